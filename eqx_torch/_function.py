"""`torch2jax`: a torch function as a JAX function."""

import contextlib
import functools
import inspect
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NoReturn

import jax

from ._annotations import read_signature, unchecked
from ._errors import InputError
from ._examples import Annotated, Examples, widened
from ._invoke import Call, divided, outputs_of, Prepared, prepared
from ._program import Compiled, Lock, Plain, PROCESS_LOCK, Residuals, TorchFunction, VmapMethod
from ._shapes import Declaration, Inference, OutputShapes
from ._sharding import check_specs
from ._trees import like_places


_IGNORED = {
    "use_torch_vjp": "is ignored: derivatives use torch's own graph, and `torch.func` where JAX "
    "batches them. Leave it out.",
    "use_zeros": "is ignored: what is not differentiated has no derivative, of which JAX makes the "
    "zeros that it needs. Leave it out.",
}
_DEPRECATED = {"output_sharding_spec", *_IGNORED}
_MOVED = {
    "torch2jax_with_vjp": "write `torch2jax(f, ...)`, which has derivatives of every order",
    "torch2jax_without_vjp": "write `torch2jax(f, ..., depth=0)`",
    "torch2jax_auto": "write `torch2jax(f)`, which needs no example arguments",
    "wrap_torch_fn": "write `torch2jax`",
    "compile_and_import_module": "leave it out, since nothing is compiled",
}
_VMAP_METHODS = ("torch", "sequential", "broadcast_all", "expand_dims")


