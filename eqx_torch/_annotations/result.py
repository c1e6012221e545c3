"""What a call returns, by the annotation of the result.

What each dimension of a result is:

- a number, a name, `*name` or an expression: its value, bound by the inputs;
- `#name` and `*#name`: what broadcasting the inputs along that name gives. It needs an input in
  which the name is marked `#` too; otherwise the result could be 1 or the name's value there;
- `...`, `_`, `_name`, `#4`: open.

A result annotated with one dtype has that dtype. One annotated with a family follows the inputs:
those whose annotation admits the same dtypes or, if there are none, those whose dtype lies in the
family. If they differ the result has the dtype that torch's promotion gives, where scalar tensors
yield to others of their category.

What is open whatever the arguments is found when a function is wrapped, by the same walk, over
bindings of all that its inputs can bind.
"""

import dataclasses
import functools
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import torch

from .._compat import leaf_position
from .._dtypes import canonical_dtype, dtype_j2t
from .._errors import DtypeError
from .._trees import bare_dataclass
from .check import Bindings, describe, key, Seen
from .patterns import Array, Choice, Container, Dim, Other, Pattern, Tree


class OpenError(Exception):
    """An annotation that does not determine the result, and what to do besides `output_shapes=`."""

    def __init__(
        self, pattern: Pattern, reason: str, remedy: str = "Bind it by an input, use a number"
    ) -> None:
        super().__init__(reason)
        self.text, self.reason, self.remedy = pattern.text, reason, remedy


class _Unknown(int):
    """Stands for an argument in expressions: all that is asked of it is 1."""

    __iter__ = None  # it would never end by `__getitem__`

    def __getattr__(self, name: str) -> "_Unknown":
        return self

    def __getitem__(self, index: Any) -> "_Unknown":
        return self

    def __len__(self) -> int:
        return 1


def bindable(patterns: Iterable[Pattern], parameters: Iterable[str]) -> Bindings:
    """What inputs of these patterns can bind at most, as bindings with the size 1."""
    known = Bindings(dict.fromkeys(parameters, _Unknown(1)))
    for pattern in patterns:
        _bind(pattern, known)
    return known


def unbound(dim: Dim, known: Bindings) -> str | None:
    """Why an expression can be evaluated in no call, None if it may be."""
    try:
        known.value(dim)
    except NameError as error:
        return f"`{error.name}` in `{dim.text}` is bound by no input"
    except SyntaxError:
        return None if "{" in dim.text else f"`{dim.text}` is no Python expression"
    except Exception:
        return None  # the arguments of a call will tell
    return None


def is_dependent(pattern: Pattern, known: Bindings) -> bool:
    """Whether checking `pattern` needs names that other inputs must have bound before."""
    dims = [dim for array in pattern.arrays() for dim in array.dims if dim.kind == "elem"]
    composed = any(not structure.isidentifier() for structure in pattern.structures())
    return composed or any(unbound(dim, Bindings(known.arguments)) for dim in dims)


def refuse_open(pattern: Pattern, known: Bindings) -> None:
    """Raises OpenError if no call with inputs that bind `known` determines the result."""
    _build(pattern, known.structures, lambda array: _refuse_open(array, known))


def predict(pattern: Pattern, bindings: Bindings) -> Any:
    """The result, a `jax.ShapeDtypeStruct` for each array. Raises OpenError."""
    return _build(pattern, bindings.structures, lambda array: _predict(array, bindings))


def _bind(pattern: Pattern, known: Bindings) -> None:
    if isinstance(pattern, Array):
        known.seen.append(Seen(pattern, None))
        for dim in (dim for dim in pattern.dims if dim.kind == "name"):
            if dim.variadic:
                known.variadic[key(dim)] = (False, ())
            else:
                known.single[key(dim)] = 1
            if dim.broadcastable:
                known.ones[key(dim)] = ""
    structure = pattern.structure if isinstance(pattern, Tree) else None
    if structure is not None and structure.isidentifier():
        known.structures[structure] = jax.tree.structure(0)
    with leaf_position(0, structure):
        for child in pattern.children:
            _bind(child, known)


def _build(pattern: Pattern, structures: Mapping[str, Any], leaf: Callable[[Array], Any]) -> Any:
    match pattern:
        case Array():
            return leaf(pattern)
        case Container() if pattern.optional:
            reason = f"the key {min(pattern.optional)!r} may be missing"
            raise OpenError(pattern, reason, "Make it required")
        case Container(names=tuple(names)):
            parts = [_build(one, structures, leaf) for one in pattern.children]
            return _made(pattern.kind, dict(zip(names, parts, strict=True)))
        case Tree():
            found = _composed(pattern, structures)
            leaves = []
            for index in range(found.num_leaves):
                with leaf_position(index, pattern.structure):
                    leaves.append(_build(pattern.children[0], structures, leaf))
            return jax.tree.unflatten(found, leaves)
        case Container(kind=kind) if kind is Mapping:
            raise OpenError(pattern, "it leaves the keys open", "Use a TypedDict")
        case Container():
            raise OpenError(
                pattern, "it leaves the length open", "Use tuple[...] with each element"
            )
        case Choice():
            raise OpenError(pattern, "it leaves open which of these is returned", "Name one")
        case Other(cls=cls) if cls is not type(None):
            raise OpenError(pattern, "it says no shape", "Annotate it with jaxtyping")


