"""Graphs that are found by the address of their token, as on GPUs, here on CPUs.

Under "check" each number that is found so is compared with the token; under "audit" all is as on a
GPU, where nobody may look at the token.
"""

import contextlib
import gc
import threading

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
import torch
from jax.sharding import AxisType

from eqx_torch import check_errors, EqxTorchError, from_torch, torch2jax
from eqx_torch._call import pairs
from eqx_torch._call.pairs import LEDGER, PAIRS
from eqx_torch._program import TAPES

from ..helpers import assert_trees_equal


X = jnp.linspace(0.1, 1.0, 4)


def reference(x):
    return jnp.sin(x * x)


@pytest.fixture(params=["check", "audit"])
def mode(request, monkeypatch):
    """How graphs are found; none is left over."""
    monkeypatch.setenv(pairs.VARIABLE, request.param)
    TAPES.clear()
    LEDGER.clear()
    PAIRS.reset()
    yield request.param
    PAIRS.reset()
    assert len(LEDGER) == len(TAPES) == 0


@pytest.fixture
def audited(monkeypatch):
    """As on a GPU, with nothing found yet."""
    monkeypatch.setenv(pairs.VARIABLE, "audit")
    TAPES.clear()
    PAIRS.reset()
    yield
    PAIRS.reset()
    LEDGER.clear()
    TAPES.clear()


def counted():
    """A function of torch's, and a list that has an item for each time that it was called."""
    calls = []

    def f(x):
        calls.append(None)
        return (x * x).sin()

    f.calls = calls
    return f


def layers(f, x, wrap=lambda f: f):
    for _ in range(4):
        x = wrap(f)(x)
    return x.sum()


def step(f):
    return lambda x: x - 0.1 * jax.grad(lambda x: layers(f, x))(x)


def scan_over_layers(f):
    return lambda x: jax.lax.scan(lambda c, _: (f(c), None), x, None, 4)[0].sum()


def hessian_vector(f):
    return jax.grad(lambda x: (jax.grad(lambda x: f(x).sum())(x) ** 2).sum())


def pulled_twice(f):
    def run(x):
        y, pull = jax.vjp(f, x)
        return pull(y)[0] + pull(2 * y)[0]

    return run


def by_pullback(f):
    def run(x):
        y, pull = jax.vjp(f, x)
        return pull(y)[0]

    return run


# What is differentiated, and how many of its backwards are paired, missed and unproven.
CASES = {
    "layers": (lambda f: jax.jit(jax.grad(lambda x: layers(f, x))), (4, 0, 0)),
    "remat": (lambda f: jax.jit(jax.grad(jax.checkpoint(lambda x: layers(f, x)))), (4, 0, 0)),
    "remat of each": (
        lambda f: jax.jit(jax.grad(lambda x: layers(f, x, jax.checkpoint))),
        (4, 0, 0),
    ),
    "steps in a scan": (
        lambda f: jax.jit(lambda x: jax.lax.scan(lambda c, _: (step(f)(c), 0), x, None, 3)[0]),
        (12, 0, 0),
    ),
    "a jitted step twice": (
        lambda f: (lambda s: jax.jit(lambda x: s(s(x))))(jax.jit(step(f))),
        (8, 0, 0),
    ),
    "donated": (lambda f: lambda x: jax.jit(step(f), donate_argnums=0)(x + 0), (4, 0, 0)),
    "inner jit": (lambda f: jax.jit(jax.grad(lambda x: layers(f, x, jax.jit))), (4, 0, 0)),
    "batch": (lambda f: jax.jit(jax.grad(lambda x: jax.vmap(f)(x).sum())), (1, 0, 0)),
    "second order": (lambda f: jax.jit(hessian_vector(f)), (2, 0, 0)),
    "outside of jit": (by_pullback, (1, 0, 0)),
    "layers outside of jit": (lambda f: jax.grad(lambda x: layers(f, x)), (4, 0, 0)),
    "pulled twice outside of jit": (pulled_twice, (1, 1, 0)),
    "pulled twice": (lambda f: jax.jit(pulled_twice(f)), (1, 1, 0)),
    "layers in a scan": (lambda f: jax.jit(jax.grad(scan_over_layers(f))), (0, 0, 4)),
    "branches": (
        lambda f: jax.jit(jax.grad(lambda x: jax.lax.cond(x[0] < 9, f, jnp.cos, x).sum())),
        (0, 0, 1),
    ),
}


