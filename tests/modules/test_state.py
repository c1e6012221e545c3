"""Buffers that a forward changes live in an `equinox.nn.State`, and end as they do in torch."""

import copy
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from jax.sharding import AxisType, PartitionSpec as P

from eqx_torch import from_torch, InputError, ModuleError, t2j, to_torch, tree_t2j

from ..helpers import assert_trees_equal


STATISTICS = ["running_mean", "running_var", "num_batches_tracked"]


class Net(torch.nn.Module):
    """A convolution with BatchNorm, and a head."""

    def __init__(self, norm: Any = torch.nn.BatchNorm2d):
        super().__init__()
        self.conv = torch.nn.Conv2d(1, 3, 3, padding=1)
        self.bn = norm(3)
        self.head = torch.nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.bn(self.conv(x))).mean((2, 3)))


class Block(torch.nn.Module):
    """Of a residual network."""

    def __init__(self, width: int):
        super().__init__()
        self.conv1 = torch.nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn1 = torch.nn.BatchNorm2d(width)
        self.conv2 = torch.nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = torch.nn.BatchNorm2d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(x + self.bn2(self.conv2(y)))


def resnet() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 4, 3, padding=1, bias=False),
        torch.nn.BatchNorm2d(4),
        torch.nn.ReLU(inplace=True),
        Block(4),
        torch.nn.MaxPool2d(2),
        Block(4),
        torch.nn.AdaptiveAvgPool2d(1),
        torch.nn.Flatten(),
        torch.nn.Linear(4, 3),
    )


class Counter(torch.nn.Module):
    """Buffers of no known layer: one that changes, one that is replaced, one that is only read."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("last", torch.zeros(3))
        self.register_buffer("scale", torch.full((3,), 2.0))
        self.register_buffer("nothing", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.last = x.detach() * self.scale
        return x * self.scale + self.calls


def with_state(module: torch.nn.Module, *args: Any, **options: Any) -> Any:
    return eqx.nn.make_with_state(from_torch)(module, *args, **options)


def buffers(model: Any, state: Any) -> dict[str, jax.Array]:
    return dict(state.get(model.buffers))


def torch_buffers(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: b.detach() for name, b in module.named_buffers()}


@pytest.fixture
def x(getkey) -> torch.Tensor:
    getkey()
    return torch.randn(4, 1, 5, 5)


def test_statistics_after_two_calls(x):
    module = Net()
    model, state = with_state(module)
    assert_trees_equal(buffers(model, state), torch_buffers(module), exact=True)
    call = eqx.filter_jit(lambda model, x, state: model(x, state=state))
    for _ in range(2):
        y, state = call(model, t2j(x), state)
        assert_trees_equal(y, module(x).detach())
    assert_trees_equal(buffers(model, state), torch_buffers(module))
    assert_trees_equal(torch_buffers(to_torch(model, state)), torch_buffers(module))


def test_calls_leave_the_old_buffers_as_they_were(x):
    model, state = with_state(Net())
    old = buffers(model, state)
    before = jax.tree.map(jnp.copy, old)
    model(t2j(x), state=state)
    assert_trees_equal(old, before, exact=True)


def test_gradients_with_state_as_aux(x):
    module = Net()
    model, state = with_state(module)

    @eqx.filter_jit
    def step(model: Any, state: Any, x: Any) -> Any:
        def loss(model: Any, state: Any) -> Any:
            y, state = model(x, state=state)
            return jnp.sum(y**2), state

        return eqx.filter_value_and_grad(loss, has_aux=True)(model, state)

    (loss, state), grads = step(model, state, t2j(x))
    expected = (module(x) ** 2).sum()
    expected.backward()
    assert_trees_equal(loss, expected.detach(), rtol=1e-5)
    assert_trees_equal(
        grads.params, {n: p.grad for n, p in module.named_parameters()}, rtol=1e-4, atol=1e-5
    )
    assert_trees_equal(buffers(model, state), torch_buffers(module))


@pytest.mark.parametrize(
    "norm",
    [
        lambda: torch.nn.BatchNorm1d(3),
        lambda: torch.nn.InstanceNorm1d(4, track_running_stats=True),
        lambda: torch.nn.utils.parametrizations.spectral_norm(torch.nn.Linear(3, 3)),
    ],
    ids=["batch", "instance", "spectral"],
)
@pytest.mark.parametrize("transform", [lambda f: f, eqx.filter_jit], ids=["eager", "jit"])
def test_gradients_of_two_calls_that_pass_on_the_state(norm, transform, getkey):
    """torch's own statistics are constants to its autograd, whatever they were computed from."""
    network = torch.nn.Sequential(torch.nn.Linear(3, 3), norm())
    x = jax.random.normal(getkey(), (4, 3))
    model, state = eqx.nn.make_with_state(from_torch)(network)

    @transform
    @eqx.filter_grad
    def gradient(model, state):
        y, state = model(x, state=state)
        z, state = model(jnp.sin(3 * x), state=state)
        return (y * z * z).sum()

    grads = gradient(model, state).params
    tensor = torch.from_numpy(np.array(x))
    y, z = network(tensor), network((3 * tensor).sin())
    (y * z * z).sum().backward()
    expected = {name: p.grad for name, p in network.named_parameters()}
    assert_trees_equal(grads, expected, rtol=1e-4, atol=1e-4)


