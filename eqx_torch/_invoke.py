"""One call of a torch function from JAX: from arguments as users write them to the primitive.

A `Call` is the arguments taken apart: arrays are traced; everything else is static and part of the
program. All that is the same in calls which are alike but for the values of their arrays is found
out for the first of them, as a `Prepared` call.

Where the arrays are sharded over explicit axes, the call is split over them: outputs are found out
for one shard, and `out_specs` says how those of all shards form the global ones, as in
`jax.shard_map`. Declared outputs are global, and are divided.
"""

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeAlias

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import PartitionSpec

from ._ambient import Ambient
from ._arrays import j2t
from ._call import call as call_program, check_errors, PENDING
from ._compat import types_of
from ._dtypes import dtype_j2t, x64_enabled
from ._errors import DtypeError, InputError
from ._probe import Values
from ._processes import refuse_deadlock
from ._program import argument_name, Leaf, Outputs, Own, Site, Spec, Static, TorchFunction
from ._sharding import check_rank, local_spec, out_spec_list, Plan, plan, shard_map
from ._trees import flatten, leaf_paths, Structure


Infer: TypeAlias = Callable[
    [Site, tuple[Spec, ...], tuple[Spec, ...] | None, Values | None], Outputs
]
WideDtypes: TypeAlias = tuple[torch.dtype | None, ...]

_ARRAYS = (jax.Array, np.ndarray, np.generic)


class Call:
    """One call, taken apart.

    Attributes:
        args, kwargs: the arguments.
        structure: of `(args, kwargs)`.
        statics: for each leaf, the Python value, or None where an array stands.
        arrays: as JAX has them; those of the model itself come before those among the arguments.
        types: of the arrays.
        own: what the arrays before the arguments are, None if there are none.
        key: equal for calls that are alike but for the values of their arrays.
    """

    def __init__(
        self,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        own: Own | None = None,
        own_arrays: Sequence[Any] = (),
        also: Hashable = None,
    ) -> None:
        """Takes a call of the function `name` apart; `also` is one more thing that is alike."""
        refuse_deadlock(name)
        if PENDING:
            check_errors()
        self.name, self.args, self.kwargs, self.own = name, args, kwargs, own
        leaves, self.structure = flatten((args, kwargs))
        self.statics = tuple([None if isinstance(x, _ARRAYS) else Static(x) for x in leaves])
        among = [x for x, static in zip(leaves, self.statics, strict=True) if static is None]
        self.arrays: list[Any] = [*own_arrays, *among]
        types = types_of(self.arrays)
        if types is None:
            labels = own.labels if own else ()
            self.arrays = [_as_jax(name, x, labels[i : i + 1]) for i, x in enumerate(self.arrays)]
            types = tuple(map(jax.typeof, self.arrays))
        self.types = types
        self._ambient = Ambient.capture()
        mesh, x64 = jax.sharding.get_abstract_mesh(), x64_enabled()
        self.key: Hashable = (
            (self.structure, self.statics, self._ambient, mesh, x64, own, also),
            types,
        )

    def specs(self) -> tuple[Spec, ...]:
        """The shapes and dtypes of the arrays. Raises for what torch does not have."""
        self._refuse_foreign()
        return specs_of(self.types)

    def site(self, wide: WideDtypes) -> Site:
        """The call site, where arrays are given these dtypes before torch sees them."""
        return Site(self.structure, self.statics, wide, self._ambient, self.own)

    def without_handed(self) -> "Call":
        """The call with the user's arguments only."""
        assert self.own is not None
        own = dataclasses.replace(self.own, handed=0)
        arrays = self.arrays[: self.num_own]
        return Call(self.name, self.args[self.own.handed :], self.kwargs, own, arrays)

    @property
    def num_own(self) -> int:
        """How many of the arrays are not among the arguments."""
        return 0 if self.own is None else len(self.own)

    def _refuse_foreign(self) -> None:
        among = iter(self.types[self.num_own :])
        handed = 0 if self.own is None else self.own.handed
        for path, static in zip(leaf_paths(self.structure), self.statics, strict=True):
            value = next(among) if static is None else static.value
            if isinstance(value, torch.Tensor | jax.ShapeDtypeStruct):
                raise _foreign(self.name, value, argument_name(path, handed))
            if static is None and jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
                raise DtypeError(_no_key(self.name, argument_name(path, handed), value))


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


