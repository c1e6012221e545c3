"""Work inside of a model: its submodules are watched, patched, and computed by JAX."""

import copy
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from jax.sharding import PartitionSpec as P

from eqx_torch import (
    capture,
    filter_shard_map,
    from_torch,
    InputError,
    ModuleError,
    patch,
    reparametrise,
    replace_module,
    select,
    ShapeError,
    state_dict,
    t2j,
    to_torch,
    trainable,
)
from eqx_torch._module.edits import check_generator

from ..helpers import assert_trees_equal
from ..helpers.meshes import explicit_mesh
from ..helpers.nets_of_blocks import fresh, hooked, Net, WIDTH, X


KEY = jax.random.key(3)
with_state = eqx.nn.make_with_state(from_torch)


class Twin(eqx.Module):
    """`Block` without dropout, in Equinox."""

    norm: eqx.nn.LayerNorm
    fc: eqx.nn.Linear

    def __init__(self, block: Any) -> None:
        tensors = {n: jnp.asarray(p.detach().numpy()) for n, p in block.named_parameters()}
        self.norm = eqx.tree_at(
            lambda m: (m.weight, m.bias),
            eqx.nn.LayerNorm(WIDTH),
            (tensors["norm.weight"], tensors["norm.bias"]),
        )
        self.fc = eqx.tree_at(
            lambda m: (m.weight, m.bias),
            eqx.nn.Linear(WIDTH, WIDTH, key=KEY),
            (tensors["fc.weight"], tensors["fc.bias"]),
        )

    def __call__(self, x: jax.Array, scale: float = 1.0) -> jax.Array:
        return x + scale * jax.vmap(lambda row: jnp.tanh(self.fc(self.norm(row))))(x)


class Counted(torch.nn.Module):
    """Counts its runs, where tensors have values."""

    runs: ClassVar[list[str]] = []

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.fc = torch.nn.Linear(3, 3)

    def forward(self, x):
        y = self.fc(x)
        if type(y.data) is torch.Tensor and y.device.type == "cpu":
            Counted.runs.append(self.name)
        return y.sin()


class Loop(torch.nn.Module):
    """Calls one submodule several times."""

    def __init__(self, times: int = 3) -> None:
        super().__init__()
        self.body, self.head, self.times = torch.nn.Linear(3, 3), torch.nn.Linear(3, 2), times

    def forward(self, x):
        for _ in range(self.times):
            x = torch.tanh(self.body(x))
        return self.head(x)


class Mean(eqx.Module):
    """A layer of which no two calls may be mixed up."""

    gain: jax.Array

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.gain * (x - x.mean(-1, keepdims=True))


def gradients_of(net: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.grad for n, p in net.named_parameters()}


def twin_gradients(twin: Any) -> dict[str, jax.Array]:
    return {
        "norm.weight": twin.norm.weight,
        "norm.bias": twin.norm.bias,
        "fc.weight": twin.fc.weight,
        "fc.bias": twin.fc.bias,
    }


# --- capture


@pytest.mark.parametrize("jitted", [False, True])
def test_captured_is_what_hooks_of_torch_see(jitted):
    net = Net()
    model = from_torch(net)
    seen = hooked(net, lambda: net(torch.from_numpy(X)))
    call = eqx.filter_jit(lambda m, x: m(x)) if jitted else lambda m, x: m(x)
    y, captured = call(capture(model, list(seen)), X)
    assert_trees_equal(y, net(torch.from_numpy(X)).detach())
    assert_trees_equal(captured, {path: output for path, [(_, _, output)] in seen.items()})
    assert captured.keys() == seen.keys()


def test_captured_with_inputs():
    net = Net()
    seen = hooked(net, lambda: net(torch.from_numpy(X)))
    _, captured = capture(from_torch(net), ["layers.*", "relu"], inputs=True)(X)
    assert_trees_equal(captured, {path: seen[path][0] for path in captured})
    assert captured["layers.1"][1] == {"scale": 0.5}


def test_captured_before_an_activation_writes_to_it():
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(inplace=True))
    y, captured = capture(from_torch(net), "*")(X)
    assert_trees_equal(captured["0"], net[0](torch.from_numpy(X)).detach())
    assert float(captured["0"].min()) < 0 <= float(y.min())
    assert_trees_equal(captured["1"], y, exact=True)


def test_several_calls_are_a_tuple():
    net = Loop()
    _, captured = capture(from_torch(net), "body")(X)
    seen = hooked(net, lambda: net(torch.from_numpy(X)))
    assert_trees_equal(captured["body"], tuple(output for _, _, output in seen["body"]))
    assert len(captured["body"]) == 3


def test_gradients_through_and_of_what_is_captured():
    net = Net()
    model = capture(from_torch(net), ["layers.0", "head"])

    def loss(model, x):
        y, captured = model(x)
        return y.sum() + (captured["layers.0"] ** 2).sum()

    grads, x_grad = eqx.filter_jit(eqx.filter_grad(lambda mx: loss(*mx)))((model, X))
    x = torch.from_numpy(X).requires_grad_()
    kept = []
    handle = net.layers[0].register_forward_hook(lambda m, a, y: kept.append(y))
    y = net(x)
    handle.remove()
    (y.sum() + (kept[0] ** 2).sum()).backward()
    assert_trees_equal(grads.params, gradients_of(net), rtol=1e-4, atol=1e-5)
    assert_trees_equal(x_grad, x.grad, rtol=1e-4, atol=1e-5)


def test_captured_under_vmap():
    net = Net()
    model = capture(from_torch(net), "layers.1")
    xs = np.stack([X, -X])
    _, captured = jax.vmap(model)(xs)
    expected = jnp.stack([model(x)[1]["layers.1"] for x in xs])
    assert_trees_equal(captured["layers.1"], expected)


def test_captured_with_state_and_key():
    net = Net(dropout=0.5, statistics=True)
    model, state = with_state(net)
    y, new = model(X, state=fresh(state), key=KEY)
    (y2, captured), new2 = capture(model, ["layers.*", "before"])(X, state=state, key=KEY)
    assert_trees_equal(y2, y, exact=True)
    assert_trees_equal(new2.get(model.buffers), new.get(model.buffers), exact=True)
    embedded = net.embed(torch.from_numpy(X))
    assert_trees_equal(captured["before"], net.before(embedded).detach(), atol=1e-5)