def test_gradients_in_evaluation_without_a_state(getkey):
    network = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3)).eval()
    x = jax.random.normal(getkey(), (4, 3))
    grads = eqx.filter_grad(lambda model: (model(x) ** 3).sum())(from_torch(network))
    network(torch.from_numpy(np.array(x))).pow(3).sum().backward()
    expected = {name: p.grad for name, p in network.named_parameters()}
    assert_trees_equal(grads.params, expected, rtol=1e-4, atol=1e-4)


def test_state_of_each_member_of_a_batch(x):
    module = Net()
    model, state = with_state(module)
    xs = torch.stack([x, 2 * x])
    call = lambda x: model(x, state=state)  # noqa: E731
    with pytest.warns(UserWarning, match="cannot batch `Net`"):
        ys, states = eqx.filter_vmap(call)(t2j(xs))
    for i in range(2):
        member = copy.deepcopy(module)
        assert_trees_equal(ys[i], member(xs[i]).detach())
        own = jax.tree.map(lambda b, i=i: b[i], buffers(model, states))
        assert_trees_equal(own, torch_buffers(member))


def test_state_through_a_scan(x):
    module = Net()
    model, state = with_state(module)
    xs = torch.stack([x, 2 * x, 3 * x])

    @eqx.filter_jit
    def run(state: Any, xs: Any) -> Any:
        def body(state: Any, x: Any) -> Any:
            y, state = model(x, state=state)
            return state, y

        return jax.lax.scan(body, state, xs)

    state, ys = run(state, t2j(xs))
    assert_trees_equal(ys, torch.stack([module(x) for x in xs]).detach())
    assert_trees_equal(buffers(model, state), torch_buffers(module))


def test_frozen_normalisation_in_a_training_parent(x):
    module = Net()
    module.bn.eval()
    model, state = with_state(module)
    y, state = model(t2j(x), state=state)
    assert_trees_equal(y, module(x).detach())
    assert_trees_equal(buffers(model, state), torch_buffers(module), exact=True)
    assert int(buffers(model, state)["bn.num_batches_tracked"]) == 0


def test_frozen_normalisation_needs_no_state(x):
    module = Net()
    module.bn.eval()
    assert_trees_equal(from_torch(module)(t2j(x)), module(x).detach())


