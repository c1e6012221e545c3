"""Random numbers that a forward draws come from `key=`, and from nothing else."""

import threading
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import AxisType, PartitionSpec as P
from torch.utils.checkpoint import checkpoint

from eqx_torch import from_torch, ModuleError, stack_modules, t2j, torch2jax

from ..helpers import assert_trees_equal
from ..helpers.module_samples import seed_of


KEY, OTHER = jax.random.key(1), jax.random.key(2)
ONES = np.ones((4, 32), np.float32)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(32))
        self.drop = torch.nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(x * self.weight)


@pytest.fixture
def model() -> Any:
    return from_torch(torch.nn.Dropout(0.5))


def mask(key: Any) -> torch.Tensor:
    """What torch's dropout makes of ones, seeded as a call with this key is."""
    with torch.random.fork_rng():
        torch.manual_seed(seed_of(key))
        return torch.nn.functional.dropout(torch.from_numpy(ONES), 0.5)


def test_same_key_same_mask(model):
    first, again, other = (model(ONES, key=key) for key in (KEY, KEY, OTHER))
    assert_trees_equal(first, mask(KEY), exact=True)
    assert_trees_equal(again, first, exact=True)
    assert not np.array_equal(other, first)


class OfValues(torch.nn.Module):
    """Dropout whose shape depends on values, so that a run on values tells what it does."""

    def __init__(self, layer: torch.nn.Module | None):
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        count = int((x > 0).sum()) // 32
        dropped = self.layer(x) if self.layer else torch.nn.functional.dropout(x, 0.5)
        return dropped[:count]


@pytest.mark.parametrize("layer", [torch.nn.Dropout(0.5), None])
@pytest.mark.parametrize("examples", [(), (torch.ones(4, 32),)])
def test_what_is_found_out_by_values_draws_from_the_key_too(layer, examples):
    model = from_torch(OfValues(layer), *examples)
    with pytest.raises(ModuleError, match="draws random numbers"):
        model(ONES)
    assert_trees_equal(model(ONES, key=KEY), mask(KEY), exact=True)
    assert_trees_equal(model(ONES, key=KEY), mask(KEY), exact=True)
    assert not np.array_equal(model(ONES, key=OTHER), mask(KEY))


def test_a_generator_of_the_forward_is_no_draw_of_the_call():
    class Own(torch.nn.Module):
        def forward(self, x):
            count = int((x > 0).sum()) // 32
            generator = torch.Generator().manual_seed(0)
            return x[:count] + torch.rand(32, generator=generator)

    y = from_torch(Own())(ONES)
    expected = torch.rand(32, generator=torch.Generator().manual_seed(0))
    assert_trees_equal(y, torch.from_numpy(ONES) + expected, exact=True)


def test_raw_keys(model):
    raw = jax.random.key_data(KEY)
    assert_trees_equal(model(ONES, key=raw), model(ONES, key=KEY), exact=True)


def test_jit_draws_as_eager_does(model):
    call = eqx.filter_jit(lambda model, x, key: model(x, key=key))
    for key in (KEY, OTHER, KEY):
        assert_trees_equal(call(model, ONES, key), mask(key), exact=True)
    assert_trees_equal(model(ONES, key=KEY), mask(KEY), exact=True)
    other = eqx.filter_jit(lambda model, x, key: 2 * model(x, key=key))
    assert_trees_equal(other(model, ONES, KEY), 2 * mask(KEY), exact=True)


@pytest.mark.parametrize("index", range(8))
def test_every_device_draws_the_same(model, index):
    x = jax.device_put(ONES, jax.devices()[index])
    y = eqx.filter_jit(model)(x, key=jax.device_put(KEY, jax.devices()[index]))
    assert y.devices() == {jax.devices()[index]}
    assert_trees_equal(y, mask(KEY), exact=True)


