"""Random models that draw, called with keys on devices and meshes, beside all else that draws.

The models are linear in their input, so that the gradient shows whether it was taken by the masks
of the forward: <c, f(x)> = <gradient of <c, f>, x>. What a key gives is computed once, with nothing
beside it, on one device by torch itself too; it has to be the same bits ever after.
"""

import contextlib
import random
import warnings
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import PartitionSpec as P
from torch.utils.checkpoint import checkpoint

from eqx_torch import from_torch, torch2jax

from ..helpers import assert_trees_equal
from ..helpers.draws import beside, Checkpointed, in_torch
from ..helpers.meshes import explicit_mesh


pytestmark = [
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True"),
    pytest.mark.filterwarnings("ignore:.*inferred by running it on zeros"),
]

_SHAPE = (8, 16)


class _Noisy(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        noise = torch.rand_like(x) + torch.empty_like(x).bernoulli_(0.5)
        return x * noise[:, torch.randperm(x.shape[1])]


class _Residual(torch.nn.Module):
    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x)


LAYERS: dict[str, Callable[[], torch.nn.Module]] = {
    "linear": lambda: torch.nn.Linear(16, 16, bias=False),
    "dropout": lambda: torch.nn.Dropout(0.3),
    "rows": lambda: torch.nn.Dropout1d(0.4),
    "noise": _Noisy,
}


def _draw_model(draw: random.Random, depth: int = 2) -> torch.nn.Module:
    layers = [torch.nn.Dropout(0.5)]
    for _ in range(draw.randint(1, 3)):
        if depth and draw.random() < 0.5:
            inner = _draw_model(draw, depth - 1)
            reentrant = draw.random() < 0.4
            layers.append(
                draw.choice([_Residual, lambda m, r=reentrant: Checkpointed(m, r)])(inner)
            )
        else:
            layers.append(LAYERS[draw.choice(list(LAYERS))]())
    draw.shuffle(layers)
    return torch.nn.Sequential(*layers)


def _draw_place(draw: random.Random) -> tuple[Any, Any]:
    """A mesh and the spec of the input, or one device and None."""
    if draw.random() < 0.5:
        return draw.choice(jax.devices()), None
    sizes = draw.choice([(2,), (4,), (2, 2)])
    if len(sizes) == 1:
        return explicit_mesh(*sizes), P("x")
    types = (jax.sharding.AxisType.Explicit,) * 2
    return jax.make_mesh(sizes, ("x", "y"), axis_types=types), draw.choice(
        [P(("x", "y")), P("y"), P("x")]
    )


class _Keyed:
    """A model at some place, with what its keys give."""

    def __init__(self, draw: random.Random, x: np.ndarray, c: np.ndarray) -> None:
        module = _draw_model(draw)
        place, spec = _draw_place(draw)
        self._mesh = None if spec is None else place
        where = place if spec is None else jax.NamedSharding(place, spec)
        model = from_torch(module, out_specs=spec)
        if self._mesh is not None:
            model = jax.tree.map(
                lambda a: (
                    jax.device_put(a, jax.NamedSharding(place, P())) if eqx.is_array(a) else a
                ),
                model,
            )
        else:
            model = jax.tree.map(
                lambda a: jax.device_put(a, place) if eqx.is_array(a) else a, model
            )

        def loss(x: Any, model: Any, key: Any, c: Any) -> Any:
            y = model(x, key=key)
            return (y * c).sum(), y

        gradient = jax.grad(jax.checkpoint(loss) if draw.random() < 0.3 else loss, has_aux=True)
        call = lambda model, x, key, c: gradient(x, model, key, c)  # noqa: E731
        self._call = eqx.filter_jit(call) if draw.random() < 0.7 else call
        self._model = model
        with self._in_mesh():
            self._x, self._c = (jax.device_put(a, where) for a in (x, c))
        self._keys = [jax.random.key(draw.randrange(1000)) for _ in range(2)]
        if self._mesh is None:
            self._keys = [jax.device_put(key, place) for key in self._keys]
        self._what = f"{module} at {place}, {spec}"
        self._expected = [self._run(key) for key in self._keys]
        for key, (g, y) in zip(self._keys, self._expected, strict=True):
            np.testing.assert_allclose((g * x).sum(), (y * c).sum(), 1e-4, 1e-3, err_msg=self._what)
            if spec is None:
                run = lambda: module(torch.from_numpy(x))  # noqa: E731
                assert_trees_equal(y, in_torch(run, key).detach(), rtol=1e-5, atol=1e-5)

    def check(self) -> None:
        for key, expected in zip(self._keys, self._expected, strict=True):
            for a, b in zip(self._run(key), expected, strict=True):
                assert np.array_equal(a, b), self._what

    def _run(self, key: Any) -> Any:
        with self._in_mesh():
            return jax.tree.map(np.asarray, self._call(self._model, self._x, key, self._c))

    def _in_mesh(self) -> Any:
        return contextlib.nullcontext() if self._mesh is None else jax.set_mesh(self._mesh)


def _unkeyed(draw: random.Random) -> Callable[[], None]:
    """Calls without a key, which draw from torch's own generator."""
    use_reentrant = draw.random() < 0.5

    def f(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(torch.nn.functional.dropout, x, use_reentrant=use_reentrant)

    wrapped = jax.jit(jax.value_and_grad(lambda x: torch2jax(f)(x).sum()))
    x = jax.device_put(jnp.ones(_SHAPE), draw.choice(jax.devices()))
    with warnings.catch_warnings():  # of numbers that no key decides, once
        warnings.simplefilter("ignore")
        jax.block_until_ready(wrapped(x))
    return lambda: jax.block_until_ready(wrapped(x))


def _drawing(draw: random.Random) -> Callable[[], None]:
    """torch's own generator: drawn from, seeded, put back."""

    def fork() -> None:
        with torch.random.fork_rng():
            torch.rand(64)

    ways = [
        lambda: torch.randperm(100),
        lambda: torch.manual_seed(0),
        lambda: torch.set_rng_state(torch.get_rng_state()),
        fork,
    ]
    return draw.choice(ways)


def _tracing(draw: random.Random) -> Callable[[], None]:
    """Finds out the shapes of models and functions that draw."""
    module = _draw_model(draw)
    with_values = draw.random() < 0.5

    def trace() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            noisy = lambda x: torch.randn_like(x) * (x.sum().item() if with_values else 1)  # noqa: E731
            jax.eval_shape(torch2jax(noisy), jnp.ones(3))
            model = from_torch(module)
            eqx.filter_eval_shape(
                lambda x, key: model(x, key=key), jnp.ones(_SHAPE), jax.random.key(0)
            )

    return trace


BESIDE = (_unkeyed, _drawing, _tracing)


def check(seed: int, rounds: int) -> None:
    """What random models draw by their keys, alone and beside three other threads."""
    draw = random.Random(seed)
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    x, c = rng.normal(size=(2, *_SHAPE)).astype(np.float32)
    keyed = [_Keyed(draw, x, c) for _ in range(2)]
    with contextlib.ExitStack() as stack:
        for kind in BESIDE:
            stack.enter_context(beside(kind(draw)))
        stack.enter_context(beside(keyed[1].check))
        for _ in range(rounds):
            keyed[0].check()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_random_models_draw_by_their_keys(seed):
    check(seed, 2)


@pytest.mark.sweep
@pytest.mark.parametrize("part", range(5))
def test_many_random_models_draw_by_their_keys(part):
    for seed in range(1000 + 10 * part, 1010 + 10 * part):
        check(seed, 20)
    jax.clear_caches()
