"""Modules with jaxtyping annotations."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
import torch
import typeguard
from beartype import beartype
from jaxtyping import Float, Int64, jaxtyped
from torch import nn, Tensor

from eqx_torch import (
    AnnotationError,
    from_torch,
    InputError,
    ModuleError,
    ShapeError,
    stack_modules,
    to_torch,
)

from ..helpers import annotation_strings, assert_trees_equal
from ..helpers.annotations import Runs


RUNS = Runs()
Batch = Float[Tensor, "batch 3"]
Hidden = Float[Tensor, "batch {self.width}"]
Open = Float[Tensor, "batch _"]


class Plain(nn.Module):
    """An unchecked forward."""

    def __init__(self, width=2):
        super().__init__()
        self.width = width
        self.linear = nn.Linear(3, width)

    def forward(self, x: Batch) -> Hidden:
        RUNS.append(tuple(x.shape))
        return self.linear(x)


class Beartyped(Plain):
    @jaxtyped(typechecker=beartype)
    def forward(self, x: Float[Tensor, "batch 3"]) -> Float[Tensor, "batch 2"]:
        RUNS.append(tuple(x.shape))
        return self.encode(x)

    @jaxtyped(typechecker=beartype)
    def encode(self, x: Float[Tensor, "batch 3"]) -> Float[Tensor, "batch 2"]:
        return self.linear(x)

    @staticmethod
    @jaxtyped(typechecker=beartype)
    def double(x: Float[Tensor, "3"]) -> Float[Tensor, "3"]:
        return 2 * x


class Typeguarded(Plain):
    @typeguard.typechecked
    def forward(self, x: Batch) -> Open:
        RUNS.append(tuple(x.shape))
        return self.linear(x)


# What `_` leaves open is said by a stub.
Typeguarded.stub = Plain.forward
MODULES = {"plain": Plain, "beartype": Beartyped, "typeguard": Typeguarded}
every_module = pytest.mark.parametrize("cls", MODULES.values(), ids=MODULES)
X = jnp.arange(12.0).reshape(4, 3)


@pytest.fixture(autouse=True)
def no_runs():
    RUNS.clear()


@pytest.fixture(autouse=True)
def seeded(getkey):
    """Seeds torch."""


def converted(cls):
    return from_torch(cls(), signature=getattr(cls, "stub", None))


def linear(model, x):
    return x @ model.params["linear.weight"].T + model.params["linear.bias"]


def loss_of(call):
    return lambda model, x: (call(model, x) ** 2).sum()


@every_module
def test_torch_runs_only_in_the_compiled_program(cls):
    model = converted(cls)
    step = eqx.filter_jit(eqx.filter_grad(loss_of(lambda model, x: model(x))))
    compiled = step.lower(model, X).compile()
    assert RUNS == []
    assert_trees_equal(
        compiled(model, X).params, eqx.filter_grad(loss_of(linear))(model, X).params, rtol=1e-5
    )
    assert set(RUNS) == {(4, 3)}


WRONG = (
    "{}.forward: argument `x` does not match its annotation.\n"
    "  annotation: Float[Tensor, 'batch 3']\n"
    "  expected: Float (batch=4, 3)\n"
    "  actual: float32 (4, 2)\n"
    "  dimension 1 is 2, must be 3\n"
    "names bound in this call:\n"
    "  batch = 4, from argument `x`, dimension 0"
)


@every_module
def test_a_wrong_shape_is_refused_when_traced(cls):
    model, name = converted(cls), "Plain" if cls is Typeguarded else cls.__name__
    calls = (
        lambda: model(X[:, :2]),
        lambda: eqx.filter_eval_shape(model, X[:, :2]),
        lambda: jax.vmap(model)(X[None, :, :2]),
        lambda: jax.grad(lambda x: model(x).sum())(X[:, :2]),
        lambda: eqx.filter_jit(model)(X[:, :2]),
    )
    for call in calls:
        with pytest.raises(ShapeError) as caught:
            call()
        assert str(caught.value) == WRONG.format(name)
    assert RUNS == []


@every_module
def test_an_ensemble_is_annotated_as_one_member(cls):
    ensemble = stack_modules([converted(cls) for _ in range(5)])
    call = eqx.filter_vmap(lambda model, x: model(x), in_axes=(eqx.if_array(0), None))
    expected = eqx.filter_vmap(linear, in_axes=(eqx.if_array(0), None))
    jitted = eqx.filter_jit(call).lower(ensemble, X).compile()
    assert RUNS == []
    assert_trees_equal(jitted(ensemble, X), expected(ensemble, X), rtol=1e-5)
    over_both = eqx.filter_vmap(lambda model, x: model(x))
    assert_trees_equal(over_both(ensemble, jnp.stack([X] * 5)), expected(ensemble, X), rtol=1e-5)
    RUNS.clear()
    with pytest.raises(ShapeError, match="it has 1 dimension, must have 2"):
        over_both(ensemble, jnp.ones((5, 3)))
    with pytest.raises(ShapeError, match="dimension 1 is 2, must be 3"):
        call(ensemble, X[:, :2])
    assert RUNS == []


@every_module
def test_new_weights_do_not_retrace(cls):
    traces = []

    @eqx.filter_jit
    def call(model, x):
        traces.append(0)
        return model(x)

    models = [converted(cls) for _ in range(3)]
    models.append(from_torch(to_torch(models[0]), signature=models[0].core.options.signature))
    for model in models:
        assert_trees_equal(call(model, X), linear(model, X), rtol=1e-5)
    assert len(traces) == 1
    assert models[0].core == models[1].core


def test_other_methods_and_their_checkers():
    model = from_torch(Beartyped(), method="encode")
    assert_trees_equal(model(X), linear(model, X), rtol=1e-5)
    with pytest.raises(ShapeError, match="^Beartyped.encode: argument `x`"):
        model(X[:, :2])
    assert_trees_equal(from_torch(model, method="double")(X[0]), 2 * X[0])


def test_stubs():
    def with_self(self, x: Float[Tensor, "n 3"]) -> Float[Tensor, "n {self.out_features}"]: ...

    def without(x: Float[Tensor, "n 3"]) -> Float[Tensor, "n 2"]: ...

    def sized(x: Float[Tensor, "n 3"], size: int = 2) -> Float[Tensor, "n {size}"]: ...

    stubs = [with_self, without, functools.partial(sized, size=2), functools.partial(with_self)]
    for stub in stubs:
        module = nn.Linear(3, 2)
        seen = Runs()
        module.register_forward_hook(lambda *_, seen=seen: seen.append(0))
        model = from_torch(module, signature=stub)
        with pytest.raises(ShapeError, match="dimension 1 is 2, must be 3"):
            model(X[:, :2])
        assert jax.eval_shape(model, X).shape == (4, 2)
        assert seen == []
        expected = X @ model.params["weight"].T + model.params["bias"]
        assert_trees_equal(model(X), expected, rtol=1e-5)

    other = from_torch(from_torch(Plain()), signature=without)
    with pytest.raises(ShapeError, match="without: argument `x`"):
        other(X[:, :2])
    with pytest.raises(AnnotationError, match="^`signature=Linear.forward` has no jaxtyping anno"):
        from_torch(nn.Linear(3, 2), signature=nn.Linear.forward)
    with pytest.raises(InputError, match="^`signature=3` is of type int"):
        from_torch(nn.Linear(3, 2), signature=3)


def test_what_leaves_the_result_open_is_refused_when_converted():
    with pytest.raises(AnnotationError) as caught:
        from_torch(Typeguarded())
    assert str(caught.value) == (
        "Typeguarded.forward: the annotation Float[Tensor, 'batch _'] does not determine the"
        " result: `_` stands for any size.\n"
        "Bind it by an input, use a number, or pass output_shapes=."
    )
    model = from_torch(Typeguarded(), output_shapes=lambda x: (len(x.shape), 2))
    with pytest.raises(
        jax.errors.JaxRuntimeError, match=r"declared by output_shapes: float32\[2, 2"
    ):
        jax.block_until_ready(model(X))
    model = from_torch(Typeguarded(), output_shapes=lambda x: (x.shape[0], 2))
    assert_trees_equal(model(X), linear(model, X), rtol=1e-5)
    with pytest.raises(ShapeError, match="dimension 1 is 2, must be 3"):
        model(X[:, :2])


def test_annotations_as_strings():
    model = from_torch(annotation_strings.Net())
    assert_trees_equal(model(X), X.T)
    with pytest.raises(ShapeError, match="^Net.forward: argument `x`"):
        model(X[0])


class Norm(nn.Module):
    """With state and random numbers."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.dropout = nn.Dropout(0.5)

    @jaxtyped(typechecker=beartype)
    def forward(
        self, x: Float[Tensor, "batch 3"], y: Int64[Tensor, "batch"]
    ) -> tuple[Float[Tensor, "batch 3"], Float[Tensor, ""]]:
        RUNS.append(tuple(x.shape))
        hidden = self.dropout(self.norm(x))
        return hidden, nn.functional.cross_entropy(hidden, y)


