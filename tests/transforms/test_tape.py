"""The graphs that forwards keep for their backwards."""

import contextlib
import copy
import gc
import pickle
import threading

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
import torch
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P
from torch.utils.checkpoint import checkpoint

from eqx_torch import from_torch, stack_modules, torch2jax
from eqx_torch._program import EXCLUSIVE, TAPES

from ..helpers import assert_trees_equal
from ..helpers.twins import random_array


MODES = {
    "recompute": ("recompute", None),
    "tape": ("tape", None),
    "tape of capacity 1": ("tape", 1),
    "tape of capacity 0": ("tape", 0),
}
POLICIES = jax.checkpoint_policies
REMATS = {
    "none": lambda f: f,
    "nothing_saveable": lambda f: jax.checkpoint(f, policy=POLICIES.nothing_saveable),
    "dots_saveable": lambda f: jax.checkpoint(f, policy=POLICIES.dots_saveable),
    "everything_saveable": lambda f: jax.checkpoint(f, policy=POLICIES.everything_saveable),
    "names": lambda f: jax.checkpoint(
        lambda w, x: checkpoint_name(f(w, x), "y") / 2,
        policy=POLICIES.save_only_these_names("y"),
    ),
    "nested": lambda f: jax.checkpoint(lambda w, x: jax.checkpoint(f)(w, f(w, x))),
    "saved results of computed inputs": lambda f: jax.checkpoint(
        lambda w, x: f(jnp.sin(w), x), policy=lambda p, *_, **__: p.name == "torch_call"
    ),
}
THREADS = 4

# torch warns of reentrant checkpoints whose inputs need no gradient, as in every plain forward.
pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
few_modes = pytest.mark.parametrize(
    "residuals", [MODES["tape"], MODES["tape of capacity 1"]], ids=["tape", "one"], indirect=True
)


class Hiding(torch.autograd.Function):
    """Keeps its inputs where autograd does not see them."""

    @staticmethod
    def forward(ctx, w, x):
        ctx.w, ctx.x = w, x
        return (x @ w).tanh()

    @staticmethod
    def backward(ctx, g):
        g = g * (1 - (ctx.x @ ctx.w).tanh() ** 2)
        return ctx.x.T @ g, g @ ctx.w.T


def _writing(w, x):
    w.mul_(1.0)
    return (x.clone().mul_(2) @ w).div_(2).tanh_()


def _viewing(w, x):
    return (x.view_as(x) @ w).tanh()[:]


def _checkpointing(reentrant):
    return lambda w, x: checkpoint(lambda w, x: (x @ w).tanh(), w, x, use_reentrant=reentrant)


FUNCTIONS = {
    "plain": lambda w, x: (x @ w).tanh(),
    "hiding": Hiding.apply,
    "writing": _writing,
    "viewing": _viewing,
    "checkpoint": _checkpointing(False),
    "reentrant checkpoint": _checkpointing(True),
}


def _jax(w, x):
    return jnp.tanh(x @ w)


@pytest.fixture(params=MODES.values(), ids=MODES)
def residuals(request, monkeypatch):
    """How the backward gets at its graph; whatever it is, none is left over."""
    mode, capacity = request.param
    TAPES.clear()
    if capacity is not None:
        monkeypatch.setattr(TAPES, "last_limit", capacity)
    yield mode
    TAPES.clear()


@pytest.fixture(params=FUNCTIONS.values(), ids=FUNCTIONS)
def layer(request, residuals):
    return torch2jax(request.param, residuals=residuals)


@pytest.fixture
def plain(residuals):
    return torch2jax(FUNCTIONS["plain"], residuals=residuals)


def _close(actual, expected):
    assert_trees_equal(actual, expected, rtol=1e-4, atol=1e-5)


def _arguments(getkey):
    return random_array(getkey, (4, 4)), random_array(getkey, (3, 4))


def _in_threads(function):
    results = [None] * THREADS

    def run(i):
        results[i] = function(i)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.covering
def test_pullbacks_in_any_order_and_again(getkey, layer):
    w, x = _arguments(getkey)
    points = [(w * (i + 1) / 12, x) for i in range(12)]
    pulls = [jax.vjp(layer, *point)[1] for point in points]
    jax_pulls = [jax.vjp(_jax, *point)[1] for point in points]
    for i in (5, 11, 0, 5, 3, 10, 0):
        _close(pulls[i](x), jax_pulls[i](x))


