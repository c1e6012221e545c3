"""The structure of the result: refused at wrap time if the annotation leaves it open, built from a
call's bindings.

What each dimension of a result is:

- a number, a name, `*name` or an expression: its value, bound by the inputs;
- `#name` and `*#name`: what broadcasting the inputs along that name gives. It needs an input in
  which the name is marked `#` too; otherwise the result could be 1 or the name's value there, and
  the annotation is refused;
- `...`, `_`, `_name`, `#4`: open, refused.

Its dtype follows the rule in `dtypes`.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NoReturn

import jax

from .._compat_jaxtyping import Dim, leaf_position
from .._errors import AnnotationError, ShapeError
from . import structures
from .bindings import Bindings, dim_value
from .dtypes import canonical, Family, numpy_dtype, promoted, Seen
from .inputs import Inputs, misplaced, scoped, unbound
from .mismatch import bound_names, describe
from .specs import Array, Choice, Elements, Items, Nothing, Other, Record, Spec, Tree, Values


REMEDY = "Bind it by an input, use a number, or pass output_shapes=."


def validate_result(spec: Spec, known: Inputs, call: str, structure: str | None = None) -> None:
    """Raises AnnotationError if `spec` does not determine the result for inputs `known`."""
    match spec:
        case Array():
            _validate_array(spec, known, call, structure)
        case Items(items=items):
            for item in items:
                validate_result(item, known, call, structure)
        case Record():
            _validate_record(spec, known, call, structure)
        case Tree():
            _validate_tree(spec, known, call)
        case Nothing():
            pass
        case Elements():
            _refuse(
                call,
                spec.text,
                "it leaves the length open",
                "Use tuple[...] with each element, or pass",
            )
        case Values():
            _refuse(call, spec.text, "it leaves the keys open", "Use a TypedDict, or pass")
        case Choice():
            _refuse(
                call, spec.text, "it leaves open which of these is returned", "Name one, or pass"
            )
        case Other():
            _refuse(call, spec.text, "it says no shape", "Annotate it with jaxtyping, or pass")


def build(spec: Spec, bindings: Bindings, call: str) -> Any:
    """The result's structure, a `jax.ShapeDtypeStruct` for each array. Raises ShapeError."""
    match spec:
        case Array():
            return jax.ShapeDtypeStruct(_shape(spec, bindings, call), _dtype(spec, bindings, call))
        case Items(items=items):
            return tuple(build(item, bindings, call) for item in items)
        case Record():
            return _make(spec, [build(field, bindings, call) for _, field in spec.fields])
        case Tree(structure=str(structure)):
            return _build_tree(spec, structure, bindings, call)
        case _:
            return None


def _validate_array(spec: Array, known: Inputs, call: str, structure: str | None) -> None:
    for dim in spec.dims:
        reason = _open(dim, known, structure)
        if reason is not None:
            raise AnnotationError(f"{_header(call, spec.text)}: {reason}.\n{REMEDY}")
    single = spec.family.single
    if single is not None:
        if numpy_dtype(single) is None:
            _refuse(call, spec.text, f"torch has no dtype {single}", "Use another dtype, or pass")
    elif not any(spec.family.overlaps(family) for family in known.families):
        label = spec.family.label
        _refuse(
            call,
            spec.text,
            f"{label} is a family of dtypes and no annotated input has a dtype of it to follow",
            "Name one dtype (such as Float32), annotate an input with the family, or pass",
        )


def _open(dim: Dim, known: Inputs, structure: str | None) -> str | None:
    """Why `dim` does not determine a size, None if it does."""
    name = scoped(dim, structure)
    match dim.kind:
        case "any" | "anys":
            return f"`{dim.text}` stands for any size"
        case "name" | "names":
            if dim.per_leaf and structure is None:
                return misplaced(dim, structure)
            if name not in (known.single if dim.kind == "name" else known.variadic):
                return f"`{dim.text}` is bound by no input"
            if dim.broadcastable and name not in known.broadcast:
                return (
                    f"`{dim.text}` is ambiguous, 1 or `{dim.value}`: no input is broadcast along it"
                )
        case "fixed" | "expression":
            if dim.broadcastable:
                return f"`{dim.text}` is ambiguous, 1 or `{dim.value}`"
            return unbound(dim, known) if dim.kind == "expression" else None
    return None


