"""Trees of arrays from one library to the other.

A tree is what torch functions take and return (see `_trees`), and becomes what such a function
would be given or return in JAX.
"""

from collections.abc import Callable
from typing import Any

import jax
import torch
from jaxtyping import PyTree

from ._arrays import j2t, t2j, Via
from ._errors import EqxTorchError
from ._trees import flatten, leaf_paths, Structure


def tree_t2j(tree: PyTree, via: Via = "dlpack") -> PyTree:
    """A copy of a tree with every torch tensor in it converted by `t2j`.

    **Arguments:**

    - `tree`: whatever torch functions take and return: nested dictionaries and tuples, dataclasses,
        mappings such as what tokenizers return, and any other JAX pytree.
    - `via`: as in `t2j`.

    **Returns:**

    A JAX pytree of the same structure. Leaves that are not torch tensors are left as they are.

    **Raises:**

    As `t2j`; a note on the exception says which leaf it was.

    !!! example

        >>> import torch
        >>> tree_t2j({"weight": torch.ones(2), "name": "linear"})
        {'weight': Array([1., 1.], dtype=float32), 'name': 'linear'}
    """
    leaves, structure = _converted(lambda leaf: t2j(leaf, via), torch.Tensor, tree)
    return structure.in_jax(leaves)


def tree_j2t(tree: PyTree, via: Via = "dlpack") -> PyTree:
    """A copy of a tree with every JAX array in it converted by `j2t`.

    **Arguments:**

    - `tree`: any JAX pytree, Equinox modules included, and what `tree_t2j` takes.
    - `via`: as in `j2t`.

    **Returns:**

    A tree of the same structure. Leaves that are not JAX arrays are left as they are: NumPy arrays
    and numbers too.

    **Raises:**

    As `j2t`; a note on the exception says which leaf it was.

    !!! example

        >>> import jax.numpy as jnp
        >>> tree_j2t((jnp.ones(2), 3))
        (tensor([1., 1.]), 3)
    """
    leaves, structure = _converted(lambda leaf: j2t(leaf, via), jax.Array, tree)
    return structure.unflatten(leaves)


def _converted(
    convert: Callable[[Any], Any], leaf_type: type, tree: PyTree
) -> tuple[list[Any], Structure]:
    leaves, structure = flatten(tree)
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, leaf_type):
            try:
                leaves[i] = convert(leaf)
            except EqxTorchError as error:
                error.add_note(f"The leaf is at tree{leaf_paths(structure)[i]}.")
                raise
    return leaves, structure
