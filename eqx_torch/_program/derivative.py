"""Derivatives of torch programs, computed by torch.

Plain calls use `torch.autograd`, which works for whatever eager torch can differentiate; within
`torch.func.vmap` only the rest of `torch.func` works.

Forward mode uses dual numbers and, where an operator or an `autograd.Function` has no forward
derivative, differentiates the pullback, which is linear in its cotangent u:

    d/du <J^T u, t> = J t          (the "double backward trick", J. Townsend, 2017)

Where a forward derivative is missing, torch does not always say so: custom operators, and some of
its own, drop the tangents of inputs that need no gradient. So dual numbers are made of tensors
that do need one, and the results must have a tangent wherever they have a gradient. That cannot be
asked of `torch.func.jvp`, so a program is batched only after one member of the batch was run
without it.

Complex numbers: JAX's pullback is the transpose of the tangent map, torch's the adjoint with
respect to the Hermitian product. They differ by a conjugation before and one after:
J^T u = conj(J^H conj(u)).
"""

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode

from .._compat import cached_weakly, set_forward_grad_enabled, set_grad_enabled
from .._errors import EqxTorchError
from .base import Derived, Indices, pick, Program, replaced, Spec, Tensors, TOKEN
from .exclusive import EXCLUSIVE
from .tape import Tape, TAPES


@cached_weakly
@dataclasses.dataclass(frozen=True, repr=False)
class Jvp(Derived):
    """The tangents of the outputs `of` of `inner`.

    Takes the primals, a token if `taped`, and a tangent for each input in `wrt`; gives one tangent
    for each output in `of`.
    """

    inner: Program
    wrt: Indices
    of: Indices
    taped: bool = False

    @functools.cached_property
    def ins(self) -> tuple[Spec, ...]:
        return self.inner.ins + _tokens(self) + pick(self.inner.ins, self.wrt)

    @functools.cached_property
    def outs(self) -> tuple[Spec, ...]:
        return pick(self.inner.outs, self.of)

    @functools.cached_property
    def linear(self) -> frozenset[int]:
        return frozenset(range(len(self.inner.ins) + self.taped, len(self.ins)))

    @functools.cached_property
    def order(self) -> int:
        return self.inner.order + 1

    @property
    def name(self) -> str:
        return f"jvp({self.inner.name})"

    def broadcast(self, size: int, shared: Indices) -> Program:
        return Jvp(self.inner.broadcast(size, ()), self.wrt, self.of)

    def prepare(self) -> None:
        _load_forward_mode()
        self.inner.prepare()

    @functools.cached_property
    def forward(self) -> tuple[Program, ...]:
        return (*self.inner.forward, self)

    def run(self, inputs: Tensors, functional: bool) -> list[torch.Tensor]:
        primals, tangents = _split(self, inputs)
        if self.taped and not functional:
            _drop(self, inputs)
        forward_mode = self.leaf.function.findings.forward_mode
        works = forward_mode.get(self, not self.inner.forward)  # dual numbers do not nest
        if functional:
            push = _functional_forward_mode if works else _functional_double_backward
            return push(self, primals, tangents)
        if works:
            with contextlib.suppress(Exception):
                out = _forward_mode(self, primals, tangents)
                forward_mode[self] = True
                return out
        out = _double_backward(self, primals, tangents)
        forward_mode[self] = False
        return out


@cached_weakly
@dataclasses.dataclass(frozen=True, repr=False)
class Vjp(Derived):
    """The cotangents of the inputs `wrt` of `inner`.

    Takes the primals, a token if `taped`, and a cotangent for each output in `of`; gives one for
    each input in `wrt`. With a token, the graph that `Record` has kept is used if it is valid.
    """

    inner: Program
    wrt: Indices
    of: Indices
    taped: bool = False

    @functools.cached_property
    def ins(self) -> tuple[Spec, ...]:
        return self.inner.ins + _tokens(self) + pick(self.inner.outs, self.of)

    @functools.cached_property
    def outs(self) -> tuple[Spec, ...]:
        return pick(self.inner.ins, self.wrt)

    @functools.cached_property
    def linear(self) -> frozenset[int]:
        return frozenset(range(len(self.inner.ins) + self.taped, len(self.ins)))

    @functools.cached_property
    def order(self) -> int:
        return self.inner.order + 1

    @property
    def name(self) -> str:
        return f"vjp({self.inner.name})"

    def broadcast(self, size: int, shared: Indices) -> Program:
        return Vjp(self.inner.broadcast(size, ()), self.wrt, self.of)

    def run(self, inputs: Tensors, functional: bool) -> list[torch.Tensor]:
        primals, cotangents = _split(self, inputs)
        cotangents = [_conj(u) for u in cotangents]
        tape = _taken(self, inputs) if self.taped and not functional else None
        if tape is not None:
            results = _replayed(self, tape, cotangents)
        else:
            pullback = _functional_pullback if functional else _pullback
            results = pullback(self, primals, cotangents)
        return [_conj(r) for r in results]


