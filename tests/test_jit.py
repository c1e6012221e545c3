"""Calls under `jax.jit` and outside of it."""

import jax

from .helpers import assert_trees_equal
from .twins import every_twin


@every_twin
def test_eager_and_jitted_are_the_twin(getkey, twin):
    args = twin.args(getkey)
    expected = twin.jax(*args)
    assert_trees_equal(twin.wrapped(*args), expected)
    assert_trees_equal(jax.jit(twin.wrapped)(*args), expected)