def test_captured_on_a_mesh():
    net = Net()
    x = np.resize(X, (8, 3))
    expected = capture(from_torch(net), "layers.*")(x)
    with jax.set_mesh(explicit_mesh(4)):
        sharded = jax.device_put(x, P("x"))
        model = capture(from_torch(net, out_specs=P("x")), "layers.*")
        y, captured = eqx.filter_jit(model)(sharded)
        assert y.sharding.spec[0] == captured["layers.0"].sharding.spec[0] == "x"
        assert_trees_equal((y, captured), expected)

        @filter_shard_map(in_specs=(P(), P("x")), out_specs=P("x"))
        def call(model, x):
            return model(x)

        inside = call(capture(from_torch(net), "layers.*"), sharded)
        assert_trees_equal(inside, expected)


def test_a_module_that_is_not_called_cannot_be_captured():
    net = Net()
    net.spare = torch.nn.Linear(3, 3)
    with pytest.raises(ModuleError, match=r"the forward of `Net` did not call spare, so"):
        capture(from_torch(net), ["spare", "head"])(X)
    with pytest.raises(ModuleError, match=r"did not call layers, so"):
        capture(from_torch(net), "layers")(X)


def test_a_pattern_captures_what_is_called():
    net = Net()
    net.spare = torch.nn.Linear(3, 3)
    model = from_torch(net)
    called = {n for n, _ in net.named_modules() if n not in ("", "layers", "spare")}
    _, captured = capture(model, "*")(X)
    assert set(captured) == called
    _, both = capture(capture(model, "head"), "layers.*")(X)
    assert set(both) == {"head", "layers.0", "layers.1", "layers.2"}
    with pytest.raises(ModuleError, match="did not call spare, so"):
        capture(model, "spar*")(X)
    with pytest.raises(InputError, match="`inputs=True`, but it is watched with `inputs=False`"):
        capture(capture(model, "head"), "embed", inputs=True)


NAMED = {
    "capture": lambda model, name: capture(model, name),
    "patch": lambda model, name: patch(model, {name: jnp.sin}),
    "replace_module": lambda model, name: replace_module(model, name, jnp.sin),
    "select": lambda model, name: select(model, name),
    "reparametrise": lambda model, name: reparametrise(model, {name: jnp.sin}),
}


@pytest.mark.parametrize("function", NAMED)
def test_one_rule_of_names(function):
    model = from_torch(Net())
    named = NAMED[function]
    what = "parameter" if function in ("select", "reparametrise") else "submodule"
    for wrong in (2, None, len, (0, 1)):
        with pytest.raises(InputError, match=f"a {what} of `Net` is named by a string, such as"):
            named(model, wrong)
    for pattern in ("hed", "*.hed", ""):
        with pytest.raises(InputError, match=f"matches no {what} of `Net`.*stands for one part"):
            named(model, pattern)
    with pytest.raises(InputError, match=r"The nearest that there is: 'layers.0.norm"):
        named(model, "norm.*" if what == "submodule" else "norm")
    named(model, "*.norm" if what == "submodule" else "norm.*")
    named(model, ("layers.0.fc", "head") if what == "submodule" else ("layers.0.fc.bias", "*.bias"))


def test_dicts_are_asked_for():
    model = from_torch(Net())
    with pytest.raises(InputError, match="`patch` takes a dict from the names of submodules"):
        patch(model, ["head"])  # pyright: ignore[reportArgumentType]
    with pytest.raises(InputError, match="`reparametrise` takes a dict from the names of param"):
        reparametrise(model, jnp.sin)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("function", "args"),
    [(capture, ("*",)), (patch, ({},)), (replace_module, ("0", jnp.sin))],
)
def test_only_models_are_taken(function, args):
    with pytest.raises(InputError, match=f"`{function.__name__}` takes a model.*`from_torch"):
        function(torch.nn.Sequential(torch.nn.Tanh()), *args)


# --- patch


def in_torch_with(net: torch.nn.Module, path: str, change: Any, x: torch.Tensor) -> torch.Tensor:
    handle = net.get_submodule(path).register_forward_hook(lambda m, a, y: change(y))
    try:
        return net(x)
    finally:
        handle.remove()


@pytest.mark.parametrize("jitted", [False, True])
def test_values_and_functions_in_place_of_outputs(jitted):
    net = Net()
    model = from_torch(net)
    x = torch.from_numpy(X)
    value = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(1))
    call = eqx.filter_jit(lambda m, x: m(x)) if jitted else lambda m, x: m(x)
    expected = in_torch_with(net, "layers.1", lambda y: value, x).detach()
    assert_trees_equal(call(patch(model, {"layers.1": t2j(value)}), X), expected)
    expected = in_torch_with(net, "layers.1", lambda y: y.cos(), x).detach()
    assert_trees_equal(call(patch(model, {"layers.1": jnp.cos}), X), expected)
    both = patch(model, {"layers.1": jnp.cos, "embed": t2j(value)})
    net.embed.register_forward_hook(lambda m, a, y: value)
    expected = in_torch_with(net, "layers.1", lambda y: y.cos(), x).detach()
    assert_trees_equal(call(both, X), expected)


def test_its_own_output_changes_nothing():
    net = Net(dropout=0.5)
    model = from_torch(net)
    y, captured = capture(model, ["layers.*", "before"])(X, key=KEY)
    for path, value in captured.items():
        assert_trees_equal(patch(model, {path: value})(X, key=KEY), y, exact=True)
        assert_trees_equal(patch(model, {path: lambda h: h})(X, key=KEY), y, exact=True)


