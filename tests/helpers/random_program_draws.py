"""Random programs of `random_programs` and their inputs, by the rules of `random_program_rules`."""

import itertools
import math
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st

from .random_params import Unfit
from .random_program_rules import RULES
from .random_programs import apply, empty, IN_TORCH, Program, Step, Type, type_of
from .random_values import available, COMPLEX, Draw, EIGHTS, INEXACT, INTEGERS, STORED, Value


MAX_SIZE = 40
_SHAPES = st.lists(st.sampled_from([2, 3, 1, 0]), max_size=3).map(tuple)
# Most programs compute in one of these.
_MAIN = {
    False: ("float32", "float32", "float16", "bfloat16", "complex64"),
    True: ("float64", "float64", "float32", "complex128"),
}


@st.composite
def programs(draw: Draw, x64: bool) -> Program:
    """Programs of a few steps; to be drawn while x64 is as said."""
    main = draw(st.sampled_from(_MAIN[x64]))
    kinds = [(main,), ("bool", *INTEGERS), INEXACT, STORED]
    others = st.one_of(st.sampled_from([d for d in kind if available(d)]) for kind in kinds)
    shape = draw(_SHAPES)
    inputs = [Type(shape, main)]
    for _ in range(draw(st.integers(0, 2))):
        # Alike shapes have steps that take both.
        inputs.append(Type(draw(st.one_of(st.just(shape), _SHAPES)), draw(others)))
    saved: set[int] = set()
    values = [Value(t, i, saved) for i, t in enumerate(inputs)]
    steps = []
    for _ in range(draw(st.integers(1, 6))):
        step = _draw_step(draw, values)
        if step is not None:
            steps.append(step)
    return Program(tuple(inputs), tuple(steps), _draw_outputs(draw, values))


def _draw_step(draw: Draw, values: list[Value]) -> Step | None:
    """A step whose result is added to the values, None if what was drawn is impossible."""
    start = draw(st.integers(0, len(RULES) - 1))
    # The first that can be applied, of the rules from a random one on.
    order = itertools.islice(itertools.cycle(RULES), start, start + len(RULES))
    name, choices = next((n, c) for n in order if (c := list(RULES[n].operands(values))))
    rule = RULES[name]
    operands = draw(st.sampled_from(choices))
    try:
        step = Step(name, operands, rule.params(draw, *(values[i] for i in operands)))
    except Unfit:
        return None
    result = type_of(apply(IN_TORCH, step, [empty(v.type) for v in values]))
    if math.prod(result.shape) > MAX_SIZE:
        return None
    values.append(_result(step, result, values))
    return step


def _result(step: Step, result: Type, values: Sequence[Value]) -> Value:
    """What is known of the result; what this step ends or saves is marked."""
    rule, first = RULES[step.op], values[step.operands[0]]
    operands = [values[i] for i in step.operands]
    shares = rule.view or step.op == "write"
    memory = first.memory if shares else len(values)
    saved = first.saved
    if not rule.view:
        saved.update(v.memory for v in (operands[1:] if step.op == "write" else operands))
    if rule.keeps:
        saved.add(memory)
    if step.op == "write":
        for v in values:
            v.alive = v.alive and v.memory != memory
    rounds = not rule.exact and not (step.op == "write" and step.params["how"] in _EXACT_WRITES)
    return Value(
        result,
        memory,
        saved,
        exact=result.dtype not in INEXACT or (not rounds and all(v.exact for v in operands)),
        overlaps=shares and (first.overlaps or step.op in ("expand", "windows")),
        last=result.dtype in EIGHTS and step.op == "cast",
    )


_EXACT_WRITES = ("copy", "fill", "zero")


def _draw_outputs(draw: Draw, values: Sequence[Value]) -> tuple[int, ...]:
    """The last value, mostly, and some others."""
    alive = [i for i, v in enumerate(values) if v.alive]
    picked = [alive[-1], *draw(st.lists(st.sampled_from(alive[::-1]), max_size=2))]
    once = {i: picked.index(i) for i in picked if values[i].last}
    return tuple(i for place, i in enumerate(picked) if once.get(i, place) == place)


def random_array(t: Type, seed: int, name: str) -> Any:
    """An array whose numbers every float dtype of 16 bits or more has exactly."""
    rng = np.random.default_rng(zlib.crc32(f"{seed} {name}".encode()))
    dtype = np.dtype(t.dtype)
    if t.dtype == "bool":
        return rng.integers(0, 2, t.shape).astype(bool)
    if t.dtype == "float8_e8m0fnu":  # powers of two
        return (0.5 ** rng.integers(0, 3, t.shape)).astype(dtype)
    if t.dtype.startswith("float8"):
        return (rng.integers(-4, 5, t.shape) / 4).astype(dtype)
    if np.issubdtype(dtype, np.integer):
        return rng.integers(-3 if dtype.kind == "i" else 0, 4, t.shape).astype(dtype)
    numbers = rng.integers(-64, 65, (2, *t.shape)) / 64
    return (numbers[0] + 1j * numbers[1] if t.dtype in COMPLEX else numbers[0]).astype(dtype)
