"""`timeline()`: the calls of torch that happen in a block of code, as text, picture and trace file.

Picture and file have a lane for each device, with a second row where calls of the device overlap. A
trace in Chrome's format, which Perfetto reads, calls the device a process and the row a thread of
it: events of one thread have to be nested, which calls are not that XLA makes side by side.
Matplotlib is imported when something is drawn; the package does not depend on it.
"""

import contextlib
import importlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ._errors import EqxTorchError
from ._torch_calls import ACTIVE, by_lane, Overlap, overlap, Recording, TorchCall


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

    def __init__(self, recording: Recording) -> None:
        self._recording = recording

    @property
    def events(self) -> tuple[TorchCall, ...]:
        """The calls, by their start."""
        return self._recording.calls()

    @property
    def duration(self) -> float:
        """The seconds from the beginning of the block to its end, or until now."""
        return (self._recording.end or time.perf_counter()) - self._recording.start

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
        events = list(_trace_events(self.events, self._recording.start))
        Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))

    def __repr__(self) -> str:
        calls = self.events
        if not calls:
            return f"Timeline of no torch calls: {_EMPTY}"
        head = f"Timeline of {_counts(calls)} in {1e3 * self.duration:.1f} ms"
        return "\n".join([head, f"{self.overlap()}", *_table(calls)])


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


_COLOURS = {
    "forward": "#4c72b0",
    "backward": "#dd8452",
    "gradient": "#8172b3",
    "tangent": "#55a868",
}
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
        [('gradient', 'cpu:0')]
    """
    recording = Recording()
    ACTIVE.append(recording)
    try:
        yield Timeline(recording)
    finally:
        ACTIVE.remove(recording)
        recording.end = time.perf_counter()
