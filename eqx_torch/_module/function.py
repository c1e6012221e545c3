"""A module's method as the code of a torch function.

Its inputs are the parameters, the changing buffers and, where it draws random numbers, a seed; then
those of the method. It returns a tuple of the method's result and each of the new buffers. What a
call borrows (a skeleton, a random generator) it holds until the program it is part of is done: the
backward of `torch.utils.checkpoint`, of hooks and of adjoint solvers reads the module again, and
must find the parameters of this very call.
"""

import contextlib
import functools
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from .._errors import ModuleError
from .._program import (
    Guard,
    Kept,
    Learnt,
    Own,
    own_generator,
    Run,
    Site,
    Spec,
    Tensors,
)
from .._trees import Structure
from .._watch import Draws, storage_key, Watch
from .blueprint import Blueprint, Skeleton
from .edits import check_generator, EditedRun, Edits
from .layers import projection
from .rng import resumed, seeded
from .traces import FlagReads, GeneratorState, Reads, stale_tensor


SEED = Spec((2,), np.dtype("uint32"))

_CPU = torch.device("cpu")
_UNCHANGED = contextlib.nullcontext()
_NO_EDITS = Edits()


class ModuleCode:
    """See the module's docstring. Equal where blueprint, method and edits are.

    Attributes:
        changed_state: the buffers that the last trial changed.
        tells: whether it warns of what calls leave behind.
    """

    isolated = True

    def __init__(self, blueprint: Blueprint, method: str, edits: Edits = _NO_EDITS) -> None:
        self.blueprint = blueprint
        self.method = method
        self.edits = edits
        self.name = type(blueprint.module).__name__
        self.python = getattr(blueprint.module, method)
        self.near = blueprint.module
        self._key = blueprint, method, edits
        self.num_own = len(blueprint.parameters) + len(blueprint.state)
        self.copies = range(len(blueprint.parameters), self.num_own)
        self.changed_state: set[str] = set()
        self.tells = True
        self._held = _Held()
        self._quiet: set[bool] = set()
        self._left: tuple[Any, ...] = ((), (), (), ())  # by the last trial
        self._told: set[str] = set()
        self._reads_flags = False  # whether its code asks if parameters require gradients

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, ModuleCode) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @functools.cached_property
    def own(self) -> dict[tuple[bool, bool], Own]:
        """The inputs before those of the method, by whether it is evaluated and has a seed."""
        names, parameters = self.blueprint.names, enumerate(self.blueprint.parameters)
        labels = tuple(f"parameter {name}" for name in names.parameters)
        labels += tuple(f"buffer {name}" for name in names.state)
        trained = frozenset(i for i, p in parameters if p.requires_grad)
        return {
            (inference, seeded): Own(
                (*labels, "key") if seeded else labels,
                trained,
                len(labels) if seeded else None,
                inference,
                handed=int(bool(self.edits)),  # what one segment hands to the next
            )
            for inference in (False, True)
            for seeded in (False, True)
        }

    def prepared(self, site: Site, learnt: Learnt) -> Run:
        own = site.own
        assert own is not None
        count, end_of_state, first = self.copies.start, self.num_own, len(own)
        seed, inference, habits = own.seed, own.inference, learnt.habits

        def call(arrays: Tensors, functional: bool) -> Any:
            pool = self.blueprint.pool(arrays[0].device if arrays else _CPU)
            skeleton = pool.borrow()
            skeleton.set_mode(inference)
            args, kwargs = site.arguments(arrays[first:])
            if seed is not None:
                check_generator(self.name, self.edits.cuts, arrays[seed].device)
            parameters = arrays[:count]
            tried = learnt.written is not None
            if self._reads_flags:
                self._check_flags(parameters, functional)
            if self._reads_flags or not (tried or functional):
                parameters = self._flagged(parameters)
            # To look for what a call leaves behind takes long, and one look tells whether it does.
            usual = habits.get(functional)
            seen = () if functional else parameters
            look = _Look(skeleton, seen) if usual is None or usual else None
            skeleton.bind(parameters, [b.clone() for b in arrays[count:end_of_state]])
            self._held.items.append(skeleton.unbind)
            drawing = self._unseeded(inference) if seed is None else self._seeding(arrays[seed])
            reads = skeleton.reads() if usual is None and not tried else None
            flags = FlagReads(parameters) if reads else _UNCHANGED
            with drawing, reads or _UNCHANGED, flags:
                mode = inference, seed is not None
                result = self._run(skeleton, args, kwargs, mode, self._held.items.append)
            if isinstance(flags, FlagReads) and flags.any:
                self._reads_flags = True
                self._check_flags(parameters, functional)
            new_state = skeleton.state()
            changed = skeleton.changed_constants()
            if changed:
                raise ModuleError(self._changed_constants(changed))
            if look is None:
                self._held.items.append(lambda: pool.give_back(skeleton))
                return result, *new_state
            written = look.written() if usual is None and not functional else []

            def end() -> None:
                changes = skeleton.trace.changes(usual)
                numbers = skeleton.trace.numbers(changes)
                skeleton.trace.put_back(changes)
                if not changes.written:
                    pool.give_back(skeleton)
                if usual is None:
                    habits[functional] = changes
                    # Where there was no trial, the first run was on copies and compared them.
                    compared = () if tried else self._written(learnt)
                    untried = [n for n in numbers if _is_untried(n[-1], tried, arrays)]
                    names = dict.fromkeys([*written, *compared])
                    self._tell(names, untried, changes.written, self._stale(reads))

            self._held.items.append(end)
            return result, *new_state

        return call

    def release(self) -> None:
        """Gives back what the calls of this thread have borrowed."""
        _end(self._held.items)
        _end(self._held.random)

    def keep(self) -> Kept:
        items, generator = self._held.items[:], own_generator()
        self._held.items.clear()
        guard: Guard = contextlib.nullcontext
        if generator is not None:
            guard = functools.partial(resumed, generator, self._held.device)
        _end(self._held.random)
        return Kept(guard, lambda: _end(items))

    def output_label(self, path: str) -> str:
        index, _, rest = path.removeprefix("[").partition("]")
        if index == "0":
            return f"output{rest}" if rest else ""
        return f"buffer {self.blueprint.names.state[int(index) - 1]}"

    def of_result(self, structure: Structure) -> Structure:
        return structure.first()

    @contextlib.contextmanager
    def trial(self, site: Site, watch: Watch) -> Iterator[Callable[[Tensors], Any]]:
        own = site.own
        assert own is not None
        skeleton = self.blueprint.pool(_CPU).new()
        modes = contextlib.ExitStack()

        def run(arrays: Tensors) -> Any:
            parameters = arrays[: self.copies.start]
            state = arrays[self.copies.start : self.num_own]
            args, kwargs = site.arguments(arrays[len(own) :])
            skeleton.set_mode(own.inference)
            skeleton.place_constants(arrays[0].device if arrays else _CPU)
            _LayerNames(skeleton.module, watch)
            look = _Look(skeleton, parameters)
            modes.enter_context(_unoptimised(skeleton.module))
            skeleton.bind(parameters, state)
            mode, edited = (own.inference, False), list[Callable[[], None]]()
            with skeleton.reads() as reads, FlagReads(parameters) as flags:
                result = self._run(skeleton, args, kwargs, mode, edited.append, True)
            self._reads_flags = self._reads_flags or flags.any
            _end(edited)
            new_state = skeleton.state()
            triples = zip(self.blueprint.names.state, state, new_state, strict=True)
            self.changed_state = {
                name for name, old, new in triples if new is not old or watch.wrote(old)
            }
            replaced = skeleton.changed_constants()
            pairs = zip(self.blueprint.names.constants, skeleton.constants, strict=True)
            changed = [name for name, c in pairs if watch.wrote(c) or name in replaced]
            if changed:
                raise ModuleError(self._changed_constants(changed))
            pairs = zip(self.blueprint.names.parameters, parameters, strict=True)
            written = [name for name, p in pairs if watch.wrote(p)]
            written += [name for name in look.written() if name not in written]
            skeleton.unbind()
            changes = skeleton.trace.changes()
            numbers = skeleton.trace.numbers(changes)
            if numbers:  # some are set once for all, others are another number with every call
                skeleton.bind(parameters, state)
                with contextlib.suppress(Exception):
                    self._run(skeleton, args, kwargs, mode, edited.append)
                _end(edited)
                skeleton.unbind()
                again = {path: new for path, _, new in skeleton.trace.numbers(changes)}
                numbers = [number for number in numbers if again.get(number[0]) != number[2]]
            self._left = written, numbers, changes.written, self._stale(reads)
            return result, *new_state

        with modes:
            yield run

    def warn(self, site: Site, draws: Sequence[str]) -> None:
        del draws  # with them calls need a key
        assert site.own is not None
        self._quiet.add(site.own.inference)
        self._tell(*self._left)

    def _run(
        self,
        skeleton: Skeleton,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        mode: tuple[bool, bool],
        at_end: Callable[[Callable[[], None]], None],
        tried: bool = False,
    ) -> Any:
        call = (
            skeleton.module if self.method == "forward" else getattr(skeleton.module, self.method)
        )
        if not self.edits:
            return call(*args, **kwargs)
        (log, values), *args = args
        run = EditedRun(self.name, self.edits, skeleton.module, *mode, log, values, tried)
        at_end(run.remove)
        before = [(b, b._version) for b in skeleton.state()]
        result = run.run(functools.partial(call, *args, **kwargs))
        if result[0]:
            triples = zip(self.blueprint.names.state, before, skeleton.state(), strict=True)
            run.check_state(
                [n for n, (old, v), new in triples if new is not old or new._version != v]
            )
        return result

    def _flagged(self, parameters: Tensors) -> list[torch.Tensor]:
        """The parameters, requiring gradients where torch's do."""
        pairs = zip(parameters, self.blueprint.parameters, strict=True)
        return [
            p.detach().requires_grad_() if own.requires_grad and not p.requires_grad else p
            for p, own in pairs
        ]

    def _check_flags(self, parameters: Tensors, functional: bool) -> None:
        """Raises where code that asks if parameters require gradients would be told otherwise.

        Raises:
            ModuleError: one is frozen in torch, but the call is differentiated with respect to it.
            RuntimeError: a transformation of torch.func is active, which allows no such flags.
        """
        if functional:
            raise RuntimeError("the code asks whether parameters require gradients")
        triples = zip(
            self.blueprint.names.parameters, parameters, self.blueprint.parameters, strict=True
        )
        frozen = [n for n, p, own in triples if p.requires_grad and not own.requires_grad]
        if frozen:
            raise ModuleError(_frozen(self.name, first(frozen)))

    def _unseeded(self, inference: bool) -> contextlib.AbstractContextManager[None]:
        return _UNCHANGED if inference in self._quiet else self._tried(inference)

    @contextlib.contextmanager
    def _tried(self, inference: bool) -> Iterator[None]:
        """What was declared was not tried: its first run in each mode tells whether it draws."""
        with Draws() as draws:
            yield
        if draws.random:
            raise ModuleError(missing_key(self.name, [], inference))
        self._quiet.add(inference)

    def _written(self, learnt: Learnt) -> list[str]:
        """The parameters that calls are known to write to."""
        written = learnt.written or frozenset()
        return [name for i, name in enumerate(self.blueprint.names.parameters) if i in written]

    def _tell(
        self,
        written: Iterable[str],
        numbers: Sequence[tuple[str, Any, Any]],
        loose: Sequence[str],
        stale: Sequence[str],
    ) -> None:
        """Warns, once, of what torch would keep from one call to the next and JAX does not."""
        texts = {path: stale_tensor(self.name, path) for path in stale}
        texts |= {name: self._written_parameter(name) for name in written}
        texts |= {number[0]: _changed_number(self.name, *number) for number in numbers}
        texts |= {path: _written_tensor(self.name, path) for path in loose}
        for path, text in texts.items():
            if self.tells and path not in self._told:
                self._told.add(path)
                warnings.warn(text, stacklevel=2)

    def _written_parameter(self, name: str) -> str:
        layer = dict(self.blueprint.module.named_modules()).get(name.rpartition(".")[0])
        return (
            f"the forward of `{self.name}` writes to its parameter {name}, but a call cannot "
            "change a model in JAX: it computes with what torch would write, and the next call "
            "starts from the old values again. Write them in the training loop, after "
            f'`optax.apply_updates`: `model = eqx.tree_at(lambda m: m.params["{name}"], model, '
            f"replace_fn={projection(layer)})`."
        )

    def _stale(self, reads: Reads | None) -> list[str]:
        return [] if reads is None else reads.stale(self.python, self.blueprint.loose)

    def _seeding(self, seed: torch.Tensor) -> contextlib.AbstractContextManager[None]:
        self._held.device = seed.device
        return seeded(seed, self._held.random.append)

    def _changed_constants(self, names: Sequence[str]) -> str:
        listed = ", ".join(f'"{name}"' for name in names)
        every = ", ".join(f'"{name}"' for name in (*self.blueprint.names.state, *names))
        return (
            f"`{self.name}` changes its buffers {listed} in `{self.method}`, but they were taken "
            f"for constants. Convert it with `state=[{every}]`, or with example arguments so that "
            "this is inferred: "
            "`model, state = eqx.nn.make_with_state(from_torch)(module, *example_args)`."
        )


