"""What a function may return: tensors, Python numbers, and constants.

A tensor arrives as an array, a number as the array that JAX makes of it, with the value of each
run. Constants (strings, members of enumerations, dtypes) are part of the structure, and have to be
the same in every run.
"""

from typing import Any

import jax
import torch

from .._dtypes import canonical_dtype
from .._errors import OutputError
from .._trees import constants, flatten_result, leaf_paths, NUMBERS, STAR, Structure
from .base import Spec
from .function import TorchFunction


_WIDEST = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}


def opened(function: TorchFunction, result: Any) -> tuple[tuple[Spec, ...], Structure]:
    """What a run has returned. Raises `OutputError` for what JAX cannot take."""
    leaves, structure = flatten_result(result)
    paths = leaf_paths(structure)
    specs = (_spec(function, path, x) for path, x in zip(paths, leaves, strict=True))
    return tuple(specs), structure


def widest(number: Any) -> torch.dtype | None:
    """The dtype that holds a Python number, None of anything else."""
    return _WIDEST.get(type(number))


def not_taken(function: TorchFunction, path: str, result: Any) -> str:
    """The message for an output that JAX cannot take."""
    name, place = function.name, function.output_label(path)
    where = f" at {place}" if place else ""
    if isinstance(result, torch.Tensor):
        return (
            f"`{name}` returned a tensor of layout {result.layout}{where}, but JAX arrays are "
            "dense. Return `.to_dense()` of it."
        )
    return (
        f"`{name}` returned {result!r} of type {type(result).__name__}{where}, but JAX can only "
        "take torch tensors, numbers and strings (in any nesting of tuples, lists, dicts, "
        "dataclasses and None). Return `torch.as_tensor(...)` of it, or leave it out."
    )


def other_constant(function: TorchFunction, declared: Structure, returned: Structure) -> str | None:
    """The message for structures that differ in a constant only."""
    mine, theirs = constants(declared), constants(returned)
    if [path for path, _ in mine] != [path for path, _ in theirs]:
        return None
    for (path, old), (_, new) in zip(mine, theirs, strict=True):
        place = function.output_label(path)
        where = f" at {place}" if place else ""
        if old is STAR and new is not STAR:
            return (
                f"`{function.name}` returned {new!r} of type {type(new).__name__}{where}, where a "
                "tensor was declared."
            )
        if new != old:
            return (
                f"`{function.name}` returned {_shown(new)}{where}, where it is {old!r} in the "
                "program: what is no tensor or number is fixed when JAX traces. Return the same on "
                "every call, or leave it out."
            )
    return None


def _shown(x: Any) -> str:
    return "a tensor or number" if x is STAR else repr(x)


def _spec(function: TorchFunction, path: str, x: Any) -> Spec:
    if type(x) in NUMBERS:
        return Spec((), canonical_dtype(jax.dtypes.scalar_type_of(x)))
    if not isinstance(x, torch.Tensor) or x.layout is not torch.strided:
        raise OutputError(not_taken(function, path, x))
    return Spec(tuple(x.shape), canonical_dtype(x.dtype))
