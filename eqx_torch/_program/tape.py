"""The tape: autograd graphs that forwards have recorded, kept for their backwards.

A recording forward returns a token beside its outputs, and the backward brings it back with the
primals. The graph may refer to the primals by their memory, which is XLA's, and so is used only
if it is provably the graph of what the backward was given:

- the token names it, and it has not been used;
- each primal lies at the address at which it was recorded. XLA passes primals by value, so equal
  addresses mean equal contents, also for tensors that a graph hides from autograd.

Otherwise the backward recomputes, with the same result. Where addresses have differed (the slices
of a `lax.scan` move), later forwards of that program record on copies of their inputs, so that the
graph owns all it needs and the token alone is proof. So they do where the backward was seen to
write to what was recorded.

Memory is bounded. A program may have a few graphs outstanding, the oldest of which is dropped for
a new one; when a dropped one is asked for, its program may have twice as many. So a pullback that
is never called costs little, one that is called again costs no more, and a scan over a hundred
layers finds its hundred graphs from the second step on. All graphs together may hold half of the
machine's memory.
"""

import collections
import contextlib
import dataclasses
import itertools
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from .._compat import on_clear_caches
from .base import Indices, Program, Tensors
from .graph import nodes_behind


FIRST_LIMIT = 8
LAST_LIMIT = 4096
_NONE = (None, 0)


@dataclasses.dataclass(frozen=True)
class Kept:
    """What a recorded call has borrowed.

    Attributes:
        guard: a context to be in while its backward runs.
        release: gives it back.
    """

    guard: contextlib.AbstractContextManager[Any] = dataclasses.field(
        default_factory=contextlib.nullcontext
    )
    release: Callable[[], None] = lambda: None


@dataclasses.dataclass(frozen=True)
class Tape:
    """One recorded graph.

    Attributes:
        inputs: for each recorded input, the tensor to differentiate by.
        outputs: for each output, where the graph of it begins, None if it has none.
        addresses: of all inputs, None if the graph owns all it needs.
        kept: what the call has borrowed.
    """

    inputs: dict[int, torch.Tensor]
    outputs: Sequence[Any]
    addresses: tuple[int, ...] | None
    kept: Kept


class _Sized(NamedTuple):
    """A graph and the memory it holds."""

    tape: Tape
    bytes: int


class TapeSite:
    """The outstanding graphs of one program, oldest first, and which were dropped.

    Attributes:
        copies: whether to record on copies of the inputs.
        bytes: how much memory the next graph will hold, None if that is not known.
    """

    def __init__(self) -> None:
        self.tapes: collections.OrderedDict[int, _Sized] = collections.OrderedDict()
        self.dropped: collections.deque[int] = collections.deque(maxlen=LAST_LIMIT)
        self.limit = FIRST_LIMIT
        self.copies = False
        self.bytes: int | None = None

    def record_on_copies(self) -> None:
        """Has graphs own all they need from now on; those that do not are of no use any more."""
        if not self.copies:
            self.copies, self.bytes = True, None

    def reset(self) -> None:
        """Drops the graphs."""
        self.tapes.clear()
        self.dropped.clear()
        self.limit, self.copies, self.bytes = FIRST_LIMIT, False, None


class Tapes:
    """All outstanding graphs. Invariant: a graph is in one place, here or with its one user.

    `_held` is never less than the memory that all graphs hold; more, when programs have died with
    theirs. It is counted anew before anything is dropped for it.
    """

    def __init__(self, memory: int) -> None:
        self._lock = threading.Lock()
        self._sites: weakref.WeakKeyDictionary[Program, TapeSite] = weakref.WeakKeyDictionary()
        self._tokens = itertools.count(1)
        self.last_limit = LAST_LIMIT
        self._memory = memory
        self._held = 0

    def site(self, program: Program) -> TapeSite:
        """Where the graphs of a program are kept."""
        with self._lock:
            return self._sites.setdefault(program, TapeSite())

    def put(self, site: TapeSite, tape: Tape) -> int:
        """Keeps a graph; returns its token."""
        token = next(self._tokens) & 0x7FFFFFFF
        size = _saved_bytes(tape) if site.bytes is None else site.bytes
        with self._lock:
            site.bytes = size
            site.tapes[token] = _Sized(tape, size)
            self._held += size
            dropped = list(self._excess(site))
        for old in dropped:
            old.kept.release()
        return token

    def take(self, site: TapeSite, token: int, primals: Tensors, wrt: Indices) -> Tape | None:
        """The graph with this token if it is valid for these primals; it is then the caller's."""
        with self._lock:
            tape, size = site.tapes.pop(token, _NONE)
            if tape is None:
                if token in site.dropped and site.limit < self.last_limit:
                    site.limit *= 2
                return None
            self._held -= size
        where = tape.addresses
        here = where is None or (not site.copies and where == addresses(primals))
        if here and tape.inputs.keys() >= set(wrt):
            return tape
        if not here:
            site.record_on_copies()
        tape.kept.release()
        return None

    def clear(self) -> None:
        """Drops all graphs; called by `jax.clear_caches()`."""
        with self._lock:
            tapes = [sized.tape for sized in self._all()]
            for site in self._sites.values():
                site.reset()
            self._held = 0
        for tape in tapes:
            tape.kept.release()

    def __len__(self) -> int:
        with self._lock:
            return sum(len(site.tapes) for site in self._sites.values())

    def _excess(self, site: TapeSite) -> Iterator[Tape]:
        """Takes out what is too much: the oldest of this site, then the oldest of all."""
        while len(site.tapes) > min(site.limit, self.last_limit):
            yield self._drop_oldest(site)
        if self._held <= self._memory:
            return
        sites = [s for s in self._sites.values() if s.tapes]
        self._held = sum(sized.bytes for sized in self._all())
        while self._held > self._memory and sum(len(s.tapes) for s in sites) > 1:
            yield self._drop_oldest(min(sites, key=lambda s: next(iter(s.tapes))))
            sites = [s for s in sites if s.tapes]

    def _drop_oldest(self, site: TapeSite) -> Tape:
        token, (tape, size) = site.tapes.popitem(last=False)
        site.dropped.append(token)
        self._held -= size
        return tape

    def _all(self) -> Iterator[_Sized]:
        return itertools.chain.from_iterable(s.tapes.values() for s in self._sites.values())


def addresses(tensors: Tensors) -> tuple[int, ...]:
    """Where the tensors lie in memory."""
    return tuple([x.data_ptr() for x in tensors])


def _saved_bytes(tape: Tape) -> int:
    """The memory that a graph holds, beside what is XLA's."""
    borrowed = set(tape.addresses or ())
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


def _half_of_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


TAPES = Tapes(_half_of_memory())
on_clear_caches(TAPES.clear)
