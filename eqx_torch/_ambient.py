"""The part of torch's state that belongs to the calling thread or process.

Autocast, the default device and the default dtype change what a torch function computes. XLA runs
it from threads of its own, later than the user's `with` statement, so these settings are captured
when JAX traces the call, are part of the traced program, and are in force whenever it runs.
"""

import contextlib
import dataclasses
import threading
from collections.abc import Iterator
from typing import Any

import torch

from ._compat import torch_function_modes


_AUTOCAST_DEVICES = ("cpu", "cuda")


@dataclasses.dataclass(frozen=True)
class Ambient:
    """Captured settings; equal ones share a trace."""

    autocast: tuple[torch.dtype | None, ...]
    default_dtype: torch.dtype
    default_device: torch.device | None

    @staticmethod
    def capture() -> "Ambient":
        """The settings of the calling thread."""
        device = torch.get_default_device() if torch_function_modes() else None
        return Ambient(_autocast(), torch.get_default_dtype(), device)

    @staticmethod
    def neutral() -> contextlib.AbstractContextManager[Any]:
        """A context in which nothing is set but the process's default dtype.

        XLA may run torch in the user's thread, whose settings are those of the moment.
        """
        if (
            torch.is_grad_enabled()
            and not torch.is_inference_mode_enabled()
            and not torch_function_modes()
            and not any(map(torch.is_autocast_enabled, _AUTOCAST_DEVICES))
        ):
            return _NOTHING
        none = (None,) * len(_AUTOCAST_DEVICES)
        return Ambient(none, torch.get_default_dtype(), None)._entered()

    def in_force(self) -> contextlib.AbstractContextManager[Any]:
        """A context in which these settings hold, whichever thread enters it."""
        if (
            torch.is_grad_enabled()
            and not torch.is_inference_mode_enabled()
            and torch.get_default_dtype() == self.default_dtype
            and _autocast() == self.autocast
            and not (torch_function_modes() or self.default_device)
        ):
            return _NOTHING
        return self._entered()

    @contextlib.contextmanager
    def _entered(self) -> Iterator[None]:
        device = self.default_device or torch.device("cpu")
        with contextlib.ExitStack() as stack:
            # Whether a derivative is taken is for JAX to say; forwards may call autograd.grad.
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.enable_grad())
            if self.default_device is not None or torch_function_modes():
                stack.enter_context(device)
            for kind, dtype in zip(_AUTOCAST_DEVICES, self.autocast, strict=True):
                if _autocast_dtype(kind) != dtype:
                    on = torch.autocast(kind, dtype=dtype, enabled=dtype is not None)
                    stack.enter_context(on)
            stack.enter_context(_DEFAULT_DTYPE.held(self.default_dtype))
            yield


def _autocast_dtype(kind: str) -> torch.dtype | None:
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def _autocast() -> tuple[torch.dtype | None, ...]:
    return tuple(map(_autocast_dtype, _AUTOCAST_DEVICES))


class _DefaultDtype:
    """The process-wide default dtype while torch calls of several threads hold one.

    Invariant: `_original` is the dtype outside of all calls while `_holders` is positive, so that
    the last one to leave restores it, in whichever order the threads leave.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holders = 0
        self._original = torch.float32

    @contextlib.contextmanager
    def held(self, dtype: torch.dtype) -> Iterator[None]:
        with self._lock:
            if self._holders == 0:
                self._original = torch.get_default_dtype()
            self._holders += 1
            torch.set_default_dtype(dtype)
        try:
            yield
        finally:
            with self._lock:
                self._holders -= 1
                if self._holders == 0:
                    torch.set_default_dtype(self._original)


_NOTHING = contextlib.nullcontext()
_DEFAULT_DTYPE = _DefaultDtype()
