"""The parts of a model: its submodules as models, its tensors and attributes, masks by name."""

import copy
import functools
import pickle
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

from eqx_torch import (
    from_torch,
    InputError,
    load_state_dict,
    ModuleError,
    reparametrise,
    select,
    state_dict,
    to_torch,
    TorchModule,
    trainable,
)

from ..helpers import assert_trees_equal
from ..helpers.nets_of_blocks import Block, fresh, Net, WIDTH, X


H = np.linspace(-1, 1, 4 * WIDTH, dtype=np.float32).reshape(4, WIDTH)
with_state = eqx.nn.make_with_state(from_torch)


def _step(node: Any, key: str) -> Any:
    return node[int(key)] if key.isdigit() else getattr(node, key)


def by_attributes(model: Any, path: str) -> Any:
    return functools.reduce(_step, path.split("."), model)


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(3, 3)
        self.second = self.first
        self.third = torch.nn.Linear(3, 3)
        self.third.weight = self.first.weight

    def forward(self, x):
        return self.third(self.second(self.first(x)))


def test_every_submodule_is_reached_by_name_and_by_attributes():
    net = Net(statistics=True)
    model, _ = with_state(net)
    for path, module in net.named_modules():
        if path:
            part = model[path]
            assert isinstance(part, TorchModule)
            assert part.core.name == type(module).__name__
            assert by_attributes(model, path).core == part.core
            names = [name for name, _ in module.named_parameters()]
            assert list(part.params) == names
            assert all(part.params[n] is model.params[f"{path}.{n}"] for n in names)


def test_tensors_are_the_models_own_leaves():
    model = from_torch(Net())
    for name, leaf in model.params.items():
        assert by_attributes(model, name) is leaf


def test_parts_compute_what_the_submodules_do():
    net = Net()
    model = from_torch(net)
    h = torch.from_numpy(H)
    for path in ("layers.1", "layers.1.fc", "layers.2.norm", "relu"):
        expected = net.get_submodule(path)(h.clone()).detach()
        assert_trees_equal(model[path](H), expected)
        assert_trees_equal(eqx.filter_jit(model[path])(H), expected)
    assert_trees_equal(model.layers[1](H, scale=0.25), net.layers[1](h, scale=0.25).detach())


def test_a_part_asked_for_twice_compiles_once():
    model = from_torch(Net())
    traces = []

    @eqx.filter_jit
    def call(part, x):
        traces.append(part.core.name)
        return part(x)

    for _ in range(2):
        call(model.layers[0], H)
        call(model["layers"][0], H)
        call(eqx.tree_at(lambda m: m.head.bias, model, jnp.ones(2)).layers[0], H)
    assert traces == ["Block"]


def test_gradients_of_a_part_are_the_models():
    net = Net()
    grads = eqx.filter_grad(lambda model: model.layers[1](H).sum())(from_torch(net))
    net.layers[1](torch.from_numpy(H)).sum().backward()
    expected = {
        n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in net.named_parameters()
    }
    assert_trees_equal(grads.params, expected)


def test_tied_submodules_and_tied_weights():
    net = Tied()
    model = from_torch(net)
    assert model.second.weight is model.first.weight is model.params["first.weight"]
    assert model.third.weight is model.params["first.weight"]
    new = eqx.tree_at(lambda m: m.third.weight, model, jnp.eye(3))
    assert new.second.weight is new.params["first.weight"]
    assert_trees_equal(new.second(X), X + net.first.bias.detach().numpy())
    assert_trees_equal(new.third(X), X + net.third.bias.detach().numpy())


def test_tree_at_through_attributes_and_items():
    model = from_torch(Net())
    zeros = jnp.zeros((WIDTH, WIDTH))
    new = eqx.tree_at(
        lambda m: [m.layers[1].fc.weight, m["layers.2"].fc.weight], model, [zeros] * 2
    )
    changed = {n for n, p in new.params.items() if p is not model.params[n]}
    assert changed == {"layers.1.fc.weight", "layers.2.fc.weight"}
    frozen = eqx.tree_at(lambda m: m.head.bias, trainable(model), False)
    assert [n for n, flag in frozen.params.items() if not flag] == ["head.bias"]


