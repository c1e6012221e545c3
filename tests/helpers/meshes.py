"""Meshes of explicit axes, arrays on them, and the collectives of a program."""

import re

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P


COLLECTIVES = re.compile(
    r" (all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)(?:-start)?\("
)


def explicit_mesh(*sizes: int) -> jax.sharding.Mesh:
    names = "xyz"[: len(sizes)]
    return jax.make_mesh(sizes, tuple(names), axis_types=(AxisType.Explicit,) * len(sizes))


def collectives(f, *args) -> set[str]:
    """The collectives in the compiled program."""
    return set(COLLECTIVES.findall(jax.jit(f).lower(*args).compile().as_text()))


def put(x, mesh, *spec):
    return jax.device_put(x, NamedSharding(mesh, P(*spec)))
