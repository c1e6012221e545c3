"""Trees of parameters: which are trained, and stacks of models."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, overload

import equinox as eqx
import jax
import jax.numpy as jnp
import torch
from jaxtyping import PyTree

from .._errors import ModuleError
from .module import own_buffers, TorchModule
from .reparametrised import Reparametrised


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
        {'bias': False, 'weight': True}
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
            f"(`{first.core.name}`): other layers, options, constants or train flags."
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
