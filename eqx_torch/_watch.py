"""What torch code does while it runs, and how a run that only finds something out leaves no trace.

A `Watch` sees every operator: the random numbers that it draws, the storages that it writes to,
which are saved just before, so that the writes can be undone, and those that it makes.

No tensor of a run survives it. Code likes to keep what it computed at its first call: in
attributes, containers, closures, globals and caches. Tensors without values must not stay there. So
what is near a function is remembered `Before` a run, one level deep, and where a tensor of the run
is still alive afterwards, the very slot that holds it is given back what it held. All else is left
alone, as are what other threads have done and what Python code does beside when JAX traces it.
"""

import collections
import contextlib
import functools
import gc
import itertools
import operator
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch.overrides import TorchFunctionMode

from ._compat import (
    is_functorch_wrapped_tensor,
    StorageWeakRef,
    SWAPPING,
    torch_tree,
    TorchDispatchMode,
    without_modes,
    WithoutFunctionModes,
)
from ._errors import ShapeError
from ._reachable import CachedFunction, is_filled, LARGE, names_in, reachable


# Whether an object is, or has in it, a tensor that must not stay.
Holds: TypeAlias = Callable[[Any], bool]

# These write running statistics without saying so in their schema.
_SILENT_WRITERS = frozenset(
    ["aten::native_batch_norm", "aten::cudnn_batch_norm", "aten::miopen_batch_norm"]
)
_STATISTICS = ("running_mean", "running_var")
# Operators that may draw random numbers do not where one of these arguments is zero or False.
_SWITCHES = frozenset(["dropout", "dropout_p", "train", "training"])

_ATTRIBUTES: Any = torch.Tensor  # of which the stub knows the values only
_DATA = _ATTRIBUTES.data.__get__
EXPOSING = frozenset(
    [
        torch.Tensor.numpy,
        torch.Tensor.__array__,
        torch.Tensor.__dlpack__,
        torch.Tensor.data_ptr,
        torch.Tensor.storage,
        torch.Tensor.untyped_storage,
    ]
)

_ABSENT = object()
_MOST = 10_000
_CLOSED = (types.ModuleType, types.CodeType, types.FrameType, type)

_SEED = 0x657178_746F726368  # one that no generator of the user's has


class Draws(TorchDispatchMode):
    """Sees where the code that runs under it draws random numbers.

    Attributes:
        place: what is running, for messages; whoever knows may set it.
        random: the places where random numbers were drawn.
        instead: the generator that stands for torch's own, if one does; others draw nothing of it.
    """

    def __init__(self, instead: torch.Generator | None = None) -> None:
        super().__init__()
        self.instead = instead
        self.place = ""
        self.random: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags and not any(
            self._is_another(value)
            if argument.name == "generator"
            else _is_off(argument.name, value)
            for argument, value in _bound(func, args, kwargs)
        ):
            self.random.append(self.place)
        return func(*args, **kwargs)

    def _is_another(self, generator: torch.Generator | None) -> bool:
        # Operators get another object for the same generator, so it is told by its seed.
        instead = self.instead and self.instead.initial_seed()
        return generator is not None and generator.initial_seed() != instead


class Watch(Draws):
    """Sees what the code that runs under it draws, writes to and makes."""

    instead: torch.Generator

    def __init__(self) -> None:
        super().__init__(torch.Generator().manual_seed(_SEED))
        self._written: dict[int, torch.Tensor] = {}
        self._before: list[tuple[torch.UntypedStorage, torch.UntypedStorage]] = []
        self._made: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for tensor in writes(func, args, kwargs or {}):
            self._note(tensor)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        made = {storage_key(x): x for x in _dense(result)}
        if not made.keys() <= self._made.keys():
            given = set(map(storage_key, _dense((args, kwargs))))
            known = self._made.keys() | given
            self.made_by_hand(x for key, x in made.items() if key not in known)
        return result

    def wrote(self, tensor: torch.Tensor) -> bool:
        """Whether the memory of this tensor was written to."""
        return storage_key(tensor) in self._written

    def undo(self) -> None:
        """Puts back the contents of all memory that was written to."""
        with without_modes():
            for storage, before in self._before:
                if storage.nbytes() != before.nbytes():
                    storage.resize_(before.nbytes())
                storage.copy_(before)

    def forget(self) -> None:
        """Holds on to no tensor of the run any more."""
        self._written.clear()
        self._before.clear()

    def survivors(self) -> frozenset[int]:
        """The keys of the storages that were made in the run and are still alive."""
        return frozenset(key for key, storage in self._made.items() if not storage.expired())

    def made_by_hand(self, tensors: Iterable[torch.Tensor]) -> None:
        """Takes tensors that no operator of the run has made for its own."""
        for tensor in tensors:
            with WithoutFunctionModes():
                self._made[storage_key(tensor)] = StorageWeakRef(tensor.untyped_storage())

    def _note(self, tensor: torch.Tensor) -> None:
        key = storage_key(tensor)
        if key in self._written:
            return
        self._written[key] = tensor
        with WithoutFunctionModes(), without_modes():
            storage = tensor.untyped_storage()
            # What was made in the run ends with it.
            if key not in self._made and storage.device.type != "meta":
                self._before.append((storage, storage.clone()))


