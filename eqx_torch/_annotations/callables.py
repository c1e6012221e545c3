"""From something callable to the function that carries the annotations.

A method, a `functools.partial`, a `torch.nn.Module` or a callable object is a function with some
arguments already given. `target` finds the function and those arguments, and evaluates the
annotations, each on its own: one that names something unknown at run time (as imports under `if
TYPE_CHECKING`) leaves the others usable.
"""

import functools
import inspect
import re
import types
import typing
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jaxtyping
import torch

from .._errors import AnnotationError


Empty = inspect.Parameter.empty

_DTYPES = (
    name
    for name, value in vars(jaxtyping).items()
    if isinstance(value, type(jaxtyping.AbstractDtype))
)
_OF_JAXTYPING = re.compile(rf"\b({'|'.join([*_DTYPES, 'PyTree'])})\[")


@dataclass(frozen=True)
class Target:
    """A function, the arguments it has been given already, and its annotations, evaluated."""

    name: str
    signature: inspect.Signature
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def given(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> "Target":
        """The same function with more arguments given."""
        return Target(self.name, self.signature, (*self.args, *args), {**self.kwargs, **kwargs})


def target(fn: Callable[..., Any]) -> Target | None:
    """The function behind `fn`, None for what has no readable signature (as builtins)."""
    if isinstance(fn, functools.partial):
        found = target(fn.func)
        return None if found is None else found.given(fn.args, fn.keywords)
    if isinstance(fn, types.MethodType):
        found = target(fn.__func__)
        return None if found is None else found.given((fn.__self__,), {})
    if isinstance(fn, torch.nn.Module):
        # What `torch.compile` returns for a module keeps that module under this name.
        original = getattr(fn, "_orig_mod", None)
        return target(fn.forward if original is None else original)
    if isinstance(fn, types.FunctionType):
        return _function(fn)
    call = type(fn).__call__
    return target(types.MethodType(call, fn)) if isinstance(call, types.FunctionType) else None


def evaluated(annotation: Any, owner: str, subject: str, scope: Mapping[str, Any]) -> Any:
    """`annotation` with its strings evaluated in `scope`, `typing.Any` if that is not possible.

    Raises AnnotationError if jaxtyping refuses the annotation. Warns if it is one of jaxtyping's
    that is dropped.
    """
    shown = repr(annotation)
    holder = types.SimpleNamespace(__annotations__={"value": annotation})
    try:
        return typing.get_type_hints(holder, dict(scope), include_extras=True)["value"]
    except (NameError, AttributeError) as error:
        if _OF_JAXTYPING.search(shown):
            warnings.warn(
                f"{owner}: the annotation {shown} of {subject} is not checked, because it"
                f" cannot be evaluated: {error}. Import what it names at run time too, not only"
                " under `if TYPE_CHECKING`.",
                stacklevel=2,
            )
        return Any
    except Exception as error:
        if _OF_JAXTYPING.search(shown):
            raise AnnotationError(
                f"{owner}: the annotation {shown} of {subject} is invalid: {error}"
            ) from error
        return Any


def _function(fn: types.FunctionType) -> Target | None:
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        return None
    # Strings are evaluated where the innermost function was written: a decorator lives in another
    # module.
    inner: Any = inspect.unwrap(fn)
    scope = {**getattr(inner, "__globals__", {}), **_closure(inner)}
    name = getattr(fn, "__qualname__", type(fn).__name__).rpartition("<locals>.")[2]
    parameters = [
        parameter
        if parameter.annotation is Empty
        else parameter.replace(
            annotation=evaluated(parameter.annotation, name, f"`{parameter.name}`", scope)
        )
        for parameter in signature.parameters.values()
    ]
    result = signature.return_annotation
    if result is not Empty:
        result = evaluated(result, name, "the result", scope)
    return Target(name, signature.replace(parameters=parameters, return_annotation=result))


def _closure(fn: Any) -> dict[str, Any]:
    """The variables of enclosing functions that `fn` uses, which annotations may name."""
    found = {}
    names = getattr(getattr(fn, "__code__", None), "co_freevars", ())
    for name, cell in zip(names, getattr(fn, "__closure__", None) or (), strict=False):
        try:
            found[name] = cell.cell_contents
        except ValueError:
            continue  # not assigned yet
    return found
