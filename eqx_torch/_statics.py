"""Python values beside the arrays of a call, which are part of its program.

Programs are shared by equal values, and Python calls values equal that torch tells apart (`1`,
`1.0` and `True`; `0.0` and `-0.0`), in any container. So a `Static` has a key, by value and by
type, all the way down. What can be changed is keyed by what it holds now, and kept as a copy that
no one else can change. What is neither of a known kind nor hashable is itself only.
"""

import collections
import copy
import functools
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np


_OPAQUE_LIBRARIES = ("builtins", "jax", "jaxlib", "numpy", "torch")
_ATOMS = (bool, int, str, type(None))
_MAPPINGS = (dict, collections.OrderedDict)
_MUTABLE = (list, collections.deque, *_MAPPINGS)


class Static:
    """A Python value; equal only to one of the same type that holds the same."""

    __slots__ = ("_changes", "_hash", "_key", "_value")

    def __init__(self, value: Any) -> None:
        try:
            self._key, self._value = _frozen(value)
        except RecursionError:  # it holds itself
            self._key, self._value = (type(value), id(value)), value
        self._changes = self._value is not value
        self._hash = hash(self._key)

    @property
    def value(self) -> Any:
        """The value, not to be changed."""
        return self._value

    def for_call(self) -> Any:
        """The value for one call, which may change it."""
        return _frozen(self._value)[1] if self._changes else _fresh(self._value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Static) and self._key == other._key

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return f"Static({self._value!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Static, (self._value,)


def may_hold(x: Any) -> bool:
    """Whether it is an object of a user's or a library's class, which code could fill."""
    library = type(x).__module__.partition(".")[0]
    return hasattr(x, "__dict__") and not callable(x) and library not in _OPAQUE_LIBRARIES


def _fresh(x: Any) -> Any:
    """A copy of an object that a function could fill, such as an empty cache; else `x` itself."""
    if not may_hold(x):
        return x
    try:
        return copy.deepcopy(x)
    except Exception:
        return x


def _frozen(x: Any) -> tuple[Hashable, Any]:
    """What a value is told apart by, and the value with copies of what can be changed in it."""
    kind = type(x)
    if kind in _ATOMS:
        return (kind, x), x
    if isinstance(x, float | complex):
        return (kind, repr(x)), x
    if isinstance(x, range):
        return (kind, x.start, x.stop, x.step), x
    if isinstance(x, set | frozenset):
        key = frozenset(_frozen(part)[0] for part in x)
        return (kind, key), x.copy() if kind is set else x
    if kind is bytearray:
        return (kind, bytes(x)), x.copy()
    if kind is np.ndarray and x.dtype != object:
        return (kind, x.shape, x.dtype.str, x.tobytes()), x.copy()
    opened = _opened(x)
    if opened is not None:
        parts, make = opened
        frozen = [_frozen(part) for part in parts]
        same = all(copy is part for part, (_, copy) in zip(parts, frozen, strict=True))
        keep = same and not _is_mutable(x)
        key = kind, tuple(key for key, _ in frozen)
        return key, x if keep else make([copy for _, copy in frozen])
    try:
        hash(x)
    except TypeError:
        return (kind, id(x)), x
    return (kind, x), x


def _opened(x: Any) -> tuple[list[Any], Callable[[list[Any]], Any]] | None:
    """The parts of a value that is keyed by them, and how to make it of them."""
    kind = type(x)
    if isinstance(x, tuple):
        return list(x), getattr(kind, "_make", kind)
    if kind is list:
        return x, kind
    if kind is collections.deque:
        return [*x, x.maxlen], lambda parts: kind(parts[:-1], parts[-1])
    if kind in _MAPPINGS:
        return [*x, *x.values()], lambda parts: kind(zip(*_halves(parts), strict=True))
    if kind is slice:
        return [x.start, x.stop, x.step], lambda parts: slice(*parts)
    if kind is functools.partial:
        return [x.func, x.args, x.keywords], lambda p: functools.partial(p[0], *p[1], **p[2])
    names = _fields(x)
    if names is None:
        return None
    return [getattr(x, name) for name in names], lambda parts: _replaced(x, names, parts)


def _is_mutable(x: Any) -> bool:
    parameters = getattr(type(x), "__dataclass_params__", None)
    return type(x) in _MUTABLE or (parameters is not None and not parameters.frozen)


def _fields(x: Any) -> list[str] | None:
    """The names of the fields of a dataclass, or an attrs class, that compares by value."""
    kind = type(x)
    if kind.__eq__ is object.__eq__:
        return None
    fields = getattr(kind, "__dataclass_fields__", None)
    found = fields if fields is not None else [a.name for a in getattr(kind, "__attrs_attrs__", ())]
    return [name for name in found if hasattr(x, name)] or None


def _replaced(x: Any, names: list[str], parts: list[Any]) -> Any:
    new = object.__new__(type(x))
    if hasattr(x, "__dict__"):
        new.__dict__.update(x.__dict__)
    for name, part in zip(names, parts, strict=True):
        object.__setattr__(new, name, part)
    return new


def _halves(parts: list[Any]) -> tuple[list[Any], list[Any]]:
    return parts[: len(parts) // 2], parts[len(parts) // 2 :]
