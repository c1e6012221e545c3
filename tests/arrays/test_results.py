"""Constants and numbers beside the tensors that a function returns, and declared containers."""

import collections
import dataclasses
import enum
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax import ShapeDtypeStruct as Struct
from jax.sharding import PartitionSpec as P
from transformers.modeling_outputs import ModelOutput

from eqx_torch import from_torch, OutputError, ShapeError, torch2jax

from ..helpers import assert_trees_equal


class Mode(enum.Enum):
    A = 1
    B = 2


@dataclasses.dataclass
class Output(ModelOutput):
    loss: object = None
    name: object = None
    steps: object = None


@dataclasses.dataclass
class Record:
    x: object
    name: object


class Named(NamedTuple):
    x: object
    name: object


CONSTANTS = [
    "text",
    b"bytes",
    Mode.B,
    None,
    torch.float32,
    torch.device("cpu"),
    torch.Size([3]),
    torch.strided,
    np.dtype("int8"),
    range(3),
    ...,
]
CONTAINERS = {
    "tuple": lambda x, c: (x, c),
    "list": lambda x, c: [c, x],
    "dict": lambda x, c: {"x": x, "c": c},
    "nested": lambda x, c: {"z": [(x, {"y": c})], "b": c},
    "dataclass": lambda x, c: Record(x, c),
    "named": lambda x, c: Named(x, c),
    "ModelOutput": lambda x, c: Output(loss=x, name=c or "none"),
    "counter": lambda x, c: collections.OrderedDict(x=x, c=c),
}


@pytest.mark.parametrize("make", CONTAINERS.values(), ids=CONTAINERS)
@pytest.mark.parametrize("constant", CONSTANTS, ids=repr)
@pytest.mark.covering
def test_constants_are_kept(make, constant):
    f = torch2jax(lambda x: make(x * 2, constant))
    x = jnp.arange(3.0)
    expected = make(2 * x, constant)
    for _ in range(2):
        assert_trees_equal(_plain(f(x)), _plain(expected))
    seen = []

    @jax.jit
    def inside(x):
        y = f(x)
        seen.append(jax.tree.map(lambda a: 0 if isinstance(a, jax.Array) else a, _plain(y)))
        return jax.tree.map(lambda a: a if isinstance(a, jax.Array) else None, _plain(y))

    inside(x)
    assert_trees_equal(seen[0], _plain(make(0, constant)))


def _plain(tree):
    """The tree without the classes that JAX does not know."""
    if isinstance(tree, ModelOutput):
        return dict(tree)
    return {"x": tree.x, "name": tree.name} if isinstance(tree, Record) else tree


def _numbers(x):
    return {"n": 3, "f": 0.5, "flag": True, "c": 2j, "x": x * 2}


def test_numbers_are_what_jax_makes_of_them():
    f, x = torch2jax(_numbers), jnp.ones(3)
    expected = jax.jit(_numbers)(x)
    for actual in (f(x), jax.jit(f)(x)):
        assert_trees_equal(actual, expected)
        for name, value in expected.items():
            assert jax.typeof(actual[name]).weak_type == jax.typeof(value).weak_type
            assert actual[name].dtype == value.dtype


def test_numbers_under_x64(x64):
    f = torch2jax(_numbers)
    x = jnp.ones(3)
    assert_trees_equal(f(x), jax.jit(_numbers)(x))


@pytest.mark.filterwarnings("ignore:the output shapes of")
def test_numbers_have_the_value_of_each_run():
    f = torch2jax(lambda x: (x.sum().item(), int(x.numel()), bool(x[0] > 1), x))
    g = jax.jit(f)
    for x in (jnp.arange(3.0), jnp.arange(3.0) + 5):
        for call in (f, g):
            total, count, large, _ = call(x)
            assert (total.item(), count.item(), large.item()) == (x.sum(), 3, x[0] > 1)


@pytest.mark.filterwarnings("ignore:the output shapes of")
def test_numbers_have_no_tangent():
    f = torch2jax(lambda x: (x.sum().item(), (x * x).sum()))
    x = jnp.arange(3.0)
    assert jax.grad(lambda x: f(x)[0])(x).tolist() == [0, 0, 0]
    assert jax.grad(lambda x: f(x)[0] * f(x)[1])(x).tolist() == (3 * 2 * x).tolist()
    _, tangents = jax.jvp(f, (x,), (jnp.ones(3),))
    assert [t.tolist() for t in tangents] == [0, 6]


def test_numbers_and_constants_of_a_batch():
    f = torch2jax(lambda x: {"x": x * 2, "n": 3, "name": "a"})
    names = []

    def member(x):
        y = f(x)
        names.append(y.pop("name"))
        return y

    y = jax.vmap(member)(jnp.ones((2, 3)))
    assert_trees_equal(y, {"n": jnp.full(2, 3), "x": 2 * jnp.ones((2, 3))})
    assert set(names) == {"a"}


def test_constants_on_a_mesh():
    with jax.set_mesh(jax.make_mesh((4,), ("x",))):
        x = jax.device_put(jnp.arange(8.0), P("x"))
        y = torch2jax(lambda x: ("a", x * 2, None), out_specs=P("x"))(x)
    assert y[0] == "a"
    assert_trees_equal(y[1], 2 * jnp.arange(8.0))


