"""Whatever torch functions take and return."""

import collections
import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest
import torch
from transformers.modeling_outputs import BaseModelOutput

from eqx_torch import torch2jax
from eqx_torch._trees import flatten, leaf_paths, map_leaves


class Pair(NamedTuple):
    a: object
    b: object


@dataclasses.dataclass
class Plain:
    x: object
    y: object = None


@dataclasses.dataclass(frozen=True)
class Validating:
    x: object

    def __post_init__(self):
        if not isinstance(self.x, torch.Tensor):
            raise TypeError("only tensors")


class Slots:
    pass


TREES = {
    "leaf": 1,
    "None": None,
    "tuple": (1, 2),
    "list": [1, (2, None)],
    "dict": {"b": 1, "a": [2]},
    "ordered": collections.OrderedDict(b=1, a=2),
    "default": collections.defaultdict(list, a=1),
    "named": Pair(1, Pair(2, None)),
    "dataclass": Plain(1, (2, {"k": 3})),
    "in dataclass": [Plain(Plain(1), Pair(2, 3))],
    "model output": BaseModelOutput(last_hidden_state=1, hidden_states=(2, 3)),
    "empty": ((), [], {}),
}
every_tree = pytest.mark.parametrize("tree", TREES.values(), ids=TREES)


@every_tree
def test_round_trip(tree):
    leaves, structure = flatten(tree)
    assert len(leaves) == structure.num_leaves == len(leaf_paths(structure))
    rebuilt = structure.unflatten(leaves)
    assert rebuilt == tree
    assert type(rebuilt) is type(tree)
    again = flatten(rebuilt)[1]
    assert (again, hash(again)) == (structure, hash(structure))
    doubled = map_leaves(lambda x: (x, x), tree)
    assert flatten(doubled)[1].num_leaves == 2 * structure.num_leaves


def test_different_trees_differ():
    structures = [flatten(tree)[1] for tree in TREES.values()]
    assert len(set(structures)) == len(structures)


def test_paths_read_like_python():
    tree = {"a": [1, Plain(2, (3,))], "b": BaseModelOutput(last_hidden_state=4), "c": Pair(5, 6)}
    assert leaf_paths(flatten(tree)[1]) == [
        "['a'][0]",
        "['a'][1].x",
        "['a'][1].y[0]",
        "['b']['last_hidden_state']",
        "['c'].a",
        "['c'].b",
    ]
    assert str(flatten((1, [2]))[1]) == "(*, [*])"


def test_dataclasses_are_rebuilt_without_their_validation():
    structure = flatten(Validating(torch.ones(2)))[1]
    assert structure.unflatten([1]).x == 1


def _parts(x):
    return x * 1, x * 2


RETURNS = {
    "tuple": lambda x: _parts(x),
    "list": lambda x: list(_parts(x)),
    "dict": lambda x: {"b": x * 1, "a": x * 2},
    "ordered": lambda x: collections.OrderedDict(b=x * 1, a=x * 2),
    "named": lambda x: Pair(*_parts(x)),
    "dataclass": lambda x: Plain(*_parts(x)),
    "model output": lambda x: BaseModelOutput(last_hidden_state=x * 1, hidden_states=_parts(x)),
    "none among them": lambda x: (x * 1, None, [None, x * 2]),
    "nothing": lambda x: None,
    "empty": lambda x: (),
}


@pytest.mark.parametrize("f", RETURNS.values(), ids=RETURNS)
def test_what_a_function_returns_comes_back(f):
    x = torch.arange(3.0)
    for call in (torch2jax(f), jax.jit(lambda a: map_leaves(lambda y: y, torch2jax(f)(a)))):
        if (
            dataclasses.is_dataclass(f(x))
            and call is not None
            and "PjitFunction" in str(type(call))
        ):
            continue  # JAX cannot return those from jitted functions
        actual = call(jnp.arange(3.0))
        expected_leaves, expected = flatten(f(x))
        leaves, structure = flatten(actual)
        assert structure == expected
        assert type(actual) is type(f(x))
        assert all((a == b.numpy()).all() for a, b in zip(leaves, expected_leaves, strict=True))


def test_torch_return_types_come_back():
    x = jnp.array([[3.0, 1.0, 2.0]])
    result = torch2jax(lambda x: torch.sort(x))(x)
    assert isinstance(result, torch.return_types.sort)
    assert result.indices.tolist() == [[1, 2, 0]]


def test_arguments_in_any_nesting():
    def f(first, *rest, pair, options, **kw):
        assert isinstance(pair, Pair)
        assert isinstance(options, Plain)
        assert kw["name"] == "sum"
        return first["a"] + rest[0][0] + pair.a * options.x + kw["last"]

    x = jnp.arange(3.0)
    g = torch2jax(f)
    actual = g(
        {"a": x, "b": None}, [x], pair=Pair(x, 2), options=Plain(x, "text"), name="sum", last=x
    )
    assert (actual == 3 * x + x * x).all()


def test_python_values_stay_what_they_are():
    seen = []

    def f(x, n, flag, *, reduction, scale=1.0, dtype=None, where=None):
        seen.append((n, flag, reduction, scale, dtype, where))
        assert type(n) is int
        assert type(flag) is bool
        return getattr(x, reduction)() * n * scale

    g = torch2jax(f)
    x = jnp.arange(3.0)
    kw = {"reduction": "sum", "scale": 0.5, "dtype": torch.float32, "where": slice(1)}
    assert jax.jit(lambda x: g(x, 3, True, **kw))(x) == 4.5
    assert jax.jit(lambda x: g(x, 3, False, reduction="mean"))(x) == 3.0
    assert set(map(str, seen)) == {
        str((3, True, "sum", 0.5, torch.float32, slice(1))),
        str((3, False, "mean", 1.0, None, None)),
    }


def test_statics_that_compare_equal_are_told_apart():
    g = torch2jax(
        lambda x, s: x / s if isinstance(s, float) else x * s, output_shapes=lambda x, s: x
    )
    x = jnp.ones(2)
    assert g(x, 2).tolist() == [2, 2]
    assert g(x, 2.0).tolist() == [0.5, 0.5]
    assert g(x, True).tolist() == [1, 1]
    assert g(x, 1).tolist() == [1, 1]
    assert jnp.isposinf(g(x, 0.0)).all()
    assert jnp.isneginf(g(x, -0.0)).all()
