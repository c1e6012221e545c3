import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from eqx_torch import dtype_j2t, dtype_t2j, DtypeError, EqxTorchError
from eqx_torch._dtypes import canonical_dtype, is_inexact

from ..helpers import assert_trees_equal


SUPPORTED = [
    (torch.bool, jnp.bool_),
    (torch.uint8, jnp.uint8),
    (torch.uint16, jnp.uint16),
    (torch.uint32, jnp.uint32),
    (torch.uint64, jnp.uint64),
    (torch.int8, jnp.int8),
    (torch.int16, jnp.int16),
    (torch.int32, jnp.int32),
    (torch.int64, jnp.int64),
    (torch.float16, jnp.float16),
    (torch.bfloat16, jnp.bfloat16),
    (torch.float32, jnp.float32),
    (torch.float64, jnp.float64),
    (torch.float8_e4m3fn, jnp.float8_e4m3fn),
    (torch.float8_e5m2, jnp.float8_e5m2),
    (torch.float8_e4m3fnuz, jnp.float8_e4m3fnuz),
    (torch.float8_e5m2fnuz, jnp.float8_e5m2fnuz),
    (torch.float8_e8m0fnu, jnp.float8_e8m0fnu),
    (torch.complex64, jnp.complex64),
    (torch.complex128, jnp.complex128),
]
supported = pytest.mark.parametrize(("torch_dtype", "jax_dtype"), SUPPORTED)


@supported
def test_both_ways(torch_dtype, jax_dtype):
    assert dtype_t2j(torch_dtype) == np.dtype(jax_dtype)
    assert isinstance(dtype_t2j(torch_dtype), np.dtype)
    for same in (jax_dtype, np.dtype(jax_dtype), np.dtype(jax_dtype).name):
        assert dtype_j2t(same) is torch_dtype
        assert dtype_t2j(same) == np.dtype(jax_dtype)
    assert dtype_j2t(torch_dtype) is torch_dtype


@supported
def test_every_bit_pattern_of_a_narrow_dtype_means_the_same_number(torch_dtype, jax_dtype):
    width = np.dtype(jax_dtype).itemsize
    assert torch.empty((), dtype=torch_dtype).element_size() == width
    if width <= 2 and is_inexact(torch_dtype):
        bits = np.arange(2 ** (8 * width), dtype=f"uint{8 * width}")
        with np.errstate(invalid="ignore"):  # signalling NaNs
            ours = bits.view(jax_dtype).astype(np.float32)
        theirs = torch.from_numpy(bits).view(torch_dtype).to(torch.float32)
        assert_trees_equal(ours, theirs, rtol=0, atol=0)


@supported
@pytest.mark.parametrize("x64_enabled", [False, True])
def test_canonical_dtype_is_what_jax_makes(torch_dtype, jax_dtype, x64_enabled):
    with jax.enable_x64(x64_enabled):
        expected = jnp.asarray(np.zeros((), jax_dtype)).dtype
        assert canonical_dtype(torch_dtype) == expected
        assert canonical_dtype(jax_dtype) == expected


@supported
def test_is_inexact(torch_dtype, jax_dtype):
    expected = torch_dtype.is_floating_point or torch_dtype.is_complex
    assert is_inexact(torch_dtype) is expected
    assert is_inexact(jax_dtype) is expected


def test_is_inexact_of_dtypes_without_a_counterpart():
    assert is_inexact(torch.complex32)
    assert not is_inexact(torch.qint8)
    assert not is_inexact(jax.random.key(0).dtype)
    assert not is_inexact(jax.dtypes.float0)


def test_byte_order_is_not_part_of_the_value():
    assert dtype_j2t(">f4") is torch.float32
    assert dtype_t2j(">i2") == np.dtype("int16")


@pytest.mark.parametrize(
    ("dtype", "message"),
    [
        (torch.complex32, "JAX has no dtype.*torch.complex32. Cast it to `complex64` first"),
        (torch.qint8, r"torch.qint8. Call `.dequantize\(\)` first"),
        (torch.quint4x2, r"torch.quint4x2. Call `.dequantize\(\)` first"),
        (torch.int4, "torch.int4. Cast it to `int8` first"),
        (torch.uint7, "torch.uint7. Cast it to `uint8` first"),
        (torch.bits8, "torch.bits8. View it as `uint8` first"),
        (torch.float4_e2m1fn_x2, "torch.float4_e2m1fn_x2. Cast it to `float32` first"),
    ],
)
def test_torch_dtypes_that_jax_lacks(dtype, message):
    for convert in (dtype_t2j, canonical_dtype):
        with pytest.raises(DtypeError, match=message):
            convert(dtype)


@pytest.mark.parametrize(
    ("dtype", "message"),
    [
        ("int4", "PyTorch has no dtype.*int4. Cast it to `int8` first"),
        ("uint4", "uint4. Cast it to `uint8` first"),
        ("float8_e3m4", "float8_e3m4. Cast it to `float32` first"),
        (np.longdouble, "longdouble'>. Cast it to `float64` first"),
        (np.clongdouble, "clongdouble'>. Cast it to `complex128` first"),
        (str, "Cast it to one of these first. Supported dtypes: bool, uint8, .*complex128"),
        ("no such dtype", "no such dtype"),
        (None, "Expected a dtype, got None"),
    ],
)
def test_jax_dtypes_that_torch_lacks(dtype, message):
    for convert in (dtype_j2t, dtype_t2j):
        with pytest.raises(DtypeError, match=message):
            convert(dtype)


def test_prng_keys():
    with pytest.raises(DtypeError, match=r"key<fry>. Pass `jax.random.key_data\(key\)` instead"):
        dtype_j2t(jax.random.key(0).dtype)


def test_the_error_is_what_either_kind_of_caller_expects():
    assert issubclass(DtypeError, EqxTorchError)
    assert issubclass(DtypeError, TypeError)
