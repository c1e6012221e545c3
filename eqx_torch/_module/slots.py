"""The places in a module where its tensors stand, and copies of a module with others there.

A tensor may stand in several places: in `_parameters` and `_buffers` of every module that has it,
and in lists that a layer keeps of its parameters, as recurrent layers do. A slot is a container
and a key, so that `container[key] = tensor` puts a tensor there.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from .._errors import ModuleError


Slot = tuple[Any, Any]


class _ScriptAttributes:
    """The tensors of a TorchScript module, which live in C++."""

    def __init__(self, module: torch.jit.ScriptModule) -> None:
        self._module = module

    def __getitem__(self, name: str) -> Any:
        return getattr(self._module, name)

    def __setitem__(self, name: str, tensor: torch.Tensor) -> None:
        setattr(self._module, name, tensor)

    def get(self, name: str) -> Any:
        return getattr(self._module, name, None)


def fill(slots: Sequence[Sequence[Slot]], tensors: Sequence[torch.Tensor]) -> None:
    """Puts each tensor in its places."""
    for places, tensor in zip(slots, tensors, strict=True):
        for container, key in places:
            container[key] = tensor


def copied(module: torch.nn.Module, memo: Mapping[int, Any]) -> torch.nn.Module:
    """A copy of a module.

    Args:
        module: the module.
        memo: by identity, what stands in the copy in place of each tensor.

    Raises:
        ModuleError: the module cannot be copied.
    """
    try:
        new = copy.deepcopy(module, {**memo, **_detached(module, memo)})
    except Exception as error:
        raise ModuleError(
            f"`{type(module).__name__}` cannot be converted, because `copy.deepcopy` cannot copy "
            f"it: {error}\nEach device thread needs a copy of the module (without its "
            "parameters). Give the part that cannot be copied a `__deepcopy__`, or wrap a "
            "function that calls the module by `torch2jax`."
        ) from error
    # TorchScript copies its modules in C++, where no memo is consulted.
    for old_part, new_part in zip(module.modules(), new.modules(), strict=True):
        if isinstance(old_part, torch.jit.ScriptModule):
            for (old, name), (container, _) in zip(_own(old_part), _own(new_part), strict=True):
                if id(old[name]) in memo:
                    container[name] = memo[id(old[name])]
    return new


def slots_of(
    module: torch.nn.Module, placeholders: Sequence[torch.Tensor]
) -> dict[int, list[Slot]]:
    """Where each placeholder stands; first in the module that registered it."""
    slots: dict[int, list[Slot]] = {id(p): [] for p in placeholders}
    for container, key in _places(module):
        if id(container[key]) in slots:
            slots[id(container[key])].append((container, key))
    return slots


def buffer_slot(module: torch.nn.Module, name: str) -> Slot:
    """Where a buffer stands."""
    owner_name, _, key = name.rpartition(".")
    owner = module.get_submodule(owner_name)
    scripted = isinstance(owner, torch.jit.ScriptModule)
    return _ScriptAttributes(owner) if scripted else owner._buffers, key


def _detached(module: torch.nn.Module, known: Mapping[int, Any]) -> dict[int, Any]:
    """Copies of the computed tensors that modules keep, which deepcopy refuses to copy."""
    return {
        id(tensor): tensor.detach().clone()
        for container, key in _places(module)
        if isinstance(tensor := container[key], torch.Tensor)
        and tensor.grad_fn is not None
        and id(tensor) not in known
    }


def _places(module: torch.nn.Module) -> Iterator[Slot]:
    """Every place in a module, its submodules and their containers where a tensor may stand."""
    for submodule in module.modules():
        yield from _own(submodule)
    for submodule in module.modules():
        for name, value in submodule.__dict__.items():
            if name not in ("_parameters", "_buffers", "_modules"):
                yield from _within(submodule.__dict__, name, value)


def _own(module: torch.nn.Module) -> Iterator[Slot]:
    """Where the parameters and the buffers that a module registered itself stand."""
    if isinstance(module, torch.jit.ScriptModule):
        attributes = _ScriptAttributes(module)
        yield from ((attributes, name) for name, _ in module._parameters.items())
        yield from ((attributes, name) for name, _ in module._buffers.items())
        return
    yield from ((module._parameters, name) for name in module._parameters)
    yield from ((module._buffers, name) for name in module._buffers)


def _within(container: Any, key: Any, value: Any) -> Iterator[Slot]:
    if isinstance(value, torch.Tensor):
        yield container, key
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from _within(value, i, item)
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from _within(value, name, item)
