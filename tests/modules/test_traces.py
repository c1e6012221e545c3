"""What a forward leaves on its module: nothing that a later call would see, and not in silence."""

import functools
import random
import weakref

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from jax.sharding import PartitionSpec as P
from torch.nn.utils import prune

from eqx_torch import from_torch

from ..helpers import assert_trees_equal


X = np.arange(1.0, 7.0, dtype=np.float32).reshape(2, 3)


class Inverse(torch.nn.Module):
    """Keeps what it computed from its parameter at the first call."""

    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(2 * torch.eye(3) + 0.1 * torch.ones(3, 3))

    def inverse(self):
        return torch.linalg.inv(self.w)

    def forward(self, x):
        return x @ self.inverse()


class OnItself(Inverse):
    def forward(self, x):
        if not hasattr(self, "kept"):
            self.kept = self.inverse()
        return x @ self.kept


class InADict(Inverse):
    def __init__(self):
        super().__init__()
        self.kept = {"by mode": {}}

    def forward(self, x):
        return x @ self.kept["by mode"].setdefault(self.training, self.inverse())


class InAList(Inverse):
    def __init__(self):
        super().__init__()
        self.kept = []

    def forward(self, x):
        self.kept = self.kept or [self.inverse()]
        return x @ self.kept[0]


class InAVariable(Inverse):
    def __init__(self):
        super().__init__()
        kept = None

        def get():
            nonlocal kept
            if kept is None:
                kept = self.inverse()
            return kept

        self.get = get

    def forward(self, x):
        return x @ self.get()


class InACachedProperty(Inverse):
    kept = functools.cached_property(Inverse.inverse)

    def forward(self, x):
        return x @ self.kept


class InACachedMethod(Inverse):
    inverse = functools.lru_cache(Inverse.inverse)


class InAChild(Inverse):
    def __init__(self):
        super().__init__()
        self.child = torch.nn.Identity()
        object.__setattr__(self.child, "parent", weakref.proxy(self))
        self.child.parents = [weakref.ref(self)]
        self.child.kept = None

    def forward(self, x):
        if self.child.kept is None:
            self.child.kept = self.child.parents[0]().inverse()
        return x @ self.child.kept * self.child.parent.w[0, 0]


CACHES = [OnItself, InADict, InAList, InAVariable, InACachedProperty, InACachedMethod, InAChild]


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("kind", CACHES)
def test_caches_follow_the_parameters(kind, jit):
    model, run = from_torch(kind()), eqx.filter_jit if jit else lambda f: f
    loss = run(eqx.filter_value_and_grad(lambda model, x: jnp.sum(jnp.sin(model(x)))))
    for scale in (1.0, 3.0, 0.5):
        module = kind()
        with torch.no_grad():
            module.w.mul_(scale)
        value = module(torch.from_numpy(X)).sin().sum()
        value.backward()
        scaled = eqx.tree_at(lambda m: m.params["w"], model, scale * model.params["w"])
        for _ in range(2):
            got, grads = loss(scaled, X)
            assert_trees_equal(got, value.detach(), rtol=1e-5)
            assert_trees_equal(grads.params["w"], module.w.grad, rtol=1e-4, atol=1e-5)


class AskedFor(Inverse):
    kept = None

    def forward(self, x):
        if self.kept is None:
            self.fill()
        return x @ self.kept

    def fill(self):
        with torch.no_grad():
            self.kept = self.inverse()


class Renewed(Inverse):
    def forward(self, x):
        self.renew(self.training)
        return x @ self.kept

    def renew(self, training):
        if training:
            self.kept = self.inverse()


class Running(Inverse):
    def __init__(self):
        super().__init__()
        self.kept = torch.zeros(3)

    def forward(self, x):
        self.kept = 0.5 * self.kept + (x @ self.inverse()).mean(0)
        return x * self.kept


STALE = [*CACHES[:4], InACachedProperty, InAChild, AskedFor, Renewed, Running]


IN_CONTAINERS = [InADict, InAList, InAVariable]


