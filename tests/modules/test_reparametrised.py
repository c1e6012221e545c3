"""Parameters that JAX computes at each call, and parameters in shards."""

import copy
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from eqx_torch import (
    filter_shard_map,
    from_torch,
    fsdp,
    InputError,
    load_state_dict,
    ModuleError,
    reparametrise,
    ShardingError,
    stack_modules,
    state_dict,
    to_torch,
    trainable,
)

from ..helpers import assert_trees_equal
from ..helpers.meshes import explicit_mesh
from ..helpers.nets_of_blocks import Net, WIDTH, X


class LowRank(eqx.Module):
    a: jax.Array
    b: jax.Array

    def __call__(self, weight: jax.Array) -> jax.Array:
        return weight + self.b @ self.a


def low_rank(weight: Any, rank: int = 2, seed: int = 0) -> LowRank:
    a, b = jax.random.split(jax.random.key(seed))
    n, m = weight.shape
    return LowRank(jax.random.normal(a, (rank, m)), jax.random.normal(b, (n, rank)))


class WeightNorm(eqx.Module):
    """`torch.nn.utils.parametrizations.weight_norm`."""

    gain: jax.Array

    def __call__(self, weight: jax.Array) -> jax.Array:
        return self.gain * weight / jnp.linalg.norm(weight, axis=1, keepdims=True)


def updated(net: torch.nn.Module) -> tuple[Any, dict[str, LowRank]]:
    net.requires_grad_(False)
    model = from_torch(net)
    names = [n for n in model.params if n.endswith("fc.weight")]
    updates = {n: low_rank(model.params[n], seed=i) for i, n in enumerate(names)}
    return reparametrise(model, updates), updates


def test_low_rank_updates_are_what_is_trained():
    net = Net()
    model, updates = updated(net)
    factors, frozen = eqx.partition(model, trainable(model))
    assert len(jax.tree.leaves(factors)) == 2 * len(updates) == 6
    merged = copy.deepcopy(net)
    halves = {}
    for n, update in updates.items():
        a, b = (torch.tensor(np.asarray(x), requires_grad=True) for x in (update.a, update.b))
        halves[n] = a, b
    parameters = {n: net.get_parameter(n) + b @ a for n, (a, b) in halves.items()}
    torch.func.functional_call(net, parameters, torch.from_numpy(X)).sum().backward()

    @eqx.filter_jit
    def grad(factors, frozen):
        return eqx.filter_grad(lambda f: eqx.combine(f, frozen)(X).sum())(factors)

    got = grad(factors, frozen)
    for n, (a, b) in halves.items():
        function = got.params[n].function
        assert_trees_equal((function.a, function.b), (a.grad, b.grad), rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        for n, (a, b) in halves.items():
            merged.get_parameter(n).add_(b @ a)
    assert_trees_equal(model(X), merged(torch.from_numpy(X)), rtol=1e-4, atol=1e-5)


def test_merged_bit_for_bit():
    model, updates = updated(Net())
    merged = to_torch(model)
    for n in updates:
        assert_trees_equal(model.params[n].value(), merged.get_parameter(n), exact=True)
    assert_trees_equal(from_torch(merged)(X), model(X), exact=True)
    assert_trees_equal(state_dict(model), dict(merged.state_dict()), exact=True)
    assert not any(p.requires_grad for p in merged.parameters())


def test_an_update_by_zero_changes_nothing():
    model = from_torch(Net())
    zero = LowRank(jnp.ones((1, WIDTH)), jnp.zeros((WIDTH, 1)))
    changed = reparametrise(model, {"layers.0.fc.weight": zero})
    assert_trees_equal(changed(X), model(X), exact=True)


def test_weight_norm_trains_as_in_torch():
    plain = torch.nn.Linear(3, 2)
    net = torch.nn.utils.parametrizations.weight_norm(copy.deepcopy(plain))
    gain = plain.weight.norm(dim=1, keepdim=True)
    model = reparametrise(from_torch(plain), {"weight": WeightNorm(jnp.asarray(gain.detach()))})
    optimiser = torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(3):
        optimiser.zero_grad()
        (net(torch.from_numpy(X)) ** 2).sum().backward()
        optimiser.step()
        grads = eqx.filter_grad(lambda m: (m(X) ** 2).sum())(model)
        model = eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, grads))
    assert_trees_equal(model.params["weight"].value(), net.weight.detach(), rtol=1e-4, atol=1e-5)
    assert_trees_equal(model(X), net(torch.from_numpy(X)).detach(), rtol=1e-4, atol=1e-5)


