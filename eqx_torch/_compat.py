"""Everything that depends on a version of JAX, torch or jaxtyping, and every private name.

Each private import stands here with the reason why no public name would do, so that a new
release of one of them can only break this file.
"""

import contextlib
import inspect
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias, TypeVar

import equinox as eqx
import jax
import jax.core
import numpy as np
import torch
import torch.random
from jax._src.array import (
    # The class of the arrays that are no tracers.
    ArrayImpl as _Array,
)
from jax._src.core import (
    # Which mesh axes `jax.vmap` maps: inside of it they are in no type.
    get_axis_env as _axis_environment,
    # Outside of all transformations a primitive may be evaluated at once; to bind it takes several
    # microseconds, and one more for each array.
    trace_state_clean as outside_of_transformations,
)
from jax._src.lax.lax import (
    # JAX makes weakly typed arrays of Python numbers, but no public function makes one of an array.
    _convert_element_type as _converted_element_type,
)
from jax._src.util import (
    # How JAX's own caches are emptied by `jax.clear_caches()`; recorded graphs are one more.
    register_cache,
    # JAX's tracing caches own the parameters of a primitive (up to 2048 entries) unless their type
    # is in this set, which holds them weakly, as JAX does with jaxprs. Without it the caches would
    # keep the torch functions and modules alive that the user has dropped.
    weakref_cache_key_types as _weakly_cached_types,
)
from jax.extend.core import Primitive
from jax.interpreters import mlir, partial_eval
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P, SingleDeviceSharding
from jaxtyping import jaxtyped
from jaxtyping._storage import (
    # `?name` has one value for each leaf of a tree, kept under a name that has the leaf's position.
    clear_treepath_memo as _clear_treepath_memo,
    get_treepath_memo as leaf_prefix,
    # Names that `isinstance` binds are wanted afterwards, and its arguments given: `jaxtyped` has
    # both only for the functions it wraps.
    pop_shape_memo as _pop_shape_memo,
    push_shape_memo as _push_shape_memo,
    set_shape_memo as _set_shape_memo,
    set_treepath_memo as _set_treepath_memo,
)
from torch import (
    # Each of some tensors from another, at less than `copy_` takes for one.
    _foreach_copy_ as copy_all,
)
from torch._C import (
    # What a derivative runs is told from what a forward runs by this alone.
    _current_graph_task_id,
    # Whether torch has a batching rule for an operator, which public names do not say.
    _dispatch_has_kernel_for_dispatch_key as _has_kernel,
    # Public names make operators, but do not keep them from the kernels of one key.
    _dispatch_key_parse,
    # What `torch.autograd.grad(is_grads_batched=True)` makes of tensors, by an older `vmap` than
    # `torch.func.vmap`, in which it may leave some behind.
    _dispatch_keys,
    _dispatch_tls_set_dispatch_key_included,
    _ExcludeDispatchKeyGuard,
    # `torch.from_dlpack` takes a capsule too, but is a Python function: 0.5 us more for each array.
    _from_dlpack as from_dlpack,
    # Which transformations of operators into programs are active in the thread.
    _get_dispatch_mode,
    # Public is only the question for one kind of device, of which there are several.
    _is_any_autocast_enabled as any_autocast,
    # The number of active function modes (`torch.set_default_device` is one) is read on every
    # call; the public `torch.get_default_device` costs 3 us, this 0.05 us.
    _len_torch_function_stack as torch_function_modes,
    # `torch.no_grad` and its kin all call the first; no public name switches forward mode off.
    _set_fwd_grad_enabled as set_forward_grad_enabled,
    _set_grad_enabled as set_grad_enabled,
    _TorchDispatchModeKey,
    # Tensors can be asked about in the middle of a run without the run's own function mode.
    DisableTorchFunction as WithoutFunctionModes,
    DispatchKeySet,
)
from torch._C._functorch import (
    # What memory a tensor has is not to be asked of a wrapper; no public name tells wrappers.
    get_unwrapped,
    is_functorch_wrapped_tensor as is_functorch_wrapped_tensor,
    # Batching rules are missing for some operators that take a generator, which matters but then.
    peek_interpreter_stack as _peek_interpreter_stack,
)
from torch._functorch.autograd_function import (
    # What `torch.library.register_vmap` uses, which refuses operators with keyword-only tensors.
    custom_function_call_vmap_helper,
)
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter
from torch._functorch.vmap import (
    # `torch.func.vmap` is these and trees of arguments, which cost it more than a small function.
    _add_batch_dim,
    _remove_batch_dim,
    lazy_load_decompositions,
    vmap_increment_nesting,
)
from torch._subclasses.fake_tensor import (
    # Tensors without memory have no public constructor; `torch.compile` uses these.
    FakeTensorMode as FakeTensorMode,
)
from torch.autograd.graph import (
    # What `torch.autograd.grad` calls when it has checked its arguments, which here are right by
    # construction; to check them takes as long as the backward of a small layer.
    _engine_run_backward,
)
from torch.multiprocessing.reductions import (
    # Whether memory is still held, which weak references to tensors do not say: a view made under
    # autograd is another object than the one that the operator has given.
    StorageWeakRef as StorageWeakRef,
)
from torch.utils import (
    # Trees as torch code makes them, for hooks: dicts in their order, None a leaf.
    _pytree as torch_tree,
)
from torch.utils._python_dispatch import (
    # Copies of real storages are taken in the middle of a run on fake tensors.
    _disable_current_modes as without_modes,
    # The only hook that sees each operator with its schema, hence each write; for probing.
    TorchDispatchMode as _TorchDispatchMode,
)