def test_a_part_with_statistics_updates_only_its_own():
    net = Net(statistics=True)
    model, state = with_state(net)
    before = state.get(model.buffers)
    y, new = model.after(H, state=state)
    expected = net.after(torch.from_numpy(H))
    assert_trees_equal(y, expected.detach(), atol=1e-5)
    after = new.get(model.buffers)
    own = dict(net.after.named_buffers())
    assert_trees_equal({n: after[f"after.{n}"] for n in own}, own)
    others = [n for n in before if not n.startswith("after.")]
    assert others
    assert_trees_equal({n: after[n] for n in others}, {n: before[n] for n in others}, exact=True)
    assert_trees_equal(state_dict(model.after, fresh(new)), dict(net.after.state_dict()))
    model(X, state=new)  # the whole takes what its part has returned


def test_a_part_without_statistics_needs_no_state():
    model, state = with_state(Net(statistics=True))
    assert model.after.is_stateful()
    assert not model.layers[0].is_stateful()
    y, same = model.layers[0](H, state=state)
    assert y.shape == H.shape
    model(X, state=same)
    with pytest.raises(ModuleError, match=r"changes its buffers running_mean.*without `state=`"):
        model.after(H)


def test_buffers_are_attributes_where_the_model_has_their_values():
    net = Net(statistics=True)
    assert_trees_equal(from_torch(net).before.running_var, net.before.running_var)
    model, _ = with_state(net)
    with pytest.raises(
        AttributeError, match=r'`state.get\(model.buffers\)\["before.running_var"\]`'
    ):
        model.before.running_var  # noqa: B018


def test_slices_and_iteration():
    net = Net()
    model = from_torch(net)
    assert len(model.layers) == 3
    assert [part.kind for part in model.layers] == ["residual"] * 3
    assert model.layers[-1].fc.weight is model.params["layers.2.fc.weight"]
    tail = model.layers[1:]
    assert len(tail) == 2
    assert tail[0].fc.bias is model.params["layers.1.fc.bias"]
    assert list(state_dict(tail)) == list(net.layers[1:].state_dict())
    assert bool(model.layers[3:])
    assert len(model.layers[3:]) == 0


def test_a_slice_of_a_sequence_is_called():
    net = torch.nn.Sequential(
        torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)
    )
    model, state = with_state(net)
    h = H[:, :4]
    y, state = model[1:](h, state=state)
    assert_trees_equal(y, net[1:](torch.from_numpy(h)).detach(), atol=1e-5)
    assert_trees_equal(state.get(model.buffers)["3.running_mean"], net[3].running_mean)
    assert_trees_equal(model[::2](X), net[::2](torch.from_numpy(X)).detach())


def test_containers_with_keys():
    class Heads(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.heads = torch.nn.ModuleDict(
                {"a": torch.nn.Linear(3, 1), "b": torch.nn.Linear(3, 2)}
            )

        def forward(self, x):
            return {name: head(x) for name, head in self.heads.items()}

    model = from_torch(Heads())
    assert list(model.heads) == ["a", "b"]
    assert len(model.heads) == 2
    assert_trees_equal({name: model.heads[name](X) for name in model.heads}, model(X))


def test_a_frozen_submodule_of_a_parent_in_training():
    net = Net(dropout=0.5, statistics=True)
    net.layers[0].eval()
    net.before.eval()
    model, state = with_state(net)
    assert [part.inference for part in model.layers] == [True, False, False]
    assert_trees_equal(model.layers[0](H), net.layers[0](torch.from_numpy(H)).detach())
    with pytest.raises(ModuleError, match="without `key=`"):
        model.layers[1](H)
    before = state.get(model.buffers)
    y, state = model.before(H, state=state)
    assert_trees_equal(y, net.before(torch.from_numpy(H)).detach())
    assert_trees_equal(state.get(model.buffers), before, exact=True)
    assert not to_torch(model.layers[0]).training
    assert all(part.inference for part in eqx.nn.inference_mode(model).layers)


def test_parts_go_back_to_torch():
    net = Net()
    model = from_torch(net)
    assert isinstance(to_torch(model.layers[1]), Block)
    assert_trees_equal(
        dict(to_torch(model.layers[1]).state_dict()), dict(net.layers[1].state_dict())
    )
    assert_trees_equal(state_dict(model.layers), dict(net.layers.state_dict()))
    part = load_state_dict(model.layers[1], Block().state_dict())
    assert part.core == model.layers[1].core


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))]
)
def test_models_are_copied_after_parts_were_asked_for(copied):
    model = from_torch(torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh()))
    expected = model[0](X)
    for one in (model, model[0]):
        assert_trees_equal(copied(one)(X), one(X), exact=True)
    assert_trees_equal(copied(model)[0](X), expected, exact=True)
    assert copied(model).core == model.core


