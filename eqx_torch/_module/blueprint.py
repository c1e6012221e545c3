"""A torch module without its parameters, and the copies of it that run.

A `Blueprint` is a copy of the module in which tensors without memory stand for the parameters and
for the buffers that its forward changes. It is static data: hashable, equal where modules are the
same but for those values. A `Skeleton` is a copy of the blueprint in which one call at a time
puts the tensors it was given where the placeholders stand, wherever that is: in `_parameters`, in
`_buffers`, or in a list that a layer keeps of them, as recurrent layers do. Skeletons are lent to
calls from a pool, so that concurrent calls never share one. Buffers that the forward only reads
are shared by all skeletons on a device.

In torch a view of a parameter follows it: its values, and gradients through it. In JAX parameters
are values, so a `View` is made anew from each parameter that a call is given. Where two registered
tensors overlap there is no such order between them, and the module is refused.
"""

import collections
import dataclasses
import functools
import gc
import itertools
import types
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from .._annotations import strip_checkers
from .._compat import is_functorch_wrapped_tensor, mark_parameter
from .._dtypes import canonical_dtype, dtype_j2t, is_inexact
from .._errors import ModuleError
from .._watch import storage_key
from .fingerprint import digest, fingerprint
from .layers import is_training, set_training
from .traces import Reads, Trace
from .walk import ATTRIBUTES, buffer_slot, copied, fill, Place, walk


_REGISTRIES = ("_parameters", "_buffers", "_modules")
_NOT_ENTERED = (torch.nn.Module, torch.Tensor, type, types.ModuleType, types.FunctionType, str)


@dataclasses.dataclass(frozen=True)
class Names:
    """The tensors of a module by name, each tensor under its first name.

    Attributes:
        parameters: of the parameters.
        state: of the buffers that the forward changes.
        constants: of the other buffers.
    """

    parameters: tuple[str, ...]
    state: tuple[str, ...]
    constants: tuple[str, ...]