__all__ = [
    "SWAPPING",
    "FakeTensorMode",
    "StorageWeakRef",
    "TorchDispatchMode",
    "WithoutFunctionModes",
    "any_autocast",
    "copy_all",
    "from_dlpack",
    "in_backward",
    "is_all_true",
    "is_functorch_wrapped_tensor",
    "leaf_prefix",
    "levels_of_func",
    "outside_of_transformations",
    "set_forward_grad_enabled",
    "set_grad_enabled",
    "torch_function_modes",
    "torch_tree",
    "without_modes",
]

# What `torch.nn.functional.scaled_dot_product_attention` calls on a CPU, and its pullback.
CPU_ATTENTION = (
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
)

_OLDER_BATCH = _dispatch_key_parse("Batched")

_LIBRARY = torch.library.Library("aten", "IMPL")  # its registrations end with it

# Reserved for a library that is no longer maintained (torchdistX), and unused by torch. It ranks
# above autograd and its thread keeps it: `PythonTLSSnapshot`, the next, is the modes' own, and were
# a key of autocast on, torch would take autocast to be on and compile otherwise.
_INTERPOSED = _dispatch_key_parse("DeferredInit")
_ONLY_INTERPOSED = DispatchKeySet(_INTERPOSED)
_FALLBACK = torch.library.Library("_", "IMPL")
_FALLBACK.fallback(torch.library.fallthrough_kernel, "DeferredInit")

Operator: TypeAlias = torch._ops.OpOverload

_Class = TypeVar("_Class", bound=type)

# The XLA custom calls behind `jax.experimental.buffer_callback`, registered when jaxlib loads.
# They are used directly because `buffer_callback` rebuilds argument trees on every call.
_CALLBACK_TARGETS = {
    "cpu": "xla_buffer_python_cpu_callback",
    "cuda": "xla_buffer_python_gpu_callback",
    "rocm": "xla_buffer_python_gpu_callback",
}


# What puts tensors in the place of a module's parameters: `torch.func.functional_call` calls it, as
# do those that it took over from.
SWAPPING = inspect.unwrap(torch.nn.utils.stateless._reparametrize_module).__code__

# What `torch.distributions` asks of a check of its arguments, to raise if it is not so.
is_all_true = torch._is_all_true

# What `torch.nn.utils.rnn.pad_packed_sequence` calls, which reads lengths without an operator.
pad_packed_sequence = torch._VF._pad_packed_sequence


class TorchDispatchMode(_TorchDispatchMode):
    """The only hook that sees each operator with its schema, hence each write; for probing."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # torch would load its compiler to tell it not to compile these hooks. Functions that run
        # under them are not compiled in any case.
        return False


def cached_weakly(cls: _Class) -> _Class:
    """Class decorator: JAX's caches hold the instances of `cls` weakly."""
    _weakly_cached_types.add(cls)
    return cls


