"""One call of a torch function from JAX: from arguments as users write them to the primitive.

Arrays among the arguments are traced; everything else is static and part of the program. The
outputs are inferred for the global arrays, and where these are sharded over explicit axes the
call is split over them.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import PartitionSpec

from ._ambient import Ambient
from ._call import call, FAILURES
from ._deadlocks import refuse_deadlock
from ._dtypes import dtype_j2t, is_key, x64_enabled
from ._errors import DtypeError, InputError
from ._probe import Outputs
from ._program import Leaf, Site, Spec, Static, TorchFunction
from ._sharding import local_spec, out_spec_list, Plan, plan, shard_map
from ._trees import flatten, leaf_paths


Infer: TypeAlias = Callable[[Site, tuple[Spec, ...]], Outputs]
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
                    f"{self._function.label(path)}. Convert it by `eqx_torch.t2j(x)`; in torch "
                    "code, where there are tensors only, call the torch function or module itself."
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
        infer: gives the outputs for a call site and global input specs.
        arguments: the arguments.
        restored: for each array, the torch dtype to give it before torch sees it.
        frozen: for each array, whether it is excluded from differentiation.
        out_specs: how the outputs are sharded, where inputs are.
        per_shard: what is done on each shard around the call.

    Returns:
        The function's result with JAX arrays in place of tensors.
    """
    refuse_deadlock(function.name)
    if FAILURES.pending:
        FAILURES.raise_pending()
    arrays = arguments.arrays()
    in_specs = arguments.specs()
    site = arguments.site(restored)
    if frozen is not None:
        arrays = [jax.lax.stop_gradient(x) if f else x for x, f in zip(arrays, frozen, strict=True)]
    split = plan(function.name, arrays, out_specs)
    outputs = infer(site, in_specs)
    leaf = Leaf(
        function,
        site,
        in_specs,
        outputs.specs,
        outputs.structure,
        x64_enabled(),
        outputs.source,
    )
    if split is None:
        results = call(leaf, *arrays)
    else:
        results = _sharded(leaf, split, out_specs, per_shard or PerShard(), arrays)
    return outputs.structure.in_jax(results)


def _sharded(
    leaf: Leaf, split: Plan, out_specs: Any, per_shard: PerShard, arrays: Sequence[Any]
) -> list[Any]:
    name, label = leaf.name, leaf.function.label
    named = lambda path: leaf.function.output_label(path) or "the output"  # noqa: E731
    returned = leaf.function.of_result(leaf.structure)
    specs = per_shard.out_specs(out_spec_list(name, out_specs, returned))
    ins = zip(leaf.site.paths, leaf.ins, split.in_specs, strict=True)
    outs = zip(leaf_paths(leaf.structure), leaf.outs, specs, strict=True)
    local = dataclasses.replace(
        leaf,
        in_specs=tuple(local_spec(name, label(path), s, p, split.mesh) for path, s, p in ins),
        out_specs=tuple(local_spec(name, named(path), s, p, split.mesh) for path, s, p in outs),
        source=f"{leaf.source}, for one shard",
    )

    def body(*shards: Any) -> list[Any]:
        results = call(local, *per_shard.enter(shards, split.axes))
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
