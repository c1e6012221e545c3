"""Order between XLA's CUDA stream and torch's.

XLA enqueues its kernels on a stream of its own and hands it to the callback. Torch work is
enqueued on that very stream, so it follows the kernels that write its inputs and precedes those
that read its outputs, and nothing waits for the device. Two events order it with torch's current
stream, where the user may have other torch work: what was enqueued there before is visible to the
function, and what is enqueued there afterwards sees what the function left in torch's memory.
ROCm builds of torch use the same names.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def on_stream(context: Any, cuda: Any = torch.cuda) -> Iterator[None]:
    """Makes XLA's stream torch's current one, in order with the one that was.

    Args:
        context: XLA's execution context, whose `stream` is the address of its stream.
        cuda: `torch.cuda`, or a stand-in for it.
    """
    before = cuda.current_stream()
    stream = cuda.ExternalStream(context.stream)
    stream.wait_event(before.record_event())
    try:
        with cuda.stream(stream):
            yield
    finally:
        before.wait_event(stream.record_event())
