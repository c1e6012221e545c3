"""What one call binds, whether its arguments match, and the message if they do not.

`check` walks over a value beside its pattern and has jaxtyping compare or bind each dimension, in a
memo that is kept here, and next to it, for messages, which argument bound each name. A `#name`
dimension of size 1 binds nothing in jaxtyping; if no other dimension binds the name, what was
broadcast along it has size 1, which `Bindings.bind_ones` says after the last argument.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jaxtyping
import torch

from .._compat import admitted_by_jaxtyping, leaf_position, leaf_prefix
from . import patterns
from .patterns import Array, Choice, Container, Dim, dtype_name, is_array, Other, Pattern, Tree


@dataclass(frozen=True)
class Seen:
    """One annotated array of a call."""

    pattern: Array
    array: Any

    @property
    def dtype(self) -> str:
        return dtype_name(self.array)

    @property
    def wide(self) -> torch.dtype | None:
        """The dtype of 64 bits that the annotation names for an array that has its 32 bits."""
        named = self.pattern.dtype
        return getattr(torch, named) if named in patterns.WIDE and named != self.dtype else None


@dataclass
class Bindings:
    """The names that a call binds, in jaxtyping's memo, and where: an argument and dimension."""

    arguments: dict[str, Any]
    single: dict[str, int] = field(default_factory=dict)
    variadic: dict[str, tuple[bool, tuple[int, ...]]] = field(default_factory=dict)
    structures: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    ones: dict[str, str] = field(default_factory=dict)
    seen: list[Seen] = field(default_factory=list)

    def admit(self, value: Any, annotation: Any) -> bool:
        """Whether jaxtyping takes `value` for what is annotated, after which its names are bound.

        Raises what an expression among the dimensions raises.
        """
        memo = self.single, self.variadic, self.structures, self.arguments
        return admitted_by_jaxtyping(value, annotation, memo)

    def value(self, dim: Dim) -> Any:
        """What `dim` is: a size, a tuple of sizes if variadic; None if nothing binds it.

        Raises what an expression raises.
        """
        if dim.kind == "name":
            found = self.single.get(key(dim)), self.variadic.get(key(dim), (None, None))[1]
            return found[dim.variadic]
        if dim.kind == "elem":  # by the two steps of jaxtyping's comparison
            return eval(eval(f"f'{dim.value}'", dict(self.arguments)), self.single.copy())
        return dim.value

    def bind_ones(self) -> None:
        """After the last argument: names that were broadcast and never larger than 1 are 1."""
        for name, origin in self.ones.items():
            if self.single.setdefault(name, 1) == 1:
                self.origins.setdefault(name, origin)

    def copy(self) -> "Bindings":
        return Bindings(*map(copy.copy, vars(self).values()))

    @property
    def names(self) -> dict[str, Any]:
        variadic = {name: tuple(shape) for name, (_, shape) in self.variadic.items()}
        return {**self.single, **variadic, **self.structures}

    def __str__(self) -> str:
        """Lines that follow those of a message: each name, and where it was bound."""
        lines = [f"\n  {x} = {value}, from {self.origins[x]}" for x, value in self.names.items()]
        return "".join(["\nnames bound in this call:", *lines]) if lines else ""


class _Sizes(NamedTuple):
    """An array of any dtype, as jaxtyping sees it."""

    shape: tuple[int, ...]
    dtype: str = "bool"


class MismatchError(Exception):
    """One argument, or a part of it, that does not match its annotation."""

    def __init__(
        self, path: str, pattern: Pattern, problems: Sequence[str], facts: Sequence[str] = ()
    ):
        lines = [f"annotation: {pattern.text}", *facts, *problems]
        super().__init__("\n  ".join([f"argument `{path}` does not match its annotation.", *lines]))
        self.path, self.problems = path, problems


def key(dim: Dim) -> str:
    """The name under which jaxtyping keeps the value of a named dimension."""
    return leaf_prefix() + dim.value if dim.per_leaf else dim.value


def describe(error: BaseException) -> str:
    """An exception in one line."""
    return f"{type(error).__name__}: {error}"


def check(pattern: Pattern, value: Any, path: str, bindings: Bindings) -> None:
    """Checks `value`, called `path` in messages, and extends `bindings`.

    Raises MismatchError at the first part that does not match.
    """
    match pattern:
        case Array():
            _array(pattern, value, path, bindings)
        case Tree():
            _tree(pattern, value, path, bindings)
        case Choice():
            _choice(pattern, value, path, bindings)
        case Container():
            parts = pattern.parts(value)
            if parts is None:
                raise MismatchError(
                    path, pattern, [f"it is {_kind(value)}, not {_wanted(pattern)}"]
                )
            for part, one, step in parts:
                check(part, one, path + step, bindings)
        case Other(cls=cls) if cls is type(None) and value is not None:
            raise MismatchError(path, pattern, [f"it is {_kind(value)}, not None"])


def _array(pattern: Array, value: Any, path: str, bindings: Bindings) -> None:
    if not is_array(value):
        raise MismatchError(path, pattern, [f"it is {_kind(value)}, not an array"])
    dtype, shape = dtype_name(value), tuple(value.shape)
    wanted = pattern.dtype or f"in {pattern.family}"
    problems = [] if pattern.admits(dtype) else [f"dtype {dtype} is not {wanted}"]
    problems += _shape(pattern.dims, shape, path, bindings)
    if problems:
        dims = ", ".join(_expected(dim, bindings) for dim in pattern.dims)
        expected = f"expected: {pattern.family} ({dims}{',' * (len(pattern.dims) == 1)})"
        raise MismatchError(path, pattern, problems, [expected, f"actual: {dtype} {shape}"])
    bindings.seen.append(Seen(pattern, value))


