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
import dataclasses
import logging
import os
import threading
import traceback
from collections.abc import Callable, Hashable, Iterator
from typing import Any, TypeAlias

import jax

from .._compat import from_dlpack
from .._errors import EqxTorchError
from .._program import Program
from .poison import poison


Callback: TypeAlias = Callable[..., tuple[()]]

_LOGGER = logging.getLogger("eqx_torch")
_PACKAGE = os.path.dirname(os.path.dirname(__file__))


@dataclasses.dataclass
class Failure:
    """An error that was not raised where it arose, and what has come since.

    Attributes:
        error: the error.
        later: how many have come since.
        devices: for each origin of an error, the device that it was first on.
    """

    error: BaseException
    later: int = 0
    devices: dict[Hashable, str] = dataclasses.field(default_factory=dict)


class Failures:
    """The error that waits to be raised.

    Invariant: `pending` holds the first error since one was last raised, or nothing. It is always
    the same list, changed only while the lock is held, so that whoever runs often may test it
    without the lock.
    """

    def __init__(self) -> None:
        self.pending: list[Failure] = []
        self._lock = threading.Lock()

    def add(self, error: BaseException, device: str, origin: Hashable) -> str | None:
        """Takes an error; gives the device of the first of this origin, None if it is the first."""
        with self._lock:
            if self.pending:
                self.pending[0].later += 1
            else:
                self.pending.append(Failure(error))
            devices = self.pending[0].devices
            first = devices.get(origin)
            devices.setdefault(origin, device)
            return first

    def _taken(self) -> BaseException | None:
        """The pending error, which then is the caller's."""
        with self._lock:
            if not self.pending:
                return None
            failure = self.pending.pop()
        if failure.later:
            _note(failure.error, f"Later errors that were only logged: {failure.later}.")
        return failure.error

    def raise_pending(self) -> None:
        """Raises the pending error if there is one."""
        error = self._taken()
        if error is not None:
            raise error

    def raise_in_callback(self) -> None:
        """Raises the pending error if there is one, to XLA, which keeps only its text."""
        error = self._taken()
        if error is not None:
            text = "".join(traceback.format_exception(error))
            raise EqxTorchError(
                f"an earlier torch call raised on one of several devices:\n\n{text}"
            )

    def log_pending(self) -> None:
        """Logs the pending error if there is one, when it is too late to raise it."""
        error = self._taken()
        if error is not None:
            _LOGGER.error(
                "the program ends, and an error of torch on one of several devices was never "
                "raised. `eqx_torch.check_errors()` raises such errors.",
                exc_info=error,
            )


FAILURES = Failures()
atexit.register(FAILURES.log_pending)


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
    FAILURES.raise_pending()


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
            _report(error, program.leaf.name, f"{platform}:{ordinal}{process}", devices)
            return ()

    return run_poisoning


def _report(error: BaseException, name: str, device: str, devices: int) -> None:
    """Keeps an error and logs it, in one line if the same one was logged and is still pending."""
    _forget_tensors(error)
    where = f"`{name}` on device {device}, one of {devices}"
    _note(error, f"Raised by {where}, where its outputs were then filled with NaN.")
    first = FAILURES.add(error, device, (name, _origin(error)))
    with contextlib.suppress(Exception):  # a handler of the user's must not raise here either
        if first is None:
            _LOGGER.error(
                "torch raised in %s. Its outputs there are NaN (integers: the smallest; bools: "
                "False). The next torch call that can raises this error, or "
                "`eqx_torch.check_errors()`.",
                where,
                exc_info=error,
            )
        else:
            _LOGGER.error(
                "torch raised in %s: %s. Its traceback is that of the error on %s.",
                where,
                _summary(error),
                first,
            )


def _note(error: BaseException, text: str) -> None:
    """Adds a note, unless the user's type of exception refuses it."""
    with contextlib.suppress(Exception):
        error.add_note(text)


def _summary(error: BaseException) -> str:
    """An error in one line, also if it cannot be shown."""
    lines: list[str] = []
    with contextlib.suppress(Exception):
        lines = str(error).strip().splitlines()
    return ": ".join([type(error).__name__, *lines[:1]])


def _origin(error: BaseException | None) -> Hashable:
    """What errors share that one mistake makes on several devices, whatever values they name.

    The lines of this package say nothing of whose mistake it was; its messages do.
    """
    origin: list[Hashable] = []
    for link in _chain(error):
        frames = traceback.walk_tb(link.__traceback__)
        places = ((frame.f_code.co_filename, line) for frame, line in frames)
        lines = tuple(place for place in places if not place[0].startswith(_PACKAGE))
        origin.append((type(link), lines, str(link) if isinstance(link, EqxTorchError) else None))
    return tuple(origin)


def _forget_tensors(error: BaseException) -> None:
    """Clears the frames of a traceback: their tensors lie in memory that is XLA's again."""
    for link in _chain(error):
        traceback.clear_frames(link.__traceback__)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error, and those that it came from."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
