"""torch's database of operators, each as a torch function and as a JAX function."""

import copy
import itertools
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo
from torch.utils._pytree import tree_map

from eqx_torch import dtype_j2t, t2j, torch2jax
from eqx_torch._dtypes import canonical_dtype, is_inexact
from eqx_torch._trees import flatten
from eqx_torch._watch import Watch


OPERATORS: dict[str, OpInfo] = {op.full_name: op for op in op_db}

# An operator is tested in the first of these that it supports.
_DTYPES = (torch.float32, torch.complex64, torch.int64, torch.bool, torch.float8_e4m3fn)
_SAMPLES = 2


class Case:
    """One operator on one sample of its arguments.

    Tensors are traced and everything else is static. Tensors are contiguous, as those made from
    JAX arrays are. A sparse argument is made from a dense one inside of the function and a sparse
    result is made dense there, Python numbers that are returned become tensors, and random
    operators draw the same numbers on every call.

    Attributes:
        name: of the operator.
        tensors: the tensors among the arguments.
        active: which of these are differentiated by.
    """

    def __init__(self, op: OpInfo, sample: Any) -> None:
        call = (sample.input, *sample.args), sample.kwargs
        self.name = op.full_name
        self._op = op
        self._determined = sample.output_process_fn_grad
        self._leaves, self._treedef = jax.tree.flatten(call)
        tensors = [x for x in self._leaves if isinstance(x, torch.Tensor)]
        self._layouts = [x.layout for x in tensors]
        self.tensors = [_contiguous(x) for x in tensors]
        wanted = [i for i, x in enumerate(tensors) if x.requires_grad]
        self.active = wanted or [i for i, x in enumerate(tensors) if is_inexact(x.dtype)]

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """The operator."""
        torch.manual_seed(0)
        leaves = jax.tree.leaves((args, kwargs))
        tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
        args, kwargs = self._call(map(_in_layout, tensors, self._layouts))
        return tree_map(_as_tensor, self._op(*args, **kwargs))

    def run_differentiable(self, *args: Any, **kwargs: Any) -> Any:
        """What of it can be differentiated: the phase of an eigenvector, for one, cannot."""
        return tree_map(_as_tensor, self._determined(self.run(*args, **kwargs)))

    def on_tensors(self, function: Callable[..., Any], tensors: Sequence[torch.Tensor]) -> Any:
        """Calls a method above as torch would, with copies since some operators write to them."""
        args, kwargs = self._call(x.clone() for x in tensors)
        return function(*args, **kwargs)

    def as_jax(
        self, function: Callable[..., Any], output_shapes: Any = None
    ) -> Callable[[Any], Any]:
        """A method above as a JAX function of a list of arrays."""
        args, kwargs = self._call(self.tensors)
        wrapped = torch2jax(function, *args, example_kw=kwargs, output_shapes=output_shapes)

        def on_arrays(arrays: Sequence[Any]) -> Any:
            args, kwargs = self._call(arrays)
            return wrapped(*args, **kwargs)

        return on_arrays

    def with_shapes(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A method above wrapped with examples that have no values."""
        shapes = [jax.ShapeDtypeStruct(x.shape, str(x.dtype)[6:]) for x in self.tensors]
        args, kwargs = self._call(shapes)
        return torch2jax(function, *args, example_kw=kwargs)

    def arrays(self) -> list[jax.Array]:
        """The tensors as JAX arrays, in memory of their own."""
        return [t2j(x.clone()) for x in self.tensors]

    def scaled(self, factor: float) -> "Case":
        """The same with another first tensor, if that is inexact."""
        other = copy.copy(self)
        first, *rest = self.tensors
        other.tensors = [(first * factor).to(first.dtype) if _has_products(first) else first, *rest]
        return other

    def is_random(self) -> bool:
        """Whether the operator draws random numbers."""
        with Watch() as watch:
            self.outputs(self.run)
        return bool(watch.random)

    @property
    def active_tensors(self) -> list[torch.Tensor]:
        """Those that are differentiated by."""
        return self.pick_active(self.tensors)

    def pick_active(self, arrays: Sequence[Any]) -> list[Any]:
        """Of these, those in the places that are differentiated by."""
        return [arrays[i] for i in self.active]

    def with_active(self, arrays: Sequence[Any], active: Sequence[Any]) -> list[Any]:
        """Arrays, with others in the places that are differentiated by."""
        out = list(arrays)
        for i, x in zip(self.active, active, strict=True):
            out[i] = x
        return out

    def outputs(self, function: Callable[..., Any]) -> Any:
        """What torch gives. Its warnings are ignored from here on."""
        return _quietly(lambda: self.on_tensors(function, self.tensors))

    def gradients(self, cotangents: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """What torch gives, in JAX's convention for complex numbers: the conjugate of torch's."""
        return _quietly(lambda: self._gradients(cotangents))

    def _gradients(self, cotangents: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        active = [x.clone().requires_grad_() for x in self.active_tensors]
        inputs = self.with_active(self.tensors, active)
        outputs = inexact_leaves(self.on_tensors(self.run_differentiable, inputs))
        pairs = [(y, u.to(y.dtype).conj()) for y, u in zip(outputs, cotangents, strict=True)]
        pairs = [(y, u) for y, u in pairs if y.requires_grad]
        if not pairs:
            return [torch.zeros_like(x) for x in active]
        ys, us = zip(*pairs, strict=True)
        grads = torch.autograd.grad(ys, active, us, allow_unused=True, materialize_grads=True)
        # Some of torch's zeros have no memory until they are copied.
        return [x.conj().clone() for x in grads]

    def _call(self, tensors: Any) -> tuple[Any, dict[str, Any]]:
        """The arguments, with these in place of the tensors."""
        rest = iter(tensors)
        leaves = [next(rest) if isinstance(x, torch.Tensor) else x for x in self._leaves]
        return jax.tree.unflatten(self._treedef, leaves)


def cases(name: str) -> list[Case]:
    """An operator on some samples of its arguments."""
    op = OPERATORS[name]
    dtype = next((d for d in _DTYPES if d in op.dtypes), None)
    if dtype is None:
        raise NotImplementedError(f"{name} supports no dtype on a CPU")
    requires_grad = op.supports_autograd and is_inexact(dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own sample functions use deprecated names
        torch.manual_seed(0)
        samples = op.sample_inputs("cpu", dtype, requires_grad=requires_grad)
        return [Case(op, sample) for sample in itertools.islice(samples, _SAMPLES)]


def tree_leaves(tree: Any) -> list[Any]:
    """The leaves of what an operator returns, in torch or in JAX."""
    return flatten(tree)[0]


def inexact_leaves(tree: Any) -> list[Any]:
    """The leaves that have derivatives, of a tree of tensors or of arrays."""
    return [x for x in tree_leaves(tree) if is_inexact(x.dtype)]


def differentiable_cases(name: str) -> list[Case]:
    """Those that have something to differentiate by."""
    return [case for case in cases(name) if case.active]


def normal_like(values: Sequence[torch.Tensor], seed: int) -> list[torch.Tensor]:
    """Normally distributed tensors, with the dtypes that these have in JAX."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(
            x.shape, generator=generator, dtype=torch.complex64 if x.is_complex() else torch.float32
        ).to(dtype_j2t(canonical_dtype(x.dtype)))
        for x in values
    ]


def _quietly(function: Callable[[], Any]) -> Any:
    """Runs torch alone; of its warnings, those that it gives here are ignored from here on."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = function()
    for warning in caught:
        warnings.filterwarnings("ignore", re.escape(str(warning.message)), warning.category)
    return result


def _has_products(x: torch.Tensor) -> bool:
    return x.is_complex() or (x.is_floating_point() and x.element_size() > 1)


def _contiguous(x: torch.Tensor) -> torch.Tensor:
    dense = x.detach() if x.layout is torch.strided else x.detach().to_dense()
    return dense.clone(memory_format=torch.contiguous_format)


def _in_layout(x: torch.Tensor, layout: torch.layout) -> torch.Tensor:
    return x if x.layout is layout else x.to_sparse(layout=layout)


def _as_tensor(x: Any) -> torch.Tensor:
    tensor = torch.as_tensor(x)
    return tensor if tensor.layout is torch.strided else tensor.to_dense()