def test_inference_mode_both_ways(x):
    module = Net()
    model, state = with_state(module)
    _, state = model(t2j(x), state=state)
    module(x)
    inference = eqx.nn.inference_mode(model)
    module.eval()
    y, unchanged = inference(t2j(x), state=state)
    assert_trees_equal(y, module(x).detach())
    assert_trees_equal(buffers(model, unchanged), torch_buffers(module))
    training = eqx.nn.inference_mode(inference, value=False)
    module.train()
    y, changed = training(t2j(x), state=unchanged)
    assert_trees_equal(y, module(x).detach())
    assert_trees_equal(buffers(model, changed), torch_buffers(module))


def test_inference_keeps_frozen_layers_frozen_afterwards(x):
    module = Net()
    module.bn.eval()
    model, state = with_state(module)
    model = eqx.nn.inference_mode(eqx.nn.inference_mode(model), value=False)
    y, state = model(t2j(x), state=state)
    assert_trees_equal(y, module(x).detach())
    assert int(buffers(model, state)["bn.num_batches_tracked"]) == 0


def test_module_converted_in_evaluation_can_be_trained(x):
    module = Net().eval()
    model, state = with_state(module)
    assert model.inference
    y, state = model(t2j(x), state=state)
    assert_trees_equal(y, module(x).detach())
    y, state = eqx.nn.inference_mode(model, value=False)(t2j(x), state=state)
    module.train()
    assert_trees_equal(y, module(x).detach())
    assert_trees_equal(buffers(model, state), torch_buffers(module))


def test_evaluation_without_a_state(x):
    module = Net()
    module(x)
    module.eval()
    assert_trees_equal(from_torch(module)(t2j(x)), module(x).detach())


def test_in_a_sequential_with_state(x):
    module = Net()

    def make() -> Any:
        return eqx.nn.Sequential([from_torch(module), eqx.nn.Lambda(lambda y: 2 * y)])

    model, state = eqx.nn.make_with_state(make)()
    y, state = model(t2j(x), state)
    assert_trees_equal(y, 2 * module(x).detach())
    assert_trees_equal(buffers(model.layers[0], state), torch_buffers(module))


def test_in_a_sequential_without_state():
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Dropout(0.5))
    model = eqx.nn.Sequential([from_torch(module), eqx.nn.Lambda(jax.nn.relu)])
    x = jnp.ones((2, 3))
    y = model(x, key=jax.random.key(0))
    assert y.shape == (2, 4)
    assert not model.is_stateful()
    evaluated = eqx.nn.inference_mode(model)(x)
    assert_trees_equal(evaluated, torch.relu(module.eval()(torch.ones(2, 3))).detach())


def test_two_modules_with_state_in_one_model(x):
    first, second = torch.nn.BatchNorm2d(1), Net()

    class Both(eqx.Module):
        first: Any
        second: Any

        def __init__(self):
            self.first = from_torch(first)
            self.second = from_torch(second)

        def __call__(self, x: Any, state: Any) -> Any:
            x, state = self.first(x, state=state)
            return self.second(x, state=state)

    model, state = eqx.nn.make_with_state(Both)()
    y, state = eqx.filter_jit(model)(t2j(x), state)
    assert_trees_equal(y, second(first(x)).detach())
    assert_trees_equal(buffers(model.first, state), torch_buffers(first))
    assert_trees_equal(buffers(model.second, state), torch_buffers(second))


def test_changing_buffers_are_found_by_examples():
    module = Counter()
    model, state = with_state(module, torch.zeros(3))
    assert set(buffers(model, state)) == {"calls", "last"}
    x = torch.arange(3.0)
    y, state = model(t2j(x), state=state)
    assert_trees_equal(y, module(x))
    expected = torch_buffers(module)
    del expected["scale"]
    assert_trees_equal(buffers(model, state), expected)


def test_changing_buffers_are_found_though_the_module_evaluates(x):
    model, state = with_state(torch.nn.Sequential(Counter()).eval(), torch.zeros(3))
    assert set(buffers(model, state)) == {"0.calls", "0.last"}