def test_serialised_through_a_part(tmp_path):
    model, other = from_torch(Net()), from_torch(Net())
    eqx.tree_serialise_leaves(tmp_path / "block.eqx", model.layers[1])
    loaded = eqx.tree_deserialise_leaves(tmp_path / "block.eqx", other.layers[1])
    assert_trees_equal(loaded.params, model.layers[1].params, exact=True)


def test_plain_attributes_are_copies():
    model = from_torch(Net(blocks=2))
    model.config["blocks"] = 5
    assert model.config == {"blocks": 2}
    assert model.layers[0].kind == "residual"
    assert model.layers[0].norm.normalized_shape == (WIDTH,)
    assert (model.head.in_features, model.layers[0].drop.p) == (WIDTH, 0.0)


def test_parts_of_a_model_of_another_method_call_forward():
    class Auto(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.code = torch.nn.Linear(3, 2)

        def encode(self, x):
            return self.code(x) * 2

    model = from_torch(Auto(), method="encode")
    assert_trees_equal(model.code(X) * 2, model(X))


def test_parts_inside_of_a_transformation():
    model = from_torch(Net())
    expected = jnp.stack([model.layers[0](h) for h in H[:, None]])
    assert_trees_equal(eqx.filter_vmap(lambda h: model.layers[0](h))(H[:, None]), expected)
    inside = jax.jit(lambda m, h: m["layers.0"](h))(model, H)
    assert_trees_equal(inside, model.layers[0](H))


@pytest.mark.parametrize(
    ("ask", "kind", "message"),
    [
        (lambda m: m.lajers, AttributeError, "The nearest that there is: 'layers'"),
        (lambda m: m["layers.9"], InputError, "no submodule 'layers.9'.*'layers.2'"),
        (lambda m: m["layers.0.fk"], InputError, "'layers.0.fc'"),
        (lambda m: m.layers[3], IndexError, "has the 3 submodules 0, 1, 2, but was asked for 3"),
        (lambda m: m.layers["a"], InputError, "no submodule 'a'"),
        (len, TypeError, "no container.*its submodules are: embed, before, layers"),
        (list, TypeError, "no container"),
        (lambda m: m[0], TypeError, "no container"),
        (lambda m: m.forward, AttributeError, r"Write `model\(x\)`"),
        (lambda m: m.half, AttributeError, "convert the torch module"),
    ],
)
def test_what_is_not_there_is_an_error_with_the_nearest(ask, kind, message):
    with pytest.raises(kind, match=message):
        ask(from_torch(Net()))


def test_a_part_that_keeps_a_view_is_refused():
    class Half(torch.nn.Module):
        def __init__(self, weight):
            super().__init__()
            self.half = weight[:2]

        def forward(self, x):
            return x @ self.half.T

    class Whole(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(4, 3))
            self.part = Half(self.weight.data)

        def forward(self, x):
            return self.part(x) + self.weight.sum()

    model = from_torch(Whole())
    assert model(X).shape == (5, 2)
    with pytest.raises(ModuleError, match="keeps a view of a tensor.*cannot be taken out"):
        model.part  # noqa: B018


def test_select_is_a_mask_for_partition():
    model = from_torch(Net())
    mask = select(model, "*.fc.weight")
    chosen, rest = eqx.partition(model, mask)
    names = [n for n, p in chosen.params.items() if p is not None]
    assert names == [f"layers.{i}.fc.weight" for i in range(3)]
    assert all(rest.params[n] is None for n in names)
    assert_trees_equal(eqx.combine(chosen, rest)(X), model(X), exact=True)


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        ("head.bias", ["head.bias"]),
        ("head.*", ["head.weight", "head.bias"]),
        (["head.bias", "layers.0.n*.bias"], ["layers.0.norm.bias", "head.bias"]),
        ("layers.*.norm.bias", [f"layers.{i}.norm.bias" for i in range(3)]),
        ("embed.?eight", ["embed.weight"]),
    ],
)
def test_select_takes_names_and_patterns(patterns, expected):
    mask = select(from_torch(Net()), patterns)
    assert {name for name, flag in mask.params.items() if flag} == set(expected)


