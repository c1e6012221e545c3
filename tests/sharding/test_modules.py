"""Modules on a mesh: training equals the unsharded run, with the expected collectives only."""

import collections
import re
from collections.abc import Callable
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
    InputError,
    ShardingError,
    stack_modules,
    t2j,
    torch2jax,
)

from ..helpers import assert_trees_equal


STEPS = 4
OPTIMIZER = optax.adam(1e-2)
DEVICES = pytest.mark.parametrize("devices", [4, 8])
MESHES = pytest.mark.parametrize(
    ("devices", "kind"), [(8, AxisType.Explicit), (4, AxisType.Auto)], ids=["explicit", "auto"]
)
KINDS = pytest.mark.parametrize(
    "kind", [AxisType.Explicit, AxisType.Auto], ids=["explicit", "auto"]
)


class Parallel(eqx.Module):
    """A column-parallel layer and a row-parallel one, whose partial results are summed."""

    column: Any
    row: Any


def network() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8))


def make_mesh(devices: int, axis: str, kind: AxisType = AxisType.Explicit) -> jax.sharding.Mesh:
    return jax.make_mesh((devices,), (axis,), axis_types=(kind,))


def collectives(text: str) -> dict[str, int]:
    kinds = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
    return dict(collections.Counter(re.findall(rf"[\])}}] ({kinds})(?:-start)?\(", text)))


def squares(y: Any, target: Any) -> Any:
    return jnp.mean((y - target) ** 2)


def train(model: Any, loss: Callable[..., Any], x: Any, target: Any) -> tuple[Any, Any, Any]:
    """The model and the losses after some steps, and the collectives of one."""
    opt_state = OPTIMIZER.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit
    def step(model: Any, opt_state: Any, x: Any, target: Any) -> Any:
        value, grads = eqx.filter_value_and_grad(loss)(model, x, target)
        updates, opt_state = OPTIMIZER.update(grads, opt_state)
        return eqx.apply_updates(model, updates), opt_state, value

    losses = []
    with jax.numpy_dtype_promotion("standard"):  # which optax's Adam needs
        compiled = step.lower(model, opt_state, x, target).compile().compiled
        for _ in range(STEPS):
            model, opt_state, value = step(model, opt_state, x, target)
            losses.append(value)
    return model, losses, collectives(compiled.as_text())


def assert_trained_alike(model: Any, losses: Any, expected: tuple[Any, Any, Any]) -> None:
    arrays = [eqx.filter(m, eqx.is_array) for m in (model, expected[0])]
    leaves = [jax.tree.leaves(a) for a in arrays]
    assert_trees_equal(*leaves, rtol=1e-4, atol=1e-5)
    assert_trees_equal(losses, expected[1], rtol=1e-5)
    assert expected[2] == {}


def put(tree: Any, mesh: Any, spec: Any) -> Any:
    """The arrays of a tree on a mesh, by a spec or by a function of each array."""
    spec_of = spec if callable(spec) else lambda _: spec
    move = lambda a: jax.device_put(a, NamedSharding(mesh, spec_of(a)))  # noqa: E731
    return jax.tree.map(lambda a: move(a) if eqx.is_array(a) else a, tree)


@pytest.fixture
def data(getkey) -> tuple[jax.Array, jax.Array]:
    getkey()
    return t2j(torch.randn(16, 4)), t2j(torch.randn(16, 8))


def call_squares(model: Any, x: Any, target: Any) -> Any:
    return squares(model(x), target)


@DEVICES
@pytest.mark.covering(1)
def test_data_parallel(data, devices):
    net = network()
    expected = train(from_torch(net), call_squares, *data)
    mesh = make_mesh(devices, "batch")
    with jax.set_mesh(mesh):
        model = from_torch(net, out_specs=P("batch"))
        model, losses, found = train(model, call_squares, *put(data, mesh, P("batch")))
    assert_trained_alike(model, losses, expected)
    assert found == {"all-reduce": 1}


