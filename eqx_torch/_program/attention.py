"""Fused attention: the batching rule that torch has not, and what to do without its derivatives.

On a CPU `torch.nn.functional.scaled_dot_product_attention` is one fused operator, and torch
computes a batch of its calls in a loop. But the operator knows batches itself: each entry of the
first axis is computed for itself. So a batch of `n` calls on `b` entries each is one call on
`n * b` entries, and the same is true of its pullback, all of whose arguments and results have that
axis.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .._compat import CPU_ATTENTION, register_batching_rule


_NO_DERIVATIVE = "derivative for aten::_scaled_dot_product"
_REMEDY = (
    "Fused attention has one derivative only. Turn it off before the first call, by "
    "`torch.backends.cuda.enable_flash_sdp(False)` (on a CPU too; on a GPU also "
    "`enable_mem_efficient_sdp(False)` and `enable_cudnn_sdp(False)`), or build a model of "
    '`transformers` with `attn_implementation="eager"`.'
)


@functools.cache
def load_attention() -> None:
    """Lets `torch.func.vmap` batch attention on a CPU, for whoever calls it."""
    for operator in CPU_ATTENTION:
        register_batching_rule(operator, _batch)


def explain_attention(error: RuntimeError) -> None:
    """Says, where torch has no derivative of fused attention, what to do."""
    if _NO_DERIVATIVE in str(error):
        error.args = (f"{error}\n{_REMEDY}",)


def _batch(
    call: Callable[..., tuple[torch.Tensor, ...]],
    size: int,
    axes: Sequence[int | None],
    arguments: dict[str, Any],
) -> tuple[torch.Tensor, ...]:
    """The results, batched on their first axis, of arguments that are batched on `axes`."""
    merged = dict(arguments)
    for (name, x), axis in zip(arguments.items(), axes, strict=True):
        if isinstance(x, torch.Tensor):
            x = x.expand(size, *x.shape) if axis is None else x.movedim(axis, 0)
            merged[name] = x if name == "attn_mask" else x.flatten(0, 1)
    entries = merged["query"].shape[0] // size
    if isinstance(merged["attn_mask"], torch.Tensor):
        merged["attn_mask"] = _merged_mask(merged["attn_mask"], entries)
    return tuple(y.unflatten(0, (size, entries)) for y in call(*merged.values()))


def _merged_mask(mask: torch.Tensor, entries: int) -> torch.Tensor:
    """A mask for each entry of each member, of one for each member.

    A member's mask is of shape (queries, keys), or has before them an axis of heads and one of
    entries, each of which may have size one.
    """
    if mask.ndim == 3:
        mask = mask[:, None, None]
    return mask.expand(-1, entries, -1, -1, -1).flatten(0, 1)
