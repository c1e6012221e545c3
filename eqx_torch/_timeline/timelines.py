"""`timeline()`: the calls of torch that happen in a block of code."""

import contextlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .._errors import EqxTorchError
from .calls import Overlap, overlap, TorchCall
from .drawing import draw
from .recording import Recording
from .trace_file import trace


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
        end = self._recording.end
        return (time.perf_counter() if end is None else end) - self._recording.start

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

        `EqxTorchError` if there are no calls, or matplotlib cannot be imported.

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
        origin = calls[0].start
        figure = draw(calls, origin, max(call.end for call in calls) - origin)
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
        Path(path).write_text(json.dumps(trace(self.events, self._recording.start)))

    def __repr__(self) -> str:
        calls = self.events
        if not calls:
            return f"Timeline of no torch calls: {_EMPTY}"
        devices = len({call.device for call in calls})
        return "\n".join(
            [
                f"Timeline of {len(calls)} torch calls on {devices} device{'s' * (devices > 1)} in "
                f"{1e3 * self.duration:.1f} ms",
                f"{self.overlap()}",
                *_table(calls),
            ]
        )


_EMPTY = (
    "only calls that begin and end inside the block are recorded. JAX runs asynchronously, so "
    "await the results there (`jax.block_until_ready`)."
)


def _table(calls: tuple[TorchCall, ...]) -> list[str]:
    """How often and how long each function ran, the longest first."""
    durations: dict[tuple[str, str], list[float]] = {}
    for call in calls:
        durations.setdefault((call.function, call.kind), []).append(1e3 * call.duration)
    width = max(len("function"), *(len(function) for function, _ in durations)) + 2
    lines = [f"{'function':<{width}}{'kind':<10}{'calls':>7}{'total ms':>11}{'mean ms':>11}"]
    for (function, kind), spent in sorted(durations.items(), key=lambda item: -sum(item[1])):
        total = sum(spent)
        lines.append(
            f"{function:<{width}}{kind:<10}{len(spent):>7}{total:>11.3f}{total / len(spent):>11.3f}"
        )
    return lines


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
    recording = Recording()
    recording.begin()
    try:
        yield Timeline(recording)
    finally:
        recording.finish()
