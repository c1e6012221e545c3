"""Calls that could only wait for ever, and are refused.

Two places are known from which a call of JAX may never return:

- inside a torch function that XLA is running. The device, or the other devices of the mesh, may be
  waiting for that function to end. It is known by the Python stack: XLA's call is one of its
  frames. So nothing has to be noted when torch is called, and only those who ask pay.
- a process that was forked from one in which JAX has run programs: the threads that run them
  exist in the parent only.
"""

import os
import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, TypeVar

from ._errors import EqxTorchError


_Callback = TypeVar("_Callback", bound=Callable[..., Any])


class _Entries:
    """Where XLA enters Python.

    Invariant: `codes` has the code of every function that was given to XLA, and `process` is the
    process in which the first of them was, None before. There are as many codes as such functions
    in this package's source.
    """

    def __init__(self) -> None:
        self.codes: set[CodeType] = set()
        self.process: int | None = None


_ENTRIES = _Entries()


def entry(callback: _Callback) -> _Callback:
    """Takes note of a function that XLA will call."""
    _ENTRIES.codes.add(callback.__code__)
    if _ENTRIES.process is None:
        _ENTRIES.process = os.getpid()
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
