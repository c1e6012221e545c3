"""The nodes of an autograd graph."""

from collections.abc import Iterable
from typing import Any

from torch.autograd.function import BackwardCFunction


def nodes_behind(roots: Iterable[Any]) -> list[Any]:
    """The nodes that can be reached from these, which may be None."""
    seen: dict[Any, None] = {}
    pending = list(roots)
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen[node] = None
        pending.extend(behind for behind, _ in node.next_functions)
    return list(seen)


def is_users(node: Any) -> bool:
    """Whether the backward is Python's: that of a `torch.autograd.Function`."""
    return isinstance(node, BackwardCFunction)
