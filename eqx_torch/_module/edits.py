"""What is watched and replaced inside a torch module while its forward runs.

Outputs of submodules can be captured, and replaced by values that the call is given, in one run.
What JAX computes in the middle of a forward (a submodule that JAX has taken over, a function of a
submodule's output) cuts it into segments. Each segment runs the forward from its start to the next
cut and gives what JAX needs there. Nothing before the cut is computed twice: each submodule that
had finished hands its output to the next segment, which takes it in place of a call. Only the code
of the modules that were cut, between the calls of their submodules, runs again.

What is replaced at one submodule is applied in this order, whatever came first: JAX computes it, a
value stands for its output, functions map that.

To hand over, a segment keeps a log of the calls in order. The log ends at the cut; the next segment
follows it from its start. A call that cannot be told by its output (it wrote to its arguments, gave
one of them back, or was given or gave an object that may change) is logged as one to run again. So
is one whose output JAX maps, before the entry that has what JAX made of it.
"""

import contextlib
import dataclasses
import inspect
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import equinox as eqx
import jax
import torch

from .._compat import in_backward, levels_of_func, torch_tree, TorchDispatchMode, unwrapped
from .._dtypes import canonical_dtype, dtype_j2t
from .._errors import ModuleError, ShapeError
from .._program import own_generator
from .._trees import flatten
from .._watch import storage_key
from .reparametrised import PlainFunction


Step: TypeAlias = tuple[str, Any, Any]
"""Of a log, as torch is given it: the path of a submodule, what its call gave with torch's dtypes
of that (None if it is to run again), and the state of the random generator after it."""
Segment: TypeAlias = Callable[[Sequence[Step], Mapping[str, Any]], tuple[str, Any, list[Any]]]

_VMAPPED: Any = type(eqx.filter_vmap(len))
_PLAIN = (torch.Tensor, int, float, complex, str, bytes, torch.dtype, torch.device, type(None))
_GIVEN = (torch.Tensor, str, type(None))
_NUMBER = "number:"
_NUMBERS = {"bool": bool, "int": int, "float": float, "complex": complex}
_RANDOM_STATE = 5056  # the bytes of torch's generator for a CPU


@dataclasses.dataclass(frozen=True)
class Edits:
    """What is watched and replaced, by the paths of submodules.

    Attributes:
        captured: those whose outputs a call also returns.
        inputs: whether it returns their inputs, too.
        values: those whose output is a value that the call is given.
        mapped: those whose output JAX maps to another.
        taken: those that JAX computes in place of torch.
        called: sets of them; of each, some submodule is to be called.
    """

    captured: tuple[str, ...] = ()
    inputs: bool = False
    values: tuple[str, ...] = ()
    mapped: tuple[str, ...] = ()
    taken: tuple[str, ...] = ()
    called: tuple[tuple[str, ...], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.captured or self.values or self.cuts)

    @property
    def cuts(self) -> tuple[str, ...]:
        """Where JAX computes in the middle of the forward."""
        return (*self.mapped, *self.taken)

    @property
    def inserted(self) -> tuple[str, ...]:
        """What a model holds something in place of."""
        return tuple(dict.fromkeys((*self.values, *self.cuts)))

    def kinds(self, path: str) -> list[str]:
        """What is replaced at a submodule."""
        return [kind for kind in ("taken", "values", "mapped") if path in getattr(self, kind)]

    def renamed(self, rename: Callable[[str], str | None]) -> "Edits":
        """Those inside of a submodule, by their paths there. Outputs are not captured."""
        inside = lambda paths: tuple(p for p in map(rename, paths) if p is not None)  # noqa: E731
        return Edits(
            values=inside(self.values),
            mapped=inside(self.mapped),
            taken=inside(self.taken),
            called=tuple(inside(g) for g in self.called if None not in map(rename, g)),
        )


class Several(eqx.Module):
    """Stands in a model's `inserted` where more than one thing is replaced at a submodule.

    Attributes:
        taken: computes the submodule.
        values: stands for its output.
        mapped: functions of the output, each of what the one before it gives.
    """

    taken: Any = None
    values: Any = None
    mapped: tuple[Callable[[Any], Any], ...] = ()


