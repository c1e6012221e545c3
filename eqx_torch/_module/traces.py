"""What calls leave behind in a module's Python objects, and how it is taken out again.

A call of a converted module starts from the module as it was converted, so that what a forward
caches is computed from the parameters of that very call, and a count of calls, or what it draws
from a random generator of its own, is the same on every device. What a forward sets or adds is
therefore put back when the call is done.
"""

import collections
import ctypes
import dataclasses
import pickle
import random
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from .._reachable import CachedFunction
from .places import (
    Attributes,
    attributes_of,
    elements,
    is_filled,
    is_generator,
    is_open,
    Place,
)
from .slots import Copy


_NUMBERS = (bool, int, float, complex, str)


class Trace:
    """The Python objects of a copy of a module, with what they held when it was made.

    Args:
        copy: the copy, which no call has used.
        bound: the tensors in whose place others will be put.
    """

    def __init__(self, copy: Copy, bound: Sequence[torch.Tensor]) -> None:
        self._held: list[_Held | _Generator] = list(_held_in(copy.places))
        # The positions of what is in sets differ from copy to copy.
        self._unordered = any(p.step == "{...}" for p in copy.places)
        self._caches = list(_caches(copy))
        known = set(map(id, bound))
        self._loose = [
            (p.path, p.value, p.value._version)
            for p in copy.places
            if isinstance(p.value, torch.Tensor) and id(p.value) not in known
        ]

    def note_modes(self) -> None:
        """Takes the train flags for those that a call should leave."""
        for held in self._held:
            held.note("training")

    def changes(self, usual: "Changes | None" = None) -> "Changes":
        """What a call has left behind, when its tensors are taken out again.

        Args:
            usual: what other calls of the kind have; only there is looked.
        """
        among = range(len(self._held)) if usual is None or self._unordered else usual.held
        changed = [i for i in among if not self._held[i].is_intact()]
        written = [path for path, tensor, version in self._loose if tensor._version != version]
        cached = any(cache.cache_info().currsize for cache in self._caches)
        return Changes(changed, written, cached)

    def numbers(self, changes: "Changes") -> list[tuple[str, Any, Any]]:
        """The numbers, strings and states of generators that are others now.

        Of each where it is, what it was, what it is.
        """
        return [number for i in changes.held for number in self._held[i].numbers()]

    def put_back(self, changes: "Changes") -> None:
        """Makes all as it was; what was written to remains."""
        for i in changes.held:
            self._held[i].put_back()
        if changes.cached:
            for cache in self._caches:
                cache.cache_clear()


class Changes:
    """What a call has left behind.

    Attributes:
        held: which objects hold something else, by position.
        written: the tensors that are neither parameters nor buffers and were written to.
        cached: whether something is in the caches of methods.
    """

    def __init__(self, held: list[int], written: list[str], cached: bool) -> None:
        self.held = held
        self.written = written
        self.cached = cached

    def __bool__(self) -> bool:
        return bool(self.held or self.written or self.cached)


class _Held:
    """A container or the attributes of an object, with the contents at first."""

    def __init__(self, place: Place, container: Any, contents: Any) -> None:
        self._place = place
        self._container = container
        self._contents = contents

    def note(self, name: str) -> None:
        if isinstance(self._place.value, torch.nn.Module):
            self._contents[name] = self._container[name]

    def is_intact(self) -> bool:
        return _same_items(_contents(self._container), self._contents)

    def put_back(self) -> None:
        _refill(self._container, self._contents)

    def numbers(self) -> Iterator[tuple[str, Any, Any]]:
        now = _contents(self._container)
        if isinstance(now, dict):
            for key, old in self._contents.items():
                new = now.get(key)
                if isinstance(old, _NUMBERS) and isinstance(new, _NUMBERS) and new != old:
                    step = f".{key}" if is_open(self._place.value) else f"[{key!r}]"
                    yield f"{self._place.path}{step}".removeprefix("."), old, new


