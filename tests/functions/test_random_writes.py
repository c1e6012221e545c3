"""Random functions that write to their arguments in hidden ways, for some dtypes only.

A function is a list of writes. Each is for some dtypes, through memory that some dtypes share with
the argument and others do not; a backward writes to its gradient, or to what it saved, in the same
way. The reference is the same function in torch, on copies. One wrapped function is called with
many dtypes and shapes in a random order, so that what one call has shown must not be held against,
or for, the next.
"""

import dataclasses
import random
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from eqx_torch import torch2jax

from ..helpers import assert_trees_equal


pytestmark = [
    pytest.mark.filterwarnings("ignore:the output shapes of"),
    pytest.mark.filterwarnings("ignore:torch.func.vmap cannot batch"),
]

_DTYPES = ("float32", "bfloat16", "float16", "float64")
_SHAPES = ((4,), (2, 3), (), (1,))

ALIASES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "itself": lambda x: x,
    "float32": lambda x: x.float(),
    "bfloat16": lambda x: x.to(torch.bfloat16),
    "float64": lambda x: x.double(),
    "contiguous": lambda x: x.mT.contiguous() if x.ndim == 2 else x.contiguous(),
    "flat": lambda x: x.reshape(-1),
}


def _for_numpy(x: torch.Tensor) -> torch.Tensor:
    x = x.detach()
    return x.float() if x.dtype == torch.bfloat16 else x


MEMORIES: dict[str, Callable[[torch.Tensor], Any]] = {
    "NumPy": lambda y: _for_numpy(y).numpy(),
    "array protocol": lambda y: np.asarray(_for_numpy(y)),
    "data": lambda y: y.data,
    "detached": lambda y: y.detach(),
    "DLPack": lambda y: torch.from_dlpack(y.detach()),
    "NumPy of data": lambda y: _for_numpy(y.data).numpy(),
}


def _double(m: Any) -> None:
    m *= 2


def _fill(m: Any) -> None:
    m[...] = 3


def _first(m: Any) -> None:
    m.reshape(-1)[:1] = 5


CHANGES: dict[str, Callable[[Any], None]] = {"double": _double, "fill": _fill, "first": _first}
PLACES = ("before", "after", "gradient", "saved")


@dataclasses.dataclass(frozen=True)
class Write:
    """A write to one of the arguments, where that has one of the dtypes."""

    argument: int
    place: str
    alias: str
    memory: str
    change: str
    dtypes: tuple[str, ...]

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """What shares the argument's memory, or does not, after the write."""
        y = ALIASES[self.alias](x)
        if str(x.dtype).removeprefix("torch.") in self.dtypes:
            CHANGES[self.change](MEMORIES[self.memory](y))
        return y


class _Square(torch.autograd.Function):
    """The square, whose backward writes."""

    @staticmethod
    def forward(ctx, x, write):
        ctx.save_for_backward(x)
        ctx.write = write
        return x * x

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        written, other = (g, x) if ctx.write.place == "gradient" else (x, g)
        y = ctx.write.apply(written)
        return 2 * (y.sum().to(g.dtype) + written * other), None


@dataclasses.dataclass(frozen=True)
class Function:
    """A function of two arguments that does these writes, one after the other."""

    writes: tuple[Write, ...]

    def __call__(self, *xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(self._part(write, xs[write.argument]) for write in self.writes)

    def _part(self, write: Write, x: torch.Tensor) -> torch.Tensor:
        if write.place == "before":
            y = write.apply(x)
            return y.sum().to(x.dtype) + x * x
        if write.place == "after":
            z = x * x
            write.apply(x)
            return z + x
        return _Square.apply(x.view_as(x), write)


def _draw_function(draw: random.Random) -> Function:
    return Function(
        tuple(
            Write(
                draw.randrange(2),
                draw.choice(PLACES),
                draw.choice(list(ALIASES)),
                draw.choice(list(MEMORIES)),
                draw.choice(list(CHANGES)),
                tuple(draw.sample(_DTYPES, draw.randint(1, 4))),
            )
            for _ in range(draw.randint(1, 2))
        )
    )


def _pull(f: Callable[..., Any], args: Any, cotangents: Any) -> Any:
    outs, pullback = jax.vjp(f, *args)
    return outs, pullback(cotangents)


def _in_torch(f: Function, args: Any, cotangents: Any) -> Any:
    """The results and, with cotangents, the gradients by them, in torch on copies."""
    leaves = [_tensor(x).requires_grad_() for x in args]
    outs = f(*(x.clone() for x in leaves))
    if cotangents is None:
        return outs
    values = tuple(y.detach().clone() for y in outs)
    gradients = torch.autograd.grad(outs, leaves, list(map(_tensor, cotangents)), allow_unused=True)
    return values, tuple(
        torch.zeros_like(x) if g is None else g for g, x in zip(gradients, leaves, strict=True)
    )


def _tensor(x: Any) -> torch.Tensor:
    values = np.asarray(x)
    wide = torch.from_numpy(values.astype(np.float64))
    return wide.to(getattr(torch, str(values.dtype)))


def _stacked(trees: Any) -> Any:
    return jax.tree.map(lambda *xs: torch.stack(xs), *trees)


WAYS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "eager": lambda f: f,
    "jit": jax.jit,
    "batch": lambda f: jax.jit(jax.vmap(f)),
}


