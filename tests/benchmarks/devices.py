"""One batch on one CPU device and split over two, with one torch thread each.

`python -m tests.benchmarks.devices` takes a mesh of one and a mesh of two simulated devices in the
same process, and compares how long the same global batch takes: the forward, and the gradient of
replicated parameters, which ends in a sum over the devices. What plain torch gains where two
threads of Python take one half each stands beside it, to tell what the machine can give.
"""

import os


# JAX reads this when it is first imported.
if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np
import torch
from jax.sharding import PartitionSpec as P
from torch import nn

from eqx_torch import from_torch, t2j

from .harness import Burst, in_turns, OUT, pair, ratio, report, Row
from .models import encoder_layer


AIM = 1.8
Call = Callable[[], Any]


@dataclasses.dataclass(frozen=True)
class Case:
    """A network and the shape of its input, batch first."""

    name: str
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]

    def start(self) -> tuple[nn.Module, torch.Tensor]:
        torch.manual_seed(0)
        return self.build(), torch.randn(self.shape)


def cases() -> list[Case]:
    return [
        Case("MLP 1024, batch 512", lambda: mlp(1024), (512, 1024)),
        Case("transformer layer 256, batch 32", lambda: encoder_layer(256), (32, 64, 256)),
    ]


def mlp(width: int) -> nn.Module:
    return nn.Sequential(
        *(layer for _ in range(3) for layer in (nn.Linear(width, width), nn.SiLU()))
    )


def on_devices(case: Case, count: int, *, gradient: bool) -> Call:
    """The outputs, or the gradients of the parameters, with the batch split over that many."""
    module, x = case.start()
    mesh = jax.make_mesh((count,), ("batch",), devices=jax.devices()[:count])
    with jax.set_mesh(mesh):
        model = jax.tree.map(
            lambda a: jax.device_put(a, P()) if eqx.is_array(a) else a,
            from_torch(module, out_specs=P("batch")),
        )
        batch = jax.device_put(t2j(x), P("batch"))
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def forward(params, x):
        return eqx.combine(params, static)(x)

    def loss(params, x):
        return (forward(params, x) ** 2).mean()

    f = jax.jit(jax.grad(loss) if gradient else forward)

    def call():
        with jax.set_mesh(mesh):
            return f(params, batch)

    return call


def in_threads(case: Case, count: int, *, gradient: bool) -> Call:
    """The same by plain torch, in that many threads of Python."""
    module, x = case.start()
    params = [p for _, p in sorted(module.named_parameters())]  # as JAX orders a dict
    pool = ThreadPoolExecutor(count)

    def shard(x):
        with torch.set_grad_enabled(gradient):
            y = module(x)
            return torch.autograd.grad((y**2).mean() / count, params) if gradient else y

    def call():
        shards = list(pool.map(shard, x.chunk(count)))
        return (
            [sum(grads) for grads in zip(*shards, strict=True)] if gradient else torch.cat(shards)
        )

    return call


def burst_of(call: Call) -> Callable[[int], Any]:
    """Calls that are each waited for."""

    def run(calls: int) -> None:
        for _ in range(calls):
            jax.block_until_ready(call())

    return run


def measure(case: Case, burst: Burst, *, gradient: bool) -> Row:
    """One line of the table."""
    calls = {
        f"{count} {what}": of(case, count, gradient=gradient)
        for what, of in (("devices", on_devices), ("threads", in_threads))
        for count in (1, 2)
    }
    check(case.name, list(calls.values()))
    times = in_turns({name: burst_of(call) for name, call in calls.items()}, burst)
    return {
        "call": f"{case.name}, {'gradient' if gradient else 'forward'}",
        "1 device, ms": pair(times["1 devices"], 1000),
        "2 devices, ms": pair(times["2 devices"], 1000),
        "1 / 2 devices": ratio(times["1 devices"], times["2 devices"]),
        "at least": AIM,
        "1 / 2 threads of plain torch": ratio(times["1 threads"], times["2 threads"]),
    }


def check(case: str, calls: Sequence[Call]) -> None:
    """All give the same arrays."""
    *results, expected = [[np.asarray(a) for a in jax.tree.leaves(call())] for call in calls]
    for result in results:
        for a, b in zip(result, expected, strict=True):
            np.testing.assert_allclose(a, b, 1e-4, 1e-5 * max(1, np.abs(b).max()), err_msg=case)


def run(chosen: Sequence[Case], burst: Burst, out: Path) -> dict[str, Any]:
    """Measures, prints and writes."""
    torch.set_num_threads(1)
    rows = [measure(case, burst, gradient=g) for case in chosen for g in (False, True)]
    return report("devices", rows, out)


def main(arguments: Sequence[str] | None = None, out: Path = OUT) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=8.0, help="for each line")
    run(cases(), Burst(milliseconds=100, seconds=parser.parse_args(arguments).seconds), out)


if __name__ == "__main__":
    main()
