"""Derivatives of derivatives: one forward, one backward, and one more for each order, as in torch.

Forces are a gradient of an energy, and a potential is trained on them: the gradient of a gradient.
Forwards are counted where torch runs the energy, backwards where it runs its engine.
"""

import collections
import gc
import threading
import weakref

import jax
import jax.numpy as jnp
import pytest
import torch
from jax.sharding import PartitionSpec as P

from eqx_torch import from_torch, torch2jax, tree_j2t, tree_t2j
from eqx_torch._program import reverse, TAPES

from ..helpers import assert_trees_equal
from ..helpers.random_programs import BACKWARDS
from ..helpers.twins import random_array


CAPACITIES = {"unbounded": None, "capacity 1": 1, "capacity 0": 0}
STEPS = 4
THREADS = 4

COUNTS = collections.Counter()


def energy(params, x):
    """The energy of atoms, by the distances of all pairs."""
    COUNTS["forward"] += 1
    distance = (((x[:, None] - x[None]) ** 2).sum(-1) + 0.5).sqrt()
    h = torch.tanh(distance.unsqueeze(-1) @ params["w"] + params["b"])
    return (h @ params["v"]).sum()


def energy_in_jax(params, x):
    distance = jnp.sqrt(((x[:, None] - x[None]) ** 2).sum(-1) + 0.5)
    h = jnp.tanh(distance[..., None] @ params["w"] + params["b"])
    return (h @ params["v"]).sum()


def squares(tree):
    return sum((leaf**2).sum() for leaf in jax.tree.leaves(tree))


def forces_of(e):
    return lambda params, x: -jax.grad(e, 1)(params, x)


def push(f, x):
    """The product of the Jacobian with some vector."""
    return jax.jvp(f, (x,), (jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape),))[1]


def pull(f, x):
    """The product of a symmetric Jacobian with the same vector, in reverse mode."""
    v = jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape)
    return jax.grad(lambda x: jnp.vdot(f(x), v))(x)


def forces(e):
    return forces_of(e)


def force_training(e):
    return lambda p, x: jax.grad(lambda p: squares(forces_of(e)(p, x)))(p)


def force_training_by_everything(e):
    return jax.grad(lambda p, x: squares(forces_of(e)(p, x)), (0, 1))


def energy_and_force_training(e):
    def loss(p, x):
        value, gradient = jax.value_and_grad(e, 1)(p, x)
        return value**2 + squares(gradient)

    return jax.grad(loss)


def hessian_product(e):
    return lambda p, x: push(lambda x: forces_of(e)(p, x), x)


def hessian_product_of_parameters(e):
    return lambda p, x: jax.jvp(lambda p: jax.grad(e)(p, x), (p,), (jax.tree.map(jnp.sin, p),))[1]


def hessian_product_in_reverse(e):
    return lambda p, x: pull(lambda x: forces_of(e)(p, x), x)


def linearized(e):
    return lambda p, x: jax.linearize(lambda x: forces_of(e)(p, x), x)[1](jnp.sin(x))


def training_on_hessian_products(e):
    return jax.grad(lambda p, x: squares(hessian_product_in_reverse(e)(p, x)))


def training_on_pushed_products(e):
    return jax.grad(lambda p, x: squares(hessian_product(e)(p, x)))


def pushed_training(e):
    return lambda p, x: push(lambda x: force_training(e)(p, x), x)


def rematerialized(e):
    return force_training(jax.checkpoint(e))


def rematerialized_loss(e):
    return jax.grad(jax.checkpoint(lambda p, x: squares(forces_of(e)(p, x))))


def jitted_inside(e):
    return force_training(jax.jit(e))


def behind_another_function(e):
    """The pullback is differentiated by its cotangent alone."""
    scale = torch2jax(lambda y, s: (y * s).sin())

    def loss(p, x):
        g = jax.grad(lambda x: scale(e(jax.lax.stop_gradient(p), x), p["v"].sum()))(x)
        return squares(g)

    return jax.grad(loss)


def in_branches(e):
    def f(p, x):
        return jax.lax.cond(x[0, 0] > -9, forces_of(e), lambda p, x: 2 * x, p, x)

    return jax.grad(lambda p, x: squares(f(p, x)))


