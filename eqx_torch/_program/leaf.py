"""The program that is the user's function, at one call site and for inputs of given shapes.

A function may write to its arguments, but JAX arrays are immutable and its memory is theirs. So
inputs that are known to be written are copied first. What is known comes from the probe that
infers output shapes; where there was none, the first run works on copies and compares. Where the
code names a way to write, all inputs are copied: it may depend on values. A function that still
writes to an input only later is caught after the fact by the runtime.

A write through torch counts up a tensor's version, except through `x.data` and NumPy, which a
comparison bit for bit shows. One that happens to write what was there shows in neither; so a tensor
whose memory was given away in such a way counts as written.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .._compat import cached_weakly
from .._dtypes import dtype_j2t
from .._errors import EqxTorchError, InputError
from .._trees import Structure
from .._watch import Exposure
from .base import Indices, Program, Spec, Tensors
from .function import Learnt, Run, TorchFunction
from .hints import hint_for
from .interposed import is_narrow
from .results import Expected
from .site import Site


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

    @property
    def randomness(self) -> str:
        """What `torch.func.vmap` makes of random numbers: those from one seed are the same."""
        return "different" if self.site.own is None else "same"

    @functools.cached_property
    def is_interposed(self) -> bool:
        """Whether operators are interposed where this or a program made of it runs."""
        pairs = zip(self.ins, self.site.wide, strict=True)
        dtypes = (wide or dtype_j2t(spec.dtype) for spec, wide in pairs)
        narrow = self.function.holds_narrow or any(map(is_narrow, dtypes))
        return narrow or self.site.seed is not None

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.function, self.site, self.in_specs, self.out_specs, self.structure))

    def broadcast(self, size: int, shared: Indices) -> Program:
        ins = tuple(s.batched(1 if i in shared else size, 0) for i, s in enumerate(self.ins))
        outs = tuple(s.batched(size, 0) for s in self.outs)
        return dataclasses.replace(self, in_specs=ins, out_specs=outs)

    def run(self, inputs: Tensors, functional: bool) -> Tensors:
        written = self.learnt.written
        if written is None:
            return self._first_run(self._given(inputs, frozenset()), functional)
        if written or self._differs:
            inputs = self._given(inputs, written | self._may_write)
        return self._expected.tensors(self._result(inputs, functional))

    def input_label(self, i: int) -> str:
        """How messages call an input of a program made of this; its own inputs come first."""
        labels = self.site.labels
        return labels[i] if i < len(labels) else "gradient"

    @functools.cached_property
    def learnt(self) -> Learnt:
        """What runs with inputs of these shapes and dtypes have shown."""
        return self.function.findings.at(self.site, self.in_specs)

    def _first_run(self, tensors: Tensors, functional: bool) -> Tensors:
        copies = [t.clone() for t in tensors]
        if functional:
            return self._expected.tensors(self._result(copies, functional))
        # Not a closure: the frames of an error keep what a function of theirs closes over.
        run = functools.partial(self._result, copies, functional)
        result, self.learnt.written = observed(run, tensors, copies)
        return self._expected.tensors(result)

    def _given(self, inputs: Tensors, copied: frozenset[int]) -> list[torch.Tensor]:
        """The inputs in the dtypes that torch is given, some of them as copies."""
        tensors = list(inputs)
        for i, dtype in self._widened:
            tensors[i] = tensors[i].to(dtype)
        for i in copied:
            tensors[i] = tensors[i].clone()
        return tensors

    def _result(self, tensors: Tensors, functional: bool) -> Any:
        ambient = self.site.ambient
        given = tensors
        if self.function.findings.needs_gradients:
            given = self.function.on_leaves(self.site, tensors)
        try:
            # The runtime has made the thread neutral.
            if ambient.is_neutral and torch.get_default_dtype() is ambient.default_dtype:
                return self._call(given, functional)
            with ambient.in_force():
                return self._call(given, functional)
        except Exception as error:
            if not (isinstance(error, RuntimeError) and self.function.asks_for_gradients(error)):
                self._explain(error, tensors)
                raise
        return self._result(tensors, functional)

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
        note = f"`{self.name}` was called on {self.site.described(shown)}."
        named = [(self.input_label(i), t.dtype) for i, t in enumerate(tensors)]
        return f"{note} {hint_for(error, named, self.x64)}".rstrip()

    @functools.cached_property
    def _call(self) -> Run:
        return self.function.code.prepared(self.site, self.learnt)

    @functools.cached_property
    def _expected(self) -> Expected:
        return Expected(self.function, self.outs, self.structure, self.x64, self.source)

    @functools.cached_property
    def _may_write(self) -> frozenset[int]:
        """The inputs that are copied whatever runs have shown."""
        return self.function.may_write(len(self.ins))

    @functools.cached_property
    def _widened(self) -> list[tuple[int, torch.dtype]]:
        """The inputs that are given another dtype."""
        return [(i, dtype) for i, dtype in enumerate(self.site.wide) if dtype is not None]

    @functools.cached_property
    def _differs(self) -> bool:
        """Whether torch is always given something other than the inputs."""
        return bool(self._widened or self._may_write)


def observed(
    run: Callable[[], Any], originals: Sequence[torch.Tensor], copies: Sequence[torch.Tensor]
) -> tuple[Any, frozenset[int]]:
    """The result of a run on `copies`, and which of these it may have written to."""
    versions = [c._version for c in copies]
    with Exposure(by_data=True) as exposure:
        result = run()
    triples = enumerate(zip(originals, copies, versions, strict=True))
    written = frozenset(
        i
        for i, (x, copy, version) in triples
        if copy._version != version or exposure.exposed(copy) or not same_bits(x, copy)
    )
    return result, written


def same_bits(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether two tensors have the same shape, dtype and bits."""
    x, y = x.detach(), y.detach()
    if x.shape != y.shape or x.dtype != y.dtype:
        return False
    return torch.equal(_bytes(x), _bytes(y))


def write_error(program: Program, inputs: Tensors) -> InputError:
    """An input was written that earlier runs left alone; from now on it is copied."""
    leaf = program.leaf
    written = [i for i, x in enumerate(inputs) if x._version]
    learnt, count = leaf.learnt, len(leaf.ins)
    learnt.written = (learnt.written or frozenset()).union(i for i in written if i < count)
    if any(i >= count for i in written):
        leaf.function.findings.of_backward(program).writes = True
    names = ", ".join(map(leaf.input_label, written))
    return InputError(
        f"`{leaf.name}` wrote to its input {names} on this call, but not on the first one, so "
        "the JAX array behind it has been changed in place. Later calls work on a copy. To avoid "
        "this, write to a copy in the function itself: `x = x.clone()`."
    )


def _bytes(x: torch.Tensor) -> torch.Tensor:
    # A clone's strides are those of its shape, which a view as bytes asks for.
    x = x.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    return x.view(-1).view(torch.uint8)
