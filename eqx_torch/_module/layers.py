"""What is known of torch's own layers: which change buffers, which draw random numbers.

Torch code has to know the mode of its layers when JAX traces. As a bool among a model's leaves, as
Equinox's own layers have it, it would be traced, or refused, by each transformation that is not
Equinox's; as a static field, `equinox.nn.inference_mode` would not find it, which replaces the node
`inference` of each module by a bool. So `Mode` is a node without leaves, and whatever bool is set
there becomes one.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import equinox as eqx
import jax.tree_util as jtu
import numpy as np
import torch
from torch.nn.parameter import is_lazy
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from .._errors import ModuleError


_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
_DROPOUTS = (
    torch.nn.Dropout,
    torch.nn.Dropout1d,
    torch.nn.Dropout2d,
    torch.nn.Dropout3d,
    torch.nn.AlphaDropout,
    torch.nn.FeatureAlphaDropout,
)


@jtu.register_static
class Mode(int):
    """A bool that is a node of a PyTree, but no leaf."""

    def __repr__(self) -> str:
        return repr(bool(self))


class ModeField:
    """The attribute `inference` of a model, a `Mode`.

    Each model has an instance of its own, since `equinox.tree_at` tells nodes apart by identity.
    """

    def __get__(self, model: Any, owner: type) -> Any:
        try:
            return vars(model)["inference"]
        except (KeyError, TypeError):  # of the class, or while a model is being made
            raise AttributeError("inference") from None

    def __set__(self, model: Any, value: Any) -> None:
        flag = isinstance(value, bool | np.bool_ | Mode)
        vars(model)["inference"] = Mode(value) if flag else value


def changing_buffers(module: torch.nn.Module) -> set[str]:
    """The buffers that torch's normalisation layers change in training."""
    names: set[str] = set()
    for prefix, layer in module.named_modules():
        names.update(_joined(prefix, name) for name in _own_changing(layer))
    return names


def drawing_layers(module: torch.nn.Module, training: Sequence[bool]) -> list[str]:
    """The layers of torch that draw random numbers, given each layer's train flag."""
    return [
        f"{name or type(layer).__name__} ({type(layer).__name__})"
        for (name, layer), flag in zip(module.named_modules(), training, strict=True)
        if flag and _draws(layer)
    ]


def is_training(module: torch.nn.Module) -> bool:
    """torch's train flag, which frozen TorchScript has lost."""
    return getattr(module, "training", False)


def set_training(module: torch.nn.Module, flags: Sequence[bool]) -> None:
    """Sets the train flag of each submodule that has one."""
    for submodule, flag in zip(module.modules(), flags, strict=True):
        if hasattr(submodule, "training"):
            submodule.training = flag


def computed_by_hooks(layer: torch.nn.Module) -> list[str]:
    """The attributes of a layer that torch's hooks compute from parameters before each call."""
    hooks = layer._forward_pre_hooks.values()
    names = [h.name for h in hooks if isinstance(h, SpectralNorm | WeightNorm)]
    return names + [h._tensor_name for h in hooks if isinstance(h, BasePruningMethod)]


def projection(layer: torch.nn.Module | None) -> str:
    """The source of what a layer does to its weight, for messages, or an example of it."""
    limit = getattr(layer, "max_norm", None)
    if not isinstance(layer, torch.nn.Embedding | torch.nn.EmbeddingBag) or limit is None:
        return "lambda w: jnp.clip(w, 0)"
    norm = f"jnp.linalg.norm(w, {layer.norm_type:g}, axis=1, keepdims=True)"
    return f"lambda w: w * jnp.minimum(1, {limit:g} / {norm})"


def check_convertible(module: torch.nn.Module) -> None:
    """Raises if a module has no values to convert."""
    if not isinstance(module, torch.nn.Module):
        raise ModuleError(_no_module(module))
    name = type(module).__name__
    _check_tree(name, module)
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    _check_unhooked(name, tensors)
    lazy = [n for n, t in tensors.items() if is_lazy(t)]
    if lazy:
        raise ModuleError(
            f"`{name}` is lazy: {', '.join(lazy)} will be made by its first call. Run it once, "
            "`module(torch.zeros(...))`, and then convert it."
        )
    meta = [n for n, t in tensors.items() if t.is_meta]
    if meta:
        raise ModuleError(
            f"`{name}` is on the meta device: {', '.join(meta[:3])} have shapes but no values. "
            'Give it memory by `module.to_empty(device="cpu")` and load a state dict, and then '
            "convert it."
        )
    quantized = [n for n, t in tensors.items() if t.is_quantized]
    if quantized:
        raise ModuleError(
            f"`{name}` is quantized: {', '.join(quantized[:3])} have a dtype that JAX does not. "
            "Convert the floating point module, or call this one through `torch2jax`."
        )


