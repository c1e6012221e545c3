"""A stand-in for `torch.cuda` that knows what has to be finished before what.

Streams are queues of kernels, events order them, and each thread has a current device and a current
stream for each device, as in CUDA. A kernel starts when those it depends on are done and not
sooner, so whatever is not among its dependencies may run at the same time. Memory comes from an
allocator like torch's, which gives a freed block to the next tenant on the same stream at once.
Nothing in it waits for a device but `synchronize`.
"""

import contextlib
import dataclasses
import itertools
import threading


@dataclasses.dataclass(eq=False)
class Kernel:
    """Work on a stream. `after` is everything that is done before it starts."""

    name: str
    stream: "Stream"
    after: frozenset["Kernel"]


@dataclasses.dataclass(eq=False)
class Block:
    """Memory, with the kernels that have used it for the tenants before this one."""

    stream: "Stream"
    users: list[Kernel] = dataclasses.field(default_factory=list)
    former: frozenset[Kernel] = frozenset()


class Stream:
    def __init__(self, cuda: "SimulatedCuda", device: int, address: int) -> None:
        self.cuda, self.device, self.address = cuda, device, address
        self.queue = cuda.queues.setdefault((device, address), Queue())

    def wait_stream(self, other: "Stream") -> None:
        self.queue.done |= other.queue.done

    def synchronize(self) -> None:
        self.cuda.synchronized.append((self.device, self.address))
        self.cuda.when_synchronized()


@dataclasses.dataclass(eq=False)
class Queue:
    """What has to be done before the next kernel of a stream starts."""

    done: frozenset[Kernel] = frozenset()


class RaceError(AssertionError):
    """A kernel may run while memory it uses is still used for something else."""


class _Current(threading.local):
    def __init__(self) -> None:
        self.device = 0
        self.streams: dict[int, Stream] = {}


class SimulatedCuda:
    """See the module's docstring.

    Attributes:
        queues: by device and address.
        made: the arguments of each call of `ExternalStream`.
        synchronized: the device and address of each stream that a thread has waited for.
        when_synchronized: called by `Stream.synchronize`.
    """

    def __init__(self) -> None:
        self.queues: dict[tuple[int, int], Queue] = {}
        self.made: list[tuple[int, int]] = []
        self.synchronized: list[tuple[int, int]] = []
        self.when_synchronized = lambda: None
        self._current = _Current()
        self._free: dict[tuple[int, int], list[Block]] = {}
        self._names = itertools.count()

    def current_device(self) -> int:
        return self._current.device

    def current_stream(self, device: int) -> Stream:
        return self._current.streams.get(device) or Stream(self, device, 0)

    def ExternalStream(self, address: int, device: int) -> Stream:  # noqa: N802
        self.made.append((address, device))
        return Stream(self, device, address)

    @contextlib.contextmanager
    def stream(self, stream: Stream):
        current = self._current
        device, before = current.device, self.current_stream(stream.device)
        current.device, current.streams[stream.device] = stream.device, stream
        try:
            yield
        finally:
            current.device, current.streams[stream.device] = device, before

    def launch(self, *blocks: Block, on: Stream | None = None, name: str = "") -> Kernel:
        """Enqueues a kernel that uses these blocks, on the current stream unless said."""
        stream = on or self.current_stream(self.current_device())
        kernel = Kernel(name or f"kernel {next(self._names)}", stream, stream.queue.done)
        stream.queue.done |= {kernel}
        for block in blocks:
            racing = block.former - kernel.after
            if racing:
                raise RaceError([k.name for k in racing])
            block.users.append(kernel)
        return kernel

    def allocate(self) -> Block:
        stream = self.current_stream(self.current_device())
        free = self._free.get((stream.device, stream.address))
        if not free:
            return Block(stream)
        old = free.pop()
        return Block(stream, former=old.former | frozenset(old.users))

    def free(self, block: Block) -> None:
        self._free.setdefault((block.stream.device, block.stream.address), []).append(block)
