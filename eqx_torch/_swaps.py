"""Functions that put tensors in the place of a module's parameters while they run.

`torch.func.functional_call` does: as long as it runs, the module has other parameters for whoever
else runs it, in another thread. Devices that run such a function at once would compute with each
other's parameters, and so would a run that only finds out shapes. So their calls take turns.
"""

import contextlib
import sys
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ._reachable import is_library, kept_by, names_in, reachable


_SWAPPER = "functional_call"
_CALLS = (torch.nn.Module._call_impl.__code__, torch.func.functional_call.__code__)


class Swaps(contextlib.AbstractContextManager["Swaps"]):
    """Sees whether a module runs in this thread with tensors in the place of its parameters.

    It looks at each call of a module as a profiler would, which concerns this thread alone; where
    one is at work already, it sees nothing. Tensors that are put in the place of buffers, or
    parameters in that of others, are seen only if `functional_call` does it.

    Attributes:
        any: whether one has.
    """

    def __init__(self) -> None:
        self.any = False

    def __enter__(self) -> "Swaps":
        self._looks = sys.getprofile() is None
        if self._looks:
            sys.setprofile(self._look_at)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._looks:
            sys.setprofile(None)

    def _look_at(self, frame: types.FrameType, event: str, _: Any) -> None:
        if event != "call" or frame.f_code not in _CALLS or self.any:
            return
        module = frame.f_locals.get("self")
        self.any = module is None or any(map(_is_swapped, module.modules()))


def _is_swapped(module: torch.nn.Module) -> bool:
    return any(
        not isinstance(p, torch.nn.Parameter) for p in module._parameters.values() if p is not None
    )


def seems_to_swap(function: Callable[..., Any]) -> bool:
    """Whether a function, or one that is near it, names `torch.func.functional_call`."""
    return any(map(_names_swapper, reachable(function, _called_by)))


def reaches_module(function: Callable[..., Any]) -> bool:
    """Whether a torch module is near a function, in which others may swap parameters."""
    return any(isinstance(item, torch.nn.Module) for item in reachable(function))


def _names_swapper(item: Any) -> bool:
    return isinstance(item, types.FunctionType) and (
        item.__name__ == _SWAPPER or _SWAPPER in names_in(item.__code__)
    )


def _called_by(item: Any) -> Iterable[Any]:
    """What an object may call, but for what libraries that are installed do."""
    closed = isinstance(item, types.FunctionType | type) and not _is_users(item)
    return [] if closed else kept_by(item)


def _is_users(item: Any) -> bool:
    """Whether a function or class is not of a library that is installed."""
    module = sys.modules.get(item.__module__ or "")
    installed = "-packages" in str(getattr(module, "__file__", ""))
    return not installed and not is_library(item.__module__)
