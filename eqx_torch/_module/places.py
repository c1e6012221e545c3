"""The object graph of a module: every place where Python code may keep a tensor, or something else.

A module holds tensors in more than its parameters and buffers: in lists and tuples, in plain
objects, in the closures and defaults of functions, in partials, methods and weak references. A
`Place` is one such position, with a container for which `container[key] = value` puts another
value there. What cannot be changed (a tuple, a bound method) is made anew where it stands.
"""

import collections
import functools
import itertools
import random
import re
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from .._reachable import CachedFunction, is_library


_ATOMS = (
    *(str, int, float, complex, bytes, type, type(None), range, slice, type(Ellipsis)),
    *(torch.dtype, torch.device, torch.Size, torch.layout, types.ModuleType, types.CodeType),
)
_PLAIN = frozenset([str, int, float, bool, type(None)])
_BOUND = (types.MethodType, types.BuiltinMethodType, types.MethodWrapperType)
# Made anew where they stand, and so looked into at every place where they do.
_REMADE = (tuple, frozenset, weakref.ref, *_BOUND)
_TRANSPARENT = (
    *(*_REMADE, dict, list, set, collections.deque, functools.partial),
    *(torch.nn.Module, CachedFunction),
)
_CLOSED = (
    *(*_BOUND, types.CellType, types.FunctionType, weakref.ref, functools.partial),
    *(CachedFunction, torch.Tensor, torch.jit.ScriptModule),
)
_PLAIN_CONTAINERS = frozenset([dict, list, tuple, set, frozenset, collections.OrderedDict])
_ELEMENTS: tuple[Any, ...] = (list, tuple, set, frozenset, collections.deque)
_OPEN_LIBRARIES = re.compile(r"(torch\.(nn|distributions)|types|collections)(\.|$)")
_GENERATORS = (
    *(torch.Generator, random.Random),
    *(np.random.Generator, np.random.BitGenerator, np.random.RandomState),
)
_REGISTERED = re.compile(r"\._(?:parameters|buffers|modules)\['([^']*)'\]")
# Recurrent layers make these anew with the parameters.
_RECURRENT = "_flat_weight_refs"


class Place(NamedTuple):
    """A position in an object graph.

    Attributes:
        value: what stands there.
        container, key: `container[key] = value` puts another value there; the container is None
            where that cannot be.
        outer: the place of the object that has it.
        step: how to get from that object to the value, for messages.
    """

    value: Any
    container: Any = None
    key: Any = None
    outer: "Place | None" = None
    step: str = ""

    @property
    def path(self) -> str:
        """How messages call it, from the module that is the root."""
        steps: list[str] = []
        place: Place | None = self
        while place is not None:
            steps.append(place.step)
            place = place.outer
        return _REGISTERED.sub(r".\1", "".join(reversed(steps))).removeprefix(".")


class ScriptAttributes:
    """The tensors of a TorchScript module, which live in C++."""

    def __init__(self, module: torch.jit.ScriptModule) -> None:
        self._module = module

    def __getitem__(self, name: str) -> Any:
        return getattr(self._module, name)

    def __setitem__(self, name: str, tensor: torch.Tensor) -> None:
        setattr(self._module, name, tensor)

    def get(self, name: str) -> Any:
        return getattr(self._module, name, None)


class Attributes:
    """The attributes of an object that has no `__dict__` to put them in."""

    def __init__(self, item: Any) -> None:
        self.item = item

    def __getitem__(self, name: str) -> Any:
        return getattr(self.item, name)

    def __setitem__(self, name: str, value: Any) -> None:
        # Frozen dataclasses refuse what is not `object`'s; functions and cells have their own.
        set_ = setattr if isinstance(self.item, types.FunctionType) else object.__setattr__
        set_(self.item, name, value)


class _Remade:
    """The parts of a value that takes all of them at once."""

    def __init__(self, parts: list[Any], put: Callable[[list[Any]], None]) -> None:
        self._parts = parts
        self._put = put

    def __getitem__(self, i: int) -> Any:
        return self._parts[i]

    def __setitem__(self, i: int, value: Any) -> None:
        self._parts[i] = value
        self._put(self._parts)


def walk(
    root: Any, opens: Callable[[Any], bool] = lambda _: True, classes: bool = False
) -> Iterator[Place]:
    """Every place in the graph of an object.

    Args:
        root: the object.
        opens: whether what is in a function, a variable of one, or an object of the user's
            belongs to the graph.
        classes: whether the places of classes are among them. What classes hold is not.
    """
    seen: dict[int, Any] = {}
    pending = [Place(root)]
    while pending:
        place = pending.pop()
        value = place.value
        if is_atom(value):
            if classes and isinstance(value, type):
                yield place
            continue
        yield place
        if isinstance(value, torch.Tensor) or type(value) in weakref.ProxyTypes:
            continue
        if id(value) in seen:
            continue
        if not isinstance(value, _REMADE):
            seen[id(value)] = value
        if isinstance(value, _TRANSPARENT) or opens(value):
            pending.extend(_inside(place))


def attributes_of(item: Any) -> tuple[Any, Iterable[str]]:
    """A container of the attributes of an object that has any of its own, and their names."""
    if isinstance(item, torch.nn.Module):
        return item.__dict__, item.__dict__
    own = getattr(item, "__dict__", None)
    slots = [name for name in _slot_names(type(item)) if hasattr(item, name)]
    if isinstance(own, dict) and not slots:
        return own, own
    return Attributes(item), [*(own or ()), *slots]


