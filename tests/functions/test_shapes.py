"""Declared outputs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from eqx_torch import ShapeError, Size
from eqx_torch._ambient import Ambient
from eqx_torch._program import Site, Spec, TorchFunction
from eqx_torch._shapes import Declaration, Inference
from eqx_torch._trees import flatten


F32, I32 = np.dtype("float32"), np.dtype("int32")


def _infer(declared, *specs, f=torch.sin, declared_for=None):
    site = Site(
        flatten(((0,) * len(specs), {}))[1],
        (None,) * len(specs),
        (None,) * len(specs),
        Ambient.capture(),
    )
    inference = Inference(TorchFunction(f, name="f"), Declaration(declared, None, declared_for))
    outputs = inference(site, specs)
    assert inference(site, specs) is outputs
    return outputs


def test_kinds_of_declarations():
    spec = Spec((2, 3), F32)
    declared = [
        jax.ShapeDtypeStruct((2, 3), "int32"),
        torch.zeros((2, 3), dtype=torch.int32),
        jnp.zeros((2, 3), "int32"),
        np.zeros((2, 3), "int32"),
    ]
    for one in declared:
        assert _infer(one, spec).specs == (Spec((2, 3), I32),)
        assert _infer(lambda x, one=one: one, spec).specs == (Spec((2, 3), I32),)
    for shape in [Size((4,)), (4,), [4], (np.int64(4),)]:
        assert _infer(shape, spec).specs == (Spec((4,), F32),)
    assert _infer(Size(()), spec).specs == (Spec((), F32),)
    assert _infer((), spec).specs == (Spec((), F32),)


def test_trees():
    spec = Spec((2, 3), F32)
    outputs = _infer({"a": (Size((1,)), None), "b": [(2, 3)]}, spec)
    assert outputs.structure == flatten({"a": (0, None), "b": [0]})[1]
    assert outputs.specs == (Spec((1,), F32), Spec((2, 3), F32))
    assert outputs.source == "output_shapes"


def test_wide_dtypes_are_those_that_jax_has():
    spec = Spec((2,), F32)
    wide = torch.zeros(2, dtype=torch.int64), jax.ShapeDtypeStruct((2,), np.float64)
    assert [s.dtype for s in _infer(wide, spec).specs] == [I32, F32]
    with jax.enable_x64(True):
        assert [str(s.dtype) for s in _infer(wide, spec).specs] == ["int64", "float64"]


def test_a_shape_takes_the_dtype_of_the_floating_point_inputs():
    bf16 = np.dtype(jnp.bfloat16)
    assert _infer((2,), Spec((2,), I32), Spec((2,), bf16)).specs == (Spec((2,), bf16),)
    with pytest.raises(ShapeError, match="their dtypes are: bfloat16, float32"):
        _infer((2,), Spec((2,), F32), Spec((2,), bf16))


def test_what_is_declared_for_examples_is_inferred_for_others():
    spec, other = Spec((2,), F32), Spec((3,), F32)
    assert _infer((7,), spec, declared_for=(spec,)).specs == (Spec((7,), F32),)
    assert _infer((7,), other, declared_for=(spec,)).specs == (other,)
