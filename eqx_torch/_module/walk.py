"""Where a torch module holds tensors, and copies in which others stand there.

A module holds tensors in more than its parameters and buffers: in lists and tuples, in plain
objects, in the closures and defaults of functions, in partials, methods and weak references. A
`Place` is one position in that graph. Its `container[key] = value` puts another value there; what
cannot be changed (a tuple, a bound method) is taken apart, and made anew where it stands. All that
is asked of a module reads this one walk: which tensors it holds and under which layers, which
objects a call may change, what leads to its parameters.

`copy.deepcopy` takes functions, weak references and methods of tensors for values and leaves them
alone. Where these lead back to a tensor or to a layer, a copy would read the original's; where to
a random generator, all copies would draw from one. Those it leaves are here made anew afterwards,
functions with the variables of theirs that lead there.
"""

import collections
import copy
import dataclasses
import functools
import random
import re
import types
import weakref
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from .._errors import ModuleError
from .._reachable import CachedFunction, is_library


Slot = tuple[Any, Any]

_ATOMS = (
    *(str, int, float, complex, bytes, type, type(None), range, slice, type(Ellipsis)),
    *(torch.dtype, torch.device, torch.Size, torch.layout, types.ModuleType, types.CodeType),
)
_PLAIN = frozenset([str, int, float, bool, type(None)])
_BUILTIN = (types.BuiltinMethodType, types.MethodWrapperType)
# Taken apart where they stand, and so looked into at every place where they do.
_VALUES = (tuple, frozenset, types.MethodType, *_BUILTIN)
_CONTAINERS: tuple[Any, ...] = (list, tuple, set, frozenset, collections.deque)
_TRANSPARENT = (
    *(*_VALUES, *_CONTAINERS, dict, weakref.ref, functools.partial),
    *(torch.nn.Module, CachedFunction),
)
_CLOSED = (
    *(*_VALUES, types.CellType, types.FunctionType, weakref.ref, functools.partial),
    *(CachedFunction, torch.Tensor, torch.jit.ScriptModule),
)
_PLAIN_CONTAINERS = frozenset([dict, list, set, collections.OrderedDict])
_OPEN_LIBRARIES = re.compile(r"(torch\.(nn|distributions)|types|collections)(\.|$)")
_GENERATORS = (torch.Generator, random.Random, np.random.BitGenerator, np.random.RandomState)
_REGISTERED = re.compile(r"\._(?:parameters|buffers|modules)\['([^']*)'\]")
ATTRIBUTES = "__dict__"
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

    @property
    def owner(self) -> Any:
        """The object of which it is an attribute; None if it is none."""
        if self.outer is None or self.outer.outer is None or self.outer.key is not ATTRIBUTES:
            return None
        return self.outer.outer.value


class Attributes:
    """What an object holds that has no dict of it, by name."""

    def __init__(self, item: Any, names: Sequence[str]) -> None:
        self._item = item
        self._names = names
        # Frozen dataclasses refuse what is not `object`'s; functions and scripts have their own.
        own = isinstance(item, types.FunctionType | torch.jit.ScriptModule)
        self._set = setattr if own else object.__setattr__

    def __getitem__(self, name: str) -> Any:
        return getattr(self._item, name)

    def __setitem__(self, name: str, value: Any) -> None:
        self._set(self._item, name, value)

    def __delitem__(self, name: str) -> None:
        object.__delattr__(self._item, name)

    def get(self, name: str) -> Any:
        return self.items().get(name)

    def items(self) -> dict[str, Any]:
        found = {}
        for name in self._names:
            try:
                found[name] = getattr(self._item, name)
            except (AttributeError, ValueError):  # as that of an empty cell
                continue
        return found


# What holds things and can be changed.
MUTABLE = (dict, list, set, collections.deque, Attributes)


class _Parts:
    """The parts of a value that takes all of them at once."""

    def __init__(self, parts: list[Any], put: Callable[[list[Any]], None]) -> None:
        self._parts = parts
        self._put = put

    def __setitem__(self, i: int, value: Any) -> None:
        self._parts[i] = value
        self._put(self._parts)