def dynamics(e):
    """The gradient of what a trajectory ends at, by the parameters of the potential."""

    def loss(p, x):
        def step(carry, _):
            x, v = carry
            v = v + 0.02 * forces_of(e)(p, x)
            return (x + 0.02 * v, v), None

        return squares(jax.lax.scan(step, (x, jnp.zeros_like(x)), None, STEPS)[0])

    return jax.grad(loss)


# Of each: its forwards, and its backwards of any order, by torch.
COUNTED = {
    forces: (1, 1),
    force_training: (1, 2),
    force_training_by_everything: (1, 2),
    hessian_product: (1, 2),
    hessian_product_of_parameters: (1, 2),
    hessian_product_in_reverse: (1, 2),
    linearized: (1, 2),
    training_on_hessian_products: (1, 3),
    jitted_inside: (1, 2),
    in_branches: (1, 2),
    dynamics: (STEPS, 2 * STEPS),
    # What is to be computed again is, and has its forces twice.
    rematerialized: (2, 3),
    # Torch goes through both graphs at once; here the energy's own derivative is one more.
    energy_and_force_training: (1, 3),
}
OTHERS = [
    pushed_training,
    training_on_pushed_products,
    rematerialized_loss,
    behind_another_function,
]
every_derivative = pytest.mark.parametrize(
    "derivative", [*COUNTED, *OTHERS], ids=lambda f: f.__name__
)


@pytest.fixture(params=CAPACITIES.values(), ids=CAPACITIES)
def capacity(request, monkeypatch):
    """How many graphs of a program may be outstanding."""
    TAPES.clear()
    if request.param is not None:
        monkeypatch.setattr(TAPES, "last_limit", request.param)
    yield request.param
    TAPES.clear()


@pytest.fixture
def unlimited(monkeypatch):
    """Counts are those of a tape that keeps what is needed."""
    TAPES.clear()
    monkeypatch.setattr(TAPES, "last_limit", 4096)


@pytest.fixture
def counting(monkeypatch, unlimited):
    run = reverse.run_backward

    def counted(*args):
        COUNTS["backward"] += 1
        return run(*args)

    monkeypatch.setattr(reverse, "run_backward", counted)


def arguments(getkey, *batch):
    params = {
        "w": random_array(getkey, (1, 8)),
        "b": random_array(getkey, (8,)),
        "v": random_array(getkey, (8,)),
    }
    return params, random_array(getkey, (*batch, 5, 3))


def close(actual, expected):
    assert_trees_equal(actual, expected, rtol=2e-3, atol=2e-4)


def counts_of(f, *args):
    """What a run costs after the first ones, which find out how to run."""
    for _ in range(4):
        COUNTS.clear()
        jax.block_until_ready(f(*args))
    return COUNTS["forward"], COUNTS["backward"]


@pytest.mark.usefixtures("capacity")
@every_derivative
def test_values(getkey, x64, derivative):
    """In double precision: some of these cancel almost all digits of single precision."""
    args = jax.tree.map(lambda a: a.astype("float64"), arguments(getkey))
    expected = derivative(energy_in_jax)(*args)
    f = jax.jit(derivative(torch2jax(energy)))
    for _ in range(3):
        assert_trees_equal(f(*args), expected, rtol=1e-8, atol=1e-8)
    assert_trees_equal(derivative(torch2jax(energy))(*args), expected, rtol=1e-8, atol=1e-8)


def test_training_is_torchs(getkey, x64):
    args = jax.tree.map(lambda a: a.astype("float64"), arguments(getkey))
    params, x = tree_j2t(args)
    leaves = {name: p.clone().requires_grad_() for name, p in params.items()}
    x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(energy(leaves, x), x, create_graph=True)
    expected = torch.autograd.grad((gradient**2).sum(), list(leaves.values()), allow_unused=True)
    expected = {name: g.numpy() for name, g in zip(leaves, expected, strict=True)}
    f = jax.jit(force_training(torch2jax(energy)))
    for _ in range(3):
        assert_trees_equal(f(*args), expected, rtol=1e-10, atol=1e-10)


