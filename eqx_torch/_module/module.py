"""`TorchModule`: a torch module as an Equinox module."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.core
import jax.tree_util as jtu
from jax.sharding import AxisType, PartitionSpec

from .._compat import axes_of_type
from .._dtypes import is_key
from .._errors import InputError, ModuleError
from .._invoke import Call, divided, outputs_of, Prepared, prepared
from .._program import argument_name
from .._sharding import check_on_mesh, check_whole, ON_THE_MESH
from .core import Core
from .edits import run_segments, Step
from .function import first, missing_key
from .layers import ModeField
from .parts import attribute, item, items, length
from .reparametrised import computed
from .rng import ModuleShards, seed_of


_KEY = ("a JAX key", "key", "y = model(x, key=key)")
_STATE = ("an `equinox.nn.State`", "state", "y, state = model(x, state=state)")


class TorchModule(eqx.nn.StatefulLayer):
    """A torch module whose parameters are JAX arrays; made by `from_torch`.

    It is a PyTree of arrays. The inexact ones are the parameters, under torch's names, so
    gradients, optimisers, serialisation and sharding treat it like any Equinox module. Calling it
    runs the torch code on those parameters.

    **Attributes:**

    - `params`: the parameters by torch's names, in torch's shapes; one that has several names
        stands under the first.
    - `buffers`: the initial values of the buffers that the forward changes, which then live in
        `equinox.nn.State`; None if there are none.
    - `inserted`: what stands in place of submodules or their outputs, by the submodules' names; see
        `patch` and `replace_module`.
    - `inference`: whether all layers are in evaluation mode; set by `equinox.nn.inference_mode`.
        It is no leaf but part of the structure, so that models of different modes have different
        structures.

    !!! example

        >>> import jax, torch
        >>> from eqx_torch import from_torch
        >>> model = from_torch(torch.nn.Linear(3, 2))
        >>> jax.tree.map(lambda a: a.shape, model.params)
        {'bias': (2,), 'weight': (2, 3)}
    """

    params: dict[str, Any]
    buffers: eqx.nn.StateIndex | None
    inserted: dict[str, Any]
    core: Core = eqx.field(static=True)
    inference: bool = ModeField()  # pyright: ignore[reportAssignmentType]

    def __init__(
        self,
        params: dict[str, Any],
        buffers: eqx.nn.StateIndex | None,
        inference: bool,
        core: Core,
        inserted: dict[str, Any] | None = None,
    ) -> None:
        """Use `from_torch`."""
        self.params = params
        self.inserted = inserted or {}
        self.buffers = buffers
        self.inference = inference
        self.core = core

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the torch module.

        **Arguments:**

        - `*args`, `**kwargs`: of torch's `forward` (or the method that was converted), with JAX
            arrays in place of tensors; anything else is passed as it is.
        - `state`: an `equinox.nn.State`. It is ours unless the forward has an argument of this
            name and the value is not a `State`.
        - `key`: a JAX PRNG key from which this call's random numbers are drawn. It is the
            forward's where the forward has an argument of this name, unless it is a typed key.

        **Returns:**

        What torch returns, with JAX arrays in place of tensors; with `state=`, a pair of that and
        the new state.

        **Raises:**

        `ModuleError` if the forward draws random numbers and `key` is missing, or changes buffers
        and `state` is missing; `InputError` if either is no such thing or was passed by position;
        and what `torch2jax` raises.

        !!! example

            >>> import equinox as eqx, jax, jax.numpy as jnp, torch
            >>> from eqx_torch import from_torch
            >>> network = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Dropout(0.5))
            >>> model, state = eqx.nn.make_with_state(from_torch)(network)
            >>> y, state = model(jnp.ones((8, 3)), state=state, key=jax.random.key(0))
            >>> y.shape
            (8, 3)
        """
        core = self.core
        own = _keywords(core, args, kwargs)
        buffers = self._buffers_for(own.state)
        run = _in_segments if core.edits else _torch_call
        result, *new_buffers = run(self, computed(self.params), buffers, own.key, args, own.rest)
        if own.state is None:
            return result
        if self.buffers is None or core.keeps_state(bool(self.inference)):
            return result, own.state
        new = dict(zip(core.stored, new_buffers, strict=True))
        return result, _updated(own.state, self.buffers, new)

    def __getattr__(self, name: str) -> Any:
        return attribute(self, name)

    def __getitem__(self, index: Any) -> Any:
        return item(self, index)

    def __iter__(self) -> Iterator[Any]:
        return items(self)

    def __len__(self) -> int:
        return length(self)

    def __bool__(self) -> bool:
        return True

    def __hash__(self) -> int:
        raise ModuleError(
            f"`{self.core.name}` cannot be hashed, as its parameters are arrays, so it cannot be "
            "what `jax.jit` compiles, nor a static argument of it. Write `eqx.filter_jit(model)`, "
            "or pass the model as an argument, `jax.jit(lambda model, x: model(x))(model, x)`; "
            "for JAX's other transformations, such as `jax.checkpoint`, write `lambda x: model(x)`."
        )

    def is_stateful(self) -> bool:
        """Whether the forward changes buffers, so that calls take and return a state.

        **Returns:**

        A bool.

        !!! example

            >>> import torch
            >>> from eqx_torch import from_torch
            >>> from_torch(torch.nn.Linear(3, 2)).is_stateful()
            False
        """
        return self.buffers is not None

    def _buffers_for(self, state: eqx.nn.State | None) -> dict[str, jax.Array]:
        if self.buffers is None:
            return {}
        if state is not None:
            return _without_derivatives(self.core, own_buffers(self.core, self.buffers, state))
        changing = self.core.changing[bool(self.inference)]
        init = self.buffers.init
        if changing or not isinstance(init, dict):
            raise ModuleError(_missing_state(self.core, changing, isinstance(init, dict)))
        pairs = zip(self.core.blueprint.names.state, self.core.stored, strict=True)
        return _without_derivatives(self.core, {name: init[stored] for name, stored in pairs})


