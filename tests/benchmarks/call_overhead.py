"""What a torch call costs inside a jitted JAX function.

`python -m tests.benchmarks.call_overhead` times `jit(jnp.add)` and `jit(torch2jax(torch.add))` on
8x8 arrays, and functions of 1 to 16 arrays, which give the cost of each further array. Each call is
waited for, with one torch thread.
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from eqx_torch import torch2jax

from .harness import Burst, in_turns, OUT, Pair, pair, report, Row, Times


COUNTS = (1, 2, 4, 8, 16)
# Microseconds beyond jnp.add, and for each further array.
BEYOND_AIM, FURTHER_AIM = 7.0, 1.2


def cases() -> dict[str, tuple[Callable[..., Any], list[jax.Array]]]:
    """What is timed: jitted functions and their arguments, by name."""
    arrays = [jnp.full((8, 8), float(i)) for i in range(max(COUNTS))]
    named: dict[str, tuple[Callable[..., Any], list[jax.Array]]] = {
        "jnp.add": (jax.jit(jnp.add), arrays[:2]),
        "torch.add": (jax.jit(torch2jax(torch.add)), arrays[:2]),
    }
    for count in COUNTS:
        named[f"jax, {count} arrays"] = (jax.jit(lambda *xs: xs[0] + 1), arrays[:count])
        named[f"torch, {count} arrays"] = (jax.jit(torch2jax(first_plus_one)), arrays[:count])
    return named


def first_plus_one(*xs: torch.Tensor) -> torch.Tensor:
    """The same work for any number of arguments."""
    return xs[0] + 1


def burst_of(function: Callable[..., Any], arrays: Sequence[jax.Array]) -> Callable[[int], Any]:
    """Calls that are each waited for."""

    def run(calls: int) -> None:
        for _ in range(calls):
            function(*arrays).block_until_ready()

    return run


def rows_of(times: Times) -> list[Row]:
    """The times of all cases, what torch.add costs beyond jnp.add, and the slopes."""
    figures = {name: pair(values, 1e6) for name, values in times.items()}
    rows = [row(name, figure) for name, figure in figures.items()]
    beyond = {
        kind: figures["torch.add"][kind] - figures["jnp.add"][kind] for kind in ("median", "best")
    }
    rows.append(row("torch.add beyond jnp.add", beyond, BEYOND_AIM))
    rows.append(row("jax, each further array", slopes(figures, "jax")))
    rows.append(row("torch, each further array", slopes(figures, "torch"), FURTHER_AIM))
    return rows


def row(name: str, figure: Pair, aim: float | str = "") -> Row:
    return {"call": name, "us": figure, "at most": aim}


def slopes(figures: dict[str, Pair], library: str) -> Pair:
    """The least-squares slopes of the times over the number of arrays."""
    kinds = ("median", "best")
    times = {kind: [figures[f"{library}, {n} arrays"][kind] for n in COUNTS] for kind in kinds}
    return {kind: float(np.polyfit(COUNTS, times[kind], 1)[0]) for kind in kinds}


def run(burst: Burst, out: Path = OUT) -> dict[str, Any]:
    """Measures, prints and writes."""
    torch.set_num_threads(1)
    times = in_turns({name: burst_of(*case) for name, case in cases().items()}, burst)
    return report("call_overhead", rows_of(times), out)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0)
    seconds = parser.parse_args(arguments).seconds
    run(Burst(milliseconds=2, seconds=seconds, pause=0))


if __name__ == "__main__":
    main()
