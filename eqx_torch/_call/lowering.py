"""Lowering: a torch call becomes one XLA custom call."""

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from jax.interpreters import mlir
from jax.sharding import get_abstract_mesh

from .._compat import callback_target, explicit_axes, lower_callback
from .._errors import EqxTorchError
from .._processes import entry, refuse_deadlock
from .._program import Program
from .runtime import callback


def lower(ctx: mlir.LoweringRuleContext, *operands: Any, program: Program) -> Sequence[Any]:
    """The lowering rule."""
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
    run = entry(callback(program, platform, devices), platform, devices)
    # Torch is called for a result without elements too: whether it has any is for torch to say.
    is_empty = all(0 in spec.shape for spec in program.outs)
    return lower_callback(ctx, target, run, operands, _operation_name(program), is_kept=is_empty)


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
