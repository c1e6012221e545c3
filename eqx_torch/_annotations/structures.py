"""Names of tree structures: `PyTree[A, "T"]` binds `T`, `PyTree[A, "S T"]` is made of two bound
ones.

jaxtyping decides this inside its `isinstance`, where it cannot be called for trees of things that
are not arrays, so the rules are here again: a single name binds or compares; several are composed,
each leaf of the first being a tree of the second; a leading `...` leaves the upper levels open, a
trailing one the lower levels.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax


Structure = Any  # a `jax.tree_util.PyTreeDef`, which is no type to type checkers


def is_binding(structure: str) -> bool:
    """Whether `structure` is a single name."""
    return structure.isidentifier()


def pieces(structure: str) -> tuple[str, ...]:
    """The names in `structure`."""
    return tuple(piece for piece in structure.split() if piece != "...")


def is_open(structure: str) -> bool:
    """Whether `...` leaves part of the structure open."""
    return "..." in structure.split()


def compose(names: Sequence[str], known: Mapping[str, Structure]) -> Structure:
    """The structure in which each leaf of one is the next. Raises KeyError for an unbound name."""
    tree = 0
    # JAX's `PyTreeDef.compose` gives wrong results for some trees, so trees of numbers are
    # composed instead.
    for name in names:
        inner = _dummy(known[name])
        tree = jax.tree.map(lambda _, inner=inner: inner, tree)
    return jax.tree.structure(tree)


def matches(structure: str, found: Structure, known: Mapping[str, Structure]) -> bool:
    """Whether `found` is what `structure` says. Raises KeyError for a name that is not bound."""
    expected = compose(pieces(structure), known)
    if structure.startswith("..."):
        leaves = jax.tree.leaves(
            _dummy(found), is_leaf=lambda tree: jax.tree.structure(tree) == expected
        )
        return all(jax.tree.structure(leaf) == expected for leaf in leaves)
    if structure.endswith("..."):
        try:
            jax.tree.map(lambda *_: 0, _dummy(expected), _dummy(found))
        except ValueError:
            return False
        return True
    return found == expected


def _dummy(structure: Structure) -> Any:
    return jax.tree.unflatten(structure, [0] * structure.num_leaves)
