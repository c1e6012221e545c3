"""Flattening of whatever torch functions take and return.

`flatten` opens what JAX's pytrees leave closed (see `_containers`). It treats each such container
or object as a *foreign* node: JAX flattens the tree with foreign nodes as leaves, and each of them
is flattened in turn. A `Structure` is hashable and compares by value, so it can be static data.

A dict is foreign where JAX would lose something of it: JAX sorts by key, and takes the keys 1 and
True for equal. torch sees the user's order and keys; the leaves are in JAX's order nonetheless. In
what a function returns, strings and other constants are foreign nodes without leaves.

Results have to leave `jax.jit`, where a container that JAX does not know would take tracers with
it. So `Structure.in_jax` makes foreign containers of classes that JAX knows. They stay foreign
here. An object's class cannot be made known, for which of its attributes are arrays is not clear
before they are there: in JAX a `TorchObject` stands for it, which becomes the object again when
torch sees it.
"""

import collections
import dataclasses
import enum
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import jax
import jax.tree_util as jtu
import numpy as np
import torch

from ._compat import weakly_typed
from ._containers import ARRAYS, children, container, in_jax, is_closed, is_container, own_class
from ._statics import Static


View: TypeAlias = Literal["torch", "jax", "places"]
"""A tree as torch code knows it, as a pytree of JAX, or as one whose leaves are those of the
structure and nothing else, for trees that JAX is to match with it."""

NUMBERS = (bool, int, float, complex)
_CONSTANTS = (
    str,
    bytes,
    enum.Enum,
    range,
    type(...),
    np.dtype,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    torch.Size,
)
_STRINGS = {str}
_DICTS = (dict, collections.OrderedDict, collections.defaultdict)


@dataclasses.dataclass(frozen=True)
class _Foreign:
    """How to rebuild one foreign node from its leaves.

    Attributes:
        cls: its class.
        keys: the names of its children, None if they are numbered.
        structure: of the list of its children.
        constants: of an object, for each leaf of `structure` its value, or None if an array; those
            values are no leaves of the node. Of a container, None.
    """

    cls: type
    keys: Static
    structure: "Structure"
    constants: tuple[Static | None, ...] | None = None

    @property
    def names(self) -> tuple[Any, ...] | None:
        return self.keys.value

    @functools.cached_property
    def num_leaves(self) -> int:
        if self.constants is None:
            return self.structure.num_leaves
        return self.constants.count(None)

    def rebuild(self, leaves: Sequence[Any], view: View) -> Any:
        if self.constants is None:
            make = container if view == "torch" else in_jax
            return make(self.cls, self.names, self.structure.rebuild(leaves, view))
        if view == "places":
            return TorchObject(self, leaves)
        new = object.__new__(self.cls)
        new.__dict__.update(self.attributes(leaves, view))
        # It is itself in JAX too if its author has made its class known there.
        return TorchObject(self, leaves) if view == "jax" and jtu.all_leaves([new]) else new

    def parts_of(self, node: Any) -> list[Any] | None:
        """The leaves of a node of torch code that can be rebuilt so."""
        if type(node) is not self.cls:
            return None
        names, items = children(node)
        leaves = self.structure.parts_of(items) if names == self.names else None
        if leaves is None or self.constants is None:
            return leaves
        pairs = [(x, c) for x, c in zip(leaves, self.constants, strict=True)]
        if any(c is not None and _constant(x) != c for x, c in pairs):
            return None
        return [x for x, c in pairs if c is None]

    def paths(self) -> list[str]:
        """Where each leaf stands, as one would write it after the name of the node."""
        paths = leaf_paths(self.structure)
        if self.constants is not None:
            pairs = zip(paths, self.constants, strict=True)
            paths = [path for path, constant in pairs if constant is None]
        if self.names is None:
            return paths
        return _named_paths(paths, self.names, issubclass(self.cls, Mapping))

    def attributes(self, leaves: Sequence[Any], view: View) -> dict[Any, Any]:
        """Of an object."""
        rest = iter(leaves)
        where = next((x.device for x in leaves if isinstance(x, torch.Tensor)), None)
        values = [
            next(rest) if c is None else _on_device(c.value, where) for c in self.constants or ()
        ]
        items = self.structure.rebuild(values, view)
        return dict(zip(self.names or (), items, strict=True))


