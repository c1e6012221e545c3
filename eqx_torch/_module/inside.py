"""Work inside of a model: watch, patch and replace its submodules, compute its parameters.

Each function gives a new model, a `TorchModule` again. What JAX puts in the place of a submodule,
of an output or of a parameter stands among the model's own leaves, so that gradients, optimisers
and serialisation treat it like any of them.
"""

import copy
import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import torch
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from .._compat import axes_of_type, torch_tree
from .._errors import InputError, ModuleError, ShardingError
from .core import Core
from .edits import Edits, node_of, Several, several
from .module import TorchModule
from .parts import core_of_part, matching, parameter_names, submodules, with_part
from .reparametrised import as_node, Reparametrised
from .walk import copied


def select(model: TorchModule, patterns: str | Sequence[str]) -> PyTree:
    """Marks parameters by name.

    **Arguments:**

    - `model`: the model.
    - `patterns`: names of parameters as in `model.params`, or patterns of their ends in which `*`
        stands for one part of a name: `"*.query.weight"`. What `reparametrise` has added to a
        parameter has names below it, such as `"*.query.weight.a"`.

    **Returns:**

    A tree of bools like `model`, True on those parameters: for `equinox.partition` and
    `optax.masked`. For `optax.multi_transform` make labels of it, and a function that returns them
    (as it would call what can be called): `labels = jax.tree.map(lambda chosen: "fast" if chosen
    else "slow", mask)`, `optax.multi_transform(transforms, lambda _: labels)`.

    **Raises:**

    `InputError` for a pattern that matches none, with the nearest names.

    !!! example

        >>> import torch
        >>> from eqx_torch import from_torch
        >>> select(from_torch(torch.nn.Linear(3, 2)), "bias").params
        {'bias': True, 'weight': False}
    """
    _check_model("select", model)
    known = _spelled(model.core, [*_leaf_names(model.params), *_leaf_names(model.inserted)])
    chosen = set(itertools.chain(*matching("parameter", model.core, patterns, known)))
    marked = {
        field: jax.tree.unflatten(
            jax.tree.structure(tree), [name in chosen for name in _leaf_names(tree)]
        )
        for field, tree in (("params", model.params), ("inserted", model.inserted))
    }
    return dataclasses.replace(jax.tree.map(lambda _: False, model), **marked)


def capture(
    model: TorchModule, patterns: str | Sequence[str], *, inputs: bool = False
) -> TorchModule:
    """A model whose call also returns the outputs of submodules.

    **Arguments:**

    - `model`: the model.
    - `patterns`: names of submodules, or patterns of their ends in which `*` stands for one part of
        a name: `"encoder.layer.*"`.
    - `inputs`: whether to return what the submodules were given, too.

    **Returns:**

    The model. Its call returns `(result, captured)` in place of `result`. `captured` is a dict from
    names to outputs, as forward hooks of torch's see them; with `inputs` to triples `(args, kwargs,
    output)`. A submodule that was called several times has a tuple of these. All are differentiable
    and nothing is computed twice. What an earlier `capture` watches is in it, too. Of the
    submodules that a pattern matches, those are left out that the forward does not call, such as a
    `ModuleList`.

    **Raises:**

    `InputError` for a pattern that matches no submodule; `ModuleError`, when the model is called,
    if the forward calls none that it matches.

    !!! example

        >>> import jax.numpy as jnp, torch
        >>> from eqx_torch import from_torch
        >>> model = from_torch(torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Tanh()))
        >>> y, captured = capture(model, "0")(jnp.ones(3))
        >>> jnp.allclose(y, jnp.tanh(captured["0"]), atol=1e-6).item()
        True
    """
    _check_model("capture", model)
    found = matching("submodule", model.core, patterns, submodules(model.core))
    edits = model.core.edits
    if edits.captured and inputs != edits.inputs:
        raise InputError(
            f"`capture` is to watch `{model.core.name}` with `inputs={inputs}`, but it is watched "
            f"with `inputs={edits.inputs}` already. Name all submodules in one `capture`."
        )
    captured = dict.fromkeys([*edits.captured, *itertools.chain(*found)])
    edits = dataclasses.replace(edits, captured=tuple(captured), inputs=inputs)
    return _with_edits(model, _calling(edits, found))


