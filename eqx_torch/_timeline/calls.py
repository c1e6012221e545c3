"""One call of torch on one device, and how much calls on several devices overlap.

Times are seconds on the clock of `time.perf_counter`. A call occupies its device from its start to
its end. Calls on one device may overlap too, since XLA runs what is independent side by side; then
the device is simply occupied. On a machine with fewer cores than devices the calls of all devices
go on at once but each has a core for a part of the time only, so overlap alone does not say that
anything is gained: the time that the calls spent on a core does.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Sequence

from .._program import Kind


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
    by_device: dict[str, list[tuple[float, float]]] = {}
    for call in calls:
        by_device.setdefault(call.device, []).append((call.start, call.end))
    # A device's occupied stretches do not overlap, so their sums count each device once.
    changes = sorted(
        change
        for stretches in map(merged, by_device.values())
        for start, end in stretches
        for change in ((start, 1), (end, -1))
    )
    seconds = [0.0] * (len(by_device) + 1)  # by the number of devices in a call
    running = 0
    for (time, step), (later, _) in itertools.pairwise(changes):
        running += step
        seconds[running] += later - time
    busy = sum(seconds[1:])
    device_time = sum(count * spent for count, spent in enumerate(seconds))
    core_time = sum(call.core_time for call in calls)
    return Overlap(
        busy=busy,
        overlapped=sum(seconds[2:]),
        mean_devices=device_time / busy if busy else 0.0,
        mean_cores=core_time / busy if busy else 0.0,
    )


def merged(stretches: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The union of stretches of time, as stretches that are apart from each other."""
    union: list[tuple[float, float]] = []
    for start, end in sorted(stretches):
        if union and start <= union[-1][1]:
            union[-1] = (union[-1][0], max(end, union[-1][1]))
        else:
            union.append((start, end))
    return union


def by_lane(calls: Iterable[TorchCall]) -> dict[str, list[list[TorchCall]]]:
    """The calls by device, devices in order, each with as few rows as keep calls apart.

    A device has a second row only where two of its calls overlap.
    """
    lanes: dict[str, list[list[TorchCall]]] = {}
    for call in sorted(calls, key=lambda call: (*device_order(call.device), call.start)):
        rows = lanes.setdefault(call.device, [])
        free = next((row for row in rows if row[-1].end <= call.start), None)
        if free is None:
            rows.append([call])
        else:
            free.append(call)
    return lanes


def device_order(device: str) -> tuple[str, int]:
    """Sorts `cpu:2` before `cpu:10`."""
    platform, _, number = device.partition(":")
    return platform, int(number)
