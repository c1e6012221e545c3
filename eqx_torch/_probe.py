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
from ._dtypes import canonical_dtype, dtype_j2t
from ._errors import EqxTorchError, OutputError, ShapeError
from ._program import not_a_tensor, Site, Spec, TorchFunction
from ._trees import flatten, leaf_paths, Structure
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
        return _run(function, site, in_specs, _fake_tensors, "one run on fake tensors")
    except EqxTorchError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
    try:
        outputs = _run(function, site, in_specs, _real_tensors, "one run on zeros")
    except EqxTorchError:
        raise
    except Exception as error:
        raise ShapeError(_not_inferred(function, site, in_specs, error)) from error
    _check_fixed(function, site, in_specs, outputs, reason)
    warnings.warn(
        f"the output shapes of `{function.name}` were inferred by running it on zeros, because "
        f"it does not run on tensors without values: {reason.splitlines()[0]}\n"
        "Declare them by `output_shapes=` to save this run, and if they depend on values.",
        stacklevel=2,
    )
    return outputs


def _run(
    function: TorchFunction,
    site: Site,
    in_specs: Sequence[Spec],
    tensors: Callable[[], contextlib.AbstractContextManager[Exposure]],
    source: str,
    fill: int = 0,
) -> Outputs:
    watch = Watch()
    with site.ambient.in_force(), _eager(), function.trial(watch) as trial, tensors() as exposure:
        pairs = zip(in_specs, site.restored, strict=True)
        inputs = [_filled(spec, dtype, fill) for spec, dtype in pairs]
        args, kwargs = site.arguments(inputs)
        try:
            with watch:
                result = trial(args, kwargs)
        finally:
            watch.undo()
    outputs = _outputs(function, result, source)
    written = frozenset(i for i, x in enumerate(inputs) if watch.wrote(x) or exposure.exposed(x))
    function.learn(site, written, watch)
    return outputs


def _outputs(function: TorchFunction, result: Any, source: str) -> Outputs:
    leaves, structure = flatten(result)
    for path, leaf in zip(leaf_paths(structure), leaves, strict=True):
        if not isinstance(leaf, torch.Tensor) or leaf.layout is not torch.strided:
            raise OutputError(not_a_tensor(function, path, leaf))
    specs = tuple(Spec(tuple(x.shape), canonical_dtype(x.dtype)) for x in leaves)
    return Outputs(specs, structure, source)


def _filled(spec: Spec, restored: torch.dtype | None, fill: int) -> torch.Tensor:
    dtype = dtype_j2t(spec.dtype) if restored is None else restored
    zeros = torch.zeros(spec.shape, dtype=dtype, device=_device())
    return zeros + fill if fill else zeros


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
    function: TorchFunction, site: Site, in_specs: Sequence[Spec], error: Exception
) -> str:
    inputs = function.described(site, [f"{s.dtype}{list(s.shape)}" for s in in_specs])
    return (
        f"cannot infer what `{function.name}` returns for {inputs}: running it on zeros of these "
        f"shapes raised {type(error).__name__}: {error}\n"
        f"{_numbers(function, site, error)}"
        "If the inputs are right, declare the outputs: `output_shapes=` takes a tree of "
        "`jax.ShapeDtypeStruct`, and the function is then not run to infer them."
    )


def _numbers(function: TorchFunction, site: Site, error: Exception) -> str:
    """What to know about the Python numbers of a call that is no call for them."""
    pairs = zip(leaf_paths(site.structure), site.statics, strict=True)
    numbers = [
        f"{function.label(path)} {static.value!r}"
        for path, static in pairs
        if static is not None and type(static.value) in (int, float, complex)
    ]
    if not numbers or not isinstance(error, TypeError | AttributeError):
        return ""
    return (
        f"Python numbers reach torch as they are ({', '.join(numbers)}). Where it needs a tensor, "
        "pass `jax.numpy.asarray` of them.\n"
    )


def _check_fixed(
    function: TorchFunction, site: Site, in_specs: Sequence[Spec], outputs: Outputs, reason: str
) -> None:
    """Raises if the shapes of the outputs depend on the values of the inputs.

    Where an output is empty for zeros, XLA may see no need to call the function at all, and no
    check would ever tell that it is not empty for other values.
    """
    if all(spec.shape.count(0) == 0 for spec in outputs.specs):
        return
    try:
        others = _run(function, site, in_specs, _real_tensors, "one run on ones", fill=1)
    except Exception:  # zeros are valid where ones are not: as positions in an axis of size one
        return
    if others.specs != outputs.specs:
        raise ShapeError(
            f"the shapes that `{function.name}` returns depend on the values of its inputs "
            f"({reason.splitlines()[0]}), but in JAX they are fixed when a program is traced. "
            "Return a mask or `torch.where(...)` of fixed shape, or declare one shape by "
            "`output_shapes=` and pad to it."
        )


@contextlib.contextmanager
def _real_tensors() -> Iterator[Exposure]:
    with torch.random.fork_rng(), Exposure() as exposure:
        yield exposure


def _eager() -> contextlib.AbstractContextManager[Any]:
    """Compiled torch functions run uncompiled; if none was compiled, the compiler is not loaded."""
    if "torch._dynamo" in sys.modules:
        return torch.compiler.set_stance("force_eager")
    return contextlib.nullcontext()
