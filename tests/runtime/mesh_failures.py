"""Torch raises on some of eight devices. Run by `test_failures.py`, in a process of its own."""

import contextlib
import logging
import re
import weakref
from concurrent.futures import ThreadPoolExecutor

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import AxisType, PartitionSpec as P

from eqx_torch import check_errors, EqxTorchError, from_torch, OutputError, ShapeError, torch2jax
from eqx_torch._dtypes import _NAMES

from ..helpers import assert_trees_equal, to_numpy
from ..helpers.meshes import explicit_mesh, put


X = np.arange(8.0, dtype=np.float32)
SUBSETS = [{3}, {0, 5}, set(range(8))]


@pytest.fixture(autouse=True)
def mesh():
    """Eight devices; afterwards no error is pending."""
    check_errors()
    mesh = explicit_mesh(8)
    with jax.set_mesh(mesh):
        yield mesh
    check_errors()


class Trouble:
    """A torch function that does something else than `x * 2` on shards of some values."""

    def __init__(self, instead, shards=frozenset()):
        self.instead = instead
        self.shards = set(shards)

    def __call__(self, x):
        return self.instead(x) if float(x.detach().flatten()[0]) in self.shards else x * 2


def _raise(kind, *args):
    def instead(x):
        raise kind(*args)

    return instead


def _logged(caplog):
    """The devices of which an error was logged; one of them, at least, with the traceback."""
    records = [r for r in caplog.records if r.name == "eqx_torch" and r.levelno == logging.ERROR]
    assert any(r.exc_info for r in records) or not records
    return sorted(
        int(re.search(r"on device cpu:(\d), one of 8", r.getMessage())[1]) for r in records
    )


def _poisoned(values, shards):
    values = np.array(values)
    values[sorted(shards)] = np.nan
    return values


INSTEAD = {
    "exception": (_raise(ValueError, "given up"), ValueError, "given up"),
    "operator": (lambda x: torch.ones(2) @ torch.ones(3), RuntimeError, "inconsistent tensor size"),
    "key error": (_raise(KeyError, "missing"), KeyError, "missing"),
    "exit": (_raise(SystemExit, 3), SystemExit, "3"),
    "shape": (lambda x: torch.ones(5), ShapeError, "returned another shape than was declared"),
    "dtype": (lambda x: x.double(), OutputError, "returned another dtype than was declared"),
    "structure": (lambda x: (x, x), OutputError, "returned another structure than was declared"),
    "set": (lambda x: {3.0}, OutputError, "returned {3.0} of type set"),
    "sparse": (lambda x: x.to_sparse(), OutputError, "returned a tensor of layout"),
}


