"""Families of dtypes: what an annotation admits, and which dtype a result has.

`Float32` admits one dtype, `Float` a family, `Shaped` any. Dtypes are compared by name, as
jaxtyping does, because torch, numpy and JAX share the names and not the types. With JAX's x64 mode
off there are no 64-bit arrays, so a family admits also what JAX makes of its members.

A result annotated with one dtype has that dtype. A result annotated with a family follows the
inputs: those whose annotation admits the same dtypes or, if there are none, those whose dtype lies
in the family. If they differ the result has the dtype that torch's promotion gives, where scalar
tensors yield to others of their category.
"""

import functools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import torch

from .._dtypes import x64_enabled


# The dtypes that JAX has only with x64 on.
WIDE = frozenset(["int64", "uint64", "float64", "complex128"])


@dataclass(frozen=True)
class Family:
    """The dtypes of one annotation. `names` is None if it admits any."""

    label: str
    names: frozenset[str] | None
    patterns: tuple[re.Pattern[str], ...] = ()

    @property
    def single(self) -> str | None:
        """The one dtype admitted, None for a family."""
        if self.names is None or self.patterns or len(self.names) != 1:
            return None
        return next(iter(self.names))

    def admits(self, name: str) -> bool:
        """Whether an array of the dtype `name` matches, under JAX's present x64 mode."""
        if (
            self.names is None
            or name in self.names
            or name in _canonical_names(self.names, x64_enabled())
        ):
            return True
        return any(pattern.match(name) for pattern in self.patterns)

    def same(self, other: "Family") -> bool:
        return self.names == other.names and self.patterns == other.patterns

    def overlaps(self, other: "Family") -> bool:
        """Whether an array of `other` can be in this family."""
        if self.names is None or other.names is None or self.patterns or other.patterns:
            return True
        return any(map(self.admits, other.names))

    def describe(self) -> str:
        """For messages: `float32`, `Float`, or the members of a small family."""
        if self.single is not None:
            return self.single
        if self.names is None or self.patterns or len(self.names) > 3:
            return f"in {self.label}"
        return " or ".join(sorted(self.names))


@dataclass(frozen=True)
class Seen:
    """One annotated array of a call: what a result's family can follow."""

    family: Family
    name: str
    rank: int
    array: Any

    @property
    def wide(self) -> torch.dtype | None:
        """The dtype of 64 bits that the annotation names for an array that has its 32 bits."""
        single = self.family.single
        return getattr(torch, single) if single in WIDE and single != self.name else None


def family(label: str, found: Iterable[str | re.Pattern[str]] | None) -> Family:
    """A family from jaxtyping's names and patterns."""
    if found is None:
        return Family(label, None)
    members = tuple(found)
    # jaxtyping lists both spellings that numpy has had for one dtype.
    names = frozenset(
        "bool" if name == "bool_" else name for name in members if isinstance(name, str)
    )
    return Family(
        label, names, tuple(pattern for pattern in members if isinstance(pattern, re.Pattern))
    )


def union(families: Sequence[Family]) -> Family:
    """The family that admits what any of `families` admits."""
    label = " | ".join(dict.fromkeys(one.label for one in families))
    if any(one.names is None for one in families):
        return Family(label, None)
    names = frozenset().union(*(one.names or () for one in families))
    return Family(label, names, tuple(pattern for one in families for pattern in one.patterns))


def dtype_name(dtype: Any) -> str:
    """The name jaxtyping compares: `float32` of a torch, numpy or JAX dtype alike."""
    if isinstance(dtype, torch.dtype):
        return str(dtype).rpartition(".")[2]
    name = np.dtype(dtype).name if isinstance(dtype, type) else dtype.type.__name__
    return "bool" if name == "bool_" else name


@functools.cache
def numpy_dtype(name: str) -> np.dtype | None:
    """The dtype of that name, None if arrays cannot have it."""
    try:
        return np.dtype(name)
    except TypeError:
        return None


def canonical(name: str) -> np.dtype:
    """The dtype that JAX uses for `name`: 64-bit ones become 32-bit with x64 off."""
    return _canonical(name, x64_enabled())


def promoted(seen: Sequence[Seen]) -> str:
    """The name of the dtype that torch's operations give for arrays of these dtypes and ranks.

    Raises torch's RuntimeError for dtypes that it does not promote, as float8.
    """
    if len({one.name for one in seen}) == 1:
        return seen[0].name
    arrays = _promote(one.name for one in seen if one.rank > 0)
    scalars = _promote(one.name for one in seen if one.rank == 0)
    if arrays is None or scalars is None:
        return dtype_name(arrays or scalars)
    array = torch.empty((1,), dtype=arrays, device="meta")
    return dtype_name(torch.result_type(array, torch.empty((), dtype=scalars, device="meta")))


def _promote(names: Iterable[str]) -> torch.dtype | None:
    dtypes = [getattr(torch, name) for name in dict.fromkeys(names)]
    return functools.reduce(torch.promote_types, dtypes) if dtypes else None


@functools.cache
def _canonical(name: str, x64: bool) -> np.dtype:
    del x64  # what JAX's answer depends on, so the cache must
    dtype = numpy_dtype(name)
    assert dtype is not None
    return np.dtype(jax.dtypes.canonicalize_dtype(dtype))


@functools.cache
def _canonical_names(names: frozenset[str], x64: bool) -> frozenset[str]:
    return frozenset(_canonical(name, x64).name for name in names if numpy_dtype(name) is not None)
