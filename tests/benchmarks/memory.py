"""The memory of training, against plain torch's, and whether long runs stay flat.

`python -m tests.benchmarks.memory` runs programs of their own. Two train a network whose activations
are many times its parameters, by torch and by us, and say how high their resident memory rose, in
all and above what they had before the first step. Two more run 10 000 steps, and 10 000 forwards
under `jax.vjp` whose pullback is dropped, and say how much the second half of them added.
"""

import argparse
import gc
import json
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
    """A forward that keeps a graph of 1 MiB for a backward that never comes."""
    module, x, _ = mlp(64, 512).start()
    model, x = from_torch(module), t2j(x)

    def forward() -> None:
        y, _ = jax.vjp(lambda x: model(x), x)
        jax.block_until_ready(y)

    return forward


def child(*arguments: object) -> dict[str, Any]:
    """What a program of its own found."""
    command = [sys.executable, "-m", __spec__.name, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def run(rows: int, steps: int, repeats: int, out: Path = OUT) -> dict[str, Any]:
    """Measures, prints and writes."""
    ours, plain = (child("peak", arm, rows, steps) for arm in ("ours", "torch"))
    np.testing.assert_allclose(ours["losses"], plain["losses"], 1e-4)
    lines: list[Row] = []
    for name, of in {
        "training, peak": lambda found: found["peak"],
        "training, peak above the start": lambda found: found["peak"] - found["start"],
    }.items():
        a, b = of(ours), of(plain)
        lines.append(line(name, ours=a, torch=b, ratio=a / b, aim=AIM))
    for what, name in {"steps": "steps", "pullbacks": "forwards, pullback dropped"}.items():
        found = child("growth", what, repeats)["growth"]
        lines.append(line(f"growth over the last {repeats // 2} of {repeats} {name}", ours=found))
    return report("memory", lines, out)


def line(what: str, *, ours: float, torch: Any = "", ratio: Any = "", aim: Any = "") -> Row:
    return {"memory": what, "torch, MiB": torch, "ours, MiB": ours, "ratio": ratio, "aim": aim}


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
            run(rows=65536, steps=3, repeats=10_000)


if __name__ == "__main__":
    main()