def test_changing_buffers_are_named():
    model, state = with_state(Counter(), state=["calls", "last"])
    _, state = model(jnp.ones(3), state=state)
    assert_trees_equal(buffers(model, state), {"calls": 1, "last": jnp.full(3, 2.0)})


def test_change_of_a_constant_is_an_error():
    model = from_torch(Counter())
    assert model.buffers is None
    message = (
        '`Counter` changes its buffers "calls", "last" in `forward`, but they were taken for '
        r'constants. Convert it with `state=\["calls", "last"\]`, or with example arguments'
    )
    with pytest.raises(ModuleError, match=message):
        model(jnp.ones(3))


def test_change_of_a_constant_at_run_time_is_an_error():
    """A change that depends on values does not show before the program runs."""

    class Sometimes(Counter):
        def forward(self, x):
            if x.sum() > 0:
                self.calls += 1
            return x

    model = from_torch(Sometimes(), output_shapes=jax.ShapeDtypeStruct((3,), jnp.float32))
    assert_trees_equal(model(jnp.zeros(3)), jnp.zeros(3))
    with pytest.raises(Exception, match=r'`state=\["calls"\]`'):
        jax.block_until_ready(model(jnp.ones(3)))
    assert_trees_equal(model(jnp.zeros(3)), jnp.zeros(3))


def test_synchronised_statistics_of_shards_are_refused(x):
    module = Net(torch.nn.SyncBatchNorm)
    message = r"`Net` has SyncBatchNorm layers \(bn\), but with `out_specs=` each shard"
    with pytest.raises(ModuleError, match=message):
        from_torch(module, out_specs=P("x"))
    model, state = with_state(module)
    y, state = model(t2j(x), state=state)
    assert_trees_equal(y, module(x).detach())
    assert_trees_equal(buffers(model, state), torch_buffers(module))


def test_call_without_state_is_an_error(x):
    model, _ = with_state(Net())
    message = (
        r"the forward of `Net` changes its buffers bn.running_mean, bn.running_var, "
        r"bn.num_batches_tracked, but was called without `state=`.*"
        r"make_with_state\(from_torch\)\(module\)"
    )
    with pytest.raises(ModuleError, match=message):
        model(t2j(x))
    with pytest.raises(ModuleError, match=message + ".*inference_mode"):
        from_torch(Net())(t2j(x))  # which still has the values that inference would use


def test_other_value_than_a_state_is_an_error(x):
    model, _ = with_state(Net())
    with pytest.raises(InputError, match="`state=` of `Net` is a dict, but takes the"):
        model(t2j(x), state={})


@pytest.mark.parametrize("names", [["nothing"], ["weight"], "calls"])
def test_wrong_names_are_an_error(names):
    with pytest.raises(ModuleError, match=r"pass a list of names of buffers of `Counter`"):
        from_torch(Counter(), state=names)


@pytest.mark.parametrize(
    "normalised",
    [
        torch.nn.utils.parametrizations.spectral_norm,
        pytest.param(
            torch.nn.utils.spectral_norm, marks=pytest.mark.filterwarnings("ignore::FutureWarning")
        ),
    ],
)
def test_vectors_of_spectral_norm(normalised, getkey):
    getkey()
    module = normalised(torch.nn.Linear(4, 3))
    model, state = with_state(module)
    x = torch.randn(2, 4)
    for _ in range(3):
        (loss, state), grads = eqx.filter_value_and_grad(_squares, has_aux=True)(
            model, state, t2j(x)
        )
        module.zero_grad()
        expected = (module(x) ** 2).sum()
        expected.backward()
        assert_trees_equal(loss, expected.detach(), rtol=1e-5)
        expected_grads = {n: p.grad for n, p in module.named_parameters()}
        assert_trees_equal(grads.params, expected_grads, rtol=1e-4, atol=1e-5)
    assert_trees_equal(buffers(model, state), torch_buffers(module), rtol=1e-5)


