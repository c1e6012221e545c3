"""The tape: autograd graphs that programs have recorded, kept for their derivatives.

A recording program returns tokens beside its outputs, one for each derivative that will be taken
of it, and each derivative brings its token back with the primals. The graph may refer to the
primals by their memory, which is XLA's, and so is used only if it is provably the graph of what
the derivative was given:

- the token names it, and has not been used;
- each primal lies at the address at which it was recorded. XLA passes primals by value, so equal
  addresses mean equal contents, also for tensors that a graph hides from autograd.

Otherwise the derivative recomputes, with the same result. Where addresses have differed (the
slices of a `lax.scan` move), later runs of that program record on copies of their inputs, so that
the graph owns all it needs and the token alone is proof.

A pullback that is differentiated again extends the graph of its forward, as `create_graph` does in
torch, and records that under a token of its own. Graphs that share nodes are `Held` together: the
last one to be used frees their buffers as it goes, and gives back what the call has borrowed.

Memory is bounded. A program may have a few graphs outstanding, the oldest of which is dropped for
a new one; when a dropped one is asked for, its program may have twice as many. So a pullback that
is never called costs little, one that is called again costs no more, and a scan over a hundred
layers finds its hundred graphs from the second step on. All graphs on a device may hold half of its
memory.
"""

import collections
import contextlib
import dataclasses
import functools
import itertools
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from .._compat import on_clear_caches
from .base import Indices, Program, Tensors
from .graph import is_users, nodes_behind


FIRST_LIMIT = 8
LAST_LIMIT = 4096


Guard: TypeAlias = Callable[[], contextlib.AbstractContextManager[Any]]


@dataclasses.dataclass(frozen=True)
class Kept:
    """What a recorded call has borrowed.

    Attributes:
        guard: makes a context to be in while its backward runs.
        release: gives it back.
    """

    guard: Guard = contextlib.nullcontext
    release: Callable[[], None] = lambda: None


class Held:
    """What graphs that share nodes need, and how many tokens name one of these graphs.

    Attributes:
        guard: makes a context to be in while a backward runs through them.
    """

    def __init__(self, kept: Kept) -> None:
        self.guard = kept.guard
        self._give_back = kept.release
        self._tokens = 1
        self._lock = threading.Lock()

    @property
    def is_last(self) -> bool:
        """Whether nobody but the caller, who has taken a graph, will use any of them."""
        return self._tokens == 1

    def share(self, others: int) -> None:
        """Takes note of further tokens."""
        with self._lock:
            self._tokens += others

    def release(self) -> None:
        """Takes note that a token has been used or dropped."""
        with self._lock:
            self._tokens -= 1
            done = self._tokens == 0
        if done:
            self._give_back()


@dataclasses.dataclass(frozen=True)
class Tape:
    """One recorded graph.

    Attributes:
        inputs: for each recorded input, the tensor to differentiate by.
        outputs: for each output, where the graph of it begins, None if it has none.
        addresses: of all inputs, None for those of which the graph owns all it needs.
        held: what it needs and shares.
        behind: for the graph of a pullback, that of the forward, which it extends.
        is_plain: whether it consists of torch's own nodes.
    """

    inputs: dict[int, torch.Tensor]
    outputs: Sequence[Any]
    addresses: Sequence[int | None]
    held: Held
    behind: "Tape | None" = None
    is_plain: bool = False

    @property
    def is_users(self) -> bool:
        """Whether a part of the backward is a user's."""
        own = any(map(is_users, nodes_behind(y.node for y in self.outputs if y is not None)))
        return own or (self.behind is not None and self.behind.is_users)

    def is_of(self, primals: Tensors) -> bool:
        """Whether these are what was recorded."""
        pairs = zip(self.addresses, primals, strict=True)
        return all(address is None or address == x.data_ptr() for address, x in pairs)


class _Sized(NamedTuple):
    """A graph and the memory it holds."""

    tape: Tape
    bytes: int

    @property
    def device(self) -> torch.device:
        """Where it holds it."""
        return next(iter(self.tape.inputs.values())).device


class TapeSite:
    """The outstanding graphs of one program, oldest first, and which were dropped.

    Attributes:
        behind: for a pullback, that of the forward whose graphs its own ones extend.
        copies: whether to record on copies of the inputs.
        bytes: how much memory the next graph will hold, None if that is not known.
    """

    def __init__(self, behind: "TapeSite | None" = None) -> None:
        self.behind = behind
        self.tapes: collections.OrderedDict[int, _Sized] = collections.OrderedDict()
        self.dropped: collections.deque[int] = collections.deque(maxlen=LAST_LIMIT)
        self.limit = FIRST_LIMIT
        self.copies = False
        self.bytes: int | None = None

    def record_copies(self) -> None:
        """From now on records on copies of the inputs."""
        self.copies, self.bytes = True, None
        if self.behind is not None:
            self.behind.record_copies()

    def reset(self) -> None:
        """Drops the graphs."""
        self.tapes.clear()
        self.dropped.clear()
        self.limit, self.copies, self.bytes = FIRST_LIMIT, False, None


