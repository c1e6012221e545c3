"""A call site: everything about a call but its arrays."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import torch

from .._ambient import Ambient
from .._statics import Static
from .._trees import flatten, leaf_paths, Structure


@dataclasses.dataclass(frozen=True)
class Site:
    """How a function is called: everything about the call but its arrays.

    Attributes:
        structure: of `(args, kwargs)`.
        statics: for each leaf, the Python value, or None where an array stands.
        restored: for each array, the torch dtype that it is given before torch sees it.
        ambient: the torch settings of the thread that traced the call.
    """

    structure: Structure
    statics: tuple[Static | None, ...]
    restored: tuple[torch.dtype | None, ...]
    ambient: Ambient

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.structure, self.statics, self.restored, self.ambient))

    def arguments(self, arrays: Sequence[Any]) -> tuple[Sequence[Any], dict[str, Any]]:
        """The arguments, with these arrays in their places."""
        if self.is_positional:
            return arrays, {}
        rest = iter(arrays)
        leaves = [next(rest) if s is None else s.for_call() for s in self.statics]
        return self.structure.unflatten(leaves)

    def rest(self, count: int) -> "Site":
        """The call without its first `count` positional arguments."""
        structure = self.structure.rest(count)
        statics = self.statics[len(self.statics) - structure.num_leaves :]
        restored = self.restored[len(self.restored) - statics.count(None) :]
        return Site(structure, statics, restored, self.ambient)

    @functools.cached_property
    def unordered(self) -> "Site":
        """Equal for calls that differ in the order of dictionaries only."""
        return dataclasses.replace(self, structure=self.structure.unordered)

    @functools.cached_property
    def paths(self) -> list[str]:
        """Where each array stands in the call."""
        pairs = zip(leaf_paths(self.structure), self.statics, strict=True)
        return [path for path, static in pairs if static is None]

    @functools.cached_property
    def is_positional(self) -> bool:
        """Whether the arguments are the arrays, in order, and nothing else."""
        _, plain = flatten(((0,) * len(self.statics), {}))
        return self.structure == plain and not any(self.statics)


def argument_name(path: str) -> str:
    """What messages call the leaf of `(args, kwargs)` at this path.

    `[0][1]['a']` is the second positional argument's entry 'a'.
    """
    if path.startswith("[0]"):
        index, _, rest = path[4:].partition("]")
        return f"argument {index}{rest}"
    name, _, rest = path[4:].partition("]")
    return f"argument {name}{rest}"