def several(edits: Edits, path: str, inserted: Mapping[str, Any]) -> Several:
    """All that stands in place of a submodule and of its output."""
    node = inserted.get(path)
    if isinstance(node, Several):
        return node
    mapped: Any = (node,) if path in edits.mapped else ()
    return Several(
        taken=node if path in edits.taken else None,
        values=node if path in edits.values else None,
        mapped=mapped,
    )


def node_of(kinds: Sequence[str], place: Several) -> Any:
    """What `inserted` has of it: itself, unless it is one thing."""
    if len(kinds) > 1 or len(place.mapped) > 1:
        return place
    return place.mapped[0] if place.mapped else getattr(place, kinds[0])


@dataclasses.dataclass
class _Logged:
    """One call in a log.

    Attributes:
        path: of the submodule.
        output: what it gave and torch's dtypes of it, None if it is to run again.
        random: the state of the random generator after the call, None in evaluation, zeros in a
            segment that drew nothing and had no seed.
        captured: what was captured inside of the call, each with its path.
    """

    path: str
    output: tuple[Any, Sequence[torch.dtype]] | None = None
    random: Any = None
    captured: list[tuple[str, Any]] = dataclasses.field(default_factory=list)


def run_segments(
    name: str,
    edits: Edits,
    inserted: Mapping[str, Any],
    segment: Segment,
    key: jax.Array | None,
) -> Any:
    """The result of a forward of which JAX may compute parts.

    Args:
        name: of the module, for messages.
        edits: where they are, and what is captured.
        inserted: by path, the value or what computes it.
        segment: runs the forward in torch to the next cut, given a log and values.
        key: of the call.

    Returns:
        The result, with captured outputs the pair of it and the dict of these.
    """
    places = {path: several(edits, path, inserted) for path in edits.inserted}
    values = {path: places[path].values for path in edits.values}
    log: list[_Logged] = []
    met: set[str] = set()
    while True:
        steps = [(entry.path, entry.output, entry.random) for entry in log]
        try:
            path, given, items = segment(steps, values)
        except ShapeError as error:
            if not log or log[-1].output is None:
                raise
            gave = [f"{x.dtype}{list(x.shape)}" for x in flatten(log[-1].output[0])[0]]
            raise ShapeError(
                f"`{name}` does not go on from {log[-1].path}, in whose place JAX gave "
                f"{', '.join(gave) or 'no array'}: {error}"
            ) from error
        log = _followed(log, items, met)
        if not path:
            break
        met.add(path)
        entry = _Logged(path) if path in edits.taken else log.pop()
        output = _computed(name, edits, path, places[path], given, _Key(key, len(log)))
        leaves = flatten(output)[0]
        if any(isinstance(x, torch.Tensor) for x in leaves):
            raise ModuleError(
                f"what is in place of {path} in `{name}` is computed by JAX, but gave a tensor of "
                "torch's, of which JAX knows no derivative. Return arrays; for torch code, put a "
                "model there that `from_torch` or `torch2jax` makes."
            )
        dtypes = [dtype_j2t(x.dtype) for x in leaves if hasattr(x, "dtype")]
        log.append(dataclasses.replace(entry, output=(output, dtypes)))
    captured = _by_path(log)
    met.update(captured)
    missing = dict.fromkeys(p for group in edits.called if met.isdisjoint(group) for p in group)
    if missing:
        raise ModuleError(
            f"the forward of `{name}` did not call {', '.join(missing)}, so that there is nothing "
            "to capture or to replace. torch computes some layers (attention among them) without "
            "calling the modules that hold their parameters: name the module around them."
        )
    return (given, captured) if edits.captured else given


def _followed(old: list[_Logged], items: Sequence[Any], met: set[str]) -> list[_Logged]:
    """The log of a segment, in JAX."""
    log: list[_Logged] = []
    for kind, *rest in items:
        kind, _, path = kind.partition(":")
        if kind == "old":
            log.append(old[int(path)])
        elif kind == "again":
            log.append(_Logged(path))
        elif kind == "captured":
            log.append(_Logged(f"captured:{path}", captured=[(path, rest[0])]))
        elif kind == "used":
            met.add(path)
        elif kind == "mapped":
            random, inner = rest
            log.append(_Logged(path, None, random, _inner(old, inner, met)))
        else:
            output, dtypes, random, inner = rest
            log.append(_Logged(path, (output, dtypes), random, _inner(old, inner, met)))
    return log


