"""Functions that put tensors in the place of a module's parameters while they run.

`torch.func.functional_call` does: as long as it runs, the module has other parameters for whoever
else runs it, in another thread. Devices that run such a function at once would compute with each
other's parameters, and so would a run that only finds out shapes. So their calls take turns.
"""

import contextlib
import threading
import types
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from ._reachable import is_library, names_in, reachable


_SWAPPER = "functional_call"


class Swaps(contextlib.AbstractContextManager["Swaps"]):
    """Sees whether a module runs in this thread with tensors in the place of its parameters.

    Attributes:
        any: whether one has.
    """

    def __init__(self) -> None:
        self.any = False

    def __enter__(self) -> "Swaps":
        self._thread = threading.get_ident()
        self._hook = register_module_forward_pre_hook(self._look_at)
        return self

    def __exit__(self, *exception: object) -> None:
        self._hook.remove()

    def _look_at(self, module: torch.nn.Module, args: Any) -> None:
        del args
        if not self.any and threading.get_ident() == self._thread:
            self.any = any(_is_swapped(m) for m in module.modules())


def _is_swapped(module: torch.nn.Module) -> bool:
    return any(
        not isinstance(p, torch.nn.Parameter) for p in module._parameters.values() if p is not None
    )


def seems_to_swap(function: Callable[..., Any]) -> bool:
    """Whether a function, or one that it can reach, names `torch.func.functional_call`.

    This is for functions that have not run. Methods that it calls by attributes are not looked at.
    """
    return any(
        isinstance(item, types.FunctionType)
        and (item.__name__ == _SWAPPER or _SWAPPER in names_in(item.__code__))
        for item in reachable(function, enter=_is_users)
    )


def _is_users(item: Any) -> bool:
    return not (isinstance(item, types.FunctionType) and is_library(item.__module__))
