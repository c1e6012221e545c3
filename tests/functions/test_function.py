"""`torch2jax`: its options, and how often what runs."""

import contextlib
import functools
import inspect
import re
import threading

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import PartitionSpec as P

from eqx_torch import DepthError, InputError, Size, t2j, torch2jax

from ..helpers import assert_trees_equal
from ..helpers.meshes import explicit_mesh, put
from ..helpers.twins import HiddenCube, random_array, scalar, TWINS


def test_it_looks_like_the_function():
    def cube(x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        """Cubes."""
        return scale * x**3

    f = torch2jax(cube)
    assert (f.__name__, f.__doc__, f.__wrapped__) == ("cube", "Cubes.", cube)
    assert inspect.signature(f) == inspect.signature(cube)


def test_callables_of_every_kind(getkey):
    class Callable:
        def __call__(self, x):
            return x.sin()

        def method(self, x):
            return x.sin()

        @classmethod
        def of_class(cls, x):
            return x.sin()

    class Module(torch.nn.Module):
        def forward(self, x):
            return x.sin()

    x = random_array(getkey, (3,))
    kinds = [
        torch.sin,
        torch.Tensor.sin,
        torch.ops.aten.sin,
        lambda x: x.sin(),
        Callable(),
        Callable().method,
        Callable.of_class,
        Module(),
        torch.nn.Sequential(Module()),
        functools.partial(lambda s, x: getattr(x, s)(), "sin"),
    ]
    for f in kinds:
        assert_trees_equal(jax.jit(torch2jax(f))(x), jnp.sin(x))


@pytest.mark.parametrize(
    "example",
    [torch.ones(3), jnp.ones(3), jax.ShapeDtypeStruct((3,), "float32"), np.ones(3, "float32")],
    ids=lambda x: type(x).__name__,
)
def test_examples_of_every_kind(getkey, example):
    f = torch2jax(lambda x, *, y: x * y, example, example_kw={"y": example})
    for shape in [(3,), (2, 3)]:
        x = random_array(getkey, shape)
        assert_trees_equal(f(x, y=x), x * x)


def test_examples_move_errors_to_the_wrapping():
    with pytest.raises(ValueError, match="cannot infer what `matmul` returns"):
        torch2jax(torch.matmul, torch.ones(2, 3), torch.ones(2, 3))


@pytest.mark.parametrize("enabled", [True, False], ids=["x64", "x32"])
def test_class_labels(getkey, enabled):
    """Torch takes 64-bit labels only, which JAX has with x64 alone."""
    with jax.enable_x64(enabled):
        x, labels = random_array(getkey, (4, 3)), jnp.array([0, 2, 1, 1])
        seen = []

        def loss(x, labels):
            seen.append(labels.dtype)
            return torch.nn.functional.cross_entropy(x, labels)

        def twin(x, labels):
            return -jax.nn.log_softmax(x)[jnp.arange(4), labels].mean()

        f = torch2jax(loss, torch.ones(4, 3), torch.zeros(4, dtype=torch.int64))
        for g in (f, jax.jit(f)):
            assert_trees_equal(g(x, labels), twin(x, labels))
        assert_trees_equal(jax.jit(jax.grad(f))(x, labels), jax.grad(twin)(x, labels))
        batch = jnp.stack([x, x]), jnp.stack([labels, labels])
        assert_trees_equal(jax.vmap(f)(*batch), jax.vmap(twin)(*batch))
        assert set(seen) == {torch.int64}


@pytest.mark.parametrize("enabled", [True, False], ids=["x64", "x32"])
def test_wide_results(enabled):
    with jax.enable_x64(enabled):
        x = jnp.arange(3.0, dtype="float32")
        f = torch2jax(lambda x: (x.double() / 3, x.argsort(), (x + 0j).to(torch.complex128)))
        y = x.astype("float64" if enabled else "float32")
        expected = y / 3, jnp.arange(3), y.astype("complex128" if enabled else "complex64")
        for g in (f, jax.jit(f)):
            assert_trees_equal(g(x), expected)
        gradient = jax.jit(jax.grad(lambda x: f(x)[0].sum().astype("float32")))
        assert_trees_equal(gradient(x), jnp.full(3, 1 / 3, "float32"))


def test_one_function_with_x64_off_and_on():
    f = torch2jax(lambda x: x.argsort())
    x = np.arange(3.0, dtype="float32")
    assert f(x).dtype == jnp.int32
    with jax.enable_x64(True):
        assert f(x).dtype == jnp.int64
    assert f(x).dtype == jnp.int32


DECLARED = {
    "struct": lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype),
    "array": lambda x: x,
    "tensor": lambda x: torch.zeros(x.shape),
    "Size": lambda x: Size(x.shape),
    "tuple": lambda x: tuple(x.shape),
    "list": lambda x: list(x.shape),
}