def _shape(
    dims: Sequence[Dim], shape: tuple[int, ...], path: str, bindings: Bindings
) -> Iterator[str]:
    """What is wrong with a shape. Binds the names of the dimensions that are right."""
    spread, variadic = len(shape) - len(dims) + 1, any(dim.variadic for dim in dims)
    if spread < 0 or (spread != 1 and not variadic):
        least = f"at least {len(dims) - 1}" if variadic else len(dims)
        yield f"it has {len(shape)} dimension{'s' * (len(shape) != 1)}, must have {least}"
        return
    start = 0
    for dim in dims:
        stop = start + (spread if dim.variadic else 1)
        where = f"dimension {start}" if stop - start == 1 else f"dimensions {start}:{stop}"
        yield from _dimension(dim, shape[start:stop], where, path, bindings)
        start = stop


def _dimension(
    dim: Dim, sizes: tuple[int, ...], where: str, path: str, bindings: Bindings
) -> Iterator[str]:
    try:
        matched = bindings.admit(_Sizes(sizes), dim.check)
        known = None if matched else bindings.value(dim)
    except Exception as error:
        yield f"{where} (`{dim.text}`) cannot be evaluated: {describe(error.__cause__ or error)}"
        return
    if matched and dim.kind == "name":
        free = dim.broadcastable and not dim.variadic and sizes == (1,)
        origins = bindings.ones if free else bindings.origins
        origins.setdefault(key(dim), f"argument `{path}`, {where}")
    elif not matched and dim.variadic:
        must = "broadcast with" if dim.broadcastable else "be"
        yield f"`{dim.text}` is {sizes}, must {must} {known}"
    elif not matched:
        label = "" if dim.text == str(dim.value) and dim.kind == "size" else f" (`{dim.text}`)"
        yield f"{where}{label} is {sizes[0]}, must be {known}{' or 1' * dim.broadcastable}"


def _expected(dim: Dim, bindings: Bindings) -> str:
    try:
        value = None if dim.kind == "size" else bindings.value(dim)
    except Exception:
        value = None
    return dim.text if value is None else f"{dim.text}={value}"


def _tree(pattern: Tree, value: Any, path: str, bindings: Bindings) -> None:
    # Below what is annotated as a leaf a tree is not flattened; arrays and unchecked things are
    # leaves by themselves.
    (part,) = pattern.children
    is_leaf = None if isinstance(part, Other) else lambda one: _accepts(part, one)
    leaves, found = jax.tree_util.tree_flatten_with_path(value, is_leaf=is_leaf)
    if pattern.structure is not None:
        try:
            like = jax.tree.unflatten(found, [0] * len(leaves))
            matched = bindings.admit(like, jaxtyping.PyTree[Any, pattern.structure])
            problem = f"its structure is {found}, which is not `{pattern.structure}`"
        except jaxtyping.AnnotationError as error:  # a name that no argument of the call binds
            matched, problem = False, str(error)
        if not matched:
            raise MismatchError(path, pattern, [problem])
        bindings.origins.setdefault(pattern.structure, f"argument `{path}`")
    for index, (keys, leaf) in enumerate(leaves):
        with leaf_position(index, pattern.structure):
            check(part, leaf, path + jax.tree_util.keystr(keys), bindings)


def _choice(pattern: Choice, value: Any, path: str, bindings: Bindings) -> None:
    members = [member for member in pattern.children if _accepts(member, value)]
    if not members:
        raise MismatchError(path, pattern, [f"it is {_kind(value)}, not one of these"])
    if len(members) == 1:
        return check(members[0], value, path, bindings)
    problems = []
    for member in members:
        tried = bindings.copy()
        try:
            check(member, value, path, tried)
        except MismatchError as mismatch:
            where = "" if mismatch.path == path else f"`{mismatch.path}`, "
            problems += [f"not {member.text}: {where}{one}" for one in mismatch.problems]
        else:
            return vars(bindings).update(vars(tried))
    actual = [f"actual: {dtype_name(value)} {tuple(value.shape)}"] if is_array(value) else []
    raise MismatchError(path, pattern, problems, actual)


def _accepts(pattern: Pattern, value: Any) -> bool:
    """Whether `value` has the kind that `pattern` speaks of, shapes and dtypes aside."""
    match pattern:
        case Array():
            return is_array(value)
        case Container(is_record=True, kind=kind):
            return isinstance(value, kind)
        case Container():
            parts = pattern.parts(value)
            return parts is not None and all(_accepts(part, one) for part, one, _ in parts)
        case Choice(children=members):
            return any(_accepts(member, value) for member in members)
        case Other(cls=cls, array=array):
            return array if is_array(value) else isinstance(value, cls)
        case _:
            return True


def _wanted(pattern: Container) -> str:
    if pattern.names is not None:
        return f"a tuple of {len(pattern.names)}" if pattern.kind is tuple else f"a {pattern.text}"
    return "a dict" if pattern.kind is Mapping else f"a {pattern.kind.__name__.lower()}"


def _kind(value: Any) -> str:
    if value is None or value is patterns.MISSING:
        return "None" if value is None else "missing"
    if is_array(value):
        return f"an array, {dtype_name(value)} {tuple(value.shape)}"
    name = type(value).__name__
    if type(value) in (tuple, list):
        return f"a {name} of {len(value)}"
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"