def walk(
    root: Any, opens: Callable[[Any], bool] = lambda _: True, ends: Container[int] = ()
) -> Iterator[Place]:
    """Every place in the graph of an object.

    Args:
        root: the object.
        opens: whether what is in a function, a variable of one, or an object of the user's
            belongs to the graph.
        ends: the identities of objects that are not looked into.
    """
    seen: dict[int, Any] = {}
    pending = [Place(root)]
    while pending:
        place = pending.pop()
        value = place.value
        if isinstance(value, _ATOMS):
            continue
        yield place
        if isinstance(value, torch.Tensor) or id(value) in seen or id(value) in ends:
            continue
        if not isinstance(value, _VALUES) and type(value) is not weakref.ref:
            seen[id(value)] = value
        if type(value) in weakref.ProxyTypes:
            continue
        if isinstance(value, (*_TRANSPARENT, Attributes)) or opens(value):
            pending.extend(_inside(place))


def contents(container: Any) -> dict[Any, Any]:
    """What a container holds, by key or position."""
    if isinstance(container, dict | Attributes):
        return dict(_items(container))
    return dict(enumerate(elements(container)))


def refill(container: Any, held: Mapping[Any, Any]) -> None:
    """Makes a container hold what it held, when `contents` was asked of it."""
    if isinstance(container, Attributes):
        for name in container.items().keys() - held.keys():
            del container[name]
        for name, value in held.items():
            container[name] = value
        return
    container.clear()
    if isinstance(container, dict):
        container.update(held)
    else:
        add: Callable[[Any], None] = getattr(container, "update", None) or container.extend
        add(held.values())


def apart(item: Any) -> tuple[list[Any], Callable[..., Any]] | None:
    """The parts of a value that cannot be changed, and what makes one like it of such parts."""
    if isinstance(item, tuple | frozenset):
        kind: Any = tuple if isinstance(item, tuple) else frozenset
        return elements(item), lambda *parts: kind.__new__(type(item), parts)
    if isinstance(item, types.MethodType):
        return [item.__func__, item.__self__], types.MethodType
    if isinstance(item, _BUILTIN):
        return [item.__self__], lambda own: getattr(own, item.__name__)
    if isinstance(item, CachedFunction):
        return [item.__wrapped__], functools.lru_cache(**item.cache_parameters())
    if type(item) is weakref.ref:
        return [item()], weakref.ref
    if type(item) in weakref.ProxyTypes:
        return [item.__repr__.__self__], weakref.proxy
    return None


def elements(container: Any) -> list[Any]:
    """What is in a list, tuple, set or deque, whatever a subclass says is."""
    kind = next(kind for kind in _CONTAINERS if isinstance(container, kind))
    return list(kind.__iter__(container))


def is_generator(value: Any) -> bool:
    """Whether random numbers are drawn from it, so that they depend on its state."""
    return isinstance(value, _GENERATORS) and not isinstance(value, random.SystemRandom)


def _items(container: Any) -> Any:
    return dict.items(container) if isinstance(container, dict) else container.items().items()


def _inside(place: Place) -> Iterator[Place]:
    item = place.value
    if isinstance(item, dict | Attributes):
        for key, value in _items(item):
            if type(value) not in _PLAIN and key != _RECURRENT:
                yield Place(value, item, key, place, step_to(place, key))
    elif isinstance(item, list | collections.deque):
        yield from (Place(v, item, i, place, f"[{i}]") for i, v in enumerate(elements(item)))
    elif isinstance(item, set):
        parts = _Parts(elements(item), functools.partial(_reset_set, item))
        yield from (Place(v, parts, i, place, "{...}") for i, v in enumerate(elements(item)))
    elif isinstance(item, functools.partial):
        parts = _Parts([item.func, item.args], functools.partial(_reset_partial, item))
        yield Place(item.func, parts, 0, place, ".func")
        yield Place(item.args, parts, 1, place, ".args")
        yield Place(item.keywords, None, None, place, ".keywords")
    elif isinstance(item, types.FunctionType):
        cells = zip(item.__code__.co_freevars, item.__closure__ or (), strict=True)
        yield from (Place(cell, None, None, place, f".<{name}>") for name, cell in cells)
        yield Place(Attributes(item, ["__defaults__", "__kwdefaults__"]), outer=place)
        yield Place(vars(item), None, ATTRIBUTES, place)
    elif isinstance(item, types.CellType):
        yield Place(Attributes(item, ["cell_contents"]), None, None, place)
    elif isinstance(item, torch.jit.ScriptModule):
        names = [*item._parameters.keys(), *item._buffers.keys()]
        yield Place(Attributes(item, names), None, None, place)
        yield from (Place(child, None, None, place, f".{n}") for n, child in item.named_children())
    elif isinstance(item, np.random.Generator):
        yield Place(item.bit_generator, None, None, place)
    elif (split := apart(item)) is not None:
        yield from _in_parts(place, *split)
    if is_open(item):
        slots = [name for cls in type(item).__mro__ for name in _slot_names(cls)]
        if slots:
            yield Place(Attributes(item, slots), None, None, place)
        if isinstance(getattr(item, "__dict__", None), dict):
            yield Place(item.__dict__, None, ATTRIBUTES, place)


