"""The output structure of a call: declared by the user, or inferred.

What is declared is about the whole (global) arrays. What is found out by a run is about the arrays
that torch is given: where inputs are sharded, about one shard. Each combination of call site and
input shapes is found out once per function, but where it depends on values, of which an eager call
has its own.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
import torch

from ._annotations import Signature
from ._dtypes import canonical_dtype, is_inexact, x64_enabled
from ._errors import ShapeError
from ._probe import is_checked, probe, Question, Values
from ._program import Outputs, Site, Spec, TorchFunction
from ._trees import flatten_result


OutputShapes: TypeAlias = Any


class Declaration:
    """What the user says about the arguments and the results of a function.

    Args:
        output_shapes: the argument of that name, or None.
        signature: the jaxtyping annotations, or None.
        declared_for: the input specs that `output_shapes` is for, None if for all.
    """

    def __init__(
        self,
        output_shapes: OutputShapes,
        signature: Signature | None,
        declared_for: tuple[Spec, ...] | None = None,
    ) -> None:
        self._output_shapes = output_shapes
        self._signature = signature
        self._declared_for = declared_for

    def outputs(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], in_specs: tuple[Spec, ...]
    ) -> tuple[Any, str] | None:
        """Checks one call, and says what it returns, if that is declared.

        Args:
            args, kwargs: the arguments with `jax.ShapeDtypeStruct` for arrays.
            in_specs: the arrays among them.

        Returns:
            A tree of shapes, and who declares it.
        """
        bindings = self._signature and self._signature.bind(tuple(args), kwargs)
        if self._output_shapes is not None and self._declared_for in (None, in_specs):
            shapes = self._output_shapes
            if callable(shapes) and not hasattr(shapes, "shape"):
                shapes = shapes(*args, **kwargs)
            return _close_shapes(shapes), "output_shapes"
        if self._signature and bindings and self._signature.result:
            source = f"its annotation {self._signature.result.text}"
            return self._signature.output(bindings), source
        return None


class Inference:
    """Output structures of one function. Invariant: an entry is what inference would give again."""

    def __init__(self, function: TorchFunction, declaration: Declaration) -> None:
        self._function = function
        self._declaration = declaration
        self._declared: dict[tuple[Site, tuple[Spec, ...], bool], Outputs | None] = {}

    def __call__(
        self,
        site: Site,
        in_specs: tuple[Spec, ...],
        shards: tuple[Spec, ...] | None = None,
        values: Values | None = None,
    ) -> Outputs:
        """The outputs of a call.

        Args:
            site: the call site.
            in_specs: the inputs, as JAX has them.
            shards: the inputs, as torch is given them, if these are shards.
            values: their values, as torch is given them, if these are known.

        Returns:
            What is declared, of the global arrays; or what was found out, of the shards.
        """
        # With and without 64-bit types the same function returns other dtypes.
        key = site, in_specs, x64_enabled()
        if key not in self._declared:
            self._declared[key] = self._declares(site, in_specs)
        of_shards = shards is not None and shards != in_specs
        question = Question(self._function, site, shards or in_specs, of_shards)
        return self._declared[key] or self._found(question, values)

    def _declares(self, site: Site, in_specs: tuple[Spec, ...]) -> Outputs | None:
        structs = [jax.ShapeDtypeStruct(*s) for s in in_specs[site.num_own :]]
        args, kwargs = site.arguments(structs)
        declared = self._declaration.outputs(args, kwargs, in_specs)
        return declared and _declared(self._function.name, *declared, in_specs)

    def _found(self, question: Question, values: Values | None) -> Outputs:
        """What a run shows; an earlier one, unless it was of other values than are known now."""
        findings, x64 = self._function.findings, x64_enabled()
        known = findings.at(question.site, question.in_specs).outputs
        # JAX sorts the dictionaries that it passes on, and values are known of the user's alone.
        of_values = findings.at(question.site.unordered, question.in_specs).outputs
        outputs = known.get(x64) or of_values.get(x64)
        if outputs is not None and (values is None or not outputs.by_values):
            return outputs
        found = probe(question, values, outputs.by_values if outputs else "")
        if outputs is None and is_checked(question, found):
            known[x64] = found
            if found.by_values:
                of_values[x64] = found
        return found


def _declared(name: str, declared: Any, source: str, in_specs: Sequence[Spec]) -> Outputs:
    """The outputs that a declaration describes."""
    leaves, structure = flatten_result(declared)
    if isinstance(declared, str):
        _declared_spec(name, declared, in_specs)
    specs = tuple(_declared_spec(name, leaf, in_specs) for leaf in leaves)
    return Outputs(specs, structure, source, declared=True)


class _Shape:
    """A shape that was written as a plain sequence. A leaf, where the sequence is a node."""

    def __init__(self, dims: Sequence[Any]) -> None:
        self.dims = tuple(map(int, dims))


def _close_shapes(shapes: OutputShapes) -> OutputShapes:
    """The tree with each shape that is written as a plain sequence as a leaf."""
    return jax.tree.map(lambda x: _Shape(x) if _is_shape(x) else x, shapes, is_leaf=_is_shape)


def _is_shape(x: Any) -> bool:
    if isinstance(x, torch.Size):
        return True
    return type(x) in (tuple, list) and all(isinstance(d, int | np.integer) for d in x)


def _declared_spec(name: str, leaf: Any, in_specs: Sequence[Spec]) -> Spec:
    if isinstance(leaf, _Shape):
        return Spec(leaf.dims, _float_dtype(name, in_specs))
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