def types_of(arrays: Sequence[Any]) -> tuple[Any, ...] | None:
    """`jax.typeof` of each, None if any is no array of JAX's.

    Of an array on one device it is the array's attribute `aval`, and to read that takes a tenth of
    the time.
    """
    types = [
        x.aval if type(x) is _Array and type(x.sharding) is SingleDeviceSharding else None
        for x in arrays
    ]
    if None not in types:
        return tuple(types)
    if not all(isinstance(x, jax.Array) for x in arrays):
        return None
    return tuple(map(jax.typeof, arrays))


class _ClearedCache:
    """What JAX asks of a cache that it clears."""

    def __init__(self, clear: Callable[[], None]) -> None:
        self.cache_clear = clear

    def cache_info(self) -> None:
        return None

    def cache_keys(self) -> list[Any]:
        return []


_cleared_caches: list[_ClearedCache] = []  # JAX holds them weakly


def on_clear_caches(clear: Callable[[], None]) -> None:
    """Calls `clear` at `jax.clear_caches()`."""
    cache = _ClearedCache(clear)
    _cleared_caches.append(cache)
    register_cache(cache, "eqx_torch")


def run_backward(
    outputs: tuple[Any, ...],
    cotangents: tuple[torch.Tensor, ...],
    inputs: tuple[torch.Tensor, ...],
    retain_graph: bool,
    create_graph: bool,
) -> tuple[torch.Tensor | None, ...]:
    """`torch.autograd.grad`; None for inputs that the outputs do not depend on."""
    return _engine_run_backward(
        outputs,
        cotangents,
        retain_graph,
        create_graph,
        inputs,
        allow_unreachable=True,
        accumulate_grad=False,
    )


def batched(
    function: Callable[..., Sequence[torch.Tensor]],
    inputs: Sequence[torch.Tensor],
    in_axes: Sequence[int | None],
    out_axes: Sequence[int],
    size: int,
    randomness: str,
) -> list[torch.Tensor]:
    """`torch.func.vmap` of a function of tensors that returns several."""
    lazy_load_decompositions()
    with vmap_increment_nesting(size, randomness) as level:
        pairs = zip(inputs, in_axes, strict=True)
        members = [x if axis is None else _add_batch_dim(x, axis, level) for x, axis in pairs]
        outs = zip(function(*members), out_axes, strict=True)
        results = [_remove_batch_dim(y, level, size, axis) for y, axis in outs]
    if any(_dispatch_keys(y).has(_OLDER_BATCH) for y in results):
        raise RuntimeError(
            "a batch of gradients (`is_grads_batched`) is not taken apart in another"
        )
    return results


def register_batching_rule(operator: Operator, rule: Callable[..., Any]) -> None:
    """Registers how `torch.func.vmap` calls an operator of torch's, if torch does not know.

    `rule` takes the operator as a function of positional arguments, the batch's size, its axis in
    each argument (None in those that are the same for all members), and the arguments by name. It
    returns a tuple of results with the batch as first axis.
    """
    if has_kernel(operator, "FuncTorchBatched"):
        return
    parameters = operator._schema.arguments
    names = [p.name for p in parameters]
    positional = sum(not p.kwarg_only for p in parameters)

    def call(*values: Any) -> Any:
        named = zip(names[positional:], values[positional:], strict=True)
        return operator(*values[:positional], **dict(named))

    def batch(info: Any, axes: Sequence[int | None], *values: Any) -> Any:
        results = rule(call, info.batch_size, axes, dict(zip(names, values, strict=True)))
        return results, (0,) * len(results)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        rest = [kwargs.get(p.name, p.default_value) for p in parameters[len(args) :]]
        interpreter: Any = retrieve_current_functorch_interpreter()
        return custom_function_call_vmap_helper(interpreter, batch, call, *args, *rest)

    _LIBRARY.impl(operator, kernel, "FuncTorchBatched")


def set_interposed(on: bool) -> None:
    """Whether operators of the calling thread are run by the kernels of `interpose`."""
    _dispatch_tls_set_dispatch_key_included(_INTERPOSED, on)


def interpose(operator: Operator, kernel: Callable[..., Any]) -> None:
    """Registers what is run in the place of an operator of torch's, and may call that."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with _ExcludeDispatchKeyGuard(_ONLY_INTERPOSED):
            return kernel(*args, **kwargs)

    _LIBRARY.impl(operator, call, "DeferredInit")


def has_kernel(operator: Operator, key: str) -> bool:
    """Whether an operator has a kernel of its own for a key of torch's dispatcher."""
    return _has_kernel(operator.name(), key)