def test_threads_do_not_race(model):
    """Eight threads on eight devices, with and without a key, and the user's own generator."""
    call = eqx.filter_jit(lambda model, x, key: model(x, key=key))
    gradient = eqx.filter_jit(
        lambda model, x, key: jax.grad(lambda x: jnp.sum(model(x, key=key)))(x)
    )
    keys = list(jax.random.split(KEY, 8))
    expected = [mask(key) for key in keys]
    wrong: list[int] = []

    def work(index: int) -> None:
        device = jax.devices()[index]
        x, key = jax.device_put((ONES, keys[index]), device)
        for _ in range(8):
            results = call(model, x, key), gradient(model, x, key)
            if not all(np.array_equal(r, expected[index]) for r in results):
                wrong.append(index)

    before = torch.get_rng_state()
    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert torch.equal(torch.get_rng_state(), before)


def test_eight_shards_do_not_race():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Explicit,))
    model = from_torch(torch.nn.Dropout(0.5), out_specs=P("x"))
    call = eqx.filter_jit(lambda x, key: model(x, key=key))
    with jax.set_mesh(mesh):
        x = jax.device_put(np.ones((8, 64), np.float32), jax.NamedSharding(mesh, P("x")))
        first = np.asarray(call(x, KEY))
        for _ in range(8):
            assert_trees_equal(call(x, KEY), first, exact=True)


def test_gradient_uses_the_mask_of_the_forward(model):
    @eqx.filter_jit
    def step(x: Any, key: Any) -> Any:
        def loss(x: Any) -> Any:
            y = model(x, key=key)
            return jnp.sum(y**2), y

        return jax.grad(loss, has_aux=True)(x)

    gradient, y = step(ONES, KEY)
    assert_trees_equal(y, mask(KEY), exact=True)
    assert_trees_equal(gradient, 2 * y * y)
    eager, y = jax.grad(lambda x: (jnp.sum(model(x, key=KEY)), model(x, key=KEY)), has_aux=True)(
        jnp.asarray(ONES)
    )
    assert_trees_equal(eager, y, exact=True)


def test_tangents_and_second_derivatives_use_it_too(model):
    f = lambda x: jnp.sum(model(x, key=KEY) ** 3)  # noqa: E731
    y = mask(KEY).numpy()
    tangent = jax.jvp(f, (ONES,), (ONES,))[1]
    assert_trees_equal(tangent, 3 * (y**3).sum(), rtol=1e-5)
    gradient = lambda x: jnp.sum(jax.grad(f)(x))  # noqa: E731
    assert_trees_equal(jax.grad(gradient)(jnp.asarray(ONES)), 6 * y**3, rtol=1e-5)


def test_rematerialised_call_draws_the_same(model):
    @jax.checkpoint
    def call(x: Any) -> Any:
        return model(x, key=KEY)

    gradient = jax.jit(jax.grad(lambda x: jnp.sum(call(x))))(jnp.asarray(ONES))
    assert_trees_equal(gradient, mask(KEY), exact=True)


def test_shards_draw_differently():
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:4])
    model = from_torch(torch.nn.Dropout(0.5), out_specs=P("x"))
    with jax.set_mesh(mesh):
        x = jax.device_put(ONES, jax.NamedSharding(mesh, P("x")))
        y = eqx.filter_jit(lambda x: model(x, key=KEY))(x)
        gradient = eqx.filter_jit(jax.grad(lambda x: jnp.sum(model(x, key=KEY))))(x)
    rows = {row.tobytes() for row in np.asarray(y)}
    assert len(rows) == 4
    assert_trees_equal(gradient, y, exact=True)


def test_user_s_generator_is_left_alone(model):
    torch.manual_seed(123)
    before = torch.get_rng_state()
    jax.block_until_ready(model(ONES, key=KEY))
    jax.block_until_ready(jax.grad(lambda x: jnp.sum(model(x, key=KEY)))(jnp.asarray(ONES)))
    from_torch(torch.nn.Dropout(0.5), ONES)
    assert torch.equal(torch.get_rng_state(), before)


