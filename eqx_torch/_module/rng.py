"""torch's random numbers in a call that has a key.

On a CPU a call draws from a generator of its own. Of the operators for a GPU, some (dropout among
them) know but the one that torch has for each device. So a call there seeds that too; from then
until its backward is done no other seeded call runs on a GPU, and the generator is put back as soon
as the forward is done. (The backward may seed again: `torch.utils.checkpoint` does.)
"""

import contextlib
from collections.abc import Callable, Iterator

import torch

from .._program import draw_from, EXCLUSIVE


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
