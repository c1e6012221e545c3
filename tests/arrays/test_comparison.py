import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from ..helpers import assert_trees_equal


def test_equal_across_libraries():
    assert_trees_equal(
        {"a": jnp.arange(3), "b": [torch.ones(2), np.float32(2), None], "c": "name"},
        {"a": torch.arange(3), "b": [np.ones(2), 2.0, None], "c": "name"},
        exact=True,
    )
    assert_trees_equal(jnp.array(jnp.nan), torch.tensor(float("nan")))
    assert_trees_equal(jax.random.key(1), jax.random.key(1))
    assert_trees_equal(jnp.ones((0, 2)), torch.ones(0, 2))


@pytest.mark.parametrize(
    ("actual", "expected", "message"),
    [
        ({"a": 1}, {"b": 1}, "structures differ"),
        ((jnp.ones(2), jnp.ones(3)), (jnp.ones(2), torch.ones(3, 1)), r"tree\[1\]: shape \(3,\)"),
        ([jnp.ones(2)], [torch.ones(2, dtype=torch.int32)], r"tree\[0\]: dtype float32 != int32"),
        ({"a": jnp.ones(2)}, {"a": torch.zeros(2)}, r"at tree\['a'\]"),
        ([jnp.arange(2)], [np.array([0, 2])], r"at tree\[0\]"),
        (["a"], ["b"], r"tree\[0\]: 'a' != 'b'"),
    ],
)
def test_difference_names_the_path(actual, expected, message):
    with pytest.raises(AssertionError, match=message):
        assert_trees_equal(actual, expected)


def test_exact_sees_the_sign_of_zero():
    assert_trees_equal(jnp.array(0.0), torch.tensor(-0.0))
    with pytest.raises(AssertionError, match="tree: "):
        assert_trees_equal(jnp.array(0.0), torch.tensor(-0.0), exact=True)


def test_tolerances():
    assert_trees_equal(jnp.array(1.0), torch.tensor(1.1), rtol=0.2)
    assert_trees_equal(jnp.array(1.0, jnp.bfloat16), torch.tensor(1.01, dtype=torch.bfloat16))
    with pytest.raises(AssertionError):
        assert_trees_equal(jnp.array(1.0), torch.tensor(1.1), rtol=0.01)
