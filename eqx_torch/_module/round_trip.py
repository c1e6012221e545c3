"""From a `TorchModule` back to torch, bit for bit and under torch's names."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import numpy as np
import torch

from .._arrays import j2t
from .._errors import ModuleError
from .blueprint import Blueprint, Names
from .convert import owned
from .core import Core
from .function import first
from .layers import set_training
from .module import misshapen, own_buffers, TorchModule
from .reparametrised import computed, Reparametrised
from .slots import copied


_UNPACKED = " `make_with_state` gives a pair: write `model, state = pair`, `{}({}state=state)`."


def to_torch(model: TorchModule, state: eqx.nn.State | None = None) -> torch.nn.Module:
    """A torch module with the parameters of a `TorchModule`.

    **Arguments:**

    - `model`: the model. Its parameters may be sharded over devices of this process.
    - `state`: its state, if it has one (not needed while the model still has the initial one).

    **Returns:**

    A new module of the class that was converted, on the CPU, in torch's own dtypes, with tied
    weights tied. It shares no memory with `model`.

    **Raises:**

    `ModuleError` if the model has a state and it was not passed, or if it is a stack of models.

    !!! example

        >>> import torch
        >>> from eqx_torch import from_torch
        >>> to_torch(from_torch(torch.nn.Linear(3, 2)))
        Linear(in_features=3, out_features=2, bias=True)
    """
    _check_model("to_torch", model)
    return _torch_module(model, state)


def state_dict(model: TorchModule, state: eqx.nn.State | None = None) -> dict[str, Any]:
    """The `state_dict` of the torch module that a model stands for.

    **Arguments:**

    - `model`: the model; `to_torch` says more.
    - `state`: its state, if it has one.

    **Returns:**

    torch tensors in torch's own dtypes under torch's own names, for `torch.save` or safetensors.

    **Raises:**

    `ModuleError` as `to_torch` does.

    !!! example

        >>> import torch
        >>> from eqx_torch import from_torch
        >>> list(state_dict(from_torch(torch.nn.Linear(3, 2))))
        ['weight', 'bias']
    """
    _check_model("state_dict", model)
    return dict(_torch_module(model, state).state_dict())


def load_state_dict(
    model: TorchModule,
    sd: Mapping[str, Any],
    state: eqx.nn.State | None = None,
    strict: bool = True,
) -> Any:
    """A model with the values of a `state_dict`.

    **Arguments:**

    - `model`: the model, which is left as it is.
    - `sd`: torch tensors by torch's names, as `state_dict` or `torch.load` gives them.
    - `state`: the model's state, if it has one.
    - `strict`: whether `sd` has to have all names of the model, and no others. If not, what it
        lacks keeps its value, and what the model lacks is left out.

    **Returns:**

    The new model, or the pair of it and the new state if `state` was passed.

    **Raises:**

    What torch's own `load_state_dict` raises for names and shapes that do not fit; `ModuleError`
    as `to_torch` does, and if parameters are computed (`reparametrise`).

    !!! example

        >>> import torch
        >>> from eqx_torch import from_torch
        >>> module = torch.nn.Linear(3, 2)
        >>> model = load_state_dict(from_torch(torch.nn.Linear(3, 2)), module.state_dict())
        >>> bool((state_dict(model)["weight"] == module.weight).all())
        True
    """
    _check_model("load_state_dict", model)
    computed_names = [n for n, p in model.params.items() if isinstance(p, Reparametrised)]
    if computed_names:
        raise ModuleError(
            f"`load_state_dict` sets parameters, but those of `{model.core.name}` are computed "
            f"({first(computed_names)}). Load them before `reparametrise` or `fsdp`."
        )
    module = _torch_module(model, state)
    module.load_state_dict(sd, strict=strict)
    names = model.core.blueprint.names
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    params = {name: _like(model.params[name], tensors[name]) for name in names.parameters}
    new = dataclasses.replace(model, params=params, core=_core_for(model, module, names))
    if model.buffers is None:
        return new if state is None else (new, state)
    old = _buffers(model, state)
    pairs = zip(names.state, model.core.stored, strict=True)
    buffers = {stored: _like(old[name], tensors[name]) for name, stored in pairs}
    if state is not None:
        return new, state.set(model.buffers, state.get(model.buffers) | buffers)
    init: Any = model.buffers.init
    return eqx.tree_at(lambda m: m.buffers.init, new, init | buffers)


def _torch_module(model: TorchModule, state: eqx.nn.State | None) -> torch.nn.Module:
    core = model.core
    blueprint = core.blueprint
    names = blueprint.names
    count = len(names.parameters)
    buffers = _buffers(model, state)
    params = computed(model.params)
    arrays = [params[n] for n in names.parameters] + [buffers[n] for n in names.state]
    _check_shapes(core, {**params, **buffers})
    placeholders = [*blueprint.parameters, *blueprint.state]
    constants = blueprint.constants
    memo: dict[int, Any] = {id(constants[i]): t.clone() for i, t in blueprint.precise.items()}
    for i, (old, array, dtype) in enumerate(zip(placeholders, arrays, core.dtypes, strict=True)):
        new = torch.empty_like(old, device="cpu", dtype=dtype, requires_grad=False)
        with torch.no_grad():
            new.copy_(j2t(np.asarray(jax.device_get(array))))
        memo[id(old)] = torch.nn.Parameter(new, old.requires_grad) if i < count else new
    owners = [memo[id(old)] for old in placeholders]
    memo |= {id(view.placeholder): view.of(owners[view.owner]) for view in blueprint.views}
    module = copied(blueprint.module, memo).module
    set_training(module, blueprint.training_flags(bool(model.inference)))
    return module


def _check_model(function: str, model: Any) -> None:
    if not isinstance(model, TorchModule):
        arguments = "model, sd, " if function == "load_state_dict" else "model, "
        remedy = _UNPACKED.format(function, arguments) if isinstance(model, tuple) else ""
        already = ", which is a torch module already" * isinstance(model, torch.nn.Module)
        raise ModuleError(
            f"`{function}` takes a model made by `from_torch`, but got a "
            f"{type(model).__name__}{already}.{remedy}"
        )
    inserted = ", ".join(model.core.edits.inserted)
    if inserted:
        raise ModuleError(
            f"`{function}` gives what torch has of a model, but JAX stands in place of {inserted} "
            f"in `{model.core.name}`. Save it by `eqx.tree_serialise_leaves`, or "
            f"take the parts that are torch's, such as `{function}(model[name])`."
        )


def _check_shapes(core: Core, arrays: Mapping[str, Any]) -> None:
    """torch would broadcast what has another shape."""
    for what, shapes in zip(("parameter", "buffer"), core.shapes, strict=True):
        for name, shape in shapes.items():
            if np.shape(arrays[name]) != shape:
                raise ModuleError(misshapen(core, f"{what} {name}", arrays[name], shape))


def _core_for(model: TorchModule, module: torch.nn.Module, names: Names) -> Core:
    """The core of a model whose constants were loaded: the same one unless they differ."""
    old = model.core
    blueprint = Blueprint(module, names)
    pairs = zip(blueprint.constants, old.blueprint.constants, strict=True)
    precise = ((t, old.blueprint.precise[i]) for i, t in blueprint.precise.items())
    if all(torch.equal(a, b) for a, b in (*pairs, *precise)):
        return old
    return Core(blueprint, old.dtypes, old.options, old.examples, old.edits, old.stored)


def _like(old: jax.Array, tensor: torch.Tensor) -> jax.Array:
    """The values of a tensor, where and how the old ones lie."""
    new = owned(tensor)
    return jax.device_put(new, old.sharding) if getattr(old, "_committed", False) else new


def _buffers(model: TorchModule, state: eqx.nn.State | None) -> dict[str, jax.Array]:
    if model.buffers is None:
        return {}
    if state is not None:
        return own_buffers(model.core, model.buffers, state)
    if not isinstance(model.buffers.init, dict):
        names = first(model.core.blueprint.names.state)
        raise ModuleError(
            f"`{model.core.name}` has buffers ({names}) that live in its state. Pass it, with "
            "`state=state`."
        )
    pairs = zip(model.core.blueprint.names.state, model.core.stored, strict=True)
    init: Any = model.buffers.init
    return {name: init[stored] for name, stored in pairs}
