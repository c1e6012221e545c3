"""The torch function at the bottom of a program, and what running it has taught about it.

A `TorchFunction` is `Code` with the options that belong to it. `Plain` is the code of a function
that a user has written; that of a module's method, which borrows a copy of the module for each
call, is in `_module.function`.

A forward that differentiates by its own parameters (the inner loop of MAML) or registers hooks on
what it has computed finds, in torch, that parameters require gradients. Here inputs do only while a
derivative is taken. So where torch says that this is missing, a function is run again on leaves
that require them, and from then on at once.
"""

import contextlib
import dataclasses
import functools
import inspect
import threading
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, Literal, Protocol, TypeAlias
from weakref import WeakKeyDictionary

import torch

from .._reachable import reachable, reaches_module, scripts_near, seems_to_swap, Ways, ways_to_write
from .._trees import Structure
from .._watch import Before, Watch
from .base import Spec, Tensors
from .interposed import is_narrow
from .site import Site
from .tape import Kept


VmapMethod: TypeAlias = Literal["torch", "sequential", "broadcast_all", "expand_dims"]
Residuals: TypeAlias = Literal["tape", "recompute"]
Lock: TypeAlias = contextlib.AbstractContextManager[Any]

Run: TypeAlias = Callable[[Tensors, bool], Any]

PROCESS_LOCK = threading.RLock()

_NO_GRADIENT = (
    "does not require grad",
    "doesn't require gradient",
    "has requires_grad=False",
)


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


class Code(Protocol):
    """What a `TorchFunction` runs.

    Attributes:
        name: what messages and jaxprs call it.
        python: the function that the user has written.
        near: where to look for what it may use.
        num_own: how many of the inputs are not among the user's arguments; they come first.
        copies: the inputs that it copies before it writes to them.
        isolated: whether each call borrows modules that no other call can see, until `release`.
    """

    name: str
    python: Callable[..., Any]
    near: Any
    num_own: int
    copies: range
    isolated: bool

    def prepared(self, site: Site, learnt: Learnt) -> Run:
        """The function of the inputs of calls at one site, prepared for many of them.

        Its second argument says whether a transformation of torch.func is active.
        """
        ...

    def trial(
        self, site: Site, watch: Watch
    ) -> contextlib.AbstractContextManager[Callable[[Tensors], Any]]:
        """The function of the inputs, for one run under `watch`."""
        ...

    def warn(self, site: Site, draws: Sequence[str]) -> None:
        """Warns of what the last trial has shown, among it where it draws random numbers."""
        ...

    def release(self) -> None:
        """Ends what calls of this thread have left open for their backward."""
        ...

    def keep(self) -> Kept:
        """Keeps what calls of this thread have left open, for a backward in a later call."""
        ...

    def output_label(self, path: str) -> str:
        """How messages call the output at a path; nothing if it is the only one."""
        ...

    def of_result(self, structure: Structure) -> Structure:
        """The structure of what the user's function returns, which all outputs may exceed."""
        ...


class Plain:
    """The code of a function; see `Code`."""

    num_own = 0
    copies = range(0)
    isolated = False

    def __init__(self, python: Callable[..., Any], name: str) -> None:
        self.python = self.near = python
        self.name = name
        self._changed: dict[str, None] = {}  # buffers, by the last trial
        self._told = False

    def prepared(self, site: Site, learnt: Learnt) -> Run:
        del learnt
        python, keeping = self.python, True

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

    @contextlib.contextmanager
    def trial(self, site: Site, watch: Watch) -> Iterator[Callable[[Tensors], Any]]:
        def run(arrays: Tensors) -> Any:
            args, kwargs = site.arguments(arrays)
            result = self.python(*args, **kwargs)
            modules = [m for m in reachable(self.near) if isinstance(m, torch.nn.Module)]
            named = [item for module in reversed(modules) for item in module.named_buffers()]
            names = {id(buffer): name for name, buffer in named if watch.wrote(buffer)}
            self._changed = dict.fromkeys(names.values())
            return result

        yield run

    def warn(self, site: Site, draws: Sequence[str]) -> None:
        if draws:
            warnings.warn(
                f"`{self.name}` draws random numbers from torch's own generator: others on each "
                "call, and on each computation of the forward by a backward. Pass random arrays "
                "as arguments, or convert a module by `from_torch` and call it with `key=`.",
                stacklevel=3,
            )
        if self._changed and not self._told:
            self._told = True
            warnings.warn(
                f"`{self.name}` changes the buffers {', '.join(self._changed)} of a torch module, "
                "which JAX knows nothing of: in place, on each computation of the forward, those "
                "by a backward included. Convert the module, so that they are state: `model, "
                "state = eqx.nn.make_with_state(from_torch)(module)`; or call its `eval()` first.",
                stacklevel=3,
            )

    def release(self) -> None:
        return

    def keep(self) -> Kept:
        return Kept()

    def output_label(self, path: str) -> str:
        return f"output{path}" if path else ""

    def of_result(self, structure: Structure) -> Structure:
        return structure