@pytest.mark.covering
@pytest.mark.parametrize(("derivative", "expected"), CASES.values(), ids=CASES)
def test_backwards_find_their_graphs_or_compute_the_forward_again(mode, derivative, expected):
    f = counted()
    actual = derivative(torch2jax(f))
    wanted = derivative(reference)(X)
    assert_trees_equal(jax.block_until_ready(actual(X)), wanted, rtol=1e-4, atol=1e-5)
    PAIRS.counts.clear()
    for i in range(3):
        wanted = derivative(reference)(X + i)
        assert_trees_equal(jax.block_until_ready(actual(X + i)), wanted, rtol=1e-4, atol=1e-5)
    counts = tuple(PAIRS.counts[name] // 3 for name in ("paired", "missed", "unproven"))
    assert counts == expected


def test_a_forward_is_computed_once(mode):
    f = counted()
    gradient = jax.jit(jax.grad(lambda x: layers(torch2jax(f), x)))
    for _ in range(3):
        jax.block_until_ready(gradient(X))
    f.calls.clear()
    jax.block_until_ready(gradient(X))
    assert len(f.calls) == 4


@pytest.mark.parametrize("inside", [False, True], ids=["explicit axes", "shard_map"])
def test_on_meshes(mode, inside):
    mesh = jax.make_mesh((2,), ("a",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])
    with jax.set_mesh(mesh):
        x = jax.device_put(X, jax.P("a"))
        if inside:
            gradient = jax.grad(lambda x: layers(torch2jax(counted()), x))
            gradient = jax.shard_map(gradient, in_specs=jax.P("a"), out_specs=jax.P("a"))
        else:
            f = torch2jax(counted(), out_specs=jax.P("a"))
            gradient = jax.grad(lambda x: layers(f, x))
        gradient = jax.jit(gradient)
        jax.block_until_ready(gradient(x))
        PAIRS.counts.clear()
        actual = jax.block_until_ready(gradient(x))
    assert_trees_equal(
        jax.device_get(actual), jax.grad(lambda x: layers(reference, x))(X), rtol=1e-4
    )
    assert PAIRS.counts == {"paired": 8}


def test_a_module_with_state_and_keys(mode):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout())
    model, state = eqx.nn.make_with_state(from_torch)(net)

    def loss(model, state, key):
        y, state = model(jnp.stack([X, 2 * X, X**2]), state=state, key=key)
        return (y**2).sum(), state

    gradient = eqx.filter_jit(eqx.filter_grad(loss, has_aux=True))
    first = gradient(model, state, jax.random.key(1))[0]
    PAIRS.counts.clear()
    again = gradient(model, state, jax.random.key(1))[0]
    assert_trees_equal(first, again, rtol=1e-5, atol=1e-6)
    assert PAIRS.counts == {"paired": 1}


