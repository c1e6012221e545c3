"""When two modules are the same but for the values of their parameters.

Modules are compared by their pickled form, in which parameters and changing buffers are stood for
by their positions and every other tensor by a digest of its contents. Classes stand for themselves:
by name they could not be told from others that a notebook has defined since. So do functions,
unless one definition made both. What cannot be pickled is equal to itself only.

Two things differ between modules that were made alike. torch keeps hooks by a number that counts
all hooks of the process; here they are kept by their order. And `torch.nn.utils.parametrize` makes
a class for each module; here the module is of the class that was parametrized, since what the new
class adds follows from the module's attributes.
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
# Attributes of modules that are keyed by a hook's number.
_HOOKS = (
    "_backward_hooks",
    "_backward_pre_hooks",
    "_forward_hooks",
    "_forward_hooks_always_called",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_load_state_dict_post_hooks",
    "_load_state_dict_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
)


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
    """Pickles in order not to unpickle.

    Attributes:
        referenced: what the pickled form mentions by number. Strings are among these since pickle
            tells equal ones from identical ones.
    """

    def __init__(self, stream: io.BytesIO, placeholders: Mapping[int, Hashable]) -> None:
        super().__init__(stream, protocol=pickle.HIGHEST_PROTOCOL)
        self._placeholders = placeholders
        self.referenced: list[Any] = []
        self._positions: dict[Hashable, int] = {}

    def persistent_id(self, obj: Any) -> int | None:
        if isinstance(obj, str):
            return self._position(obj, obj)
        if isinstance(obj, torch.Tensor):
            return self._position(id(obj), self._placeholders.get(id(obj)) or digest(obj))
        if isinstance(obj, types.FunctionType):
            return self._position(id(obj), _made_by(obj))
        if isinstance(obj, type | types.BuiltinFunctionType):
            return self._position(id(obj), obj)
        return None

    def _position(self, key: Hashable, value: Any) -> int:
        if key not in self._positions:
            self._positions[key] = len(self.referenced)
            self.referenced.append(value)
        return self._positions[key]

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, torch.nn.Module) or isinstance(obj, torch.jit.ScriptModule):
            return NotImplemented
        if is_parametrized(obj):
            return _Module, (type(obj).__bases__, _comparable(obj, vars(obj)))
        reduced = obj.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        if isinstance(reduced, tuple) and len(reduced) > 2 and isinstance(reduced[2], dict):
            return (*reduced[:2], _comparable(obj, reduced[2]), *reduced[3:])
        return reduced


class _Module:
    """A parametrized module, pickled."""


def _comparable(module: torch.nn.Module, attributes: Mapping[str, Any]) -> dict[str, Any]:
    """A module's attributes, without those that are computed anew by each call."""
    kept = {name: attributes[name] for name in _HOOKS if attributes.get(name)}
    order = {number: i for i, number in enumerate(sorted(set[Any]().union(*kept.values())))}
    renumbered = {
        name: [(order[number], hook) for number, hook in hooks.items()]
        for name, hooks in kept.items()
    }
    computed = computed_by_hooks(module)
    return {k: v for k, v in {**attributes, **renumbered}.items() if k not in computed}


def _made_by(function: types.FunctionType) -> Any:
    """What functions have in common that were made by one definition to do the same.

    One that keeps something that may change is like no other.
    """
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    kept = [*cells, *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    if function.__dict__ or not all(isinstance(x, _IMMUTABLE) for x in kept):
        return function
    values = tuple((type(x), x) for x in kept)
    return function.__code__, id(function.__globals__), values


def digest(tensor: torch.Tensor) -> Hashable:
    """Equal for tensors that are equal bit for bit."""
    data = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    contents = hashlib.sha256(data.view(torch.uint8).numpy().data).hexdigest()
    return str(tensor.dtype), tuple(tensor.shape), str(tensor.device), contents
