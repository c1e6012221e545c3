"""Random chains of the transformations of `random_chains` and `random_sharding`."""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import strategies as st

from .random_chains import Arg, Grad, Jit, Jvp, Remat, Scan, Signature, Transformation, Vjp, Vmap
from .random_sharding import Explicit, NAMES, ShardMap, Split
from .random_values import COMPLEX, Draw, INEXACT


KINDS = (Vmap, Grad, Scan, Jit, Vjp, Jvp, Remat, ShardMap)
MAX_SIZE = 1500
MAX_ORDER = 2
_SIZES = st.sampled_from([2, 3, 1, 0])
_MESHES = st.sampled_from([(2,), (4,), (2, 2), (8,), (2, 4)])


def draw_chain(
    draw: Draw, of: Signature, sharded: bool, smooth: bool
) -> tuple[Transformation, ...]:
    """A chain for functions of this signature.

    Args:
        draw: draws from a strategy.
        of: the signature.
        sharded: whether the function is split over a mesh already.
        smooth: whether its results may be fed to it again.
    """
    chain: list[Transformation] = []
    for _ in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from(KINDS))
        order = sum(isinstance(t, Grad | Jvp | Vjp) for t in chain)
        if kind in (Grad, Jvp, Vjp) and order == MAX_ORDER:
            continue
        if kind is ShardMap and (sharded or not _may_be_mapped(of, chain)):
            continue
        split = sharded or any(isinstance(t, ShardMap) for t in chain)
        if kind is Scan:
            new = _draw_scan(draw, of, feeds=smooth and not order)
        elif kind is ShardMap:
            new = _draw_shard_map(draw, of, alike=any(isinstance(t, Jvp) for t in chain))
        elif kind is Vmap:
            new = _draw_vmap(draw, of, _SIZES.filter(bool) if split else _SIZES)
        else:
            new = _SIMPLE[kind](draw, of)
        if new is None or _size(new.signature(of)) > MAX_SIZE:
            continue
        chain.append(new)
        of = new.signature(of)
    return tuple(chain)


def draw_explicit(draw: Draw, of: Signature) -> Explicit | None:
    """How a function of this signature is split over explicit axes, None if nothing can be."""
    if not _may_be_sharded(of):
        return None
    split = _draw_split(draw, of.ins)
    if not split.used:
        return None
    joined = tuple(_draw_joined(draw, len(y.shape), split.used) for y in of.outs)
    return Explicit(split, of, joined, draw(st.booleans()))


def _draw_joined(draw: Draw, ndim: int, names: Sequence[str]) -> tuple[tuple[str, ...], ...] | None:
    """The dimensions along which results of shards are joined, None if they are stacked."""
    if not ndim or draw(st.booleans()):
        return None
    places = [draw(st.integers(0, ndim - 1)) for _ in names]
    order = draw(st.permutations(list(zip(names, places, strict=True))))
    return tuple(tuple(name for name, place in order if place == dim) for dim in range(ndim))


def _size(of: Signature) -> int:
    return sum(math.prod(x.shape) for x in (*of.ins, *of.outs))


def _may_be_sharded(of: Signature) -> bool:
    """XLA cannot split calls of Python, torch's or others, all of whose inputs are empty."""
    return any(0 not in x.shape for x in of.ins)


def _may_be_mapped(of: Signature, chain: Sequence[Transformation]) -> bool:
    """Whether the types in a `jax.shard_map` of the chain are sure to fit.

    Cotangents, and what a scan carries, must vary over the same axes of the mesh as the results
    and arguments whose they are. XLA cannot compile all pullbacks of empty results, and for CPUs
    not all of complex ones.
    """
    if not _may_be_sharded(of) or any(0 in y.shape for y in of.outs):
        return False
    if any(x.dtype in COMPLEX for x in (*of.ins, *of.outs)):
        return False
    carries = any(isinstance(t, Scan) and t.feed for t in chain)
    return not carries and not any(isinstance(t, Vjp | ShardMap) for t in chain)


