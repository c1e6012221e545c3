"""Random annotations, against jaxtyping's verdict on real tensors and what torch returns."""

import jax
import pytest
from hypothesis import given, strategies as st

from eqx_torch._annotations import read_signature
from eqx_torch._errors import ShapeError

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


def check_prediction(case):
    signature = read_signature(case.function())
    shapes = case.shapes()
    predicted = signature.output(signature.bind(structs_of(case, shapes), {}))
    returned = torch_function(case)(*tensors_of(case, shapes))
    assert jax.tree.map(lambda one: (one.shape, one.dtype.name), predicted) == tuple(
        (tuple(one.shape), str(one.dtype).removeprefix("torch.")) for one in returned
    )


def check_wrong(case, data):
    """Wrong shapes are refused exactly if jaxtyping refuses the tensors."""
    shapes = changed(case, data)
    signature = read_signature(case.function())
    if admitted_by_jaxtyping(case, shapes):
        signature.bind(structs_of(case, shapes), {})
        return
    with pytest.raises(ShapeError) as caught:
        signature.bind(structs_of(case, shapes), {})
    message = str(caught.value)
    assert message.startswith("f: argument `x")
    assert " must " in message or "cannot be evaluated" in message


@quick
@given(cases())
def test_predictions(case):
    check_prediction(case)


@quick
@given(cases(), st.data())
def test_wrong_shapes(case, data):
    check_wrong(case, data)


@pytest.mark.slow
@thorough
@given(cases())
def test_many_predictions(case):
    check_prediction(case)


@pytest.mark.slow
@thorough
@given(cases(), st.data())
def test_many_wrong_shapes(case, data):
    check_wrong(case, data)
