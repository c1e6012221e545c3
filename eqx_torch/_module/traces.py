"""What calls leave behind in a module's Python objects, and what they find there.

A call of a converted module starts from the module as it was converted, so that what a forward
caches is computed from the parameters of that very call, and a count of calls, or what it draws
from a random generator of its own, is the same on every device. What a forward sets or adds is
therefore put back when the call is done. What it reads is looked at in the first run of a kind: not
the original's tensors, which some things lead to that no copy can have (global variables, classes),
nor, without a word, what an earlier call has cached, which is a constant since.
"""

import ctypes
import dataclasses
import pickle
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from .._compat import torch_tree, TorchDispatchMode
from .._errors import ModuleError
from .._reachable import attributes_set_by, CachedFunction, is_library
from .._watch import storage_key
from .walk import apart, ATTRIBUTES, contents, Copy, is_generator, MUTABLE, Place, refill, step_to


_PACKAGE = __name__.partition(".")[0]


@dataclasses.dataclass(frozen=True)
class GeneratorState:
    """The state of a random generator."""

    contents: bytes = dataclasses.field(repr=False)


_ATTRIBUTES: Any = torch.Tensor  # of which the stub knows the values only
_REQUIRES_GRAD = _ATTRIBUTES.requires_grad.__get__
_NUMBERS = (bool, int, float, complex, str, GeneratorState)


class Trace:
    """The Python objects of a copy of a module, with what they held when it was made.

    Args:
        copy: the copy, which no call has used.
        bound: the tensors in whose place others will be put.

    Attributes:
        loose: the places of the tensors that are none of these.
    """

    def __init__(self, copy: Copy, bound: Sequence[torch.Tensor]) -> None:
        holders = {id(p.value): p for p in reversed(copy.places) if _is_holder(p.value)}
        self._held = [(place, _contents(place.value)) for place in holders.values()]
        # The positions of what is in sets differ from copy to copy.
        self._unordered = any(p.step == "{...}" for p in copy.places)
        self._caches = list(_caches(copy))
        known = set(map(id, bound))
        tensors = [p for p in copy.places if isinstance(p.value, torch.Tensor)]
        self.loose = [p for p in tensors if id(p.value) not in known]
        self._versions = [p.value._version for p in self.loose]

    def note_modes(self) -> None:
        """Takes the train flags for those that a call should leave."""
        for place, before in self._held:
            if place.key is ATTRIBUTES and "training" in before:
                before["training"] = place.value["training"]

    def changes(self, usual: "Changes | None" = None) -> "Changes":
        """What a call has left behind, when its tensors are taken out again.

        Args:
            usual: what other calls of the kind have; only there is looked.
        """
        among = range(len(self._held)) if usual is None or self._unordered else usual.held
        changed = [i for i in among if not self._is_intact(i)]
        pairs = zip(self.loose, self._versions, strict=True)
        written = [place.path for place, version in pairs if place.value._version != version]
        cached = any(cache.cache_info().currsize for cache in self._caches)
        return Changes(changed, written, cached)

    def numbers(self, changes: "Changes") -> list[tuple[str, Any, Any]]:
        """The numbers, strings and states of generators that are others now.

        Of each where it is, what it was, what it is.
        """
        return [number for i in changes.held for number in self._numbers_in(*self._held[i])]

    def put_back(self, changes: "Changes") -> None:
        """Makes all as it was; what was written to remains."""
        for i in changes.held:
            place, before = self._held[i]
            if is_generator(place.value):
                _set_state(place.value, before[None].contents)
            else:
                refill(place.value, before)
        if changes.cached:
            for cache in self._caches:
                cache.cache_clear()

    def _is_intact(self, i: int) -> bool:
        place, before = self._held[i]
        now = _contents(place.value)
        same_keys = len(now) == len(before) and all(
            a is b or a == b for a, b in zip(now, before, strict=True)
        )
        return same_keys and all(map(_same, now.values(), before.values()))

    def _numbers_in(self, place: Place, before: Mapping[Any, Any]) -> Iterator[Any]:
        now = _contents(place.value)
        for key, old in before.items():
            new = now.get(key)
            if isinstance(old, _NUMBERS) and isinstance(new, _NUMBERS) and new != old:
                yield Place(new, None, key, place, step_to(place, key)).path, old, new


@dataclasses.dataclass(frozen=True)
class Changes:
    """What a call has left behind.

    Attributes:
        held: which objects hold something else, by position.
        written: the tensors that are neither parameters nor buffers and were written to.
        cached: whether something is in the caches of methods.
    """

    held: list[int]
    written: list[str]
    cached: bool

    def __bool__(self) -> bool:
        return bool(self.held or self.written or self.cached)


