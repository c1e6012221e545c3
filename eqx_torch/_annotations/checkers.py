"""A callable without the run-time type checkers that its author put on it.

The annotations speak of global arrays and of JAX's dtypes, and are checked when a call is traced.
A checker that is still on the function meets other things when torch runs: the shard of one device,
whose size is not the annotated `128`, or the int32 tensor that JAX makes of an `Int64` one without
x64. It would refuse them. (Fake tensors and those inside `torch.func.vmap` it takes: these have
the class and the shape of what they stand for.) jaxtyping's own switch is one for the process, and
devices call from several threads, so checkers are taken off, on a copy, and the user's object stays
as it is.

Taken off are `jaxtyped(typechecker=...)` and beartype, also below other decorators, and from all
methods of a module. Left on are `jaxtyped(typechecker=None)`, which checks nothing itself and
serves `isinstance` in the body, and typeguard's `@typechecked` alone, which rewrites the function
and keeps no original. Functions that the body calls, methods reached by `super()`, and a `forward`
set on a module's instance, keep their checkers.
"""

import functools
import types
from collections.abc import Callable
from typing import Any

import torch

from .._compat_jaxtyping import is_checking_layer


def unchecked(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` without run-time type checkers.

    **Arguments:**

    - `fn`: a function, method, `functools.partial`, `torch.nn.Module` or other callable.

    **Returns:**

    `fn` itself if no checker is on it, else a copy. For a module it is a view: an instance of a
    subclass that shares all state with the module, its attributes and hooks included.

    !!! Example

        >>> import torch
        >>> from beartype import beartype
        >>> from jaxtyping import Float, jaxtyped
        >>> @jaxtyped(typechecker=beartype)
        ... def double(x: Float[torch.Tensor, "8"]) -> Float[torch.Tensor, "8"]:
        ...     return 2 * x
        >>> unchecked(double)(torch.ones(2))
        tensor([2., 2.])
    """
    if isinstance(fn, functools.partial):
        inner = unchecked(fn.func)
        return fn if inner is fn.func else functools.partial(inner, *fn.args, **fn.keywords)
    if isinstance(fn, types.MethodType):
        inner = unchecked(fn.__func__)
        return fn if inner is fn.__func__ else types.MethodType(inner, fn.__self__)
    if isinstance(fn, types.FunctionType):
        return _function(fn)
    if isinstance(fn, torch.nn.Module):
        cls = _class(type(fn))
        return fn if cls is type(fn) else _view(fn, cls)
    call = type(fn).__call__
    if isinstance(fn, type) or not isinstance(call, types.FunctionType):
        return fn
    inner = unchecked(call)
    return fn if inner is call else types.MethodType(inner, fn)


def strip_checkers(module: torch.nn.Module) -> None:
    """Takes the checkers off the methods of `module` and all its submodules, in place.

    **Arguments:**

    - `module`: a module that belongs to the caller, as a copy does.
    """
    classes = {cls: _class(cls) for cls in {type(one) for one in module.modules()}}
    for one in module.modules():
        cls = classes[type(one)]
        if cls is not type(one):
            one.__class__ = cls


def _function(fn: types.FunctionType) -> Callable[..., Any]:
    inner = getattr(fn, "__wrapped__", None)
    if inner is None:
        return fn
    if is_checking_layer(fn) or fn.__code__.co_filename.startswith("<@beartype("):
        return unchecked(inner)
    stripped = unchecked(inner)
    return fn if stripped is inner else _rewrapped(fn, inner, stripped)


def _rewrapped(fn: types.FunctionType, inner: Any, stripped: Any) -> types.FunctionType:
    """The decorator's wrapper `fn` around `stripped` in place of `inner`, which it closes over."""
    cells = fn.__closure__ or ()
    if not any(_holds(cell, inner) for cell in cells):
        return fn  # the decorator keeps the function where it cannot be replaced
    closure = tuple(types.CellType(stripped) if _holds(cell, inner) else cell for cell in cells)
    made = types.FunctionType(fn.__code__, fn.__globals__, fn.__name__, fn.__defaults__, closure)
    made.__kwdefaults__ = fn.__kwdefaults__
    functools.update_wrapper(made, fn)
    made.__wrapped__ = stripped  # pyright: ignore[reportFunctionMemberAccess]
    return made


def _holds(cell: types.CellType, value: Any) -> bool:
    try:
        return cell.cell_contents is value
    except ValueError:
        return False  # not assigned yet


def _class(cls: type[torch.nn.Module]) -> type[torch.nn.Module]:
    """`cls` with methods that are not checked."""
    names: dict[str, Any] = {}
    for name, method in _methods(cls).items():
        stripped = _method(method)
        if stripped is not method:
            names[name] = stripped
    if not names:
        return cls
    names |= {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    return types.new_class(cls.__name__, (cls,), exec_body=lambda body: body.update(names))


def _methods(cls: type[torch.nn.Module]) -> dict[str, Any]:
    """What the classes between `cls` and torch's own define."""
    own = [base for base in cls.__mro__ if not _is_of_torch(base)]
    return {name: value for base in reversed(own) for name, value in vars(base).items()}


def _is_of_torch(base: type) -> bool:
    return base is object or base.__module__.partition(".")[0] == "torch"


def _method(value: Any) -> Any:
    if isinstance(value, classmethod | staticmethod):
        inner = unchecked(value.__func__)
        return value if inner is value.__func__ else type(value)(inner)
    return unchecked(value) if isinstance(value, types.FunctionType) else value


def _view(module: torch.nn.Module, cls: type[torch.nn.Module]) -> torch.nn.Module:
    made = cls.__new__(cls)
    object.__setattr__(made, "__dict__", vars(module))
    return made