@pytest.mark.parametrize("declare", DECLARED.values(), ids=DECLARED)
def test_declared_shapes(getkey, declare):
    x = random_array(getkey, (2, 3))
    runs = []

    def f(x):
        runs.append(type(x))
        return x.sin() if x.sum().item() < 1e9 else None

    g = torch2jax(f, output_shapes=declare(x))
    assert_trees_equal(jax.jit(g)(x), jnp.sin(x))
    assert runs == [torch.Tensor], "it runs when the program runs, and at no other time"


def test_declared_trees_and_functions(getkey):
    x = random_array(getkey, (2, 3))

    def f(x, n):
        return {"a": x[:n], "b": (x.sum(), [x.T])}

    trees = [
        {"a": Size((1, 3)), "b": (Size(()), [Size((3, 2))])},
        {"a": (1, 3), "b": (jax.ShapeDtypeStruct((), "float32"), [jnp.zeros((3, 2))])},
    ]
    for declared in [
        *trees,
        lambda x, n: {"a": x.update(shape=(n, 3)), **trees[0], "b": trees[0]["b"]},
    ]:
        g = torch2jax(f, output_shapes=declared)
        assert_trees_equal(g(x, 1), {"a": x[:1], "b": (x.sum(), [x.T])})


def test_a_declaration_with_examples_is_for_their_shapes(getkey):
    f = torch2jax(torch.sin, torch.ones(3), output_shapes=Size((3,)))
    for shape in [(3,), (5,), (2, 2)]:
        x = random_array(getkey, shape)
        assert_trees_equal(f(x), jnp.sin(x))


def test_shapes_change_without_wrapping_again(getkey, recwarn):
    f = torch2jax(lambda x: (x * 2).sum(-1))
    both = jax.jit(lambda x: f(x) + f(x[None])[0])
    for shape in [(3,), (4,), (2, 3)]:
        x = random_array(getkey, shape)
        assert_trees_equal(both(x), 4 * x.sum(-1))
    assert not recwarn.list


def test_depth(getkey):
    x = random_array(getkey, (3,))

    def third(f):
        return scalar(jax.grad(scalar(jax.grad(scalar(jax.grad(scalar(f)))))))

    for depth in range(4):
        f = torch2jax(torch.sin, depth=depth)
        derivatives = [
            f,
            jax.grad(scalar(f)),
            jax.hessian(scalar(f)),
            jax.hessian(jax.grad(scalar(f))),
        ]
        twins = [jnp.sin, jax.grad(scalar(jnp.sin)), jax.hessian(scalar(jnp.sin))]
        twins.append(jax.hessian(jax.grad(scalar(jnp.sin))))
        for order, (g, twin) in enumerate(zip(derivatives, twins, strict=True)):
            if order <= depth:
                assert_trees_equal(jax.jit(jax.vmap(g, axis_size=1, in_axes=None))(x)[0], twin(x))
                assert_trees_equal(g(x), twin(x))
            else:
                with pytest.raises(DepthError):
                    g(x)
    stopped = torch2jax(torch.sin, depth=0)
    gradient = jax.grad(lambda x: (x * stopped(jax.lax.stop_gradient(x))).sum())
    assert_trees_equal(gradient(x), jnp.sin(x))