@functools.cache
def _load_forward_mode() -> None:
    """torch loads rules at the first use, with a deprecated function, and warns of itself."""
    with EXCLUSIVE, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        with forward_ad.dual_level():
            forward_ad.make_dual(torch.zeros(()), torch.zeros(()))


def _tokens(program: Jvp | Vjp) -> tuple[Spec, ...]:
    return (TOKEN,) if program.taped else ()


def _split(program: Jvp | Vjp, inputs: Tensors) -> tuple[Tensors, Tensors]:
    """The primals, and the tangents or cotangents."""
    count = len(program.inner.ins)
    return inputs[:count], inputs[count + program.taped :]


def _taken(program: Jvp | Vjp, inputs: Tensors) -> Tape | None:
    """The recorded graph that the token names, if it is valid."""
    primals, token = inputs[: len(program.inner.ins)], inputs[len(program.inner.ins)]
    if token.device.type != "cpu":  # reading it would wait for the device
        return None
    return TAPES.take(program.inner, int(token), primals, program.wrt)


def _drop(jvp: Jvp, inputs: Tensors) -> None:
    """Forward mode has no use for the graph."""
    tape = _taken(jvp, inputs)
    if tape is not None:
        tape.kept.release()


def _restricted(
    program: Jvp | Vjp, primals: Tensors, functional: bool
) -> Callable[..., tuple[torch.Tensor, ...]]:
    """The inner program as a function of the inputs `wrt` alone, giving the outputs `of`."""

    def restricted(*active: torch.Tensor) -> tuple[torch.Tensor, ...]:
        inputs = replaced(primals, program.wrt, active)
        return pick(program.inner.run(inputs, functional), program.of)

    return restricted


def _forward_mode(jvp: Jvp, primals: Tensors, tangents: Tensors) -> list[torch.Tensor]:
    active = map(leaf_of, pick(primals, jvp.wrt))
    with EXCLUSIVE, _NoGradStopsTangents(), forward_ad.dual_level():
        duals = map(forward_ad.make_dual, active, tangents)
        return list(map(_tangent, _restricted(jvp, primals, functional=False)(*duals)))


