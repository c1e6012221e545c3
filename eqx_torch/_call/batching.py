"""Batching: what `jax.vmap` makes of a torch call.

With `vmap_method="torch"` the batched call is the program's `Vmap`. The other methods are those of
`jax.ffi`: a loop, or one call of the function itself on arrays with a leading batch axis.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .._program import Program, Record, TOKEN, untaped, Vmap
from .._sharding import batch_axes, is_manual, over_batch_shards, over_the_batch
from .primitive import align, call


def batch(
    arrays: Sequence[Any], dims: Sequence[int | None], *, program: Program
) -> tuple[list[Any], list[int | None]]:
    """The batched outputs, with their batch axis first. Graphs are not recorded across a batch."""
    base, kept = untaped(program)
    arrays, dims = [arrays[i] for i in kept], [dims[i] for i in kept]
    axes = batch_axes(arrays, dims)
    # JAX cannot differentiate a `shard_map` in a `shard_map` that has residuals of its own: neither
    # graphs, nor what is made to vary only in there.
    recordable = axes is None or not is_manual(axes[0])
    if axes is not None and not recordable:
        arrays, dims = over_the_batch(axes, arrays, dims), [d or 0 for d in dims]
    recorded = isinstance(program, Record)

    def local(*xs: Any) -> list[Any]:
        outs = _batched(base, xs, dims, recordable)
        return [*outs, _no_tokens(xs, dims)] if recorded else outs

    outs = local(*arrays) if axes is None else over_batch_shards(local, axes, arrays, dims)
    return outs, [0] * len(outs)


def _no_tokens(arrays: Sequence[Any], dims: Sequence[int | None]) -> Any:
    """A token of no graph for each member: one for all of them is nowhere in a batch's sharding."""
    nothing = jnp.zeros((_size(arrays, dims), *TOKEN.shape), TOKEN.dtype)
    return align([nothing, *arrays])[0]


def _size(arrays: Sequence[Any], dims: Sequence[int | None]) -> int:
    return next(x.shape[d] for x, d in zip(arrays, dims, strict=True) if d is not None)


def _batched(
    program: Program, arrays: Sequence[Any], dims: Sequence[int | None], recordable: bool
) -> list[Any]:
    size = _size(arrays, dims)
    method = program.leaf.function.vmap_method
    if method == "torch":
        out_axes = (0,) * len(program.outs)
        return call(Vmap(program, tuple(dims), out_axes, size, recordable), *arrays)
    leading = [x if d is None else jnp.moveaxis(x, d, 0) for x, d in zip(arrays, dims, strict=True)]
    if method == "sequential":
        return _looped(program, leading, dims)
    # Only the function itself knows what an axis of size one means; derivatives of it have inputs
    # (cotangents of a batch, for one batch-independent primal) for which it has no meaning.
    expand = method == "expand_dims" and program.order == 0
    shared = tuple(i for i, d in enumerate(dims) if d is None and expand)
    aligned = [
        x if d is not None else jnp.broadcast_to(x, (1 if i in shared else size, *x.shape))
        for i, (x, d) in enumerate(zip(leading, dims, strict=True))
    ]
    return call(program.broadcast(size, shared), *aligned)


def _looped(program: Program, arrays: Sequence[Any], dims: Sequence[int | None]) -> list[Any]:
    def member(_: None, batched: list[Any]) -> tuple[None, list[Any]]:
        rest = iter(batched)
        xs = [x if d is None else next(rest) for x, d in zip(arrays, dims, strict=True)]
        return None, call(program, *xs)

    batched = [x for x, d in zip(arrays, dims, strict=True) if d is not None]
    return jax.lax.scan(member, None, batched)[1]
