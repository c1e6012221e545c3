"""No tensor of a run survives it.

Code likes to keep what it computed at its first call: in attributes, containers, closures, globals
and caches. Tensors without values must not stay there. So what is near a function is remembered
before a run, one level deep, and where a tensor of the run is still alive afterwards, the very slot
that holds it is given back what it held. Everything else is left alone, as are what other threads
have done and what Python code does beside when JAX traces it.
"""

import collections
import functools
import gc
import itertools
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

import torch

from ._compat import is_functorch_wrapped_tensor
from ._errors import ShapeError
from ._reachable import CachedFunction, is_filled, LARGE, names_in, reachable
from ._watch import storage_key, Watch


Holds: TypeAlias = Callable[[Any], bool]

_ABSENT = object()
_MOST = 10_000
_CLOSED = (types.ModuleType, types.CodeType, types.FrameType, type)


class Before:
    """What the objects near a function hold before a run.

    Args:
        root: a function, method, partial, module, callable object or container of these.
    """

    def __init__(self, root: Any) -> None:
        self._slots = [slot for item in reachable(root) for slot in _slots(item)]

    def _give_back(self, holds: Holds) -> bool:
        """Gives slots back what they held, where what they have now `holds` what must not stay."""
        given_back = [slot(holds) for slot in self._slots]
        return any(given_back)

    def take_out_wrappers(self) -> bool:
        """Gives slots back what they held, where they hold what `torch.func` wraps tensors in.

        Returns:
            Whether there were any.
        """
        return self._give_back(functools.partial(_holds, is_functorch_wrapped_tensor))

    def repair(self, watch: Watch) -> None:
        """Gives slots back what they held, where they hold a tensor of a run."""
        watch.forget()
        if left := watch.survivors():
            self._give_back(functools.partial(_holds, functools.partial(_is_one_of, left)))

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
                raise ShapeError(_kept(name, holder))


def _slots(item: Any) -> Iterator[Callable[[Holds], bool]]:
    """A function for each place of an object where a call may keep something."""
    if isinstance(item, torch.Tensor):
        if item.is_leaf and item.requires_grad:
            yield functools.partial(_attribute, item, "grad", item.grad)
    elif isinstance(item, dict):
        size = dict.__len__(item)  # classes may have their own idea of it, and of copies
        yield functools.partial(_dict, item, dict.copy(item) if size <= LARGE else None, size)
    elif isinstance(item, list | collections.deque):
        yield functools.partial(_list, item, list(item) if len(item) <= LARGE else None, len(item))
    elif isinstance(item, set):
        yield functools.partial(_set, item)
    elif isinstance(item, types.CellType):
        before = item.cell_contents if is_filled(item) else _ABSENT
        yield functools.partial(_attribute, item, "cell_contents", before)
    elif isinstance(item, types.FunctionType):
        scope = item.__globals__
        for name in names_in(item.__code__):
            yield functools.partial(_entry, scope, name, scope.get(name, _ABSENT))
    elif isinstance(item, type):
        yield functools.partial(_class, item, dict(vars(item)))
    elif isinstance(item, CachedFunction):
        yield functools.partial(_cache, item)


def _attribute(item: Any, name: str, before: Any, holds: Holds) -> bool:
    value = getattr(item, name, _ABSENT)
    if value is before or not holds(value):
        return False
    if before is _ABSENT:
        delattr(item, name)
    else:
        setattr(item, name, before)
    return True


def _entry(container: dict[Any, Any], key: Any, before: Any, holds: Holds) -> bool:
    value = dict.get(container, key, _ABSENT)
    if value is before or not holds(value):
        return False
    if before is _ABSENT:
        container.pop(key, None)
    else:
        container[key] = before
    return True


def _dict(
    container: dict[Any, Any], before: dict[Any, Any] | None, size: int, holds: Holds
) -> bool:
    if before is None:  # then what is new stands at the end
        new = itertools.islice(dict.__reversed__(container), max(dict.__len__(container) - size, 0))
        before, keys = {}, list(new)
    else:
        keys = list(dict.keys(container))
    given_back = [_entry(container, key, before.get(key, _ABSENT), holds) for key in keys]
    return any(given_back)


def _list(container: Any, before: list[Any] | None, size: int, holds: Holds) -> bool:
    now = list(container)
    if before is None:
        wrong = [i for i in range(size, len(now)) if holds(now[i])]
    else:
        known = set(map(id, before))
        wrong = [i for i, x in enumerate(now) if id(x) not in known and holds(x)]
    same = set(range(size)).difference(wrong)
    in_place = before and len(now) >= size and all(now[i] is before[i] for i in same)
    for i in reversed(wrong):
        if before and in_place and i < size:
            container[i] = before[i]
        else:
            del container[i]
    return bool(wrong)


def _set(container: set[Any], holds: Holds) -> bool:
    wrong = {x for x in container.copy() if holds(x)}
    container.difference_update(wrong)
    return bool(wrong)


def _class(cls: type, before: dict[str, Any], holds: Holds) -> bool:
    changed = [n for n, value in dict(vars(cls)).items() if value is not before.get(n, _ABSENT)]
    given_back = [_attribute(cls, name, before.get(name, _ABSENT), holds) for name in changed]
    return any(given_back)


def _cache(function: Any, holds: Holds) -> bool:
    """Forgets what a cached function has returned; it cannot forget less than all."""
    kept = gc.get_referents(function)
    wrong = any(holds(x) for x in kept if x is not function.__wrapped__)
    if wrong:
        function.cache_clear()
    return wrong


def _holds(is_one: Callable[[Any], bool], value: Any) -> bool:
    """Whether an object is, or has in it, one of some tensors."""
    pending, seen = [value], set[int]()
    while pending and len(seen) < _MOST:
        item = pending.pop()
        if id(item) in seen or isinstance(item, _CLOSED):
            continue
        seen.add(id(item))
        if issubclass(type(item), torch.Tensor) and is_one(item):
            return True
        pending.extend(_parts(item))
    return False


def _parts(item: Any) -> Iterable[Any]:
    if isinstance(item, types.FunctionType):  # but not its globals
        return [*(item.__closure__ or ()), item.__defaults__, item.__kwdefaults__, item.__dict__]
    return gc.get_referents(item)


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
        for name in filter(None, map(functools.partial(_name, level), above)):
            return name
        level = above[:100]
        if not level:  # torch has lost count of a reference, or a frame ends soon
            return "a place that has no name" if depth else None
    return "a place that has no name"


def _name(held: list[Any], holder: Any) -> str:
    """What to call a holder of one of the objects `held`; nothing if only its own holder says."""
    scope = holder if isinstance(holder, dict) else getattr(holder, "__dict__", {})
    keys = [key for key, value in list(scope.items()) if any(value is x for x in held)]
    if not keys:
        return ""
    if not isinstance(holder, dict):
        return f"the attribute `{keys[0]}` of a `{type(holder).__name__}`"
    if holder is vars(sys.modules.get(holder.get("__name__", ""), types)):
        return f"the global `{keys[0]}` of `{holder['__name__']}`"
    return ""


def _kept(name: str, holder: str) -> str:
    return (
        f"`{name}` keeps a tensor of the run that found out its output shapes, in {holder}, which "
        "has no values of any use to later calls and cannot be taken out of there. Declare the "
        "outputs by `output_shapes=`, so that there is no such run, or make what is kept before."
    )
