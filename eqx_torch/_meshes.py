"""The mesh that a call is on: the one of its inputs, which all have to lie on the same."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AxisType

from ._compat import explicit_axes
from ._errors import ShardingError


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
