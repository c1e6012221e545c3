"""Reverse mode: the cotangents of a program's inputs, computed by torch.

Plain calls use `torch.autograd`, which works for whatever eager torch can differentiate; within
`torch.func.vmap` only the rest of `torch.func` works.

Complex numbers: JAX's pullback is the transpose of the tangent map, torch's the adjoint with
respect to the Hermitian product. They differ by a conjugation before and one after:
J^T u = conj(J^H conj(u)). The functions here are torch's.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from .._compat import run_backward
from .._errors import EqxTorchError
from .attention import explain_attention
from .base import Derivative, Indices, pick, Program, replaced, Tensors
from .graph import dense, is_error, is_users, nodes_behind, with_dense_gradient
from .seen import (
    is_seen,
    nearby,
    PRECISE,
    random_like,
    refuse_unseen,
    refusing_unseen,
    rounding,
)
from .tape import Held, Tape


_STRIDED = torch.strided

# How reentrant checkpoints refuse `torch.autograd.grad`.
_REFUSAL = "torch.utils.checkpoint is incompatible with .grad()"
_NO_SECOND = (
    "`{name}` cannot be differentiated again: its backward is computed outside of autograd, on "
    "detached tensors or by NumPy, or is not linear in the gradient it is given. Write the "
    "backward of the `torch.autograd.Function` with operators of torch on the tensors it is given."
)


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
        nodes = nodes_behind(y.grad_fn for y in outputs) if nested or vjp.inner.order else []
        if vjp.inner.order:
            refuse_errors(nodes)
        if nested:
            by_primals = requires_gradient(primals)
            message = _NO_SECOND.format(name=vjp.leaf.name)
            with refusing_unseen(nodes, message, by_primals):
                grads = gradients(outputs, active, cotangents, create_graph=True)
                refuse_unseen(grads, message)
            if any(map(is_users, nodes)):
                refuse_unseen_nearby(vjp, primals, message)
            return grads
        try:
            return gradients(outputs, active, cotangents, create_graph=False)
        except RuntimeError as error:
            if not is_refusal(error):
                raise
        findings.grad_is_refused = True
    return _accumulated(forward(*active), active, cotangents)


def recorded(
    program: Program, inputs: Tensors, wrt: Indices, copies: bool
) -> tuple[Tensors, Tape | None]:
    """The outputs of a program, and the graph by which the inputs `wrt` reach them."""
    primals = [x.clone() for x in inputs] if copies else inputs
    active = [leaf_of(primals[i]) for i in wrt]
    results = program.run(replaced(primals, wrt, active), False)
    edges = [_edge(y) for y in results]
    if not any(edges):
        return results, None
    return results, Tape(
        inputs=dict(zip(wrt, active, strict=True)),
        outputs=edges,
        addresses=[None if copies else x.data_ptr() for x in inputs],
        held=Held(program.leaf.function.code.keep()),
    )


def replayed_pullback(vjp: Derivative, tape: Tape, cotangents: Tensors) -> list[torch.Tensor]:
    """The pullback, by the graph that a forward has recorded."""
    pairs = zip(pick(tape.outputs, vjp.of), cotangents, strict=True)
    inputs = [tape.inputs[i] for i in vjp.wrt]
    with tape.held.guard():
        return _gradients_of(pairs, inputs, create_graph=False, keep=not tape.held.is_last)


def extended_pullback(
    vjp: Derivative,
    primals: Tensors,
    tape: Tape,
    cotangents: Tensors,
    wrt: Indices,
    plain: bool | None,
) -> tuple[list[torch.Tensor], Tape | None]:
    """The pullback, and its graph: that of a forward, extended.

    Raises where autograd does not see all of it. Torch's own nodes it sees, if it has on one run.

    Args:
        vjp: the pullback.
        primals: its primals.
        tape: the graph of the forward, which the new one shares.
        cotangents: its cotangents, whose memory the graph borrows.
        wrt: the primals that the pullback is differentiated by.
        plain: whether an earlier run has consisted of torch's own nodes, None if there was none.
    """
    seeds = [u.detach().requires_grad_() for u in cotangents]
    us = list(map(conj, seeds))
    behind = [edge.node for edge in tape.outputs if edge is not None]
    with tape.held.guard():
        extend = functools.partial(_extended, vjp, tape, us)
        results = extend() if plain else _seen(vjp, extend, nodes_behind(behind), bool(wrt))
        edges = [_edge(x) for x in results]
        nodes = nodes_behind([*behind, *(edge.node for edge in edges if edge is not None)])
        is_plain = not any(map(is_users, nodes))
        if plain and not is_plain:
            return extended_pullback(vjp, primals, tape, cotangents, wrt, plain=None)
        if plain is None and not is_plain:
            refuse_unseen_nearby(vjp, primals, _NO_SECOND.format(name=vjp.leaf.name))
    refuse_errors(nodes)
    if not any(edges):
        return results, None
    return results, Tape(
        inputs={i: tape.inputs[i] for i in wrt} | dict(enumerate(seeds, len(primals))),
        outputs=edges,
        addresses=[*tape.addresses, *[u.data_ptr() for u in cotangents]],
        held=tape.held,
        behind=tape,
        is_plain=is_plain and not vjp.leaf.function.ways_to_write.hooks,
    )


def _extended(vjp: Derivative, tape: Tape, cotangents: Tensors) -> list[torch.Tensor]:
    pairs = zip(pick(tape.outputs, vjp.of), cotangents, strict=True)
    inputs = [tape.inputs[i] for i in vjp.wrt]
    return [conj(x) for x in _gradients_of(pairs, inputs, create_graph=True)]


def _seen(
    vjp: Derivative,
    extend: Callable[[], list[torch.Tensor]],
    nodes: Sequence[Any],
    by_primals: bool,
) -> list[torch.Tensor]:
    """The result of `extend`, by a backward through these nodes of which autograd sees all."""
    message = _NO_SECOND.format(name=vjp.leaf.name)
    with refusing_unseen(nodes, message, by_primals):
        results = extend()
    refuse_unseen(results, message)
    return results


def replayed_tangents(
    jvp: Derivative, vjp: Derivative, tape: Tape, tangents: Tensors, keep: bool
) -> list[torch.Tensor] | None:
    """The tangents of the pullback `vjp`, by its recorded graph; None if that does not have them.

    Let g = J(x)^T u be the pullback. For the inputs x that it is taken by, dg/dx is a Hessian, of
    u f(x), and so symmetric: tangents are cotangents, those of g for dx. And g is linear in u: its
    tangent for du is the pullback of du by the graph of the forward. The sum of both is one
    backward through both graphs.
    """
    if tape.behind is None or not tape.is_plain:
        return None
    count = len(vjp.inner.ins)
    if any(i < count and i not in vjp.wrt for i in jvp.wrt):
        return None
    edges = [
        tape.outputs[vjp.wrt.index(i)] if i < count else tape.behind.outputs[vjp.of[i - count]]
        for i in jvp.wrt
    ]
    inputs = [tape.behind.inputs[i] for i in pick(vjp.wrt, jvp.of)]
    pairs = zip(edges, map(conj, tangents), strict=True)
    with tape.held.guard():
        pushed = _gradients_of(pairs, inputs, create_graph=False, keep=keep)
    return list(map(conj, pushed))


def functional_pullback(
    vjp: Derivative, primals: Tensors, cotangents: Tensors
) -> list[torch.Tensor]:
    """The pullback, by `torch.func`."""
    forward = restricted(vjp, primals, functional=True)
    active = pick(primals, vjp.wrt)
    grads = torch.func.vjp(forward, *active)[1](tuple(cotangents))
    return [_dense(g, x) for g, x in zip(grads, active, strict=True)]


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
    return with_dense_gradient(x) if x.requires_grad else x.detach().requires_grad_()


def conj(x: torch.Tensor) -> torch.Tensor:
    """Between JAX's cotangents and torch's."""
    return x.conj() if x.is_complex() else x


def requires_gradient(tensors: Tensors) -> bool:
    """Whether an outer derivative is taken by any of these."""
    return any(t.requires_grad for t in tensors)


def gradients(
    outputs: Tensors, inputs: Tensors, cotangents: Tensors, create_graph: bool
) -> list[torch.Tensor]:
    """`torch.autograd.grad`, with zeros where nothing depends on an input."""
    roots = [y if y.requires_grad else None for y in outputs]
    return _gradients_of(zip(roots, cotangents, strict=True), inputs, create_graph, create_graph)


def refuse_errors(nodes: Sequence[Any]) -> None:
    """Raises what torch has to say about a pullback that has no derivative.

    torch puts a node that raises behind its outputs. Since that node leads to no input,
    `torch.autograd.grad` would pass it by and take the derivative to be zero.
    """
    for node in nodes:
        if is_error(node):
            _raise_error_of(node)


def _raise_error_of(node: Any) -> None:
    count = len(node._input_metadata)
    try:
        node(*[torch.zeros(())] * count)
    except RuntimeError as error:
        explain_attention(error)
        raise


def refuse_unseen_nearby(program: Derivative, primals: Tensors, message: str) -> None:
    """Raises where autograd does not see all of a pullback, at a point near the primals.

    Where the function is not defined nearby, the primals themselves have to do.
    """
    for point in (map(nearby, primals), (p.detach() for p in primals)):
        try:
            seen = _is_seen_at(program, list(point), message)
        except EqxTorchError:
            raise
        except Exception:
            continue
        if seen is False:
            raise EqxTorchError(message)
        if seen:
            return


def _is_seen_at(program: Derivative, primals: Tensors, message: str) -> bool | None:
    active = [p.requires_grad_() for p in pick(primals, program.wrt)]
    outputs = restricted(program, primals, functional=False)(*active)
    cotangents = [u.requires_grad_() for u in random_like(outputs)]
    with refusing_unseen(nodes_behind(y.grad_fn for y in outputs), message, by_primals=False):
        pulled = gradients(outputs, active, cotangents, create_graph=True)
    refuse_errors(nodes_behind(x.grad_fn for x in pulled))
    return is_seen_by_draws(pulled, cotangents)


def is_seen_by_draws(pulled: Tensors, cotangents: Tensors) -> bool | None:
    """`is_seen` for random tangents. In low precision a difference may hide behind rounding for one
    of them, not for several."""
    for draw in range(1, 2 if rounding((*pulled, *cotangents)) < PRECISE else 5):
        tangents = random_like(pulled, draw)
        back = gradients(pulled, cotangents, tangents, create_graph=True)
        seen = is_seen(pulled, cotangents, back, tangents)
        if not seen:
            return seen
    return True


def _gradients_of(
    pairs: Iterable[tuple[Any, torch.Tensor]],
    inputs: Tensors,
    create_graph: bool,
    keep: bool = True,
) -> list[torch.Tensor]:
    """The gradients for pairs of an output and its cotangent.

    Args:
        pairs: in the place of an output may stand where its graph begins, or None if it has none.
        inputs: what the gradients are by.
        create_graph: whether they are to be differentiated.
        keep: whether the graph is used again.
    """
    pairs = [(y, u) for y, u in pairs if y is not None]
    if not pairs:
        return [torch.zeros_like(x) for x in inputs]
    outputs, cotangents = zip(*pairs, strict=True)
    try:
        grads = run_backward(outputs, cotangents, tuple(inputs), keep, create_graph)
    except RuntimeError as error:
        explain_attention(error)
        raise
    return [
        g if g is not None and g.layout is _STRIDED else _dense(g, x)
        for g, x in zip(grads, inputs, strict=True)
    ]


def _accumulated(outputs: Tensors, inputs: Tensors, cotangents: Tensors) -> list[torch.Tensor]:
    """As `gradients`, by `torch.autograd.backward`, which reentrant checkpoints insist on.

    It also adds to the `grad` of other tensors that the function has used.
    """
    pairs = [(y, u) for y, u in zip(outputs, cotangents, strict=True) if y.requires_grad]
    if pairs:
        ys, us = zip(*pairs, strict=True)
        torch.autograd.backward(ys, us)
    return [_dense(x.grad, x) for x in inputs]


def _edge(y: torch.Tensor) -> torch.autograd.graph.GradientEdge | None:
    return torch.autograd.graph.get_gradient_edge(y) if y.requires_grad else None


def _dense(gradient: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(x) if gradient is None else dense(gradient)
