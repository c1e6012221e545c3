"""Models go to torch, to disk and back bit for bit, and new weights never retrace."""

import copy
import gc
import pickle
from pathlib import Path
from typing import Any

import cloudpickle
import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import psutil
import pytest
import safetensors.torch
import torch
from jax.sharding import NamedSharding, PartitionSpec as P

from eqx_torch import (
    from_torch,
    InputError,
    load_state_dict,
    ModuleError,
    stack_modules,
    state_dict,
    t2j,
    to_torch,
    TorchModule,
)

from ..helpers import assert_trees_equal


DTYPES = [
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]


class Holder(torch.nn.Module):
    """A parameter, tied, and buffers of one dtype."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(3, 2).to(dtype))
        self.tied = self.weight
        self.scalar = torch.nn.Parameter(torch.randn(()).to(dtype), requires_grad=False)
        self.register_buffer("kept", torch.randn(4).to(dtype))
        self.register_buffer("derived", torch.randn(4).to(dtype), persistent=False)
        self.register_buffer("index", torch.tensor([2**40]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def network(width: int = 3) -> torch.nn.Module:
    """With statistics."""
    return torch.nn.Sequential(
        torch.nn.Linear(4, width), torch.nn.BatchNorm1d(width), torch.nn.LeakyReLU(0.1)
    )


def with_state(module: torch.nn.Module) -> tuple[TorchModule, eqx.nn.State]:
    return eqx.nn.make_with_state(from_torch)(module)


def assert_tensors_equal(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    """Bit for bit, in torch's dtypes and layouts."""
    assert list(actual) == list(expected)
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype, name
        assert actual[name].stride() == tensor.stride(), name
        flat = [
            t.detach().clone(memory_format=torch.contiguous_format) for t in (actual[name], tensor)
        ]
        assert_trees_equal(*[t.reshape(-1).view(torch.uint8) for t in flat], exact=True)


def everything(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return dict(module.named_parameters()) | dict(module.named_buffers())


@pytest.fixture(autouse=True)
def seeded(getkey) -> None:
    getkey()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_under_x64(dtype, x64):
    module = Holder(dtype)
    model = from_torch(module)
    assert_tensors_equal(state_dict(model), module.state_dict())
    back = to_torch(model)
    assert_tensors_equal(everything(back), everything(module))
    assert back.tied is back.weight
    assert not back.scalar.requires_grad
    other = Holder(dtype)
    loaded = load_state_dict(model, other.state_dict())
    assert_tensors_equal(state_dict(loaded), other.state_dict())
    assert_tensors_equal({"derived": to_torch(loaded).derived}, {"derived": module.derived})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_in_32_bits(dtype):
    """Parameters have the precision that JAX has; what JAX does not hold keeps all of torch's."""
    module = Holder(dtype)
    if dtype in (torch.float64, torch.complex128):
        with torch.no_grad():
            half = torch.complex64 if dtype.is_complex else torch.float32
            for parameter in module.parameters():
                parameter.copy_(parameter.to(half))
    model = from_torch(module)
    assert_tensors_equal(state_dict(model), module.state_dict())
    assert_tensors_equal(everything(to_torch(model)), everything(module))
    other = copy.deepcopy(module)
    other.kept = torch.zeros_like(other.kept)
    assert_tensors_equal(state_dict(load_state_dict(model, other.state_dict())), other.state_dict())


@pytest.mark.parametrize(
    ("layer", "memory_format"),
    [
        (lambda: torch.nn.Conv2d(4, 8, 3), torch.channels_last),
        (lambda: torch.nn.Conv3d(4, 8, 3), torch.channels_last_3d),
    ],
    ids=["channels_last", "channels_last_3d"],
)
def test_memory_formats(layer, memory_format):
    module = layer().to(memory_format=memory_format)
    assert_tensors_equal(state_dict(from_torch(module)), module.state_dict())
    module = torch.nn.Linear(3, 2)
    module.weight = torch.nn.Parameter(torch.randn(3, 2).t())
    assert_tensors_equal(everything(to_torch(from_torch(module))), everything(module))


def test_after_an_optimiser_step_and_loaded_into_torch():
    module = network()
    model, state = with_state(module)
    x = torch.randn(8, 4)

    def loss(model: Any, state: Any) -> Any:
        y, state = model(t2j(x), state=state)
        return jnp.sum(y**2), state

    grads, state = eqx.filter_grad(loss, has_aux=True)(model, state)
    model = eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, grads))
    fresh = network()
    fresh.load_state_dict(state_dict(model, state))
    assert_tensors_equal(fresh.state_dict(), to_torch(model, state).state_dict())
    optimiser = torch.optim.SGD(module.parameters(), 0.1)
    (module(x) ** 2).sum().backward()
    optimiser.step()
    assert_trees_equal(dict(fresh.state_dict()), dict(module.state_dict()), rtol=1e-4, atol=1e-5)
    other, other_state = with_state(network())
    again, again_state = load_state_dict(other, fresh.state_dict(), other_state)
    assert_tensors_equal(state_dict(again, again_state), fresh.state_dict())


