"""Torch functions on sharded arrays: explicit shardings in, shards to torch, explicit out.

An array's type says how it is sharded over the *explicit* axes of its mesh. A torch function is
opaque, so a call on such arrays becomes a `jax.shard_map` that is manual over the axes in use:
each device calls the function on its shards. How the results lie is not in the inputs' types;
`out_specs` says it. Over *manual* axes (inside the user's own `jax.shard_map`) arrays already are
shards. Over *auto* axes the types say nothing, and XLA would gather what it pleases.

The mesh of a call is the one of its inputs, which all have to lie on the same.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from ._compat import axes_of_type, explicit_axes, unsettled_axes, vmapped_mesh_axes
from ._errors import ShardingError
from ._program import Spec
from ._trees import like_places, Structure


ON_THE_MESH = "`state = jax.device_put(state, jax.NamedSharding(mesh, P()))`"
_WITHOUT_OUT_SPECS = (
    "A model without `out_specs`, with the weights of `model` and for the same state, is "
    "`from_torch(model)`."
)


@dataclasses.dataclass(frozen=True)
class Plan:
    """Over which axes of which mesh a call is split, and how its inputs lie there."""

    mesh: Any
    axes: frozenset[str]
    in_specs: tuple[P, ...]


def plan(name: str, types: Sequence[Any], out_specs: Any) -> Plan | None:
    """How to split a call on arrays of these types, None where there is nothing to split.

    Raises:
        ShardingError: inputs are sharded over explicit axes and `out_specs` is missing, or
            `out_specs` names axes that are not explicit, or the inputs lie on several meshes.
    """
    mesh = mesh_of(types)
    if mesh.empty:
        return None
    check_meshes(name, types)
    for t in types:
        _check_settled(name, "an input", t)
    explicit = explicit_axes(mesh)
    in_specs = tuple(_kept(t.sharding.spec, explicit) for t in types)
    used = frozenset[str]().union(*map(_names, in_specs))
    if out_specs is None:
        if used:
            raise ShardingError(_missing_out_specs(name, used))
        return None
    for spec in jax.tree.leaves(like_places(out_specs), is_leaf=_is_spec):
        _check_out_spec(name, mesh, spec, used)
    return Plan(mesh, used, in_specs) if used else None


def check_specs(out_specs: Any) -> None:
    """Raises if what a user passes as `out_specs` is no tree of specs."""
    for leaf in jax.tree.leaves(like_places(out_specs), is_leaf=_is_spec):
        if isinstance(leaf, jax.sharding.NamedSharding):
            raise ShardingError(
                f"`out_specs` holds {leaf}. Pass its spec, `out_specs=sharding.spec`; the mesh is "
                "that of the inputs."
            )
        if not _is_spec(leaf):
            name = leaf if isinstance(leaf, str) else "x"
            raise ShardingError(
                f"`out_specs` holds {leaf!r} of type {type(leaf).__name__}. Pass a "
                f'`jax.sharding.PartitionSpec`, for instance `out_specs=P("{name}")`, or a tree of '
                "them."
            )
        if leaf.reduced | leaf.unreduced:
            raise ShardingError(
                f"`out_specs` holds {leaf}: torch gives values that are settled, neither reduced "
                "nor unreduced over an axis. Leave that out, and reshard the result, "
                "`jax.sharding.reshard(y, spec)`."
            )


def shard_map(plan: Plan, body: Callable[..., Any], out_specs: Any, arrays: Sequence[Any]) -> Any:
    """Calls `body` on the shards of `arrays`.

    Where all axes are explicit, those that are not in use become manual too: where only some axes
    are manual, XLA's compiler for CPUs aborts the process at sums of bfloat16 arrays over them.
    """
    all_explicit = explicit_axes(plan.mesh) == set(plan.mesh.axis_names)
    mapped = jax.shard_map(
        body,
        mesh=plan.mesh,
        in_specs=plan.in_specs,
        out_specs=out_specs,
        axis_names=set() if all_explicit else set(plan.axes),  # to JAX the empty set means all
    )
    return mapped(*arrays)


def check_whole(name: str, what: str, aval: Any, remedy: str) -> None:
    """Raises unless an array of a model, of this type, lies whole on every device of its mesh.

    Args:
        name: of the function.
        what: the array is.
        aval: its type.
        remedy: gathers it.
    """
    _check_settled(name, f"its {what}", aval)
    axes = _names(_kept(aval.sharding.spec, explicit_axes(aval.sharding.mesh)))
    if axes:
        raise ShardingError(
            f"`{name}` was called with its {what} sharded over the mesh axes {sorted(axes)}, by "
            f"{aval.sharding.spec}, so that each device would compute with its own part of it. "
            f"Gather it before the call, {remedy}."
        )


def check_on_mesh(name: str, what: str, named: Mapping[str, Any], types: Sequence[Any]) -> None:
    """Raises unless arrays that a call gives back lie on the mesh of its other inputs."""
    mesh = mesh_of(types)
    for key, array in named.items() if explicit_axes(mesh) else ():
        own = jax.typeof(array).sharding.mesh
        lies = None
        if own.empty:
            lies = f"off that mesh, on {_devices(array)}"
        elif not alike(own, mesh):
            lies = f"on the mesh {shown(own)}"
        if lies:
            raise ShardingError(
                f"`{name}` was called on the mesh {shown(mesh)}, but its {what} {key} lies "
                f"{lies}. Replicate the {what}s over the mesh: {ON_THE_MESH}."
            )


def _check_settled(name: str, what: str, aval: Any) -> None:
    """Raises for the types that only JAX's own operations give a meaning to."""
    axes = unsettled_axes(aval)
    if axes:
        manual = axes & axes_of_type(aval.sharding.mesh, AxisType.Manual)
        remedy = (
            "Inside `jax.shard_map`, write `jax.lax.psum(x, axes)` of what is unreduced and "
            '`jax.lax.pcast(x, axes, to="varying")` of what is reduced'
            if manual
            else "Write `jax.sharding.reshard(x, P())`, of which JAX knows the derivative"
        )
        raise ShardingError(
            f"`{name}` was called with {what} of type {aval.str_short()}, which is reduced or "
            f"unreduced over the mesh axes {sorted(axes)}: sums that JAX has put off, of its value "
            f"or of its gradient. torch can only be given what is settled. {remedy}."
        )


