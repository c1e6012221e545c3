"""The nodes of an autograd graph, and the gradients that leave the user's part of it.

Some of these are sparse, those of `Embedding(sparse=True)` for one. JAX has dense arrays, and few
of torch's operators have a backward that takes anything else.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction


def nodes_behind(roots: Iterable[Any]) -> list[Any]:
    """The nodes that can be reached from these, which may be None."""
    nodes = list(dict.fromkeys(root for root in roots if root is not None))
    seen = set(nodes)
    for node in nodes:  # which grows
        for behind, _ in node.next_functions:
            if behind is not None and behind not in seen:
                seen.add(behind)
                nodes.append(behind)
    return nodes


def is_users(node: Any) -> bool:
    """Whether the backward is Python's: that of a `torch.autograd.Function`."""
    return isinstance(node, BackwardCFunction) and not isinstance(node, _OWN)


def is_error(node: Any) -> bool:
    """Whether it raises what torch has to say where there is no derivative."""
    return node.name() == "torch::autograd::Error"


def dense(gradient: torch.Tensor) -> torch.Tensor:
    """The same gradient, as JAX has it."""
    return gradient if gradient.layout is torch.strided else gradient.to_dense()


class _DenseGradient(torch.autograd.Function):
    """The identity. Hooks of torch's cannot change a layout."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        del ctx
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        del ctx
        return dense(*gradients)

    @staticmethod
    def jvp(ctx: Any, *tangents: torch.Tensor) -> torch.Tensor:
        del ctx
        return tangents[0].view_as(tangents[0])


_OWN: Any = _DenseGradient._backward_cls  # pyright: ignore[reportAttributeAccessIssue]


def with_dense_gradient(x: torch.Tensor) -> torch.Tensor:
    """The same tensor, by which the gradient is dense for what comes before."""
    return _DenseGradient.apply(x)  # pyright: ignore[reportReturnType]
