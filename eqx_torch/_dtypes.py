"""The dtypes that PyTorch and JAX share.

Twenty dtypes mean the same values in both libraries and carry the same name in both; this table of
names is all the knowledge there is. A dtype that only one library has is an error here, before any
data moves: no value ever crosses as the bits of another dtype.

Which dtype a value has *in JAX* depends on the x64 setting too. `dtype_t2j` ignores the setting
(`torch.int64` is `int64`), `canonical_dtype` applies it (`int32` while x64 is off).
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.typing import DTypeLike

from ._errors import DtypeError


_NAMES = (
    "bool",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "int8",
    "int16",
    "int32",
    "int64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "complex64",
    "complex128",
)
_CONFIG: Any = jax.config  # its attributes are made when JAX is imported

_T2J = {getattr(torch, name): jnp.dtype(name) for name in _NAMES}
_J2T = {jax_dtype: torch_dtype for torch_dtype, jax_dtype in _T2J.items()}

# The longest prefix of the dtype's name decides.
_REMEDIES = {
    "": "Cast it to one of these first",
    "bits": "View it as `uint8` first",
    "complex32": "Cast it to `complex64` first",
    "complex256": "Cast it to `complex128` first",
    "float128": "Cast it to `float64` first",
    "float4": "Cast it to `float32` first",
    "float6": "Cast it to `float32` first",
    "float8": "Cast it to `float32` first",
    "int": "Cast it to `int8` first",
    "key<": "Pass `jax.random.key_data(key)` instead",
    "qint": "Call `.dequantize()` first",
    "quint": "Call `.dequantize()` first",
    "uint": "Cast it to `uint8` first",
}


def dtype_t2j(dtype: torch.dtype | DTypeLike) -> np.dtype:
    """The JAX (NumPy) dtype that has the same values as a torch dtype.

    **Arguments:**

    - `dtype`: a `torch.dtype`. A JAX or NumPy dtype, or its name, is accepted and normalised.

    **Returns:**

    The `numpy.dtype` of the same name, whether or not JAX's x64 mode is on.

    **Raises:**

    `DtypeError` for a dtype that only one of the libraries has, such as `torch.complex32`.

    !!! example

        >>> import torch
        >>> dtype_t2j(torch.bfloat16)
        dtype(bfloat16)
        >>> dtype_t2j(torch.int64)
        dtype('int64')
    """
    if isinstance(dtype, torch.dtype):
        if dtype not in _T2J:
            raise DtypeError(_unsupported(str(dtype), str(dtype).removeprefix("torch."), "JAX"))
        return _T2J[dtype]
    native = _native_dtype(dtype)
    if native not in _J2T:
        raise DtypeError(_unsupported(str(dtype), str(native), "PyTorch"))
    return native


def dtype_j2t(dtype: torch.dtype | DTypeLike) -> torch.dtype:
    """The torch dtype that has the same values as a JAX dtype.

    **Arguments:**

    - `dtype`: anything that `jax.numpy` takes for a dtype: `jnp.float32`, `np.dtype("int8")`,
        `"bfloat16"`. A `torch.dtype` is accepted and returned.

    **Returns:**

    The `torch.dtype` of the same name.

    **Raises:**

    `DtypeError` for a dtype that only one of the libraries has: 4-bit integers, PRNG keys, strings.

    !!! example

        >>> import jax.numpy as jnp
        >>> dtype_j2t(jnp.float8_e5m2)
        torch.float8_e5m2
    """
    return _J2T[dtype_t2j(dtype)]


def canonical_dtype(dtype: torch.dtype | DTypeLike) -> np.dtype:
    """The dtype that JAX gives to values of `dtype` under the current x64 setting.

    **Arguments:**

    - `dtype`: a torch, JAX or NumPy dtype.

    **Returns:**

    `dtype` as a `numpy.dtype`; its 32-bit (or `complex64`) relative if it has 64 bits a number and
    x64 is off.

    **Raises:**

    `DtypeError` as `dtype_t2j` does.

    !!! example

        >>> import torch
        >>> canonical_dtype(torch.float64)
        dtype('float32')
    """
    # JAX warns when a 64-bit dtype is asked for by name, and not when a value has one.
    return jax.dtypes.result_type(np.empty((), dtype_t2j(dtype)))


def is_inexact(dtype: torch.dtype | DTypeLike) -> bool:
    """Whether values of `dtype` are real or complex floating point, and so have derivatives.

    **Arguments:**

    - `dtype`: a torch, JAX or NumPy dtype, supported here or not.

    **Returns:**

    A `bool`.

    !!! example

        >>> import torch
        >>> is_inexact(torch.bfloat16), is_inexact("int32")
        (True, False)
    """
    if isinstance(dtype, torch.dtype):
        return dtype.is_floating_point or dtype.is_complex
    return jnp.issubdtype(dtype, jnp.inexact)


def _native_dtype(dtype: DTypeLike) -> np.dtype:
    if dtype is None:
        # NumPy would read None as float64.
        raise DtypeError("Expected a dtype, got None.")
    try:
        return np.dtype(dtype).newbyteorder("=")
    except TypeError as error:
        raise DtypeError(_unsupported(str(dtype), str(dtype), "PyTorch")) from error


def _unsupported(shown: str, name: str, other: str) -> str:
    prefix = max((prefix for prefix in _REMEDIES if name.startswith(prefix)), key=len)
    return (
        f"{other} has no dtype with the values of {shown}. {_REMEDIES[prefix]}. "
        f"Supported dtypes: {', '.join(_NAMES)}."
    )


def x64_enabled() -> bool:
    """Whether JAX has 64-bit types now."""
    return _CONFIG.jax_enable_x64


def is_key(x: Any) -> bool:
    """Whether `x` is a JAX array of typed keys, which torch has no dtype for."""
    return isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
