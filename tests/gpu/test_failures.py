"""After a call that fails, the next one is right."""

import jax
import jax.numpy as jnp
import pytest
import torch

from eqx_torch import torch2jax

from ..helpers import assert_trees_equal
from .devices import briefly, needs_gpu, ON_GPU, slow


X = jnp.linspace(0, 1, 32)


def _raises(x):
    raise ValueError("the function's own message")


FAILURES = {
    "raises": (_raises, "the function's own message"),
    "shape": (lambda x: x[:3].sin(), "another shape"),
    "dtype": (lambda x: x.half(), "another dtype"),
    "not a tensor": (lambda x: "text", "where a tensor was declared"),
    "torch's own": (lambda x: x @ x[:3], "size|shape"),
}
every_failure = pytest.mark.parametrize(("f", "message"), FAILURES.values(), ids=FAILURES)
CALLS = {
    "eager": lambda f: f,
    "jit": jax.jit,
    "between slow operations": lambda f: jax.jit(lambda x: slow(f(slow(x)))),
    "grad": lambda f: jax.jit(jax.grad(lambda x: f(x).sum())),
    "scan": lambda f: jax.jit(lambda x: jax.lax.scan(lambda c, _: (f(c), None), x, None, 3)[0]),
}


FEW_CALLS = briefly(CALLS, "eager", "between slow operations")


@every_failure
@pytest.mark.parametrize("call", FEW_CALLS.values(), ids=FEW_CALLS)
@pytest.mark.covering
def test_the_error_arrives_and_the_next_call_is_right(f, message, call):
    failing = call(torch2jax(f, output_shapes=X))
    good = torch2jax(torch.sin)
    for _ in range(2):
        with pytest.raises(Exception, match=message):
            jax.block_until_ready(failing(X))
        assert_trees_equal(jax.jit(good)(X), jnp.sin(X), atol=1e-5)
    if ON_GPU:
        assert torch.cuda.current_stream() == torch.cuda.default_stream()


def test_a_function_that_fails_now_and_then():
    failing = [True]

    def f(x):
        if failing[0]:
            raise ValueError("this time")
        return x.sin()

    call = jax.jit(torch2jax(f, output_shapes=X))
    for fails in (True, False, True, False):
        failing[0] = fails
        if fails:
            with pytest.raises(Exception, match="this time"):
                jax.block_until_ready(call(X))
        else:
            assert_trees_equal(call(X), jnp.sin(X), atol=1e-5)


@needs_gpu
def test_torch_running_out_of_memory():
    size = torch.cuda.mem_get_info()[1]
    f = torch2jax(lambda x: x + torch.ones(size, device=x.device)[0], output_shapes=X)
    with pytest.raises(Exception, match="out of memory"):
        jax.block_until_ready(jax.jit(f)(X))
    assert_trees_equal(jax.jit(torch2jax(torch.sin))(X), jnp.sin(X), atol=1e-5)


@needs_gpu
def test_tensors_of_another_device_are_torchs_error():
    other = torch.ones(32)
    f = torch2jax(lambda x: x * other, output_shapes=X)
    with pytest.raises(Exception, match="same device"):
        jax.block_until_ready(jax.jit(f)(X))
