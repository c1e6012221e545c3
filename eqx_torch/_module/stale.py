"""Tensors that a module has computed before it is converted, and that would be constants.

What a forward caches is computed in a converted module from the parameters of the very call. What
it has cached earlier looks like any other tensor that a module holds beside its parameters. Two
things tell: a graph, or methods that may read the attribute before they set it, as their bytecode
shows. An attribute that every call sets first, such as the weights of its last attention, is no
cache.
"""

import collections
import dis
import functools
import types
import warnings
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from .._reachable import is_library, names_in
from .._watch import storage_key
from .layers import computed_by_hooks
from .places import is_open, Place, walk
from .variables import is_installed, methods_of


_JUMPS = frozenset([*dis.hasjrel, *dis.hasjabs])
_RETURNS = frozenset(["RETURN_VALUE", "RETURN_CONST"])
_NEVER_GO_ON = _RETURNS | {"RAISE_VARARGS", "RERAISE", "JUMP_FORWARD", "JUMP_BACKWARD"}
_LOADS = frozenset(["LOAD_ATTR", "LOAD_METHOD"])
_READS = _LOADS | {"LOAD_CONST"}


def warn_of_stale(module: torch.nn.Module, method: str) -> None:
    """Warns of each tensor that an earlier call of the method has left."""
    places = list(walk(module))
    registered = [*module.parameters(), *module.buffers()]
    known = {storage_key(tensor) for tensor in registered if tensor.layout is torch.strided}
    loose = {id(p.value): p for p in places if _is_loose(p.value, known)}
    if not loose:
        return
    owners = {type(p.value) for p in places if is_open(p.value)}
    classes = {cls for owner in owners for cls in owner.__mro__}
    functions = _run_by(method, [f for cls in classes for f in _methods(cls)])
    for place in loose.values():
        if _is_stale(place, functions, method):
            warnings.warn(_message(type(module).__name__, place.path), stacklevel=3)


def _message(name: str, path: str) -> str:
    return (
        f"`{path}` of `{name}` holds a tensor that was computed before the conversion, by an "
        "earlier call or when the module was made, and is now a constant: it does not follow the "
        "parameters, and no gradient flows through it. If the forward computes it, set it to None "
        "or remove it, or convert a new module; if it is a constant, detach it and register it "
        "(`self.register_buffer`)."
    )


def _is_loose(value: object, known: set[int]) -> bool:
    if not isinstance(value, torch.Tensor) or isinstance(value, torch.nn.Parameter):
        return False
    computed = value.is_floating_point() or value.is_complex()
    return computed and value.layout is torch.strided and storage_key(value) not in known


def _methods(cls: type) -> list[types.FunctionType]:
    if is_library(cls.__module__):
        return []
    return [function for function in methods_of(cls) if not is_installed(function)]


def _run_by(method: str, functions: Sequence[types.FunctionType]) -> list[types.FunctionType]:
    """Those of the functions that a call may run, by their names."""
    names = {method, "forward", "__call__"}
    while True:
        found = [f for f in functions if f.__name__ in names]
        more = set[str]().union(*(names_in(f.__code__) for f in found))
        if more <= names:
            return found
        names |= more


def _is_stale(place: Place, functions: Iterable[types.FunctionType], method: str) -> bool:
    has_graph = isinstance(place.value, torch.Tensor) and place.value.grad_fn is not None
    owner = place.outer.value if place.outer is not None else None
    if not isinstance(place.key, str) or place.step != f".{place.key}":
        return has_graph
    if isinstance(owner, torch.nn.Module) and place.key in computed_by_hooks(owner):
        return False
    if isinstance(getattr(type(owner), place.key, None), functools.cached_property):
        return True
    uses = _Uses(functions, place.key)
    setting = [use for use in map(uses.of, (method, "forward", "__call__")) if use.sets]
    return any(use.may_read for use in setting) if setting else has_graph


class _Use(NamedTuple):
    """What functions of one name do to an attribute.

    Attributes:
        sets: whether they set it.
        may_read: whether they may read it, or ask for it by name, before they set it.
        may_end: whether they may return without having set it.
    """

    sets: bool
    may_read: bool
    may_end: bool


_NOTHING = _Use(sets=False, may_read=False, may_end=True)


class _Uses:
    """What functions, and those that they call by the names of attributes, do to an attribute."""

    def __init__(self, functions: Iterable[types.FunctionType], attribute: str) -> None:
        self._attribute = attribute
        self._functions: dict[str, list[types.FunctionType]] = collections.defaultdict(list)
        for function in functions:
            self._functions[function.__name__].append(function)
        self._known: dict[str, _Use] = {}

    def of(self, name: str) -> _Use:
        """What the functions of a name do."""
        if name not in self._known:
            self._known[name] = _NOTHING  # if it calls itself
            uses = [self._use(function) for function in self._functions.get(name, ())]
            self._known[name] = _Use(*map(any, zip(*uses, strict=True))) if uses else _NOTHING
        return self._known[name]

    def _use(self, function: types.FunctionType) -> _Use:
        steps = list(dis.get_instructions(function))
        positions = {step.offset: i for i, step in enumerate(steps)}
        sets = may_read = may_end = False
        pending, seen = [0], set[int]()
        while pending:
            i = pending.pop()
            if i in seen or i >= len(steps):
                continue
            seen.add(i)
            step = steps[i]
            if step.opname == "STORE_ATTR" and step.argval == self._attribute:
                # A tensor that is added to is written to, which the first call tells.
                sets = sets or not any(s.argrepr == "+=" for s in steps[max(i - 2, 0) : i])
                continue
            if step.opname in _READS and step.argval == self._attribute:
                may_read = True
            elif step.opname in _LOADS and step.argval in self._functions:
                called = self.of(step.argval)
                sets, may_read = sets or called.sets, may_read or called.may_read
                if not called.may_end:
                    continue
            may_end = may_end or step.opname in _RETURNS
            if step.opcode in _JUMPS:
                pending.append(positions[step.argval])
            if step.opname not in _NEVER_GO_ON:
                pending.append(i + 1)
        return _Use(sets, may_read, may_end)
