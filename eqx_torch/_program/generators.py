"""What the random numbers of a call are drawn from: a generator that is its own.

torch draws from one generator a process, which every thread may seed, and put back to an earlier
state, while others draw. Here a thread draws from a generator of its own while it runs a call that
has a key: operators that draw on a CPU are interposed and given it, and code that asks torch for
the state of its random numbers, or seeds them, reaches it (`torch.utils.checkpoint` does the former
to draw the same numbers again, in the backward). A generator is seeded as torch's own would be, so
the numbers are torch's for that seed.
"""

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from .._compat import (
    has_kernel,
    interpose,
    Operator,
    outside_of_func,
    route_default_generator,
    without_values,
)


# The operators by which all others draw on CPUs, and those that are made of them but have a kernel
# of their own. The latter are here for modes of torch's dispatcher, behind which nothing is
# interposed any more; compiled functions run in one for the first time.
_DRAWING = (
    "_sample_dirichlet",
    "_standard_gamma",
    "bernoulli",
    "bernoulli_",
    "binomial",
    "cauchy",
    "cauchy_",
    "exponential",
    "exponential_",
    "geometric",
    "geometric_",
    "log_normal",
    "log_normal_",
    "multinomial",
    "normal",
    "normal_",
    "normal_functional",
    "poisson",
    "rand",
    "rand_like",
    "randint",
    "randint_like",
    "randn",
    "randn_like",
    "random",
    "random_",
    "randperm",
    "rrelu_with_noise",
    "rrelu_with_noise_",
    "rrelu_with_noise_functional",
    "uniform",
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
    _route_once()
    _OWN.generator = generator


@contextlib.contextmanager
def drawing_from(generator: torch.Generator) -> Iterator[None]:
    """The calling thread draws from this, in interposed operators."""
    _route_once()
    before, _OWN.generator = _OWN.generator, generator
    try:
        yield
    finally:
        _OWN.generator = before


@functools.cache
def _route_once() -> None:
    """To import the package changes nothing of torch's."""
    route_default_generator(own_generator)


def _drawing(operator: Operator, taking: Operator) -> Callable[..., Any]:
    """An operator with the thread's generator, unless it is given one.

    `taking` is the same that takes a generator, for which `torch.func.vmap` may have no rule.
    """
    position = list(_parameters(taking)).index("generator") if operator is taking else sys.maxsize
    has_rule = operator is taking or has_kernel(taking, "FuncTorchVmapMode")

    def call(*args: Any, **kwargs: Any) -> Any:
        own = _OWN.generator
        if own is None or len(args) > position or kwargs.get("generator") is not None:
            return operator(*args, **kwargs)
        if not _is_on_cpu(args, kwargs) or without_values() or not (has_rule or outside_of_func()):
            return operator(*args, **kwargs)
        return taking(*args, **{**kwargs, "generator": own})

    return call


def _native_dropout(
    x: torch.Tensor, p: float, train: bool | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`torch.native_dropout`, which takes no generator, as torch has it for CPUs."""
    own = _OWN.generator
    if own is None or train is False or not x.is_cpu or not x.numel() or without_values():
        return torch.ops.aten.native_dropout.default(x, p, train)
    kept = torch.empty_like(x, dtype=torch.bool).bernoulli_(1.0 - p, generator=own)
    return x.mul(kept).mul_(0.0 if p == 1 else 1.0 / (1.0 - p)), kept


def _is_on_cpu(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    for x in (*args, *kwargs.values()):
        if isinstance(x, torch.Tensor):
            return x.is_cpu
    device = kwargs.get("device")
    return device is None or device.type == "cpu"


def _parameters(operator: Operator) -> dict[str, str]:
    """The type of each parameter, by name."""
    return {argument.name: str(argument.type) for argument in operator._schema.arguments}


def _interpose_all() -> None:
    for name in _DRAWING:
        packet = getattr(torch.ops.aten, name)
        overloads = [getattr(packet, overload) for overload in packet.overloads()]
        for operator in overloads:
            wanted = {**_parameters(operator), "generator": "Optional[Generator]"}
            taking = next((o for o in overloads if _parameters(o) == wanted), None)
            if taking is not None:
                interpose(operator, _drawing(operator, taking))
    interpose(torch.ops.aten.native_dropout.default, _native_dropout)


_interpose_all()
