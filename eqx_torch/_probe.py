"""What a torch function returns, learnt from one run of it.

The run is on fake tensors, which have no values. Where the function needs some (`.item()`,
`.numpy()`), it is on those at hand, of example arguments or of an eager call, and where there are
none on zeros, with a warning. No tensor of a run survives it; what the run showed about writes to
inputs and random numbers goes to the findings.
"""

import contextlib
import dataclasses
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import jax
import torch

from ._dtypes import dtype_j2t, x64_enabled
from ._errors import EqxTorchError, InputError, ShapeError
from ._fakes import blank, blanks_serve, on_blanks, on_fakes, run_on_fakes
from ._program import (
    argument_name,
    drawing_from,
    hint_for,
    interposing,
    opened,
    Outputs,
    Site,
    Spec,
    TorchFunction,
)
from ._reachable import reaches_module
from ._trees import leaf_paths
from ._watch import Before, Exposure, Swaps, Watch


# The values of the arrays of a call, None if they are not known. To have them may take a copy.
Values: TypeAlias = Callable[[], Sequence[torch.Tensor] | None]


@dataclasses.dataclass(frozen=True)
class Question:
    """A call of which the outputs are to be found out.

    Attributes:
        in_specs: the shapes and dtypes that torch is given.
        of_shards: whether these are shards of larger arrays.
    """

    function: TorchFunction
    site: Site
    in_specs: tuple[Spec, ...]
    of_shards: bool = False

    @property
    def inputs(self) -> str:
        """The inputs by name, for messages."""
        shown = [f"{s.dtype}{list(s.shape)}" for s in self.in_specs]
        note = " (the shapes of one shard)" if self.of_shards else ""
        return self.site.described(shown) + note

    def dtypes(self) -> list[torch.dtype]:
        """What torch is given for each array."""
        pairs = zip(self.in_specs, self.site.wide, strict=True)
        return [wide or dtype_j2t(spec.dtype) for spec, wide in pairs]


@dataclasses.dataclass(frozen=True)
class _Way:
    """How to run a function: on which tensors, and where the tensors are that it makes."""

    source: str
    input: Callable[[Spec, torch.dtype, torch.device], torch.Tensor]
    mode: Callable[[torch.device], contextlib.AbstractContextManager[Exposure | None]]


def probe(question: Question, values: Values | None = None, reason: str = "") -> Outputs:
    """The outputs of a function for inputs of some shapes, by running it once.

    Args:
        question: the call.
        values: those at hand, None if there are none.
        reason: why the function does not run on tensors without values, if that is known.

    Raises:
        ShapeError: the function ran on no tensors of these shapes, or the result depends on values.
        OutputError: it returned something other than tensors.
    """
    function = question.function
    with function.lock_to_try() or contextlib.nullcontext():
        before = Before(function.code.python)
    refusal: Exception | None = None
    if not reason and not run_on_fakes(function.scripts):
        reason = "in TorchScript, `torch.tensor` takes no tensors without values beside it"
    if not reason and blanks_serve(_device()) and not function.scripts:
        outputs = _on_blanks(question, before)
        if outputs is not None:
            return outputs
    if not reason:
        try:
            return _run(question, _ON_FAKES, before)
        except EqxTorchError:
            raise
        except Exception as error:
            refusal = error.with_traceback(None)
            reason = _first_line(refusal)
    at_hand = values and values()
    try:
        if at_hand is not None:
            outputs = _run(question, _on_values(at_hand), before)
            return dataclasses.replace(outputs, by_values=reason)
        outputs = dataclasses.replace(_run(question, _ON_ZEROS, before), by_values=reason)
    except EqxTorchError:
        raise
    except Exception as error:
        raise _not_inferred(question, error, refusal, at_hand is not None) from error
    _check_fixed(question, outputs)
    warnings.warn(
        f"the output shapes of `{function.name}` were inferred by running it on zeros, "
        f"because it does not run on tensors without values: {reason}\n{_ZEROS_ADVICE}",
        stacklevel=3,
    )
    return outputs


