"""Functions of whole models: back to torch, bit for bit and under torch's names, and stacks."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, overload

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import torch
from jaxtyping import PyTree

from .._arrays import j2t
from .._errors import ModuleError
from .blueprint import Blueprint, Names
from .convert import owned
from .core import Core
from .function import first
from .layers import set_training
from .module import misshapen, own_buffers, TorchModule
from .reparametrised import computed, Reparametrised
from .walk import copied


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
            own = np.shape(arrays[name])
            if own != shape:
                raise ModuleError(misshapen(core, f"{what} {name}", own, shape))


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


_PAIRS = (
    " Models that have a state are passed with it, all as pairs: `ensemble, states = "
    "stack_modules([(model, state), ...])`."
)
_REMEDIES = {
    eqx.nn.State: _PAIRS,
    tuple: _PAIRS,
    list: _PAIRS,
    torch.nn.Module: " Write `from_torch(module)`.",
}


def trainable(model: PyTree) -> PyTree:
    """Marks the parameters that torch would train.

    **Arguments:**

    - `model`: a `TorchModule`, or a tree that holds some.

    **Returns:**

    A tree of bools like `model`, for `equinox.partition`: True on parameters whose
    `requires_grad` was set when they were converted, False everywhere else.

    **Raises:**

    Nothing: what is no `TorchModule` is False.

    !!! example

        >>> import equinox as eqx, torch
        >>> from eqx_torch import from_torch
        >>> layer = torch.nn.Linear(3, 2)
        >>> _ = layer.bias.requires_grad_(False)
        >>> trainable(from_torch(layer)).params
        {'weight': True, 'bias': False}
    """
    return jax.tree.map(_marked, model, is_leaf=_is_module)


@overload
def stack_modules(models: Iterable[TorchModule]) -> TorchModule: ...


@overload
def stack_modules(
    models: Iterable[tuple[TorchModule, eqx.nn.State]],
) -> tuple[TorchModule, eqx.nn.State]: ...


def stack_modules(models: Iterable[Any]) -> Any:
    """One model with the parameters of several, stacked.

    **Arguments:**

    - `models`: conversions of torch modules that are equal but for their values, or, where these
        have a state, pairs of model and state, as `equinox.nn.make_with_state` gives them.

    **Returns:**

    A `TorchModule` with a leading axis, of the length of `models`, on every array, to be called
    under `equinox.filter_vmap`. All members are then computed by one batched torch call. Of pairs,
    the pair of it and an `equinox.nn.State` that is stacked in the same way.

    **Raises:**

    `ModuleError` if the models differ in more than their values.

    !!! example

        >>> import equinox as eqx, jax.numpy as jnp, torch
        >>> from eqx_torch import from_torch
        >>> ensemble = stack_modules([from_torch(torch.nn.Linear(3, 2)) for _ in range(4)])
        >>> call = eqx.filter_vmap(lambda model, x: model(x), in_axes=(eqx.if_array(0), None))
        >>> call(ensemble, jnp.ones(3)).shape
        (4, 2)
    """
    models = list(models)
    if not models:
        raise ModuleError("`stack_modules` needs at least one module.")
    if not all(map(_is_pair, models)):
        return _stacked_models(models)
    stack = _stacked_models([model for model, _ in models])
    return stack, _stacked_states(models)


def unstack_modules(stack: Any) -> list[Any]:
    """The members of an ensemble, the reverse of `stack_modules`.

    **Arguments:**

    - `stack`: what `stack_modules` gives, or what became of it: a `TorchModule` with a leading axis
        on every array, or the pair of it and its state.

    **Returns:**

    A list of `TorchModule`s, or of pairs.

    **Raises:**

    `ModuleError` if the arrays have no common leading axis.

    !!! example

        >>> import torch
        >>> from eqx_torch import from_torch
        >>> ensemble = stack_modules([from_torch(torch.nn.Linear(3, 2)) for _ in range(4)])
        >>> [model.params["bias"].shape for model in unstack_modules(ensemble)]
        [(2,), (2,), (2,), (2,)]
    """
    arrays, rest = eqx.partition(stack, eqx.is_array)
    sizes = {x.shape[:1] for x in jax.tree.leaves(arrays)}
    if len(sizes) != 1 or () in sizes:
        raise ModuleError(
            "`unstack_modules` takes what `stack_modules` gives, whose arrays have one leading "
            f"axis, but the arrays of {type(stack).__name__} have the leading sizes "
            f"{sorted(size[0] if size else 'none' for size in sizes)}."
        )
    ((count,),) = sizes
    member = lambda i: jax.tree.map(lambda x: x[i], arrays)  # noqa: E731
    return [eqx.combine(member(i), rest) for i in range(count)]


def _stacked_models(models: Sequence[Any]) -> TorchModule:
    first = models[0]
    for i, model in enumerate(models):
        _check_member(i, model, first)
    params, inserted = (
        jax.tree.map(_stacked_arrays, *(getattr(m, name) for m in models))
        for name in ("params", "inserted")
    )
    stack = dataclasses.replace(first, params=params, inserted=inserted)
    if not _holds_state(first):
        return stack
    init = _stacked([m.buffers.init for m in models])
    return eqx.tree_at(lambda m: m.buffers.init, stack, init)


def _stacked_states(pairs: Sequence[tuple[TorchModule, eqx.nn.State]]) -> eqx.nn.State:
    """The buffers of each member from its own state, for the index that the first one has."""
    model, state = pairs[0]
    if model.buffers is None:
        return state.substate(model)
    buffers = [own_buffers(m.core, m.buffers, s) for m, s in pairs if m.buffers is not None]
    structure = jax.tree.structure(state.substate(model))
    return jax.tree.unflatten(structure, jax.tree.leaves(_stacked(buffers)))


def _check_member(i: int, model: Any, first: Any) -> None:
    if not isinstance(model, TorchModule):
        remedy = next((text for kind, text in _REMEDIES.items() if isinstance(model, kind)), "")
        raise ModuleError(
            f"`stack_modules` takes modules made by `from_torch`, but got a "
            f"{type(model).__name__} at position {i}.{remedy}"
        )
    if model.core != first.core or model.inference != first.inference:
        raise ModuleError(
            f"`stack_modules` takes modules that differ only in their values, but the one at "
            f"position {i} (`{model.core.name}`) is another than the first "
            f"(`{first.core.name}`): other layers, options, constants or train flags. "
            "Make all of them by the same code, and put them into one mode, "
            "`eqx.nn.inference_mode(model, value=False)`, before they are stacked."
        )
    if _holds_state(model) != _holds_state(first):
        raise ModuleError(
            f"`stack_modules` got a model at position {i} that differs from the first in where "
            "its state is: make all of them by `eqx.nn.make_with_state(from_torch)(module)`, or "
            "all by `from_torch(module)`."
        )


def _holds_state(model: TorchModule) -> bool:
    """Whether a model holds the initial values of its buffers."""
    return model.buffers is not None and isinstance(model.buffers.init, dict)


def _stacked(trees: Sequence[Any]) -> Any:
    return jax.tree.map(lambda *xs: jnp.stack(xs), *trees)


def _stacked_arrays(*xs: Any) -> Any:
    return jnp.stack(xs) if eqx.is_array(xs[0]) else xs[0]


def _is_pair(x: Any) -> bool:
    return isinstance(x, tuple) and len(x) == 2 and isinstance(x[1], eqx.nn.State)


def _is_module(x: Any) -> bool:
    return isinstance(x, TorchModule)


def _marked(node: Any) -> Any:
    if not _is_module(node):
        return False
    names = node.core.blueprint.names.parameters
    flags = {
        name: _flags(node.params[name], p.requires_grad)
        for name, p in zip(names, node.core.blueprint.parameters, strict=True)
    }
    nothing = jax.tree.map(lambda _: False, node)
    inserted = jax.tree.map(eqx.is_inexact_array, node.inserted)
    return dataclasses.replace(nothing, params=flags, inserted=inserted)


def _flags(param: Any, flag: bool) -> Any:
    """What is trained of a parameter, or of what computes it."""
    if not isinstance(param, Reparametrised):
        return flag
    return Reparametrised(
        _flags(param.weight, flag), jax.tree.map(eqx.is_inexact_array, param.function)
    )
