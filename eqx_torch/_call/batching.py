"""Batching: what `jax.vmap` makes of a torch call.

With `vmap_method="torch"` the batched call is the program's `Vmap`. The other methods are those of
`jax.ffi`: a loop, or one call of the function itself on arrays with a leading batch axis.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .._program import Program, Record, TOKEN, untaped, Vmap
from .._sharding import batch_axes, over_batch_shards
from .primitive import align, call


def batch(
    arrays: Sequence[Any], dims: Sequence[int | None], *, program: Program
) -> tuple[list[Any], list[int | None]]:
    """The batched outputs, with their batch axis first. Graphs are not recorded across a batch."""
    base, kept = untaped(program)
    arrays, dims = [arrays[i] for i in kept], [dims[i] for i in kept]
    axes = batch_axes(arrays, dims)
    if axes is None:
        outs = _batched(base, arrays, dims)
    else:
        local = lambda *xs: _batched(base, xs, dims)  # noqa: E731
        outs = over_batch_shards(local, axes, arrays, dims)
    out_dims: list[int | None] = [0] * len(outs)
    if isinstance(program, Record):
        nothing = align([jnp.zeros(TOKEN.shape, TOKEN.dtype), *arrays])[0]
        return [*outs, nothing], [*out_dims, None]
    return outs, out_dims


def _batched(program: Program, arrays: Sequence[Any], dims: Sequence[int | None]) -> list[Any]:
    size = next(x.shape[d] for x, d in zip(arrays, dims, strict=True) if d is not None)
    method = program.leaf.function.vmap_method
    if method == "torch":
        out_axes = (0,) * len(program.outs)
        return call(Vmap(program, tuple(dims), out_axes, size), *arrays)
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