def test_gradients_of_values_and_of_functions():
    net = Net()
    model = from_torch(net)
    value = torch.ones(5, WIDTH, requires_grad=True)
    patched = patch(model, {"layers.1": t2j(value.detach())})
    grads = eqx.filter_grad(lambda m: m(X).sum())(patched)
    in_torch_with(net, "layers.1", lambda y: value, torch.from_numpy(X)).sum().backward()
    assert_trees_equal(grads.inserted["layers.1"], value.grad)
    assert_trees_equal(grads.params["head.weight"], net.head.weight.grad)
    assert not np.asarray(grads.params["layers.0.fc.weight"]).any()  # what it gave is not used

    net.zero_grad()
    gain = torch.tensor(2.0, requires_grad=True)
    scale = lambda y: gain * (y - y.mean(-1, keepdim=True))  # noqa: E731
    in_torch_with(net, "layers.1", scale, torch.from_numpy(X)).sum().backward()
    grads = eqx.filter_grad(lambda m: m(X).sum())(patch(model, {"layers.1": Mean(jnp.array(2.0))}))
    assert_trees_equal(grads.inserted["layers.1"].gain, gain.grad, rtol=1e-4, atol=1e-5)
    assert_trees_equal(grads.params, gradients_of(net), rtol=1e-4, atol=1e-5)


def test_trees_of_arrays_in_place_of_outputs():
    net = torch.nn.Sequential(torch.nn.LSTM(3, 4))
    model = from_torch(net)
    y, captured = capture(model, "0")(X)
    zeros = jax.tree.map(jnp.zeros_like, captured["0"])
    assert_trees_equal(patch(model, {"0": zeros})(X), zeros)
    doubled = patch(model, {"0": lambda out: jax.tree.map(lambda a: 2 * a, out)})(X)
    assert_trees_equal(doubled, jax.tree.map(lambda a: 2 * a, y))


def test_a_patched_output_is_captured_as_patched():
    model = from_torch(Net())
    value = jnp.ones((5, WIDTH))
    _, captured = capture(patch(model, {"layers.1": value}), "layers.*")(X)
    assert_trees_equal(captured["layers.1"], value, exact=True)
    plain = capture(model, "layers.*")(X)[1]
    _, captured = capture(patch(model, {"layers.1": jnp.cos}), "layers.*")(X)
    assert_trees_equal(captured["layers.0"], plain["layers.0"], exact=True)
    assert_trees_equal(captured["layers.1"], jnp.cos(plain["layers.1"]), exact=True)


def test_statistics_behind_a_patch():
    net = Net(statistics=True)
    model, state = with_state(net)
    y, state = patch(model, {"layers.1": jnp.cos})(X, state=state)
    expected = in_torch_with(net, "layers.1", lambda y: y.cos(), torch.from_numpy(X))
    assert_trees_equal(y, expected.detach(), rtol=1e-4, atol=1e-5)
    assert_trees_equal(state.get(model.buffers), dict(net.named_buffers()), atol=1e-5)


def test_patched_members_of_a_batch():
    model = from_torch(Net())
    values = jnp.stack([jnp.zeros((5, WIDTH)), jnp.ones((5, WIDTH))])
    ys = jax.vmap(lambda v: patch(model, {"layers.0": v})(X))(values)
    expected = jnp.stack([patch(model, {"layers.0": v})(X) for v in values])
    assert_trees_equal(ys, expected)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            jnp.ones(3),
            r"layers.1 in `Net` is float32\[3\], but the submodule gives float32\[5, 8\]",
        ),
        (jnp.ones((5, WIDTH), int), r"is int32\[5, 8\], but the submodule gives float32"),
        ((jnp.ones((5, WIDTH)),) * 2, r"is float32\[5, 8\], float32\[5, 8\], but"),
    ],
)
def test_values_of_another_shape_or_dtype(value, message):
    with pytest.raises(ModuleError, match=message):
        patch(from_torch(Net()), {"layers.1": value})(X)


def test_what_cannot_be_a_value():
    model = from_torch(Net())
    with pytest.raises(InputError, match="got a Tensor. Convert tensors by `eqx_torch.t2j"):
        patch(model, {"layers.1": torch.ones(3)})
    with pytest.raises(InputError, match="'layers.7' matches no submodule"):
        patch(model, {"layers.7": jnp.ones(3)})


def test_patches_of_one_submodule_add_up():
    net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    model, last = from_torch(net), from_torch(net[1])
    h = from_torch(net[0])(X)
    value = jnp.linspace(-1, 1, X.size).reshape(X.shape).astype(h.dtype)
    f, g, r = (lambda y: y + 1), (lambda y: y * 2), (lambda x: x - 3)
    replaced = replace_module(model, "0", r)
    cases = [
        (patch(patch(model, {"0": f}), {"0": g}), g(f(h))),
        (patch(patch(model, {"0": value}), {"0": g}), g(value)),
        (patch(patch(model, {"0": f}), {"0": value}), value),
        (patch(patch(patch(model, {"0": f}), {"0": value}), {"0": g}), g(value)),
        (patch(replaced, {"0": g}), g(r(X))),
        (patch(patch(replaced, {"0": f}), {"0": g}), g(f(r(X)))),
        (patch(replaced, {"0": value}), value),
        (patch(patch(replaced, {"0": value}), {"0": g}), g(value)),
        (replace_module(patch(model, {"0": g}), "0", r), g(r(X))),
        (replace_module(patch(model, {"0": value}), "0", r), value),
        (replace_module(patch(replaced, {"0": g}), "0", jnp.sin), g(jnp.sin(X))),
    ]
    for edited, output in cases:
        assert_trees_equal(edited(X), last(output), atol=1e-5)
        y, captured = capture(edited, "0")(X)
        assert_trees_equal((y, captured["0"]), (last(output), output), atol=1e-5)
    computed = eqx.filter_jit(reparametrise(patch(replaced, {"0": g}), {"1.bias": jnp.zeros_like}))
    assert_trees_equal(computed(X), last(g(r(X))) - last.bias, atol=1e-5)
    assert_trees_equal(patch(capture(model, "1"), {"1": g})(X)[1]["1"], g(model(X)), atol=1e-5)


