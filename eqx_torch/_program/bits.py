"""Writes to tensors, as the first run on copies of them shows.

A write through torch counts up a tensor's version, except through `x.data` and NumPy, which a
comparison bit for bit shows. One that happens to write what was there shows in neither; so a tensor
whose memory was given away in such a way counts as written.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .._watch import Exposure


def observed(
    run: Callable[[], Any], originals: Sequence[torch.Tensor], copies: Sequence[torch.Tensor]
) -> tuple[Any, frozenset[int]]:
    """The result of a run on `copies`, and which of these it may have written to."""
    versions = [c._version for c in copies]
    with Exposure(by_data=True) as exposure:
        result = run()
    triples = enumerate(zip(originals, copies, versions, strict=True))
    written = frozenset(
        i
        for i, (x, copy, version) in triples
        if copy._version != version or exposure.exposed(copy) or not same_bits(x, copy)
    )
    return result, written


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
