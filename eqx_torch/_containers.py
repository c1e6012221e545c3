"""Containers of torch code that JAX's pytrees leave closed.

These are dataclasses, mappings such as Hugging Face's `ModelOutput`, `torch.return_types`, and
objects with tensors among their attributes, such as Hugging Face's caches of attention keys.
"""

import copy
import dataclasses
import itertools
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.tree_util as jtu
import torch


ARRAYS = (torch.Tensor, jax.Array)
_PLAIN = (*ARRAYS, type, str, int, float, complex, torch.nn.Module)
_OPAQUE_LIBRARIES = ("builtins", "jax", "jaxlib", "numpy", "torch")
_MOST_ATTRIBUTES = 10_000


class _Registry:
    """The container classes that were made known to JAX here.

    Invariant: a class is in `classes` before JAX knows it, so that it never counts as JAX's own.
    """

    def __init__(self) -> None:
        self.classes: set[type] = set()
        self.lock = threading.Lock()


_REGISTRY = _Registry()


def make_known(cls: type) -> None:
    """Makes JAX flatten the containers of a class, unless it does.

    This is for the whole process, and whoever registers the class later is told that it is.
    """
    with _REGISTRY.lock:
        if cls in _REGISTRY.classes:
            return
        _REGISTRY.classes.add(cls)
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


def _swapped(named: tuple[Any, list[Any]]) -> tuple[list[Any], Any]:
    names, items = named
    return items, names


def container(cls: Any, names: tuple[Any, ...] | None, items: Sequence[Any]) -> Any:
    """A container with these children."""
    if names is None:
        return cls(items)
    named = zip(names, items, strict=True)
    if not dataclasses.is_dataclass(cls):
        return cls(dict(named))
    # What `__init__` and `__post_init__` check is for the user's own values, not for tracers.
    new: Any = cls.__new__(cls)  # pyright: ignore[reportArgumentType]
    for name, value in named:
        if isinstance(new, dict):
            new[name] = value
        else:
            object.__setattr__(new, name, value)
    return new


def is_closed(x: Any) -> bool:
    """Whether a leaf of JAX's is a container or an object that torch code uses as one.

    Classes that were made known to JAX here still count.
    """
    if x is None or isinstance(x, _PLAIN):
        return False
    if type(x) in _REGISTRY.classes:
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
