"""Calls of torch as they happened: when, where, and how much those of several devices overlap.

`ACTIVE` holds the recordings that are on, and is empty nearly always: its truth is all that a call
asks for then. It is asked when a program runs, not when it is compiled, so programs compiled before
a recording was on are seen too.

Times are seconds on the clock of `time.perf_counter`. A call occupies its device from its start to
its end. Calls on one device may overlap too, since XLA runs what is independent side by side; then
the device is simply occupied. On a machine with fewer cores than devices the calls of all devices
go on at once but each has a core for a part of the time only, so overlap alone does not say that
anything is gained: the time that the calls spent on a core does.
"""

import collections
import dataclasses
import itertools
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any

from ._program import Kind, Program


# DLPack's numbers. The second half of `__dlpack_device__` is XLA's number of the device, for the
# CPU devices of one process too.
_PLATFORMS = {1: "cpu", 2: "cuda", 10: "rocm"}


@dataclasses.dataclass(frozen=True)
class TorchCall:
    """One call of torch on one device, as XLA made it.

    **Attributes:**

    - `function`: the name of the torch function or module.
    - `kind`: "forward"; "backward" if it computed cotangents; "gradient" if it computed a number
        and its gradient at once; "tangent" if it computed tangents.
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


class Recording:
    """The calls that end while it is among the `ACTIVE` ones."""

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.end: float | None = None
        self.ended: list[TorchCall] = []

    def calls(self) -> tuple[TorchCall, ...]:
        """Those that began while it was on, too, by their start."""
        own = [call for call in self.ended if call.start >= self.start]
        return tuple(sorted(own, key=lambda call: call.start))


ACTIVE: list[Recording] = []


class Span:
    """A context manager around a call, by which the recordings that are on then get it.

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
        for recording in tuple(ACTIVE):
            recording.ended.append(call)


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
        row = next((row for row in rows if row[-1].end <= call.start), None)
        if row is None:
            rows.append([call])
        else:
            row.append(call)
    return lanes
