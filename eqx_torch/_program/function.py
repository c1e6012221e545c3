"""The torch function at the bottom of a program, and what running it has taught about it."""

import contextlib
import dataclasses
import functools
import inspect
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias
from weakref import WeakKeyDictionary

import torch

from .._reachable import reachable, reaches_module, scripts_near, seems_to_swap
from .._trees import Structure
from .._watch import Before, Watch
from .._writers import Ways, ways_to_write
from .base import Spec, Tensors
from .interposed import is_narrow
from .site import argument_name, Site
from .tape import Kept


VmapMethod: TypeAlias = Literal["torch", "sequential", "broadcast_all", "expand_dims"]
Residuals: TypeAlias = Literal["tape", "recompute"]
Lock: TypeAlias = contextlib.AbstractContextManager[Any]

PROCESS_LOCK = threading.RLock()


@dataclasses.dataclass(frozen=True)
class Outputs:
    """What a function returns, and who says so.

    Attributes:
        source: who, for messages.
        declared: whether the user says it, of the global arrays; else it was found out, for arrays
            of the very shapes that torch is given, which may be shards.
        by_values: why a run on values had to show it, so that other values may give other shapes;
            nothing if none had to.
    """

    specs: tuple[Spec, ...]
    structure: Structure
    source: str
    declared: bool = False
    by_values: str = ""


