"""Forward and reverse mode.

Let f be the program and A(x) its differential at x, restricted to the inputs whose tangents are
not symbolically zero. JAX linearizes: the JVP rule gives

    y = f(x),    dy = A(x) dx

where A is a program of x and dx, linear in dx. Reverse mode is the transpose of that second call:
for cotangents u of dy, the cotangents of dx are A(x)^T u, which is the pullback of f. Both are
programs again, so derivatives of any order follow from these two rules.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import ad

from .._errors import DepthError
from .._program import adjoint, differential, Jvp, Program, Record, Vjp, Vmap
from .primitive import call


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
    results = call(Record(program, active) if recorded else program, *primals)
    outs, token = (results[:-1], results[-1:]) if recorded else (results, [])
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
    """Whether to keep the graph: of a first derivative, of which the backward is known to follow.

    Backwards of higher order recompute.
    """
    function = program.leaf.function
    if function.residuals != "tape" or function.depth == 0 or program.order > 0:
        return False
    if isinstance(program, Record) or (isinstance(program, Vmap) and not program.recordable):
        return False
    return bool(program.inexact_outs)


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
    if isinstance(program, Record) and not used[-1]:
        program, kept = program.inner, tuple(range(len(program.inner.outs)))
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