class Blueprint:
    """See the module's docstring.

    Args:
        module: the module, which is left as it is.
        names: its tensors.

    Attributes:
        parameters, state: what stands for them.
        constants: the other buffers, in the precision of JAX.
        precise: those of which that is not torch's own, as they were, by position.
        loose: the paths of tensors that may have been computed, and whether they surely were.
    """

    def __init__(self, module: torch.nn.Module, names: Names) -> None:
        self.names = names
        tensors = dict(module.named_parameters()) | dict(module.named_buffers())
        self.parameters = [_placeholder(tensors[name]) for name in names.parameters]
        self.state = [_placeholder(tensors[name]) for name in names.state]
        self.constants = [_constant(tensors[name]) for name in names.constants]
        self.precise = {
            i: tensors[name].detach().to("cpu", copy=True)
            for i, name in enumerate(names.constants)
            if tensors[name].dtype != self.constants[i].dtype
        }
        registered = set(map(id, tensors.values()))
        everything = list(walk(module))
        changing = {name: tensors[name] for name in names.parameters + names.state}
        _check_followed(module, changing, everything)
        places = [place for place in everything if isinstance(place.value, torch.Tensor)]
        others = {id(p.value): p for p in reversed(places) if id(p.value) not in registered}
        found = _views(type(module).__name__, names, tensors, others)
        self.views = list(found.values())
        self.bound = [*self.parameters, *self.state, *(v.placeholder for v in self.views)]
        all_names = names.parameters + names.state + names.constants
        stand_ins = [*self.parameters, *self.state, *self.constants]
        memo = {id(tensors[n]): new for n, new in zip(all_names, stand_ins, strict=True)}
        memo |= {key: view.placeholder for key, view in found.items()}
        self.module = copied(module, memo).module
        known = {*filter(None, map(_memory, tensors.values()))}
        loose = [p for p in others.values() if _memory(p.value) not in known]
        self.loose = {p.path: _is_computed(p) for p in loose if _may_be_computed(p.value)}
        self._originals = {name: weakref.ref(tensor) for name, tensor in tensors.items()}
        self._loose = {place.path: weakref.ref(place.value) for place in loose}
        self.flags = tuple(map(is_training, self.module.modules()))
        self._pools: dict[torch.device, _Pool] = {}

    def __getstate__(self) -> dict[str, Any]:
        """For pickle: without the skeletons, the module it was made of, and what was computed."""
        dropped = ("key", "_hash")
        kept = {k: v for k, v in vars(self).items() if k not in dropped}
        return {**kept, "_pools": {}, "_originals": {}, "_loose": {}}

    @functools.cached_property
    def key(self) -> Hashable:
        """Equal for equal blueprints."""
        named = [*self.parameters, *self.state]
        placeholders: dict[int, Hashable] = {
            id(t): ("tensor", i, t.requires_grad) for i, t in enumerate(named)
        }
        placeholders |= {id(v.placeholder): ("view", v.key) for v in self.views}
        precise = tuple((i, digest(t)) for i, t in self.precise.items())
        return fingerprint(self.module, placeholders), precise

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Blueprint) and self.key == other.key

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.names, self.flags))

    def reads(self, loose: Iterable[Place], hidden: Callable[[], str]) -> Reads:
        """Sees what a call reads of the module of which this was made.

        Args:
            loose: the tensors that a copy has beside those of a call.
            hidden: the message for a call that reads what stands for a tensor of it.
        """
        pairs = [(place.path, place.value) for place in loose]
        name = type(self.module).__name__
        others = [*pairs, *_alive(self._loose).items()]
        return Reads(name, _alive(self._originals), others, self.bound, hidden)

    def pool(self, device: torch.device) -> "_Pool":
        """The skeletons on one device."""
        pool = self._pools.get(device)
        return pool or self._pools.setdefault(device, _Pool(self, device))

    def training_flags(self, inference: bool) -> tuple[bool, ...]:
        """torch's train flag for each submodule.

        A module that was training when it was converted keeps its flags (a frozen layer in it
        stays frozen); one that was not is trained as a whole.
        """
        if inference:
            return (False,) * len(self.flags)
        return self.flags if self.flags[0] else (True,) * len(self.flags)

    def changing(self, inference: bool) -> list[str]:
        """The state that a call in this mode may change: that of layers in training."""
        modules = self.module.named_modules()
        training = {
            name
            for (name, _), flag in zip(modules, self.training_flags(inference), strict=True)
            if flag
        }
        return [name for name in self.names.state if name.rpartition(".")[0] in training]


