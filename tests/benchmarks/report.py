"""Writes the tables of the benchmarks into `docs/benchmarks.md`.

`python -m tests.benchmarks.report` replaces what stands between `<!-- table NAME -->` and
`<!-- end -->` by the rows of `out/NAME.json`, with the versions and the machine they come from. A
table whose file is missing stays as it is, and is named. What was aimed at, the columns "at most"
and "at least", the page says in words.
"""

import json
import re
from pathlib import Path
from typing import Any

from .harness import OUT, table


PAGE = Path(__file__).parents[2] / "docs" / "benchmarks.md"
_BLOCK = re.compile(r"<!-- table (\w+) -->\n.*?<!-- end -->", re.DOTALL)


def block(name: str, result: dict[str, Any]) -> str:
    """The marked block of one benchmark."""
    rows = [
        {column: cell for column, cell in row.items() if column not in ("at most", "at least")}
        for row in result["rows"]
    ]
    return f"<!-- table {name} -->\n{table(rows)}\n\n{origin(result)}\n<!-- end -->"


def origin(result: dict[str, Any]) -> str:
    """One sentence that says what was measured where."""
    of = result["environment"]
    libraries = ", ".join(f"{name} {v}" for name, v in of["libraries"].items() if v)
    flags = f", `{of['XLA_FLAGS'].strip()}`" if of["XLA_FLAGS"].strip() else ""
    return (
        f"{of['date']}, {of['cpu']}, cores: {of['cores']}, load before: {of['load before']}, "
        f"torch threads: {of['torch threads']}{flags}; Python {of['python']}, {libraries}."
    )


def updated(page: str, out: Path) -> tuple[str, list[str]]:
    """The page with new tables, and the names of those that have no file."""
    missing = []

    def replace(match: re.Match[str]) -> str:
        path = out / f"{match[1]}.json"
        if not path.exists():
            missing.append(match[1])
            return match[0]
        return block(match[1], json.loads(path.read_text()))

    return _BLOCK.sub(replace, page), missing


def main(page: Path = PAGE, out: Path = OUT) -> None:
    text, missing = updated(page.read_text(), out)
    page.write_text(text)
    for name in missing:
        print(f"{page.name}: no {name}.json, the table stays as it was")


if __name__ == "__main__":
    main()