@pytest.mark.parametrize("how", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize(("instead", "kind", "message"), INSTEAD.values(), ids=INSTEAD)
def test_forward(mesh, caplog, how, instead, kind, message):
    with jax.enable_x64(True):  # else a float64 result stands for float32
        trouble = Trouble(instead, {3})
        x = put(X, mesh, "x")
        f = how(torch2jax(trouble, output_shapes=x, out_specs=P("x")))
        assert_trees_equal(f(x), _poisoned(2 * X, {3}))
        assert _logged(caplog) == [3]
        if not issubclass(kind, EqxTorchError):
            assert "mesh_failures.py" in caplog.text, "the traceback of torch code"
        with pytest.raises(kind, match=message) as info:
            check_errors()
        assert type(info.value) is kind
        (note,) = info.value.__notes__
        assert "on device cpu:3, one of 8, where its outputs were then filled with NaN." in note
        check_errors()
        trouble.shards.clear()
        assert_trees_equal(f(x), 2 * X)


def _around_collectives(f):
    def body(x):
        before = jax.lax.psum(x, "x") - x
        y = f(x) + before
        return y, jax.lax.psum(y, "x")

    return jax.shard_map(body, in_specs=P("x"), out_specs=(P("x"), P()))


@pytest.mark.parametrize("how", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("shards", SUBSETS, ids=str)
def test_between_collectives(mesh, caplog, how, shards):
    trouble = Trouble(_raise(ValueError, "given up"), shards)
    x = put(X, mesh, "x")
    local = torch2jax(trouble, output_shapes=lambda x: x)
    f = how(_around_collectives(local))
    expected = X + X.sum()
    y, total = jax.block_until_ready(f(x))
    assert_trees_equal(y, _poisoned(expected, shards))
    assert_trees_equal(total, np.full(1, np.nan, np.float32))
    assert _logged(caplog) == sorted(shards)
    with pytest.raises(ValueError, match="given up"):
        check_errors()
    trouble.shards.clear()
    assert_trees_equal(f(x), (expected, expected.sum(keepdims=True)), rtol=1e-5)


class Backward(torch.autograd.Function):
    """x * w, whose backward can raise."""

    shards = frozenset()

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        if float(x[0]) in Backward.shards:
            raise ValueError("backward given up")
        return g * w, (g * x).sum()


@pytest.mark.parametrize("how", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("residuals", ["tape", "recompute"])
@pytest.mark.parametrize("shards", SUBSETS, ids=str)
def test_backward(mesh, caplog, monkeypatch, how, residuals, shards):
    """The gradient of `w` is summed over the devices; the next step is right."""
    x, w = put(X, mesh, "x"), put(np.float32(3), mesh)
    f = torch2jax(Backward.apply, output_shapes=x, out_specs=P("x"), residuals=residuals)
    step = how(jax.value_and_grad(lambda x, w: f(x, w).sum(), (0, 1)))
    expected = (3 * X.sum(), (np.full(8, 3, np.float32), X.sum()))
    assert_trees_equal(step(x, w), expected)
    monkeypatch.setattr(Backward, "shards", frozenset(shards))
    value, (dx, dw) = jax.block_until_ready(step(x, w))
    assert_trees_equal(value, expected[0])
    assert_trees_equal(dx, _poisoned(expected[1][0], shards))
    assert_trees_equal(dw, np.float32(np.nan))
    assert _logged(caplog) == sorted(shards)
    with pytest.raises(ValueError, match="backward given up"):
        check_errors()
    monkeypatch.setattr(Backward, "shards", frozenset())
    assert_trees_equal(step(x, w), expected)


@pytest.mark.parametrize("how", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_a_backward_after_a_failed_forward(mesh, caplog, how):
    """It gets the poisoned outputs, and a token that names no graph."""
    trouble = Trouble(_raise(ValueError, "given up"), {3})
    x = put(X, mesh, "x")
    f = torch2jax(lambda x: trouble(x) ** 2, output_shapes=x, out_specs=P("x"))
    gradient = how(jax.grad(lambda x: f(f(x)).sum()))
    result = jax.block_until_ready(gradient(x)) if how is jax.jit else _ignoring(gradient, x)
    if result is not None:
        assert np.isnan(np.asarray(result)[3])
    assert set(_logged(caplog)) == {3}
    trouble.shards.clear()
    _drain()
    expected = jax.grad(lambda x: (4 * (4 * x**2) ** 2).sum())(jnp.asarray(X))
    assert_trees_equal(gradient(x), expected, rtol=1e-5)


def _ignoring(f, x):
    """Eagerly, a later call of the same derivative may already raise."""
    try:
        return jax.block_until_ready(f(x))
    except ValueError:
        return None


def _drain():
    with contextlib.suppress(ValueError):
        check_errors()


def test_the_poison_of_each_dtype(mesh):
    dtypes = [jnp.dtype(name) for name in _NAMES]
    bad = [True]

    def f(x):
        if bad and float(x[0]) == 3:
            raise ValueError("given up")
        return [x.to(getattr(torch, name)) for name in _NAMES]

    with jax.enable_x64(True):
        x = put(X, mesh, "x")
        shapes = [jax.ShapeDtypeStruct((8,), dtype) for dtype in dtypes]
        g = jax.jit(torch2jax(f, output_shapes=shapes, out_specs=P("x")))
        for y in jax.block_until_ready(g(x)):
            value = np.asarray(y)[3]
            if jnp.issubdtype(y.dtype, jnp.inexact):
                assert np.isnan(value.astype(np.complex128)), y.dtype
            elif y.dtype == bool:
                assert not value
            else:
                assert value == jnp.iinfo(y.dtype).min
        with pytest.raises(ValueError, match="given up"):
            check_errors()
        bad.clear()
        for y, dtype in zip(g(x), dtypes, strict=True):
            assert_trees_equal(y, torch.arange(8.0).to(getattr(torch, dtype.name)))


# How much of it is logged


def _tracebacks(caplog):
    return [bool(r.exc_info) for r in caplog.records if r.name == "eqx_torch"]


def test_the_same_error_elsewhere_takes_one_line(mesh, caplog):
    """Each device is named, with its own message; the traceback is logged once while pending."""

    def f(x):
        raise ValueError(f"not {x[0]:g}\nwhich is a long story")

    x = put(X, mesh, "x")
    g = jax.jit(torch2jax(f, output_shapes=x, out_specs=P("x")))
    for steps in (2, 1):
        caplog.clear()
        for _ in range(steps):
            jax.block_until_ready(g(x))
        assert _logged(caplog) == sorted([*range(8)] * steps)
        assert sum(_tracebacks(caplog)) == 1
        (whole,) = [r.getMessage() for r in caplog.records if r.exc_info]
        first = re.search(r"on device (cpu:\d),", whole)[1]
        lines = {r.getMessage() for r in caplog.records if not r.exc_info}
        assert lines >= {
            f"torch raised in `f` on device cpu:{i}, one of 8: ValueError: not {i}. Its traceback "
            f"is that of the error on {first}."
            for i in set(range(8)) - {int(first[-1])}
        }
        with pytest.raises(ValueError, match="which is a long story"):
            check_errors()


OTHERS = {
    "line": lambda i: (_raise(ValueError, "a"), lambda x: int("b"))[i],
    "type": lambda i: _raise((ValueError, TypeError)[i], "given up"),
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_another_error_is_logged_whole(mesh, caplog, other):
    def f(x):
        return other(int(x[0]) % 2)(x)

    x = put(X, mesh, "x")
    jax.block_until_ready(torch2jax(f, output_shapes=x, out_specs=P("x"))(x))
    assert _logged(caplog) == list(range(8))
    assert sum(_tracebacks(caplog)) == 2
    with pytest.raises((ValueError, TypeError)):
        check_errors()


def test_the_same_line_reached_from_another_function_is_logged_whole(mesh, caplog):
    x = put(X, mesh, "x")
    instead = _raise(ValueError, "given up")

    def f(x):
        return instead(x)

    def g(x):
        return f(x)

    programs = [
        jax.jit(torch2jax(h, output_shapes=x, out_specs=P("x"))).lower(x).compile() for h in (f, g)
    ]
    for program in programs:
        jax.block_until_ready(program(x))
    assert _logged(caplog) == sorted([*range(8)] * 2)
    assert sum(_tracebacks(caplog)) == 2
    with pytest.raises(ValueError, match="given up"):
        check_errors()


# Who raises it


@pytest.fixture
def pending(mesh, caplog):
    """An error waits to be raised; the compiled call that caused it, its function and input."""
    trouble = Trouble(_raise(ValueError, "given up"), {3})
    x = put(X, mesh, "x")
    f = torch2jax(trouble, output_shapes=lambda x: x, out_specs=P("x"))
    compiled = jax.jit(f)
    jax.block_until_ready(compiled(x))
    trouble.shards.clear()
    return compiled, f, x


def test_a_call_from_python_raises(pending):
    _, f, x = pending
    with pytest.raises(ValueError, match="given up"):
        f(x)
    assert_trees_equal(f(x), 2 * X)


def test_a_call_that_is_traced_raises(pending):
    _, f, x = pending
    step = jax.jit(lambda x: f(x) + 1)
    with pytest.raises(ValueError, match="given up"):
        step(x)
    assert_trees_equal(step(x), 2 * X + 1)


def test_a_call_of_a_module_raises(mesh):
    model = from_torch(torch.nn.Linear(1, 1), out_specs=P("x"))
    x = put(X[:, None], mesh, "x")
    expected = np.asarray(model(x))
    trouble = Trouble(_raise(ValueError, "given up"), {3})
    jax.block_until_ready(torch2jax(trouble, output_shapes=x, out_specs=P("x"))(x))
    with pytest.raises(ValueError, match="given up"):
        model(x)
    assert_trees_equal(model(x), expected)


def test_a_compiled_program_on_one_device_raises(mesh):
    trouble = Trouble(_raise(ValueError, "given up"), {3})
    with jax.set_mesh(jax.make_mesh((1,), ("one",))):
        single = jax.jit(torch2jax(torch.sin))
        y = jnp.ones(3)
        assert_trees_equal(single(y), jnp.sin(y))
    x = put(X, mesh, "x")
    jax.block_until_ready(jax.jit(torch2jax(trouble, output_shapes=x, out_specs=P("x")))(x))
    with jax.set_mesh(jax.make_mesh((1,), ("one",))):
        with pytest.raises((jax.errors.JaxRuntimeError, ValueError)) as info:
            jax.block_until_ready(single(y))
        assert "an earlier torch call raised on one of several devices" in str(info.value)
        assert "mesh_failures.py" in str(info.value)
        assert "ValueError: given up" in str(info.value)
        assert "Raised by `Trouble` on device cpu:3, one of 8" in str(info.value)
        check_errors()
        assert_trees_equal(single(y), jnp.sin(y))


def test_a_compiled_program_over_several_devices_runs_as_usual(pending, caplog):
    compiled, _, x = pending
    for _ in range(3):
        assert_trees_equal(compiled(x), 2 * X)
    assert _logged(caplog) == [], "none but the one of the call that failed"
    with pytest.raises(ValueError, match="given up"):
        check_errors()


def test_it_is_raised_to_one_of_many(pending):
    """A race of threads for the error has one winner."""

    def ask(_):
        try:
            check_errors()
        except ValueError:
            return 1
        return 0

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(ask, range(64))) == 1


# What else goes on


def test_tensors_of_the_failed_call_are_forgotten(mesh):
    """They lie in XLA's memory, and the traceback would keep them."""
    seen = []

    def f(x):
        if float(x[0]) == 3:
            y = x * 2
            seen.extend([weakref.ref(x), weakref.ref(y)])
            try:
                raise KeyError("inner")
            except KeyError as error:
                raise ValueError("given up") from error
        return x

    x = put(X, mesh, "x")
    jax.block_until_ready(torch2jax(f, output_shapes=x, out_specs=P("x"))(x))
    assert len(seen) == 2
    assert [ref() for ref in seen] == [None, None]
    with pytest.raises(ValueError, match="given up") as info:
        check_errors()
    assert isinstance(info.value.__cause__, KeyError)


@pytest.mark.parametrize("derivative", ["backward", "forward"])
def test_tensors_of_a_failed_derivative_are_forgotten(mesh, derivative):
    seen = []

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(x):
            return x * 2

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.third = bool(inputs[0][0] == 3)

        @staticmethod
        def backward(ctx, g):
            if ctx.third:
                seen.append(weakref.ref(g))
                raise ValueError("given up")
            return g * 2

        @staticmethod
        def jvp(ctx, t):
            if ctx.third:
                seen.append(weakref.ref(t))
                raise ValueError("given up")
            return t * 2

    x = put(X, mesh, "x")
    f = torch2jax(Fails.apply, output_shapes=x, out_specs=P("x"))
    if derivative == "backward":
        out = jax.grad(lambda x: f(x).sum())(x)
    else:
        _, out = jax.jvp(f, (x,), (x,))
    jax.block_until_ready(out)
    assert seen
    assert [ref() for ref in seen] == [None] * len(seen)
    with pytest.raises(ValueError, match="given up"):
        check_errors()


def test_a_log_handler_that_raises(mesh, monkeypatch):
    class Broken(logging.Handler):
        def emit(self, record):
            raise OSError("disk full")

    handler = Broken()
    logging.getLogger("eqx_torch").addHandler(handler)
    try:
        trouble = Trouble(_raise(ValueError, "given up"), {3})
        x = put(X, mesh, "x")
        f = _around_collectives(torch2jax(trouble, output_shapes=lambda x: x))
        y, _ = jax.block_until_ready(jax.jit(f)(x))
    finally:
        logging.getLogger("eqx_torch").removeHandler(handler)
    assert_trees_equal(y, _poisoned(X + X.sum(), {3}))
    with pytest.raises(ValueError, match="given up"):
        check_errors()


class FailingLock:
    """A lock that cannot be taken the third time."""

    def __init__(self):
        self.count = 0

    def __enter__(self):
        self.count += 1
        if self.count == 3:
            raise TimeoutError("no lock")

    def __exit__(self, *error):
        return None


def test_a_lock_that_raises(mesh, caplog):
    x = put(X, mesh, "x")
    f = torch2jax(lambda x: x * 2, output_shapes=lambda x: x, lock=FailingLock())
    y, _ = jax.block_until_ready(jax.jit(_around_collectives(f))(x))
    assert np.isnan(np.asarray(y)).sum() == len(_logged(caplog)) == 1
    with pytest.raises(TimeoutError, match="no lock"):
        check_errors()


def test_a_module_is_whole_after_a_failure(mesh, caplog):
    """The copy of the module that a device borrowed comes back."""
    bad = [True]

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = torch.nn.Linear(1, 1)

        def forward(self, x):
            y = self.inner(x)
            if bad and float(x.detach()[0, 0]) in (2, 3):
                raise ValueError("given up")
            return y

    layer = Layer()
    x = put(X[:, None], mesh, "x")
    model = from_torch(layer, output_shapes=x, out_specs=P("x"))
    step = eqx.filter_jit(eqx.filter_value_and_grad(lambda model, x: model(x).sum()))
    _, grads = step(model, x)
    assert np.isnan(np.asarray(grads.params["inner.weight"])).all()
    assert set(_logged(caplog)) == {2, 3}
    with pytest.raises(ValueError, match="given up"):
        check_errors()
    bad.clear()
    for _ in range(3):
        value, grads = step(model, x)
        assert_trees_equal(value, layer.inner(torch.tensor(X[:, None])).sum(), rtol=1e-4)
        assert_trees_equal(grads.params["inner.weight"], X.sum().reshape(1, 1))
    check_errors()


def test_in_a_scan(mesh, caplog):
    """Each step has a collective, and only the third fails."""
    trouble = Trouble(_raise(ValueError, "given up"), {20.0})  # 5 doubled twice
    x = put(X, mesh, "x")
    f = torch2jax(trouble, output_shapes=lambda x: x)

    def body(x):
        def step(x, _):
            return f(x), jax.lax.psum(x, "x")

        return jax.lax.scan(step, x, None, length=4)

    g = jax.jit(jax.shard_map(body, in_specs=P("x"), out_specs=(P("x"), P())))
    y, sums = jax.block_until_ready(g(x))
    assert_trees_equal(y, _poisoned(16 * X, {5}), rtol=1e-6)
    assert_trees_equal(sums[:3, 0], X.sum() * np.float32([1, 2, 4]))
    assert np.isnan(np.asarray(sums[3])).all()
    assert _logged(caplog) == [5]
    with pytest.raises(ValueError, match="given up"):
        check_errors()
    trouble.shards.clear()
    assert_trees_equal(g(x)[0], 16 * X)


def test_over_auto_axes(caplog):
    """XLA calls torch on every device, with the whole input."""
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
    calls = []

    def f(x):
        calls.append(1)
        if len(calls) == 2:
            raise ValueError("given up")
        return x * 2

    with jax.set_mesh(mesh):
        x = jax.device_put(X, jax.NamedSharding(mesh, P()))
        with pytest.warns(UserWarning, match="do not prove that they are replicated"):
            jax.block_until_ready(jax.jit(torch2jax(f, output_shapes=x))(x))
    assert len(calls) == 4
    assert sum(r.name == "eqx_torch" for r in caplog.records) == 1
    with pytest.raises(ValueError, match="given up"):
        check_errors()


def test_errors_of_this_package_are_themselves(mesh):
    def f(x):
        raise EqxTorchError("mine")

    x = put(X, mesh, "x")
    jax.block_until_ready(torch2jax(f, output_shapes=x, out_specs=P("x"))(x))
    with pytest.raises(EqxTorchError) as info:
        check_errors()
    assert str(info.value) == "mine"
    assert to_numpy(x).sum() == X.sum()