def _squares(model: Any, state: Any, x: Any) -> Any:
    y, state = model(x, state=state)
    return jnp.sum(y**2), state


# Training of a residual network, beside torch.


def _data(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    xs = torch.randn(count, 16, 1, 8, 8, generator=generator)
    return xs, torch.randint(0, 3, (count, 16), generator=generator)


def _torch_losses(module: torch.nn.Module, loss_of: Any) -> list[float]:
    optimiser = torch.optim.SGD(module.parameters(), 0.05, momentum=0.9)
    losses = []
    for x, labels in zip(*_data(20), strict=True):
        optimiser.zero_grad()
        loss = loss_of(module, x, labels)
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    return losses


def _losses(model: Any, state: Any, place: Any) -> Any:
    optimiser = optax.sgd(0.05, momentum=0.9)
    opt_state = optimiser.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit
    def step(model: Any, state: Any, opt_state: Any, x: Any, labels: Any) -> Any:
        def loss_of(model: Any, state: Any) -> Any:
            y, state = model(x, state=state)
            y = jax.sharding.reshard(y, P()) if place is not _nowhere else y
            losses = optax.softmax_cross_entropy_with_integer_labels(y, labels)
            return jnp.mean(losses), state

        value_and_grad = eqx.filter_value_and_grad(loss_of, has_aux=True)
        (loss, state), grads = value_and_grad(model, state)
        updates, opt_state = optimiser.update(grads, opt_state)
        return eqx.apply_updates(model, updates), state, opt_state, loss

    losses = []
    for x, labels in zip(*_data(20), strict=True):
        x, labels = place(t2j(x), P("x")), place(t2j(labels.int()), P())
        model, state, opt_state, loss = step(model, state, opt_state, x, labels)
        losses.append(float(loss))
    return model, state, losses


def _nowhere(x: Any, spec: Any) -> Any:
    del spec
    return x


def _averaged_over_shards(module: torch.nn.Module, x: torch.Tensor, labels: Any) -> torch.Tensor:
    """What a call split over four devices computes: statistics of each shard, then averaged."""
    ys, after = [], []
    for shard in x.chunk(4):
        own = {name: b.clone() for name, b in module.named_buffers()}
        ys.append(torch.func.functional_call(module, own, (shard,)))
        after.append(own)
    for name, b in module.named_buffers():
        values = torch.stack([buffers[name] for buffers in after])
        b.copy_(values.mean(0) if b.is_floating_point() else values.amax(0))
    return torch.nn.functional.cross_entropy(torch.cat(ys), labels)


def _whole(module: torch.nn.Module, x: torch.Tensor, labels: Any) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(module(x), labels)


def test_residual_network_trains_as_in_torch(getkey):
    getkey()
    module = resnet()
    model, state = with_state(module)
    expected = _torch_losses(module, _whole)
    model, state, losses = _losses(model, state, _nowhere)
    assert_trees_equal(losses, expected, rtol=1e-4, atol=1e-5)
    assert_trees_equal(buffers(model, state), torch_buffers(module), rtol=1e-3, atol=1e-4)


def test_residual_network_trains_on_four_devices(getkey):
    getkey()
    module = resnet()
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:4])
    with jax.set_mesh(mesh):
        model, state = with_state(module, out_specs=P("x"))
        model, state = eqx.filter_shard((model, state), jax.NamedSharding(mesh, P()))
        expected = _torch_losses(module, _averaged_over_shards)
        place = lambda x, spec: jax.device_put(x, jax.NamedSharding(mesh, spec))  # noqa: E731
        model, state, losses = _losses(model, state, place)
    assert_trees_equal(losses, expected, rtol=1e-4, atol=1e-5)
    assert_trees_equal(buffers(model, state), torch_buffers(module), rtol=1e-3, atol=1e-4)
    for value in tree_t2j(list(buffers(model, state).values())):
        assert value.sharding.is_fully_replicated
