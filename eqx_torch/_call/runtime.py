"""What XLA calls: buffers in, torch, buffers out.

The callback runs on threads of XLA's, once a device, possibly at the same time. It touches no JAX
array and starts no JAX computation, so it can never wait for the runtime that waits for it. The
tensors it makes share memory with XLA's buffers and are valid until it returns.
"""

import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Any

from .._ambient import Ambient, in_neutral_thread
from .._compat import from_dlpack
from .._program import Program, write_error
from .streams import on_stream


_LOGGER = logging.getLogger("eqx_torch")


def callback(program: Program, platform: str, devices: int) -> Callable[..., tuple[()]]:
    """The function that evaluates a program on XLA buffers.

    It takes XLA's execution context, a buffer for each input and then one for each output.

    Args:
        program: the program.
        platform: XLA's name of what it runs on.
        devices: how many devices call the function.
    """
    function = program.leaf.function
    evaluate = _evaluator(program)
    if devices > 1:
        evaluate = _logged(program.leaf.function.name, evaluate)
    stream = contextlib.nullcontext if platform == "cpu" else on_stream

    def run(context: Any, *buffers: Any) -> tuple[()]:
        del context
        if in_neutral_thread():
            evaluate(buffers)
        else:
            with Ambient.neutral():
                evaluate(buffers)
        return ()

    def run_guarded(context: Any, *buffers: Any) -> tuple[()]:
        with stream(context), function.lock or contextlib.nullcontext(), Ambient.neutral():
            evaluate(buffers)
        return ()

    # Contexts with nothing in them would be a twentieth of what a call costs.
    return run if platform == "cpu" and function.lock is None else run_guarded


def _logged(
    name: str, evaluate: Callable[[Sequence[Any]], None]
) -> Callable[[Sequence[Any]], None]:
    """Logs what is raised at once.

    The other devices may be waiting for this one in a collective. Then XLA ends the process before
    it passes the error on.
    """

    def run(buffers: Sequence[Any]) -> None:
        try:
            evaluate(buffers)
        except Exception:
            _LOGGER.exception(
                "`%s` raised on one of several devices. If others wait for it in a collective, XLA "
                "ends the process after 40 seconds.",
                name,
            )
            raise

    return run


def _evaluator(program: Program) -> Callable[[Sequence[Any]], None]:
    """The function that evaluates a program on buffers: its inputs, then its outputs."""
    count = len(program.ins)
    evaluate = program.runner()
    function = program.leaf.function
    release = function.release if function.borrows else None

    def run(buffers: Sequence[Any]) -> None:
        tensors = [from_dlpack(b.__dlpack__()) for b in buffers]
        inputs = tensors[:count]
        try:
            for i, result in enumerate(evaluate(inputs, False), count):
                tensors[i].copy_(result.detach() if result.requires_grad else result)
        finally:
            if release is not None:
                release()
        for x in inputs:
            if x._version:
                written = tuple(i for i, x in enumerate(inputs) if x._version)
                raise write_error(program.leaf, written)

    return run