def patch(model: TorchModule, values: Mapping[str, Any]) -> TorchModule:
    """A model in which the outputs of submodules are replaced.

    **Arguments:**

    - `model`: the model.
    - `values`: by the name of a submodule, or a pattern of names as in `capture`, an array (or a
        tree of arrays, as the submodule returns them), or a JAX function from the output to what
        replaces it.

    **Returns:**

    The model. The arrays are leaves of it, in `model.inserted`, so that gradients flow to them. The
    submodules run as before. A function is called while the forward stands still: torch runs up to
    it, JAX computes it, and torch runs on. A function is given what was patched there before: the
    array, or what an earlier function gave. An array replaces that. Both are in place of the output
    of what `replace_module` puts there, before or after.

    **Raises:**

    `InputError` for a name that is no submodule's, and for a function with arrays of its own for
    several; `ModuleError`, when the model is called, for an array of another shape than the output,
    and as `replace_module` does.

    !!! example

        >>> import jax.numpy as jnp, torch
        >>> from eqx_torch import from_torch
        >>> model = from_torch(torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Tanh()))
        >>> patch(model, {"0": jnp.zeros(2)})(jnp.ones(3))
        Array([0., 0.], dtype=float32)
    """
    _check_model("patch", model)
    _check_mapping("patch", "submodules to arrays or functions", values)
    core = model.core
    edits, inserted = core.edits, dict(model.inserted)
    for pattern, value in values.items():
        found = matching("submodule", core, pattern, submodules(core))
        names = list(itertools.chain(*found))
        if callable(value):
            kind, node = "mapped", _function_node("patch", core, pattern, names, value)
        else:
            kind, node = "values", jax.tree.map(_as_array(pattern), value)
        for name in names:
            if kind == "mapped":
                _check_uncut(core, edits, name)
            edits = _put(edits, inserted, name, kind, node)
        edits = _calling(edits, found)
    return dataclasses.replace(_with_edits(model, edits), inserted=inserted)


def replace_module(
    model: TorchModule, name: str | Sequence[str], new: Callable[..., Any]
) -> TorchModule:
    """A model one of whose submodules is computed by JAX.

    **Arguments:**

    - `model`: the model.
    - `name`: of the submodule, such as `"encoder.layer.1"`; of several, a pattern as in `capture`,
        or a list of names.
    - `new`: an Equinox module, or a JAX function, that is called with what torch gives the
        submodule (arrays in place of tensors, the rest as it is) and returns what stands for its
        output. If it has an argument `key`, it is given one made from the key of the call, or None.

    **Returns:**

    The model. `new` is `model[name]` and its leaves are the model's own; the parameters that only
    the old submodule had are gone. What is patched in place of its output stays. A call runs torch
    up to the submodule, then `new`, and torch from there. Submodules that had finished hand over
    their outputs and are not computed again; between them, the code of the modules around `new`
    runs again after each replacement.

    **Raises:**

    `InputError` for a name that is no submodule's, what cannot be called or has a state, and a
    module with arrays of its own for several; `ModuleError` where the
    submodule has replaced parts inside, and, when the model is called, where it is not called or is
    given what JAX cannot take, such as caches.

    !!! example

        >>> import jax, jax.numpy as jnp, torch
        >>> from eqx_torch import from_torch
        >>> model = from_torch(torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Tanh()))
        >>> replace_module(model, "1", jax.nn.relu)(jnp.ones(3)).shape
        (2,)
    """
    _check_model("replace_module", model)
    core = model.core
    if not callable(new):
        raise InputError(
            f"`replace_module` puts an Equinox module or a function in place of {name!r}, but got "
            f"a {type(new).__name__}. For an array in place of its output, `patch`."
        )
    found = matching("submodule", core, name, submodules(core))
    names = list(itertools.chain(*found))
    node = _function_node("replace_module", core, name, names, new)
    model = _with_edits(model, _calling(core.edits, found))
    for path in names:
        model = _replaced(model, path, node)
    return model


def _replaced(model: TorchModule, name: str, node: Any) -> TorchModule:
    core, inserted = model.core, dict(model.inserted)
    edits = _put(core.edits, inserted, name, "taken", node)
    if name not in core.edits.taken:
        _check_uncut(core, core.edits, name, taken=True)
        module = _without(core, name)
        own, parameters = core_of_part(core, module, core.options, core.examples, edits)
        model = with_part(model, own, parameters)
    return dataclasses.replace(model, inserted=inserted)