@dataclasses.dataclass(frozen=True)
class _Dict:
    """A dictionary whose order or keys JAX would not keep.

    Attributes:
        names: its keys, in JAX's order, which that of the leaves is.
        order: the positions in `names` of the keys as the dictionary has them.
        structure: of the list of its values, in JAX's order.
        make: what makes a dictionary of pairs.
    """

    names: tuple[Static, ...]
    order: tuple[int, ...]
    structure: "Structure"
    make: Static

    @functools.cached_property
    def num_leaves(self) -> int:
        return self.structure.num_leaves

    def rebuild(self, leaves: Sequence[Any], view: View) -> Any:
        items = self.structure.rebuild(leaves, view)
        order = range(len(items)) if view == "places" else self.order
        return self.make.value((self.names[i].value, items[i]) for i in order)

    def parts_of(self, node: Any) -> list[Any] | None:
        if type(node) not in _DICTS or len(node) != len(self.names):
            return None
        try:
            return self.structure.parts_of([node[name.value] for name in self.names])
        except KeyError:
            return None

    def paths(self) -> list[str]:
        return _named_paths(leaf_paths(self.structure), [n.value for n in self.names], True)


@dataclasses.dataclass(frozen=True)
class _Constant:
    """A constant in what a function returns."""

    value: Static

    @property
    def num_leaves(self) -> int:
        return 0

    def rebuild(self, leaves: Sequence[Any], view: View) -> Any:
        del leaves
        return None if view == "places" else self.value.value

    def parts_of(self, node: Any) -> list[Any] | None:
        return [] if not _is_tensor(node) and _constant(node) == self.value else None

    def paths(self) -> list[str]:
        return []


_Node: TypeAlias = _Foreign | _Dict | _Constant


@dataclasses.dataclass(frozen=True)
class Structure:
    """A tree without its leaves.

    Attributes:
        treedef: of the tree with foreign nodes as leaves.
        foreign: for each leaf of `treedef` the foreign node, or None if it is one of the leaves;
            None if there is no foreign node.
        numbers: which leaves of a result were Python numbers.
    """

    treedef: Any
    foreign: tuple[_Node | None, ...] | None
    numbers: tuple[int, ...] = dataclasses.field(default=(), compare=False)

    @property
    def num_leaves(self) -> int:
        if self.foreign is None:
            return self.treedef.num_leaves
        return sum(1 if f is None else f.num_leaves for f in self.foreign)

    def unflatten(self, leaves: Iterable[Any]) -> Any:
        """The tree with these leaves, as torch code knows it."""
        return self.rebuild(leaves, "torch")

    def in_jax(self, leaves: Iterable[Any]) -> Any:
        """The tree with these leaves, as a pytree of JAX; arrays as JAX makes them of numbers."""
        leaves = list(leaves)
        for i in self.numbers:
            leaves[i] = _as_number(leaves[i])
        return self.rebuild(leaves, "jax")

    def places(self) -> Any:
        """As a pytree of JAX whose leaves are the positions of the leaves, and nothing else."""
        return self.rebuild(range(self.num_leaves), "places")

    @functools.cached_property
    def unordered(self) -> "Structure":
        """Equal for structures that differ in the order of dictionaries only."""
        return self if self.foreign is None else flatten(self.places())[1]

    def rebuild(self, leaves: Iterable[Any], view: View) -> Any:
        """Any of these."""
        if self.foreign is None:
            return jtu.tree_unflatten(self.treedef, leaves)
        rest = iter(leaves)
        nodes = [
            next(rest) if f is None else f.rebuild(list(itertools.islice(rest, f.num_leaves)), view)
            for f in self.foreign
        ]
        return jtu.tree_unflatten(self.treedef, nodes)

    def leaves_of(self, tree: Any) -> Sequence[Any] | None:
        """The leaves of a tree of torch code, None if it is not of this structure."""
        if type(tree) is tuple and len(tree) == self._flat and all(map(_is_tensor, tree)):
            return tree
        leaves = self.parts_of(tree)
        return leaves if leaves is not None and all(map(_is_taken, leaves)) else None

    def parts_of(self, tree: Any) -> list[Any] | None:
        """The same, whatever the leaves are."""
        try:
            nodes = self.treedef.flatten_up_to(tree)
        except ValueError:
            return None
        if self.foreign is None:
            return nodes
        leaves: list[Any] = []
        for node, foreign in zip(nodes, self.foreign, strict=True):
            found = [node] if foreign is None else foreign.parts_of(node)
            if found is None:
                return None
            leaves += found
        return leaves

    @functools.cached_property
    def _flat(self) -> int:
        """The length of a tuple of leaves, -1 if the structure is another one."""
        plain = flatten((0,) * self.num_leaves)[1]
        return self.num_leaves if self == plain else -1

    def __str__(self) -> str:
        return str(self.rebuild([STAR] * self.num_leaves, "jax"))


def _is_tensor(x: Any) -> bool:
    return isinstance(x, torch.Tensor)


def _is_taken(x: Any) -> bool:
    return isinstance(x, torch.Tensor) or type(x) in NUMBERS


class _Star:
    def __repr__(self) -> str:
        return "*"


STAR = _Star()


def _as_number(x: Any) -> Any:
    """What JAX makes of a Python number of this value, which has no tangent."""
    if not isinstance(x, jax.Array):
        return x
    constant = jax.lax.stop_gradient(x)
    return constant if constant.dtype == bool else weakly_typed(constant)