def over_batch(array: Any) -> P:
    return P("batch", *(None,) * (array.ndim - 1)) if array.ndim else P()


def placed(tree: Any, devices: int) -> Any:
    mesh = jax.make_mesh((devices,), ("batch",))
    put = lambda a: jax.device_put(a, NamedSharding(mesh, over_batch(a)))  # noqa: E731
    return jax.tree.map(lambda a: put(a) if eqx.is_array(a) else a, tree)


def test_from_sharded_parameters():
    module = network(8)
    model, state = placed(with_state(module), 4)
    assert_tensors_equal(state_dict(model, state), module.state_dict())
    other = network(8)
    loaded, loaded_state = load_state_dict(model, other.state_dict(), state)
    assert_tensors_equal(state_dict(loaded, loaded_state), other.state_dict())
    for name, parameter in loaded.params.items():
        assert parameter.sharding == model.params[name].sharding


def test_tree_serialise_leaves(tmp_path: Path):
    module = network()
    eqx.tree_serialise_leaves(tmp_path / "model.eqx", with_state(module))
    model, state = eqx.tree_deserialise_leaves(tmp_path / "model.eqx", with_state(network()))
    assert_tensors_equal(state_dict(model, state), module.state_dict())


def test_safetensors_and_pth(tmp_path: Path):
    module = network()
    model, state = with_state(module)
    safetensors.torch.save_file(state_dict(model, state), tmp_path / "model.safetensors")
    torch.save(state_dict(model, state), tmp_path / "model.pth")
    for loaded in (
        safetensors.torch.load_file(tmp_path / "model.safetensors"),
        torch.load(tmp_path / "model.pth", weights_only=True),
    ):
        network().load_state_dict(loaded)
        fresh, fresh_state = with_state(network())
        assert_tensors_equal(
            state_dict(*load_state_dict(fresh, loaded, fresh_state)), module.state_dict()
        )


SHOWN = """\
TorchModule(
  params={
    '0.bias': f32[3], '0.weight': f32[3,4], '1.bias': f32[3], '1.weight': f32[3]
  },
  buffers=StateIndex(marker='TorchModule.buffers', init=_Sentinel()),
  inserted={},
  core=Sequential,
  inference=False
)"""


def test_what_is_shown():
    model, state = with_state(network())
    assert repr(model) == str(model) == eqx.tree_pformat(model) == SHOWN
    assert "'1.running_mean': f32[3]" in repr(state)
    paths = [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_flatten_with_path(model)[0]]
    assert paths[:2] == [".params['0.bias']", ".params['0.weight']"]
    assert len(paths) == 4
    large = from_torch(torch.nn.Sequential(*[torch.nn.Linear(200, 200) for _ in range(10)]))
    lines = repr(large).splitlines()
    assert [line.strip().rstrip(",") for line in lines[2:22]] == [
        f"'{i}.{name}" for i in range(10) for name in ("weight': f32[200,200]", "bias': f32[200]")
    ]
    assert len(lines) == 20 + 8


def doubled(module: torch.nn.Module, args: Any, result: Any) -> Any:
    return result * 2


@pytest.mark.parametrize(
    "copied",
    [
        copy.copy,
        copy.deepcopy,
        lambda x: pickle.loads(pickle.dumps(x)),
        lambda x: cloudpickle.loads(cloudpickle.dumps(x)),
    ],
    ids=["copy", "deepcopy", "pickle", "cloudpickle"],
)
def test_copies(copied):
    module = network()
    module.register_forward_hook(doubled)
    model, state = with_state(module)
    x = t2j(torch.randn(5, 4))
    again, new_state = copied((model, jax.tree.map(lambda x: x, state)))
    assert jax.tree.structure(again) == jax.tree.structure(model)
    assert again.core == model.core
    assert hash(again.core) == hash(model.core)
    assert_tensors_equal(state_dict(again, new_state), module.state_dict())
    y, _ = model(x, state=jax.tree.map(lambda x: x, state))
    assert_trees_equal(again(x, state=new_state)[0], y, exact=True)


def test_what_torch_cannot_pickle_says_so():
    module = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(3, 2))
    with pytest.raises(RuntimeError, match="parametrized modules is only supported through"):
        pickle.dumps(from_torch(module))


class Counting:
    """A jitted call that counts its traces."""

    def __init__(self) -> None:
        self.traces = 0
        self.call = eqx.filter_jit(self._call)

    def _call(self, model: Any, state: Any, x: Any) -> Any:
        self.traces += 1
        return model(x, state=state)[0]

    def __call__(self, model: Any, state: Any) -> jax.Array:
        return self.call(model, jax.tree.map(lambda x: x, state), jnp.ones((5, 4)))


def make_model(seed: int, slope: float = 0.1) -> torch.nn.Module:
    torch.manual_seed(seed)
    module = network()
    module[2].negative_slope = slope
    return module


