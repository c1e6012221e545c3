"""Python values beside the arrays of a call: told apart by value and type, and compiled once."""

import collections
import dataclasses
import enum
import functools
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from eqx_torch import torch2jax
from eqx_torch._statics import Static


class Mode(enum.Enum):
    A = 1
    B = 2


class Level(enum.IntEnum):
    ONE = 1


@dataclasses.dataclass(frozen=True)
class Frozen:
    n: object


@dataclasses.dataclass
class Mutable:
    n: object


@dataclasses.dataclass(eq=False)
class ByIdentity:
    n: object


class Pair(collections.namedtuple("Pair", "a b")):
    pass


def shift(x, by):
    return x + by


# Each pair is equal or collides to Python, or has equal parts, and torch can tell it apart.
TOLD_APART = {
    "frozenset": (frozenset({1}), frozenset({True})),
    "set": ({1.0}, {1}),
    "int and float in a tuple": ((1,), (1.0,)),
    "nested": (frozenset({(1, (2,))}), frozenset({(True, (2,))})),
    "zeros": (slice(0.0, None), slice(-0.0, None)),
    "zeros in a set": (frozenset({0.0}), frozenset({-0.0})),
    "complex zeros": (0j, -0j),
    "slices": (slice(0, 2), slice(False, 2)),
    "slices of a tuple": ((slice(0, 1),), (slice(0, True),)),
    "empty ranges": (range(0), range(1, 1)),
    "enum and its value": (Level.ONE, 1),
    "enums": (Mode.A, Mode.B),
    "partials": (functools.partial(shift, by=1), functools.partial(shift, by=True)),
    "frozen dataclasses in a set": (frozenset({Frozen(1)}), frozenset({Frozen(True)})),
    "list and tuple": (functools.partial(shift, [1]), functools.partial(shift, (1,))),
    "tuple and Size": (frozenset({(1, 2)}), frozenset({torch.Size((1, 2))})),
    "named tuple": (frozenset({Pair(1, 2)}), frozenset({(1, 2)})),
    "numpy dtypes": (np.dtype("int32"), np.dtype("int64")),
    "torch dtypes": (torch.int32, torch.int64),
    "devices": (torch.device("cpu"), torch.device("cpu", 0)),
    "bytes": (b"a", bytearray(b"a")),
    "by identity": (ByIdentity(1), ByIdentity(1)),
    "keys of a dict": ({1: 1}, {True: 1}),
    "keys of an ordered dict": (
        collections.OrderedDict({1: 1}),
        collections.OrderedDict({1.0: 1}),
    ),
}


@pytest.mark.parametrize(("a", "b"), TOLD_APART.values(), ids=TOLD_APART)
def test_statics_are_told_apart_by_value_and_type(a, b):
    seen = []
    f = torch2jax(lambda x, s: seen.append(repr(s)) or x, output_shapes=lambda x, s: x)
    for s in (a, b, a, b):
        seen.clear()
        f(jnp.ones(2), s)
        assert repr(s) in seen


SAME = {
    "slice": lambda: slice(0, 2),
    "slices": lambda: (slice(0, 2), ..., None),
    "set": lambda: {1, 2},
    "frozenset of sets": lambda: frozenset({frozenset({1}), (2, 3)}),
    "partial": lambda: functools.partial(shift, by=[1, {"a": {2}}]),
    "dataclass in a partial": lambda: functools.partial(shift, by=Mutable([1])),
    "deque": lambda: collections.deque([1], maxlen=3),
    "bytes": lambda: bytearray(b"a"),
    "array in a partial": lambda: functools.partial(shift, by=np.arange(3)),
    "nan": lambda: float("nan"),
    "dtype": lambda: np.dtype("float32"),
    "size": lambda: torch.Size((1, 2)),
    "range": lambda: range(3),
    "dict in other hands": lambda: {2: "a", 1: "b"},
}


@pytest.mark.parametrize("make", SAME.values(), ids=SAME)
def test_equal_statics_share_a_trace(make):
    traces = []

    def shapes(x, s):
        traces.append(s)
        return x

    f = torch2jax(lambda x, s: x, output_shapes=shapes)
    for _ in range(3):
        f(jnp.ones(2), make())
    assert len(traces) == 1
    assert Static(make()) == Static(make())
    assert hash(Static(make())) == hash(Static(make()))


def test_what_is_changed_is_another_value():
    box = [1]
    by = functools.partial(shift, by=box)
    f = torch2jax(lambda x, g: x * g.keywords["by"][-1])
    x = jnp.ones(2)
    compiled = jax.jit(lambda x: f(x, by))
    assert compiled(x).tolist() == f(x, by).tolist() == [1, 1]
    box.append(5)
    assert f(x, by).tolist() == [5, 5]
    assert compiled(x).tolist() == [1, 1]  # as whatever a jitted function closes over
    assert f(x, functools.partial(shift, by=[1])).tolist() == [1, 1]


def test_a_function_may_change_what_it_is_given():
    def f(x, s):
        s.add(len(s))
        return x * len(s)

    g = torch2jax(f)
    mine = set()
    assert [g(jnp.ones(1), mine).item() for _ in range(3)] == [1, 1, 1]
    assert mine == set()


def test_unhashable_statics_are_not_kept():
    f = torch2jax(lambda x, s: x * len(s.keywords["by"]))
    inner = Mutable([1])
    alive = weakref.ref(inner)
    f(jnp.ones(1), functools.partial(shift, by=[inner]))
    del inner
    gc.collect()
    assert alive() is None


def test_what_holds_itself_is_itself_only():
    endless = []
    endless.append(endless)
    one = functools.partial(shift, by=endless)
    assert Static(one) == Static(one)
    assert torch2jax(lambda x, g: x)(jnp.ones(1), one) == 1
