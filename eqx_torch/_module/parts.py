"""The parts of a model: its submodules as models, its tensors and plain attributes.

A submodule of a converted module is a model that has some of the whole's leaves, under the names
that torch gives them there. It is made when it is asked for and holds nothing of its own: what
`equinox.tree_at` finds through it are the leaves of the whole. Its static part is made once.
"""

import copy
import dataclasses
import difflib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import torch

from .._arrays import t2j
from .._errors import InputError, ModuleError
from .._examples import Examples
from .blueprint import Blueprint, Names
from .core import Core, Options
from .edits import Edits, several
from .walk import walk


_CONTAINERS = (torch.nn.ModuleList, torch.nn.Sequential, torch.nn.ModuleDict)
_OF_TORCH = frozenset(vars(torch.nn.Module()))

_MOVE = "torch runs where the arrays are: `model = eqx.filter_shard(model, jax.devices()[0])`."
_CAST = (
    "For another dtype convert the torch module, `from_torch(module.half())`, or cast the "
    "parameters: `params, rest = eqx.partition(model, eqx.is_inexact_array)`, then `model = "
    "eqx.combine(jax.tree.map(lambda a: a.astype(jnp.float16), params), rest)`."
)
_PARAMETERS = (
    "Write `model.params`, a dict of JAX arrays. Optimisers are optax's: "
    "`opt_state = optax.adam(1e-3).init(model)`."
)
_GRADIENTS = "Gradients are results, not kept in the model: `grads = eqx.filter_grad(loss)(model)`."
_REMEDIES = {
    "eval": "Write `model = eqx.nn.inference_mode(model)`.",
    "train": "Write `model = eqx.nn.inference_mode(model, value=False)`.",
    "training": "Read `model.inference`, which is its opposite.",
    "forward": 'Write `model(x)`; another method is `from_torch(model, method="name")`.',
    "state_dict": "Write `eqx_torch.state_dict(model)`.",
    "load_state_dict": "Write `model = eqx_torch.load_state_dict(model, sd)`.",
    "requires_grad_": "Write `eqx.partition(model, eqx_torch.trainable(model))`.",
    "to": f"{_MOVE} {_CAST}",
    **dict.fromkeys(["cuda", "cpu"], _MOVE),
    **dict.fromkeys(["half", "bfloat16", "float", "double"], _CAST),
    **dict.fromkeys(["parameters", "named_parameters"], _PARAMETERS),
    **dict.fromkeys(["zero_grad", "grad", "backward"], _GRADIENTS),
}


def attribute(model: Any, name: str) -> Any:
    """What torch's module has under this name: a submodule, a tensor or a plain attribute."""
    core: Core | None = vars(model).get("core")
    if core is None or name.startswith("__"):
        raise AttributeError(_missing_attribute(core, name))
    module = core.blueprint.module
    tensor = module._parameters.get(name, module._buffers.get(name))
    if tensor is not None:
        return _tensor(model, name, tensor)
    if module._modules.get(name) is not None:
        return part(model, name)
    if name in _OF_TORCH or not _is_plain(module, name):
        raise AttributeError(_missing_attribute(core, name))
    # A change to it would change what is compiled.
    return copy.deepcopy(getattr(module, name))


def item(model: Any, index: Any) -> Any:
    """A submodule by its path or, of a container, by its number, or some by a range of numbers."""
    core: Core = model.core
    module = core.blueprint.module
    if isinstance(index, str):
        known = submodules(core)
        if index not in known:
            raise InputError(f"`{core.name}` has no submodule {index!r}{_nearest(index, [*known])}")
        return part(model, index)
    names = _children(core)
    if isinstance(index, slice) and isinstance(module, torch.nn.ModuleList | torch.nn.Sequential):
        return _made(model, ("slice", *names[index]), module[index])
    if not isinstance(index, int | np.integer) or not -len(names) <= index < len(names):
        raise IndexError(
            f"`{core.name}` has the {len(names)} submodules {', '.join(names)}, but was asked for "
            f"{index!r}."
        )
    return part(model, names[index])


def items(model: Any) -> Iterator[Any]:
    """The submodules of a container, the keys of one that has keys."""
    names = _children(model.core)
    if isinstance(model.core.blueprint.module, torch.nn.ModuleDict):
        return iter(names)
    return (part(model, name) for name in names)


def length(model: Any) -> int:
    """How many submodules a container has."""
    return len(_children(model.core))