def is_atom(value: Any) -> bool:
    """Whether a value holds nothing that could change."""
    return isinstance(value, _ATOMS)


def is_generator(value: Any) -> bool:
    """Whether random numbers are drawn from it, so that they depend on its state."""
    return isinstance(value, _GENERATORS) and not isinstance(value, random.SystemRandom)


def elements(container: Any) -> list[Any]:
    """What is in a list, tuple, set or deque, whatever a subclass says is."""
    kind = next(kind for kind in _ELEMENTS if isinstance(container, kind))
    return list(kind.__iter__(container))


def is_open(item: Any) -> bool:
    """Whether the attributes of an object are places: those of libraries are theirs alone."""
    cls = type(item)
    if cls in _PLAIN_CONTAINERS or issubclass(cls, _CLOSED):
        return False
    return (
        issubclass(cls, torch.nn.Module)
        or not is_library(cls.__module__)
        or bool(_OPEN_LIBRARIES.match(cls.__module__))
    )


def _inside(place: Place) -> Iterator[Place]:
    item = place.value
    if isinstance(item, torch.jit.ScriptModule):
        yield from _inside_script(place, item)
    elif isinstance(item, dict):
        for key, value in dict.items(item):
            if type(value) in _PLAIN:
                continue
            yield Place(value, item, key, place, f"[{key!r}]" if isinstance(key, str) else "[...]")
    elif isinstance(item, list | collections.deque):
        yield from (Place(v, item, i, place, f"[{i}]") for i, v in enumerate(elements(item)))
    elif isinstance(item, tuple | frozenset):
        parts = _Remade(elements(item), functools.partial(_remake, place, _like(item)))
        yield from (Place(v, parts, i, place, f"[{i}]") for i, v in enumerate(elements(item)))
    elif isinstance(item, set):
        parts = _Remade(elements(item), functools.partial(_refill, item))
        yield from (Place(v, parts, i, place, "{...}") for i, v in enumerate(elements(item)))
    elif isinstance(item, types.CellType):
        if is_filled(item):
            yield Place(item.cell_contents, Attributes(item), "cell_contents", place)
    elif isinstance(item, functools.partial):
        parts = _Remade([item.func, item.args], functools.partial(_reset, item))
        yield Place(item.func, parts, 0, place, ".func")
        yield Place(item.args, parts, 1, place, ".args")
        yield Place(item.keywords, None, None, place, ".keywords")
    elif isinstance(item, _BOUND):
        parts = _Remade([item.__self__], functools.partial(_remake, place, _bound_like(item)))
        yield Place(item.__self__, parts, 0, place, ".__self__")
        yield Place(getattr(item, "__func__", None), None, None, place)
    elif isinstance(item, weakref.ref):
        target = item()
        if isinstance(target, torch.Tensor) and not place.path.rpartition("[")[0].endswith(
            _RECURRENT
        ):
            parts = _Remade([target], functools.partial(_remake, place, _weakly))
            yield Place(target, parts, 0, place, "()")
    elif isinstance(item, types.FunctionType):
        yield from _inside_function(place, item)
    elif isinstance(item, CachedFunction):
        yield Place(item.__wrapped__, None, None, place)
    if is_open(item):
        container, names = attributes_of(item)
        for name in names:
            value = container[name]
            if type(value) not in _PLAIN:
                yield Place(value, container, name, place, f".{name}")


def _inside_script(place: Place, module: torch.jit.ScriptModule) -> Iterator[Place]:
    attributes = ScriptAttributes(module)
    for name, tensor in itertools.chain(module._parameters.items(), module._buffers.items()):
        yield Place(tensor, attributes, name, place, f".{name}")
    for name, child in module.named_children():
        yield Place(child, None, None, place, f".{name}")


def _inside_function(place: Place, function: types.FunctionType) -> Iterator[Place]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        yield Place(cell, None, None, place, f".<{name}>")
    attributes = Attributes(function)
    for name in ("__defaults__", "__kwdefaults__"):
        yield Place(getattr(function, name), attributes, name, place, f".{name}")
    yield Place(vars(function), None, None, place)


def is_filled(cell: types.CellType) -> bool:
    """Whether the variable has a value."""
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def _slot_names(cls: type) -> list[str]:
    names: list[str] = []
    for base in cls.__mro__:
        slots = vars(base).get("__slots__", ())
        names += [slots] if isinstance(slots, str) else slots
    return [name for name in names if name not in ("__dict__", "__weakref__")]


def _remake(place: Place, make: Callable[[list[Any]], Any], parts: list[Any]) -> None:
    place.container[place.key] = make(parts)


def _like(old: Any) -> Callable[[list[Any]], Any]:
    kind = (
        tuple if isinstance(old, tuple) else frozenset
    )  # named tuples take their parts one by one
    return functools.partial(kind.__new__, type(old))


def _bound_like(method: Any) -> Callable[[list[Any]], Any]:
    if isinstance(method, types.MethodType):
        return lambda parts: types.MethodType(method.__func__, parts[0])
    return lambda parts: getattr(parts[0], method.__name__)


def _weakly(parts: list[Any]) -> Any:
    return weakref.ref(parts[0])


def _reset(item: Any, parts: list[Any]) -> None:
    item.__setstate__((*parts, item.keywords, vars(item)))


def _refill(container: set[Any], parts: list[Any]) -> None:
    container.clear()
    container.update(parts)
