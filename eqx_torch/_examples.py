"""Example arguments of a wrapped function, and the 64 bits that arguments are given back.

Examples fix the structure of a function's arguments and let errors appear when it is wrapped.
They also say which arrays torch wants in 64 bits: JAX holds class labels in 32 bits unless x64 is
on, and torch refuses those. An annotation with one dtype of 64 bits says so too; where both speak,
a torch tensor among the examples is right.
"""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.core
import numpy as np
import torch
from jax.sharding import PartitionSpec

from ._ambient import Ambient
from ._annotations import Signature
from ._arrays import j2t
from ._dtypes import canonical_dtype, dtype_j2t, dtype_t2j, x64_enabled
from ._errors import ConversionError, InputError
from ._invoke import Call, Infer, is_array, WideDtypes
from ._program import Own, Site, Spec, Static
from ._trees import flatten


_OF_SHARDINGS = PartitionSpec, jax.sharding.Sharding, jax.sharding.Mesh


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
        for x in args:
            if isinstance(x, _OF_SHARDINGS):
                spec = getattr(x, "spec", x if isinstance(x, PartitionSpec) else 'P("x")')
                raise InputError(
                    f"`{name}` got {x} by position, where examples of its arguments are passed. "
                    f"Pass specs by name, `out_specs={spec}`; the mesh is that of the inputs."
                )
        return Examples(name, args, kwargs or {}) if args or kwargs is not None else None

    def infer(
        self,
        infer: Infer,
        args: Sequence[Any],
        kwargs: dict[str, Any] | None,
        own: Own | None = None,
        tensors: Sequence[torch.Tensor] = (),
        wide: WideDtypes = (),
    ) -> None:
        """Infers the outputs for arguments like these, so that errors appear now.

        Args:
            infer: gives the outputs.
            args, kwargs: the examples with their values, or arguments of the same structure.
            own: what the inputs before the arguments are.
            tensors: examples of these.
            wide: the torch dtype to give to each of them before torch sees it.
        """
        wide = *wide, *self._wide_dtypes([spec.dtype for spec in self.specs])
        site = Site(self._structure, self._statics, wide, Ambient.capture(), own)
        specs = tuple(Spec(tuple(t.shape), canonical_dtype(t.dtype)) for t in tensors)
        leaves, _ = flatten((tuple(args), kwargs or {}))
        arrays = [*tensors, *(x for x in leaves if _is_example(x))]
        infer(site, specs + self.specs, None, lambda: _values(arrays))

    def wide_dtypes(self, arguments: Call) -> WideDtypes:
        """The torch dtype to give to each array of a call before torch sees it."""
        dynamic = [static is None for static in arguments.statics]
        same = arguments.structure.unordered == self._structure.unordered
        if not same or dynamic != [s is None for s in self._statics]:
            raise InputError(
                f"`{self._name}` was called with arguments of another structure than its "
                "examples have.\n"
                f"  examples: {_shown(self._structure, self._statics)}\n"
                f"  call:     {_shown(arguments.structure, arguments.statics)}\n"
                "Call it like the examples, which are those of a whole call, or wrap it without "
                "them (`from_torch(model)` of a converted model drops them). Where they are there "
                "for dtypes only, annotate the arguments in place of that, in the function or by "
                '`signature=`: `labels: Int64[Tensor, "batch"]`.'
            )
        return self._wide_dtypes([spec.dtype for spec in arguments.specs()[arguments.num_own :]])

    def key(self) -> Hashable:
        """Equal for examples of the same structure, dtypes and shapes."""
        return self._structure, self._statics, self._dtypes, self.specs

    def _wide_dtypes(self, dtypes: Sequence[Any]) -> WideDtypes:
        return tuple(
            dtype_j2t(example) if example != dtype and canonical_dtype(example) == dtype else None
            for example, dtype in zip(self._dtypes, dtypes, strict=True)
        )


class Annotated:
    """The annotations of a function, for calls without examples."""

    def __init__(self, signature: Signature | None) -> None:
        self._signature = signature

    def wide_dtypes(self, arguments: Call) -> WideDtypes:
        """The torch dtype to give to each array of a call before torch sees it."""
        specs = arguments.specs()[arguments.num_own :]
        if self._signature is None or not self._signature.widens or x64_enabled():
            return (None,) * len(specs)
        structs = [jax.ShapeDtypeStruct(*spec) for spec in specs]
        args, kwargs = arguments.site(()).arguments(structs)
        wide = _wide(self._signature, args, kwargs)
        return tuple(wide.get(id(struct)) for struct in structs)


def widened(
    signature: Signature | None, args: Sequence[Any], kwargs: dict[str, Any] | None
) -> tuple[tuple[Any, ...], dict[str, Any] | None]:
    """Example arguments, those of JAX in the 64 bits that annotations give to them."""
    if signature is None or not signature.widens or not (args or kwargs) or x64_enabled():
        return tuple(args), kwargs
    leaves, structure = flatten((tuple(args), kwargs or {}))
    structs = [_struct(x) if _is_example(x) else x for x in leaves]
    wide = _wide(signature, *structure.unflatten(structs))
    pairs = zip(leaves, structs, strict=True)
    return structure.unflatten([_as_wide(x, wide.get(id(struct))) for x, struct in pairs])


def _wide(
    signature: Signature, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[int, torch.dtype | None]:
    """By the identity of each annotated array of a call."""
    return {id(seen.array): seen.wide for seen in signature.bind(tuple(args), kwargs).seen}


def _struct(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(tuple(x.shape), canonical_dtype(x.dtype))


def _as_wide(x: Any, dtype: torch.dtype | None) -> Any:
    if dtype is None or isinstance(x, torch.Tensor):
        return x
    if isinstance(x, jax.ShapeDtypeStruct | jax.core.Tracer):
        return jax.ShapeDtypeStruct(x.shape, dtype_t2j(dtype))
    return np.asarray(x).astype(dtype_t2j(dtype))


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
