"""Graphs for pullbacks on devices that run behind their host: found by address, never waited for.

The token of a graph is in the memory of the device, and to read it would be to wait for all work
that comes before. But callbacks are called in the order of the program, and a token whose way from
the recording to the pullback is proven (`wiring`) has not been moved. While it is alive its memory
has no other writer. So a recording notes where its token lies and which number it has, the pullback
asks for the number by the address of its operand, and an equal address is that very execution:
also with several threads, and with several graphs of one call outstanding.

That XLA moves no such token is not documented. So on the device the number is compared with the
token, and where they differ the results are NaN. These are counted on the device, and a count is
looked at when it happens to have arrived. It is then reported as an error of a device is, and ends
pairing for the process: all backwards compute their forward again.

Whatever has no proof, or is not found, is recomputed.
"""

import collections
import enum
import itertools
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, NamedTuple, TypeAlias

import jax
import torch
from jax.interpreters import mlir

from .._compat import on_clear_caches
from .._errors import EqxTorchError
from .._program import Program, Record, TAPES, TapeSite, Tensors
from .debug import Evaluate
from .failures import ask_in_checks, report
from .wiring import Port, Wiring


VARIABLE = "EQX_TORCH_GRAPHS"
_LIMIT = 4096
_ROUNDS = 16  # after so many pullbacks the count is fetched

Place: TypeAlias = tuple[int, int]
Write: TypeAlias = Callable[[list[torch.Tensor], list[torch.Tensor]], None]


class Mode(enum.Enum):
    """How a pullback finds its graph.

    For tests and measurements, `EQX_TORCH_GRAPHS` names the one for programs compiled from then on.
    """

    READ = "read"  # by its token: the default on CPUs, where it is at hand
    AUDIT = "audit"  # by address: the default on GPUs
    CHECK = "check"  # by address, and it is an error if its token is another
    OFF = "off"  # not at all


def mode_on(platform: str) -> Mode:
    """The one for programs on a platform that are compiled now."""
    default = Mode.READ if platform == "cpu" else Mode.AUDIT
    return Mode(os.environ.get(VARIABLE) or default)


def new_port(program: Program, platform: str) -> Port | None:
    """The part in pairs of a program that is lowered for a platform, None if it has none."""
    if platform == "cpu" and mode_on(platform) is Mode.READ:
        return None
    operand = program.token
    if isinstance(program, Record):
        return Port(operand, len(program.inner.outs))
    return None if operand is None else Port(operand, len(program.outs))


def connect(ctx: mlir.LoweringRuleContext, port: Port, call: Any, is_live: bool) -> None:
    """Takes note of a port whose call is part of a module now, alone in it if `is_live`."""
    if is_live:
        port.is_proven, port.wanted = True, set(range(len(call.results) - port.first))
        return
    context = ctx.module_context
    Wiring.of(context).add(call, port, context.module)


class _Noted(NamedTuple):
    """A graph, and the call that has recorded it."""

    number: int
    site: "weakref.ref[TapeSite]"
    port: int


class Ledger:
    """Where live tokens lie, and the graphs they name, oldest first.

    Each method is made of single operations on the dictionary: the garbage collector calls them.
    """

    def __init__(self) -> None:
        self._noted: dict[Place, _Noted] = {}

    def note(self, place: Place, noted: _Noted) -> None:
        """Takes note of the graph whose token is at this place now."""
        self._noted[place] = noted
        if len(self._noted) > _LIMIT:
            self.drop([next(iter(self._noted))])

    def take(self, place: Place) -> int:
        """The graph whose token is at this place, the caller's from now on, or 0."""
        noted = self._noted.pop(place, None)
        return 0 if noted is None else noted.number

    def drop(self, places: Iterable[Place]) -> None:
        """Drops the graphs of tokens that are overwritten, or that nobody can ask for."""
        for place in places:
            noted = self._noted.pop(place, None)
            site = None if noted is None else noted.site()
            if noted is not None and site is not None:
                TAPES.discard(site, noted.number)

    def drop_of(self, port: int) -> None:
        """Drops the graphs that a call has recorded."""
        self.drop([place for place, x in list(self._noted.items()) if x.port == port])

    def forget(self, place: Place, number: int) -> None:
        """Drops a graph whose token is at this place, if it still is."""
        noted = self._noted.get(place)
        if noted is not None and noted.number == number:
            self.drop([place])

    def clear(self) -> None:
        """Drops all."""
        self.drop(list(self._noted))

    def __len__(self) -> int:
        return len(self._noted)


LEDGER = Ledger()
on_clear_caches(LEDGER.clear)


