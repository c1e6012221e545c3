"""What an annotation says, as data, and how it is read.

An annotation is read once, when a function is wrapped, into a tree of the classes below: arrays at
the leaves, containers above them, and `Other` for whatever jaxtyping does not speak about, which is
not checked. Checking an argument and predicting a result are walks over this tree. jaxtyping parses
the shapes; what the typing module has that says nothing about arrays (`Annotated`, `NewType`,
aliases, bounds of type variables) is looked through.

Dtypes are compared by name, as jaxtyping does, because torch, numpy and JAX share the names and not
the types. While JAX's x64 mode is off there are no arrays of 64 bits, so an annotation admits also
what JAX makes of its dtypes.
"""

import collections
import dataclasses
import functools
import inspect
import operator
import re
import sys
import types
import typing
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, MutableSequence, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jaxtyping
import numpy as np
import torch

from .._compat import parsed_dimension
from .._dtypes import x64_enabled
from .._errors import AnnotationError


# The dtypes that JAX has only with x64 on, and what it makes of them without.
WIDE = {"int64": "int32", "uint64": "uint32", "float64": "float32", "complex128": "complex64"}

ARRAYS = (jax.ShapeDtypeStruct, torch.Tensor, jax.Array, np.ndarray, np.generic)

# In place of a part that is not there.
MISSING = inspect.Parameter.empty


@dataclass(frozen=True)
class Dim:
    """One dimension of an array.

    `kind` is "size" (`4`), "name" (`n`, and `*n` if `variadic`), "elem" (an expression, `n-1`) or
    "any" (`_` or `...`), and `value` what it says. `check` is what jaxtyping checks sizes against.
    """

    text: str
    check: Any = field(compare=False)
    kind: str
    value: Any
    variadic: bool
    broadcastable: bool
    per_leaf: bool


@dataclass(frozen=True)
class Pattern:
    """What an annotation says, `text` for messages; `children` are the patterns of its parts."""

    text: str
    children: "tuple[Pattern, ...]"

    def below(self) -> "Iterator[Pattern]":
        """The pattern and all that it consists of."""
        yield self
        for child in self.children:
            yield from child.below()

    def arrays(self) -> "Iterator[Array]":
        return (one for one in self.below() if isinstance(one, Array))

    def structures(self) -> Iterator[str]:
        """What trees say of their structure."""
        return (one.structure for one in self.below() if isinstance(one, Tree) and one.structure)

    @property
    def speaks(self) -> bool:
        """Whether there is anything of jaxtyping in it."""
        return any(self.arrays()) or any(self.structures())


@dataclass(frozen=True)
class Array(Pattern):
    """`Float[Tensor, "b n"]`, or a union of such annotations that differ only in dtypes."""

    dims: tuple[Dim, ...]
    family: str
    dtypes: frozenset[str]

    @property
    def dtype(self) -> str | None:
        """The one dtype admitted, None for a family."""
        return next(iter(self.dtypes)) if len(self.dtypes) == 1 else None

    def admits(self, dtype: str) -> bool:
        """Whether an array of this dtype matches, under JAX's present x64 mode."""
        if dtype in self.dtypes:
            return True
        return not x64_enabled() and any(WIDE.get(name) == dtype for name in self.dtypes)


@dataclass(frozen=True)
class Container(Pattern):
    """A tuple, list, dictionary (`kind` is Mapping), named tuple, typed dictionary or dataclass.

    Its children are the parts called `names`, of which typed dictionaries may miss the `optional`
    ones, or without names the one pattern of any number of parts.
    """

    kind: type
    names: tuple[Any, ...] | None = None
    optional: frozenset[str] = frozenset()

    @property
    def is_record(self) -> bool:
        """Whether the parts are attributes."""
        return self.names is not None and self.kind not in (tuple, Mapping)

    def parts(self, value: Any) -> list[tuple[Pattern, Any, str]] | None:
        """The parts of `value`, each with what its path adds; None if it is of another kind."""
        if not isinstance(value, self.kind):
            return None
        named = list(zip(self.names or (), self.children, strict=self.names is not None))
        if self.is_record:
            return [(pattern, getattr(value, name), f".{name}") for name, pattern in named]
        found = value if isinstance(value, Mapping) else dict(enumerate(value))
        if self.names is None:
            return [(self.children[0], one, f"[{name!r}]") for name, one in found.items()]
        if self.kind is tuple and len(named) != len(found):
            return None
        wanted = [(name, one) for name, one in named if name in found or name not in self.optional]
        return [(one, found.get(name, MISSING), f"[{name!r}]") for name, one in wanted]


