import re

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
import torch
from jaxtyping import (
    BFloat16,
    Bool,
    Complex,
    Complex64,
    Float,
    Float8e4m3fn,
    Float16,
    Float32,
    Float64,
    Inexact,
    Int,
    Int64,
    Integer,
    Key,
    Num,
    Real,
    Shaped,
    UInt,
)
from torch import Tensor

from ..helpers.annotations import arr, bind, predict, refused, unreadable


def takes(dtype):
    def f(x): ...

    f.__annotations__ = {"x": dtype[Tensor, "n"]}
    return f


def returns(result, **inputs):
    """A function whose arguments are called `inputs`, all of one dimension or none."""

    def f(x=None, y=None, z=None): ...

    f.__annotations__ = {**inputs, "return": result}
    return f


MEMBERS = {
    "Float": ["float16", "bfloat16", "float32", "float8_e4m3fn", "float8_e5m2"],
    "Int": ["int8", "int16", "int32"],
    "UInt": ["uint8", "uint16", "uint32"],
    "Integer": ["int8", "uint8"],
    "Bool": ["bool"],
    "Complex": ["complex64"],
    "Inexact": ["float32", "complex64"],
    "Real": ["int32", "uint8", "float16"],
    "Num": ["int32", "uint8", "float16", "complex64"],
    "Shaped": ["bool", "int32", "float32", "complex64"],
    "Float32": ["float32"],
    "BFloat16": ["bfloat16"],
    "Float8e4m3fn": ["float8_e4m3fn"],
    "Int8": ["int8"],
}
ALL = sorted({name for names in MEMBERS.values() for name in names})
PAIRS = [(family, dtype) for family in MEMBERS for dtype in ALL]


@pytest.mark.parametrize(("family", "dtype"), PAIRS)
def test_admitted_as_by_jaxtyping(family, dtype):
    annotation = getattr(jaxtyping, family)
    array = jnp.zeros(2, dtype)
    if isinstance(array, annotation[jax.Array, "n"]):
        bind(takes(annotation), arr(2, dtype=dtype))
    else:
        message = refused(takes(annotation), arr(2, dtype=dtype))
        assert f"dtype {dtype} is not " in message


def test_keys():
    key = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 3))
    assert bind(takes(Key), key).names == {"n": 3}
    assert "dtype prng_key is not in Float" in refused(takes(Float), key)


def test_own_families():
    class Small(jaxtyping.AbstractDtype):
        dtypes = [re.compile(r"u?int8"), "float16"]  # noqa: RUF012

    for dtype in ("int8", "uint8", "float16"):
        bind(takes(Small), arr(2, dtype=dtype))
    assert "dtype int16 is not in Small" in refused(takes(Small), arr(2, dtype="int16"))
    follow = returns(Small[Tensor, "n"], x=Small[Tensor, "n"])
    assert predict(follow, arr(2, dtype="uint8")) == arr(2, dtype="uint8")


def test_without_x64_64_bit_annotations_take_and_give_32_bit():
    f = returns(Int64[Tensor, "n"], x=Int64[Tensor, "n"], y=Float64[Tensor, ""])
    assert predict(f, arr(3, dtype="int32"), arr()) == arr(3, dtype="int32")
    assert "dtype int16 is not int64" in refused(f, arr(3, dtype="int16"), arr())
    with jax.enable_x64(True):
        assert predict(f, arr(3, dtype="int64"), arr(dtype="float64")).dtype == np.int64
        refused(f, arr(3, dtype="int32"), arr(dtype="float64"))


@pytest.mark.parametrize(
    ("result", "dtype"),
    [
        (Float32, "float32"),
        (BFloat16, "bfloat16"),
        (Float8e4m3fn, "float8_e4m3fn"),
        (Bool, "bool"),
        (Complex64, "complex64"),
        (Float64, "float32"),
    ],
)
def test_one_dtype_is_itself(result, dtype):
    f = returns(result[Tensor, "n"], x=Int[Tensor, "n"])
    assert predict(f, arr(3, dtype="int32")) == arr(3, dtype=dtype)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float8_e5m2"])
def test_a_family_follows_the_inputs(dtype):
    f = returns(Float[Tensor, "n"], x=Float[Tensor, "n"], y=Int[Tensor, "m"])
    assert predict(f, arr(3, dtype=dtype), arr(2, dtype="int32")) == arr(3, dtype=dtype)


