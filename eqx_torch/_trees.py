"""Trees: whatever torch functions take and return, flattened by JAX.

JAX takes some nodes of torch code for leaves: dataclasses, mappings such as Hugging Face's
`ModelOutput`, `torch.return_types`, and objects with tensors among their attributes, such as caches
of attention keys. Of dictionaries it loses the user's order, and the types of keys such as 1 and
True. In what a function returns, strings and other constants would be leaves. In the place of each
of these, `flatten` puts a `TorchObject`: a PyTree of the node's children, whose static part is the
recipe to make the node of them. So JAX's treedef is all there is to a `Structure`, which is
hashable and compares by value, and the leaves are in JAX's order.

A tree is unflattened for torch, where each recipe is followed, or for JAX, where those are of which
JAX knows the class. What remains is a `TorchObject` in JAX, too, which is how results leave
`jax.jit`; torch sees the node again. JAX is told of no class of the user's: whether and how that is
a PyTree is for its author to say, now or later.
"""

import collections
import dataclasses
import enum
import functools
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.tree_util as jtu
import numpy as np
import torch

from ._compat import weakly_typed
from ._statics import may_hold, Static


NUMBERS = (bool, int, float, complex)
_ARRAYS = (torch.Tensor, jax.Array)
_LEAVES = (*_ARRAYS, type, str, int, float, complex, torch.nn.Module)
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
_DICTS = (dict, collections.OrderedDict, collections.defaultdict)
_MOST_ATTRIBUTES = 10_000
_ABSENT = object()


@dataclasses.dataclass(frozen=True)
class _Recipe:
    """How to make a node of its children.

    Attributes:
        cls: its class.
        names: of its children; None if they are numbered.
        make: makes it, given this recipe and the children.
        extra: what else `make` needs.
    """

    cls: type
    names: Static
    make: Callable[["_Recipe", Sequence[Any]], Any]
    extra: Static | None = None

    def named(self, children: Sequence[Any]) -> dict[Any, Any]:
        return dict(zip(self.names.value, children, strict=True))


def _of_object(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *args: function(_in_jax(self), *args)


class TorchObject:
    """In JAX, an object of torch code whose class JAX does not know.

    It is a PyTree of the arrays in the object, and becomes the object again when it is passed to a
    torch function. For a dataclass, a mapping or a sequence, it is an instance of the class that
    has all its attributes and methods, but cannot be changed. Of another object, such as a cache of
    attention keys, it has the attributes only.
    """

    __slots__ = ("_children", "_recipe")

    def __init__(self, recipe: _Recipe, children: Iterable[Any]) -> None:
        object.__setattr__(self, "_recipe", recipe)
        object.__setattr__(self, "_children", tuple(children))

    @property
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride]
        return TorchObject if self._recipe.make is _make_object else self._recipe.cls

    def __getattr__(self, name: str) -> Any:
        if self._recipe.make is not _make_object:
            value = _in_jax(self)
            found = getattr(value, name)
            is_method = callable(found) and getattr(found, "__self__", None) is value
            return functools.partial(_unchanging, value, found) if is_method else found
        attributes = self._recipe.named(self._children)
        if name.startswith("__") or name not in attributes:
            raise AttributeError(
                f"this stands for a `{self._recipe.cls.__name__}` of torch code and has its "
                f"attributes {', '.join(attributes)}, but not `{name}`. It has no "
                "methods: those can be called inside of a torch function that it is passed to."
            )
        return _mapped(_shown, attributes[name])

    def __setattr__(self, name: str, value: Any) -> None:
        raise dataclasses.FrozenInstanceError(
            f"cannot assign to `{name}` of a `{self._recipe.cls.__name__}` that a torch function "
            "has returned; make a new one"
        )

    def __eq__(self, other: object) -> bool:
        if self._recipe.make is _make_object:
            return self is other
        return _in_jax(self) == (_in_jax(other) if _is_node(other) else other)

    def __hash__(self) -> int:
        return id(self) if self._recipe.make is _make_object else hash(_in_jax(self))

    __getitem__ = _of_object(operator.getitem)
    __contains__ = _of_object(operator.contains)
    __iter__, __len__ = _of_object(iter), _of_object(len)

    def __bool__(self) -> bool:
        return self._recipe.make is _make_object or bool(_in_jax(self))

    def __dir__(self) -> Iterable[str]:
        named = self._recipe.make is _make_object
        return self._recipe.names.value if named else dir(_in_jax(self))

    def __repr__(self) -> str:
        if self._recipe.make is not _make_object:
            return repr(_in_jax(self))
        count = len(jtu.tree_leaves(self))
        return f"TorchObject({self._recipe.cls.__name__}, {count} arrays)"

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        del protocol
        return TorchObject, (self._recipe, self._children)


