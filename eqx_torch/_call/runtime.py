"""What XLA calls: buffers in, torch, buffers out.

The callback runs on threads of XLA's, once a device, possibly at the same time. It touches no JAX
array and starts no JAX computation, so it can never wait for the runtime that waits for it. The
tensors it makes share memory with XLA's buffers and are valid until it returns.
"""

import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from .._ambient import Ambient, in_neutral_thread
from .._compat import from_dlpack
from .._program import Program, write_error
from .._timeline import ACTIVE, Span
from .streams import no_stream, XLA_STREAMS


Callback: TypeAlias = Callable[..., tuple[()]]

_LOGGER = logging.getLogger("eqx_torch")


def callback(program: Program, platform: str, devices: int) -> Callback:
    """The function that evaluates a program on XLA buffers.

    It takes XLA's execution context, a buffer for each input and then one for each output.

    Args:
        program: the program.
        platform: XLA's name of what it runs on.
        devices: how many devices call the function.
    """
    lock = program.leaf.function.lock
    run = _evaluator(program)
    if devices > 1:
        run = _logged(program.leaf.function.name, run)
    if platform == "cpu" and lock is None:
        return run  # contexts with nothing in them would be a twentieth of what a call costs
    stream = no_stream if platform == "cpu" else XLA_STREAMS.entered
    settled = lock is not None and devices > 1

    def run_guarded(context: Any, *buffers: Any) -> tuple[()]:
        with stream(context, buffers, settled), lock or contextlib.nullcontext():
            return run(context, *buffers)

    return run_guarded


def _logged(name: str, run: Callback) -> Callback:
    """Logs what is raised at once.

    The other devices may be waiting for this one in a collective. Then XLA ends the process before
    it passes the error on.
    """

    def run_logged(context: Any, *buffers: Any) -> tuple[()]:
        try:
            return run(context, *buffers)
        except Exception:
            _LOGGER.exception(
                "`%s` raised on one of several devices. If others wait for it in a collective, XLA "
                "ends the process after 40 seconds.",
                name,
            )
            raise

    return run_logged


def _evaluator(program: Program) -> Callback:
    """Evaluates a program."""
    count = len(program.ins)
    evaluate = program.runner()
    function = program.leaf.function

    def run(buffers: Sequence[Any]) -> tuple[()]:
        tensors = [from_dlpack(b.__dlpack__()) for b in buffers]
        inputs = tensors[:count]
        i = count
        for result in evaluate(inputs, False):
            tensors[i].copy_(result.detach() if result.requires_grad else result)
            i += 1
        for x in inputs:
            if x._version:
                raise write_error(program.leaf, inputs)
        return ()

    def run_and_release(buffers: Sequence[Any]) -> tuple[()]:
        try:
            return run(buffers)
        finally:
            function.release()

    run_in_neutral = run_and_release if function.borrows else run

    def run_recorded(buffers: Sequence[Any]) -> tuple[()]:
        with Span(program, buffers[0]):
            return run_in_neutral(buffers)

    def run_in_thread(context: Any, *buffers: Any) -> tuple[()]:
        del context
        task = run_recorded if ACTIVE else run_in_neutral
        if in_neutral_thread():
            return task(buffers)
        with Ambient.neutral():
            return task(buffers)

    return run_in_thread