def torch2jax(
    fn: Callable[..., Any],
    *example_args: Any,
    example_kw: dict[str, Any] | None = None,
    output_shapes: OutputShapes = None,
    out_specs: Any = None,
    lock: bool | Lock = False,
    depth: int | None = None,
    nondiff_argnums: int | Sequence[int] | None = None,
    nondiff_mask: Any = None,
    vmap_method: VmapMethod = "torch",
    residuals: Residuals = "tape",
    signature: Callable[..., Any] | None = None,
    output_sharding_spec: Any = None,
    use_torch_vjp: Any = None,
    use_zeros: Any = None,
    **unknown: NoReturn,
) -> Callable[..., Any]:
    """Makes a JAX function of a torch function.

    The result takes JAX arrays and returns JAX arrays. Each time the JAX program runs it, `fn` is
    called with torch tensors that share memory with the arrays, on every device that takes part.
    It works under `jax.jit`, `jax.vmap`, `jax.shard_map`, `jax.checkpoint`, control flow, and any
    order of `jax.grad`, `jax.jvp` and `jax.hessian`; derivatives are computed by torch.

    `fn` must give the same result for the same inputs and keep no tensor after it returns. It may
    branch on values, and write to its arguments (it is given a copy of those).

    **Arguments:**

    - `fn`: takes and returns any nesting of tuples, lists, dicts, dataclasses and None with torch
        tensors as leaves. Arguments that are not arrays (numbers, strings) are passed as they are.
        Strings and other constants in the result are kept; they must be the same in every run.
        Numbers in it arrive as arrays, as from `jax.jit`.
    - `*example_args`, `example_kw`: optional examples of the arguments: torch tensors, JAX arrays
        or `jax.ShapeDtypeStruct`. They fix the structure of the arguments, move errors to the time
        of wrapping, and give 64-bit dtypes back to arguments that JAX holds in 32 bits (class
        labels), as an annotation such as `Int64[Tensor, "n"]` does. Calls may have other shapes.
        Where output shapes depend on values, those of the examples give them.
    - `output_shapes`: the outputs of `fn`: a tree of `jax.ShapeDtypeStruct`, tensors, arrays or
        `Size`, or a function that gives one for the arguments as `jax.ShapeDtypeStruct`. Shapes
        are global. A list stands for a tuple, and the reverse: what is declared is returned. If
        None, jaxtyping annotations of `fn` say it, or else `fn` is run once for each new
        combination of shapes, on tensors without memory; if it needs values, on those of the
        examples or of an eager call, or on zeros, with a warning. If examples are given too,
        `output_shapes` holds for calls with their shapes.
    - `out_specs`: for inputs that are sharded over explicit mesh axes: how the outputs are, a
        `jax.sharding.PartitionSpec` or a prefix tree of them. `fn` is then called on each shard.
        Shapes that are not declared are inferred for one shard, and `out_specs` puts the results
        of all shards together, as in `jax.shard_map`.
    - `lock`: True to hold one process-wide lock while `fn` or a derivative of it runs (devices
        call it concurrently from different threads), or a context manager to hold instead. Where
        `fn` is found to replace a module's parameters (`torch.func.functional_call`), the
        process-wide lock is held in any case.
    - `depth`: how often the result may be differentiated; None for any number of times.
    - `nondiff_argnums`: positions of arguments that derivatives leave out, as if constant.
    - `nondiff_mask`: a tree of bools, or a prefix of one, like the positional arguments, True on
        those that derivatives leave out.
    - `vmap_method`: how `jax.vmap` calls `fn`. `"torch"`: one call under `torch.func.vmap`, or a
        loop where that fails. `"sequential"`, `"broadcast_all"`, `"expand_dims"` as in `jax.ffi`.
    - `residuals`: `"tape"` to keep the graph of a forward for its backward, as torch does (on a
        GPU some backwards recompute, those of a `lax.scan` over layers among them);
        `"recompute"` to always run the forward again in the backward, which needs less memory.
    - `signature`: an annotated function (a stub will do) whose jaxtyping annotations to use in
        place of those of `fn`. If its first argument is named `self`, that is the module or
        object whose method `fn` is.
    - `output_sharding_spec`: the deprecated name of `out_specs`.
    - `use_torch_vjp`, `use_zeros`: options of `wrap_torch2jax`, deprecated and ignored.
    - `**unknown`: none. Examples of keyword arguments are passed in `example_kw`.

    **Returns:**

    A function with the signature of `fn`.

    **Raises:**

    `InputError` for arguments that do not fit; when called also `ShapeError`, `DtypeError`,
    `OutputError`, `ShardingError` and `DepthError`. What is raised while the program runs, by `fn`
    or by the checks of its results, arrives inside the text of a JAX error
    (`jax.errors.JaxRuntimeError` or `ValueError`), with torch's message and traceback.

    !!! example

        >>> import jax, jax.numpy as jnp, torch
        >>> softplus = torch2jax(torch.nn.functional.softplus)
        >>> jax.jit(jax.grad(lambda x: softplus(x).sum()))(jnp.zeros(3))
        Array([0.5, 0.5, 0.5], dtype=float32)
    """
    check_keywords("torch2jax", unknown, torch2jax)
    for option, value in {"use_torch_vjp": use_torch_vjp, "use_zeros": use_zeros}.items():
        if value is not None:
            warnings.warn(f"`{option}` {_IGNORED[option]}", DeprecationWarning, stacklevel=2)
    if output_sharding_spec is not None:
        warnings.warn(
            "`output_sharding_spec` is deprecated; its name is now `out_specs`.",
            DeprecationWarning,
            stacklevel=2,
        )
        out_specs = output_sharding_spec if out_specs is None else out_specs
    if not callable(fn):
        raise InputError(
            f"`torch2jax` takes a function of torch tensors, but got {fn!r} of type "
            f"{type(fn).__name__}."
        )
    if _is_jax_function(fn):
        raise InputError(
            f"`torch2jax` takes a function of torch tensors, but `{function_name(fn)}` is one of "
            "JAX arrays already. Call it as it is."
        )
    check_options(depth, vmap_method, residuals, out_specs)
    annotated = read_signature(fn, signature, result=output_shapes is None)
    compiled = Compiled()
    name = function_name(fn)
    function = TorchFunction(
        Plain(unchecked(fn), name),
        lock=lock_of(lock),
        depth=depth,
        vmap_method=vmap_method,
        residuals=residuals,
        compiled=compiled,
    )
    examples = Examples.of(name, *widened(annotated, example_args, example_kw))
    declaration = Declaration(output_shapes, annotated, examples and examples.specs)
    infer = Inference(function, declaration)
    annotations = Annotated(annotated)
    nondiff = _NonDiff(name, nondiff_argnums, nondiff_mask)
    known: dict[Hashable, Prepared] = {}

    def prepare(call: Call) -> Prepared:
        site = call.site((examples or annotations).wide_dtypes(call))
        split, shards = divided(function, site, call.types, out_specs)
        outputs = outputs_of(infer, call, site, split, shards)
        constant = nondiff.constant(call)
        new = prepared(
            function, site, split, shards, outputs, constant=constant, out_specs=out_specs
        )
        if not outputs.by_values:
            known[call.key] = new
        return new

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        call = Call(name, args, kwargs)
        return (known.get(call.key) or prepare(call))(call.arrays)

    if examples is not None:
        examples.infer(infer, example_args, example_kw)
    functools.update_wrapper(wrapped, fn, updated=())
    wrapped.__dict__["_compiled"] = compiled
    return wrapped