def test_nondiff_argnums(getkey):
    """Also for what torch could not differentiate."""
    x, y = random_array(getkey, (3,)), random_array(getkey, (3,))
    for argnums in (1, -1, (1,), [1]):
        f = torch2jax(lambda x, y: x * y.floor_divide(0.5) * y, nondiff_argnums=argnums)
        gradients = jax.grad(lambda x, y, f=f: f(x, y).sum(), (0, 1))(x, y)
        assert_trees_equal(gradients, (jnp.floor_divide(y, jnp.float32(0.5)) * y, jnp.zeros(3)))


@pytest.mark.parametrize("mask", [(False, True), [False, {"a": True, "b": True}]], ids=str)
def test_nondiff_mask(getkey, mask):
    x, y = random_array(getkey, (3,)), random_array(getkey, (3,))
    tree = {"a": y, "b": 2 * y}
    f = torch2jax(lambda x, t, *, z: x * t["a"] * t["b"] * z, nondiff_mask=mask)
    actual = jax.grad(lambda x, t, z: f(x, t, z=z).sum(), (0, 1, 2))(x, tree, x)
    twin = lambda x, t, z: (x * t["a"] * t["b"] * z).sum()  # noqa: E731
    gx, _, gz = jax.grad(twin, (0, 1, 2))(x, tree, x)
    assert_trees_equal(actual, (gx, jax.tree.map(jnp.zeros_like, tree), gz), rtol=1e-5)


def test_part_of_an_argument_is_left_out(getkey):
    x, y = random_array(getkey, (3,)), random_array(getkey, (3,))
    f = torch2jax(lambda t: t[0] * t[1], nondiff_mask=((True, False),))
    actual = jax.grad(lambda t: f(t).sum())((x, y))
    assert_trees_equal(actual, (jnp.zeros(3), x))


class Recorded(contextlib.AbstractContextManager):
    """A lock that counts."""

    def __init__(self):
        self.entered = 0
        self.inside = 0

    def __enter__(self):
        self.entered += 1
        self.inside += 1

    def __exit__(self, *exc):
        self.inside -= 1


