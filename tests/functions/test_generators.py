"""A key alone decides what a call draws, whatever else draws, seeds or puts back a generator."""

import itertools
import threading
import warnings
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import PartitionSpec as P
from torch.testing._internal import common_methods_invocations
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from eqx_torch import from_torch, torch2jax

from ..helpers import assert_trees_equal
from ..helpers.draws import beside, Checkpointed, in_torch, KEY
from ..helpers.meshes import explicit_mesh, put
from ..helpers.operators import OPERATORS


ONES = np.ones((200, 100), np.float32)

# torch does not know that a forward is not for training, as here where outputs are inferred.
pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")


class Drops(torch.nn.Module):
    """Linear, so that its gradient at ones is its value."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(10):
            x = torch.nn.functional.dropout(x, 0.1, self.training)
        return x


MODULES = {
    "plain": lambda: Drops(),
    "checkpointed": lambda: Checkpointed(Drops()),
    "reentrant": lambda: Checkpointed(Drops(), use_reentrant=True),
}


def _trace() -> None:
    """Finds out the shapes of a function that needs values and draws."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        noisy = torch2jax(lambda x: torch.randn_like(x) * x.sum().item())
        jax.eval_shape(noisy, jnp.ones(3))


def _draw_and_seed() -> None:
    torch.randperm(100)
    torch.manual_seed(0)
    torch.set_rng_state(torch.get_rng_state())


OTHERS = {"trials": _trace, "draws": _draw_and_seed}


@pytest.mark.filterwarnings("ignore:.*inferred by running it on zeros")
@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("module", MODULES)
def test_beside_another_thread(module, other):
    model = from_torch(MODULES[module]())
    expected = in_torch(lambda: Drops()(torch.from_numpy(ONES)))
    call = eqx.filter_jit(lambda x, key: jax.vjp(lambda x: model(x, key=key), x)[0])
    grad = eqx.filter_jit(lambda x, key: jax.grad(lambda x: model(x, key=key).sum())(x))
    call(ONES, KEY), grad(ONES, KEY)
    with beside(OTHERS[other]):
        for _ in range(10):
            assert_trees_equal(call(ONES, KEY), expected, exact=True)
            assert_trees_equal(grad(ONES, KEY), expected, rtol=1e-5)


@pytest.mark.parametrize("module", MODULES)
def test_beside_checkpoints_without_a_key_on_a_mesh(module):
    """These put back torch's random state, on a device while others draw."""
    mesh = explicit_mesh(4)
    drops = from_torch(MODULES[module](), out_specs=P("x"))
    other = from_torch(Checkpointed(torch.sin), out_specs=P("x"))

    @jax.jit
    def step(x, key):
        differing = []
        for k in jax.random.split(key, 4):
            y, pull = jax.vjp(jax.checkpoint(lambda x, k=k: drops(x, key=k)), x)
            x = x + 0 * jax.grad(lambda x: other(x).sum())(y)
            differing.append((abs(pull(jnp.ones_like(y))[0] - y) > 1e-5).sum())
        return y, jnp.stack(differing)

    with jax.set_mesh(mesh):
        x = put(jnp.asarray(ONES), mesh, "x")
        first, _ = step(x, KEY)
        for _ in range(4):
            y, differing = step(x, KEY)
            assert_trees_equal(differing, np.zeros(4, np.int32))
            assert_trees_equal(y, first, exact=True)


def test_shards_draw_at_the_same_time():
    """Each waits, with half of its numbers drawn, until all have come as far; so do gradients."""
    barrier = threading.Barrier(4)

    class Backward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            barrier.wait(60)
            return g

    class Waits(torch.nn.Module):
        def forward(self, x):
            y = torch.nn.functional.dropout(x)
            barrier.wait(60)
            return Backward.apply(torch.nn.functional.dropout(y))

    mesh = explicit_mesh(4)
    model = from_torch(Waits(), output_shapes=lambda x: x, out_specs=P("x"))
    with jax.set_mesh(mesh):
        x = put(jnp.asarray(ONES), mesh, "x")
        value, pull = jax.vjp(lambda x: model(x, key=KEY), x)
        assert_trees_equal(pull(jnp.ones_like(value))[0], value, exact=True)


