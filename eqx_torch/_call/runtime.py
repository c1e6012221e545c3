"""What XLA calls: buffers in, torch, buffers out.

The callback runs on threads of XLA's, once a device, possibly at the same time. It touches no JAX
array and starts no JAX computation, so it can never wait for the runtime that waits for it. The
tensors it makes share memory with XLA's buffers and are valid until it returns.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .._ambient import Ambient, in_neutral_thread
from .._compat import copy_all, from_dlpack, set_grad_enabled
from .._processes import interrupt_again
from .._program import local_gpus, Lock, Program, with_interposed, write_error
from .._timeline import ACTIVE, Span
from .debug import debugged, debugging, Evaluate
from .failures import Callback, PENDING, poisoning, raise_in_callback
from .pairs import mode_on, Write, writer
from .streams import XLA_STREAMS
from .wiring import Port


_version = operator.attrgetter("_version")


def callback(program: Program, platform: str, devices: int, port: Port | None = None) -> Callback:
    """The function that evaluates a program on XLA buffers.

    It takes XLA's execution context, a buffer for each input and then one for each output.

    Args:
        program: the program.
        platform: XLA's name of what it runs on.
        devices: how many devices call the function.
        port: what the program has to do with tokens.
    """
    lock = program.leaf.function.lock_to_run()
    # Contexts with nothing in them would be a twentieth of what a call costs.
    if port is None:
        write = _copier(_runner(program))
    else:
        write = writer(program, _runner, port, mode_on(platform))
    run = _evaluator(program, write, PENDING if devices == 1 else ())
    if lock is not None:
        run = _locked(run, lock)
    if devices > 1:
        run = poisoning(program, run, platform, devices)
    if platform == "cpu":
        return run
    # A program on one device may wait while it holds the lock that another one's calls wait for.
    return _on_stream(run, settled=lock is not None and max(devices, local_gpus()) > 1)


def _locked(run: Callback, lock: Lock) -> Callback:
    def run_locked(context: Any, *buffers: Any) -> tuple[()]:
        with lock:
            return run(context, *buffers)

    return run_locked


def _on_stream(run: Callback, settled: bool) -> Callback:
    def run_on_stream(context: Any, *buffers: Any) -> tuple[()]:
        with XLA_STREAMS.entered(context, buffers, settled):
            return run(context, *buffers)

    return run_on_stream


def _evaluator(program: Program, write: Write, pending: Sequence[BaseException]) -> Callback:
    """Evaluates a program, unless an error is `pending`, which is then raised instead."""
    run = _on_buffers(program, write)

    def run_recorded(buffers: Sequence[Any]) -> tuple[()]:
        with Span(program, buffers[0]):
            return run(buffers)

    def run_in_thread(context: Any, *buffers: Any) -> tuple[()]:
        del context
        if pending:
            raise_in_callback()
        task = run_recorded if ACTIVE else run
        try:
            if in_neutral_thread():
                return task(buffers)
            with Ambient.neutral():
                return task(buffers)
        except KeyboardInterrupt:
            interrupt_again()
            raise

    return run_in_thread


def _runner(program: Program) -> Evaluate:
    evaluate = program.run
    if program.leaf.is_interposed:
        evaluate = with_interposed(evaluate)
    return debugged(program, evaluate) if debugging() else evaluate


def _copier(evaluate: Evaluate) -> Write:
    def run(inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        results = evaluate(inputs, False)
        set_grad_enabled(False)
        try:
            if len(outputs) == 1:
                outputs[0].copy_(results[0])
            else:
                copy_all(outputs, list(results))
        finally:
            set_grad_enabled(True)

    return run


def _on_buffers(program: Program, write: Write) -> Callable[[Sequence[Any]], tuple[()]]:
    """Evaluates a program in a thread without settings of its own."""
    count = len(program.ins)
    code = program.leaf.function.code

    def run(buffers: Sequence[Any]) -> tuple[()]:
        tensors = [from_dlpack(b.__dlpack__()) for b in buffers]
        inputs = tensors[:count]
        write(inputs, tensors[count:])
        if any(map(_version, inputs)):
            raise write_error(program, inputs)
        return ()

    def run_and_release(buffers: Sequence[Any]) -> tuple[()]:
        try:
            return run(buffers)
        finally:
            code.release()

    return run_and_release if code.isolated else run