def test_a_gradient_inside_of_torch(getkey):
    """The forces may also be torch's own, and JAX's gradient that of their loss."""

    def inner(params, x):
        x = x.clone().requires_grad_()
        return -torch.autograd.grad(energy(params, x), x, create_graph=True)[0]

    args = arguments(getkey)
    f = jax.grad(lambda p, x: squares(torch2jax(inner)(p, x)))
    close(jax.jit(f)(*args), force_training(energy_in_jax)(*args))


@pytest.mark.usefixtures("counting")
@pytest.mark.parametrize("derivative", COUNTED, ids=lambda f: f.__name__)
def test_one_forward_and_one_backward_for_each_order(getkey, derivative):
    f = jax.jit(derivative(torch2jax(energy)))
    assert counts_of(f, *arguments(getkey)) == COUNTED[derivative]
    assert len(TAPES) == 0


BATCHED = {
    "forces": (lambda e: jax.vmap(forces_of(e), (None, 0)), (1, 1)),
    "training": (
        lambda e: jax.grad(lambda p, x: squares(jax.vmap(forces_of(e), (None, 0))(p, x))),
        (1, 2),
    ),
    "products": (
        lambda e: lambda p, x: jax.vmap(hessian_product(e), (None, 0))(p, x),
        (1, 2),
    ),
    "products in reverse": (
        lambda e: lambda p, x: jax.vmap(hessian_product_in_reverse(e), (None, 0), 1)(p, x),
        (1, 2),
    ),
    "of the last axis": (
        lambda e: (
            lambda p, x: jax.vmap(hessian_product(e), (None, -1), 1)(p, jnp.moveaxis(x, 0, -1))
        ),
        (1, 2),
    ),
    "two batches": (
        lambda e: jax.grad(
            lambda p, x: squares(
                jax.vmap(jax.vmap(forces_of(e), (None, 0)), (None, 0))(p, jnp.stack([x, 2 * x]))
            )
        ),
        (1, 2),
    ),
    "training of each": (lambda e: jax.vmap(force_training(e), (None, 0)), None),
    "hessians": (
        lambda e: jax.vmap(jax.hessian(e, 1), (None, 0)),
        None,
    ),
    "some tangents": (
        lambda e: (
            lambda p, x: jax.vmap(
                lambda v: jax.jvp(lambda x: forces_of(e)(p, x), (x[0],), (v,))[1]
            )(x)
        ),
        None,
    ),
    "some are another function's": (
        lambda e: jax.vmap(
            lambda p, x: jax.lax.cond(x[0, 0] > 0, forces_of(e), lambda p, x: 2 * x, p, x),
            (None, 0),
        ),
        None,
    ),
}
batched = pytest.mark.parametrize(("make", "counts"), BATCHED.values(), ids=BATCHED)


@pytest.mark.usefixtures("capacity")
@batched
def test_values_of_batches(getkey, make, counts):
    args = arguments(getkey, 3)
    f = jax.jit(make(torch2jax(energy)))
    for _ in range(2):
        close(f(*args), make(energy_in_jax)(*args))


@pytest.mark.usefixtures("counting")
@batched
def test_counts_of_batches(getkey, make, counts):
    if counts is not None:
        assert counts_of(jax.jit(make(torch2jax(energy))), *arguments(getkey, 3)) == counts
        assert len(TAPES) == 0


def test_complex_hessian_products(getkey):
    z = jax.lax.complex(random_array(getkey, (4,)), random_array(getkey, (4,)))
    v = jax.lax.complex(random_array(getkey, (4,)), random_array(getkey, (4,)))
    f = torch2jax(lambda z: (z.sin() * z.conj()).abs().pow(2).sum())
    f_in_jax = lambda z: (jnp.abs(jnp.sin(z) * jnp.conj(z)) ** 2).sum()  # noqa: E731
    actual = jax.jit(lambda z, v: jax.jvp(jax.grad(f), (z,), (v,)))
    for _ in range(3):
        close(actual(z, v), jax.jvp(jax.grad(f_in_jax), (z,), (v,)))


def of_both_kinds(sin, join):
    """Of real numbers, a complex and a real result."""
    return lambda x: (sin(join(x, 2 * x)), x * x)