class Exposure(TorchFunctionMode):
    """Sees which tensors give away their memory, where writes to it cannot be seen.

    Args:
        by_data: whether `x.data` does: only a `Watch` sees writes to that.
    """

    def __init__(self, by_data: bool = False) -> None:
        super().__init__()
        self._exposing = EXPOSING | {_DATA} if by_data else EXPOSING
        self._keys: set[int] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in self._exposing:
            self._keys.add(storage_key(args[0]))
        return func(*args, **(kwargs or {}))

    def exposed(self, tensor: torch.Tensor) -> bool:
        """Whether the memory of this tensor may have been written to from outside of torch."""
        return storage_key(tensor) in self._keys


class Swaps(contextlib.AbstractContextManager["Swaps"]):
    """Sees whether a function puts tensors in the place of a module's parameters, in this thread.

    `torch.func.functional_call` does: as long as it runs, the module has other parameters for
    whoever else runs it, so that calls of such functions have to take turns. This looks at calls
    as a profiler does; where one is at work already, it sees nothing.

    Attributes:
        any: whether it has.
    """

    def __init__(self) -> None:
        self.any = False

    def __enter__(self) -> "Swaps":
        self._looks = sys.getprofile() is None
        if self._looks:
            sys.setprofile(self._look_at)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._looks:
            sys.setprofile(None)

    def _look_at(self, frame: types.FrameType, event: str, _: Any) -> None:
        self.any = self.any or (event == "call" and frame.f_code is SWAPPING)


class Before:
    """What the objects near a function hold before a run.

    Args:
        root: a function, method, partial, module, callable object or container of these.
    """

    def __init__(self, root: Any) -> None:
        self._slots = [slot for item in reachable(root) for slot in _slots(item)]

    def take_out_wrappers(self) -> bool:
        """Gives slots back what they held, where they hold what `torch.func` wraps tensors in.

        Returns:
            Whether there were any.
        """
        return self._give_back(is_functorch_wrapped_tensor)

    def repair(self, watch: Watch) -> None:
        """Gives slots back what they held, where they hold a tensor of a run."""
        watch.forget()
        if left := watch.survivors():
            self._give_back(functools.partial(_is_one_of, left))

    def end(self, watch: Watch, name: str) -> None:
        """Ends a run: none of its tensors is alive after this.

        Raises:
            ShapeError: something has kept one that cannot be given back what it held before.
        """
        self.repair(watch)
        if watch.survivors():
            gc.collect()  # tensors may be parts of cycles
        if left := watch.survivors():
            holder = _holder([x for x in gc.get_objects() if _is_one_of(left, x)])
            if holder is not None:
                raise ShapeError(
                    f"`{name}` keeps a tensor of the run that inferred its output shapes, in "
                    f"{holder}, which has no values of any use to later calls and cannot be taken "
                    "out of there. Declare the outputs by `output_shapes=`, so that there is no "
                    "such run, or make what is kept before."
                )

    def _give_back(self, is_one: Callable[[Any], bool]) -> bool:
        holds = functools.partial(_holds, is_one)
        given_back = [slot(holds) for slot in self._slots]
        return any(given_back)


def _slots(item: Any) -> Iterator[Callable[[Holds], bool]]:
    """What gives an object back what it held, where a call has kept something else there.

    Each says whether it had to.
    """
    if isinstance(item, torch.Tensor):
        if item.is_leaf and item.requires_grad:
            yield _attributes(item, lambda: {"grad": item.grad})
    elif isinstance(item, types.CellType):
        contents = "cell_contents"
        yield _attributes(item, lambda: {contents: item.cell_contents} if is_filled(item) else {})
    elif isinstance(item, type):
        yield _attributes(item, lambda: dict(vars(item)))
    elif isinstance(item, types.FunctionType):
        names, scope = names_in(item.__code__), item.__globals__
        yield _entries(scope, lambda: {name: scope[name] for name in names if name in scope})
    elif isinstance(item, dict):  # classes may have their own idea of what it has
        size = dict.__len__(item)
        small = size <= LARGE
        yield _entries(item, functools.partial(dict.copy, item) if small else _newest(item, size))
    elif isinstance(item, set):
        yield functools.partial(_set, item)
    elif isinstance(item, list | collections.deque):
        yield functools.partial(_list, item, list(item) if len(item) <= LARGE else None, len(item))
    elif isinstance(item, CachedFunction):
        yield functools.partial(_cache, item)


def _attributes(item: Any, now: Callable[[], Mapping[str, Any]]) -> Callable[[Holds], bool]:
    return _slot(now, functools.partial(setattr, item), functools.partial(delattr, item))


def _entries(item: Any, now: Callable[[], Mapping[Any, Any]]) -> Callable[[Holds], bool]:
    return _slot(now, functools.partial(operator.setitem, item), lambda key: item.pop(key, None))


