"""A module's method as a torch function of its parameters, its changing buffers and arguments.

The function takes `(parameters, state, seed, inference, *args), kwargs` and returns a tuple of the
method's result and each of the new buffers. What a call borrows (a skeleton, the random generator)
it holds until the program it is part of is done: the backward of `torch.utils.checkpoint`, of hooks
and of adjoint solvers reads the module again, and must find the parameters of this very call.
"""

import contextlib
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from .._errors import ModuleError
from .._program import (
    Compiled,
    Kept,
    Lock,
    Residuals,
    Site,
    Spec,
    Tensors,
    TorchFunction,
    VmapMethod,
)
from .._survivors import Before
from .._trees import flatten, Structure
from .._watch import Draws, Watch
from .blueprint import Blueprint, Skeleton
from .rng import SEEDING


SEED = Spec((2,), np.dtype("uint32"))

_CPU = torch.device("cpu")
_UNCHANGED = contextlib.nullcontext()


class ModuleFunction(TorchFunction):
    """See the module's docstring. Equal where blueprint, method and options are.

    Attributes:
        changed_state: the buffers that the last trial changed.
    """

    randomness = "same"
    borrows = True
    isolated = True
    own_arguments = 4  # parameters, state, seed, inference

    def __init__(
        self,
        blueprint: Blueprint,
        method: str,
        *,
        name: str,
        lock: Lock | None,
        depth: int | None,
        vmap_method: VmapMethod,
        residuals: Residuals,
        compiled: Compiled,
    ) -> None:
        super().__init__(
            getattr(blueprint.module, method),
            name=name,
            lock=lock,
            depth=depth,
            vmap_method=vmap_method,
            residuals=residuals,
            compiled=compiled,
        )
        self.blueprint = blueprint
        self.method = method
        self.own_inputs = len(blueprint.parameters) + len(blueprint.state)
        self.changed_state: set[str] = set()
        self._held = _Held()
        self._quiet: set[bool] = set()

    def _key(self) -> Hashable:
        own = self.blueprint, self.method, self.lock
        return own, self.depth, self.vmap_method, self.residuals

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, ModuleFunction) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def prepared(self, site: Site) -> Callable[[Tensors, bool], Any]:
        parameters = len(self.blueprint.parameters)
        state = parameters + len(self.blueprint.state)
        seed, mode = site.statics[state : state + 2]
        assert mode is not None
        seeded, inference, rest = seed is None, mode.value, site.rest(self.own_arguments)
        keeping = True

        def call(arrays: Tensors, functional: bool) -> Any:
            nonlocal keeping
            pool = self.blueprint.pool(arrays[0].device if arrays else _CPU)
            skeleton = pool.borrow()
            skeleton.set_mode(inference)
            args, kwargs = rest.arguments(arrays[state + seeded :])
            skeleton.bind(arrays[:parameters], [b.clone() for b in arrays[parameters:state]])
            self._held.items.append(skeleton.unbind)
            # Wrappers of torch.func die with the transformation, so a layer must not keep one.
            # To look for them takes long, and one look tells whether a layer keeps anything.
            before = Before(skeleton.module) if functional and keeping else None
            try:
                with self._seeding(arrays[state]) if seeded else self._unseeded(inference):
                    result = self._run(skeleton, args, kwargs)
                new_state = skeleton.state()
            finally:
                if before is not None:
                    keeping = before.give_back(lambda _: True)
            changed = skeleton.changed_constants()
            if changed:
                raise ModuleError(self._changed_constants(changed))
            self._held.items.append(lambda: pool.give_back(skeleton))
            return result, *new_state

        return call

    def release(self) -> None:
        """Gives back what the calls of this thread have borrowed."""
        _end(self._held.items)
        _end(self._held.locks)

    def keep(self) -> Kept:
        items, locks = self._held.items[:], self._held.locks
        self._held.items.clear()
        guard = SEEDING.lock if locks else contextlib.nullcontext()
        _end(locks)
        return Kept(guard, lambda: _end(items))

    def must_loop(self, site: Site, in_axes: Sequence[int | None]) -> bool:
        """A batch with a key for each member is drawn member by member."""
        position = len(self.blueprint.parameters) + len(self.blueprint.state)
        return site.statics[position] is None and in_axes[position] is not None

    def label(self, path: str) -> str:
        if not path.startswith("[0]"):
            return super().label(path)
        index, _, rest = path.removeprefix("[0][").partition("]")
        names = self.blueprint.names
        if int(index) >= self.own_arguments:
            return super().label(f"[0][{int(index) - self.own_arguments}]{rest}")
        if int(index) == 2:
            return "key"
        kind, own = (("parameter", names.parameters), ("buffer", names.state))[int(index)]
        return f"{kind} {own[int(rest[1:-1])]}"

    def output_label(self, path: str) -> str:
        index, _, rest = path.removeprefix("[").partition("]")
        if index == "0":
            return super().output_label(rest)
        return f"buffer {self.blueprint.names.state[int(index) - 1]}"

    def of_result(self, structure: Structure) -> Structure:
        return flatten(structure.in_jax(range(structure.num_leaves))[0])[1]

    @contextlib.contextmanager
    def trial(self, watch: Watch) -> Iterator[Callable[[Sequence[Any], Mapping[str, Any]], Any]]:
        skeleton = self.blueprint.pool(torch.device("cpu")).new()

        def run(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
            parameters, state, _, inference, *rest = args
            skeleton.set_mode(inference)
            skeleton.place_constants(watch.device)
            skeleton.bind(parameters, state)
            _LayerNames(skeleton.module, watch)
            result = self._run(skeleton, rest, kwargs)
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
            return result, *new_state

        yield run

    def learn(
        self, site: Site, in_specs: tuple[Spec, ...], written: frozenset[int], draws: Sequence[str]
    ) -> None:
        learnt = self.findings.at(site, in_specs)
        # The state is cloned before it is bound, whether or not it is written.
        learnt.written = written.difference(range(len(self.blueprint.parameters), self.own_inputs))
        learnt.draws = tuple(dict.fromkeys(draws))
        inference = site.statics[self.own_inputs + 1]
        assert inference is not None
        self._quiet.add(inference.value)

    def learn_seeded(self, site: Site, in_specs: tuple[Spec, ...], seeded: Site, seed: int) -> None:
        """Takes note that a call with a seed, its input number `seed`, does as one without."""
        written = self.findings.at(site, in_specs).written
        if written is not None:
            specs = (*in_specs[:seed], SEED, *in_specs[seed:])
            moved = frozenset(i + (i >= seed) for i in written)
            self.findings.at(seeded, specs).written = moved

    def _run(self, skeleton: Skeleton, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if self.method == "forward":
            return skeleton.module(*args, **kwargs)
        return getattr(skeleton.module, self.method)(*args, **kwargs)

    def _unseeded(self, inference: bool) -> contextlib.AbstractContextManager[None]:
        return _UNCHANGED if inference in self._quiet else self._tried(inference)

    @contextlib.contextmanager
    def _tried(self, inference: bool) -> Iterator[None]:
        """What was declared was not tried: its first run in each mode tells whether it draws."""
        with Draws() as draws:
            yield
        if draws.any:
            raise ModuleError(missing_key(self.name, [], inference))
        self._quiet.add(inference)

    def _seeding(self, seed: torch.Tensor) -> contextlib.AbstractContextManager[None]:
        return SEEDING.drawing(seed, self._held.locks.append)

    def _changed_constants(self, names: Sequence[str]) -> str:
        listed = ", ".join(f'"{name}"' for name in names)
        every = ", ".join(f'"{name}"' for name in (*self.blueprint.names.state, *names))
        return (
            f"`{self.name}` changes its buffers {listed} in `{self.method}`, but they were taken "
            f"for constants. Convert it with `state=[{every}]`, or with example arguments so that "
            "this is found out: "
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


class _Held(threading.local):
    """What the calls of one thread must still give back, in the order in which to do it.

    Attributes:
        items: when the derivatives of the calls are done.
        locks: at the end of the program in any case.
    """

    def __init__(self) -> None:
        self.items: list[Callable[[], None]] = []
        self.locks: list[Callable[[], None]] = []


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

    def _entering(self, name: str) -> Callable[..., None]:
        def hook(module: torch.nn.Module, args: Any) -> None:
            self._outer.append(self._watch.place)
            self._watch.place = f"{name} ({type(module).__name__})"

        return hook

    def _leaving(self, module: torch.nn.Module, args: Any, result: Any) -> None:
        self._watch.place = self._outer.pop()


def _end(items: list[Callable[[], None]]) -> None:
    while items:
        items.pop(0)()