@pytest.mark.parametrize("wrt", [(0,), (1,), (2,), (0, 1), (1, 2), (0, 1, 2)])
@pytest.mark.parametrize("way", ["eager", "jit", "vmap"])
def test_pullbacks_of_real_to_complex_by_some_of_their_arguments(way, wrt, getkey):
    """The pullback is linear in its cotangents, by which alone it is a map of tangents."""
    x, r, a, b = jax.random.normal(getkey(), (4, 3))

    def derivative(f):
        pulled = lambda x, u, r: jnp.sum(jax.vjp(f, x)[1]((u, r))[0] * r)  # noqa: E731
        by = jax.grad(pulled, wrt)
        if way == "vmap":
            return lambda x, u, r: jax.vmap(by)(*(t[None] for t in (x, u, r)))
        return jax.jit(by) if way == "jit" else by

    actual = derivative(torch2jax(of_both_kinds(torch.sin, torch.complex)))
    expected = derivative(of_both_kinds(jnp.sin, jax.lax.complex))
    for _ in range(3):
        close(actual(x, jax.lax.complex(a, b), r), expected(x, jax.lax.complex(a, b), r))


def hooked(x):
    y = x * 1
    y.register_hook(lambda g: g * torch.linspace(1, 2, len(x), dtype=g.dtype))
    return (y.flip(0) ** 2 * y).sum()


def test_forward_mode_of_what_hooks_change(getkey):
    """A tangent is the transpose of the gradient, with whatever hooks make of that."""
    x, v = jax.random.normal(getkey(), (2, 3))
    f = torch2jax(hooked)
    expected = jax.vjp(f, x)[1](jnp.ones_like(f(x)))[0] @ v
    assert_trees_equal(jax.jvp(f, (x,), (v,))[1].sum(), expected, rtol=1e-5)
    assert_trees_equal(jax.linearize(f, x)[1](v).sum(), expected, rtol=1e-5)


def test_forward_mode_of_gradients_that_hooks_change(getkey, x64):
    """Their Jacobian is not symmetric, and so a product with it is none of reverse mode."""
    x = random_array(getkey, (4,)).astype("float64")
    gradient = jax.grad(torch2jax(hooked))
    product = jax.jit(lambda x, v: jax.jvp(gradient, (x,), (v,))[1])
    columns = [(gradient(x + 1e-5 * e) - gradient(x - 1e-5 * e)) / 2e-5 for e in jnp.eye(4)]
    jacobian = jnp.stack(columns, 1)
    assert not jnp.allclose(jacobian, jacobian.T, rtol=1e-2)
    for v in (x, jnp.ones(4), jnp.sin(x)):
        assert_trees_equal(product(x, v), jacobian @ v, rtol=1e-5, atol=1e-5)