def check(seed: int, calls: int) -> None:
    """Calls a random function so often, and compares each call, and what it was given after it."""
    draw = random.Random(seed)
    x64 = draw.random() < 0.5
    function = _draw_function(draw)
    options = {"residuals": draw.choice(["tape", "recompute"])}
    dtypes = _DTYPES if x64 else _DTYPES[:3]
    with jax.enable_x64(x64):
        # The argument, not the function, is what a call of `torch2jax` sees of `self`.
        wrapped = torch2jax(lambda *xs: function(*xs), **options)
        derived = lambda *args: _pull(wrapped, args[:2], args[2:])  # noqa: E731
        both = {way: (wrap(wrapped), wrap(derived)) for way, wrap in WAYS.items()}
        for _ in range(calls):
            way, with_gradient = draw.choice(list(WAYS)), draw.random() < 0.6
            batch = (2,) if way == "batch" else ()
            kinds = [(draw.choice(dtypes), draw.choice(_SHAPES)) for _ in range(2)]
            args = [_draw_array(draw, (*batch, *shape), dtype) for dtype, shape in kinds]
            if with_gradient:
                parts = [kinds[write.argument] for write in function.writes]
                args += [_draw_array(draw, (*batch, *shape), dtype) for dtype, shape in parts]
            before = [np.array(x) for x in args]
            run = lambda xs: _in_torch(function, xs[:2], xs[2:] or None)  # noqa: E731
            members = [[x[i] for x in before] for i in range(2)] if batch else [before]
            what = f"{function}, {options}, x64={x64}, {way}, gradient={with_gradient}, {before}"
            try:
                expected = [run(member) for member in members]
            except RuntimeError as refused:
                # torch has seen a write to what its derivative needs.
                with pytest.raises(Exception, match=_first_words(refused)):
                    jax.block_until_ready(both[way][with_gradient](*args))
            else:
                actual = both[way][with_gradient](*args)
                _compare(actual, _stacked(expected) if batch else expected[0], what)
            _compare(args, before, f"what was given to {what}", exact=True)


def _compare(actual: Any, expected: Any, what: str, exact: bool = False) -> None:
    try:
        assert_trees_equal(actual, expected, exact=exact)
    except AssertionError as error:
        raise AssertionError(f"{what}: {error}") from error


def _first_words(error: Exception) -> str:
    return re.escape(str(error).partition(":")[0])


def _draw_array(draw: random.Random, shape: tuple[int, ...], dtype: str) -> Any:
    """Small integers, zeros at times, in JAX's memory or NumPy's."""
    low = draw.choice([0, 1])
    numbers = [draw.randint(low, 3) for _ in range(int(np.prod(shape)))]
    if draw.random() < 0.2:
        numbers = [draw.choice([0, 3])] * len(numbers)
    values = np.array(numbers, np.float64).reshape(shape).astype(jnp.dtype(dtype))
    return values if draw.random() < 0.3 else jnp.asarray(values)


@pytest.mark.parametrize("seed", range(12))
def test_random_writes(seed):
    check(seed, 6)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_many_random_writes(part):
    for seed in range(1000 + 30 * part, 1030 + 30 * part):
        check(seed, 12)
    jax.clear_caches()
