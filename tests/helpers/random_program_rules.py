"""Which steps a random program may take.

Each rule is an operation with the operands it takes and how its parameters are drawn.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import strategies as st

from .random_params import (
    draw_cast,
    draw_cumsum,
    draw_diagonal,
    draw_dim,
    draw_dims,
    draw_expand,
    draw_matmul,
    draw_mul,
    draw_permutation,
    draw_reduction,
    draw_reshape,
    draw_residual,
    draw_roll,
    draw_select,
    draw_slice,
    draw_squeeze,
    draw_stack,
    draw_sum,
    draw_unsqueeze,
    draw_windows,
    Unfit,
)
from .random_programs import apply, empty, IN_TORCH, Program, SEEN, Step, type_of
from .random_values import (
    broadcast,
    chosen_elementwise,
    COMPLEX,
    COMPUTED,
    Draw,
    EVERY,
    INEXACT,
    INTEGERS,
    joined,
    multiplied,
    nonempty,
    one,
    Operands,
    REAL,
    some_size,
    taken,
    two,
    Value,
    written,
)


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
    "residual": Rule(one(REAL), draw_residual, exact=False),
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


def leaves_autograd(program: Program) -> bool:
    """Whether the backward of a step is computed outside of autograd."""
    return any(step.params.get("backward", SEEN) != SEEN for step in program.steps)


def is_smooth(program: Program) -> bool:
    """Whether inputs that are rounded a little differently give nearly the same."""
    jumps = [step.params.get("dtype", "float32") not in INEXACT for step in program.steps]
    return not any(jumps) and not any(step.op in _KINKED for step in program.steps)
