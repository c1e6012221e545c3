"""Copies of a module that share nothing with it, and the places where their tensors stand.

`copy.deepcopy` copies a module, but leaves alone what it takes for values: functions, whatever they
close over, weak references, methods of tensors. Where these lead back to a tensor or to a layer of
the module, a copy would read the original's; where to a random generator, all copies would draw
from one. So functions are copied too, with the variables of theirs that lead there, and what refers
to something that is copied is made anew for the copy.

A slot is a container and a key, so that `container[key] = tensor` puts a tensor there.
"""

import collections
import copy
import dataclasses
import functools
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from .._errors import ModuleError
from .._reachable import CachedFunction
from .places import is_atom, is_filled, is_generator, is_open, Place, ScriptAttributes, walk


Slot = tuple[Any, Any]


@dataclasses.dataclass(frozen=True)
class Copy:
    """A copy of a module.

    Attributes:
        module: the copy.
        slots: where its tensors stand, by their identities; first where they are registered.
        places: everything in it that may change.
    """

    module: torch.nn.Module
    slots: dict[int, list[Slot]]
    places: list[Place]


def fill(slots: Sequence[Sequence[Slot]], tensors: Sequence[torch.Tensor]) -> None:
    """Puts each tensor in its places."""
    for places, tensor in zip(slots, tensors, strict=True):
        for container, key in places:
            container[key] = tensor


def copied(module: torch.nn.Module, tensors: Mapping[int, Any]) -> Copy:
    """A copy of a module.

    Args:
        module: the module.
        tensors: by identity, what stands in the copy in place of each tensor.

    Raises:
        ModuleError: the module cannot be copied.
    """
    graph = _Graph(module, tensors)
    memo = {**tensors, **graph.constants()}
    try:
        new = graph.copy(memo)
    except ModuleError:
        raise
    except Exception as error:
        raise ModuleError(
            f"`{type(module).__name__}` cannot be converted, because `copy.deepcopy` cannot copy "
            f"it: {error}\nEach device thread needs a copy of the module (without its "
            "parameters). Give the part that cannot be copied a `__deepcopy__`, or wrap a "
            "function that calls the module by `torch2jax`."
        ) from error
    places = list(walk(new, _is_made(memo)))
    return Copy(new, _slots(new, places), places)


def buffer_slot(module: torch.nn.Module, name: str) -> Slot:
    """Where a buffer stands."""
    owner_name, _, key = name.rpartition(".")
    owner = dict(module.named_modules(remove_duplicate=False))[owner_name]
    scripted = isinstance(owner, torch.jit.ScriptModule)
    return ScriptAttributes(owner) if scripted else owner._buffers, key


class _Graph:
    """What a module can reach, and what of that leads to its tensors, layers or generators."""

    def __init__(self, module: torch.nn.Module, tensors: Mapping[int, Any]) -> None:
        self._module = module
        self._tensors = tensors
        self._places = list(walk(module))
        self._holding = _leading(self._places, {*tensors, *map(id, module.modules())})
        generators = {id(p.value) for p in self._places if is_generator(p.value)}
        self._leading = self._holding | _leading(self._places, generators)

    def constants(self) -> dict[int, torch.Tensor]:
        """Copies of the computed tensors that modules keep, which deepcopy refuses to copy."""
        return {
            id(place.value): place.value.detach().clone()
            for place in self._places
            if isinstance(place.value, torch.Tensor)
            and place.value.grad_fn is not None
            and id(place.value) not in self._tensors
        }

    def copy(self, memo: dict[int, Any]) -> torch.nn.Module:
        """The copy; `memo` is that of deepcopy."""
        leading = [p.value for p in self._places if id(p.value) in self._leading]
        functions = {id(f): f for f in leading if isinstance(f, types.FunctionType)}
        for function in functions.values():
            memo[id(function)] = self._shell(function, memo)
        late = {id(x): make for x in leading if (make := self._later(x, functions)) is not None}
        late |= self._references(memo)
        memo.update((key, _Late(make)) for key, make in late.items())
        new = copy.deepcopy(self._module, memo)
        for function in functions.values():
            self._furnish(function, memo)
        _copy_scripted(self._module, new, self._tensors)
        if late:
            _fulfil(new, memo)
        self._check_copied(memo)
        return new

    def _shell(self, function: types.FunctionType, memo: dict[int, Any]) -> types.FunctionType:
        """A copy of a function whose variables are still empty."""
        closure = function.__closure__ and tuple(
            memo.setdefault(id(c), types.CellType()) if self._is_own(c) else c
            for c in function.__closure__
        )
        code, scope = function.__code__, function.__globals__
        new = types.FunctionType(code, scope, function.__name__, None, closure)
        for name in (*functools.WRAPPER_ASSIGNMENTS, "__defaults__", "__kwdefaults__"):
            setattr(new, name, getattr(function, name))
        new.__dict__.update(function.__dict__)
        return new

    def _is_own(self, cell: types.CellType) -> bool:
        """Whether a variable is to be copied; what else it holds is the user's, to be looked at."""
        return id(cell) in self._leading or (is_filled(cell) and is_atom(cell.cell_contents))

    def _furnish(self, old: types.FunctionType, memo: dict[int, Any]) -> None:
        new = memo[id(old)]
        for cell, own in zip(old.__closure__ or (), new.__closure__ or (), strict=True):
            if own is not cell and is_filled(cell) and not is_filled(own):
                own.cell_contents = copy.deepcopy(cell.cell_contents, memo)
        for name in ("__defaults__", "__kwdefaults__", "__dict__"):
            if id(getattr(old, name)) in self._leading:
                setattr(new, name, copy.deepcopy(getattr(old, name), memo))

    def _later(self, item: Any, functions: Mapping[int, Any]) -> Callable[..., Any] | None:
        """What makes the counterpart in the copy, of what deepcopy would not copy."""
        if isinstance(item, types.MethodType):
            if id(item.__func__) in functions or isinstance(item.__self__, torch.Tensor):
                return lambda of: types.MethodType(of(item.__func__), of(item.__self__))
        elif isinstance(item, types.BuiltinMethodType | types.MethodWrapperType):
            return lambda of: getattr(of(item.__self__), item.__name__)
        elif isinstance(item, CachedFunction):
            return lambda of: functools.lru_cache(**item.cache_parameters())(of(item.__wrapped__))
        return None

    def _references(self, memo: Mapping[int, Any]) -> dict[int, Callable[..., Any]]:
        """What makes weak references and proxies to what is in the graph itself."""
        reached = {id(place.value) for place in self._places}
        found: dict[int, Callable[..., Any]] = {}
        for place in self._places:
            if type(place.value) is weakref.ref:
                target, make = place.value(), weakref.ref
            elif type(place.value) in weakref.ProxyTypes:
                target, make = _behind(place.value), weakref.proxy
            else:
                continue
            if id(target) in reached or id(target) in memo:
                found[id(place.value)] = lambda of, make=make, target=target: make(of(target))
        return found

    def _check_copied(self, memo: Mapping[int, Any]) -> None:
        """Raises if an object that leads to a tensor is in the copy what it is in the original."""
        for place in self._places:
            item = place.value
            shared = id(item) not in memo or memo[id(item)] is item
            if shared and id(item) in self._holding and _is_object(item):
                raise ModuleError(
                    f"`{type(self._module).__name__}` cannot be converted: "
                    f"`{place.path}` leads to its parameters, but `copy.deepcopy` does not copy "
                    f"a {type(item).__name__}, so that the parameters of the original would be "
                    "read for ever. Give it a `__deepcopy__` that does, or pass what it holds as "
                    "an argument."
                )