def test_pullbacks_in_other_threads(getkey, plain):
    w, x = _arguments(getkey)
    pulls = [jax.vjp(plain, w * i, x)[1] for i in range(THREADS)]
    for pick in (lambda i: i, lambda i: 0):
        actual = _in_threads(lambda i, pick=pick: pulls[pick(i)](x))
        _close(actual, [jax.vjp(_jax, w * pick(i), x)[1](x) for i in range(THREADS)])


@pytest.mark.covering(2)
def test_a_batch_of_cotangents(getkey, plain):
    w, x = _arguments(getkey)
    us = random_array(getkey, (5, 3, 4))
    pull, jax_pull = jax.vjp(plain, w, x)[1], jax.vjp(_jax, w, x)[1]
    _close(jax.vmap(pull)(us), jax.vmap(jax_pull)(us))
    _close(pull(x), jax_pull(x))


@few_modes
def test_linear_maps(getkey, plain):
    w, x = _arguments(getkey)

    def everything(f):
        y, push = jax.linearize(f, w, x)
        pull = jax.linear_transpose(push, w, x)
        return push(w, x), pull(y), push(x.T @ x, x), pull(2 * y), jax.jvp(f, (w, x), (w, x))

    _close(everything(plain), everything(_jax))


@few_modes
def test_derivatives_of_pullbacks(getkey, plain):
    w, x = _arguments(getkey)

    def everything(f):
        def energy(w, x, u):
            return sum((a**2).sum() for a in jax.vjp(f, w, x)[1](u))

        def push(w, x, u):
            return jax.jvp(lambda u: jax.vjp(f, w, x)[1](u), (u,), (2 * u,))

        gradient = jax.grad(energy, (0, 1, 2))
        batched = jax.vmap(gradient, (None, 0, 0))
        return gradient(w, x, x), push(w, x, x), batched(w, x[None], x[None])

    _close(everything(plain), everything(_jax))
    _close(jax.jit(lambda: everything(plain))(), everything(_jax))


@few_modes
@pytest.mark.parametrize("remat", REMATS.values(), ids=REMATS)
@pytest.mark.covering(3)
def test_scans_over_layers_and_over_time(getkey, plain, remat):
    ws, x = random_array(getkey, (12, 4, 4)) / 4, random_array(getkey, (3, 4))

    def gradients(f):
        def loss(ws, x):
            step = remat(f)
            x = jax.lax.scan(lambda x, w: (step(w, x), None), x, ws)[0]
            x = jax.lax.scan(lambda x, _: (step(ws[0], x) + f(ws[1], x), None), x, length=3)[0]
            return (step(ws[2], x) ** 2).sum()

        return jax.jit(jax.grad(loss, (0, 1)))

    actual, expected = gradients(plain), gradients(_jax)
    for scale in (0.5, 1.0):  # the first steps teach how many graphs there are
        _close(actual(scale * ws, x), expected(scale * ws, x))
    assert len(TAPES) == 0


@few_modes
@pytest.mark.covering(3)
def test_hidden_inputs_in_a_scan(getkey, layer):
    ws, x = random_array(getkey, (6, 4, 4)) / 3, random_array(getkey, (3, 4))

    def gradients(f):
        def loss(ws, x):
            return (jax.lax.scan(lambda x, w: (f(w, x), None), x, ws)[0] ** 2).sum()

        return jax.jit(jax.grad(loss, (0, 1)))

    actual, expected = gradients(layer), gradients(_jax)
    for scale in (0.5, 1.0, 1.5):
        _close(actual(scale * ws, x), expected(scale * ws, x))


@few_modes
def test_branches(getkey, plain):
    w, x = _arguments(getkey)

    def gradients(f):
        def loss(w, x, p):
            return (jax.lax.cond(p, f, lambda w, x: 2 * x, w, x) ** 2).sum()

        return jax.jit(jax.grad(loss, (0, 1)))

    for p in (True, False, True):
        _close(gradients(plain)(w, x, p), gradients(_jax)(w, x, p))


