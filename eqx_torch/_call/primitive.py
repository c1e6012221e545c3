"""The one primitive, `torch_call`, and its rules: evaluate a torch program on JAX arrays.

`torch_call_p.bind(*arrays, program=p)` takes an array for each of `p.ins` and gives one for each
of `p.outs`. Each rule turns it into other calls of itself, whose parameters are other programs.
"""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import get_abstract_mesh

from .._compat import (
    callback_target,
    explicit_axes,
    lower_callback,
    output_aval,
    outside_of_transformations,
    register_dce,
    varying_axes,
)
from .._errors import DepthError, EqxTorchError, ShardingError
from .._processes import entry, refuse_deadlock
from .._program import (
    adjoint,
    batched_with_graph,
    differential,
    Jvp,
    Program,
    Record,
    recording,
    TOKEN,
    untaped,
    Vjp,
    Vmap,
)
from .._sharding import batch_axes, is_manual, over_batch_shards, over_the_batch
from .pairs import connect, LIVE, new_port
from .runtime import callback


_CONFIG: Any = jax.config  # its attributes are made when JAX is imported

torch_call_p = Primitive("torch_call")
torch_call_p.multiple_results = True

# The same in a program of its own, where each token that it takes is an array in which a recording
# has put it.
torch_call_live_p = Primitive("torch_call")
torch_call_live_p.multiple_results = True


def call(program: Program, *arrays: Any) -> list[Any]:
    """Evaluates a program. Every array inside a program's rules goes through here."""
    if outside_of_transformations():
        return impl(*arrays, program=program)
    return torch_call_p.bind(*align(arrays), program=program)


def align(arrays: Sequence[Any]) -> list[Any]:
    """Casts arrays to vary along the same manual mesh axes.

    The outputs vary wherever any input does. The transpose of the cast is a psum, so cotangents
    of inputs that are replicated over an axis are summed over it by JAX.
    """
    own = [varying_axes(jax.typeof(x)) for x in arrays]
    union = frozenset[str]().union(*own)
    if not union:
        return list(arrays)
    return [
        jax.lax.pcast(x, tuple(sorted(union - axes)), to="varying") if union - axes else x
        for x, axes in zip(arrays, own, strict=True)
    ]


def abstract_eval(*avals: Any, program: Program) -> list[Any]:
    """The types of the outputs."""
    for aval in avals:
        if any(entry is not None for entry in aval.sharding.spec):
            raise ShardingError(
                f"a derivative or batch of `{program.leaf.name}` met an array of type {aval}, "
                "sharded over explicit mesh axes that its primal inputs are not sharded over. "
                "Reshard it with `jax.sharding.reshard(x, P())`, or shard the inputs and pass "
                "`out_specs=`."
            )
    return [output_aval(spec.shape, spec.dtype, avals) for spec in program.outs]


def impl(*arrays: Any, program: Program) -> list[Any]:
    """Evaluates a program outside of `jax.jit`, by compiling it alone."""
    if _CONFIG.jax_disable_jit or _CONFIG.jax_debug_nans or _CONFIG.jax_debug_infs:
        return _impl_in_debugging(program, arrays)
    if LIVE.serves(program, arrays):
        return LIVE.noted(program, lambda: _compiled(program, torch_call_live_p)(*arrays))
    return _compiled(program, torch_call_p)(*arrays)


def _compiled(program: Program, primitive: Primitive) -> Callable[..., list[Any]]:
    compiled = program.leaf.function.compiled()
    if compiled is None:
        return _jitted(program, primitive)
    function = compiled.by_program.get((program, primitive))
    if function is None:
        jitted = _jitted(program, primitive)
        function = compiled.by_program.setdefault((program, primitive), jitted)
    return function


def _impl_in_debugging(program: Program, arrays: Sequence[Any]) -> list[Any]:
    """Evaluates a program where JAX would evaluate the inside of `jax.jit` step by step.

    A torch call is one step: to take it apart would be to call it again.
    """
    with jax.disable_jit(False), jax.debug_nans(False), jax.debug_infs(False):
        results = _jitted(program, torch_call_p)(*arrays)
    for kind, found, wanted in (
        ("nan", jnp.isnan, _CONFIG.jax_debug_nans),
        ("inf", jnp.isinf, _CONFIG.jax_debug_infs),
    ):
        inexact = [y for y in results if jnp.issubdtype(y.dtype, jnp.inexact)]
        if wanted and any(bool(found(y).any()) for y in inexact):
            raise FloatingPointError(f"invalid value ({kind}) encountered in torch's {program}")
    return results