def _slot(
    now: Callable[[], Mapping[Any, Any]],
    put: Callable[[Any, Any], None],
    take: Callable[[Any], object],
) -> Callable[[Holds], bool]:
    before = now()

    def give_back(holds: Holds) -> bool:
        changed = ((key, x) for key, x in now().items() if x is not before.get(key, _ABSENT))
        wrong = [key for key, x in changed if holds(x)]
        for key in wrong:
            if key in before:
                put(key, before[key])
            else:
                take(key)
        return bool(wrong)

    return give_back


def _newest(item: dict[Any, Any], size: int) -> Callable[[], dict[Any, Any]]:
    """What stands behind the first entries of a large dictionary."""

    def newest() -> dict[Any, Any]:
        new = itertools.islice(dict.__reversed__(item), max(dict.__len__(item) - size, 0))
        return {key: dict.get(item, key) for key in list(new)}

    return newest


def _list(item: Any, before: list[Any] | None, size: int, holds: Holds) -> bool:
    now, known = list(item), set(map(id, before or ()))
    first = 0 if before is not None else size  # of a large one, only what is new at its end
    wrong = [i for i in range(first, len(now)) if id(now[i]) not in known and holds(now[i])]
    same = set(range(size)).difference(wrong)
    in_place = before and len(now) >= size and all(now[i] is before[i] for i in same)
    for i in reversed(wrong):
        if before and in_place and i < size:
            item[i] = before[i]
        else:
            del item[i]
    return bool(wrong)


def _set(item: set[Any], holds: Holds) -> bool:
    wrong = {x for x in item.copy() if holds(x)}
    item.difference_update(wrong)
    return bool(wrong)


def _cache(function: Any, holds: Holds) -> bool:
    """Forgets what a cached function has returned; it cannot forget less than all."""
    wrong = any(holds(x) for x in gc.get_referents(function) if x is not function.__wrapped__)
    if wrong:
        function.cache_clear()
    return wrong


def _holds(is_one: Callable[[Any], bool], value: Any) -> bool:
    pending, seen = [value], set[int]()
    while pending and len(seen) < _MOST:
        item = pending.pop()
        if id(item) in seen or isinstance(item, _CLOSED):
            continue
        seen.add(id(item))
        if issubclass(type(item), torch.Tensor) and is_one(item):
            return True
        if isinstance(item, types.FunctionType):  # but not its globals
            own = item.__defaults__, item.__kwdefaults__, item.__dict__
            pending.extend([*(item.__closure__ or ()), *own])
        else:
            pending.extend(gc.get_referents(item))
    return False


def _is_one_of(keys: frozenset[int], item: Any) -> bool:
    if not issubclass(type(item), torch.Tensor) or item.layout is not torch.strided:
        return False
    try:
        return storage_key(item) in keys
    except RuntimeError:  # wrappers of torch.func have none
        return False


def _holder(tensors: list[Any]) -> str | None:
    """Where tensors are kept, as far as that has a name; None if nobody can reach them."""
    level = tensors
    for depth in range(5):
        above = [x for x in gc.get_referrers(*level) if x is not level and x is not tensors]
        above = [x for x in above if not isinstance(x, types.FrameType)]
        for holder in above:
            for key, value in list(getattr(holder, "__dict__", {}).items()):
                if any(value is x for x in level):
                    return f"the attribute `{key}` of a `{type(holder).__name__}`"
        level = above[:100]
        if not level:  # torch has lost count of a reference, or a frame ends soon
            return "a place that has no name" if depth else None
    return "a place that has no name"


def writes(func: Any, args: Any, kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """The arguments of an operator that it writes to."""
    silent = func.name() in _SILENT_WRITERS
    for argument, value in _bound(func, args, kwargs):
        alias = argument.alias_info
        writes = alias is not None and alias.is_write
        if silent and argument.name in _STATISTICS:
            writes = bool(kwargs.get("training", args[5] if len(args) > 5 else False))
        if writes:
            values = value if isinstance(value, list | tuple) else [value]
            yield from (v for v in values if isinstance(v, torch.Tensor))


def _is_off(name: str, value: Any) -> bool:
    return name in _SWITCHES and isinstance(value, bool | int | float) and not value


def _bound(func: Any, args: Any, kwargs: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    """Each argument of an operator with its value."""
    for i, argument in enumerate(func._schema.arguments):
        default = argument.default_value
        yield argument, args[i] if i < len(args) else kwargs.get(argument.name, default)


def _dense(tree: Any) -> list[torch.Tensor]:
    """The tensors in what an operator takes or gives that have one storage each."""
    # Not JAX's trees: torch's compiler calls dispatch modes with tensors that they do not take.
    leaves = torch_tree.tree_leaves(tree)
    return [x for x in leaves if isinstance(x, torch.Tensor) and x.layout is torch.strided]


def storage_key(tensor: torch.Tensor) -> int:
    """Equal for tensors that share memory."""
    with WithoutFunctionModes():
        return tensor.untyped_storage()._cdata