def test_a_mask_keeps_weights_at_zero():
    mask = np.eye(WIDTH, dtype=np.float32)
    model = reparametrise(from_torch(Net()), {"*.fc.weight": lambda w: w * mask})
    grads = eqx.filter_grad(lambda m: (m(X) ** 2).sum())(model)
    node = grads.params["layers.0.fc.weight"].weight
    assert np.asarray(node)[mask == 1].all()
    assert not np.asarray(node)[mask == 0].any()
    merged = to_torch(model).layers[0].fc.weight
    assert_trees_equal(merged, model.params["layers.0.fc.weight"].weight * mask, exact=True)


def test_one_after_another_and_through_parts():
    model = from_torch(Net())
    weight = model.params["layers.1.fc.weight"]
    model = reparametrise(model, {"layers.1.fc.weight": lambda w: 2 * w})
    model = reparametrise(model, {"*.fc.weight": lambda w: w + 1})
    node = model.layers[1].fc.weight
    assert_trees_equal(node.value(), 2 * weight + 1)
    assert node.weight.weight is weight
    h = np.ones((2, WIDTH), np.float32)
    expected = h @ np.asarray(2 * weight + 1).T + np.asarray(model.layers[1].fc.bias)
    assert_trees_equal(model.layers[1].fc(h), expected, rtol=1e-5)
    assert_trees_equal(to_torch(model.layers[1]).fc.weight, node.value(), exact=True)


def test_tied_weights_are_computed_once():
    net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Tanh(), torch.nn.Linear(3, 3))
    net[2].weight = net[0].weight
    model = reparametrise(from_torch(net), {"0.weight": lambda w: w.T})
    with torch.no_grad():
        net[0].weight.copy_(net[0].weight.T.clone())
    assert_trees_equal(model(X), net(torch.from_numpy(X)).detach(), atol=1e-6)
    merged = to_torch(model)
    assert merged[2].weight is merged[0].weight
    by_other = reparametrise(from_torch(net), {"2.weight": jnp.sin})
    by_first = reparametrise(from_torch(net), {"0.weight": jnp.sin})
    assert_trees_equal(by_other(X), by_first(X), exact=True)


def test_under_transformations_and_in_a_stack():
    model, _ = updated(Net())
    assert_trees_equal(eqx.filter_jit(model)(X), model(X))
    xs = np.stack([X, -X])
    assert_trees_equal(jax.vmap(model)(xs), jnp.stack([model(x) for x in xs]))
    others = jax.tree.map(lambda a: a * 0.5 if eqx.is_inexact_array(a) else a, model)
    stack = stack_modules([model, others])
    ys = eqx.filter_vmap(lambda m, x: m(x), in_axes=(eqx.if_array(0), None))(stack, X)
    assert_trees_equal(ys, jnp.stack([model(X), others(X)]), rtol=1e-4, atol=1e-5)


def test_serialised(tmp_path):
    (model, _), (like, _) = updated(Net()), updated(Net())
    eqx.tree_serialise_leaves(tmp_path / "model.eqx", model)
    loaded = eqx.tree_deserialise_leaves(tmp_path / "model.eqx", like)
    assert_trees_equal(loaded(X), model(X), exact=True)


def test_what_cannot_compute_a_parameter():
    model = from_torch(Net())
    with pytest.raises(InputError, match=r"head.bias of `Net` gives float32\[1\], but.*\[2\]"):
        reparametrise(model, {"head.bias": lambda b: b[:1]})
    with pytest.raises(InputError, match=r"gives float16\[2\], but the parameter is float32\[2\]"):
        reparametrise(model, {"head.bias": lambda b: b.astype(jnp.float16)})
    shared = LowRank(jnp.ones((1, WIDTH)), jnp.zeros((WIDTH, 1)))
    with pytest.raises(InputError, match=r"matches 3 parameters.*the LowRank for them"):
        reparametrise(model, {"*.fc.weight": shared})
    with pytest.raises(InputError, match="matches no parameter"):
        reparametrise(model, {"fc.wait": jnp.sin})
    with pytest.raises(ModuleError, match="are computed .head.bias.. Load them before"):
        load_state_dict(reparametrise(model, {"head.bias": jnp.sin}), Net().state_dict())


# --- fsdp