class TorchFunction:
    """Code that runs on torch tensors, with the options that belong to it.

    Equal where code and options are.

    Attributes:
        name: that of the code.
        lock: held while it or one of its derivatives runs, if the user has asked for one.
        depth: how often it may be differentiated, None for any number of times.
        vmap_method: how a batch of it is computed.
        findings: what is known about it.
        residuals: whether forwards keep their graph for the backward, or backwards recompute.
        compiled: weakly, its jitted programs.
    """

    def __init__(
        self,
        code: Code,
        *,
        lock: Lock | None = None,
        depth: int | None = None,
        vmap_method: VmapMethod = "torch",
        residuals: Residuals = "tape",
        compiled: Compiled | None = None,
    ) -> None:
        self.code = code
        self.name = code.name
        self.lock = lock
        self.depth = depth
        self.vmap_method: VmapMethod = vmap_method
        self.residuals: Residuals = residuals
        self.findings = Findings()
        self.compiled = (lambda: None) if compiled is None else weakref.ref(compiled)
        self._key: Hashable = code, lock, depth, vmap_method, residuals

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, TorchFunction) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self.code)

    def learn(
        self, site: Site, in_specs: tuple[Spec, ...], written: frozenset[int], draws: Sequence[str]
    ) -> None:
        """Takes note of what a trial has shown."""
        learnt = self.findings.at(site, in_specs)
        learnt.written = written.difference(self.code.copies)
        learnt.draws = tuple(dict.fromkeys(draws))
        self.code.warn(site, draws)

    def asks_for_gradients(self, error: Exception) -> bool:
        """Whether to run it again after this error, now with what `on_leaves` makes."""
        findings = self.findings
        if findings.needs_gradients or not any(text in str(error) for text in _NO_GRADIENT):
            return False
        findings.needs_gradients = True
        return True

    def on_leaves(self, site: Site, tensors: Tensors) -> Tensors:
        """The inputs as it has to be given them where it has asked for gradients."""
        return [
            x.detach().requires_grad_()
            if not x.requires_grad
            and (x.is_floating_point() or x.is_complex())
            and site.may_require_gradient(i)
            else x
            for i, x in enumerate(tensors)
        ]

    @functools.cached_property
    def ways_to_write(self) -> Ways:
        """How the code of it and of its derivatives could write to what it is given."""
        return ways_to_write(self.code.python)

    def may_write(self, count: int) -> frozenset[int]:
        """Which of its inputs, `count` in all, the code could write to on some call."""
        ways = self.ways_to_write
        first = 0 if ways.unseen or ways.unrecorded else self.code.num_own
        return frozenset(range(first, count) if ways.unseen or ways.in_place else ())

    def lock_to_run(self) -> Lock | None:
        """What is held while it or one of its derivatives runs."""
        if self.lock is not None or self.code.isolated:
            return self.lock
        swaps = self.findings.swaps or seems_to_swap(self.code.python)
        return PROCESS_LOCK if swaps else None

    def lock_to_try(self) -> Lock | None:
        """What is held while a trial runs, lest calls replace what it reads in a module."""
        if self.lock is not None or self.code.isolated:
            return self.lock
        shares = reaches_module(self.code.python) or seems_to_swap(self.code.python)
        return PROCESS_LOCK if shares else None

    @functools.cached_property
    def holds_narrow(self) -> bool:
        """Whether there are integers of less than 64 bits among the tensors near it."""
        near = reachable(self.code.near)
        return any(isinstance(x, torch.Tensor) and is_narrow(x.dtype) for x in near)

    @functools.cached_property
    def scripts(self) -> tuple[torch.jit.ScriptModule, ...]:
        """The TorchScript modules near it, of which torch knows less than of others.

        The derivatives of `torch.func` through a scripted module are wrong. And where one makes a
        tensor of numbers, a run on fake tensors ends the process.
        """
        return scripts_near(self.code.near)

    @functools.cached_property
    def hooks_gradients(self) -> bool:
        """Whether hooks may change gradients on their way.

        In a batch of `torch.func` nothing seems to require gradients, so that hooks of modules are
        passed by, and code that asks sets none.
        """
        near = (x for x in reachable(self.code.near) if isinstance(x, torch.nn.Module))
        modules = (module for x in near for module in x.modules())
        hooked = any(m._backward_hooks or m._backward_pre_hooks for m in modules)
        return hooked or self.ways_to_write.hooks

    def must_loop(self, site: Site, in_axes: Sequence[int | None]) -> bool:
        """Whether a batch with these axes of the inputs has to be computed one by one.

        One with a seed for each member is drawn member by member.
        """
        keyed = site.seed is not None and in_axes[site.seed] is not None
        return keyed or bool(self.scripts) or self.hooks_gradients

    def misfit(self, site: Site) -> str:
        """What is wrong with the number or the names of a call's arguments; nothing if right."""
        args, kwargs = site.arguments([None] * (len(site.labels) - site.num_own))
        try:
            signature = inspect.signature(self.code.python)
        except ValueError:  # of what is not written in Python
            return ""
        try:
            signature.bind(*args[site.handed :], **kwargs)
        except TypeError as error:
            return str(error)
        return ""
