"""`timeline()`: the calls of torch that happen in a block of code, as text, picture and trace file.

`ACTIVE` holds the timelines that are on, and is empty nearly always: its truth is all that a call
asks for then. It is asked when a program runs, not when it is compiled, so programs compiled before
a timeline was on are seen too.

Times are seconds on the clock of `time.perf_counter`. A call occupies its device from its start to
its end. Calls on one device may overlap too, since XLA runs what is independent side by side; then
the device is simply occupied. On a machine with fewer cores than devices the calls of all devices
go on at once but each has a core for a part of the time only, so overlap alone does not say that
anything is gained: the time that the calls spent on a core does.

Picture and file have a lane for each device, with a second row where calls of the device overlap. A
trace in Chrome's format, which Perfetto reads, calls the device a process and the row a thread of
it: events of one thread have to be nested, which calls are not that XLA makes side by side.
Matplotlib is imported when something is drawn; the package does not depend on it.
"""

import collections
import contextlib
import dataclasses
import importlib
import itertools
import json
import os
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ._errors import EqxTorchError
from ._program import Kind, Program


# DLPack's numbers. The second half of `__dlpack_device__` is XLA's number of the device, for the
# CPU devices of one process too.
_PLATFORMS = {1: "cpu", 2: "cuda", 10: "rocm"}


@dataclasses.dataclass(frozen=True)
class TorchCall:
    """One call of torch on one device, as XLA made it.

    **Attributes:**

    - `function`: the name of the torch function or module.
    - `kind`: "forward"; "backward" if it computed cotangents; "tangent" if it computed tangents.
        Of a derivative of higher order, what was taken last counts.
    - `program`: all that was computed, for instance `vmap(vjp(f))`; a forward that keeps its graph
        for the backward is a `record(f)`.
    - `device`: such as `cpu:0` or `cuda:0`.
    - `thread`: the operating system's number of the thread that XLA made the call from.
    - `start`: when it began, in seconds on the clock of `time.perf_counter`.
    - `end`: when it returned.
    - `core_time`: for how many seconds, at most `end - start`, the thread was running on a core.
    """

    function: str
    kind: Kind
    program: str
    device: str
    thread: int
    start: float
    end: float
    core_time: float

    @property
    def duration(self) -> float:
        """Seconds from start to end."""
        return self.end - self.start


@dataclasses.dataclass(frozen=True)
class Overlap:
    """How much of the time several devices ran torch calls at once.

    **Attributes:**

    - `busy`: the seconds in which at least one device was in a call.
    - `overlapped`: the seconds in which at least two devices were.
    - `mean_devices`: how many devices were in a call, on average over `busy`.
    - `mean_cores`: how many cores their threads ran on, on average over `busy`. Threads that torch
        starts itself (`torch.set_num_threads`) are not counted. Well below `mean_devices`, it
        says that calls wait for a core, for a lock or for the Python interpreter.
    """

    busy: float
    overlapped: float
    mean_devices: float
    mean_cores: float

    @property
    def fraction(self) -> float:
        """`overlapped / busy`, zero if nothing ran."""
        return self.overlapped / self.busy if self.busy else 0.0

    def __str__(self) -> str:
        return (
            f"several devices ran at once for {self.fraction:.0%} of the busy time: "
            f"{self.mean_devices:.1f} devices and {self.mean_cores:.1f} cores on average"
        )


def overlap(calls: Sequence[TorchCall]) -> Overlap:
    """Measures how much the devices of these calls overlap."""
    begun = [(call.start, 1, call.device) for call in calls]
    changes = sorted([*begun, *((call.end, -1, call.device) for call in calls)])
    running = collections.Counter[str]()
    seconds = collections.defaultdict[int, float](float)  # by the number of devices in a call
    for (now, step, device), (later, *_) in itertools.pairwise(changes):
        running[device] += step
        seconds[sum(count > 0 for count in running.values())] += later - now
    busy = sum(spent for count, spent in seconds.items() if count)
    core_time = sum(call.core_time for call in calls)
    return Overlap(
        busy=busy,
        overlapped=sum(spent for count, spent in seconds.items() if count > 1),
        mean_devices=sum(n * spent for n, spent in seconds.items()) / busy if busy else 0.0,
        mean_cores=core_time / busy if busy else 0.0,
    )


