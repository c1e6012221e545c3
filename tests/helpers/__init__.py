"""The one way in which tests compare trees."""

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jaxtyping import PyTree


# Relative and absolute, as in `torch.testing.assert_close`; other dtypes are compared exactly.
_TOLERANCES = {
    "float8_e4m3fn": (2**-3, 2**-9),
    "float8_e4m3fnuz": (2**-3, 2**-9),
    "float8_e5m2": (2**-2, 2**-16),
    "float8_e5m2fnuz": (2**-2, 2**-16),
    "bfloat16": (1.6e-2, 1e-5),
    "float16": (1e-3, 1e-5),
    "float32": (1.3e-6, 1e-5),
    "float64": (1e-7, 1e-7),
    "complex64": (1.3e-6, 1e-5),
    "complex128": (1e-7, 1e-7),
}


def assert_trees_equal(
    actual: PyTree,
    expected: PyTree,
    *,
    rtol: float | None = None,
    atol: float | None = None,
    exact: bool = False,
) -> None:
    """Asserts that two pytrees have the same structure, shapes, dtypes and values.

    Leaves on either side may be JAX arrays, torch tensors, NumPy arrays or Python numbers: what
    they would be in JAX is compared, so while x64 is off `torch.int64` equals `jnp.int32`. NaN
    equals NaN. Anything else is compared by `==`.

    `exact` compares bit for bit, the sign of zeros and the payload of NaNs included. `rtol` and
    `atol` default to what suits the dtype.
    """
    actual_leaves, actual_structure = jax.tree_util.tree_flatten_with_path(actual)
    expected_leaves, expected_structure = jax.tree_util.tree_flatten_with_path(expected)
    assert actual_structure == expected_structure, (
        f"structures differ: {actual_structure}, expected {expected_structure}"
    )
    for (path, actual_leaf), (_, expected_leaf) in zip(actual_leaves, expected_leaves, strict=True):
        where = f"at tree{jax.tree_util.keystr(path)}"
        if not (_is_array(actual_leaf) and _is_array(expected_leaf)):
            assert actual_leaf == expected_leaf, f"{where}: {actual_leaf!r} != {expected_leaf!r}"
            continue
        _assert_arrays_equal(
            to_numpy(actual_leaf), to_numpy(expected_leaf), where, rtol, atol, exact
        )


def to_numpy(value) -> np.ndarray:
    """A NumPy array with the values of an array, tensor or number, and the dtype JAX gives it."""
    if isinstance(value, torch.Tensor):
        value = _tensor_to_numpy(value)
    elif isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    array = np.asarray(value)
    if array.dtype == jax.dtypes.float0:
        return array
    dtype = jax.dtypes.result_type(np.empty((), array.dtype.newbyteorder("=")))
    with np.errstate(over="ignore"):
        return array.astype(dtype)


def _tensor_to_numpy(tensor: torch.Tensor) -> np.ndarray:
    dtype = np.dtype(str(tensor.dtype).removeprefix("torch."))
    # A clone's strides are those of its shape, which a view as bytes asks for.
    values = tensor.detach().cpu().resolve_conj().resolve_neg()
    flat = values.clone(memory_format=torch.contiguous_format).view(-1)
    return flat.view(torch.uint8).numpy().view(dtype).reshape(tuple(tensor.shape))


def _is_array(leaf) -> bool:
    return isinstance(
        leaf, jax.Array | torch.Tensor | np.ndarray | np.generic | bool | int | float | complex
    )


def _assert_arrays_equal(
    actual: np.ndarray,
    expected: np.ndarray,
    where: str,
    rtol: float | None,
    atol: float | None,
    exact: bool,
) -> None:
    assert actual.shape == expected.shape, f"{where}: shape {actual.shape} != {expected.shape}"
    assert actual.dtype == expected.dtype, f"{where}: dtype {actual.dtype} != {expected.dtype}"
    if exact:
        assert actual.tobytes() == expected.tobytes(), f"{where}: {actual} != {expected}"
        return
    name = str(actual.dtype)
    if name not in _TOLERANCES:
        np.testing.assert_array_equal(actual, expected, err_msg=where)
        return
    default_rtol, default_atol = _TOLERANCES[name]
    wide = np.complex128 if name.startswith("complex") else np.float64
    with np.errstate(invalid="ignore"):  # signalling NaNs
        actual, expected = actual.astype(wide), expected.astype(wide)
    np.testing.assert_allclose(
        actual,
        expected,
        rtol=default_rtol if rtol is None else rtol,
        atol=default_atol if atol is None else atol,
        equal_nan=True,
        err_msg=where,
    )
