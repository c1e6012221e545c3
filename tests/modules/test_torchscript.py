"""TorchScript modules with buffers at any depth, and potentials that are deployed as such."""

import functools
import importlib.util

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
import torch

from eqx_torch import from_torch, load_state_dict, state_dict, t2j, to_torch, torch2jax

from ..helpers import assert_trees_equal
from ..helpers.potentials import loaded, Potential


pytestmark = pytest.mark.filterwarnings(
    "ignore:.torch.jit", "ignore::DeprecationWarning", "ignore:The TorchScript type system"
)
needs_e3nn = pytest.mark.skipif(not importlib.util.find_spec("e3nn"), reason="e3nn is missing")


class Inner(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)
        self.register_buffer("scale", 2 * torch.ones(3))
        self.register_buffer("offset", torch.arange(3.0).double())
        self.plain = 3 * torch.ones(3)

    def forward(self, x):
        return self.linear(x) * self.scale * self.plain + self.offset.float()


class Outer(torch.nn.Module):
    """Buffers in children, some of them shared, and a layer with two names."""

    def __init__(self):
        super().__init__()
        self.a, self.b = Inner(), Inner()
        self.b.scale = self.a.scale
        self.again = self.a.linear
        self.norm = torch.nn.BatchNorm1d(3).eval()
        self.register_buffer("shift", torch.ones(3))

    def forward(self, x):
        return self.norm(self.b(torch.tanh(self.a(x)))) + self.shift + self.again(x)


def _frozen(module):
    return torch.jit.freeze(torch.jit.script(module.eval()))


