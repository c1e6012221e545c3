"""The memory of training, against plain torch's, and whether long runs stay flat.

`python -m tests.benchmarks.memory` runs programs of their own. Two import torch alone, and this
library. Two train a network whose activations are many times its parameters, by torch and by us,
and say how high their resident memory rose, in all and above what they had before the first step;
both import both libraries, so that the peaks are about the training. Two more run 10 000 steps, and
10 000 forwards under `jax.vjp` whose pullback is dropped, and say how much the second half added.
"""

import argparse
import gc
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import psutil
from torch import nn

from eqx_torch import from_torch, t2j

from .arms import with_jit, with_torch
from .harness import OUT, report, Row
from .models import mlp, regression, Task


AIM = 1.1
MEBI = 2**20
ROOT = Path(__file__).parents[2]


def deep(rows: int, width: int = 256, layers: int = 10) -> Task:
    """Activations of `rows * width` floats, two a layer kept for the backward."""

    def build() -> nn.Module:
        pairs = ((nn.Linear(width, width), nn.SiLU()) for _ in range(layers))
        return nn.Sequential(*(layer for pair in pairs for layer in pair))

    return regression("deep MLP", build, (rows, width), (rows, width))


def peak(arm: str, rows: int, steps: int) -> dict[str, Any]:
    """Losses of a training, and the memory at its start and at most, in MiB."""
    task = deep(rows)
    step = with_torch(task, fused=True) if arm == "torch" else with_jit(task)
    start = psutil.Process().memory_info().rss
    losses = [float(step()) for _ in range(steps)]
    highest = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"losses": losses, "peak": highest / MEBI, "start": start / MEBI}


def growth(what: str, repeats: int) -> dict[str, Any]:
    """MiB that the second half of the repeats added."""
    once = training() if what == "steps" else dropped_pullbacks()
    halves = []
    for _ in range(2):
        for _ in range(repeats // 2):
            once()
        gc.collect()
        halves.append(psutil.Process().memory_info().rss / MEBI)
    return {"growth": halves[1] - halves[0], "end": halves[1]}


def training() -> Callable[[], Any]:
    step = with_jit(mlp(64, 32))
    return lambda: jax.block_until_ready(step())


def dropped_pullbacks() -> Callable[[], Any]:
    """A forward that keeps a graph of some 0.6 MiB for a backward that never comes."""
    module, x, _ = mlp(64, 512).start()
    model, x = jax.jit(from_torch(module).__call__), t2j(x)

    def forward() -> None:
        y, _ = jax.vjp(model, x)
        jax.block_until_ready(y)

    return forward


def imported(library: str) -> float:
    """MiB of a program that only imports the library."""
    program = f"import {library}, psutil; print(psutil.Process().memory_info().rss)"
    command = [sys.executable, "-c", program]
    return int(subprocess.run(command, capture_output=True, check=True).stdout) / MEBI


def child(*arguments: object, threads: int | None = None) -> dict[str, Any]:
    """What a program of its own found."""
    command = [sys.executable, "-m", "tests.benchmarks.memory", *map(str, arguments)]
    environment = dict(os.environ) | ({"OMP_NUM_THREADS": str(threads)} if threads else {})
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def run(rows: int, steps: int, repeats: int, out: Path = OUT) -> dict[str, Any]:
    """Measures, prints and writes."""
    ours, plain = (child("peak", arm, rows, steps) for arm in ("ours", "torch"))
    np.testing.assert_allclose(ours["losses"], plain["losses"], 1e-4)
    above = [found["peak"] - found["start"] for found in (ours, plain)]
    lines = [
        line("import", imported("eqx_torch"), imported("torch")),
        line("training, peak", ours["peak"], plain["peak"], AIM),
        line("training, peak above the start", *above, AIM),
    ]
    for what, name in {"steps": "steps", "pullbacks": "forwards, pullback dropped"}.items():
        found = child("growth", what, repeats, threads=1)["growth"]
        lines.append(line(f"growth in the last {repeats // 2} of {repeats} {name}", found))
    return report("memory", lines, out)


def line(what: str, ours: float, plain: float | str = "", aim: float | str = "") -> Row:
    """One line of the table."""
    times = ours / plain if isinstance(plain, float) else ""
    return {"memory": what, "torch, MiB": plain, "ours, MiB": ours, "ratio": times, "at most": aim}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("child", nargs="*", help="how this program runs itself")
    args = parser.parse_args(arguments)
    match args.child:
        case ["peak", arm, rows, steps]:
            print(json.dumps(peak(arm, int(rows), int(steps))))
        case ["growth", what, repeats]:
            print(json.dumps(growth(what, int(repeats))))
        case _:
            run(rows=32768, steps=3, repeats=10_000)


if __name__ == "__main__":
    main()
