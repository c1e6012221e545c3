"""Random annotations on torch functions: JAX predicts what torch returns, and refuses the rest."""

import jax
import pytest
from hypothesis import given, strategies as st

from eqx_torch import ShapeError, torch2jax

from ..helpers import assert_trees_equal
from ..helpers.annotations import Runs
from ..helpers.random_annotations import (
    admitted_by_jaxtyping,
    cases,
    changed,
    quick,
    structs_of,
    tensors_of,
    thorough,
    torch_function,
)


def annotated(case, runs):
    """A torch function that does and is annotated what `case` says, its arguments in containers."""
    compute, stub = torch_function(case), case.function()

    def body(*args):
        runs.append(0)
        # Both members of a container are alike.
        return compute(*(jax.tree.leaves(arg)[0] for arg in args))

    names = ", ".join(f"x{index}" for index in range(len(case.arrays)))
    scope = {"body": body}
    exec(f"def f({names}): return body({names})", scope)
    scope["f"].__annotations__ = stub.__annotations__
    return scope["f"]


def check_prediction(case, data):
    runs, shapes = Runs(), case.shapes()
    f, structs = torch2jax(annotated(case, runs)), structs_of(case, shapes)
    returned = torch_function(case)(*tensors_of(case, shapes))
    expected = jax.tree.map(lambda one: (tuple(one.shape), dtype_of(one)), returned)
    assert jax.tree.map(lambda one: (one.shape, one.dtype.name), jax.eval_shape(f, *structs)) == (
        expected
    )
    batched = jax.tree.map(lambda one: jax.ShapeDtypeStruct((2, *one.shape), one.dtype), structs)
    assert [one.shape for one in jax.eval_shape(jax.vmap(f), *batched)] == [
        (2, *shape) for shape, _ in expected
    ]
    assert runs == []
    if data.draw(st.booleans()):
        zeros = jax.tree.map(lambda one: jax.numpy.zeros(one.shape, one.dtype), structs)
        assert_trees_equal(f(*zeros), returned)


def dtype_of(tensor):
    return str(tensor.dtype).removeprefix("torch.")


def check_wrong(case, data):
    """One size of one array is changed: refused exactly if jaxtyping refuses the tensors."""
    runs, shapes = Runs(), changed(case, data)
    f, structs = torch2jax(annotated(case, runs)), structs_of(case, shapes)
    if admitted_by_jaxtyping(case, shapes):
        jax.eval_shape(f, *structs)
    else:
        with pytest.raises(ShapeError, match="^f: argument `x"):
            jax.eval_shape(f, *structs)
    assert runs == []


@quick
@given(cases(), st.data())
def test_predictions(case, data):
    check_prediction(case, data)


@quick
@given(cases(), st.data())
def test_wrong_shapes(case, data):
    check_wrong(case, data)


@pytest.mark.slow
@thorough
@given(cases(), st.data())
def test_many_predictions(case, data):
    check_prediction(case, data)


@pytest.mark.slow
@thorough
@given(cases(), st.data())
def test_many_wrong_shapes(case, data):
    check_wrong(case, data)
