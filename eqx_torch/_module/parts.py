"""The parts of a model: its submodules as models, its tensors and plain attributes.

A submodule of a converted module is a model that has some of the whole's leaves, under the names
that torch gives them there. It is made when it is asked for and holds nothing of its own: what
`equinox.tree_at` finds through it are the leaves of the whole. Its static part is made once.
"""

import copy
import dataclasses
import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import torch

from .._arrays import t2j
from .._errors import InputError, ModuleError
from .._examples import Examples
from .blueprint import Blueprint, Names
from .core import Core, Options
from .edits import Edits
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
        check_paths(core, [index])
        return part(model, index)
    names = _children(core)
    if isinstance(index, slice) and isinstance(module, torch.nn.ModuleList | torch.nn.Sequential):
        chosen = names[index]
        moved = {old: str(new) for new, old in enumerate(chosen)}
        rename = functools.partial(_moved, moved=moved)
        return _made(model, ("slice", *chosen), lambda: module[index], rename)
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
    name = canonical(core, path)
    if name in core.edits.taken:
        return model.inserted[name]
    prefix = f"{name}."
    below = lambda p: p.removeprefix(prefix) if p.startswith(prefix) else None  # noqa: E731
    return _made(model, (name,), lambda: core.blueprint.module.get_submodule(name), below)


def canonical(core: Core, path: str) -> str:
    """The first of the paths of a submodule that has several."""
    module = core.blueprint.module.get_submodule(path)
    return next(name for name, m in core.blueprint.module.named_modules() if m is module)


def paths(core: Core) -> list[str]:
    """The paths of all submodules."""
    every = core.blueprint.module.named_modules(remove_duplicate=False)
    return [name for name, _ in every if name]


def check_paths(core: Core, wanted: Iterable[str]) -> None:
    """Raises for a path at which there is no submodule."""
    known = paths(core)
    for path in wanted:
        if path not in known:
            raise InputError(f"`{core.name}` has no submodule {path!r}{_nearest(path, known)}")


def matching(
    what: str, core: Core, patterns: str | Sequence[str], known: Sequence[str]
) -> list[str]:
    """The names that a pattern matches: that very name, or else those whose end it matches.

    In a pattern `*` stands for one part of a name, or for some of its characters.

    Raises:
        InputError: a pattern matches none.
    """
    found: dict[str, None] = {}
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        names = [pattern] if pattern in known else [n for n in known if _matches(n, pattern)]
        if not names:
            raise InputError(
                f"{pattern!r} matches no {what} of `{core.name}`{_nearest(pattern, known)}"
            )
        found.update(dict.fromkeys(names))
    return list(found)


def _matches(name: str, pattern: str) -> bool:
    return PurePosixPath(name.replace(".", "/")).match(pattern.replace(".", "/"))


def _made(
    model: Any,
    key: tuple[str, ...],
    submodule: Callable[[], torch.nn.Module],
    renamed: Callable[[str], str | None],
) -> Any:
    """A model of a submodule.

    Args:
        model: the whole.
        key: of the submodule among those of the whole.
        submodule: gives it, without its tensors.
        renamed: the path in it of what has a path in the whole, None if it is not inside.
    """
    core: Core = model.core
    if key not in core.parts:
        options = dataclasses.replace(
            core.options, method="forward", output_shapes=None, out_specs=None, signature=None
        )
        edits = core.edits.renamed(renamed)
        core.parts[key] = core_of_part(core, submodule(), options, None, edits)
    own, parameters = core.parts[key]
    inserted = {renamed(path): new for path, new in model.inserted.items()}
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
            f"its submodules are: {names}."
        )
    return list(module._modules)


def _moved(path: str, moved: dict[str, str]) -> str | None:
    first, dot, rest = path.partition(".")
    return f"{moved[first]}{dot}{rest}" if first in moved else None


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
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.3) or list(known[:3])
    listed = ", ".join(map(repr, close))
    return f". The nearest that there is: {listed}." if close else "."
