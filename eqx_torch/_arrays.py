"""One array, or a tree of arrays, from one library to the other.

Both directions hand over the memory itself (DLPack) whenever the two libraries can agree on what it
holds, and copy otherwise. Shared memory has one owner more, not a new owner: it is freed when the
last array or tensor that uses it is. JAX takes its arrays to be immutable and cannot notice a torch
tensor that is written to, so tensors that share memory with an array must not be changed in place.

A JAX array made here is always row-major. JAX could share a transposed tensor by giving the array
another memory layout, but `jax.jit` compiles once for each layout and compiled functions refuse one
they were not compiled for, so an array whose layout depends on where its values came from costs
more than the copy.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast, get_args, Literal, TypeAlias

import jax
import numpy as np
import torch
from jax.core import Tracer
from jaxtyping import PyTree

from ._dtypes import canonical_dtype, dtype_j2t
from ._errors import ConversionError, EqxTorchError
from ._processes import inside_callback
from ._trees import flatten, leaf_paths, Structure


Via: TypeAlias = Literal["dlpack", "cpu", "host"]


def t2j(tensor: torch.Tensor, via: Via = "dlpack") -> jax.Array:
    """A torch tensor as a JAX array on the same device.

    The values are those of `tensor.detach()`. Memory is shared if the tensor is contiguous, starts
    at an address that XLA accepts (64-byte aligned on a CPU), is not pinned, and has a dtype that
    JAX keeps; other tensors are copied.

    **Arguments:**

    - `tensor`: a tensor of any shape, with one of the dtypes that `dtype_t2j` supports. It must not
        be written to while the array is in use; pass `tensor.clone()` if it will be.
    - `via`: `"dlpack"` shares memory as described. `"cpu"` and `"host"` (the same thing) always
        copy, by way of host memory.

    **Returns:**

    A `jax.Array` of the same shape and dtype, committed to the tensor's device. While JAX's x64
    mode is off, 64-bit values become 32-bit ones as `jnp.asarray` converts a NumPy array: floats
    are rounded, integers wrap around.

    **Raises:**

    `ConversionError` for a tensor that has no memory to take values from (sparse, nested, meta or
    fake tensors; tensors inside a `torch.func` transformation), or that is on a device JAX does not
    see; `DtypeError` for a dtype that JAX does not have.

    !!! example

        >>> import torch
        >>> t2j(torch.arange(3.0))
        Array([0., 1., 2.], dtype=float32)
    """
    _check_via(via)
    if not isinstance(tensor, torch.Tensor):
        raise ConversionError(
            f"t2j expected a torch.Tensor, got {_type_name(tensor)}. `jax.numpy.asarray` takes "
            "NumPy arrays and Python numbers."
        )
    dtype = dtype_j2t(canonical_dtype(tensor.dtype))
    _check_has_memory(tensor)
    if inside_callback():
        raise ConversionError(
            "t2j was called inside a torch function that JAX is running. The tensor may lie in "
            "memory that is JAX's again when that function returns, and what computes on the array "
            "may wait for the device that waits for the function. Return the tensor, and compute "
            "in JAX on the result."
        )
    if via != "dlpack":
        return _copy_tensor(tensor, dtype)
    return _share_tensor(tensor, dtype)


def j2t(array: jax.typing.ArrayLike, via: Via = "dlpack") -> torch.Tensor:
    """A JAX array as a torch tensor on the same device.

    **Arguments:**

    - `array`: a JAX array of any shape, with one of the dtypes that `dtype_j2t` supports, on one
        device or replicated over several (the copy on the first local device is taken). NumPy
        arrays and Python numbers are accepted too; they are always copied.
    - `via`: `"dlpack"` shares the memory of a JAX array. `"cpu"` and `"host"` (the same thing)
        always copy, by way of host memory.

    **Returns:**

    A tensor of the same shape and dtype, without `requires_grad`. A Python number becomes a tensor
    of the dtype that `jnp.asarray` gives it. The tensor shares memory with a JAX array, which is
    immutable: write to `tensor.clone()`.

    **Raises:**

    `ConversionError` for an array that has no values yet (inside a JAX transformation) or any more
    (deleted or donated), or whose values are spread over several devices; `DtypeError` for a dtype
    that torch does not have.

    !!! example

        >>> import jax.numpy as jnp
        >>> j2t(jnp.arange(3.0))
        tensor([0., 1., 2.])
    """
    _check_via(via)
    if isinstance(array, jax.Array):
        dtype_j2t(array.dtype)
        shard = _one_shard(array)
        if via != "dlpack":
            return _copy_numpy(np.asarray(shard)).to(_torch_device(shard))
        return torch.from_dlpack(shard)
    if isinstance(array, np.ndarray | np.generic):
        return _copy_numpy(np.asarray(array))
    if isinstance(array, bool | int | float | complex):
        dtype = canonical_dtype(jax.dtypes.scalar_type_of(array))
        return _copy_numpy(np.asarray(array, dtype))
    raise ConversionError(
        f"j2t expected a JAX array, a NumPy array or a number, got {_type_name(array)}."
    )


def tree_t2j(tree: PyTree, via: Via = "dlpack") -> PyTree:
    """A copy of a tree with every torch tensor in it converted by `t2j`.

    **Arguments:**

    - `tree`: whatever torch functions take and return: nested dictionaries and tuples, dataclasses,
        mappings such as what tokenizers return, and any other JAX pytree.
    - `via`: as in `t2j`.

    **Returns:**

    A JAX pytree of the same structure. Leaves that are not torch tensors are left as they are.

    **Raises:**

    As `t2j`; a note on the exception says which leaf it was.

    !!! example

        >>> import torch
        >>> tree_t2j({"weight": torch.ones(2), "name": "linear"})
        {'weight': Array([1., 1.], dtype=float32), 'name': 'linear'}
    """
    leaves, structure = flatten(tree)
    return structure.in_jax(_converted(t2j, via, torch.Tensor, leaves, structure))


def tree_j2t(tree: PyTree, via: Via = "dlpack") -> PyTree:
    """A copy of a tree with every JAX array in it converted by `j2t`.

    **Arguments:**

    - `tree`: any JAX pytree, Equinox modules included, and what `tree_t2j` takes.
    - `via`: as in `j2t`.

    **Returns:**

    A tree of the same structure. Leaves that are not JAX arrays are left as they are: NumPy arrays
    and numbers too.

    **Raises:**

    As `j2t`; a note on the exception says which leaf it was.

    !!! example

        >>> import jax.numpy as jnp
        >>> tree_j2t((jnp.ones(2), 3))
        (tensor([1., 1.]), 3)
    """
    leaves, structure = flatten(tree)
    return structure.unflatten(_converted(j2t, via, jax.Array, leaves, structure))


def _converted(
    convert: Callable[[Any, Via], Any], via: Via, of: type, leaves: list[Any], structure: Structure
) -> list[Any]:
    converted = list(leaves)
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, of):
            try:
                converted[i] = convert(leaf, via)
            except EqxTorchError as error:
                error.add_note(f"The leaf is at tree{leaf_paths(structure)[i]}.")
                raise
    return converted


def _share_tensor(tensor: torch.Tensor, dtype: torch.dtype) -> jax.Array:
    tensor = _row_major(tensor.detach().to(dtype))
    if tensor.is_pinned():
        # JAX would refuse it or keep it in host memory that no computation can use directly.
        tensor = tensor.clone()
    try:
        with _on_device_of(tensor):
            return jax.dlpack.from_dlpack(tensor)
    except (RuntimeError, TypeError, ValueError, BufferError) as error:
        raise ConversionError(
            f"JAX could not take a {tensor.dtype} tensor of shape {tuple(tensor.shape)} on "
            f"{tensor.device}: {error}\n"
            "If JAX does not see that device, write `t2j(tensor.cpu())`."
        ) from error


def _copy_tensor(tensor: torch.Tensor, dtype: torch.dtype) -> jax.Array:
    host = np.array(_share_tensor(tensor.detach().cpu(), dtype))
    return jax.device_put(host, _jax_device(tensor))


def _jax_device(tensor: torch.Tensor) -> Any:
    """JAX may have only some of the GPUs that torch sees."""
    if not tensor.is_cuda:
        return jax.local_devices(backend="cpu")[0]
    gpus = jax.local_devices(backend="gpu")
    index = tensor.get_device()
    found = next((gpu for gpu in gpus if gpu.local_hardware_id == index), None)
    if found is None:
        raise ConversionError(
            f"t2j was given a tensor on {tensor.device}, which is not among the GPUs that JAX has "
            f"in this process ({gpus}). Write `t2j(tensor.cpu())`."
        )
    return found


def _row_major(tensor: torch.Tensor) -> torch.Tensor:
    # A conjugated or negated view exports the values it is a view of, so it is resolved first.
    tensor = tensor.resolve_conj().resolve_neg().contiguous()
    # Axes of size 1 may have any stride in a contiguous tensor, and JAX would read a transposition
    # into it; going by way of one axis sets every stride to what the shape says.
    return tensor.view(-1).view(tensor.shape)


def _on_device_of(tensor: torch.Tensor) -> AbstractContextManager:
    if not tensor.is_cuda:
        return nullcontext()
    # Starting JAX's GPU backend can change the current device, so it has to happen before torch's
    # is set; torch exports a tensor only from the device that is current.
    jax.local_devices()
    return torch.cuda.device(tensor.device)


def _check_has_memory(tensor: torch.Tensor) -> None:
    reason = _why_no_memory(tensor)
    if reason is not None:
        raise ConversionError(
            f"t2j cannot convert a {tensor.dtype} tensor of type {_type_name(tensor)}: {reason}"
        )


def _why_no_memory(tensor: torch.Tensor) -> str | None:
    if tensor.is_nested:
        return "it is nested. Call `torch.nested.to_padded_tensor` first."
    if tensor.layout is not torch.strided:
        return f"its layout is {tensor.layout}. Call `.to_dense()` first."
    if tensor.is_meta:
        return "it is on the meta device and has no values. Give it some (`.to_empty`) first."
    try:
        storage = tensor.untyped_storage()
    except (RuntimeError, NotImplementedError):
        return (
            "inside a `torch.func` transformation it has no memory of its own. Convert before or "
            "after the transformation."
        )
    # A fake tensor claims a real device, and exporting it yields whatever lies in memory there.
    if storage.device.type == "meta":
        return "it is fake and has no values. Convert outside `FakeTensorMode`."
    return None


def _one_shard(array: jax.Array) -> jax.Array:
    shape_and_dtype = f"{array.dtype}[{','.join(map(str, array.shape))}]"
    if isinstance(array, Tracer):
        raise ConversionError(
            f"j2t was called on a {shape_and_dtype} that JAX is tracing: inside `jax.jit`, "
            "`jax.grad`, `jax.vmap` and the like it has no values yet. Wrap the torch function "
            "with `eqx_torch.torch2jax` and call the result there instead."
        )
    if array.is_deleted():
        raise ConversionError(
            f"j2t was called on a {shape_and_dtype} that has been deleted or donated to a jitted "
            "function. Convert it before that call, or do not donate it."
        )
    if not cast(Any, array).is_ready() and inside_callback():  # the stub does not know it
        raise ConversionError(
            f"j2t was called on a {shape_and_dtype} that is not computed yet, inside a torch "
            "function that JAX is running. The device that computes it may be waiting for that "
            "function. Pass the array to the function as an argument, or call "
            "`array.block_until_ready()` before."
        )
    if not array.is_fully_replicated:
        raise ConversionError(
            f"j2t was called on a {shape_and_dtype} that is sharded over "
            f"{len(array.sharding.device_set)} devices ({array.sharding}), and a torch tensor is "
            "on one. Write one of\n"
            "  1. `j2t(jax.device_get(array))` to gather it in host memory,\n"
            "  2. `j2t(jax.device_put(array, device))` to gather it on one device,\n"
            "  3. `[j2t(shard.data) for shard in array.addressable_shards]` for a tensor a device."
        )
    return array.addressable_data(0)


def _copy_numpy(array: np.ndarray) -> torch.Tensor:
    dtype = dtype_j2t(array.dtype)
    native = np.array(array, array.dtype.newbyteorder("="), order="C")
    # Torch does not know NumPy's extension dtypes, but every dtype is a view of bytes to both.
    data = torch.from_numpy(native.reshape(-1).view(np.uint8))
    return data.view(dtype).view(array.shape)


def _torch_device(array: jax.Array) -> torch.device:
    (device,) = array.devices()
    if device.platform == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", device.local_hardware_id)


def _check_via(via: str) -> None:
    if via not in get_args(Via):
        raise ConversionError(f'via must be one of "dlpack", "cpu" and "host", got {via!r}.')


def _type_name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
