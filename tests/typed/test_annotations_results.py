from typing import Any, Literal

import pytest
import torch
from jaxtyping import Float, Float32, Int, PyTree, Shaped
from torch import Tensor

from ..helpers.annotations import arr, predict, unreadable


REMEDY = "\nBind it by an input, use a number, or pass output_shapes=."


def function(argument, result):
    def f(x): ...

    f.__annotations__ = {"x": argument, "return": result}
    return f


@pytest.mark.parametrize(
    ("argument", "result", "reason"),
    [
        ("n", "k", "`k` is bound by no input"),
        ("n", "*k", "`*k` is bound by no input"),
        ("*n", "n", "`n` is bound by no input"),
        ("n", "*n", "`*n` is bound by no input"),
        ("_n", "n", "`n` is bound by no input"),
        ("n", "...", "`...` stands for any size"),
        ("n", "... n", "`...` stands for any size"),
        ("n", "_", "`_` stands for any size"),
        ("n", "_n", "`_n` stands for any size"),
        ("n", "#n", "`#n` is ambiguous, 1 or `n`: no input is broadcast along it"),
        ("*n", "*#n", "`*#n` is ambiguous, 1 or `n`: no input is broadcast along it"),
        ("n", "#3", "`#3` is ambiguous, 1 or `3`"),
        ("n", "#2*n", "`#2*n` is ambiguous, 1 or `2*n`"),
        ("n", "2*k", "`k` in `2*k` is bound by no input"),
        ("*n", "n+1", "`n` in `n+1` is bound by no input"),
        ("n", "min(n,k)", "`k` in `min(n,k)` is bound by no input"),
        ("n", "{y}", "`{y}` mentions `y`, which is no argument"),
        ("n", "{x.ndim}+k", "`k` in `{x.ndim}+k` is bound by no input"),
        ("n", "n+", "`n+` is no Python expression"),
        ("n", "?n", '`?n` varies over the leaves of a tree, but it is in no PyTree[..., "T"]'),
    ],
)
def test_dimensions_that_are_not_fixed(argument, result, reason):
    message = unreadable(function(Float[Tensor, argument], Float[Tensor, result]))
    assert message == (
        f"f: the annotation Float[Tensor, '{result}'] does not determine the result: {reason}."
        + REMEDY
    )


ROW = Float[Tensor, "n"]


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (list[ROW], "list[Float[Tensor, 'n']]…it leaves the length open.\nUse tuple[...]"),
        (tuple[ROW, ...], "tuple[Float[Tensor, 'n'], ...]…it leaves the length open.\nUse tuple"),
        (dict[str, ROW], "dict[str, Float[Tensor, 'n']]…it leaves the keys open.\nUse a TypedDict"),
        (ROW | None, "Float[Tensor, 'n'] | None…it leaves open which of these is returned.\nName"),
        (
            ROW | Float[Tensor, "n 1"],
            "Float[Tensor, 'n'] | Float[Tensor, 'n 1']…it leaves open which",
        ),
        (tuple[ROW, Tensor], "Tensor…it says no shape.\nAnnotate it with jaxtyping, or pass"),
        (tuple[ROW, int], "int…it says no shape."),
        (tuple[ROW, Any], "Any…it says no shape."),
        (tuple[ROW, Literal["a"]], "Literal['a']…it says no shape."),
        (PyTree[ROW], "PyTree[Float[Tensor, 'n']]…it leaves the tree's structure open.\nName it"),
        (PyTree[ROW, "T"], "PyTree[Float[Tensor, 'n'], 'T']…`T` is bound by no input.\nBind it by"),
        (Int[Tensor, "n"], "Int[Tensor, 'n']…Int is a family of dtypes and no annotated input"),
    ],
)
def test_structures_that_are_not_fixed(result, message):
    annotation, reason = message.split("…")
    found = unreadable(function(ROW, result))
    assert found.startswith(
        f"f: the annotation {annotation} does not determine the result: {reason}"
    )
    assert found.endswith("output_shapes=.")


@pytest.mark.parametrize(
    ("argument", "result", "value", "expected"),
    [
        (ROW, None, arr(3), None),
        (ROW, tuple[ROW, tuple[()]], arr(3), (arr(3), ())),
        (ROW, tuple[ROW, None, Float[Tensor, ""]], arr(3), (arr(3), None, arr())),
        (ROW, Float32[Tensor, "4 n-1"], arr(3, dtype="float16"), arr(4, 2)),
        (ROW, Float[Tensor, "n"] | Float[torch.nn.Parameter, "n"], arr(3), arr(3)),
        (Shaped[Tensor, "*b"], Shaped[Tensor, "2 *b 3"], arr(4, 5), arr(2, 4, 5, 3)),
        (PyTree[ROW, "T"], PyTree[tuple[ROW, ROW], "T T"], [arr(3)], [[(arr(3), arr(3))]]),
    ],
)
def test_fixed_structures(argument, result, value, expected):
    assert predict(function(argument, result), value) == expected


@pytest.mark.parametrize(
    ("argument", "reason"),
    [
        (Float[Tensor, "k-1"], "`k` in `k-1` is bound by no input"),
        (Float[Tensor, "{self.n}"], "`{self.n}` mentions `self`, which is no argument"),
        (
            Float[Tensor, "?n"],
            '`?n` varies over the leaves of a tree, but it is in no PyTree[..., "T"]',
        ),
        (PyTree[ROW, "S T"], "`S` is bound by no input"),
        (
            PyTree[PyTree[ROW, "T"], "S"],
            "a tree with a named structure is inside another one",
        ),
    ],
)
def test_arguments_that_no_call_could_match(argument, reason):
    message = unreadable(function(argument, None))
    assert message.startswith("f: the annotation of `x` ")
    assert message.endswith(f" cannot be checked: {reason}.")
