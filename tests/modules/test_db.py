"""Every module of torch's own database gives in JAX what it gives in torch.

Each in training, and in evaluation where that differs: outputs, gradients of parameters and
inputs, and changed buffers, under `eqx.filter_jit` and under `eqx.filter_vmap`.
"""

import contextlib
import re
import warnings
from collections.abc import Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
import torch

from eqx_torch import ShapeError

from ..helpers import assert_trees_equal
from ..helpers.module_samples import (
    arrays,
    CONFIGURATIONS,
    MODULES,
    other_values,
    Results,
    Sample,
    samples,
)


# Of every kind: plain, normalising, recurrent, with integers, drawing, lazy.
FAST = [
    ("nn.Linear", True),
    ("nn.BatchNorm1d", True),
    ("nn.InstanceNorm1d", False),
    ("nn.GRUCell", True),
    ("nn.Embedding", True),
    ("nn.FractionalMaxPool2d", True),
    ("nn.LazyConv1d", True),
]

# Samples whose outputs torch does not know, or does not know right, without their inputs' values.
# They are declared. `None` stands for all samples.
DECLARED: dict[str, tuple[str | None, str]] = {
    "nn.MultiLabelMarginLoss": ("1d_reduction_none", "returned another shape than was declared"),
}

# The number of samples of a configuration that are batched too.
_BATCHED = 2

configurations = pytest.mark.parametrize(
    ("name", "training"),
    [
        pytest.param(*c, marks=() if c in FAST else pytest.mark.slow, id="-".join(map(str, c)))
        for c in CONFIGURATIONS
    ],
)


def is_declared(name: str, sample: Sample) -> bool:
    part, _ = DECLARED.get(name, ("no such sample", ""))
    return part is None or part in sample.name


@configurations
def test_results(name, training):
    count = 0
    for sample in samples(name, training):
        expected = _in_torch(sample, sample.tensors)
        model, state, step = _in_jax(name, sample, expected)
        with _quiet_runs_on_zeros():
            actual = eqx.filter_jit(step)(model, state, arrays(sample.tensors))
        _assert_equal(sample, actual, expected.tree(model.core.blueprint.names.state))
        count += 1
    assert count


@configurations
def test_batches(name, training):
    """Also equal where torch cannot batch the module; then it is called in a loop."""
    for _, sample in zip(range(_BATCHED), samples(name, training), strict=False):
        members = [sample.tensors, other_values(sample.tensors)]
        results = [_in_torch(sample, tensors) for tensors in members]
        model, state, step = _in_jax(name, sample, results[0])
        changing = model.core.blueprint.names.state
        expected = jax.tree.map(lambda *xs: torch.stack(xs), *[r.tree(changing) for r in results])
        batch = jax.tree.map(lambda *xs: jnp.stack(xs), *[arrays(ts) for ts in members])
        batched = eqx.filter_jit(eqx.filter_vmap(step, in_axes=(None, None, 0)))
        with _quiet_runs_on_zeros(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.func.vmap cannot batch")
            actual = batched(model, state, batch)
        _assert_equal(sample, actual, expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", DECLARED)
def test_declared_outputs_cannot_be_inferred(name):
    found = [s for s in samples(name, True) if is_declared(name, s)]
    assert found
    errors = (ShapeError, jax.errors.JaxRuntimeError)
    with _quiet_runs_on_zeros(), pytest.raises(errors, match=DECLARED[name][1]):
        _run_undeclared(found[0])


def test_database_is_whole():
    assert len(CONFIGURATIONS) >= 126
    assert set(FAST) <= set(CONFIGURATIONS)
    assert DECLARED.keys() <= MODULES.keys()


def _run_undeclared(sample: Sample) -> None:
    model, state, step = sample.in_jax(None)
    jax.block_until_ready(eqx.filter_jit(step)(model, state, arrays(sample.tensors)))


def _in_torch(sample: Sample, tensors: Any) -> Results:
    """torch's own warnings are ignored from here on."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = sample.in_torch(tensors)
    for warning in caught:
        warnings.filterwarnings("ignore", re.escape(str(warning.message)), warning.category)
    return results


def _in_jax(name: str, sample: Sample, expected: Results) -> Any:
    declared = None
    if is_declared(name, sample):
        specs = [jax.ShapeDtypeStruct(x.shape, str(x.dtype)[6:]) for x in expected.outputs]
        declared = expected.structure.unflatten(specs)
    with _quiet_runs_on_zeros():
        return sample.in_jax(declared)


@contextlib.contextmanager
def _quiet_runs_on_zeros() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*inferred by running it on zeros")
        yield


def _assert_equal(sample: Sample, actual: Any, expected: Any) -> None:
    try:
        assert_trees_equal(actual, expected, rtol=1e-4, atol=1e-5)
    except AssertionError as error:
        raise AssertionError(f"on sample {sample.name!r} of {sample.module}") from error