def _made(kind: Any, parts: dict[Any, Any]) -> Any:
    if dataclasses.is_dataclass(kind):
        return bare_dataclass(typing.cast(type, kind), parts)
    if kind is Mapping:
        return parts
    return tuple(parts.values()) if kind is tuple else kind(*parts.values())


def _composed(pattern: Tree, structures: Mapping[str, Any]) -> Any:
    """The structure in which each leaf of one is the next."""
    if pattern.structure is None:
        raise OpenError(pattern, "it leaves the tree's structure open", 'Name it, PyTree[..., "T"]')
    tree: Any = 0
    # As JAX's `PyTreeDef.compose` is wrong for some trees, trees of numbers are composed instead.
    for name in pattern.structure.split():
        if name == "...":
            raise OpenError(pattern, "`...` leaves the tree's structure open", "Name all of it")
        if name not in structures:
            raise OpenError(pattern, f"`{name}` is bound by no input", "Bind it by an input")
        inner = jax.tree.unflatten(structures[name], [0] * structures[name].num_leaves)
        tree = jax.tree.map(lambda _, inner=inner: inner, tree)
    return jax.tree.structure(tree)


def _refuse_open(array: Array, known: Bindings) -> None:
    for dim in array.dims:
        if reason := _open(dim, known):
            raise OpenError(array, reason)
    if array.dtype is not None:
        try:
            dtype_j2t(array.dtype)
        except DtypeError:
            raise OpenError(array, f"torch has no dtype {array.dtype}", "Use another") from None
    elif not any(array.admits(dtype) for one in known.seen for dtype in one.pattern.dtypes):
        family = f"{array.family} is a family of dtypes"
        reason = f"{family} and no annotated input has a dtype of it to follow"
        remedy = "Name one dtype (such as Float32), annotate an input with the family"
        raise OpenError(array, reason, remedy)


def _open(dim: Dim, known: Bindings) -> str | None:
    """Why `dim` does not determine a size, None if it does."""
    if dim.kind == "any":
        return f"`{dim.text}` stands for any size"
    if dim.kind == "name" and known.value(dim) is None:
        return f"`{dim.text}` is bound by no input"
    if dim.broadcastable and not (dim.kind == "name" and key(dim) in known.ones):
        why = ": no input is broadcast along it" if dim.kind == "name" else ""
        return f"`{dim.text}` is ambiguous, 1 or `{dim.value}`{why}"
    return unbound(dim, known)


def _predict(array: Array, bindings: Bindings) -> jax.ShapeDtypeStruct:
    shape: list[int] = []
    for dim in array.dims:
        try:
            value = bindings.value(dim)
        except Exception as error:
            reason = f"`{dim.text}` cannot be evaluated, {describe(error)}"
            raise OpenError(array, reason) from error
        if value is None:
            raise OpenError(array, f"no argument of this call binds `{dim.text}`")
        sizes = value if dim.variadic else (value,)
        if any(size != int(size) or size < 0 for size in sizes):
            raise OpenError(array, f"`{dim.text}` is {value}, which is no size")
        shape += map(int, sizes)
    dtype = array.dtype or _followed(array, bindings.seen)
    return jax.ShapeDtypeStruct(tuple(shape), canonical_dtype(dtype))


def _followed(array: Array, seen: Sequence[Seen]) -> torch.dtype:
    own = [one for one in seen if one.pattern.dtypes == array.dtypes]
    found = own or [one for one in seen if array.admits(one.dtype)]
    names = ", ".join(dict.fromkeys(one.dtype for one in found or seen)) or "none"
    if not found:
        raise OpenError(array, f"{array.family} follows the inputs, whose dtypes are {names}")
    try:
        dtypes = [(getattr(torch, one.dtype), len(one.array.shape) > 0) for one in found]
        groups = [[dtype for dtype, ranked in dtypes if ranked is kind] for kind in (True, False)]
        like = [
            torch.empty(shape, dtype=functools.reduce(torch.promote_types, group), device="meta")
            for shape, group in zip(((1,), ()), groups, strict=True)
            if group
        ]
        return torch.result_type(like[0], like[-1])
    except (RuntimeError, AttributeError) as error:
        raise OpenError(array, f"torch does not promote {names}") from error
