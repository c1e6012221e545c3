"""Which values of a parameter belong to which set of tests."""

from collections.abc import Container, Iterable
from typing import Any

import pytest


def sampled(values: Iterable[Any], quick: Container[Any], every: int = 1) -> list[Any]:
    """Parameters, quick, or slow for one in `every` of the rest, or else of a sweep.

    A value that is a tuple is one of several arguments.
    """
    rest = 0
    parameters = []
    for value in values:
        marks = ()
        if value not in quick:
            marks = pytest.mark.sweep if rest % every else pytest.mark.slow
            rest += 1
        arguments = value if isinstance(value, tuple) else (value,)
        name = "-".join(getattr(argument, "__name__", str(argument)) for argument in arguments)
        parameters.append(pytest.param(*arguments, marks=marks, id=name))
    return parameters