def test_constants_of_a_module():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = torch.nn.BatchNorm1d(3)

        def forward(self, x):
            return Output(loss=self.norm(x).sum(), name="norm", steps=len(x))

    model, state = eqx.nn.make_with_state(from_torch)(Model())
    y, _ = model(jnp.ones((4, 3)), state=state)
    assert (y.name, y.steps) == ("norm", 4)


@pytest.mark.parametrize("jit", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_another_constant_at_run_time_is_an_error(jit):
    f = torch2jax(
        lambda x: {"x": x, "label": "pos" if x.sum() > 0 else "neg"},
        output_shapes=lambda x: {"x": x, "label": "pos"},
    )
    call = jit(lambda x: f(x)["x"])
    assert call(jnp.ones(2)).tolist() == [1, 1]
    with pytest.raises(Exception, match=r"returned 'neg' at output\['label'\], where it is 'pos'"):
        call(-jnp.ones(2))


def test_a_number_in_the_place_of_a_constant_is_an_error():
    f = torch2jax(lambda x: (x, 3), output_shapes=lambda x: (x, "three"))
    with pytest.raises(Exception, match=r"returned a tensor or number at output\[1\], where"):
        f(jnp.ones(2))


def test_a_number_where_a_scalar_is_declared():
    f = torch2jax(lambda x, n: n, output_shapes=lambda x, n: Struct((), "int32"))
    assert_trees_equal(f(jnp.ones(2), 7), jnp.int32(7))
    with pytest.raises(Exception, match="another dtype than was declared"):
        f(jnp.ones(2), 7.0)
    with pytest.raises(Exception, match="overflow"):
        f(jnp.ones(2), 2**40)


@pytest.mark.parametrize(
    "value", [object(), np.ones(2), {1, 2}, torch.nn.Identity()], ids=lambda x: type(x).__name__
)
def test_other_objects_are_refused(value):
    with pytest.raises(OutputError, match="can only take torch tensors, numbers and strings"):
        torch2jax(lambda x: (x, value))(jnp.ones(2))


A, B = Struct((2,), "float32"), Struct((), "float32")
SEQUENCES = {
    "list for a tuple": (lambda x: (x, x.sum()), [A, B]),
    "tuple for a list": (lambda x: [x, x.sum()], (A, B)),
    "nested": (lambda x: ([x, (x.sum(),)], {"a": (x,)}), [(A, [B]), {"a": [A]}]),
    "in a dataclass": (lambda x: Record((x, [x]), None), Record([A, (A,)], None)),
    "in a named tuple": (lambda x: Named([x], [x]), Named((A,), (A,))),
    "sizes": (lambda x: (x, x), [(2,), (2,)]),
    "a named tuple": (lambda x: torch.topk(x, 1), [Struct((1,), "float32"), Struct((1,), "int32")]),
    "with a constant": (lambda x: (x, "a"), [A, "a"]),
}


@pytest.mark.parametrize(("f", "declared"), SEQUENCES.values(), ids=SEQUENCES)
@pytest.mark.parametrize("jit", [True, False], ids=["jit", "eager"])
@pytest.mark.covering
def test_lists_and_tuples_are_one_where_they_are_declared(f, declared, jit):
    g = torch2jax(f, output_shapes=declared)
    x = jnp.arange(2.0)
    tensors = _leaves(f(torch.arange(2.0)))
    actual = jax.jit(lambda x: _leaves(g(x)))(x) if jit else _leaves(g(x))
    assert_trees_equal(actual, tensors)
    assert _kinds(jax.eval_shape(lambda x: _without_text(g(x)), x)) == _kinds(
        _without_text(declared)
    )


def _leaves(tree):
    """The arrays or tensors, in the order in which Python shows them."""
    if tree is None or isinstance(tree, str):
        return []
    if isinstance(tree, jax.Array | torch.Tensor):
        return [tree]
    items = _plain(tree)
    items = items.values() if isinstance(items, dict) else items
    return [leaf for item in items for leaf in _leaves(item)]


def _without_text(tree):
    return jax.tree.map(lambda x: None if isinstance(x, str) else x, _plain(tree))


def _kinds(tree):
    """The structure, where a shape is a leaf."""
    leaf = lambda x: type(x) is tuple and x == (2,)  # noqa: E731
    return jax.tree.structure(_plain(tree), is_leaf=leaf)


@pytest.mark.parametrize("declared", [[A], [A, A, A], {"a": A, "b": A}, A], ids=str)
def test_other_misfits_are_errors(declared):
    with pytest.raises(Exception, match="another structure than was declared"):
        torch2jax(lambda x: (x, x), output_shapes=declared)(jnp.ones(2))


def test_shapes_inside_are_checked_all_the_same():
    f = torch2jax(lambda x: (x, x), output_shapes=[A, Struct((3,), "float32")])
    with pytest.raises(Exception, match=f"{ShapeError.__name__}.*another shape") as caught:
        f(jnp.ones(2))
    assert "output[1]" in str(caught.value)
