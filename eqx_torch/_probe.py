"""What a torch function returns, learnt from one run of it.

The run is on fake tensors, which have shapes but no memory. Where the function needs values
(`.item()`, `.numpy()`), it is on zeros, with a warning. Neither leaves a trace in the function, its
modules or torch's random state; what the run showed about writes to inputs goes to the findings.
"""

import contextlib
import dataclasses
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import torch

from ._compat import FakeTensorMode
from ._dtypes import dtype_j2t, x64_enabled
from ._errors import EqxTorchError, InputError, ShapeError
from ._program import (
    ask_for_gradients,
    drawing_from,
    dtype_hint,
    Effects,
    interposing,
    library_hint,
    on_leaves,
    opened,
    Site,
    Spec,
    TorchFunction,
)
from ._swaps import Swaps
from ._trees import leaf_paths, Structure
from ._watch import Exposure, Watch


@dataclasses.dataclass(frozen=True)
class Outputs:
    """What a function returns, and who says so."""

    specs: tuple[Spec, ...]
    structure: Structure
    source: str


def probe(function: TorchFunction, site: Site, in_specs: Sequence[Spec]) -> Outputs:
    """The outputs of a function for inputs of these shapes, by running it once.

    Raises:
        ShapeError: the function ran neither on fake tensors nor on zeros.
        OutputError: it returned something other than tensors.
    """
    try:
        trial = _try(function, site, in_specs, _fake_tensors, "one run on fake tensors")
    except EqxTorchError:
        raise
    except Exception as refusal:
        trial = _try_on_zeros(function, site, in_specs, refusal)
    function.learn(site, trial.effects, trial.watch)
    return trial.outputs


@dataclasses.dataclass
class _Trial:
    outputs: Outputs
    effects: Effects
    watch: Watch


def _try_on_zeros(
    function: TorchFunction, site: Site, in_specs: Sequence[Spec], refusal: Exception
) -> _Trial:
    try:
        trial = _try(function, site, in_specs, _real_tensors, "one run on zeros")
    except EqxTorchError:
        raise
    except Exception as error:
        raise _not_inferred(function, site, in_specs, error, refusal) from error
    reason = f"{type(refusal).__name__}: {refusal}"
    _check_fixed(function, in_specs, trial.outputs, reason)
    warnings.warn(
        f"the output shapes of `{function.name}` were inferred by running it on zeros, because "
        f"it does not run on tensors without values: {reason.splitlines()[0]}\n"
        "Declare them by `output_shapes=` to save this run, and if they depend on values.",
        stacklevel=3,
    )
    return trial


def _try(
    function: TorchFunction,
    site: Site,
    in_specs: Sequence[Spec],
    tensors: Callable[[], contextlib.AbstractContextManager[Exposure]],
    source: str,
) -> _Trial:
    try:
        return _try_once(function, site, in_specs, tensors, source)
    except Exception as error:
        if not ask_for_gradients(function, error):
            raise
    return _try_once(function, site, in_specs, tensors, source)


def _try_once(
    function: TorchFunction,
    site: Site,
    in_specs: Sequence[Spec],
    tensors: Callable[[], contextlib.AbstractContextManager[Exposure]],
    source: str,
) -> _Trial:
    watch = Watch()
    with (
        function.lock_to_try() or contextlib.nullcontext(),
        site.ambient.in_force(),
        _eager(),
        interposing(),
        drawing_from(torch.Generator()),
        function.trial(watch) as trial,
        tensors() as exposure,
    ):
        pairs = zip(in_specs, site.restored, strict=True)
        inputs = [_zeros(spec, dtype) for spec, dtype in pairs]
        args, kwargs = site.arguments(on_leaves(function, inputs))
        try:
            with watch, Swaps() as swaps:
                result = trial(args, kwargs)
        finally:
            watch.undo()
    outputs = _outputs(function, result, source)
    written = frozenset(i for i, x in enumerate(inputs) if watch.wrote(x) or exposure.exposed(x))
    return _Trial(outputs, Effects(written, swaps.any), watch)


def _outputs(function: TorchFunction, result: Any, source: str) -> Outputs:
    return Outputs(*opened(function, result), source)


def _zeros(spec: Spec, restored: torch.dtype | None) -> torch.Tensor:
    dtype = dtype_j2t(spec.dtype) if restored is None else restored
    return torch.zeros(spec.shape, dtype=dtype, device=_device())


