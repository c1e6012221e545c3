"""The Python objects that a function can reach: where it may keep something, whom it may call."""

import functools
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch


CachedFunction = type(functools.lru_cache(lambda: None))

_OPAQUE = (types.ModuleType, str, int, float, complex, bytes)
_LIBRARIES = ("jax", "jaxlib", "numpy", "torch")


def reachable(root: Any, neighbours: Callable[[Any], Iterable[Any]] | None = None) -> Iterator[Any]:
    """Every object that can be reached from `root`, once.

    Args:
        root: a function, method, partial, module, callable object or container of these.
        neighbours: what an object reaches at once; by default, what it may keep something in.
    """
    neighbours = neighbours or kept_by
    seen: set[int] = set()
    pending = [root]
    while pending:
        item = pending.pop()
        if item is None or isinstance(item, _OPAQUE) or id(item) in seen:
            continue
        seen.add(id(item))
        yield item
        pending.extend(neighbours(item))


def globals_of(function: types.FunctionType) -> dict[str, Any]:
    """The globals that a function names, and those that functions inside it do."""
    scope = function.__globals__
    return {name: scope[name] for name in names_in(function.__code__) if name in scope}


def names_in(code: types.CodeType) -> set[str]:
    """The names of globals and attributes in code, that of functions inside it included."""
    inner = [c for c in code.co_consts if isinstance(c, types.CodeType)]
    return set(code.co_names).union(*map(names_in, inner))


def is_library(module: str | None) -> bool:
    """Whether a module of this name belongs to Python, JAX, NumPy or torch."""
    package = (module or "").partition(".")[0]
    return package in sys.stdlib_module_names or package in _LIBRARIES


def kept_by(item: Any) -> Iterable[Any]:
    """What an object holds, and what a function names."""
    if isinstance(item, dict):
        return item.values()
    if isinstance(item, list | tuple | set):
        return item
    if isinstance(item, functools.partial):
        return [item.func, item.args, item.keywords]
    if isinstance(item, types.MethodType):
        return [item.__func__, item.__self__]
    if isinstance(item, types.CellType):
        return [item.cell_contents]
    if isinstance(item, types.FunctionType):
        cells = [c for c in item.__closure__ or () if _is_filled(c)]
        own = [*cells, item.__defaults__, item.__kwdefaults__, item.__dict__]
        return [*own, *globals_of(item).values()]
    if isinstance(item, CachedFunction):
        return [item.__wrapped__]
    if isinstance(item, type):
        return []
    return [item.__dict__] if _is_users(item) else []


def _is_users(item: Any) -> bool:
    """Whether an object's attributes are open: those of libraries are theirs alone."""
    open_ = isinstance(item, torch.nn.Module) or not is_library(type(item).__module__)
    return open_ and isinstance(getattr(item, "__dict__", None), dict)


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False
