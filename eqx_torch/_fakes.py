"""Runs of torch code on tensors that have shapes, but no values that code could tell apart.

torch's own, the fake tensors of `torch.compile`, do for all code, but the first of them in a
process imports torch's compiler, which takes as long as to import torch and JAX. As long as nobody
has imported it, a run on *blanks* is tried first: on real memory of zeros, which the system hands
out only when it is touched. Operators that say by values what they return, and whoever reads
memory, are refused; what is known to need no computation is not computed; and there is a limit to
the rest. Whatever does not work out is left to fake tensors. (Tensors on the meta device are no way
around: torch's rules for these import the compiler, too.)

No switch of the process is touched here: what torch logs of operators that fail on fake tensors is
dropped for the threads of such runs alone. And `torch.distributions`, which checks the values of
its arguments, takes them for valid; at run time it checks them.
"""

import contextlib
import logging
import math
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from ._compat import (
    fakes_without_memory,
    FakeTensorMode,
    has_kernel,
    is_all_true,
    pad_packed_sequence,
    torch_tree,
    TorchDispatchMode,
)
from ._watch import EXPOSING


_OF_NUMBERS = ("aten::tensor(", "aten::as_tensor(")
_COMPILER = "torch._dynamo"
_CONSTRAINTS = "torch.distributions.constraints"

_SMALL = 2**12  # elements: what is computed in any case
_MOST = 2**26  # elements that a run on blanks may compute
_DEAR = 64  # times that for each element of an operator that may take more than linear time
_BY_VALUES = frozenset([torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape])
_LINEAR = frozenset([torch.Tag.core, torch.Tag.pointwise, torch.Tag.reduction, torch.Tag.inplace])
# These read memory without an operator that says so.
_READERS = EXPOSING | {
    torch.Tensor.tolist,
    torch.Tensor.tensor_split,
    torch.tensor_split,
    pad_packed_sequence,
    torch.ctc_loss,
}
_RECURRENT = frozenset([torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu])
_GROWING = ("repeat", "upsample")
_aten: Any = torch.ops.aten
_BY_MEMORY = frozenset([_aten._pack_padded_sequence.default, _aten._cdist_forward.default])
_INDEXING = frozenset([_aten.index.Tensor])
_PRODUCTS = frozenset(
    [_aten.mm.default, _aten.bmm.default, _aten.addmm.default, _aten.baddbmm.default]
)


class NeedsValuesError(Exception):
    """A run on blanks came to where values matter, or to what takes too long."""


def blanks_serve(device: torch.device) -> bool:
    """Whether a run on blanks saves an import."""
    return device.type == "cpu" and _COMPILER not in sys.modules


