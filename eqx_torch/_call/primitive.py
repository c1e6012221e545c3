"""The one primitive: evaluate a torch program on JAX arrays.

`torch_call_p.bind(*arrays, program=p)` takes an array for each of `p.ins` and gives one for each
of `p.outs`. Its rules are in `autodiff`, `batching` and `lowering`, and are registered in this
package's `__init__`.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive

from .._compat import output_aval, outside_of_transformations, varying_axes
from .._errors import ShardingError
from .._program import Program


_CONFIG: Any = jax.config  # its attributes are made when JAX is imported

torch_call_p = Primitive("torch_call")
torch_call_p.multiple_results = True


def call(program: Program, *arrays: Any) -> list[Any]:
    """Evaluates a program. Every array inside a program's rules goes through here."""
    if outside_of_transformations():
        return impl(*arrays, program=program)
    return torch_call_p.bind(*align(arrays), program=program)


def align(arrays: Sequence[Any]) -> list[Any]:
    """Casts arrays to vary along the same manual mesh axes.

    The outputs vary wherever any input does. The transpose of the cast is a psum, so cotangents
    of inputs that are replicated over an axis are summed over it by JAX.
    """
    own = [varying_axes(jax.typeof(x)) for x in arrays]
    union = frozenset[str]().union(*own)
    if not union:
        return list(arrays)
    return [
        jax.lax.pcast(x, tuple(sorted(union - axes)), to="varying") if union - axes else x
        for x, axes in zip(arrays, own, strict=True)
    ]


def abstract_eval(*avals: Any, program: Program) -> list[Any]:
    """The types of the outputs."""
    for aval in avals:
        if any(entry is not None for entry in aval.sharding.spec):
            raise ShardingError(
                f"a derivative or batch of `{program.leaf.name}` met an array of type {aval}, "
                "sharded over explicit mesh axes that its primal inputs are not sharded over. "
                "Reshard it with `jax.sharding.reshard(x, P())`, or shard the inputs and pass "
                "`out_specs=`."
            )
    return [output_aval(spec.shape, spec.dtype, avals) for spec in program.outs]


def impl(*arrays: Any, program: Program) -> list[Any]:
    """Evaluates a program outside of `jax.jit`, by compiling it alone."""
    if _CONFIG.jax_disable_jit or _CONFIG.jax_debug_nans or _CONFIG.jax_debug_infs:
        return _impl_in_debugging(program, arrays)
    compiled = program.leaf.function.compiled()
    if compiled is None:
        return _jitted(program)(*arrays)
    function = compiled.by_program.get(program)
    if function is None:
        function = compiled.by_program.setdefault(program, _jitted(program))
    return function(*arrays)


def _impl_in_debugging(program: Program, arrays: Sequence[Any]) -> list[Any]:
    """Evaluates a program where JAX would evaluate the inside of `jax.jit` step by step.

    A torch call is one step: to take it apart would be to call it again.
    """
    with jax.disable_jit(False), jax.debug_nans(False), jax.debug_infs(False):
        results = _jitted(program)(*arrays)
    for kind, found, wanted in (
        ("nan", jnp.isnan, _CONFIG.jax_debug_nans),
        ("inf", jnp.isinf, _CONFIG.jax_debug_infs),
    ):
        inexact = [y for y in results if jnp.issubdtype(y.dtype, jnp.inexact)]
        if wanted and any(bool(found(y).any()) for y in inexact):
            raise FloatingPointError(f"invalid value ({kind}) encountered in torch's {program}")
    return results


def _jitted(program: Program) -> Any:
    def torch_call(*arrays: Any) -> list[Any]:
        return torch_call_p.bind(*arrays, program=program)

    return jax.jit(torch_call)
