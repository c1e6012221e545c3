"""Orbax saves a model, its state and its optimizer, and restores them onto other meshes."""

import contextlib
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import torch
from jax.sharding import NamedSharding, PartitionSpec as P

from eqx_torch import from_torch, state_dict

from ..helpers import assert_trees_equal


OPTIMIZER = optax.adam(1e-2)


@pytest.fixture(autouse=True)
def promotion():
    """optax needs JAX's standard promotion."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@contextlib.contextmanager
def mesh(*shape: int):
    """A mesh of as many of the devices as this takes, put in force."""
    devices = jax.devices()[: int(np.prod(shape))]
    with jax.set_mesh(jax.make_mesh(shape, ("batch", "other")[: len(shape)], devices=devices)):
        yield jax.sharding.get_mesh()


def network() -> torch.nn.Module:
    """BatchNorm's statistics, one of them an integer, and parameters of one and two dimensions."""
    return torch.nn.Sequential(
        torch.nn.Linear(16, 32), torch.nn.BatchNorm1d(32), torch.nn.SiLU(), torch.nn.Linear(32, 8)
    )


def new_training() -> tuple[Any, Any, Any]:
    """A model, its state and that of the optimizer, on no mesh yet."""
    model, state = eqx.nn.make_with_state(from_torch)(network(), out_specs=P("batch"))
    return model, state, OPTIMIZER.init(eqx.filter(model, eqx.is_inexact_array))


def placed(tree: Any, spec: P) -> Any:
    """A tree on the mesh in force, sharded by as much of the spec as the dimensions allow."""
    mesh = jax.sharding.get_mesh()

    def put(x: Any) -> Any:
        if not eqx.is_array(x):
            return x
        counts = [1 if axis is None else mesh.shape[axis] for axis in spec]
        fits = x.ndim >= len(spec) and not any(
            size % count for size, count in zip(x.shape, counts, strict=False)
        )
        return jax.device_put(x, NamedSharding(mesh, spec if fits else P()))

    return jax.tree.map(put, tree)


def step(training: Any, x: Any) -> Any:
    """One step of training, of arrays that are replicated."""
    model, state, opt_state = training

    def loss_fn(model: Any, state: Any) -> Any:
        y, state = model(x, state=state)
        return (y**2).mean(), state

    grads, state = eqx.filter_grad(loss_fn, has_aux=True)(model, state)
    updates, opt_state = OPTIMIZER.update(grads, opt_state)
    return eqx.apply_updates(model, updates), state, opt_state


def trained(steps: int) -> Any:
    """A training after some steps on the mesh in force, replicated."""
    training = placed(new_training(), P())
    for i in range(steps):
        training = eqx.filter_jit(step)(training, batch(i))
    return training


def batch(seed: int) -> jax.Array:
    """An input on the mesh in force, sharded over its first axis."""
    return jax.device_put(jax.random.normal(jax.random.key(seed), (64, 16)), P("batch"))


def save(path: Path, tree: Any) -> None:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, eqx.filter(tree, eqx.is_array))


def restore(path: Path, like: Any) -> Any:
    arrays, rest = eqx.partition(like, eqx.is_array)
    with ocp.StandardCheckpointer() as checkpointer:
        return eqx.combine(checkpointer.restore(path, arrays), rest)


def values(tree: Any) -> Any:
    """The arrays of a tree, off the mesh."""
    return jax.tree.map(np.asarray, jax.tree.leaves(eqx.filter(tree, eqx.is_array)))


def shardings(tree: Any) -> Any:
    return [x.sharding for x in jax.tree.leaves(eqx.filter(tree, eqx.is_array))]


