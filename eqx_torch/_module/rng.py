"""The random numbers of a call that has a key, and what each of its shards has for itself.

On a CPU a call draws from a generator of its own. Of the operators for a GPU, some (dropout among
them) know but the one that torch has for each device. So a call there seeds that too; from then
until its backward is done no other seeded call runs on a GPU, and the generator is put back as soon
as the forward is done. (The backward may seed again: `torch.utils.checkpoint` does.) Where the
graph is kept for a backward in another call, others may run between the two.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax.sharding import PartitionSpec as P

from .._invoke import PerShard
from .._program import draw_from, drawing_from, EXCLUSIVE, settle


_NOTHING = contextlib.nullcontext()


def seeded(
    seed: torch.Tensor, at_end: Callable[[Callable[[], None]], None]
) -> contextlib.AbstractContextManager[None]:
    """Starts to draw random numbers from `seed`. The forward runs in the context that is returned.

    Args:
        seed: two words of 32 bits.
        at_end: takes a function to call when no derivative of this call can run any more.
    """
    high, low = seed.tolist()  # on a GPU this waits, and so has to precede the lock
    number = _as_seed(high, low)
    draw_from(torch.Generator().manual_seed(number))
    at_end(lambda: draw_from(None))
    return _on_gpu(number, seed.device, at_end) if seed.is_cuda else _NOTHING


@contextlib.contextmanager
def resumed(generator: torch.Generator, device: torch.device) -> Iterator[None]:
    """A context for a backward through the graph of a seeded call, which may seed again."""
    settle(device)
    with EXCLUSIVE if device.type == "cuda" else _NOTHING, drawing_from(generator):
        yield


@contextlib.contextmanager
def _on_gpu(
    number: int, device: torch.device, at_end: Callable[[Callable[[], None]], None]
) -> Iterator[None]:
    EXCLUSIVE.acquire()
    at_end(EXCLUSIVE.release)
    index = torch.cuda.current_device() if device.index is None else device.index
    generator = torch.cuda.default_generators[index]
    state = generator.get_state()
    try:
        generator.manual_seed(number)
        yield
    finally:
        generator.set_state(state)


def _as_seed(high: int, low: int) -> int:
    """torch takes seeds as signed 64-bit integers."""
    return int.from_bytes(((high << 32) | low).to_bytes(8, "little"), "little", signed=True)


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
