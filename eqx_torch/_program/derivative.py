"""Derivatives of torch programs, computed by torch.

Plain calls use `torch.autograd.grad`, which works for whatever eager torch can differentiate.
Forward mode uses `torch.func.jvp` and, where an operator or an `autograd.Function` has no forward
derivative, differentiates the pullback, which is linear in its cotangent u:

    d/du <J^T u, t> = J t          (the "double backward trick", J. Townsend, 2017)

Complex numbers: JAX's pullback is the transpose of the tangent map, torch's the adjoint with
respect to the Hermitian product. They differ by a conjugation before and one after:
J^T u = conj(J^H conj(u)).
"""

import dataclasses
import functools
import warnings
from collections.abc import Callable

import torch

from .._compat import cached_weakly
from .base import Derived, Indices, pick, Program, replaced, Spec, Tensors


# How reentrant checkpoints refuse `torch.autograd.grad`.
_REFUSAL = "torch.utils.checkpoint is incompatible with .grad()"


@cached_weakly
@dataclasses.dataclass(frozen=True, repr=False)
class Jvp(Derived):
    """The tangents of the outputs `of` of `inner`.

    Takes the primals and a tangent for each input in `wrt`; gives one tangent for each in `of`.
    """

    inner: Program
    wrt: Indices
    of: Indices

    @functools.cached_property
    def ins(self) -> tuple[Spec, ...]:
        return self.inner.ins + pick(self.inner.ins, self.wrt)

    @functools.cached_property
    def outs(self) -> tuple[Spec, ...]:
        return pick(self.inner.outs, self.of)

    @functools.cached_property
    def linear(self) -> frozenset[int]:
        return frozenset(range(len(self.inner.ins), len(self.ins)))

    @functools.cached_property
    def order(self) -> int:
        return self.inner.order + 1

    @property
    def name(self) -> str:
        return f"jvp({self.inner.name})"

    def broadcast(self, size: int, expand: bool) -> Program:
        return Jvp(self.inner.broadcast(size, False), self.wrt, self.of)

    def prepare(self) -> None:
        _load_forward_mode()
        self.inner.prepare()

    def run(self, inputs: Tensors, functional: bool) -> list[torch.Tensor]:
        primals, tangents = inputs[: len(self.inner.ins)], inputs[len(self.inner.ins) :]
        findings = self.leaf.function.findings
        if functional or not findings.forward_mode_fails:
            try:
                return _forward_mode(self, primals, tangents)
            except Exception:
                if functional:
                    raise
        out = _double_backward(self, primals, tangents)
        findings.forward_mode_fails = True
        return out


@cached_weakly
@dataclasses.dataclass(frozen=True, repr=False)
class Vjp(Derived):
    """The cotangents of the inputs `wrt` of `inner`.

    Takes the primals and a cotangent for each output in `of`; gives one for each input in `wrt`.
    """

    inner: Program
    wrt: Indices
    of: Indices

    @functools.cached_property
    def ins(self) -> tuple[Spec, ...]:
        return self.inner.ins + pick(self.inner.outs, self.of)

    @functools.cached_property
    def outs(self) -> tuple[Spec, ...]:
        return pick(self.inner.ins, self.wrt)

    @functools.cached_property
    def linear(self) -> frozenset[int]:
        return frozenset(range(len(self.inner.ins), len(self.ins)))

    @functools.cached_property
    def order(self) -> int:
        return self.inner.order + 1

    @property
    def name(self) -> str:
        return f"vjp({self.inner.name})"

    def broadcast(self, size: int, expand: bool) -> Program:
        return Vjp(self.inner.broadcast(size, False), self.wrt, self.of)

    def run(self, inputs: Tensors, functional: bool) -> list[torch.Tensor]:
        primals, cotangents = inputs[: len(self.inner.ins)], inputs[len(self.inner.ins) :]
        pullback = _functional_pullback if functional else _pullback
        results = pullback(self, primals, [_conj(u) for u in cotangents])
        return [_conj(r) for r in results]


