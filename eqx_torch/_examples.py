"""Example arguments of a wrapped function.

They fix the structure of its arguments and let errors appear when it is wrapped. They also say
which arrays torch wants in 64 bits: JAX holds class labels in 32 bits unless x64 is on, and torch
refuses those.
"""

from collections.abc import Hashable, Sequence
from typing import Any

import jax
import torch

from ._ambient import Ambient
from ._arrays import j2t
from ._dtypes import canonical_dtype, dtype_j2t, dtype_t2j
from ._errors import ConversionError, InputError
from ._invoke import Arguments, Infer, is_array, Restored
from ._program import Site, Spec, Static
from ._trees import flatten


class Examples:
    """Example arguments, without their values.

    Attributes:
        specs: of the arrays among them.
    """

    def __init__(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        leaves, self._structure = flatten((tuple(args), kwargs))
        arrays = [leaf for leaf in leaves if _is_example(leaf)]
        self._name = name
        self._statics = tuple(None if _is_example(x) else Static(x) for x in leaves)
        self._dtypes = tuple(dtype_t2j(x.dtype) for x in arrays)
        self.specs = tuple(Spec(tuple(x.shape), canonical_dtype(x.dtype)) for x in arrays)

    @staticmethod
    def of(name: str, args: Sequence[Any], kwargs: dict[str, Any] | None) -> "Examples | None":
        """The examples, None if there are none."""
        return Examples(name, args, kwargs or {}) if args or kwargs is not None else None

    def infer(self, infer: Infer, args: Sequence[Any], kwargs: dict[str, Any] | None) -> None:
        """Infers the outputs for arguments like these, so that errors appear now.

        Args:
            infer: gives the outputs.
            args, kwargs: the examples with their values, or arguments of the same structure.
        """
        restored = self._restored([spec.dtype for spec in self.specs])
        site = Site(self._structure, self._statics, restored, Ambient.capture())
        leaves, _ = flatten((tuple(args), kwargs or {}))
        infer(site, self.specs, None, lambda: _values([x for x in leaves if _is_example(x)]))

    def restored(self, arguments: Arguments) -> Restored:
        """The torch dtype to give to each array of a call before torch sees it."""
        dynamic = [static is None for static in arguments.statics]
        if arguments.structure != self._structure or dynamic != [s is None for s in self._statics]:
            raise InputError(
                f"`{self._name}` was called with arguments of another structure than its "
                "examples have.\n"
                f"  examples: {_shown(self._structure, self._statics)}\n"
                f"  call:     {_shown(arguments.structure, arguments.statics)}\n"
                "Call it like the examples, or wrap it without them (they are optional)."
            )
        return self._restored([x.dtype for x in arguments.arrays()])

    def key(self) -> Hashable:
        """Equal for examples of the same structure, dtypes and shapes."""
        return self._structure, self._statics, self._dtypes, self.specs

    def _restored(self, dtypes: Sequence[Any]) -> Restored:
        return tuple(
            dtype_j2t(example) if example != dtype and canonical_dtype(example) == dtype else None
            for example, dtype in zip(self._dtypes, dtypes, strict=True)
        )


def _values(arrays: Sequence[Any]) -> list[torch.Tensor] | None:
    """The values of example arguments, None if one has none."""
    if any(isinstance(x, torch.Tensor) and x.is_meta for x in arrays):
        return None
    try:
        return [x.detach() if isinstance(x, torch.Tensor) else j2t(x) for x in arrays]
    except ConversionError:
        return None


def _is_example(x: Any) -> bool:
    return is_array(x) or isinstance(x, torch.Tensor | jax.ShapeDtypeStruct)


def _shown(structure: Any, statics: Sequence[Static | None]) -> str:
    args, kwargs = structure.unflatten([_Shown(s) for s in statics])
    return f"args={args} kwargs={kwargs}"


class _Shown:
    def __init__(self, static: Static | None) -> None:
        self._static = static

    def __repr__(self) -> str:
        return "array" if self._static is None else repr(self._static.value)
