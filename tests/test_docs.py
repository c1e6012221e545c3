"""What the README and the pages under docs/ show works when it is copied."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .run_blocks import blocks


ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES_WITH_CODE = [page for page in PAGES if blocks(page.read_text())]


@pytest.mark.parametrize("page", PAGES_WITH_CODE, ids=lambda page: str(page.relative_to(ROOT)))
def test_blocks_run(page, tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    program = [sys.executable, "-W", "error", "-m", "tests.run_blocks", str(page)]
    done = subprocess.run(program, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


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