def test_failed_forward_leaves_the_generator_alone():
    class Fails(torch.nn.Module):
        def forward(self, x):
            y = torch.nn.functional.dropout(x)
            if x.sum() > 0:
                raise ValueError("as asked")
            return y

    model = from_torch(Fails(), output_shapes=jax.ShapeDtypeStruct(ONES.shape, np.float32))
    before = torch.get_rng_state()
    for _ in range(2):
        with pytest.raises(Exception, match="as asked"):
            jax.block_until_ready(model(ONES, key=KEY))
    jax.block_until_ready(model(0 * ONES, key=KEY))
    assert torch.equal(torch.get_rng_state(), before)


def test_batch_with_a_key_each_is_the_loop():
    model = from_torch(Net())
    keys = jax.random.split(KEY, 3)
    xs = np.stack([ONES, 2 * ONES, 3 * ONES])
    call = lambda x, key: model(x, key=key)  # noqa: E731
    batched = jax.vmap(call)(xs, keys)
    looped = jnp.stack([call(x, key) for x, key in zip(xs, keys, strict=True)])
    assert_trees_equal(batched, looped, exact=True)
    gradients = jax.vmap(jax.grad(lambda x, key: jnp.sum(call(x, key))))(jnp.asarray(xs), keys)
    assert_trees_equal(gradients, jnp.stack([mask(key).numpy() for key in keys]), exact=True)


def test_batch_with_one_key_draws_the_same_for_every_member():
    model = from_torch(Net())
    xs = np.stack([ONES, 2 * ONES, 3 * ONES])
    batched = jax.vmap(lambda x: model(x, key=KEY))(xs)
    looped = jnp.stack([model(x, key=KEY) for x in xs])
    assert_trees_equal(batched, looped, exact=True)


def test_ensemble_with_a_key_each():
    models = [from_torch(Net()) for _ in range(3)]
    keys = jax.random.split(KEY, 3)
    call = eqx.filter_vmap(lambda model, key: model(ONES, key=key))
    looped = jnp.stack([m(ONES, key=key) for m, key in zip(models, keys, strict=True)])
    assert_trees_equal(call(stack_modules(models), keys), looped, exact=True)


def test_scan_over_keys(model):
    keys = jax.random.split(KEY, 3)
    _, ys = jax.lax.scan(lambda c, key: (c, model(ONES, key=key)), None, keys)
    assert_trees_equal(ys, torch.stack([mask(key) for key in keys]), exact=True)


def test_missing_key_names_the_layer():
    module = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Dropout(0.5))
    message = (
        r"the forward of `Sequential` draws random numbers in 1 \(Dropout\), but was called "
        r"without `key=`. Pass `key=jax.random.key\(0\)` .* or `model = eqx.nn.inference_mode"
    )
    for call in (from_torch(module), eqx.filter_jit(from_torch(module))):
        with pytest.raises(ModuleError, match=message):
            call(ONES)


