"""Runs of torch code on tensors that have shapes but no values, with no more than torch itself.

torch computes with tensors on its "meta" device. Two things are done so that code need not know:
operators make their results there whatever device they are asked for, and tensors say that they are
where the call will run. Small tensors of the function's own keep their values, since code reads
them (`torch.tensor([2, 3]).tolist()`).

`torch.compile` uses `FakeTensorMode` for the same. That knows more (autocast, and operators that
have rules for fake tensors only), but takes longer and loads the compiler. So what cannot be had
here is refused, and tried there.
"""

import contextlib
import logging
import sys
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ._compat import (
    any_autocast,
    FakeTensorMode,
    is_all_true,
    refuse_pointers,
    TorchDispatchMode,
)
from ._watch import draws, EXPOSING, storage_key, writes


META = torch.device("meta")
_SMALL = 10_000  # elements
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_BY_VALUES = frozenset([torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output])
_ATTRIBUTES: Any = torch.Tensor  # of which the stub knows the values only
_DEVICE = _ATTRIBUTES.device.__get__
_KINDS = {
    _ATTRIBUTES.is_cpu.__get__: "cpu",
    _ATTRIBUTES.is_cuda.__get__: "cuda",
    _ATTRIBUTES.is_meta.__get__: "meta",
}
_BOOL = torch.Tensor.__bool__
_CONSTRAINTS = "torch.distributions.constraints"
_READING = EXPOSING | {torch.Tensor.tolist, torch.Tensor.item}


class NeedsValuesError(RuntimeError):
    """Code asked for the values of a tensor that has none."""


class _NotHereError(RuntimeError):
    """Something that only fake tensors do right."""


@contextlib.contextmanager
def on_meta(device: torch.device) -> Iterator[None]:
    """Operators give tensors without values, which pretend to be on `device`.

    Raises:
        NeedsValuesError: when the run ends, if it has asked for values, whatever became of that.
    """
    operators = _Operators(device)
    pretence = _Pretence(device, operators)
    with operators, pretence:
        yield
    if operators.refusal is not None:  # the code may have caught it
        raise operators.refusal


class _Operators(TorchDispatchMode):
    """Runs operators on the meta device, but for those of small tensors that have values."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._stale: set[int] = set()  # memory of the function's own that it thinks it has changed
        self.refusal: Exception | None = None

    def refuse(self, refusal: Exception) -> Exception:
        """The error to raise."""
        self.refusal = self.refusal or refusal
        return refusal

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if any_autocast():
            raise self.refuse(_NotHereError("autocast does not act on tensors without values"))
        tensors = list(_tensors((args, kwargs)))
        if any(type(x) not in _PLAIN or x.layout is not torch.strided for x in tensors):
            raise self.refuse(_NotHereError(f"{func} has arguments of a type of their own"))
        known = tensors and all(map(self._has_values, tensors))
        if known and self._only_reads(func, args, kwargs):
            return func(*args, **kwargs)
        if not _BY_VALUES.isdisjoint(func.tags) and not _is_sized(func, args, kwargs):
            raise self.refuse(NeedsValuesError(f"{func} needs the values of its arguments"))
        self._stale.update(storage_key(x) for x in writes(func, args, kwargs) if not x.is_meta)
        return self._on_meta(func, args, kwargs, tensors)

    def _only_reads(self, func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
        """Whether an operator changes neither tensors nor random generators, and stays here."""
        device = kwargs.get("device")
        return (
            (device is None or device.type == "cpu")
            and kwargs.get("generator") is None
            and not draws(func, args, kwargs)
            and not any(True for _ in writes(func, args, kwargs))
        )

    def _has_values(self, tensor: torch.Tensor) -> bool:
        known = not tensor.is_meta and storage_key(tensor) not in self._stale
        return known and tensor.numel() <= _SMALL

    def _on_meta(self, func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> Any:
        real = {id(x): x for x in tensors if not x.is_meta}
        mixed = len(real) < len(tensors) and any(x.is_cpu and x.ndim for x in real.values())
        if mixed and self._device.type != "cpu" and "device" not in kwargs:
            raise self.refuse(_NotHereError("tensors of several devices meet"))
        metas = {key: _as_meta(x) for key, x in real.items()}
        place = lambda x: _placed(x, metas)  # noqa: E731
        args, kwargs = _mapped(place, args), _mapped(place, kwargs)
        for argument in func._schema.arguments:
            if argument.name == "device" and (not tensors or argument.name in kwargs):
                kwargs[argument.name] = META
            if argument.name in ("generator", "pin_memory"):
                kwargs.pop(argument.name, None)
        back = {id(meta): real[key] for key, meta in metas.items()}
        result = func(*args, **kwargs)
        for x in _tensors(result):
            refuse_pointers(x)
        return _mapped(lambda x: back.get(id(x), x), result) if back else result


class _Pretence(TorchFunctionMode):
    """Tensors without values say that they are on `device`, and refuse to give values."""

    def __init__(self, device: torch.device, operators: _Operators) -> None:
        super().__init__()
        self._device = device
        self._operators = operators

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # What `torch.distributions` does with these is to raise or not.
        if func is is_all_true:
            return True
        if args and isinstance(args[0], torch.Tensor) and args[0].is_meta:
            if func == _DEVICE:
                return self._device
            if func in _KINDS:
                return self._device.type == _KINDS[func]
            if func == _BOOL and sys._getframe(1).f_globals.get("__name__") == _CONSTRAINTS:
                return True
            if func in _READING:
                name = getattr(func, "__name__", str(func))
                raise self._operators.refuse(NeedsValuesError(f"`Tensor.{name}` needs values"))
        return func(*args, **(kwargs or {}))


def _is_sized(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether these arguments alone say which shape an operator gives that in general needs values.

    Elements are taken at places that are given by numbers, not by a mask, or the size is passed.
    """
    if func is torch.ops.aten.index.Tensor:
        return not any(i.dtype in (torch.bool, torch.uint8) for i in args[1] if i is not None)
    return kwargs.get("output_size") is not None


def _as_meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=META)


def _placed(x: Any, metas: dict[int, torch.Tensor]) -> Any:
    return META if isinstance(x, torch.device) else metas.get(id(x), x)


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, tuple | list):
        for item in tree:
            yield from _tensors(item)
    elif isinstance(tree, dict):
        yield from _tensors(tuple(tree.values()))


def _mapped(fn: Any, tree: Any) -> Any:
    """The arguments or the result of an operator with `fn` applied to all that is in them."""
    if isinstance(tree, dict):
        return {key: _mapped(fn, value) for key, value in tree.items()}
    if type(tree) in (tuple, list):
        return type(tree)(_mapped(fn, value) for value in tree)
    return fn(tree)


@contextlib.contextmanager
def on_fakes(device: torch.device) -> Iterator[None]:
    """Operators give fake tensors."""
    del device
    with _QUIET.here(), FakeTensorMode(allow_non_fake_inputs=True):
        yield


class _Quiet(logging.Filter):
    """Drops what threads in a run on fake tensors log: an operator that fails is no error there."""

    def __init__(self) -> None:
        super().__init__()
        self._threads: set[int] = set()
        logging.getLogger(FakeTensorMode.__module__).addFilter(self)

    def filter(self, record: logging.LogRecord) -> bool:
        return record.thread not in self._threads

    @contextlib.contextmanager
    def here(self) -> Iterator[None]:
        thread = threading.get_ident()
        self._threads.add(thread)
        try:
            yield
        finally:
            self._threads.discard(thread)


_QUIET = _Quiet()
