"""What a call tells the timelines that are on.

`ACTIVE` holds the recordings that are on, and is empty nearly always: its truth is all that a call
asks for then. It is asked when a program runs, not when it is compiled, so programs compiled before
a timeline was on are seen too. A recording gets the calls that begin and end while it is on.
"""

import threading
import time
from typing import Any

from .._program import Program
from .calls import TorchCall


# DLPack's numbers. The second half of `__dlpack_device__` is XLA's number of the device, for the
# CPU devices of one process too.
_PLATFORMS = {1: "cpu", 2: "cuda", 10: "rocm"}


class Recording:
    """The calls of one stretch of time, from all threads.

    Invariant: nothing is added once it has ended.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: list[TorchCall] = []
        self.start = time.perf_counter()
        self.end: float | None = None

    def begin(self) -> None:
        """Is told of calls from now on."""
        self.start = time.perf_counter()
        ACTIVE.append(self)

    def finish(self) -> None:
        """Is told of none any more."""
        ACTIVE.remove(self)
        with self._lock:
            self.end = time.perf_counter()

    def add(self, call: TorchCall) -> None:
        """Notes a call that has ended."""
        with self._lock:
            if self.end is None:
                self._calls.append(call)

    def calls(self) -> tuple[TorchCall, ...]:
        """The calls so far, by their start."""
        with self._lock:
            return tuple(sorted(self._calls, key=lambda call: call.start))


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
        self._recordings = tuple(ACTIVE)
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
        for recording in self._recordings:
            recording.add(call)