def test_all_that_is_patched_is_trained():
    net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    inner, outer = Mean(jnp.array(2.0)), Mean(jnp.array(3.0))
    model = replace_module(from_torch(net), "0", inner)
    model = patch(patch(model, {"0": outer}), {"0": jnp.sin})
    last = from_torch(net[1])
    loss = lambda pair: (last(jnp.sin(pair[1](pair[0](X)))) ** 2).sum()  # noqa: E731
    expected = jax.grad(loss)((inner, outer))
    grads = eqx.filter_grad(lambda m: (m(X) ** 2).sum())(model)
    assert_trees_equal(grads["0"].gain, expected[0].gain, rtol=1e-4)
    assert_trees_equal(jax.tree.leaves(grads.inserted), jax.tree.leaves(expected), rtol=1e-4)
    assert select(model, "0.gain")["0"].gain
    assert len(jax.tree.leaves(eqx.filter(model, trainable(model)))) == 4


def test_patterns_of_patches_and_replacements():
    net = Net()
    model = from_torch(net)
    for layer in net.layers:
        layer.fc.register_forward_hook(lambda m, a, y: y.cos())
    assert_trees_equal(patch(model, {"layers.*.fc": jnp.cos})(X), net(torch.from_numpy(X)).detach())
    new = replace_module(model, ["layers.0.fc", "*.1.fc"], jnp.sin)
    one = replace_module(replace_module(model, "layers.0.fc", jnp.sin), "layers.1.fc", jnp.sin)
    assert_trees_equal(new(X), one(X), exact=True)
    assert new.params.keys() == one.params.keys()
    values = patch(model, {"layers.*": jnp.zeros((5, WIDTH))})
    assert len(jax.tree.leaves(values.inserted)) == 3
    for edit in (
        lambda: patch(model, {"layers.*": Mean(jnp.ones(()))}),
        lambda: replace_module(model, "layers.*", Mean(jnp.ones(()))),
    ):
        with pytest.raises(InputError, match="matches 3 submodules.*the Mean for them has arrays"):
            edit()


def test_what_is_mapped_writes_to_its_arguments():
    class Adds(torch.nn.Module):
        def forward(self, x, seen):
            x += 1
            seen.append(x.sum())
            return x * 2

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.adds, self.act = Adds(), torch.nn.Tanh()

        def forward(self, x):
            seen = []
            h = x * 3
            y = self.adds(h, seen)
            return self.act(y) * h + seen[0] + len(seen)

    net = Model()
    expected = in_torch_with(net, "adds", lambda y: y.cos(), torch.from_numpy(X))
    model = patch(patch(from_torch(net), {"adds": jnp.cos}), {"act": lambda y: y})
    assert_trees_equal(model(X), expected, rtol=1e-5)
    assert_trees_equal(eqx.filter_jit(model)(X), expected, rtol=1e-5)
    y, captured = capture(model, "adds")(X)
    assert_trees_equal(y, expected, rtol=1e-5)
    assert captured["adds"].shape == X.shape


# --- replace_module


def test_a_twin_trains_as_the_block_in_torch():
    net = Net()
    model = replace_module(from_torch(net), "layers.1", Twin(net.layers[1]))
    optimiser = optax.adam(1e-2)
    params, rest = eqx.partition(model, trainable(model))
    opt_state = optimiser.init(params)
    reference = torch.optim.Adam(net.parameters(), 1e-2)
    x = torch.from_numpy(X)

    @eqx.filter_jit
    def step(params, opt_state):
        def loss_fn(params):
            return (eqx.combine(params, rest)(X) ** 2).sum()

        loss, grads = eqx.filter_value_and_grad(loss_fn)(params)
        updates, opt_state = optimiser.update(grads, opt_state)
        return eqx.apply_updates(params, updates), opt_state, loss, grads

    for _ in range(3):
        reference.zero_grad()
        expected = (net(x) ** 2).sum()
        expected.backward()
        with jax.numpy_dtype_promotion("standard"):  # which optax's Adam needs
            params, opt_state, loss, grads = step(params, opt_state)
        assert_trees_equal(loss, expected.detach(), rtol=1e-4)
        wanted = gradients_of(net)
        twins = {n: wanted.pop(f"layers.1.{n}") for n in twin_gradients(grads.layers[1])}
        assert_trees_equal(grads.params, wanted, rtol=1e-3, atol=1e-4)
        assert_trees_equal(twin_gradients(grads.layers[1]), twins, rtol=1e-3, atol=1e-4)
        reference.step()
    expected = {n: p.detach() for n, p in net.named_parameters()}
    trained = {f"layers.1.{n}": p for n, p in twin_gradients(params.layers[1]).items()}
    assert_trees_equal({**params.params, **trained}, expected, rtol=1e-3, atol=1e-3)


def test_the_new_module_is_part_of_the_model():
    net = Net()
    twin = Twin(net.layers[1])
    model = replace_module(from_torch(net), "layers.1", twin)
    assert model.layers[1] is model["layers"][1] is model["layers.1"] is twin
    assert not [n for n in model.params if n.startswith("layers.1.")]
    moved = eqx.tree_at(lambda m: m.layers[1].fc.bias, model, jnp.ones(WIDTH))
    assert_trees_equal(moved.inserted["layers.1"].fc.bias, jnp.ones(WIDTH))
    assert_trees_equal(model.layers[1:][0].fc.weight, twin.fc.weight, exact=True)
    assert_trees_equal(state_dict(model.layers[0]), dict(net.layers[0].state_dict()), exact=True)
    with pytest.raises(ModuleError, match="JAX stands in place of layers.1 in `Net`"):
        to_torch(model)


def test_what_ran_before_a_cut_does_not_run_again():
    net = torch.nn.Sequential(*(Counted(str(i)) for i in range(4)))
    plain = eqx.filter_jit(from_torch(net))
    model = from_torch(net)
    one = eqx.filter_jit(replace_module(model, "2", jnp.cos))
    two = eqx.filter_jit(patch(replace_module(model, "1", jnp.cos), {"2": jnp.sin}))
    for call, expected in [(plain, "0123"), (one, "013"), (two, "023")]:
        call(X)
        jax.block_until_ready(call(X))
        Counted.runs.clear()
        jax.block_until_ready(call(X))
        assert "".join(Counted.runs) == expected


