"""The Python objects near a function: where it may keep something, whom it may call.

A search is bounded, so that it costs the same whatever a program holds: it begins with what the
function itself names, and does not look into containers that are larger than code writes them.
"""

import collections
import functools
import itertools
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch


CachedFunction = type(functools.lru_cache(lambda: None))
LARGE = 1000  # entries

_MOST = 50_000  # objects: those of a module of some thousand layers
_OPAQUE = (types.ModuleType, str, int, float, complex, bytes)
_CONTAINERS: tuple[Any, ...] = (dict, list, tuple, set, collections.deque)
_SWAPPER = "functional_call"
_LIBRARIES = ("jax", "jaxlib", "numpy", "torch")


def reachable(root: Any, neighbours: Callable[[Any], Iterable[Any]] | None = None) -> Iterator[Any]:
    """The objects that can be reached from `root`, the nearest first, each once.

    Args:
        root: a function, method, partial, module, callable object or container of these.
        neighbours: what an object reaches at once; by default, what it may keep something in.
    """
    neighbours = neighbours or kept_by
    seen: set[int] = set()
    pending = collections.deque([root])
    while pending and len(seen) < _MOST:
        item = pending.popleft()
        if item is None or isinstance(item, _OPAQUE) or id(item) in seen:
            continue
        seen.add(id(item))
        yield item
        pending.extend(neighbours(item))


def seems_to_swap(function: Callable[..., Any]) -> bool:
    """Whether a function, or one that is near it, names `torch.func.functional_call`.

    That puts tensors in the place of a module's parameters while it runs.
    """
    functions = (x for x in reachable(function, called_by) if isinstance(x, types.FunctionType))
    return any(_SWAPPER in (f.__name__, *names_in(f.__code__)) for f in functions)


def reaches_module(function: Callable[..., Any]) -> bool:
    """Whether a torch module is near a function, in which others may swap parameters."""
    return any(isinstance(x, torch.nn.Module) for x in reachable(function))


def scripts_near(root: Any) -> tuple[torch.jit.ScriptModule, ...]:
    """The TorchScript modules, scripted or traced, near a function or a module."""
    return tuple(x for x in reachable(root) if isinstance(x, torch.jit.ScriptModule))


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
    if isinstance(item, _CONTAINERS):
        return _contents(item)
    if isinstance(item, functools.partial):
        return [item.func, item.args, item.keywords]
    if isinstance(item, types.MethodType):
        return [item.__func__, item.__self__]
    if isinstance(item, types.CellType):
        return [item.cell_contents] if is_filled(item) else []
    if isinstance(item, types.FunctionType):
        own = [*(item.__closure__ or ()), item.__defaults__, item.__kwdefaults__, item.__dict__]
        is_own = not is_library(item.__globals__.get("__name__"))
        return [*own, *globals_of(item).values()] if is_own else own
    if isinstance(item, CachedFunction):
        return [item.__wrapped__]
    if isinstance(item, type):
        return [] if is_library(item.__module__) else [x for _, x in members(item)]
    return [item.__dict__, type(item)] if _is_users(item) else []


def called_by(item: Any) -> Iterable[Any]:
    """What an object may call, but for what libraries that are installed do."""
    return [] if is_closed(item) else kept_by(item)


def is_closed(item: Any) -> bool:
    """Whether it is a function or a class of a library that is installed."""
    if not isinstance(item, types.FunctionType | type):
        return False
    module = sys.modules.get(item.__module__ or "")
    installed = "-packages" in str(getattr(module, "__file__", ""))
    return installed or is_library(item.__module__)


def _contents(container: Any) -> Iterable[Any]:
    # Classes may have their own idea of what a dict has, and other threads may be adding to it.
    kind = next(kind for kind in _CONTAINERS if isinstance(container, kind))
    if kind.__len__(container) > LARGE:
        return ()
    return tuple(dict.copy(container).values() if kind is dict else kind.__iter__(container))


def _is_users(item: Any) -> bool:
    """Whether an object's attributes are open: those of libraries are theirs alone."""
    open_ = isinstance(item, torch.nn.Module) or not is_library(type(item).__module__)
    return open_ and isinstance(getattr(item, "__dict__", None), dict)


def is_filled(cell: types.CellType) -> bool:
    """Whether a variable of a closure has a value."""
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def members(cls: type) -> list[tuple[str, Any]]:
    """The methods of a class, and what else is kept in it, by name."""
    own = [tuple(vars(c).items()) for c in cls.__mro__ if not is_library(c.__module__)]
    return [(name, _behind_descriptor(x)) for name, x in itertools.chain(*own)]


def _behind_descriptor(x: Any) -> Any:
    if isinstance(x, staticmethod | classmethod):
        return x.__func__
    return x.fget if isinstance(x, property) else x