@dataclasses.dataclass(frozen=True)
class Prepared:
    """What is the same in calls that are alike but for the values of their arrays.

    Attributes:
        leaf: the program, on each device.
        result: the structure of what the function returns.
        constant: the arrays that are excluded from differentiation.
        split: how the call is split over a mesh, None if it is not.
        out_specs: of the outputs, where it is split.
        per_shard: what is done on each shard around the call.
    """

    leaf: Leaf
    result: Structure
    constant: frozenset[int]
    split: Plan | None
    out_specs: list[PartitionSpec]
    per_shard: PerShard

    def __call__(self, arrays: Sequence[Any]) -> Any:
        """The function's result with JAX arrays in place of tensors."""
        if self.constant:
            arrays = [
                jax.lax.stop_gradient(x) if i in self.constant else x for i, x in enumerate(arrays)
            ]
        if self.split is None:
            results = call_program(self.leaf, *arrays)
        else:
            results = shard_map(self.split, self._on_shards, self.out_specs, arrays)
        return self.result.in_jax(results)

    def _on_shards(self, *shards: Any) -> list[Any]:
        assert self.split is not None
        axes = self.split.axes
        results = call_program(self.leaf, *self.per_shard.enter(shards, axes))
        return self.per_shard.leave(results, axes)


def divided(
    function: TorchFunction, site: Site, types: Sequence[Any], out_specs: Any
) -> tuple[Plan | None, tuple[Spec, ...]]:
    """How a call on arrays of these types is split, None if it is not, and what torch is given."""
    specs = specs_of(types)
    split = plan(function.name, types, out_specs)
    if split is None:
        return None, specs
    triples = zip(site.labels, specs, split.in_specs, strict=True)
    return split, tuple(local_spec(function.name, *t, split.mesh) for t in triples)


def outputs_of(
    infer: Infer, call: Call, site: Site, split: Plan | None, shards: tuple[Spec, ...]
) -> Outputs:
    """What a call returns."""
    values = _values(call.arrays, shards)
    return infer(site, specs_of(call.types), None if split is None else shards, values)


def prepared(
    function: TorchFunction,
    site: Site,
    split: Plan | None,
    shards: tuple[Spec, ...],
    outputs: Outputs,
    *,
    constant: frozenset[int] = frozenset(),
    out_specs: Any = None,
    per_shard: PerShard | None = None,
) -> Prepared:
    """A call of which it is known how it is split and what it returns."""
    source = outputs.source if split is None else f"{outputs.source}, for one shard"
    result, per_shard = outputs.structure, per_shard or PerShard()
    leaf = Leaf(function, site, shards, outputs.specs, result, x64_enabled(), source)
    specs: list[PartitionSpec] = []
    if split is not None:
        returned = function.code.of_result(result)
        specs = per_shard.out_specs(out_spec_list(function.name, out_specs, returned))
        places = (function.code.output_label(p) or "the output" for p in leaf_paths(result))
        triples = list(zip(places, leaf.outs, specs, strict=True))
        if outputs.declared:
            outs = tuple(local_spec(function.name, *t, split.mesh) for t in triples)
            leaf = dataclasses.replace(leaf, out_specs=outs)
        for triple in triples:
            check_rank(function.name, *triple)
    return Prepared(leaf, result, constant, split, specs, per_shard)


def specs_of(types: Sequence[Any]) -> tuple[Spec, ...]:
    """The shapes and dtypes of arrays. Raises for a dtype that torch has not."""
    for dtype in {t.dtype for t in types}:
        dtype_j2t(dtype)
    return tuple([Spec(t.shape, t.dtype) for t in types])


def is_array(x: Any) -> bool:
    """Whether an argument is traced."""
    return isinstance(x, _ARRAYS)


def _values(arrays: Sequence[Any], specs: Sequence[Spec]) -> Values | None:
    """The values that torch is given, those of the first shard; None if they are not known now."""
    if any(isinstance(x, jax.core.Tracer) or not x.is_fully_addressable for x in arrays):
        return None

    def values() -> list[torch.Tensor] | None:
        shards = [x.addressable_shards[0].data for x in arrays]
        alike = all(x.shape == spec.shape for x, spec in zip(shards, specs, strict=True))
        return [j2t(x) for x in shards] if alike else None

    return values


def _as_jax(name: str, x: Any, label: Sequence[str]) -> Any:
    """An array as JAX has it; `label` is what messages call it, if it is the model's own."""
    if isinstance(x, jax.Array):
        return x
    if not is_array(x):
        raise _foreign(name, x, *label)
    dtype_j2t(x.dtype)
    return jnp.asarray(x)


def _foreign(name: str, x: Any, label: str) -> InputError:
    if x is None:
        return InputError(
            f"the {label} of `{name}` is None: this is part of a model. "
            "Put it together before calling it, `eqx.combine(params, rest)`."
        )
    return InputError(
        f"`{name}` takes JAX arrays, but got a {type(x).__name__} as {label}. Convert it by "
        "`eqx_torch.t2j(x)`, or on a mesh by `jax.numpy.asarray(x.numpy())`; in torch code, where "
        "there are tensors only, call the torch function or module itself."
    )


def _no_key(name: str, label: str, key: Any) -> str:
    return (
        f"`{name}` got a JAX key, {key.dtype}{list(key.shape)}, as "
        f"{label}, and torch has no dtype for keys. A function has no `key=`: draw "
        "in JAX and pass it the numbers, for instance `jax.random.normal(key, shape)`, or pass "
        "the words of the key, `jax.random.key_data(key)`. A model made by `from_torch` takes "
        "`key=`."
    )
