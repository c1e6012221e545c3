"""A callable without the run-time type checkers that its author put on it.

The annotations speak of global arrays and of JAX's dtypes, and are checked when a call is traced.
A checker that is still on the function meets other things when torch runs: the shard of one device,
whose size is not the annotated `128`, or the int32 tensor that JAX makes of an `Int64` one without
x64. It would refuse them. jaxtyping's own switch is one for the process, and devices call from
several threads, so checkers are taken off, on a copy, and the user's object stays as it is.

Taken off are `jaxtyped(typechecker=...)` and beartype, also below other decorators, and from all
methods of a module. Left on are `jaxtyped(typechecker=None)`, which checks nothing itself and
serves `isinstance` in the body, and typeguard's `@typechecked` alone, which rewrites the function
and keeps no original. Functions that the body calls, methods reached by `super()`, and a `forward`
set on a module's instance, keep their checkers.
"""

import functools
import types
from typing import Any

import torch

from .._compat import is_checking_layer


def unchecked(fn: Any) -> Any:
    """`fn` itself if no checker is on it, else a copy without.

    For a module it is a view: an instance of a subclass that shares all state with the module, its
    attributes and hooks included.
    """
    match fn:
        case functools.partial():
            inner, made = fn.func, lambda new: functools.partial(new, *fn.args, **fn.keywords)
        case types.MethodType():
            inner, made = fn.__func__, lambda new: types.MethodType(new, fn.__self__)
        case classmethod() | staticmethod():
            inner, made = fn.__func__, type(fn)
        case types.FunctionType(__wrapped__=inner):
            if is_checking_layer(fn) or fn.__code__.co_filename.startswith("<@beartype("):
                return unchecked(inner)
            made = functools.partial(_rewrapped, fn)
        case torch.nn.Module():
            inner, made = type(fn), functools.partial(_view, fn)
        case type() if issubclass(fn, torch.nn.Module):
            return _class(fn)
        case type() | types.FunctionType() | types.BuiltinFunctionType():
            return fn
        case _:
            inner, made = type(fn).__call__, lambda new: types.MethodType(new, fn)
            if not isinstance(inner, types.FunctionType):
                return fn
    stripped = unchecked(inner)
    return fn if stripped is inner else made(stripped)


def strip_checkers(module: torch.nn.Module) -> None:
    """Takes the checkers off the methods of a module and all its submodules, in place."""
    classes = {cls: _class(cls) for cls in {type(one) for one in module.modules()}}
    for one in module.modules():
        if classes[type(one)] is not type(one):
            one.__class__ = classes[type(one)]


def cell_contents(fn: types.FunctionType) -> dict[str, Any]:
    """The variables of enclosing functions that `fn` uses."""
    cells = zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True)
    return {name: cell.cell_contents for name, cell in cells if cell != types.CellType()}


def _rewrapped(fn: types.FunctionType, stripped: Any) -> types.FunctionType:
    """The wrapper `fn` of a decorator around `stripped`, if it closes over what it wraps."""
    inner, contents = vars(fn)["__wrapped__"], cell_contents(fn)
    names, cells = fn.__code__.co_freevars, fn.__closure__ or ()
    closure = tuple(
        types.CellType(stripped) if contents.get(name) is inner else cell
        for name, cell in zip(names, cells, strict=True)
    )
    if closure == cells:
        return fn  # the decorator keeps the function where it cannot be replaced
    made = types.FunctionType(fn.__code__, fn.__globals__, fn.__name__, fn.__defaults__, closure)
    made.__kwdefaults__ = fn.__kwdefaults__
    functools.update_wrapper(made, fn)
    made.__wrapped__ = stripped  # pyright: ignore[reportFunctionMemberAccess]
    return made


def _class(cls: type[torch.nn.Module]) -> type[torch.nn.Module]:
    """`cls` with methods that are not checked."""
    own = [base for base in cls.__mro__ if base.__module__.partition(".")[0] != "torch"]
    methods = {name: value for base in reversed(own[:-1]) for name, value in vars(base).items()}
    names: dict[str, Any] = {}
    for name, method in methods.items():
        if isinstance(method, types.FunctionType | classmethod | staticmethod):
            stripped = unchecked(method)
            if stripped is not method:
                names[name] = stripped
    if not names:
        return cls
    names |= {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    return types.new_class(cls.__name__, (cls,), exec_body=lambda body: body.update(names))


def _view(module: torch.nn.Module, cls: type[torch.nn.Module]) -> torch.nn.Module:
    made = cls.__new__(cls)
    object.__setattr__(made, "__dict__", vars(module))
    return made
