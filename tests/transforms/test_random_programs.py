"""Random torch programs under random chains of JAX's transformations, against the same in JAX."""

import collections
import gc
import re
import warnings
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import pytest
from hypothesis import HealthCheck, Phase
from jax.interpreters import ad

from eqx_torch import check_errors
from eqx_torch._call import primitive, torch_call_p

from ..helpers import assert_trees_equal
from ..helpers.random_cases import Case, cases
from ..helpers.random_chain_draws import KINDS
from ..helpers.random_program_rules import RULES
from ..helpers.random_programs import BACKWARDS
from ..helpers.random_values import EVERY


REFUSAL = "cannot be differentiated (again|in forward mode)"
QUICK_PARTS, QUICK_EXAMPLES = 4, 75
THOROUGH_PARTS, THOROUGH_EXAMPLES = 50, 200

# A program is compiled for almost every example; all of them together would be a burden.
_CLEARED_EVERY = 50


def check(case: Case) -> None:
    """Asserts that a case gives the same by torch as by JAX."""
    with jax.enable_x64(case.x64), warnings.catch_warnings():
        # A loop in place of a batched call, and slow batched operators, are right all the same.
        warnings.filterwarnings("ignore", "torch.func.vmap cannot batch")
        warnings.filterwarnings("ignore", "There is a performance drop")
        expected = case.in_jax()
        tolerance = case.tolerance
        try:
            actual = jax.block_until_ready(case.in_torch())
            check_errors()
        except Exception as error:
            if not (case.may_be_refused and re.search(REFUSAL, str(error))):
                raise
            _forget_refusals()
        else:
            assert_trees_equal(actual, expected, rtol=tolerance, atol=tolerance)


def _forget_refusals() -> None:
    """On several devices each of them may have refused."""
    try:
        check_errors()
    except Exception as error:
        if not re.search(REFUSAL, str(error)):
            raise


def run(seed: int, examples: int, phases: tuple[Phase, ...] = tuple(Phase)) -> None:
    """Checks so many random cases, the same ones for the same seed."""
    count = 0

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=examples,
        phases=phases,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    @hypothesis.given(cases())
    def check_each(case: Case) -> None:
        nonlocal count
        count += 1
        if count % _CLEARED_EVERY == 0:
            jax.clear_caches()
        check(case)

    check_each()


@pytest.mark.parametrize("part", range(QUICK_PARTS))
def test_random_programs_under_random_transformations(part):
    run(part, QUICK_EXAMPLES)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(THOROUGH_PARTS))
def test_many_random_programs_under_random_transformations(part):
    run(1000 + part, THOROUGH_EXAMPLES)
    jax.clear_caches()
    gc.collect()


@pytest.mark.slow
def test_everything_is_drawn():
    """No operation, transformation, dtype or size is missing from what may be drawn."""
    seen: collections.Counter[Any] = collections.Counter()

    @hypothesis.seed(0)
    @hypothesis.settings(
        max_examples=2000,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @hypothesis.given(cases())
    def look(case: Case) -> None:
        types = case.program.types()
        seen.update(step.op for step in case.program.steps)
        seen.update(step.params.get("backward") for step in case.program.steps)
        seen.update(t.dtype for t in types)
        seen.update(size for t in types for size in t.shape)
        seen.update(type(t) for t in case.chain)
        seen.update(case.options.values())
        seen["explicit"] += case.explicit is not None
        seen["refusals"] += case.may_be_refused
        if case.explicit is not None:
            seen["joined"] += any(case.explicit.joined)
            seen["found out" if not case.explicit.declared else "declared"] += 1
        seen["several outputs"] += len(case.program.outputs) > 1

    look()
    wanted = [*RULES, *EVERY, *KINDS, 0, 1, 2, 3, "explicit", "several outputs"]
    wanted += ["refusals", "joined", "found out", "declared", *BACKWARDS]
    assert not [kind for kind in wanted if not seen[kind]]


def _drop_a_cotangent(monkeypatch):
    """The last of the cotangents is zero."""

    def transpose(cotangents, *primals, program):
        out = primitive.transpose(cotangents, *primals, program=program)
        last = max(i for i, u in enumerate(out) if u is not None)
        return [*out[:last], ad.Zero(primals[last].aval), *out[last + 1 :]]

    monkeypatch.setitem(ad.primitive_transposes, torch_call_p, transpose)


def _double_a_tangent(monkeypatch):
    """The tangent of the last output is twice what it should be."""

    def jvp(primals, tangents, *, program):
        outs, out_tangents = primitive.jvp(primals, tangents, program=program)
        *others, last = out_tangents
        return outs, [*others, last if type(last) is ad.Zero else last + last]

    monkeypatch.setitem(ad.primitive_jvps, torch_call_p, jvp)


def _reverse_a_batch(monkeypatch):
    """The members of a batch come in the wrong order."""

    right = primitive._batched

    def wrong(*args):
        return [jnp.flip(y, 0) for y in right(*args)]

    monkeypatch.setattr(primitive, "_batched", wrong)


@pytest.mark.parametrize("mistake", [_drop_a_cotangent, _double_a_tangent, _reverse_a_batch])
def test_a_mistake_in_the_library_is_found(mistake, monkeypatch):
    mistake(monkeypatch)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        run(0, QUICK_EXAMPLES, phases=(Phase.generate,))
