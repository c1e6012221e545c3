"""The static part of a `TorchModule`: the module without its tensors, and how it is called."""

import dataclasses
import functools
import inspect
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import torch
from jax.sharding import PartitionSpec

from .._dtypes import canonical_dtype, dtype_t2j
from .._examples import Examples
from .._invoke import Arguments, Restored
from .._program import Compiled, Lock, Site, Spec, VmapMethod
from .._shapes import Inference, OutputShapes
from .blueprint import Blueprint
from .function import ModuleFunction
from .layers import drawing_layers


@dataclasses.dataclass(frozen=True)
class Options:
    """The arguments of `from_torch` beside the module and its examples."""

    method: str = "forward"
    output_shapes: OutputShapes = None
    out_specs: Any = None
    lock: Lock | None = None
    depth: int | None = None
    vmap_method: VmapMethod = "torch"

    def key(self) -> Hashable:
        """Equal for equal options."""
        trees = (self.output_shapes, self.out_specs)
        leaves, structure = jax.tree.flatten(trees, is_leaf=_is_spec)
        return (
            self.method,
            tuple(map(_by_value, leaves)),
            structure,
            self.lock,
            self.depth,
            self.vmap_method,
        )


class Core:
    """Hashable; equal where the modules are equal but for their parameters.

    Attributes:
        blueprint: the module without its tensors.
        dtypes: torch's own dtypes of the parameters and of the state.
        examples: of the method's arguments, if there are any.
        function: the method as a torch function.
        infer: gives the outputs of the function.
    """

    def __init__(
        self,
        blueprint: Blueprint,
        dtypes: tuple[torch.dtype, ...],
        options: Options,
        examples: Examples | None,
    ) -> None:
        self.blueprint = blueprint
        self.dtypes = dtypes
        self.options = options
        self.examples = examples
        self.name = type(blueprint.module).__name__
        self._compiled = Compiled()
        self.function = ModuleFunction(
            blueprint,
            options.method,
            name=self.name,
            lock=options.lock,
            depth=options.depth,
            vmap_method=options.vmap_method,
            compiled=self._compiled,
        )
        declared = None if options.output_shapes is None else self._declared
        self.infer = Inference(self.function, declared, self._declared_for())

    @functools.cached_property
    def arguments(self) -> frozenset[str]:
        """The names of the method's arguments."""
        return argument_names(self.blueprint.module, self.options.method)

    def restored(self, user: Arguments) -> Restored:
        """The torch dtypes to give to parameters, state and arguments before torch sees them.

        Integer state (the batch counter of BatchNorm) and example arguments are given back the 64
        bits that JAX may not have; parameters compute in the precision that JAX has.
        """
        count = len(self.blueprint.parameters)
        state = tuple(_restored_state(dtype) for dtype in self.dtypes[count:])
        arguments = self.examples and self.examples.restored(user)
        return (None,) * count + state + (arguments or (None,) * len(user.specs()))

    def draws(self, site: Site, inference: bool) -> Sequence[str] | None:
        """The layers that draw random numbers at a call site without a seed, None if unknown."""
        found = self.function.draws.get(site)
        if found is not None:
            return found
        flags = self.blueprint.training_flags(inference)
        return drawing_layers(self.blueprint.module, flags) or None

    def _declared(self, parameters: Any, state: Any, seed: Any, mode: Any, *args: Any, **kw: Any):
        del parameters, seed, mode
        shapes = self.options.output_shapes
        if callable(shapes) and not hasattr(shapes, "shape"):
            shapes = shapes(*args, **kw)
        return shapes, *state

    def _declared_for(self) -> tuple[Spec, ...] | None:
        if self.examples is None:
            return None
        own = [*self.blueprint.parameters, *self.blueprint.state]
        return (*(_spec(t) for t in own), *self.examples.specs)

    def _key(self) -> Hashable:
        return (
            self.blueprint,
            self.dtypes,
            self.options.key(),
            self.examples and self.examples.key(),
        )

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Core) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash((self.blueprint, self.dtypes))

    def __repr__(self) -> str:
        return self.name


def argument_names(module: torch.nn.Module, method: str) -> frozenset[str]:
    """The names of a method's arguments."""
    try:
        return frozenset(inspect.signature(getattr(module, method)).parameters)
    except (TypeError, ValueError):
        return frozenset()


def _restored_state(dtype: torch.dtype) -> torch.dtype | None:
    narrowed = canonical_dtype(dtype) != dtype_t2j(dtype)
    return dtype if narrowed and not dtype.is_floating_point and not dtype.is_complex else None


def _spec(tensor: torch.Tensor) -> Spec:
    return Spec(tuple(tensor.shape), canonical_dtype(tensor.dtype))


def _by_value(leaf: Any) -> Hashable:
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        return tuple(leaf.shape), str(leaf.dtype)
    return leaf


def _is_spec(x: Any) -> bool:
    return isinstance(x, PartitionSpec)
