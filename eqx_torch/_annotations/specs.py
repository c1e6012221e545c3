"""What an annotation says, as data.

An annotation is read once, when a function is wrapped, into a tree of the classes below: arrays at
the leaves, containers above them, and `Other` for whatever jaxtyping does not speak about, which
is never checked. Checking an argument and building a result are walks over this tree.
"""

import collections.abc
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import torch

from .._compat_jaxtyping import AbstractArray, Dim
from .dtypes import Family


@dataclass(frozen=True)
class Array:
    """`Float[Tensor, "b n"]`, or a union of such annotations that differ only in dtypes."""

    text: str
    annotation: type[AbstractArray]
    dims: tuple[Dim, ...]
    family: Family

    @functools.cached_property
    def broadcasts(self) -> bool:
        return any(dim.broadcastable for dim in self.dims)


@dataclass(frozen=True)
class Items:
    """`tuple[A, B]`."""

    text: str
    items: "tuple[Spec, ...]"


@dataclass(frozen=True)
class Elements:
    """`list[A]`, `Sequence[A]`, `tuple[A, ...]`: any number of one thing."""

    text: str
    kind: type
    item: "Spec"


@dataclass(frozen=True)
class Values:
    """`dict[K, A]`, `Mapping[K, A]`."""

    text: str
    value: "Spec"


@dataclass(frozen=True)
class Record:
    """A named tuple, a typed dictionary or a dataclass, whose fields have annotations."""

    text: str
    cls: type
    keyed: bool
    fields: "tuple[tuple[str, Spec], ...]"
    optional: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Tree:
    """`PyTree[A, "T"]`."""

    text: str
    leaf: "Spec"
    structure: str | None


@dataclass(frozen=True)
class Choice:
    """`A | B`, `Optional[A]`."""

    text: str
    members: "tuple[Spec, ...]"


@dataclass(frozen=True)
class Nothing:
    """`None`."""

    text: str = "None"


@dataclass(frozen=True)
class Other:
    """Anything else, not checked.

    `arrays` (arrays can be this) and `cls` tell whether a value belongs to it as a union's member.
    """

    text: str
    arrays: bool
    cls: type | None = None


ARRAYS = (jax.ShapeDtypeStruct, torch.Tensor, jax.Array, np.ndarray, np.generic)
Spec = Array | Items | Elements | Values | Record | Tree | Choice | Nothing | Other


def children(spec: Spec) -> "tuple[Spec, ...]":
    """The specs directly below `spec`."""
    match spec:
        case Items(items=items):
            return items
        case Elements(item=item):
            return (item,)
        case Values(value=value):
            return (value,)
        case Record(fields=fields):
            return tuple(field for _, field in fields)
        case Tree(leaf=leaf):
            return (leaf,)
        case Choice(members=members):
            return members
        case _:
            return ()


def speaks(spec: Spec) -> bool:
    """Whether there is anything of jaxtyping in `spec`: an array or a named structure."""
    if isinstance(spec, Array) or (isinstance(spec, Tree) and spec.structure is not None):
        return True
    return any(map(speaks, children(spec)))


def arrays_in(spec: Spec, structure: str | None = None) -> "Iterator[tuple[Array, str | None]]":
    """Every array in `spec`, with the name of the structure it is a leaf of, for `?` dimensions."""
    if isinstance(spec, Array):
        yield spec, structure
    below = spec.structure if isinstance(spec, Tree) and spec.structure is not None else structure
    for child in children(spec):
        yield from arrays_in(child, below)


def trees_in(spec: Spec) -> Iterator[Tree]:
    """Every `PyTree[...]` in `spec`."""
    if isinstance(spec, Tree):
        yield spec
    for child in children(spec):
        yield from trees_in(child)


def is_array(value: Any) -> bool:
    """Whether `value` is an array or stands for one."""
    return isinstance(value, ARRAYS)


def accepts(spec: Spec, value: Any) -> bool:
    """Whether `value` has the kind that `spec` speaks of, shapes and dtypes aside."""
    match spec:
        case Array():
            return is_array(value)
        case Items(items=items):
            return (
                isinstance(value, tuple)
                and len(value) == len(items)
                and all(map(accepts, items, value))
            )
        case Elements(kind=kind, item=item):
            return isinstance(value, kind) and all(accepts(item, one) for one in value)
        case Values(value=item):
            return isinstance(value, Mapping) and all(accepts(item, one) for one in value.values())
        case Record(keyed=True):
            return isinstance(value, Mapping) and _fields_accept(spec, value)
        case Record(cls=cls):
            return isinstance(value, cls)
        case Choice(members=members):
            return any(accepts(member, value) for member in members)
        case Nothing():
            return value is None
        case Other(arrays=arrays, cls=cls):
            return arrays if is_array(value) else cls is None or _instance(value, cls)
        case Tree():
            return True


def _instance(value: Any, cls: type) -> bool:
    try:
        return isinstance(value, _NUMBERS.get(cls, cls))
    except TypeError:
        return True  # as for protocols, which cannot tell


def _fields_accept(spec: Record, value: Mapping[str, Any]) -> bool:
    return all(
        accepts(field, value[name]) if name in value else name in spec.optional
        for name, field in spec.fields
    )


# Where a type checker expects a `float`, an `int` will do.
_NUMBERS: Mapping[type, tuple[type, ...]] = {float: (float, int), complex: (complex, float, int)}

# Generic types of sequences, and what an argument must be an instance of.
SEQUENCES: Mapping[Any, type] = {
    list: list,
    collections.abc.Sequence: collections.abc.Sequence,
    collections.abc.MutableSequence: collections.abc.MutableSequence,
    collections.abc.Iterable: collections.abc.Sequence,
    collections.abc.Collection: collections.abc.Sequence,
    collections.deque: collections.deque,
}