class Tapes:
    """All outstanding graphs. Invariant: a graph is in one place, here or with its one user.

    `_held` is never less than the memory that all graphs of a device hold; more, when programs have
    died with theirs. It is counted anew before anything is dropped for it.

    Args:
        memory: how much the graphs of a device may hold.
    """

    def __init__(self, memory: Callable[[torch.device], int]) -> None:
        self._lock = threading.Lock()
        self._sites: weakref.WeakKeyDictionary[Program, TapeSite] = weakref.WeakKeyDictionary()
        self._tokens = itertools.count(1)
        self.last_limit = LAST_LIMIT
        self._memory = memory
        self._held: collections.Counter[torch.device] = collections.Counter()
        self._discarded: collections.deque[tuple[weakref.ref[TapeSite], int]] = collections.deque()

    def site(self, program: Program, behind: TapeSite | None = None) -> TapeSite:
        """Where the graphs of a program are kept."""
        with self._lock:
            return self._sites.setdefault(program, TapeSite(behind))

    def put(self, site: TapeSite, tape: Tape, count: int = 1) -> list[int]:
        """Keeps a graph; returns tokens for it."""
        tokens = [next(self._tokens) & 0x7FFFFFFF for _ in range(count)]
        size = _saved_bytes(tape) if site.bytes is None else site.bytes
        tape.held.share(count - 1)
        sized = _Sized(tape, size)
        with self._lock:
            site.bytes = size
            for token in tokens:
                site.tapes[token] = sized
            self._held[sized.device] += count * size
            dropped = [*self._thrown_away(), *self._excess(site, sized.device)]
        for old in dropped:
            old.held.release()
        return tokens

    def take(self, site: TapeSite, token: int, primals: Tensors, wrt: Indices) -> Tape | None:
        """The graph with this token if it is valid for these primals; it is then the caller's."""
        with self._lock:
            sized = site.tapes.pop(token, None)
            if sized is None:
                if token in site.dropped and site.limit < self.last_limit:
                    site.limit *= 2
                return None
            self._held[sized.device] -= sized.bytes
        tape = sized.tape
        here = tape.is_of(primals)
        if here and tape.inputs.keys() >= set(wrt):
            return tape
        if not here:
            site.record_copies()
        tape.held.release()
        return None

    def clear(self) -> None:
        """Drops all graphs; called by `jax.clear_caches()`."""
        with self._lock:
            tapes = [sized.tape for sized in self._all()]
            for site in self._sites.values():
                site.reset()
            self._held.clear()
        for tape in tapes:
            tape.held.release()

    def clear_device(self, device: torch.device) -> None:
        """Drops the graphs that hold memory of a device."""
        with self._lock:
            own = [(s, t) for s in self._sites.values() for t, x in s.tapes.items()]
            own = [(s, t) for s, t in own if s.tapes[t].device == device]
            tapes = [s.tapes.pop(t).tape for s, t in own]
            del self._held[device]
        for tape in tapes:
            tape.held.release()

    def discard(self, site: TapeSite, token: int) -> None:
        """Drops a graph, at the latest when the next is kept.

        The garbage collector may call this while the lock is held.
        """
        self._discarded.append((weakref.ref(site), token))
        if self._lock.acquire(blocking=False):
            try:
                dropped = list(self._thrown_away())
            finally:
                self._lock.release()
            for old in dropped:
                old.held.release()

    def _thrown_away(self) -> Iterator[Tape]:
        while self._discarded:
            reference, token = self._discarded.popleft()
            site = reference()
            sized = None if site is None else site.tapes.pop(token, None)
            if sized is not None:
                self._held[sized.device] -= sized.bytes
                yield sized.tape

    def __len__(self) -> int:
        with self._lock:
            return sum(len(site.tapes) for site in self._sites.values())

    def _excess(self, site: TapeSite, device: torch.device) -> Iterator[Tape]:
        """Takes out what is too much: the oldest of this site, then the oldest of the device."""
        while len(site.tapes) > min(site.limit, self.last_limit):
            yield self._drop_oldest(site)
        memory = self._memory(device)
        if self._held[device] <= memory:
            return
        own = [(t, s, x) for s in self._sites.values() for t, x in s.tapes.items()]
        own = sorted(((t, s, x) for t, s, x in own if x.device == device), key=lambda each: each[0])
        self._held[device] = sum(sized.bytes for *_, sized in own)
        for token, owner, _ in own[:-1]:
            if self._held[device] <= memory:
                return
            yield self._drop(owner, token)

    def _drop_oldest(self, site: TapeSite) -> Tape:
        return self._drop(site, next(iter(site.tapes)))

    def _drop(self, site: TapeSite, token: int) -> Tape:
        sized = site.tapes.pop(token)
        site.dropped.append(token)
        self._held[sized.device] -= sized.bytes
        return sized.tape

    def _all(self) -> Iterator[_Sized]:
        return itertools.chain.from_iterable(s.tapes.values() for s in self._sites.values())


def _saved_bytes(tape: Tape) -> int:
    """The memory that a graph holds, beside what is XLA's."""
    borrowed = set(tape.addresses)
    roots = (edge.node for edge in tape.outputs if edge is not None)
    saved = (tensor for node in nodes_behind(roots) for tensor in _saved_tensors(node))
    storages = dict(map(_memory, (*tape.inputs.values(), *saved)))
    return sum(size for address, size in storages.items() if address not in borrowed)


def _memory(x: torch.Tensor) -> tuple[int, int]:
    """The address and the size of a tensor's memory."""
    storage = x.untyped_storage()
    try:
        return storage.data_ptr(), storage.nbytes()
    except RuntimeError:  # zeros of forward mode and wrappers of torch.func have none
        return 0, 0


def _saved_tensors(node: Any) -> Iterator[torch.Tensor]:
    """What a node has saved, as it is: to unpack it would run checkpointed layers again."""
    for name in dir(node):
        if not name.startswith("_raw_saved_"):
            continue
        try:
            saved = getattr(node, name)
        except RuntimeError:  # freed already, by a derivative within the function
            continue
        for raw in saved if isinstance(saved, list | tuple) else [saved]:
            value = getattr(raw, "data", None)
            if isinstance(value, torch.Tensor) and value.layout is torch.strided:
                yield value


@functools.cache
def _half_of_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory // 2
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


TAPES = Tapes(_half_of_memory)
on_clear_caches(TAPES.clear)