def _jitted(program: Program, primitive: Primitive) -> Any:
    def torch_call(*arrays: Any) -> list[Any]:
        return primitive.bind(*arrays, program=program)

    return jax.jit(torch_call)


# Let f be the program and A(x) its differential at x, restricted to the inputs whose tangents are
# not symbolically zero. JAX linearizes: the JVP rule gives
#
#     y = f(x),    dy = A(x) dx
#
# where A is a program of x and dx, linear in dx. Reverse mode is the transpose of that second call:
# for cotangents u of dy, the cotangents of dx are A(x)^T u, which is the pullback of f. Both are
# programs again, so derivatives of any order follow from these two rules.


def jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, program: Program
) -> tuple[list[Any], list[Any]]:
    """The outputs and their tangents."""
    active = tuple(
        i
        for i, (spec, t) in enumerate(zip(program.ins, tangents, strict=True))
        if spec.differentiable and type(t) is not ad.Zero
    )
    recorded = bool(active) and is_recorded(program)
    results = call(recording(program, active) if recorded else program, *primals)
    outs, token = results[: len(program.outs)], results[len(program.outs) :]
    out_tangents: list[Any] = [ad.Zero(jax.typeof(y).to_tangent_aval()) for y in outs]
    if not active:
        return outs, out_tangents
    tangent_map, residuals, of = differential(program, active, taped=recorded)
    _check_depth(tangent_map)
    arguments = [*(primals[i] for i in residuals), *token, *(tangents[i] for i in active)]
    for i, tangent in zip(of, call(tangent_map, *arguments), strict=True):
        out_tangents[i] = tangent
    return outs, out_tangents


def is_recorded(program: Program) -> bool:
    """Whether to keep the graph for derivatives: of forwards, and of pullbacks that have theirs."""
    function = program.leaf.function
    if function.residuals != "tape" or function.depth == 0 or not program.inexact_outs:
        return False
    if isinstance(program, Record):
        return True
    if isinstance(program, Vmap) and not program.recordable:
        return False
    return program.order == 0 or (isinstance(program, Vjp) and program.taped)


def transpose(cotangents: Sequence[Any], *primals: Any, program: Program) -> list[Any]:
    """The cotangents of the undefined primals, None for the others."""
    wrt = tuple(i for i, x in enumerate(primals) if ad.is_undefined_primal(x))
    of = tuple(i for i, u in enumerate(cotangents) if type(u) is not ad.Zero)
    out: list[Any] = [ad.Zero(x.aval) if ad.is_undefined_primal(x) else None for x in primals]
    if not of:
        return out
    pullback, residuals = adjoint(program, wrt, of)
    _check_depth(pullback)
    arguments = [_defined(primals[i]) for i in residuals] + [cotangents[i] for i in of]
    for i, cotangent in zip(wrt, call(pullback, *arguments), strict=True):
        out[i] = cotangent
    return out


def dce(used: Sequence[bool], eqn: Any) -> tuple[list[bool], Any]:
    """Computes no more than is used: no graph without its token, no derivative for nobody."""
    program = eqn.params["program"]
    if not any(used):
        return [False] * len(eqn.invars), None
    kept = tuple(i for i, u in enumerate(used) if u)
    if isinstance(program, Record):
        outs = len(program.inner.outs)
        tokens = tuple(i for i in kept if i >= outs)
        kept = (*range(outs), *tokens)
        inner = program.inner
        program = dataclasses.replace(program, count=len(tokens)) if tokens else inner
    elif isinstance(program, Jvp):
        program = dataclasses.replace(program, of=tuple(program.of[i] for i in kept))
    elif isinstance(program, Vjp):
        program = dataclasses.replace(program, wrt=tuple(program.wrt[i] for i in kept))
    else:
        kept = tuple(range(len(used)))
    outvars = [eqn.outvars[i] for i in kept]
    new = eqn.replace(params=dict(eqn.params, program=program), outvars=outvars)
    return [True] * len(eqn.invars), new


def _defined(primal: Any) -> Any:
    """The point at which to take the pullback of a program in which it is linear: any."""
    if not ad.is_undefined_primal(primal):
        return primal
    return jnp.zeros(primal.aval.shape, primal.aval.dtype)