def test_state_and_keys():
    labels = torch.zeros(4, dtype=torch.int64)
    model, state = eqx.nn.make_with_state(from_torch)(Norm(), torch.ones(4, 3), labels)
    assert RUNS == []
    y, key = jnp.array([0, 1, 2, 0]), jax.random.key(0)
    call = eqx.filter_jit(lambda model, state, key: model(X, y, key=key, state=state))
    compiled = call.lower(model, state, key).compile()
    assert RUNS == []
    (hidden, loss), new_state = compiled(model, state, key)
    assert RUNS == [(4, 3)]
    normal = (X - X.mean(0)) / jnp.sqrt(X.var(0) + 1e-5)
    assert_trees_equal(hidden, jnp.where(hidden == 0, 0.0, 2 * normal), rtol=1e-4)
    assert_trees_equal(
        loss, -jnp.take_along_axis(jax.nn.log_softmax(hidden), y[:, None], 1).mean(), rtol=1e-5
    )
    buffers = new_state.get(model.buffers)
    assert_trees_equal(buffers["norm.running_mean"], 0.1 * X.mean(0), rtol=1e-5)
    with pytest.raises(ModuleError, match="without `key=`"):
        model(X, y, state=state)
    with pytest.raises(ModuleError, match="without `state=`"):
        model(X, y, key=key)
    with pytest.raises(ShapeError, match="dimension 0 \\(`batch`\\) is 3, must be 4"):
        model(X, y[:3], key=key, state=state)
    evaluated = eqx.nn.inference_mode(model)
    assert_trees_equal(evaluated(X, y, state=state)[0][0], X / jnp.sqrt(1 + 1e-5), rtol=1e-5)