def test_nor_does_it_in_a_gradient():
    net = torch.nn.Sequential(*(Counted(str(i)) for i in range(3)))
    grad = eqx.filter_jit(eqx.filter_grad(lambda m, x: m(x).sum()))
    model = replace_module(from_torch(net), "1", jnp.cos)
    for _ in range(2):
        jax.block_until_ready(grad(model, X).params["0.fc.weight"])
    Counted.runs.clear()
    jax.block_until_ready(grad(model, X).params["0.fc.weight"])
    assert sorted(Counted.runs) == ["0", "2"]


def test_two_replacements_and_a_patch():
    net = Net()
    x = torch.from_numpy(X)
    model = replace_module(from_torch(net), "layers.0", Twin(net.layers[0]))
    model = replace_module(model, "layers.2", Twin(net.layers[2]))
    assert_trees_equal(model(X), net(x).detach(), atol=1e-5)
    both = patch(model, {"layers.1": lambda h: h * 2})
    expected = in_torch_with(net, "layers.1", lambda y: y * 2, x).detach()
    assert_trees_equal(both(X), expected, atol=1e-5)
    y, captured = capture(both, ["layers.*", "head"])(X)
    assert_trees_equal(y, both(X), exact=True)
    assert set(captured) == {"layers.0", "layers.1", "layers.2", "head"}
    assert_trees_equal(captured["layers.0"], net.layers[0](net.embed(x), 0.5).detach(), atol=1e-5)
    assert_trees_equal(captured["head"], y, exact=True)


def test_one_that_is_called_several_times():
    net = Loop()
    weight, bias = t2j(net.body.weight.detach()), t2j(net.body.bias.detach())
    body = eqx.tree_at(lambda m: (m.weight, m.bias), eqx.nn.Linear(3, 3, key=KEY), (weight, bias))
    model = replace_module(from_torch(net), "body", eqx.filter_vmap(body))
    assert_trees_equal(model(X), net(torch.from_numpy(X)).detach(), atol=1e-6)
    grads = eqx.filter_grad(lambda m: m(X).sum())(
        replace_module(from_torch(net), "body", Mean(jnp.array(1.5)))
    )
    step = lambda g, x: jnp.tanh(g * (x - x.mean(-1, keepdims=True)))  # noqa: E731
    head = lambda x: x @ t2j(net.head.weight.detach()).T  # noqa: E731
    expected = jax.grad(lambda g: head(step(g, step(g, step(g, X)))).sum())(1.5)
    assert_trees_equal(grads.inserted["body"].gain, expected, rtol=1e-4, atol=1e-5)