MAKERS = {
    "scripted": torch.jit.script,
    "loaded": lambda m: loaded(torch.jit.script(m)),
    "traced": lambda m: torch.jit.trace(m, torch.ones(4, 3)),
    "traced and loaded": lambda m: loaded(torch.jit.trace(m, torch.ones(4, 3))),
    "frozen": _frozen,
    "frozen and loaded": lambda m: loaded(_frozen(m)),
    "for inference": lambda m: torch.jit.optimize_for_inference(torch.jit.script(m.eval())),
    "inside": lambda m: torch.nn.Sequential(torch.jit.script(m), torch.nn.Linear(3, 3)),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_buffers_at_any_depth(make):
    torch.manual_seed(0)
    module = make(Outer().eval())
    x = torch.randn(4, 3, requires_grad=True)
    model = from_torch(module)
    y = module(x)
    names = [name for name, _ in module.named_parameters()]
    wanted = torch.autograd.grad(y.square().sum(), [x, *module.parameters()])
    got = jax.grad(lambda x: (model(x) ** 2).sum())(t2j(x.detach()))
    grads = eqx.filter_grad(lambda m: (m(t2j(x.detach())) ** 2).sum())(model).params
    assert_trees_equal(eqx.filter_jit(model)(t2j(x.detach())), y.detach(), rtol=1e-5)
    assert_trees_equal([got, *(grads[n] for n in names)], list(wanted), rtol=1e-4, atol=1e-4)
    own, back = module.state_dict(), to_torch(model)
    assert state_dict(model).keys() == own.keys()
    for name, tensor in state_dict(model).items():
        assert_trees_equal(tensor, own[name], exact=True)
        assert tensor.dtype == own[name].dtype
    assert_trees_equal(back(x).detach(), y.detach(), exact=True)
    changed = {n: t + 1 if t.is_floating_point() else t for n, t in own.items()}
    again = load_state_dict(model, changed)
    module.load_state_dict(changed)
    assert_trees_equal(again(t2j(x.detach())), module(x).detach(), rtol=1e-4)


# Potentials.


class Equivariant(torch.nn.Module):
    """The products of a potential, by e3nn."""

    def __init__(self, channels: int = 4) -> None:
        from e3nn import o3

        super().__init__()
        self.product = o3.FullyConnectedTensorProduct(
            f"{channels}x0e + {channels}x1o", "1x0e + 1x1o", f"{channels}x0e"
        )

    def forward(self, s: torch.Tensor, v: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        one = torch.ones_like(t[:, :1])
        return self.product(torch.cat([s, v.flatten(1)], 1), torch.cat([one, t], 1))


def _generated_code():
    return loaded(torch.jit.script(Potential()))


def _with_e3nn():
    return loaded(torch.jit.script(Potential(Equivariant())))


def _eager_e3nn():
    return Potential(Equivariant())


POTENTIALS = [
    pytest.param(_generated_code, id="generated code"),
    pytest.param(_with_e3nn, id="e3nn", marks=needs_e3nn),
    pytest.param(_eager_e3nn, id="e3nn, not scripted", marks=needs_e3nn),
]


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("make", POTENTIALS)
def test_potentials_are_trained_on_forces(make, jit):
    torch.manual_seed(0)
    module = make()
    model = from_torch(module)
    positions, species = torch.randn(5, 3), torch.tensor([0, 1, 2, 1, 0])
    target = torch.randn(5, 3)
    names = [name for name, _ in module.named_parameters()]

    def forces_in_torch(x):
        x = x.clone().requires_grad_()
        energy = module(x, species)
        return energy, -torch.autograd.grad(energy, x, create_graph=True)[0]

    def forces(model, x):
        energy, gradient = jax.value_and_grad(lambda x: model(x, t2j(species)))(x)
        return energy, -gradient

    def loss_fn(model, x):
        return jnp.mean((forces(model, x)[1] - t2j(target)) ** 2)

    transform = optax.adam(1e-2)

    @jax.numpy_dtype_promotion("standard")
    def step(model, moments, x):
        loss, grads = eqx.filter_value_and_grad(loss_fn)(model, x)
        updates, moments = transform.update(grads.params, moments)
        params = optax.apply_updates(model.params, updates)
        return eqx.tree_at(lambda m: m.params, model, params), moments, loss

    run = eqx.filter_jit if jit else lambda f: f
    close = functools.partial(assert_trees_equal, rtol=1e-3, atol=1e-4)
    x = t2j(positions)
    close(run(forces)(model, x), tuple(t.detach() for t in forces_in_torch(positions)))
    optimiser, moments = torch.optim.Adam(module.parameters(), 1e-2), transform.init(model.params)
    for _ in range(3):
        optimiser.zero_grad()
        loss = (forces_in_torch(positions)[1] - target).square().mean()
        loss.backward()
        optimiser.step()
        model, moments, got = run(step)(model, moments, x)
        close(got, loss.detach())
    own = dict(module.named_parameters())
    close([model.params[n] for n in names], [own[n].detach() for n in names])


@pytest.mark.parametrize("make", POTENTIALS)
def test_frozen_potentials_have_forces(make):
    torch.manual_seed(0)
    module = make().eval()
    scripted = module if isinstance(module, torch.jit.ScriptModule) else torch.jit.script(module)
    frozen = loaded(torch.jit.freeze(scripted))
    positions, species = torch.randn(5, 3, requires_grad=True), torch.tensor([0, 1, 2, 1, 0])
    wanted = torch.autograd.grad(module(positions, species), positions)[0]
    model = from_torch(frozen)
    got = jax.jit(jax.grad(lambda x: model(x, t2j(species))))(t2j(positions.detach()))
    assert_trees_equal(got, wanted, rtol=1e-4, atol=1e-5)


class Exponential(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.exp(-x).sum()


class OfNumbers(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.tensor([1.0, 2.0, 3.0])


@pytest.mark.parametrize("wrap", [from_torch, lambda m: torch2jax(lambda x: m(x))])
def test_second_derivatives_of_scripted_modules(wrap):
    """Those of `torch.func` are wrong, and so are its batches of first ones at the first call."""
    x = jnp.array([1.0, 2.0, 3.0])
    f = wrap(torch.jit.script(Exponential()))
    forces = jax.grad(lambda xs: (jax.vmap(jax.grad(f))(xs) ** 2).sum())(jnp.stack([x, 2 * x]))
    assert_trees_equal(forces, -2 * jnp.exp(-2 * jnp.stack([x, 2 * x])), rtol=1e-5)
    assert_trees_equal(jax.hessian(f)(x), jnp.diag(jnp.exp(-x)), rtol=1e-5, atol=1e-6)


def test_scripts_that_make_tensors_of_numbers():
    module = torch.jit.script(OfNumbers())
    x = jnp.ones(3)
    assert_trees_equal(from_torch(module, x)(x), jnp.arange(1.0, 4.0))
    assert_trees_equal(torch2jax(module)(x), jnp.arange(1.0, 4.0))
    with pytest.warns(UserWarning, match="inferred by running it on zeros"):
        traced = jax.jit(torch2jax(lambda x: module(x)))(x)
    assert_trees_equal(traced, jnp.arange(1.0, 4.0))