def test_missing_key_names_the_user_s_own_layer():
    class Noise(torch.nn.Module):
        def forward(self, x):
            return x + torch.randn_like(x)

    class Parent(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.noise = Noise()

        def forward(self, x):
            return self.noise(x)

    with pytest.raises(ModuleError, match=r"draws random numbers in noise \(Noise\), but"):
        from_torch(Parent())(ONES)


@pytest.mark.parametrize(
    "module",
    [
        torch.nn.Dropout(0.0),
        torch.nn.Dropout(0.5).eval(),
        torch.nn.MultiheadAttention(32, 2, batch_first=True),
        torch.nn.TransformerEncoderLayer(32, 2, 8, dropout=0.0, batch_first=True),
        torch.nn.LSTM(32, 3, num_layers=2),
    ],
    ids=lambda module: type(module).__name__,
)
def test_no_key_is_needed_where_nothing_is_drawn(module):
    """Attention may draw, but does so only with dropout."""
    model = from_torch(module)
    args = (ONES,) * (3 if isinstance(module, torch.nn.MultiheadAttention) else 1)
    jax.block_until_ready(model(*args))
    jax.block_until_ready(model(*args, key=KEY))


def test_inference_needs_no_key(model):
    assert_trees_equal(eqx.nn.inference_mode(model)(ONES), ONES, exact=True)


def test_no_key_leaks_out_of_a_trace(model):
    call = eqx.filter_jit(lambda x, key: model(x, key=key))
    call(ONES, KEY)
    eqx.filter_jit(lambda x, key: model(x, key=key) + 1)(ONES, KEY)
    with jax.checking_leaks():
        eqx.filter_jit(lambda x, key: model(x, key=key) + 2)(ONES, KEY)
    assert_trees_equal(model(ONES, key=KEY), mask(KEY), exact=True)


# torch does not know that a forward is not for training, as here where outputs are inferred.
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_torch_s_checkpoint_repeats_the_mask(use_reentrant):
    class Checkpointed(Net):
        def forward(self, x):
            body = lambda x: torch.sin(super(Checkpointed, self).forward(x))  # noqa: E731
            return checkpoint(body, x, use_reentrant=use_reentrant)

    module = Checkpointed()
    model = from_torch(module)
    loss = lambda both: jnp.sum(both[0](both[1], key=KEY))  # noqa: E731
    y = eqx.filter_jit(model)(ONES, key=KEY)
    gradients = eqx.filter_jit(eqx.filter_grad(loss))((model, jnp.asarray(ONES)))
    assert_trees_equal(y, torch.sin(mask(KEY)))
    expected = torch.cos(mask(KEY)) * mask(KEY)
    assert_trees_equal(gradients[1], expected, rtol=1e-5)
    assert_trees_equal(gradients[0].params["weight"], expected.sum(0), rtol=1e-5)


def test_random_numbers_of_every_kind():
    class Draws(torch.nn.Module):
        def forward(self, x):
            noise = torch.randn_like(x) + torch.rand(x.shape) + torch.bernoulli(0.5 * x)
            return noise, torch.randperm(5), torch.multinomial(x, 2)

    torch.manual_seed(seed_of(KEY))
    expected = Draws()(torch.from_numpy(ONES))
    assert_trees_equal(from_torch(Draws())(ONES, key=KEY), expected)
    call = eqx.filter_jit(from_torch(Draws()))
    assert_trees_equal(call(t2j(torch.ones(4, 32)), key=KEY), expected)


class OwnNoise(torch.nn.Module):
    """Draws from a generator of its own, made outside or inside of the forward."""

    def __init__(self, inside):
        super().__init__()
        self.generator = None if inside else torch.Generator().manual_seed(42)

    def forward(self, x):
        g = self.generator or torch.Generator().manual_seed(42)
        g.manual_seed(42)
        noise = torch.randn(3, generator=g) + torch.empty(3).uniform_(generator=g)
        return x + noise + torch.randperm(3, generator=g) + torch.rand_like(x, generator=g)


@pytest.mark.parametrize("declared", [False, True], ids=["inferred", "declared"])
@pytest.mark.parametrize("wrap", [from_torch, torch2jax])
def test_draws_from_a_generator_of_its_own_need_no_key(wrap, declared):
    module = OwnNoise(inside=True)
    x = jnp.arange(3.0)
    expected = module(torch.arange(3.0))
    f = wrap(module, output_shapes=x if declared else None)
    for call in (f, eqx.filter_jit(f)):
        assert_trees_equal(call(x), expected)


def test_a_function_may_name_a_generator():
    module = OwnNoise(inside=False)
    state = module.generator.get_state()
    f = torch2jax(lambda x: module(x))
    jax.eval_shape(f, jnp.arange(3.0))
    assert_trees_equal(f(jnp.arange(3.0)), module(torch.arange(3.0)))
    assert state.numel()


class AlwaysDraws(torch.nn.Module):
    def forward(self, x):
        return x + torch.randn(3)


@pytest.mark.parametrize("declared", [False, True], ids=["inferred", "declared"])
def test_the_advice_is_not_what_is_done_already(declared):
    x = jnp.ones(3)
    model = from_torch(AlwaysDraws(), output_shapes=x if declared else None)
    for inference in (False, True):
        model = eqx.nn.inference_mode(model, inference)
        with pytest.raises(Exception, match="without `key=`") as info:
            jax.block_until_ready(model(x))
        assert ("inference_mode" in str(info.value)) is not inference