class FunctionalDropout(nn.Module):
    def forward(self, x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return nn.functional.dropout(x, 0.5, self.training)


def test_random_numbers_outside_of_layers_ask_for_a_key():
    model, x = from_torch(FunctionalDropout()), jnp.ones(64)
    for _ in range(2):
        with pytest.raises(jax.errors.JaxRuntimeError) as caught:
            jax.block_until_ready(model(x))
        assert (
            "ModuleError: the forward of `FunctionalDropout` draws random numbers, but was called "
            "without `key=`. Pass `key=jax.random.key(0)`"
        ) in str(caught.value)
    key = jax.random.key(0)
    first = model(x, key=key)
    assert_trees_equal(first, model(x, key=key))
    assert set(first.tolist()) == {0.0, 2.0}
    assert_trees_equal(eqx.nn.inference_mode(model)(x), x)


class Wrong(nn.Module):
    def forward(self, x: Float[Tensor, "n 3"]) -> Float[Tensor, "n 2"]:
        return x


def test_another_shape_is_returned():
    model = from_torch(Wrong())
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        jax.block_until_ready(model(X))
    assert (
        "ShapeError: `Wrong` returned another shape than was declared.\n"
        "  declared by its annotation Float[Tensor, 'n 2']: float32[4, 2]\n"
        "  returned: float32[4, 3]\n"
    ) in str(caught.value)
