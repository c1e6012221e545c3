"""A training step around a torch module, against plain torch and `wrap_torch2jax`.

`python -m tests.benchmarks.train_step` trains each network of `models.tasks` in each of the ways
of `arms.py`. All compute the same losses from the same weights, which is checked first. Then they
take turns, a burst of steps each, as a training loop runs: the last loss of a burst is waited for.
Ours is the step under `jax.jit`; what `eqx.filter_jit` adds to it stands in a column of its own.

`--cores 1` restricts the process to one core, for torch and XLA alike, and `--compiled` compares
where the module is under `torch.compile`; each writes its own file.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from .arms import compiled_arms, eager_arms, Step
from .harness import Burst, in_turns, OUT, pair, ratio, report, Row, Times, use_cores
from .models import Task, tasks


CHECKED_STEPS = 4
# The arms sum in different orders, and Adam's first updates are the signs of gradients, of those
# that are all but zero too.
TOLERANCE = 1e-3
COMPILED = ("MLP 512", "transformer layer 256")

# Column, arm in the numerator, arm in the denominator.
EAGER_RATIOS = (
    ("ours / fused", "ours", "torch, fused Adam"),
    ("ours / plain", "ours", "torch, plain Adam"),
    ("filter_jit / ours", "ours, filter_jit", "ours"),
    ("wrap_torch2jax / ours", "wrap_torch2jax", "ours"),
)
COMPILED_RATIOS = (("ours / torch.compile", "ours", "torch.compile"),)


def checked(task: Task, arms: Mapping[str, Callable[[Task], Step]]) -> dict[str, Step]:
    """The steps of the task, all of which have computed the same first losses."""
    steps = {name: arm(task) for name, arm in arms.items()}
    losses = {name: [float(step()) for _ in range(CHECKED_STEPS)] for name, step in steps.items()}
    expected, *_ = losses.values()
    for name, values in losses.items():
        np.testing.assert_allclose(values, expected, TOLERANCE, err_msg=f"{task.name}, {name}")
    return steps


def burst_of(step: Step) -> Callable[[int], Any]:
    """Many steps, of which the last is waited for."""

    def run(calls: int) -> None:
        for _ in range(calls):
            loss = step()
        jax.block_until_ready(loss)

    return run


def measure(task: Task, arms: Mapping[str, Callable[[Task], Step]], burst: Burst) -> Times:
    """Seconds a step, by arm."""
    steps = checked(task, arms)
    return in_turns({name: burst_of(step) for name, step in steps.items()}, burst)


def row(task: Task, times: Times, ratios: Sequence[tuple[str, str, str]]) -> Row:
    """One line of the table. Arms that are not installed have no ratio."""
    under = ratios[0][2]
    cells: Row = {"network": task.name, f"{under}, ms": pair(times[under], 1000)}
    cells["ours, ms"] = pair(times["ours"], 1000)
    for column, over, under in ratios:
        if over in times:
            cells[column] = ratio(times[over], times[under])
    return cells


def main(arguments: Sequence[str] | None = None, out: Path = OUT) -> dict[str, Any]:
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="networks with this in their name")
    parser.add_argument("--cores", type=int, help="1 measures on one core")
    parser.add_argument("--compiled", action="store_true", help="modules under torch.compile")
    parser.add_argument("--seconds", type=float, default=8.0, help="for each network")
    args = parser.parse_args(arguments)
    if args.cores:
        use_cores(args.cores)
    name = "train_step" + ("_compiled" if args.compiled else "")
    name += f"_{args.cores}_core" if args.cores else ""
    chosen = [t for t in tasks() if args.only in t.name]
    if args.compiled:
        chosen = [t for t in chosen if t.name.startswith(COMPILED)]
    return run(chosen, name, Burst(seconds=args.seconds), args.compiled, out)


def run(
    chosen: Sequence[Task], name: str, burst: Burst, compiled: bool, out: Path
) -> dict[str, Any]:
    """Measures these tasks."""
    arms = compiled_arms() if compiled else eager_arms()
    ratios = COMPILED_RATIOS if compiled else EAGER_RATIOS
    times = {task.name: measure(task, arms, burst) for task in chosen}
    rows = [row(task, times[task.name], ratios) for task in chosen]
    milliseconds = {
        task: {arm: pair(values, 1000) for arm, values in of.items()} for task, of in times.items()
    }
    return report(name, rows, out, milliseconds=milliseconds)


if __name__ == "__main__":
    main()