@dataclass(frozen=True)
class Tree(Pattern):
    """`PyTree[A, "T"]`."""

    structure: str | None


@dataclass(frozen=True)
class Choice(Pattern):
    """`A | B`, `Optional[A]`."""


@dataclass(frozen=True)
class Other(Pattern):
    """Anything else, None too: as a union's member of the class `cls`, an array if `array`."""

    cls: Any
    array: bool


def is_array(value: Any) -> bool:
    """Whether `value` is an array or stands for one."""
    return isinstance(value, ARRAYS)


def dtype_name(array: Any) -> str:
    """The name that jaxtyping compares."""
    if isinstance(array, torch.Tensor):
        return str(array.dtype).removeprefix("torch.")
    return array.dtype.type.__name__.rstrip("_")


def read(annotation: Any, owner: str, inside: tuple[type, ...] = ()) -> Pattern:
    """The pattern of an evaluated `annotation` of the function named `owner`.

    `inside` has the classes whose fields are being read, where one that contains itself stops.
    """
    annotation = _plain(annotation)
    text = annotation.__name__ if isinstance(annotation, type) else repr(annotation)
    text = re.sub(r"\b(jax)?typing\.", "", text)
    arguments = typing.get_args(annotation)
    origin = typing.get_origin(annotation) if arguments or annotation == tuple[()] else None
    origin = Sequence if origin in (Iterable, Collection) else origin
    inner = functools.partial(read, owner=owner, inside=inside)
    if isinstance(annotation, type) and issubclass(annotation, jaxtyping.AbstractArray):
        return _array(annotation)
    if hasattr(annotation, "leaftype"):
        return Tree(text, (inner(annotation.leaftype),), annotation.structure)
    if origin in (typing.Union, types.UnionType):
        return _choice(text, map(inner, arguments))
    if origin is tuple and arguments[1:] != (Ellipsis,):
        return Container(text, tuple(map(inner, arguments)), tuple, tuple(range(len(arguments))))
    if isinstance(origin, type) and issubclass(origin, Mapping) and len(arguments) == 2:
        return Container(text, (inner(arguments[1]),), Mapping)
    if origin in _SEQUENCES:
        return Container(text, (inner(arguments[0]),), origin)
    names = _part_names(annotation) if isinstance(annotation, type) else None
    if names is not None and annotation not in inside:
        return _record(annotation, names, owner, (*inside, annotation))
    return _other(annotation, text)


def evaluated(annotation: Any, owner: str, subject: str, scope: Mapping[str, Any]) -> Any:
    """`annotation` with its strings evaluated in `scope`, `typing.Any` if that is not possible.

    Raises AnnotationError if jaxtyping refuses the annotation. Warns if it is one of jaxtyping's
    that is dropped.
    """
    holder = types.SimpleNamespace(__annotations__={"value": annotation})
    try:
        return typing.get_type_hints(holder, dict(scope), include_extras=True)["value"]
    except Exception as error:
        if not _OF_JAXTYPING.search(repr(annotation)):
            return Any
        said = f"{owner}: the annotation {annotation!r} of {subject} is"
        if not isinstance(error, NameError | AttributeError):
            raise AnnotationError(f"{said} invalid: {error}") from error
        remedy = "Import what it names at run time too, not only under `if TYPE_CHECKING`."
        said = f"{said} not checked, because it cannot be evaluated: {error}. {remedy}"
        warnings.warn(said, stacklevel=2)
        return Any


