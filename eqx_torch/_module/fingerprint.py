"""When two modules are the same but for the values of their parameters.

Modules are compared by their pickled form, in which parameters and changing buffers are stood for
by their positions and every other tensor by a digest of its contents. Classes and functions are
pickled by name; the objects that the names stood for are compared too, since a notebook may define
a class again. What cannot be pickled is equal to itself only.
"""

import hashlib
import io
import pickle
import types
from collections.abc import Hashable, Mapping
from typing import Any

import torch


def fingerprint(module: torch.nn.Module, placeholders: Mapping[int, Hashable]) -> Hashable:
    """A value that is equal for equal modules.

    Args:
        module: the module.
        placeholders: by identity, what stands for each tensor whose values do not matter.
    """
    stream = io.BytesIO()
    pickler = _Pickler(stream, placeholders)
    try:
        pickler.dump(module)
    except Exception:
        return _Itself()
    return stream.getvalue(), tuple(pickler.referenced)


class _Itself:
    """Equal to itself only."""


class _Pickler(pickle.Pickler):
    def __init__(self, stream: io.BytesIO, placeholders: Mapping[int, Hashable]) -> None:
        super().__init__(stream, protocol=pickle.HIGHEST_PROTOCOL)
        self._placeholders = placeholders
        self.referenced: list[Any] = []

    def persistent_id(self, obj: Any) -> Hashable | None:
        if not isinstance(obj, torch.Tensor):
            return None
        return self._placeholders.get(id(obj)) or _digest(obj)

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type | types.FunctionType):
            self.referenced.append(obj)
        return NotImplemented


def _digest(tensor: torch.Tensor) -> Hashable:
    data = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    contents = hashlib.sha256(data.view(torch.uint8).numpy().data).hexdigest()
    return str(tensor.dtype), tuple(tensor.shape), str(tensor.device), contents
