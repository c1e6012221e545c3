"""What a function may return: tensors, Python numbers, and constants.

A tensor arrives as an array, a number as the array that JAX makes of it, with the value of each
run. Constants (strings, members of enumerations, dtypes) are part of the structure, and have to be
the same in every run. A list and a tuple are one, `tuple[...]` is also what one writes for the
named tuples of `torch.topk` and its like, and a typed dictionary for an `OrderedDict`.
"""

from collections.abc import Mapping
from typing import Any

import jax
import torch

from .._dtypes import canonical_dtype, dtype_j2t
from .._errors import OutputError, ShapeError
from .._trees import (
    children,
    constants,
    flatten,
    flatten_result,
    is_container,
    leaf_paths,
    NUMBERS,
    STAR,
    Structure,
    with_children,
)
from .base import Spec, Tensors
from .function import TorchFunction


_WIDEST = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}
_NARROWED = {
    torch.int64: torch.int32,
    torch.uint64: torch.uint32,
    torch.float64: torch.float32,
    torch.complex128: torch.complex64,
}
_Tensor, _STRIDED = torch.Tensor, torch.strided


def opened(function: TorchFunction, result: Any) -> tuple[tuple[Spec, ...], Structure]:
    """What a run has returned. Raises `OutputError` for what JAX cannot take."""
    leaves, structure = flatten_result(result)
    paths = leaf_paths(structure)
    specs = (_spec(function, path, x) for path, x in zip(paths, leaves, strict=True))
    return tuple(specs), structure


class Expected:
    """The results that a function has been declared to return.

    Args:
        function: the function.
        specs: of the results.
        structure: of the tree of them.
        x64: whether JAX has 64-bit types; if not, a result of 64 bits stands for one of 32.
        source: who declares it, for messages.
    """

    def __init__(
        self,
        function: TorchFunction,
        specs: tuple[Spec, ...],
        structure: Structure,
        x64: bool,
        source: str,
    ) -> None:
        self._function = function
        self._specs = specs
        self._structure = structure
        self._narrowed = {} if x64 else _NARROWED
        self._source = source
        self._is_one = structure == flatten(0)[1]
        self._each = [(torch.Size(s.shape), dtype_j2t(s.dtype)) for s in specs]

    def tensors(self, result: Any) -> Tensors:
        """The tensors in what a run has returned. Raises unless they are those expected."""
        one = self._is_one and isinstance(result, torch.Tensor)
        results: Tensors = (result,) if one else self._leaves(result)
        for y, (shape, dtype) in zip(results, self._each):  # noqa: B905
            right = type(y) is _Tensor and y.dtype is dtype and y.shape == shape
            if not (right and y.layout is _STRIDED):
                return [self._tensor(i, y) for i, y in enumerate(results)]
        return results

    def _leaves(self, result: Any) -> Any:
        structure = self._structure
        leaves = structure.leaves_of(result)
        if leaves is None:
            declared = structure.unflatten(range(structure.num_leaves))
            leaves = structure.leaves_of(_as_declared(declared, result))
        if leaves is None:
            raise self._structure_error(result)
        return leaves

    def _tensor(self, i: int, result: Any) -> torch.Tensor:
        shape, dtype = self._each[i]
        wide = _WIDEST.get(type(result))
        if wide is not None:
            result = torch.tensor(result, dtype=dtype if self._stands_for(wide, dtype) else wide)
        if not isinstance(result, torch.Tensor) or result.layout is not _STRIDED:
            path = leaf_paths(self._structure)[i]
            raise OutputError(_not_taken(self._function, path, result))
        if result.shape != shape or not self._stands_for(result.dtype, dtype):
            raise self._spec_error(i, result)
        return result.to(dtype)

    def _stands_for(self, dtype: torch.dtype, declared: torch.dtype) -> bool:
        return dtype is declared or self._narrowed.get(dtype) is declared

    def _structure_error(self, result: Any) -> Exception:
        function = self._function
        leaves, structure = flatten_result(result)
        for path, leaf in zip(leaf_paths(structure), leaves, strict=True):
            if not isinstance(leaf, torch.Tensor) and type(leaf) not in _WIDEST:
                return OutputError(_not_taken(function, path, leaf))
        constant = _other_constant(function, self._structure, structure)
        if constant is not None:
            return OutputError(constant)
        declared, returned = map(function.code.of_result, (self._structure, structure))
        return OutputError(
            f"`{function.name}` returned another structure than was declared.\n"
            f"  declared by {self._source}: {declared}\n"
            f"  returned: {returned}\n"
            "Return the same structure on every call, or declare the right one, in the annotation "
            "or by `output_shapes=`."
        )

    def _spec_error(self, i: int, result: torch.Tensor) -> Exception:
        spec = self._specs[i]
        place = self._function.code.output_label(leaf_paths(self._structure)[i])
        kind = ShapeError if tuple(result.shape) != spec.shape else OutputError
        return kind(
            f"`{self._function.name}` returned another "
            f"{'shape' if kind is ShapeError else 'dtype'} than "
            f"was declared{f' at {place}' if place else ''}.\n"
            f"  declared by {self._source}: {spec.dtype}{list(spec.shape)}\n"
            f"  returned: {str(result.dtype).removeprefix('torch.')}{list(result.shape)}\n"
            "Nothing is broadcast or cast for you: return what was declared, or declare what is "
            "returned, in the annotation or by `output_shapes=`."
        )


def _as_declared(declared: Any, value: Any) -> Any:
    """A tree with its containers as they were declared, where those are as good."""
    kind = type(declared)
    if kind in (tuple, list) and isinstance(value, tuple | list) and len(declared) == len(value):
        return kind(map(_as_declared, declared, value))
    if kind is dict and isinstance(value, Mapping) and declared.keys() == value.keys():
        return {name: _as_declared(declared[name], value[name]) for name in declared}
    if kind is type(value) and is_container(declared):
        names, items = children(declared)
        found, values = children(value)
        if found == names and len(items) == len(values):
            return with_children(declared, list(map(_as_declared, items, values)))
    return value


def _not_taken(function: TorchFunction, path: str, result: Any) -> str:
    """The message for an output that JAX cannot take."""
    name, place = function.name, function.code.output_label(path)
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


def _other_constant(
    function: TorchFunction, declared: Structure, returned: Structure
) -> str | None:
    """The message for structures that differ in a constant only."""
    mine, theirs = constants(declared), constants(returned)
    if [path for path, _ in mine] != [path for path, _ in theirs]:
        return None
    for (path, old), (_, new) in zip(mine, theirs, strict=True):
        place = function.code.output_label(path)
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
    if not isinstance(x, torch.Tensor) or x.layout is not _STRIDED:
        raise OutputError(_not_taken(function, path, x))
    return Spec(tuple(x.shape), canonical_dtype(x.dtype))
