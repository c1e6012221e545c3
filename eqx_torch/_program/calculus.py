"""The derivative and the adjoint of a program, as programs.

Both return the new program and the inputs of the old one that it takes as residuals: its own
inputs are those residuals followed by the tangents (or cotangents).
"""

import dataclasses

from .base import Indices, pick, Program
from .batch import Vmap
from .derivative import Jvp, Vjp
from .record import Record


def differential(
    program: Program, active: Indices, taped: bool = False
) -> tuple[Program, Indices, Indices]:
    """The map from tangents of the inputs `active` to tangents of outputs.

    A program is its own differential in the inputs in which it is linear.

    Args:
        program: the program.
        active: the inputs that have tangents.
        taped: whether the map also takes, after the residuals, the token of a recorded graph.

    Returns:
        The map, the residuals it takes, and the outputs whose tangents it gives.
    """
    if program.linear.issuperset(active):
        return _part(program, active)
    base, kept = untaped(program)
    of = base.inexact_outs
    return Jvp(base, tuple(kept.index(i) for i in active), of, taped), kept, of


def untaped(program: Program) -> tuple[Program, Indices]:
    """The program that neither records nor uses a graph, and the inputs that it takes.

    Its outputs are the same, but for the token that a recording program gives last.
    """
    everything = tuple(range(len(program.ins)))
    if isinstance(program, Record):
        return program.inner, everything
    if isinstance(program, Jvp | Vjp) and program.taped:
        token = len(program.inner.ins)
        kept = everything[:token] + everything[token + 1 :]
        return dataclasses.replace(program, taped=False), kept
    return program, everything


def _part(program: Program, active: Indices) -> tuple[Program, Indices, Indices]:
    """The program with nothing but `active` among its linear inputs."""
    outs = tuple(range(len(program.outs)))
    if isinstance(program, Jvp):
        n = len(program.inner.ins) + program.taped
        wrt = pick(program.wrt, [i - n for i in active])
        return dataclasses.replace(program, wrt=wrt), tuple(range(n)), outs
    if isinstance(program, Vjp):
        n = len(program.inner.ins) + program.taped
        of = pick(program.of, [i - n for i in active])
        return dataclasses.replace(program, of=of), tuple(range(n)), outs
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
        base, kept = untaped(program)
        return Vjp(base, tuple(kept.index(i) for i in wrt), of), kept
    if isinstance(program, Jvp):
        n = len(program.inner.ins) + program.taped
        inputs = pick(program.wrt, [i - n for i in wrt])
        return Vjp(program.inner, inputs, pick(program.of, of), program.taped), tuple(range(n))
    if isinstance(program, Vjp):
        n = len(program.inner.ins)
        outputs = pick(program.of, [i - n - program.taped for i in wrt])
        return Jvp(program.inner, pick(program.wrt, of), outputs), tuple(range(n))
    if isinstance(program, Vmap):
        inner, residuals = adjoint(program.inner, wrt, of)
        in_axes = pick(program.in_axes, residuals) + pick(program.out_axes, of)
        out_axes = pick(program.in_axes, wrt)
        return Vmap(inner, in_axes, out_axes, program.size), residuals
    raise AssertionError(program)
