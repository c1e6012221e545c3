"""`filter_shard_map`: `jax.shard_map` for functions of Equinox modules."""

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax

from ._sharding import check_meshes, check_own_mesh


def filter_shard_map(
    f: Callable[..., Any] | None = None,
    *,
    out_specs: Any,
    in_specs: Any = None,
    mesh: Any = None,
    axis_names: frozenset[str] | set[str] = frozenset(),
    check_vma: bool = True,
) -> Callable[..., Any]:
    """`jax.shard_map` for functions whose arguments and results are not only arrays.

    Arrays are mapped over the mesh, everything else is static.

    **Arguments:**

    - `f`: the function, called with positional arguments. If left out, a decorator is returned.
    - `out_specs`: a `jax.sharding.PartitionSpec` or a prefix tree of them for the results.
    - `in_specs`: a spec for all arguments, or a tuple with a spec or a prefix tree for each. If
        None, the specs are those in the types of the arguments (explicit axes).
    - `mesh`, `axis_names`, `check_vma`: as in `jax.shard_map`.

    **Returns:**

    A function with the signature of `f`.

    **Raises:**

    `ShardingError` if the arguments lie on another mesh than `mesh` or that of `jax.set_mesh`.

    !!! example

        >>> import equinox as eqx, jax, jax.numpy as jnp
        >>> from jax.sharding import PartitionSpec as P
        >>> mesh = jax.make_mesh((1,), ("x",))
        >>> linear = eqx.nn.Linear(3, 2, key=jax.random.key(0))
        >>> x = jax.device_put(jnp.ones((4, 3)), jax.NamedSharding(mesh, P("x")))
        >>> call = filter_shard_map(
        ...     lambda model, x: jax.vmap(model)(x),
        ...     mesh=mesh,
        ...     in_specs=(P(), P("x")),
        ...     out_specs=P("x"),
        ... )
        >>> call(linear, x).shape
        (4, 2)
    """
    if f is None:
        return functools.partial(
            filter_shard_map,
            out_specs=out_specs,
            in_specs=in_specs,
            mesh=mesh,
            axis_names=axis_names,
            check_vma=check_vma,
        )

    def mapped(*args: Any) -> Any:
        arrays, static = eqx.partition(args, eqx.is_array)
        name = getattr(f, "__name__", type(f).__name__)
        check_own_mesh(name, mesh)
        check_meshes(name, [jax.typeof(x) for x in jax.tree.leaves(arrays)])
        rest: list[Any] = []

        def body(*shards: Any) -> Any:
            result, other = eqx.partition(f(*eqx.combine(shards, static)), eqx.is_array)
            rest.append(other)
            return result

        call = jax.shard_map(
            body,
            mesh=mesh,
            out_specs=out_specs,
            axis_names=set(axis_names),
            check_vma=check_vma,
            # To JAX, None means arguments without arrays.
            **({} if in_specs is None else {"in_specs": in_specs}),
        )
        return eqx.combine(call(*arrays), rest.pop())

    return functools.update_wrapper(mapped, f)
