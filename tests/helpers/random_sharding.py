"""The two ways of running a random program on several devices.

In both, some dimensions of some arguments are sharded over the axes of a mesh, each device applies
the function to its shards, and since a random program says nothing of how its results fit together,
they are stacked along a new first axis, summed, or, as `out_specs` of a torch call allows, joined
along axes of their own.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, PartitionSpec as P

from eqx_torch import torch2jax
from eqx_torch._compat import varying_axes

from .random_chains import Arg, Function, Signature


NAMES = ("x", "y")


@dataclasses.dataclass(frozen=True)
class Split:
    """How the arguments of a function lie on a mesh.

    Attributes:
        sizes: of the mesh.
        specs: for each argument and each of its dimensions, the axes that it is sharded over.
    """

    sizes: tuple[int, ...]
    specs: tuple[tuple[tuple[str, ...], ...], ...]

    @property
    def names(self) -> tuple[str, ...]:
        return NAMES[: len(self.sizes)]

    @property
    def used(self) -> tuple[str, ...]:
        """The axes over which some argument is sharded."""
        names = {name for spec in self.specs for entry in spec for name in entry}
        return tuple(name for name in self.names if name in names)

    @property
    def in_specs(self) -> tuple[P, ...]:
        return tuple(P(*(entry or None for entry in spec)) for spec in self.specs)

    def size(self, name: str) -> int:
        return self.sizes[NAMES.index(name)]

    def mesh(self, axis_type: AxisType) -> Mesh:
        return jax.make_mesh(self.sizes, self.names, axis_types=(axis_type,) * len(self.sizes))

    def global_shape(self, shape: tuple[int, ...], i: int) -> tuple[int, ...]:
        """The shape of an argument whose shards have this one."""
        return self.whole(shape, self.specs[i])

    def whole(self, shape: tuple[int, ...], spec: Sequence[Sequence[str]]) -> tuple[int, ...]:
        """The shape of an array with shards of this shape, sharded over these axes."""
        pairs = zip(shape, spec, strict=True)
        return tuple(n * math.prod(map(self.size, entry)) for n, entry in pairs)


@dataclasses.dataclass(frozen=True)
class ShardMap:
    """`jax.shard_map` over Auto axes.

    Attributes:
        summed: for each result, whether it is summed over the devices.
    """

    split: Split
    summed: tuple[bool, ...]

    def apply(self, f: Function) -> Function:
        names = self.split.names

        def local(*shards: Any) -> tuple[Any, ...]:
            pairs = zip(f(*shards), self.summed, strict=True)
            return tuple(_sum(y, names) if summed else y[None] for y, summed in pairs)

        return jax.shard_map(
            local,
            mesh=self.split.mesh(AxisType.Auto),
            in_specs=self.split.in_specs,
            out_specs=tuple(P() if summed else P(names) for summed in self.summed),
        )

    def signature(self, of: Signature) -> Signature:
        ins = enumerate(of.ins)
        outs = zip(of.outs, self.summed, strict=True)
        count = math.prod(self.split.sizes)
        return Signature(
            tuple(x._replace(shape=self.split.global_shape(x.shape, i)) for i, x in ins),
            tuple(y if summed else y.with_axis(0, count) for y, summed in outs),
        )


@dataclasses.dataclass(frozen=True)
class Explicit:
    """A torch function of arrays sharded over explicit axes.

    Attributes:
        of: what the function takes and returns on each device.
        joined: for each result and each of its dimensions the axes along which the shards' results
            are joined there; None for results that are stacked.
        declared: whether the shapes of the results are declared, not found out.
    """

    split: Split
    of: Signature
    joined: tuple[tuple[tuple[str, ...], ...] | None, ...]
    declared: bool

    def in_torch(self, f: Callable[..., Any], **options: Any) -> Function:
        """The function, wrapped."""
        if self.declared:
            outs = self.signature.outs
            options["output_shapes"] = tuple(jax.ShapeDtypeStruct(y.shape, y.dtype) for y in outs)
        return torch2jax(
            lambda *shards: self._with_new_axes(f(*shards)),
            out_specs=tuple(P(*(entry or None for entry in spec)) for spec in self._out_specs),
            **options,
        )

    def in_jax(self, f: Function) -> Function:
        """What the wrapped function is to compute, on one device: one shard after another."""

        def g(*args: Any) -> tuple[Any, ...]:
            places = itertools.product(*(range(self.split.size(n)) for n in self.split.used))
            outs = [self._with_new_axes(f(*self._shards(args, place))) for place in places]
            return tuple(map(self._join, zip(*outs, strict=True), self._out_specs))

        return g

    def _with_new_axes(self, outs: Sequence[Any]) -> tuple[Any, ...]:
        """The results of a shard, with a new first axis for those that are stacked."""
        pairs = zip(outs, self.joined, strict=True)
        return tuple(y[None] if joined is None else y for y, joined in pairs)

    @property
    def _out_specs(self) -> tuple[tuple[tuple[str, ...], ...], ...]:
        """For each result and each of its dimensions, the axes that it is sharded over."""
        pairs = zip(self.of.outs, self.joined, strict=True)
        stacked = lambda y: (self.split.used, *((),) * len(y.shape))  # noqa: E731
        return tuple(stacked(y) if joined is None else joined for y, joined in pairs)

    def _join(self, shards: Sequence[Any], spec: Sequence[Sequence[str]]) -> Any:
        """The whole of which these are the shards, in the order of the used axes."""
        used = self.split.used
        order: list[int] = []
        for dim, entry in enumerate(spec):
            order += [*map(used.index, entry), len(used) + dim]
        y = jnp.stack(shards).reshape(*map(self.split.size, used), *shards[0].shape)
        return y.transpose(order).reshape(self.split.whole(shards[0].shape, spec))

    def _shards(self, args: Sequence[Any], place: tuple[int, ...]) -> Iterator[Any]:
        """The shards that the device at this place of the mesh has."""
        number = dict(zip(self.split.used, place, strict=True))
        for x, local, spec in zip(args, self.of.ins, self.split.specs, strict=True):
            for dim, entry in enumerate(spec):
                index = 0
                for name in entry:
                    index = index * self.split.size(name) + number[name]
                size = local.shape[dim]
                x = jax.lax.slice_in_dim(x, index * size, (index + 1) * size, axis=dim)
            yield x

    @property
    def signature(self) -> Signature:
        """Of the wrapped function."""
        ins = tuple(
            Arg(self.split.global_shape(x.shape, i), x.dtype, tuple(self.split.in_specs[i]))
            for i, x in enumerate(self.of.ins)
        )
        outs = tuple(
            Arg(
                self.split.whole((1, *y.shape) if joined is None else y.shape, spec),
                y.dtype,
                tuple(entry or None for entry in spec),
            )
            for y, joined, spec in zip(self.of.outs, self.joined, self._out_specs, strict=True)
        )
        return Signature(ins, outs)


def varying_alike(f: Function) -> Function:
    """The function with results that all vary over every axis that any argument varies over.

    So do a torch call's, since JAX does not see which of them depend on what.
    """

    def g(*args: Any) -> tuple[Any, ...]:
        axes = sorted(frozenset[str]().union(*(varying_axes(jax.typeof(x)) for x in args)))
        return tuple(_varying(y, axes) for y in f(*(_varying(x, axes) for x in args)))

    return g


def _varying(x: Any, names: Iterable[str]) -> Any:
    missing = tuple(name for name in names if name not in varying_axes(jax.typeof(x)))
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def _sum(y: Any, names: tuple[str, ...]) -> Any:
    """The sum over axes, along some of which `y` may be the same everywhere."""
    return jax.lax.psum(_varying(y, names), names)
