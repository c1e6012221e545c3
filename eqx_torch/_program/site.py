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
class Own:
    """What a model puts in front of the arguments of a call: parameters, buffers and a seed.

    Attributes:
        labels: what messages call each of these inputs.
        trained: those that require gradients in torch.
        seed: which of them random numbers are drawn from, None if none are.
        inference: whether the model is evaluated.
        handed: how many of the positional arguments, the first, are not the user's.
    """

    labels: tuple[str, ...]
    trained: frozenset[int]
    seed: int | None
    inference: bool
    handed: int = 0

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.labels, self.trained, self.seed, self.inference, self.handed))

    def __len__(self) -> int:
        return len(self.labels)


@dataclasses.dataclass(frozen=True)
class Site:
    """How a function is called: everything about the call but its arrays.

    Attributes:
        structure: of `(args, kwargs)`.
        statics: for each leaf, the Python value, or None where an array stands.
        wide: for each array, the dtype of 64 bits that it is given before torch sees it, None if
            it stays as it is.
        ambient: the torch settings of the thread that traced the call.
        own: the inputs that come before the arrays among the arguments, None if there are none.
    """

    structure: Structure
    statics: tuple[Static | None, ...]
    wide: tuple[torch.dtype | None, ...]
    ambient: Ambient
    own: Own | None = None

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.structure, self.statics, self.wide, self.ambient, self.own))

    @functools.cached_property
    def num_own(self) -> int:
        """How many of the inputs are not among the arguments; they come first."""
        return 0 if self.own is None else len(self.own)

    @property
    def handed(self) -> int:
        """How many of the positional arguments, the first, are not the user's."""
        return 0 if self.own is None else self.own.handed

    @property
    def seed(self) -> int | None:
        """Which input random numbers are drawn from, None if none are."""
        return None if self.own is None else self.own.seed

    def arguments(self, arrays: Sequence[Any]) -> tuple[Sequence[Any], dict[str, Any]]:
        """The arguments, with these arrays in their places."""
        if self.is_positional:
            return arrays, {}
        rest = iter(arrays)
        leaves = [next(rest) if s is None else s.for_call() for s in self.statics]
        return self.structure.unflatten(leaves)

    @functools.cached_property
    def unordered(self) -> "Site":
        """Equal for calls that differ in the order of dictionaries only."""
        return dataclasses.replace(self, structure=self.structure.unordered)

    @functools.cached_property
    def labels(self) -> tuple[str, ...]:
        """What messages call each input."""
        pairs = zip(leaf_paths(self.structure), self.statics, strict=True)
        named = tuple(argument_name(path, self.handed) for path, static in pairs if static is None)
        return named if self.own is None else self.own.labels + named

    def described(self, inputs: Sequence[str]) -> str:
        """The inputs of a call by name, for messages, those that the user passed first."""
        named = [f"{label} {shown}" for label, shown in zip(self.labels, inputs, strict=True)]
        named = [*named[self.num_own :], *named[: self.num_own]]
        rest = f", {len(named) - 8} more" if len(named) > 8 else ""
        return ", ".join(named[:8]) + rest if named else "no arrays"

    def may_require_gradient(self, i: int) -> bool:
        """Whether the input `i`, of a floating dtype, may require a gradient in torch."""
        return self.own is None or i in self.own.trained

    @functools.cached_property
    def is_positional(self) -> bool:
        """Whether the arguments are the arrays, in order, and nothing else."""
        _, plain = flatten(((0,) * len(self.statics), {}))
        return self.structure == plain and not any(self.statics)


def argument_name(path: str, handed: int = 0) -> str:
    """What messages call the leaf of `(args, kwargs)` at this path.

    `[0][1]['a']` is the second positional argument's entry 'a'. The first `handed` of these are not
    the user's.
    """
    if path.startswith("[0]"):
        index, _, rest = path[4:].partition("]")
        users = int(index) - handed
        return f"argument {users}{rest}" if users >= 0 else f"what is handed over{rest}"
    name, _, rest = path[4:].partition("]")
    return f"argument {name}{rest}"