class Skeleton:
    """A copy of a blueprint that one call at a time may use."""

    def __init__(self, blueprint: Blueprint, constants: Sequence[torch.Tensor]) -> None:
        self._blueprint = blueprint
        self.parameter_names = blueprint.names.parameters
        self.constants = list(constants)
        memo: dict[int, Any] = {id(p): p for p in blueprint.bound}
        memo |= {id(old): new for old, new in zip(blueprint.constants, self.constants, strict=True)}
        self._copy = copied(blueprint.module, memo)
        self.module = self._copy.module
        strip_checkers(self.module)
        slots = self._copy.slots
        self._parameter_slots = [slots[id(p)] for p in blueprint.parameters]
        self._state_slots = [slots[id(p)] for p in blueprint.state]
        self._view_slots = [slots[id(v.placeholder)] for v in blueprint.views]
        self._constant_slots = [buffer_slot(self.module, n) for n in blueprint.names.constants]
        self._versions = [c._version for c in self.constants]
        self._inference: bool | None = None

    def set_mode(self, inference: bool) -> None:
        """Sets torch's train flags."""
        if inference != self._inference:
            set_training(self.module, self._blueprint.training_flags(inference))
            self._inference = inference
            if "trace" in vars(self):
                self.trace.note_modes()

    @functools.cached_property
    def trace(self) -> Trace:
        """What calls leave behind. To be asked for first while there is nothing."""
        return Trace(self._copy, [*self._blueprint.bound, *self.constants])

    def reads(self) -> Reads:
        """Sees what a call finds in the module beside what it is given."""
        return self._blueprint.reads(self.trace.loose, self._hidden)

    def bind(self, parameters: Sequence[torch.Tensor], state: Sequence[torch.Tensor]) -> None:
        """Puts tensors in place of the parameters and of the changing buffers."""
        for parameter in parameters:
            mark_parameter(parameter)
        fill(self._parameter_slots, parameters)
        fill(self._state_slots, state)
        if self._view_slots:
            owners = [*parameters, *state]
            fill(self._view_slots, [v.of(owners[v.owner]) for v in self._blueprint.views])

    def unbind(self) -> None:
        """Takes them out, so that nothing keeps or reads memory that is XLA's."""
        slots = self._parameter_slots + self._state_slots + self._view_slots
        fill(slots, self._blueprint.bound)

    def overwritten(self, parameters: Sequence[torch.Tensor]) -> list[str]:
        """The parameters in whose place the forward has put something else."""
        pairs = zip(self._blueprint.names.parameters, self._parameter_slots, strict=True)
        return [
            name
            for (name, ((container, key), *_)), bound in zip(pairs, parameters, strict=True)
            if container.get(key) is not bound
        ]

    def _hidden(self) -> str:
        """The message for a call that reads a stand-in, where `bind` has put nothing."""
        blueprint = self._blueprint
        all_names = blueprint.names.parameters + blueprint.names.state
        pairs = zip(all_names, (*blueprint.parameters, *blueprint.state), strict=True)
        names = {id(p): name for name, p in pairs}
        what, where = "a tensor", "a place"
        for path, module in self.module.named_modules():
            for key, value in vars(module).items():
                found = None if key in _REGISTRIES else _led_to(value, names)
                if found is not None:
                    kind = type(value).__name__
                    what, where = found, f"its attribute {path}.{key} ({kind})".replace(" .", " ")
        return (
            f"`{type(self.module).__name__}` reads {what} from {where} that is not looked into, so "
            "that the tensors of a call cannot be put there. Keep it in a list, a dict or an "
            "attribute of its own."
        )

    def place_constants(self, device: torch.device) -> None:
        """Moves the constants of this skeleton, which no longer shares them with others."""
        slots = self._copy.slots
        moved = [c.to(device) for c in self.constants]
        fill([slots[id(c)] for c in self.constants], moved)
        self.constants = moved
        self._versions = [c._version for c in moved]

    def state(self) -> list[torch.Tensor]:
        """The changing buffers, as the forward has left them."""
        return [container[key] for ((container, key), *_) in self._state_slots]

    def changed_constants(self) -> list[str]:
        """Buffers that should only have been read, but were written or replaced."""
        names = self._blueprint.names.constants
        pairs = zip(names, self._constant_slots, self.constants, self._versions, strict=True)
        return [
            name
            for name, (container, key), constant, version in pairs
            if container.get(key) is not constant or constant._version != version
        ]


def _led_to(root: Any, names: Mapping[int, str], depth: int = 6) -> str | None:
    """The first of named objects that Python's garbage collector, too, would get to."""
    level, seen = [root], set[int]()
    for _ in range(depth):
        for item in level:
            if id(item) in names:
                return names[id(item)]
        level = [x for x in level if id(x) not in seen and not isinstance(x, _NOT_ENTERED)]
        seen.update(map(id, level))
        level = list(itertools.chain.from_iterable(map(_held_by, level)))
    return None


def _held_by(item: Any) -> Iterable[Any]:
    is_objects = isinstance(item, np.ndarray) and item.dtype == object
    return item.flat if is_objects else gc.get_referents(item)


class _Pool:
    """Skeletons on one device that no call is using. Invariant: each is lent to one call only."""

    def __init__(self, blueprint: Blueprint, device: torch.device) -> None:
        self._blueprint = blueprint
        self._constants = [c.to(device) for c in blueprint.constants]
        self._free: collections.deque[Skeleton] = collections.deque()

    def borrow(self) -> Skeleton:
        """A skeleton for one call."""
        try:
            return self._free.pop()
        except IndexError:
            return self.new()

    def give_back(self, skeleton: Skeleton) -> None:
        """Lends a skeleton to later calls."""
        self._free.append(skeleton)

    def new(self) -> Skeleton:
        """A skeleton that no later call will see, unless it is given back."""
        return Skeleton(self._blueprint, self._constants)