@few_modes
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.covering
def test_batched_branches_on_shards(getkey, plain, check_vma):
    w, x = random_array(getkey, (4, 4)), random_array(getkey, (8, 3, 4))

    def gradients(f):
        def loss(w, x):
            return (jax.lax.cond(w[0, 0] > -9, f, lambda w, x: 2 * x, w, x) ** 2).sum()

        batched = jax.vmap(jax.grad(loss, (0, 1)), (None, 0))
        specs = (P(), P("b"))
        out = (P("b"), P("b"))
        return jax.jit(jax.shard_map(batched, in_specs=specs, out_specs=out, check_vma=check_vma))

    with jax.set_mesh(jax.make_mesh((8,), ("b",))):
        w, x = jax.device_put(w, P()), jax.device_put(x, P("b"))
        _close(gradients(plain)(w, x), gradients(_jax)(w, x))


def test_threads_share_a_jitted_gradient(getkey, plain):
    w, x = _arguments(getkey)
    actual = jax.jit(jax.grad(lambda w: (plain(w, x) ** 2).sum()))
    expected = jax.grad(lambda w: (_jax(w, x) ** 2).sum())
    results = _in_threads(lambda i: [actual(w * i) for _ in range(5)])
    _close(results, [[expected(w * i)] * 5 for i in range(THREADS)])


@pytest.mark.covering(2)
def test_caches_cleared_before_the_backward(getkey, plain):
    w, x = _arguments(getkey)
    y, pull = jax.vjp(plain, w, x)
    jax.block_until_ready(y)
    jax.clear_caches()
    assert len(TAPES) == 0
    _close(pull(x), jax.vjp(_jax, w, x)[1](x))


@pytest.mark.parametrize(("bound", "kept"), [(1, 1), (9_000, 2), (10**9, 4)])
def test_the_graphs_of_a_device_have_a_bound(monkeypatch, bound, kept):
    """The newest is kept in any case, and those of other devices do not count."""
    TAPES.clear()
    monkeypatch.setattr(TAPES, "_memory", lambda device: {"cpu": bound}[device.type])
    x = jnp.ones(1000)
    functions = [torch2jax(lambda x, i=i: (x * i).exp(), output_shapes=x) for i in range(4)]
    pulls = [jax.block_until_ready(jax.vjp(f, x))[1] for f in functions]
    assert len(TAPES) == kept
    for i, pull in enumerate(pulls):
        assert_trees_equal(pull(x)[0], i * jnp.exp(i * x), rtol=1e-5)
    assert len(TAPES) == 0
    jax.block_until_ready(jax.vjp(functions[0], x)[0])
    TAPES.clear_device(torch.device("cuda", 0))
    assert len(TAPES) == 1
    TAPES.clear_device(torch.device("cpu"))
    assert len(TAPES) == 0


@few_modes
@pytest.mark.parametrize("times", [0, 1, 3])
@pytest.mark.covering
def test_few_graphs_of_dropped_pullbacks_are_kept(getkey, plain, times):
    """However often others were called: a graph used up is no reason to keep more of them."""
    w, x = _arguments(getkey)
    for _ in range(12):
        pull = jax.vjp(plain, w, x)[1]
        for _ in range(times):
            pull(x)
    for _ in range(40):
        jax.block_until_ready(jax.vjp(plain, w, x)[0])
    assert len(TAPES) <= 8


def test_checkpointed_layers_run_once_in_the_forward(getkey):
    runs = []

    def f(x):
        runs.append(None)
        return x.sin().cos()

    wrapped = torch2jax(lambda x: checkpoint(f, x, use_reentrant=False), output_shapes=lambda x: x)
    jax.block_until_ready(jax.vjp(wrapped, random_array(getkey, (3,)))[0])
    assert len(runs) == 1


class Layer(torch.nn.Module):
    def __init__(self, reentrant=None):
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(4, 4)
        self.dropout = torch.nn.Dropout(0.5)
        self.reentrant = reentrant

    def compute(self, x):
        return self.dropout(torch.tanh(self.linear(x))) * x

    def forward(self, x):
        if self.reentrant is None:
            return self.compute(x)
        return checkpoint(self.compute, x, use_reentrant=self.reentrant)


def _gradients(model, x, key):
    @eqx.filter_jit
    @eqx.filter_grad
    def gradient(model_and_x):
        model, x = model_and_x
        return (model(x, key=key) ** 2).sum()

    model, x = gradient((model, x))
    return model.params, x


