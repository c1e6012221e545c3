"""How the parameters of the operations of random programs are drawn."""

import math
from typing import Any

from hypothesis import strategies as st

from .random_programs import BACKWARDS
from .random_values import available, casts, Draw, INEXACT, Value


class Unfit(Exception):  # noqa: N818
    """These operands do not suit the operation after all."""


def draw_dim(draw: Draw, v: Value, *others: Value) -> dict[str, Any]:
    return {"dim": draw(st.integers(0, len(v.shape) - 1))}


def draw_dims(draw: Draw, v: Value) -> dict[str, Any]:
    """Some of the dimensions, at least one."""
    dims = range(len(v.shape))
    return {"dims": tuple(draw(st.lists(st.sampled_from(dims), min_size=1, unique=True)))}


def draw_reduction(draw: Draw, v: Value) -> dict[str, Any]:
    return {**draw_dims(draw, v), "keep": draw(st.booleans())}


def draw_sum(draw: Draw, v: Value) -> dict[str, Any]:
    params = draw_reduction(draw, v)
    return {**params, **scale(v, math.prod(v.shape[d] for d in params["dims"]))}


def draw_cumsum(draw: Draw, v: Value) -> dict[str, Any]:
    params = draw_dim(draw, v)
    return {**params, **scale(v, v.shape[params["dim"]])}


def draw_matmul(draw: Draw, x: Value, y: Value) -> dict[str, Any]:
    return scale(x, x.shape[-1])


def scale(v: Value, count: int) -> dict[str, Any]:
    """Of a sum of so many values: a power of two, which rounds nothing."""
    return {"factor": 0.5 ** math.ceil(math.log2(max(count, 1)))} if v.dtype in INEXACT else {}


def draw_residual(draw: Draw, v: Value) -> dict[str, Any]:
    backward = draw(st.sampled_from(list(BACKWARDS)))
    return {"backward": backward, "factor": 0.5 ** draw(st.integers(0, 4))}


def draw_permutation(draw: Draw, v: Value) -> dict[str, Any]:
    return {"dims": tuple(draw(st.permutations(range(len(v.shape)))))}


def draw_reshape(draw: Draw, v: Value) -> dict[str, Any]:
    size = math.prod(v.shape)
    shapes = [(size,), (1, size), (size, 1), v.shape[::-1], (*v.shape, 1)]
    shapes += [(2, size // 2)] if size % 2 == 0 else []
    return {"shape": draw(st.sampled_from(shapes))}


def draw_expand(draw: Draw, v: Value) -> dict[str, Any]:
    sizes = tuple(draw(st.integers(0, 3)) if n == 1 else n for n in v.shape)
    front = tuple(draw(st.lists(st.integers(0, 2), max_size=1)))
    return {"shape": (*front, *sizes)}


def draw_select(draw: Draw, v: Value) -> dict[str, Any]:
    dim = draw(st.sampled_from([d for d, n in enumerate(v.shape) if n]))
    return {"dim": dim, "index": draw(st.integers(-v.shape[dim], v.shape[dim] - 1))}


def draw_slice(draw: Draw, v: Value) -> dict[str, Any]:
    dim = draw_dim(draw, v)["dim"]
    start = draw(st.integers(0, v.shape[dim]))
    stop = draw(st.integers(start, v.shape[dim]))
    return {"dim": dim, "start": start, "stop": stop, "step": draw(st.integers(1, 2))}


def draw_windows(draw: Draw, v: Value) -> dict[str, Any]:
    dim = draw(st.sampled_from([d for d, n in enumerate(v.shape) if n]))
    return {"dim": dim, "size": draw(st.integers(1, v.shape[dim])), "step": draw(st.integers(1, 2))}


def draw_diagonal(draw: Draw, v: Value) -> dict[str, Any]:
    return {"dims": tuple(draw(st.permutations(range(len(v.shape))))[:2])}


def draw_roll(draw: Draw, v: Value) -> dict[str, Any]:
    return {"shift": draw(st.integers(-2, 2)), **draw_dim(draw, v)}


def draw_squeeze(draw: Draw, v: Value) -> dict[str, Any]:
    return {"dim": draw(st.sampled_from([d for d, n in enumerate(v.shape) if n == 1]))}


def draw_unsqueeze(draw: Draw, v: Value) -> dict[str, Any]:
    return {"dim": draw(st.integers(0, len(v.shape)))}


def draw_mul(draw: Draw, x: Value, y: Value) -> dict[str, Any]:
    return {"factor": 0.5} if x.dtype in INEXACT else {}


def draw_stack(draw: Draw, v: Value, other: Value) -> dict[str, Any]:
    return {"dim": draw(st.integers(0, len(v.shape)))}


def draw_cast(draw: Draw, v: Value) -> dict[str, Any]:
    dtypes = [d for d in casts(v) if d != v.dtype and available(d)]
    if not dtypes:
        raise Unfit
    return {"dtype": draw(st.sampled_from(dtypes))}
