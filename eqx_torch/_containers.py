"""Containers of torch code that JAX's pytrees leave closed.

These are dataclasses, mappings such as Hugging Face's `ModelOutput`, `torch.return_types`, and
objects with tensors among their attributes, such as Hugging Face's caches of attention keys.
"""

import copy
import dataclasses
import itertools
import threading
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.tree_util as jtu
import torch


ARRAYS = (torch.Tensor, jax.Array)
_PLAIN = (*ARRAYS, type, str, int, float, complex, torch.nn.Module)
_OPAQUE_LIBRARIES = ("builtins", "jax", "jaxlib", "numpy", "torch")
_MOST_ATTRIBUTES = 10_000


class _StandIn:
    """Mixed into the subclass that stands for a container class in JAX; see `in_jax`.

    It is as the user's own class in all that one does with what a function has returned, and
    equal to an instance of that.
    """

    __slots__ = ()

    def __init_subclass__(cls) -> None:
        """Not that of the user's class, which may register its subclasses elsewhere."""

    def __eq__(self, other: object) -> bool:
        return _own(self) == _own(other)

    def __hash__(self) -> int:
        return hash(_own(self))

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        del protocol
        return in_jax, (own_class(type(self)), *children(self))


class _Registry:
    """For container classes that JAX does not know, the classes that stand for them there.

    A class that cannot be subclassed (of `torch.return_types`) stands for itself. JAX has no way to
    forget a class, so each stays for the life of the process.
    """

    def __init__(self) -> None:
        self.stand_ins: dict[type, type] = {}
        self.own: dict[type, type] = {}
        self.lock = threading.Lock()


_REGISTRY = _Registry()


def in_jax(cls: Any, names: tuple[Any, ...] | None, items: Sequence[Any]) -> Any:
    """A container with these children that JAX flattens.

    It is one of `cls` if JAX knows that, and else one of a subclass that was made known in its
    place: whether and how a class is a PyTree is for its author to say, now or later.
    """
    own = container(cls, names, items)
    return container(_stand_in(cls), names, items) if jtu.all_leaves([own]) else own


def own_class(cls: type) -> type:
    """The class that torch code uses, of one that may stand for it."""
    return _REGISTRY.own.get(cls, cls)


def _own(x: Any) -> Any:
    return container(own_class(type(x)), *children(x)) if isinstance(x, _StandIn) else x


def _stand_in(cls: type) -> type:
    with _REGISTRY.lock:
        if cls not in _REGISTRY.stand_ins:
            stand_in = _subclass(cls)
            _REGISTRY.stand_ins[cls] = stand_in
            # Before JAX knows it, so that it never counts as JAX's own.
            _REGISTRY.own[stand_in] = cls
            _make_known(stand_in)
        return _REGISTRY.stand_ins[cls]


def _subclass(cls: type) -> type:
    names = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
    if getattr(cls, "__hash__", None) is None:
        names["__hash__"] = None
    try:
        return types.new_class(
            cls.__name__, (_StandIn, cls), exec_body=lambda n: n.update(names, __slots__=())
        )
    except TypeError:
        return cls


def _make_known(cls: type) -> None:
    key = jtu.DictKey if issubclass(cls, Mapping) else jtu.GetAttrKey

    def with_keys(node: Any) -> Any:
        names, items = children(node)
        keys = map(jtu.SequenceKey, range(len(items))) if names is None else map(key, names)
        return tuple(zip(keys, items, strict=True)), names

    jtu.register_pytree_with_keys(
        cls,
        with_keys,
        lambda names, items: container(cls, names, list(items)),
        lambda node: (children(node)[1], children(node)[0]),
    )


def container(cls: Any, names: tuple[Any, ...] | None, items: Sequence[Any]) -> Any:
    """A container with these children."""
    if names is None:
        return cls(items)
    named = dict(zip(names, items, strict=True))
    if not dataclasses.is_dataclass(cls):
        own = own_class(cls)(named)
        return own if type(own) is cls else _as_stand_in(cls, own)
    # What `__init__` and `__post_init__` check is for the user's own values, not for tracers.
    new: Any = cls.__new__(cls)  # pyright: ignore[reportArgumentType]
    for name, value in named.items():
        if isinstance(new, dict):
            new[name] = value
        else:
            object.__setattr__(new, name, value)
    return new


def _as_stand_in(cls: Any, own: Any) -> Any:
    """A mapping as one of the subclass `cls`, which its class need not know how to make."""
    new = cls.__new__(cls)
    vars(new).update(vars(own))
    if isinstance(new, dict):
        for name, value in own.items():
            new[name] = value
    return new


def is_closed(x: Any) -> bool:
    """Whether a leaf of JAX's is a container or an object that torch code uses as one.

    Classes that stand for one in JAX count.
    """
    if x is None or isinstance(x, _PLAIN):
        return False
    if type(x) in _REGISTRY.own:
        return True
    if not jtu.all_leaves([x]):
        return False
    return is_container(x) or _is_object(x)


def is_container(x: Any) -> bool:
    """Whether it is opened whatever it holds."""
    return dataclasses.is_dataclass(x) or isinstance(x, Mapping | tuple | list)


def fresh(x: Any) -> Any:
    """A copy of an object that a function could fill, such as an empty cache; else `x` itself."""
    if not _may_hold(x):
        return x
    try:
        return copy.deepcopy(x)
    except Exception:
        return x


def _is_object(x: Any) -> bool:
    """Whether a leaf is an object of a user's or a library's class that holds tensors."""
    if not _may_hold(x):
        return False
    budget = itertools.repeat(None, _MOST_ATTRIBUTES)
    try:
        return _holds_tensors(x, (), budget)
    except _EndlessError:
        return False


class _EndlessError(Exception):
    """An object refers to itself, or to a great many others."""


def _holds_tensors(x: Any, above: tuple[int, ...], budget: Iterator[None]) -> bool:
    if isinstance(x, ARRAYS):
        return True
    if not (isinstance(x, Mapping | list | tuple) or _may_hold(x)):
        return False
    if id(x) in above or next(budget, x) is x:
        raise _EndlessError
    # All of it is searched: a tensor may come first and a reference to the object itself later.
    found = [_holds_tensors(y, (*above, id(x)), budget) for y in children(x)[1]]
    return any(found)


def _may_hold(x: Any) -> bool:
    library = type(x).__module__.partition(".")[0]
    return hasattr(x, "__dict__") and not callable(x) and library not in _OPAQUE_LIBRARIES


def children(node: Any) -> tuple[tuple[Any, ...] | None, list[Any]]:
    """The children of a container or an object, and their names, None if they are numbered."""
    if isinstance(node, Mapping):
        return tuple(node.keys()), list(node.values())
    if dataclasses.is_dataclass(node):
        present = [f.name for f in dataclasses.fields(node) if hasattr(node, f.name)]
        return tuple(present), [getattr(node, name) for name in present]
    if isinstance(node, tuple | list):
        return None, list(node)
    return tuple(vars(node)), list(vars(node).values())