class Reads(TorchDispatchMode):
    """Sees which tensors the code reads that runs under it.

    Args:
        name: of the module, for messages.
        originals: the parameters and buffers of the module that was converted, by name.
        loose: other tensors that the module holds, with their paths.
        bound: what stands for tensors that a call should have put in their place.
        hidden: the message for one that it has not.

    Raises:
        ModuleError: it reads one of `originals` or of `bound`.
    """

    def __init__(
        self,
        name: str,
        originals: Mapping[str, torch.Tensor],
        loose: Iterable[tuple[str, torch.Tensor]],
        bound: Sequence[torch.Tensor],
        hidden: Callable[[], str],
    ) -> None:
        super().__init__()
        self._bound = set(map(id, bound))
        self._hidden = hidden
        self._name = name
        loose = list(loose)
        # Memory that were freed meanwhile would be that of others, under the same key.
        self._alive = [*originals.values(), *(tensor for _, tensor in loose)]
        self._originals = {key: n for n, t in originals.items() for key in _keys(t)}
        self._loose = {key: path for path, tensor in loose for key in _keys(tensor)}
        self._read: dict[str, None] = {}
        self._refusal = ""

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        # Not raised by the operator: torch takes some errors of `a + b` for no such operator.
        if self._refusal:
            raise ModuleError(self._refusal)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for key in _keys([*args, *kwargs.values()]):
            if key in self._originals:
                self._refusal = self._refusal or _reads_original(self._name, self._originals[key])
            if key in self._loose:
                self._read[self._loose[key]] = None
        # torch computes with meta tensors on other devices, and returns what memory holds.
        if not self._bound.isdisjoint(map(id, torch_tree.tree_leaves((args, kwargs)))):
            self._refusal = self._refusal or self._hidden()
        return func(*args, **kwargs)

    def stale(self, function: Callable[..., Any], computed: Mapping[str, bool]) -> list[str]:
        """The tensors that seem to be caches of an earlier call.

        Args:
            function: what has run.
            computed: of the tensors that may be such, whether they surely are.
        """
        read = [path for path in self._read if path in computed]
        set_ = attributes_set_by(function) if read else frozenset()
        return [path for path in read if computed[path] or path.rpartition(".")[2] in set_]


class FlagReads(TorchFunctionMode):
    """Sees whether code asks if parameters require gradients; where libraries do, to be faster.

    Attributes:
        any: whether it has.
    """

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self._parameters = set(map(id, parameters))
        self.any = False

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func == _REQUIRES_GRAD and id(args[0]) in self._parameters:
            asking = sys._getframe(1).f_globals.get("__name__")
            self.any = self.any or not is_library(asking)
        return func(*args, **(kwargs or {}))


def _keys(tree: Any) -> Iterator[int]:
    """The memory of the tensors in an operator's arguments."""
    if isinstance(tree, torch.Tensor):
        if tree.layout is torch.strided:
            yield storage_key(tree)
    elif isinstance(tree, list | tuple):
        for item in tree:
            yield from _keys(item)


def _reads_original(name: str, tensor: str) -> str:
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None and _is_inner(frame.f_globals.get("__name__", "")):
        frame = frame.f_back
    reader = f"`{frame.f_code.co_qualname}`" if frame is not None else "its code"
    return (
        f"`{name}` cannot be converted: {reader} reads its parameter {tensor} through something "
        "that is not copied with the module (a global variable, a class or a variable of its "
        "methods, an object that copies as itself), so that it would forever read the "
        "original's. Make it an attribute of the module (`self.name = ...`) or a default "
        "argument, or pass it as an argument of the call."
    )


def stale_tensor(name: str, path: str) -> str:
    """The message for a tensor that seems to be the cache of an earlier call."""
    return (
        f"`{path}` of `{name}` holds a tensor that was computed before the conversion, by an "
        "earlier call or when the module was made, and is now a constant: it does not follow the "
        "parameters, and no gradient flows through it. If the forward computes it, set it to None "
        "or remove it, or convert a new module; if it is a constant, detach it and register it "
        "(`self.register_buffer`)."
    )


def _is_inner(module: str) -> bool:
    return is_library(module) or module.partition(".")[0] == _PACKAGE


def _is_holder(item: Any) -> bool:
    return isinstance(item, MUTABLE) or is_generator(item)


def _contents(holder: Any) -> dict[Any, Any]:
    return {None: _state(holder)} if is_generator(holder) else contents(holder)


def _state(generator: Any) -> GeneratorState:
    if isinstance(generator, torch.Generator):  # read as it is in a run on fake tensors too
        state = generator.get_state()
        return GeneratorState(ctypes.string_at(state.data_ptr(), state.numel()))
    if isinstance(generator, np.random.BitGenerator):
        return GeneratorState(pickle.dumps(generator.state))
    get = getattr(generator, "getstate", None) or generator.get_state
    return GeneratorState(pickle.dumps(get()))


def _set_state(generator: Any, contents: bytes) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(torch.frombuffer(bytearray(contents), dtype=torch.uint8))
    elif isinstance(generator, np.random.BitGenerator):
        generator.state = pickle.loads(contents)
    else:
        set_ = getattr(generator, "setstate", None) or generator.set_state
        set_(pickle.loads(contents))


def _same(a: Any, b: Any) -> bool:
    """Whether two values are one, or alike and of the kinds that are made anew where they stand."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, (*_NUMBERS, bytes)):
        return a == b
    parts, others = apart(a), apart(b)
    if parts is None or others is None:
        return False
    return len(parts[0]) == len(others[0]) and all(map(_same, parts[0], others[0]))


def _caches(copy: Copy) -> Iterator[Any]:
    """The functions with caches that the module has, or that are methods of its layers."""
    classes = {cls for module in copy.module.modules() for cls in type(module).__mro__}
    methods = (value for cls in classes for value in vars(cls).values())
    held = (place.value for place in copy.places)
    for function in (*methods, *held):
        if isinstance(function, CachedFunction):
            yield function
