import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Annotated, NamedTuple, NewType, NotRequired, Optional, TypedDict, TypeVar

import equinox as eqx
import jax
import numpy as np
import pytest
import torch
from jaxtyping import ArrayLike, Float, Int
from torch import Tensor

from ..helpers.annotations import arr, bind, predict, refused, unreadable


Row = Float[Tensor, "n"]


class Pair(NamedTuple):
    left: Float[Tensor, "n"]
    right: Float[Tensor, "n 2"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Stats:
    mean: Float[Tensor, "n"]
    deviation: "Float[Tensor, 'n n']"


class Layer(eqx.Module):
    weight: Float[Tensor, "n n"]
    bias: Float[Tensor, "n"] | None


@dataclasses.dataclass
class Unknown:
    mean: Float[Tensor, "n"]


class Batch(TypedDict):
    image: Float[Tensor, "n 3"]
    label: NotRequired[Int[Tensor, "n"]]


class Both(TypedDict):
    image: Float[Tensor, "n 3"]
    label: Float[Tensor, "n"]


@dataclasses.dataclass
class Node:
    value: Float[Tensor, "n"]
    children: "list[Node]"


def test_tuples():
    def f(x: tuple[Row, Float[Tensor, "m"]]) -> tuple[Float[Tensor, "n m"], tuple[Row, None]]: ...

    assert predict(f, (arr(2), arr(3))) == (arr(2, 3), (arr(2), None))
    assert refused(f, (arr(2),)) == (
        "f: argument `x` does not match its annotation.\n"
        "  annotation: tuple[Float[Tensor, 'n'], Float[Tensor, 'm']]\n"
        "  it is a tuple of 1, not a tuple of 2"
    )
    assert "it is a list of 2" in refused(f, [arr(2), arr(3)])
    assert "argument `x[1]`" in refused(f, (arr(2), arr(3, 4)))


@pytest.mark.parametrize(
    ("annotation", "value"),
    [
        (list[Row], [arr(3), arr(3)]),
        (Sequence[Row], (arr(3), arr(3))),
        (tuple[Row, ...], (arr(3), arr(3))),
        (collections.deque[Row], collections.deque([arr(3), arr(3)])),
        (list[Row], []),
    ],
)
def test_sequences(annotation, value):
    def f(x, y): ...

    f.__annotations__ = {"x": annotation, "y": Row}
    bind(f, value, arr(3))
    if value:
        message = refused(f, value, arr(4))
        assert "argument `y`" in message
        assert "n = 3, from argument `x[0]`, dimension 0" in message
    refused(f, arr(3), arr(3))


@pytest.mark.parametrize("annotation", [dict[str, Row], Mapping[str, Row]])
def test_dicts(annotation):
    def f(x): ...

    f.__annotations__ = {"x": annotation}
    bind(f, {"a": arr(3), "b": arr(3)})
    message = refused(f, {"a": arr(3), "b": arr(4)})
    assert "argument `x['b']`" in message
    assert "n = 3, from argument `x['a']`, dimension 0" in message
    assert "it is a list of 1, not a dict" in refused(f, [arr(3)])


def test_named_tuples():
    def f(x: Pair) -> Pair: ...

    assert predict(f, Pair(arr(3), arr(3, 2))) == Pair(arr(3), arr(3, 2))
    assert "argument `x.right`" in refused(f, Pair(arr(3), arr(4, 2)))
    assert "it is a tuple of 2, not a Pair" in refused(f, (arr(3), arr(3, 2)))


def test_dataclasses():
    def f(x: Stats) -> Stats: ...

    assert predict(f, Stats(arr(3), arr(3, 3))) == Stats(arr(3), arr(3, 3))
    assert "argument `x.deviation`" in refused(f, Stats(arr(3), arr(3, 4)))


def test_equinox_modules():
    def f(x: Layer) -> tuple[Layer, Row]: ...

    message = unreadable(f)
    assert "Float[Tensor, 'n'] | None" in message
    assert "it leaves open which of these is returned" in message

    def g(x: Layer) -> Row: ...

    assert predict(g, Layer(arr(3, 3), None)) == arr(3)
    assert predict(g, Layer(arr(3, 3), arr(3))) == arr(3)
    assert "argument `x.bias`" in refused(g, Layer(arr(3, 3), arr(4)))


def test_equinox_modules_as_results():
    class Normal(eqx.Module):
        mean: Row
        scale: Float[Tensor, ""]

        def __init__(self):
            raise NotImplementedError

    def f(x: Row) -> Normal: ...

    out = predict(f, arr(3))
    assert isinstance(out, Normal)
    assert jax.tree.leaves(out) == [arr(3), arr()]


def test_dataclasses_that_are_no_trees():
    def f(x: Unknown) -> Row: ...

    def g(x: Unknown) -> Unknown: ...

    assert predict(f, Unknown(arr(3))) == arr(3)
    assert predict(g, Unknown(arr(3))) == Unknown(arr(3))


def test_typed_dicts():
    def f(x: Batch) -> Both: ...

    both = {"image": arr(2, 3), "label": arr(2)}
    assert predict(f, {"image": arr(2, 3)}) == both
    assert predict(f, {"image": arr(2, 3), "label": arr(2, dtype="int32")}) == both
    message = refused(f, {"label": arr(2, dtype="int32")})
    assert "argument `x['image']`" in message
    assert "it is missing, not an array" in message
    assert "argument `x['label']`" in refused(f, {"image": arr(2, 3), "label": arr(2)})

    def g(x: Row) -> Batch: ...

    assert "the key 'label' may be missing" in unreadable(g)


def test_classes_that_contain_themselves():
    def f(x: Node) -> Row: ...

    assert predict(f, Node(arr(3), [])) == arr(3)
    assert "argument `x.value`" in refused(f, Node(arr(3, 3), []))


@pytest.mark.parametrize("annotation", [Optional[Row], Row | None])  # noqa: UP045
def test_optional(annotation):
    def f(x, y): ...

    f.__annotations__ = {"x": annotation, "y": Row, "return": Row}
    assert predict(f, None, arr(3)) == arr(3)
    assert predict(f, arr(3), arr(3)) == arr(3)
    assert "argument `y`" in refused(f, arr(4), arr(3))
    assert "it is a str, not one of these" in refused(f, "no", arr(3))


def test_a_name_bound_by_an_optional_argument_only():
    def f(x: Row, y: Float[Tensor, "m"] | None = None) -> Float[Tensor, "n m"]: ...

    assert predict(f, arr(3), arr(4)) == arr(3, 4)
    expected = (
        "f: the result's structure cannot be read off its annotation Float[Tensor, 'n m']:"
        " no argument of this call binds `m`.\n"
        "names bound in this call:\n"
        "  n = 3, from argument `x`, dimension 0"
    )
    assert refused(f, arr(3)) == expected
    assert refused(f, arr(3), None) == expected


def test_unions_of_shapes():
    def f(x: Float[Tensor, "n"] | Float[Tensor, "n m"] | Int[Tensor, ""]) -> Float[Tensor, "2"]: ...

    for good in (arr(3), arr(3, 4), arr(dtype="int32")):
        bind(f, good)
    assert refused(f, arr(3, 4, 5)) == (
        "f: argument `x` does not match its annotation.\n"
        "  annotation: Float[Tensor, 'n'] | Float[Tensor, 'n m'] | Int[Tensor, '']\n"
        "  actual: float32 (3, 4, 5)\n"
        "  not Float[Tensor, 'n']: it has 3 dimensions, must have 1\n"
        "  not Float[Tensor, 'n m']: it has 3 dimensions, must have 2\n"
        "  not Int[Tensor, '']: dtype float32 is not in Int\n"
        "  not Int[Tensor, '']: it has 3 dimensions, must have 0"
    )


def test_a_refused_member_of_a_union_binds_nothing():
    def f(x: Float[Tensor, "n 3"] | Float[Tensor, "m n"]) -> Float[Tensor, "n"]: ...

    assert bind(f, arr(2, 4)).names == {"m": 2, "n": 4}

    Ends = tuple[Row, Float[Tensor, "n 2"]]
    Free = tuple[Float[Tensor, "m"], Float[Tensor, "k 3"]]

    def g(x: Ends | Free) -> Float[Tensor, "m"]: ...

    assert bind(g, (arr(3), arr(4, 3))).names == {"m": 3, "k": 4}
    assert refused(g, (arr(3), arr(4, 5))) == (
        "g: argument `x` does not match its annotation.\n"
        "  annotation: tuple[Float[Tensor, 'n'], Float[Tensor, 'n 2']]"
        " | tuple[Float[Tensor, 'm'], Float[Tensor, 'k 3']]\n"
        "  not tuple[Float[Tensor, 'n'], Float[Tensor, 'n 2']]: `x[1]`, dimension 0 (`n`) is 4,"
        " must be 3\n"
        "  not tuple[Float[Tensor, 'n'], Float[Tensor, 'n 2']]: `x[1]`, dimension 1 is 5, must be"
        " 2\n"
        "  not tuple[Float[Tensor, 'm'], Float[Tensor, 'k 3']]: `x[1]`, dimension 1 is 5, must be 3"
    )


def test_unions_with_other_types():
    def f(x: float | Row | dict[str, Row]): ...

    for good in (1.0, 2, arr(3), {"a": arr(3)}):
        bind(f, good)
    for bad in ("no", arr(3, 4), {"a": 3}, None):
        refused(f, bad)

    def g(x: Row | Tensor): ...

    bind(g, arr(3, 4))


def test_named_annotations():
    T = TypeVar("T", bound=Row)
    U = TypeVar("U", Row, Float[Tensor, "n 2"])
    Id = NewType("Id", Row)

    def f(x: Annotated[Row, "doc"], y: T, z: U, w: Id) -> Annotated[Row, 1]: ...

    assert predict(f, arr(3), arr(3), arr(3, 2), arr(3)) == arr(3)
    for index, bad in enumerate([arr(3, 9), arr(4), arr(3, 3), arr(4)]):
        args = [arr(3), arr(3), arr(3, 2), arr(3)]
        args[index] = bad
        refused(f, *args)


def test_what_is_not_annotated_is_not_checked():
    def f(x: Row, n: int, s: str, t: Tensor, d: dict, anything, flag: bool = True) -> Row: ...

    assert predict(f, arr(3), "1", 2, None, 3, object()) == arr(3)


def test_concrete_arrays_are_checked_too():
    def f(x: Row, y: Row, z: Row) -> Row: ...

    args = torch.zeros(3), np.zeros(3, "float32"), jax.numpy.zeros(3)
    assert predict(f, *args) == arr(3)


def test_scalars_of_array_like():
    def f(x: Float[ArrayLike, "*n"], y: Float[ArrayLike, "n"] = None) -> Float[Tensor, "*n"]: ...

    assert predict(f, arr(3), np.zeros(3, "float32")) == arr(3)
    assert predict(f, np.float32(3)) == arr()
    bind(f, 1.0)
    assert "it is a str, not one of these" in refused(f, "no")
    assert "it is a float, not an array" in refused(f, arr(3), 1.0)