@dataclasses.dataclass(frozen=True)
class GeneratorState:
    """The state of a random generator."""

    contents: bytes = dataclasses.field(repr=False)


class _Generator:
    """A random generator, with its state at first."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._state = _random_state(place.value)
        self._before = _contents_of(self._state)

    def note(self, name: str) -> None:
        del name

    def is_intact(self) -> bool:
        return self._now() == self._before

    def put_back(self) -> None:
        _set_random_state(self._place.value, self._state)

    def numbers(self) -> Iterator[tuple[str, Any, Any]]:
        now = self._now()
        if now != self._before:
            yield self._place.path, self._before, now

    def _now(self) -> GeneratorState:
        return _contents_of(_random_state(self._place.value))


def _contents_of(state: Any) -> GeneratorState:
    if isinstance(state, torch.Tensor):  # read as it is in a run on tensors without memory too
        return GeneratorState(ctypes.string_at(state.data_ptr(), state.numel()))
    return GeneratorState(pickle.dumps(state))


def _random_state(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return _bits(generator).state


def _set_random_state(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(state)
    else:
        _bits(generator).state = state


def _bits(generator: Any) -> Any:
    return generator.bit_generator if isinstance(generator, np.random.Generator) else generator


def _held_in(places: Sequence[Place]) -> Iterator[_Held | _Generator]:
    seen: set[int] = set()
    for place in places:
        item = place.value
        if id(item) in seen:
            continue
        seen.add(id(item))
        is_variable = isinstance(item, types.CellType) and is_filled(item)
        if is_variable or isinstance(item, dict | list | set | collections.deque):
            yield _Held(place, item, _contents(item))
        if is_generator(item):
            yield _Generator(place)
        if is_open(item) and not isinstance(item, tuple):
            container, _ = attributes_of(item)
            yield _Held(place, container, _contents(container))


def _contents(container: Any) -> Any:
    if isinstance(container, types.CellType):
        return {"cell_contents": container.cell_contents}
    if isinstance(container, Attributes):
        _, names = attributes_of(container.item)
        return {name: container[name] for name in names}
    return dict(dict.items(container)) if isinstance(container, dict) else elements(container)


def _refill(container: Any, contents: Any) -> None:
    if isinstance(container, types.CellType):
        container.cell_contents = contents["cell_contents"]
    elif isinstance(container, Attributes):
        for name in _contents(container).keys() - contents.keys():
            object.__delattr__(container.item, name)
        for name, value in contents.items():
            container[name] = value
    else:
        container.clear()
        add: Callable[[Any], None] = getattr(container, "update", None) or container.extend
        add(contents)


def _same_items(now: Any, before: Any) -> bool:
    if len(now) != len(before):
        return False
    if isinstance(now, dict):
        pairs = zip(now.items(), before.items(), strict=True)
        return all((a is c or a == c) and _same(b, d) for (a, b), (c, d) in pairs)
    return all(map(_same, now, before))


def _same(a: Any, b: Any) -> bool:
    """Whether two values are one, or of the kinds that are made anew where they stand."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, str | bytes | bool | int | float | complex):
        return a == b
    if isinstance(a, tuple):
        return tuple.__len__(a) == tuple.__len__(b) and all(map(_same, elements(a), elements(b)))
    if isinstance(a, types.MethodType):
        return a.__self__ is b.__self__ and a.__func__ is b.__func__
    if isinstance(a, types.BuiltinMethodType):
        return a.__self__ is b.__self__ and a.__name__ == b.__name__
    return isinstance(a, weakref.ref) and a() is b()


def _caches(copy: Copy) -> Iterator[Any]:
    """The functions with caches that the module has, or that are methods of its layers."""
    classes = {cls for module in copy.module.modules() for cls in type(module).__mro__}
    methods = (value for cls in classes for value in vars(cls).values())
    held = (place.value for place in copy.places)
    for function in (*methods, *held):
        if isinstance(function, CachedFunction):
            yield function
