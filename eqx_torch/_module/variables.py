"""Functions of a module that reach its tensors by variables that no copy of them can have.

A hook may read `net[0].bias`, where `net` is a global variable and the very module that is
converted; a class made inside of a function may do so in its methods. Such a function has to be
left as it is, and would read the original's parameters for ever. So is a class, with what it holds.
Which values a function takes from its variables is seen in its bytecode.
"""

import dis
import functools
import inspect
import types
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from .._errors import ModuleError
from .._reachable import CachedFunction, is_library, names_in
from .places import is_filled, is_open, walk


_VARIABLES = frozenset(["LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLASSDEREF"])
_ATTRIBUTES = frozenset(["LOAD_ATTR", "LOAD_METHOD"])
_CONSTANTS = frozenset(["LOAD_CONST", "LOAD_SMALL_INT"])
_UNSEEN = frozenset(["CACHE", "EXTENDED_ARG", "PUSH_NULL", "RESUME", "PRECALL", "NOP"])
_MISSING = object()
_BEHIND: dict[type, str] = {
    staticmethod: "__func__",
    classmethod: "__func__",
    property: "fget",
    functools.cached_property: "func",
    CachedFunction: "__wrapped__",
}
# Methods that no call runs.
_MAKING = frozenset(["__init__", "__new__", "__deepcopy__", "__getstate__", "__setstate__"])


def check_variables(module: torch.nn.Module) -> None:
    """Raises if a function of the module reads its parameters by a variable or a class.

    Raises:
        ModuleError: it does.
    """
    tensors = {**dict(module.named_buffers()), **dict(module.named_parameters())}
    names = {id(tensor): name for name, tensor in tensors.items()}
    reading = _Reading(module)
    for label, variable, value in reading.values():
        name = _leads_to(value, names)
        if name is not None:
            raise ModuleError(
                f"`{type(module).__name__}` cannot be converted: `{label}` reads its parameter "
                f"{name} through the variable `{variable}`, which is no part of the module, so "
                "that a copy would read the original's. Make it an attribute (`self.name = "
                "...`) or a default argument, or pass it as an argument of the call."
            )
    for cls in reading.classes:
        for attribute in reading.attributes.intersection(vars(cls)):
            name = _leads_to(vars(cls)[attribute], names)
            if name is not None:
                raise ModuleError(
                    f"`{type(module).__name__}` cannot be converted: the class `{cls.__name__}` "
                    f"has an attribute `{attribute}` that leads to its parameter {name}, but "
                    "classes are not copied, so that a copy would read the original's. Make it an "
                    f"attribute of the instance (`self.{attribute} = ...`)."
                )


def methods_of(cls: type) -> Iterator[types.FunctionType]:
    """The functions that a class has itself, also decorated, but those that no call runs."""
    for name, attribute in vars(cls).items():
        if name in _MAKING:
            continue
        if not isinstance(attribute, types.FunctionType):
            keys = (key for kind, key in _BEHIND.items() if isinstance(attribute, kind))
            attribute = next((getattr(attribute, key) for key in keys), None)
        if isinstance(attribute, types.FunctionType):
            # Decorators may be of a package, and what they decorate the user's.
            inner = inspect.unwrap(attribute)
            yield attribute
            if inner is not attribute and isinstance(inner, types.FunctionType):
                yield inner


def is_installed(function: types.FunctionType) -> bool:
    """Whether a function belongs to a package."""
    return is_library(function.__module__) or "-packages" in function.__code__.co_filename


class _Reading:
    """What the functions of a module read, and the functions and classes that they name.

    Attributes:
        classes: those of the module's objects, and those that its functions name.
        attributes: the names of all attributes that are read.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.classes: dict[type, None] = {}
        self.attributes: set[str] = set()
        self._seen: set[Any] = set()
        self._pending: list[tuple[str, types.FunctionType, Mapping[str, Any]]] = []
        for place in walk(module, classes=True):
            value = place.value
            if isinstance(value, types.FunctionType):
                # What a function closes over that a module holds is copied.
                label = f"{place.path} ({value.__qualname__})"
                self._pending.append((label, value, {}))
            elif isinstance(value, type) or is_open(value):
                self._add_class(value if isinstance(value, type) else type(value))

    def values(self) -> Iterator[tuple[str, str, Any]]:
        """What is read from variables: by what, from which, and the value."""
        while self._pending:
            label, function, cells = self._pending.pop()
            key = function.__code__, id(function.__globals__), tuple(map(id, cells.values()))
            if key in self._seen or is_installed(function):
                continue
            self._seen.add(key)
            self.attributes |= names_in(function.__code__)
            for variable, value in _read_in(function.__code__, {**function.__globals__, **cells}):
                yield label, variable, value
                if isinstance(value, types.FunctionType):
                    self._pending.append((label, value, _variables(value)))
                elif isinstance(value, type):
                    self._add_class(value)

    def _add_class(self, cls: type) -> None:
        for base in cls.__mro__:
            if base not in self.classes and not is_library(base.__module__):
                self.classes[base] = None
                methods = [(f.__qualname__, f, _variables(f)) for f in methods_of(base)]
                self._pending.extend(methods)


def _variables(function: types.FunctionType) -> dict[str, Any]:
    pairs = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return {name: cell.cell_contents for name, cell in pairs if is_filled(cell)}


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
            if isinstance(value, type):
                yield variable, value
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
    if isinstance(value, type):
        return next((vars(c)[name] for c in value.__mro__ if name in vars(c)), _MISSING)
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