def reparametrise(
    model: TorchModule, functions: Mapping[str, Callable[[jax.Array], jax.Array]]
) -> TorchModule:
    """A model some of whose parameters are computed by JAX at each call.

    **Arguments:**

    - `model`: the model.
    - `functions`: by the name of a parameter, or a pattern of names as in `select`, a JAX function
        or an Equinox module that gives the parameter from the array that has stood for it. Arrays
        of an Equinox module become leaves of the model. So one that has any is for one parameter.

    **Returns:**

    The model. `model.params[name]` is now a node with the attributes `weight`, the array, and
    `function`. `to_torch` and `state_dict` give the computed parameters.

    **Raises:**

    `InputError` for a name that is no parameter's, a module with arrays for several parameters, and
    a function that changes the parameter's shape or dtype.

    !!! example

        A low-rank update of a frozen weight (LoRA):

        >>> import equinox as eqx, jax, jax.numpy as jnp, torch
        >>> from eqx_torch import from_torch, trainable
        >>> class LowRank(eqx.Module):
        ...     a: jax.Array
        ...     b: jax.Array
        ...     def __call__(self, weight):
        ...         return weight + self.b @ self.a
        >>> model = from_torch(torch.nn.Linear(3, 2).requires_grad_(False))
        >>> update = LowRank(jnp.ones((1, 3)), jnp.zeros((2, 1)))
        >>> model = reparametrise(model, {"weight": update})
        >>> factors, frozen = eqx.partition(model, trainable(model))
        >>> [x.shape for x in jax.tree.leaves(factors)]
        [(1, 3), (2, 1)]
    """
    _check_model("reparametrise", model)
    _check_mapping("reparametrise", "parameters to functions", functions)
    params = dict(model.params)
    known = parameter_names(model.core)
    for pattern, function in functions.items():
        names = list(itertools.chain(*matching("parameter", model.core, pattern, known)))
        _check_shared(model.core, "parameter", pattern, names, function)
        for name in names:
            node = Reparametrised(params[name], as_node(function))
            _check_computed(model.core, name, node)
            params[name] = node
    return dataclasses.replace(model, params=params)


def fsdp(model: TorchModule, axis: str) -> TorchModule:
    """A model whose parameters are sharded over a mesh axis, and gathered for each call.

    So that parameters, gradients and the optimiser's state take the memory of one shard on each
    device, while a call has them whole ("fully sharded data parallel").

    **Arguments:**

    - `model`: the model.
    - `axis`: the name of an axis of the mesh that is in force (`jax.set_mesh`).

    **Returns:**

    The model. Each parameter of which some dimension is a multiple of the axis's size is sharded
    along the largest such dimension; others stay whole on every device, as do the arrays of
    `reparametrise`'s functions.

    **Raises:**

    `ShardingError` if the mesh in force has no such axis.

    !!! example

        >>> import jax, torch
        >>> from eqx_torch import from_torch
        >>> mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
        >>> with jax.set_mesh(mesh):
        ...     model = fsdp(from_torch(torch.nn.Linear(3, 2)), "data")
        ...     print(model.params["weight"].weight.sharding.spec[1])
        data
    """
    _check_model("fsdp", model)
    mesh = jax.sharding.get_mesh()
    if not isinstance(axis, str):
        name = next((part for part in axis if isinstance(part, str)), None) if axis else None
        raise InputError(
            f"`fsdp` takes the name of one mesh axis, but got {axis!r}. Write `fsdp(model, "
            f'"{name or next(iter(mesh.shape), "batch")}")`.'
        )
    if axis not in mesh.shape:
        raise ShardingError(
            f"`fsdp` shards over the mesh axis {axis!r}, but the mesh in force has the axes "
            f"{list(mesh.shape)}. Enter the mesh first: `with jax.set_mesh(mesh):`."
        )
    params = {n: _spread(p, axis, mesh) for n, p in model.params.items()}
    return dataclasses.replace(model, params=params)


class Gathered(eqx.Module):
    """Gathers a parameter from the shards of a mesh axis."""

    axis: str = eqx.field(static=True)
    dimension: int = eqx.field(static=True)

    def __call__(self, weight: jax.Array) -> jax.Array:
        mesh = jax.sharding.get_abstract_mesh()
        if self.axis in axes_of_type(mesh, AxisType.Manual):
            return jax.lax.all_gather(weight, self.axis, axis=self.dimension, tiled=True)
        if self.axis in axes_of_type(mesh, AxisType.Explicit):
            return jax.sharding.reshard(weight, PartitionSpec())
        return weight


