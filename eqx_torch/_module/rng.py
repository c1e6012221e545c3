"""torch's random state for the length of one call.

torch draws from one generator a process (and one a GPU), JAX calls torch from several threads, and
the user has plans of their own for the generator. So a call that draws is seeded from its key, and
from then until its backward is done no other seeded call runs; the generator is put back as soon
as the forward is done. (The backward may seed again: `torch.utils.checkpoint` does.)
"""

import contextlib
from collections.abc import Callable, Iterator

import torch

from .._program import EXCLUSIVE


class Seeding:
    """Seeds calls, one at a time. Invariant: outside of `drawing`, generators are as found."""

    def __init__(self) -> None:
        self.lock = EXCLUSIVE

    @contextlib.contextmanager
    def drawing(
        self, seed: torch.Tensor, at_end: Callable[[Callable[[], None]], None]
    ) -> Iterator[None]:
        """Draws random numbers from `seed` in its body.

        Args:
            seed: two words of 32 bits.
            at_end: takes a function to call when no derivative of this call can run any more.
        """
        high, low = seed.tolist()  # on a GPU this waits, and so has to precede the lock
        self.lock.acquire()
        at_end(self.lock.release)
        generators = _generators(seed.device)
        states = [g.get_state() for g in generators]
        try:
            for generator in generators:
                generator.manual_seed(_as_seed(high, low))
            yield
        finally:
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)


SEEDING = Seeding()


def _generators(device: torch.device) -> list[torch.Generator]:
    if device.type != "cuda":
        return [torch.default_generator]
    index = torch.cuda.current_device() if device.index is None else device.index
    return [torch.default_generator, torch.cuda.default_generators[index]]


def _as_seed(high: int, low: int) -> int:
    """torch takes seeds as signed 64-bit integers."""
    return int.from_bytes(((high << 32) | low).to_bytes(8, "little"), "little", signed=True)
