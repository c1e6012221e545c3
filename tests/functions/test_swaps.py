"""Functions that put their tensors in the place of a module's parameters while they run."""

import functools
import threading
import time

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
import torch
from jax.sharding import PartitionSpec as P
from torch.func import functional_call

from eqx_torch import from_torch, torch2jax
from eqx_torch._swaps import seems_to_swap, Swaps

from ..helpers import assert_trees_equal
from ..helpers.meshes import explicit_mesh


class Slow(torch.nn.Module):
    """Reads its parameter so late that another call may have replaced it."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, x):
        time.sleep(0.02)
        return x * self.weight


def calling(module):
    return lambda weight, x: functional_call(module, {"weight": weight}, x)


X = jnp.arange(1.0, 9.0)


class Buffered(Slow):
    def __init__(self):
        super().__init__()
        del self.weight
        self.register_buffer("weight", torch.zeros(1))


def where_positive(module):
    return lambda weight, x: calling(module)(weight, x) if x.sum() > 0 else x


SLOW = Slow()
# A run on zeros shows none of these swaps, but the functions name what makes them.
UNSEEN = {
    "buffers": calling(Buffered()),
    "parameters": lambda weight, x: calling(SLOW)(torch.nn.Parameter(weight), x),
    "branch": where_positive(Slow()),
}


@pytest.mark.filterwarnings("ignore:the output shapes of")
@pytest.mark.parametrize("function", UNSEEN.values(), ids=UNSEEN)
def test_swaps_that_a_run_on_zeros_does_not_show(function):
    with jax.set_mesh(explicit_mesh(8)):
        weight, x = jax.device_put((10 * X, X), P("x"))
        f = jax.jit(torch2jax(function, out_specs=P("x")))
        for _ in range(3):
            assert_trees_equal(f(weight, x), 10 * X**2)


OPTIONS = {
    "inferred": {},
    "declared": {"output_shapes": lambda weight, x: x},
    "locked": {"lock": True},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_devices_take_turns(options):
    with jax.set_mesh(explicit_mesh(8)):
        weight, x = jax.device_put((10 * X, X), P("x"))
        f = jax.jit(torch2jax(calling(Slow()), out_specs=P("x"), **options))
        for _ in range(3):
            assert_trees_equal(f(weight, x), 10 * X**2)
        gradients = jax.jit(jax.grad(lambda w, x: f(w, x).sum(), (0, 1)))
        assert_trees_equal(gradients(weight, x), (X, 10 * X))


def test_shapes_are_found_out_between_calls():
    module = Slow()
    with jax.set_mesh(explicit_mesh(8)):
        weight, x = jax.device_put((10 * X, X), P("x"))
        f = jax.jit(torch2jax(calling(module), out_specs=P("x")))
        f(weight, x).block_until_ready()
        for scale in range(5):
            y = f(weight, x)
            other = torch2jax(lambda w, x, s=scale: s * calling(module)(w, x), out_specs=P("x"))
            assert jax.eval_shape(other, weight, x).shape == (8,)
            assert_trees_equal(y, 10 * X**2)
    assert type(module.weight) is torch.nn.Parameter
    assert_trees_equal(module.weight, jnp.zeros(1))


class Noted(torch.nn.Module):
    """Notes how many calls there are at once."""

    def __init__(self, counts):
        super().__init__()
        self.counts = counts

    def forward(self, x):
        self.counts.running += 1
        self.counts.most = max(self.counts.most, self.counts.running)
        time.sleep(0.05)
        self.counts.running -= 1
        return x * 2


class Counts:
    running, most = 0, 0

    def __deepcopy__(self, memo):
        return self


@pytest.mark.parametrize("wrap", [torch2jax, from_torch])
def test_others_run_at_once(wrap):
    counts = Counts()
    with jax.set_mesh(explicit_mesh(8)):
        x = jax.device_put(X, P("x"))
        f = eqx.filter_jit(wrap(Noted(counts), out_specs=P("x")))
        assert_trees_equal(f(x), X * 2)
    assert counts.most > 1


def test_a_run_on_zeros_does_not_wait_where_no_module_is_shared():
    """For a call that waits, as it would for ever, for what that run has yet to compute."""
    lock = threading.Lock()

    def waits(weight, x):
        with lock:
            return calling(module)(weight, x)

    module = Slow()
    with jax.set_mesh(explicit_mesh(8)):
        weight, x = jax.device_put((10 * X, X), P("x"))
        f = jax.jit(torch2jax(waits, output_shapes=lambda weight, x: x, out_specs=P("x")))
        with lock:
            y = f(weight, x)
            shape = jax.eval_shape(torch2jax(lambda x: x * 2, out_specs=P("x")), x).shape
        assert_trees_equal(y, 10 * X**2)
    assert shape == (8,)


NETWORK = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2), torch.nn.LSTM(2, 2))
NORMED = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(2, 2))


def with_tensors(module, x):
    tensors = {name: p.detach() for name, p in module.named_parameters()}
    return functional_call(module, tensors, x)


@pytest.mark.parametrize(
    ("run", "swaps"),
    [
        (lambda x: NETWORK(x), False),
        (lambda x: NORMED(x), False),
        (lambda x: x.sin(), False),
        (lambda x: with_tensors(NETWORK, x), True),
        (lambda x: with_tensors(NORMED, x), True),
        (lambda x: with_tensors(NETWORK[2], x), True),
        (lambda x: torch.vmap(lambda x: with_tensors(NORMED, x))(x), True),
    ],
)
def test_what_is_a_swap(run, swaps):
    with Swaps() as seen:
        run(torch.ones(3, 2))
    assert seen.any == swaps


def _helper(weight, x):
    return torch.func.functional_call(NORMED, {"bias": weight}, x)


class Holder:
    def outer(self, weight, x):
        return self._inner(weight, x)

    def __call__(self, weight, x):
        return self._inner(weight, x)

    def _inner(self, weight, x):
        return functional_call(NORMED, {"bias": weight}, x)


HOLDER = Holder()
SEEMING = {
    "closure": calling(NORMED),
    "by its module": _helper,
    "by a global": lambda weight, x: _helper(weight, x),
    "partial": functools.partial(_helper, x=None),
    "method of its object": HOLDER.outer,
    "object": HOLDER,
    "method by an attribute": lambda weight, x: HOLDER.outer(weight, x),
    "method of a class": lambda weight, x: Holder().outer(weight, x),
    "inside": lambda weight, x: torch.vmap(lambda x: functional_call(NORMED, weight, x))(x),
    "torch's own": functional_call,
}
OTHERS = {"module": NORMED, "function": lambda x: NETWORK(x), "torch": torch.func.vmap}


@pytest.mark.parametrize("function", SEEMING.values(), ids=SEEMING)
def test_what_seems_to_swap(function):
    assert seems_to_swap(function)


@pytest.mark.parametrize("function", OTHERS.values(), ids=OTHERS)
def test_what_does_not(function):
    assert not seems_to_swap(function)