class _NoGradStopsTangents(TorchFunctionMode):
    """What is computed under `torch.no_grad` is constant, in forward mode as in reverse mode."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is set_grad_enabled:
            set_forward_grad_enabled(*args)
        return func(*args, **(kwargs or {}))


def _tangent(y: torch.Tensor) -> torch.Tensor:
    tangent = forward_ad.unpack_dual(y).tangent
    if tangent is not None:
        return tangent
    if y.requires_grad:
        raise NotImplementedError("an operator without a forward derivative dropped the tangents")
    return torch.zeros_like(y)


def _double_backward(jvp: Jvp, primals: Tensors, tangents: Tensors) -> list[torch.Tensor]:
    nested = _requires_grad([*primals, *tangents])
    active = [leaf_of(p) for p in pick(primals, jvp.wrt)]
    outputs = _restricted(jvp, primals, functional=False)(*active)
    seeds = [torch.ones_like(y).requires_grad_() for y in outputs]
    pulled = _grad(outputs, active, seeds, create_graph=True)
    _refuse_errors(pulled)
    if not _requires_grad(pulled) and any(map(torch.any, pulled)):
        raise EqxTorchError(_NO_TANGENT.format(name=jvp.leaf.name))
    return _grad(pulled, seeds, tangents, create_graph=nested)


def _functional_forward_mode(jvp: Jvp, primals: Tensors, tangents: Tensors) -> list[torch.Tensor]:
    restricted = _restricted(jvp, primals, functional=True)
    with EXCLUSIVE, _NoGradStopsTangents():
        return list(torch.func.jvp(restricted, pick(primals, jvp.wrt), tuple(tangents))[1])


def _functional_double_backward(
    jvp: Jvp, primals: Tensors, tangents: Tensors
) -> list[torch.Tensor]:
    restricted = _restricted(jvp, primals, functional=True)
    outputs, pullback, *_ = torch.func.vjp(restricted, *pick(primals, jvp.wrt))
    seeds = tuple(map(torch.zeros_like, outputs))
    pushforward = torch.func.vjp(lambda *us: pullback(us), *seeds)[1]
    return list(pushforward(tuple(tangents)))


_NO_TANGENT = (
    "`{name}` cannot be differentiated in forward mode: it has no forward derivative in torch, and "
    "its backward is computed outside of autograd (on detached tensors or by NumPy), so torch "
    "cannot differentiate that instead. Use reverse mode (`jax.grad`, `jax.vjp`, `jax.jacrev`), or "
    "give the `torch.autograd.Function` a `jvp`."
)


def _pullback(vjp: Vjp, primals: Tensors, cotangents: Tensors) -> list[torch.Tensor]:
    nested = _requires_grad([*primals, *cotangents])
    active = [leaf_of(p) for p in pick(primals, vjp.wrt)]
    outputs = _restricted(vjp, primals, functional=False)(*active)
    if vjp.inner.order:
        _refuse_errors(outputs)
    if nested:
        # Only then does torch put in the nodes that `_refuse_errors` looks for.
        cotangents = [u if u.requires_grad else u.detach().requires_grad_() for u in cotangents]
    return _grad(outputs, active, cotangents, create_graph=nested)


def _replayed(vjp: Vjp, tape: Tape, cotangents: Tensors) -> list[torch.Tensor]:
    """The pullback by a recorded graph."""
    edges = pick(tape.outputs, vjp.of)
    pairs = [(edge, u) for edge, u in zip(edges, cotangents, strict=True) if edge is not None]
    inputs = [tape.inputs[i] for i in vjp.wrt]
    try:
        with tape.kept.guard:
            edges, us = zip(*pairs, strict=True) if pairs else ((), ())
            return gradients(edges, inputs, us, create_graph=False)
    finally:
        tape.kept.release()


def _functional_pullback(vjp: Vjp, primals: Tensors, cotangents: Tensors) -> list[torch.Tensor]:
    restricted = _restricted(vjp, primals, functional=True)
    pullback = torch.func.vjp(restricted, *pick(primals, vjp.wrt))[1]
    return list(pullback(tuple(cotangents)))


def leaf_of(x: torch.Tensor) -> torch.Tensor:
    """A new tensor to differentiate by, behind which outer derivatives still see `x`."""
    return x.view_as(x) if x.requires_grad else x.detach().requires_grad_()


def _requires_grad(tensors: Tensors) -> bool:
    return any(t.requires_grad for t in tensors)


def _grad(
    outputs: Tensors, inputs: Tensors, cotangents: Tensors, create_graph: bool
) -> list[torch.Tensor]:
    """`torch.autograd.grad`, with zeros where nothing depends on an input."""
    pairs = [(y, u) for y, u in zip(outputs, cotangents, strict=True) if y.requires_grad]
    ys, us = zip(*pairs, strict=True) if pairs else ((), ())
    return gradients(ys, inputs, us, create_graph)


def gradients(
    outputs: Sequence[Any], inputs: Tensors, cotangents: Tensors, create_graph: bool
) -> list[torch.Tensor]:
    """`torch.autograd.grad` of outputs, or edges of a graph, that all require a gradient."""
    if not outputs:
        return [torch.zeros_like(x) for x in inputs]
    grads = torch.autograd.grad(
        outputs,
        inputs,
        cotangents,
        create_graph=create_graph,
        allow_unused=True,
        materialize_grads=True,
    )
    return list(grads)


def _refuse_errors(outputs: Tensors) -> None:
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
            node(torch.zeros(()))
        pending.extend(behind for behind, _ in node.next_functions)


def _conj(x: torch.Tensor) -> torch.Tensor:
    return x.conj() if x.is_complex() else x
