"""What the code of a function may do, on this call or on a later one, as its bytecode shows.

What a run shows holds for the values that it had, and a write may wait for others: `if bad.any():
x.data[bad] = 0`. So the code itself is asked whether it names a way to write. It may be wrong in
one direction at no harm: who does not write works on copies in vain. Only code is looked at that a
call can come to: methods whose names it mentions, nothing of installed libraries, no initialisers.
"""

import collections
import dis
import functools
import itertools
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch

from ._reachable import called_by, is_closed, members, names_in, reachable


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
# What makes a pullback of a number other than that number times the pullback of 1: hooks and
# backwards of the user's, by what they do, and half precision, by underflow.
_SCALED = frozenset(
    [
        *("register_full_backward_hook", "register_full_backward_pre_hook"),
        *("backward", "custom_bwd", "autocast", "half", "float16"),
    ]
)
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


class Ways(NamedTuple):
    """The ways to write that code near a function names.

    Attributes:
        unseen: those that torch does not see.
        in_place: those that it counts.
        unrecorded: no way by itself: where no gradient is recorded, these go for parameters too.
        hooks: no way by itself: hooks on gradients, of which a graph does not tell.
        scaled: no way by itself: a pullback may depend on the scale of what it is given.
    """

    unseen: bool = False
    in_place: bool = False
    unrecorded: bool = False
    hooks: bool = False
    scaled: bool = False


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
            return list(itertools.chain(*itertools.starmap(self._called, members(item))))
        if not isinstance(item, types.FunctionType):
            return called_by(item)
        new = names_in(item.__code__) - self._named
        self._named |= new
        released = itertools.chain(*(self._waiting.pop(name, ()) for name in new))
        return [*called_by(item), *released]

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
    hooks = bool(names & _HOOKS)
    scaled = hooks or not _SCALED.isdisjoint([*names, code.co_name])
    return Ways(bool(names & _UNSEEN), in_place, unrecorded, hooks, scaled)


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
