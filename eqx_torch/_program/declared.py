"""Results in the containers that were declared.

A list and a tuple are one, `tuple[...]` is also what one writes for the named tuples of
`torch.topk` and its like, and a typed dictionary for an `OrderedDict`.
"""

from collections.abc import Mapping
from typing import Any

from .._containers import children, container, is_container
from .._trees import Structure


def as_declared(tree: Any, structure: Structure) -> Any:
    """The tree with containers as its structure was declared, where they are as good."""
    return _like(structure.unflatten(range(structure.num_leaves)), tree)


def _like(declared: Any, value: Any) -> Any:
    kind = type(declared)
    if kind in (tuple, list) and isinstance(value, tuple | list) and len(declared) == len(value):
        return kind(map(_like, declared, value))
    if kind is dict and isinstance(value, Mapping) and declared.keys() == value.keys():
        return {name: _like(declared[name], value[name]) for name in declared}
    if kind is type(value) and is_container(declared):
        names, items = children(declared)
        found, values = children(value)
        if found == names and len(items) == len(values):
            items = list(map(_like, items, values))
            return kind(*items) if hasattr(kind, "_fields") else container(kind, names, items)
    return value