def _named_paths(paths: Sequence[str], names: Sequence[Any], mapping: bool) -> list[str]:
    named = []
    for path in paths:
        index, _, rest = path[1:].partition("]")
        name = names[int(index)]
        named.append((f"[{name!r}]" if mapping else f".{name}") + rest)
    return named


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
        attributes = self._foreign.attributes(self._leaves, "jax")
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
    return _flattened(tree, _is_foreign)


def flatten_result(tree: Any) -> tuple[list[Any], Structure]:
    """The same of what a function returns, where constants are part of the structure."""
    leaves, structure = _flattened(tree, _is_foreign_in_result)
    numbers = tuple(i for i, x in enumerate(leaves) if type(x) in NUMBERS)
    return leaves, dataclasses.replace(structure, numbers=numbers) if numbers else structure


def _flattened(tree: Any, is_foreign: Callable[[Any], bool]) -> tuple[list[Any], Structure]:
    found: list[Any] = []

    def closes(node: Any) -> bool:
        closed = is_foreign(node)
        if closed:
            found.append(node)
        return closed

    nodes, treedef = jtu.tree_flatten(tree, is_leaf=closes)
    if not found:
        return nodes, Structure(treedef, None)
    leaves: list[Any] = []
    foreign: list[_Node | None] = []
    rest = iter(found)
    following = next(rest)
    for node in nodes:
        if node is following:
            own, kind = _opened(node, is_foreign)
            leaves.extend(own)
            foreign.append(kind)
            following = next(rest, _NOTHING)
        else:
            leaves.append(node)
            foreign.append(None)
    return leaves, Structure(treedef, tuple(foreign))


_NOTHING = object()


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


def constants(structure: Structure) -> list[tuple[str, Any]]:
    """Where each leaf and each constant of a result stands; a leaf is `STAR`."""
    tree = structure.rebuild([STAR] * structure.num_leaves, "jax")
    return [(jtu.keystr(path), x) for path, x in jtu.tree_flatten_with_path(tree)[0]]


def _is_foreign(x: Any) -> bool:
    kind = type(x)
    if kind in _DICTS:
        return _is_altered(x)
    return kind is TorchObject or is_closed(x)


def _is_foreign_in_result(x: Any) -> bool:
    return isinstance(x, _CONSTANTS) or _is_foreign(x)


def _is_altered(x: Any) -> bool:
    """Whether JAX would not keep the order or the types of the keys of a dictionary."""
    if not x:
        return False
    keys = list(x)
    if set(map(type, keys)) != _STRINGS:
        return _sorted(keys) is not None
    return len(keys) > 1 and type(x) is not collections.OrderedDict and sorted(keys) != keys


def _sorted(keys: list[Any]) -> list[Any] | None:
    """In JAX's order; None where there is none, as JAX says itself."""
    try:
        return sorted(keys)
    except TypeError:
        return None


def _opened(node: Any, is_foreign: Callable[[Any], bool]) -> tuple[list[Any], _Node]:
    """The leaves of a foreign node, and how to rebuild it."""
    if isinstance(node, TorchObject):
        return list(node._leaves), node._foreign
    if type(node) in _DICTS:
        return _opened_dict(node, is_foreign)
    if is_foreign is _is_foreign_in_result and isinstance(node, _CONSTANTS):
        return [], _Constant(_constant(node))
    names, items = children(node)
    if is_container(node):
        leaves, structure = _flattened(items, is_foreign)
        return leaves, _Foreign(own_class(type(node)), Static(names), structure)
    leaves, structure = flatten(items)
    constants = tuple(None if isinstance(x, ARRAYS) else _constant(x) for x in leaves)
    arrays = [x for x in leaves if isinstance(x, ARRAYS)]
    return arrays, _Foreign(type(node), Static(names), structure, constants)


def _opened_dict(node: Any, is_foreign: Callable[[Any], bool]) -> tuple[list[Any], _Dict]:
    keys, kind = list(node), type(node)
    names = keys if kind is collections.OrderedDict else sorted(keys)
    place = {name: i for i, name in enumerate(names)}
    leaves, structure = _flattened([node[name] for name in names], is_foreign)
    factory = node.default_factory if kind is collections.defaultdict else None
    make = kind if factory is None else functools.partial(kind, factory)
    order = tuple(place[key] for key in keys)
    return leaves, _Dict(tuple(map(Static, names)), order, structure, Static(make))


def _constant(value: Any) -> Static:
    """Objects that differ only in the device of their tensors have the same structure."""
    return Static(torch.device(value.type) if isinstance(value, torch.device) else value)


def _on_device(constant: Any, device: torch.device | None) -> Any:
    return device if device is not None and isinstance(constant, torch.device) else constant