def _inner(old: list[_Logged], items: Sequence[Any], met: set[str]) -> list[tuple[str, Any]]:
    return [pair for entry in _followed(old, items, met) for pair in entry.captured]


def _by_path(log: Sequence[_Logged]) -> dict[str, Any]:
    """What was captured: of a submodule that was called several times, a tuple."""
    calls: dict[str, list[Any]] = {}
    for entry in log:
        for path, value in entry.captured:
            calls.setdefault(path, []).append(value)
    return {path: c[0] if len(c) == 1 else tuple(c) for path, c in calls.items()}


class _Key(NamedTuple):
    """The key of a call, and what tells a replacement's share of it apart."""

    whole: jax.Array | None
    position: int


def _computed(name: str, edits: Edits, path: str, place: Several, given: Any, key: _Key) -> Any:
    """What JAX puts in place of the output of a submodule."""
    output = _with_numbers(given)
    if path in edits.taken:
        args, kwargs = output
        is_given = path in edits.values
        output = place.values if is_given else _called(name, path, place.taken, args, kwargs, key)
    for function in place.mapped:
        output = function(output)
    return output


def _called(name: str, path: str, new: Any, args: Any, kwargs: dict[str, Any], key: _Key) -> Any:
    keyless = "key" not in kwargs and _takes_key(new)
    if not keyless:
        return new(*args, **kwargs)
    if key.whole is not None:
        return new(*args, **kwargs, key=jax.random.fold_in(key.whole, key.position))
    try:
        return new(*args, **kwargs, key=None)
    except Exception as error:
        if "key" not in str(error):
            raise
        raise ModuleError(
            f"what is in place of {path} in `{name}` draws random numbers, but the model was "
            "called without `key=`. Pass `key=jax.random.key(0)` (split it for each call), or "
            f"`model = eqx.nn.inference_mode(model)` if this is not training. It raised: {error}"
        ) from error


def _takes_key(function: Callable[..., Any]) -> bool:
    if isinstance(function, PlainFunction):
        function = function.function
    if isinstance(function, _VMAPPED):  # which takes no keyword arguments
        return False
    try:
        return "key" in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False


class _Cut(BaseException):
    """Ends a segment. No `Exception`, which torch code may catch."""

    def __init__(self, path: str, given: Any) -> None:
        self.path = path
        self.given = given