@pytest.mark.parametrize(
    ("kind", "graph"),
    [(k, True) for k in STALE] + [(k, False) for k in STALE if k not in IN_CONTAINERS],
)
def test_what_an_earlier_call_has_cached_is_named(kind, graph):
    module = kind()
    with torch.set_grad_enabled(graph):
        module(torch.from_numpy(X))
    with pytest.warns(UserWarning, match="computed before the conversion.*convert a new") as warned:
        from_torch(module)
    assert len(warned) == 1
    assert "kept" in str(warned[0].message) or kind is InAVariable


class SetAnew(Inverse):
    """What it holds was set by an earlier call, but every call sets it before it reads it."""

    def __init__(self):
        super().__init__()
        self.scale = torch.full((3,), 2.0)

    def set_scale(self, scale):
        if scale is not None:
            self.scale = scale

    def forward(self, x):
        self.kept = self.inverse() if self.training else self.inverse().detach()
        if self.training:
            self.last = x @ self.kept
        else:
            self.last = x
        return self.read() * self.scale

    def read(self):
        return self.last


@pytest.mark.parametrize("graph", [True, False], ids=["graph", "no graph"])
def test_what_every_call_sets_first_is_no_cache(graph):
    module, x = SetAnew(), torch.from_numpy(X)
    with torch.set_grad_enabled(graph):
        y = module(x)
    model = from_torch(module)
    assert_trees_equal(model(X), y.detach(), rtol=1e-5)
    grads = eqx.filter_grad(lambda m: m(X).sum())(model)
    module(x).sum().backward()
    assert_trees_equal(grads.params["w"], module.w.grad, rtol=1e-4)


def _pruned():
    return prune.random_unstructured(torch.nn.Linear(3, 3), "weight", 0.5)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(3, 3)),
        lambda: torch.nn.utils.parametrizations.spectral_norm(torch.nn.Linear(3, 3)),
        _pruned,
        lambda: torch.nn.MultiheadAttention(3, 1),
        lambda: torch.nn.LSTM(3, 3),
    ],
    ids=["weight_norm", "spectral_norm", "pruned", "attention", "lstm"],
)
def test_nothing_that_torch_s_layers_keep_is_a_cache(make):
    layer, x = make(), torch.from_numpy(X)
    layer(x, x, x) if isinstance(layer, torch.nn.MultiheadAttention) else layer(x)
    from_torch(layer)


class Mask(torch.nn.Module):
    """Keeps a mask made at its first call."""

    def __init__(self):
        super().__init__()
        self.mask = None

    def forward(self, x):
        if self.mask is None:
            self.mask = torch.ones_like(x) * 2
        return x * self.mask


def test_what_was_kept_under_a_transformation_does_not_outlive_it():
    model, x = from_torch(Mask()), jnp.ones(2)
    xs = jnp.ones((3, 2))
    for _ in range(2):
        assert_trees_equal(model(x), 2 * x)
        assert_trees_equal(jax.vmap(model)(xs), 2 * xs)
        y, pull = jax.vjp(model, x)
        assert_trees_equal(pull(y)[0], 4 * x)
        assert_trees_equal(jax.jvp(model, (x,), (x,)), (2 * x, 2 * x))
        assert_trees_equal(jax.vmap(jax.grad(lambda x: model(x).sum()))(xs), 2 * xs)
        assert_trees_equal(jax.hessian(lambda x: (model(x) ** 2).sum())(x), 8 * jnp.eye(2))


# Counters and schedules.


