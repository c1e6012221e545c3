"""What the benchmarks share: timing in turns, one table, one JSON file.

Times on a machine that others use, or whose clock changes, compare only with times taken next to
them. So the things to compare take turns in one process, a burst of calls at a time, in an order
that rotates. What is reported is a ratio, as a pair: the median over the rounds of the ratio of
neighbours, and the ratio of the best bursts. A benchmark's result is a list of rows, of the same
columns each; a cell is a text, a number or such a pair.
"""

import dataclasses
import datetime as dt
import importlib.metadata
import json
import os
import platform
import re
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import torch


OUT = Path(__file__).parent / "out"
LIBRARIES = ("jax", "jaxlib", "torch", "equinox", "optax", "wrap_torch2jax")

LOAD = os.getloadavg()[0]  # before anything is measured

Pair = dict[str, float]
Row = dict[str, Any]
Times = dict[str, list[float]]


@dataclasses.dataclass(frozen=True)
class Burst:
    """How long one arm runs before the next has its turn, and for how long all of them do."""

    milliseconds: float = 20.0  # of one burst
    seconds: float = 8.0  # of all rounds
    rounds: int = 5  # at least
    pause: float = 0.01  # seconds in which the OpenMP threads of the last arm stop spinning


def in_turns(
    arms: Mapping[str, Callable[[int], Any]],
    burst: Burst,
    clock: Callable[[], float] | None = None,
) -> Times:
    """Seconds of one call of each arm by the clock, once a round.

    An arm takes how often to call, calls, and returns when the last result is there. Each has to be
    warm: what compiles has compiled.
    """
    clock = clock or time.perf_counter
    calls = {name: _calls_in(arm, burst.milliseconds / 1000) for name, arm in arms.items()}
    times: Times = {name: [] for name in arms}
    names = list(arms)
    end = time.perf_counter() + burst.seconds
    done = 0
    while done < burst.rounds or time.perf_counter() < end:
        for name in names:
            time.sleep(burst.pause)
            arms[name](1)
            times[name].append(_seconds(arms[name], calls[name], clock) / calls[name])
        names = names[1:] + names[:1]
        done += 1
    return times


def _calls_in(arm: Callable[[int], Any], seconds: float) -> int:
    arm(2)
    calls = 1
    while (taken := _seconds(arm, calls, time.perf_counter)) < seconds / 4:
        calls *= 2
    return max(1, round(calls * seconds / taken))


def _seconds(arm: Callable[[int], Any], calls: int, clock: Callable[[], float]) -> float:
    start = clock()
    arm(calls)
    return clock() - start


def pair(values: Sequence[float], scale: float = 1.0) -> Pair:
    """Median and best."""
    return {"median": scale * statistics.median(values), "best": scale * min(values)}


def ratio(over: Sequence[float], under: Sequence[float]) -> Pair:
    """The median ratio of neighbours, and the ratio of the bests."""
    neighbours = [a / b for a, b in zip(over, under, strict=True)]
    return {"median": statistics.median(neighbours), "best": min(over) / min(under)}


def table(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table whose columns are aligned."""
    columns = list(rows[0])
    cells = [columns, *([_text(row[column]) for column in columns] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    padded = [" | ".join(map(str.ljust, line, widths)) for line in cells]
    rule = "-|-".join("-" * width for width in widths)
    return "\n".join(f"| {line} |" for line in [padded[0], rule, *padded[1:]]).replace(
        f"| {rule} |", f"|-{rule}-|"
    )


def _text(cell: Any) -> str:
    if isinstance(cell, dict):
        return f"{_text(cell['median'])} ({_text(cell['best'])})"
    if isinstance(cell, float):
        return f"{cell:.0f}" if abs(cell) >= 100 else f"{cell:.2f}"
    return str(cell)


def environment() -> dict[str, Any]:
    """Versions, machine and thread settings."""
    return {
        "date": dt.date.today().isoformat(),
        "python": platform.python_version(),
        "libraries": {name: _version(name) for name in LIBRARIES},
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "load before": round(LOAD, 1),
        "torch threads": torch.get_num_threads(),
        "devices": [device.device_kind for device in jax.devices()],
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
    }


def _version(library: str) -> str | None:
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu() -> str:
    found = re.search(r"^model name\s*:\s*(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return found[1] if found else platform.machine()


def use_cores(count: int) -> None:
    """Starts this program again, on that many cores, unless it already runs on so few.

    Both libraries, and OpenMP below torch, count the cores when they are loaded.
    """
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) > count:
        os.sched_setaffinity(0, cores[:count])
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def report(name: str, rows: Sequence[Row], out: Path = OUT, **details: Any) -> dict[str, Any]:
    """Prints the table and writes `NAME.json`: the rows, the environment and any details."""
    result = {"benchmark": name, "environment": environment(), "rows": list(rows), **details}
    print(table(rows))
    if LOAD > 0.5:
        print(f"The machine was busy: its load was {LOAD:.1f} before this began.")
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    return result