_ZEROS_ADVICE = (
    "If they depend on values, wrap it with example arguments that have some, or declare them by "
    "`output_shapes=`, which saves this run too."
)


def _on_blanks(question: Question, before: Before) -> Outputs | None:
    """The outputs, None if they are to be found out in another way."""
    try:
        outputs = _run(question, _ON_BLANKS, before)
    except EqxTorchError:
        raise
    except Exception:
        return None
    return None if _may_be_empty(question, outputs) else outputs


def _run(question: Question, way: _Way, before: Before) -> Outputs:
    try:
        return _run_once(question, way, before)
    except Exception as error:
        if not question.function.asks_for_gradients(error):
            raise
    return _run_once(question, way, before)


def _run_once(question: Question, way: _Way, before: Before) -> Outputs:
    function, name = question.function, question.function.name
    with function.lock_to_try() or contextlib.nullcontext():
        watch = Watch()
        try:
            outputs, written, swaps = _watched(question, way, watch)
        except Exception as error:
            if way in (_ON_BLANKS, _ON_FAKES) and not isinstance(error, EqxTorchError):
                _forget_frames(error)
                before.end(watch, name)
            else:  # it is for the user, with the frames and all that they hold
                before.repair(watch)
            raise
        before.end(watch, name)
    function.findings.swaps |= swaps
    function.learn(question.site, question.in_specs, written, watch.random)
    return dataclasses.replace(outputs, source=way.source)


def _watched(question: Question, way: _Way, watch: Watch) -> tuple[Outputs, frozenset[int], bool]:
    function, site = question.function, question.site
    shares = not function.code.isolated and reaches_module(function.code.python)
    swaps = Swaps()
    with (
        site.ambient.in_force(),
        interposing(),
        drawing_from(watch.instead),
        function.code.trial(site, watch) as trial,
        way.mode(_device()) as exposure,
    ):
        pairs = zip(question.in_specs, question.dtypes(), strict=True)
        inputs = [way.input(spec, dtype, _device()) for spec, dtype in pairs]
        watch.made_by_hand(inputs)
        given = function.on_leaves(site, inputs) if function.findings.needs_gradients else inputs
        try:
            with watch, swaps if shares else contextlib.nullcontext():
                result = trial(given)
        finally:
            watch.undo()
        exposed = exposure.exposed if exposure else lambda _: False
        written = [i for i, x in enumerate(inputs) if watch.wrote(x) or exposed(x)]
    return _outputs(function, result), frozenset(written), swaps.any


