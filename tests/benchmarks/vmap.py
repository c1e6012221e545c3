"""`jax.vmap` of a wrapped function or module, against calling it on the batch.

`python -m tests.benchmarks.vmap` computes each network on 256 examples: by `jax.vmap` of a call
that takes one example and by the same wrapper called on the whole batch, both under jit, and in
plain torch by `torch.func.vmap` and on the whole batch; the forward alone, and the gradient of the
parameters. All give the same, which is checked first. torch has one thread.
"""

import argparse
import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np
import torch
from torch import nn

from eqx_torch import from_torch, t2j, torch2jax, tree_t2j

from .harness import Burst, in_turns, OUT, pair, ratio, report, Row


BATCH = 256
AIM = 1.15
Call = Callable[[], Any]


@dataclasses.dataclass(frozen=True)
class Case:
    """What is batched: a function of parameters and input, or the forward of a module."""

    name: str
    build: Callable[[], nn.Module]  # the parameters, and without `function` the forward
    shape: tuple[int, ...]  # of one example
    function: Callable[[dict[str, torch.Tensor], torch.Tensor], torch.Tensor] | None = None

    def in_jax(self, batch: int) -> tuple[Callable[..., jax.Array], Any, jax.Array]:
        """The call of parameters and input, the parameters and the input."""
        module, x = self._start(batch)
        if self.function is not None:
            return torch2jax(self.function), tree_t2j(dict(module.named_parameters())), t2j(x)
        params, static = eqx.partition(from_torch(module), eqx.is_inexact_array)
        return lambda params, x: eqx.combine(params, static)(x), params, t2j(x)

    def in_torch(self, batch: int) -> tuple[Callable[..., torch.Tensor], list[Any], torch.Tensor]:
        """The call of the input, the parameters in the order of JAX, and the input."""
        module, x = self._start(batch)
        params = dict(module.named_parameters())
        ordered = [params[name] for name in sorted(params)]
        if self.function is None:
            return module, ordered, x
        return functools.partial(self.function, params), ordered, x

    def _start(self, batch: int) -> tuple[nn.Module, torch.Tensor]:
        torch.manual_seed(0)
        return self.build(), torch.randn(batch, *self.shape)


def cases() -> list[Case]:
    return [
        Case("function, tanh of affine 64", lambda: nn.Linear(64, 64), (64,), layer),
        Case("module, MLP 256", lambda: mlp(256), (256,)),
        Case("module, 2 convolutions", convolutions, (3, 16, 16)),
        Case("module, transformer layer 64", transformer_layer, (16, 64)),
    ]


def layer(params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(nn.functional.linear(x, params["weight"], params["bias"]))


def mlp(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))


def convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1))


def transformer_layer() -> nn.Module:
    return nn.TransformerEncoderLayer(64, 2, 256, dropout=0.0, batch_first=True)


def forwards(case: Case, batch: int) -> dict[str, Call]:
    """The outputs for the batch, in each way."""
    call, params, x = case.in_jax(batch)
    mapped, batched = jax.jit(jax.vmap(call, (None, 0))), jax.jit(call)
    call_torch, _, x_torch = case.in_torch(batch)
    mapped_torch = torch.func.vmap(call_torch)

    def without_graph(call: Callable[..., torch.Tensor]) -> torch.Tensor:
        with torch.no_grad():
            return call(x_torch)

    return {
        "jax.vmap": lambda: mapped(params, x),
        "batched": lambda: batched(params, x),
        "torch.vmap": lambda: without_graph(mapped_torch),
        "torch": lambda: without_graph(call_torch),
    }


def gradients(case: Case, batch: int) -> dict[str, Call]:
    """The gradients of the parameters, of the mean square of the outputs, in each way."""
    call, params, x = case.in_jax(batch)

    def gradient_of(call):
        return jax.jit(jax.grad(lambda params, x: (call(params, x) ** 2).mean()))

    mapped, batched = gradient_of(jax.vmap(call, (None, 0))), gradient_of(call)
    call_torch, of, x_torch = case.in_torch(batch)
    mapped_torch = torch.func.vmap(call_torch)
    return {
        "jax.vmap": lambda: mapped(params, x),
        "batched": lambda: batched(params, x),
        "torch.vmap": lambda: torch.autograd.grad((mapped_torch(x_torch) ** 2).mean(), of),
        "torch": lambda: torch.autograd.grad((call_torch(x_torch) ** 2).mean(), of),
    }


def check(case: str, calls: dict[str, Call]) -> None:
    """All ways give the same arrays."""
    results = {
        name: [np.asarray(a) for a in jax.tree.leaves(call())] for name, call in calls.items()
    }
    for name in calls:
        for actual, expected in zip(results[name], results["torch"], strict=True):
            atol = 1e-5 * max(1, np.abs(expected).max())
            np.testing.assert_allclose(actual, expected, 1e-4, atol, err_msg=f"{case}, {name}")


def burst_of(call: Call) -> Callable[[int], Any]:
    """Calls that are each waited for."""

    def run(calls: int) -> None:
        for _ in range(calls):
            jax.block_until_ready(call())

    return run


def measure(case: str, calls: dict[str, Call], burst: Burst) -> Row:
    """One line of the table."""
    check(case, calls)
    times = in_turns({name: burst_of(call) for name, call in calls.items()}, burst)
    return {
        "call": case,
        "torch, ms": pair(times["torch"], 1000),
        "jax.vmap, ms": pair(times["jax.vmap"], 1000),
        "jax.vmap / batched": ratio(times["jax.vmap"], times["batched"]),
        "at most": AIM,
        "jax.vmap / torch": ratio(times["jax.vmap"], times["torch"]),
        "torch.vmap / torch": ratio(times["torch.vmap"], times["torch"]),
    }


def run(chosen: Sequence[Case], burst: Burst, out: Path, batch: int = BATCH) -> dict[str, Any]:
    """Measures, prints and writes."""
    torch.set_num_threads(1)
    rows = []
    for case in chosen:
        rows.append(measure(f"{case.name}, forward", forwards(case, batch), burst))
        rows.append(measure(f"{case.name}, gradient", gradients(case, batch), burst))
    return report("vmap", rows, out, batch=batch)


def main(arguments: Sequence[str] | None = None, out: Path = OUT) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="calls with this in their name")
    parser.add_argument("--seconds", type=float, default=4.0, help="for each line")
    args = parser.parse_args(arguments)
    run([c for c in cases() if args.only in c.name], Burst(seconds=args.seconds), out)


if __name__ == "__main__":
    main()
