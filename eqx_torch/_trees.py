"""Flattening of whatever torch functions take and return.

JAX's pytrees leave some containers closed that torch code uses: dataclasses, mappings such as
Hugging Face's `ModelOutput`, and `torch.return_types`. `flatten` opens those too. It treats each
as a *foreign* node: JAX flattens the tree with foreign nodes as leaves, and each of them is
flattened in turn. A `Structure` is hashable and compares by value, so it can be static data.

What `torch.sort` and its like return is rebuilt as a namedtuple of the same fields, which JAX can
return from `jax.jit`.
"""

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.tree_util as jtu
import torch


_LEAVES = (torch.Tensor, jax.Array, type)


@dataclasses.dataclass(frozen=True)
class _Foreign:
    """How to rebuild one foreign container from its children."""

    cls: type
    names: tuple[Any, ...] | None
    structure: "Structure"

    def rebuild(self, children: Sequence[Any]) -> Any:
        if self.names is None:
            return _maker(self.cls)(children)
        items = dict(zip(self.names, children, strict=True))
        if not dataclasses.is_dataclass(self.cls):
            return self.cls(items)
        if issubclass(self.cls, Mapping):
            return self.cls(**items)
        # Validation in `__init__` belongs to the user's own values, not to tracers or structs.
        new = object.__new__(self.cls)
        for name, value in items.items():
            object.__setattr__(new, name, value)
        return new


@dataclasses.dataclass(frozen=True)
class Structure:
    """A tree without its leaves."""

    treedef: Any
    foreign: tuple[_Foreign | None, ...] | None

    @property
    def num_leaves(self) -> int:
        if self.foreign is None:
            return self.treedef.num_leaves
        return sum(1 if f is None else f.structure.num_leaves for f in self.foreign)

    def unflatten(self, leaves: Iterable[Any]) -> Any:
        """The tree with these leaves."""
        if self.foreign is None:
            return jtu.tree_unflatten(self.treedef, leaves)
        rest = iter(leaves)
        nodes = [next(rest) if f is None else _rebuilt(f, rest) for f in self.foreign]
        return jtu.tree_unflatten(self.treedef, nodes)

    def __str__(self) -> str:
        return str(self.unflatten([_Star()] * self.num_leaves))


@functools.cache
def _maker(cls: type) -> Callable[[Sequence[Any]], Any]:
    """What makes a tuple of type `cls`, or of the namedtuple that stands for it."""
    if cls.__module__ != "torch.return_types":
        return cls
    return collections.namedtuple(cls.__name__, cls.__match_args__)._make


class _Star:
    def __repr__(self) -> str:
        return "*"


def flatten(tree: Any) -> tuple[list[Any], Structure]:
    """The leaves of a tree, and its structure."""
    nodes, treedef = jtu.tree_flatten(tree, is_leaf=_is_foreign)
    if not any(map(_is_foreign, nodes)):
        return nodes, Structure(treedef, None)
    leaves: list[Any] = []
    foreign: list[_Foreign | None] = []
    for node in nodes:
        if not _is_foreign(node):
            leaves.append(node)
            foreign.append(None)
            continue
        names, children = _open(node)
        child_leaves, structure = flatten(children)
        leaves.extend(child_leaves)
        foreign.append(_Foreign(type(node), names, structure))
    return leaves, Structure(treedef, tuple(foreign))


def map_leaves(fn: Callable[[Any], Any], tree: Any) -> Any:
    """Applies `fn` to each leaf of a tree."""
    leaves, structure = flatten(tree)
    return structure.unflatten(map(fn, leaves))


def as_declared(tree: Any, structure: Structure) -> Any:
    """The tree with plain containers where its structure was declared by plain ones.

    `tuple[...]` is what one writes for the named tuples of `torch.topk` and its like, and a typed
    dictionary for an `OrderedDict`.
    """
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


def leaf_paths(structure: Structure) -> list[str]:
    """Where each leaf stands, as one would write it after the name of the tree."""
    nodes = range(structure.treedef.num_leaves)
    tree = jtu.tree_unflatten(structure.treedef, nodes)
    paths = [jtu.keystr(path) for path, _ in jtu.tree_flatten_with_path(tree)[0]]
    if structure.foreign is None:
        return paths
    out: list[str] = []
    for path, foreign in zip(paths, structure.foreign, strict=True):
        out.extend([path] if foreign is None else _foreign_paths(path, foreign))
    return out


def _foreign_paths(path: str, foreign: _Foreign) -> list[str]:
    mapping = issubclass(foreign.cls, Mapping)
    names = foreign.names
    paths = []
    for inner in leaf_paths(foreign.structure):
        if names is not None:
            index, _, rest = inner[1:].partition("]")
            name = names[int(index)]
            inner = (f"[{name!r}]" if mapping else f".{name}") + rest
        paths.append(path + inner)
    return paths


def _rebuilt(foreign: _Foreign, leaves: Any) -> Any:
    own = [next(leaves) for _ in range(foreign.structure.num_leaves)]
    return foreign.rebuild(foreign.structure.unflatten(own))


def _is_foreign(x: Any) -> bool:
    if x is None or isinstance(x, _LEAVES):
        return False
    container = dataclasses.is_dataclass(x) or isinstance(x, Mapping | tuple | list)
    return container and jtu.all_leaves([x])


def _open(node: Any) -> tuple[tuple[Any, ...] | None, list[Any]]:
    if isinstance(node, Mapping):
        return tuple(node.keys()), list(node.values())
    if dataclasses.is_dataclass(node):
        present = [f.name for f in dataclasses.fields(node) if hasattr(node, f.name)]
        return tuple(present), [getattr(node, name) for name in present]
    return None, list(node)
