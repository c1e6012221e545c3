"""Functions that put tensors in the place of a module's parameters while they run.

`torch.func.functional_call` does: as long as it runs, the module has other parameters for whoever
else runs it, in another thread. Devices that run such a function at once would compute with each
other's parameters, and so would a run that only finds out shapes. So their calls take turns.
"""

import contextlib
import itertools
import sys
import threading
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from ._reachable import is_library, kept_by, names_in, reachable


_SWAPPER = "functional_call"


class Swaps(contextlib.AbstractContextManager["Swaps"]):
    """Sees whether a module runs in this thread with tensors in the place of its parameters.

    Tensors in the place of buffers, or parameters in that of others, are not seen.

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
    """Whether a function, or one that it can reach, names `torch.func.functional_call`."""
    return any(map(_names_swapper, reachable(function, _called_by)))


def reaches_module(function: Callable[..., Any]) -> bool:
    """Whether a function can reach a torch module, in which others may swap parameters."""
    return any(isinstance(item, torch.nn.Module) for item in reachable(function))


def _names_swapper(item: Any) -> bool:
    return isinstance(item, types.FunctionType) and (
        item.__name__ == _SWAPPER or _SWAPPER in names_in(item.__code__)
    )


def _called_by(item: Any) -> Iterable[Any]:
    """What an object may call: what it holds, and the methods of the user's classes."""
    if isinstance(item, types.FunctionType):
        return kept_by(item) if _is_users(item) else []
    if isinstance(item, type):
        return _methods(item)
    return [type(item), *kept_by(item)]


def _methods(cls: type) -> list[Any]:
    own = [vars(c).values() for c in cls.__mro__ if _is_users(c)]
    values = map(_behind_descriptor, itertools.chain(*own))
    return [x for x in values if isinstance(x, types.FunctionType)]


def _behind_descriptor(x: Any) -> Any:
    if isinstance(x, staticmethod | classmethod):
        return x.__func__
    return x.fget if isinstance(x, property) else x


def _is_users(item: Any) -> bool:
    """Whether a function or class is not of a library that is installed."""
    module = sys.modules.get(item.__module__ or "")
    installed = "-packages" in str(getattr(module, "__file__", ""))
    return not installed and not is_library(item.__module__)
