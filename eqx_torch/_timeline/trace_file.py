"""Calls in the format of Chrome's trace events, which Perfetto reads.

A device is what the format calls a process, and a row of a device a thread of it: events of one
thread have to be nested, which calls are not that XLA makes side by side. The thread that made a
call is among its arguments.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from .calls import by_lane, TorchCall


def trace(calls: Iterable[TorchCall], origin: float) -> dict[str, Any]:
    """The content of a trace file, as JSON.

    Args:
        calls: what happened.
        origin: the time that the trace counts from.
    """
    events = [
        event
        for number, (device, rows) in enumerate(by_lane(calls).items(), 1)
        for event in _device_events(number, device, rows, origin)
    ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _device_events(
    number: int, device: str, rows: list[list[TorchCall]], origin: float
) -> Iterator[dict[str, Any]]:
    yield _name("process_name", number, 0, name=device)
    yield _name("process_sort_index", number, 0, sort_index=number)
    for row, calls in enumerate(rows, 1):
        yield _name("thread_name", number, row, name="torch calls")
        for call in calls:
            yield {
                "ph": "X",
                "name": call.function,
                "cat": call.kind,
                "pid": number,
                "tid": row,
                "ts": (call.start - origin) * 1e6,
                "dur": call.duration * 1e6,
                "args": {
                    "kind": call.kind,
                    "program": call.program,
                    "thread": call.thread,
                    "core time (ms)": call.core_time * 1e3,
                },
            }


def _name(what: str, process: int, thread: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": args}
