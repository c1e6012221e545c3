"""The values that stand for no value: NaN, an integer type's minimum, False."""

import torch


def poison(tensors: list[torch.Tensor]) -> None:
    """Overwrites tensors of any dtypes."""
    for tensor in tensors:
        tensor.detach().fill_(_poison_of(tensor.dtype))


def _poison_of(dtype: torch.dtype) -> float | int | bool:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return False if dtype is torch.bool else torch.iinfo(dtype).min
