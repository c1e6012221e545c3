"""Debug mode: finds torch functions that keep or change what is not theirs.

The tensors that a function is given share memory with XLA's buffers and are valid until it
returns. A function that keeps one reads later what XLA has put there since; one that writes past
torch's notice, by NumPy or by `x.data`, changes an array of JAX. In debug mode the function gets
copies, which are compared with the arrays and then poisoned. So a write is an error, and a kept
tensor is NaN.

Whether it is on is read when a program is compiled, from `EQX_TORCH_DEBUG`: what is compiled
already stays as it is.
"""

import os
from collections.abc import Callable

import torch

from .._errors import InputError
from .._program import input_label, Program, same_bits, Tensors
from .failures import poison


Evaluate = Callable[[Tensors, bool], Tensors]

VARIABLE = "EQX_TORCH_DEBUG"


def debugging() -> bool:
    """Whether programs that are compiled now are to be debugged."""
    return os.environ.get(VARIABLE, "0") not in ("", "0")


def debugged(program: Program, evaluate: Evaluate) -> Evaluate:
    """`evaluate`, the runner of the program, on copies of its inputs."""

    def evaluate_on_copies(inputs: Tensors, functional: bool) -> Tensors:
        copies = [x.clone() for x in inputs]
        try:
            # What is returned may share memory with what was passed.
            results = [y.detach().clone() for y in evaluate(copies, functional)]
            _refuse_writes(program, inputs, copies)
        finally:
            poison(copies)
        return results

    return evaluate_on_copies


def _refuse_writes(program: Program, inputs: Tensors, copies: list[torch.Tensor]) -> None:
    pairs = enumerate(zip(inputs, copies, strict=True))
    written = [i for i, (x, copy) in pairs if not same_bits(x, copy)]
    if written:
        names = ", ".join(input_label(program.leaf, i) for i in written)
        raise InputError(
            f"`{program.leaf.name}` has changed its input {names}, which is a JAX array, in a way "
            "that torch does not notice (by NumPy, `x.data` or a kernel of its own), so that no "
            "copy was made. Write to a copy in the function itself: `x = x.clone()`. Without "
            f"{VARIABLE} the array itself would have changed."
        )
