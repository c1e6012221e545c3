"""Flattening of whatever torch functions take and return.

`flatten` opens what JAX's pytrees leave closed (see `_containers`). It treats each such container
or object as a *foreign* node: JAX flattens the tree with foreign nodes as leaves, and each of them
is flattened in turn. A `Structure` is hashable and compares by value, so it can be static data.

Results have to leave `jax.jit`, where a container that JAX does not know would take tracers with
it. So `Structure.in_jax` makes the classes of foreign containers known to JAX. That must not
change what they flatten to here, so they stay foreign. An object's class cannot be made known, for
which of its attributes are arrays is not clear before they are there: in JAX a `TorchObject`
stands for it, which becomes the object again when torch sees it.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax.tree_util as jtu
import torch

from ._containers import ARRAYS, children, container, is_closed, is_container, make_known


@dataclasses.dataclass(frozen=True, eq=False)
class Static:
    """A Python value beside the arrays; equal only to one of the same type."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Static) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @functools.cached_property
    def _key(self) -> tuple[type, Any]:
        try:
            hash(self.value)
        except TypeError:
            return type(self.value), id(self.value)
        # repr tells 0.0 from -0.0, which compare equal.
        value = repr(self.value) if isinstance(self.value, float | complex) else self.value
        return type(self.value), value


@dataclasses.dataclass(frozen=True)
class _Foreign:
    """How to rebuild one foreign node from its leaves.

    Attributes:
        cls: its class.
        names: of its children, None if they are numbered.
        structure: of the list of its children.
        constants: of an object, for each leaf of `structure` its value, or None if an array; those
            values are no leaves of the node. Of a container, None.
    """

    cls: type
    names: tuple[Any, ...] | None
    structure: "Structure"
    constants: tuple[Static | None, ...] | None = None

    @property
    def num_leaves(self) -> int:
        if self.constants is None:
            return self.structure.num_leaves
        return self.constants.count(None)

    def rebuild(self, leaves: Sequence[Any], in_jax: bool) -> Any:
        if self.constants is None:
            if in_jax:
                make_known(self.cls)
            return container(self.cls, self.names, self.structure.rebuild(leaves, in_jax))
        if in_jax:
            return TorchObject(self, leaves)
        new = object.__new__(self.cls)
        new.__dict__.update(self.attributes(leaves, in_jax))
        return new

    def paths(self) -> list[str]:
        """Where each leaf stands, as one would write it after the name of the node."""
        paths = leaf_paths(self.structure)
        if self.constants is not None:
            pairs = zip(paths, self.constants, strict=True)
            paths = [path for path, constant in pairs if constant is None]
        if self.names is None:
            return paths
        mapping = issubclass(self.cls, Mapping)
        named = []
        for path in paths:
            index, _, rest = path[1:].partition("]")
            name = self.names[int(index)]
            named.append((f"[{name!r}]" if mapping else f".{name}") + rest)
        return named

    def attributes(self, leaves: Sequence[Any], in_jax: bool) -> dict[Any, Any]:
        """Of an object."""
        rest = iter(leaves)
        where = next((x.device for x in leaves if isinstance(x, torch.Tensor)), None)
        values = [
            next(rest) if c is None else _on_device(c.value, where) for c in self.constants or ()
        ]
        items = self.structure.rebuild(values, in_jax)
        return dict(zip(self.names or (), items, strict=True))


@dataclasses.dataclass(frozen=True)
class Structure:
    """A tree without its leaves."""

    treedef: Any
    foreign: tuple[_Foreign | None, ...] | None

    @property
    def num_leaves(self) -> int:
        if self.foreign is None:
            return self.treedef.num_leaves
        return sum(1 if f is None else f.num_leaves for f in self.foreign)

    def unflatten(self, leaves: Iterable[Any]) -> Any:
        """The tree with these leaves, as torch code knows it."""
        return self.rebuild(leaves, in_jax=False)

    def in_jax(self, leaves: Iterable[Any]) -> Any:
        """The tree with these leaves, as a pytree of JAX."""
        return self.rebuild(leaves, in_jax=True)

    def rebuild(self, leaves: Iterable[Any], in_jax: bool) -> Any:
        """Either of the two."""
        if self.foreign is None:
            return jtu.tree_unflatten(self.treedef, leaves)
        rest = iter(leaves)
        nodes = [
            next(rest)
            if f is None
            else f.rebuild([next(rest) for _ in range(f.num_leaves)], in_jax)
            for f in self.foreign
        ]
        return jtu.tree_unflatten(self.treedef, nodes)

    def rest(self, count: int) -> "Structure":
        """Of `(args, kwargs)`, the structure without the first `count` of `args`."""
        args, kwargs = self.treedef.children()
        kept = jtu.treedef_tuple(args.children()[count:])
        treedef = jtu.treedef_tuple((kept, kwargs))
        foreign = self.foreign and self.foreign[self.treedef.num_leaves - treedef.num_leaves :]
        return Structure(treedef, foreign if foreign and any(foreign) else None)

    def leaves_of(self, tree: Any) -> Sequence[Any] | None:
        """The leaves of a tree of this structure, if that is quickly seen; None says nothing."""
        if type(tree) is tuple and len(tree) == self._flat:
            return tree if all(map(_is_tensor, tree)) else None
        leaves: list[Any] = [None] * self.num_leaves
        return leaves if _filled(leaves, self._template, tree) else None

    @functools.cached_property
    def _flat(self) -> int:
        """The length of a tuple of leaves, -1 if the structure is another one."""
        plain = flatten((0,) * self.num_leaves)[1]
        return self.num_leaves if self == plain else -1

    @functools.cached_property
    def _template(self) -> Any:
        return self.unflatten(range(self.num_leaves)) if self.foreign is None else None

    def __str__(self) -> str:
        return str(self.in_jax([_Star()] * self.num_leaves))


