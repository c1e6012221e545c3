"""What the README and the pages under docs/ show works when it is copied."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from ..helpers.run_blocks import blocks, included


ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES_WITH_CODE = [page for page in PAGES if blocks(page.read_text())]
LANGUAGES = {"python", "py", "sh", "text"}


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


every_page = pytest.mark.parametrize("page", PAGES, ids=_name)


@pytest.mark.parametrize("page", PAGES_WITH_CODE, ids=_name)
def test_blocks_run(page, tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    program = [sys.executable, "-W", "error", "-m", "tests.helpers.run_blocks", str(page)]
    done = subprocess.run(program, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@every_page
def test_every_block_has_a_language_that_is_checked(page):
    fences = re.findall(r"^ *```(.*)$", page.read_text(), re.MULTILINE)
    assert {opening.split(" ")[0] for opening in fences[::2]} <= LANGUAGES
    assert set(fences[1::2]) <= {""}


@every_page
def test_code_that_is_not_run_is_included_from_a_file(page):
    assert blocks(page.read_text(), "py") == []


@every_page
def test_included_files_exist_and_have_a_test(page):
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    for path in included(page.read_text()):
        assert (ROOT / path).is_file()
        assert path == "CHANGELOG.md" or Path(path).stem in tests


@every_page
def test_commands_name_what_exists(page):
    for _, block in blocks(page.read_text(), "sh"):
        for line in block.replace("\\\n", " ").splitlines():
            _check_command(shlex.split(line, comments=True))


def _check_command(words: list[str]) -> None:
    """Fails unless a line of a sh block is of a known kind and what it names is there."""
    while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
        words = words[1:]
    if words and words[0] == "srun":  # the command is what follows its options
        words = words[words.index("python") :]
    match words:
        case ["make", target]:
            assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
        case ["python", "-m", module, *_]:
            path = ROOT / module.replace(".", "/")
            assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file()
        case ["python" | ".venv/bin/python", path, *options] if path.endswith(".py"):
            program = (ROOT / path).read_text()
            assert all(o in program for o in options if o.startswith("--"))
        case ["pip", "install", package]:
            assert package.split("[")[0] in (".", "eqx-torch")
        case _:
            pytest.fail(f"unknown command: {' '.join(words)}")


def test_first_block_of_the_readme_is_the_example():
    text = (ROOT / "examples" / "readme.py").read_text()
    _, _, rest = text.partition("# README: begin\n")
    marked, end, _ = rest.partition("# README: end\n")
    assert end
    assert blocks((ROOT / "README.md").read_text())[0][1] == marked


def test_the_example_of_the_readme_runs():
    program = [sys.executable, "-W", "error", str(ROOT / "examples" / "readme.py")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(program, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.removeprefix("loss ")) < 0.2


def test_blocks_are_found_with_their_lines():
    text = "a\n```python\nx = 1\n```\nb\n```text\ny\n```\n```python\nx = 2\n```\n"
    assert blocks(text) == [(2, "x = 1\n"), (9, "x = 2\n")]
    assert blocks(text, "text") == [(6, "y\n")]


def test_blocks_inside_a_list_lose_their_indentation():
    text = "- a\n\n    ```python\n    if x:\n        y\n    ```\n"
    assert blocks(text) == [(3, "if x:\n    y\n")]


def test_blocks_that_include_a_file_are_not_run():
    text = '```python\n--8<-- "examples/digits.py"\n```\n'
    assert blocks(text) == []
    assert included(text) == ["examples/digits.py"]