class _Derivatives(TorchDispatchMode):
    """Sees whether a run takes derivatives: by the operators of a backward, or by asking."""

    def __init__(self, run: "EditedRun") -> None:
        super().__init__()
        self._run = run
        self._asked = _Asked(run)

    def __enter__(self) -> Any:
        self._asked.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> Any:
        super().__exit__(*error)
        self._asked.__exit__(*error)

    def __torch_dispatch__(
        self, func: Any, kinds: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if in_backward():
            self._run.check_derivative()
        return func(*args, **(kwargs or {}))


class _Asked(torch.overrides.TorchFunctionMode):
    def __init__(self, run: "EditedRun") -> None:
        super().__init__()
        self._run = run

    def __torch_function__(
        self, func: Any, kinds: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (torch.autograd.grad, torch.Tensor.backward):
            self._run.check_derivative()
        return func(*args, **(kwargs or {}))


class EditedRun:
    """One segment, in torch. Invariant: until `remove`, submodules of interest have a `forward` of
    their own, and afterwards are as they were.

    Args:
        name: of the module, for messages.
        edits: what to watch and replace.
        module: a skeleton's.
        inference: its mode.
        seeded: whether random numbers are drawn from a seed.
        log: the calls that are done, from an earlier segment.
        values: in place of the outputs of submodules.
        tried: whether this run finds out shapes; then it also looks for derivatives.
    """

    def __init__(
        self,
        name: str,
        edits: Edits,
        module: torch.nn.Module,
        inference: bool,
        seeded: bool,
        log: Sequence[Step],
        values: Mapping[str, Any],
        tried: bool,
    ) -> None:
        self._name = name
        self._edits = edits
        self._inference = inference
        self._generator = own_generator() if seeded else None
        self._log = log
        self._position = 0
        self._values = values
        self._items: list[Any] = []
        self._tried = tried
        self._depth = 0  # of calls that do not run again
        self._over = False
        self._levels = levels_of_func()
        self._undo = contextlib.ExitStack()
        around = _around(module, edits.cuts)
        between = {id(child) for m in around.values() for child in m.children()}
        for path, submodule in module.named_modules():
            if path in edits.captured:
                self._watch(path, submodule)
            if path in edits.values:
                self._wrap(submodule, self._valued(path, submodule.forward))
            if id(submodule) in between:
                holds = id(submodule) in around or path in edits.cuts
                self._wrap(submodule, self._logged(path, submodule.forward, holds))

    def run(self, call: Callable[[], Any]) -> tuple[str, Any, list[Any]]:
        """The path of the cut and what JAX is given there, or "" and the result; and the log."""
        looks = self._tried and bool(self._edits.cuts)
        try:
            with _Derivatives(self) if looks else contextlib.nullcontext():
                return "", call(), self._items
        except _Cut as cut:
            return cut.path, _numbers_as_text(cut.given), self._items
        finally:
            self._over = True

    def remove(self) -> None:
        """Leaves the module as it was."""
        self._undo.close()

    def check_derivative(self) -> None:
        """Raises if a derivative may lead through what JAX computes, which is no part of it."""
        if not self._depth:
            raise ModuleError(
                f"the forward of `{self._name}` takes a derivative in code around what JAX "
                f"computes ({self._edits.cuts[0]}), which torch cannot differentiate there. Take "
                "the derivative in JAX (convert the module that is differentiated), or replace a "
                "module outside of that code."
            )

    def _check_level(self, path: str) -> None:
        functional = self._tried and _in_functional(sys._getframe())
        if functional or levels_of_func() != self._levels:
            raise ModuleError(
                f"the forward of `{self._name}` calls {path} inside of a torch transformation "
                "(`torch.func`, `torch.autograd.functional`, forward-mode derivatives), where it "
                "can neither be captured nor computed by JAX. Transform in JAX (convert the module "
                "that is transformed), or name a module outside of it."
            )

    def check_state(self, changed: Sequence[str]) -> None:
        """Raises if buffers were changed by code that runs again after the cut."""
        done = [item[0].partition(":")[2] for item in self._items if item[0].startswith("handed")]
        again = [n for n in changed if not any(n.startswith(f"{path}.") for path in done)]
        if again:
            raise ModuleError(
                f"the forward of `{self._name}` changes its buffers {', '.join(again)} in code "
                f"that runs again after each part that JAX computes ({self._edits.cuts[0]}). "
                "Replace a module outside of that code, or `eqx.nn.inference_mode(model)`."
            )

    def _wrap(self, module: torch.nn.Module, forward: Callable[..., Any]) -> None:
        if isinstance(module, torch.jit.ScriptModule):
            return  # it runs again, as what nobody logs
        own = vars(module)
        old = own.get("forward")
        own["forward"] = forward
        if old is None:
            self._undo.callback(own.pop, "forward")
        else:
            self._undo.callback(own.__setitem__, "forward", old)

    def _watch(self, path: str, module: torch.nn.Module) -> None:
        def hook(module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if self._over:
                return
            self._check_level(path)
            if self._next(f"captured:{path}") is None:
                seen = (args, kwargs, output) if self._edits.inputs else output
                self._items.append([f"captured:{path}", _copied(seen)])

        self._undo.callback(module.register_forward_hook(hook, with_kwargs=True).remove)

    def _valued(self, path: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def valued(*args: Any, **kwargs: Any) -> Any:
            output = forward(*args, **kwargs)
            self._items.append([f"used:{path}"])
            return self._in_place_of(path, output)

        return valued

    def _in_place_of(self, path: str, output: Any) -> Any:
        """The value for the output of a submodule."""
        old, structure = torch_tree.tree_flatten(output)
        new = torch_tree.tree_leaves(self._values[path])
        if len(new) != len(old) or any(map(_differ, old, new)):
            raise ModuleError(
                f"the value for the output of {path} in `{self._name}` is {_shown(new)}, but the "
                f"submodule gives {_shown(old)}. Pass a value of the same structure, shapes and "
                "dtypes."
            )
        cast = [
            y.to(x.dtype) if isinstance(x, torch.Tensor) else y
            for x, y in zip(old, new, strict=True)
        ]
        return torch_tree.tree_unflatten(cast, structure)

    def _logged(self, path: str, forward: Callable[..., Any], around: bool) -> Callable[..., Any]:
        """The forward of a submodule that is called by one that is cut, or is `around` a cut."""
        edits = self._edits

        def logged(*args: Any, **kwargs: Any) -> Any:
            if around:
                self._check_level(path)
                self._check_not_over(path)
            if self._over or levels_of_func() != self._levels:
                return forward(*args, **kwargs)
            step = self._next(path)
            if step is not None and step[1] is None and path in edits.mapped:
                self._apart(forward, args, kwargs)  # for what it does beside
                step = self._next(path)
            if step is not None and step[1] is not None:
                return self._handed(*step[1:])
            if path in edits.taken:
                self._check_plain(path, "is given", (args, kwargs))
                raise _Cut(path, (args, kwargs))
            if path in edits.mapped:
                raise _Cut(path, self._mapped(path, forward, args, kwargs))
            if step is None and not around:
                return self._whole(path, forward, args, kwargs)
            return forward(*args, **kwargs)

        return logged

    def _check_not_over(self, path: str) -> None:
        if self._over:
            raise ModuleError(
                f"{path} of `{self._name}` runs again for a derivative (`torch.utils.checkpoint`), "
                "which it cannot where JAX computes a part of it. Turn checkpoints off in torch, "
                "and use `jax.checkpoint`."
            )

    def _next(self, path: str) -> Step | None:
        """The logged call, if it is the next."""
        if self._position == len(self._log) or self._log[self._position][0] != path:
            return None
        self._items.append([f"old:{self._position}"])
        self._position += 1
        return self._log[self._position - 1]

    def _handed(self, given: Any, random: Any) -> Any:
        output, dtypes = given
        if random is not None and self._generator is not None and random.any():
            self._generator.set_state(random.cpu())
        return _cast(output, dtypes)

    def _whole(self, path: str, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A call that no cut is inside of."""
        given = torch_tree.tree_leaves((args, kwargs))
        versions = [x._version for x in given if isinstance(x, torch.Tensor)]
        before = self._random_state()
        output, inner = self._apart(forward, args, kwargs)
        if not _stands_for_call(given, versions, output):
            self._items.extend([[f"again:{path}"], *inner])
            return output
        after = self._random_after(path, before)
        dtypes = [x.dtype for x in flatten(output)[0] if isinstance(x, torch.Tensor)]
        self._items.append([f"handed:{path}", _copied(output), dtypes, after, inner])
        return output

    def _mapped(self, path: str, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The output of a call, for JAX to map."""
        given = torch_tree.tree_leaves((args, kwargs))
        versions = [x._version for x in given if isinstance(x, torch.Tensor)]
        before = self._random_state()
        output, inner = self._apart(forward, args, kwargs)
        self._check_plain(path, "gives", output)
        if not _leaves_alone(given, versions):
            self._items.append([f"again:{path}"])
        self._items.append([f"mapped:{path}", self._random_after(path, before), inner])
        return output

    def _apart(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, list[Any]]:
        """The result of a call, and what was logged inside of it."""
        outer, self._items = self._items, []
        self._depth += 1
        try:
            return forward(*args, **kwargs), self._items
        finally:
            self._items = outer
            self._depth -= 1

    def _random_after(self, path: str, before: Any) -> Any:
        """The state of the random generator, for the next segment to go on from."""
        after = self._random_state()
        if not self._inference:
            return torch.zeros(_RANDOM_STATE, dtype=torch.uint8) if after is None else after
        if after is not None and not torch.equal(before, after):
            raise ModuleError(
                f"{path} in `{self._name}` draws random numbers in evaluation mode, which a "
                "forward that JAX computes a part of cannot follow. Draw them in JAX and pass "
                "them as arguments."
            )
        return None

    def _random_state(self) -> torch.Tensor | None:
        return None if self._generator is None else self._generator.get_state()

    def _check_plain(self, path: str, verb: str, tree: Any) -> None:
        for leaf in torch_tree.tree_leaves(tree):
            if not isinstance(leaf, _PLAIN):
                raise ModuleError(
                    f"{path} in `{self._name}` {verb} a {type(leaf).__name__}, which JAX cannot "
                    "take over. Call the model so that there is none (for caches of keys and "
                    "values, `use_cache=False`), or name another submodule."
                )


def _in_functional(frame: types.FrameType | None) -> bool:
    """Whether a call is one of `torch.autograd.functional`, to which no graph is no error."""
    while frame is not None:
        if frame.f_globals.get("__name__") == torch.autograd.functional.__name__:
            return True
        frame = frame.f_back
    return False


def check_generator(name: str, cuts: Sequence[str], device: torch.device) -> None:
    """Raises for a cut forward that draws where not all operators draw from our generator.

    A segment would start to draw from the seed again, and repeat the numbers of the one before it.
    """
    if cuts and device.type != "cpu":
        raise ModuleError(
            f"`{name}` draws random numbers on {device.type}, which a forward that JAX computes a "
            f"part of ({cuts[0]}) cannot follow there. Use it in evaluation mode, "
            "`eqx.nn.inference_mode(model)`, or set the probabilities of its dropout to 0 before "
            "it is converted."
        )


def _around(module: torch.nn.Module, cuts: Sequence[str]) -> dict[int, torch.nn.Module]:
    """The modules that a cut is inside of, under any of its names, by identity."""
    cut = {id(module.get_submodule(path)) for path in cuts}
    around: dict[int, torch.nn.Module] = {}
    for path, submodule in module.named_modules(remove_duplicate=False) if cut else ():
        while path and id(submodule) in cut:
            path = path.rpartition(".")[0]
            outer = module.get_submodule(path)
            around[id(outer)] = outer
    return around


def _stands_for_call(given: Sequence[Any], versions: Sequence[int], output: Any) -> bool:
    """Whether a call did nothing but give this output."""
    tensors = [x for x in given if isinstance(x, torch.Tensor)]
    results = torch_tree.tree_leaves(output)
    if not _leaves_alone(given, versions) or not all(isinstance(x, _GIVEN) for x in results):
        return False
    made = [x for x in results if isinstance(x, torch.Tensor)]
    if any(x.layout is not torch.strided for x in (*tensors, *made)):
        return False
    return {storage_key(unwrapped(x)) for x in tensors}.isdisjoint(
        storage_key(unwrapped(x)) for x in made
    )


def _leaves_alone(given: Sequence[Any], versions: Sequence[int]) -> bool:
    """Whether a call has not changed what it was given, nor can have."""
    now = [x._version for x in given if isinstance(x, torch.Tensor)]
    return all(isinstance(x, _PLAIN) for x in given) and now == versions


def _copied(tree: Any) -> Any:
    """What later code cannot write to."""
    return torch_tree.tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, tree)


def _cast(tree: Any, dtypes: Sequence[torch.dtype]) -> Any:
    """The tree in torch's own dtypes, where JAX has held it in others."""
    left = iter(dtypes)
    leaves, structure = flatten(tree)
    return structure.unflatten(
        [x.to(next(left)) if isinstance(x, torch.Tensor) else x for x in leaves]
    )


def _numbers_as_text(tree: Any) -> Any:
    """Numbers among the arguments of a call as constants: a result's would become arrays."""
    return torch_tree.tree_map(
        lambda x: f"{_NUMBER} {type(x).__name__} {x}" if type(x) in _NUMBERS.values() else x, tree
    )


def _with_numbers(tree: Any) -> Any:
    return jax.tree.map(_number, tree)


def _number(x: Any) -> Any:
    if not (isinstance(x, str) and x.startswith(_NUMBER)):
        return x
    _, kind, text = x.split()
    return text == "True" if kind == "bool" else _NUMBERS[kind](text)


def _differ(old: Any, new: Any) -> bool:
    if not isinstance(old, torch.Tensor):
        return old is not new
    return (
        not isinstance(new, torch.Tensor)
        or old.shape != new.shape
        or canonical_dtype(old.dtype) != canonical_dtype(new.dtype)
    )


def _shown(leaves: Sequence[Any]) -> str:
    texts = [
        f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}"
        if isinstance(x, torch.Tensor)
        else type(x).__name__
        for x in leaves
    ]
    return ", ".join(texts) or "nothing"
