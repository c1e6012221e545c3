"""What the inputs' annotations can bind, and what is wrong with them, known before any call."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .._compat_jaxtyping import Dim
from .._errors import AnnotationError
from . import structures
from .dtypes import Family
from .expressions import argument_names, dimension_names
from .specs import arrays_in, children, Spec, Tree, trees_in


@dataclass(frozen=True)
class Inputs:
    """What a call can bind at most.

    Names of `?` dimensions come with the structure whose leaves they vary over.
    """

    parameters: frozenset[str]
    single: frozenset[tuple[str, str | None]]
    variadic: frozenset[tuple[str, str | None]]
    broadcast: frozenset[tuple[str, str | None]]
    structures: frozenset[str]
    families: tuple[Family, ...]


def inputs(specs: Sequence[Spec], parameters: Iterable[str]) -> Inputs:
    """What annotated inputs of these specs can bind."""
    arrays = [found for spec in specs for found in arrays_in(spec)]
    dims = [(dim, scoped(dim, structure)) for array, structure in arrays for dim in array.dims]
    trees = [tree.structure for spec in specs for tree in trees_in(spec)]
    return Inputs(
        frozenset(parameters),
        frozenset(name for dim, name in dims if dim.kind == "name"),
        frozenset(name for dim, name in dims if dim.kind == "names"),
        frozenset(
            name for dim, name in dims if dim.kind in ("name", "names") and dim.broadcastable
        ),
        frozenset(name for name in trees if name is not None and structures.is_binding(name)),
        tuple(array.family for array, _ in arrays),
    )


def scoped(dim: Dim, structure: str | None) -> tuple[str, str | None]:
    """The name of `dim`, with the structure that a `?` refers to."""
    return str(dim.value), structure if dim.per_leaf else None


def unbound(dim: Dim, known: Inputs) -> str | None:
    """The reason why the expression `dim` cannot be evaluated in any call, None if it can."""
    try:
        arguments, names = argument_names(str(dim.value)), dimension_names(str(dim.value))
    except SyntaxError:
        return f"`{dim.text}` is no Python expression"
    missing = sorted(arguments - known.parameters)
    if missing:
        return f"`{dim.text}` mentions `{missing[0]}`, which is no argument"
    missing = sorted(name for name in names if (name, None) not in known.single)
    return f"`{missing[0]}` in `{dim.text}` is bound by no input" if missing else None


def is_dependent(spec: Spec) -> bool:
    """Whether checking `spec` needs names that other arguments must have bound before."""
    composed = any(
        tree.structure and not structures.is_binding(tree.structure) for tree in trees_in(spec)
    )
    return composed or any(
        dim.kind == "expression" and dimension_names(str(dim.value))
        for array, _ in arrays_in(spec)
        for dim in array.dims
    )


def validate(spec: Spec, known: Inputs, where: str) -> None:
    """Raises AnnotationError for what no call could ever match; `where` begins the message."""
    for array, structure in arrays_in(spec):
        for dim in array.dims:
            reason = unbound(dim, known) if dim.kind == "expression" else misplaced(dim, structure)
            if reason is not None:
                raise AnnotationError(f"{where} {array.text} cannot be checked: {reason}.")
    for tree in trees_in(spec):
        _validate_tree(tree, known, where)


def misplaced(dim: Dim, structure: str | None) -> str | None:
    """The reason why a `?` dimension means nothing where it stands, None if it does."""
    if not dim.per_leaf or structure is not None:
        return None
    return f'`{dim.text}` varies over the leaves of a tree, but it is in no PyTree[..., "T"]'


def _validate_tree(tree: Tree, known: Inputs, where: str) -> None:
    structure = tree.structure
    if structure is None:
        return
    missing = [name for name in structures.pieces(structure) if name not in known.structures]
    if missing:
        raise AnnotationError(
            f"{where} {tree.text} cannot be checked: `{missing[0]}` is bound by no input."
        )
    below = [
        inner
        for child in children(tree)
        for inner in trees_in(child)
        if inner.structure is not None
    ]
    if below:
        raise AnnotationError(
            f"{where} {tree.text} cannot be checked: a tree with a named structure is inside"
            " another one."
        )
