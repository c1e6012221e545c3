"""Runs examples, and puts what they draw and print on their pages: both come from one run.

`python docs/pictures.py [NAME ...]`, all of them without names.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path


ROOT = Path(__file__).parents[1]
PAGES = {page.stem: page for page in sorted((ROOT / "docs" / "examples").glob("*.md"))}
for name in ("index", "multi_process"):
    del PAGES[name]


def update(name: str) -> None:
    """Runs one example, and writes its page's first block of text and its picture."""
    done = subprocess.run(
        [sys.executable, f"examples/{name}.py"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    block = f"```text\n{done.stdout.strip()}\n```"
    page = PAGES[name]
    page.write_text(
        re.sub(
            "^```text\n.*?^```$",
            lambda _: block,
            page.read_text(),
            count=1,
            flags=re.DOTALL | re.MULTILINE,
        )
    )
    picture = ROOT / "examples" / "out" / f"{name}.png"
    if picture.exists():
        shutil.copy(picture, ROOT / "docs" / "images")


if __name__ == "__main__":
    for name in sys.argv[1:] or PAGES:
        update(name)