def missing_key(name: str, layers: Sequence[str], inference: bool) -> str:
    """The message for a call without a key of a module that draws random numbers."""
    where = f" in {first(layers)}" if layers else ""
    mode = (
        "" if inference else ", or `model = eqx.nn.inference_mode(model)` if this is not training"
    )
    return (
        f"the forward of `{name}` draws random numbers{where}, but was called "
        f"without `key=`. Pass `key=jax.random.key(0)` (split it for each call){mode}."
    )


def first(names: Sequence[str]) -> str:
    """The names, or the first of them if there are many."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


class _Look:
    """A call of which is to be seen what it leaves behind; made before its skeleton is bound."""

    def __init__(self, skeleton: Skeleton, parameters: Sequence[torch.Tensor]) -> None:
        skeleton.trace  # noqa: B018
        self._skeleton = skeleton
        self._parameters = parameters
        self._before = [_memory(p) for p in parameters]

    def written(self) -> list[str]:
        """The parameters that are others now."""
        skeleton, parameters = self._skeleton, self._parameters
        names = skeleton.overwritten(parameters)
        triples = zip(skeleton.parameter_names, parameters, self._before, strict=True)
        return names + [n for n, p, before in triples if _memory(p) != before and n not in names]


def _memory(tensor: torch.Tensor) -> tuple[Any, int]:
    """Where a tensor's contents are, and how often they were written to."""
    return storage_key(tensor), tensor._version


