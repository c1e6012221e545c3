"""Runs of torch code that leave no trace.

A `Watch` sees every operator of a run: what is written, and whether random numbers are drawn. It
saves each real storage just before the first write to it, so that the run can be undone.
`untouched` puts back what the Python objects that a function can reach hold: attributes,
containers, closures, globals and caches, where code likes to keep what it computed at its first
call.
"""

import contextlib
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ._compat import TorchDispatchMode, without_modes
from ._reachable import CachedFunction, globals_of, reachable


# These write running statistics without saying so in their schema.
_SILENT_WRITERS = frozenset(
    ["aten::native_batch_norm", "aten::cudnn_batch_norm", "aten::miopen_batch_norm"]
)
_STATISTICS = ("running_mean", "running_var")
# Operators that may draw random numbers do not where one of these arguments is zero or False.
_SWITCHES = frozenset(["dropout", "dropout_p", "train", "training"])

_EXPOSING = (
    torch.Tensor.numpy,
    torch.Tensor.__array__,
    torch.Tensor.__dlpack__,
    torch.Tensor.data_ptr,
    torch.Tensor.storage,
    torch.Tensor.untyped_storage,
)


class Watch(TorchDispatchMode):
    """Sees the operators of the code that runs under it.

    Attributes:
        place: what is running, for messages; whoever knows may set it.
        random: the places where random numbers were drawn.
    """

    def __init__(self) -> None:
        super().__init__()
        self.place = ""
        self.random: list[str] = []
        self._written: dict[int, torch.Tensor] = {}
        self._before: list[tuple[torch.UntypedStorage, torch.UntypedStorage]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for tensor in _written_by(func, args, kwargs):
            self._note(tensor)
        if _draws(func, args, kwargs):
            self.random.append(self.place)
        return func(*args, **kwargs)

    def wrote(self, tensor: torch.Tensor) -> bool:
        """Whether the memory of this tensor was written to."""
        return _storage_key(tensor) in self._written

    def undo(self) -> None:
        """Puts back the contents of all memory that was written to."""
        with without_modes():
            for storage, before in self._before:
                storage.copy_(before)

    def _note(self, tensor: torch.Tensor) -> None:
        key = _storage_key(tensor)
        if key in self._written:
            return
        self._written[key] = tensor
        storage = tensor.untyped_storage()
        if storage.device.type != "meta":
            with without_modes():
                self._before.append((storage, storage.clone()))


class Exposure(TorchFunctionMode):
    """Sees which tensors give away their memory, where writes to it cannot be seen."""

    def __init__(self) -> None:
        super().__init__()
        self._keys: set[int] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _EXPOSING:
            self._keys.add(_storage_key(args[0]))
        return func(*args, **(kwargs or {}))

    def exposed(self, tensor: torch.Tensor) -> bool:
        """Whether the memory of this tensor may have been written to from outside of torch."""
        return _storage_key(tensor) in self._keys


class Draws(TorchDispatchMode):
    """Sees whether the code that runs under it draws random numbers, and nothing else.

    Attributes:
        any: whether it has.
    """

    def __init__(self) -> None:
        super().__init__()
        self.any = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self.any = self.any or _draws(func, args, kwargs)
        return func(*args, **kwargs)


class untouched(contextlib.AbstractContextManager["untouched"]):  # noqa: N801
    """Restores, on leaving, what Python objects that `root` can reach keep between calls.

    Args:
        root: a function, method, partial, module, callable object or container of these.

    Attributes:
        changed: after leaving, whether anything had to be restored.
    """

    def __init__(self, root: Any) -> None:
        self._root = root
        self.changed = False

    def __enter__(self) -> "untouched":
        self._restorers = _restorers(self._root)
        return self

    def __exit__(self, *exception: object) -> None:
        restored = [restore() for restore in self._restorers]
        self.changed = any(restored)


def _restorers(root: Any) -> list[Callable[[], bool]]:
    """One for each place reachable from `root` where a call may keep something.

    Each returns whether the call has.
    """
    found: list[Callable[[], bool]] = []
    for item in reachable(root):
        if isinstance(item, torch.Tensor):
            if item.is_leaf and item.requires_grad:
                found.append(functools.partial(_put_back, item, "grad", item.grad))
        elif isinstance(item, dict | list | set):
            found.append(functools.partial(_refill, item, item.copy()))
        elif isinstance(item, types.CellType):
            found.append(functools.partial(_put_back, item, "cell_contents", item.cell_contents))
        elif isinstance(item, types.FunctionType):
            found.append(functools.partial(_rebind, item.__globals__, globals_of(item)))
        elif isinstance(item, CachedFunction):
            found.append(functools.partial(_empty_if_used, item, item.cache_info()))
    return found


def _put_back(item: Any, name: str, value: Any) -> bool:
    if getattr(item, name, None) is value:
        return False
    setattr(item, name, value)
    return True


def _refill(container: Any, contents: Any) -> bool:
    if _same_items(container, contents):
        return False
    container.clear()
    (container.extend if isinstance(container, list) else container.update)(contents)
    return True


def _same_items(x: Any, y: Any) -> bool:
    if isinstance(x, dict):
        return list(x) == list(y) and all(
            a is b for a, b in zip(x.values(), y.values(), strict=True)
        )
    return len(x) == len(y) and all(a is b for a, b in zip(x, y, strict=True))


def _rebind(scope: dict[str, Any], names: dict[str, Any]) -> bool:
    changed = {name: value for name, value in names.items() if scope.get(name) is not value}
    scope.update(changed)
    return bool(changed)


def _empty_if_used(cached: Any, before: Any) -> bool:
    """Forgets what a cached function returned during the run; it cannot forget less than all."""
    used = cached.cache_info().misses != before.misses
    if used:
        cached.cache_clear()
    return used


def _draws(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether an operator draws random numbers with these arguments."""
    return torch.Tag.nondeterministic_seeded in func.tags and not any(
        argument.name in _SWITCHES and isinstance(value, bool | int | float) and not value
        for argument, value in _bound(func, args, kwargs)
    )


def _bound(func: Any, args: Any, kwargs: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    """Each argument of an operator with its value."""
    for i, argument in enumerate(func._schema.arguments):
        default = argument.default_value
        yield argument, args[i] if i < len(args) else kwargs.get(argument.name, default)


def _written_by(func: Any, args: Any, kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    silent = func.name() in _SILENT_WRITERS
    for argument, value in _bound(func, args, kwargs):
        alias = argument.alias_info
        writes = alias is not None and alias.is_write
        if silent and argument.name in _STATISTICS:
            writes = bool(kwargs.get("training", args[5] if len(args) > 5 else False))
        if not writes:
            continue
        values = value if isinstance(value, list | tuple) else [value]
        yield from (v for v in values if isinstance(v, torch.Tensor))


def _storage_key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
