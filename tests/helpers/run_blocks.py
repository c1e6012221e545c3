"""Runs the python blocks of a Markdown file, in order and in one namespace.

`python -m tests.helpers.run_blocks README.md`, which leaves behind no file that a block writes. A
traceback shows the lines of the Markdown file. A block that includes a file
(`--8<-- "examples/digits.py"`) is left to the test of that file. The sections of a page of recipes
(`docs/recipes/`) see what stands above the first of them, and nothing of each other.
"""

import contextlib
import re
import sys
import tempfile
from pathlib import Path


_INCLUDE = re.compile(r'^--8<-- "(.*)"$', re.MULTILINE)


def blocks(text: str, language: str = "python") -> list[tuple[int, str]]:
    """The line in front of each block of a language, and the block, without included files."""
    fenced = re.compile(rf"^( *)```{language}\b[^\n]*\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
    found = [(text[: m.start(2)].count("\n"), _dedented(m[2], m[1])) for m in fenced.finditer(text)]
    return [(line, block) for line, block in found if not _INCLUDE.search(block)]


def included(text: str) -> list[str]:
    """The files that a page includes, as it names them."""
    return _INCLUDE.findall(text)


def _dedented(block: str, indent: str) -> str:
    return "".join(line.removeprefix(indent) for line in block.splitlines(keepends=True))


def run(path: Path) -> None:
    """Executes the blocks of a file."""
    text = path.read_text()
    parts = [text]
    if path.parent.name == "recipes":
        parts = re.split("^(?=## )", text, flags=re.MULTILINE)
    shared = {"__name__": path.stem}
    start = 0
    for part in parts:
        namespace = dict(shared) if start else shared
        for line, block in blocks(part):
            exec(compile("\n" * (start + line) + block, str(path), "exec"), namespace)
        start += part.count("\n")


if __name__ == "__main__":
    page = Path(sys.argv[1]).resolve()
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        run(page)