def _is_untried(number: Any, tried: bool, leaves: Sequence[Any]) -> bool:
    """Whether a number that has changed tells of more than trials do, which draw none."""
    return isinstance(number, GeneratorState) or not (tried or number in _sizes(leaves))


def _sizes(leaves: Sequence[Any]) -> set[int]:
    """The sizes of tensors."""
    return {n for x in leaves if isinstance(x, torch.Tensor) for n in x.shape}


def _changed_number(name: str, attribute: str, old: Any, new: Any) -> str:
    if isinstance(new, GeneratorState):
        return (
            f"the forward of `{name}` draws from its random generator {attribute}, but each call "
            "of a converted module starts from the module as it was converted, so that every call "
            "draws the same numbers. Draw from torch's own generator, without `generator=`, and "
            "pass `key=`, or pass random arrays as arguments."
        )
    return (
        f"the forward of `{name}` changes its attribute {attribute} (from {old!r} to {new!r}), but "
        "each call of a converted module starts from the module as it was converted, so that this "
        "is the same change every time. Pass what changes from call to call (a count, a schedule) "
        "as an argument, or keep it in a buffer, which becomes state."
    )


def _frozen(name: str, parameters: str) -> str:
    return (
        f"the forward of `{name}` asks whether its parameters require gradients, and {parameters} "
        "was frozen (`requires_grad=False`) when it was converted, but this call is differentiated "
        "with respect to it. Leave it out, `trained, frozen = eqx.partition(model, "
        "trainable(model))`, or convert the module after `requires_grad_(True)`."
    )