def _unchanging(value: Any, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls a method of what a `TorchObject` stands for, which would not be told of a change."""
    before = children(value)
    result = method(*args, **kwargs)
    names, items = children(value)
    if names != before[0] or any(x is not y for x, y in zip(items, before[1], strict=True)):
        raise TypeError(
            f"`{method.__name__}` changes a `{type(value).__name__}` that a torch function has "
            "returned, which cannot be changed; make a new one, or a `dict` of it"
        )
    return result


class _Made:
    """In a treedef, the place of a node that is made as soon as its children are."""

    def __init__(self, recipe: _Recipe, children: Sequence[Any]) -> None:
        self.recipe, self.children = recipe, children


def _with_keys(node: TorchObject) -> tuple[Iterable[Any], _Recipe]:
    recipe, children = node._recipe, node._children
    names = recipe.names.value
    if names is None:
        keys: Iterable[Any] = map(jtu.SequenceKey, range(len(children)))
    else:
        keys = map(jtu.DictKey if issubclass(recipe.cls, Mapping) else jtu.GetAttrKey, names)
    return tuple(zip(keys, children, strict=True)), recipe


jtu.register_pytree_with_keys(
    TorchObject, _with_keys, TorchObject, lambda node: (node._children, node._recipe)
)
jtu.register_pytree_node(
    _Made, lambda node: (node.children, node.recipe), lambda recipe, xs: recipe.make(recipe, xs)
)


@dataclasses.dataclass(frozen=True)
class Structure:
    """A tree without its leaves.

    Attributes:
        treedef: of the tree with a `TorchObject` for each node that JAX does not keep.
        numbers: which leaves of a result were Python numbers.
    """

    treedef: Any
    numbers: tuple[int, ...] = dataclasses.field(default=(), compare=False)

    @property
    def num_leaves(self) -> int:
        return self.treedef.num_leaves

    def unflatten(self, leaves: Iterable[Any]) -> Any:
        """The tree with these leaves, as torch code knows it."""
        return self._for_torch.unflatten(leaves)

    def in_jax(self, leaves: Iterable[Any]) -> Any:
        """The tree with these leaves, as a pytree of JAX; arrays as JAX makes them of numbers."""
        leaves = list(leaves)
        for i in self.numbers:
            leaves[i] = _as_number(leaves[i])
        tree = self.treedef.unflatten(leaves)
        return tree if self._is_plain else _mapped(_shown, tree)

    def places(self) -> Any:
        """As a pytree of JAX whose leaves are the positions of the leaves, and nothing else."""
        return _mapped(_placed, self._positions)

    @functools.cached_property
    def unordered(self) -> "Structure":
        """Equal for structures that differ in the order of dictionaries only."""
        return self if self._is_plain else self._with(_sorted)

    def first(self) -> "Structure":
        """That of the first item, where this is of a tuple."""
        return Structure(self.treedef.children()[0])

    def leaves_of(self, tree: Any) -> Sequence[Any] | None:
        """The leaves of what a function returns, None if it is not of this structure."""
        leaves = self._parts_of(tree)
        return leaves if leaves is not None and all(map(_is_taken, leaves)) else None

    def _parts_of(self, tree: Any) -> list[Any] | None:
        outer, nodes = self._outer
        try:
            parts = outer.flatten_up_to(tree)
        except ValueError:
            return None
        if self._is_plain:
            return parts
        leaves: list[Any] = []
        for part, node in zip(parts, nodes, strict=True):
            found = [part] if node is None else _parts_of(*node, part)
            if found is None:
                return None
            leaves += found
        return leaves

    @functools.cached_property
    def _outer(self) -> tuple[Any, list[tuple[_Recipe, "Structure"] | None]]:
        """The treedef around the outermost nodes, and for each of its leaves the node, if any."""
        nodes, outer = jtu.tree_flatten(self._positions, is_leaf=_is_node)
        inner = (jtu.tree_structure(list(x._children)) if _is_node(x) else None for x in nodes)
        pairs = zip(nodes, inner, strict=True)
        return outer, [None if y is None else (x._recipe, Structure(y)) for x, y in pairs]

    @functools.cached_property
    def _positions(self) -> Any:
        return self.treedef.unflatten(range(self.num_leaves))

    @functools.cached_property
    def _is_plain(self) -> bool:
        """Whether JAX keeps all of the tree."""
        return not any(self._outer[1])

    @functools.cached_property
    def _for_torch(self) -> Any:
        return self.treedef if self._is_plain else self._with(_made).treedef

    def _with(self, change: Callable[[TorchObject], Any]) -> "Structure":
        return Structure(jtu.tree_structure(_mapped(change, self._positions)))

    def __str__(self) -> str:
        return str(self.in_jax([STAR] * self.num_leaves))


class _Star:
    def __repr__(self) -> str:
        return "*"


STAR = _Star()


def flatten(tree: Any) -> tuple[list[Any], Structure]:
    """The leaves of a tree, and its structure."""
    leaves, treedef = _flattened(tree, lambda x: False)
    return leaves, Structure(treedef)


def flatten_result(tree: Any) -> tuple[list[Any], Structure]:
    """The same of what a function returns, where constants are part of the structure."""
    leaves, treedef = _flattened(tree, lambda x: isinstance(x, _CONSTANTS))
    return leaves, Structure(treedef, tuple(i for i, x in enumerate(leaves) if type(x) in NUMBERS))


def like_places(tree: Any) -> Any:
    """A tree, or a prefix of one, as `Structure.places` has it, with leaves of its own."""
    leaves, structure = flatten(tree)
    return _mapped(_placed, structure.treedef.unflatten(leaves))


def leaf_paths(structure: Structure) -> list[str]:
    """Where each leaf stands, as one would write it after the name of the tree."""
    return [jtu.keystr(path) for path, _ in jtu.tree_flatten_with_path(structure._positions)[0]]


def constants(structure: Structure) -> list[tuple[str, Any]]:
    """Where each leaf and each constant of a result stands; a leaf is `STAR`."""
    found = jtu.tree_flatten_with_path(structure._positions, is_leaf=_is_constant)[0]
    return [(jtu.keystr(path), _in_jax(x) if _is_node(x) else STAR) for path, x in found]


def is_container(x: Any) -> bool:
    """Whether it is opened whatever it holds."""
    return dataclasses.is_dataclass(x) or isinstance(x, Mapping | tuple | list)


def children(node: Any) -> tuple[tuple[Any, ...] | None, list[Any]]:
    """The names of the children of a container or an object, None if numbered, and these."""
    if isinstance(node, Mapping):
        return tuple(node.keys()), list(node.values())
    if dataclasses.is_dataclass(node):
        present = [f.name for f in dataclasses.fields(node) if hasattr(node, f.name)]
        return tuple(present), [getattr(node, name) for name in present]
    if isinstance(node, tuple | list):
        return None, list(node)
    return tuple(vars(node)), list(vars(node).values())


def with_children(node: Any, items: Sequence[Any]) -> Any:
    """A container like this one with other children."""
    if hasattr(node, "_fields"):
        return type(node)(*items)
    recipe = _recipe(node, children(node)[0])
    return recipe.make(recipe, items)


def bare_dataclass(cls: Any, values: Mapping[str, Any]) -> Any:
    """An instance with these fields of which nothing is checked or computed.

    What `__init__` and `__post_init__` check is for the user's own values, not for tracers.
    """
    new = cls.__new__(cls)
    for name, value in values.items():
        if isinstance(new, dict):
            new[name] = value
        else:
            object.__setattr__(new, name, value)
    return new


def _flattened(tree: Any, is_constant: Callable[[Any], bool]) -> tuple[list[Any], Any]:
    closed: set[int] = set()

    def stops(x: Any) -> bool:
        stop = is_constant(x) or _is_closed(x)
        if stop:
            closed.add(id(x))
        return stop

    nodes, treedef = jtu.tree_flatten(tree, is_leaf=stops)
    if not closed:
        return nodes, treedef
    nodes = [_opened(x, is_constant) if id(x) in closed else x for x in nodes]
    return jtu.tree_flatten(treedef.unflatten(nodes))


def _parts_of(recipe: _Recipe, inner: Structure, node: Any) -> list[Any] | None:
    """The leaves of a node that this recipe makes, None if it does not."""
    if type(node) is not recipe.cls:
        return None
    if recipe.make is _make_constant:
        return [] if _constant(node) == recipe.extra else None
    if recipe.make is _make_dict:
        if len(node) != len(recipe.names.value):
            return None
        items = [node.get(name, _ABSENT) for name in recipe.names.value]
        return None if any(x is _ABSENT for x in items) else inner._parts_of(items)
    names, items = children(node)
    return inner._parts_of(items) if names == recipe.names.value else None


def _is_closed(x: Any) -> bool:
    """Whether JAX takes a node of torch code for a leaf, or does not keep all of it."""
    if type(x) in _DICTS:
        return _is_altered(x)
    if x is None or isinstance(x, _LEAVES) or not jtu.all_leaves([x]):
        return False
    return is_container(x) or _is_object(x)


def _is_altered(x: Any) -> bool:
    """Whether JAX would not keep the order or the types of the keys of a dictionary."""
    keys = list(x)
    if all(type(key) is str for key in keys):
        return type(x) is not collections.OrderedDict and sorted(keys) != keys
    try:
        sorted(keys)
    except TypeError:  # which JAX says itself
        return False
    return True


def _is_object(x: Any) -> bool:
    """Whether a leaf is an object of a user's or a library's class that holds tensors."""
    try:
        return may_hold(x) and _holds_tensors(x, (), itertools.repeat(None, _MOST_ATTRIBUTES))
    except _EndlessError:
        return False


class _EndlessError(Exception):
    """An object refers to itself, or to a great many others."""


def _holds_tensors(x: Any, above: tuple[int, ...], budget: Iterator[None]) -> bool:
    if isinstance(x, _ARRAYS):
        return True
    if not (isinstance(x, Mapping | list | tuple) or may_hold(x)):
        return False
    if id(x) in above or next(budget, x) is x:
        raise _EndlessError
    # All of it is searched: a tensor may come first and a reference to the object itself later.
    found = [_holds_tensors(y, (*above, id(x)), budget) for y in children(x)[1]]
    return any(found)


def _opened(x: Any, is_constant: Callable[[Any], bool]) -> TorchObject:
    if is_constant(x):
        return TorchObject(_Recipe(type(x), Static(()), _make_constant, _constant(x)), ())
    if type(x) in _DICTS:
        return _opened_dict(x, is_constant)
    names, items = children(x)
    if not is_container(x):
        is_constant = _is_constant_attribute
    leaves, treedef = _flattened(items, is_constant)
    return TorchObject(_recipe(x, names), treedef.unflatten(leaves))


def _constant(x: Any) -> Static:
    """Objects that differ only in the device of their tensors have the same structure."""
    return Static(torch.device(x.type) if isinstance(x, torch.device) else x)


def _opened_dict(x: Any, is_constant: Callable[[Any], bool]) -> TorchObject:
    keys, kind = list(x), type(x)
    names = keys if kind is collections.OrderedDict else sorted(keys)
    place = {name: i for i, name in enumerate(names)}
    extra = Static((tuple(place[key] for key in keys), getattr(x, "default_factory", None)))
    leaves, treedef = _flattened([x[name] for name in names], is_constant)
    recipe = _Recipe(kind, Static(tuple(names)), _make_dict, extra)
    return TorchObject(recipe, treedef.unflatten(leaves))


def _is_constant_attribute(x: Any) -> bool:
    return jtu.all_leaves([x]) and not isinstance(x, _ARRAYS) and not _is_closed(x)


def _recipe(x: Any, names: tuple[Any, ...] | None) -> _Recipe:
    if dataclasses.is_dataclass(x):
        make = _make_dataclass
    elif not is_container(x):
        make = _make_object
    else:
        make = _make_sequence if names is None else _make_mapping
    return _Recipe(type(x), Static(names), make)


def _make_constant(recipe: _Recipe, children: Sequence[Any]) -> Any:
    del children
    assert recipe.extra is not None
    return recipe.extra.value


def _make_dict(recipe: _Recipe, children: Sequence[Any]) -> Any:
    assert recipe.extra is not None
    order, factory = recipe.extra.value
    items = [(recipe.names.value[i], children[i]) for i in order]
    return recipe.cls(items) if factory is None else collections.defaultdict(factory, items)


def _make_sequence(recipe: _Recipe, children: Sequence[Any]) -> Any:
    return recipe.cls(list(children))  # pyright: ignore[reportCallIssue]


def _make_mapping(recipe: _Recipe, children: Sequence[Any]) -> Any:
    return recipe.cls(recipe.named(children))  # pyright: ignore[reportCallIssue]


def _make_dataclass(recipe: _Recipe, children: Sequence[Any]) -> Any:
    return bare_dataclass(recipe.cls, recipe.named(children))


def _make_object(recipe: _Recipe, children: Sequence[Any]) -> Any:
    new = object.__new__(recipe.cls)
    tensors = (x for x in jtu.tree_leaves(children) if isinstance(x, torch.Tensor))
    device = next((x.device for x in tensors), None)
    for name, value in recipe.named(children).items():
        of_tensors = isinstance(value, torch.device) and device is not None
        new.__dict__[name] = device if of_tensors else value
    return new


def _is_node(x: Any) -> bool:
    return type(x) is TorchObject


def _is_constant(x: Any) -> bool:
    return _is_node(x) and x._recipe.make is _make_constant


def _mapped(change: Callable[[TorchObject], Any], tree: Any) -> Any:
    """The tree with each outermost `TorchObject` changed."""
    return jtu.tree_map(lambda x: change(x) if _is_node(x) else x, tree, is_leaf=_is_node)


def _made(node: TorchObject) -> _Made:
    return _Made(node._recipe, _mapped(_made, node._children))


def _sorted(node: TorchObject) -> Any:
    """A node with each dictionary in it in JAX's order."""
    recipe, children = node._recipe, _mapped(_sorted, node._children)
    if recipe.make is not _make_dict:
        return TorchObject(recipe, children)
    new = _make_dict(_in_order(recipe), children)
    return TorchObject(_in_order(recipe), children) if _is_altered(new) else new


def _placed(node: TorchObject) -> Any:
    """A node as a PyTree of JAX's in which constants are not there."""
    recipe, children = node._recipe, _mapped(_placed, node._children)
    if recipe.make is _make_dict:
        return _make_dict(_in_order(recipe), children)
    return None if recipe.make is _make_constant else TorchObject(recipe, children)


def _in_order(recipe: _Recipe) -> _Recipe:
    assert recipe.extra is not None
    order, factory = recipe.extra.value
    return dataclasses.replace(recipe, extra=Static((tuple(range(len(order))), factory)))


def _shown(node: TorchObject) -> Any:
    """A node as JAX and its users see it."""
    recipe = node._recipe
    if recipe.make in (_make_dict, _make_constant):
        return _in_jax(node)
    is_known = not jtu.all_leaves([recipe.make(recipe, node._children)])
    return _in_jax(node) if is_known else node


def _in_jax(node: Any) -> Any:
    """The object itself, with what is in it as JAX's users see that."""
    return node._recipe.make(node._recipe, _mapped(_shown, node._children))


def _is_taken(x: Any) -> bool:
    return isinstance(x, torch.Tensor) or type(x) in NUMBERS


def _as_number(x: Any) -> Any:
    """What JAX makes of a Python number of this value, which has no tangent."""
    if not isinstance(x, jax.Array):
        return x
    constant = jax.lax.stop_gradient(x)
    return constant if constant.dtype == bool else weakly_typed(constant)
