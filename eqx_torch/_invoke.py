"""One call of a torch function from JAX: from arguments as users write them to the primitive.

Arrays among the arguments are traced; everything else is static and part of the program. Where the
arrays are sharded over explicit axes, the call is split over them: outputs are found out for one
shard, and `out_specs` says how those of all shards form the global ones, as in `jax.shard_map`.
Declared outputs are global, and are divided.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import PartitionSpec

from ._ambient import Ambient
from ._arrays import j2t
from ._call import call, check_errors, PENDING
from ._dtypes import dtype_j2t, is_key, x64_enabled
from ._errors import DtypeError, InputError
from ._probe import Values
from ._processes import refuse_deadlock
from ._program import Leaf, Outputs, Site, Spec, Static, TorchFunction
from ._sharding import check_rank, local_spec, out_spec_list, Plan, plan, shard_map
from ._trees import flatten, leaf_paths


Infer: TypeAlias = Callable[
    [Site, tuple[Spec, ...], tuple[Spec, ...] | None, Values | None], Outputs
]
Restored: TypeAlias = tuple[torch.dtype | None, ...]


class Arguments:
    """The arguments of one call, taken apart.

    Attributes:
        structure: of `(args, kwargs)`.
        statics: for each leaf, the Python value, or None where an array stands.
    """

    def __init__(
        self, function: TorchFunction, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> None:
        leaves, self.structure = flatten((tuple(args), kwargs))
        dynamic = [is_array(leaf) for leaf in leaves]
        self.statics: tuple[Static | None, ...] = tuple(
            None if d else Static(leaf) for d, leaf in zip(dynamic, leaves, strict=True)
        )
        self._leaves = leaves
        self._dynamic = dynamic
        self._function = function

    def arrays(self) -> list[Any]:
        """The arrays, as JAX has them."""
        self._refuse_foreign()
        pairs = zip(self._leaves, self._dynamic, strict=True)
        return [_as_jax(x) for x, dynamic in pairs if dynamic]

    def specs(self) -> tuple[Spec, ...]:
        """The shapes and dtypes of the arrays."""
        return tuple(map(_checked_spec, self.arrays()))

    def site(self, restored: Restored | None) -> Site:
        """The call site, traced now."""
        count = sum(self._dynamic)
        none = (None,) * count
        return Site(self.structure, self.statics, restored or none, Ambient.capture())

    def _refuse_foreign(self) -> None:
        for path, leaf in zip(leaf_paths(self.structure), self._leaves, strict=True):
            if isinstance(leaf, torch.Tensor | jax.ShapeDtypeStruct):
                kind = type(leaf).__name__
                raise InputError(
                    f"`{self._function.name}` takes JAX arrays, but got a {kind} as "
                    f"{self._function.label(path)}. Convert it by `eqx_torch.t2j(x)`, or on a "
                    "mesh by `jax.numpy.asarray(x.numpy())`; in torch code, where there are "
                    "tensors only, call the torch function or module itself."
                )
            if is_key(leaf):
                raise DtypeError(_no_key(self._function, path, leaf))


class PerShard:
    """What is done on each device around a call that is split over a mesh: nothing, here."""

    def out_specs(self, specs: list[PartitionSpec]) -> list[PartitionSpec]:
        """The specs of all outputs, given those of what the user's function returns."""
        return specs

    def enter(self, shards: Sequence[Any], axes: frozenset[str]) -> Sequence[Any]:
        """The inputs of the call, given the shards."""
        del axes
        return shards

    def leave(self, results: list[Any], axes: frozenset[str]) -> list[Any]:
        """The shards of the outputs, given the call's results."""
        del axes
        return results


def is_array(x: Any) -> bool:
    """Whether an argument is traced."""
    return isinstance(x, jax.Array | np.ndarray | np.generic)