def step_to(place: Place, key: Any) -> str:
    """How to get from what stands in a place to what it holds under a key, for messages."""
    if place.key is ATTRIBUTES or isinstance(place.value, Attributes):
        return "" if key == "cell_contents" else f".{key}"
    if key is None:
        return ""
    return f"[{key!r}]" if isinstance(key, str | int) else "[...]"


def _in_parts(place: Place, parts: list[Any], make: Callable[..., Any]) -> Iterator[Place]:
    item = place.value
    if type(item) is weakref.ref and not isinstance(parts[0], torch.Tensor):
        return

    def put(parts: list[Any]) -> None:
        place.container[place.key] = make(*parts)

    holder = _Parts(list(parts), put)
    for i, part in enumerate(parts):
        step = f"[{i}]" if isinstance(item, tuple | frozenset) else ""
        yield Place(part, holder, i, place, step)


def is_open(item: Any) -> bool:
    """Whether the attributes of an object are places: those of libraries are theirs alone."""
    cls = type(item)
    if cls in _PLAIN_CONTAINERS or issubclass(cls, _CLOSED) or cls is Attributes:
        return False
    return (
        issubclass(cls, torch.nn.Module)
        or not is_library(cls.__module__)
        or bool(_OPEN_LIBRARIES.match(cls.__module__))
    )


def _slot_names(cls: type) -> list[str]:
    slots = vars(cls).get("__slots__", ())
    names = [slots] if isinstance(slots, str) else list(slots)
    return [name for name in names if name not in ("__dict__", "__weakref__")]


def _reset_partial(item: Any, parts: list[Any]) -> None:
    item.__setstate__((*parts, item.keywords, vars(item)))


def _reset_set(item: set[Any], parts: list[Any]) -> None:
    item.clear()
    item.update(parts)


@dataclasses.dataclass(frozen=True)
class Copy:
    """A copy of a module that shares nothing with it.

    Attributes:
        module: the copy.
        slots: where its tensors stand, by their identities; first where they are registered.
        places: everything in it that may change.
    """

    module: torch.nn.Module
    slots: dict[int, list[Slot]]
    places: list[Place]


def copied(module: torch.nn.Module, tensors: Mapping[int, Any]) -> Copy:
    """A copy of a module.

    Args:
        module: the module.
        tensors: by identity, what stands in the copy in place of each tensor.

    Raises:
        ModuleError: the module cannot be copied.
    """
    copier = _Copier(module, tensors)
    try:
        new = copier.copy()
    except Exception as error:
        raise ModuleError(
            f"`{type(module).__name__}` cannot be converted, because `copy.deepcopy` cannot copy "
            f"it: {error}\nEach device thread needs a copy of the module (without its "
            "parameters). Give the part that cannot be copied a `__deepcopy__`, or wrap a "
            "function that calls the module by `torch2jax`."
        ) from error
    places = list(copier.places_in(new))
    return Copy(new, _slots(new, places), places)


def fill(slots: Sequence[Sequence[Slot]], tensors: Sequence[torch.Tensor]) -> None:
    """Puts each tensor in its places."""
    for places, tensor in zip(slots, tensors, strict=True):
        for container, key in places:
            container[key] = tensor


def buffer_slot(module: torch.nn.Module, name: str) -> Slot:
    """Where a buffer stands."""
    owner_name, _, key = name.rpartition(".")
    owner = dict(module.named_modules(remove_duplicate=False))[owner_name]
    scripted = isinstance(owner, torch.jit.ScriptModule)
    return Attributes(owner, [key]) if scripted else owner._buffers, key


