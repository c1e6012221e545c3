"""Shapes are inferred on the kind of device that the call will run on.

Tensors without memory may pretend to be on a GPU, so what is found for one can be tested without.
"""

import collections

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
import torch

from eqx_torch import _probe, from_torch, torch2jax

from ..helpers import assert_trees_equal


@pytest.fixture
def for_gpus(monkeypatch):
    monkeypatch.setattr(_probe, "_device", lambda: torch.device("cuda"))


class Scaled(torch.nn.Module):
    """Has a parameter, a buffer under two names that its forward reads, and one it changes."""

    def __init__(self, parameters=True):
        super().__init__()
        if parameters:
            self.weight = torch.nn.Parameter(torch.ones(3))
        self.register_buffer("scale", torch.arange(3.0))
        self.inner = torch.nn.Module()
        self.inner.register_buffer("scale", self.scale)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        x = x["x"] if isinstance(x, dict) else x
        assert x.device == self.scale.device == self.inner.scale.device
        return x * self.scale * self.inner.scale * getattr(self, "weight", 1)


def _called(model, x, state):
    return model(x, state=state)


@pytest.mark.parametrize("nested", [False, True], ids=["array", "dict"])
@pytest.mark.parametrize("parameters", [True, False], ids=["parameters", "none"])
def test_constants_are_where_the_arguments_are(for_gpus, parameters, nested):
    module = Scaled(parameters)
    x = {"x": jnp.ones((2, 3))} if nested else jnp.ones((2, 3))
    model, state = eqx.nn.make_with_state(from_torch)(module, x)
    out, _ = eqx.filter_eval_shape(_called, model, x, state)
    assert (out.shape, out.dtype) == ((2, 3), jnp.float32)
    assert module.scale.device.type == "cpu"


@pytest.mark.parametrize("nested", [False, True], ids=["array", "dict"])
@pytest.mark.parametrize("parameters", [True, False], ids=["parameters", "none"])
def test_the_probe_leaves_the_constants_of_calls_alone(monkeypatch, parameters, nested):
    x = jnp.ones((2, 3))
    argument = {"x": x} if nested else x
    with monkeypatch.context() as patch:
        patch.setattr(_probe, "_device", lambda: torch.device("cuda"))
        model, state = eqx.nn.make_with_state(from_torch)(Scaled(parameters), argument)
        eqx.filter_eval_shape(_called, model, argument, state)
    y, _ = model(argument, state=state)
    assert_trees_equal(y, x * jnp.arange(3.0) ** 2)


def test_functions_see_the_device(for_gpus):
    def f(x):
        return x.new_zeros(2) if x.is_cuda else x

    out = jax.eval_shape(torch2jax(f), jax.ShapeDtypeStruct((5,), "float32"))
    assert out.shape == (2,)


def test_the_cpu_is_probed_where_torch_sees_no_gpu(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    seen = collections.deque()  # lists are put back after the run

    def f(x):
        seen.append(x.device.type)
        return x

    jax.eval_shape(torch2jax(f), jax.ShapeDtypeStruct((5,), "float32"))
    assert list(seen) == ["cpu"]
