"""Order between XLA's streams on GPUs and torch's.

XLA enqueues the kernels of a device on a stream of its own and hands it to the callback. Torch
work is enqueued on that very stream, so it follows the kernels that write its inputs and precedes
those that read its outputs, and the host waits for nothing. The rest follows from torch's own
rules for streams:

- Two events order XLA's stream with the one that was torch's current stream on the device, where
  the user may have other torch work: what was enqueued there before is visible to the function,
  and what is enqueued there afterwards sees what the function left in torch's memory. A current
  stream belongs to a thread, and XLA may call from one of its own, whose stream is the device's
  default one. Work on a side stream has to be joined to that, as for any two streams in torch.
- torch's allocator gives memory back to the stream it was allocated on. What the function frees
  while its kernels still run is used again by later calls on XLA's stream, behind them. What it
  leaves to the user may be freed there while it is still read there: the next call waits for that
  by the first of the two events.
- Autograd runs each node of a backward in a thread of its own for the device, but on the stream
  of the node's forward, and joins these streams with the caller's. All of them are XLA's here.
- With several GPUs, nothing says that the device of XLA's thread is current in torch. The buffers
  say which it is, and entering the stream makes it current.

ROCm builds of torch use the same names.
"""

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch


class Stream(Protocol):
    """What is asked of `torch.cuda.Stream`."""

    def wait_stream(self, stream: Any, /) -> None:
        """Later work waits, on the device, for what the other stream has now."""
        ...

    def synchronize(self) -> None:
        """Waits, on the host, for the work the stream has."""
        ...


class Cuda(Protocol):
    """What is asked of `torch.cuda`."""

    def current_stream(self, device: int, /) -> Stream:
        """The current stream of this thread on a device."""
        ...

    def ExternalStream(self, address: int, device: int, /) -> Stream:  # noqa: N802
        """A stream that another library has made."""
        ...

    def stream(self, stream: Any, /) -> contextlib.AbstractContextManager[Any]:
        """Makes a stream, and its device, this thread's current ones."""
        ...


class XlaStreams:
    """XLA's streams, as torch's.

    Args:
        cuda: `torch.cuda`, or a stand-in for it.
    """

    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda
        # XLA has a few streams a device, and torch's object for one is no more than its address.
        self._external = functools.lru_cache(maxsize=256)(cuda.ExternalStream)

    @contextlib.contextmanager
    def entered(
        self, context: Any, buffers: Sequence[Any], settled: bool = False
    ) -> Iterator[None]:
        """Makes XLA's stream torch's current one, in order with the one that was.

        Args:
            context: XLA's execution context, whose `stream` is the address of its stream.
            buffers: those of the call, at least one.
            settled: whether to wait for the work that the stream has. That is for calls that then
                take a lock which calls on other devices wait for. Before they take it, they have
                to come to the collectives that this device has already enqueued; a function that
                waits for such a collective (`.item()`) while it holds the lock would wait for
                ever.
        """
        device = buffers[0].__dlpack_device__()[1]
        before = self._cuda.current_stream(device)
        stream = self._external(context.stream, device)
        stream.wait_stream(before)
        try:
            with self._cuda.stream(stream):
                if settled:
                    stream.synchronize()
                yield
        finally:
            before.wait_stream(stream)


XLA_STREAMS = XlaStreams(torch.cuda)
