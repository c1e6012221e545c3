"""Backwards that leave autograd: their second derivatives are right, or refused, never wrong."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.testing._internal.autograd_function_db import autograd_function_db

from eqx_torch import torch2jax

from ..helpers import assert_trees_equal
from ..helpers.sets import sampled


pytestmark = [
    pytest.mark.usefixtures("x64"),
    pytest.mark.filterwarnings("ignore:torch.func.vmap cannot batch"),
]


def square(backward, jvp=None):
    """The square of a tensor, with this backward."""

    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            ctx.save_for_forward(x)
            return x**2

        @staticmethod
        def backward(ctx, g):
            return backward(g, *ctx.saved_tensors)

    if jvp is not None:
        Square.jvp = staticmethod(jvp)
    return Square.apply


def _by_numpy(g, x):
    return torch.from_numpy(2 * g.detach().numpy() * x.detach().numpy())


def hooked(x):
    y = x**2
    if y.requires_grad:
        y.register_hook(lambda g: g.detach())
    return y


RIGHT = square(lambda g, x: 2 * x * g)
LEAVING = {
    "by NumPy": square(_by_numpy),
    "detached": square(lambda g, x: 2 * x * g.detach()),
    "detached in part": square(lambda g, x: x * g + (x * g).detach()),
    "without gradients": square(lambda g, x: x * g + torch.no_grad()(lambda: x * g)()),
    "not linear": square(lambda g, x: (2 * x * g).clamp(-1e-3, 1e-3)),
}
# Their pullbacks are linear and can be seen in the cotangents, but not in the primals.
DETOURS = {
    "saved tensors by NumPy": square(lambda g, x: g * torch.from_numpy(2 * x.detach().numpy())),
    "by `data`": square(lambda g, x: g * torch.from_numpy(2 * np.asarray(x.data))),
    "in part": square(lambda g, x: g * x + g * torch.from_numpy(x.detach().numpy())),
}

X, V = np.array([1.0, 0.0, -3.0]), np.array([1.0, 2.0, -1.0])
FIRST = {
    "jvp": lambda f: jax.jvp(f, (X,), (V,))[1],
    "linearize": lambda f: jax.linearize(f, X)[1](V),
    "jacfwd": lambda f: jax.jacfwd(f)(X),
    "a batch of jvp": lambda f: jax.vmap(lambda v: jax.jvp(f, (X,), (v,))[1])(np.stack([V, X])),
}
SECOND = {
    "hessian": lambda f: jax.hessian(lambda x: f(x).sum())(X),
    "jacrev of jacfwd": lambda f: jax.jacrev(jax.jacfwd(f))(X),
    "grad of grad": lambda f: jax.grad(lambda x: jax.grad(lambda x: jnp.sin(f(x)).sum())(x).sum())(
        X
    ),
    "a batch of hessians": lambda f: jax.vmap(jax.hessian(lambda x: f(x).sum()))(np.stack([X, V])),
}
REFUSAL = "cannot be differentiated (again|in forward mode)"


@pytest.mark.parametrize("derivative", [*FIRST, *SECOND])
@pytest.mark.parametrize("name", LEAVING)
@pytest.mark.covering
def test_another_path_does_not_hide_it(name, derivative):
    f = torch2jax(lambda x: x + LEAVING[name](x))
    with pytest.raises(Exception, match=REFUSAL):
        jax.block_until_ready({**FIRST, **SECOND}[derivative](f))


@pytest.mark.parametrize("derivative", SECOND)
@pytest.mark.parametrize("name", DETOURS)
@pytest.mark.covering
def test_saved_tensors_that_take_a_detour(name, derivative):
    f = torch2jax(lambda x: x + DETOURS[name](x))
    assert_trees_equal(jax.jacrev(f)(X), jax.jacrev(lambda x: x + x**2)(X))
    with pytest.raises(Exception, match="cannot be differentiated in forward mode"):
        FIRST["jacfwd"](f)
    with pytest.raises(Exception, match=REFUSAL):
        jax.block_until_ready(SECOND[derivative](f))


@pytest.mark.parametrize("name", [*LEAVING, *DETOURS])
def test_the_first_gradient_is_right(name):
    if name == "not linear":
        pytest.skip("its first gradient is that of no function")
    f = torch2jax(lambda x: x + {**LEAVING, **DETOURS}[name](x))
    assert_trees_equal(jax.grad(lambda x: f(x).sum())(X), 1 + 2 * X)


@pytest.mark.parametrize("derivative", [*FIRST, *SECOND])
@pytest.mark.parametrize(
    "function",
    [RIGHT, square(lambda g, x: 2 * x * g, lambda ctx, t: (2 * ctx.saved_tensors[0] * t).detach())],
    ids=["right", "a tangent of detached tensors"],
)
@pytest.mark.covering(5)
def test_what_stays_in_autograd_is_right(function, derivative):
    take = {**FIRST, **SECOND}[derivative]
    f = torch2jax(lambda x: x + function(x))
    assert_trees_equal(take(f), take(lambda x: x + x**2))


@pytest.mark.parametrize("seed", range(8))
def test_rounding_does_not_hide_it(seed):
    """With an input of low precision, a derivative that is wrong by a third is not rounding."""
    f = torch2jax(lambda x, y: (0.5 * x + LEAVING["detached in part"](x), y.softmax(0)))
    x, v = np.random.default_rng(seed).normal(size=(2, 3)).astype(np.float32)
    half = np.ones(3, np.float16)
    with pytest.raises(Exception, match="cannot be differentiated in forward mode"):
        jax.block_until_ready(jax.jvp(f, (x, half), (v, half)))


def test_a_hook_that_detaches():
    f = torch2jax(lambda x: x + hooked(x))
    assert_trees_equal(jax.jacrev(f)(X), jax.jacrev(lambda x: x + x**2)(X))
    with pytest.raises(Exception, match="cannot be differentiated in forward mode"):
        FIRST["jacfwd"](f)
    with pytest.raises(Exception, match=REFUSAL):
        SECOND["grad of grad"](f)


# One is differentiated once only; the backward of the other adds what no gradient is a factor of.
_WITHOUT_SECOND = {
    "NumpyCubeNotComposableAutogradFunction",
    "CubeGenVmapAutogradFunction",
}


@pytest.mark.parametrize(
    "info",
    [info for info in autograd_function_db if info.name not in _WITHOUT_SECOND],
    ids=lambda info: info.name,
)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.covering(4)
def test_torchs_own_functions_are_not_refused(info):
    """Some of which go through NumPy, in forwards that have a backward."""
    sample = next(iter(info.sample_inputs("cpu", torch.float64, requires_grad=True)))
    if not isinstance(sample.input, torch.Tensor) or not info.supports_gradgrad:
        pytest.skip("not of one tensor, or without a second derivative")

    def f(x):
        out = info.op(x, *(a.detach() if isinstance(a, torch.Tensor) else a for a in sample.args))
        outs = out if isinstance(out, tuple | list) else [out]
        return sum(y.sin().sum() for y in outs if y.is_floating_point())

    x = sample.input.detach()
    expected = torch.autograd.functional.hessian(f, x)
    actual = jax.hessian(torch2jax(f))(jnp.asarray(x.numpy()))
    assert_trees_equal(actual, expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("seed", sampled(range(30), range(6)))
def test_random_sums_and_chains_are_right_or_refused(seed):
    draw = random.Random(seed)
    parts = [
        (draw.choice([RIGHT, RIGHT, hooked, *LEAVING.values(), *DETOURS.values()]), draw.random())
        for _ in range(draw.randint(1, 3))
    ]
    chained = draw.random() < 0.5

    def compose(square, sin):
        def f(x):
            total = x
            for part, weight in parts:
                y = square(part)(total if chained else x)
                total = total + weight * sin(y)
            return total

        return f

    f = torch2jax(compose(lambda part: part, torch.sin))
    expected = compose(lambda part: lambda x: x**2, jnp.sin)
    name = draw.choice([*FIRST, *SECOND])
    message = ""
    try:
        actual = jax.block_until_ready({**FIRST, **SECOND}[name](f))
    except Exception as error:
        message = str(error)
    if message:
        assert "cannot be differentiated" in message
        assert any(part is not RIGHT for part, _ in parts)
    else:
        assert_trees_equal(actual, {**FIRST, **SECOND}[name](expected))


_INDICES = torch.tensor([[0, 1, 1], [1, 0, 2]])


def test_values_of_a_sparse_matrix():
    dense = torch.arange(12.0, dtype=torch.float64).reshape(3, 4) / 7
    matrix = lambda v: torch.sparse_coo_tensor(_INDICES, v, (2, 3), check_invariants=False)  # noqa: E731
    f = torch2jax(lambda v: v.sum() + torch.sparse.mm(matrix(v), dense))
    rows, columns = _INDICES.numpy()
    expected = lambda v: v.sum() + jnp.zeros((2, 3)).at[rows, columns].set(v) @ dense.numpy()  # noqa: E731
    assert_trees_equal(jax.jacrev(f)(X), jax.jacrev(expected)(X))
    for derivative in (jax.jacfwd(f), jax.hessian(lambda v: jnp.sin(f(v)).sum())):
        with pytest.raises(Exception, match=REFUSAL):
            jax.block_until_ready(derivative(X))
