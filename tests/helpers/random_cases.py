"""A random program under a random chain of transformations, in torch and in JAX."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from eqx_torch import torch2jax

from .random_chain_draws import draw_chain, draw_explicit
from .random_chains import apply_all, Arg, Grad, Jvp, Signature, Transformation, Vjp
from .random_program_draws import programs, random_array
from .random_program_rules import is_smooth, leaves_autograd
from .random_programs import Program, Type
from .random_sharding import Explicit, varying_alike
from .random_values import Draw


# What rounds in no more than this is right: some thirty times the dtype's epsilon.
_TOLERANCES = {
    "bfloat16": 2e-1,
    "float16": 3e-2,
    "float32": 1e-4,
    "complex64": 1e-4,
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A program, how it is wrapped, the transformations from the inside, a seed of arguments."""

    x64: bool
    program: Program
    options: dict[str, Any]
    explicit: Explicit | None
    chain: tuple[Transformation, ...]
    seed: int

    def in_torch(self) -> tuple[Any, ...]:
        """What the chain makes of the program in torch."""
        program = self.program.in_torch
        with self._mesh() as mesh:
            wrap = torch2jax if self.explicit is None else self.explicit.in_torch
            args = [
                jnp.asarray(x)
                if mesh is None
                else jax.device_put(x, NamedSharding(mesh, P(*t.spec)))
                for x, t in zip(self._arrays(), self.signature().ins, strict=True)
            ]
            results = apply_all(self.chain, wrap(program, **self.options))(*args)
            return tuple(_without_shards(y) if y.size == 0 else y for y in results)

    @property
    def may_be_refused(self) -> bool:
        """Whether it takes a derivative that autograd does not see."""
        derivatives = [type(t) for t in self.chain if isinstance(t, Grad | Jvp | Vjp)]
        beyond_first = Jvp in derivatives or len(derivatives) > 1
        return beyond_first and leaves_autograd(self.program)

    def in_jax(self) -> tuple[Any, ...]:
        """What the chain makes of the program in JAX."""
        program = self.program.in_jax
        f = varying_alike(program) if self.explicit is None else self.explicit.in_jax(program)
        return jax.jit(apply_all(self.chain, f))(*self._arrays())

    def signature(self) -> Signature:
        """Of the transformed function."""
        signature = _signature(self.program) if self.explicit is None else self.explicit.signature
        for transformation in self.chain:
            signature = transformation.signature(signature)
        return signature

    @property
    def tolerance(self) -> float:
        """By the coarsest dtype that the program computes in."""
        return max(_TOLERANCES.get(t.dtype, 1e-11) for t in self.program.types())

    def _arrays(self) -> list[Any]:
        ins = enumerate(self.signature().ins)
        return [random_array(Type(x.shape, x.dtype), self.seed, str(i)) for i, x in ins]

    @contextlib.contextmanager
    def _mesh(self) -> Iterator[Any]:
        if self.explicit is None:
            yield None
            return
        mesh = self.explicit.split.mesh(AxisType.Explicit)
        with jax.set_mesh(mesh):
            yield mesh


@st.composite
def cases(draw: Draw) -> Case:
    """Random cases; they run while x64 is as the case says."""
    x64 = draw(st.booleans())
    with jax.enable_x64(x64):
        program = draw(programs(x64))
        options = {
            "residuals": draw(st.sampled_from(["tape", "recompute"])),
            "vmap_method": draw(st.sampled_from(["torch", "torch", "sequential"])),
        }
        own = _signature(program)
        explicit = draw_explicit(draw, own) if draw(st.integers(0, 4)) == 4 else None
        signature = own if explicit is None else explicit.signature
        chain = draw_chain(draw, signature, explicit is not None, is_smooth(program))
        return Case(x64, program, options, explicit, chain, draw(st.integers(0, 2**16)))


def _signature(program: Program) -> Signature:
    types = program.types()
    ins = tuple(Arg(*t) for t in program.inputs)
    return Signature(
        ins, tuple(Arg(types[i].shape, _in_jax(types[i].dtype)) for i in program.outputs)
    )


def _in_jax(dtype: str) -> str:
    """The name of the dtype that a result of this one has in JAX now."""
    return "int32" if dtype == "int64" and not jax.config.jax_enable_x64 else dtype


def _without_shards(y: Any) -> jax.Array:
    """An array without elements; JAX gives the shards of such results wrong shapes."""
    return jnp.zeros(y.shape, y.dtype)
