"""Each promise of `docs/guarantees.md` names a test that exists."""

import re
from pathlib import Path

import pytest


ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "guarantees.md").read_text()
HOLDERS = sorted(set(re.findall(r"`(tests/[^`]+)`", PAGE)))
ROWS = [line for line in PAGE.splitlines() if re.match(r"\| (?!promise)\w", line)]


@pytest.mark.parametrize("holder", HOLDERS)
def test_the_test_exists(holder):
    path, _, name = holder.partition("::")
    assert (ROOT / path).exists()
    if name:
        assert re.search(rf"^def {name}\(", (ROOT / path).read_text(), re.MULTILINE)


def test_every_promise_is_held_by_a_test():
    assert len(ROWS) >= 15
    assert [row for row in ROWS if "`tests/" not in row.split("|")[2]] == []