class _NonDiff:
    """Which arguments derivatives leave out."""

    def __init__(self, name: str, argnums: int | Sequence[int] | None, mask: Any) -> None:
        if argnums is not None and mask is not None:
            raise InputError(
                f"`{name}` was wrapped with both `nondiff_argnums` and `nondiff_mask`; pass one."
            )
        self._name = name
        self._argnums = (argnums,) if isinstance(argnums, int) else argnums
        self._mask = mask

    def constant(self, call: Call) -> frozenset[int]:
        """The arrays of a call that are left out."""
        if self._argnums is None and self._mask is None:
            return frozenset()
        args, _ = call.structure.places()
        mask = self._mask_of(call.args, args)
        pairs = zip(mask, call.statics, strict=False)  # those of keyword arguments come last
        arrays = [left_out for left_out, static in pairs if static is None]
        return frozenset(i for i, left_out in enumerate(arrays) if left_out)

    def _mask_of(self, args: Sequence[Any], like: Any) -> list[bool]:
        if self._argnums is not None:
            self._check_argnums(len(args))
            positions = {i % len(args) for i in self._argnums}
            prefix: Any = tuple(i in positions for i in range(len(args)))
        else:
            mask = self._mask
            prefix = tuple(mask) if isinstance(mask, list) else mask
        try:
            mask: Any = jax.tree.leaves(jax.tree.broadcast(like_places(prefix), like))
        except ValueError:
            mask = [None]
        if all(isinstance(x, bool) for x in mask):
            return mask
        raise InputError(
            f"`nondiff_mask={self._mask!r}` of `{self._name}` is not a prefix of its "
            f"{len(args)} positional arguments. Pass a tuple with a bool (or a tree of them) "
            "for each."
        )

    def _check_argnums(self, count: int) -> None:
        wrong = [i for i in self._argnums or () if not -count <= i < count]
        if wrong:
            raise InputError(
                f"`nondiff_argnums` of `{self._name}` names the positional arguments {wrong}, but "
                f"it was called with {count}. Keyword arguments can be left out of derivatives by "
                "`jax.lax.stop_gradient`."
            )


def _is_jax_function(fn: Callable[..., Any]) -> bool:
    """Whether this is a jitted function, or a layer of Equinox's or ours."""
    library = type(fn).__module__.partition(".")[0]
    return isinstance(fn, jax.stages.Wrapped) or library in ("equinox", "eqx_torch")


def function_name(fn: Callable[..., Any]) -> str:
    """What messages call a function."""
    inner = fn.func if isinstance(fn, functools.partial) else fn
    return getattr(inner, "__name__", type(inner).__name__)


def lock_of(lock: bool | Lock | None) -> Lock | None:
    """The lock that an argument `lock=` asks for."""
    if lock is True:
        return PROCESS_LOCK
    if lock is False or lock is None:
        return None
    if not isinstance(lock, contextlib.AbstractContextManager):
        raise InputError(
            f"`lock={lock!r}` is of type {type(lock).__name__}; pass True, False or a context "
            "manager that can be entered any number of times, such as `threading.RLock()`."
        )
    return lock


def check_keywords(name: str, unknown: Mapping[str, Any], function: Callable[..., Any]) -> None:
    """Raises for keywords that are no options of `torch2jax` or `from_torch`."""
    if unknown:
        own = (name for name in inspect.signature(function).parameters if name not in _DEPRECATED)
        options = list(own)
        examples = ", ".join(f'"{keyword}": ...' for keyword in unknown)
        raise InputError(
            f"`{name}` has no option {', '.join(f'`{keyword}`' for keyword in unknown)}. Examples "
            f"of keyword arguments are passed in a dict, `example_kw={{{examples}}}`. The options "
            f"are {', '.join(options[options.index('example_kw') : -1])}."
        )


def check_options(depth: Any, vmap_method: Any, residuals: Any, out_specs: Any) -> None:
    """Raises for options that no wrapped function can have."""
    check_specs(out_specs)
    if depth is not None and (isinstance(depth, bool) or not isinstance(depth, int) or depth < 0):
        raise InputError(
            f"`depth={depth!r}`: pass a number of derivatives (0 for none), or None for any."
        )
    if vmap_method not in _VMAP_METHODS:
        raise InputError(f"`vmap_method={vmap_method!r}`: pass one of {', '.join(_VMAP_METHODS)}.")
    if residuals not in ("tape", "recompute"):
        raise InputError(f'`residuals={residuals!r}`: pass "tape" or "recompute".')


def __getattr__(name: str) -> Any:
    """The `__getattr__` of the package: of names of `wrap_torch2jax`, what to write here."""
    if name in _MOVED:
        # An ImportError, since `from eqx_torch import name` drops the text of an AttributeError.
        raise ImportError(
            f"`eqx_torch` has no `{name}` of `wrap_torch2jax`: {_MOVED[name]}.", name=name
        )
    raise AttributeError(f"module 'eqx_torch' has no attribute '{name}'")
