"""Forward mode: the tangents of a program's outputs, computed by torch.

Dual numbers are used or, where an operator or an `autograd.Function` has no forward derivative, the
pullback is differentiated, which is linear in its cotangent u:

    d/du <J^T u, t> = J t          (the "double backward trick", J. Townsend, 2017)

Where a forward derivative is missing, torch does not always say so: custom operators, and some of
its own, drop the tangents of inputs that need no gradient. So dual numbers are made of tensors
that do need one, and the results must have a tangent wherever they have a gradient. That cannot be
asked of `torch.func.jvp`, so a program is batched only after one member of the batch was run
without it.
"""

import functools
import warnings
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode

from .._compat import set_forward_grad_enabled, set_grad_enabled
from .._errors import EqxTorchError
from .base import Derivative, pick, Program, Tensors
from .exclusive import EXCLUSIVE, settle
from .graph import is_users, nodes_behind
from .reverse import (
    gradients,
    is_seen_by_draws,
    leaf_of,
    refuse_errors,
    refuse_unseen_nearby,
    requires_gradient,
    restricted,
)
from .seen import (
    is_seen,
    nearby,
    PRECISE,
    random_like,
    refuse_unseen,
    refusing_unseen,
    rounding,
)


_NO_TANGENT = (
    "`{name}` cannot be differentiated in forward mode: it has no forward derivative in torch, and "
    "its backward is computed outside of autograd (on detached tensors or by NumPy), so torch "
    "cannot differentiate that instead. Use reverse mode (`jax.grad`, `jax.vjp`, `jax.jacrev`), or "
    "give the `torch.autograd.Function` a `jvp`."
)


def dual_numbers(jvp: Derivative, primals: Tensors, tangents: Tensors) -> list[torch.Tensor]:
    """The tangents, by dual numbers."""
    pushed, roots = _pushed(jvp, primals, tangents)
    if requires_gradient(primals) and any(map(is_users, nodes_behind(roots))):
        _refuse_unseen_tangents(jvp, primals)
    return pushed


def double_backward(jvp: Derivative, primals: Tensors, tangents: Tensors) -> list[torch.Tensor]:
    """The tangents, by the derivative of the pullback."""
    by_primals = requires_gradient(primals)
    message = _NO_TANGENT.format(name=jvp.leaf.name)
    active = [leaf_of(p) for p in pick(primals, jvp.wrt)]
    outputs = restricted(jvp, primals, functional=False)(*active)
    nodes = nodes_behind(y.grad_fn for y in outputs)
    seeds = [u.requires_grad_() for u in random_like(outputs)]
    with refusing_unseen(nodes, message, by_primals):
        pulled = gradients(outputs, active, seeds, create_graph=True)
    refuse_errors(nodes_behind(x.grad_fn for x in pulled))
    refuse_unseen(pulled, message)
    if rounding((*pulled, *seeds)) > PRECISE and is_seen_by_draws(pulled, seeds) is False:
        raise EqxTorchError(message)
    pushed = gradients(
        pulled, seeds, tangents, create_graph=by_primals or requires_gradient(tangents)
    )
    if is_seen(pulled, seeds, pushed, tangents) is False:
        raise EqxTorchError(message)
    if by_primals and any(map(is_users, nodes)):
        refuse_unseen_nearby(jvp, primals, message)
    return pushed


def functional_dual_numbers(
    jvp: Derivative, primals: Tensors, tangents: Tensors
) -> list[torch.Tensor]:
    """The tangents, by `torch.func.jvp`."""
    forward = restricted(jvp, primals, functional=True)
    settle(primals[0].device)
    with EXCLUSIVE, _AsInReverseMode(jvp.inner):
        return list(torch.func.jvp(forward, pick(primals, jvp.wrt), tuple(tangents))[1])


def functional_double_backward(
    jvp: Derivative, primals: Tensors, tangents: Tensors
) -> list[torch.Tensor]:
    """The tangents, by the derivative of the pullback of `torch.func`."""
    forward = restricted(jvp, primals, functional=True)
    outputs, pull, *_ = torch.func.vjp(forward, *pick(primals, jvp.wrt))
    seeds = tuple(map(torch.zeros_like, outputs))
    push = torch.func.vjp(lambda *us: pull(us), *seeds)[1]
    return list(push(tuple(tangents)))


@functools.cache
def load_forward_mode() -> None:
    """torch loads rules at the first use, with a deprecated function, and warns of itself."""
    with EXCLUSIVE, warnings.catch_warnings():
        for category in (DeprecationWarning, FutureWarning):
            warnings.simplefilter("ignore", category)
        with forward_ad.dual_level():
            forward_ad.make_dual(torch.zeros(()), torch.zeros(()))


class _AsInReverseMode(TorchFunctionMode):
    """What is computed under `torch.no_grad` is constant, in forward mode as in reverse mode.

    Hooks on gradients do nothing to tangents of a forward, so that there the double backward trick
    has to be used. A pullback has applied them by then.
    """

    def __init__(self, program: Program) -> None:
        super().__init__()
        self._of_forward = not program.order

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is set_grad_enabled:
            set_forward_grad_enabled(*args)
        elif func is torch.Tensor.register_hook and self._of_forward:
            raise RuntimeError("a hook on a gradient has no counterpart in forward mode")
        return func(*args, **(kwargs or {}))


def _pushed(
    jvp: Derivative, primals: Tensors, tangents: Tensors
) -> tuple[list[torch.Tensor], list[Any]]:
    """The tangents by dual numbers, and where the graphs of the results begin."""
    active = map(leaf_of, pick(primals, jvp.wrt))
    settle(primals[0].device)
    with EXCLUSIVE, _AsInReverseMode(jvp.inner), forward_ad.dual_level():
        duals = map(forward_ad.make_dual, active, tangents)
        results = restricted(jvp, primals, functional=False)(*duals)
        return list(map(_tangent, results)), [y.grad_fn for y in results]


def _refuse_unseen_tangents(jvp: Derivative, primals: Tensors) -> None:
    """Raises where the `jvp` of a `torch.autograd.Function` lies outside of autograd.

    The tangents are then computed by the derivative of the pullback instead.
    """
    point = [nearby(p) for p in primals]
    tangents = [t.requires_grad_() for t in random_like(pick(point, jvp.wrt))]
    try:
        pushed, _ = _pushed(jvp, point, tangents)
        cotangents = random_like(pushed, 1)
        back = gradients(pushed, tangents, cotangents, create_graph=False)
    except Exception:
        return  # whoever differentiates will have the error
    if is_seen(pushed, tangents, back, cotangents) is False:
        raise NotImplementedError("the tangents cannot be differentiated")


def _tangent(y: torch.Tensor) -> torch.Tensor:
    tangent = forward_ad.unpack_dual(y).tangent
    if tangent is not None:
        return tangent
    if y.requires_grad:
        raise NotImplementedError("an operator without a forward derivative dropped the tangents")
    return torch.zeros_like(y)