class _Late:
    """Stands in a copy for what can only be made when all else is there."""

    def __init__(self, make: Callable[[Callable[[Any], Any]], Any]) -> None:
        self.make = make


def _leading(places: Sequence[Place], targets: set[int]) -> set[int]:
    """The identities of what leads to the targets."""
    holders: dict[int, list[int]] = collections.defaultdict(list)
    for place in places:
        if place.outer is not None:
            holders[id(place.value)].append(id(place.outer.value))
    found: set[int] = set()
    pending = list(targets)
    while pending:
        key = pending.pop()
        if key not in found:
            found.add(key)
            pending.extend(holders[key])
    return found


def _is_made(memo: Mapping[int, Any]) -> Callable[[Any], bool]:
    """Whether an object was made by a copy, given deepcopy's memo."""
    made = {id(value) for key, value in memo.items() if key != id(value)}
    return lambda item: id(item) in made


def _fulfil(new: torch.nn.Module, memo: dict[int, Any]) -> None:
    """Puts in a copy what stands in it for late objects, whose parts may have such in turn."""

    def of(old: Any) -> Any:
        made = copy.deepcopy(old, memo)
        return made.make(of) if isinstance(made, _Late) else made

    late = True
    while late:
        late = [p for p in walk(new, _is_made(memo)) if isinstance(p.value, _Late)]
        for place in late:
            place.container[place.key] = place.value.make(of)


def _copy_scripted(old: torch.nn.Module, new: torch.nn.Module, tensors: Mapping[int, Any]) -> None:
    """TorchScript copies its modules in C++, where no memo is consulted."""
    counterparts: dict[str, Any] = dict(new.named_modules(remove_duplicate=False))
    for name, part in old.named_modules(remove_duplicate=False):
        if isinstance(part, torch.jit.ScriptModule):
            old_tensors, new_tensors = ScriptAttributes(part), ScriptAttributes(counterparts[name])
            for key in [*part._parameters.keys(), *part._buffers.keys()]:
                if id(old_tensors[key]) in tensors:
                    new_tensors[key] = tensors[id(old_tensors[key])]


def _slots(module: torch.nn.Module, places: Sequence[Place]) -> dict[int, list[Slot]]:
    """The places of all tensors, by what they are."""
    slots: dict[int, dict[tuple[int, Any], Slot]] = collections.defaultdict(dict)
    registered = [
        (tensor, container, key)
        for part in module.modules()
        if not isinstance(part, torch.jit.ScriptModule)
        for container in (part._parameters, part._buffers)
        for key, tensor in container.items()
    ]
    others = [(p.value, p.container, p.key) for p in places if isinstance(p.value, torch.Tensor)]
    for tensor, container, key in registered + others:
        slots[id(tensor)].setdefault((id(container), key), (container, key))
    return {key: list(found.values()) for key, found in slots.items()}


def _is_object(item: Any) -> bool:
    return is_open(item) and not isinstance(item, torch.nn.Module | dict | list | tuple | set)


def _behind(proxy: Any) -> Any:
    """The object that a weak proxy stands for."""
    return proxy.__repr__.__self__