def blank(shape: Iterable[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of zeros that takes no memory until it is touched."""
    empty = torch.empty(0, dtype=dtype)
    size = math.prod(shape := tuple(shape)) * empty.element_size()
    memory = torch.from_numpy(np.zeros(size, np.uint8)) if size else empty
    return memory.view(dtype).view(shape)


@contextlib.contextmanager
def on_blanks(device: torch.device) -> Iterator[None]:
    """Operators give tensors whose values may not be read."""
    del device
    refused: list[str] = []
    with _Blanks(refused), _Unread(refused):
        yield
    if refused:  # and the code has caught it
        raise NeedsValuesError(refused[0])


@contextlib.contextmanager
def on_fakes(device: torch.device) -> Iterator[None]:
    """Operators give fake tensors."""
    del device
    with _QUIET.here(), fakes_without_memory(), _ValidArguments():
        yield


def run_on_fakes(scripts: Iterable[torch.jit.ScriptModule]) -> bool:
    """Whether TorchScript modules do. One that makes tensors of numbers ends the process there."""
    return not any(name in _graph(x) for x in scripts for name in _OF_NUMBERS)


def _graph(module: torch.jit.ScriptModule) -> str:
    with contextlib.suppress(Exception):  # one without a forward has none
        return str(module.inlined_graph)
    return ""


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


class _Unread(_ValidArguments):
    """Refuses to give away the memory of tensors."""

    def __init__(self, refused: list[str]) -> None:
        super().__init__()
        self._refused = refused

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Recurrent layers take the lengths of packed sequences from memory; others have none.
        if func in _READERS or (func in _RECURRENT and not isinstance(args[3], bool)):
            self._refused.append(func.__name__)
            raise NeedsValuesError(func.__name__)
        return super().__torch_function__(func, types, args, kwargs)


class _Blanks(TorchDispatchMode):
    """Refuses operators that need values, and computes no more than it has to."""

    def __init__(self, refused: list[str]) -> None:
        super().__init__()
        self._refused = refused
        self._left = _MOST

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        try:
            return self._result(func, args, kwargs or {})
        except Exception:
            self._refused.append(func.name())
            raise

    def _result(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if not _knows_its_shape(func, args):
            raise NeedsValuesError(func.name())
        tensors = _tensors((args, kwargs))
        if max((x.numel() for x in tensors), default=0) > _SMALL:
            result = _uncomputed(func, args, kwargs, tensors)
            if result is not None:
                return result
        if func.is_view:
            return func(*args, **kwargs)
        self._spend(_size(func, args, tensors), func)
        result = func(*args, **kwargs)
        self._spend(sum(x.numel() for x in _tensors(result)), func)
        return result

    def _spend(self, elements: int, func: Any) -> None:
        self._left -= elements * (1 if _LINEAR.intersection(func.tags) else _DEAR)
        if self._left < 0:
            raise NeedsValuesError(f"{func.name()} on {elements} elements")


def _knows_its_shape(func: Any, args: Any) -> bool:
    """Whether what an operator returns has a shape and a dtype that no value decides."""
    if func in _INDEXING:  # by numbers, or by masks
        return all(x is None or x.dtype not in (torch.bool, torch.uint8) for x in args[1])
    if func.namespace != "aten" or func in _BY_MEMORY or not _BY_VALUES.isdisjoint(func.tags):
        return False
    return any(has_kernel(func, key) for key in ("Meta", "CompositeExplicitAutograd"))


def _size(func: Any, args: Any, tensors: Sequence[torch.Tensor]) -> int:
    """About how many elements an operator reads and writes, before it does."""
    largest = max((x.numel() for x in tensors), default=1)
    lists = [x for x in args if isinstance(x, list | tuple)] + ([] if tensors else [args])
    sizes = [math.prod(abs(n) for n in x if isinstance(n, int) and n) for x in lists]
    grows = any(name in func.name() for name in _GROWING)
    return largest * math.prod(sizes) if grows else max([largest, *sizes])


def _uncomputed(func: Any, args: Any, kwargs: Any, tensors: Any) -> torch.Tensor | None:
    """A blank for what an operator gives, as a run on a part of its inputs shows, or None."""
    few = torch_tree.tree_map(_first_element, (args, kwargs))
    if torch.Tag.pointwise in func.tags:
        if not (_is_functional(func) and all(x.is_contiguous() for x in tensors)):
            return None
        shape = np.broadcast_shapes(*(x.shape for x in tensors))
    elif func in _PRODUCTS:
        *bias, a, b = args
        shape = (*a.shape[:-1], b.shape[-1])
        fits = a.shape[-1] == b.shape[-2] and a.shape[:-2] == b.shape[:-2]
        if not fits or any(np.broadcast_shapes(c.shape, shape) != shape for c in bias):
            return None
    elif func is _aten.embedding.default:
        shape = (*args[1].shape, args[0].shape[1])
    elif func is _aten.convolution.default:
        one = func(args[0][:1], *args[1:], **kwargs)
        return blank((len(args[0]), *one.shape[1:]), one.dtype)
    else:
        return None
    return blank(shape, func(*few[0], **few[1]).dtype)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [x for x in torch_tree.tree_leaves(tree) if isinstance(x, torch.Tensor)]


def _is_functional(func: Any) -> bool:
    """Whether an operator makes one tensor and writes to none."""
    schema = func._schema
    alone = len(schema.returns) == 1 and str(schema.returns[0].type) == "Tensor"
    aliases = any(x.alias_info for x in (*schema.arguments, *schema.returns))
    return alone and not aliases and torch.Tag.nondeterministic_seeded not in func.tags


def _first_element(x: Any) -> Any:
    return x[(slice(1),) * x.dim()] if isinstance(x, torch.Tensor) else x


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
