"""XLA records kernels in CUDA graphs and replays them. Calls of torch are not among them.

A graph would hold the kernels that torch launched once, and the memory its allocator had then; a
function that allocates or that depends on values would give wrong results from the second time on.
"""

import re

import jax
import jax.numpy as jnp
import torch

from eqx_torch import torch2jax

from ..helpers import assert_trees_equal
from .devices import needs_gpu, ON_GPU


X = jnp.linspace(0, 1, 64)
# As eager as XLA can be made to record.
OPTIONS = {"xla_gpu_graph_min_graph_size": 1} if ON_GPU else {}


def _looped(f, count):
    def body(state):
        i, x = state
        return i + 1, jnp.sin(f(x) + 0.1) * 0.5

    return lambda x: jax.lax.while_loop(lambda state: state[0] < count, body, (0, x))[1]


def test_a_function_that_allocates_in_a_while_loop():
    """It allocates more with every call, and is called for every turn of the loop."""
    calls = []

    def f(x):
        calls.append(torch.arange(len(calls) + 1.0, device=x.device))
        return x + calls[-1].sum() / 10

    def in_jax(x, first):
        for count in range(first, first + 20):
            x = jnp.sin(x + sum(range(count + 1)) / 10 + 0.1) * 0.5
        return x

    program = jax.jit(_looped(torch2jax(f, output_shapes=X), 20), compiler_options=OPTIONS)
    for first in (0, 20):
        assert_trees_equal(program(X), in_jax(X, first), rtol=1e-3, atol=1e-3)
        assert len(calls) == first + 20


def test_control_flow_on_values_in_a_loop():
    def f(x):
        return x * 2 if bool(x.sum() < 20) else x - 1

    def twin(x):
        return jnp.where(x.sum() < 20, x * 2, x - 1)

    actual = jax.jit(_looped(torch2jax(f, output_shapes=X), 15), compiler_options=OPTIONS)
    assert_trees_equal(actual(X), jax.jit(_looped(twin, 15))(X), rtol=1e-4, atol=1e-4)


def test_gradients_in_a_loop():
    f = torch2jax(lambda x: x.sin() * x)

    def loss(f):
        step = lambda c, _: (f(c) + jnp.cos(c), None)  # noqa: E731
        return lambda x: jax.lax.scan(step, x, None, length=10)[0].sum()

    actual = jax.jit(jax.grad(loss(f)), compiler_options=OPTIONS)
    expected = jax.jit(jax.grad(loss(lambda x: jnp.sin(x) * x)))(X)
    for _ in range(3):
        assert_trees_equal(actual(X), expected, rtol=1e-3, atol=1e-3)


@needs_gpu
def test_no_call_is_part_of_a_command_buffer():
    capturing = []

    def f(x):
        capturing.append(torch.cuda.is_current_stream_capturing())
        return x.sin()

    def program(x):
        for _ in range(3):
            x = jnp.cos(torch2jax(f, output_shapes=X)(jnp.sin(x) @ jnp.ones((64, 64))))
        return x

    compiled = jax.jit(program).lower(X).compile(compiler_options=OPTIONS)
    for _ in range(3):
        jax.block_until_ready(compiled(X))
    assert capturing == [False] * 9
    computations = re.split(r"^(?=%|ENTRY)", compiled.as_text(), flags=re.MULTILINE)
    with_calls = [c for c in computations if "xla_buffer_python_gpu_callback" in c]
    assert with_calls
    assert not [c for c in with_calls if "command_buffer" in c.partition("{")[0]]


@needs_gpu
def test_torchs_own_graphs_in_a_function():
    """A function may replay a graph that it has captured itself."""
    static_in = torch.zeros(64, device="cuda")
    static_out = torch.zeros(64, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        static_out.copy_(static_in.sin() + 1)

    def f(x):
        static_in.copy_(x)
        graph.replay()
        return static_out.clone()

    call = jax.jit(torch2jax(f, output_shapes=X))
    for i in range(5):
        assert_trees_equal(call(X + i), jnp.sin(X + i) + 1, atol=1e-5)
