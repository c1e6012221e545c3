"""What each shard of one call of a module has for itself: random numbers, and statistics."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from .._invoke import PerShard


class ModuleShards(PerShard):
    """The shards of one call draw differently; changed buffers are averaged over them."""

    def __init__(self, seed: int | None, num_buffers: int) -> None:
        self._seed = seed
        self._num_buffers = num_buffers

    def out_specs(self, specs: list[P]) -> list[P]:
        return specs + [P()] * self._num_buffers

    def enter(self, shards: Sequence[Any], axes: frozenset[str]) -> Sequence[Any]:
        if self._seed is None:
            return shards
        index = jax.lax.axis_index(tuple(sorted(axes)))
        key = jax.random.wrap_key_data(shards[self._seed], impl="threefry2x32")
        seed = seed_of(jax.random.fold_in(key, index))
        return [*shards[: self._seed], seed, *shards[self._seed + 1 :]]

    def leave(self, results: list[Any], axes: frozenset[str]) -> list[Any]:
        names = tuple(sorted(axes))
        split = len(results) - self._num_buffers
        return results[:split] + [_averaged(x, names) for x in results[split:]]


def seed_of(key: jax.Array) -> jax.Array:
    """Two words of 32 bits."""
    return jax.random.bits(key, (2,), jnp.uint32)


def _averaged(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    reduce = jax.lax.pmean if jnp.issubdtype(x.dtype, jnp.inexact) else jax.lax.pmax
    return reduce(x, axes)