def _spread(param: Any, axis: str, mesh: Any) -> Any:
    """A parameter in shards, if it can be; of one that is computed, the array it is computed of."""
    whole = NamedSharding(mesh, PartitionSpec())
    if isinstance(param, Reparametrised):
        weight = _spread(param.weight, axis, mesh)
        if isinstance(param.function, Gathered):
            return weight
        arrays, rest = eqx.partition(param.function, eqx.is_array)
        return Reparametrised(weight, eqx.combine(jax.device_put(arrays, whole), rest))
    size = mesh.shape[axis]
    fitting = [i for i, n in enumerate(np.shape(param)) if n and n % size == 0]
    if not fitting:
        return jax.device_put(param, whole)
    dimension = max(fitting, key=lambda i: param.shape[i])
    spec = PartitionSpec(*(axis if i == dimension else None for i in range(param.ndim)))
    return Reparametrised(
        jax.device_put(param, NamedSharding(mesh, spec)), Gathered(axis, dimension)
    )


def _spelled(core: Core, leaves: Sequence[str]) -> dict[str, str]:
    """The names of leaves by all of theirs: those of a parameter that has several, too."""
    known = {leaf: leaf for leaf in leaves}
    for alias, name in parameter_names(core).items():
        below = [leaf for leaf in leaves if leaf == name or leaf.startswith(f"{name}.")]
        known |= {alias + leaf.removeprefix(name): leaf for leaf in below if alias != name}
    return known


def _leaf_names(tree: dict[str, Any]) -> list[str]:
    """The name of each leaf of a model's parameters, or of what was inserted."""
    names = []
    for path, _ in jtu.tree_flatten_with_path(tree)[0]:
        name, *rest = (jtu.keystr((key,), simple=True) for key in path)
        inner, node = rest[:1], tree[name]
        is_base = inner == ["weight"] and isinstance(node, Reparametrised)
        is_base |= inner == ["taken"] and isinstance(node, Several)
        own = [key for key in rest if key != "function"]
        names.append(".".join([name, *(own[1:] if is_base else own)]))
    return names


def _with_edits(model: TorchModule, edits: Edits) -> TorchModule:
    core = model.core
    own = Core(core.blueprint, core.dtypes, core.options, core.examples, edits, core.stored)
    return dataclasses.replace(model, core=own)


def _put(edits: Edits, inserted: dict[str, Any], name: str, kind: str, new: Any) -> Edits:
    """Puts something in place of a submodule, or of its output, into `inserted`."""
    place = several(edits, name, inserted)
    if kind == "mapped":
        place = dataclasses.replace(place, mapped=(*place.mapped, new))
    elif kind == "values":
        place = dataclasses.replace(place, values=new, mapped=())
        edits = dataclasses.replace(edits, mapped=tuple(p for p in edits.mapped if p != name))
    else:
        place = dataclasses.replace(place, taken=new)
    paths = dict.fromkeys([*getattr(edits, kind), name])
    edits = dataclasses.replace(edits, **{kind: tuple(paths)})
    inserted[name] = node_of(edits.kinds(name), place)
    return edits


def _calling(edits: Edits, found: Sequence[tuple[str, ...]]) -> Edits:
    """The edits, with what the forward has to call."""
    return dataclasses.replace(edits, called=tuple(dict.fromkeys([*edits.called, *found])))


def _check_uncut(core: Core, edits: Edits, name: str, taken: bool = False) -> None:
    """Raises if a submodule is inside of one that JAX computes, or has one inside."""
    for other in edits.inserted:
        cuts = other in edits.cuts and _is_inside(core, name, other)
        cut = (taken or other in edits.cuts) and _is_inside(core, other, name)
        if cuts or cut:
            raise ModuleError(
                f"{name} of `{core.name}` cannot be replaced together with {other}, since one is "
                "inside of the other. Replace the inner one, or all of the outer one."
            )


def _is_inside(core: Core, name: str, outer: str) -> bool:
    module = core.blueprint.module.get_submodule(name)
    around = core.blueprint.module.get_submodule(outer)
    return module is not around and any(module is m for m in around.modules())


