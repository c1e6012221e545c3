"""The derivatives of a program, as programs: tangents pushed forward, cotangents pulled back.

`Record` is a program that keeps the graph of what it computes for its derivatives, which find it
by a token. The pullback that is recorded takes the graph of its forward itself, by the forward's
token, extends it, and keeps both under a token of its own. So where JAX differentiates n times,
torch computes one forward, one backward, and one more for each order, as it does by `create_graph`.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Self, TypeVar

import torch

from .._compat import cached_weakly
from .._errors import EqxTorchError
from .base import Derivative, Derived, Indices, Kind, pick, Program, Spec, Tensors, TOKEN
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
from .reverse import (
    conj,
    extended_pullback,
    functional_pullback,
    is_refusal,
    pullback,
    recorded,
    replayed_pullback,
    replayed_tangents,
)
from .seen import random_like
from .tape import Tape, TAPES, TapeSite


class _Taped(Derivative):
    """A derivative that may be computed by the graph that `Record` has kept of `inner`."""

    @functools.cached_property
    def untaped(self) -> Self:
        """The same without a token."""
        return dataclasses.replace(self, taped=False) if self.taped else self

    @functools.cached_property
    def tape_site(self) -> TapeSite:
        """Where the graphs of `inner` are kept."""
        return _site(self.inner)

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
        return (*self.inner.forward, self) if self._linear is None else self._linear.forward

    @functools.cached_property
    def _linear(self) -> "Vjp | None":
        """The pullback that it is where `inner` is a pullback and linear in `wrt`."""
        return _of_forward(Vjp, self)

    def run(self, inputs: Tensors, functional: bool) -> list[torch.Tensor]:
        primals, tangents = self.split(inputs)
        tape = _taken(self, inputs, self.wrt) if self.taped and not functional else None
        try:
            writes = self.learnt.writes
            if writes is None and not functional:
                push = functools.partial(self._tangents, functional=False)
                return self._observed(primals, tangents, push)
            if writes:
                tangents = [t.clone() for t in tangents]
            pushed = None if tape is None else self._replay(tape, primals, tangents)
            return self._tangents(primals, tangents, functional) if pushed is None else pushed
        finally:
            if tape is not None:
                tape.held.release()

    def _replay(self, tape: Tape, primals: Tensors, tangents: Tensors) -> list[torch.Tensor] | None:
        """The tangents by the recorded graph, None if it does not have them.

        Once, it is asked by random tangents whether it has.
        """
        inner, learnt = self.inner, self.learnt
        if not isinstance(inner, Vjp) or learnt.symmetric is False:
            return None
        try:
            if learnt.symmetric is None:
                trial = random_like(tangents)
                found = replayed_tangents(self, inner, tape, trial, keep=True)
                learnt.symmetric = found is not None and all(
                    map(_alike, found, self._tangents(primals, trial, False))
                )
            if learnt.symmetric:
                return replayed_tangents(self, inner, tape, tangents, not tape.held.is_last)
        except RuntimeError:
            learnt.symmetric = False
        return None

    def _tangents(
        self, primals: Tensors, tangents: Tensors, functional: bool
    ) -> list[torch.Tensor]:
        if self._linear is not None:
            n = len(self._linear.inner.ins)
            return self._linear.run([*primals[:n], *tangents], functional)
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

    def prepare(self) -> None:
        (self.inner if self._linear is None else self._linear).prepare()

    @functools.cached_property
    def forward(self) -> tuple[Program, ...]:
        return self.inner.forward if self._linear is None else self._linear.forward

    @functools.cached_property
    def _linear(self) -> Jvp | None:
        """The map of tangents that it is where `inner` is a pullback and linear in `wrt`."""
        return _of_forward(Jvp, self)

    def run(self, inputs: Tensors, functional: bool) -> list[torch.Tensor]:
        primals, cotangents = self.split(inputs)
        taken = self.taped and not functional
        tape = _taken(self, inputs, self.wrt) if taken else None
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
            tape.held.release()
        return self._observed(
            primals, cotangents, lambda ps, us: self._cotangents(None, ps, us, False)
        )

    def _cotangents(
        self, tape: Tape | None, primals: Tensors, cotangents: Tensors, functional: bool
    ) -> list[torch.Tensor]:
        us = [conj(u) for u in cotangents] if self._complex else cotangents
        results = None if tape is None else self._replay(tape, us)
        if results is None and self._linear is not None:  # tangents, for which torch's way is JAX's
            n = len(self._linear.inner.ins)
            return self._linear.run([*primals[:n], *cotangents], functional)
        if results is None:
            results = self._recomputed(primals, us, functional)
        return [conj(r) for r in results] if self._complex else results

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
            tape.held.release()

    def recorded(self, inputs: Tensors, wrt: Indices, copies: bool) -> tuple[Tensors, Tape | None]:
        """The cotangents, and their graph by the inputs `wrt`, the token not counted.

        There is none on the first run, which is on copies, nor where autograd does not see all of
        the pullback: who differentiates it will have the error.
        """
        learnt = self.learnt
        if learnt.writes is None or learnt.extends is False:
            return self.run(inputs, False), None
        primals, cotangents = self.split(inputs)
        owned = copies or learnt.writes
        if owned:
            cotangents = [u.clone() for u in cotangents]
        try:
            results, tape = self._extended(inputs, primals, cotangents, wrt)
        except Exception:
            results, tape = self.untaped.run([*primals, *cotangents], False), None
            learnt.extends = False
        if tape is not None and owned:
            addresses = [*tape.addresses[: len(primals)], *[None] * len(cotangents)]
            tape = dataclasses.replace(tape, addresses=addresses)
        return results, tape

    def _extended(
        self, inputs: Tensors, primals: Tensors, cotangents: Tensors, wrt: Indices
    ) -> tuple[Tensors, Tape | None]:
        learnt, own = self.learnt, tuple(i for i in wrt if i < len(primals))
        needed = tuple(sorted({*self.wrt, *own}))
        tape = _taken(self, inputs, needed) if self.taped else None
        if tape is None:
            _, tape = _recorded(self.inner, primals, needed, self.tape_site.copies)
        if tape is None:
            return self.untaped.run([*primals, *cotangents], False), None
        longer = None
        try:
            results, longer = extended_pullback(
                self, primals, tape, cotangents, own, learnt.plain or None
            )
            learnt.extends, learnt.plain = True, longer is None or longer.is_plain
            return results, longer
        finally:
            if longer is None:
                tape.held.release()


@cached_weakly
@dataclasses.dataclass(frozen=True, repr=False)
class Record(Derived):
    """`inner`, which also gives tokens of the graph by which its inputs `wrt` reach its outputs.

    Tokens are zero where nothing was kept. They are in the host's memory.

    Attributes:
        inner: a program without a token, or a pullback with one, whose graph it extends.
        wrt: the inputs that any of the derivatives is taken by.
        count: how many derivatives there will be, each with a token of its own.
    """

    inner: Program
    wrt: Indices
    count: int = 1

    @functools.cached_property
    def ins(self) -> tuple[Spec, ...]:
        return self.inner.ins

    @functools.cached_property
    def outs(self) -> tuple[Spec, ...]:
        return (*self.inner.outs, *[TOKEN] * self.count)

    @functools.cached_property
    def token(self) -> int | None:
        return self.inner.token

    @functools.cached_property
    def order(self) -> int:
        return self.inner.order

    @property
    def name(self) -> str:
        return f"record({self.inner.name})"

    def broadcast(self, size: int, shared: Indices) -> Program:
        return Record(self.inner.broadcast(size, shared), self.wrt, self.count)

    @functools.cached_property
    def _evaluate(self) -> Callable[[Tensors, Indices, bool], tuple[Tensors, Tape | None]]:
        if isinstance(self.inner, Vjp):
            return self.inner.recorded
        return functools.partial(recorded, self.inner)

    @functools.cached_property
    def tape_site(self) -> TapeSite:
        """Where its graphs are kept."""
        return _site(self.inner.untaped if isinstance(self.inner, _Taped) else self.inner)

    @functools.cached_property
    def _by(self) -> Indices:
        """`wrt`, where the token of the pullback is not counted."""
        if not (isinstance(self.inner, _Taped) and self.inner.taped):
            return self.wrt
        token = len(self.inner.inner.ins)
        return tuple(i - (i > token) for i in self.wrt)

    def run(self, inputs: Tensors, functional: bool) -> list[torch.Tensor]:
        refused = self.leaf.function.findings.grad_is_refused
        if functional or refused:
            nothing = torch.zeros(1, dtype=torch.int32)
            return [*self.inner.run(inputs, functional), *[nothing] * self.count]
        results, tape = self._evaluate(inputs, self._by, self.tape_site.copies)
        tokens = [0] * self.count if tape is None else TAPES.put(self.tape_site, tape, self.count)
        return [*results, *[torch.full((1,), token, dtype=torch.int32) for token in tokens]]


def _recorded(
    program: Program, inputs: Tensors, wrt: Indices, copies: bool
) -> tuple[Tensors, Tape | None]:
    """What `Record` computes, for a derivative that has found no graph."""
    if isinstance(program, Vjp):
        return program.recorded(inputs, wrt, copies)
    return recorded(program, inputs, wrt, copies)


def _site(program: Program) -> TapeSite:
    behind = program.tape_site if isinstance(program, Vjp) else None
    return TAPES.site(program, behind)


def _taken(program: _Taped, inputs: Tensors, wrt: Indices) -> Tape | None:
    """The recorded graph that the token names, if it is valid and has these inputs."""
    primals, token = inputs[: len(program.inner.ins)], inputs[len(program.inner.ins)]
    return TAPES.take(program.tape_site, int(token), primals, wrt)


_Kind = TypeVar("_Kind", "Jvp", "Vjp")


def _of_forward(kind: type[_Kind], program: Derivative) -> _Kind | None:
    """A derivative of a pullback by cotangents, as a derivative of the forward.

    Since the pullback is linear in these, its tangent is a pullback, and its adjoint a tangent.
    """
    inner = program.inner
    if not (isinstance(inner, Vjp) and inner.linear.issuperset(program.wrt)):
        return None
    of = pick(inner.of, [i - len(inner.inner.ins) for i in program.wrt])
    return kind(inner.inner, pick(inner.wrt, program.of), of)


def _alike(found: torch.Tensor, expected: torch.Tensor) -> bool:
    found, expected = found.detach(), expected.detach()
    tolerance = torch.finfo(expected.dtype).eps ** 0.5
    scale = float(expected.abs().max()) if expected.numel() else 0.0
    return torch.allclose(found, expected, rtol=tolerance, atol=tolerance * scale)


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
