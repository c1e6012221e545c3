"""jaxtyping annotations of torch functions check the inputs of a call and predict its result.

`read_signature` does at wrap time all that does not depend on a call's arguments, and raises there
what no call can mend. `Signature.bind` and `Signature.output` are what is left for each trace.

A method, a `functools.partial`, a `torch.nn.Module` or a callable object is a function with some
arguments already given. Annotations are evaluated each on its own: one that names something unknown
at run time (as imports under `if TYPE_CHECKING`) leaves the others usable.
"""

import functools
import inspect
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jaxtyping
import torch

from .._errors import AnnotationError, InputError, ShapeError
from .check import Bindings, check, MismatchError
from .checkers import cell_contents, strip_checkers as strip_checkers, unchecked as unchecked
from .patterns import Container, evaluated, is_array, Pattern, read, WIDE
from .result import bindable, is_dependent, OpenError, predict, refuse_open, unbound


@dataclass(frozen=True, eq=False)
class Signature:
    """What the jaxtyping annotations of a callable say. Immutable, for any number of threads.

    It has the `name` and `signature` of the function behind the callable, the `args` and `kwargs`
    that this is given already, the patterns of its `inputs` in the order in which they are checked,
    and that of its `result`, None if only arguments are annotated.
    """

    name: str
    signature: inspect.Signature
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    inputs: Mapping[str, Pattern]
    result: Pattern | None

    @functools.cached_property
    def widens(self) -> bool:
        """Whether an argument is annotated with one dtype of 64 bits."""
        return any(
            one.dtype in WIDE for pattern in self.inputs.values() for one in pattern.arrays()
        )

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Bindings:
        """Checks the arguments of one call, with a `jax.ShapeDtypeStruct` for every array.

        Raises `ShapeError` if one does not match its annotation, `InputError` if they do not fit
        the callable at all.
        """
        try:
            bound = self.signature.bind(*self.args, *args, **{**self.kwargs, **kwargs})
        except TypeError as error:
            raise InputError(f"{self.name}: {error}") from None
        bound.apply_defaults()
        bindings = Bindings(bound.arguments)
        try:
            for name, pattern in self.inputs.items():
                value = bound.arguments[name]
                if value is not self.signature.parameters[name].default or is_array(value):
                    check(pattern, value, name, bindings)
        except MismatchError as mismatch:
            raise ShapeError(f"{self.name}: {mismatch}{bindings}") from None
        bindings.bind_ones()
        return bindings

    def output(self, bindings: Bindings) -> Any:
        """The result of a call, a `jax.ShapeDtypeStruct` for each array, by what `bind` returned.

        Raises `ShapeError` if the annotation does not fix it for this call: an optional argument
        that binds one of its names is None, an expression gives no size, torch does not promote
        the inputs' dtypes.
        """
        try:
            return None if self.result is None else predict(self.result, bindings)
        except OpenError as error:
            raise ShapeError(
                f"{self.name}: the result's structure cannot be read off its annotation"
                f" {error.text}: {error.reason}.{bindings}"
            ) from error.__cause__


def read_signature(
    fn: Callable[..., Any], stub: Callable[..., Any] | None = None, *, result: bool = True
) -> Signature | None:
    """What the jaxtyping annotations of `fn` say, or those of the stub that speaks for it.

    None if there is no stub and `fn` has no jaxtyping annotations. A stub is a function with the
    arguments of `fn`; if its first one is named `self`, that is what `fn` is a method of. With
    `result`, the annotation of the result has to determine it.

    Raises `AnnotationError` if an annotation is invalid, that of the result does not determine it,
    or a stub has none; `InputError` for a stub that is no function.
    """
    if stub is not None and not callable(stub):
        raise InputError(
            f"`signature={stub!r}` is of type {type(stub).__name__}; pass an annotated function."
        )
    found = _function(fn if stub is None else stub)
    first = next(iter(found.signature.parameters), None) if found else None
    if stub is not None and found and first == "self" and not found.args:
        found = replace(found, args=(_owner(fn),))
    found = None if found is None else _annotated(found, result)
    if stub is not None and found is None:
        raise AnnotationError(
            f"`signature={_name(stub)}` has no jaxtyping annotations. Pass a function such as "
            '`def stub(x: Float[Tensor, "b n"]) -> Float[Tensor, "b"]: ...`.'
        )
    return found