def _function_node(
    function: str, core: Core, pattern: Any, names: Sequence[str], new: Callable[..., Any]
) -> Any:
    """What a model holds of a function that it calls in the middle of its forward."""
    if isinstance(new, torch.nn.Module):
        raise InputError(
            f"`{function}` got a torch module for {pattern!r}. Convert it: `from_torch(module)`."
        )
    _check_shared(core, "submodule", pattern, names, new)
    leaves = jax.tree.leaves(new, is_leaf=lambda x: _has_state(x) or isinstance(x, TorchModule))
    if any(map(_has_state, leaves)):
        raise InputError(
            f"`{function}` got a {type(new).__name__} for {pattern!r}, which has a state "
            "(`eqx.nn.StateIndex`), but what JAX computes inside of a model is called without. "
            "Keep torch's layer, whose buffers are the state of the model, or put there what has "
            "none: another layer, such as `eqx.nn.LayerNorm`, or one whose state stays as it is, "
            "`lambda x: layer(x, state)[0]`."
        )
    return as_node(new)


def _has_state(x: Any) -> bool:
    if isinstance(x, TorchModule):  # without initial values it cannot be called without a state
        return x.buffers is not None and not isinstance(x.buffers.init, dict)
    return isinstance(x, eqx.nn.StateIndex)


def _check_shared(core: Core, what: str, pattern: Any, names: Sequence[str], new: Any) -> None:
    """Raises for a function that would have its arrays several times."""
    if len(names) > 1 and any(map(eqx.is_array, jax.tree.leaves(new))):
        raise InputError(
            f"{pattern!r} matches {len(names)} {what}s of `{core.name}`, but the "
            f"{type(new).__name__} for them has arrays of its own, of which each would have a "
            "copy. Make one for each by its name."
        )


def _without(core: Core, name: str) -> torch.nn.Module:
    """The torch module with a stand-in for a submodule: its plain attributes, and nothing else."""
    blueprint = core.blueprint
    own = [*blueprint.parameters, *blueprint.state, *blueprint.constants]
    own += [view.placeholder for view in blueprint.views]
    module = copied(blueprint.module, {id(t): t for t in own}).module
    old = module.get_submodule(name)
    stub = object.__new__(type(old))
    torch.nn.Module.__init__(stub)
    kept = vars(old).keys() - vars(stub).keys()
    vars(stub).update({k: copy.copy(vars(old)[k]) for k in kept if _is_plain(vars(old)[k])})
    stub.training = old.training
    for path, submodule in module.named_modules(remove_duplicate=False):
        if submodule is old:
            parent, _, child = path.rpartition(".")
            module.get_submodule(parent)._modules[child] = stub
    return module


def _is_plain(value: Any) -> bool:
    held = torch_tree.tree_leaves(value)
    return not any(isinstance(x, torch.Tensor | torch.nn.Module) for x in held)


def _as_array(name: str) -> Callable[[Any], jax.Array]:
    def convert(x: Any) -> jax.Array:
        if isinstance(x, jax.Array | np.ndarray | np.generic | bool | int | float | complex):
            return jnp.asarray(x)
        raise InputError(
            f"`patch` takes JAX arrays, or a JAX function, for the output of {name!r}, but "
            f"got a {type(x).__name__}. Convert tensors by `eqx_torch.t2j(x)`."
        )

    return convert


def _check_computed(core: Core, name: str, node: Reparametrised) -> None:
    made = eqx.filter_eval_shape(Reparametrised.value, node)
    shape = core.shapes[0][name]
    dtype = jax.tree.leaves(node)[0].dtype
    if getattr(made, "shape", None) != shape or made.dtype != dtype:
        shown = f"{made.dtype}{list(made.shape)}" if hasattr(made, "dtype") else repr(made)
        raise InputError(
            f"the function for the parameter {name} of `{core.name}` gives {shown}, but the "
            f"parameter is {dtype}{list(shape)}."
        )


def _check_model(function: str, model: Any) -> None:
    if not isinstance(model, TorchModule):
        remedy = " Convert it: `from_torch(module)`." * isinstance(model, torch.nn.Module)
        raise InputError(
            f"`{function}` takes a model made by `from_torch`, but got a "
            f"{type(model).__name__}.{remedy}"
        )


def _check_mapping(function: str, what: str, given: Any) -> None:
    if not isinstance(given, Mapping):
        raise InputError(
            f"`{function}` takes a dict from the names of {what}, but got a {type(given).__name__}."
        )