def test_threads_with_one_executable(mode):
    gradient = jax.jit(jax.grad(lambda x: layers(torch2jax(counted()), x)))
    expected = jax.jit(jax.grad(lambda x: layers(reference, x)))
    jax.block_until_ready(gradient(X))
    PAIRS.counts.clear()
    results = {}

    def run(i):
        results[i] = [jax.block_until_ready(gradient(X + i + n / 64)) for n in range(20)]

    threads = [threading.Thread(target=run, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, found in results.items():
        for n, y in enumerate(found):
            assert_trees_equal(y, expected(X + i + n / 64), rtol=1e-3, atol=1e-4)
    assert PAIRS.counts == {"paired": 3 * 20 * 4}


def forge(monkeypatch):
    """Pullbacks are given the oldest graph there is."""

    def take(place):
        oldest = next(iter(LEDGER._noted), None)
        noted = LEDGER._noted.pop(oldest, None)
        return 0 if noted is None else noted.number

    monkeypatch.setattr(LEDGER, "take", take)
    monkeypatch.setattr(PAIRS, "look", lambda *_: None)  # as if no count had arrived yet


def outstanding_graphs():
    """A gradient by two graphs that have copies of their inputs: only tokens tell them apart."""

    def loss(f):
        return lambda x: (f(x) * f(3 * x) ** 2).sum()

    gradient = jax.jit(jax.grad(loss(torch2jax(counted()))))
    expected = jax.grad(loss(reference))(X)
    for _ in range(2):
        assert_trees_equal(jax.block_until_ready(gradient(X)), expected, rtol=1e-4)
        for site in TAPES._sites.values():
            site.copies = True
    return gradient, expected


def test_of_a_wrong_graph_there_is_nan_and_a_report(audited, monkeypatch, caplog):
    gradient, expected = outstanding_graphs()
    with monkeypatch.context() as patch:
        forge(patch)
        assert jnp.isnan(jax.block_until_ready(gradient(X))).all()
    with pytest.raises(EqxTorchError, match="the autograd graph of another call"):
        check_errors()
    assert PAIRS.ended
    assert "Please report this" in caplog.text
    check_errors()
    assert len(LEDGER) == len(TAPES) == 0
    PAIRS.counts.clear()
    assert_trees_equal(jax.block_until_ready(gradient(X)), expected, rtol=1e-4)
    assert PAIRS.counts == {"unproven": 2}


def test_a_count_that_has_arrived_is_raised_at_the_next_call(audited, monkeypatch):
    gradient, _ = outstanding_graphs()
    look = PAIRS.look
    forge(monkeypatch)
    monkeypatch.setattr(PAIRS, "look", look)
    with pytest.raises(Exception, match="the autograd graph of another call"):
        jax.block_until_ready(gradient(X))
    assert PAIRS.ended


def test_but_for_the_audit_it_would_be_wrong(audited, monkeypatch):
    """That of the test before can fail."""
    gradient, expected = outstanding_graphs()

    def write(self, outputs, values, tokens, numbers, wrong):
        for output, value in zip(outputs, values, strict=False):
            output.copy_(value)

    monkeypatch.setattr(pairs._Run, "_write_audited", write)
    forge(monkeypatch)
    actual = jax.block_until_ready(gradient(X))
    assert jnp.isfinite(actual).all()
    assert not jnp.allclose(actual, expected)


def test_of_a_wrong_second_order_graph_too(audited, monkeypatch):
    """The graph that extends a wrong one has a token that says so."""
    hvp = jax.jit(lambda x: hessian_vector(lambda x: layers(torch2jax(counted()), x))(x))
    jax.block_until_ready(hvp(X))
    jax.block_until_ready(hvp(X))
    with monkeypatch.context() as patch:
        forge(patch)
        assert jnp.isnan(jax.block_until_ready(hvp(X))).all()
    with pytest.raises(EqxTorchError, match="the autograd graph of another call"):
        check_errors()


def test_in_check_mode_a_wrong_graph_is_an_error(monkeypatch):
    monkeypatch.setenv(pairs.VARIABLE, "check")
    gradient, _ = outstanding_graphs()
    forge(monkeypatch)
    with pytest.raises(Exception, match=r"graph \d+ for token \d+"):
        jax.block_until_ready(gradient(X))
    LEDGER.clear()
    TAPES.clear()


@pytest.fixture
def unfinished():
    """A gradient that is left between its forwards and its backwards, and leaves a graph behind."""
    failing = []

    def fail(x):
        if failing:
            raise RuntimeError("on purpose")
        return x.cos()

    f, g = torch2jax(counted()), torch2jax(fail, output_shapes=X)
    gradient = jax.jit(jax.grad(lambda x: g(f(x)).sum()))
    jax.block_until_ready(gradient(X))
    failing.append(None)
    with contextlib.suppress(Exception):
        jax.block_until_ready(gradient(X))
    return [gradient, f, g]


@pytest.mark.parametrize("end", ["the executable", "the caches", "neither"])
def test_no_graph_outlives_its_executable(audited, unfinished, end):
    assert (len(LEDGER), len(TAPES)) == (1, 1)
    if end == "the executable":
        function = unfinished.pop(0)
        del function
    elif end == "the caches":
        jax.clear_caches()
    gc.collect()
    left = int(end == "neither")
    assert (len(LEDGER), len(TAPES)) == (left, left)


def test_outside_of_jit_a_graph_dies_with_its_token(mode):
    f = torch2jax(counted())
    for _ in range(3):
        y, pull = jax.vjp(f, X)
        jax.block_until_ready(y)
    assert len(TAPES) == len(LEDGER) == 1
    copied = jax.tree.map(lambda x: x + 0, pull)
    del pull, y
    gc.collect()
    assert len(TAPES) == len(LEDGER) == 0
    PAIRS.counts.clear()
    assert_trees_equal(copied(X)[0], jax.vjp(reference, X)[1](X)[0], rtol=1e-4)
    assert PAIRS.counts == {"unproven": 1}


def test_without_memory_for_a_graph_there_is_none(mode):
    full = []

    def f(x):
        if full and x.requires_grad:
            full.clear()
            raise torch.OutOfMemoryError("on purpose")
        return (x * x).sin()

    gradient = jax.jit(jax.grad(lambda x: torch2jax(f, output_shapes=X)(x).sum()))
    expected = jax.grad(lambda x: reference(x).sum())(X)
    for filled in ([], [None], []):
        full[:] = filled
        assert_trees_equal(jax.block_until_ready(gradient(X)), expected, rtol=1e-4)
    assert full == []


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "complex64"])
def test_results_are_the_same_bits(dtype, monkeypatch):
    x = X.astype(dtype)

    def pulled(mode):
        monkeypatch.setenv(pairs.VARIABLE, mode)
        f = torch2jax(lambda x: (x * x).sin())
        return jax.block_until_ready(jax.jit(by_pullback(f))(x))

    assert_trees_equal(pulled("off"), pulled("audit"))