class _Copier:
    """Copies a module: `copy.deepcopy`, and what that leaves as it is."""

    def __init__(self, module: torch.nn.Module, tensors: Mapping[int, Any]) -> None:
        self._module = module
        self._tensors = tensors
        places = list(walk(module))
        generators = [id(p.value) for p in places if is_generator(p.value)]
        targets = {*tensors, *generators, *map(id, module.modules())}
        self._leading = _leading(places, targets)
        reached = {id(place.value) for place in places}
        # What deepcopy would leave or copy wrongly, which it finds in its memo.
        self._late = {
            id(x): x
            for x in (place.value for place in places)
            if self._is_late(x) or (_is_weak(x) and id(_target(x)) in reached)
        }
        self._memo: dict[int, Any] = {**tensors, **self._late}
        # It refuses to copy computed tensors.
        for place in places:
            value = place.value
            if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                self._memo.setdefault(id(value), value.detach().clone())

    def copy(self) -> torch.nn.Module:
        new = self._of(self._module)
        _copy_scripted(self._module, new, self._tensors)
        while late := [p for p in self.places_in(new) if self._of_late(p) is not p.value]:
            for place in late:
                place.container[place.key] = self._of_late(place)
        return new

    def places_in(self, new: torch.nn.Module) -> Iterator[Place]:
        """The places in a copy, but of what is not copied but the user's."""
        made = {id(value) for key, value in self._memo.items() if key != id(value)}
        return walk(new, lambda item: id(item) in made, self._late)

    def _is_late(self, item: Any) -> bool:
        if isinstance(item, types.MethodType):
            return isinstance(item.__func__, types.FunctionType) and self._is_late(item.__func__)
        kinds = (types.FunctionType, CachedFunction, *_BUILTIN)
        return isinstance(item, kinds) and id(item) in self._leading

    def _of_late(self, place: Place) -> Any:
        return self._of(place.value) if id(place.value) in self._late else place.value

    def _of(self, old: Any) -> Any:
        """What stands in the copy in place of an object."""
        if self._memo.get(id(old)) is not old or id(old) not in self._late:
            return copy.deepcopy(old, self._memo)
        if isinstance(old, types.FunctionType):
            return self._function(old)
        parts, make = apart(old) or ([], None)
        assert make is not None
        new = make(*map(self._of, parts))
        self._memo[id(old)] = new
        if new is old:  # as a weak reference to what the copy shares
            del self._late[id(old)]
        return new

    def _function(self, old: types.FunctionType) -> types.FunctionType:
        own = [cell for cell in old.__closure__ or () if self._is_own(cell)]
        empty = [cell for cell in own if id(cell) not in self._memo]
        self._memo.update({id(cell): types.CellType() for cell in empty})
        closure = old.__closure__ and tuple(self._memo.get(id(c), c) for c in old.__closure__)
        new = types.FunctionType(old.__code__, old.__globals__, old.__name__, None, closure)
        self._memo[id(old)] = new
        for cell in empty:
            self._memo[id(cell)].cell_contents = self._of(cell.cell_contents)
        for name in functools.WRAPPER_ASSIGNMENTS:
            setattr(new, name, getattr(old, name))
        for name in ("__defaults__", "__kwdefaults__", "__dict__"):
            value = getattr(old, name)
            setattr(new, name, self._of(value) if id(value) in self._leading else copy.copy(value))
        return new

    def _is_own(self, cell: types.CellType) -> bool:
        """Whether a variable is to be copied; what else it holds is the user's, to be looked at."""
        held = Attributes(cell, ["cell_contents"]).items().values()
        return id(cell) in self._leading or any(isinstance(x, _ATOMS) for x in held)


def _is_weak(item: Any) -> bool:
    return type(item) is weakref.ref or type(item) in weakref.ProxyTypes


def _target(reference: Any) -> Any:
    return (apart(reference) or ([None], None))[0][0]


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


def _copy_scripted(old: torch.nn.Module, new: torch.nn.Module, tensors: Mapping[int, Any]) -> None:
    """TorchScript copies its modules in C++, where no memo is consulted."""
    counterparts: dict[str, Any] = dict(new.named_modules(remove_duplicate=False))
    for name, part in old.named_modules(remove_duplicate=False):
        if isinstance(part, torch.jit.ScriptModule):
            for key in [*part._parameters.keys(), *part._buffers.keys()]:
                if id(getattr(part, key)) in tensors:
                    setattr(counterparts[name], key, tensors[id(getattr(part, key))])


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
