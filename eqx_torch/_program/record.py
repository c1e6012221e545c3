"""A forward that keeps its autograd graph for the backward."""

import dataclasses
import functools

import torch

from .._compat import cached_weakly
from .base import Derived, Indices, Program, replaced, Spec, Tensors, TOKEN
from .reverse import leaf_of
from .tape import addresses, Tape, TAPES, TapeSite


@cached_weakly
@dataclasses.dataclass(frozen=True, repr=False)
class Record(Derived):
    """`inner`, which also gives the token of the graph by which its inputs `wrt` reach its outputs.

    The token is zero where nothing was kept.
    """

    inner: Program
    wrt: Indices

    @functools.cached_property
    def ins(self) -> tuple[Spec, ...]:
        return self.inner.ins

    @functools.cached_property
    def outs(self) -> tuple[Spec, ...]:
        return (*self.inner.outs, TOKEN)

    @functools.cached_property
    def order(self) -> int:
        return self.inner.order

    @property
    def name(self) -> str:
        return f"record({self.inner.name})"

    def broadcast(self, size: int, shared: Indices) -> Program:
        return Record(self.inner.broadcast(size, shared), self.wrt)

    @functools.cached_property
    def _site(self) -> TapeSite:
        return TAPES.site(self.inner)

    def run(self, inputs: Tensors, functional: bool) -> list[torch.Tensor]:
        refused = self.leaf.function.findings.grad_is_refused
        if functional or refused or not inputs[0].is_cpu:
            # Made on the device: to copy a token there would be to wait for it.
            nothing = torch.zeros(1, dtype=torch.int32, device=inputs[0].device)
            return [*self.inner.run(inputs, functional), nothing]
        copies = self._site.copies
        primals = [x.clone() for x in inputs] if copies else inputs
        active = [leaf_of(primals[i]) for i in self.wrt]
        results = self.inner.run(replaced(primals, self.wrt, active), False)
        edges = [_edge(y) for y in results]
        if not any(edges):
            return [*results, _token(0)]
        tape = Tape(
            inputs=dict(zip(self.wrt, active, strict=True)),
            outputs=edges,
            addresses=None if copies else addresses(inputs),
            kept=self.leaf.function.code.keep(),
        )
        return [*results, _token(TAPES.put(self._site, tape))]


def _edge(y: torch.Tensor) -> torch.autograd.graph.GradientEdge | None:
    return torch.autograd.graph.get_gradient_edge(y) if y.requires_grad else None


def _token(number: int) -> torch.Tensor:
    return torch.tensor([number], dtype=torch.int32)
