"""The one lock around torch state of which a process has one.

- The forward-mode level: a thread that leaves it erases the tangents of the others, which then
  are zero.
- The default random generators of GPUs, of which a forward may seed all.

One lock serves both, so that no two threads can wait for each other.

GPUs run behind their threads. A thread that waits for its GPU while it holds the lock (for
`.item()`, say) may wait for a collective that another GPU has not come to, and never will if its
thread waits for the lock. So whoever takes the lock lets the GPU finish first what it has.
"""

import threading

import torch


EXCLUSIVE = threading.RLock()


def settle(device: torch.device) -> None:
    """Waits for the work that a GPU has from this thread, if there are others."""
    if device.type == "cuda" and torch.cuda.device_count() > 1:
        torch.cuda.current_stream(device).synchronize()