class Scaled(torch.autograd.Function):
    """A cube with a gradient of the user's making."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * 3 * x**2 * torch.linspace(1, 2, len(x))


def test_forward_mode_of_gradients_that_users_write(getkey):
    x = random_array(getkey, (4,))
    gradient = jax.grad(torch2jax(lambda x: (Scaled.apply(x).flip(0) * x).sum()))
    pullback = jax.vjp(gradient, x)[1]
    rows = jnp.stack([pullback(e)[0] for e in jnp.eye(4)])
    product = jax.jit(lambda x, v: jax.jvp(gradient, (x,), (v,))[1])
    for v in (x, jnp.ones(4), jnp.sin(x)):
        close(product(x, v), rows @ v)


def test_a_backward_that_leaves_autograd_is_refused(getkey):
    f = torch2jax(lambda x: (BACKWARDS["detached"](x) * x).sum())
    x = random_array(getkey, (4,))
    gradient = jax.jit(jax.grad(f))
    loss = jax.jit(jax.grad(lambda x: squares(jax.grad(f)(x))))
    for _ in range(3):
        close(gradient(x), jnp.sin(x) + x * jnp.cos(x))
        with pytest.raises(Exception, match="cannot be differentiated again"):
            jax.block_until_ready(loss(x))


def test_modules(getkey):
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    model = from_torch(module)
    xs = random_array(getkey, (6, 3))

    def loss(model, xs):
        return squares(jax.vmap(jax.grad(lambda x: model(x).sum()))(xs))

    inputs = tree_j2t(xs).clone().requires_grad_()
    (gradient,) = torch.autograd.grad(module(inputs).sum(), inputs, create_graph=True)
    (gradient**2).sum().backward()
    f = jax.jit(jax.grad(loss))
    for _ in range(4):
        grads = f(model, xs)
        for name, p in module.named_parameters():
            expected = torch.zeros_like(p) if p.grad is None else p.grad
            close(grads.params[name], tree_t2j(expected))
    pool = model.core.blueprint.pool(torch.device("cpu"))
    assert len(pool._free) <= 2


def test_pullbacks_of_pullbacks_in_any_order_and_again(getkey):
    params, x = arguments(getkey)
    f, f_in_jax = (force_training_vjp(e) for e in (torch2jax(energy), energy_in_jax))
    points = [x * (i + 1) / 8 for i in range(12)]
    pulls, pulls_in_jax = ([g(params, x) for x in points] for g in (f, f_in_jax))
    for i in (5, 11, 0, 5, 3, 0):
        close(pulls[i](x), pulls_in_jax[i](x))


def force_training_vjp(e):
    return lambda p, x: jax.vjp(forces_of(e), p, x)[1]


def test_dropped_pullbacks_of_pullbacks_are_freed(getkey, unlimited):
    alive = weakref.WeakSet()

    class Seen(torch.nn.Module):
        def forward(self, w, x):
            alive.add(h := torch.tanh(x @ w))
            return (h**2).sum()

    module = Seen()
    f = torch2jax(lambda w, x: module(w, x), output_shapes=jax.ShapeDtypeStruct((), "float32"))
    w, x = random_array(getkey, (4, 4)), random_array(getkey, (3, 4))
    for _ in range(30):
        jax.block_until_ready(jax.vjp(forces_of(f), w, x)[0])
    assert len(TAPES) <= 24
    TAPES.clear()
    gc.collect()
    assert len(alive) == 0


def test_several_devices(getkey):
    params, x = arguments(getkey, 8)

    def training(e):
        def loss(p, x):
            return jax.lax.psum(squares(jax.vmap(forces_of(e), (None, 0))(p, x)), "b")

        return lambda p, x: jax.grad(
            lambda p: jax.shard_map(loss, in_specs=(P(), P("b")), out_specs=P())(p, x)
        )(p)

    with jax.set_mesh(jax.make_mesh((8,), ("b",))):
        params, x = jax.device_put(params, P()), jax.device_put(x, P("b"))
        actual = jax.jit(training(torch2jax(energy)))
        for _ in range(3):
            close(actual(params, x), jax.jit(training(energy_in_jax))(params, x))


def test_donated_arguments(getkey):
    params, x = arguments(getkey)

    def step(e):
        def update(p, x):
            return jax.tree.map(lambda p, g: p - 1e-3 * g, p, force_training(e)(p, x))

        return jax.jit(update, donate_argnums=0)

    actual, expected = (jax.tree.map(jnp.copy, params) for _ in range(2))
    ours, jaxs = step(torch2jax(energy)), step(energy_in_jax)
    for _ in range(4):
        actual, expected = ours(actual, x), jaxs(expected, x)
        close(actual, expected)


def test_threads_share_a_jitted_training(getkey):
    params, x = arguments(getkey)
    f = jax.jit(force_training(torch2jax(energy)))
    results = [None] * THREADS

    def run(i):
        results[i] = [f(params, x * (i + 1) / 4) for _ in range(5)]

    threads = [threading.Thread(target=run, args=(i,)) for i in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i in range(THREADS):
        expected = force_training(energy_in_jax)(params, x * (i + 1) / 4)
        close(results[i], [expected] * 5)


def test_derivatives_by_cotangents_alone_count_no_order(getkey):
    """A pullback is linear in its cotangent, so its tangent is no second derivative."""
    x = random_array(getkey, (4,))
    f = torch2jax(lambda x: x.sin(), depth=1)

    def loss(u):
        return squares(jax.vjp(f, x)[1](u))

    close(jax.jit(jax.grad(loss))(x), 2 * x * jnp.cos(x) ** 2)
    pushed = jax.jit(lambda u: push(lambda u: jax.vjp(f, x)[1](u)[0], u))
    close(pushed(x), jnp.cos(x) * jnp.cos(jnp.arange(4.0)))