def test_select_tells_names_apart_that_hold_one_array():
    model = from_torch(Net())
    shared = eqx.tree_at(lambda m: m.layers[0].fc.weight, model, model.params["layers.1.fc.weight"])
    mask = select(shared, "layers.0.fc.weight")
    assert [name for name, flag in mask.params.items() if flag] == ["layers.0.fc.weight"]


def test_a_whole_name_is_no_pattern():
    class Two(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.bias = torch.nn.Parameter(torch.zeros(()))
            self.fc = torch.nn.Linear(3, 2)

        def forward(self, x):
            return self.fc(x) + self.bias

    model = from_torch(Two())
    assert select(model, "bias").params == {"bias": True, "fc.weight": False, "fc.bias": False}
    assert select(model, "*.bias").params == {"bias": False, "fc.weight": False, "fc.bias": True}


def test_select_for_optax():
    model = from_torch(Net())
    grads = eqx.filter_grad(lambda m: m(X).sum())(model)
    head = select(model, "head.*")
    masked = optax.masked(optax.sgd(1.0), head)
    updates, _ = masked.update(grads, masked.init(model))
    for name, update in updates.params.items():
        sign = -1 if name.startswith("head.") else 1
        assert_trees_equal(update, sign * grads.params[name], exact=True)
    labels = jax.tree.map(lambda chosen: "fast" if chosen else "slow", head)
    rates = optax.multi_transform(
        {"fast": optax.sgd(2.0), "slow": optax.sgd(0.5)}, lambda _: labels
    )
    updates, _ = rates.update(grads, rates.init(model))
    for name, update in updates.params.items():
        rate = 2.0 if name.startswith("head.") else 0.5
        assert_trees_equal(update, -rate * grads.params[name])


def test_select_below_reparametrised_parameters():
    class Scale(eqx.Module):
        gain: jax.Array
        shift: jax.Array

        def __call__(self, weight):
            return self.gain * weight + self.shift

    model = from_torch(torch.nn.Sequential(torch.nn.Linear(3, 2)))
    model = reparametrise(model, {"0.weight": Scale(jnp.ones(()), jnp.zeros(()))})
    node = select(model, "*.weight.gain").params["0.weight"]
    assert (node.weight, node.function.gain, node.function.shift) == (False, True, False)
    node = select(model, "0.weight").params["0.weight"]
    assert (node.weight, node.function.gain, node.function.shift) == (True, False, False)


@pytest.mark.parametrize("pattern", ["*.fc.wait", "haed.bias", "layers"])
def test_a_pattern_that_selects_nothing_is_an_error(pattern):
    with pytest.raises(InputError, match="matches no parameter of `Net`.*one part. The nearest"):
        select(from_torch(Net()), pattern)


def test_loading_some_of_the_names():
    net, other = Net(), Net()
    model = from_torch(net)
    some = {n: t for n, t in other.state_dict().items() if n.startswith("layers.")}
    loaded = load_state_dict(model, {**some, "unknown": torch.zeros(1)}, strict=False)
    net.load_state_dict(some, strict=False)
    assert_trees_equal(state_dict(loaded), dict(net.state_dict()), exact=True)
    assert loaded.core is model.core
    with pytest.raises(RuntimeError, match="Missing key"):
        load_state_dict(model, some)
