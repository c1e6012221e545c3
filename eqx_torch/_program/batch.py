"""Batches of a torch program: one call of `torch.func.vmap`, or a loop where it cannot batch."""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Sequence

import torch

from .._compat import batched, cached_weakly
from .._dtypes import dtype_j2t
from .attention import load_attention
from .base import Derived, Indices, Program, Spec, Tensors
from .graph import with_dense_gradient


Axes = tuple[int | None, ...]

_ROWS = torch.contiguous_format


@cached_weakly
@dataclasses.dataclass(frozen=True, repr=False)
class Vmap(Derived):
    """`inner` on each member of a batch.

    An input without an axis is the same for every member. An output without an axis is the sum
    over the members: summing is the adjoint of giving every member the same.

    Attributes:
        recordable: whether a forward of it may keep its graph.
    """

    inner: Program
    in_axes: Axes
    out_axes: Axes
    size: int
    recordable: bool = True

    @functools.cached_property
    def ins(self) -> tuple[Spec, ...]:
        return _batched_specs(self.inner.ins, self.in_axes, self.size)

    @functools.cached_property
    def outs(self) -> tuple[Spec, ...]:
        return _batched_specs(self.inner.outs, self.out_axes, self.size)

    @functools.cached_property
    def batches(self) -> bool:
        return True

    @functools.cached_property
    def linear(self) -> frozenset[int]:
        return self.inner.linear

    @functools.cached_property
    def order(self) -> int:
        return self.inner.order

    @property
    def name(self) -> str:
        return f"vmap({self.inner.name})"

    def broadcast(self, size: int, shared: Indices) -> Program:
        in_axes = tuple(None if a is None else a + 1 for a in self.in_axes)
        out_axes = tuple(None if a is None else a + 1 for a in self.out_axes)
        return Vmap(self.inner.broadcast(size, shared), in_axes, out_axes, self.size)

    def prepare(self) -> None:
        load_attention()
        self.inner.prepare()

    def run(self, inputs: Tensors, functional: bool) -> list[torch.Tensor]:
        if self.size == 0:
            return [inputs[0].new_zeros(s.shape, dtype=dtype_j2t(s.dtype)) for s in self.outs]
        findings = self.leaf.function.findings
        if functional:
            return self._batched(inputs)
        function = self.leaf.function
        if findings.batching_fails or function.must_loop(self.leaf.site, self.in_axes):
            return self._looped(inputs)
        try:
            self._try_alone(inputs)
            return self._batched(inputs)
        except Exception as error:
            out = self._looped(inputs)
            findings.batching_fails = True
            _warn(self, error)
            return out

    def _try_alone(self, inputs: Tensors) -> None:
        """Runs one member without torch.func, which sees less, where derivatives are to be tried.

        That is whether forward mode works, and whether autograd sees what it is to differentiate.
        """
        findings = self.leaf.function.findings
        order = self.order and self.order + any(x.requires_grad for x in inputs)
        unknown = any(program not in findings.forward_mode for program in self.forward)
        if unknown or order > max(findings.tried_alone.get(self.inner, 0), 1):
            self._member(inputs, 0)
            findings.tried_alone[self.inner] = order

    def _batched(self, inputs: Tensors) -> list[torch.Tensor]:
        def member(*xs: torch.Tensor) -> Tensors:
            return self.inner.run(xs, functional=True)

        stacked = [axis or 0 for axis in self.out_axes]
        randomness = self.leaf.randomness
        ys = batched(member, inputs, self.in_axes, stacked, self.size, randomness)
        outs = zip(ys, self.out_axes, strict=True)
        return [y.sum(0) if axis is None else y for y, axis in outs]

    def _looped(self, inputs: Tensors) -> list[torch.Tensor]:
        members = [self._member(inputs, i) for i in range(self.size)]
        return [
            torch.stack(ys).sum(0) if axis is None else torch.stack(ys, axis)
            for ys, axis in zip(zip(*members, strict=True), self.out_axes, strict=True)
        ]

    def _member(self, inputs: Tensors, i: int) -> list[torch.Tensor]:
        pairs = zip(inputs, self.in_axes, strict=True)
        # Copies, since a function may ask for contiguous memory, or for all of a tensor's memory.
        xs = [x if a is None else x.select(a, i).clone(memory_format=_ROWS) for x, a in pairs]
        xs = [with_dense_gradient(x) if x.requires_grad else x for x in xs]
        out = list(self.inner.run(xs, functional=False))
        if not any(x.requires_grad for x in xs):
            self.leaf.function.code.release()
        return out


def batched_or_looped(
    program: Program, differentiate: Callable[[], list[torch.Tensor]]
) -> list[torch.Tensor]:
    """A derivative of what may be batched: torch may batch a forward, but not its backward."""
    findings = program.leaf.function.findings
    try:
        return differentiate()
    except Exception as error:
        if not program.batches or findings.batching_fails:
            raise
        findings.batching_fails = True
        try:
            out = differentiate()
        except Exception:
            findings.batching_fails = False
            raise error from None
        _warn(program, error)
        return out


def _warn(program: Program, error: Exception) -> None:
    name, reason = program.leaf.function.name, str(error).partition("\n")[0]
    warnings.warn(_LOOPED.format(name=name, error=reason), stacklevel=3)


_LOOPED = (
    "torch.func.vmap cannot batch `{name}`, so the members of the batch are computed one after "
    'another. Pass vmap_method="sequential" if this is what you want, or make the function '
    "independent of the values of its inputs. torch said: {error}"
)


def _batched_specs(specs: Sequence[Spec], axes: Axes, size: int) -> tuple[Spec, ...]:
    pairs = zip(specs, axes, strict=True)
    return tuple(s if axis is None else s.batched(size, axis) for s, axis in pairs)
