"""The one lock around torch state of which a process has one.

- The forward-mode level: a thread that leaves it erases the tangents of the others, which then
  are zero.
- The default random generators of GPUs, of which a forward may seed all.

One lock serves both, so that no two threads can wait for each other.

GPUs run behind their threads. A thread that waits for its GPU while it holds the lock (for
`.item()`, say) may wait for a collective that another GPU has not come to, and never will if its
thread waits for the lock. So whoever takes the lock lets the GPU finish first what it has.
"""

import functools
import threading

import jax
import torch


EXCLUSIVE = threading.RLock()


def settle(device: torch.device) -> None:
    """Waits for the work that a GPU has from this thread, if this process has others."""
    if device.type == "cuda" and local_gpus() > 1:
        torch.cuda.current_stream(device).synchronize()


@functools.cache
def local_gpus() -> int:
    """The GPUs that JAX has for this process, which may be fewer than torch sees."""
    try:
        return jax.local_device_count("gpu")
    except RuntimeError:
        return 0
