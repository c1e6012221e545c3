"""What is done thousands of times in a process of its own, while its memory is watched.

`python -m tests.runtime.leak_workloads '{NAME: COUNT}'` does each named workload so many times and
prints a line of JSON: by how much the process has grown over the second half (the first warms up),
and how many of the modules that were dropped are still alive.

Every call has arrays of 64 KiB and every module a parameter of 256 KiB, so that one that is lost
each time is far more than an allocator's noise.
"""

import gc
import json
import sys
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import psutil
import torch
from jax.sharding import PartitionSpec as P

from eqx_torch import from_torch, torch2jax


Step = Callable[[int], Any]

torch.set_num_threads(1)
_X = jnp.linspace(-1.0, 1.0, 2**14)
_CLEARED_EVERY = 4


class Payload(torch.nn.Module):
    """A module of which every copy is known."""

    alive: ClassVar[weakref.WeakSet[torch.nn.Module]] = weakref.WeakSet()

    def __new__(cls, *args: Any, **kwargs: Any) -> "Payload":
        module = super().__new__(cls)
        cls.alive.add(module)
        return module

    def __init__(self) -> None:
        super().__init__()
        self.big = torch.nn.Parameter(torch.ones(2**16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.big.sum() * x.sin()


class FailsBackward(torch.autograd.Function):
    """Keeps its input, and raises when it is asked for it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> torch.Tensor:
        raise ValueError("this backward fails")


def _curved(x: torch.Tensor) -> torch.Tensor:
    return x.sin().exp()


def _summed(f: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    return lambda *args: f(*args).sum()


def _calls() -> Step:
    f = jax.jit(torch2jax(_curved))
    return lambda i: f(_X)


def _eager_calls() -> Step:
    f = torch2jax(_curved)
    return lambda i: f(_X)


def _gradients() -> Step:
    f = jax.jit(jax.grad(_summed(torch2jax(_curved))))
    return lambda i: f(_X)


def _eager_gradients() -> Step:
    f = jax.grad(_summed(torch2jax(_curved)))
    return lambda i: f(_X)


def _force_training() -> Step:
    def loss(f: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        return lambda w, x: (jax.grad(_summed(f), 1)(w, x) ** 2).sum()

    f = jax.jit(jax.grad(loss(torch2jax(lambda w, x: _curved(w * x)))))
    return lambda i: f(_X, _X)


def _energy_and_force_training() -> Step:
    energy = torch2jax(lambda w, x: _curved(w * x).sum())

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        value, gradient = jax.value_and_grad(energy, 1)(w, x)
        return value + (gradient**2).sum()

    f = jax.jit(jax.grad(loss))
    return lambda i: f(_X, _X)


def _dropped_pullbacks_of_gradients() -> Step:
    f = torch2jax(lambda x: _curved(x).sum())
    return lambda i: jax.vjp(jax.grad(f), _X)[0]


def _dropped_pullbacks_of_pullbacks() -> Step:
    f = torch2jax(_curved)
    return lambda i: jax.vjp(jax.grad(_summed(f)), _X)[0]


def _dropped_pullbacks() -> Step:
    f = torch2jax(_curved)
    return lambda i: jax.vjp(f, _X)[0]


def _dropped_pullbacks_of_jit() -> Step:
    f = jax.jit(lambda x: jax.vjp(torch2jax(_curved), x))
    return lambda i: f(_X)[0]


def _dropped_pullbacks_of_module() -> Step:
    model = from_torch(torch.nn.Sequential(torch.nn.Linear(128, 128), torch.nn.SiLU()))
    x = _X.reshape(128, 128)
    return lambda i: eqx.filter_vjp(lambda model: model(x), model)[0]


def _vmap() -> Step:
    f = jax.jit(jax.vmap(jax.grad(_summed(torch2jax(_curved)))))
    return lambda i: f(_X.reshape(4, -1))


def _devices() -> Step:
    mesh = jax.make_mesh((8,), ("x",))
    with jax.set_mesh(mesh):
        f = torch2jax(lambda w, x: _curved(w * x), out_specs=P("x"))
        g = jax.jit(jax.grad(_summed(f), (0, 1)))
        args = jax.device_put(_X[:1], P()), jax.device_put(_X, P("x"))

    def step(i: int) -> Any:
        # Independent programs with collectives, all under way at once, are too many for the threads
        # of XLA's CPU devices: they wait for each other, without torch too.
        with jax.set_mesh(mesh):
            return jax.block_until_ready(g(*args))

    return step


def _exceptions() -> Step:
    def fails(x: torch.Tensor) -> torch.Tensor:
        y = _curved(x)
        if y.sum() > 0:
            raise ValueError("this forward fails")
        return y

    return _failing(jax.jit(torch2jax(fails, output_shapes=lambda x: x)), "this forward fails")


def _exceptions_in_backward() -> Step:
    f = jax.jit(jax.grad(_summed(torch2jax(lambda x: FailsBackward.apply(x.sin())))))
    return _failing(f, "this backward fails")


def _failing(f: Callable[[jax.Array], Any], message: str) -> Step:
    def step(i: int) -> None:
        try:
            jax.block_until_ready(f(_X))
        except jax.errors.JaxRuntimeError as error:
            if message in str(error):
                return
            raise
        raise AssertionError("nothing was raised")

    return step


def _wrappings() -> Step:
    return lambda i: torch2jax(Payload())(_X)


def _jitted_wrappings() -> Step:
    return lambda i: jax.jit(jax.grad(_summed(torch2jax(Payload()))))(_X)


def _conversions() -> Step:
    return lambda i: from_torch(Payload())(_X)


def _jitted_conversions() -> Step:
    """`equinox.filter_jit` never lets go of the static parts of what it was called with.

    But all these models are equal, and so it sees only one.
    """
    gradient = eqx.filter_jit(eqx.filter_grad(lambda model: model(_X).sum()))
    return lambda i: gradient(from_torch(Payload())).params


def _compilations() -> Step:
    f = torch2jax(_curved)
    return lambda i: jax.jit(lambda x: f(x) * float(i))(_X)


def _scans() -> Step:
    """Outside of `jax.jit` JAX keeps what a scan has run until its caches are cleared."""

    def step(i: int) -> Any:
        f = torch2jax(Payload())
        y = jax.lax.scan(lambda c, _: (f(c), None), _X, None, length=2)[0]
        if i % _CLEARED_EVERY == 0:
            jax.clear_caches()
        return y

    return step


WORKLOADS: dict[str, Callable[[], Step]] = {
    "calls": _calls,
    "eager calls": _eager_calls,
    "gradients": _gradients,
    "eager gradients": _eager_gradients,
    "force training": _force_training,
    "energy and force training": _energy_and_force_training,
    "dropped pullbacks": _dropped_pullbacks,
    "dropped pullbacks of pullbacks": _dropped_pullbacks_of_pullbacks,
    "dropped pullbacks of gradients": _dropped_pullbacks_of_gradients,
    "dropped pullbacks of jit": _dropped_pullbacks_of_jit,
    "dropped pullbacks of a module": _dropped_pullbacks_of_module,
    "vmap": _vmap,
    "devices": _devices,
    "exceptions": _exceptions,
    "exceptions in backward": _exceptions_in_backward,
    "wrappings": _wrappings,
    "jitted wrappings": _jitted_wrappings,
    "conversions": _conversions,
    "jitted conversions": _jitted_conversions,
    "scans": _scans,
    "compilations": _compilations,
}
# Those whose every step drops a function or a program.
DROPPING = tuple(WORKLOADS)[list(WORKLOADS).index("wrappings") :]


def growth(step: Step, count: int) -> float:
    """By how many MiB the process grows over the second half of so many steps."""
    sizes = []
    for half in (range(count // 2), range(count // 2, count)):
        for i in half:
            result = step(i)
        jax.block_until_ready(result)
        del result
        gc.collect()
        sizes.append(psutil.Process().memory_info().rss / 2**20)
    return sizes[1] - sizes[0]


def main(counts: dict[str, int]) -> None:
    for name, count in counts.items():
        before = len(Payload.alive)
        grown = growth(WORKLOADS[name](), count)
        if name == "scans":
            jax.clear_caches()
        gc.collect()
        alive = len(Payload.alive) - before
        print(json.dumps({"name": name, "MiB": grown, "alive": alive}), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
