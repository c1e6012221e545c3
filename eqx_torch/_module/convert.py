"""`from_torch`: a torch module as an Equinox module."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import torch

from .._arrays import t2j
from .._compat import called_by_make_with_state
from .._errors import InputError, ModuleError
from .._examples import Examples, widened
from .._function import check_keywords, check_options, lock_of
from .._invoke import Infer
from .._probe import probe, Question
from .._program import Lock, Residuals, TorchFunction, VmapMethod
from .._shapes import OutputShapes
from .blueprint import Blueprint, Names
from .core import Core, Options, own_wide_dtypes, signature_of
from .function import ModuleCode
from .layers import changing_buffers, check_convertible, check_shards, is_training
from .module import TorchModule


def from_torch(
    module: torch.nn.Module | TorchModule,
    *example_args: Any,
    example_kw: dict[str, Any] | None = None,
    output_shapes: OutputShapes = None,
    out_specs: Any = None,
    state: Sequence[str] | None = None,
    method: str = "forward",
    lock: bool | Lock = False,
    depth: int | None = None,
    vmap_method: VmapMethod = "torch",
    residuals: Residuals = "tape",
    signature: Callable[..., Any] | None = None,
    **unknown: NoReturn,
) -> TorchModule:
    """Makes an Equinox module of a torch module.

    The parameters are copied to JAX arrays; the torch module is left as it is, and later changes
    to it do not reach the result. Buffers that the forward changes become state: use
    `model, state = equinox.nn.make_with_state(from_torch)(module)` for a module that has any.

    **Arguments:**

    - `module`: the torch module, or a `TorchModule` of which to convert another method; that
        shares its parameters.
    - `*example_args`, `example_kw`: optional examples of the method's arguments: torch tensors,
        JAX arrays or `jax.ShapeDtypeStruct`. They fix the structure of the arguments, move errors
        to the time of conversion, give 64-bit dtypes back to arguments that JAX holds in 32 bits,
        and tell which buffers the forward changes, by one run on tensors without memory.
    - `output_shapes`, `out_specs`, `lock`, `depth`, `vmap_method`, `residuals`,
        `signature`: as in `torch2jax`. With `out_specs`, the shards of a call draw different
        random numbers, and changed buffers are averaged over the shards (integers: the
        maximum). Each shard is normalised by its own statistics, so `torch.nn.SyncBatchNorm`,
        which promises otherwise, is refused.
    - `state`: the names of the buffers that the forward changes. If None they are inferred from
        the examples, and without examples are those of torch's normalisation layers.
    - `method`: the method to call.
    - `**unknown`: none. Examples of keyword arguments are passed in `example_kw`.

    **Returns:**

    A `TorchModule`.

    **Raises:**

    `ModuleError` for a module that cannot be converted, with what to do first; `InputError` for
    options that do not fit.

    !!! example

        >>> import jax.numpy as jnp, torch
        >>> model = from_torch(torch.nn.Linear(3, 2))
        >>> model(jnp.ones((5, 3))).shape
        (5, 2)
    """
    check_keywords("from_torch", unknown, from_torch)
    check_options(depth, vmap_method, residuals, out_specs)
    held = lock_of(lock)
    options = Options(
        method, output_shapes, out_specs, held, depth, vmap_method, residuals, signature
    )
    if isinstance(module, TorchModule):
        _check_has_state(module, state, at_making=called_by_make_with_state())
        return _with_options(module, options, example_args, example_kw)
    check_convertible(module)
    if out_specs is not None:
        check_shards(module)
    _check_method(module, method)
    name = type(module).__name__
    annotated = signature_of(module, options)
    example_args, example_kw = widened(annotated, example_args, example_kw)
    examples = Examples.of(name, example_args, example_kw)
    names = _names(module, state, options, example_args, example_kw)
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    dtypes = tuple(tensors[n].dtype for n in names.parameters + names.state)
    core = Core(Blueprint(module, names), dtypes, options, examples)
    buffers = {n: owned(tensors[n]) for n in names.state}
    model = TorchModule(
        params={n: owned(tensors[n]) for n in names.parameters},
        buffers=eqx.nn.StateIndex(buffers) if buffers else None,
        inference=not is_training(module),
        core=core,
    )
    if examples is not None:
        _infer(core.code, module, not is_training(module), core.infer, example_args, example_kw)
    return model


def owned(tensor: torch.Tensor) -> jax.Array:
    """A copy of a tensor that is free to go to any device."""
    return jnp.array(np.asarray(t2j(tensor.detach().cpu())))


def _with_options(
    model: TorchModule,
    options: Options,
    example_args: Sequence[Any],
    example_kw: dict[str, Any] | None,
) -> TorchModule:
    """The same parameters and state under another method or other options."""
    core = model.core
    _check_method(core.blueprint.module, options.method)
    annotated = signature_of(core.blueprint.module, options)
    examples = Examples.of(core.name, *widened(annotated, example_args, example_kw))
    own = Core(core.blueprint, core.dtypes, options, examples, core.edits, core.stored)
    return dataclasses.replace(model, core=own)


def _names(
    module: torch.nn.Module,
    state: Sequence[str] | None,
    options: Options,
    example_args: Sequence[Any],
    example_kw: dict[str, Any] | None,
) -> Names:
    parameters = tuple(name for name, _ in module.named_parameters())
    buffers = tuple(name for name, _ in module.named_buffers())
    if state is not None:
        _check_state(module, state, buffers)
        changing = set(state)
    else:
        changing = changing_buffers(module).intersection(buffers)
        unknown = set(buffers) - changing
        if unknown and (example_args or example_kw is not None):
            every = Names(parameters, buffers, ())
            changing |= _found_changing(module, every, options, example_args, example_kw)
    return Names(
        parameters,
        tuple(b for b in buffers if b in changing),
        tuple(b for b in buffers if b not in changing),
    )


def _found_changing(
    module: torch.nn.Module,
    names: Names,
    options: Options,
    example_args: Sequence[Any],
    example_kw: dict[str, Any] | None,
) -> set[str]:
    """The buffers that one run in training mode changes."""
    code = ModuleCode(Blueprint(module, names), options.method)
    code.tells = False  # the model's own will
    function = TorchFunction(code)
    ask = lambda site, specs, _, values: probe(Question(function, site, specs), values)  # noqa: E731
    _infer(code, module, False, ask, example_args, example_kw)
    return code.changed_state


def _infer(
    code: ModuleCode,
    module: torch.nn.Module,
    inference: bool,
    infer: Infer,
    example_args: Sequence[Any],
    example_kw: dict[str, Any] | None,
) -> None:
    """Infers what a call like the examples returns, with parameters and state in front."""
    names = code.blueprint.names
    named = dict(module.named_parameters()) | dict(module.named_buffers())
    tensors = [named[name] for name in (*names.parameters, *names.state)]
    wide = own_wide_dtypes([t.dtype for t in tensors], len(names.parameters))
    examples = Examples(code.name, example_args, example_kw or {})
    own = code.own[inference, False]
    examples.infer(infer, example_args, example_kw, own, tensors, wide)


def _check_method(module: torch.nn.Module, method: Any) -> None:
    if not isinstance(method, str):
        name = getattr(method, "__name__", "forward")
        raise InputError(
            f'`method=` takes the name of a method, but got {method!r}: write `method="{name}"`.'
        )
    if not callable(getattr(module, method, None)):
        raise InputError(f"`{type(module).__name__}` has no method `{method}` to convert.")


def _check_has_state(model: TorchModule, state: Any, at_making: bool) -> None:
    """Raises if a model's state is to be chosen or made a second time."""
    name = model.core.name
    if state is not None:
        raise InputError(
            f"`state=` names the buffers that the forward of a torch module changes, but "
            f"`{name}` is converted already, and its state is known. Leave it out."
        )
    if at_making and model.buffers is not None and not isinstance(model.buffers.init, dict):
        raise ModuleError(
            f"`{name}` has a state already, made by `eqx.nn.make_with_state`, and no longer holds "
            "the initial one. Write `from_torch(model, ...)` without `make_with_state`, and pass "
            "the state of `model`, which the result shares."
        )


def _check_state(module: torch.nn.Module, state: Sequence[str], buffers: Sequence[str]) -> None:
    unknown = [name for name in state if name not in buffers]
    if unknown or isinstance(state, str):
        raise ModuleError(
            f"`state={state!r}`: pass a list of names of buffers of `{type(module).__name__}`, "
            f"which has {list(buffers)}."
        )