def part(model: Any, path: str) -> Any:
    """The submodule at a path, as a model, or what has been put in its place."""
    core: Core = model.core
    if not path:
        return model
    module = core.blueprint.module
    submodule = module.get_submodule(path)
    name = next(name for name, m in module.named_modules() if m is submodule)
    if name in core.edits.taken:
        return several(core.edits, name, model.inserted).taken
    return _made(model, (name,), submodule)


def submodules(core: Core) -> dict[str, str]:
    """The path of each submodule, and the first of its paths: it may have several."""
    module = core.blueprint.module
    first = {id(m): name for name, m in module.named_modules()}
    every = module.named_modules(remove_duplicate=False)
    return {name: first[id(m)] for name, m in every if name}


def parameter_names(core: Core) -> dict[str, str]:
    """The name of each parameter, and the first of its names."""
    names, own = core.blueprint.names.parameters, core.blueprint.parameters
    first = {id(p): name for name, p in zip(names, own, strict=True)}
    every = core.blueprint.module.named_parameters(remove_duplicate=False)
    return dict(zip(names, names, strict=True)) | {
        name: first[id(p)] for name, p in every if id(p) in first
    }


def matching(
    what: str, core: Core, patterns: str | Sequence[str], known: Mapping[str, str]
) -> list[tuple[str, ...]]:
    """The names that each pattern matches: that very name, or else those whose end it matches.

    In a pattern `*` stands for one part of a name, or for some of its characters.

    Args:
        what: has names, for messages.
        core: of the model.
        patterns: one or several.
        known: each name, and the first of those that the same thing has.

    Raises:
        InputError: a pattern matches none, or is none.
    """
    listed = [patterns] if isinstance(patterns, str) else patterns
    if not isinstance(listed, Sequence) or not all(isinstance(p, str) for p in listed):
        example = next(iter(known), "name")
        raise InputError(
            f"a {what} of `{core.name}` is named by a string, such as {example!r}, and several by "
            f"a list of strings, but got {patterns!r} of type {type(patterns).__name__}."
        )
    found = []
    for pattern in listed:
        names = [pattern] if pattern in known else [n for n in known if _matches(n, pattern)]
        if not names:
            raise InputError(
                f"{pattern!r} matches no {what} of `{core.name}`. It is a whole name or the end "
                f"of one, in which `*` stands for one part{_nearest(pattern, list(known))}"
            )
        found.append(tuple(dict.fromkeys(known[name] for name in names)))
    return found


def _matches(name: str, pattern: str) -> bool:
    return bool(pattern) and PurePosixPath(name.replace(".", "/")).match(pattern.replace(".", "/"))


def _made(model: Any, key: tuple[str, ...], submodule: torch.nn.Module) -> Any:
    """A model of a submodule.

    Args:
        model: the whole.
        key: of the submodule among those of the whole.
        submodule: itself, without its tensors.
    """
    core: Core = model.core
    moved: dict[str, str | None] = {}
    if core.edits:
        paths = {id(m): name for name, m in submodule.named_modules() if name}
        whole = core.blueprint.module.named_modules()
        moved = {path: paths.get(id(m)) for path, m in whole}
    if key not in core.parts:
        options = dataclasses.replace(
            core.options, method="forward", output_shapes=None, out_specs=None, signature=None
        )
        edits = core.edits.renamed(moved.get)
        core.parts[key] = core_of_part(core, submodule, options, None, edits)
    own, parameters = core.parts[key]
    inserted = {moved[path]: new for path, new in model.inserted.items()}
    frozen = core.blueprint.flags[0] and not own.blueprint.flags[0]
    return dataclasses.replace(
        with_part(model, own, parameters),
        inserted={path: new for path, new in inserted.items() if path is not None},
        inference=True if frozen else model.inference,
    )


def with_part(model: Any, core: Core, parameters: Sequence[str]) -> Any:
    """The model with the static part of some of it, of the parameters that have these names."""
    pairs = zip(core.blueprint.names.parameters, parameters, strict=True)
    return dataclasses.replace(
        model,
        params={name: model.params[old] for name, old in pairs},
        buffers=model.buffers if core.stored else None,
        core=core,
    )