def _check_tree(name: str, module: torch.nn.Module) -> None:
    """Raises if a module is a submodule of itself, where torch's own walks have no end."""
    around: list[int] = []
    done: set[int] = set()

    def check(path: str, module: torch.nn.Module) -> None:
        own = id(module._modules)  # a proxy has those of its module
        if own in around:
            raise ModuleError(
                f"`{name}` has itself, or a module around it, as its submodule {path}, so that "
                "torch's own `module.state_dict()` has no end. Keep it from being registered: "
                f'`object.__setattr__(self, "{path.rpartition(".")[2]}", weakref.proxy(module))`.'
            )
        if own in done:
            return
        around.append(own)
        for key, child in module._modules.items():
            if child is not None and not isinstance(child, torch.jit.ScriptModule):
                check(f"{path}.{key}".removeprefix("."), child)
        done.add(around.pop())

    if not isinstance(module, torch.jit.ScriptModule):
        check("", module)


def _check_unhooked(name: str, tensors: Mapping[str, torch.Tensor]) -> None:
    """Raises if there are hooks on tensors, for which arrays of JAX stand in every call."""
    for n, tensor in tensors.items():
        if tensor._backward_hooks or tensor._post_accumulate_grad_hooks:
            raise ModuleError(
                f"`{name}` has a hook on the gradient of its tensor {n}, which would not run, "
                "since the gradients of arrays are JAX's. Remove it, and change the gradients "
                f'themselves, as by `grads = eqx.tree_at(lambda g: g.params["{n}"], grads, '
                "replace_fn=lambda g: g * mask)`, or let the forward change the tensor "
                "(`self.weight * mask`)."
            )


def check_shards(module: torch.nn.Module) -> None:
    """Raises if a module would have to see all shards of a call at once."""
    layers = module.named_modules()
    synced = [name or "itself" for name, m in layers if isinstance(m, torch.nn.SyncBatchNorm)]
    if synced:
        raise ModuleError(
            f"`{type(module).__name__}` has SyncBatchNorm layers ({', '.join(synced[:3])}), but "
            "with `out_specs=` each shard is normalised by its own statistics, since torch calls "
            "on different devices do not communicate. If that will do, make them BatchNorm "
            "layers; to normalise by the whole batch, leave `out_specs` out and replicate the "
            "inputs, `jax.sharding.reshard(x, P())`."
        )


def _no_module(x: Any) -> str:
    takes = "`from_torch` takes a `torch.nn.Module`, but got"
    if isinstance(x, type):
        return f"{takes} the class `{x.__name__}`. Make one: `from_torch({x.__name__}(...))`."
    if isinstance(x, eqx.Module):
        return (
            f"{takes} the Equinox module `{type(x).__name__}`, which takes JAX arrays already: "
            "call it as it is, or make it a field of an `equinox.Module` beside torch's."
        )
    if isinstance(x, tuple):
        return f"{takes} a tuple. Of a model and its state pass the model: `from_torch(model)`."
    return (
        f"{takes} {x!r} of type {type(x).__name__}. Functions of tensors are converted by "
        "`torch2jax`."
    )


def _own_changing(layer: torch.nn.Module) -> list[str]:
    buffers = dict(layer.named_buffers(recurse=False))
    if getattr(layer, "track_running_stats", False):
        return [name for name in _STATISTICS if name in buffers]
    if type(layer).__name__ == "_SpectralNorm":
        return [name for name in ("_u", "_v") if name in buffers]
    hooks = [h for h in layer._forward_pre_hooks.values() if isinstance(h, SpectralNorm)]
    return [f"{h.name}_{suffix}" for h in hooks for suffix in "uv"]


def _draws(layer: torch.nn.Module) -> bool:
    if isinstance(layer, _DROPOUTS):
        return layer.p > 0
    if isinstance(layer, torch.nn.RReLU):
        return True
    if isinstance(layer, torch.nn.MultiheadAttention):
        return layer.dropout > 0
    if isinstance(layer, torch.nn.RNNBase):
        return layer.dropout > 0 and layer.num_layers > 1
    return isinstance(layer, torch.nn.FractionalMaxPool2d | torch.nn.FractionalMaxPool3d)


def _joined(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
