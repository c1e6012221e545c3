"""Runs of torch code on fake tensors, which have shapes but no values.

They are `torch.compile`'s. Here no switch of the process is touched: what torch logs of operators
that fail on them is dropped for the threads of such runs alone. And `torch.distributions`, which
checks the values of its arguments, takes them for valid; at run time it checks them.
"""

import contextlib
import logging
import sys
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ._compat import fakes_without_memory, FakeTensorMode, is_all_true


_CONSTRAINTS = "torch.distributions.constraints"


@contextlib.contextmanager
def on_fakes(device: torch.device) -> Iterator[None]:
    """Operators give fake tensors."""
    del device
    with _QUIET.here(), fakes_without_memory(), _ValidArguments():
        yield


class _ValidArguments(TorchFunctionMode):
    """What `torch.distributions` asks of its arguments, to raise if it is false, is true."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is is_all_true:
            return True
        caller = sys._getframe(1).f_globals.get("__name__")
        if func is torch.Tensor.__bool__ and caller == _CONSTRAINTS:
            return True
        return func(*args, **(kwargs or {}))


class _Quiet(logging.Filter):
    """Drops what threads in a run on fake tensors log: an operator that fails is no error there."""

    def __init__(self) -> None:
        super().__init__()
        self._threads: set[int] = set()
        logging.getLogger(FakeTensorMode.__module__).addFilter(self)

    def filter(self, record: logging.LogRecord) -> bool:
        return record.thread not in self._threads

    @contextlib.contextmanager
    def here(self) -> Iterator[None]:
        thread = threading.get_ident()
        self._threads.add(thread)
        try:
            yield
        finally:
            self._threads.discard(thread)


_QUIET = _Quiet()