def _draw_some(draw: Draw, items: Sequence[int]) -> tuple[int, ...]:
    """At least one of these, in order."""
    if not items:
        return ()
    return tuple(sorted(draw(st.lists(st.sampled_from(items), min_size=1, unique=True))))


def _draw_jit(draw: Draw, of: Signature) -> Jit:
    return Jit()


def _draw_remat(draw: Draw, of: Signature) -> Remat:
    return Remat()


def _draw_vmap(draw: Draw, of: Signature, size: st.SearchStrategy[int]) -> Vmap:
    sizes = [len(x.shape) for x in of.ins]
    axes = [draw(st.one_of(st.integers(-n - 1, n), st.none())) for n in sizes]
    if not any(axis is not None for axis in axes):
        axes[0] = 0
    out_axes = [draw(st.integers(-len(y.shape) - 1, len(y.shape))) for y in of.outs]
    return Vmap(tuple(axes), tuple(out_axes), draw(size))


def _draw_grad(draw: Draw, of: Signature) -> Grad | None:
    wrt, results = _draw_some(draw, of.active), _draw_some(draw, of.inexact)
    if not (wrt and results):
        return None
    wide = any(of.outs[i].dtype in ("float64", "complex128") for i in results)
    return Grad(wrt, results, "float64" if wide else "float32", draw(st.booleans()))


def _draw_jvp(draw: Draw, of: Signature) -> Jvp | None:
    wrt = _draw_some(draw, of.active)
    return Jvp(wrt, of.inexact, len(of.ins)) if wrt and of.inexact else None


def _draw_vjp(draw: Draw, of: Signature) -> Vjp | None:
    possible = [i for i, x in enumerate(of.ins) if not x.dtype.startswith("float8")]
    wrt, results = _draw_some(draw, possible), _draw_some(draw, of.inexact)
    if not results:
        return None
    return Vjp(wrt, results, len(of.ins), draw(st.booleans()))


_SIMPLE: dict[type, Callable[[Draw, Signature], Any]] = {
    Jit: _draw_jit,
    Remat: _draw_remat,
    Grad: _draw_grad,
    Jvp: _draw_jvp,
    Vjp: _draw_vjp,
}


def _draw_scan(draw: Draw, of: Signature, feeds: bool) -> Scan:
    pairs = [
        (i, j)
        for (i, y), (j, x) in itertools.product(enumerate(of.outs), enumerate(of.ins))
        if feeds and y == x and y.dtype in INEXACT
    ]
    feed = (draw(st.sampled_from(pairs)),) if pairs and draw(st.booleans()) else ()
    fed = {j for _, j in feed}
    over = tuple(i for i in range(len(of.ins)) if i not in fed and draw(st.booleans()))
    return Scan(over, feed, draw(_SIZES), draw(st.booleans()))


def _draw_shard_map(draw: Draw, of: Signature, alike: bool) -> ShardMap | None:
    """A `jax.shard_map`, in which all arguments vary alike if so asked."""
    if alike:
        if not all(x.shape for x in of.ins):
            return None
        sizes = draw(_MESHES)
        names = NAMES[: len(sizes)]
        places = [draw(st.integers(0, len(x.shape) - 1)) for x in of.ins]
        specs = [
            tuple(names if dim == place else () for dim in range(len(x.shape)))
            for x, place in zip(of.ins, places, strict=True)
        ]
        split = Split(sizes, tuple(specs))
    else:
        split = _draw_split(draw, of.ins)
    return ShardMap(split, tuple(y.dtype in INEXACT and draw(st.booleans()) for y in of.outs))


def _draw_split(draw: Draw, ins: Sequence[Arg]) -> Split:
    """For each argument and each axis, one of the dimensions or none is sharded over it."""
    sizes = draw(_MESHES)
    specs = []
    for x in ins:
        dims: list[tuple[str, ...]] = [()] * len(x.shape)
        for name in NAMES[: len(sizes)] if x.shape else ():
            place = draw(st.one_of(st.integers(0, len(dims) - 1), st.none()))
            if place is not None:
                dims[place] = (*dims[place], name)
        specs.append(tuple(dims))
    return Split(sizes, tuple(specs))