# Of torch's database.
RANDOM = [
    "bernoulli",
    "cauchy",
    "exponential",
    "geometric",
    "log_normal",
    "multinomial",
    "nn.functional.alpha_dropout",
    "nn.functional.dropout",
    "nn.functional.dropout2d",
    "nn.functional.dropout3d",
    "nn.functional.feature_alpha_dropout.with_train",
    "nn.functional.fractional_max_pool2d",
    "nn.functional.fractional_max_pool3d",
    "nn.functional.multi_head_attention_forward",
    "nn.functional.rrelu",
    "nn.functional.scaled_dot_product_attention",
    "normal",
    "normal.in_place",
    "normal.number_mean",
    "pca_lowrank",
    "rand_like",
    "randint",
    "randint_like",
    "randn",
    "randn_like",
    "svd_lowrank",
    "uniform",
]


def _random_samples() -> list[Any]:
    """Those that do draw of some samples of these operators."""
    found = []
    for name in RANDOM:
        op = OPERATORS[name]
        dtype = next((d for d in (torch.float32, torch.int64) if d in op.dtypes), None)
        try:
            samples = list(itertools.islice(op.sample_inputs("cpu", dtype), 4))
        except Exception:  # not on a CPU
            continue
        for sample in samples:
            before = torch.get_rng_state()
            try:
                _run(op, sample)
            except Exception:
                continue
            if not torch.equal(before, torch.get_rng_state()):
                found.append((name, op, sample))
    return found


def _run(op: Any, sample: Any) -> list[torch.Tensor]:
    args = [x.clone() if isinstance(x, torch.Tensor) else x for x in (sample.input, *sample.args)]
    out = tree_leaves(op(*args, **sample.kwargs))
    return [y.detach() for y in out if isinstance(y, torch.Tensor)]


class Calls(torch.nn.Module):
    """A function of no arguments as a module."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self) -> Any:
        return self.function()


def _check(function: Any) -> None:
    """With a key it draws what it does seeded, and leaves torch's own generator alone."""
    expected = in_torch(function)
    other = in_torch(function, jax.random.key(2))
    before = torch.default_generator.get_state()
    model = from_torch(
        Calls(function),
        output_shapes=jax.tree.map(
            lambda y: jax.ShapeDtypeStruct(y.shape, jax.dtypes.canonicalize_dtype(y.numpy().dtype)),
            expected,
        ),
    )
    for _ in range(2):
        assert_trees_equal(model(key=KEY), expected, exact=True)
    assert_trees_equal(model(key=jax.random.key(2)), other, exact=True)
    assert torch.equal(torch.default_generator.get_state(), before)


@pytest.mark.filterwarnings("ignore:::torch")
def test_all_operators_draw_by_the_key(monkeypatch):
    seedless = lambda op, *args, **kwargs: op(*args, **kwargs)  # noqa: E731
    monkeypatch.setattr(common_methods_invocations, "wrapper_set_seed", seedless)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        samples = _random_samples()
        _check(lambda: [_run(op, sample) for _, op, sample in samples])
    assert {name for name, *_ in samples} == set(RANDOM)


ONE = torch.ones(40)
DRAWS = {
    "factories": lambda: [torch.rand(3), torch.randn(5), torch.randint(9, (4,)), torch.randperm(7)],
    "alike": lambda: [torch.rand_like(ONE), torch.randn_like(ONE), torch.randint_like(ONE, 2, 9)],
    "out": lambda: torch.rand(3, out=torch.empty(3)),
    "in place": lambda: [
        ONE.clone().normal_(),
        ONE.clone().random_(),
        ONE.clone().exponential_(),
        ONE.clone().geometric_(0.3),
    ],
    "native dropout": lambda: list(torch.native_dropout(ONE, 0.3, True)),
    "gamma": lambda: [torch._standard_gamma(ONE), torch._sample_dirichlet(torch.ones(2, 3))],
    "poisson": lambda: [torch.poisson(3 * ONE), torch.binomial(9 * ONE, 0.5 * ONE)],
    "multinomial": lambda: torch.multinomial(ONE, 5, replacement=True),
    "distributions": lambda: [
        torch.distributions.Beta(ONE, ONE).sample(),
        torch.distributions.Categorical(ONE).sample(),
        torch.distributions.Normal(ONE, ONE).rsample(),
    ],
    "initialisers": lambda: [
        torch.nn.init.trunc_normal_(torch.empty(4, 4)),
        torch.nn.init.orthogonal_(torch.empty(4, 4)),
        torch.nn.Linear(3, 3).weight.detach(),
    ],
    "gumbel": lambda: torch.nn.functional.gumbel_softmax(ONE),
    "batched": lambda: torch.func.vmap(torch.rand_like, randomness="different")(torch.ones(3, 4)),
    "batched alike": lambda: torch.func.vmap(lambda x: x + torch.randn(4), randomness="same")(
        torch.ones(3, 4)
    ),
    "scripted": lambda: torch.jit.script(torch.nn.Sequential(torch.nn.Dropout()))(ONE),
    "seeded within": lambda: [torch.rand(2), torch.manual_seed(3) and torch.rand(2)],
    "forked": lambda: [_forked(), torch.rand(2)],
}


