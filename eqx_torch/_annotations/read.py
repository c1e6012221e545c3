"""From an annotation to a `Spec`.

Every wrapper of the typing module that says nothing about arrays (`Annotated`, `NewType`, type
aliases, bounds of type variables) is looked through.
"""

import collections.abc
import dataclasses
import functools
import inspect
import operator
import sys
import types
import typing
from typing import Any

from .._compat_jaxtyping import AbstractArray, dims, dtype_names, is_tree_annotation, tree_parts
from . import dtypes
from .callables import evaluated
from .specs import (
    Array,
    ARRAYS,
    Choice,
    Elements,
    Items,
    Nothing,
    Other,
    Record,
    SEQUENCES,
    Spec,
    Tree,
    Values,
)


def read(annotation: Any, owner: str, inside: tuple[type, ...] = ()) -> Spec:
    """The spec of an evaluated `annotation` of the function named `owner`.

    `inside` has the classes whose fields are being read, where one that contains itself stops.
    """
    annotation = _plain(annotation)
    if annotation is None or annotation is type(None):
        return Nothing()
    if isinstance(annotation, type) and issubclass(annotation, AbstractArray):
        return _array(annotation)
    if is_tree_annotation(annotation):
        leaf, structure = tree_parts(annotation)
        return Tree(text(annotation), read(leaf, owner, inside), structure)
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return _choice(text(annotation), tuple(read(one, owner, inside) for one in arguments))
    if origin is tuple and (arguments or isinstance(annotation, types.GenericAlias)):
        return _tuple(annotation, arguments, owner, inside)
    if origin in SEQUENCES and arguments:
        return Elements(text(annotation), SEQUENCES[origin], read(arguments[0], owner, inside))
    if (
        isinstance(origin, type)
        and issubclass(origin, collections.abc.Mapping)
        and len(arguments) == 2
    ):
        return Values(text(annotation), read(arguments[1], owner, inside))
    if isinstance(annotation, type) and annotation not in inside:
        return _record(annotation, owner, (*inside, annotation))
    return _other(annotation)


def text(annotation: Any) -> str:
    """How messages write `annotation`: as its author did, without module names."""
    if annotation is None or annotation is type(None):
        return "None"
    arguments = typing.get_args(annotation)
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return " | ".join(map(text, arguments))
    if annotation is Ellipsis:
        return "..."
    if is_tree_annotation(annotation):
        leaf, structure = tree_parts(annotation)
        return (
            f"PyTree[{text(leaf)}]" if structure is None else f"PyTree[{text(leaf)}, {structure!r}]"
        )
    origin = typing.get_origin(annotation)
    name = getattr(origin or annotation, "__name__", None) or repr(annotation)
    return f"{name}[{', '.join(map(text, arguments))}]" if origin and arguments else name


def _plain(annotation: Any) -> Any:
    if typing.get_origin(annotation) is typing.Annotated:
        return _plain(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) in (typing.Required, typing.NotRequired, typing.Final):
        return _plain(typing.get_args(annotation)[0])
    if isinstance(annotation, typing.NewType):
        return _plain(annotation.__supertype__)
    if sys.version_info >= (3, 12) and isinstance(annotation, typing.TypeAliasType):
        return _plain(annotation.__value__)
    if isinstance(annotation, typing.TypeVar):
        if annotation.__constraints__:
            return functools.reduce(operator.or_, annotation.__constraints__)
        return Any if annotation.__bound__ is None else _plain(annotation.__bound__)
    return annotation


def _array(annotation: type[AbstractArray]) -> Array:
    family = dtypes.family(annotation.dtype.__name__, dtype_names(annotation))
    return Array(annotation.__name__, annotation, dims(annotation), family)


def _choice(name: str, members: tuple[Spec, ...]) -> Spec:
    """A union, in which arrays that differ only in their dtypes are one member."""
    merged: list[Spec] = []
    for member in members:
        twin = next((i for i, one in enumerate(merged) if _same_dims(one, member)), None)
        if twin is None:
            merged.append(member)
        else:
            merged[twin] = _merge(typing.cast(Array, merged[twin]), typing.cast(Array, member))
    return merged[0] if len(merged) == 1 else Choice(name, tuple(merged))


def _same_dims(a: Spec, b: Spec) -> bool:
    return isinstance(a, Array) and isinstance(b, Array) and a.dims == b.dims


def _merge(a: Array, b: Array) -> Array:
    return Array(f"{a.text} | {b.text}", a.annotation, a.dims, dtypes.union((a.family, b.family)))


def _tuple(
    annotation: Any, arguments: tuple[Any, ...], owner: str, inside: tuple[type, ...]
) -> Spec:
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        return Elements(text(annotation), tuple, read(arguments[0], owner, inside))
    return Items(text(annotation), tuple(read(one, owner, inside) for one in arguments))


def _record(cls: type, owner: str, inside: tuple[type, ...]) -> Spec:
    keyed = typing.is_typeddict(cls)
    if dataclasses.is_dataclass(cls):
        names = [field.name for field in dataclasses.fields(cls)]
    elif issubclass(cls, tuple) and hasattr(cls, "_fields"):
        names = list(cls._fields)  # pyright: ignore[reportAttributeAccessIssue]
    elif keyed:
        names = list(cls.__annotations__)
    else:
        return _other(cls)
    hints = _hints(cls, names, owner)
    fields = tuple((name, read(hints.get(name, Any), owner, inside)) for name in names)
    optional = getattr(cls, "__optional_keys__", frozenset()) if keyed else frozenset()
    return Record(cls.__name__, cls, keyed, fields, frozenset(optional))


def _hints(cls: type, names: list[str], owner: str) -> dict[str, Any]:
    """The evaluated annotations of the fields, each in the scope of the class declaring it."""
    found: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        scope = vars(sys.modules[base.__module__]) if base.__module__ in sys.modules else {}
        for name, annotation in inspect.get_annotations(base).items():
            if name in names:
                found[name] = evaluated(annotation, owner, f"`{cls.__name__}.{name}`", scope)
    return found


def _other(annotation: Any) -> Other:
    if annotation is Any or annotation is object:
        return Other(text(annotation), True)
    cls = typing.get_origin(annotation) or annotation
    if not isinstance(cls, type):
        return Other(text(annotation), False)
    return Other(text(annotation), issubclass(cls, ARRAYS), cls)