def test_one_that_has_two_names():
    class Twice(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a = torch.nn.Linear(3, 3)
            self.b = self.a

        def forward(self, x):
            return self.b(self.a(x)) * 2

    model = replace_module(from_torch(Twice()), "b", jnp.sin)
    assert_trees_equal(model(X), 2 * jnp.sin(jnp.sin(X)))
    assert model.params == {}


class Shared(torch.nn.Module):
    """A submodule that has its first name outside of the part that calls it."""

    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(3, 3)
        self.b = torch.nn.Sequential(torch.nn.Tanh(), self.a)

    def forward(self, x):
        return self.b(self.a(x)) * 2


def test_the_second_name_of_a_submodule():
    net = Shared()
    model = from_torch(net)
    assert model.b[1].weight is model.a.weight is model["b.1"].weight
    for edit in (
        lambda m, name: patch(m, {name: jnp.sin}),
        lambda m, name: replace_module(m, name, jnp.sin),
        lambda m, name: replace_module(replace_module(m, "a", jnp.cos), name, jnp.sin),
        lambda m, name: reparametrise(m, {f"{name}.weight": jnp.sin}),
        lambda m, name: capture(m, name),
    ):
        first, second = edit(model, "a"), edit(model, "b.1")
        assert_trees_equal(second(X), first(X), exact=True)
        assert_trees_equal(second.b(X), first.b(X), exact=True)
    assert select(model, "b.1.weight").params == {"a.weight": True, "a.bias": False}
    sine = jnp.sin(from_torch(net.a)(jnp.tanh(X)))
    assert_trees_equal(patch(model, {"a": jnp.sin}).b(X), sine, atol=1e-6)
    assert_trees_equal(patch(model, {"b.1": jnp.sin}).b[1:](jnp.tanh(X)), sine, atol=1e-6)
    with pytest.raises(ModuleError, match="b of `Shared` cannot.*together with a,"):
        replace_module(patch(model, {"a": jnp.sin}), "b", jnp.sin)


def test_a_replacement_is_replaced_again():
    net = Net()
    model = replace_module(from_torch(net), "layers.1", Mean(jnp.ones(())))
    with pytest.raises(TypeError, match="scale"):
        model(X)
    again = replace_module(model, "layers.1", Twin(net.layers[1]))
    assert_trees_equal(again(X), net(torch.from_numpy(X)).detach(), atol=1e-5)


def test_parts_inside_of_each_other_are_refused_by_name():
    model = replace_module(from_torch(Net()), "layers.1.fc", jnp.sin)
    for name in ("layers.1", "layers"):
        with pytest.raises(ModuleError, match=f"{name} of `Net` cannot.*with layers.1.fc"):
            replace_module(model, name, jnp.sin)
        with pytest.raises(ModuleError, match="cannot be replaced together"):
            patch(model, {name: jnp.sin})
    outer = patch(from_torch(Net()), {"layers.1": jnp.sin})
    with pytest.raises(ModuleError, match="layers.1.fc of `Net` cannot.*with layers.1,"):
        replace_module(outer, "layers.1.fc", jnp.sin)


@pytest.mark.parametrize(
    ("new", "message"),
    [
        (jnp.ones(3), "For an array in place of its output, `patch`"),
        (torch.nn.Tanh(), "got a torch module for 'head'. Convert it"),
        (
            eqx.nn.BatchNorm(2, "batch", mode="batch"),
            "`replace_module` got a BatchNorm for 'head', which has a state.*Keep torch's layer",
        ),
        (
            eqx.nn.make_with_state(from_torch)(torch.nn.BatchNorm1d(2))[0],
            "got a TorchModule for 'head', which has a state",
        ),
    ],
)
def test_what_cannot_replace(new, message):
    with pytest.raises(InputError, match=message):
        replace_module(from_torch(Net()), "head", new)


def test_a_state_that_stays_as_it_is():
    layer, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(8, "b", mode="batch", inference=True)
    fixed = lambda x: jax.vmap(lambda row: layer(row, state)[0], axis_name="b")(x)  # noqa: E731
    net = Net()
    expected = in_torch_with(net, "layers.1.norm", lambda y: y * 0, torch.from_numpy(X)).detach()
    replaced = replace_module(from_torch(net), "layers.1.norm", lambda x: 0 * fixed(x))
    assert_trees_equal(replaced(X), expected, atol=1e-5)
    with pytest.raises(InputError, match="`patch` got a torch module for 'head'"):
        patch(from_torch(net), {"head": torch.nn.Tanh()})


def test_tree_at_of_a_submodule_names_replace_module():
    model = from_torch(Net())
    with pytest.raises(TypeError, match="`equinox.tree_at` replaces arrays.*replace_module"):
        eqx.tree_at(lambda m: m.layers[1], model, jnp.sin)


def test_what_the_new_module_gives_of_another_shape_fails_in_torch():
    model = replace_module(from_torch(Net()), "layers.1", lambda x, scale: x[:, :3])
    message = (
        r"does not go on from layers.1, in whose place JAX gave float32\[5, 3\]: "
        r".*expected input with shape \[\*, 8\]"
    )
    with pytest.raises(ShapeError, match=message):
        model(X)
    with pytest.raises(InputError, match="`Net` was called with wrong arguments: too many"):
        model(X, X)


def test_a_new_module_that_gives_a_tensor_or_nothing_is_refused():
    model = replace_module(from_torch(Net()), "layers.1", lambda x, scale: torch.ones(x.shape))
    with pytest.raises(ModuleError, match="in place of layers.1.*gave a tensor of torch's"):
        model(X)
    model = replace_module(from_torch(Net()), "layers.1", lambda x, scale: None)
    with pytest.raises(ShapeError, match="from layers.1, in whose place JAX gave no array"):
        model(X)


def test_a_module_with_a_key():
    net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Dropout(0.5), torch.nn.Tanh())
    model = replace_module(from_torch(net), "1", eqx.nn.Dropout(0.5))
    y = model(X, key=KEY)
    assert_trees_equal(model(X, key=KEY), y, exact=True)
    assert (np.asarray(model(X, key=jax.random.key(4))) != np.asarray(y)).any()
    h = jnp.tanh(2 * t2j(net[0](torch.from_numpy(X)).detach()))
    assert (np.asarray(y == 0) | np.isclose(y, h, atol=1e-5)).all()
    assert 0 < np.asarray(y == 0).sum() < y.size
    with pytest.raises(ModuleError, match="in place of 1 in `Sequential` draws.*`key=jax.random"):
        model(X)
    evaluated = eqx.nn.inference_mode(model)
    assert_trees_equal(evaluated(X), jnp.tanh(t2j(net[0](torch.from_numpy(X)).detach())))


def test_two_calls_of_one_with_a_key_draw_differently():
    drawn = lambda x, key: jax.random.normal(key, x.shape)  # noqa: E731
    _, captured = capture(replace_module(from_torch(Loop()), "body", drawn), "body")(X, key=KEY)
    first, second, third = (np.asarray(x) for x in captured["body"])
    assert (first != second).any()
    assert (second != third).any()
    assert (first != third).any()


def test_statistics_before_and_behind_a_cut_are_updated_once():
    net = Net(statistics=True)
    model, state = with_state(net)
    model = replace_module(model, "layers.1", Twin(net.layers[1]))
    call = eqx.filter_jit(lambda m, x, s: m(x, state=s))
    for _ in range(2):
        y, state = call(model, X, state)
        expected = net(torch.from_numpy(X)).detach()
        assert_trees_equal(y, expected, rtol=1e-4, atol=1e-4)
    buffers = state.get(model.buffers)
    assert_trees_equal(buffers, dict(net.named_buffers()), rtol=1e-4, atol=1e-4)
    assert int(buffers["before.num_batches_tracked"]) == 2


def test_statistics_of_what_is_replaced():
    net = Net(statistics=True)
    model, state = with_state(net)
    replaced = replace_module(model, "after", lambda x: x)
    y, new = replaced(X, state=state)
    net.after = torch.nn.Identity()
    assert_trees_equal(y, net(torch.from_numpy(X)).detach(), atol=1e-5)
    assert_trees_equal(new.get(model.buffers)["before.running_mean"], net.before.running_mean)


def test_buffers_changed_by_code_that_runs_again_are_refused():
    class Counter(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(()))
            self.fc = torch.nn.Linear(3, 3)

        def forward(self, x):
            self.count += 1
            return self.fc(x) * self.count

    model, state = with_state(Counter(), X)
    model = replace_module(model, "fc", jnp.sin)
    with pytest.raises(ModuleError, match="changes its buffers count in code that runs again"):
        model(X, state=state)


@pytest.mark.parametrize("cut", ["replaced", "patched"])
def test_dropout_before_and_behind_a_cut(cut):
    net = torch.nn.Sequential(
        torch.nn.Dropout(0.5), torch.nn.Linear(3, 3), torch.nn.Tanh(), torch.nn.Dropout(0.5)
    )
    model = from_torch(net)
    edited = replace_module(model, "2", jnp.tanh)
    if cut == "patched":
        edited = patch(model, {"2": lambda h: h})
    call = eqx.filter_jit(lambda m, x, key: m(x, key=key))
    x = np.ones((16, 3), np.float32)
    assert_trees_equal(call(edited, x, KEY), call(model, x, KEY), atol=1e-6)
    assert_trees_equal(edited(x, key=KEY), model(x, key=KEY), atol=1e-6)
    grad = eqx.filter_grad(lambda m: (m(x, key=KEY) ** 2).sum())
    assert_trees_equal(grad(edited).params, grad(model).params, rtol=1e-4, atol=1e-5)


