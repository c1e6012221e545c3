"""Annotations on a mesh: of the global arrays with `out_specs`, of the shards in `shard_map`."""

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
import torch
from beartype import beartype
from jax.sharding import PartitionSpec as P
from jaxtyping import Float, Int64, jaxtyped
from torch import nn, Tensor

from eqx_torch import (
    check_errors,
    filter_shard_map,
    from_torch,
    OutputError,
    ShapeError,
    ShardingError,
    torch2jax,
)

from ..helpers import assert_trees_equal
from ..helpers.annotations import Runs
from ..helpers.meshes import explicit_mesh, put


RUNS = Runs()
MESH = explicit_mesh(8)
X = jnp.arange(48.0).reshape(16, 3) / 48
SHARDED = put(X, MESH, "x")

CHECKERS = {
    "none": lambda fn: fn,
    "beartype": beartype,
    "jaxtyped": jaxtyped(typechecker=beartype),
    "jaxtyped none": jaxtyped(typechecker=None),
}
every_checker = pytest.mark.parametrize("checker", CHECKERS.values(), ids=CHECKERS)


@pytest.fixture(autouse=True)
def no_runs():
    RUNS.clear()


@pytest.fixture
def on_mesh():
    with jax.set_mesh(MESH):
        yield


def row_sums(x: Float[Tensor, "16 d"]) -> tuple[Float[Tensor, "16"], Float[Tensor, "16 d"]]:
    RUNS.append(tuple(x.shape))
    return x.sum(1), x.exp()


def twin(x):
    return x.sum(1), jnp.exp(x)


@every_checker
def test_global_annotations_and_shards(checker):
    f = torch2jax(checker(row_sums), out_specs=P("x"))
    compiled = jax.jit(f).lower(SHARDED).compile()
    assert [one.shape for one in jax.eval_shape(f, SHARDED)] == [(16,), (16, 3)]
    assert RUNS == []
    assert_trees_equal(compiled(SHARDED), twin(X), rtol=1e-5)
    assert RUNS == [(2, 3)] * 8
    loss = jax.jit(jax.grad(lambda x: f(x)[1].sum()))
    RUNS.clear()
    compiled = loss.lower(SHARDED).compile()
    assert RUNS == []
    assert_trees_equal(compiled(SHARDED), jnp.exp(X), rtol=1e-5)
    assert set(RUNS) == {(2, 3)}


@every_checker
def test_a_wrong_global_shape(checker):
    f = torch2jax(checker(row_sums), out_specs=P("x"))
    for call in (f, jax.jit(f), jax.grad(lambda x: f(x)[0].sum())):
        with pytest.raises(ShapeError) as caught:
            call(put(jnp.ones((8, 3)), MESH, "x"))
        assert str(caught.value) == (
            "row_sums: argument `x` does not match its annotation.\n"
            "  annotation: Float[Tensor, '16 d']\n"
            "  expected: Float (16, d=3)\n"
            "  actual: float32 (8, 3)\n"
            "  dimension 0 is 8, must be 16\n"
            "names bound in this call:\n"
            "  d = 3, from argument `x`, dimension 1"
        )
    assert RUNS == []


def test_a_function_of_the_inputs_gives_global_shapes():
    def plain(x):
        RUNS.append(tuple(x.shape))
        return x.sum(1), x.exp()

    f = torch2jax(plain, out_specs=P("x"), output_shapes=lambda x: ((len(x.shape) * 8,), x.shape))
    assert_trees_equal(jax.jit(f)(SHARDED), twin(X), rtol=1e-5)
    assert RUNS == [(2, 3)] * 8


@every_checker
def test_inside_shard_map_the_annotation_speaks_of_the_shard(checker):
    @checker
    def centred(x: Float[Tensor, "2 d"]) -> Float[Tensor, "2 d"]:
        RUNS.append(tuple(x.shape))
        return x - x.mean(1, keepdim=True)

    mapped = jax.shard_map(torch2jax(centred), mesh=MESH, in_specs=P("x"), out_specs=P("x"))
    compiled = jax.jit(mapped).lower(SHARDED).compile()
    assert RUNS == []
    assert_trees_equal(compiled(SHARDED), X - X.mean(1, keepdims=True), rtol=1e-5)
    assert RUNS == [(2, 3)] * 8
    with pytest.raises(ShapeError) as caught:
        jax.shard_map(torch2jax(row_sums), mesh=MESH, in_specs=P("x"), out_specs=P("x"))(SHARDED)
    assert "  expected: Float (16, d=3)\n  actual: float32 (2, 3)\n" in str(caught.value)


def test_vmap_of_a_sharded_batch():
    def norm(x: Float[Tensor, "3"]) -> Float[Tensor, ""]:
        RUNS.append(tuple(x.shape))
        return x.norm()

    call = jax.jit(jax.vmap(torch2jax(norm)))
    compiled = call.lower(SHARDED).compile()
    assert RUNS == []
    assert_trees_equal(compiled(SHARDED), jnp.linalg.norm(X, axis=1), rtol=1e-5)


def test_an_annotated_result_that_cannot_be_divided():
    def first(x: Float[Tensor, "n d"]) -> Float[Tensor, "n-1"]:
        RUNS.append(tuple(x.shape))
        return x[1:, 0]

    with pytest.raises(ShardingError, match=r"of global shape \[15\], cannot be divided"):
        torch2jax(first, out_specs=P("x"))(SHARDED)
    assert RUNS == []


# What torch really returns


