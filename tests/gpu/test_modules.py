"""Modules train as they do by torch on the same device."""

import copy

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
import torch

from eqx_torch import from_torch, load_state_dict, state_dict, t2j, to_torch, torch2jax

from ..helpers import assert_trees_equal
from .devices import on_torch, seed_of, TORCH_DEVICE


STEPS = 5


class Rotated(torch.nn.Module):
    """Reads a buffer that is not a parameter, in every call."""

    def __init__(self):
        super().__init__()
        self.register_buffer("angles", torch.linspace(0, 1, 16))

    def forward(self, x):
        return x * self.angles.cos() + x.roll(1, -1) * self.angles.sin()


def network():
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 4, 3, padding=1),
        torch.nn.BatchNorm2d(4),
        torch.nn.SiLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(64, 16),
        Rotated(),
        torch.nn.Linear(16, 3),
    )


@pytest.fixture
def data(getkey):
    x = jax.random.normal(getkey(), (STEPS, 8, 1, 4, 4))
    y = jax.random.randint(getkey(), (STEPS, 8), 0, 3)
    return x, y


def by_torch(module, x, y):
    """The losses, and the module after the training."""
    module = copy.deepcopy(module).to(TORCH_DEVICE)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for images, labels in zip(on_torch(x), on_torch(y).long(), strict=True):
        loss = torch.nn.functional.cross_entropy(module(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses), module


def by_jax(module, x, y):
    model, state = eqx.nn.make_with_state(from_torch)(module)
    optimizer = optax.sgd(0.1, momentum=0.9)
    opt_state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))

    def loss_fn(model, state, images, labels):
        logits, state = model(images, state=state)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses.mean(), state

    @eqx.filter_jit
    def step(model, state, opt_state, images, labels):
        gradient = eqx.filter_value_and_grad(loss_fn, has_aux=True)
        (loss, state), grads = gradient(model, state, images, labels)
        updates, opt_state = optimizer.update(grads, opt_state)
        return eqx.apply_updates(model, updates), state, opt_state, loss

    losses = []
    for images, labels in zip(x, y, strict=True):
        model, state, opt_state, loss = step(model, state, opt_state, images, labels)
        losses.append(loss)
    return jnp.stack(losses), model, state


def test_training(data):
    module = network()
    with jax.numpy_dtype_promotion("standard"):
        losses, model, state = by_jax(module, *data)
    expected, trained = by_torch(module, *data)
    assert_trees_equal(losses, expected, rtol=1e-4, atol=1e-4)
    parameters = {name: p.detach() for name, p in trained.named_parameters()}
    assert_trees_equal(dict(model.params), parameters, rtol=1e-3, atol=1e-4)
    buffers = dict(trained.named_buffers())
    changed = dict(state.get(model.buffers))
    assert set(changed) == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    assert_trees_equal(changed, {n: buffers[n] for n in changed}, rtol=1e-4, atol=1e-4)


def test_evaluation(data):
    module = network().eval()
    x = data[0][0]
    model, state = eqx.nn.make_with_state(from_torch)(module)
    expected = copy.deepcopy(module).to(TORCH_DEVICE)(on_torch(x)).detach()
    y, after = eqx.filter_jit(model)(x, state=state)
    assert_trees_equal(y, expected, rtol=1e-4, atol=1e-5)
    assert_trees_equal(dict(after.get(model.buffers)), dict(state.get(model.buffers)))


def test_a_module_that_is_on_the_device(data):
    module = network().eval().to(TORCH_DEVICE)
    model, state = eqx.nn.make_with_state(from_torch)(module)
    x = data[0][0]
    y, _ = eqx.filter_jit(model)(x, state=state)
    assert_trees_equal(y, module(on_torch(x)).detach(), rtol=1e-4, atol=1e-5)
    assert all(p.devices() == {jax.devices()[0]} for p in model.params.values())
    back = to_torch(model, state)
    assert {t.device.type for t in back.state_dict().values()} == {"cpu"}
    assert_trees_equal(state_dict(model, state), dict(module.state_dict()), exact=True)
    assert_trees_equal(dict(back.state_dict()), dict(module.state_dict()), exact=True)
    model, state = load_state_dict(model, module.state_dict(), state)
    assert_trees_equal(eqx.filter_jit(model)(x, state=state)[0], y, exact=True)


def test_dropout(getkey):
    key, other = getkey(), getkey()
    x = jnp.ones((4, 32))
    model = from_torch(torch.nn.Dropout(0.5))
    call = eqx.filter_jit(lambda model, x, key: model(x, key=key))
    before = torch.get_rng_state()
    first = call(model, x, key)
    assert_trees_equal(call(model, x, key), first, exact=True)
    assert not jnp.array_equal(call(model, x, other), first)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(seed_of(key))
    drawn = torch.nn.functional.dropout(on_torch(x), 0.5)
    assert_trees_equal(first, drawn, exact=True)


def test_the_gradient_of_dropout_has_the_mask_of_its_forward(getkey):
    key, x = getkey(), jnp.ones((4, 32))
    model = from_torch(torch.nn.Dropout(0.5))
    value, pullback = jax.vjp(lambda x: model(x, key=key), x)
    assert_trees_equal(pullback(jnp.ones_like(x))[0], value, exact=True)


def test_recurrent_layers(getkey):
    module = torch.nn.LSTM(5, 6, batch_first=True)
    x = jax.random.normal(getkey(), (2, 7, 5))
    model = from_torch(module)
    twin = copy.deepcopy(module).to(TORCH_DEVICE)

    def loss(model, x):
        return (model(x)[0] ** 2).sum()

    grads = eqx.filter_jit(eqx.filter_grad(loss))(model, x)
    (twin(on_torch(x))[0] ** 2).sum().backward()
    expected = {name: p.grad for name, p in twin.named_parameters()}
    assert_trees_equal(dict(grads.params), expected, rtol=1e-3, atol=1e-4)


def test_attention(getkey):
    q, k, v = (jax.random.normal(getkey(), (2, 4, 16, 8)) for _ in range(3))
    attend = torch.nn.functional.scaled_dot_product_attention
    f = torch2jax(lambda q, k, v: attend(q, k, v, is_causal=True))
    gradient = jax.jit(jax.grad(lambda *args: (f(*args) ** 2).sum(), (0, 1, 2)))
    inputs = [on_torch(x).requires_grad_() for x in (q, k, v)]
    (attend(*inputs, is_causal=True) ** 2).sum().backward()
    assert_trees_equal(gradient(q, k, v), tuple(x.grad for x in inputs), rtol=1e-3, atol=1e-4)


def test_donated_parameters(getkey):
    model = from_torch(torch.nn.Linear(8, 8))
    x = jax.random.normal(getkey(), (4, 8))

    def step(model, x):
        grads = eqx.filter_grad(lambda model: (model(x) ** 2).sum())(model)
        return jax.tree.map(lambda p, g: p - 0.01 * g, *map(_arrays, (model, grads)))

    expected = step(model, x)
    donating = jax.jit(lambda arrays, x: step(eqx.combine(arrays, static), x), donate_argnums=0)
    arrays, static = eqx.partition(model, eqx.is_array)
    arrays = jax.tree.map(jnp.copy, arrays)
    assert_trees_equal(donating(arrays, x), expected, rtol=1e-5)


def _arrays(model):
    return eqx.filter(model, eqx.is_array)


def test_tensors_cross_on_the_device(getkey):
    x = torch.randn(3, 4, device=TORCH_DEVICE)
    array = t2j(x)
    assert array.devices() == {jax.devices()[0]}
    assert_trees_equal(array, x, exact=True)
