"""Every private name of jaxtyping that eqx_torch uses, and why.

jaxtyping parses an annotation such as `Float[Tensor, "batch 784"]` once, into attributes of the
class it returns (`dims`, `dtypes`, `index_variadic`), and checks arrays against it in
`isinstance`. eqx_torch checks the shapes and dtypes of arrays that are not there yet, and computes
shapes of results, so it needs the parsed dimensions and the check of a bare shape. Neither is
public. The rest of the library sees only what this file defines.
"""

import contextlib
import re
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from jaxtyping import AbstractArray, jaxtyped, PyTree

# The parsed form of an annotation: sentinels and classes of its dimensions, and the check of
# single dimensions, by which a message can say which of several is wrong.
from jaxtyping._array_types import (
    _anonymous_dim,
    _anonymous_variadic_dim,
    _any_dtype,
    _check_dims,
    _FixedDim,
    _NamedDim,
    _NamedVariadicDim,
    _SymbolicDim,
)

# `?name` has one value for each leaf of a tree; jaxtyping keeps the leaf's position in thread-
# local storage.
from jaxtyping._storage import clear_treepath_memo, get_treepath_memo, set_treepath_memo


__all__ = [
    "AbstractArray",
    "Dim",
    "check_dim",
    "check_shape",
    "dims",
    "dtype_names",
    "evaluate",
    "is_checking_layer",
    "is_tree_annotation",
    "leaf_position",
    "leaf_prefix",
    "tree_parts",
]

Kind = Literal["fixed", "name", "names", "expression", "any", "anys"]
Single = dict[str, int]
Variadic = dict[str, tuple[bool, tuple[int, ...]]]


@dataclass(frozen=True)
class Dim:
    """One dimension of an annotation as jaxtyping parsed it.

    `kind` is `"fixed"` (`4`), `"name"` (`n`), `"names"` (`*n`), `"expression"` (`n-1`), `"any"`
    (`_`) or `"anys"` (`...`); `value` is the size, the name or the expression.
    """

    text: str
    kind: Kind
    value: int | str | None
    broadcastable: bool = False
    per_leaf: bool = False


def dims(annotation: type[AbstractArray]) -> tuple[Dim, ...]:
    """The dimensions of `annotation`, in order."""
    return tuple(map(_dim, annotation.dims, annotation.dim_str.split()))


def _dim(raw: Any, text: str) -> Dim:
    if raw is _anonymous_dim:
        return Dim(text, "any", None)
    if raw is _anonymous_variadic_dim:
        return Dim(text, "anys", None)
    if isinstance(raw, _FixedDim):
        return Dim(text, "fixed", raw.size, raw.broadcastable)
    if isinstance(raw, _SymbolicDim):
        return Dim(text, "expression", raw.elem, raw.broadcastable)
    if isinstance(raw, _NamedDim):
        return Dim(text, "name", raw.name, raw.broadcastable, raw.treepath)
    assert isinstance(raw, _NamedVariadicDim)
    return Dim(text, "names", raw.name, raw.broadcastable, raw.treepath)


def dtype_names(annotation: type[AbstractArray]) -> tuple[str | re.Pattern[str], ...] | None:
    """The names and patterns of the dtypes that `annotation` admits, None for any."""
    found: Any = annotation.dtypes
    return None if found is _any_dtype else tuple(found)


def check_shape(
    annotation: type[AbstractArray],
    array: Any,
    single: Single,
    variadic: Variadic,
    arguments: Mapping[str, Any],
) -> str:
    """Checks `array.shape`, adding the names it binds to `single` and `variadic`.

    Returns the empty string, or the reason why the shape does not match.
    """
    return annotation._check_shape(array, single, variadic, arguments)  # pyright: ignore[reportArgumentType]


def check_dim(
    annotation: type[AbstractArray],
    index: int,
    size: int,
    single: Single,
    arguments: Mapping[str, Any],
) -> str:
    """`check_shape` for one dimension that is not variadic."""
    return _check_dims([annotation.dims[index]], (size,), single, dict(arguments))  # pyright: ignore[reportArgumentType]


def evaluate(expression: str, single: Single, arguments: Mapping[str, Any]) -> Any:
    """The value of a symbolic dimension, by the two steps of jaxtyping's comparison."""
    text = eval(f"f'{expression}'", dict(arguments)) if "{" in expression else expression
    return eval(text, single.copy())


def is_tree_annotation(annotation: Any) -> bool:
    """Whether `annotation` is `PyTree[...]`; the bare `PyTree`, which says nothing, is not."""
    return isinstance(annotation, type(PyTree)) and annotation is not PyTree


def tree_parts(annotation: Any) -> tuple[Any, str | None]:
    """The leaf annotation and the structure's name of `PyTree[leaf, "structure"]`."""
    return annotation.leaftype, annotation.structure


@contextlib.contextmanager
def leaf_position(index: int, structure: str | None) -> Iterator[None]:
    """Within it, `?name` means the name's value at leaf `index` of the tree named `structure`."""
    if structure is None:
        yield
        return
    set_treepath_memo(index, structure)
    try:
        yield
    finally:
        clear_treepath_memo()


def leaf_prefix() -> str:
    """What jaxtyping puts before the name of a `?name` dimension at the current leaf."""
    return get_treepath_memo()


def is_checking_layer(fn: types.FunctionType) -> bool:
    """Whether `fn` is the wrapper that `jaxtyped(typechecker=...)` puts around a function.

    Its variables tell it from the wrapper of `jaxtyped(typechecker=None)`, which checks nothing.
    """
    code = fn.__code__
    ours = code.co_filename == jaxtyped.__code__.co_filename
    return ours and "param_signature" in code.co_freevars