def test_the_users_lock_is_held_forward_and_backward(getkey):
    x = random_array(getkey, (3,))
    lock, held = Recorded(), []

    class Sin(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            held.append(lock.inside)
            ctx.save_for_backward(x)
            return x.sin()

        @staticmethod
        def backward(ctx, g):
            held.append(lock.inside)
            return ctx.saved_tensors[0].cos() * g

    f = torch2jax(lambda x: Sin.apply(x), output_shapes=x, lock=lock)
    assert_trees_equal(jax.jit(jax.grad(lambda x: f(x).sum()))(x), jnp.cos(x))
    assert set(held) == {1}
    assert len(held) >= 2
    assert lock.entered >= 1
    assert lock.inside == 0


LOCKS = {
    "True": True,
    "False": False,
    "None": None,
    "Lock": threading.Lock(),
    "RLock": threading.RLock(),
}


@pytest.mark.parametrize("lock", LOCKS.values(), ids=LOCKS.keys())
def test_locks_of_every_kind(getkey, lock):
    x = random_array(getkey, (3,))
    f = torch2jax(torch.sin, lock=lock)
    assert_trees_equal(jax.grad(lambda x: f(x).sum())(x), jnp.cos(x))


def test_a_lock_is_released_after_an_error():
    lock = threading.Lock()
    f = torch2jax(lambda x: x @ torch.ones(7), output_shapes=Size(()), lock=lock)
    with pytest.raises(Exception, match="size"):
        jax.block_until_ready(f(jnp.ones(3)))
    assert lock.acquire(blocking=False)


def test_the_second_call_runs_no_python(getkey):
    traces = []

    @jax.jit
    def f(x):
        traces.append(None)
        return torch2jax(torch.sin)(x)

    x = random_array(getkey, (3,))
    for _ in range(3):
        assert_trees_equal(f(x), jnp.sin(x))
    assert len(traces) == 1
    assert f._cache_size() == 1


def test_one_compilation_for_each_shape_outside_of_jit(getkey):
    f = torch2jax(torch.sin)
    x = random_array(getkey, (3,))
    grad = jax.grad(lambda x: f(x).sum())
    jax.block_until_ready((f(x), grad(x)))
    with jax.no_tracing():
        jax.block_until_ready([f(x) for _ in range(3)])


def test_wrapped_twice_traced_once_each(getkey):
    x = random_array(getkey, (3,))
    model = torch.nn.Linear(3, 2)
    traces = []

    def used(f):
        @eqx.filter_jit
        def g(f, x):
            traces.append(None)
            return f(x)

        return [g(f, x) for _ in range(3)]

    first, second = torch2jax(model), torch2jax(model)
    assert_trees_equal(used(first), used(second))
    assert len(traces) == 2


def test_the_function_runs_once_for_each_run_of_the_program(getkey):
    runs = []

    def f(x):
        runs.append(None)
        return x.sin()

    g = torch2jax(f, output_shapes=lambda x: x)
    x = random_array(getkey, (3,))
    for _ in range(3):
        jax.block_until_ready(jax.jit(g)(x))
    assert len(runs) == 3


def test_requires_grad_inside_and_arguments_that_are_not_used(getkey):
    x, y, z = (random_array(getkey, (3,)) for _ in range(3))

    def f(x, y, z):
        x.requires_grad_()
        assert x.requires_grad
        return (x * y).sin()

    g = torch2jax(f)
    both = lambda f: jax.grad(scalar(f), (0, 1, 2))(x, y, z)  # noqa: E731
    assert_trees_equal(both(g), both(lambda x, y, z: jnp.sin(x * y)))
    assert_trees_equal(g(x, y, z), jnp.sin(x * y))


@pytest.mark.filterwarnings("ignore:torch.func.vmap cannot batch")
def test_gradients_inside_of_the_function(getkey):
    """An energy, and the force as its gradient, both differentiated again."""
    x = random_array(getkey, (4,))

    def energy_and_force(x):
        x = x if x.requires_grad else x.requires_grad_()
        energy = (x**4).sum()
        (gradient,) = torch.autograd.grad(energy, x, create_graph=True)
        return energy, -gradient

    def twin(x):
        return (x**4).sum(), -jax.grad(lambda x: (x**4).sum())(x)

    f = torch2jax(energy_and_force)
    everything = lambda f: jax.jit(  # noqa: E731
        lambda x: (f(x), jax.grad(scalar(f))(x), jax.jvp(f, (x,), (x,)), jax.hessian(scalar(f))(x))
    )(x)
    assert_trees_equal(everything(f), everything(twin), rtol=1e-4)


def test_integers_under_differentiation(getkey):
    twin = TWINS["ids"]
    ids, table = twin.args(getkey)
    f = twin.wrapped
    y, pullback = jax.vjp(f, ids, table)
    expected, expected_pullback = jax.vjp(twin.jax, ids, table)
    assert_trees_equal(y, expected)
    cotangents = pullback(jnp.ones_like(y))
    assert cotangents[0].dtype == jax.dtypes.float0
    assert_trees_equal(cotangents[1], expected_pullback(jnp.ones_like(y))[1])
    gradient = eqx.filter_grad(lambda args: f(*args).sum())((ids, table))
    assert gradient[0] is None
    assert_trees_equal(gradient[1], cotangents[1])


INDEXED = {
    "max_pool2d": (
        lambda x: torch.nn.functional.max_pool2d(x, 2, return_indices=True),
        lambda x: x.reshape(1, 2, 2, 2, 2).transpose(0, 1, 3, 2, 4).reshape(1, 2, 2, 4).max(-1),
    ),
    "topk": (lambda x: torch.topk(x, 2), lambda x: jax.lax.top_k(x, 2)[0]),
    "sort": (lambda x: torch.sort(x), lambda x: jnp.sort(x)),
    "median": (lambda x: torch.median(x, -1), lambda x: jnp.sort(x)[..., 1]),
    "max": (lambda x: torch.max(x, -1), lambda x: x.max(-1)),
}


@pytest.mark.parametrize(("f", "twin"), INDEXED.values(), ids=INDEXED)
def test_floats_beside_integers(getkey, f, twin):
    x = random_array(getkey, (1, 4, 4))
    f = torch2jax(f)
    assert_trees_equal(f(x)[0], twin(x))
    actual = jax.grad(lambda x: (f(x)[0] ** 2).sum())(x)
    assert_trees_equal(actual, jax.grad(lambda x: (twin(x) ** 2).sum())(x))
    (value, _), gradient = jax.value_and_grad(lambda x: ((f(x)[0]).sum(), f(x)), has_aux=True)(x)
    assert_trees_equal(value, twin(x).sum())
    assert gradient.shape == x.shape


def test_hidden_inputs_differentiated_twice(getkey):
    x = random_array(getkey, (3,))
    f = torch2jax(lambda x: HiddenCube.apply(x))
    assert_trees_equal(jax.grad(lambda x: f(x).sum())(x), 3 * x**2)
    second = jax.jit(jax.grad(lambda x: jax.grad(lambda x: f(x).sum())(x).sum()))
    assert_trees_equal(second(x), 6 * x, rtol=1e-5)


def test_no_derivative_is_torchs_message(getkey):
    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x**2

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx, g):
            return 2 * ctx.saved_tensors[0] * g

    x = random_array(getkey, (3,))
    f = torch2jax(lambda x: Once.apply(x))
    loss = lambda x: (f(x) + x**3).sum()  # noqa: E731
    assert_trees_equal(jax.grad(loss)(x), 2 * x + 3 * x**2)
    g = torch2jax(lambda x: Once.apply(x) + x**3)
    for derivative in (
        lambda: jax.jvp(g, (x,), (x,)),
        lambda: jax.jvp(jax.grad(lambda x: g(x).sum()), (x,), (x,)),
        lambda: jax.grad(lambda x: jax.grad(lambda x: g(x).sum())(x).sum())(x),
    ):
        with pytest.raises(Exception, match="once_differentiable"):
            jax.block_until_ready(derivative())


