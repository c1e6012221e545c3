"""The program that is the user's function, at one call site and for inputs of given shapes.

A function may write to its arguments, but JAX arrays are immutable and its memory is theirs. So
inputs that are known to be written are copied first. What is known comes from the probe that
infers output shapes; where there was none, the first run works on copies and compares. Where the
code names a way to write, all inputs are copied: it may depend on values. A function that still
writes to an input only later is caught after the fact by the runtime.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch

from .._compat import cached_weakly
from .._dtypes import dtype_j2t
from .._errors import EqxTorchError, InputError, OutputError, ShapeError
from .._trees import flatten, flatten_result, leaf_paths, Structure
from .base import Indices, Program, Spec, Tensors
from .bits import observed
from .declared import as_declared
from .function import Learnt, TorchFunction
from .hints import hint_for
from .interposed import is_narrow
from .leaves import retrying
from .results import not_taken, other_constant, widest
from .site import Site


_NOTHING: frozenset[int] = frozenset()
_WIDE = {
    torch.int32: (torch.int64,),
    torch.uint32: (torch.uint64,),
    torch.float32: (torch.float64,),
    torch.complex64: (torch.complex128,),
}


@cached_weakly
@dataclasses.dataclass(frozen=True, repr=False)
class Leaf(Program):
    """The user's function.

    Attributes:
        x64: whether JAX had 64-bit types when the call was traced; if not, a 64-bit result
            stands for its 32-bit counterpart.
        source: where the output specs come from, for messages.
    """

    function: TorchFunction
    site: Site
    in_specs: tuple[Spec, ...]
    out_specs: tuple[Spec, ...]
    structure: Structure
    x64: bool
    source: str = dataclasses.field(compare=False)

    @functools.cached_property
    def ins(self) -> tuple[Spec, ...]:
        return self.in_specs

    @functools.cached_property
    def outs(self) -> tuple[Spec, ...]:
        return self.out_specs

    @property
    def leaf(self) -> "Leaf":
        return self

    @functools.cached_property
    def order(self) -> int:
        return 0

    @property
    def name(self) -> str:
        return self.function.name

    @functools.cached_property
    def is_interposed(self) -> bool:
        """Whether operators are interposed where this or a program made of it runs."""
        pairs = zip(self.ins, self.site.restored, strict=True)
        dtypes = (restored or dtype_j2t(spec.dtype) for spec, restored in pairs)
        narrow = self.function.holds_narrow or any(map(is_narrow, dtypes))
        return narrow or self.function.draws_at(self.site)

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.function, self.site, self.in_specs, self.out_specs, self.structure))

    def broadcast(self, size: int, shared: Indices) -> Program:
        ins = tuple(s.batched(1 if i in shared else size, 0) for i, s in enumerate(self.ins))
        outs = tuple(s.batched(size, 0) for s in self.outs)
        return dataclasses.replace(self, in_specs=ins, out_specs=outs)

    def run(self, inputs: Tensors, functional: bool) -> list[torch.Tensor]:
        written = self.learnt.written
        if written is None:
            return self._first_run(self._prepared(inputs, frozenset()), functional)
        if written or self._restored or self._may_write:
            inputs = self._prepared(inputs, written | self._may_write)
        return self._checked(self._result(inputs, functional))

    def runner(self) -> Callable[[Tensors, bool], Tensors]:
        """`run`; for most calls without what they do not need."""
        ambient = self.site.ambient
        if self._restored or self._may_write or not ambient.is_neutral:
            return self.run
        run, function, learnt, checked = self.run, self._call, self.learnt, self._checker()
        default_dtype, get_default_dtype = ambient.default_dtype, torch.get_default_dtype

        def plain_run(inputs: Tensors, functional: bool) -> Tensors:
            if learnt.written != _NOTHING or get_default_dtype() is not default_dtype:
                return run(inputs, functional)
            try:
                result = function(inputs, functional)
            except Exception as error:
                self._explain(error, inputs)
                raise
            return checked(result)

        return plain_run

    def _checker(self) -> Callable[[Any], Tensors]:
        """`_checked`, prepared for many calls."""
        if not self._single:
            return self._checked
        checked, tensor, strided = self._checked, torch.Tensor, torch.strided
        ((shape, dtype, _),) = self._expected

        def checked_one(y: Any) -> Tensors:
            right = type(y) is tensor and y.dtype is dtype and y.shape == shape
            return (y,) if right and y.layout is strided else checked(y)

        return checked_one

    def _first_run(self, tensors: list[torch.Tensor], functional: bool) -> list[torch.Tensor]:
        copies = [t.clone() for t in tensors]
        if functional:
            return self._checked(self._result(copies, functional))
        # Not a closure: the frames of an error keep what a function of theirs closes over.
        run = functools.partial(self._result, copies, functional)
        results, written = observed(run, tensors, copies)
        self.learnt.written = written
        return self._checked(results)

    def _prepared(self, inputs: Tensors, written: frozenset[int]) -> list[torch.Tensor]:
        tensors = list(inputs)
        for i, dtype in self._restored:
            tensors[i] = tensors[i].to(dtype)
        for i in written:
            tensors[i] = tensors[i].clone()
        return tensors

    def _result(self, tensors: Tensors, functional: bool) -> Any:
        ambient = self.site.ambient
        try:
            # The runtime has made the thread neutral.
            if ambient.is_neutral and torch.get_default_dtype() is ambient.default_dtype:
                return self._call(tensors, functional)
            with ambient.in_force():
                return self._call(tensors, functional)
        except Exception as error:
            self._explain(error, tensors)
            raise

    def _explain(self, error: Exception, tensors: Tensors) -> None:
        """Adds to torch's message what torch was given, which may be a shard or of 32 bits.

        JAX shows the message of an error, but not its notes.
        """
        own = isinstance(error, EqxTorchError | KeyError)  # KeyError shows its message as a literal
        if own or not (error.args and type(error.args[0]) is str):
            return
        with contextlib.suppress(Exception):  # types of the user's may refuse
            seen = self._what_torch_saw(error, tensors)
            error.args = (f"{error.args[0]}\n{seen}", *error.args[1:])

    def _what_torch_saw(self, error: Exception, tensors: Tensors) -> str:
        shown = [f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in tensors]
        note = f"`{self.name}` was called on {self.function.described(self.site, shown)}."
        named = [(input_label(self, i), t.dtype) for i, t in enumerate(tensors)]
        hint = hint_for(error, named, self.x64)
        return f"{note} {hint}".rstrip()

    def _checked(self, result: Any) -> list[torch.Tensor]:
        if self._single and isinstance(result, torch.Tensor):
            return [self._checked_leaf(0, result)]
        results = self.structure.leaves_of(result)
        if results is None:
            results = self.structure.leaves_of(as_declared(result, self.structure))
        if results is None:
            raise self._structure_error(result)
        return [self._checked_leaf(i, r) for i, r in enumerate(results)]

    def _checked_leaf(self, i: int, result: Any) -> torch.Tensor:
        shape, dtype, accepted = self._expected[i]
        wide = None if isinstance(result, torch.Tensor) else widest(result)
        if wide is not None:
            result = torch.tensor(result, dtype=dtype if wide in accepted else wide)
        if not isinstance(result, torch.Tensor) or result.layout is not torch.strided:
            raise OutputError(not_taken(self.function, leaf_paths(self.structure)[i], result))
        if result.shape != shape:
            raise self._spec_error(i, result)
        if result.dtype is dtype:
            return result
        if result.dtype not in accepted:
            raise self._spec_error(i, result)
        return result.to(dtype)

    @functools.cached_property
    def _call(self) -> Callable[[Tensors, bool], Any]:
        return retrying(self.function, self.function.prepared(self.site, self.learnt))

    @functools.cached_property
    def learnt(self) -> Learnt:
        """What runs with inputs of these shapes and dtypes have shown."""
        return self.function.findings.at(self.site, self.in_specs)

    @functools.cached_property
    def _may_write(self) -> frozenset[int]:
        """The inputs that are copied whatever runs have shown."""
        return self.function.may_write(len(self.ins))

    @functools.cached_property
    def _restored(self) -> list[tuple[int, torch.dtype]]:
        """The inputs that are given another dtype."""
        return [(i, dtype) for i, dtype in enumerate(self.site.restored) if dtype is not None]

    @functools.cached_property
    def _single(self) -> bool:
        return self.structure == flatten(0)[1]

    @functools.cached_property
    def _expected(self) -> list[tuple[torch.Size, torch.dtype, frozenset[torch.dtype]]]:
        return [
            (torch.Size(s.shape), dtype, _standing_for(dtype, self.x64))
            for s in self.outs
            for dtype in [dtype_j2t(s.dtype)]
        ]

    def _structure_error(self, result: Any) -> Exception:
        leaves, structure = flatten_result(result)
        for path, leaf in zip(leaf_paths(structure), leaves, strict=True):
            if not isinstance(leaf, torch.Tensor) and widest(leaf) is None:
                return OutputError(not_taken(self.function, path, leaf))
        constant = other_constant(self.function, self.structure, structure)
        if constant is not None:
            return OutputError(constant)
        declared, returned = map(self.function.of_result, (self.structure, structure))
        return OutputError(
            f"`{self.name}` returned another structure than was declared.\n"
            f"  declared by {self.source}: {declared}\n"
            f"  returned: {returned}\n"
            "Return the same structure on every call, or declare the right one, in the annotation "
            "or by `output_shapes=`."
        )

    def _spec_error(self, i: int, result: torch.Tensor) -> Exception:
        spec = self.outs[i]
        place = self.function.output_label(leaf_paths(self.structure)[i])
        kind = ShapeError if tuple(result.shape) != spec.shape else OutputError
        return kind(
            f"`{self.name}` returned another {'shape' if kind is ShapeError else 'dtype'} than "
            f"was declared{f' at {place}' if place else ''}.\n"
            f"  declared by {self.source}: {spec.dtype}{list(spec.shape)}\n"
            f"  returned: {str(result.dtype).removeprefix('torch.')}{list(result.shape)}\n"
            "Nothing is broadcast or cast for you: return what was declared, or declare what is "
            "returned, in the annotation or by `output_shapes=`."
        )


def write_error(program: Program, inputs: Tensors) -> InputError:
    """An input was written that earlier runs left alone; from now on it is copied."""
    leaf = program.leaf
    written = [i for i, x in enumerate(inputs) if x._version]
    learnt, count = leaf.learnt, len(leaf.ins)
    learnt.written = (learnt.written or frozenset()).union(i for i in written if i < count)
    if any(i >= count for i in written):
        leaf.function.findings.of_backward(program).writes = True
    names = ", ".join(input_label(leaf, i) for i in written)
    return InputError(
        f"`{leaf.name}` wrote to its input {names} on this call, but not on the first one, so "
        "the JAX array behind it has been changed in place. Later calls work on a copy. To avoid "
        "this, write to a copy in the function itself: `x = x.clone()`."
    )


def input_label(leaf: Leaf, i: int) -> str:
    """How messages call an input of a program made from `leaf`; its own inputs come first."""
    paths = leaf.site.paths
    return leaf.function.label(paths[i]) if i < len(paths) else "gradient"


def _standing_for(dtype: torch.dtype, x64: bool) -> frozenset[torch.dtype]:
    """The torch dtypes that arrive as this one."""
    return frozenset([dtype, *(() if x64 else _WIDE.get(dtype, ()))])