def _validate_record(spec: Record, known: Inputs, call: str, structure: str | None) -> None:
    if spec.optional:
        _refuse(
            call,
            spec.text,
            f"the key {min(spec.optional)!r} may be missing",
            "Make it required, or pass",
        )
    for _, field in spec.fields:
        validate_result(field, known, call, structure)
    if jax.tree_util.all_leaves([_make(spec, [None] * len(spec.fields))]):
        remedy = "Register it with jax.tree_util.register_dataclass, or pass"
        _refuse(call, spec.text, "JAX does not know this class as a tree", remedy)


def _validate_tree(spec: Tree, known: Inputs, call: str) -> None:
    structure = spec.structure
    if structure is None:
        _refuse(
            call,
            spec.text,
            "it leaves the tree's structure open",
            'Name it, PyTree[..., "T"], or pass',
        )
    if structures.is_open(structure):
        _refuse(
            call, spec.text, "`...` leaves the tree's structure open", "Name all of it, or pass"
        )
    missing = [name for name in structures.pieces(structure) if name not in known.structures]
    if missing:
        _refuse(
            call, spec.text, f"`{missing[0]}` is bound by no input", "Bind it by an input, or pass"
        )
    validate_result(spec.leaf, known, call, structure)


def _header(call: str, text: str) -> str:
    return f"{call}: the annotation {text} does not determine the result"


def _refuse(call: str, text: str, reason: str, remedy: str) -> NoReturn:
    raise AnnotationError(f"{_header(call, text)}: {reason}.\n{remedy} output_shapes=.")


def _shape(spec: Array, bindings: Bindings, call: str) -> tuple[int, ...]:
    shape: list[int] = []
    for dim in spec.dims:
        try:
            value = dim_value(dim, bindings)
        except Exception as error:
            reason = f"`{dim.text}` cannot be evaluated, {describe(error)}"
            raise _unfixed(spec.text, reason, bindings, call) from error
        if value is None:
            raise _unfixed(
                spec.text, f"no argument of this call binds `{dim.text}`", bindings, call
            )
        if isinstance(value, tuple):
            shape += value
        elif value != int(value) or value < 0:
            raise _unfixed(spec.text, f"`{dim.text}` is {value}, which is no size", bindings, call)
        else:
            shape.append(int(value))
    return tuple(shape)


def _dtype(spec: Array, bindings: Bindings, call: str) -> Any:
    single = spec.family.single
    if single is not None:
        return canonical(single)
    followed = _followed(spec.family, bindings.seen)
    if not followed:
        found = ", ".join(dict.fromkeys(one.name for one in bindings.seen)) or "none"
        reason = f"{spec.family.label} follows the inputs, whose dtypes are {found}"
        raise _unfixed(spec.text, reason, bindings, call)
    try:
        return canonical(promoted(followed))
    except (RuntimeError, AttributeError) as error:
        found = ", ".join(dict.fromkeys(one.name for one in followed))
        raise _unfixed(spec.text, f"torch does not promote {found}", bindings, call) from error


def _followed(family: Family, seen: Sequence[Seen]) -> list[Seen]:
    return [one for one in seen if family.same(one.family)] or [
        one for one in seen if family.admits(one.name)
    ]


def _unfixed(text: str, reason: str, bindings: Bindings, call: str) -> ShapeError:
    lines = [f"{call}: the result's structure cannot be read off its annotation {text}: {reason}."]
    return ShapeError("\n".join(lines + bound_names(bindings)))


def _build_tree(spec: Tree, structure: str, bindings: Bindings, call: str) -> Any:
    try:
        found = structures.compose(structures.pieces(structure), bindings.structures)
    except KeyError as error:
        reason = f"no argument of this call binds the structure `{error.args[0]}`"
        raise _unfixed(spec.text, reason, bindings, call) from None
    leaves = []
    for index in range(found.num_leaves):
        with leaf_position(index, structure):
            leaves.append(build(spec.leaf, bindings, call))
    return jax.tree.unflatten(found, leaves)


def _make(spec: Record, values: Sequence[Any]) -> Any:
    names = [name for name, _ in spec.fields]
    if spec.keyed:
        return dict(zip(names, values, strict=True))
    if not dataclasses.is_dataclass(spec.cls):
        return spec.cls(*values)
    # Without `__init__`, which may compute with its arguments; frozen classes refuse `setattr`.
    made = object.__new__(spec.cls)
    for name, value in zip(names, values, strict=True):
        object.__setattr__(made, name, value)
    return made
