"""The Python objects near a function: where it may keep something, whom it may call, and what for.

A search is bounded, so that it costs the same whatever a program holds: it begins with what the
function itself names, and does not look into containers that are larger than code writes them.

What a run shows holds for the values that it had, and a write may wait for others: `if bad.any():
x.data[bad] = 0`. So the code itself is asked, by its bytecode, whether it names a way to write. It
may be wrong in one direction at no harm: who does not write works on copies in vain. Only code is
looked at that a call can come to: methods whose names it mentions, nothing of installed libraries,
no initialisers.
"""

import collections
import dis
import functools
import itertools
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch


CachedFunction = type(functools.lru_cache(lambda: None))
LARGE = 1000  # entries

_MOST = 50_000  # objects: those of a module of some thousand layers
_OPAQUE = (types.ModuleType, str, int, float, complex, bytes)
_CONTAINERS: tuple[Any, ...] = (dict, list, tuple, set, collections.deque)
_SWAPPER = "functional_call"
_LIBRARIES = ("jax", "jaxlib", "numpy", "torch")

# Ways to memory by which torch does not see writes.
_UNSEEN = frozenset(
    [
        *("data", "set_", "data_ptr", "storage", "untyped_storage", "_typed_storage"),
        *("numpy", "array", "asarray", "asanyarray", "ascontiguousarray", "frombuffer"),
        *("__array__", "__array_interface__", "__cuda_array_interface__"),
        *("from_dlpack", "to_dlpack", "__dlpack__"),
    ]
)
_KEYWORDS = frozenset(["out", "inplace"])
_HARMLESS = frozenset(["requires_grad_", "detach_", "share_memory_", "rename_"])
_HOOKS = frozenset(["register_hook", "register_prehook", "register_multi_grad_hook"])
# Parameters require gradients, and torch lets nobody write to them where it records.
_UNRECORDED = frozenset(["no_grad", "inference_mode", "set_grad_enabled", "backward", "jvp"])
# Methods that are called by others than the user's code.
_ENTRIES = frozenset(["forward", "backward", "jvp", "vmap", "setup_context"])
_INITIALISERS = frozenset(
    [
        *("__init__", "__new__", "__post_init__", "__setstate__", "__init_subclass__"),
        *("reset_parameters", "_reset_parameters", "init_weights", "_init_weights"),
    ]
)


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
    functions = (x for x in reachable(function, _called_by) if isinstance(x, types.FunctionType))
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
        return [] if is_library(item.__module__) else [x for _, x in _members(item)]
    return [item.__dict__, type(item)] if _is_users(item) else []


def _called_by(item: Any) -> Iterable[Any]:
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


def _members(cls: type) -> list[tuple[str, Any]]:
    """The methods of a class, and what else is kept in it, by name."""
    own = [tuple(vars(c).items()) for c in cls.__mro__ if not is_library(c.__module__)]
    return [(name, _behind_descriptor(x)) for name, x in itertools.chain(*own)]


def _behind_descriptor(x: Any) -> Any:
    if isinstance(x, staticmethod | classmethod):
        return x.__func__
    return x.fget if isinstance(x, property) else x


class Ways(NamedTuple):
    """The ways to write that code near a function names.

    Attributes:
        unseen: those that torch does not see.
        in_place: those that it counts.
        unrecorded: no way by itself: where no gradient is recorded, these go for parameters too.
        hooks: no way by itself: hooks on gradients, of which a graph does not tell.
    """

    unseen: bool = False
    in_place: bool = False
    unrecorded: bool = False
    hooks: bool = False


def ways_to_write(function: Callable[..., Any]) -> Ways:
    """How a function, or what it may call, could write to what it is given."""
    found = map(_ways_in, _code_of(function))
    return Ways(*map(any, zip(Ways(), *found, strict=True)))


def attributes_set_by(function: Callable[..., Any]) -> frozenset[str]:
    """The names of the attributes that a function, or what it may call, sets."""
    steps = (step for code in _code_of(function) for step in _steps(code))
    return frozenset(step.argval for step in steps if step.opname == "STORE_ATTR")


def _code_of(function: Callable[..., Any]) -> Iterator[types.CodeType]:
    for item in reachable(function, _Calls()):
        if isinstance(item, types.FunctionType) and not is_closed(item):
            yield item.__code__


class _Calls:
    """What objects may call, but for methods that no code met so far has named."""

    def __init__(self) -> None:
        self._named = set(_ENTRIES)
        self._waiting: dict[str, list[Any]] = collections.defaultdict(list)

    def __call__(self, item: Any) -> Iterable[Any]:
        if is_closed(item):
            return []
        if isinstance(item, type):
            return list(itertools.chain(*itertools.starmap(self._called, _members(item))))
        if not isinstance(item, types.FunctionType):
            return _called_by(item)
        new = names_in(item.__code__) - self._named
        self._named |= new
        released = itertools.chain(*(self._waiting.pop(name, ()) for name in new))
        return [*_called_by(item), *released]

    def _called(self, name: str, member: Any) -> list[Any]:
        if name in _INITIALISERS:
            return []
        special = name.startswith("__") and name.endswith("__")
        if special or name in self._named or not isinstance(member, types.FunctionType):
            return [member]
        self._waiting[name].append(member)
        return []


def _steps(code: types.CodeType) -> Iterator[dis.Instruction]:
    """The instructions of code, and of functions inside it."""
    yield from dis.get_instructions(code)
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _steps(inner)


def _ways_in(code: types.CodeType) -> Ways:
    names = names_in(code)
    in_place = any(map(_writes_in_place, names)) or _assigns(code)
    unrecorded = not _UNRECORDED.isdisjoint([*names, code.co_name])
    return Ways(bool(names & _UNSEEN), in_place, unrecorded, bool(names & _HOOKS))


@functools.cache
def _writes_in_place(name: str) -> bool:
    if not name.endswith("_") or name.endswith("__") or name in _HARMLESS:
        return False
    return any(hasattr(x, name) for x in (torch.Tensor, torch, torch.nn.functional))


def _assigns(code: types.CodeType) -> bool:
    """Whether code assigns to items, to its arguments in place, or to `out=`."""
    keywords = (c for c in code.co_consts if isinstance(c, tuple))
    if any(_KEYWORDS.intersection(c) for c in keywords):
        return True
    if any(_assigns(c) for c in code.co_consts if isinstance(c, types.CodeType)):
        return True
    arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    steps = list(dis.get_instructions(code))
    return any(_is_assignment(a, b, arguments) for a, b in itertools.pairwise(steps))


def _is_assignment(a: dis.Instruction, b: dis.Instruction, arguments: tuple[str, ...]) -> bool:
    if b.opname == "STORE_SUBSCR":
        return not (a.opname == "LOAD_CONST" and isinstance(a.argval, str))
    if b.opname == "STORE_SLICE":
        return True
    if not (a.opname == "BINARY_OP" and a.argrepr.endswith("=") and b.opname.startswith("STORE_")):
        return False
    target = b.argval[0] if isinstance(b.argval, tuple) else b.argval
    return target in arguments