@few_modes
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.covering
def test_checkpointed_layers_draw_the_same_again(getkey, residuals, reentrant, sharded):
    out_specs = P("b") if sharded else None
    actual = from_torch(Layer(reentrant), residuals=residuals, out_specs=out_specs)
    expected = from_torch(Layer(), residuals="recompute", out_specs=out_specs)
    x = random_array(getkey, (64, 4))
    with jax.set_mesh(jax.make_mesh((8,), ("b",))) if sharded else contextlib.nullcontext():
        if sharded:
            x = jax.device_put(x, P("b"))
            actual, expected = (
                eqx.tree_at(lambda m: m.params, m, jax.device_put(m.params, P()))
                for m in (actual, expected)
            )
        for key in jax.random.split(getkey(), 2):
            _close(_gradients(actual, x, key), _gradients(expected, x, key))


@few_modes
def test_pullbacks_of_modules_with_keys(getkey, residuals):
    model = from_torch(Layer(False), residuals=residuals)
    reference = from_torch(Layer(), residuals="recompute")
    x, keys = random_array(getkey, (3, 4)), jax.random.split(getkey(), 10)
    pulls = [jax.vjp(lambda x, k=k: model(x, key=k), x)[1] for k in keys]
    for i in (3, 9, 0, 3):
        expected = jax.vjp(lambda x: reference(x, key=keys[i]), x)[1]  # noqa: B023
        _close(pulls[i](x), expected(x))


@few_modes
def test_scan_over_stacked_modules_with_keys(getkey, residuals):
    modules = [from_torch(Layer(), residuals=residuals) for _ in range(10)]
    arrays, static = eqx.partition(stack_modules(modules), eqx.is_array)
    x, keys = random_array(getkey, (3, 4)), jax.random.split(getkey(), 10)

    def step(x, layer):
        return eqx.combine(layer[0], static)(x, key=layer[1]) + x, None

    @jax.jit
    @jax.grad
    def scanned(arrays):
        return (jax.lax.scan(step, x, (arrays, keys))[0] ** 2).sum()

    def unrolled(arrays):
        y = x
        for i in range(10):
            y, _ = step(y, (jax.tree.map(lambda a, i=i: a[i], arrays), keys[i]))
        return (y**2).sum()

    expected = jax.grad(unrolled)(arrays)
    for _ in range(3):
        _close(scanned(arrays).params, expected.params)


class Failing(torch.autograd.Function):
    where = None

    @staticmethod
    def forward(ctx, x):
        if Failing.where == "forward":
            raise ValueError("told to fail")
        return x * 2

    @staticmethod
    def backward(ctx, g):
        if Failing.where == "backward":
            raise ValueError("told to fail")
        return g * 2


class FailingLayer(Layer):
    def forward(self, x):
        return Failing.apply(super().forward(x))


@few_modes
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.covering
def test_errors_leave_nothing_behind(getkey, residuals, monkeypatch, where):
    model = from_torch(FailingLayer(), residuals=residuals)
    x, key = random_array(getkey, (3, 4)), getkey()
    expected = _gradients(model, x, key)
    for _ in range(3):
        monkeypatch.setattr(Failing, "where", where)
        with pytest.raises(Exception, match="told to fail"):
            jax.block_until_ready(_gradients(model, x, key))
        monkeypatch.setattr(Failing, "where", None)
        _close(_gradients(model, x, key), expected)
    assert len(TAPES) == 0
    assert all(_in_threads(lambda _: EXCLUSIVE.acquire(timeout=9) and not EXCLUSIVE.release()))


@few_modes
def test_modules_go_back_to_their_pool(getkey, residuals):
    model = from_torch(torch.nn.Linear(4, 4), residuals=residuals)
    x = random_array(getkey, (3, 4))
    pool = model.core.blueprint.pool(torch.device("cpu"))
    for _ in range(20):
        pull = jax.vjp(model, x)[1]
        pull(x)
        jax.block_until_ready(pull(x))
    assert len(pool._free) == 1
    for _ in range(20):
        jax.block_until_ready(jax.vjp(model, x)[0])
    TAPES.clear()
    gc.collect()
    assert len(pool._free) <= 9


COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda m: pickle.loads(pickle.dumps(m))}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_copies_of_models(getkey, copied):
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.ReLU())
    model, state = eqx.nn.make_with_state(from_torch)(module)
    x = random_array(getkey, (3, 4))
    leaves, structure = jax.tree.flatten(state)
    expected, _ = model(x, state=jax.tree.unflatten(structure, leaves))
    new = copied(model)
    assert jax.tree.structure(new) == jax.tree.structure(model)
    actual, _ = new(x, state=jax.tree.unflatten(structure, leaves))
    assert_trees_equal(actual, expected, exact=True)