class Timeline:
    """The torch calls of a block of code, made by `eqx_torch.timeline()`.

    It can be read while the block runs, and does not change after it. Printed, it shows how often
    and how long each function ran.

    **Attributes:**

    - `events`: a tuple with a `TorchCall` for each call, by their start.
    - `duration`: the seconds from the beginning of the block to its end, or until now.

    !!! example

        >>> import jax.numpy as jnp, torch
        >>> from eqx_torch import timeline, torch2jax
        >>> with timeline() as record:
        ...     y = torch2jax(torch.relu)(jnp.ones(3)).block_until_ready()
        >>> [(call.function, call.kind) for call in record.events]
        [('relu', 'forward')]
    """

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.end: float | None = None
        self.ended: list[TorchCall] = []

    @property
    def events(self) -> tuple[TorchCall, ...]:
        """The calls that began in the block, by their start."""
        own = [call for call in self.ended if call.start >= self.start]
        return tuple(sorted(own, key=lambda call: call.start))

    @property
    def duration(self) -> float:
        """The seconds from the beginning of the block to its end, or until now."""
        return (self.end or time.perf_counter()) - self.start

    def overlap(self) -> Overlap:
        """How much of the time several devices ran torch calls at once.

        **Returns:**

        An `Overlap`, all zeros if there are no calls.

        !!! example

            >>> import jax.numpy as jnp, torch
            >>> from eqx_torch import timeline, torch2jax
            >>> with timeline() as record:
            ...     y = torch2jax(torch.relu)(jnp.ones(3)).block_until_ready()
            >>> record.overlap().mean_devices
            1.0
        """
        return overlap(self.events)

    def plot(self, path: str | os.PathLike[str] | None = None) -> Any:
        """Draws one lane a device, from the first call to the end of the last.

        Forward, backward and tangent computations have different colours, and the title states the
        overlap. Needs matplotlib.

        **Arguments:**

        - `path`: where to save the picture, if anywhere; its suffix chooses the format.

        **Returns:**

        The `matplotlib.figure.Figure`.

        **Raises:**

        `EqxTorchError` if there are no calls, `ImportError` without matplotlib.

        !!! example

            >>> import tempfile, jax.numpy as jnp, torch
            >>> from eqx_torch import timeline, torch2jax
            >>> with timeline() as record:
            ...     y = torch2jax(torch.relu)(jnp.ones(3)).block_until_ready()
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     figure = record.plot(f"{folder}/timeline.png")
        """
        calls = self.events
        if not calls:
            raise EqxTorchError(f"there is nothing to draw: {_EMPTY}")
        figure = draw(calls)
        if path is not None:
            figure.savefig(path)
        return figure

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the calls as Chrome trace JSON, which <https://ui.perfetto.dev> opens.

        **Arguments:**

        - `path`: where to; an existing file is replaced.

        **Returns:**

        Nothing.

        **Raises:**

        `OSError` if the file cannot be written.

        !!! example

            >>> import tempfile, jax.numpy as jnp, torch
            >>> from eqx_torch import timeline, torch2jax
            >>> with timeline() as record:
            ...     y = torch2jax(torch.relu)(jnp.ones(3)).block_until_ready()
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     record.save(f"{folder}/timeline.json")
        """
        events = list(_trace_events(self.events, self.start))
        Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))

    def __repr__(self) -> str:
        calls = self.events
        if not calls:
            return f"Timeline of no torch calls: {_EMPTY}"
        head = f"Timeline of {_counts(calls)} in {1e3 * self.duration:.1f} ms"
        return "\n".join([head, f"{self.overlap()}", *_table(calls)])


@contextlib.contextmanager
def timeline() -> Iterator[Timeline]:
    """Records each call of torch that XLA makes while a block of code runs.

    All threads and all programs are seen, those too that were compiled before. Timelines may be
    nested and may overlap: each gets the calls that begin and end while it is on. While none is on,
    a call is not slowed down by more than a test of an empty list.

    JAX returns from a call before its work is done: await the results inside the block.

    On a GPU torch, too, returns before its work is done. There a call's time is the time until its
    work was enqueued; when the kernels run is shown by `jax.profiler`, whose traces name torch
    calls by their functions.

    **Returns:**

    A context manager, which gives a `Timeline`: its `events` are the calls, `overlap()` is how much
    they overlap, `plot()` draws them, and `save()` writes them as Chrome trace JSON.

    !!! example

        >>> import jax, jax.numpy as jnp, torch
        >>> from eqx_torch import timeline, torch2jax
        >>> f = jax.jit(jax.grad(torch2jax(lambda x: x.sin().sum())))
        >>> with timeline() as record:
        ...     y = f(jnp.ones(3)).block_until_ready()
        >>> [(call.kind, call.device) for call in record.events]
        [('forward', 'cpu:0'), ('backward', 'cpu:0')]
    """
    record = Timeline()
    ACTIVE.append(record)
    try:
        yield record
    finally:
        ACTIVE.remove(record)
        record.end = time.perf_counter()


ACTIVE: list[Timeline] = []


class Span:
    """A context manager around a call, by which the timelines that are on then get it.

    Args:
        program: what is called.
        buffer: any of XLA's buffers for it.
    """

    def __init__(self, program: Program, buffer: Any) -> None:
        self._program = program
        self._buffer = buffer

    def __enter__(self) -> None:
        self._start = time.perf_counter()
        self._core_time = time.thread_time()

    def __exit__(self, *error: object) -> None:
        core_time, end = time.thread_time() - self._core_time, time.perf_counter()
        platform, number = self._buffer.__dlpack_device__()
        call = TorchCall(
            function=self._program.leaf.name,
            kind=self._program.kind,
            program=self._program.name,
            device=f"{_PLATFORMS[platform]}:{number}",
            thread=threading.get_native_id(),
            start=self._start,
            end=end,
            core_time=core_time,
        )
        for record in tuple(ACTIVE):
            record.ended.append(call)


def by_lane(calls: Iterable[TorchCall]) -> dict[str, list[list[TorchCall]]]:
    """The calls by device, `cpu:2` before `cpu:10`, each with as few rows as keep calls apart.

    A device has a second row only where two of its calls overlap.
    """

    def order(call: TorchCall) -> tuple[str, int, float]:
        platform, _, number = call.device.partition(":")
        return platform, int(number), call.start

    lanes: dict[str, list[list[TorchCall]]] = {}
    for call in sorted(calls, key=order):
        rows = lanes.setdefault(call.device, [])
        free = (row for row in rows if row[-1].end <= call.start)
        if (row := next(free, None)) is None:
            rows.append(row := [])
        row.append(call)
    return lanes


_EMPTY = (
    "only calls that begin and end inside the block are recorded. JAX runs asynchronously, so "
    "await the results there (`jax.block_until_ready`)."
)


def _counts(calls: Sequence[TorchCall]) -> str:
    devices = len({call.device for call in calls})
    return f"{len(calls)} torch calls on {devices} device{'s' * (devices > 1)}"


def _table(calls: Sequence[TorchCall]) -> Iterator[str]:
    """How often and how long each function ran, the longest first."""
    durations: dict[tuple[str, str], list[float]] = {}
    for call in calls:
        durations.setdefault((call.function, call.kind), []).append(1e3 * call.duration)
    width = max(len("function"), *(len(function) for function, _ in durations)) + 2
    yield f"{'function':<{width}}{'kind':<10}{'calls':>7}{'total ms':>11}{'mean ms':>11}"
    for (function, kind), spent in sorted(durations.items(), key=lambda item: -sum(item[1])):
        count, total = len(spent), sum(spent)
        yield f"{function:<{width}}{kind:<10}{count:>7}{total:>11.3f}{total / count:>11.3f}"


def _trace_events(calls: Sequence[TorchCall], origin: float) -> Iterator[dict[str, Any]]:
    def named(what: str, process: int, thread: int, **args: Any) -> dict[str, Any]:
        return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": args}

    for process, (device, rows) in enumerate(by_lane(calls).items(), 1):
        yield named("process_name", process, 0, name=device)
        yield named("process_sort_index", process, 0, sort_index=process)
        for thread, row in enumerate(rows, 1):
            yield named("thread_name", process, thread, name="torch calls")
            for call in row:
                yield {
                    "ph": "X",
                    "name": call.function,
                    "cat": call.kind,
                    "pid": process,
                    "tid": thread,
                    "ts": (call.start - origin) * 1e6,
                    "dur": call.duration * 1e6,
                    "args": {
                        "kind": call.kind,
                        "program": call.program,
                        "thread": call.thread,
                        "core time (ms)": call.core_time * 1e3,
                    },
                }


_COLOURS = {"forward": "#4c72b0", "backward": "#dd8452", "tangent": "#55a868"}
_WIDTH = 10.0  # inches
_ROW = 0.42
_BAR = 0.84  # of a row
_LETTER = 0.0078 * 8  # inches that a letter of 8 points takes, on average


def draw(calls: Sequence[TorchCall]) -> Any:
    """A matplotlib figure of at least one call."""
    lanes = by_lane(calls)
    height = 1.5 + _ROW * sum(map(len, lanes.values()))
    matplotlib = importlib.import_module("matplotlib.figure")
    figure = matplotlib.Figure((_WIDTH, height), dpi=150, layout="constrained")
    axes = figure.subplots()
    origin = min(call.start for call in calls)
    span = max(call.end for call in calls) - origin
    top, ticks = 0, []
    for rows in lanes.values():
        ticks.append(top + len(rows) / 2)
        for row in rows:
            _draw_row(axes, row, top, origin, span)
            top += 1
        axes.axhline(top, color="0.85", linewidth=0.8, zorder=0)
    _describe(axes, calls)
    axes.set_yticks(ticks, list(lanes))
    axes.set(ylim=(top, 0), xlim=(0, 1e3 * span), xlabel="milliseconds")
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    return figure


def _draw_row(axes: Any, row: list[TorchCall], top: float, origin: float, span: float) -> None:
    bars = [(1e3 * (call.start - origin), 1e3 * call.duration) for call in row]
    place, colours = (top + (1 - _BAR) / 2, _BAR), [_COLOURS[call.kind] for call in row]
    axes.broken_barh(bars, place, facecolors=colours, edgecolors="white", linewidth=0.4)
    style = {"size": 8, "color": "white", "ha": "center", "va": "center"}
    for call, (left, width) in zip(row, bars, strict=True):
        if len(call.function) * _LETTER < 0.9 * _WIDTH * call.duration / span:
            axes.text(left + width / 2, top + 0.5, call.function, **style)


def _describe(axes: Any, calls: Sequence[TorchCall]) -> None:
    """The title, which states the measured overlap, and the legend."""
    title = _counts(calls)
    if any(not call.device.startswith("cpu:") for call in calls):
        title += " (on GPUs the time until the work was enqueued)"
    axes.set_title(title, loc="left", size=11, pad=22)
    subtitle = f"{overlap(calls)}"
    axes.annotate(subtitle, (0, 1), (0, 6), "axes fraction", "offset points", size=9, color="0.3")
    counts = {kind: sum(call.kind == kind for call in calls) for kind in _COLOURS}
    for kind, count in counts.items():
        if count:
            axes.bar(0, 0, color=_COLOURS[kind], label=f"{count} {kind}")
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=3, frameon=False, fontsize=9)