def _annotated(found: Signature, result: bool) -> Signature | None:
    """`found` with the patterns of its annotations, None if it has none."""
    inputs, returned = {}, None
    for name, one in found.signature.parameters.items():
        pattern = read(one.annotation, found.name)
        kind = {one.VAR_POSITIONAL: tuple, one.VAR_KEYWORD: Mapping}.get(one.kind)
        if pattern.speaks:
            inputs[name] = pattern if kind is None else Container(pattern.text, (pattern,), kind)
    if result:
        returned = read(found.signature.return_annotation, found.name)
    returned = returned if returned is not None and returned.speaks else None
    if not inputs and returned is None:
        return None
    try:
        known = bindable(inputs.values(), found.signature.parameters)
        for name, pattern in inputs.items():
            for reason in (unbound(dim, known) for one in pattern.arrays() for dim in one.dims):
                if reason is not None:
                    where = f"{found.name}: the annotation of `{name}`"
                    raise AnnotationError(f"{where} cannot be checked: {reason}.")
        if returned is not None:
            refuse_open(returned, known)
    except jaxtyping.AnnotationError as error:  # `?name` outside of a tree, trees inside trees
        raise AnnotationError(f"{found.name}: {error}") from None
    except OpenError as error:
        raise AnnotationError(
            f"{found.name}: the annotation {error.text} does not determine the result:"
            f" {error.reason}.\n{error.remedy}, or pass output_shapes=."
        ) from None
    # What other arguments bind must be bound first.
    ordered = sorted(inputs.items(), key=lambda one: is_dependent(one[1], known))
    return replace(found, inputs=dict(ordered), result=returned)


def _function(fn: Any, /, *args: Any, **kwargs: Any) -> Signature | None:
    """The function behind `fn`, None for what has no readable signature (as builtins)."""
    if isinstance(fn, functools.partial):
        return _function(fn.func, *fn.args, *args, **{**fn.keywords, **kwargs})
    if isinstance(fn, types.MethodType):
        return _function(fn.__func__, fn.__self__, *args, **kwargs)
    if isinstance(fn, torch.nn.Module):
        # What `torch.compile` returns for a module keeps that module under this name.
        return _function(getattr(fn, "_orig_mod", fn).forward, *args, **kwargs)
    if not isinstance(fn, types.FunctionType):
        call = type(fn).__call__
        is_plain = isinstance(call, types.FunctionType)
        return _function(call, fn, *args, **kwargs) if is_plain else None
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        return None
    # Strings are evaluated where the innermost function was written, as a decorator lives in
    # another module, and may name variables of the functions around it.
    inner: Any = inspect.unwrap(fn)
    scope = dict(getattr(inner, "__globals__", {}))
    if isinstance(inner, types.FunctionType):
        scope |= cell_contents(inner)
    name = _name(fn)
    parameters = [
        one.replace(annotation=evaluated(one.annotation, name, f"`{one.name}`", scope))
        for one in signature.parameters.values()
    ]
    returned = evaluated(signature.return_annotation, name, "the result", scope)
    signature = signature.replace(parameters=parameters, return_annotation=returned)
    return Signature(name, signature, args, kwargs, {}, None)


def _name(fn: Any) -> str:
    return getattr(fn, "__qualname__", type(fn).__name__).rpartition("<locals>.")[2]


def _owner(fn: Callable[..., Any]) -> Any:
    """What `fn` is a method of, None for a plain function."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    plain = isinstance(fn, types.FunctionType | types.BuiltinFunctionType)
    return None if plain else getattr(fn, "__self__", fn)
