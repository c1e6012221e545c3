"""Whether autograd sees all of a pullback that is differentiated again.

The backward of a `torch.autograd.Function`, or a hook, may leave autograd: on detached tensors, or
by NumPy. Its derivative would be taken as zero. Where other paths add to the same gradient, the
sum still requires one, so the result does not tell. Three things do:

- A pullback is linear in its cotangents, which require a gradient. So each gradient that leaves a
  node of the graph, or arrives at one from its hooks, requires one too, unless it is zero.
- What leaves autograd in part only is not seen by that. But for the pullback B that is computed
  and the one that autograd sees, A, <B u, t> = <u, A^T t> for random u and t only if A = B. If
  autograd computes anything other than B, by hooks that are not linear, say, this differs as well.
- The map may be zero just where it is evaluated. So where there are backwards of the user's, both
  questions are asked at a point nearby as well, at which nothing is zero by chance.

What neither shows is a backward on saved tensors that have left autograd, since the cotangents
have not. A plain `detach` means a constant, as everywhere in torch, but a NumPy array may be a
detour only: in a backward of the user's it is refused.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from .._errors import EqxTorchError
from .base import Tensors
from .graph import is_users


PRECISE = 1e-4  # the rounding from which on one random direction is not enough

_DETACHING: Any = (torch.Tensor.detach, torch.Tensor.data.__get__)  # pyright: ignore[reportAttributeAccessIssue]
_LEAVING = (torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.__dlpack__)


@contextlib.contextmanager
def refusing_unseen(nodes: Sequence[Any], message: str, by_primals: bool) -> Iterator[None]:
    """Raises where a gradient leaves autograd in a backward through these nodes.

    Args:
        nodes: of the graph; its cotangents have to require gradients.
        message: of the error.
        by_primals: whether the outer derivative is by primals too, not only by cotangents.
    """
    check = functools.partial(_check, message)
    handles = [node.register_hook(check) for node in nodes]
    watched = by_primals and any(map(is_users, nodes))
    try:
        with _Detours(message) if watched else contextlib.nullcontext():
            yield
    finally:
        for handle in handles:
            handle.remove()


def refuse_unseen(gradients: Sequence[torch.Tensor | None], message: str) -> None:
    """Raises where one of these is not zero, and requires no gradient itself."""
    for g in gradients:
        if g is not None and not g.requires_grad and _is_something(g):
            raise EqxTorchError(message)


def is_seen(pulled: Tensors, cotangents: Tensors, back: Tensors, tangents: Tensors) -> bool | None:
    """Whether <B u, t> = <u, A^T t>; None if these are not finite.

    Args:
        pulled: B u, by the pullback.
        cotangents: u.
        back: A^T t, by autograd's derivative of it.
        tangents: t.
    """
    ones, others = _products(pulled, tangents), _products(cotangents, back)
    difference = abs(sum(x.sum() for x in ones) - sum(x.sum() for x in others))
    scale = sum(x.abs().sum() for x in (*ones, *others))
    if not torch.isfinite(torch.as_tensor(scale)):
        return None
    return bool(difference <= rounding((*pulled, *cotangents)) ** 0.6 * scale)


def rounding(tensors: Tensors) -> float:
    """The relative error of the least precise of these."""
    return max(torch.finfo(x.dtype).eps for x in tensors)


def random_like(tensors: Tensors, draw: int = 0) -> list[torch.Tensor]:
    """Normally distributed numbers, without a draw from torch's own generator.

    Those of another `draw` are independent.
    """
    return [_random(x, torch.randn, draw) for x in tensors]


def nearby(x: torch.Tensor) -> torch.Tensor:
    """The same with each number changed a little, away from zero."""
    if not x.is_floating_point() and not x.is_complex():
        return x.detach()
    x = x.detach()
    step = (0.01 + 0.09 * _random(x, torch.rand).abs()).to(x.dtype)
    return torch.where(x == 0, step, x * (1 + step))


def _random(
    x: torch.Tensor, distribution: Callable[..., torch.Tensor], draw: int = 0
) -> torch.Tensor:
    # Of a seed, torch's generator for a CPU takes the lower 32 bits.
    seed = 2**24 * draw + x.numel() % 2**24
    generator = torch.Generator(x.device).manual_seed(seed)
    dtype = torch.complex64 if x.is_complex() else torch.float32
    return distribution(x.shape, generator=generator, device=x.device, dtype=dtype).to(x.dtype)


def _products(xs: Tensors, ys: Tensors) -> list[torch.Tensor]:
    """The terms of the inner product by which torch's pullbacks are adjoints."""
    wide = [(_wide(x), _wide(y)) for x, y in zip(xs, ys, strict=True)]
    return [(x.conj() * y).real if x.is_complex() else x * y for x, y in wide]


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.detach().to(torch.complex128 if x.is_complex() else torch.float64)


def _check(message: str, leaving: Tensors, arriving: Tensors) -> None:
    refuse_unseen((*leaving, *arriving), message)


def _is_something(g: torch.Tensor) -> bool:
    return bool((g if g.layout is torch.strided else g.to_dense()).any())


class _Detours(TorchFunctionMode):
    """Raises where numbers that require a gradient are detached and given to NumPy.

    Within the forward of a `torch.autograd.Function`, which has a backward, they may be; there, and
    there only, gradients are off.
    """

    def __init__(self, message: str) -> None:
        super().__init__()
        self._message = message
        self._detached: dict[int, torch.Tensor] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _LEAVING and id(args[0]) in self._detached and torch.is_grad_enabled():
            raise EqxTorchError(self._message)
        result = func(*args, **(kwargs or {}))
        detached = func in _DETACHING and args[0].requires_grad
        follows = detached or any(id(x) in self._detached for x in args)
        if follows and isinstance(result, torch.Tensor) and torch.is_grad_enabled():
            self._detached[id(result)] = result
        return result
