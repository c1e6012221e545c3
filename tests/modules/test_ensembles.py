"""Stacks of models and of their states."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from eqx_torch import from_torch, ModuleError, stack_modules, state_dict, unstack_modules

from ..helpers import assert_trees_equal


X = np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)
with_state = eqx.nn.make_with_state(from_torch)


def network() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))


@eqx.filter_jit
@eqx.filter_vmap(in_axes=(eqx.if_array(0), 0, None))
def call(model: Any, state: Any, x: Any) -> Any:
    return model(x, state=state)


def in_torch(nets: list[torch.nn.Module], steps: int = 1) -> torch.Tensor:
    for _ in range(steps - 1):
        [net(torch.from_numpy(X)) for net in nets]
    return torch.stack([net(torch.from_numpy(X)) for net in nets]).detach()


def member(stack: Any, i: int) -> Any:
    return jax.tree.map(lambda a: a[i] if eqx.is_array(a) else a, stack)


def test_pairs_of_models_and_states():
    nets = [network() for _ in range(3)]
    pairs = [with_state(net) for net in nets]
    ensemble, states = stack_modules(pairs)
    for _ in range(2):
        ys, states = call(ensemble, states, X)
    assert_trees_equal(ys, in_torch(nets, steps=2), rtol=1e-4, atol=1e-5)
    for i, net in enumerate(nets):
        mine = state_dict(member(ensemble, i), member(states, i))
        assert_trees_equal(mine, dict(net.state_dict()), rtol=1e-5)
    for model, state in pairs:  # the states that were stacked are not used up
        model(X, state=state)


def test_pairs_after_training():
    nets = [network() for _ in range(2)]
    pairs = []
    for net in nets:
        model, state = with_state(net)
        _, state = model(X, state=state)
        pairs.append((model, state))
    in_torch(nets)
    _, states = stack_modules(pairs)
    _, states = call(stack_modules(pairs)[0], states, X)
    in_torch(nets)
    buffers = states.get(pairs[0][0].buffers)
    for i, net in enumerate(nets):
        expected = {f"1.{name}": b for name, b in net[1].named_buffers()}
        assert_trees_equal({name: b[i] for name, b in buffers.items()}, expected, rtol=1e-5)


class Twins(eqx.Module):
    left: Any
    right: Any

    def __init__(self, left: torch.nn.Module, right: torch.nn.Module) -> None:
        self.left, self.right = from_torch(left), from_torch(right)


@pytest.mark.parametrize("through", ["make_with_state", "State", "one state"])
def test_each_model_may_find_its_buffers_at_its_own_place(through):
    nets = [network() for _ in range(2)]
    if through == "make_with_state":
        pairs = [with_state(net) for net in nets]
    elif through == "State":
        models = [from_torch(net) for net in nets]
        pairs = [(model, eqx.nn.State(model)) for model in models]
    else:
        twins, state = eqx.nn.make_with_state(Twins)(*nets)
        pairs = [(twins.left, state), (twins.right, state)]
        with pytest.raises(ModuleError, match="differ"):
            stack_modules([twins.left, from_torch(nets[1])])
    ensemble, states = stack_modules(pairs)
    ys, states = call(ensemble, states, X)
    assert_trees_equal(ys, in_torch(nets), rtol=1e-4, atol=1e-5)


def test_pairs_of_models_without_buffers():
    nets = [torch.nn.Linear(3, 3) for _ in range(2)]
    ensemble, states = stack_modules([with_state(net) for net in nets])
    assert jax.tree.leaves(states) == []
    ys, _ = call(ensemble, states, X)
    assert_trees_equal(ys, in_torch(nets), rtol=1e-5)


PAIRS = (
    " Models that have a state are passed with it, all as pairs: `ensemble, states = "
    "stack_modules([(model, state), ...])`."
)
WRONG = {
    "states": (lambda pairs: [state for _, state in pairs], f"a State at position 0.{PAIRS}"),
    "a pair of lists": (
        lambda pairs: list(zip(*pairs, strict=True)),
        f"a tuple at position 0.{PAIRS}",
    ),
    "a pair and a model": (lambda pairs: [pairs[0], pairs[1][0]], f"a tuple at position 0.{PAIRS}"),
    "a model and a pair": (lambda pairs: [pairs[0][0], pairs[1]], f"a tuple at position 1.{PAIRS}"),
    "a pair of torch's": (
        lambda pairs: [(network(), pairs[0][1])],
        "a Sequential at position 0. Write `from_torch(module)`.",
    ),
    "torch's": (
        lambda pairs: [pairs[0][0], network()],
        "a Sequential at position 1. Write `from_torch(module)`.",
    ),
    "arrays": (lambda pairs: [jnp.ones(3)], "a ArrayImpl at position 0."),
}


@pytest.mark.parametrize(("of", "got"), WRONG.values(), ids=WRONG)
def test_what_cannot_be_stacked(of, got):
    pairs = [with_state(network()) for _ in range(2)]
    with pytest.raises(ModuleError) as info:
        stack_modules(of(pairs))
    message = "`stack_modules` takes modules made by `from_torch`, but got "
    assert str(info.value) == message + got


def test_models_that_differ_in_where_their_state_is():
    message = (
        "^`stack_modules` got a model at position 1 that differs from the first in where its state "
        r"is: make all of them by `eqx.nn.make_with_state\(from_torch\)\(module\)`, or all by "
    )
    apart, within = with_state(network())[0], from_torch(network())
    for models in ([apart, within], [within, apart]):
        with pytest.raises(ModuleError, match=message):
            stack_modules(models)


def test_models_that_differ():
    message = r"the one at position 1 \(`Linear`\) is another than the first \(`Sequential`\)"
    pairs = [with_state(network()), with_state(torch.nn.Linear(3, 3))]
    for models in (pairs, [model for model, _ in pairs]):
        with pytest.raises(ModuleError, match=message):
            stack_modules(models)


def test_a_state_of_another_model():
    pairs = [with_state(network()), (with_state(network())[0], with_state(torch.nn.ReLU())[1])]
    with pytest.raises(ModuleError, match="the state passed to `Sequential` is not its own"):
        stack_modules(pairs)


def test_no_models():
    with pytest.raises(ModuleError, match="^`stack_modules` needs at least one module.$"):
        stack_modules([])


def test_members_of_an_ensemble():
    models = [from_torch(torch.nn.Linear(3, 2)) for _ in range(3)]
    members = unstack_modules(stack_modules(models))
    assert len(members) == 3
    for one, model in zip(members, models, strict=True):
        assert one.core is models[0].core
        assert_trees_equal(one.params, model.params, exact=True)
        assert_trees_equal(one(X), model(X), exact=True)


def test_members_with_their_states():
    nets = [network() for _ in range(2)]
    ensemble, states = stack_modules([with_state(net) for net in nets])
    ys, states = call(ensemble, states, X)
    in_torch(nets)
    members = unstack_modules((ensemble, states))
    for (model, state), net, y in zip(members, nets, ys, strict=True):
        assert_trees_equal(state_dict(model, state), dict(net.state_dict()), rtol=1e-5)
        again, _ = model(X, state=state)
        assert_trees_equal(again, y, rtol=1e-4, atol=1e-5)


def test_what_is_no_ensemble_has_no_members():
    message = r"`unstack_modules` takes what `stack_modules` gives.*leading sizes \[2, 3\]"
    net = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 3))
    with pytest.raises(ModuleError, match=message):
        unstack_modules(from_torch(net))
    with pytest.raises(ModuleError, match="no arrays|leading"):
        unstack_modules(from_torch(torch.nn.Tanh()))
