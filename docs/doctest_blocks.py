"""Shows the doctests of docstrings as code.

Docstrings hold their examples as plain doctests, which Markdown would take for quotations. This
extension of Griffe, which reads the package for mkdocstrings, puts a fence around each of them.
"""

import re
from typing import Any

import griffe


# The lines from a prompt to the next empty line, all with the indentation of the prompt.
_DOCTEST = re.compile(r"^(?P<indent> *)>>> .*\n(?:(?P=indent).+\n)*", re.MULTILINE)


def fenced(text: str) -> str:
    """The text with a fence around each doctest."""
    return _DOCTEST.sub(_fence, text.rstrip("\n") + "\n")


def _fence(match: re.Match[str]) -> str:
    indent = match["indent"]
    return f"{indent}```pycon\n{match[0]}{indent}```\n"


class DoctestBlocks(griffe.Extension):
    """Puts fences around the doctests of every docstring."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called by Griffe for each module, class, function and attribute it has read."""
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)
