"""The static part of a `TorchModule`: the module without its tensors, and how it is called."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import torch
from jax.sharding import PartitionSpec

from .._annotations import read_signature, Signature
from .._dtypes import canonical_dtype, dtype_t2j
from .._examples import Annotated, Examples
from .._invoke import Call, Prepared, WideDtypes
from .._program import Compiled, Lock, Residuals, Site, Spec, TorchFunction, VmapMethod
from .._shapes import Declaration, Inference, OutputShapes
from .blueprint import Blueprint
from .edits import Edits
from .function import ModuleCode
from .layers import changing_buffers, drawing_layers


_NO_EDITS = Edits()


@dataclasses.dataclass(frozen=True)
class Options:
    """The arguments of `from_torch` beside the module and its examples."""

    method: str = "forward"
    output_shapes: OutputShapes = None
    out_specs: Any = None
    lock: Lock | None = None
    depth: int | None = None
    vmap_method: VmapMethod = "torch"
    residuals: Residuals = "tape"
    signature: Callable[..., Any] | None = None

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
            self.residuals,
            self.signature,
        )


class Core:
    """Hashable; equal where the modules are equal but for their parameters.

    Attributes:
        blueprint: the module without its tensors.
        dtypes: torch's own dtypes of the parameters and of the state.
        examples: of the method's arguments, if there are any.
        edits: what is watched and replaced inside.
        stored: the names under which a model's state has the buffers that change: those of the
            whole model, where this is a part of one.
        parts: the cores of submodules that were asked for, and their parameters' names here.
        code: the method, as the code of the function.
        function: the method as a torch function.
        infer: gives the outputs of the function.
        known: the calls that have been prepared, by their keys.
    """

    def __init__(
        self,
        blueprint: Blueprint,
        dtypes: tuple[torch.dtype, ...],
        options: Options,
        examples: Examples | None,
        edits: Edits = _NO_EDITS,
        stored: tuple[str, ...] | None = None,
    ) -> None:
        self.blueprint = blueprint
        self.edits = edits
        self.stored = blueprint.names.state if stored is None else stored
        self.dtypes = dtypes
        self.options = options
        self.examples = examples
        self.parts: dict[tuple[str, ...], tuple[Core, tuple[str, ...]]] = {}
        self._compiled = Compiled()
        self.code = ModuleCode(blueprint, options.method, edits)
        self.name = self.code.name
        self.function = TorchFunction(
            self.code,
            lock=options.lock,
            depth=options.depth,
            vmap_method=options.vmap_method,
            residuals=options.residuals,
            compiled=self._compiled,
        )
        signature = signature_of(blueprint.module, options)
        self._annotations = Annotated(signature)
        declaration = _ModuleDeclaration(blueprint, options, signature, examples, bool(edits))
        self.infer = Inference(self.function, declaration)
        self.known: dict[Hashable, Prepared] = {}

    @functools.cached_property
    def shapes(self) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
        """The shapes of the parameters and of the state, by name."""
        names = self.blueprint.names
        parameters = zip(names.parameters, self.blueprint.parameters, strict=True)
        state = zip(names.state, self.blueprint.state, strict=True)
        return {n: tuple(p.shape) for n, p in parameters}, {n: tuple(b.shape) for n, b in state}

    @functools.cached_property
    def arguments(self) -> frozenset[str]:
        """The names of the method's arguments."""
        return argument_names(self.blueprint.module, self.options.method)

    def wide_dtypes(self, call: Call) -> WideDtypes:
        """The torch dtypes to give to parameters, state and arguments before torch sees them."""
        own = own_wide_dtypes(self.dtypes, len(self.blueprint.parameters))
        if not self.edits:
            return own + (self.examples or self._annotations).wide_dtypes(call)
        users = call.without_handed()
        handed = (None,) * (len(call.arrays) - len(users.arrays))
        return own + handed + (self.examples or self._annotations).wide_dtypes(users)

    def draws(
        self, site: Site, in_specs: tuple[Spec, ...], inference: bool
    ) -> Sequence[str] | None:
        """The layers that draw random numbers at a call site without a seed, None if unknown."""
        found = self.function.findings.at(site, in_specs).draws
        if found is not None:
            return found
        flags = self.blueprint.training_flags(inference)
        return drawing_layers(self.blueprint.module, flags) or None

    def _key(self) -> Hashable:
        return (
            self.blueprint,
            self.dtypes,
            self.options.key(),
            self.edits,
            self.stored,
            self.examples and self.examples.key(),
        )

    @functools.cached_property
    def statistics(self) -> frozenset[str]:
        """The buffers that torch's own layers change."""
        return frozenset(changing_buffers(self.blueprint.module))

    @functools.cached_property
    def changing(self) -> dict[bool, list[str]]:
        """The state that a call may change, by whether the model is evaluated."""
        return {inference: self.blueprint.changing(inference) for inference in (False, True)}

    def keeps_state(self, inference: bool) -> bool:
        """Whether a call in this mode leaves the state as it is: statistics are only read."""
        own = self.blueprint.names.state
        return self.statistics.issuperset(own) and not self.changing[inference]

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Core) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash((self.blueprint, self.dtypes))

    def __repr__(self) -> str:
        return self.name

    def __deepcopy__(self, memo: Any) -> "Core":
        return self  # as it never changes

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled by the torch module without its parameters, and the options."""
        own = (self.blueprint, self.dtypes, self.options, self.examples, self.edits, self.stored)
        return Core, own


class _ModuleDeclaration(Declaration):
    """What is declared of a method, for the function with parameters and state in front."""

    def __init__(
        self,
        blueprint: Blueprint,
        options: Options,
        signature: Signature | None,
        examples: Examples | None,
        edited: bool,
    ) -> None:
        super().__init__(options.output_shapes, signature, examples and examples.specs)
        self._edited = edited
        count = len(blueprint.parameters)
        self._state = range(count, count + len(blueprint.state))

    def outputs(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], in_specs: tuple[Spec, ...]
    ) -> tuple[Any, str] | None:
        if self._edited:  # what is declared is the result of the whole, not of a segment
            return None
        declared = super().outputs(args, kwargs, in_specs[self._state.stop :])
        if declared is None:
            return None
        shapes, source = declared
        state = (jax.ShapeDtypeStruct(*in_specs[i]) for i in self._state)
        return (shapes, *state), source


def signature_of(module: torch.nn.Module, options: Options) -> Signature | None:
    """The annotations of the method that is converted."""
    method = getattr(module, options.method)
    return read_signature(method, options.signature, result=options.output_shapes is None)


def argument_names(module: torch.nn.Module, method: str) -> frozenset[str]:
    """The names of a method's arguments."""
    try:
        return frozenset(inspect.signature(getattr(module, method)).parameters)
    except (TypeError, ValueError):
        return frozenset()


def own_wide_dtypes(dtypes: Sequence[torch.dtype], count: int) -> WideDtypes:
    """The torch dtypes to give to `count` parameters, and to the state, before torch sees them.

    Integer state (the batch counter of BatchNorm) is given back the 64 bits that JAX may not have;
    parameters compute in the precision that JAX has.
    """
    return (None,) * count + tuple(map(_restored_state, dtypes[count:]))


def _restored_state(dtype: torch.dtype) -> torch.dtype | None:
    narrowed = canonical_dtype(dtype) != dtype_t2j(dtype)
    return dtype if narrowed and not dtype.is_floating_point and not dtype.is_complex else None


def _by_value(leaf: Any) -> Hashable:
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        return tuple(leaf.shape), str(leaf.dtype)
    return leaf


def _is_spec(x: Any) -> bool:
    return isinstance(x, PartitionSpec)
