"""Which steps a random program may take.

Each rule is an operation with the operands it takes and how its parameters are drawn. What is known
of a value besides its type decides which rules apply to it:

- exact: no rounding has touched it, so both interpreters have the very same bits, and steps that
  jump or have a kink may be applied;
- writable: torch can change it in place, since no autograd graph may need what it was, and no two
  elements share memory. Writing ends the use of all that shares memory with it.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from hypothesis import strategies as st

from .random_programs import apply, empty, IN_TORCH, Program, Step, Type, type_of


HALVES = ("float16", "bfloat16")
COMPLEX = ("complex64", "complex128")
EIGHTS = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
REAL = (*HALVES, "float32", "float64")
INEXACT = (*REAL, *COMPLEX)
INTEGERS = ("int8", "int16", "int32", "int64", "uint8")
# torch can move and cast values of these, and little else.
STORED = ("uint16", "uint32", "uint64", *EIGHTS, "float8_e8m0fnu")
EVERY = (*INEXACT, *INTEGERS, "bool", *STORED)
COMPUTED = (*INEXACT, *INTEGERS)
WIDE = ("float64", "complex128", "int64", "uint64")

Draw = Callable[[st.SearchStrategy[Any]], Any]
Operands = Iterator[tuple[int, ...]]


class Unfit(Exception):  # noqa: N818
    """These operands do not suit the rule after all."""


@dataclasses.dataclass
class Value:
    """What is known of a value.

    Attributes:
        memory: of the value that it is a view of.
        saved: the memories that an autograd graph may need as they are; shared by all values.
        overlaps: whether elements share memory.
        last: whether it can only be returned, and once: torch cannot add float8 cotangents.
        alive: whether it can still be used.
    """

    type: Type
    memory: int
    saved: set[int]
    exact: bool = True
    overlaps: bool = False
    last: bool = False
    alive: bool = True

    @property
    def shape(self) -> tuple[int, ...]:
        return self.type.shape

    @property
    def dtype(self) -> str:
        return self.type.dtype

    @property
    def writable(self) -> bool:
        return not self.overlaps and self.memory not in self.saved


@dataclasses.dataclass(frozen=True)
class Rule:
    """An operation that may be drawn.

    Attributes:
        operands: all combinations that it can take.
        params: draws its parameters.
        exact: whether a result of exact operands is exact.
        view: whether the result shares memory with the first operand.
        keeps: whether torch's derivative needs the result.
    """

    operands: Callable[[Sequence[Value]], Operands]
    params: Callable[..., dict[str, Any]] = lambda draw, *values: {}
    exact: bool = True
    view: bool = False
    keeps: bool = False


def one(
    dtypes: Sequence[str] = EVERY,
    ndim: int = 0,
    exact: bool = False,
    when: Callable[[Value], bool] = lambda v: True,
) -> Callable[[Sequence[Value]], Operands]:
    """One value of these dtypes, with at least so many dimensions."""

    def operands(values: Sequence[Value]) -> Operands:
        for i, v in reversed(list(enumerate(values))):
            fits = v.dtype in dtypes and len(v.shape) >= ndim and (v.exact or not exact)
            if v.alive and not v.last and fits and when(v):
                yield (i,)

    return operands


def two(
    dtypes: Sequence[str],
    exact: bool = False,
    when: Callable[[Value, Value], bool] | None = None,
) -> Callable[[Sequence[Value]], Operands]:
    """Two values of one of these dtypes, of shapes that broadcast."""
    fits = when or (lambda x, y: broadcast(x.shape, y.shape) is not None)

    def operands(values: Sequence[Value]) -> Operands:
        for (i,) in one(dtypes, exact=exact)(values):
            for (j,) in one(dtypes, exact=exact)(values):
                x, y = values[i], values[j]
                if x.dtype == y.dtype and fits(x, y):
                    yield i, j

    return operands


@functools.cache
def broadcast(*shapes: tuple[int, ...]) -> tuple[int, ...] | None:
    """The shape that these broadcast to, if they do."""
    try:
        return np.broadcast_shapes(*shapes)
    except ValueError:
        return None


def chosen_elementwise(values: Sequence[Value]) -> Operands:
    """A mask and two values to choose from."""
    for (m,) in one(("bool",))(values):
        for i, j in two((*COMPUTED, "bool"))(values):
            if broadcast(*(values[k].shape for k in (m, i, j))) is not None:
                yield m, i, j


def multiplied(x: Value, y: Value) -> bool:
    """Whether two values can be multiplied as matrices."""
    if not (x.shape and y.shape):
        return False
    inner = y.shape[-2] if len(y.shape) > 1 else y.shape[0]
    return x.shape[-1] == inner and broadcast(x.shape[:-2], y.shape[:-2]) is not None


def taken(values: Sequence[Value]) -> Operands:
    """A value and a vector of numbers in it."""
    for (i,) in one((*COMPUTED, "bool"), 1, when=lambda v: v.shape[0] > 0)(values):
        for (j,) in one(INTEGERS, 1, when=lambda v: len(v.shape) == 1)(values):
            yield i, j


def joined(x: Value, y: Value) -> bool:
    """Whether two values can be concatenated along their first axis."""
    return bool(x.shape) and len(x.shape) == len(y.shape) and x.shape[1:] == y.shape[1:]


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


def draw_write(draw: Draw, target: Value, *other: Value) -> dict[str, Any]:
    """Where and how a value is changed by another or, without one, by itself."""
    place = draw(st.sampled_from([name for name in PLACES if fits(name, target)]))
    params = RULES[place].params(draw, target)
    part = type_of(apply(IN_TORCH, Step(place, (0,), params), [empty(target.type)]))
    if not other:
        how = ["zero", "sin"] if target.dtype in REAL else ["zero"]
    elif broadcast(part.shape, other[0].shape) != part.shape:
        how = []
    else:
        how = ["fill"] if other[0].dtype == "bool" else []
        how += ["copy"] if other[0].dtype == target.dtype else []
        how += ["add", "mul"] if how == ["copy"] else []
    if not how:
        raise Unfit
    return {"place": {"op": place, "params": params}, "how": draw(st.sampled_from(how))}


def fits(name: str, value: Value) -> bool:
    """Whether an operation can take a value alone."""
    return next(RULES[name].operands([value]), None) is not None


def written(values: Sequence[Value]) -> Operands:
    """A value to change and, at times, one to change it by."""
    for (i,) in one((*COMPUTED, "bool"), when=lambda v: v.writable)(values):
        yield (i,)
        for (j,) in one((values[i].dtype, "bool"))(values):
            if values[j].memory != values[i].memory:
                yield i, j


def draw_cast(draw: Draw, v: Value) -> dict[str, Any]:
    dtypes = [d for d in casts(v) if d != v.dtype and available(d)]
    if not dtypes:
        raise Unfit
    return {"dtype": draw(st.sampled_from(dtypes))}


def available(dtype: str) -> bool:
    """Whether JAX has the dtype now."""
    return dtype not in WIDE or jax.config.jax_enable_x64


def casts(v: Value) -> tuple[str, ...]:
    """The dtypes in which a value means the same in both interpreters."""
    if v.dtype in COMPLEX:
        return COMPLEX
    if v.dtype in REAL:
        return (*INEXACT, *(("bool", "int8", "int32", *EIGHTS) if v.exact else ()))
    if v.dtype == "bool":
        return (*INEXACT, *INTEGERS)
    if v.dtype.startswith("float8"):
        return ("float32",)
    return (*INTEGERS, "uint16", "uint32", "bool")


def nonempty(v: Value) -> bool:
    return 0 not in v.shape


def some_size(v: Value) -> bool:
    return any(v.shape)


RULES: dict[str, Rule] = {
    "sin": Rule(one(REAL), exact=False),
    "mul": Rule(two(COMPUTED), draw_mul, exact=False),
    "conj": Rule(one(COMPLEX), view=True),
    "take": Rule(taken, lambda draw, v, index: {"dim": 0}),
    "write": Rule(written, draw_write, exact=False),
    "where": Rule(chosen_elementwise),
    "matmul": Rule(two(INEXACT, when=multiplied), draw_matmul, exact=False),
    "all": Rule(one(("bool",), 1), draw_dims),
    "sum": Rule(one(COMPUTED, 1), draw_sum, exact=False),
    "imag": Rule(one(COMPLEX), view=True),
    "average": Rule(two(INEXACT), exact=False),
    "not": Rule(one(("bool", *INTEGERS))),
    "tanh": Rule(one(REAL), exact=False, keeps=True),
    "real": Rule(one(COMPLEX), view=True),
    "sub": Rule(two(INEXACT), exact=False),
    "parity": Rule(one(INTEGERS), lambda draw, v: {"dtype": draw(st.sampled_from(REAL[:3]))}),
    "softmax": Rule(one(REAL, 1), draw_dim, exact=False, keeps=True),
    "complex": Rule(two(("float32", "float64"))),
    "exp": Rule(one(REAL), exact=False, keeps=True),
    "xor": Rule(two(("bool", *INTEGERS))),
    "cumsum": Rule(one(COMPUTED, 1), draw_cumsum, exact=False),
    "cast": Rule(one(EVERY), draw_cast),
    "cos": Rule(one(REAL), exact=False),
    "as_real": Rule(one(COMPLEX), view=True),
    "sigmoid": Rule(one(REAL), exact=False, keeps=True),
    "less": Rule(two((*REAL, *INTEGERS), exact=True)),
    "prod": Rule(one(REAL, 1), draw_dim, exact=False, keeps=True),
    "add": Rule(two(INTEGERS)),
    "logsumexp": Rule(one(REAL, 1, when=nonempty), draw_dim, exact=False, keeps=True),
    "equal": Rule(two((*REAL, *INTEGERS), exact=True)),
    "maximum": Rule(two((*REAL, *INTEGERS), exact=True)),
    "sort": Rule(one((*REAL, "int32"), 1, True), draw_dim),
    "amax": Rule(one(REAL, 1, True, nonempty), draw_reduction, keeps=True),
    "minimum": Rule(two((*REAL, *INTEGERS), exact=True)),
    "relu": Rule(one(REAL, exact=True), keeps=True),
    "argsort": Rule(one((*REAL, "int32"), 1, True), draw_dim),
    "abs": Rule(one((*REAL, "int8", "int32"), exact=True)),
    "neg": Rule(one(COMPUTED)),
    "cat": Rule(two((*COMPUTED, "bool"), when=joined), lambda draw, x, y: {"dim": 0}),
    "stack": Rule(two((*COMPUTED, "bool"), when=lambda x, y: x.shape == y.shape), draw_stack),
    "flip": Rule(one((*COMPUTED, "bool"), 1), draw_dims),
    "roll": Rule(one((*COMPUTED, "bool"), 1), draw_roll),
    "clone": Rule(one(EVERY)),
    "select": Rule(one(EVERY, 1, when=some_size), draw_select, view=True),
    "slice": Rule(one(EVERY, 1), draw_slice, view=True),
    "permute": Rule(one(EVERY, 1), draw_permutation, view=True),
    "reshape": Rule(one(EVERY), draw_reshape, view=True),
    "expand": Rule(one(EVERY), draw_expand, view=True),
    "diagonal": Rule(one(EVERY, 2), draw_diagonal, view=True),
    "windows": Rule(one(EVERY, 1, when=some_size), draw_windows, view=True),
    "squeeze": Rule(one(EVERY, 1, when=lambda v: 1 in v.shape), draw_squeeze, view=True),
    "unsqueeze": Rule(one(EVERY), draw_unsqueeze, view=True),
    "whole": Rule(one(EVERY), view=True),
    "detach": Rule(one(INEXACT), view=True),
}
PLACES = ("whole", "slice", "select", "permute", "diagonal", "unsqueeze")

_KINKED = ("abs", "amax", "argsort", "equal", "less", "maximum", "minimum", "relu", "sort")


def is_smooth(program: Program) -> bool:
    """Whether inputs that are rounded a little differently give nearly the same."""
    jumps = [step.params.get("dtype", "float32") not in INEXACT for step in program.steps]
    return not any(jumps) and not any(step.op in _KINKED for step in program.steps)
