"""The output structure of a call: declared by the user, or inferred.

Shapes are those of the whole (global) arrays. Each combination of call site and input shapes is
inferred once per function.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
import torch

from ._dtypes import canonical_dtype, is_inexact
from ._errors import ShapeError
from ._probe import Outputs, probe
from ._program import Site, Spec, TorchFunction
from ._trees import flatten


OutputShapes: TypeAlias = Any


class Inference:
    """Output structures of one function. Invariant: an entry is what inference would give again.

    Args:
        function: the function.
        output_shapes: what the user declared, or None.
        declared_for: the input specs that a declaration is for, None if for all.
    """

    def __init__(
        self,
        function: TorchFunction,
        output_shapes: OutputShapes,
        declared_for: tuple[Spec, ...] | None = None,
    ) -> None:
        self._function = function
        self._output_shapes = output_shapes
        self._declared_for = declared_for
        self._known: dict[Any, Outputs] = {}

    def __call__(self, site: Site, in_specs: tuple[Spec, ...]) -> Outputs:
        """The outputs of a call with inputs of these specs."""
        key = site, in_specs, canonical_dtype("int64")
        outputs = self._known.get(key)
        if outputs is None:
            outputs = self._known.setdefault(key, self._infer(site, in_specs))
        return outputs

    def _infer(self, site: Site, in_specs: tuple[Spec, ...]) -> Outputs:
        if self._output_shapes is None or self._declared_for not in (None, in_specs):
            return probe(self._function, site, in_specs)
        declared = self._output_shapes
        if _is_shape_function(declared):
            args, kwargs = site.arguments([jax.ShapeDtypeStruct(*s) for s in in_specs])
            declared = declared(*args, **kwargs)
        return _declared(self._function.name, declared, in_specs)


def _declared(name: str, declared: OutputShapes, in_specs: Sequence[Spec]) -> Outputs:
    """The outputs that `output_shapes=` declares."""
    closed, rebuild = _close_shapes(declared)
    leaves, structure = flatten(closed)
    specs = tuple(_declared_spec(name, rebuild(leaf), in_specs) for leaf in leaves)
    return Outputs(specs, structure, "output_shapes")


def _close_shapes(declared: OutputShapes) -> tuple[OutputShapes, Callable[[Any], Any]]:
    """The declaration with each shape that is written as a plain sequence as a leaf."""
    closed = jax.tree.map(
        lambda x: _Shape(tuple(x)) if _is_shape(x) else x, declared, is_leaf=_is_shape
    )
    return closed, lambda leaf: leaf.dims if isinstance(leaf, _Shape) else leaf


class _Shape:
    def __init__(self, dims: tuple[int, ...]) -> None:
        self.dims = dims


def _is_shape(x: Any) -> bool:
    if isinstance(x, torch.Size):
        return True
    return type(x) in (tuple, list) and all(isinstance(d, int | np.integer) for d in x)


def _is_shape_function(declared: OutputShapes) -> bool:
    return callable(declared) and not hasattr(declared, "shape")


def _declared_spec(name: str, leaf: Any, in_specs: Sequence[Spec]) -> Spec:
    if isinstance(leaf, tuple):
        return Spec(tuple(map(int, leaf)), _float_dtype(name, in_specs))
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        return Spec(tuple(map(int, leaf.shape)), canonical_dtype(leaf.dtype))
    raise ShapeError(
        f"`output_shapes` of `{name}` holds {leaf!r} of type {type(leaf).__name__}; it takes "
        "`jax.ShapeDtypeStruct(shape, dtype)`, a tensor, an array or a `Size` for each output."
    )


def _float_dtype(name: str, in_specs: Sequence[Spec]) -> np.dtype[Any]:
    """The dtype of an output that was declared by its shape alone."""
    dtypes = {s.dtype for s in in_specs if is_inexact(s.dtype)}
    if len(dtypes) == 1:
        return dtypes.pop()
    found = ", ".join(sorted(map(str, dtypes))) or "none"
    raise ShapeError(
        f"`output_shapes` of `{name}` gives a shape without a dtype, which then is that of the "
        f"floating point inputs, but their dtypes are: {found}. "
        "Use `jax.ShapeDtypeStruct(shape, dtype)`."
    )