def out_spec_list(name: str, out_specs: Any, structure: Structure) -> list[P]:
    """`out_specs`, a spec or a prefix tree of the outputs, as one spec for each output."""
    places = structure.places()
    try:
        whole = jax.tree.broadcast(like_places(out_specs), places, is_leaf=_is_spec)
        specs = jax.tree.leaves(whole, is_leaf=_is_spec)
    except ValueError as error:
        raise ShardingError(
            f"`out_specs={out_specs}` of `{name}` is not a prefix of its outputs {structure}. "
            "Pass one PartitionSpec for all outputs, or a tree of them like the outputs."
        ) from error
    by_place = dict(zip(jax.tree.leaves(places), specs, strict=True))
    return [by_place[i] for i in range(structure.num_leaves)]


def local_spec(name: str, what: str, spec: Spec, partition: P, mesh: Any) -> Spec:
    """The part of a global array that one device has."""
    check_rank(name, what, spec, partition)
    counts = [math.prod(mesh.shape[a] for a in _entry(e)) for e in partition]
    counts += [1] * (len(spec.shape) - len(counts))
    dims = list(zip(spec.shape, counts, strict=True))
    if any(size % count for size, count in dims):
        raise ShardingError(
            f"{what} of `{name}`, of global shape {list(spec.shape)}, cannot be divided by "
            f"{partition} over the mesh axes {dict(mesh.shape)}. Each sharded dimension must be "
            "a multiple of the number of devices along its axes: pad the batch, or choose other "
            "specs."
        )
    return Spec(tuple(size // count for size, count in dims), spec.dtype)


def check_rank(name: str, what: str, spec: Spec, partition: P) -> None:
    """Raises if an array has fewer dimensions than its spec has entries."""
    if len(partition) > len(spec.shape):
        raise ShardingError(
            f"{what} of `{name}` has {len(spec.shape)} dimensions, but its spec {partition} has "
            f"{len(partition)} entries. Return one value for each shard, `y[None]`, or if it is a "
            'mean over the batch one for each example (`reduction="none"`), and take the mean in '
            "JAX."
        )


def batch_axes(arrays: Sequence[Any], dims: Sequence[int | None]) -> tuple[Any, P] | None:
    """The mesh, and the axes over which the batch of a `jax.vmap` is sharded."""
    for x, d in zip(arrays, dims, strict=True):
        sharding = jax.typeof(x).sharding
        if d is not None and not sharding.mesh.empty and sharding.spec[d] is not None:
            return sharding.mesh, P(sharding.spec[d])
    return None


def is_manual(mesh: Any) -> bool:
    """Whether this is in a `jax.shard_map` over some of the axes."""
    return bool(axes_of_type(mesh, AxisType.Manual))


def over_the_batch(
    axes: tuple[Any, P], arrays: Sequence[Any], dims: Sequence[int | None]
) -> list[Any]:
    """The arrays, each with a batch axis: first in those that had none."""
    mesh, batch = axes
    size = next(x.shape[d] for x, d in zip(arrays, dims, strict=True) if d is not None)
    return [
        jnp.broadcast_to(x, (size, *x.shape), out_sharding=NamedSharding(mesh, batch))
        if d is None
        else x
        for x, d in zip(arrays, dims, strict=True)
    ]


def over_batch_shards(
    body: Callable[..., list[Any]],
    axes: tuple[Any, P],
    arrays: Sequence[Any],
    dims: Sequence[int | None],
) -> list[Any]:
    """Calls `body` on the shards of a batch; its outputs have the batch axis first."""
    mesh, batch = axes
    in_specs = tuple(P() if d is None else P(*(None,) * d, *batch) for d in dims)
    split = Plan(mesh, _names(batch), in_specs)
    return shard_map(split, body, batch, arrays)


def _devices(array: Any) -> str:
    """Where an array lies, which a tracer does not know."""
    if isinstance(array, jax.core.Tracer):
        return "one device"
    return ", ".join(map(str, sorted(array.devices(), key=lambda d: d.id)))


def _check_out_spec(name: str, mesh: Any, spec: P, used: frozenset[str]) -> None:
    out = _names(spec)
    unknown = out - frozenset(mesh.axis_names)
    if unknown:
        raise ShardingError(
            f"`out_specs` of `{name}` names the mesh axes {sorted(unknown)}, but the mesh has "
            f"{list(mesh.axis_names)}."
        )
    manual = out & axes_of_type(mesh, AxisType.Manual)
    if manual:
        raise ShardingError(
            f"`out_specs` of `{name}` names {sorted(manual)}, which are manual here: inside "
            "`jax.shard_map` the function sees local shards, and the shard_map's own `out_specs` "
            "say how the results lie. Leave `out_specs` out."
        )
    auto = out & axes_of_type(mesh, AxisType.Auto)
    if auto:
        raise ShardingError(
            f"`out_specs` of `{name}` names the Auto mesh axes {sorted(auto)}, over which JAX "
            "does not know the shardings of the inputs when it traces, and XLA would gather "
            "them. Make the axes explicit, `jax.make_mesh(shape, names, "
            "axis_types=(AxisType.Explicit,) * len(names))`, or call the function inside "
            "`jax.shard_map`."
        )
    _check_used(name, spec, out, used)


def _check_used(name: str, spec: P, out: frozenset[str], used: frozenset[str]) -> None:
    """Raises unless an output is sharded over the axes `used` that the inputs are."""
    if used - out:
        raise ShardingError(
            f"inputs of `{name}` are sharded over {sorted(used)}, but `out_specs` has {spec}, as "
            f"if the results of all shards along {sorted(used - out)} were equal. Name these axes "
            "in it. For a sum or mean over all shards, return one row for each shard, "
            f'`x.sum(0, keepdim=True)`, with `out_specs=P("{min(used - out)}")`, and add the rows '
            "up in JAX, `.sum(0)`."
        )
    vmapped = (out - used) & vmapped_mesh_axes()
    if vmapped:
        raise ShardingError(
            f"`out_specs` of `{name}` has {spec}, but over {sorted(vmapped)} `jax.vmap` maps it: "
            "the function sees one example, and each device already calls it for its own "
            f"examples only. Leave the axis out. {_WITHOUT_OUT_SPECS}"
        )
    if out - used:
        raise ShardingError(
            f"`out_specs` of `{name}` has {spec}, but no input is sharded over "
            f"{sorted(out - used)}, so that every device along it would compute the same. Shard an "
            f'input, for instance `jax.sharding.reshard(x, P("{min(out - used)}"))`, or leave the '
            f"axis out. {_WITHOUT_OUT_SPECS}"
        )


def _missing_out_specs(name: str, used: frozenset[str]) -> str:
    return (
        f"inputs of `{name}` are sharded over the explicit mesh axes {sorted(used)}. A torch "
        "function is opaque to JAX, so say how its results lie: either (1) pass `out_specs=`, "
        f'for instance `out_specs=P("{min(used)}")`, to run it on each shard, or (2) replicate '
        "the inputs, `jax.sharding.reshard(x, P())`, to run it on the full arrays."
    )


def _kept(spec: Any, axes: frozenset[str]) -> P:
    """The spec over these axes only."""
    kept = [tuple(a for a in _entry(e) if a in axes) for e in spec]
    return P(*(names[0] if len(names) == 1 else names or None for names in kept))


def _names(spec: P) -> frozenset[str]:
    return frozenset(name for entry in spec for name in _entry(entry))


def _entry(entry: Any) -> tuple[str, ...]:
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)


def _is_spec(x: Any) -> bool:
    return isinstance(x, P)


def mesh_of(types: Sequence[Any]) -> Any:
    """The mesh that a call on inputs of these types is on, which may be the empty one."""
    sharded = [t.sharding.mesh for t in types if not t.sharding.mesh.empty]
    sharded.sort(key=lambda mesh: len(explicit_axes(mesh)), reverse=True)
    return sharded[0] if sharded else jax.sharding.get_abstract_mesh()


def check_meshes(name: str, types: Sequence[Any]) -> None:
    """Raises if inputs lie on two meshes, or on another than `jax.set_mesh` has chosen.

    JAX moves arrays from one mesh with Auto axes only to another.
    """
    places = [(f"an input of type {t.str_short()} lies on", t.sharding.mesh) for t in types]
    places.append(("`jax.set_mesh` has chosen", jax.sharding.get_abstract_mesh()))
    places = [(what, mesh) for what, mesh in places if not mesh.empty]
    for place in places[1:]:
        meshes = places[0][1], place[1]
        if not alike(*meshes) and not all(_is_auto(mesh) for mesh in meshes):
            raise ShardingError(_two_meshes(name, *places[0], *place))


def check_own_mesh(name: str, mesh: Any) -> None:
    """Raises if a function's `mesh=` is another than `jax.set_mesh` has chosen."""
    chosen = jax.sharding.get_abstract_mesh()
    if mesh is not None and not chosen.empty and not alike(mesh, chosen):
        places = ("its `mesh=` is", mesh, "`jax.set_mesh` has chosen", chosen)
        raise ShardingError(_two_meshes(name, *places))


def alike(mesh: Any, other: Any) -> bool:
    """Whether two meshes are one; inside of `jax.shard_map` its axes are manual."""
    if mesh.shape_tuple != other.shape_tuple:
        return False
    kinds = zip(mesh.axis_types, other.axis_types, strict=True)
    return all(a == b or AxisType.Manual in (a, b) for a, b in kinds)


def shown(mesh: Any) -> str:
    """A mesh as messages have it."""
    axes = zip(mesh.shape_tuple, mesh.axis_types, strict=True)
    return "(" + ", ".join(f"{axis!r}: {size} {kind.name}" for (axis, size), kind in axes) + ")"


def _is_auto(mesh: Any) -> bool:
    return all(kind == AxisType.Auto for kind in mesh.axis_types)


def _two_meshes(name: str, what: str, mesh: Any, other_what: str, other: Any) -> str:
    return (
        f"`{name}` was called with two meshes: {what} {shown(mesh)}, but {other_what} "
        f"{shown(other)}. Keep to one: call it inside `with jax.set_mesh(mesh):` with the mesh of "
        "its inputs, or move the inputs, `jax.device_put(x, jax.NamedSharding(mesh, P(...)))`."
    )
