"""What the random numbers of a call are drawn from: a generator that is its own.

torch draws from one generator a process, which every thread may seed, and put back to an earlier
state, while others draw. Here a thread draws from a generator of its own while it runs a call that
has a key: operators that draw on a CPU are interposed and given it, and code that asks torch for
the state of its random numbers, or seeds them, reaches it (`torch.utils.checkpoint` does the former
to draw the same numbers again, in the backward). A generator is seeded as torch's own would be, so
the numbers are torch's for that seed.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .._compat import interpose, route_default_generator, without_values


# The operators by which all others draw on CPUs.
_DRAWING = (
    "_sample_dirichlet",
    "_standard_gamma",
    "bernoulli",
    "bernoulli_",
    "binomial",
    "cauchy_",
    "exponential_",
    "geometric_",
    "log_normal_",
    "multinomial",
    "normal",
    "normal_",
    "poisson",
    "random_",
    "randperm",
    "rrelu_with_noise",
    "rrelu_with_noise_",
    "uniform_",
)


class _Own(threading.local):
    """Of the calling thread.

    Attributes:
        generator: what it draws from, None for torch's own.
    """

    generator: torch.Generator | None = None


_OWN = _Own()


def own_generator() -> torch.Generator | None:
    """What the calling thread draws from, None for torch's own."""
    return _OWN.generator


def draw_from(generator: torch.Generator | None) -> None:
    """From here on the calling thread draws from this, in interposed operators."""
    _OWN.generator = generator


@contextlib.contextmanager
def drawing_from(generator: torch.Generator) -> Iterator[None]:
    """The calling thread draws from this, in interposed operators."""
    before, _OWN.generator = _OWN.generator, generator
    try:
        yield
    finally:
        _OWN.generator = before


def _drawing(operator: torch._ops.OpOverload) -> Callable[..., Any]:
    """The operator with the thread's generator, unless it is given one."""
    names = [argument.name for argument in operator._schema.arguments]
    position = names.index("generator")

    def call(*args: Any, **kwargs: Any) -> Any:
        own = _OWN.generator
        if own is None or len(args) > position or kwargs.get("generator") is not None:
            return operator(*args, **kwargs)
        tensor = next(x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor))
        if not tensor.is_cpu or without_values():
            return operator(*args, **kwargs)
        return operator(*args, **{**kwargs, "generator": own})

    return call


def _interpose_all() -> None:
    for name in _DRAWING:
        packet = getattr(torch.ops.aten, name)
        for overload in packet.overloads():
            operator = getattr(packet, overload)
            types = {str(argument.type) for argument in operator._schema.arguments}
            if {"Tensor", "Optional[Generator]"} <= types:
                interpose(operator, _drawing(operator))


_interpose_all()
route_default_generator(own_generator)