@pytest.mark.parametrize(
    ("first", "second", "promoted"),
    [
        (arr(3, dtype="float16"), arr(3, dtype="float32"), "float32"),
        (arr(3, dtype="float16"), arr(3, dtype="bfloat16"), "float32"),
        (arr(3, dtype="float16"), arr(dtype="float32"), "float16"),  # a scalar yields
        (arr(dtype="float16"), arr(dtype="float32"), "float32"),
    ],
)
def test_inputs_that_differ_are_promoted_as_torch_does(first, second, promoted):
    f = returns(Float[Tensor, ""], x=Float[Tensor, "..."], y=Float[Tensor, "..."])
    assert predict(f, first, second) == arr(dtype=promoted)

    def zeros(struct):
        return torch.zeros(struct.shape, dtype=getattr(torch, struct.dtype.name))

    assert (zeros(first) * zeros(second)).dtype == getattr(torch, promoted)


def test_a_family_follows_its_own_before_others():
    gather = returns(Shaped[Tensor, "m"], x=Shaped[Tensor, "n"], y=Int[Tensor, "m"])
    args = arr(3, dtype="int8"), arr(2, dtype="int32")
    assert predict(gather, *args) == arr(2, dtype="int8")
    wide = returns(Inexact[Tensor, "n"], x=Float[Tensor, "n"], y=Complex[Tensor, "n"])
    assert predict(wide, arr(3), arr(3, dtype="complex64")) == arr(3, dtype="complex64")
    narrow = returns(Float[Tensor, "n"], x=Num[Tensor, "n"], y=Float32[Tensor, "n"])
    assert predict(narrow, arr(3, dtype="int32"), arr(3)) == arr(3)
    of_bool = returns(Integer[Tensor, "n"], x=Real[Tensor, "n"])
    assert predict(of_bool, arr(3, dtype="uint8")) == arr(3, dtype="uint8")


def test_a_call_without_a_dtype_to_follow():
    f = returns(Float[Tensor, "n"], x=Num[Tensor, "n"])
    assert refused(f, arr(3, dtype="int32")) == (
        "f: the result's structure cannot be read off its annotation"
        " Float[Tensor, 'n']: Float follows the inputs, whose dtypes are int32.\n"
        "names bound in this call:\n"
        "  n = 3, from argument `x`, dimension 0"
    )
    g = returns(Float[Tensor, "n"], x=Float[Tensor, "n"], y=Float[Tensor, "n"])
    message = refused(g, arr(3, dtype="float8_e5m2"), arr(3))
    assert "torch does not promote float8_e5m2, float32" in message


@pytest.mark.parametrize("family", [Float, Int, UInt, Complex, Shaped])
def test_no_input_to_follow(family):
    f = returns(family[Tensor, "3"], x=Bool[Tensor, "n"])
    if family is Shaped:
        assert predict(f, arr(2, dtype="bool")) == arr(3, dtype="bool")
        return
    name = family.__name__
    assert unreadable(f) == (
        f"f: the annotation {name}[Tensor, '3'] does not determine the result: {name} is a family"
        " of dtypes and no annotated input has a dtype of it to follow.\n"
        "Name one dtype (such as Float32), annotate an input with the family, or pass"
        " output_shapes=."
    )


def test_keys_are_no_results():
    message = unreadable(returns(Key[Tensor, "n"], x=Float[Tensor, "n"]))
    assert "torch has no dtype prng_key" in message


def test_unions_of_dtypes():
    Half = Float16[Tensor, "n"] | BFloat16[Tensor, "n"]
    f = returns(Half, x=Half, y=Float32[Tensor, ""])
    assert predict(f, arr(3, dtype="bfloat16"), arr()) == arr(3, dtype="bfloat16")
    assert refused(f, arr(3, 1), arr()) == (
        "f: argument `x` does not match its annotation.\n"
        "  annotation: Float16[Tensor, 'n'] | BFloat16[Tensor, 'n']\n"
        "  expected: Float16 | BFloat16 (n,)\n"
        "  actual: float32 (3, 1)\n"
        "  dtype float32 is not bfloat16 or float16\n"
        "  it has 2 dimensions, must have 1"
    )
    either = returns(Int[Tensor, "n"] | Float[Tensor, "n"], x=Num[Tensor, "n"])
    assert predict(either, arr(3, dtype="int8")) == arr(3, dtype="int8")
