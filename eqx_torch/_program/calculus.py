"""The derivative, the adjoint and the batch of a program, as programs.

The first two return the new program and the inputs of the old one that it takes as residuals: its
own inputs are those residuals followed by the tangents (or cotangents).
"""

import dataclasses
from typing import NamedTuple

from .base import Indices, pick, Program
from .batch import Axes, Vmap
from .derivative import Jvp, Record, Vjp


def recording(program: Program, wrt: Indices) -> Record:
    """The program that also keeps its graph, for one more derivative, by the inputs `wrt`."""
    if isinstance(program, Record):
        everything = tuple(sorted({*program.wrt, *wrt}))
        return dataclasses.replace(program, wrt=everything, count=program.count + 1)
    return Record(program, wrt)


def differential(
    program: Program, active: Indices, taped: bool = False
) -> tuple[Program, Indices, Indices]:
    """The map from tangents of the inputs `active` to tangents of outputs.

    A program is its own differential in the inputs in which it is linear, if it has no graph.

    Args:
        program: the program.
        active: the inputs that have tangents.
        taped: whether the map also takes, after the residuals, the token of a recorded graph.

    Returns:
        The map, the residuals it takes, and the outputs whose tangents it gives.
    """
    if not taped and program.linear.issuperset(active):
        return _part(program, active)
    base, kept = untaped(program)
    of = base.inexact_outs
    return Jvp(base, tuple(kept.index(i) for i in active), of, taped), kept, of


def untaped(program: Program) -> tuple[Program, Indices]:
    """The program that neither records nor uses a graph, and the inputs that it takes.

    Its outputs are the same, but for the tokens that a recording program gives last.
    """
    if isinstance(program, Record):
        return untaped(program.inner)
    everything, token = tuple(range(len(program.ins))), program.token
    if isinstance(program, Jvp | Vjp) and token is not None:
        return program.untaped, everything[:token] + everything[token + 1 :]
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
    if isinstance(program, Record):
        base, kept = untaped(program)
        result, residuals = adjoint(base, tuple(kept.index(i) for i in wrt), of)
        return result, pick(kept, residuals)
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


class Batched(NamedTuple):
    """A program for a batch, and where it has the batch's axis."""

    program: Program
    in_axes: Axes
    out_axes: Axes


def batched_with_graph(program: Program, dims: Axes, size: int) -> Batched | None:
    """A batch of a program that records or uses a graph, which is then that of the whole batch.

    Batch and derivative change places: a pullback for each member is the pullback of the batch. It
    is the cotangent of each member if each has a primal of its own; what all share would get the
    sum. And one token has to name the graph of all.

    Args:
        program: the program.
        dims: the axes of the batch in its inputs.
        size: the size of the batch.

    Returns:
        The program and its axes, None if there is none.
    """
    if isinstance(program, Record):
        inner = batched_with_graph(program.inner, dims, size) or _batch(program.inner, dims, size)
        if inner is None or any(inner.in_axes[i] is None for i in program.wrt):
            return None
        recorded = dataclasses.replace(program, inner=inner.program)
        return Batched(recorded, inner.in_axes, (*inner.out_axes, *[None] * program.count))
    if not (isinstance(program, Jvp | Vjp) and program.taped):
        return None
    token = len(program.inner.ins)
    if dims[token] is not None:
        return None
    batch = _batch_of_derivative(program, dims[:token], size)
    if batch is None:
        return None
    axes = (*batch.in_axes[:token], None, *batch.in_axes[token:])
    return batch._replace(in_axes=axes)


def _batch(program: Program, dims: Axes, size: int) -> Batched:
    """The derivative of a batch if that is the same, else the batch of the program."""
    if isinstance(program, Jvp | Vjp):
        batch = _batch_of_derivative(program, dims[: len(program.inner.ins)], size)
        if batch is not None:
            return batch
    out_axes = (0,) * len(program.outs)
    return Batched(Vmap(program, dims, out_axes, size), dims, out_axes)


def _batch_of_derivative(program: Jvp | Vjp, dims: Axes, size: int) -> Batched | None:
    """The derivative of a batch, with the axes of the primals in `dims`, its token not counted."""
    inner = _batch(program.inner, dims, size)
    by, of = pick(inner.in_axes, program.wrt), pick(inner.out_axes, program.of)
    if None in by:
        return None
    taken, given = (by, of) if isinstance(program, Jvp) else (of, by)
    return Batched(
        dataclasses.replace(program, inner=inner.program), (*inner.in_axes, *taken), given
    )