class Live(threading.local):
    """The tokens outside of `jax.jit`: arrays in which recordings have put them.

    An array that a recording has returned is at the place that was noted as long as it is alive,
    so there is no other proof than that it is the same object.

    Attributes:
        last: what this thread has noted of late.
    """

    _arrays: ClassVar[dict[int, weakref.ref[jax.Array]]] = {}

    def __init__(self) -> None:
        self.last: collections.deque[tuple[Place, int]] = collections.deque(maxlen=16)

    def serves(self, program: Program, arrays: Sequence[Any]) -> bool:
        """Whether a call gives or takes tokens, and those that it takes are alive."""
        operand = program.token
        if operand is None and type(program) is not Record:
            return False
        if not os.environ.get(VARIABLE) and jax.default_backend() == "cpu":
            return False
        if operand is None:
            return True
        token = arrays[operand]
        reference = self._arrays.get(id(token))
        # JAX would move a token to where the others are.
        others = (x for x in arrays if isinstance(x, jax.Array))
        alive = reference is not None and reference() is token
        return alive and all(x.sharding == token.sharding for x in others)

    def noted(self, program: Program, call: Callable[[], list[Any]]) -> list[Any]:
        """The results of a call, whose tokens are alive from now on."""
        self.last.clear()
        results = call()
        tokens = results[len(program.inner.outs) :] if isinstance(program, Record) else []
        # What ran in another thread, or has yet to run, is dropped when its place is taken.
        known = list(self.last) if len(self.last) == len(tokens) else [None] * len(tokens)
        for token, place in zip(tokens, known, strict=True):
            self._arrays[id(token)] = weakref.ref(token, self._forgetting(id(token), place))
        return results

    def _forgetting(self, key: int, noted: tuple[Place, int] | None) -> Callable[[Any], None]:
        def forget(reference: Any) -> None:
            if self._arrays.get(key) is reference:
                del self._arrays[key]
            if noted is not None:
                LEDGER.forget(*noted)

        return forget


LIVE = Live()


class _Audit:
    """The pullbacks on one stream that had the graph of another token.

    Attributes:
        found: how many, where they are counted.
        arrived: how many of these the host knows of.
    """

    def __init__(self, device: torch.device) -> None:
        self._nans: dict[torch.dtype, torch.Tensor] = {}
        self.found = torch.zeros((), dtype=torch.int32, device=device)
        on_gpu = device.type != "cpu"
        # The host may read pinned memory while the device writes there, and waits for nothing.
        self.arrived = torch.zeros((), dtype=torch.int32).pin_memory() if on_gpu else self.found
        self._calls = itertools.count()

    def nan(self, like: torch.Tensor) -> torch.Tensor:
        """NaN of a tensor's dtype, made on the stream on which it is used."""
        nan = self._nans.get(like.dtype)
        if nan is None:
            nan = self._nans[like.dtype] = like.new_full((), float("nan"))
        return nan

    def add(self, wrong: torch.Tensor) -> None:
        """Counts a pullback that is, or is not, wrong."""
        self.found += wrong
        if self.arrived is not self.found and next(self._calls) % _ROUNDS == 0:
            self.arrived.copy_(self.found, non_blocking=True)


class Pairs:
    """The state of pairing in this process.

    Attributes:
        counts: how many pullbacks were paired, how many were proven but missed, and how many were
            not proven.
        ended: whether a pair was wrong.
    """

    def __init__(self) -> None:
        self.counts: collections.Counter[str] = collections.Counter()
        self._lock = threading.Lock()
        self.ended = False
        self._audits: dict[tuple[torch.device, int], _Audit] = {}

    def count(self, what: str) -> None:
        """Counts a pullback."""
        with self._lock:
            self.counts[what] += 1

    def audit(self, device: torch.device) -> _Audit:
        """That of the current stream of a device."""
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
        audit = self._audits.get((device, stream))
        if audit is None:
            audit = self._audits.setdefault((device, stream), _Audit(device))
        return audit

    def look(self, audit: _Audit, name: str) -> None:
        """Reports and ends pairing if a wrong pair is known of."""
        if not self.ended and int(audit.arrived):
            self._end(audit, name)

    def ask(self) -> None:
        """As `look`, for all streams, which are waited for."""
        for audit in list(self._audits.values()):
            if not self.ended and int(audit.found):
                self._end(audit, "a torch function")

    def reset(self) -> None:
        """As when the process began; for tests."""
        self.counts.clear()
        self._audits.clear()
        self.ended = False

    def _end(self, audit: _Audit, name: str) -> None:
        self.ended = True
        LEDGER.clear()
        error = EqxTorchError(
            "a backward was given the autograd graph of another call, since XLA has moved the "
            "token of its own. Its results are NaN. From now on backwards in this process compute "
            f"their forward again. Please report this; until it is mended, {VARIABLE}=off in the "
            "environment does the same from the start."
        )
        report(error, name, str(audit.found.device), 1)