def _filled(leaves: list[Any], template: Any, tree: Any) -> bool:
    """Puts the tensors of a tree of builtin containers into the places that a template has."""
    if type(template) is int:
        leaves[template] = tree
        return isinstance(tree, torch.Tensor)
    kind = type(template)
    if type(tree) is not kind:
        return False
    if kind is tuple or kind is list:
        filled = map(_filled, itertools.repeat(leaves), template, tree)
        return len(tree) == len(template) and all(filled)
    if kind is dict:
        return tree.keys() == template.keys() and all(
            _filled(leaves, template[key], tree[key]) for key in template
        )
    return False


def _is_tensor(x: Any) -> bool:
    return isinstance(x, torch.Tensor)


class _Star:
    def __repr__(self) -> str:
        return "*"


class TorchObject:
    """In JAX, an object of torch code that holds tensors, such as a cache of attention keys.

    It is a PyTree of the arrays, shows the object's attributes, and becomes an object of the same
    class when it is passed to a torch function. It has none of the object's methods.
    """

    def __init__(self, foreign: Any, leaves: Iterable[Any]) -> None:
        self._foreign = foreign
        self._leaves = tuple(leaves)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("_foreign", "_leaves"):
            raise AttributeError(name)
        attributes = self._foreign.attributes(self._leaves, in_jax=True)
        if name not in attributes:
            raise AttributeError(
                f"this stands for a `{self._foreign.cls.__name__}` of torch code and has its "
                f"attributes {', '.join(map(str, attributes))}, but not `{name}`. It has no "
                "methods: those can be called inside of a torch function that it is passed to."
            )
        return attributes[name]

    def __repr__(self) -> str:
        return f"TorchObject({self._foreign.cls.__name__}, {len(self._leaves)} arrays)"


class _PathKey(str):
    """A key of JAX's paths that is written as it is."""


jtu.register_pytree_with_keys(
    TorchObject,
    lambda x: (tuple(zip(map(_PathKey, x._foreign.paths()), x._leaves, strict=True)), x._foreign),
    lambda foreign, leaves: TorchObject(foreign, list(leaves)),
    lambda x: (x._leaves, x._foreign),
)


def flatten(tree: Any) -> tuple[list[Any], Structure]:
    """The leaves of a tree, and its structure."""
    nodes, treedef = jtu.tree_flatten(tree, is_leaf=_is_foreign)
    if not any(map(_is_foreign, nodes)):
        return nodes, Structure(treedef, None)
    leaves: list[Any] = []
    foreign: list[_Foreign | None] = []
    for node in nodes:
        if _is_foreign(node):
            own, kind = _opened(node)
            leaves.extend(own)
            foreign.append(kind)
        else:
            leaves.append(node)
            foreign.append(None)
    return leaves, Structure(treedef, tuple(foreign))


def map_leaves(fn: Callable[[Any], Any], tree: Any) -> Any:
    """Applies `fn` to each leaf of a tree."""
    leaves, structure = flatten(tree)
    return structure.unflatten(map(fn, leaves))


def leaf_paths(structure: Structure) -> list[str]:
    """Where each leaf stands, as one would write it after the name of the tree."""
    nodes = range(structure.treedef.num_leaves)
    tree = jtu.tree_unflatten(structure.treedef, nodes)
    paths = [jtu.keystr(path) for path, _ in jtu.tree_flatten_with_path(tree)[0]]
    if structure.foreign is None:
        return paths
    out: list[str] = []
    for path, foreign in zip(paths, structure.foreign, strict=True):
        inner = [""] if foreign is None else foreign.paths()
        out.extend(path + rest for rest in inner)
    return out


def _is_foreign(x: Any) -> bool:
    return isinstance(x, TorchObject) or is_closed(x)


def _opened(node: Any) -> tuple[list[Any], _Foreign]:
    """The leaves of a foreign node, and how to rebuild it."""
    if isinstance(node, TorchObject):
        return list(node._leaves), node._foreign
    names, items = children(node)
    leaves, structure = flatten(items)
    if is_container(node):
        return leaves, _Foreign(type(node), names, structure)
    constants = tuple(None if isinstance(x, ARRAYS) else _constant(x) for x in leaves)
    arrays = [x for x in leaves if isinstance(x, ARRAYS)]
    return arrays, _Foreign(type(node), names, structure, constants)


def _constant(value: Any) -> Static:
    """Objects that differ only in the device of their tensors have the same structure."""
    return Static(torch.device(value.type) if isinstance(value, torch.device) else value)


def _on_device(constant: Any, device: torch.device | None) -> Any:
    return device if device is not None and isinstance(constant, torch.device) else constant
