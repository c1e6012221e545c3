"""A model used as a torch module: `state=` and `key=`, which are ours, and attributes it lacks."""

import difflib
import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.tree_util as jtu
import torch

from .._dtypes import is_key
from .._errors import InputError
from .._program import argument_name
from .core import Core


class Keywords(NamedTuple):
    """The keyword arguments of a call: ours, and those that are the forward's."""

    state: eqx.nn.State | None
    key: jax.Array | None
    rest: dict[str, Any]


def keywords(core: Core, args: Sequence[Any], kwargs: dict[str, Any]) -> Keywords:
    """Takes ours out of a call's. An argument of the forward's may have the same name.

    Raises:
        InputError: `state=` is no state, `key=` not one key, or either stands elsewhere.
    """
    rest, state, key = dict(kwargs), None, None
    if "state" not in core.arguments or _is_state(rest.get("state")):
        state = rest.pop("state", None)
    if state is not None and not _is_state(state):
        raise InputError(
            f"`state=` of `{core.name}` is a {type(state).__name__}, but takes the "
            "`equinox.nn.State` of `model, state = eqx.nn.make_with_state(from_torch)(module)`."
        )
    if "key" not in core.arguments or is_key(rest.get("key")):
        key = rest.pop("key", None)
    if any(map(_is_ours, jax.tree.leaves((args, rest), is_leaf=_is_state))):
        _refuse(core, (tuple(args), rest))
    return Keywords(state, None if key is None else _typed(core, key), rest)


_KEY = ("a key of JAX's", "key", "y = model(x, key=key)")
_STATE = ("an `equinox.nn.State`", "state", "y, state = model(x, state=state)")


def _is_state(x: Any) -> bool:
    return isinstance(x, eqx.nn.State)


def _is_ours(x: Any) -> bool:
    return _is_state(x) or is_key(x)


def _refuse(core: Core, arguments: Any) -> None:
    """Raises for a state or a key among the arguments of torch."""
    leaves = jtu.tree_leaves_with_path(arguments, is_leaf=_is_state)
    path, leaf = next((path, leaf) for path, leaf in leaves if _is_ours(leaf))
    what, name, call = _KEY if is_key(leaf) else _STATE
    raise InputError(
        f"`{core.name}` got {what} as {argument_name(jtu.keystr(path))}, but what is not passed as "
        f"`state=` or `key=` is for torch's `{core.options.method}`. Write `{name}={name}`, as in "
        f"`{call}`."
    )


def _typed(core: Core, key: Any) -> jax.Array:
    try:
        typed = key if is_key(key) else jax.random.wrap_key_data(key)
    except (TypeError, ValueError) as error:
        array = f"an array {key.dtype}{list(key.shape)}" if hasattr(key, "dtype") else None
        raise InputError(
            f"`key=` of `{core.name}` is {array or f'{key!r} of type {type(key).__name__}'}, but "
            "takes a key of JAX's: `key=jax.random.key(0)`."
        ) from error
    if typed.ndim:
        raise InputError(
            f"`key=` of `{core.name}` is an array of keys, of shape {list(typed.shape)}, but a "
            "call draws from one key: `key=keys[0]`. To call it with each of them, "
            "`jax.vmap(lambda key: model(x, key=key))(keys)`."
        )
    return typed


_MOVE = "torch runs where the arrays are: `model = eqx.filter_shard(model, jax.devices()[0])`."
_CAST = (
    "For another dtype convert the torch module, `from_torch(module.half())`, or cast the "
    "parameters: `params, rest = eqx.partition(model, eqx.is_inexact_array)`, then `model = "
    "eqx.combine(jax.tree.map(lambda a: a.astype(jnp.float16), params), rest)`."
)
_PARAMETERS = (
    "Write `model.params`, a dict of JAX arrays. Optimisers are optax's: "
    "`opt_state = optax.adam(1e-3).init(model)`."
)
_GRADIENTS = "Gradients are results, not kept in the model: `grads = eqx.filter_grad(loss)(model)`."
_REMEDIES = {
    "eval": "Write `model = eqx.nn.inference_mode(model)`.",
    "train": "Write `model = eqx.nn.inference_mode(model, value=False)`.",
    "training": "Read `model.inference`, which is its opposite.",
    "forward": 'Write `model(x)`; another method is `from_torch(model, method="name")`.',
    "state_dict": "Write `eqx_torch.state_dict(model)`.",
    "load_state_dict": "Write `model = eqx_torch.load_state_dict(model, sd)`.",
    "requires_grad_": "Write `eqx.partition(model, eqx_torch.trainable(model))`.",
    "to": f"{_MOVE} {_CAST}",
    **dict.fromkeys(["cuda", "cpu"], _MOVE),
    **dict.fromkeys(["half", "bfloat16", "float", "double"], _CAST),
    **dict.fromkeys(["parameters", "named_parameters"], _PARAMETERS),
    **dict.fromkeys(["zero_grad", "grad", "backward"], _GRADIENTS),
}


def missing_attribute(core: Core | None, name: str) -> str:
    """The message for an attribute that a model (None while it is being made) does not have."""
    # Libraries look for names with underscores at every object.
    remedy = None if core is None or name.startswith("__") else _remedy(core, name)
    return f"a TorchModule has no attribute `{name}`." + (f" {remedy}" if remedy else "")


def _remedy(core: Core, name: str) -> str | None:
    module, names = core.blueprint.module, core.blueprint.names
    if name in names.state:
        stored = core.stored[names.state.index(name)]
        return f'Write `state.get(model.buffers)["{stored}"]`: the forward changes it.'
    if name in _REMEDIES:
        return _REMEDIES[name]
    if not hasattr(torch.nn.Module, name) and inspect.isroutine(getattr(type(module), name, None)):
        return f'Write `from_torch(model, method="{name}")`, which shares its parameters.'
    if name in dir(module):
        arguments = "model, state" if names.state else "model"
        return f"The torch module has one: `eqx_torch.to_torch({arguments}).{name}`."
    if name.startswith("_"):
        return None
    return f"`{core.name}` has none either{nearest(name, [*module._modules, *module._parameters])}"


def nearest(name: str, known: Sequence[str]) -> str:
    """The end of a message about a name that is unknown: those that are like it, or some."""
    bare = name.strip("*.")
    containing = [other for other in known if bare and bare in other]
    close = containing or difflib.get_close_matches(name, known, n=3, cutoff=0.3) or known
    listed = ", ".join(map(repr, close[:3]))
    return f". The nearest that there is: {listed}." if close else "."
