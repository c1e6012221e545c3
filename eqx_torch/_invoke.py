"""One call of a torch function from JAX: from arguments as users write them to the primitive.

Arrays among the arguments are traced; everything else is static and part of the program. The
outputs are inferred for the global arrays, and where these are sharded over explicit axes the
call is split over them.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import torch

from ._ambient import Ambient
from ._call import call
from ._dtypes import canonical_dtype, dtype_j2t
from ._errors import DtypeError, InputError
from ._probe import Outputs
from ._program import argument_name, Leaf, Site, Spec, Static, TorchFunction
from ._sharding import local_spec, out_spec_list, Plan, plan, shard_map
from ._trees import flatten, leaf_paths


Infer: TypeAlias = Callable[[Site, tuple[Spec, ...]], Outputs]
Restored: TypeAlias = tuple[torch.dtype | None, ...]


class Arguments:
    """The arguments of one call, taken apart.

    Attributes:
        structure: of `(args, kwargs)`.
        statics: for each leaf, the Python value, or None where an array stands.
        arrays: the arrays.
    """

    def __init__(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        leaves, self.structure = flatten((tuple(args), kwargs))
        dynamic = [is_array(leaf) for leaf in leaves]
        self.statics: tuple[Static | None, ...] = tuple(
            None if d else Static(leaf) for d, leaf in zip(dynamic, leaves, strict=True)
        )
        self._leaves = leaves
        self._dynamic = dynamic
        self._name = name

    def arrays(self) -> list[Any]:
        """The arrays, as JAX has them."""
        self._refuse_foreign()
        pairs = zip(self._leaves, self._dynamic, strict=True)
        return [_as_jax(x) for x, dynamic in pairs if dynamic]

    def _refuse_foreign(self) -> None:
        for path, leaf in zip(leaf_paths(self.structure), self._leaves, strict=True):
            if isinstance(leaf, torch.Tensor | jax.ShapeDtypeStruct):
                kind = type(leaf).__name__
                raise InputError(
                    f"`{self._name}` takes JAX arrays, but got a {kind} as {argument_name(path)}. "
                    "Convert it by `eqx_torch.t2j(x)`, or call the torch function itself."
                )


def is_array(x: Any) -> bool:
    """Whether an argument is traced."""
    return isinstance(x, jax.Array | np.ndarray | np.generic)


def spec_of(x: Any) -> Spec:
    """The shape and dtype of an array."""
    return Spec(tuple(x.shape), canonical_dtype(x.dtype))


def invoke(
    function: TorchFunction,
    infer: Infer,
    arguments: Arguments,
    *,
    restored: Restored | None = None,
    frozen: Sequence[bool] | None = None,
    out_specs: Any = None,
) -> Any:
    """Calls a torch function on JAX arrays.

    Args:
        function: the function.
        infer: gives the outputs for a call site and global input specs.
        arguments: the arguments.
        restored: for each array, the torch dtype to give it before torch sees it.
        frozen: for each array, whether it is excluded from differentiation.
        out_specs: how the outputs are sharded, where inputs are.

    Returns:
        The function's result with JAX arrays in place of tensors.
    """
    arrays = arguments.arrays()
    in_specs = tuple(map(_checked_spec, arrays))
    site = Site(
        arguments.structure,
        arguments.statics,
        (None,) * len(arrays) if restored is None else restored,
        Ambient.capture(),
    )
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
        canonical_dtype("int64") == np.int64,
        outputs.source,
    )
    results = call(leaf, *arrays) if split is None else _sharded(leaf, split, out_specs, arrays)
    return outputs.structure.unflatten(results)


def _sharded(leaf: Leaf, split: Plan, out_specs: Any, arrays: Sequence[Any]) -> list[Any]:
    name = leaf.name
    specs = out_spec_list(name, out_specs, leaf.structure)
    ins = zip(leaf.site.paths, leaf.ins, split.in_specs, strict=True)
    outs = zip(leaf_paths(leaf.structure), leaf.outs, specs, strict=True)
    local = Leaf(
        leaf.function,
        leaf.site,
        tuple(local_spec(name, path, s, p, split.mesh) for path, s, p in ins),
        tuple(local_spec(name, f"output{path}", s, p, split.mesh) for path, s, p in outs),
        leaf.structure,
        leaf.x64,
        leaf.source,
    )
    return shard_map(split, lambda *shards: call(local, *shards), specs, arrays)


def _as_jax(x: Any) -> Any:
    if isinstance(x, jax.Array):
        return x
    dtype_j2t(x.dtype)
    return jnp.asarray(x)


def _checked_spec(x: Any) -> Spec:
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended):
        raise DtypeError(
            f"torch has no dtype for JAX's {x.dtype}. Pass `jax.random.key_data(key)` instead of "
            "a key."
        )
    dtype_j2t(x.dtype)
    return Spec(tuple(x.shape), np.dtype(x.dtype))
