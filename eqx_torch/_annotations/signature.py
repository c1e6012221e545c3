"""A function's annotations, ready to check calls and to predict results.

`read_signature` does at wrap time all that does not depend on a call's arguments, and raises there
what no call can mend. `Signature.bind` and `Signature.output` are what is left for each trace.
"""

import functools
import inspect
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax

from .._errors import InputError
from .bindings import Bindings
from .callables import Empty, Target, target
from .check import check
from .dtypes import dtype_name, numpy_dtype, WIDE
from .inputs import inputs, is_dependent, validate
from .mismatch import MismatchError, shape_error
from .read import read
from .result import build, validate_result
from .specs import arrays_in, is_array, speaks, Spec


_Kind = inspect.Parameter


@dataclass(frozen=True)
class _Parameter:
    name: str
    kind: Any
    default: Any
    spec: Spec


@dataclass(frozen=True, eq=False)
class Signature:
    """What the jaxtyping annotations of a callable say. Immutable, for any number of threads.

    **Attributes:**

    - `name`: what messages call the callable.
    - `determines_output`: whether `output` predicts the result; False if only arguments are
      annotated.
    - `result_text`: the result's annotation, for messages.
    """

    name: str
    determines_output: bool
    _signature: inspect.Signature
    _args: tuple[Any, ...]
    _kwargs: Mapping[str, Any]
    _parameters: tuple[_Parameter, ...]
    _result: Spec | None

    @property
    def result_text(self) -> str:
        return "" if self._result is None else self._result.text

    @functools.cached_property
    def widens(self) -> bool:
        """Whether an argument is annotated with one dtype of 64 bits."""
        specs = [parameter.spec for parameter in self._parameters]
        return any(a.family.single in WIDE for spec in specs for a, _ in arrays_in(spec))

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Bindings:
        """Checks the annotated arguments of one call.

        **Arguments:**

        - `args`, `kwargs`: the arguments, with a `jax.ShapeDtypeStruct` for every array.

        **Returns:**

        The values of the names in the annotations and where each was bound.

        **Raises:**

        `ShapeError` if an argument does not match its annotation; `InputError` if the arguments
        do not fit the callable at all.

        !!! Example

            >>> import jax, torch
            >>> from jaxtyping import Float
            >>> def f(x: Float[torch.Tensor, "b 3"]) -> Float[torch.Tensor, "b"]: ...
            >>> signature = read_signature(f)
            >>> bindings = signature.bind((jax.ShapeDtypeStruct((5, 3), "float32"),), {})
            >>> bindings.names
            {'b': 5}
            >>> signature.output(bindings)
            ShapeDtypeStruct(shape=(5,), dtype=float32)
        """
        try:
            bound = self._signature.bind(*self._args, *args, **{**self._kwargs, **kwargs})
        except TypeError as error:
            raise InputError(f"{self.name}: {error}") from None
        bound.apply_defaults()
        bindings = Bindings(bound.arguments)
        try:
            for parameter in self._parameters:
                _check_parameter(parameter, bound.arguments[parameter.name], bindings)
        except MismatchError as mismatch:
            raise shape_error(self.name, mismatch) from mismatch.__cause__
        bindings.settle()
        return bindings

    def output(self, bindings: Bindings) -> Any:
        """The structure of a call's result.

        **Arguments:**

        - `bindings`: what `bind` returned for the call.

        **Returns:**

        The result with a `jax.ShapeDtypeStruct` for each array; None if `determines_output` is
        False.

        **Raises:**

        `ShapeError` if the annotation does not fix the result for this call: an optional argument
        that binds one of its names is None, an expression gives no size, torch does not promote
        the inputs' dtypes.
        """
        return None if self._result is None else build(self._result, bindings, self.name)