PAIRS = Pairs()
ask_in_checks(PAIRS.ask)


def writer(
    program: Program, evaluator: Callable[[Program], Evaluate], port: Port, mode: Mode
) -> Write:
    """What evaluates a program that gives or takes tokens, and writes to its outputs.

    Args:
        program: the program.
        evaluator: makes what XLA's call runs of a program.
        port: its part in the module.
        mode: how graphs are found.
    """
    run = _Run(program, evaluator, port, mode)
    weakref.finalize(run, LEDGER.drop_of, id(run)).atexit = False
    return run.__call__


class _Run:
    """See `writer`."""

    def __init__(
        self, program: Program, evaluator: Callable[[Program], Evaluate], port: Port, mode: Mode
    ) -> None:
        self._name = str(program)
        self._port, self._mode = port, mode
        self._site = program.tape_site if isinstance(program, Record) else None
        self._full = evaluator(program)
        self._plain = evaluator(program.inner) if isinstance(program, Record) else self._full

    def __call__(self, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        self._port.settle()
        operand, first = self._port.operand, self._port.first
        results, tokens = outputs[:first], outputs[first:]
        places = list(map(_place, tokens))
        LEDGER.drop(places)
        token = None if operand is None else inputs[operand]
        number = 0 if token is None else self._number(token)
        if operand is not None:
            inputs[operand] = _on_host(number)
        try:
            values = (self._full if self._keeps else self._plain)(inputs, False)
        except torch.OutOfMemoryError:
            TAPES.clear_device(inputs[0].device)
            number = 0
            if operand is not None:
                inputs[operand] = _on_host(number)
            values = self._plain(inputs, False)
        numbers = [int(x) for x in values[first:]] or [0] * len(tokens)
        if token is not None and number and self._mode is Mode.AUDIT:
            self._write_audited(results, values, tokens, numbers, token != number)
        else:
            for output, value in zip(results, values, strict=False):
                output.copy_(value.detach())
            for output, kept in zip(tokens, numbers, strict=True):
                output.fill_(kept)
        self._note(places, numbers)

    @property
    def _keeps(self) -> bool:
        """Whether a graph is recorded."""
        if self._mode is Mode.READ:
            return True
        return bool(self._port.wanted) and self._mode is not Mode.OFF and not PAIRS.ended

    def _number(self, token: torch.Tensor) -> int:
        """That of the graph for a token, 0 if there is none."""
        if self._mode is Mode.READ:
            return int(token)
        if self._mode is Mode.OFF or PAIRS.ended or not self._port.is_proven:
            PAIRS.count("unproven")
            return 0
        number = LEDGER.take(_place(token))
        PAIRS.count("paired" if number else "missed")
        if number and self._mode is Mode.CHECK and number != int(token):
            raise AssertionError(f"{self._name}: graph {number} for token {int(token)}")
        return number

    def _write_audited(
        self,
        outputs: list[torch.Tensor],
        values: Tensors,
        tokens: list[torch.Tensor],
        numbers: list[int],
        wrong: torch.Tensor,
    ) -> None:
        """Writes NaN, and tokens of no graph, where the token taken has another number."""
        wrong = wrong.view(())
        audit = PAIRS.audit(wrong.device)
        audit.add(wrong)
        for output, value in zip(outputs, values, strict=False):
            torch.where(wrong, audit.nan(output), value.detach(), out=output)
        for output, number in zip(tokens, numbers, strict=True):
            output.fill_(number).masked_fill_(wrong, 0)
        PAIRS.look(audit, self._name)

    def _note(self, places: list[Place], numbers: list[int]) -> None:
        if self._mode is Mode.READ or self._site is None:
            return
        for i, (place, number) in enumerate(zip(places, numbers, strict=True)):
            if number and i in self._port.wanted and not PAIRS.ended:
                LEDGER.note(place, _Noted(number, weakref.ref(self._site), id(self)))
                LIVE.last.append((place, number))
            elif number:
                TAPES.discard(self._site, number)


def _place(x: torch.Tensor) -> Place:
    return x.get_device(), x.data_ptr()


def _on_host(number: int) -> torch.Tensor:
    return torch.full((1,), number, dtype=torch.int32)
