"""The process around XLA's calls of torch: none waits for ever, Ctrl-C arrives, the end waits.

Two places are known from which a call of JAX may never return, and in which it is refused:

- inside a torch function that XLA is running. The device, or the other devices of the mesh, may be
  waiting for that function to end. It is known by the Python stack: XLA's call is one of its
  frames. So nothing has to be noted when torch is called, and only those who ask pay.
- a process that was forked from one in which JAX has run programs: the threads that run them
  exist in the parent only.

XLA may run a torch call in the thread that asked for it. In the main thread Ctrl-C then raises
`KeyboardInterrupt` inside of torch, and XLA makes of it an error like any other, which
`except Exception` catches. So it is delivered again as soon as the main thread has left the call.

JAX returns before a program has run. A thread of XLA's that asks for Python while the interpreter
ends is stopped by Python, and the process aborts. JAX waits only for programs with effects, and a
torch call has none. So before the interpreter ends, it waits for every array that is alive, and
then for two small programs, one on all devices and one on the first. They run after those that were
asked for before: on a GPU by the order of its stream; on a CPU because XLA begins a program over
several devices when the last such program is done, and one on a single device when the last such
program of the same thread is done. So on a CPU only that of the kind which called torch is run.
What remains are threads that go on asking, and a program on one device of a CPU whose results
nobody holds, asked for in another thread than the main one.
"""

import _thread
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, TypeVar

import jax
import numpy as np

from ._errors import EqxTorchError


_Callback = TypeVar("_Callback", bound=Callable[..., Any])


class _Entries:
    """Where XLA enters Python.

    Attributes:
        codes: the code of every function that was given to XLA, as many as there are such functions
            in this package's source.
        callers: the platforms that they run on, each with whether in programs over many devices.
        process: the process in which the first of them was given, None before.
    """

    def __init__(self) -> None:
        self.codes: set[CodeType] = set()
        self.callers: set[tuple[str, bool]] = set()
        self.process: int | None = None


_ENTRIES = _Entries()
_PATIENCE = 0.1


def entry(callback: _Callback, platform: str, devices: int) -> _Callback:
    """Takes note of a function that XLA will call in a program over so many devices."""
    _ENTRIES.codes.add(callback.__code__)
    _ENTRIES.callers.add((platform, devices > 1))
    _ENTRIES.process = _ENTRIES.process or os.getpid()
    return callback


def inside_callback(frame: FrameType | None = None) -> bool:
    """Whether a frame, by default the caller's, runs inside a call from XLA."""
    frame, codes = frame or sys._getframe(), _ENTRIES.codes
    while frame is not None:
        if frame.f_code in codes:
            return True
        frame = frame.f_back
    return False


def refuse_deadlock(name: str) -> None:
    """Raises where a call of the wrapped function `name` may never return."""
    if _ENTRIES.process not in (None, os.getpid()):
        raise EqxTorchError(
            f"`{name}` was called in a process that was forked from one in which JAX has run "
            "programs. JAX's threads do not exist here, so the call would never return. Start "
            'the process by "spawn" or "forkserver" '
            '(`torch.utils.data.DataLoader(..., multiprocessing_context="spawn")`), or call only '
            "torch in it."
        )
    if inside_callback():
        raise EqxTorchError(
            f"`{name}` was called inside a torch function that JAX is running. Its device may be "
            "waiting for that function to end, so the call might never return. Call the torch "
            "function that was wrapped, or return to JAX and call it there."
        )


def interrupt_again() -> None:
    """Interrupts the main thread after the torch call that it is in. Elsewhere, does nothing."""
    if threading.current_thread() is threading.main_thread():
        threading.Thread(target=_interrupt_outside, daemon=True).start()


def _interrupt_outside() -> None:
    main = threading.main_thread().ident or 0
    deadline = time.monotonic() + _PATIENCE
    # A program that goes from one torch call to the next may never be seen outside of one. If it is
    # interrupted inside, this begins anew.
    while inside_callback(sys._current_frames().get(main)) and time.monotonic() < deadline:
        time.sleep(0.001)
    _thread.interrupt_main()


def wait_for_calls() -> None:
    """Returns when no program that was asked for in this process will call torch any more."""
    if _ENTRIES.process != os.getpid():  # XLA's threads do not exist in forked ones
        return
    try:
        for platform in {platform for platform, _ in _ENTRIES.callers}:
            kinds = {several for name, several in _ENTRIES.callers if name == platform}
            with contextlib.suppress(Exception):  # of a platform that is gone
                _wait_for(platform, kinds if platform == "cpu" else {True, False})
    except KeyboardInterrupt:
        # No more may run here, so the process ends as Ctrl-C ends those that do not handle it.
        sys.stdout.flush()
        sys.stderr.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)


def _wait_for(platform: str, kinds: set[bool]) -> None:
    for array in jax.live_arrays(platform):
        with contextlib.suppress(Exception):  # a program that failed has ended, too
            array.block_until_ready()
    devices = jax.local_devices(backend=platform)
    for several in kinds:
        some = devices if several else devices[:1]
        mesh = jax.make_mesh((len(some),), ("devices",), devices=some)
        with jax.set_mesh(mesh):
            x = jax.device_put(np.zeros(mesh.size, np.float32), jax.P("devices"))
            jax.jit(jax.lax.neg)(x).block_until_ready()
