"""Functions of a module that reach its tensors by variables that no copy of them can have.

A hook may read `net[0].bias`, where `net` is a global variable and the very module that is
converted; a class made inside of a function may do so in its methods. Such a function has to be
left as it is, and would read the original's parameters for ever. Which values it takes from its
variables is seen in its bytecode.
"""

import dis
import types
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from .._errors import ModuleError
from .._reachable import is_library
from .places import is_filled, Place, walk


_VARIABLES = frozenset(["LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLASSDEREF"])
_ATTRIBUTES = frozenset(["LOAD_ATTR", "LOAD_METHOD"])
_CONSTANTS = frozenset(["LOAD_CONST", "LOAD_SMALL_INT"])
_UNSEEN = frozenset(["CACHE", "EXTENDED_ARG", "PUSH_NULL", "RESUME", "PRECALL", "NOP"])
_MISSING = object()
# Methods that no call runs.
_MAKING = frozenset(["__init__", "__new__", "__deepcopy__", "__getstate__", "__setstate__"])


def check_variables(module: torch.nn.Module) -> None:
    """Raises if a function of the module reads its parameters by a variable.

    Raises:
        ModuleError: it does.
    """
    tensors = {**dict(module.named_buffers()), **dict(module.named_parameters())}
    names = {id(tensor): name for name, tensor in tensors.items()}
    seen: set[Any] = set()
    for label, function, cells in _functions(module):
        for variable, value in _read_by(function, cells, seen):
            name = _leads_to(value, names)
            if name is not None:
                raise ModuleError(
                    f"`{type(module).__name__}` cannot be converted: `{label}` reads its parameter "
                    f"{name} through the variable `{variable}`, which is no part of the module, so "
                    "that a copy would read the original's. Make it an attribute (`self.name = "
                    "...`) or a default argument, or pass it as an argument of the call."
                )


def _functions(
    module: torch.nn.Module,
) -> Iterator[tuple[str, types.FunctionType, Mapping[str, Any]]]:
    """The functions that a module holds, and the methods of its classes, with their variables.

    What a function closes over that a module holds is copied, so those variables are left out.
    """
    classes: dict[type, None] = {}
    for place in walk(module):
        if isinstance(place.value, types.FunctionType):
            yield _label(place), place.value, {}
        elif isinstance(place.value, torch.nn.Module):
            classes |= dict.fromkeys(type(place.value).__mro__)
    for cls in classes:
        if is_library(cls.__module__):
            continue
        for name, attribute in vars(cls).items():
            if name in _MAKING:
                continue
            function = getattr(attribute, "__func__", getattr(attribute, "fget", attribute))
            if isinstance(function, types.FunctionType):
                yield function.__qualname__, function, _variables(function)


def _label(place: Place) -> str:
    return f"{place.path} ({place.value.__qualname__})"


def _variables(function: types.FunctionType) -> dict[str, Any]:
    pairs = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return {name: cell.cell_contents for name, cell in pairs if is_filled(cell)}


def _read_by(
    function: types.FunctionType, cells: Mapping[str, Any], seen: set[Any]
) -> Iterator[tuple[str, Any]]:
    """What a function and the functions that it names read from their variables."""
    key = function.__code__, id(function.__globals__), tuple(map(id, cells.values()))
    if key in seen or _is_installed(function):
        return
    seen.add(key)
    for variable, value in _read_in(function.__code__, {**function.__globals__, **cells}):
        yield variable, value
        if isinstance(value, types.FunctionType):
            yield from _read_by(value, _variables(value), seen)


def _is_installed(function: types.FunctionType) -> bool:
    return is_library(function.__module__) or "-packages" in function.__code__.co_filename


def _read_in(code: types.CodeType, scope: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The values that code reads from variables, as far as attributes and indices lead."""
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _read_in(inner, scope)
    if scope.keys().isdisjoint((*code.co_names, *code.co_freevars)):
        return
    variable, value, index = "", _MISSING, _MISSING
    for step in dis.get_instructions(code):
        if step.opname in _UNSEEN:
            continue
        if value is not _MISSING and step.opname in _CONSTANTS:
            index = step.argval
            continue
        inside = _MISSING
        if value is not _MISSING and step.opname in _ATTRIBUTES:
            inside = _attribute(value, step.argval)
        elif index is not _MISSING and _is_subscript(step):
            inside = _item(value, index)
        index = _MISSING
        if inside is not _MISSING:
            value = inside
            continue
        if value is not _MISSING:
            yield variable, value
        known = step.opname in _VARIABLES and step.argval in scope
        variable, value = (step.argval, scope[step.argval]) if known else ("", _MISSING)


def _is_subscript(step: dis.Instruction) -> bool:
    return step.opname == "BINARY_SUBSCR" or (step.opname == "BINARY_OP" and step.argrepr == "[]")


def _attribute(value: Any, name: str) -> Any:
    """An attribute that is a plain value, found without running code."""
    own = getattr(value, "__dict__", {})
    if isinstance(value, torch.nn.Module) and not isinstance(value, torch.jit.ScriptModule):
        own = {**own, **own["_parameters"], **own["_buffers"], **own["_modules"]}
    return own.get(name, _MISSING) if isinstance(own, dict) else _MISSING


def _item(value: Any, index: Any) -> Any:
    if isinstance(value, torch.nn.Sequential | torch.nn.ModuleList | list | tuple | dict):
        try:
            return value[index]
        except (LookupError, TypeError):
            return _MISSING
    return _MISSING


def _leads_to(value: Any, names: Mapping[int, str], depth: int = 3) -> str | None:
    """The name of a tensor of the module that a value is or holds."""
    if isinstance(value, torch.Tensor):
        return names.get(id(value))
    if isinstance(value, torch.nn.Module):
        inside = [*value.parameters(), *value.buffers()]
    elif isinstance(value, list | tuple | set):
        inside = [*value]
    elif isinstance(value, dict):
        inside = [*value.values()]
    else:
        return None
    found = (_leads_to(x, names, depth - 1) for x in inside if depth)
    return next((name for name in found if name is not None), None)
