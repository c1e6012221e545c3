"""Functions that put tensors in the place of a module's parameters while they run.

`torch.func.functional_call` does: as long as it runs, the module has other parameters for whoever
else runs it, in another thread. Devices that run such a function at once would compute with each
other's parameters, and so would a run that only finds out shapes. So their calls take turns.
"""

import contextlib
import sys
import types
from collections.abc import Callable
from typing import Any

import torch

from ._compat import SWAPPING
from ._reachable import called_by, names_in, reachable


_SWAPPER = "functional_call"


class Swaps(contextlib.AbstractContextManager["Swaps"]):
    """Sees whether a function replaces a module's parameters, in this thread.

    It looks at calls as a profiler does, which concerns this thread alone; where one is at work
    already, it sees nothing.

    Attributes:
        any: whether it has.
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
        self.any = self.any or (event == "call" and frame.f_code is SWAPPING)


def seems_to_swap(function: Callable[..., Any]) -> bool:
    """Whether a function, or one that is near it, names `torch.func.functional_call`."""
    return any(map(_names_swapper, reachable(function, called_by)))


def reaches_module(function: Callable[..., Any]) -> bool:
    """Whether a torch module is near a function, in which others may swap parameters."""
    return any(isinstance(item, torch.nn.Module) for item in reachable(function))


def _names_swapper(item: Any) -> bool:
    return isinstance(item, types.FunctionType) and (
        item.__name__ == _SWAPPER or _SWAPPER in names_in(item.__code__)
    )
