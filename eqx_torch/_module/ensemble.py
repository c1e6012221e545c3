"""Trees of parameters: which are trained, and stacks of models."""

from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from .._errors import ModuleError
from .module import TorchModule


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


def stack_modules(models: Sequence[TorchModule]) -> TorchModule:
    """One model with the parameters of several, stacked.

    **Arguments:**

    - `models`: conversions of torch modules that are equal but for their values.

    **Returns:**

    A `TorchModule` with a leading axis, of the length of `models`, on every array, to be called
    under `equinox.filter_vmap`. All members are then computed by one batched torch call.

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
    if not models:
        raise ModuleError("`stack_modules` needs at least one module.")
    first = models[0]
    for i, model in enumerate(models):
        if not isinstance(model, TorchModule):
            raise ModuleError(
                f"`stack_modules` takes modules made by `from_torch`, but got a "
                f"{type(model).__name__} at position {i}."
            )
        if model.core != first.core or model.inference != first.inference:
            raise ModuleError(
                f"`stack_modules` takes modules that differ only in their values, but the one at "
                f"position {i} (`{model.core.name}`) is another than the first "
                f"(`{first.core.name}`): other layers, options, constants or train flags."
            )
    params = _stacked([m.params for m in models])
    stack = eqx.tree_at(lambda m: m.params, first, params)
    if first.buffers is None or not isinstance(first.buffers.init, dict):
        return stack
    init = _stacked([m.buffers.init for m in models if m.buffers is not None])
    return eqx.tree_at(lambda m: m.buffers.init, stack, init)


def _stacked(trees: Sequence[Any]) -> Any:
    return jax.tree.map(lambda *xs: jnp.stack(xs), *trees)


def _is_module(x: Any) -> bool:
    return isinstance(x, TorchModule)


def _marked(node: Any) -> Any:
    if not _is_module(node):
        return False
    names = node.core.blueprint.names.parameters
    flags = {
        name: p.requires_grad for name, p in zip(names, node.core.blueprint.parameters, strict=True)
    }
    nothing = jax.tree.map(lambda _: False, node)
    return eqx.tree_at(lambda m: m.params, nothing, flags)