def _forked() -> torch.Tensor:
    with torch.random.fork_rng():
        return torch.rand(2)


@pytest.mark.filterwarnings("ignore:`torch.jit.script")
@pytest.mark.parametrize("kind", DRAWS)
def test_draws_of_every_kind(kind):
    _check(DRAWS[kind])


class Passing(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ["factories", "alike", "in place", "native dropout", "gamma"])
def test_draws_within_a_mode_of_the_forward(kind):
    def within():
        with Passing():
            return DRAWS[kind]()

    _check(within)


def test_a_generator_that_is_passed_is_kept():
    def drawn():
        generator = torch.Generator().manual_seed(5)
        return [torch.rand(3, generator=generator), ONE.clone().normal_(generator=generator)]

    model = from_torch(Calls(drawn))
    assert_trees_equal(model(key=KEY), drawn(), exact=True)


def test_lstm_and_attention_draw_by_the_key():
    lstm = torch.nn.LSTM(4, 4, num_layers=3, dropout=0.5)
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True)
    before = torch.get_rng_state()
    for module, x in ((lstm, torch.ones(3, 2, 4)), (layer, torch.ones(2, 3, 8))):
        first = tree_leaves(in_torch(lambda module=module, x=x: module(x)))[0].detach()
        y = jax.tree.leaves(from_torch(module)(jnp.asarray(x.numpy()), key=KEY))[0]
        assert_trees_equal(y, first, rtol=1e-4)
    assert torch.equal(torch.get_rng_state(), before)


class NoisyBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * torch.rand_like(x)

    @staticmethod
    def backward(ctx, g):
        return g + torch.rand_like(g)


def test_draws_of_a_backward_follow_the_key():
    """They go on where the forward stopped, with the forward's graph and without."""

    class Noisy(torch.nn.Module):
        def forward(self, x):
            return NoisyBackward.apply(x)

    model = from_torch(Noisy())
    call = lambda x: model(x, key=KEY).sum()  # noqa: E731
    expected = in_torch(lambda: torch.rand_like(ONE) * 0 + 1 + torch.rand_like(ONE))
    before = torch.get_rng_state()
    for gradient in (jax.grad(call), jax.jit(jax.grad(call)), jax.grad(jax.checkpoint(call))):
        assert_trees_equal(gradient(jnp.asarray(ONE.numpy())), expected, exact=True)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("values", [False, True], ids=["fake", "zeros"])
@pytest.mark.filterwarnings("ignore:.*inferred by running it on zeros", "ignore:.*draws random")
def test_trials_leave_torch_s_generator_alone(values):
    """Whether they draw or seed."""

    def f(x):
        torch.manual_seed(0)
        y = torch.nn.functional.dropout(x) + torch.rand(3) + torch.randn_like(x)
        return y * x.sum().item() if values else y

    before = torch.get_rng_state()
    jax.eval_shape(torch2jax(f), jnp.ones(3))
    assert torch.equal(torch.get_rng_state(), before)


def test_torch_s_own_seeding_is_as_ever_outside_of_calls():
    torch.manual_seed(4)
    expected = torch.rand(3, generator=torch.Generator().manual_seed(4))
    state = torch.get_rng_state()
    assert_trees_equal(torch.rand(3), expected, exact=True)
    torch.set_rng_state(state)
    assert_trees_equal(torch.rand(3), expected, exact=True)
    assert torch.initial_seed() == 4 == torch.default_generator.initial_seed()


@pytest.mark.slow
@pytest.mark.filterwarnings("default::DeprecationWarning", "default::FutureWarning")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_module_draws_by_the_key(backend):
    class Compiled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.call = torch.compile(
                lambda x: torch.nn.functional.dropout(x) * (1 + torch.rand(100)), backend=backend
            )

        def forward(self, x):
            return self.call(x)

    model = from_torch(Compiled(), output_shapes=lambda x: x)
    before = torch.get_rng_state()
    first, again = (model(ONES, key=KEY) for _ in range(2))
    assert_trees_equal(again, first, exact=True)
    assert not np.array_equal(model(ONES, key=jax.random.key(2)), first)
    gradient = jax.grad(lambda x: model(x, key=KEY).sum())(jnp.asarray(ONES))
    assert_trees_equal(gradient, first, rtol=1e-5)
    assert torch.equal(torch.get_rng_state(), before)
