"""Runs the python blocks of a Markdown file, in order and in one namespace.

`python -m tests.run_blocks README.md`. A traceback shows the lines of the Markdown file.
"""

import re
import sys
from pathlib import Path


_BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


def blocks(text: str) -> list[tuple[int, str]]:
    """The line in front of each python block, and the block."""
    return [(text[: m.start(1)].count("\n"), m[1]) for m in _BLOCK.finditer(text)]


def run(path: Path) -> None:
    """Executes the blocks of a file."""
    namespace = {"__name__": path.stem}
    for line, block in blocks(path.read_text()):
        exec(compile("\n" * line + block, str(path), "exec"), namespace)


if __name__ == "__main__":
    run(Path(sys.argv[1]))