class _Keywords(NamedTuple):
    """The keyword arguments of a call: ours, and those that are the forward's."""

    state: eqx.nn.State | None
    key: jax.Array | None
    rest: dict[str, Any]


def _keywords(core: Core, args: Sequence[Any], kwargs: dict[str, Any]) -> _Keywords:
    """Takes ours out of a call's. An argument of the forward's may have the same name.

    Raises:
        InputError: `state=` is no state, `key=` not one key, or either stands elsewhere.
    """
    rest, state, key = dict(kwargs), None, None
    if "state" not in core.arguments or _is_state(rest.get("state")):
        state = rest.pop("state", None)
    if state is not None and not _is_state(state):
        raise InputError(
            f"`state=` of `{core.name}` is a {type(state).__name__}, but takes the "
            "`equinox.nn.State` of `model, state = eqx.nn.make_with_state(from_torch)(module)`."
        )
    if "key" not in core.arguments or is_key(rest.get("key")):
        key = rest.pop("key", None)
    if any(map(_is_ours, jax.tree.leaves((args, rest), is_leaf=_is_state))):
        _refuse(core, (tuple(args), rest))
    return _Keywords(state, None if key is None else _typed(core, key), rest)


def _is_state(x: Any) -> bool:
    return isinstance(x, eqx.nn.State)


def _is_ours(x: Any) -> bool:
    return _is_state(x) or is_key(x)


def _refuse(core: Core, arguments: Any) -> None:
    """Raises for a state or a key among the arguments of torch."""
    leaves = jtu.tree_leaves_with_path(arguments, is_leaf=_is_state)
    path, leaf = next((path, leaf) for path, leaf in leaves if _is_ours(leaf))
    what, name, call = _KEY if is_key(leaf) else _STATE
    raise InputError(
        f"`{core.name}` got {what} as {argument_name(jtu.keystr(path))}, but what is not passed as "
        f"`state=` or `key=` is for torch's `{core.options.method}`. Write `{name}={name}`, as in "
        f"`{call}`."
    )