def wide() -> torch.nn.Module:
    """Parameters of which some can be sharded over eight devices and some cannot."""
    return torch.nn.Sequential(
        torch.nn.Linear(3, 64), torch.nn.Tanh(), torch.nn.Linear(64, 16), torch.nn.Linear(16, 5)
    )


XS = np.resize(np.sin(np.arange(48, dtype=np.float32)), (16, 3))
SPECS = {
    "0.weight": P("x", None),
    "0.bias": P("x"),
    "2.weight": P(None, "x"),
    "2.bias": P("x"),
    "3.weight": P(None, "x"),
}


def gradients_in_torch(net: torch.nn.Module) -> dict[str, Any]:
    (net(torch.from_numpy(XS)) ** 2).sum().backward()
    return {n: p.grad for n, p in net.named_parameters()}


def spec_of(leaf: Any) -> P:
    return leaf.sharding.spec


def test_parameters_and_gradients_lie_in_shards():
    net = wide()
    expected = net(torch.from_numpy(XS)).detach()
    gradients = gradients_in_torch(net)
    with jax.set_mesh(explicit_mesh(8)):
        model = fsdp(from_torch(net, out_specs=P("x")), "x")
        x = jax.device_put(XS, P("x"))
        y, grads = eqx.filter_jit(
            lambda m, x: (m(x), eqx.filter_grad(lambda m: (m(x) ** 2).sum())(m))
        )(model, x)
        assert_trees_equal(y, expected, rtol=1e-4, atol=1e-5)
        for name, gradient in gradients.items():
            param, grad = model.params[name], grads.params[name]
            if name in SPECS:
                assert spec_of(param.weight) == spec_of(grad.weight) == SPECS[name]
                shards = {s.data.size for s in grad.weight.addressable_shards}
                assert shards == {gradient.numel() // 8}
                param, grad = param.weight, grad.weight
            assert param.sharding.device_set == set(jax.devices()[:8])
            assert_trees_equal(grad, gradient, rtol=1e-4, atol=1e-4)


def test_memory_of_a_device_in_training():
    """Parameters, gradients and the optimiser's moments: an eighth of the whole, and the rest."""
    net = wide()
    sizes = {n: p.numel() for n, p in net.named_parameters()}
    own = sum(size // 8 if n in SPECS else size for n, size in sizes.items())
    with jax.set_mesh(explicit_mesh(8)), jax.numpy_dtype_promotion("standard"):
        model = fsdp(from_torch(net, out_specs=P("x")), "x")
        optimiser = optax.adam(1e-2)
        opt_state = eqx.filter_jit(optimiser.init)(eqx.filter(model, eqx.is_inexact_array))
        x = jax.device_put(XS, P("x"))

        @eqx.filter_jit
        def step(model, opt_state, x):
            grads = eqx.filter_grad(lambda m: (m(x) ** 2).sum())(model)
            updates, opt_state = optimiser.update(grads, opt_state)
            return eqx.apply_updates(model, updates), opt_state, grads

        before = float((model(x) ** 2).sum())
        for _ in range(3):
            model, opt_state, grads = step(model, opt_state, x)
        assert float((model(x) ** 2).sum()) < before
        for tree in (model, grads, opt_state[0].mu, opt_state[0].nu):
            leaves = [a for a in jax.tree.leaves(tree) if eqx.is_inexact_array(a)]
            on_one = sum(a.addressable_shards[3].data.size for a in leaves)
            assert on_one == own
        assert_trees_equal(dict(to_torch(model).named_parameters()).keys(), sizes.keys())


def test_in_filter_shard_map():
    net = wide()
    gradients = gradients_in_torch(net)
    mesh = explicit_mesh(8)
    with jax.set_mesh(mesh):
        model = fsdp(from_torch(net), "x")
        specs = jax.tree.map(lambda a: spec_of(a) if eqx.is_array(a) else None, model)
        x = jax.device_put(XS, P("x"))

        @filter_shard_map(in_specs=(specs, P("x")), out_specs=(P("x"), specs))
        def step(model, x):
            return model(x), eqx.filter_grad(lambda m: (m(x) ** 2).sum())(model)

        y, grads = eqx.filter_jit(step)(model, x)
        assert_trees_equal(y, net(torch.from_numpy(XS)).detach(), rtol=1e-4, atol=1e-5)
        for name, gradient in gradients.items():
            grad = grads.params[name]
            grad = grad.weight if name in SPECS else grad
            assert_trees_equal(grad, gradient, rtol=1e-4, atol=1e-4)
        assert spec_of(grads.params["2.weight"].weight) == SPECS["2.weight"]


def test_composed_with_low_rank_updates():
    net = wide().requires_grad_(False)
    with jax.set_mesh(explicit_mesh(8)):
        model = fsdp(from_torch(net, out_specs=P("x")), "x")
        update = low_rank(np.zeros((16, 64)))
        model = reparametrise(model, {"2.weight": jax.device_put(update, P())})
        x = jax.device_put(XS, P("x"))
        assert len(jax.tree.leaves(eqx.filter(model, trainable(model)))) == 2
        y = eqx.filter_jit(lambda m, x: m(x))(model, x)
        merged = to_torch(model)
    with torch.no_grad():
        net[2].weight.add_(torch.tensor(np.asarray(update.b @ update.a)))
    assert_trees_equal(y, net(torch.from_numpy(XS)), rtol=1e-4, atol=1e-4)
    assert_trees_equal(merged[2].weight, net[2].weight, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:.*do not prove that they are replicated")
@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
def test_the_array_below_a_low_rank_update_is_sharded(kind):
    net = wide().requires_grad_(False)
    update = low_rank(np.zeros((16, 64)), rank=8)
    reference = reparametrise(from_torch(net), {"2.weight": update})
    expected = reference(XS), eqx.filter_grad(lambda m: (m(XS) ** 2).sum())(reference)
    with jax.set_mesh(jax.make_mesh((8,), ("x",), axis_types=(kind,))):
        options = {"out_specs": P("x")} if kind is AxisType.Explicit else {}
        model = fsdp(reparametrise(from_torch(net, **options), {"2.weight": update}), "x")
        base = model.params["2.weight"]
        assert spec_of(base.weight.weight) == SPECS["2.weight"]
        assert base.function.a.sharding.spec == P()
        x = jax.device_put(XS, NamedSharding(jax.sharding.get_mesh(), P("x")))
        y, grads = eqx.filter_jit(
            lambda m, x: (m(x), eqx.filter_grad(lambda m: (m(x) ** 2).sum())(m))
        )(model, x)
    wanted = expected[1].params["2.weight"].function
    got = grads.params["2.weight"].function
    assert_trees_equal(y, expected[0], rtol=1e-4, atol=1e-4)
    assert_trees_equal((got.a, got.b), (wanted.a, wanted.b), rtol=1e-3, atol=1e-2)


def test_sharded_again_over_another_mesh():
    net = wide()
    with jax.set_mesh(explicit_mesh(4)):
        model = fsdp(from_torch(net), "x")
    with jax.set_mesh(explicit_mesh(8)):
        model = fsdp(model, "x")
        param = model.params["0.weight"]
        assert param.weight.shape == (64, 3)
        assert {s.data.shape for s in param.weight.addressable_shards} == {(8, 3)}
        assert_trees_equal(state_dict(model), dict(net.state_dict()), exact=True)


def test_a_computed_parameter_says_where_its_array_is():
    model = reparametrise(from_torch(wide()), {"0.bias": jnp.sin})
    with pytest.raises(AttributeError, match=r"no attribute `shape`.*`.weight.shape` of it"):
        model[0].bias.shape  # noqa: B018
    assert not hasattr(model[0].bias, "sharding")


@pytest.mark.parametrize("axis", [("x",), P("x"), None])
def test_fsdp_takes_the_name_of_an_axis(axis):
    with jax.set_mesh(explicit_mesh(4)), pytest.raises(InputError, match=r'`fsdp\(model, "x"\)`'):
        fsdp(from_torch(wide()), axis)


def test_a_part_of_a_model_in_shards():
    net = wide()
    with jax.set_mesh(explicit_mesh(8)):
        model = fsdp(from_torch(net, out_specs=P("x")), "x")
        part = from_torch(model[0], out_specs=P("x"))
        y = eqx.filter_jit(part)(jax.device_put(XS, P("x")))
        assert_trees_equal(y, net[0](torch.from_numpy(XS)).detach(), atol=1e-5)


def test_the_mesh_in_force_has_to_have_the_axis():
    with pytest.raises(ShardingError, match=r"axis 'x', but the mesh in force has the axes \[\]"):
        fsdp(from_torch(wide()), "x")
    with jax.set_mesh(explicit_mesh(4)), pytest.raises(ShardingError, match=r"axes \['x'\]"):
        fsdp(from_torch(wide()), "data")
