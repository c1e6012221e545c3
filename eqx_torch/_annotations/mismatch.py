"""Why an argument does not match, and the message that says so.

`check` raises a `MismatchError` with the facts where it finds them; the call turns the one that
leaves it into a `ShapeError`. A mismatch inside a union is caught there and becomes one line of
the union's own.
"""

from collections.abc import Sequence
from typing import Any

from .._errors import ShapeError
from .bindings import add_array, add_dim, Bindings, dim_value, Origin, placed
from .dtypes import dtype_name
from .specs import Array, is_array


class MismatchError(Exception):
    """One argument, or a part of it, that does not match its annotation."""

    def __init__(
        self,
        path: str,
        annotation: str,
        problems: Sequence[str],
        bindings: Bindings,
        expected: str | None = None,
        actual: str | None = None,
    ):
        super().__init__(path)
        self.path, self.annotation, self.problems = path, annotation, tuple(problems)
        self.bindings, self.expected, self.actual = bindings, expected, actual


def shape_error(call: str, mismatch: MismatchError) -> ShapeError:
    """The exception for the caller of the function named `call`."""
    lines = [
        f"{call}: argument `{mismatch.path}` does not match its annotation.",
        f"  annotation: {mismatch.annotation}",
    ]
    if mismatch.expected is not None:
        lines.append(f"  expected: {mismatch.expected}")
    if mismatch.actual is not None:
        lines.append(f"  actual: {mismatch.actual}")
    lines += [f"  {problem}" for problem in mismatch.problems]
    return ShapeError("\n".join([*lines, *bound_names(mismatch.bindings)]))


def bound_names(bindings: Bindings) -> list[str]:
    """Lines naming each binding and where it was made."""
    names = bindings.names
    if not names:
        return []
    return ["names bound in this call:"] + [
        f"  {name} = {value}{_origin(bindings.origins.get(name))}" for name, value in names.items()
    ]


def kind_mismatch(
    path: str, annotation: str, value: Any, bindings: Bindings, wanted: str
) -> MismatchError:
    """`value` is not even the kind of thing that is annotated."""
    return MismatchError(path, annotation, [f"it is {_kind(value)}, not {wanted}"], bindings)


def array_mismatch(array: Array, value: Any, path: str, bindings: Bindings) -> MismatchError:
    """`value` is an array of the wrong dtype or shape: says each dimension that is wrong."""
    problems = []
    name = dtype_name(value.dtype)
    if not array.family.admits(name):
        problems.append(f"dtype {name} is not {array.family.describe()}")
    found = bindings.copy()
    problems += _dimensions(array, value, path, found)
    expected = f"{array.family.label} {_expected(array, found)}"
    actual = f"{name} {tuple(value.shape)}"
    return MismatchError(path, array.text, problems, found, expected, actual)


def describe(error: BaseException) -> str:
    """An exception in one line."""
    return f"{type(error).__name__}: {error}"


def _dimensions(array: Array, value: Any, path: str, bindings: Bindings) -> list[str]:
    rank, declared = len(value.shape), len(array.dims)
    if array.annotation.index_variadic is None:
        if rank != declared:
            return [f"it has {_count(rank)}, must have {declared}"]
    elif rank < declared - 1:
        return [f"it has {_count(rank)}, must have at least {declared - 1}"]
    problems = []
    for index, dim, start, _ in placed(array.dims, rank):
        if dim.kind in ("names", "anys"):
            continue
        size = value.shape[start]
        try:
            matched = add_dim(array, index, size, path, start, bindings)
        except Exception as error:
            reason = describe(error.__cause__ or error)
            problems.append(f"dimension {start} (`{dim.text}`) cannot be evaluated: {reason}")
            continue
        if not matched:
            label = "" if dim.text == str(dim.value) and dim.kind == "fixed" else f" (`{dim.text}`)"
            or_one = " or 1" if dim.broadcastable else ""
            problems.append(
                f"dimension {start}{label} is {size}, must be {dim_value(dim, bindings)}{or_one}"
            )
    return problems or _variadic(array, value, path, bindings)


def _variadic(array: Array, value: Any, path: str, bindings: Bindings) -> list[str]:
    if add_array(array, value, path, bindings):
        return []
    for _, dim, start, stop in placed(array.dims, len(value.shape)):
        if dim.kind == "names":
            shape, known = tuple(value.shape[start:stop]), dim_value(dim, bindings)
            must = "broadcast with" if dim.broadcastable else "be"
            return [f"`{dim.text}` is {shape}, must {must} {known}"]
    return []


def _expected(array: Array, bindings: Bindings) -> str:
    parts = [_expected_dim(dim, bindings) for dim in array.dims]
    return f"({parts[0]},)" if len(parts) == 1 else f"({', '.join(parts)})"


def _expected_dim(dim: Any, bindings: Bindings) -> str:
    try:
        value = dim_value(dim, bindings)
    except Exception:
        return dim.text
    return dim.text if dim.kind == "fixed" or value is None else f"{dim.text}={value}"


def _origin(origin: Origin | None) -> str:
    if origin is None:
        return ""
    if origin.start is None or origin.stop is None:
        return f", from argument `{origin.path}`"
    if origin.stop - origin.start == 1:
        return f", from argument `{origin.path}`, dimension {origin.start}"
    return f", from argument `{origin.path}`, dimensions {origin.start}:{origin.stop}"


def _kind(value: Any) -> str:
    if value is None:
        return "None"
    if is_array(value):
        return f"an array, {dtype_name(value.dtype)} {tuple(value.shape)}"
    if isinstance(value, tuple | list) and type(value) in (tuple, list):
        return f"a {type(value).__name__} of {len(value)}"
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def _count(rank: int) -> str:
    return "1 dimension" if rank == 1 else f"{rank} dimensions"