def test_new_weights_share_one_trace_and_one_compilation(tmp_path: Path):
    model, state = with_state(make_model(0))
    call = Counting()
    compiled: list[str] = []
    call(model, state)
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, *_, **__: compiled.append(event) if "backend_compile" in event else None
    )
    grads = eqx.filter_grad(lambda m: jnp.sum(m.params["0.weight"] ** 2))(model)
    optimiser = optax.sgd(0.1)
    opt_state = optimiser.init(eqx.filter(model, eqx.is_inexact_array))
    updates, _ = optimiser.update(grads, opt_state)
    eqx.tree_serialise_leaves(tmp_path / "model.eqx", (model, state))
    others = [with_state(make_model(seed)) for seed in range(1, 4)]
    stack = stack_modules([other for other, _ in others])
    others += [
        load_state_dict(model, make_model(5).state_dict(), jax.tree.map(lambda x: x, state)),
        (eqx.apply_updates(model, updates), state),
        eqx.tree_deserialise_leaves(tmp_path / "model.eqx", with_state(make_model(6))),
        pickle.loads(pickle.dumps((model, state))),
        (jax.tree.map(lambda a: a[1] if eqx.is_array(a) else a, stack), state),
    ]
    compiled.clear()
    for other, other_state in others:
        y = call(other, other_state)
        module = to_torch(other, other_state)
        assert_trees_equal(y, module(torch.ones(5, 4)).detach(), rtol=1e-4, atol=1e-5)
    jax.monitoring.clear_event_listeners()
    assert call.traces == 1
    assert compiled == []


def test_what_matters_has_a_trace_of_its_own():
    call = Counting()
    call(*with_state(make_model(0)))
    for count, change in enumerate(
        [
            lambda m: setattr(m[2], "negative_slope", 0.3),
            lambda m: m[0].register_forward_hook(doubled),
            lambda m: m[1].eval(),
        ]
    ):
        module = make_model(1)
        change(module)
        y = call(*with_state(module))
        assert_trees_equal(y, module(torch.ones(5, 4)).detach(), rtol=1e-4, atol=1e-5)
        assert call.traces == count + 2


def test_later_changes_of_the_torch_module_do_not_arrive():
    module = make_model(0)
    original = copy.deepcopy(module)
    model, state = with_state(module)
    with torch.no_grad():
        module[0].weight.zero_()
        module[1].running_mean.add_(1)
    module[2].negative_slope = 5.0
    module[0].register_forward_hook(doubled)
    module.eval()
    y, state = model(jnp.ones((5, 4)), state=state)
    assert_trees_equal(y, original(torch.ones(5, 4)).detach(), rtol=1e-4, atol=1e-5)
    back = to_torch(model, state)
    assert back.training
    assert back[2].negative_slope == 0.1


def _memory() -> int:
    gc.collect()
    return psutil.Process().memory_info().rss


def test_a_hundred_conversions_leave_memory_flat():
    call = eqx.filter_jit(lambda model, x: model(x))

    def convert() -> None:
        module = torch.nn.Linear(1024, 1024)  # four megabytes
        model = from_torch(module)
        jax.block_until_ready(call(model, jnp.ones((1, 1024))))
        to_torch(model)

    for _ in range(10):
        convert()
    before = _memory()
    for _ in range(100):
        convert()
    assert _memory() - before < 100e6


@pytest.mark.parametrize("function", [to_torch, state_dict, load_state_dict])
def test_a_torch_module_in_place_of_a_model(function):
    args = (torch.nn.Linear(2, 2), {}) if function is load_state_dict else (torch.nn.Linear(2, 2),)
    message = (
        f"^`{function.__name__}` takes a model made by `from_torch`, but got a Linear, which is a "
        "torch module already.$"
    )
    with pytest.raises(ModuleError, match=message):
        function(*args)


@pytest.mark.parametrize("shape", [(1, 3), (2, 1), (3,), (), (4, 2, 3)], ids=str)
def test_nothing_is_broadcast_on_the_way_back(shape):
    model = eqx.tree_at(
        lambda m: m.params["weight"], from_torch(torch.nn.Linear(3, 2)), jnp.ones(shape)
    )
    message = r"parameter weight of `Linear` has shape .* but the torch module has \[2, 3\]"
    for back in (to_torch, state_dict, lambda m: load_state_dict(m, {})):
        with pytest.raises(ModuleError, match=message):
            back(model)


def test_no_buffer_is_broadcast_on_the_way_back():
    model, state = eqx.nn.make_with_state(from_torch)(torch.nn.BatchNorm1d(3))
    small = jax.tree.map(lambda a: a[:1] if a.ndim else a, state)
    message = "buffer running_mean of `BatchNorm1d` has shape .1., but the torch module has .3."
    with pytest.raises(ModuleError, match=message):
        to_torch(model, small)
    with pytest.raises(InputError, match=message):
        model(jnp.ones((4, 3)), state=small)