def read_signature(fn: Callable[..., Any], *, result: bool = True) -> Signature | None:
    """Reads the jaxtyping annotations of a callable.

    **Arguments:**

    - `fn`: a function, a method, a `functools.partial`, a `torch.nn.Module` (its `forward` is
      read), an object with `__call__`; decorated or not; with annotations as strings or not.
    - `result`: whether to read the annotation of the result. With False, what the result's
      annotation leaves open is no error, and `determines_output` is False.

    **Returns:**

    The signature, None if neither arguments nor result have jaxtyping annotations.

    **Raises:**

    `AnnotationError` if an annotation is invalid, or that of the result does not determine its
    structure.

    !!! Example

        >>> import torch
        >>> from jaxtyping import Float
        >>> class Net(torch.nn.Module):
        ...     def forward(
        ...         self, x: Float[torch.Tensor, "batch 784"]
        ...     ) -> Float[torch.Tensor, "batch 10"]: ...
        >>> read_signature(Net()).determines_output
        True
    """
    found = target(fn)
    if found is None:
        return None
    parameters = [
        _Parameter(one.name, one.kind, one.default, read(one.annotation, found.name))
        for one in found.signature.parameters.values()
        if one.annotation is not Empty
    ]
    parameters = [one for one in parameters if speaks(one.spec)]
    annotation = found.signature.return_annotation
    returned = None if annotation is Empty or not result else read(annotation, found.name)
    if returned is not None and not speaks(returned):
        returned = None
    if not parameters and returned is None:
        return None
    return _validated(found, parameters, returned)


def _validated(found: Target, parameters: list[_Parameter], returned: Spec | None) -> Signature:
    known = inputs([one.spec for one in parameters], found.signature.parameters)
    for one in parameters:
        validate(one.spec, known, f"{found.name}: the annotation of `{one.name}`")
    if returned is not None:
        validate_result(returned, known, found.name)
    # What other arguments bind must be bound first.
    parameters = sorted(parameters, key=lambda one: is_dependent(one.spec))
    specs = [one.spec for one in parameters] + ([] if returned is None else [returned])
    args, kwargs = _slim(found, specs, frozenset(one.name for one in parameters))
    return Signature(
        found.name, returned is not None, found.signature, args, kwargs, tuple(parameters), returned
    )


def _slim(
    found: Target, specs: list[Spec], checked: frozenset[str]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments given already, without what would keep memory alive for nothing.

    Arrays become their structs; the rest is kept if an expression like `{self.width}` may read it.
    """
    dims = [dim for spec in specs for array, _ in arrays_in(spec) for dim in array.dims]
    read_later = any(dim.kind == "expression" and "{" in dim.text for dim in dims)
    parameters = found.signature.parameters
    positional = (_Kind.POSITIONAL_ONLY, _Kind.POSITIONAL_OR_KEYWORD)
    names = [one.name for one in parameters.values() if one.kind in positional]

    def slim(name: str | None, value: Any) -> Any:
        # What is in no parameter of its own belongs to `*args` or `**kwargs`.
        keep = read_later or name not in parameters or name in checked
        return jax.tree.map(_struct, value) if keep else None

    given = itertools.zip_longest(names[: len(found.args)], found.args)
    args = tuple(slim(name, value) for name, value in given)
    return args, {name: slim(name, value) for name, value in found.kwargs.items()}


def _struct(value: Any) -> Any:
    if not is_array(value) or numpy_dtype(dtype_name(value.dtype)) is None:
        return value
    return jax.ShapeDtypeStruct(tuple(value.shape), numpy_dtype(dtype_name(value.dtype)))


def _check_parameter(parameter: _Parameter, value: Any, bindings: Bindings) -> None:
    if parameter.kind is _Kind.VAR_POSITIONAL:
        for index, one in enumerate(value):
            check(parameter.spec, one, f"{parameter.name}[{index}]", bindings)
    elif parameter.kind is _Kind.VAR_KEYWORD:
        for name, one in value.items():
            check(parameter.spec, one, name, bindings)
    elif value is not parameter.default or is_array(value):
        check(parameter.spec, value, parameter.name, bindings)
