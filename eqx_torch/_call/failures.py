"""Errors of torch on one of several devices.

A device that raises leaves its program. Other devices may already wait for it in a collective, and
XLA ends a process in which they do so for 40 seconds. So in a program over several devices a torch
call never raises. Where torch does, the call's outputs on that device are poisoned, the error is
logged at once and stays pending, and it is raised once, by the first that comes of

- a wrapped function that is called from Python, or traced;
- a torch call in a program on one device, compiled long ago or not;
- `check_errors()`.

If none comes, it is logged again when the interpreter ends. While it is pending, further errors of
the same origin, which are those of one mistake on other devices or at later steps, are logged
without their traceback.

A compiled program over several devices runs as usual while an error is pending. All its devices
would have to raise at the same call, and they cannot agree on one: they come to it at different
times, under control flow that may differ between them, and some of them in other processes. So a
result is poisoned by a failure of the call that computes it, or of what that was given, and by no
other.
"""

import atexit
import contextlib
import logging
import threading
import traceback
from collections.abc import Callable, Hashable
from typing import Any, TypeAlias

import jax
import torch

from .._compat import from_dlpack
from .._errors import EqxTorchError
from .._processes import wait_for_calls
from .._program import Program


Callback: TypeAlias = Callable[..., tuple[()]]

_LOGGER = logging.getLogger("eqx_torch")


class _Failures:
    """The error that waits to be raised.

    Invariant: `pending` holds the first error since one was last raised, or nothing. It is always
    the same list, changed only while the lock is held, so that whoever runs often may test it
    without the lock.
    """

    def __init__(self) -> None:
        self.pending: list[BaseException] = []
        self.asked: list[Callable[[], None]] = []
        self._devices: dict[Hashable, str] = {}
        self._lock = threading.Lock()

    def add(self, error: BaseException, device: str, origin: Hashable) -> str | None:
        """Takes an error; gives the device of the first of this origin, None if it is the first."""
        with self._lock:
            if not self.pending:
                self.pending.append(error)
                self._devices.clear()
            first = self._devices.get(origin)
            self._devices.setdefault(origin, device)
            return first

    def take(self) -> BaseException | None:
        """The pending error, which then is the caller's."""
        with self._lock:
            return self.pending.pop() if self.pending else None


_FAILURES = _Failures()
PENDING = _FAILURES.pending


def check_errors() -> None:
    """Raises what a torch function raised on one of several devices.

    In a program over several devices an error cannot be raised where it arises, since the other
    devices may be waiting for that one in a collective. Instead the outputs of that call are
    filled with NaN on that device (integers with their type's smallest value, bools with False),
    the error is logged at once by the logger `"eqx_torch"`, and it is raised once: here, or before
    that by a wrapped function that is called from Python or traced, or by a torch call of a program
    on one device. A compiled program over several devices never raises it.

    JAX runs asynchronously. To see the errors of a computation, wait for its results first:

        loss.block_until_ready()
        eqx_torch.check_errors()

    **Returns:**

    Nothing.

    **Raises:**

    The first exception since one was last raised, the object that torch code raised, with its
    traceback and a note that says on which device; nothing if there was none.

    !!! example

        >>> import jax.numpy as jnp
        >>> import torch
        >>> from eqx_torch import torch2jax
        >>> torch2jax(torch.sin)(jnp.zeros(2)).block_until_ready()
        Array([0., 0.], dtype=float32)
        >>> check_errors()
    """
    ask()
    error = _FAILURES.take()
    if error is not None:
        raise error


def ask_in_checks(ask: Callable[[], None]) -> None:
    """Calls `ask` before errors are looked for by the user, or at the end: it may report some."""
    _FAILURES.asked.append(ask)


def ask() -> None:
    """Has those report that know of errors not yet reported."""
    for ask_one in _FAILURES.asked:
        ask_one()


def raise_in_callback() -> None:
    """Raises the pending error if there is one, to XLA, which keeps only its text."""
    error = _FAILURES.take()
    if error is not None:
        text = "".join(traceback.format_exception(error))
        raise EqxTorchError(f"an earlier torch call raised on one of several devices:\n\n{text}")


@atexit.register
def _log_at_the_end() -> None:
    wait_for_calls()
    ask()
    error = _FAILURES.take()
    if error is not None:
        _LOGGER.error(
            "the program ends, and an error of torch on one of several devices was never raised. "
            "`eqx_torch.check_errors()` raises such errors.",
            exc_info=error,
        )


def poisoning(program: Program, run: Callback, platform: str, devices: int) -> Callback:
    """What XLA calls on each of several devices: as `run`, but it never raises.

    Args:
        program: what `run` evaluates.
        run: takes XLA's execution context and the buffers.
        platform: XLA's name of what it runs on.
        devices: how many devices call it.
    """
    count = len(program.ins)
    process = f" of process {jax.process_index()}" if jax.process_count() > 1 else ""

    def run_poisoning(context: Any, *buffers: Any) -> tuple[()]:
        try:
            return run(context, *buffers)
        except BaseException as error:
            poison([from_dlpack(b.__dlpack__()) for b in buffers[count:]])
            _, ordinal = buffers[-1].__dlpack_device__()
            report(error, program.leaf.name, f"{platform}:{ordinal}{process}", devices)
            return ()

    return run_poisoning


def poison(tensors: list[torch.Tensor]) -> None:
    """Overwrites tensors with what stands for no value: NaN, an integer's minimum, False."""
    for tensor in tensors:
        dtype = tensor.dtype
        if dtype.is_floating_point or dtype.is_complex:
            value = float("nan")
        else:
            value = False if dtype is torch.bool else torch.iinfo(dtype).min
        tensor.detach().fill_(value)


def report(error: BaseException, name: str, device: str, devices: int) -> None:
    """Keeps an error and logs it, in one line if the same one was logged and is still pending."""
    frames = traceback.walk_tb(error.__traceback__)
    lines = tuple((frame.f_code.co_filename, line) for frame, line in frames)
    _forget_tensors(error)
    first = _FAILURES.add(error, device, (name, type(error), lines))
    where = f"`{name}` on device {device}, one of {devices}"
    with contextlib.suppress(Exception):  # neither handlers of the user's nor exceptions may raise
        error.add_note(f"Raised by {where}, where its outputs were then filled with NaN.")
        if first is None:
            _LOGGER.error(
                "torch raised in %s. Its outputs there are NaN (integers: the smallest; bools: "
                "False). The next torch call that can raises this error, or "
                "`eqx_torch.check_errors()`.",
                where,
                exc_info=error,
            )
        else:
            summary = ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])
            text = "torch raised in %s: %s. Its traceback is that of the error on %s."
            _LOGGER.error(text, where, summary, first)


def _forget_tensors(error: BaseException) -> None:
    """Clears the frames of an error and its causes: their tensors' memory is XLA's again."""
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in chain:
        chain.append(link)
        traceback.clear_frames(link.__traceback__)
        link = link.__cause__ or link.__context__