def _typed(core: Core, key: Any) -> jax.Array:
    try:
        typed = key if is_key(key) else jax.random.wrap_key_data(key)
    except (TypeError, ValueError) as error:
        array = f"an array {key.dtype}{list(key.shape)}" if hasattr(key, "dtype") else None
        raise InputError(
            f"`key=` of `{core.name}` is {array or f'{key!r} of type {type(key).__name__}'}, but "
            "takes a JAX key: `key=jax.random.key(0)`."
        ) from error
    if typed.ndim:
        raise InputError(
            f"`key=` of `{core.name}` is an array of keys, of shape {list(typed.shape)}, but a "
            "call draws from one key: `key=keys[0]`. To call it with each of them, "
            "`jax.vmap(lambda key: model(x, key=key))(keys)`."
        )
    return typed


def _torch_call(
    model: TorchModule,
    params: Mapping[str, Any],
    buffers: dict[str, jax.Array],
    key: jax.Array | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> list[Any]:
    """One torch call: its result and the new buffers."""
    core, names = model.core, model.core.blueprint.names
    call = Call(
        core.name,
        args,
        kwargs,
        core.code.own[bool(model.inference), False],
        [*map(params.__getitem__, names.parameters), *map(buffers.get, names.state)],
        also=None if key is None else jax.typeof(key),
    )
    alike = core.known.get(call.key) or _prepare(core, call, key)
    if key is not None and alike.leaf.site.seed is not None:
        call.arrays.insert(call.num_own, seed_of(key))
    return alike(call.arrays)


def _in_segments(
    model: TorchModule,
    params: Mapping[str, Any],
    buffers: dict[str, jax.Array],
    key: jax.Array | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> list[Any]:
    """A call of which JAX may compute parts: one torch call for each segment."""
    core = model.core
    _check_specs(core)

    def segment(log: Sequence[Step], values: Mapping[str, Any]) -> Any:
        nonlocal buffers
        handed = (log, dict(values))
        result, *new = _torch_call(model, params, buffers, key, (handed, *args), kwargs)
        new_buffers = dict(zip(core.blueprint.names.state, new, strict=True))
        buffers = _without_derivatives(core, new_buffers)
        return result

    result = run_segments(core.name, core.edits, model.inserted, segment, key)
    return [result, *buffers.values()]


def _check_specs(core: Core) -> None:
    """`out_specs` are of the result; what is captured has no others, and a cut forward none."""
    specs = core.options.out_specs
    if specs is not None and (core.edits.cuts or not isinstance(specs, PartitionSpec)):
        raise InputError(
            f"`{core.name}` was converted with `out_specs=`, which say how its result is sharded, "
            "but not how what JAX computes in the middle, or captures, is. Leave them out "
            "(`from_torch(model)`) and call it inside `eqx_torch.filter_shard_map`, where JAX "
            "computes shard by shard as torch does; to capture only, one spec is enough."
        )


def _prepare(core: Core, call: Call, key: jax.Array | None) -> Prepared:
    """Finds out what is the same in all calls that are alike."""
    function, out_specs, own = core.function, core.options.out_specs, call.own
    assert own is not None
    _check_own(core, call)
    wide = core.wide_dtypes(call)
    site = call.site(wide)
    state = core.code.copies
    buffers = dict(zip(core.blueprint.names.state, call.arrays[state.start :], strict=False))
    others = [t for i, t in enumerate(call.types) if i not in state]
    check_on_mesh(core.name, "buffer", buffers, others)
    split, shards = divided(function, site, call.types, out_specs)
    outputs = outputs_of(core.infer, call, site, split, shards)
    draws = core.draws(site, shards, own.inference)
    if draws and key is None:
        raise ModuleError(missing_key(core.name, draws, own.inference))
    seed = None
    if key is not None and draws != ():
        seed, written = len(own), function.findings.at(site, shards).written
        own = core.code.own[own.inference, True]
        wide = (*wide[:seed], None, *wide[seed:])
        site = dataclasses.replace(site, own=own, wide=wide)
        types = (*call.types[:seed], jax.typeof(seed_of(key)), *call.types[seed:])
        split, shards = divided(function, site, types, out_specs)
        if written is not None:  # with a seed it does as without
            written = frozenset(i + (i >= seed) for i in written)
            function.findings.at(site, shards).written = written
    per_shard = ModuleShards(seed, len(state))
    new = prepared(function, site, split, shards, outputs, out_specs=out_specs, per_shard=per_shard)
    if not outputs.by_values:
        core.known[call.key] = new
    return new


def _updated(
    state: eqx.nn.State, index: eqx.nn.StateIndex, new: dict[str, jax.Array]
) -> eqx.nn.State:
    """The state with new buffers.

    Not by `State.set`, which refuses what varies in place of what does not: inside `jax.shard_map`
    each shard has its own statistics, until the caller averages them.
    """
    own = state.substate(index)
    new = state.get(index) | new
    return state.update(jax.tree.unflatten(jax.tree.structure(own), jax.tree.leaves(new)))


def own_buffers(core: Core, index: eqx.nn.StateIndex, state: eqx.nn.State) -> dict[str, jax.Array]:
    """The buffers that a state holds for one model."""
    try:
        buffers = state.get(index)
    except KeyError:
        buffers = None
    names = core.blueprint.names.state
    if not isinstance(buffers, dict) or not buffers.keys() >= set(core.stored):
        raise ModuleError(
            f"the state passed to `{core.name}` is not its own: it holds nothing for the buffers "
            f"{first(names)}. Pass the state that was made with this model, "
            "`model, state = eqx.nn.make_with_state(from_torch)(module)`, or that it returned."
        )
    return {name: buffers[stored] for name, stored in zip(names, core.stored, strict=True)}


def _without_derivatives(core: Core, buffers: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """The buffers, the statistics of torch's own layers as the constants that torch takes them for.

    To JAX they depend on what an earlier call was given, or are leaves of the model.
    """
    traced = [n for n in core.statistics & set(buffers) if isinstance(buffers[n], jax.core.Tracer)]
    return buffers | {n: jax.lax.stop_gradient(buffers[n]) for n in traced}


def _check_own(core: Core, call: Call) -> None:
    """Raises unless the arrays of a model are what its torch module has, whole on every device."""
    shapes = (*core.shapes[0].values(), *core.shapes[1].values())
    labels = call.own.labels if call.own else ()
    for label, aval, shape in zip(labels, call.types, shapes, strict=False):
        if aval.shape != shape:
            raise InputError(misshapen(core, label, aval.shape, shape))
        if not aval.sharding.mesh.empty:
            check_whole(core.name, label, aval, _GATHERED[label.partition(" ")[0]])


_GATHERED = {
    "parameter": "`jax.sharding.reshard(parameter, P())`, or all of the model: `model = "
    "jax.tree.map(lambda a: jax.sharding.reshard(a, P()) if eqx.is_array(a) else a, model)`",
    "buffer": ON_THE_MESH,
}


def misshapen(core: Core, what: str, own: tuple[int, ...], shape: tuple[int, ...]) -> str:
    """The message for an array of the shape `own`, where the torch module has another."""
    has = f"the {what} of `{core.name}` has shape {list(own)}, but the torch module has "
    if own[-len(shape) or len(own) :] == shape:
        return (
            f"{has}{list(shape)}. If this is a stack of modules, call it under `eqx.filter_vmap`, "
            "or take one of them: `jax.tree.map(lambda a: a[i] if eqx.is_array(a) else a, model)`."
        )
    axes = axes_of_type(jax.sharding.get_abstract_mesh(), AxisType.Manual)
    if axes and len(own) == len(shape):
        return (
            f"{has}{list(shape)}: inside `jax.shard_map` over {sorted(axes)} it is a shard. Give "
            "the `jax.shard_map` the whole model, by `in_specs=P()` for it, or gather it inside, "
            f'`jax.lax.all_gather(x, "{min(axes)}", axis=i, tiled=True)`. Where torch is to '
            "compute with a part, convert a torch module of the shard's shape."
        )
    return (
        f"{has}{list(shape)}. Put an array of that shape in its place, or convert a torch module "
        "that has the other shape."
    )


def _missing_state(core: Core, changing: list[str], has_values: bool) -> str:
    remedy = (
        "Keep them in a state: `model, state = eqx.nn.make_with_state(from_torch)(module)`, then "
        "`y, state = model(x, state=state)`."
    )
    if not changing:
        return f"`{core.name}` has buffers that live in a state, but was called without. {remedy}"
    fixed = " To use the values they have, `model = eqx.nn.inference_mode(model)`." * has_values
    return (
        f"the forward of `{core.name}` changes its buffers {first(changing)}, but was "
        f"called without `state=`. {remedy}{fixed}"
    )
