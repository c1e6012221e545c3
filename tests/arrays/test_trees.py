"""Whatever torch functions take and return."""

import collections
import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest
import torch
from jax.sharding import PartitionSpec as P
from transformers.modeling_outputs import BaseModelOutput

from eqx_torch import from_torch, InputError, torch2jax
from eqx_torch._trees import flatten, leaf_paths

from ..helpers import assert_trees_equal


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
    doubled = structure.unflatten([(x, x) for x in leaves])
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
    for call in (torch2jax(f), jax.jit(torch2jax(f))):
        actual = call(jnp.arange(3.0))
        expected_leaves, expected = flatten(f(x))
        leaves, structure = flatten(actual)
        assert structure.unordered == expected.unordered
        assert isinstance(actual, type(f(x)))
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


ORDERS = {
    "dict": lambda a, b: {"b": b, "a": a},
    "nested": lambda a, b: [{"z": {"b": b, "a": (a,)}}],
    "defaultdict": lambda a, b: collections.defaultdict(list, {"b": b, "a": a}),
    "in a dataclass": lambda a, b: Plain({"b": b, "a": a}),
    "numbers": lambda a, b: {2: b, 1: a},
    "numbers in an ordered dict": lambda a, b: collections.OrderedDict({2: b, 1: a}),
}


def _values(tree):
    """The tensors, in the order in which Python shows them."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    if dataclasses.is_dataclass(tree):
        return _values(tree.x)
    items = tree.values() if isinstance(tree, dict) else tree
    return [tensor for item in items for tensor in _values(item)]


@pytest.mark.parametrize("make", ORDERS.values(), ids=ORDERS)
def test_torch_sees_dicts_in_the_users_order(make):
    f = torch2jax(lambda tree: torch.cat(_values(tree)))
    a, b = jnp.arange(2.0), jnp.arange(2.0, 5.0)
    expected = jnp.concatenate([b, a])
    assert_trees_equal(f(make(a, b)), expected)
    assert_trees_equal(jax.jit(lambda a, b: f(make(a, b)))(a, b), expected)
    weights = jnp.arange(1.0, 6.0)
    gradients = jax.grad(lambda a, b: (weights * f(make(a, b))).sum(), (0, 1))(a, b)
    assert_trees_equal(gradients, (weights[3:], weights[:3]))
    # The leaves are in JAX's order nonetheless.
    assert jax.tree.leaves(flatten(make(1, 2))[1].places()) == [0, 1]


def test_torch_sees_keywords_in_the_users_order():
    f = torch2jax(lambda **kwargs: torch.cat(list(kwargs.values())))
    a, b = jnp.zeros(1), jnp.ones(2)
    assert f(b=b, a=a).tolist() == [1, 1, 0]
    assert f(a=a, b=b).tolist() == [0, 1, 1]
    assert jax.jit(lambda a, b: f(b=b, a=a))(a, b).tolist() == [1, 1, 0]
    # The keywords of a jitted function are sorted by JAX before they arrive.
    assert jax.jit(f)(b=b, a=a).tolist() == [0, 1, 1]


def test_a_module_sees_keywords_in_the_users_order():
    class Cat(torch.nn.Module):
        def forward(self, **kwargs):
            return torch.cat(list(kwargs.values()))

    a, b = jnp.zeros(1), jnp.ones(2)
    assert from_torch(Cat())(b=b, a=a).tolist() == [1, 1, 0]
    examples = from_torch(Cat(), example_kw={"a": a, "b": b})
    assert examples(b=b, a=a).tolist() == [1, 1, 0]


def test_examples_hold_for_any_order():
    f = torch2jax(
        lambda d, **kwargs: torch.nn.functional.cross_entropy(d["x"], kwargs["y"]) * kwargs["a"],
        {"x": torch.zeros(2, 3), "b": torch.zeros(1)},
        example_kw={"y": torch.zeros(2, dtype=torch.int64), "a": torch.zeros(())},
    )
    x, y = jnp.zeros((2, 3)), jnp.array([0, 1])
    result = f({"b": jnp.zeros(1), "x": x}, a=jnp.float32(2), y=y)
    assert_trees_equal(result, 2 * jnp.log(jnp.float32(3)))


def test_results_keep_the_order_of_their_dicts():
    f = torch2jax(lambda x: {"b": x, "a": {"d": x, "c": x}})
    result = f(jnp.ones(1))
    assert list(result) == ["b", "a"]
    assert list(result["a"]) == ["d", "c"]


def test_the_order_of_a_result_may_change():
    f = torch2jax(
        lambda x: {"b": x, "a": -x} if x.sum() > 0 else {"a": -x, "b": x},
        output_shapes=lambda x: {"b": x, "a": x},
    )
    for x in (jnp.ones(1), -jnp.ones(1)):
        assert_trees_equal(f(x), {"a": -x, "b": x})


def test_masks_and_specs_reach_the_leaves_of_any_dict():
    f = torch2jax(lambda d: d["b"] * d["a"], nondiff_mask=({"b": True, "a": False},))
    gradients = jax.grad(lambda d: f(d))({"b": jnp.float32(2), "a": jnp.float32(3)})
    assert_trees_equal(gradients, {"a": jnp.float32(2), "b": jnp.float32(0)})
    with jax.set_mesh(jax.make_mesh((2, 2), ("x", "y"))):
        x = jax.device_put(jnp.ones((4, 4)), P("x", "y"))
        specs = {"b": P("x", "y"), "a": P("y", "x"), "name": None}
        g = torch2jax(lambda x: {"b": x, "name": "n", "a": x.T}, out_specs=specs)
        y = g(x)
        assert jax.typeof(y["a"]).sharding.spec == P("y", "x")
        assert jax.typeof(y["b"]).sharding.spec == P("x", "y")
        assert y["name"] == "n"


def test_masks_and_specs_reach_the_leaves_of_dataclasses():
    f = torch2jax(lambda d: d.x * d.y, nondiff_mask=(Plain(True, False),))
    gradients = jax.grad(lambda x, y: f(Plain(x, y)), (0, 1))(jnp.float32(2), jnp.float32(3))
    assert_trees_equal(gradients, (jnp.float32(0), jnp.float32(2)))
    g = torch2jax(lambda d: d.x * d.y, nondiff_mask=(Pair(True, False),))
    with pytest.raises(InputError, match="is not a prefix of its 1 positional arguments"):
        g(Plain(jnp.float32(2), jnp.float32(3)))
    with jax.set_mesh(jax.make_mesh((2, 2), ("x", "y"))):
        x = jax.device_put(jnp.ones((4, 4)), P("x", "y"))
        y = torch2jax(lambda x: Plain(x, x.T), out_specs=Plain(P("x", "y"), P("y", "x")))(x)
        assert jax.typeof(y.x).sharding.spec == P("x", "y")
        assert jax.typeof(y.y).sharding.spec == P("y", "x")
