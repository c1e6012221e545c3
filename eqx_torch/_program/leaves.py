"""Functions that rely on inputs that require gradients, whoever calls them.

A forward that differentiates by its own parameters (the inner loop of MAML) or registers hooks on
what it has computed finds, in torch, that parameters require gradients. Here inputs do only while a
derivative is taken. So where torch says that this is missing, the function is run again on leaves
that require them, and from then on at once.
"""

from collections.abc import Callable
from typing import Any

import torch

from .base import Tensors
from .function import TorchFunction


_MISSING = (
    "does not require grad",
    "doesn't require gradient",
    "has requires_grad=False",
)


def ask_for_gradients(function: TorchFunction, error: Exception) -> bool:
    """Whether to run a function again after this error, now with what `on_leaves` makes."""
    findings = function.findings
    if findings.needs_gradients or not any(message in str(error) for message in _MISSING):
        return False
    findings.needs_gradients = True
    return True


def on_leaves(function: TorchFunction, tensors: Tensors) -> Tensors:
    """The inputs of a function as it has to be given them."""
    if not function.findings.needs_gradients:
        return tensors
    return [
        x.detach().requires_grad_() if not x.requires_grad and _may(function, i, x) else x
        for i, x in enumerate(tensors)
    ]


def retrying(
    function: TorchFunction, call: Callable[[Tensors, bool], Any]
) -> Callable[[Tensors, bool], Any]:
    """A function of a call's arrays that asks for gradients where it needs them."""

    def run(tensors: Tensors, functional: bool) -> Any:
        try:
            return call(on_leaves(function, tensors), functional)
        except RuntimeError as error:
            if not ask_for_gradients(function, error):
                raise
        return call(on_leaves(function, tensors), functional)

    return run


def _may(function: TorchFunction, i: int, x: torch.Tensor) -> bool:
    return (x.is_floating_point() or x.is_complex()) and function.may_require_gradient(i)
