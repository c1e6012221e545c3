"""A torch module without its parameters, and the copies of it that run.

A `Blueprint` is a copy of the module in which tensors without memory stand for the parameters and
for the buffers that its forward changes. It is static data: hashable, equal where modules are the
same but for those values. A `Skeleton` is a copy of the blueprint in which one call at a time
puts the tensors it was given where the placeholders stand, wherever that is: in `_parameters`, in
`_buffers`, or in a list that a layer keeps of them, as recurrent layers do. Skeletons are lent to
calls from a pool, so that concurrent calls never share one. Buffers that the forward only reads
are shared by all skeletons on a device.
"""

import collections
import dataclasses
import functools
from collections.abc import Hashable, Sequence
from typing import Any

import torch

from .._annotations import strip_checkers
from .._dtypes import canonical_dtype, dtype_j2t, is_inexact
from .fingerprint import digest, fingerprint
from .layers import is_training, set_training
from .places import walk
from .sharing import View, views
from .slots import buffer_slot, copied, fill
from .traces import Trace


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
    """

    def __init__(self, module: torch.nn.Module, names: Names) -> None:
        self.names = names
        tensors = _tensors(module)
        self.parameters = [_placeholder(tensors[name]) for name in names.parameters]
        self.state = [_placeholder(tensors[name]) for name in names.state]
        self.constants = [_constant(tensors[name]) for name in names.constants]
        # In torch's own precision, for the way back, where JAX's is another.
        self.precise = {
            i: tensors[name].detach().to("cpu", copy=True)
            for i, name in enumerate(names.constants)
            if tensors[name].dtype != self.constants[i].dtype
        }
        all_names = names.parameters + names.state + names.constants
        stand_ins = [*self.parameters, *self.state, *self.constants]
        memo = {id(tensors[n]): new for n, new in zip(all_names, stand_ins, strict=True)}
        found = _views(module, names, tensors)
        self.views = list(found.values())
        memo |= {key: view.placeholder for key, view in found.items()}
        self.module = copied(module, memo).module
        self.flags = tuple(map(is_training, self.module.modules()))
        self._pools: dict[torch.device, _Pool] = {}

    def __getstate__(self) -> dict[str, Any]:
        """For pickle: without the skeletons, and what was computed."""
        kept = ("names", "parameters", "state", "constants", "views", "precise", "module", "flags")
        return {**{name: getattr(self, name) for name in kept}, "_pools": {}}

    @functools.cached_property
    def key(self) -> Hashable:
        """Equal for equal blueprints."""
        named = [*self.parameters, *self.state]
        placeholders: dict[int, Hashable] = {id(t): ("tensor", i) for i, t in enumerate(named)}
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
        own = [*blueprint.parameters, *blueprint.state, *(v.placeholder for v in blueprint.views)]
        memo: dict[int, Any] = {id(p): p for p in own}
        memo |= {id(old): new for old, new in zip(blueprint.constants, self.constants, strict=True)}
        copy = copied(blueprint.module, memo)
        self.module, self._copy = copy.module, copy
        strip_checkers(self.module)
        self._parameter_slots = [copy.slots[id(p)] for p in blueprint.parameters]
        self._state_slots = [copy.slots[id(p)] for p in blueprint.state]
        self._view_slots = [copy.slots[id(v.placeholder)] for v in blueprint.views]
        self._constant_slots = [buffer_slot(self.module, n) for n in blueprint.names.constants]
        self._versions = [c._version for c in self.constants]
        self._inference: bool | None = None

    def set_mode(self, inference: bool) -> None:
        """Sets torch's train flags."""
        if inference != self._inference:
            flags = self._blueprint.training_flags(inference)
            set_training(self.module, flags)
            self._inference = inference
            if "trace" in vars(self):
                self.trace.note_modes()

    @functools.cached_property
    def trace(self) -> Trace:
        """What calls leave behind. To be asked for first while there is nothing."""
        blueprint = self._blueprint
        own = [*blueprint.parameters, *blueprint.state, *(v.placeholder for v in blueprint.views)]
        return Trace(self._copy, [*own, *self.constants])

    def bind(self, parameters: Sequence[torch.Tensor], state: Sequence[torch.Tensor]) -> None:
        """Puts tensors in place of the parameters and of the changing buffers."""
        fill(self._parameter_slots, parameters)
        fill(self._state_slots, state)
        if self._view_slots:
            owners = [*parameters, *state]
            fill(self._view_slots, [v.of(owners[v.owner]) for v in self._blueprint.views])

    def unbind(self) -> None:
        """Takes them out, so that nothing keeps or reads memory that is XLA's."""
        fill(self._parameter_slots, self._blueprint.parameters)
        fill(self._state_slots, self._blueprint.state)
        fill(self._view_slots, [v.placeholder for v in self._blueprint.views])

    def overwritten(self, parameters: Sequence[torch.Tensor]) -> list[str]:
        """The parameters in whose place the forward has put something else."""
        pairs = zip(self._blueprint.names.parameters, self._parameter_slots, strict=True)
        return [
            name
            for (name, ((container, key), *_)), bound in zip(pairs, parameters, strict=True)
            if container.get(key) is not bound
        ]

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


def _tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return dict(module.named_parameters()) | dict(module.named_buffers())


def _views(
    module: torch.nn.Module, names: Names, tensors: dict[str, torch.Tensor]
) -> dict[int, View]:
    registered = set(map(id, tensors.values()))
    others = {
        place.path: place.value
        for place in walk(module)
        if isinstance(place.value, torch.Tensor) and id(place.value) not in registered
    }
    owners = {name: tensors[name] for name in names.parameters + names.state}
    constants = {name: tensors[name] for name in names.constants}
    return views(type(module).__name__, owners, constants, others)


def _placeholder(tensor: torch.Tensor) -> torch.Tensor:
    empty = torch.empty_like(tensor, device="meta", requires_grad=False)
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(empty, requires_grad=tensor.requires_grad)
    return empty


def _constant(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the host, in the precision in which JAX has the parameters it meets."""
    dtype = dtype_j2t(canonical_dtype(tensor.dtype)) if is_inexact(tensor.dtype) else tensor.dtype
    return tensor.detach().to("cpu", dtype, copy=True)