def _check_depth(program: Program) -> None:
    function = program.leaf.function
    if function.depth is None or program.order <= function.depth:
        return
    times = "at all" if function.depth == 0 else f"more than depth={function.depth} times"
    raise DepthError(
        f"`{function.name}` was differentiated to order {program.order}, but was wrapped with "
        f"depth={function.depth} and so cannot be differentiated {times}. Wrap it with "
        f"`depth={program.order}` or leave `depth` out; to take no derivative here, use "
        "`jax.lax.stop_gradient` on its inputs."
    )


# With `vmap_method="torch"` the batched call is the program's `Vmap`, or where graphs are recorded
# the same program of the forward's `Vmap`: a batch of a recording is a recording of the batch, and
# has one token. The other methods are those of `jax.ffi`: a loop, or one call of the function
# itself on arrays with a leading batch axis.


def batch(
    arrays: Sequence[Any], dims: Sequence[int | None], *, program: Program
) -> tuple[list[Any], list[int | None]]:
    """The batched outputs, and the axes of the batch in them."""
    base, kept = untaped(program)
    axes = batch_axes([arrays[i] for i in kept], [dims[i] for i in kept])
    if axes is None and program.leaf.function.vmap_method == "torch":
        size = _size(arrays, dims)
        whole = batched_with_graph(program, tuple(dims), size)
        if whole is not None:
            triples = zip(arrays, dims, whole.in_axes, strict=True)
            inputs = [_with_axis(x, dim, axis, size) for x, dim, axis in triples]
            return call(whole.program, *inputs), list(whole.out_axes)
    arrays, dims = [arrays[i] for i in kept], [dims[i] for i in kept]
    # JAX cannot differentiate a `shard_map` in a `shard_map` that has residuals of its own: neither
    # graphs, nor what is made to vary only in there.
    recordable = axes is None or not is_manual(axes[0])
    if axes is not None and not recordable:
        arrays, dims = over_the_batch(axes, arrays, dims), [d or 0 for d in dims]
    tokens = program.count if isinstance(program, Record) else 0

    def local(*xs: Any) -> list[Any]:
        return [*_batched(base, xs, dims, recordable), *[_no_tokens(xs, dims)] * tokens]

    outs = local(*arrays) if axes is None else over_batch_shards(local, axes, arrays, dims)
    return outs, [0] * len(outs)


def _with_axis(x: Any, dim: int | None, axis: int | None, size: int) -> Any:
    """Moves the batch axis of an array to `axis`, or gives it one."""
    if dim == axis or axis is None:
        return x
    if dim is not None:
        return jnp.moveaxis(x, dim, axis)
    return jnp.broadcast_to(jnp.expand_dims(x, axis), (*x.shape[:axis], size, *x.shape[axis:]))


def _no_tokens(arrays: Sequence[Any], dims: Sequence[int | None]) -> Any:
    """A token of no graph for each member: one for all of them is nowhere in a batch's sharding."""
    nothing = jnp.zeros((_size(arrays, dims), *TOKEN.shape), TOKEN.dtype)
    return align([nothing, *arrays])[0]


def _size(arrays: Sequence[Any], dims: Sequence[int | None]) -> int:
    return next(x.shape[d] for x, d in zip(arrays, dims, strict=True) if d is not None)


def _batched(
    program: Program, arrays: Sequence[Any], dims: Sequence[int | None], recordable: bool
) -> list[Any]:
    size = _size(arrays, dims)
    method = program.leaf.function.vmap_method
    if method == "torch":
        out_axes = (0,) * len(program.outs)
        return call(Vmap(program, tuple(dims), out_axes, size, recordable), *arrays)
    leading = [x if d is None else jnp.moveaxis(x, d, 0) for x, d in zip(arrays, dims, strict=True)]
    if method == "sequential":
        return _looped(program, leading, dims)
    # Only the function itself knows what an axis of size one means; derivatives of it have inputs
    # (cotangents of a batch, for one batch-independent primal) for which it has no meaning.
    expand = method == "expand_dims" and program.order == 0
    shared = tuple(i for i, d in enumerate(dims) if d is None and expand)
    aligned = [
        x if d is not None else jnp.broadcast_to(x, (1 if i in shared else size, *x.shape))
        for i, (x, d) in enumerate(zip(leading, dims, strict=True))
    ]
    return call(program.broadcast(size, shared), *aligned)


def _looped(program: Program, arrays: Sequence[Any], dims: Sequence[int | None]) -> list[Any]:
    def member(_: None, batched: list[Any]) -> tuple[None, list[Any]]:
        rest = iter(batched)
        xs = [x if d is None else next(rest) for x, d in zip(arrays, dims, strict=True)]
        return None, call(program, *xs)

    batched = [x for x, d in zip(arrays, dims, strict=True) if d is not None]
    return jax.lax.scan(member, None, batched)[1]