def test_no_forward_mode_is_said(getkey):
    class Numpy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return torch.from_numpy(np.square(x.detach().numpy()))

        @staticmethod
        def backward(ctx, g):
            return torch.from_numpy(2 * ctx.saved_tensors[0].detach().numpy() * g.detach().numpy())

    x = random_array(getkey, (3,))
    f = torch2jax(lambda x: Numpy.apply(x), output_shapes=x)
    assert_trees_equal(jax.grad(lambda x: f(x).sum())(x), 2 * x)
    message = (
        "`<lambda>` cannot be differentiated in forward mode: it has no forward derivative in "
        "torch, and its backward is computed outside of autograd (on detached tensors or by "
        "NumPy), so torch cannot differentiate that instead. Use reverse mode (`jax.grad`, "
        "`jax.vjp`, `jax.jacrev`), or give the `torch.autograd.Function` a `jvp`."
    )
    with pytest.raises(Exception, match=re.escape(message)):
        jax.block_until_ready(jax.jvp(f, (x,), (x,)))


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.float8_e4m3fn, torch.bfloat16, torch.uint16, torch.int8]
)
def test_dtypes_go_through_unchanged(dtype):
    bits = torch.randint(
        0, 2 if dtype is torch.bool else 256, (64 * dtype.itemsize,), dtype=torch.uint8
    )
    tensor = bits.view(dtype)
    f = torch2jax(lambda x: (x, x.clone(), x.view(8, 8).T))
    for g in (f, jax.jit(f)):
        expected = tensor, tensor, tensor.view(8, 8).T.contiguous()
        assert_trees_equal(g(t2j(tensor)), expected, exact=True)


def test_out_specs_on_a_dict(getkey):
    mesh = explicit_mesh(4)
    x = random_array(getkey, (8,))
    with jax.set_mesh(mesh):
        f = torch2jax(lambda x: {"a": x, "b": (x + 1, x)}, out_specs={"a": P("x"), "b": P("x")})
        assert_trees_equal(f(put(x, mesh, "x")), {"a": x, "b": (x + 1, x)})


def test_wrapping_what_is_not_callable():
    with pytest.raises(InputError):
        torch2jax(None)