@dataclasses.dataclass(frozen=True)
class View:
    """A tensor that is a view of a parameter or of a changing buffer.

    Attributes:
        owner: the position of that one, parameters first.
        size, stride, offset: where in its memory the view's elements are.
        attached: whether derivatives pass through it.
        placeholder: stands for it in a blueprint.
    """

    owner: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    attached: bool
    placeholder: torch.Tensor

    @property
    def key(self) -> Hashable:
        """Equal for equal views."""
        return self.owner, self.size, self.stride, self.offset, self.attached

    def of(self, owner: torch.Tensor) -> torch.Tensor:
        """The view of another tensor."""
        owner = owner if self.attached else owner.detach()
        layout = self.size, self.stride, self.offset
        if owner.is_contiguous() and not is_functorch_wrapped_tensor(owner):
            return owner.as_strided(*layout)
        index = torch.arange(owner.numel(), device=owner.device).as_strided(*layout)
        return owner.reshape(-1)[index]


def _check_followed(
    module: torch.nn.Module, changing: Mapping[str, torch.Tensor], places: Iterable[Place]
) -> None:
    """Raises if something would stay with the original where a call has other tensors.

    Calls have copies of the layers, and arrays in place of parameters and changing buffers: they
    are found under other identities, and at other addresses.
    """
    ids = {id(tensor): name for name, tensor in changing.items()}
    ids |= {id(layer): name or "itself" for name, layer in module.named_modules()}
    extents = [(name, *_extent(t)) for name, t in changing.items() if _has_memory(t)]
    for place in places:
        if isinstance(place.value, dict) and place.key is not ATTRIBUTES:
            for key in dict.keys(place.value):
                if isinstance(key, int | torch.Tensor):
                    name = ids.get(key if isinstance(key, int) else id(key))
                    if name is not None:
                        raise ModuleError(_keyed(type(module).__name__, place.path, name))
        elif (address := _address(place.value)) is not None:
            held = [name for name, low, high in extents if low <= address < high]
            if held:
                raise ModuleError(_exposed(type(module).__name__, place, held[0]))


def _address(value: Any) -> int | None:
    """Where memory begins that torch does not know of as a tensor's."""
    if isinstance(value, np.ndarray) and not value.dtype.hasobject and value.size:
        return value.__array_interface__["data"][0]
    if isinstance(value, torch.UntypedStorage | torch.TypedStorage) and value.device.type == "cpu":
        return value.data_ptr()
    return None


def _keyed(module: str, path: str, name: str) -> str:
    return (
        f"`{module}` cannot be converted: `{path}` has `{name}`, or its `id`, for a key, but "
        "calls have other objects in its place, which would not be found there. Use its name for "
        "the key."
    )


def _exposed(module: str, place: Place, name: str) -> str:
    return (
        f"`{module}` cannot be converted: `{place.path}`, a `{type(place.value).__name__}`, is the "
        f"memory of `{name}`, but calls have other memory in its place, so that it would keep the "
        f"values that `{name}` has now. Do not keep it, but make it in `forward` of "
        f"`self.{name}`, or keep a copy."
    )


def _views(
    module: str,
    names: Names,
    tensors: Mapping[str, torch.Tensor],
    others: Mapping[int, Place],
) -> dict[int, View]:
    """The views of parameters and changing buffers among other tensors, by their identities.

    Raises:
        ModuleError: tensors overlap that are not views of one another.
    """
    owners = names.parameters + names.state
    positions = {id(tensors[name]): i for i, name in enumerate(owners)}
    registered = set(map(id, tensors.values()))
    found: dict[int, View] = {}
    named = {key: (place.path, place.value) for key, place in others.items()}
    named |= {id(tensor): (name, tensor) for name, tensor in tensors.items()}
    for pair in _overlapping(named):
        (owner_name, owner), (view_name, view) = sorted(
            pair, key=lambda named: positions.get(id(named[1]), len(owners))
        )
        if id(owner) not in positions:
            continue
        if id(view) in registered or id(view) in found or not _is_view(view, owner):
            raise ModuleError(
                _overlap(module, owner_name, owner, view_name, view, id(view) in registered)
            )
        found[id(view)] = View(
            positions[id(owner)],
            tuple(view.shape),
            view.stride(),
            (view.data_ptr() - owner.data_ptr()) // owner.element_size(),
            view.requires_grad,
            torch.empty_strided(view.shape, view.stride(), dtype=view.dtype, device="meta"),
        )
    return found