def lower(
    ctx: mlir.LoweringRuleContext, *operands: Any, program: Program, is_live: bool = False
) -> Sequence[Any]:
    """The lowering rule; `is_live` where its tokens are arrays."""
    refuse_deadlock(program.leaf.name)
    (platform, *others) = ctx.module_context.platforms
    target = callback_target(platform)
    if others or target is None:
        wanted = ", ".join(ctx.module_context.platforms)
        raise EqxTorchError(
            f"`{program.leaf.name}` was lowered for {wanted}, but torch functions run on one of "
            "CPU, CUDA and ROCm. Lower the program for one of these (for instance under "
            '`jax.default_device(jax.devices("cpu")[0])`), or call the function outside of it.'
        )
    if platform != "cpu" and not torch.cuda.is_available():
        raise EqxTorchError(
            f"`{program.leaf.name}` was lowered for {platform}, but the installed torch "
            f"({torch.__version__}) sees no GPU: it is a build for CPUs, or for another kind of "
            "GPU or driver. Install the build of torch for this GPU, or run the program on the CPU "
            '(for instance under `jax.default_device(jax.devices("cpu")[0])`).'
        )
    _warn_if_gathered(ctx, program)
    program.prepare()
    devices = _num_devices(ctx)
    port = new_port(program, platform)
    run = entry(callback(program, platform, devices, port), platform, devices)
    # Torch is called for a result without elements too: whether it has any is for torch to say.
    is_empty = all(0 in spec.shape for spec in program.outs)
    name = _operation_name(program)
    results = lower_callback(ctx, target, run, operands, name, is_kept=is_empty)
    if port is not None:
        connect(ctx, port, results[0].owner, is_live)
    return results


def _operation_name(program: Program) -> str:
    """The function's name, by which its calls are found in profiles: `f`, `f_backward`."""
    name = program.leaf.name
    return name if program.kind == "forward" else f"{name}_{program.kind}"


def _num_devices(ctx: mlir.LoweringRuleContext) -> int:
    context = ctx.module_context.axis_context
    return context.mesh.size if isinstance(context, mlir.SPMDAxisContext) else context.num_devices


def _warn_if_gathered(ctx: mlir.LoweringRuleContext, program: Program) -> None:
    """Warns where XLA may gather sharded inputs onto every device without anyone's asking.

    Inside manual axes the inputs are local shards. Where all axes are explicit, types prove that
    the inputs are replicated; an input of no mesh is then one that nobody has sharded: a NumPy
    array, a constant, or an array made on one device. Everything else is XLA's choice, and unknown
    when JAX traces.
    """
    context = ctx.module_context.axis_context
    if not isinstance(context, mlir.ShardingContext) or context.num_devices == 1:
        return
    avals: Sequence[Any] = ctx.avals_in
    meshes = [aval.sharding.mesh for aval in avals] + [get_abstract_mesh()]
    of_program = [mesh for mesh in meshes if not mesh.empty]
    if of_program and all(map(_is_explicit, of_program)):
        return
    warnings.warn(
        f"`{program.leaf.name}` is called in a program over {context.num_devices} devices, and "
        "the types of its inputs do not prove that they are replicated. If they are sharded, XLA "
        "gathers them onto every device and every device computes the whole. Choose a mesh with "
        "explicit axes, `jax.set_mesh(jax.make_mesh(..., axis_types=(AxisType.Explicit,)))`, and "
        "pass `out_specs=`, or call it inside `jax.shard_map`.",
        stacklevel=2,
    )


def _is_explicit(mesh: Any) -> bool:
    return explicit_axes(mesh) == frozenset(mesh.axis_names)


torch_call_p.def_impl(impl)
torch_call_p.def_abstract_eval(abstract_eval)
ad.primitive_jvps[torch_call_p] = jvp
ad.primitive_transposes[torch_call_p] = transpose
batching.primitive_batchers[torch_call_p] = batch
register_dce(torch_call_p, dce)
# Uncached, since the operands in a function for equal calls do not say where they come from.
mlir.register_lowering(torch_call_p, lower, cacheable=False)
torch_call_live_p.def_abstract_eval(abstract_eval)
lower_live = functools.partial(lower, is_live=True)
mlir.register_lowering(torch_call_live_p, lower_live, cacheable=False)
