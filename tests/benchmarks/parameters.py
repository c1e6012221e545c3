"""What calls cost by the number of parameters, and steps whose loss is waited for.

`python -m tests.benchmarks.parameters` takes chains of linear layers of width 32. It compares a
call outside of `jax.jit` with the same under `eqx.filter_jit`, and a loss with its gradient under
`jax.jit` with torch's, where JAX computes the loss and where torch does. Then it trains a small MLP
and waits for each loss, as loops do that print it. Times are of the processor, with one torch
thread.
"""

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np
import torch
from torch import nn

from eqx_torch import from_torch, t2j

from .arms import with_jit, with_loss_in_torch, with_torch
from .harness import Burst, in_turns, OUT, pair, ratio, report, Row
from .models import mlp, regression, Task


COUNTS = (1, 10, 100, 500)
EAGER_AIM, GRADIENT_AIM, WAITING_AIM = 1.5, 1.2, 1.25
WIDTH, BATCH = 32, 32

Call = Callable[[], Any]


def chain(layers: int) -> Task:
    """A chain of linear layers."""

    def build() -> nn.Module:
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))

    return regression(f"{2 * layers} arrays", build, (BATCH, WIDTH), (BATCH, WIDTH))


class WithLoss(nn.Module):
    """A network that returns its loss."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.network(x).square().mean()


def eager(task: Task) -> tuple[Call, Call]:
    """A call outside of `jax.jit`, and the same under `eqx.filter_jit`."""
    network, x, _ = task.start()
    model, x = from_torch(network), t2j(x)
    jitted = eqx.filter_jit(lambda model, x: model(x))
    return lambda: model(x), lambda: jitted(model, x)


def gradients(task: Task) -> tuple[Call, Call, Call]:
    """The loss and its gradient: loss in JAX, loss in torch, and all in torch."""
    network, x, _ = task.start()

    def ours(module: nn.Module, loss: Callable[[jax.Array], jax.Array]) -> Call:
        params, static = eqx.partition(from_torch(module), eqx.is_inexact_array)
        both = jax.jit(jax.value_and_grad(lambda p, x: loss(eqx.combine(p, static)(x))))
        inputs = t2j(x)
        return lambda: both(params, inputs)

    def torchs() -> Any:
        loss = network(x).square().mean()
        return loss.detach(), torch.autograd.grad(loss, list(network.parameters()))

    in_jax = ours(network, lambda y: (y**2).mean())
    return in_jax, ours(WithLoss(network), lambda y: y), torchs


def steps(task: Task) -> tuple[Call, Call, Call]:
    """Steps of training: loss in JAX, loss in torch, and all in torch."""
    makers = with_jit, with_loss_in_torch, lambda task: with_torch(task, fused=True)
    return tuple(make(task) for make in makers)  # pyright: ignore[reportReturnType]


def cases(counts: Sequence[int]) -> Iterator[tuple[str, float, Call, Call]]:
    """Name, aim, what is measured and what it is compared with."""
    for count in counts:
        task = chain(count)
        yield f"call outside of jit / filter_jit, {task.name}", EAGER_AIM, *eager(task)
        in_jax, in_torch, torchs = gradients(task)
        yield f"gradient / torch, {task.name}", GRADIENT_AIM, in_jax, torchs
        yield f"gradient, loss in torch / torch, {task.name}", GRADIENT_AIM, in_torch, torchs
    task = mlp(64, 32)
    in_jax, in_torch, torchs = steps(task)
    yield f"step, each waited for / torch, {task.name}", WAITING_AIM, in_jax, torchs
    in_jax, in_torch, torchs = steps(task)
    yield f"the same, loss in torch / torch, {task.name}", WAITING_AIM, in_torch, torchs


def measure(name: str, aim: float, over: Call, under: Call, burst: Burst) -> Row:
    """One line of the table."""
    for _ in range(3):
        found, expected = map(_first, (over(), under()))
        np.testing.assert_allclose(found, expected, 1e-3, 1e-5, err_msg=name)
    times = in_turns({"over": waiting(over), "under": waiting(under)}, burst, time.process_time)
    return {
        "call": name,
        "us": pair(times["over"], 1e6),
        "compared with, us": pair(times["under"], 1e6),
        "ratio": ratio(times["over"], times["under"]),
        "at most": aim,
    }


def _first(results: Any) -> Any:
    """The output, or the loss."""
    first = jax.tree.leaves(results)[0]
    return first.detach().numpy() if isinstance(first, torch.Tensor) else np.asarray(first)


def waiting(call: Call) -> Callable[[int], Any]:
    """Calls that are each waited for."""

    def run(calls: int) -> None:
        for _ in range(calls):
            jax.block_until_ready(call())

    return run


def run(counts: Sequence[int], burst: Burst, out: Path = OUT) -> dict[str, Any]:
    """Measures, prints and writes."""
    torch.set_num_threads(1)
    return report("parameters", [measure(*case, burst) for case in cases(counts)], out)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=4.0, help="for each line")
    run(COUNTS, Burst(seconds=parser.parse_args(arguments).seconds))


if __name__ == "__main__":
    main()
