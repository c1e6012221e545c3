"""What a `TorchModule` says when it is asked for an attribute that only torch's module has."""

import inspect

import torch

from .core import Core
from .function import first


_MOVE = "torch runs where the arrays are: `model = eqx.filter_shard(model, {})`."
_CAST = (
    "For another dtype convert the torch module, `from_torch(module.half())`, or cast the "
    "parameters: `params, rest = eqx.partition(model, eqx.is_inexact_array)`, then `model = "
    "eqx.combine(jax.tree.map(lambda a: a.astype(jnp.float16), params), rest)`."
)
_GRADIENTS = "Gradients are results, not kept in the model: `grads = eqx.filter_grad(loss)(model)`."
_PARAMETERS = (
    "Write `model.params`, a dict of JAX arrays. Optimisers are optax's: "
    "`opt_state = optax.adam(1e-3).init(model)`."
)

_REMEDIES = {
    "eval": "Write `model = eqx.nn.inference_mode(model)`.",
    "train": "Write `model = eqx.nn.inference_mode(model, value=False)`.",
    "training": "Read `model.inference`, which is its opposite.",
    "forward": 'Write `model(x)`; another method is `from_torch(model, method="name")`.',
    "state_dict": "Write `eqx_torch.state_dict(model)`.",
    "load_state_dict": "Write `model = eqx_torch.load_state_dict(model, sd)`.",
    "parameters": _PARAMETERS,
    "named_parameters": _PARAMETERS,
    "named_buffers": "Write `eqx_torch.state_dict(model)`, or `state_dict(model, state)`.",
    "requires_grad_": "Write `eqx.partition(model, eqx_torch.trainable(model))`.",
    "zero_grad": _GRADIENTS,
    "grad": _GRADIENTS,
    "backward": _GRADIENTS,
    "to": f"{_MOVE.format('jax.devices()[0]')} {_CAST}",
    "cuda": _MOVE.format('jax.devices("cuda")[0]'),
    "cpu": _MOVE.format('jax.devices("cpu")[0]'),
    "half": _CAST,
    "bfloat16": _CAST,
    "float": _CAST,
    "double": _CAST,
}


def missing_attribute(core: Core | None, name: str) -> str:
    """The message for an attribute that a model does not have.

    Args:
        core: of the model, None while it is being made.
        name: of the attribute.
    """
    # Libraries look for names with underscores at every object.
    remedy = None if core is None or name.startswith("__") else _remedy(core, name)
    return f"a TorchModule has no attribute `{name}`." + (f" {remedy}" if remedy else "")


def _remedy(core: Core, name: str) -> str | None:
    module = core.blueprint.module
    parameters = _parameters_at(core, name)
    if parameters:
        listed = first([f'`model.params["{p}"]`' for p in parameters])
        return f"Parameters stand under torch's names: {listed}."
    if name in core.blueprint.names.state:
        return f'Write `state.get(model.buffers)["{name}"]`: the forward changes it.'
    if name in _REMEDIES:
        return _REMEDIES[name]
    if hasattr(torch.nn.Module, name):
        return (
            f"Write `module.{name}`, with the torch module, before `from_torch`, or "
            f"`{_in_torch(core)}.{name}`."
        )
    if inspect.isroutine(getattr(type(module), name, None)):
        return f'Write `from_torch(model, method="{name}")`, which shares its parameters.'
    children, buffers = dict(module.named_children()), dict(module.named_buffers())
    if name in children or name in buffers or name in vars(module) or hasattr(type(module), name):
        return f"The torch module has one: `{_in_torch(core)}.{name}`."
    return None


def _parameters_at(core: Core, name: str) -> list[str]:
    """The names in `params` of a parameter, or of those of a submodule."""
    blueprint = core.blueprint
    names = dict(zip(map(id, blueprint.parameters), blueprint.names.parameters, strict=True))
    every = blueprint.module.named_parameters(remove_duplicate=False)
    found = [names[id(p)] for n, p in every if n == name or n.startswith(f"{name}.")]
    return list(dict.fromkeys(found))


def _in_torch(core: Core) -> str:
    return (
        "eqx_torch.to_torch(model, state)" if core.blueprint.state else "eqx_torch.to_torch(model)"
    )
