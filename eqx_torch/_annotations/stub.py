"""Annotations from a stub: for functions and modules that cannot be edited."""

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

from .._errors import AnnotationError, InputError
from .signature import read_signature, Signature


def read_signature_for(
    fn: Callable[..., Any], stub: Callable[..., Any] | None, *, result: bool = True
) -> Signature | None:
    """Reads the annotations of `fn`, or those of the `stub` that speaks for it.

    **Arguments:**

    - `fn`: the function that is wrapped.
    - `stub`: a function with the arguments of `fn`, or None. If its first argument is named
        `self`, that is what `fn` is a method of.
    - `result`: as in `read_signature`.

    **Returns:**

    The signature, None if there is no stub and `fn` has no annotations.

    **Raises:**

    `InputError` for a stub that is no function, `AnnotationError` for one without annotations, and
    what `read_signature` raises.
    """
    if stub is None:
        return read_signature(fn, result=result)
    if not callable(stub):
        raise InputError(
            f"`signature={stub!r}` is of type {type(stub).__name__}; pass an annotated function."
        )
    signature = read_signature(_bound(stub, fn), result=result)
    if signature is None:
        name = getattr(stub, "__qualname__", type(stub).__name__).rpartition("<locals>.")[2]
        raise AnnotationError(
            f"`signature={name}` has no jaxtyping annotations. Pass a function such as "
            '`def stub(x: Float[Tensor, "b n"]) -> Float[Tensor, "b"]: ...`.'
        )
    return signature


def _bound(stub: Callable[..., Any], fn: Callable[..., Any]) -> Callable[..., Any]:
    try:
        first = next(iter(inspect.signature(stub).parameters), None)
    except (TypeError, ValueError):
        return stub
    if first != "self" or isinstance(stub, type):
        return stub
    owner = _owner(fn)
    return functools.partial(stub, None) if owner is None else types.MethodType(stub, owner)


def _owner(fn: Callable[..., Any]) -> Any:
    """What `fn` is a method of, None for a plain function."""
    if isinstance(fn, functools.partial):
        return _owner(fn.func)
    if isinstance(fn, types.FunctionType | types.BuiltinFunctionType):
        return None
    return getattr(fn, "__self__", fn)
