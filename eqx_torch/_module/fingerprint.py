"""When two modules are the same but for the values of their parameters.

Modules are compared by their pickled form, in which parameters and changing buffers are stood for
by their positions and every other tensor by a digest of its contents. Classes and functions stand
for themselves, unless one definition made both functions. What cannot be pickled is equal to itself
only.

Modules that were made alike differ in the numbers by which torch keeps hooks, which count all hooks
of the process, and in the class that `torch.nn.utils.parametrize` makes for each module. Here hooks
are kept by their order, and a parametrized module is of the class that was parametrized.
"""

import hashlib
import io
import pickle
import types
from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch.nn.utils.parametrize import is_parametrized

from .layers import computed_by_hooks


_IMMUTABLE = (str, bool, int, float, complex, bytes, type(None), type, torch.dtype)


def fingerprint(module: torch.nn.Module, placeholders: Mapping[int, Hashable]) -> Hashable:
    """A value that is equal for equal modules.

    Args:
        module: the module.
        placeholders: by identity, what stands for each tensor whose values do not matter.
    """
    stream = io.BytesIO()
    pickler = _Pickler(stream, pickle.HIGHEST_PROTOCOL)
    pickler.placeholders, pickler.numbers = placeholders, {}
    try:
        pickler.dump(module)
    except Exception:
        return object()
    return stream.getvalue(), tuple(pickler.numbers)


class _Pickler(pickle.Pickler):
    """Pickles in order not to unpickle.

    Attributes:
        numbers: of what the pickled form mentions by number. Strings are among these since pickle
            tells equal ones from identical ones.
    """

    placeholders: Mapping[int, Hashable]
    numbers: dict[Hashable, int]

    def persistent_id(self, obj: Any) -> int | None:
        if isinstance(obj, torch.Tensor):
            value = self.placeholders.get(id(obj)) or digest(obj)
        elif isinstance(obj, types.FunctionType):
            value = _made_by(obj)
        elif type(obj) is str or isinstance(obj, type | types.BuiltinFunctionType):
            value = obj
        else:
            return None
        return self.numbers.setdefault(value, len(self.numbers))

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, torch.nn.Module) or isinstance(obj, torch.jit.ScriptModule):
            return NotImplemented
        if is_parametrized(obj):
            cls, state = type(obj).__bases__, dict(vars(obj))
        else:
            cls, state = type(obj), dict(obj.__getstate__())
        hooks = {k: v for k, v in state.items() if k.endswith("_hooks") or "_hooks_" in k}
        order = sorted({number for numbered in hooks.values() for number in numbered or ()})
        state |= {k: [(order.index(n), v[n]) for n in v or ()] for k, v in hooks.items()}
        computed = computed_by_hooks(obj)
        return _Pickled, (cls,), {k: v for k, v in state.items() if k not in computed}


class _Pickled:
    """A module."""


def _made_by(function: types.FunctionType) -> Hashable:
    """What functions have in common that were made by one definition to do the same.

    One that keeps something that may change is like no other.
    """
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    kept = [*cells, *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    if function.__dict__ or not all(isinstance(x, _IMMUTABLE) for x in kept):
        return function
    values = tuple((type(x), x, repr(x)) for x in kept)
    return function.__code__, id(function.__globals__), values


def digest(tensor: torch.Tensor) -> Hashable:
    """Equal for tensors that are equal bit for bit."""
    data = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    contents = hashlib.sha256(data.view(torch.uint8).numpy().data).hexdigest()
    return str(tensor.dtype), tuple(tensor.shape), str(tensor.device), contents