_SEQUENCES = (list, tuple, collections.deque, Sequence, MutableSequence)
_SHAPED: Any = jaxtyping.Shaped
_DTYPES = [x for x, value in vars(jaxtyping).items() if isinstance(value, type(_SHAPED))]
_OF_JAXTYPING = re.compile(rf"\b({'|'.join([*_DTYPES, 'PyTree'])})\[")
_FAMILIES: Any = (jaxtyping.Num, jaxtyping.Bool, jaxtyping.Key)
_NAMES = frozenset(
    [name for family in _FAMILIES for name in family.dtypes]
    + [str(x).removeprefix("torch.") for x in vars(torch).values() if isinstance(x, torch.dtype)]
)
# Where a type checker expects a `float`, an `int` will do.
_NUMBERS: Mapping[Any, Any] = {float: (float, int), complex: (complex, float, int)}


def _plain(annotation: Any) -> Any:
    wrappers = (typing.Annotated, typing.Required, typing.NotRequired, typing.Final)
    if typing.get_origin(annotation) in wrappers:
        return _plain(typing.get_args(annotation)[0])
    if isinstance(annotation, typing.NewType):
        return _plain(annotation.__supertype__)
    if sys.version_info >= (3, 12) and isinstance(annotation, typing.TypeAliasType):
        return _plain(annotation.__value__)
    if isinstance(annotation, typing.TypeVar):
        if annotation.__constraints__:
            return functools.reduce(operator.or_, annotation.__constraints__)
        return Any if annotation.__bound__ is None else _plain(annotation.__bound__)
    return type(None) if annotation is None else annotation


def _array(annotation: Any) -> Array:
    found = _NAMES if annotation.dtypes is _SHAPED.dtypes else annotation.dtypes
    patterns = [one for one in found if isinstance(one, re.Pattern)]
    names = {one.rstrip("_") for one in found if isinstance(one, str)}  # numpy had `bool_`
    names |= {name for name in _NAMES for pattern in patterns if pattern.match(name)}
    dims = tuple(map(_dim, annotation.dim_str.split()))
    return Array(annotation.__name__, (), dims, annotation.dtype.__name__, frozenset(names))


def _dim(text: str) -> Dim:
    check = _SHAPED[Any, text]
    return Dim(text, check, *parsed_dimension(check))


def _choice(text: str, members: Iterable[Pattern]) -> Pattern:
    """A union, in which arrays that differ only in their dtypes are one member."""
    merged: dict[Any, Any] = {}
    for one in members:
        key = one.dims if isinstance(one, Array) else one
        merged[key] = _either(merged[key], one) if key in merged else one
    patterns = tuple(merged.values())
    return patterns[0] if len(patterns) == 1 else Choice(text, patterns)


def _either(a: Any, b: Any) -> Array:
    family = f"{a.family} | {b.family}"
    return Array(f"{a.text} | {b.text}", (), a.dims, family, a.dtypes | b.dtypes)


def _part_names(cls: Any) -> tuple[str, ...] | None:
    """The names of the parts of a dataclass, typed dictionary or named tuple."""
    if dataclasses.is_dataclass(cls):
        return tuple(one.name for one in dataclasses.fields(cls))
    if typing.is_typeddict(cls):
        return tuple(cls.__annotations__)
    return getattr(cls, "_fields", None) if issubclass(cls, tuple) else None


def _record(cls: Any, names: tuple[str, ...], owner: str, inside: tuple[type, ...]) -> Pattern:
    hints: dict[str, Any] = {}
    for base in reversed(cls.__mro__):  # each annotation in the scope of the class that has it
        scope = vars(sys.modules[base.__module__]) if base.__module__ in sys.modules else {}
        for name, hint in inspect.get_annotations(base).items():
            hints[name] = evaluated(hint, owner, f"`{cls.__name__}.{name}`", scope)
    parts = tuple(read(hints.get(name, Any), owner, inside) for name in names)
    kind = Mapping if typing.is_typeddict(cls) else cls
    optional = getattr(cls, "__optional_keys__", frozenset())
    return Container(cls.__name__, parts, kind, names, optional)


def _other(annotation: Any, text: str) -> Other:
    cls = typing.get_origin(annotation) or annotation
    try:
        isinstance(None, cls)
    except TypeError:  # `Any`, and what cannot tell, as protocols
        cls = object
    arrays = annotation in (Any, object) or (isinstance(cls, type) and issubclass(cls, ARRAYS))
    return Other(text, (), _NUMBERS.get(cls, cls), arrays)