@MESHES
@pytest.mark.covering(1)
def test_data_parallel_inside_shard_map(data, devices, kind):
    net = network()
    expected = train(from_torch(net), call_squares, *data)
    mesh = make_mesh(devices, "batch", kind)

    @filter_shard_map(mesh=mesh, in_specs=(P(), P("batch"), P("batch")), out_specs=P())
    def loss(model: Any, x: Any, target: Any) -> Any:
        return jax.lax.pmean(squares(model(x), target), "batch")

    model = put(from_torch(net), mesh, P())
    model, losses, found = train(model, loss, *put(data, mesh, P("batch")))
    assert_trained_alike(model, losses, expected)
    assert found == {"all-reduce": 1}


def parallel() -> Parallel:
    torch.manual_seed(0)
    return Parallel(
        from_torch(torch.nn.Linear(4, 8)), from_torch(torch.nn.Linear(8, 8, bias=False))
    )


def parallel_squares(model: Any, x: Any, target: Any) -> Any:
    return squares(model.row(jnp.tanh(model.column(x))), target)


@MESHES
@pytest.mark.parametrize("inferred", [True, False], ids=["inferred", "in_specs"])
@pytest.mark.covering(1)
def test_tensor_parallel_inside_shard_map(data, devices, kind, inferred):
    if inferred and kind == AxisType.Auto:
        pytest.skip("types do not tell how arrays are sharded over Auto axes")
    whole = parallel()
    expected = train(whole, parallel_squares, *data)
    # Each device calls a torch module of the shape of its part of the weights.
    part = Parallel(
        from_torch(torch.nn.Linear(4, 8 // devices)),
        from_torch(torch.nn.Linear(8 // devices, 8, bias=False)),
    )
    params = lambda m: (m.column.params, m.row.params)  # noqa: E731
    model = eqx.tree_at(params, part, params(whole))
    mesh = make_mesh(devices, "model", kind)
    specs = Parallel(P("model"), P(None, "model"))
    in_specs = None if inferred else (specs, P(), P())

    @filter_shard_map(mesh=mesh, in_specs=in_specs, out_specs=P())
    def loss(model: Any, x: Any, target: Any) -> Any:
        partial = model.row(jnp.tanh(model.column(x)))
        return squares(jax.lax.psum(partial, "model"), target)

    sharded = Parallel(
        put(model.column, mesh, specs.column),
        put(model.row, mesh, specs.row),
    )
    sharded, losses, found = train(sharded, loss, *put(data, mesh, P()))
    assert_trained_alike(sharded, losses, expected)
    assert found == {"all-reduce": 1}
    assert sharded.column.params["weight"].sharding.spec[0] == "model"


def over_batch(array: jax.Array) -> P:
    return P("batch", *(None,) * (array.ndim - 1))


@DEVICES
@pytest.mark.covering(1)
def test_fully_sharded_data_parallel(data, devices):
    net = network()
    expected = train(from_torch(net), call_squares, *data)
    mesh = make_mesh(devices, "batch")

    def loss(model: Any, x: Any, target: Any) -> Any:
        arrays, rest = eqx.partition(model, eqx.is_array)
        whole = jax.tree.map(lambda a: jax.sharding.reshard(a, P()), arrays)
        return squares(eqx.combine(whole, rest)(x), target)

    with jax.set_mesh(mesh):
        model = put(from_torch(net, out_specs=P("batch")), mesh, over_batch)
        model, losses, found = train(model, loss, *put(data, mesh, P("batch")))
    assert_trained_alike(model, losses, expected)
    # The gradients and the loss are summed by one, and then each device keeps its part.
    assert found == {"all-gather": 4, "all-reduce": 1}
    for parameter in model.params.values():
        assert parameter.sharding.is_equivalent_to(
            NamedSharding(mesh, over_batch(parameter)), parameter.ndim
        )


@MESHES
@pytest.mark.covering(1)
def test_fully_sharded_data_parallel_inside_shard_map(data, devices, kind):
    net = network()
    expected = train(from_torch(net), call_squares, *data)
    mesh = make_mesh(devices, "batch", kind)

    @filter_shard_map(mesh=mesh, in_specs=P("batch"), out_specs=P())
    def loss(model: Any, x: Any, target: Any) -> Any:
        arrays, rest = eqx.partition(model, eqx.is_array)
        gather = lambda a: jax.lax.all_gather(a, "batch", tiled=True)  # noqa: E731
        whole = eqx.combine(jax.tree.map(gather, arrays), rest)
        return jax.lax.pmean(squares(whole(x), target), "batch")

    model = put(from_torch(net), mesh, over_batch)
    model, losses, found = train(model, loss, *put(data, mesh, P("batch")))
    assert_trained_alike(model, losses, expected)
    assert found == {"all-gather": 4, "reduce-scatter": 4, "all-reduce": 1}


def normalised(**options: Any) -> tuple[Any, Any]:
    torch.manual_seed(1)
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.5))
    return eqx.nn.make_with_state(from_torch)(net, **options)


def averaged(state: Any, axis: str) -> Any:
    inexact = lambda b: jnp.issubdtype(b.dtype, jnp.inexact)  # noqa: E731
    mean = lambda b: (jax.lax.pmean if inexact(b) else jax.lax.pmax)(b, axis)  # noqa: E731
    return jax.tree.map(mean, state)


@KINDS
@pytest.mark.parametrize("inferred", [True, False], ids=["inferred", "in_specs"])
@pytest.mark.parametrize("decorated", [True, False], ids=["decorator", "function"])
@pytest.mark.covering
def test_shard_map_with_state_and_key(data, kind, inferred, decorated):
    if inferred and kind == AxisType.Auto:
        pytest.skip("types do not tell how arrays are sharded over Auto axes")
    mesh = make_mesh(4, "batch", kind)
    model, state = put(normalised(), mesh, P())
    x = put(data[0], mesh, P("batch"))
    keys = put(jax.random.split(jax.random.key(0), 4), mesh, P("batch"))

    def run(model: Any, state: Any, x: Any, keys: Any) -> Any:
        y, state = model(x, state=state, key=keys[0])
        return y, averaged(state, "batch")

    in_specs = None if inferred else (P(), P(), P("batch"), P("batch"))
    options = {"mesh": mesh, "in_specs": in_specs, "out_specs": (P("batch"), P())}
    call = filter_shard_map(**options)(run) if decorated else filter_shard_map(run, **options)
    assert call.__name__ == "run"
    y, new = eqx.filter_jit(call)(model, _copy(state), x, keys)

    alone, first = normalised()
    shards = [
        alone(
            data[0][4 * i : 4 * i + 4],
            state=_copy(first),
            key=jax.random.split(jax.random.key(0), 4)[i],
        )
        for i in range(4)
    ]
    assert_trees_equal(y, jnp.concatenate([y for y, _ in shards]))
    means = jax.tree.map(
        lambda *b: np.mean(np.stack(b), 0).astype(b[0].dtype), *[s for _, s in shards]
    )
    assert_trees_equal(jax.tree.leaves(new), jax.tree.leaves(means))


GATHERED = "jax.tree.map(lambda a: jax.sharding.reshard(a, P()) if eqx.is_array(a) else a, model)"


class Scaled(torch.nn.Module):
    """Each shard of `scale` is broadcast where the whole is meant."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.arange(4.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


LEFT_SHARDED = {
    "embedding": (lambda: torch.nn.Embedding(8, 2), "weight", P("x"), jnp.arange(8) % 3),
    "scale": (Scaled, "scale", P("x"), jnp.ones((8, 4))),
    "bias": (lambda: torch.nn.Linear(4, 8), "bias", P("x"), jnp.ones((8, 4))),
    "columns": (lambda: torch.nn.Linear(4, 8), "weight", P(None, "x"), jnp.ones((8, 4))),
    "another axis": (lambda: torch.nn.Linear(4, 8), "weight", P("y"), jnp.ones((8, 4))),
    "both axes": (lambda: torch.nn.Linear(4, 8), "weight", P(("x", "y")), jnp.ones((8, 4))),
}
CALLS = {
    "eager": lambda model, x: model(x),
    "jit": eqx.filter_jit(lambda model, x: model(x)),
    "grad": eqx.filter_grad(lambda model, x: model(x).sum()),
    "jit of grad": eqx.filter_jit(eqx.filter_grad(lambda model, x: model(x).sum())),
    "vmap": lambda model, x: jax.vmap(model)(x),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("out_specs", [None, P("x")], ids=["without", "out_specs"])
@pytest.mark.parametrize(("make", "name", "spec", "x"), LEFT_SHARDED.values(), ids=LEFT_SHARDED)
@pytest.mark.covering
def test_parameters_left_sharded(make, name, spec, x, out_specs, call):
    module = make()
    model = from_torch(module, out_specs=out_specs)
    expected = module(torch.from_numpy(np.array(x))).detach()
    with jax.set_mesh(jax.make_mesh((4, 2), ("x", "y"))):
        put_at = lambda m: m.params[name]  # noqa: E731
        sharded = eqx.tree_at(put_at, model, jax.device_put(put_at(model), spec))
        axis = "y" if "y" in str(spec) else "x"
        message = f"its parameter {name} sharded over .*'{axis}'.*" + re.escape(GATHERED)
        with pytest.raises(ShardingError, match=message):
            call(sharded, jax.device_put(x, P("x")) if out_specs else x)

        @eqx.filter_jit
        def gathered(model, x):
            gather = lambda a: jax.sharding.reshard(a, P()) if eqx.is_array(a) else a  # noqa: E731
            return jax.tree.map(gather, model)(x)

        y = gathered(sharded, jax.device_put(x, P("x")) if out_specs else x)
    assert_trees_equal(y, expected)


@KINDS
def test_shards_of_parameters_inside_shard_map(kind):
    model = from_torch(Scaled())
    with jax.set_mesh(make_mesh(4, "x", kind)):
        call = filter_shard_map(
            lambda model, x: model(x), in_specs=(P("x"), P("x")), out_specs=P("x")
        )
        message = r"parameter scale of `Scaled` has shape \[1\].* has \[4\]: inside `jax.shard_map`"
        scale = jax.device_put(model.params["scale"], P("x"))
        sharded = eqx.tree_at(lambda m: m.params["scale"], model, scale)
        x = jax.device_put(jnp.ones((8, 4)), P("x"))
        with pytest.raises(InputError, match=message):
            call(sharded, x)

        def gathering(model, x):
            whole = jax.lax.all_gather(model.params["scale"], "x", tiled=True)
            return eqx.tree_at(lambda m: m.params["scale"], model, whole)(x)

        call = filter_shard_map(gathering, in_specs=(P("x"), P("x")), out_specs=P("x"))
        y = call(sharded, x)
    assert_trees_equal(y, jnp.tile(jnp.arange(4.0), (8, 1)))


def test_a_stack_of_modules_may_be_sharded():
    modules = [Scaled() for _ in range(4)]
    ensemble = stack_modules([from_torch(m) for m in modules])
    with jax.set_mesh(make_mesh(4, "x")):
        sharded = put(ensemble, jax.sharding.get_mesh(), P("x"))
        call = eqx.filter_vmap(lambda m, x: m(x), in_axes=(eqx.if_array(0), None))
        assert_trees_equal(call(sharded, jnp.ones(4)), jnp.tile(jnp.arange(4.0), (4, 1)))


UNSETTLED = pytest.mark.parametrize("kind", ["reduced", "unreduced"])


@UNSETTLED
@pytest.mark.parametrize("call", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.covering
def test_reduced_and_unreduced_arrays(kind, call):
    f = torch2jax(lambda x: x * x)
    with jax.set_mesh(make_mesh(4, "x")):
        spec = P(None, **{kind: {"x"}})
        x = jax.sharding.reshard(jnp.arange(4.0), spec)
        with pytest.raises(ShardingError, match=r"unreduced over .*'x'.*reshard\(x, P\(\)\)"):
            call(f)(x)
        with pytest.raises(ShardingError, match="unreduced over .*'x'.*Inside `jax.shard_map`"):
            call(jax.shard_map(f, in_specs=spec, out_specs=P("x")))(x)
        settled = call(lambda x: f(jax.sharding.reshard(x, P())))(x)
        with pytest.raises(ShardingError, match="neither reduced nor unreduced"):
            torch2jax(torch.sin, out_specs=spec)(jax.device_put(jnp.arange(4.0), P("x")))
        assert_trees_equal(settled, jnp.arange(4.0) ** 2)


@UNSETTLED
def test_reduced_and_unreduced_parameters(kind):
    with jax.set_mesh(make_mesh(4, "x")):
        scale = jax.sharding.reshard(jnp.arange(4.0), P(None, **{kind: {"x"}}))
        model = eqx.tree_at(lambda m: m.params["scale"], from_torch(Scaled()), scale)
        with pytest.raises(ShardingError, match="its parameter scale of type .*unreduced over"):
            model(jnp.ones(4))


def _copy(state: Any) -> Any:
    return jax.tree.map(lambda x: x, state)


JIT = pytest.mark.parametrize("jit", [eqx.filter_jit, lambda f: f], ids=["jit", "eager"])


@JIT
@pytest.mark.parametrize("chosen", [True, False], ids=["set_mesh", "no set_mesh"])
@pytest.mark.covering(1)
def test_a_state_off_the_mesh(data, jit, chosen):
    model, state = normalised(out_specs=P("batch"))
    mesh = make_mesh(4, "batch")
    x = put(data[0], mesh, P("batch"))
    call = jit(lambda model, x, state: model(x, state=state, key=jax.random.key(0)))
    message = (
        r"`Sequential` was called on the mesh \('batch': 4 Explicit\), but its buffer "
        r"1\.\w+ lies off that mesh, on .*\. Replicate the buffers over the mesh: "
        r"`state = jax.device_put\(state, jax.NamedSharding\(mesh, P\(\)\)\)`"
    )
    with jax.set_mesh(mesh if chosen else jax.sharding.get_mesh()):
        with pytest.raises(ShardingError, match=message):
            call(model, x, _copy(state))
        on_mesh = jax.device_put(_copy(state), NamedSharding(mesh, P()))
        _, new = call(model, x, on_mesh)
    assert all(b.sharding.is_fully_replicated for b in jax.tree.leaves(new))


def test_a_state_on_another_device_or_mesh_or_sharded(data):
    model, state = normalised(out_specs=P("batch"))
    mesh = make_mesh(4, "batch")
    x = put(data[0], mesh, P("batch"))
    call = lambda state: model(x, state=state, key=jax.random.key(0))  # noqa: E731
    with pytest.raises(ShardingError, match="lies off that mesh, on cpu:5"):
        call(jax.device_put(_copy(state), jax.devices()[5]))
    with pytest.raises(ShardingError, match="lies on the mesh .'data': 2 Explicit.*Replicate"):
        call(put(_copy(state), make_mesh(2, "data"), P()))
    split = put(_copy(state), mesh, lambda b: over_batch(b) if b.ndim else P())
    with pytest.raises(ShardingError, match="running_mean sharded over .*'batch'.*device_put"):
        call(split)


@JIT
def test_two_meshes(data, jit):
    x = put(data[0], make_mesh(4, "batch"), P("batch"))
    f = jit(torch2jax(lambda x: x * 2, out_specs=P("batch")))
    inputs_off = (
        r"`<lambda>` was called with two meshes: an input of type float32\[16@batch,4\] lies on "
        r"\('batch': 4 Explicit\), but `jax.set_mesh` has chosen \('data': 2 Explicit\)\. Keep to"
    )
    with jax.set_mesh(make_mesh(2, "data")), pytest.raises(ShardingError, match=inputs_off):
        f(x)
    both = jit(torch2jax(lambda x, y: x, out_specs=P("batch")))
    y = put(data[1], make_mesh(2, "data"), P())
    with pytest.raises(ShardingError, match=r"called with two meshes: .*'batch': 4.*'data': 2"):
        both(x, y)


def test_two_meshes_and_filter_shard_map(data):
    mesh, other = make_mesh(4, "batch"), make_mesh(2, "data")
    x = put(data[0], mesh, P("batch"))
    model = from_torch(torch.nn.Linear(4, 2))
    on_mesh = filter_shard_map(lambda m, x: m(x), mesh=mesh, out_specs=P("batch"))
    chosen = r"its `mesh=` is \('batch': 4 Explicit\), but `jax.set_mesh` has chosen \('data': 2"
    with jax.set_mesh(other), pytest.raises(ShardingError, match=chosen):
        on_mesh(model, x)
    anywhere = filter_shard_map(lambda m, x: m(x), out_specs=P("batch"))
    with jax.set_mesh(other), pytest.raises(ShardingError, match="lies on .*has chosen"):
        anywhere(model, x)
    with jax.set_mesh(mesh):
        y = anywhere(put(model, mesh, P()), x)
    assert_trees_equal(y, model(data[0]))


def test_arrays_move_between_meshes_of_auto_axes(data):
    x = put(data[0], make_mesh(8, "a", AxisType.Auto), P())
    f = torch2jax(lambda x: x * 2)
    mesh = jax.make_mesh((4, 2), ("b", "c"), axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(mesh), pytest.warns(UserWarning, match="program over 8 devices"):
        y = f(x)
    assert_trees_equal(y, 2 * data[0])


RUNS = []


class Counted(torch.nn.Module):
    """Counts its runs, those on fake tensors too."""

    def __init__(self, *layers: torch.nn.Module):
        super().__init__()
        self.layers = torch.nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        RUNS.append(None)
        return self.layers(x)


def members(*layers: Callable[[], torch.nn.Module]) -> list[torch.nn.Module]:
    return [Counted(*[layer() for layer in layers]) for _ in range(3)]


def runs_of(f: Callable[..., Any], *args: Any) -> tuple[int, Any]:
    """How often torch runs when a compiled function is called, and the result."""
    jax.block_until_ready(f(*args))
    before = len(RUNS)
    result = jax.block_until_ready(f(*args))
    return len(RUNS) - before, result


STATEFUL = {
    "one example": lambda x: np.asarray(x)[:1],
    "one example, gathered": lambda x: x.at[:1].get(out_sharding=P()),
    "the whole batch": lambda x: jax.sharding.reshard(x, P()),
}


@pytest.mark.parametrize("jit", [lambda f: f, eqx.filter_jit], ids=["eager", "jit"])
@pytest.mark.parametrize("part", STATEFUL.values(), ids=STATEFUL)
@pytest.mark.covering(1)
def test_a_trained_model_with_out_specs_on_what_is_not_sharded(data, part, jit):
    """`from_torch(model)` is the same model without `out_specs`; its state stays valid."""
    x, _ = data
    module = torch.nn.Sequential(network(), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.5))
    mesh = make_mesh(4, "b")
    with jax.set_mesh(mesh):
        made = eqx.nn.make_with_state(from_torch)(module, out_specs=P("b"))
        model, state = eqx.filter_shard(made, P())
        x = jax.device_put(x, NamedSharding(mesh, P("b")))
        _, state = model(x, state=state, key=jax.random.key(0))
        model, part = eqx.nn.inference_mode(model), part(x)
        with pytest.raises(ShardingError, match="with the weights of `model` and for the same st"):
            jit(model)(part, state=state)
        local = from_torch(model)
        y, after = jit(local)(part, state=state)
        expected, _ = model(x, state=after)
    assert_trees_equal(y, np.asarray(expected)[: len(part)], rtol=1e-5)
    assert all(local.params[name] is model.params[name] for name in model.params)


def test_an_ensemble_is_one_batched_call(data):
    nets = members(lambda: torch.nn.Linear(4, 8), torch.nn.Tanh, lambda: torch.nn.Linear(8, 2))
    ensemble = stack_modules([from_torch(net) for net in nets])

    def total(ensemble: Any, x: Any) -> Any:
        call = eqx.filter_vmap(lambda m, x: m(x), in_axes=(eqx.if_array(0), None))
        return jnp.sum(call(ensemble, x) ** 2)

    count, value = runs_of(eqx.filter_jit(total), ensemble, data[0])
    assert count == 1
    x = torch.from_numpy(np.array(data[0]))
    losses = [(net(x) ** 2).sum() for net in nets]
    assert_trees_equal(value, sum(losses).detach(), rtol=1e-5)
    count, grads = runs_of(eqx.filter_jit(eqx.filter_grad(total)), ensemble, data[0])
    assert count <= 2  # what torch.func has batched keeps no graph for the backward
    for i, loss in enumerate(losses):
        loss.backward()
        expected = {name: p.grad for name, p in nets[i].named_parameters()}
        assert_trees_equal({n: g[i] for n, g in grads.params.items()}, expected, rtol=1e-4)


@pytest.mark.parametrize("paired", [False, True])
def test_an_ensemble_with_statistics(data, paired):
    nets = members(lambda: torch.nn.Linear(4, 8), lambda: torch.nn.BatchNorm1d(8))
    if paired:
        ensemble, states = stack_modules([eqx.nn.make_with_state(from_torch)(net) for net in nets])
    else:
        stack = lambda: stack_modules([from_torch(net) for net in nets])  # noqa: E731
        ensemble, states = eqx.nn.make_with_state(stack)()

    @eqx.filter_jit
    @eqx.filter_vmap(in_axes=(eqx.if_array(0), 0, None))
    def call(model: Any, state: Any, x: Any) -> Any:
        return model(x, state=state)

    count, (ys, new) = runs_of(lambda: call(ensemble, _copy(states), data[0]))
    assert count == 1
    for i, net in enumerate(nets):
        x = torch.from_numpy(np.array(data[0]))
        assert_trees_equal(ys[i], net(x).detach(), rtol=1e-4, atol=1e-5)
        mine = {name: b[i] for name, b in new.get(ensemble.buffers).items()}
        assert_trees_equal(mine, dict(net.named_buffers()), rtol=1e-5)


def test_an_ensemble_with_a_key_for_each_member(data):
    nets = members(lambda: torch.nn.Linear(4, 8), lambda: torch.nn.Dropout(0.5))
    models = [from_torch(net) for net in nets]
    keys = jax.random.split(jax.random.key(0), 3)

    @eqx.filter_jit
    @eqx.filter_vmap(in_axes=(eqx.if_array(0), 0, None))
    def call(model: Any, key: Any, x: Any) -> Any:
        return model(x, key=key)

    count, ys = runs_of(call, stack_modules(models), keys, data[0])
    assert count == 3  # torch has one generator, so each draws in its turn
    looped = [model(data[0], key=key) for model, key in zip(models, keys, strict=True)]
    assert_trees_equal(ys, jnp.stack(looped), rtol=1e-5)
