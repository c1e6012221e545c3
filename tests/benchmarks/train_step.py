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
# The aims for ours against torch; 1 where nothing else is said.
AIMS = {"MLP 64, batch 32": 1.25, "MLP 512, batch 128": 1.1}
COMPILED_AIM = 1.05
NEIGHBOUR_AIM = 1.7
COMPILED = ("MLP 512", "transformer layer 256")

Arm = Callable[[Task], Step]
Ratio = tuple[str, str, str]

# Column, arm in the numerator, arm in the denominator.
EAGER_RATIOS = (
    ("ours / fused", "ours", "torch, fused Adam"),
    ("ours / plain", "ours", "torch, plain Adam"),
    ("filter_jit / ours", "ours, filter_jit", "ours"),
    ("wrap_torch2jax / ours", "wrap_torch2jax", "ours"),
)
COMPILED_RATIOS = (("ours / torch.compile", "ours", "torch.compile"),)


def checked(task: Task, arms: Mapping[str, Arm]) -> dict[str, Step]:
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


def measure(task: Task, arms: Mapping[str, Arm], burst: Burst) -> Times:
    """Seconds a step, by arm."""
    steps = checked(task, arms)
    return in_turns({name: burst_of(step) for name, step in steps.items()}, burst)


def row(task: str, times: Times, ratios: Sequence[Ratio]) -> Row:
    """One line of the table. Arms that are not installed have no ratio."""
    under = ratios[0][2]
    cells: Row = {"network": task, f"{under}, ms": pair(times[under], 1000)}
    cells["ours, ms"] = pair(times["ours"], 1000)
    for column, over, under in ratios:
        if over in times:
            cells[column] = ratio(times[over], times[under])
            cells |= aim_of(task, column)
    return cells


def aim_of(task: str, column: str) -> Row:
    """What stands beside a ratio that has an aim."""
    match column:
        case "ours / fused":
            return {"at most": AIMS.get(task, 1.0)}
        case "ours / torch.compile":
            return {"at most": COMPILED_AIM}
        case "wrap_torch2jax / ours":
            return {"at least": NEIGHBOUR_AIM}
        case _:
            return {}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="networks with this in their name")
    parser.add_argument("--cores", type=int, help="1 measures on one core")
    parser.add_argument("--compiled", action="store_true", help="modules under torch.compile")
    parser.add_argument("--seconds", type=float, default=8.0, help="for each network")
    args = parser.parse_args(arguments)
    if args.cores:
        use_cores(args.cores)
    name = "train_step"
    if args.compiled:
        name += "_compiled"
    if args.cores:
        name += f"_cores_{args.cores}"
    chosen = [t for t in tasks() if args.only in t.name]
    if args.compiled:
        chosen = [t for t in chosen if t.name.startswith(COMPILED)]
    arms, ratios = (
        (compiled_arms(), COMPILED_RATIOS) if args.compiled else (eager_arms(), EAGER_RATIOS)
    )
    run(name, chosen, arms, ratios, Burst(seconds=args.seconds))


def run(
    name: str,
    chosen: Sequence[Task],
    arms: Mapping[str, Arm],
    ratios: Sequence[Ratio],
    burst: Burst,
    out: Path = OUT,
) -> dict[str, Any]:
    """Measures, prints and writes."""
    times = {task.name: measure(task, arms, burst) for task in chosen}
    rows = [row(task, of, ratios) for task, of in times.items()]
    milliseconds = {
        task: {arm: pair(values, 1000) for arm, values in of.items()} for task, of in times.items()
    }
    return report(name, rows, out, milliseconds=milliseconds)


if __name__ == "__main__":
    main()