def _written_tensor(name: str, path: str) -> str:
    return (
        f"the forward of `{name}` writes to its tensor {path}, which is no buffer, but each call "
        "of a converted module starts from the module as it was converted. Register it "
        "(`self.register_buffer`), and it becomes state."
    )


class _Held(threading.local):
    """What the calls of one thread must still give back, in the order in which to do it.

    Attributes:
        items: when the derivatives of the calls are done.
        random: what random numbers are drawn from, at the end of the program in any case.
        device: of the last call that was seeded.
    """

    def __init__(self) -> None:
        self.items: list[Callable[[], None]] = []
        self.random: list[Callable[[], None]] = []
        self.device = _CPU


class _LayerNames:
    """Tells a watch which layer is running."""

    def __init__(self, module: torch.nn.Module, watch: Watch) -> None:
        self._watch = watch
        self._outer: list[str] = []
        watch.place = type(module).__name__
        for name, layer in module.named_modules():
            if isinstance(layer, torch.jit.ScriptModule):  # takes no hooks
                continue
            layer.register_forward_pre_hook(self._entering(name or type(layer).__name__))
            layer.register_forward_hook(self._leaving)

    def __deepcopy__(self, memo: Any) -> "_LayerNames":
        return self  # as a forward may copy the module that has the hooks

    def _entering(self, name: str) -> Callable[..., None]:
        def hook(module: torch.nn.Module, args: Any) -> None:
            self._outer.append(self._watch.place)
            self._watch.place = f"{name} ({type(module).__name__})"

        return hook

    def _leaving(self, module: torch.nn.Module, args: Any, result: Any) -> None:
        self._watch.place = self._outer.pop()


def _unoptimised(module: torch.nn.Module) -> contextlib.AbstractContextManager[Any]:
    """TorchScript's optimiser, which compares constants, cannot where tensors have no values."""
    scripted = any(isinstance(m, torch.jit.ScriptModule) for m in module.modules())
    return torch.jit.optimized_execution(False) if scripted else contextlib.nullcontext()


def _end(items: list[Callable[[], None]]) -> None:
    while items:
        items.pop(0)()