def short(x: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
    return x[:, :-1]


def on_one_shard(x: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
    return x[:, :-1] if x[0, 0] == 0 else x


def to_int(x: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
    return x.int()


RETURNED = {
    short: "another shape(.|\n)*Float\\[Tensor, 'n d'\\], for one shard: float32\\[2, 3\\]\n"
    "  returned: float32\\[2, 2\\]",
    on_one_shard: "another shape(.|\n)*Float\\[Tensor, 'n d'\\], for one shard: float32\\[2, 3\\]\n"
    "  returned: float32\\[2, 2\\]",
    to_int: "another dtype(.|\n)*Float\\[Tensor, 'n d'\\], for one shard: float32\\[2, 3\\]\n"
    "  returned: int32\\[2, 3\\]",
}


@pytest.mark.parametrize("fn", RETURNED, ids=lambda fn: fn.__name__)
def test_what_torch_returns_is_not_what_is_annotated(fn):
    f = torch2jax(fn, out_specs=P("x"))
    for call in (f, jax.jit(f), jax.jit(jax.grad(lambda x: f(x).sum()))):
        jax.block_until_ready(call(SHARDED))
        with pytest.raises(OutputError if fn is to_int else ShapeError, match=RETURNED[fn]):
            check_errors()
    good = torch2jax(row_sums, out_specs=P("x"))
    assert_trees_equal(good(SHARDED), twin(X), rtol=1e-5)


# Modules


class Classifier(nn.Module):
    """Sizes that no shard has."""

    def __init__(self):
        super().__init__()
        self.body = Body()
        self.norm = nn.BatchNorm1d(4)

    @jaxtyped(typechecker=beartype)
    def forward(
        self, x: Float[Tensor, "16 3"], y: Int64[Tensor, "16"]
    ) -> tuple[Float[Tensor, "16 4"], Float[Tensor, "16"]]:
        RUNS.append(tuple(x.shape))
        out = self.norm(self.body(x))
        return out, self.losses(out, y)

    @jaxtyped(typechecker=beartype)
    def losses(self, out: Float[Tensor, "16 4"], y: Int64[Tensor, "16"]) -> Float[Tensor, "16"]:
        return nn.functional.cross_entropy(out, y, reduction="none")


class Body(nn.Linear):
    def __init__(self):
        super().__init__(3, 4)

    @jaxtyped(typechecker=beartype)
    def forward(self, input: Float[Tensor, "16 3"]) -> Float[Tensor, "16 4"]:  # noqa: A002
        return super().forward(input)


def reference(model, x, y):
    out = x @ model.params["body.weight"].T + model.params["body.bias"]
    out = out / jnp.sqrt(1 + 1e-5) * model.params["norm.weight"] + model.params["norm.bias"]
    return out, -jnp.take_along_axis(jax.nn.log_softmax(out), y[:, None], 1)[:, 0]


@pytest.mark.usefixtures("on_mesh")
def test_a_module_with_checkers_under_shards(getkey):
    getkey()
    examples = torch.ones(16, 3), torch.zeros(16, dtype=torch.int64)
    model, state = eqx.nn.make_with_state(from_torch)(Classifier(), *examples, out_specs=P("x"))
    evaluated = eqx.nn.inference_mode(model)
    y = jnp.arange(16, dtype=jnp.int32) % 4
    labels = put(y, MESH, "x")

    @eqx.filter_jit
    @eqx.filter_value_and_grad(has_aux=True)
    def step(model, state, x, y):
        (out, losses), state = model(x, y, state=state)
        return losses.mean(), (out, state)

    compiled = step.lower(evaluated, state, SHARDED, labels).compile()
    assert RUNS == []
    results = jax.block_until_ready(compiled(evaluated, state, SHARDED, labels))
    (loss, (out, state)), grads = results
    assert set(RUNS) == {(2, 3)}
    expected_out, expected_losses = reference(evaluated, X, y)
    assert_trees_equal(out, expected_out, rtol=1e-5)
    assert_trees_equal(loss, expected_losses.mean(), rtol=1e-5)
    expected = eqx.filter_grad(lambda m: reference(m, X, y)[1].mean())(evaluated)
    assert_trees_equal(grads.params, expected.params, rtol=1e-4)
    (out, _), new_state = model(SHARDED, labels, state=state)
    assert out.shape == (16, 4)
    assert new_state.get(model.buffers)["norm.running_mean"].shape == (4,)
    with pytest.raises(ShapeError, match="^Classifier.forward: argument `y`(.|\n)*must be 16"):
        model(SHARDED, put(y[:8], MESH, "x"), state=new_state)


def test_a_module_inside_shard_map_speaks_of_the_shard(getkey):
    getkey()

    class Local(nn.Linear):
        @jaxtyped(typechecker=beartype)
        def forward(self, input: Float[Tensor, "2 3"]) -> Float[Tensor, "2 4"]:  # noqa: A002
            RUNS.append(tuple(input.shape))
            return super().forward(input)

    model = from_torch(Local(3, 4))
    call = filter_shard_map(
        lambda model, x: model(x), mesh=MESH, in_specs=(P(), P("x")), out_specs=P("x")
    )
    expected = X @ model.params["weight"].T + model.params["bias"]
    assert_trees_equal(call(model, SHARDED), expected, rtol=1e-5)
    assert RUNS == [(2, 3)] * 8
    with pytest.raises(ShapeError, match="dimension 0 is 16, must be 2"):
        model(X)