@dataclasses.dataclass(eq=False)
class Learnt:
    """What runs have shown of the calls at one site with inputs of these shapes and dtypes.

    Attributes:
        outputs: what the function returns, with 64-bit types in JAX and without.
        written: the inputs that it writes to, None if that is not known.
        draws: the places where it draws random numbers, None if that is not known.
        habits: what calls leave behind in a module, by whether torch.func transforms them.
    """

    outputs: dict[bool, Outputs] = dataclasses.field(default_factory=dict)
    written: frozenset[int] | None = None
    draws: tuple[str, ...] | None = None
    habits: dict[bool, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(eq=False)
class LearntBackward:
    """What runs of one pullback have shown.

    Attributes:
        writes: whether it writes to what it is given, None if that is not known.
        extends: whether it can extend the graph of its forward, None if that is not known.
        plain: whether that graph consisted of torch's own nodes, None if that is not known.
        symmetric: of the tangents of a pullback, whether they are cotangents of it too, None if
            that is not known.
    """

    writes: bool | None = None
    extends: bool | None = None
    plain: bool | None = None
    symmetric: bool | None = None


@dataclasses.dataclass(eq=False)
class Findings:
    """What runs of a function have shown. Invariant: dropping any of it costs time, never truth.

    This is the one place for it. What a function does may depend on the shapes and dtypes of its
    inputs (`x.float()` is `x` itself, or a copy), so that is kept for each call site and these; of
    a backward, for each program, which has them too.

    Attributes:
        learnt: of each call site and input specs.
        backwards: of each pullback.
        forward_mode: for each program that is computed in forward mode, whether torch can.
        swaps: whether it has put tensors in the place of a module's parameters.
        tried_alone: for each program that is batched, the order of derivatives, those that are
            taken of it included, to which one member was run without a batch.
        needs_gradients: whether it runs only on inputs that require gradients.
        grad_is_refused: whether `torch.autograd.grad` was refused where `backward` is not.
        batching_fails: whether `torch.func.vmap` has failed where a loop worked.
    """

    learnt: dict[tuple[Site, tuple[Spec, ...]], Learnt] = dataclasses.field(default_factory=dict)
    backwards: WeakKeyDictionary[Any, LearntBackward] = dataclasses.field(
        default_factory=WeakKeyDictionary
    )
    forward_mode: WeakKeyDictionary[Any, bool] = dataclasses.field(
        default_factory=WeakKeyDictionary
    )
    swaps: bool = False
    tried_alone: WeakKeyDictionary[Any, int] = dataclasses.field(default_factory=WeakKeyDictionary)
    needs_gradients: bool = False
    grad_is_refused: bool = False
    batching_fails: bool = False

    def of_backward(self, pullback: Any) -> LearntBackward:
        """What is known of a pullback, to be updated in place."""
        return self.backwards.setdefault(pullback, LearntBackward())

    def at(self, site: Site, in_specs: tuple[Spec, ...]) -> Learnt:
        """What is known of such calls, to be updated in place."""
        return self.learnt.setdefault((site, in_specs), Learnt())


class Compiled:
    """The jitted forms of a function's programs, for calls outside of `jax.jit`.

    Invariant: owned by what the user holds (the wrapped function), never by a program. A program
    that owned it would keep its own cache entry alive for ever, since JAX's caches own programs.
    """

    def __init__(self) -> None:
        self.by_program: dict[Any, Callable[..., Any]] = {}


class TorchFunction:
    """A Python function of torch tensors, with the options that belong to it.

    Compares by identity; a subclass whose instances can be compared by value may do so.

    Attributes:
        name: what messages and jaxprs call it.
        lock: held while it or one of its derivatives runs, if the user has asked for one.
        depth: how often it may be differentiated, None for any number of times.
        vmap_method: how a batch of it is computed.
        findings: what is known about it.
        residuals: whether forwards keep their graph for the backward, or backwards recompute.
        compiled: weakly, its jitted programs.
        randomness: what `torch.func.vmap` makes of random numbers.
        borrows: whether calls hold something that `release` ends.
        isolated: whether each call has modules of its own.
        own_arguments: how many of the positional arguments are not the user's.
        own_inputs: how many of the inputs are not the user's; they come first.
    """

    randomness = "different"
    borrows = False
    isolated = False
    own_arguments = 0
    own_inputs = 0

    def __init__(
        self,
        python: Callable[..., Any],
        *,
        name: str,
        lock: Lock | None = None,
        depth: int | None = None,
        vmap_method: VmapMethod = "torch",
        residuals: Residuals = "tape",
        compiled: Compiled | None = None,
    ) -> None:
        self.python = python
        self.name = name
        self.lock = lock
        self.depth = depth
        self.vmap_method: VmapMethod = vmap_method
        self.residuals: Residuals = residuals
        self.findings = Findings()
        self.compiled = (lambda: None) if compiled is None else weakref.ref(compiled)

    @contextlib.contextmanager
    def trial(self, watch: Watch) -> Iterator[Callable[[Sequence[Any], Mapping[str, Any]], Any]]:
        """The function, for one run under `watch`."""
        del watch
        yield lambda args, kwargs: self.python(*args, **kwargs)

    def learn(
        self, site: Site, in_specs: tuple[Spec, ...], written: frozenset[int], draws: Sequence[str]
    ) -> None:
        """Takes note of what a trial has shown."""
        learnt = self.findings.at(site, in_specs)
        learnt.written, learnt.draws = written, tuple(draws)
        if draws:
            warnings.warn(
                f"`{self.name}` draws random numbers from torch's own generator: others on each "
                "call, and on each computation of the forward by a backward. Pass random arrays "
                "as arguments, or convert a module by `from_torch` and call it with `key=`.",
                stacklevel=2,
            )

    def release(self) -> None:
        """Ends what calls of this thread have left open for their backward."""
        return

    def keep(self) -> Kept:
        """Keeps what calls of this thread have left open, for a backward in a later call."""
        return Kept()

    @functools.cached_property
    def ways_to_write(self) -> Ways:
        """How the code of it and of its derivatives could write to what it is given."""
        return ways_to_write(self.python)

    def may_write(self, count: int) -> frozenset[int]:
        """Which of its inputs, `count` in all, the code could write to on some call."""
        ways = self.ways_to_write
        first = 0 if ways.unseen or ways.unrecorded else self.own_inputs
        return frozenset(range(first, count) if ways.unseen or ways.in_place else ())

    def lock_to_run(self) -> Lock | None:
        """What is held while it or one of its derivatives runs."""
        if self.lock is not None or self.isolated:
            return self.lock
        return PROCESS_LOCK if self.findings.swaps or seems_to_swap(self.python) else None

    def lock_to_try(self) -> Lock | None:
        """What is held while a trial runs, lest calls replace what it reads in a module."""
        if self.lock is not None or self.isolated:
            return self.lock
        shares = reaches_module(self.python) or seems_to_swap(self.python)
        return PROCESS_LOCK if shares else None

    def draws_at(self, site: Site) -> bool:
        """Whether it is given at this site what to draw random numbers from."""
        del site
        return False

    @functools.cached_property
    def holds_narrow(self) -> bool:
        """Whether there are integers of less than 64 bits among the tensors near it."""
        near = reachable(self.python)
        return any(isinstance(x, torch.Tensor) and is_narrow(x.dtype) for x in near)

    @functools.cached_property
    def scripts(self) -> tuple[torch.jit.ScriptModule, ...]:
        """The TorchScript modules near it, of which torch knows less than of others.

        The derivatives of `torch.func` through a scripted module are wrong. And where one makes a
        tensor of numbers, a run on fake tensors ends the process.
        """
        return scripts_near(self.python)

    def must_loop(self, site: Site, in_axes: Sequence[int | None]) -> bool:
        """Whether a batch with these axes of the inputs has to be computed one by one."""
        del site, in_axes
        return bool(self.scripts)

    def label(self, path: str) -> str:
        """How messages call the argument at a path: `[0][1]['a']` is in the second positional."""
        return argument_name(path)

    def described(self, site: Site, inputs: Sequence[str]) -> str:
        """The inputs of a call by name, for messages, those that the user passed first."""
        pairs = zip(site.paths, inputs, strict=True)
        named = [f"{self.label(path)} {shown}" for path, shown in pairs]
        named = [*named[self.own_inputs :], *named[: self.own_inputs]]
        rest = f", {len(named) - 8} more" if len(named) > 8 else ""
        return ", ".join(named[:8]) + rest if named else "no arrays"

    def may_require_gradient(self, i: int) -> bool:
        """Whether the input `i`, of a floating dtype, may require a gradient in torch."""
        del i
        return True

    def misfit(self, site: Site) -> str:
        """What is wrong with the number or the names of a call's arguments; nothing if right."""
        args, kwargs = site.arguments([None] * len(site.paths))
        try:
            signature = inspect.signature(self.python)
        except ValueError:  # of what is not written in Python
            return ""
        try:
            signature.bind(*args[self.own_arguments :], **kwargs)
        except TypeError as error:
            return str(error)
        return ""

    def output_label(self, path: str) -> str:
        """How messages call the output at a path; nothing if it is the only one."""
        return f"output{path}" if path else ""

    def of_result(self, structure: Structure) -> Structure:
        """The structure of what the user's function returns, which all outputs may exceed."""
        return structure

    def prepared(self, site: Site, learnt: Learnt) -> Callable[[Tensors, bool], Any]:
        """The function of the arrays of a call at one site, prepared for many calls.

        Its second argument says whether a transformation of torch.func is active.
        """

        python = self.python

        keeping = True

        def call(arrays: Tensors, functional: bool) -> Any:
            nonlocal keeping
            args, kwargs = site.arguments(arrays)
            if not (functional and keeping):
                return python(*args, **kwargs)
            # Wrappers of torch.func die with the transformation, so no cache must keep one.
            # To look for them takes long, and one look tells whether the function has a cache.
            before = Before(python)
            try:
                return python(*args, **kwargs)
            finally:
                keeping = before.take_out_wrappers()

        def call_on_arrays(arrays: Tensors, functional: bool) -> Any:
            return call(arrays, True) if functional else python(*arrays)

        return call_on_arrays if site.is_positional else call
