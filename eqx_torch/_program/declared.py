"""Results in plain containers where plain ones were declared.

`tuple[...]` is what one writes for the named tuples of `torch.topk` and its like, and a typed
dictionary for an `OrderedDict`.
"""

from collections.abc import Mapping
from typing import Any

from .._trees import Structure


def as_declared(tree: Any, structure: Structure) -> Any:
    """The tree with plain containers where its structure was declared by plain ones."""
    return _like(structure.unflatten(range(structure.num_leaves)), tree)


def _like(declared: Any, value: Any) -> Any:
    if isinstance(declared, tuple) and isinstance(value, tuple) and len(declared) == len(value):
        items = tuple(map(_like, declared, value))
        named = hasattr(declared, "_fields") and type(declared) is type(value)
        return type(declared)(*items) if named else items if type(declared) is tuple else value
    if type(declared) is list and type(value) is list and len(declared) == len(value):
        return list(map(_like, declared, value))
    if type(declared) is dict and isinstance(value, Mapping) and declared.keys() == value.keys():
        return {name: _like(declared[name], value[name]) for name in declared}
    return value