def outside_of_func() -> bool:
    """Whether no transformation of `torch.func` is active."""
    return _peek_interpreter_stack() is None


def levels_of_func() -> tuple[int, int]:
    """How many transformations of `torch.func` and levels of forward derivatives are active."""
    stack = _peek_interpreter_stack()
    return (0 if stack is None else stack.level()), torch.autograd.forward_ad._current_level


def in_backward() -> bool:
    """Whether torch's engine is computing a derivative in this thread."""
    return _current_graph_task_id() != -1


def fakes_without_memory() -> FakeTensorMode:
    """Operators give fake tensors, which raise where their memory is asked for.

    By default torch hands out a null pointer, with a warning, and what writes there, such as what
    `torch.from_dlpack` makes of it, ends the process. The switch of the process is not touched.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    mode._allow_unsafe_data_ptr_access = False
    return mode


def without_values() -> bool:
    """Whether operators run for their shapes, or for a program to be made of them."""
    keys = (_TorchDispatchModeKey.FAKE, _TorchDispatchModeKey.PROXY)
    return any(_get_dispatch_mode(key) is not None for key in keys)


class _RoutedGenerator:
    """torch's default generator, or another in the threads that have one."""

    def __init__(self, choose: Callable[[], torch.Generator | None]) -> None:
        self._choose = choose

    def __getattr__(self, name: str) -> Any:
        return getattr(self._choose() or torch.default_generator, name)


def route_default_generator(choose: Callable[[], torch.Generator | None]) -> None:
    """Makes `torch.manual_seed`, `get_rng_state` and their kin ask which generator is meant.

    That is the only name by which they know it. Operators do not ask for it.
    """
    torch.random.default_generator = _RoutedGenerator(choose)  # type: ignore[assignment]


def register_dce(
    primitive: Primitive, rule: Callable[[Sequence[bool], Any], tuple[list[bool], Any]]
) -> None:
    """Registers what to do where only some of a primitive's results are used.

    `rule` takes which are used and the equation, as JAX passed them before 0.12. Since then JAX
    puts between them which inputs are live references; a torch call takes no references.
    """
    partial_eval.dce_rules[primitive] = lambda used, *rest: rule(used, rest[-1])


def callback_target(platform: str) -> str | None:
    """The custom call that runs a Python callback on buffers, None where there is none."""
    return _CALLBACK_TARGETS.get(platform)


def lower_callback(
    ctx: mlir.LoweringRuleContext,
    target: str,
    callback: Callable[..., tuple[()]],
    operands: Sequence[Any],
    name: str,
    is_kept: bool,
) -> Sequence[Any]:
    """Emits a custom call that passes its operand and result buffers to `callback`.

    XLA calls the operation `name`, in programs as in profiles. It drops one that gives no elements,
    unless that `is_kept`.
    """
    ctx.module_context.add_host_callback(callback)
    index = len(ctx.module_context.host_callbacks) - 1
    with _location(ctx, name):
        lower = jax.ffi.ffi_lowering(target, has_side_effect=is_kept)
        return lower(ctx, *operands, index=np.uint64(index))


def _location(ctx: mlir.LoweringRuleContext, name: str) -> mlir.ir.Location:
    """The location in force, with `name` where JAX has put that of the primitive.

    It is as JAX builds it: the operation's type, within it its path, within that the source lines.
    """
    lines: Any = mlir.ir.Location.current
    while isinstance(lines, mlir.ir.NameLoc):
        lines = lines.child_loc
    stack = str(ctx.name_stack)
    path = mlir.ir.Location.name(f"{stack}/{name}" if stack else name, childLoc=lines)
    return mlir.ir.Location.name(f"{name}:", childLoc=path)


def varying_axes(aval: Any) -> frozenset[str]:
    """The manual mesh axes along which a value of this type differs between devices."""
    return frozenset(aval.manual_axis_type.varying)


