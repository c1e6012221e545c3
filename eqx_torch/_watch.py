"""Runs of torch code that leave no trace.

A `Watch` sees every operator of a run: what is written, and whether random numbers are drawn. It
saves each real storage just before the first write to it, so that the run can be undone.
`untouched` puts back the Python attributes of the modules that a function can reach, where modules
like to keep what they computed at their first call.
"""

import contextlib
import functools
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ._compat import TorchDispatchMode, without_modes


# These write running statistics without saying so in their schema.
_SILENT_WRITERS = frozenset(
    ["aten::native_batch_norm", "aten::cudnn_batch_norm", "aten::miopen_batch_norm"]
)
_STATISTICS = ("running_mean", "running_var")
# Operators that may draw random numbers do not where one of these arguments is zero or False.
_SWITCHES = frozenset(["dropout", "dropout_p", "train", "training"])


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
        if torch.Tag.nondeterministic_seeded in func.tags and _draws(func, args, kwargs):
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


@contextlib.contextmanager
def untouched(root: Any) -> Iterator[None]:
    """Restores, on leaving, the attributes of every module that `root` can reach.

    Args:
        root: a function, method, partial, module or container of these.
    """
    saved = [_Saved(owner) for owner in _owners(root)]
    try:
        yield
    finally:
        for state in saved:
            state.restore()


class _Saved:
    """An object's attributes, and the contents of those that are containers."""

    def __init__(self, owner: Any) -> None:
        self._attributes = owner.__dict__
        self._values = dict(owner.__dict__)
        self._containers = [
            (value, value.copy())
            for value in self._values.values()
            if isinstance(value, dict | list | set)
        ]

    def restore(self) -> None:
        self._attributes.clear()
        self._attributes.update(self._values)
        for container, contents in self._containers:
            container.clear()
            (container.extend if isinstance(container, list) else container.update)(contents)


def _owners(root: Any) -> list[Any]:
    """The objects reachable from `root` whose attributes a call of it may change."""
    found: dict[int, Any] = {}
    seen: set[int] = set()
    pending = [root]
    while pending:
        item = pending.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, torch.nn.Module):
            found.update((id(m), m) for m in item.modules())
        else:
            if isinstance(item, types.MethodType) and hasattr(item.__self__, "__dict__"):
                found[id(item.__self__)] = item.__self__
            pending.extend(_neighbours(item))
    return list(found.values())


def _neighbours(item: Any) -> list[Any]:
    if isinstance(item, functools.partial):
        return [item.func, *item.args, *item.keywords.values()]
    if isinstance(item, types.MethodType):
        return [item.__func__, item.__self__]
    if isinstance(item, types.FunctionType):
        return _captured(item)
    if isinstance(item, dict):
        return list(item.values())
    if isinstance(item, list | tuple | set):
        return list(item)
    return []


def _captured(function: Callable[..., Any]) -> list[Any]:
    """What a function sees beside its arguments, as far as it may hold modules."""
    try:
        scope = inspect.getclosurevars(function)
    except ValueError:  # a closure cell that is not filled yet
        return []
    values = [*scope.nonlocals.values(), *scope.globals.values()]
    return [v for v in values if not isinstance(v, type | types.ModuleType | torch.Tensor)]


def _draws(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    return not any(
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
