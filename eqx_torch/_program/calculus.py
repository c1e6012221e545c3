"""The derivative and the adjoint of a program, as programs.

Both return the new program and the inputs of the old one that it takes as residuals: its own
inputs are those residuals followed by the tangents (or cotangents).
"""

from .base import Indices, pick, Program
from .batch import Vmap
from .derivative import Jvp, Vjp


def differential(program: Program, active: Indices) -> tuple[Program, Indices, Indices]:
    """The map from tangents of the inputs `active` to tangents of outputs.

    A program is its own differential in the inputs in which it is linear.

    Returns:
        The map, the residuals it takes, and the outputs whose tangents it gives.
    """
    if program.linear.issuperset(active):
        return _part(program, active)
    of = program.inexact_outs
    return Jvp(program, active, of), tuple(range(len(program.ins))), of


def _part(program: Program, active: Indices) -> tuple[Program, Indices, Indices]:
    """The program with nothing but `active` among its linear inputs."""
    outs = tuple(range(len(program.outs)))
    if isinstance(program, Jvp):
        n = len(program.inner.ins)
        wrt = pick(program.wrt, [i - n for i in active])
        return Jvp(program.inner, wrt, program.of), tuple(range(n)), outs
    if isinstance(program, Vjp):
        n = len(program.inner.ins)
        of = pick(program.of, [i - n for i in active])
        return Vjp(program.inner, program.wrt, of), tuple(range(n)), outs
    if isinstance(program, Vmap):
        inner, residuals, _ = _part(program.inner, active)
        in_axes = pick(program.in_axes, residuals + active)
        return Vmap(inner, in_axes, program.out_axes, program.size), residuals, outs
    raise AssertionError(program)


def adjoint(program: Program, wrt: Indices, of: Indices) -> tuple[Program, Indices]:
    """The map from cotangents of the outputs `of` to cotangents of the inputs `wrt`.

    Where the program is not known to be linear in `wrt` (the user asserts it by calling
    `jax.linear_transpose`), the pullback at any point serves; then all inputs are residuals.

    Returns:
        The map and the residuals it takes.
    """
    if not program.linear.issuperset(wrt):
        return Vjp(program, wrt, of), tuple(range(len(program.ins)))
    if isinstance(program, Jvp):
        n = len(program.inner.ins)
        inputs = pick(program.wrt, [i - n for i in wrt])
        return Vjp(program.inner, inputs, pick(program.of, of)), tuple(range(n))
    if isinstance(program, Vjp):
        n = len(program.inner.ins)
        outputs = pick(program.of, [i - n for i in wrt])
        return Jvp(program.inner, pick(program.wrt, of), outputs), tuple(range(n))
    if isinstance(program, Vmap):
        inner, residuals = adjoint(program.inner, wrt, of)
        in_axes = pick(program.in_axes, residuals) + pick(program.out_axes, of)
        out_axes = pick(program.in_axes, wrt)
        return Vmap(inner, in_axes, out_axes, program.size), residuals
    raise AssertionError(program)