@functools.cache
def _load_forward_mode() -> None:
    """torch loads rules at the first use, with a deprecated function, and warns of itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        with torch.autograd.forward_ad.dual_level():
            torch.autograd.forward_ad.make_dual(torch.zeros(()), torch.zeros(()))


def _restricted(
    program: Jvp | Vjp, primals: Tensors, functional: bool
) -> Callable[..., tuple[torch.Tensor, ...]]:
    """The inner program as a function of the inputs `wrt` alone, giving the outputs `of`."""

    def restricted(*active: torch.Tensor) -> tuple[torch.Tensor, ...]:
        inputs = replaced(primals, program.wrt, active)
        return pick(program.inner.run(inputs, functional), program.of)

    return restricted


def _forward_mode(jvp: Jvp, primals: Tensors, tangents: Tensors) -> list[torch.Tensor]:
    restricted = _restricted(jvp, primals, functional=True)
    return list(torch.func.jvp(restricted, pick(primals, jvp.wrt), tuple(tangents))[1])


def _double_backward(jvp: Jvp, primals: Tensors, tangents: Tensors) -> list[torch.Tensor]:
    nested = _requires_grad([*primals, *tangents])
    active = [_leaf_of(p) for p in pick(primals, jvp.wrt)]
    outputs = _restricted(jvp, primals, functional=False)(*active)
    seeds = [torch.zeros_like(y).requires_grad_() for y in outputs]
    pulled = _grad(outputs, active, seeds, create_graph=True)
    return _grad(pulled, seeds, tangents, create_graph=nested)


def _pullback(vjp: Vjp, primals: Tensors, cotangents: Tensors) -> list[torch.Tensor]:
    nested = _requires_grad([*primals, *cotangents])
    active = [_leaf_of(p) for p in pick(primals, vjp.wrt)]
    restricted = _restricted(vjp, primals, functional=False)
    findings = vjp.leaf.function.findings
    if nested or not findings.grad_is_refused:
        try:
            return _grad(restricted(*active), active, cotangents, create_graph=nested)
        except RuntimeError as error:
            if nested or _REFUSAL not in str(error):
                raise
        findings.grad_is_refused = True
    return _accumulated(restricted(*active), active, cotangents)


def _functional_pullback(vjp: Vjp, primals: Tensors, cotangents: Tensors) -> list[torch.Tensor]:
    restricted = _restricted(vjp, primals, functional=True)
    pullback = torch.func.vjp(restricted, *pick(primals, vjp.wrt))[1]
    return list(pullback(tuple(cotangents)))


def _leaf_of(x: torch.Tensor) -> torch.Tensor:
    """A new tensor to differentiate by, behind which outer derivatives still see `x`."""
    return x.view_as(x) if x.requires_grad else x.detach().requires_grad_()


def _requires_grad(tensors: Tensors) -> bool:
    return any(t.requires_grad for t in tensors)


def _grad(
    outputs: Tensors, inputs: Tensors, cotangents: Tensors, create_graph: bool
) -> list[torch.Tensor]:
    """`torch.autograd.grad`, with zeros where nothing depends on an input."""
    pairs = [(y, u) for y, u in zip(outputs, cotangents, strict=True) if y.requires_grad]
    if not pairs:
        return [torch.zeros_like(x) for x in inputs]
    ys, us = zip(*pairs, strict=True)
    grads = torch.autograd.grad(
        ys, inputs, us, create_graph=create_graph, allow_unused=True, materialize_grads=True
    )
    return list(grads)


def _accumulated(outputs: Tensors, inputs: Tensors, cotangents: Tensors) -> list[torch.Tensor]:
    """As `_grad`, by `torch.autograd.backward`, which `torch.utils.checkpoint` may insist on.

    It also adds to the `grad` of other tensors that the function has used.
    """
    pairs = [(y, u) for y, u in zip(outputs, cotangents, strict=True) if y.requires_grad]
    if pairs:
        ys, us = zip(*pairs, strict=True)
        torch.autograd.backward(ys, us)
    return [torch.zeros_like(x) if x.grad is None else x.grad for x in inputs]


def _conj(x: torch.Tensor) -> torch.Tensor:
    return x.conj() if x.is_complex() else x