def core_of_part(
    core: Core, module: torch.nn.Module, options: Options, examples: Examples | None, edits: Edits
) -> tuple[Core, tuple[str, ...]]:
    """The static part of a model of which `module` has some of the tensors' stand-ins.

    Returns:
        That, and its parameters' names in the whole.
    """
    whole = core.blueprint
    _check_apart(core, module)
    names = {id(t): n for n, t in zip(whole.names.parameters, whole.parameters, strict=True)}
    names |= {id(t): n for n, t in zip(whole.names.state, whole.state, strict=True)}
    stored = dict(zip(whole.names.state, core.stored, strict=True))
    dtypes = dict(zip((*whole.names.parameters, *whole.names.state), core.dtypes, strict=True))
    parameters = {name: names[id(t)] for name, t in module.named_parameters()}
    buffers = dict(module.named_buffers())
    state = {name: names[id(t)] for name, t in buffers.items() if id(t) in names}
    constants = tuple(name for name in buffers if name not in state)
    blueprint = Blueprint(module, Names((*parameters,), (*state,), constants))
    indices = {id(t): i for i, t in enumerate(whole.constants)}
    at = [indices.get(id(buffers[name])) for name in constants]
    blueprint.precise = {i: whole.precise[j] for i, j in enumerate(at) if j in whole.precise}
    own = Core(
        blueprint,
        tuple(dtypes[name] for name in (*parameters.values(), *state.values())),
        options,
        examples,
        edits,
        tuple(stored[name] for name in state.values()),
    )
    return own, tuple(parameters.values())


def _check_apart(core: Core, module: torch.nn.Module) -> None:
    """Raises if a submodule has a view of a tensor, which only the whole can follow."""
    views = {id(view.placeholder) for view in core.blueprint.views}
    held = [place.path for place in walk(module) if id(place.value) in views] if views else []
    if held:
        raise ModuleError(
            f"a submodule of `{core.name}` keeps a view of a tensor at {held[0]}, so that it "
            "cannot be taken out as a model. Convert it by itself, "
            "`from_torch(eqx_torch.to_torch(model).get_submodule(path))`."
        )


def _tensor(model: Any, name: str, tensor: torch.Tensor) -> Any:
    """The leaf, or the array, that stands for a tensor of the module."""
    core: Core = model.core
    blueprint = core.blueprint
    for names, own in (
        (blueprint.names.parameters, blueprint.parameters),
        (blueprint.names.state, blueprint.state),
    ):
        for known, placeholder in zip(names, own, strict=True):
            if placeholder is tensor:
                if own is blueprint.parameters:
                    return model.params[known]
                init = model.buffers.init
                if isinstance(init, dict):
                    return init[core.stored[names.index(known)]]
                raise AttributeError(_missing_attribute(core, name))
    return t2j(tensor)


def _is_plain(module: torch.nn.Module, name: str) -> bool:
    """Whether an attribute is data, neither computed nor a method."""
    try:
        value = inspect.getattr_static(module, name)
    except AttributeError:
        return False
    is_code = inspect.isroutine(value) or hasattr(type(value), "__get__")
    return not (is_code or isinstance(value, torch.nn.Module | torch.Tensor))


def _children(core: Core) -> list[str]:
    module = core.blueprint.module
    if not isinstance(module, _CONTAINERS):
        names = ", ".join(name for name, _ in module.named_children()) or "none"
        raise TypeError(
            f"`{core.name}` is no container of modules, so that it has no length and no items; "
            f"its submodules are: {names}. `equinox.tree_at` replaces arrays, such as those of "
            "`model.params`; to replace a submodule, `eqx_torch.replace_module(model, path, new)`."
        )
    return list(module._modules)


def _missing_attribute(core: Core | None, name: str) -> str:
    """The message for an attribute that a model (None while it is being made) does not have."""
    # Libraries look for names with underscores at every object.
    remedy = None if core is None or name.startswith("__") else _remedy(core, name)
    return f"a TorchModule has no attribute `{name}`." + (f" {remedy}" if remedy else "")


def _remedy(core: Core, name: str) -> str | None:
    module, names = core.blueprint.module, core.blueprint.names
    if name in names.state:
        stored = core.stored[names.state.index(name)]
        return f'Write `state.get(model.buffers)["{stored}"]`: the forward changes it.'
    if name in _REMEDIES:
        return _REMEDIES[name]
    if not hasattr(torch.nn.Module, name) and inspect.isroutine(getattr(type(module), name, None)):
        return f'Write `from_torch(model, method="{name}")`, which shares its parameters.'
    if name in dir(module):
        arguments = "model, state" if names.state else "model"
        return f"The torch module has one: `eqx_torch.to_torch({arguments}).{name}`."
    if name.startswith("_"):
        return None
    return f"`{core.name}` has none either{_nearest(name, [*module._modules, *module._parameters])}"


def _nearest(name: str, known: Sequence[str]) -> str:
    """The end of a message about a name that is unknown: those that are like it, or some."""
    bare = name.strip("*.")
    containing = [other for other in known if bare and bare in other]
    close = containing or difflib.get_close_matches(name, known, n=3, cutoff=0.3) or known
    listed = ", ".join(map(repr, close[:3]))
    return f". The nearest that there is: {listed}." if close else "."
