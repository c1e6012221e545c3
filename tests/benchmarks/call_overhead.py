"""What a torch call costs inside a jitted JAX function.

`python -m tests.benchmarks.call_overhead` times, in turns and in one process, `jit(jnp.add)` and
`jit(torch2jax(torch.add))` on 8x8 arrays, and functions of 1 to 16 arrays, which give the cost of
each further array. It prints one table and writes `tests/benchmarks/out/call_overhead.json`.
"""

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from eqx_torch import torch2jax


OUT = Path(__file__).parent / "out" / "call_overhead.json"
COUNTS = (1, 2, 4, 8, 16)


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


def measure(rounds: int, calls: int) -> dict[str, list[float]]:
    """Microseconds of each call; the cases take turns, `calls` at a time."""
    named = cases()
    for function, arrays in named.values():
        for _ in range(3):  # compiles; the first runs look for writes
            jax.block_until_ready(function(*arrays))
    times: dict[str, list[float]] = {name: [] for name in named}
    for _ in range(rounds):
        for name, (function, arrays) in named.items():
            times[name].extend(one_call(function, arrays) for _ in range(calls))
    return times


def one_call(function: Callable[..., Any], arrays: list[jax.Array]) -> float:
    """Microseconds until the result is there.

    Calls are timed one by one, so that on a busy machine only those are slow that are interrupted.
    """
    start = time.perf_counter_ns()
    function(*arrays).block_until_ready()
    return (time.perf_counter_ns() - start) / 1000


def summary(times: dict[str, list[float]]) -> dict[str, Any]:
    """Medians and bests, what torch.add costs beyond jnp.add, and the slopes over the arrays."""
    statistic = {"median": statistics.median, "best": min}
    figures = {
        kind: {name: of(values) for name, values in times.items()} for kind, of in statistic.items()
    }
    return {
        "microseconds": figures,
        "torch.add beyond jnp.add": {
            kind: values["torch.add"] - values["jnp.add"] for kind, values in figures.items()
        },
        "each further array": {
            kind: {library: slope(values, library) for library in ("jax", "torch")}
            for kind, values in figures.items()
        },
    }


def slope(values: dict[str, float], library: str) -> float:
    """The least-squares slope of the times over the number of arrays."""
    times = [values[f"{library}, {count} arrays"] for count in COUNTS]
    return float(np.polyfit(COUNTS, times, 1)[0])


def print_table(result: dict[str, Any]) -> None:
    """One line for each figure."""
    median, best = (result["microseconds"][kind] for kind in ("median", "best"))
    rows = [(name, median[name], best[name]) for name in median]
    beyond, further = result["torch.add beyond jnp.add"], result["each further array"]
    rows.append(("torch.add beyond jnp.add", beyond["median"], beyond["best"]))
    for library in ("jax", "torch"):
        name = f"{library}, each further array"
        rows.append((name, further["median"][library], further["best"][library]))
    print(f"{'microseconds a call':<30}{'median':>10}{'best':>10}")
    for name, *figures in rows:
        print(f"{name:<30}" + "".join(f"{figure:>10.2f}" for figure in figures))


def main(rounds: int = 60, calls: int = 200, out: Path = OUT) -> dict[str, Any]:
    """Measures, prints and writes."""
    torch.set_num_threads(1)
    result = summary(measure(rounds, calls))
    print_table(result)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=2) + "\n")
    return result


if __name__ == "__main__":
    main()