def test_random_numbers_of_a_gpu_are_not_followed():
    check_generator("Net", ("layers.1",), torch.device("cpu"))
    check_generator("Net", (), torch.device("cuda"))
    with pytest.raises(ModuleError, match="`Net` draws random numbers on cuda.*layers.1"):
        check_generator("Net", ("layers.1",), torch.device("cuda"))


def test_caches_are_refused():
    class Cache:
        def __init__(self):
            self.seen = []

    class Layer(torch.nn.Module):
        def forward(self, x, cache):
            cache.seen.append(x)
            return x.sin()

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = Layer()

        def forward(self, x):
            return self.layer(x, Cache())

    model = from_torch(Model())
    assert_trees_equal(model(X), jnp.sin(X))
    with pytest.raises(ModuleError, match="layer in `Model` is given a Cache.*`use_cache=False`"):
        replace_module(model, "layer", lambda x, cache: jnp.sin(x))(X)
    assert_trees_equal(patch(model, {"layer": jnp.cos})(X), jnp.cos(jnp.sin(X)), atol=1e-6)


class Energy(torch.nn.Module):
    """A sum of two paths, of which one leads through `act`."""

    def __init__(self):
        super().__init__()
        self.first, self.act, self.last = (
            torch.nn.Linear(3, 4),
            torch.nn.Tanh(),
            torch.nn.Linear(4, 1),
        )

    def forward(self, x):
        return self.last(self.act(self.first(x))).sum() + (x**2).sum()


class Around(torch.nn.Module):
    def __init__(self, around):
        super().__init__()
        self.energy, self.around = Energy(), around

    def forward(self, x):
        with torch.enable_grad():
            return self.around(self.energy, x)


def by_grad(energy, x):
    x = x.detach().requires_grad_()
    return torch.autograd.grad(energy(x), x, create_graph=True)[0]


def by_backward(energy, x):
    x = x.detach().requires_grad_()
    torch.autograd.backward([energy(x)], inputs=[x])
    return x.grad


def by_dual_numbers(energy, x):
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        return torch.autograd.forward_ad.unpack_dual(energy(dual)).tangent


DERIVATIVES = {
    "grad": by_grad,
    "backward": by_backward,
}
TRANSFORMATIONS = {
    "jacobian": lambda energy, x: torch.autograd.functional.jacobian(energy, x),
    "func.grad": lambda energy, x: torch.func.grad(energy)(x),
    "func.jvp": lambda energy, x: torch.func.jvp(energy, (x,), (torch.ones_like(x),))[1],
    "func.vmap": lambda energy, x: torch.func.vmap(energy)(x),
    "dual numbers": by_dual_numbers,
}


@pytest.mark.parametrize("name", DERIVATIVES)
def test_derivatives_through_a_cut_are_refused(name):
    """They would be those of the other path."""
    model = from_torch(Around(DERIVATIVES[name]))
    y, captured = capture(model, "energy.act")(X)
    assert_trees_equal(y, model(X), exact=True)
    assert captured["energy.act"].shape == (5, 4)
    for edited in (
        replace_module(model, "energy.act", jnp.tanh),
        patch(model, {"energy.first": lambda h: h}),
    ):
        for call, x in ((edited, X), (eqx.filter_jit(edited), X)):
            with pytest.raises(ModuleError, match="takes a derivative in code around what JAX"):
                call(x)
    whole = replace_module(model, "energy", lambda x: (x**2).sum())
    with pytest.raises((ModuleError, ShapeError), match="takes a derivative|does not require grad"):
        whole(X)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's own use of it
@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_transformations_of_torch_around_a_cut_are_refused(name):
    model = from_torch(Around(TRANSFORMATIONS[name]))
    for edited in (
        replace_module(model, "energy.act", jnp.tanh),
        patch(model, {"energy.first": lambda h: h}),
        replace_module(model, "energy", lambda x: (x**2).sum()),
    ):
        with pytest.raises(ModuleError, match=r"inside of a torch transformation"):
            edited(X)
    if "func" in name or name == "dual numbers":
        with pytest.raises(ModuleError, match="it can neither be captured nor"):
            capture(model, "energy.act")(X)


def test_derivatives_beside_a_cut():
    """Whole in a submodule that finishes, or before what is called again."""
    for name in ("grad", "func.grad"):
        way = {**DERIVATIVES, **TRANSFORMATIONS}[name]
        net = torch.nn.Sequential(Around(way), torch.nn.Tanh(), Around(way))
        model = from_torch(net)
        edited = replace_module(model, "1", jnp.tanh)
        assert_trees_equal(edited(X), model(X), rtol=1e-4, atol=1e-5)
        grad = eqx.filter_grad(lambda m: m(X).sum())
        name = "0.energy.first.weight"
        assert_trees_equal(
            grad(edited).params[name], grad(model).params[name], rtol=1e-4, atol=1e-5
        )


