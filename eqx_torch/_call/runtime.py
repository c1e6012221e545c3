"""What XLA calls: buffers in, torch, buffers out.

The callback runs on threads of XLA's, once a device, possibly at the same time. It touches no JAX
array and starts no JAX computation, so it can never wait for the runtime that waits for it. The
tensors it makes share memory with XLA's buffers and are valid until it returns.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack

from .._ambient import Ambient
from .._program import Program, write_error
from .streams import on_stream


def callback(program: Program, platform: str) -> Callable[..., tuple[()]]:
    """The function that evaluates a program on XLA buffers.

    It takes XLA's execution context, a buffer for each input and then one for each output.
    """
    count = len(program.ins)
    lock = program.leaf.function.lock

    def run(context: Any, *buffers: Any) -> tuple[()]:
        del context
        with Ambient.neutral():
            tensors = [from_dlpack(b.__dlpack__()) for b in buffers]
            _evaluate(program, tensors[:count], tensors[count:])
        return ()

    def run_guarded(context: Any, *buffers: Any) -> tuple[()]:
        stream = contextlib.nullcontext() if platform == "cpu" else on_stream(context)
        with stream, lock or contextlib.nullcontext():
            return run(context, *buffers)

    # Contexts with nothing in them would be a twentieth of what a call costs.
    return run if platform == "cpu" and lock is None else run_guarded


def _evaluate(program: Program, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
    try:
        results = program.run(inputs, functional=False)
        for output, result in zip(outputs, results, strict=True):
            output.copy_(result.detach() if result.requires_grad else result)
    finally:
        program.leaf.function.release()
    written = [i for i, x in enumerate(inputs) if x._version]
    if written:
        raise write_error(program.leaf, tuple(written))