def invoke(
    function: TorchFunction,
    infer: Infer,
    arguments: Arguments,
    *,
    restored: Restored | None = None,
    frozen: Sequence[bool] | None = None,
    out_specs: Any = None,
    per_shard: PerShard | None = None,
) -> Any:
    """Calls a torch function on JAX arrays.

    Args:
        function: the function.
        infer: gives the outputs for a call site, global input specs, those of the shards (None if
            the call is not split) and the values of these, if they are known.
        arguments: the arguments.
        restored: for each array, the torch dtype to give it before torch sees it.
        frozen: for each array, whether it is excluded from differentiation.
        out_specs: how the outputs are sharded, where inputs are.
        per_shard: what is done on each shard around the call.

    Returns:
        The function's result with JAX arrays in place of tensors.
    """
    refuse_deadlock(function.name)
    if PENDING:
        check_errors()
    arrays = arguments.arrays()
    site = arguments.site(restored)
    if frozen is not None:
        arrays = [jax.lax.stop_gradient(x) if f else x for x, f in zip(arrays, frozen, strict=True)]
    split, shards, outputs = outputs_of(function, infer, arguments, site, out_specs)
    leaf = Leaf(
        function,
        site,
        shards,
        outputs.specs,
        outputs.structure,
        x64_enabled(),
        outputs.source if split is None else f"{outputs.source}, for one shard",
    )
    if split is None:
        results = call(leaf, *arrays)
    else:
        results = _sharded(leaf, outputs, split, out_specs, per_shard or PerShard(), arrays)
    return outputs.structure.in_jax(results)


def outputs_of(
    function: TorchFunction, infer: Infer, arguments: Arguments, site: Site, out_specs: Any
) -> tuple[Plan | None, tuple[Spec, ...], Outputs]:
    """How a call is split, None if it is not, what torch is given, and what it returns."""
    arrays, in_specs = arguments.arrays(), arguments.specs()
    split = plan(function.name, arrays, out_specs)
    if split is None:
        return None, in_specs, infer(site, in_specs, None, _values(arrays, in_specs))
    triples = zip(site.paths, in_specs, split.in_specs, strict=True)
    shards = tuple(
        local_spec(function.name, function.label(path), s, p, split.mesh) for path, s, p in triples
    )
    return split, shards, infer(site, in_specs, shards, _values(arrays, shards))


def _values(arrays: Sequence[Any], specs: Sequence[Spec]) -> Values | None:
    """The values that torch is given, those of the first shard; None if they are not known now."""
    if any(isinstance(x, jax.core.Tracer) or not x.is_fully_addressable for x in arrays):
        return None

    def values() -> list[torch.Tensor] | None:
        shards = [x.addressable_shards[0].data for x in arrays]
        alike = all(x.shape == spec.shape for x, spec in zip(shards, specs, strict=True))
        return [j2t(x) for x in shards] if alike else None

    return values


def _sharded(
    leaf: Leaf,
    outputs: Outputs,
    split: Plan,
    out_specs: Any,
    per_shard: PerShard,
    arrays: Sequence[Any],
) -> list[Any]:
    name, mesh = leaf.name, split.mesh
    named = lambda path: leaf.function.output_label(path) or "the output"  # noqa: E731
    returned = leaf.function.of_result(leaf.structure)
    specs = per_shard.out_specs(out_spec_list(name, out_specs, returned))
    triples = list(zip(map(named, leaf_paths(leaf.structure)), leaf.outs, specs, strict=True))
    if outputs.declared:
        outs = tuple(local_spec(name, what, s, p, mesh) for what, s, p in triples)
        leaf = dataclasses.replace(leaf, out_specs=outs)
    for what, spec, partition in triples:
        check_rank(name, what, spec, partition)

    def body(*shards: Any) -> list[Any]:
        results = call(leaf, *per_shard.enter(shards, split.axes))
        return per_shard.leave(results, split.axes)

    return shard_map(split, body, specs, arrays)


def _as_jax(x: Any) -> Any:
    if isinstance(x, jax.Array):
        return x
    dtype_j2t(x.dtype)
    return jnp.asarray(x)


def _no_key(function: TorchFunction, path: str, key: jax.Array) -> str:
    return (
        f"`{function.name}` got a JAX key, {key.dtype}{list(key.shape)}, as "
        f"{function.label(path)}, and torch has no dtype for keys. A function has no `key=`: draw "
        "in JAX and pass it the numbers, for instance `jax.random.normal(key, shape)`, or pass "
        "the words of the key, `jax.random.key_data(key)`. A model made by `from_torch` takes "
        "`key=`."
    )


def _checked_spec(x: Any) -> Spec:
    dtype_j2t(x.dtype)
    return Spec(tuple(x.shape), np.dtype(x.dtype))