class Checkpointed(torch.nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.net, self.tail, self.reentrant = Net(), torch.nn.Tanh(), reentrant

    def forward(self, x):
        y = torch.utils.checkpoint.checkpoint(self.net, x, use_reentrant=self.reentrant)
        return self.tail(y)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_of_torch_beside_a_cut(reentrant):
    model = from_torch(Checkpointed(reentrant))
    edited = replace_module(model, "tail", jnp.tanh)
    assert_trees_equal(edited(X), model(X), atol=1e-6)
    # To the input, too, without which reentrant checkpoints give torch no gradient.
    grad = eqx.filter_grad(lambda pair: pair[0](pair[1]).sum())
    (one, one_x), (other, other_x) = grad((edited, X)), grad((model, X))
    assert_trees_equal((one.params, one_x), (other.params, other_x), rtol=1e-4, atol=1e-5)
    _, captured = capture(model, "net.layers.*")(X)
    assert len(captured) == 3


def test_checkpoints_of_torch_around_a_cut():
    module = Checkpointed(reentrant=False)
    model = replace_module(from_torch(module), "net.layers.1", Twin(module.net.layers[1]))
    assert_trees_equal(model(X), module(torch.from_numpy(X)).detach(), atol=1e-5)
    with pytest.raises(Exception, match="runs again for a derivative.*Turn checkpoints off"):
        eqx.filter_grad(lambda m: m(X).sum())(model)


def test_calls_that_their_output_does_not_tell_run_again():
    """One that writes to its argument, gives it back, or changes an object that it is given."""

    class Adds(torch.nn.Module):
        def forward(self, x, seen):
            x += 1
            seen.append(x.sum())
            return x

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.adds, self.same, self.act = Adds(), torch.nn.Identity(), torch.nn.Tanh()

        def forward(self, x):
            seen = []
            h = x * 2
            h = self.same(self.adds(h, seen))
            return self.act(h) * h + seen[0]

    net = Model()
    expected = net(torch.from_numpy(X))
    assert_trees_equal(from_torch(net)(X), expected, rtol=1e-5)
    model = replace_module(from_torch(net), "act", jnp.tanh)
    assert_trees_equal(model(X), expected, rtol=1e-5)
    assert_trees_equal(eqx.filter_jit(model)(X), expected, rtol=1e-5)


@pytest.mark.parametrize("deep", [False, True])
def test_a_cut_inside_of_a_block(deep):
    net = Net()
    path = "layers.1.fc" if deep else "embed"
    layer = net.get_submodule(path)
    weight, bias = t2j(layer.weight.detach()), t2j(layer.bias.detach())
    model = replace_module(from_torch(net), path, lambda x: x @ weight.T + bias)
    y, captured = capture(model, ["layers.*", "layers.0.fc"])(X)
    assert_trees_equal(y, net(torch.from_numpy(X)).detach(), atol=1e-5)
    seen = hooked(net, lambda: net(torch.from_numpy(X)))
    assert_trees_equal(captured, {p: seen[p][0][2] for p in captured}, atol=1e-5)
    assert len(captured) == 4


# --- transformations


def replaced() -> tuple[Any, torch.nn.Module]:
    net = Net()
    return replace_module(from_torch(net), "layers.1", Twin(net.layers[1])), net


def test_replaced_under_vmap():
    model, net = replaced()
    xs = np.stack([X, 2 * X])
    expected = torch.stack([net(torch.from_numpy(x)) for x in xs]).detach()
    assert_trees_equal(jax.vmap(model)(xs), expected, atol=1e-5)
    grads = jax.vmap(jax.grad(lambda x: model(x).sum()))(xs)
    x = torch.from_numpy(xs).requires_grad_()
    net(x.flatten(0, 1)).sum().backward()
    assert_trees_equal(grads, x.grad, rtol=1e-4, atol=1e-5)


def test_replaced_under_a_second_derivative():
    model, net = replaced()
    f = lambda x: model(x[None])[0, 0]  # noqa: E731
    hessian = jax.hessian(f)(X[0])
    expected = torch.autograd.functional.hessian(
        lambda x: net(x[None])[0, 0], torch.from_numpy(X[0])
    )
    assert_trees_equal(hessian, expected, rtol=1e-3, atol=1e-5)
    _, tangent = jax.jvp(model, (X,), (jnp.ones_like(X),))
    _, expected = torch.autograd.functional.jvp(net, torch.from_numpy(X), torch.ones(X.shape))
    assert_trees_equal(tangent, expected.detach(), rtol=1e-4, atol=1e-5)


def test_replaced_in_a_scan():
    model, net = replaced()
    xs = np.stack([X, 2 * X, 3 * X])
    _, ys = jax.jit(lambda m, xs: jax.lax.scan(lambda c, x: (c, m(x)), 0, xs))(model, xs)
    expected = torch.stack([net(torch.from_numpy(x)) for x in xs]).detach()
    assert_trees_equal(ys, expected, atol=1e-5)


def test_replaced_in_filter_shard_map():
    model, net = replaced()
    x = np.resize(X, (8, 3))
    net(torch.from_numpy(x)).sum().backward()
    expected = net.embed.weight.grad, net.layers[1].fc.weight.grad
    with jax.set_mesh(explicit_mesh(4)):

        @filter_shard_map(in_specs=(P(), P("x")), out_specs=P())
        def grads(model, x):
            return eqx.filter_grad(lambda m: m(x).sum())(model)

        got = grads(model, jax.device_put(x, P("x")))
    actual = got.params["embed.weight"], got.layers[1].fc.weight
    assert_trees_equal(actual, expected, rtol=1e-3, atol=1e-4)


def test_out_specs_of_a_cut_model_are_refused():
    net = Net()
    with jax.set_mesh(explicit_mesh(4)):
        model = replace_module(from_torch(net, out_specs=P("x")), "head", jnp.sin)
        with pytest.raises(InputError, match="converted with `out_specs=`.*filter_shard_map"):
            model(jax.device_put(np.resize(X, (8, 3)), P("x")))


def test_serialised_copied_and_in_evaluation(tmp_path):
    model, _net = replaced()
    like, _ = replaced()
    eqx.tree_serialise_leaves(tmp_path / "model.eqx", model)
    loaded = eqx.tree_deserialise_leaves(tmp_path / "model.eqx", like)
    for one in (loaded, copy.deepcopy(model), eqx.nn.inference_mode(model)):
        assert_trees_equal(one(X), model(X), exact=True)


def test_a_part_with_something_replaced_inside():
    net = Net()
    fc = net.layers[1].fc
    weight, bias = t2j(fc.weight.detach()), t2j(fc.bias.detach())
    model = replace_module(from_torch(net), "layers.1.fc", lambda x: x @ weight.T + bias)
    h = torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH)
    assert_trees_equal(model.layers[1](t2j(h)), net.layers[1](h).detach(), atol=1e-6)
    assert list(model.layers[1].params) == ["norm.weight", "norm.bias"]
