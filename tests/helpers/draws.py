"""Models that draw, what torch alone draws in them, and work that draws at the same time."""

import contextlib
import threading
from typing import Any

import jax
import torch
from torch.utils.checkpoint import checkpoint

from .module_samples import seed_of


KEY = jax.random.key(1)


class Checkpointed(torch.nn.Module):
    def __init__(self, inner: Any, use_reentrant: bool = False) -> None:
        super().__init__()
        self.inner, self.use_reentrant = inner, use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=self.use_reentrant)


def in_torch(run: Any, key: Any = KEY) -> Any:
    """What torch draws, seeded as a call with this key is."""
    with torch.random.fork_rng():
        torch.manual_seed(seed_of(key))
        return run()


@contextlib.contextmanager
def beside(work: Any) -> Any:
    """Runs `work` again and again in another thread."""
    stop, errors = threading.Event(), []

    def loop() -> None:
        try:
            while not stop.is_set():
                work()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=loop)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    for error in errors:
        raise error