def output_aval(shape: tuple[int, ...], dtype: Any, operands: Sequence[Any]) -> Any:
    """The type of a result that is unsharded and varies over the manual axes its operands do."""
    mesh = next(
        (a.sharding.mesh for a in operands if not a.sharding.mesh.empty),
        jax.sharding.get_abstract_mesh(),
    )
    if mesh.empty:
        return jax.core.ShapedArray(shape, dtype)
    sharding = NamedSharding(mesh, P(*(None,) * len(shape)))
    varying = frozenset[str]().union(*map(varying_axes, operands))
    if not varying:
        return jax.core.ShapedArray(shape, dtype, sharding=sharding)
    manual_axis_type = type(operands[0].manual_axis_type)
    return jax.core.ShapedArray(
        shape, dtype, sharding=sharding, manual_axis_type=manual_axis_type(varying=varying)
    )


def unsettled_axes(aval: Any) -> frozenset[str]:
    """The mesh axes over which an array of this type, or its cotangent, has yet to be summed."""
    kinds = (aval.sharding.spec, aval.manual_axis_type)
    return frozenset().union(*(kind.reduced | kind.unreduced for kind in kinds))


def weakly_typed(x: Any) -> Any:
    """An array whose dtype yields to others, as that of a Python number does."""
    return _converted_element_type(x, weak_type=True)


def explicit_axes(mesh: Any) -> frozenset[str]:
    """The names of the mesh axes whose shardings are part of the types."""
    return axes_of_type(mesh, AxisType.Explicit)


def vmapped_mesh_axes() -> frozenset[str]:
    """The explicit mesh axes over which a `jax.vmap` around this call is sharded."""
    return frozenset(_axis_environment().explicit_mesh_axis_names)


def axes_of_type(mesh: Any, axis_type: AxisType) -> frozenset[str]:
    """The names of the mesh axes of one type."""
    pairs = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return frozenset(name for name, kind in pairs if kind == axis_type)


def called_by_make_with_state() -> bool:
    """Whether the caller of this was itself called by `eqx.nn.make_with_state`.

    Equinox then takes the initial state out of what the caller returns, and its message for a model
    that has none left tells to do what was done. Nothing but the frame tells the caller of this.
    """
    caller = sys._getframe(2)
    return caller.f_globals.get("__name__") == eqx.nn.make_with_state.__module__


def admitted_by_jaxtyping(value: Any, annotation: Any, memo: tuple[dict[str, Any], ...]) -> bool:
    """Whether `value` is an instance, after which `memo` has the names that were bound.

    `memo` is the sizes of single names, those of variadic ones, the structures and the arguments.
    """
    _push_shape_memo({})
    _set_shape_memo(*memo)
    try:
        return isinstance(value, annotation)
    finally:
        _pop_shape_memo()


def parsed_dimension(annotation: Any) -> tuple[str, Any, bool, bool, bool]:
    """What jaxtyping parsed the only dimension of an annotation into, which has no public name.

    Its kind ("size", "name", "elem" for an expression, "any"), what it says, and whether it is
    variadic, may be broadcast (`#`) and differs among the leaves of a tree (`?`).
    """
    (dim,) = annotation.dims
    kind = next((kind for kind in ("size", "name", "elem") if hasattr(dim, kind)), "any")
    marks = getattr(dim, "broadcastable", False), getattr(dim, "treepath", False)
    return kind, getattr(dim, kind, None), annotation.index_variadic is not None, *marks


@contextlib.contextmanager
def leaf_position(index: int, structure: str | None) -> Iterator[None]:
    """Within it, `?name` means the name's value at leaf `index` of the tree named `structure`."""
    if structure is None:
        yield
        return
    _set_treepath_memo(index, structure)
    try:
        yield
    finally:
        _clear_treepath_memo()


def is_checking_layer(fn: types.FunctionType) -> bool:
    """Whether `fn` is the wrapper that `jaxtyped(typechecker=...)` puts around a function.

    Its variables tell it from the wrapper of `jaxtyped(typechecker=None)`, which checks nothing.
    """
    ours = fn.__code__.co_filename == jaxtyped.__code__.co_filename
    return ours and "param_signature" in fn.__code__.co_freevars


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that torch.func's transformations have wrapped: no public API tells."""
    while is_functorch_wrapped_tensor(tensor):
        tensor = get_unwrapped(tensor)
    return tensor


def mark_parameter(tensor: torch.Tensor) -> None:
    """Makes `isinstance(tensor, torch.nn.Parameter)` true.

    torch's metaclass of parameters looks for this attribute, which is meant for tensors of other
    types. A `Parameter` proper would be cut off from the graph that its tensor is part of.
    """
    setattr(tensor, "_is_param", True)  # noqa: B010
