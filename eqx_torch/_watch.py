"""What torch code does while it runs: writes, random numbers, the tensors it makes.

A `Watch` sees every operator of a run. It saves each real storage just before the first write to
it, so that the writes can be undone, and knows of each new storage whether it is still alive.
`Exposure` sees which tensors give away their memory, `Draws` only whether random numbers are drawn.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ._compat import (
    StorageWeakRef,
    TorchDispatchMode,
    without_modes,
    WithoutFunctionModes,
)


# These write running statistics without saying so in their schema.
_SILENT_WRITERS = frozenset(
    ["aten::native_batch_norm", "aten::cudnn_batch_norm", "aten::miopen_batch_norm"]
)
_STATISTICS = ("running_mean", "running_var")
# Operators that may draw random numbers do not where one of these arguments is zero or False.
_SWITCHES = frozenset(["dropout", "dropout_p", "train", "training"])

_SEED = 0x657178_746F726368  # one that no generator of the user's has

_ATTRIBUTES: Any = torch.Tensor  # of which the stub knows the values only
_DATA = _ATTRIBUTES.data.__get__
EXPOSING = frozenset(
    [
        torch.Tensor.numpy,
        torch.Tensor.__array__,
        torch.Tensor.__dlpack__,
        torch.Tensor.data_ptr,
        torch.Tensor.storage,
        torch.Tensor.untyped_storage,
    ]
)


class Watch(TorchDispatchMode):
    """Sees the operators of the code that runs under it.

    Attributes:
        place: what is running, for messages; whoever knows may set it.
        generator: what random numbers are drawn from in place of torch's own generator.
        random: the places where random numbers were drawn.
    """

    def __init__(self) -> None:
        super().__init__()
        self.place = ""
        self.generator = torch.Generator().manual_seed(_SEED)
        self.random: list[str] = []
        self._written: dict[int, torch.Tensor] = {}
        self._before: list[tuple[torch.UntypedStorage, torch.UntypedStorage]] = []
        self._made: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for tensor in writes(func, args, kwargs):
            self._note(tensor)
        if draws(func, args, kwargs, self.generator):
            self.random.append(self.place)
        result = func(*args, **kwargs)
        self._note_made(result, (args, kwargs))
        return result

    def wrote(self, tensor: torch.Tensor) -> bool:
        """Whether the memory of this tensor was written to."""
        return storage_key(tensor) in self._written

    def undo(self) -> None:
        """Puts back the contents of all memory that was written to."""
        with without_modes():
            for storage, before in self._before:
                if storage.nbytes() != before.nbytes():
                    storage.resize_(before.nbytes())
                storage.copy_(before)

    def forget(self) -> None:
        """Holds on to no tensor of the run any more."""
        self._written.clear()
        self._before.clear()

    def survivors(self) -> frozenset[int]:
        """The keys of the storages that were made in the run and are still alive."""
        return frozenset(key for key, storage in self._made.items() if not storage.expired())

    def made_by_hand(self, tensors: Iterable[torch.Tensor]) -> None:
        """Takes tensors that no operator of the run has made for its own."""
        for tensor in tensors:
            with WithoutFunctionModes():
                self._made[storage_key(tensor)] = StorageWeakRef(tensor.untyped_storage())

    def _note(self, tensor: torch.Tensor) -> None:
        key = storage_key(tensor)
        if key in self._written:
            return
        self._written[key] = tensor
        with WithoutFunctionModes(), without_modes():
            storage = tensor.untyped_storage()
            if storage.device.type != "meta":
                self._before.append((storage, storage.clone()))

    def _note_made(self, result: Any, arguments: Any) -> None:
        made = {storage_key(x): x for x in _dense(result)}
        if not made.keys() <= self._made.keys():
            made = {key: x for key, x in made.items() if key not in self._made}
            given = set(map(storage_key, _dense(arguments)))
            self.made_by_hand(x for key, x in made.items() if key not in given)


class Exposure(TorchFunctionMode):
    """Sees which tensors give away their memory, where writes to it cannot be seen.

    Args:
        by_data: whether `x.data` does: only a `Watch` sees writes to that.
    """

    def __init__(self, by_data: bool = False) -> None:
        super().__init__()
        self._exposing = EXPOSING | {_DATA} if by_data else EXPOSING
        self._keys: set[int] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in self._exposing:
            self._keys.add(storage_key(args[0]))
        return func(*args, **(kwargs or {}))

    def exposed(self, tensor: torch.Tensor) -> bool:
        """Whether the memory of this tensor may have been written to from outside of torch."""
        return storage_key(tensor) in self._keys


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
        self.any = self.any or draws(func, args, kwargs)
        return func(*args, **kwargs)


def draws(func: Any, args: Any, kwargs: dict[str, Any], own: torch.Generator | None = None) -> bool:
    """Whether an operator draws random numbers with these arguments from torch's own generator.

    Args:
        func, args, kwargs: the operator and its arguments.
        own: what stands for torch's own generator.
    """
    return torch.Tag.nondeterministic_seeded in func.tags and not any(
        _is_off(argument.name, value, own) for argument, value in _bound(func, args, kwargs)
    )


def _is_off(name: str, value: Any, own: torch.Generator | None) -> bool:
    if name == "generator":
        # An operator is given another object for the same generator.
        return value is not None and (own is None or value.initial_seed() != own.initial_seed())
    return name in _SWITCHES and isinstance(value, bool | int | float) and not value


def _bound(func: Any, args: Any, kwargs: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    """Each argument of an operator with its value."""
    for i, argument in enumerate(func._schema.arguments):
        default = argument.default_value
        yield argument, args[i] if i < len(args) else kwargs.get(argument.name, default)


def writes(func: Any, args: Any, kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """The arguments of an operator that it writes to."""
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


def _dense(tree: Any) -> Iterator[torch.Tensor]:
    """The tensors in what an operator takes or gives that have one storage each."""
    if isinstance(tree, torch.Tensor):
        if tree.layout is torch.strided:
            yield tree
    elif isinstance(tree, tuple | list):
        for item in tree:
            yield from _dense(item)
    elif isinstance(tree, dict):
        yield from _dense(tuple(tree.values()))


def storage_key(tensor: torch.Tensor) -> int:
    """Equal for tensors that share memory."""
    with WithoutFunctionModes():
        return tensor.untyped_storage()._cdata
