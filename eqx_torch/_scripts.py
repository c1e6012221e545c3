"""TorchScript modules, which run in an interpreter of torch's own."""

import contextlib
from typing import Any

import torch

from ._reachable import reachable


_OF_NUMBERS = ("aten::tensor(", "aten::as_tensor(")


def scripts_near(root: Any) -> tuple[torch.jit.ScriptModule, ...]:
    """The scripted or traced modules among the objects near a function or a module."""
    return tuple(x for x in reachable(root) if isinstance(x, torch.jit.ScriptModule))


def makes_tensors_of_numbers(module: torch.jit.ScriptModule) -> bool:
    """Whether its forward calls `torch.tensor` or `torch.as_tensor`."""
    graph = ""
    with contextlib.suppress(Exception):  # one without a forward has no graph
        graph = str(module.inlined_graph)
    return any(operator in graph for operator in _OF_NUMBERS)
