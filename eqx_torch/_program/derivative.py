"""The derivatives of a program, as programs: tangents pushed forward, cotangents pulled back."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable

import torch

from .._compat import cached_weakly
from .._errors import EqxTorchError
from .base import Derivative, Indices, Kind, pick, Program, Spec, Tensors
from .batch import batched_or_looped
from .forward import (
    double_backward,
    dual_numbers,
    functional_double_backward,
    functional_dual_numbers,
    load_forward_mode,
)
from .function import LearntBackward
from .leaf import observed
from .reverse import functional_pullback, is_refusal, pullback, replayed_pullback
from .tape import Tape, TAPES, TapeSite


class _Taped(Derivative):
    """A derivative that may be computed by the graph that `Record` has kept of `inner`."""

    @functools.cached_property
    def tape_site(self) -> TapeSite:
        """Where the graphs of `inner` are kept."""
        return TAPES.site(self.inner)

    @functools.cached_property
    def learnt(self) -> LearntBackward:
        """What runs have shown."""
        return self.leaf.function.findings.of_backward(self)

    def _observed(
        self,
        primals: Tensors,
        others: Tensors,
        run: Callable[[Tensors, Tensors], list[torch.Tensor]],
    ) -> list[torch.Tensor]:
        """The result of a run on copies, which shows what such runs write to.

        Only what a `torch.autograd.Function` of the user's does can write to a primal that it has
        saved. From then on each forward has a copy of that; the graphs of earlier ones would write
        to JAX's memory.
        """
        originals, count = [*primals, *others], len(primals)
        copies = [x.clone() for x in originals]
        run_on_copies = functools.partial(run, copies[:count], copies[count:])
        results, written = observed(run_on_copies, originals, copies)
        own = written.intersection(range(min(count, len(self.leaf.ins))))
        if own:
            learnt = self.leaf.learnt
            learnt.written = (learnt.written or frozenset()) | own
            TAPES.clear()
        named = bool(self.leaf.function.may_write(len(self.inner.ins)))
        self.learnt.writes = named or any(i >= count for i in written)
        return results


@cached_weakly
@dataclasses.dataclass(frozen=True, repr=False)
class Jvp(_Taped):
    """The tangents of the outputs `of` of `inner`.

    Takes the primals, a token if `taped`, and a tangent for each input in `wrt`; gives one tangent
    for each output in `of`.
    """

    @functools.cached_property
    def ins(self) -> tuple[Spec, ...]:
        return (*self.inner.ins, *self.tokens, *pick(self.inner.ins, self.wrt))

    @functools.cached_property
    def outs(self) -> tuple[Spec, ...]:
        return pick(self.inner.outs, self.of)

    @property
    def name(self) -> str:
        return f"jvp({self.inner.name})"

    @property
    def kind(self) -> Kind:
        return "tangent"

    def broadcast(self, size: int, shared: Indices) -> Program:
        return Jvp(self.inner.broadcast(size, ()), self.wrt, self.of)

    def prepare(self) -> None:
        load_forward_mode()
        self.inner.prepare()

    @functools.cached_property
    def forward(self) -> tuple[Program, ...]:
        return (*self.inner.forward, self)

    def run(self, inputs: Tensors, functional: bool) -> list[torch.Tensor]:
        primals, tangents = self.split(inputs)
        if self.taped and not functional:
            _drop(self, inputs)
        writes = self.learnt.writes
        if writes is None and not functional:
            return self._observed(primals, tangents, lambda ps, ts: self._tangents(ps, ts, False))
        if writes:
            tangents = [t.clone() for t in tangents]
        return self._tangents(primals, tangents, functional)

    def _tangents(
        self, primals: Tensors, tangents: Tensors, functional: bool
    ) -> list[torch.Tensor]:
        forward_mode = self.leaf.function.findings.forward_mode
        works = forward_mode.get(self, not self.inner.forward)  # dual numbers do not nest
        if functional:
            push = functional_dual_numbers if works else functional_double_backward
            return push(self, primals, tangents)
        if works:
            with contextlib.suppress(Exception):
                out = dual_numbers(self, primals, tangents)
                forward_mode[self] = True
                return out
        differentiate = functools.partial(double_backward, self, primals, tangents)
        out = _through_forward_mode(self, differentiate)
        forward_mode[self] = False
        return out


@cached_weakly
@dataclasses.dataclass(frozen=True, repr=False)
class Vjp(_Taped):
    """The cotangents of the inputs `wrt` of `inner`.

    Takes the primals, a token if `taped`, and a cotangent for each output in `of`; gives one for
    each input in `wrt`. With a token, the graph that `Record` has kept is used if it is valid.
    """

    @functools.cached_property
    def ins(self) -> tuple[Spec, ...]:
        return (*self.inner.ins, *self.tokens, *pick(self.inner.outs, self.of))

    @functools.cached_property
    def outs(self) -> tuple[Spec, ...]:
        return pick(self.inner.ins, self.wrt)

    @property
    def name(self) -> str:
        return f"vjp({self.inner.name})"

    @property
    def kind(self) -> Kind:
        return "backward"

    def broadcast(self, size: int, shared: Indices) -> Program:
        return Vjp(self.inner.broadcast(size, ()), self.wrt, self.of)

    def run(self, inputs: Tensors, functional: bool) -> list[torch.Tensor]:
        primals, cotangents = self.split(inputs)
        tape = _taken(self, inputs) if self.taped and not functional else None
        writes = self.learnt.writes
        if writes is None and not functional:
            return self._first_run(tape, primals, cotangents)
        if writes is not False:
            cotangents = [u.clone() for u in cotangents]
        return self._cotangents(tape, primals, cotangents, functional)

    def _first_run(
        self, tape: Tape | None, primals: Tensors, cotangents: Tensors
    ) -> list[torch.Tensor]:
        """With a graph that writes to no primal, or on copies of these."""
        if tape is not None and not tape.is_users:
            return self._observed(
                [], cotangents, lambda _, us: self._cotangents(tape, primals, us, False)
            )
        if tape is not None:
            tape.kept.release()
        return self._observed(
            primals, cotangents, lambda ps, us: self._cotangents(None, ps, us, False)
        )

    def _cotangents(
        self, tape: Tape | None, primals: Tensors, cotangents: Tensors, functional: bool
    ) -> list[torch.Tensor]:
        if self._complex:
            cotangents = [_conj(u) for u in cotangents]
        results = None if tape is None else self._replay(tape, cotangents)
        if results is None:
            results = self._recomputed(primals, cotangents, functional)
        return [_conj(r) for r in results] if self._complex else results

    @functools.cached_property
    def _complex(self) -> bool:
        return any(spec.dtype.kind == "c" for spec in (*self.ins, *self.outs))

    def _recomputed(
        self, primals: Tensors, cotangents: Tensors, functional: bool
    ) -> list[torch.Tensor]:
        """The cotangents by a new forward."""
        if functional:
            return functional_pullback(self, primals, cotangents)
        differentiate = functools.partial(pullback, self, primals, cotangents)
        return _through_forward_mode(self, differentiate)

    def _replay(self, tape: Tape, cotangents: Tensors) -> list[torch.Tensor] | None:
        """The cotangents by the recorded graph, None if it cannot be used."""
        try:
            return replayed_pullback(self, tape, cotangents)
        except RuntimeError as error:
            refused = is_refusal(error)
            if not (refused or self.batches):
                raise
            self.leaf.function.findings.grad_is_refused |= refused
            return None
        finally:
            tape.kept.release()


def _taken(program: _Taped, inputs: Tensors) -> Tape | None:
    """The recorded graph that the token names, if it is valid."""
    primals, token = inputs[: len(program.inner.ins)], inputs[len(program.inner.ins)]
    if not token.is_cpu:  # reading it would wait for the device
        return None
    return TAPES.take(program.tape_site, int(token), primals, program.wrt)


def _drop(jvp: Jvp, inputs: Tensors) -> None:
    """Forward mode has no use for the graph."""
    tape = _taken(jvp, inputs)
    if tape is not None:
        tape.kept.release()


def _through_forward_mode(
    program: Derivative, differentiate: Callable[[], list[torch.Tensor]]
) -> list[torch.Tensor]:
    """A derivative of what may itself be computed in forward mode.

    torch cannot differentiate all of its rules for dual numbers: that of softmax writes to a tensor
    which its own derivative needs. Then the double backward trick takes their place.
    """
    forward_mode = program.leaf.function.findings.forward_mode
    # Asked before, since another thread may have found the same meanwhile.
    dual = [p for p in program.inner.forward if forward_mode.get(p, True)]
    try:
        return batched_or_looped(program, differentiate)
    except (RuntimeError, EqxTorchError):
        if not dual:
            raise
        forward_mode.update(dict.fromkeys(dual, False))
        with contextlib.suppress(Exception):
            return batched_or_looped(program, differentiate)
        for p in dual:
            forward_mode.pop(p, None)
        raise


def _conj(x: torch.Tensor) -> torch.Tensor:
    return x.conj() if x.is_complex() else x