class Count(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.n = 0

    def forward(self, x):
        self.n += 1
        return x * self.n


class Temperature(Count):
    def forward(self, x):
        self.tau = getattr(self, "tau", 1.0)
        self.n = 1 - self.n
        return x * self.n


class Counts(Count):
    def __init__(self):
        super().__init__()
        self.seen = {"calls": [0], "n": 0}

    def forward(self, x):
        self.seen["n"] += 1
        return x * self.seen["n"]


@pytest.mark.parametrize(
    ("kind", "attribute"), [(Count, "n"), (Temperature, "n"), (Counts, "seen['n']")]
)
def test_counters_are_named_and_the_same_for_every_call(kind, attribute):
    model = from_torch(kind())
    x = jnp.ones(4)
    with pytest.warns(UserWarning, match="as an argument, or keep it in a buffer") as warned:
        assert_trees_equal(model(x), x)
    (one,) = warned
    assert f"`{kind.__name__}` changes its attribute {attribute} (from 0 to 1)" in str(one.message)
    with jax.set_mesh(jax.make_mesh((4,), ("x",))):
        sharded, xs = from_torch(kind(), out_specs=P("x")), jax.device_put(x, P("x"))
        with pytest.warns(UserWarning, match="changes its attribute"):
            assert_trees_equal(sharded(xs), x)
        for _ in range(3):
            assert_trees_equal(jax.jit(lambda x: sharded(x))(xs), x)
    for _ in range(3):
        assert_trees_equal(eqx.filter_jit(model)(x), x)


def test_counters_are_named_where_shapes_are_declared():
    model = from_torch(Count(), output_shapes=jax.ShapeDtypeStruct((4,), jnp.float32))
    with pytest.warns(UserWarning, match=r"changes its attribute n \(from 0 to 1\)"):
        assert_trees_equal(model(jnp.ones(4)), jnp.ones(4))
    assert_trees_equal(model(jnp.ones(4)), jnp.ones(4))


class SetOnce(torch.nn.Module):
    """Remembers sizes and that it has run, as rotary embeddings and windows do."""

    def __init__(self):
        super().__init__()
        self.longest, self.ready, self.mode, self.shift = 0, False, "new", 2

    def forward(self, x):
        self.longest = max(self.longest, x.shape[0])
        self.ready, self.mode, self.shift = True, "used", min(self.shift, 1)
        return x * self.longest * self.shift


def test_what_is_set_once_is_no_counter():
    model = from_torch(SetOnce())
    assert_trees_equal(model(jnp.ones(4)), 4 * jnp.ones(4))
    assert_trees_equal(model(jnp.ones(2)), 2 * jnp.ones(2))


class Total(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.total = torch.zeros(())

    def forward(self, x):
        self.total += 1
        return x * self.total


def test_tensors_that_are_no_buffers():
    model = from_torch(Total())
    with pytest.warns(UserWarning, match="writes to its tensor total, which is no buffer"):
        assert_trees_equal(model(jnp.ones(2)), jnp.ones(2))
    assert_trees_equal(model(jnp.ones(2)), jnp.ones(2))


def test_nothing_is_looked_for_where_nothing_is_left(monkeypatch):
    model = from_torch(torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Tanh()))
    model(X)

    def look(*args):
        raise AssertionError

    monkeypatch.setattr("eqx_torch._module.function._Look", look)
    model(X)
    eqx.filter_grad(lambda m: m(X).sum())(model)


# Parameters.


class Writing(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([3.0, -4.0, 0.5]))

    def forward(self, x):
        self.write()
        return x * self.weight


class InPlace(Writing):
    def write(self):
        with torch.no_grad():
            self.weight.clamp_(min=0)


class ByData(Writing):
    def write(self):
        self.weight.data.clamp_(min=0)


class Copied(Writing):
    def write(self):
        with torch.no_grad():
            self.weight.copy_(self.weight.clamp(min=0))


class NewData(Writing):
    def write(self):
        self.weight.data = self.weight.data.clamp(min=0)


class NewParameter(Writing):
    def write(self):
        self.weight = torch.nn.Parameter(self.weight.detach().clamp(min=0))


def _clamps(module, args):
    module.weight.data.clamp_(min=0)


class InAHook(Writing):
    def __init__(self):
        super().__init__()
        self.register_forward_pre_hook(_clamps)

    def write(self):
        pass


DECLARED = [{}, {"output_shapes": jax.ShapeDtypeStruct((2, 3), jnp.float32)}]


@pytest.mark.parametrize("declared", DECLARED, ids=["tried", "declared"])
@pytest.mark.parametrize("kind", [InPlace, ByData, Copied, NewData, NewParameter, InAHook])
def test_writes_to_parameters_are_named_with_what_to_write(kind, declared):
    model, module = from_torch(kind(), **declared), kind()
    y = module(torch.from_numpy(X)).detach()
    with pytest.warns(UserWarning, match="writes to its parameter weight") as warned:
        assert_trees_equal(model(X), y)
    assert len(warned) == 1
    assert "after `optax.apply_updates`" in str(warned[0].message)
    before = np.array(model.params["weight"])
    for _ in range(2):
        assert_trees_equal(eqx.filter_jit(model)(X), y)
    assert_trees_equal(model.params["weight"], before, exact=True)
    projected = _as_the_message_says(str(warned[0].message), model)
    assert_trees_equal(projected.params["weight"], module.weight.detach())
    assert_trees_equal(projected(X), y)


def _as_the_message_says(message, model):
    line = message.partition("`model = ")[2].partition("`.")[0]
    return eval(line, {"eqx": eqx, "jnp": jnp, "model": model})


@pytest.mark.parametrize("kind", [torch.nn.Embedding, torch.nn.EmbeddingBag])
def test_embeddings_of_bounded_norm(kind):
    layer = kind(5, 3, max_norm=1.0)
    model, x = from_torch(layer), jnp.array([[0, 2]])
    with pytest.warns(UserWarning, match="writes to its parameter weight") as warned:
        y = model(x)
    assert_trees_equal(y, layer(torch.tensor([[0, 2]])).detach(), rtol=1e-5)
    projected = _as_the_message_says(str(warned[0].message), model)
    layer(torch.arange(5)[None])
    assert_trees_equal(projected.params["weight"], layer.weight.detach(), rtol=1e-5)
    assert_trees_equal(projected(x), layer(torch.tensor([[0, 2]])).detach(), rtol=1e-5)


def test_a_projection_in_the_loop_trains_as_in_torch():
    module = InPlace()
    with pytest.warns(UserWarning, match="writes to its parameter"):
        model = from_torch(InPlace(), X)
    optimiser = torch.optim.SGD(module.parameters(), 0.1)
    transform = optax.sgd(0.1)
    state = transform.init(model.params)
    for _ in range(3):
        optimiser.zero_grad()
        module(torch.from_numpy(X)).sum().backward()
        optimiser.step()
        grads = eqx.filter_grad(lambda m: m(X).sum())(model)
        updates, state = transform.update(grads.params, state)
        params = {k: jnp.clip(model.params[k], 0) + u for k, u in updates.items()}
        model = eqx.tree_at(lambda m: m.params, model, params)
    assert_trees_equal(model.params["weight"], module.weight.detach(), rtol=1e-5)


# Random generators.


class Drawing(torch.nn.Module):
    """Draws from a generator of its own."""

    def __init__(self, make):
        super().__init__()
        self.kept = {"rng": make()}

    def draw(self, x):
        rng = self.kept["rng"]
        if isinstance(rng, torch.Generator):
            return torch.rand(x.shape, generator=rng)
        if isinstance(rng, np.random.PCG64):
            rng = np.random.Generator(rng)
        return torch.full_like(x, rng() if callable(rng) else rng.random())

    def forward(self, x):
        return x * self.draw(x)


def _drawing_from(rng):
    return lambda: rng.uniform(1, 2)


GENERATORS = {
    "torch": lambda: torch.Generator().manual_seed(3),
    "python": lambda: random.Random(3),
    "a method": lambda: random.Random(3).random,
    "a variable": lambda: _drawing_from(random.Random(3)),
    "numpy's method": lambda: np.random.default_rng(3).random,
    "numpy": lambda: np.random.default_rng(3),
    "numpy's bits": lambda: np.random.PCG64(3),
    "numpy's old one": lambda: np.random.RandomState(3),
}


@pytest.mark.parametrize("make", GENERATORS.values(), ids=GENERATORS)
def test_generators_of_a_module_draw_the_same_in_every_call(make):
    x, expected = jnp.ones(4), Drawing(make)(torch.ones(4))
    model = from_torch(Drawing(make))
    with pytest.warns(UserWarning, match=r"random generator kept\['rng'\].*`key=`"):
        assert_trees_equal(model(x), expected)
    for _ in range(3):
        assert_trees_equal(model(x), expected)
        assert_trees_equal(eqx.filter_jit(model)(x), expected)
        slope = jax.grad(jax.checkpoint(lambda x: model(x).sum()))(x)
        assert_trees_equal(slope, expected)
    with jax.set_mesh(jax.make_mesh((4,), ("x",))):
        sharded, xs = from_torch(Drawing(make), out_specs=P("x")), jax.device_put(x, P("x"))
        with pytest.warns(UserWarning, match="draws from its random generator"):
            first = sharded(xs)
        assert_trees_equal(first, jnp.full(4, expected[0].item()))
        for _ in range(3):
            assert_trees_equal(jax.jit(lambda x: sharded(x))(xs), first)