def _is_view(view: torch.Tensor, owner: torch.Tensor) -> bool:
    """Whether a tensor can be made from another's elements in the order in which JAX has them."""
    low, high = _extent(owner)
    first, last = _extent(view)
    return (
        owner.is_contiguous()
        and low <= first
        and last <= high
        and (first - low) % owner.element_size() == 0
        and view.dtype == owner.dtype
        and not (view.is_conj() or view.is_neg())
    )


def _overlapping(
    named: Mapping[int, tuple[str, torch.Tensor]],
) -> Iterator[tuple[tuple[str, torch.Tensor], tuple[str, torch.Tensor]]]:
    """The pairs that have memory in common."""
    stored = [tensor for _, tensor in named.values() if _has_memory(tensor)]
    ordered = sorted((str(t.device), *_extent(t), id(t)) for t in stored)
    open_: list[tuple[str, int, int, int]] = []
    for item in ordered:
        device, low, _, key = item
        open_ = [o for o in open_ if o[0] == device and o[2] > low]
        for *_, other in open_:
            if _intersect(named[other][1], named[key][1]):
                yield named[other], named[key]
        open_.append(item)


def _has_memory(tensor: torch.Tensor) -> bool:
    strided = tensor.layout is torch.strided and not tensor.is_quantized
    return strided and not tensor.is_meta and tensor.numel() > 0


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The first byte of a tensor's memory, and the one after its last."""
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return start, start + (last + 1) * tensor.element_size()


def _intersect(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether tensors whose extents intersect have elements in common."""
    if (_is_dense(a) and _is_dense(b)) or a.element_size() != b.element_size():
        return True
    return bool(torch.isin(_addresses(a), _addresses(b)).any())


def _is_dense(tensor: torch.Tensor) -> bool:
    low, high = _extent(tensor)
    return high - low == tensor.numel() * tensor.element_size()


def _addresses(tensor: torch.Tensor) -> torch.Tensor:
    address = torch.tensor(tensor.data_ptr())
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        address = address[..., None] + torch.arange(size) * (stride * tensor.element_size())
    return address


def _overlap(
    module: str,
    owner_name: str,
    owner: torch.Tensor,
    view_name: str,
    view: torch.Tensor,
    registered: bool,
) -> str:
    text = (
        f"`{module}` cannot be converted: `{view_name}` shares memory with `{owner_name}`, so that "
        "in torch a change of one is a change of the other, but in JAX they would be two arrays. "
    )
    layouts = [(t.shape, t.stride(), t.data_ptr()) for t in (view, owner)]
    if registered and layouts[0] == layouts[1]:
        return text + f"Make them one: `module.{view_name} = module.{owner_name}`."
    return text + (
        f"Do not keep `{view_name}`, but compute it in `forward` from `self.{owner_name}` (its "
        "`.t()`, a slice of it), or keep a copy: `.clone()`."
    )


def _alive(references: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    tensors = {name: reference() for name, reference in references.items()}
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def _memory(tensor: torch.Tensor) -> int | None:
    return storage_key(tensor) if tensor.layout is torch.strided else None


def _may_be_computed(tensor: torch.Tensor) -> bool:
    strided = tensor.layout is torch.strided
    return strided and is_inexact(tensor.dtype) and not isinstance(tensor, torch.nn.Parameter)


def _is_computed(place: Place) -> bool:
    kept = getattr(type(place.owner), str(place.key), None)
    return place.value.grad_fn is not None or isinstance(kept, functools.cached_property)


def _placeholder(tensor: torch.Tensor) -> torch.Tensor:
    empty = torch.empty_like(tensor, device="meta", requires_grad=False)
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(empty, requires_grad=tensor.requires_grad)
    return empty


def _constant(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the host, in the precision in which JAX has the parameters it meets."""
    dtype = dtype_j2t(canonical_dtype(tensor.dtype)) if is_inexact(tensor.dtype) else tensor.dtype
    return tensor.detach().to("cpu", dtype, copy=True)
