"""Comparison of tensors bit for bit, by which unseen writes are found."""

import torch


def same_bits(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether two tensors have the same shape, dtype and bits."""
    x, y = x.detach(), y.detach()
    if x.shape != y.shape or x.dtype != y.dtype:
        return False
    return torch.equal(_bytes(x), _bytes(y))


def _bytes(x: torch.Tensor) -> torch.Tensor:
    # A clone's strides are those of its shape, which a view as bytes asks for.
    x = x.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    return x.view(-1).view(torch.uint8)