def _zeros(spec: Spec, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.zeros(spec.shape, dtype=dtype, device=device)


@contextlib.contextmanager
def _with_values(device: torch.device) -> Iterator[Exposure]:
    # What is drawn on a CPU comes from a generator of the run's own.
    with torch.random.fork_rng(enabled=device.type == "cuda"), Exposure() as exposure:
        yield exposure


def _blank(spec: Spec, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    del device
    return blank(spec.shape, dtype)


_ON_BLANKS = _Way("one run on tensors without values", _blank, on_blanks)
_ON_FAKES = _Way("one run on tensors without values", _zeros, on_fakes)
_ON_ZEROS = _Way("one run on zeros", _zeros, _with_values)


def _on_values(values: Sequence[torch.Tensor]) -> _Way:
    rest = iter(values)

    def value(spec: Spec, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        del spec
        return next(rest).to(device, dtype, copy=True)

    return _Way("one run on values", value, _with_values)


def _forget_frames(error: Exception) -> None:
    """Takes from an error the frames that it has passed through, whose variables hold tensors."""
    error.__cause__ = error.__context__ = None
    error.with_traceback(None)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _outputs(function: TorchFunction, result: Any) -> Outputs:
    return Outputs(*opened(function, result), source="")


def _device() -> torch.device:
    on_gpu = jax.default_backend() == "gpu" and torch.cuda.is_available()
    return torch.device("cuda" if on_gpu else "cpu")


def _check_fixed(question: Question, outputs: Outputs) -> None:
    """Raises if an output that was empty for some values may not be empty for others.

    XLA sees no need to call a function whose outputs are all empty, so no check would ever tell.
    """
    if not _may_be_empty(question, outputs):
        return
    raise ShapeError(
        f"the shapes that `{question.function.name}` returns seem to depend on the values of its "
        f"inputs ({outputs.by_values}; for zeros it returns an empty tensor), but in JAX they "
        "are fixed when a program is traced. Return a mask or `torch.where(...)` of fixed shape, "
        "or pad to one shape. Wrap it with example arguments of which the values give that shape, "
        "or declare it by `output_shapes=`."
    )


def _may_be_empty(question: Question, outputs: Outputs) -> bool:
    """Whether an output is empty, and no input is to blame."""
    return not _without_elements(question) and any(0 in spec.shape for spec in outputs.specs)


def is_checked(question: Question, outputs: Outputs) -> bool:
    """Whether a call for which these outputs are expected tells if it has others."""
    empty = all(0 in spec.shape for spec in outputs.specs)
    return not empty or not outputs.by_values or _without_elements(question)


def _without_elements(question: Question) -> bool:
    return all(0 in spec.shape for spec in question.in_specs)


def _not_inferred(
    question: Question, error: Exception, refusal: Exception | None, on_values: bool
) -> EqxTorchError:
    """The error for a function that raised `error` on values, and `refusal` without."""
    function = question.function
    misfit = function.misfit(question.site)
    if misfit:
        return InputError(f"`{function.name}` was called with wrong arguments: {misfit}.")
    values = "the values at hand" if on_values else "zeros of these shapes"
    advice = _advice(question, error, refusal, on_values)
    return ShapeError(
        f"cannot infer what `{function.name}` returns for {question.inputs}: running it on "
        f"{values} raised {type(error).__name__}: {error}{advice}"
    )


def _advice(
    question: Question, error: Exception, refusal: Exception | None, on_values: bool
) -> str:
    """What to write instead, on a line of its own; nothing if torch's message has to do."""
    named = list(zip(question.site.labels, question.dtypes(), strict=True))
    hint = hint_for(error, named, x64_enabled())
    if hint:
        return f"\n{hint}"
    numbers = _numbers(question.site)
    if numbers and isinstance(error, TypeError | AttributeError):
        return (
            f"\nPython numbers reach torch as they are ({numbers}). Where it needs a tensor, pass "
            "`jax.numpy.asarray` of them."
        )
    if _passed(error, "torch.distributions"):
        return (
            "\nDistributions check the values of their arguments when they are made: pass "
            "`validate_args=False`, or wrap the function with example arguments that are valid, "
            "`torch2jax(fn, *examples)`."
        )
    if on_values or type(error) is type(refusal):  # then it is none of the zeros that is wrong
        return ""
    return (
        "\nIf zeros are no good inputs, wrap the function with example arguments that are, which "
        "it is then run on: `torch2jax(fn, *examples)`. Or declare the outputs: `output_shapes=` "
        "takes a tree of `jax.ShapeDtypeStruct`, and the function is then not run to infer them."
    )


def _passed(error: Exception, *packages: str) -> bool:
    """Whether an error has passed through code of one of these packages."""
    frames = traceback.walk_tb(error.__traceback__)
    modules = [frame.f_globals.get("__name__", "") + "." for frame, _ in frames]
    return any(module.startswith(f"{package}.") for module in modules for package in packages)


def _numbers(site: Site) -> str:
    """The Python numbers of a call, by name."""
    pairs = zip(leaf_paths(site.structure), site.statics, strict=True)
    return ", ".join(
        f"{argument_name(path, site.handed)} {static.value!r}"
        for path, static in pairs
        if static is not None and type(static.value) in (int, float, complex)
    )