LAYOUTS = {
    "replicated on 8": ((8,), P()),
    "sharded over 8": ((8,), P("batch")),
    "columns sharded over 8": ((8,), P(None, "batch")),
    "sharded over 2 by 4": ((2, 4), P("other", "batch")),
    "replicated on 4": ((4,), P()),
    "sharded over 4": ((4,), P("batch")),
    "on 1": ((1,), P()),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> tuple[Path, Any]:
    """Checkpoints of one training in each layout, and the values of its arrays."""
    path = tmp_path_factory.mktemp("checkpoints")
    torch.manual_seed(0)
    with jax.numpy_dtype_promotion("standard"), mesh(8):
        training = trained(3)
    for name in ("replicated on 8", "sharded over 8", "on 1"):
        shape, spec = LAYOUTS[name]
        with mesh(*shape):
            save(path / name, placed(training, spec))
    return path, values(training)


@pytest.mark.parametrize("source", ["replicated on 8", "sharded over 8", "on 1"])
@pytest.mark.parametrize("target", LAYOUTS)
def test_any_layout_is_restored_onto_any_other(saved, source, target):
    path, expected = saved
    shape, spec = LAYOUTS[target]
    with mesh(*shape):
        like = placed(new_training(), spec)
        restored = restore(path / source, like)
    assert_trees_equal(values(restored), expected, exact=True)
    assert shardings(restored) == shardings(like)


def test_layouts_differ():
    """The layouts above shard what they say."""
    for name, (shape, spec) in LAYOUTS.items():
        with mesh(*shape):
            model, _, _ = placed(new_training(), spec)
        shard = model.params["0.weight"].addressable_shards[0].data.shape
        assert (shard == (32, 16)) == ("sharded" not in name), name


def test_batchnorm_statistics_are_restored(saved):
    path, _ = saved
    with mesh(4):
        model, state, _ = restore(path / "sharded over 8", placed(new_training(), P()))
        own = state_dict(model, state)
    assert own["1.num_batches_tracked"] == 3
    assert own["1.running_mean"].abs().min() > 0
    with mesh(8):
        torch.manual_seed(0)
        model, state, _ = trained(3)
        assert_trees_equal(own, state_dict(model, state), exact=True)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_only_shapes_and_shardings_are_needed_to_restore(saved, layout):
    path, expected = saved
    shape, spec = LAYOUTS[layout]
    with mesh(*shape):
        like = placed(new_training(), spec)
        abstract = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
            eqx.filter(like, eqx.is_array),
        )
        with ocp.StandardCheckpointer() as checkpointer:
            restored = checkpointer.restore(path / "sharded over 8", abstract)
    assert_trees_equal(values(restored), expected, exact=True)
    assert shardings(restored) == shardings(like)


def test_training_goes_on_as_if_never_saved(tmp_path):
    with mesh(8):
        training = trained(2)
        save(tmp_path / "checkpoint", training)
        restored = restore(tmp_path / "checkpoint", placed(new_training(), P()))
        for i in (2, 3):
            training = eqx.filter_jit(step)(training, batch(i))
            restored = eqx.filter_jit(step)(restored, batch(i))
    assert_trees_equal(values(restored), values(training), exact=True)


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_the_model_computes_the_same_on_fewer_devices(saved, devices):
    path, _ = saved
    results = []
    for count in (8, devices):
        with mesh(count):
            model, state, _ = restore(path / "replicated on 8", placed(new_training(), P()))
            y, _ = eqx.nn.inference_mode(model)(batch(9), state=state)
            results.append(np.asarray(y))
    assert jnp.ptp(results[0]) > 0
    assert_trees_equal(results[1], results[0])


def test_a_manager_keeps_the_last_steps(tmp_path):
    options = ocp.CheckpointManagerOptions(max_to_keep=2)
    with mesh(4), ocp.CheckpointManager(tmp_path / "steps", options=options) as manager:
        training = placed(new_training(), P())
        seen = {}
        for i in range(4):
            training = eqx.filter_jit(step)(training, batch(i))
            seen[i] = values(training)
            arrays = eqx.filter(training, eqx.is_array)
            manager.save(i, args=ocp.args.StandardSave(arrays))
        manager.wait_until_finished()
        assert manager.all_steps() == [2, 3]
        for i in (2, 3):
            restored = manager.restore(i, args=ocp.args.StandardRestore(arrays))
            assert_trees_equal(values(restored), seen[i], exact=True)