def _device() -> torch.device:
    on_gpu = jax.default_backend() == "gpu" and torch.cuda.is_available()
    return torch.device("cuda" if on_gpu else "cpu")


@contextlib.contextmanager
def _fake_tensors() -> Iterator[Exposure]:
    # torch logs operators that fail on fake tensors with their tracebacks; here that is no error.
    logger = logging.getLogger(FakeTensorMode.__module__)
    disabled, logger.disabled = logger.disabled, True
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            yield Exposure()
    finally:
        logger.disabled = disabled


def _not_inferred(
    function: TorchFunction,
    site: Site,
    in_specs: Sequence[Spec],
    error: Exception,
    refusal: Exception,
) -> EqxTorchError:
    """The error for a function that raised `error` on zeros, and `refusal` on fake tensors."""
    misfit = function.misfit(site)
    if misfit:
        return InputError(f"`{function.name}` was called with wrong arguments: {misfit}.")
    inputs = function.described(site, [f"{s.dtype}{list(s.shape)}" for s in in_specs])
    return ShapeError(
        f"cannot infer what `{function.name}` returns for {inputs}: running it on zeros of these "
        f"shapes raised {type(error).__name__}: {error}"
        f"{_advice(function, site, in_specs, error, refusal)}"
    )


def _advice(
    function: TorchFunction,
    site: Site,
    in_specs: Sequence[Spec],
    error: Exception,
    refusal: Exception,
) -> str:
    """What to write instead, on a line of its own; nothing if torch's message has to do."""
    named = _dtypes(function, site, in_specs)
    hint = dtype_hint(error, named, x64_enabled()) or library_hint(error)
    if hint:
        return f"\n{hint}"
    numbers = _numbers(function, site)
    if numbers and isinstance(error, TypeError | AttributeError):
        return (
            f"\nPython numbers reach torch as they are ({numbers}). Where it needs a tensor, pass "
            "`jax.numpy.asarray` of them."
        )
    if type(error) is type(refusal):  # without values, so it is none of these zeros that is wrong
        return ""
    return (
        "\nIf the inputs are right, declare the outputs: `output_shapes=` takes a tree of "
        "`jax.ShapeDtypeStruct`, and the function is then not run to infer them."
    )


def _dtypes(
    function: TorchFunction, site: Site, in_specs: Sequence[Spec]
) -> list[tuple[str, torch.dtype]]:
    """The dtype that torch was given for each input, by name."""
    triples = zip(site.paths, in_specs, site.restored, strict=True)
    return [(function.label(p), restored or dtype_j2t(s.dtype)) for p, s, restored in triples]


def _numbers(function: TorchFunction, site: Site) -> str:
    """The Python numbers of a call, by name."""
    pairs = zip(leaf_paths(site.structure), site.statics, strict=True)
    return ", ".join(
        f"{function.label(path)} {static.value!r}"
        for path, static in pairs
        if static is not None and type(static.value) in (int, float, complex)
    )


def _check_fixed(
    function: TorchFunction, in_specs: Sequence[Spec], outputs: Outputs, reason: str
) -> None:
    """Raises if an output that is empty for zeros may not be empty for other values.

    XLA sees no need to call a function whose outputs are all empty, so no check would ever tell.
    """
    if not any(0 in spec.shape for spec in outputs.specs):
        return
    if all(0 in spec.shape for spec in in_specs):
        return
    raise ShapeError(
        f"the shapes that `{function.name}` returns seem to depend on the values of its inputs "
        f"({reason.splitlines()[0]}; for zeros it returns an empty tensor), but in JAX they are "
        "fixed when a program is traced. Return a mask or `torch.where(...)` of fixed shape, or "
        "declare one shape by `output_shapes=` and pad to it."
    )


@contextlib.contextmanager
def _real_tensors() -> Iterator[Exposure]:
    # What is drawn on a CPU comes from a generator of the run's own.
    with torch.random.fork_rng(enabled=_device().type == "cuda"), Exposure() as exposure:
        yield exposure


def _eager() -> contextlib.AbstractContextManager[Any]:
    """Compiled torch functions run uncompiled; if none was compiled, the compiler is not loaded."""
    if "torch._dynamo" in sys.modules:
        return torch.compiler.set_stance("force_eager")
    return contextlib.nullcontext()
