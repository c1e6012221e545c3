"""Reverse mode: the cotangents of a program's inputs, computed by torch.

Plain calls use `torch.autograd`, which works for whatever eager torch can differentiate; within
`torch.func.vmap` only the rest of `torch.func` works.

Complex numbers: JAX's pullback is the transpose of the tangent map, torch's the adjoint with
respect to the Hermitian product. They differ by a conjugation before and one after:
J^T u = conj(J^H conj(u)). The functions here are torch's.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .._compat import run_backward
from .._errors import EqxTorchError
from .attention import explain_attention
from .base import Derivative, pick, replaced, Tensors
from .tape import Tape


# How reentrant checkpoints refuse `torch.autograd.grad`.
_REFUSAL = "torch.utils.checkpoint is incompatible with .grad()"


def pullback(vjp: Derivative, primals: Tensors, cotangents: Tensors) -> list[torch.Tensor]:
    """The pullback, by a new forward."""
    nested = requires_gradient([*primals, *cotangents])
    active = [leaf_of(p) for p in pick(primals, vjp.wrt)]
    forward = restricted(vjp, primals, functional=False)
    findings = vjp.leaf.function.findings
    if nested:
        # Only then does torch put in the nodes that `refuse_errors` looks for.
        cotangents = [u if u.requires_grad else u.detach().requires_grad_() for u in cotangents]
    if nested or not findings.grad_is_refused:
        outputs = forward(*active)
        if vjp.inner.order:
            refuse_errors(outputs)
        try:
            grads = gradients(outputs, active, cotangents, create_graph=nested)
            if nested:
                _refuse_detached(vjp, grads)
            return grads
        except RuntimeError as error:
            if nested or not is_refusal(error):
                raise
        findings.grad_is_refused = True
    return _accumulated(forward(*active), active, cotangents)


def replayed_pullback(vjp: Derivative, tape: Tape, cotangents: Tensors) -> list[torch.Tensor]:
    """The pullback, by the graph that a forward has recorded."""
    edges = pick(tape.outputs, vjp.of)
    pairs = [(edge, u) for edge, u in zip(edges, cotangents, strict=True) if edge is not None]
    inputs = [tape.inputs[i] for i in vjp.wrt]
    with tape.kept.guard:
        return _gradients_of(pairs, inputs, create_graph=False)


def functional_pullback(
    vjp: Derivative, primals: Tensors, cotangents: Tensors
) -> list[torch.Tensor]:
    """The pullback, by `torch.func`."""
    forward = restricted(vjp, primals, functional=True)
    return list(torch.func.vjp(forward, *pick(primals, vjp.wrt))[1](tuple(cotangents)))


def is_refusal(error: RuntimeError) -> bool:
    """Whether torch refuses `torch.autograd.grad`, but not `torch.autograd.backward`."""
    return _REFUSAL in str(error)


def restricted(
    program: Derivative, primals: Tensors, functional: bool
) -> Callable[..., tuple[torch.Tensor, ...]]:
    """The inner program as a function of the inputs `wrt` alone, giving the outputs `of`."""

    def forward(*active: torch.Tensor) -> tuple[torch.Tensor, ...]:
        inputs = replaced(primals, program.wrt, active)
        return pick(program.inner.run(inputs, functional), program.of)

    return forward


def leaf_of(x: torch.Tensor) -> torch.Tensor:
    """A new tensor to differentiate by, behind which outer derivatives still see `x`."""
    return x.view_as(x) if x.requires_grad else x.detach().requires_grad_()


def requires_gradient(tensors: Tensors) -> bool:
    """Whether an outer derivative is taken by any of these."""
    return any(t.requires_grad for t in tensors)


def gradients(
    outputs: Tensors, inputs: Tensors, cotangents: Tensors, create_graph: bool
) -> list[torch.Tensor]:
    """`torch.autograd.grad`, with zeros where nothing depends on an input."""
    pairs = [(y, u) for y, u in zip(outputs, cotangents, strict=True) if y.requires_grad]
    return _gradients_of(pairs, inputs, create_graph)


def refuse_errors(outputs: Tensors) -> None:
    """Raises what torch has to say about a pullback that has no derivative.

    torch puts a node that raises behind its outputs. Since that node leads to no input,
    `torch.autograd.grad` would pass it by and take the derivative to be zero.
    """
    seen = set()
    pending: list[Any] = [y.grad_fn for y in outputs]
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() == "torch::autograd::Error":
            _raise_error_of(node)
        pending.extend(behind for behind, _ in node.next_functions)


def _raise_error_of(node: Any) -> None:
    try:
        node(torch.zeros(()))
    except RuntimeError as error:
        explain_attention(error)
        raise


def _refuse_detached(vjp: Derivative, grads: Tensors) -> None:
    """Raises where a pullback lies outside of autograd, whose derivative would be taken as zero.

    A pullback is linear in the cotangents, which require a gradient here. So what is not zero does
    not come from them by operators that torch can differentiate.
    """
    if any(not g.requires_grad and bool(g.any()) for g in grads):
        raise EqxTorchError(
            f"`{vjp.leaf.name}` cannot be differentiated again: its backward is computed outside "
            "of autograd, on detached tensors or by NumPy. Write the backward of the "
            "`torch.autograd.Function` with operators of torch on the tensors it is given."
        )


def _gradients_of(
    pairs: Sequence[tuple[Any, torch.Tensor]], inputs: Tensors, create_graph: bool
) -> list[torch.Tensor]:
    """The gradients for pairs of an output, or where its graph begins, and its cotangent."""
    if not pairs:
        return [torch.zeros_like(x) for x in inputs]
    outputs, cotangents = zip(*pairs, strict=True)
    try:
        grads = run_backward(outputs, cotangents, tuple(inputs), create_graph)
    except RuntimeError as error:
        explain_attention(error)
        raise
    return [torch.zeros_like(x) if g is None else g for g, x in zip(grads, inputs, strict=True)]


def _accumulated(outputs: Tensors, inputs: Tensors, cotangents: Tensors) -> list[torch.Tensor]:
    """As `gradients`, by `torch.autograd.backward`, which reentrant checkpoints insist on.

    It also adds to the `grad` of other tensors that the function has used.
    """
    pairs = [(y, u) for y, u in zip(outputs, cotangents, strict=True) if y.requires_grad]
    if pairs:
        ys, us = zip(*pairs, strict=True)
        torch.autograd.backward(ys, us)
    return [torch.zeros_like(x) if x.grad is None else x.grad for x in inputs]
