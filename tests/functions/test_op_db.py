"""Every operator of torch's own database gives in JAX what it gives in torch.

Under `jax.jit`: values, gradients, forward derivatives and batches.
"""

import contextlib
import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from eqx_torch import tree_t2j
from eqx_torch._dtypes import canonical_dtype
from eqx_torch._errors import ShapeError

from ..helpers import assert_trees_equal, to_numpy
from ..helpers.operators import (
    Case,
    cases,
    differentiable_cases,
    inexact_leaves,
    normal_like,
    OPERATORS,
    tree_leaves,
)
from ..helpers.sets import sampled


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Operators that do not apply, and the error that says so.
_ON_GPUS = (AssertionError, "Jiterator is only supported on CUDA and ROCm GPUs")
_NO_DTYPE = (NotImplementedError, "supports no dtype on a CPU")
EXCLUDED = {
    "chalf": (Exception, "JAX has no dtype with the values of torch.complex32"),
    "jiterator_2inputs_2outputs": _ON_GPUS,
    "jiterator_4inputs_with_extra_args": _ON_GPUS,
    "jiterator_binary": _ON_GPUS,
    "jiterator_binary_return_by_ref": _ON_GPUS,
    "jiterator_unary": _ON_GPUS,
    "nn.functional.batch_norm.without_cudnn": _NO_DTYPE,
    "torch.ops.aten._efficient_attention_forward": _NO_DTYPE,
    "torch.ops.aten._flash_attention_forward": _NO_DTYPE,
}

# Their outputs cannot be inferred from shapes alone, so they are declared.
DECLARED = _names("""
    allclose argwhere bincount combinations corrcoef cov equal istft item linalg.lstsq
    linalg.lstsq.grad_oriented masked_select narrow nn.functional.ctc_loss
    nn.functional.gaussian_nll_loss nn.functional.one_hot nonzero tensor_split unique
    unique_consecutive
""")

# Their outputs are uninitialised memory, which torch can be asked to fill.
UNINITIALISED = _names("""
    empty empty_like empty_permuted empty_strided new_empty new_empty_strided resize_ resize_as_
""")

# For these, torch has neither a forward derivative nor one of the gradient.
_ONCE = "torch differentiates it once, and backwards"
# For these, <u, J t> is not <J^T u, t> in torch itself.
_SYMMETRIC = "torch takes the gradient, but not the tangent, to be symmetric or triangular"
_REPEATED = "torch's gradient ignores that places are written to more than once"
NO_TANGENTS = {
    "_segment_reduce.lengths": _ONCE,
    "_segment_reduce.offsets": _ONCE,
    "as_strided_scatter": _REPEATED,
    "cdist": _ONCE,
    "linalg.cholesky": _SYMMETRIC,
    "linalg.cholesky_ex": _SYMMETRIC,
    "linalg.eigh": _SYMMETRIC,
    "nn.functional.ctc_loss": _ONCE,
    "nn.functional.embedding_bag": _ONCE,
    "nn.functional.linear_cross_entropy.chunked_none": _ONCE,
    "nn.functional.max_unpool1d": _REPEATED,
    "nn.functional.max_unpool2d": _REPEATED,
    "nn.functional.max_unpool3d": _REPEATED,
    "nn.functional.multi_margin_loss": _ONCE,
    "nn.functional.multilabel_margin_loss": _ONCE,
    "sparse.mm.reduce": _ONCE,
    "sparse.sampled_addmm": _ONCE,
    "triangular_solve": _SYMMETRIC,
}

pytestmark = pytest.mark.filterwarnings("ignore:.*draws random numbers from torch's own generator")

# Of every kind: elementwise, reducing, with lists of tensors, without gradients, complex, random,
# writing to its input, with several results, sparse.
FAST = _names("""
    atan2 bitwise_and cat exponential fft.rfft index_put linalg.solve nn.functional.batch_norm
    scatter_reduce.prod sort to_sparse unbind
""")


def operators(names: Any, expected_failures: dict[str, str] | None = None) -> pytest.MarkDecorator:
    params = []
    for param in sampled(sorted(names), FAST, every=5):
        (name,) = param.values
        reason = (expected_failures or {}).get(name)
        marks = [*param.marks, pytest.mark.xfail(reason=reason)] if reason else param.marks
        params.append(pytest.param(name, marks=marks))
    return pytest.mark.parametrize("name", params)


@operators(OPERATORS.keys() - EXCLUDED.keys())
def test_values(name):
    _check_values(name)


def _check_values(name: str) -> None:
    with _filled_memory(name):
        for case in cases(name):
            expected = case.outputs(case.run)
            actual = jax.jit(_as_jax(case, case.run, expected))(case.arrays())
            assert_trees_equal(tree_leaves(actual), tree_leaves(expected))


@operators(OPERATORS.keys() - EXCLUDED.keys())
def test_gradients(name):
    for case in differentiable_cases(name):
        function, cotangents = _differentiable(case)
        actual = functools.partial(_pullback, case, function, cotangents)
        try:
            expected = case.gradients(cotangents)
        except Exception as error:
            if any(x.numel() for x in case.active_tensors):  # XLA drops calls without results
                with pytest.raises(Exception, match=re.escape(str(error).splitlines()[0])):
                    actual()
        else:
            assert_trees_equal(actual(), expected)


@operators(OPERATORS.keys() - EXCLUDED.keys(), NO_TANGENTS)
def test_tangents(name):
    """<u, J t> is <J^T u, t>, and J^T u is known from torch."""
    for case in differentiable_cases(name):
        function, cotangents = _differentiable(case)
        try:
            gradients = case.gradients(cotangents)
        except Exception:  # test_gradients sees to these
            continue
        tangents = normal_like(case.active_tensors, seed=1)
        out_tangents = _pushforward(case, function, tangents)
        left, right = _terms(cotangents, out_tangents), _terms(gradients, tangents)
        scale = np.abs(left).sum() + np.abs(right).sum()
        precision = max([1e-4, *(torch.finfo(u.dtype).eps for u in cotangents)])
        np.testing.assert_allclose(
            left.sum().real, right.sum().real, rtol=0, atol=precision * scale + 1e-6
        )


# Of torch, that `torch.func.vmap` is not fast for an operator; of this library, that it fails.
@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@pytest.mark.filterwarnings("ignore:torch.func.vmap cannot batch:UserWarning")
@operators(OPERATORS.keys() - EXCLUDED.keys() - UNINITIALISED)
def test_batches(name):
    """A batch of two samples that differ in the first tensor."""
    for case in (case for case in cases(name) if case.tensors):
        members = [case, case.scaled(0.5)]
        outputs = [tree_leaves(member.outputs(member.run)) for member in members]
        if any(x.shape != y.shape for x, y in zip(*outputs, strict=True)):
            continue
        function = _as_jax(case, case.run, case.outputs(case.run))
        actual = _batched(function, [member.arrays() for member in members])
        expected = [torch.stack(ys) for ys in zip(*outputs, strict=True)]
        if case.is_random():  # each member draws its own numbers
            assert [(y.shape, y.dtype) for y in actual] == [
                (y.shape, canonical_dtype(y.dtype)) for y in expected
            ]
            continue
        sizes = [np.abs(to_numpy(y).astype(complex)).ravel() for y in expected]
        scale = max([1.0, *(size[np.isfinite(size)].max(initial=0) for size in sizes)])
        assert_trees_equal(actual, expected, rtol=1e-4, atol=1e-5 * scale)


@operators(EXCLUDED)
def test_excluded_operators_do_not_apply(name):
    error, message = EXCLUDED[name]
    with pytest.raises(error, match=message):
        _check_values(name)


@operators(DECLARED)
def test_declared_outputs_cannot_be_inferred_from_shapes(name):
    with pytest.raises(
        (ShapeError, UserWarning), match="cannot infer|running it on zeros|depend on the values"
    ):
        _infer_from_shapes(name)


def _infer_from_shapes(name: str) -> None:
    for case in cases(name):
        case.outputs(case.run)
        case.with_shapes(case.run)


@operators(DECLARED)
def test_declared_outputs_are_inferred_from_values(name):
    with _filled_memory(name):
        for case in cases(name):
            expected = case.outputs(case.run)
            actual = case.as_jax(case.run)(case.arrays())
            assert_trees_equal(tree_leaves(actual), tree_leaves(expected))


def test_tables_name_operators():
    assert OPERATORS.keys() >= EXCLUDED.keys() | DECLARED | UNINITIALISED | FAST
    assert not EXCLUDED.keys() & (DECLARED | UNINITIALISED | FAST)


def _as_jax(case: Case, function: Callable[..., Any], outputs: Any) -> Callable[[Any], Any]:
    return case.as_jax(function, outputs if case.name in DECLARED else None)


def _differentiable(case: Case) -> tuple[Callable[[Any], Any], list[torch.Tensor]]:
    """A JAX function of all arrays that gives the inexact outputs, and cotangents for these."""
    outputs = case.outputs(case.run_differentiable)
    function = _as_jax(case, case.run_differentiable, outputs)
    cotangents = normal_like(inexact_leaves(outputs), seed=0)
    return lambda arrays: inexact_leaves(function(arrays)), cotangents


def _pullback(case: Case, function: Callable[[Any], Any], cotangents: Any) -> Any:
    @jax.jit
    def pullback(arrays: Any, cotangents: Any) -> Any:
        of_active = lambda xs: function(case.with_active(arrays, xs))  # noqa: E731
        return jax.vjp(of_active, case.pick_active(arrays))[1](cotangents)[0]

    return jax.block_until_ready(pullback(case.arrays(), tree_t2j(cotangents)))


def _pushforward(case: Case, function: Callable[[Any], Any], tangents: Any) -> Any:
    @jax.jit
    def pushforward(arrays: Any, tangents: Any) -> Any:
        of_active = lambda xs: function(case.with_active(arrays, xs))  # noqa: E731
        return jax.jvp(of_active, (case.pick_active(arrays),), (tangents,))[1]

    return pushforward(case.arrays(), tree_t2j(tangents))


def _batched(function: Callable[[Any], Any], members: list[list[jax.Array]]) -> list[jax.Array]:
    batch = jnp.stack([arrays[0] for arrays in members])
    rest = members[0][1:]

    @jax.jit
    def batched(batch: jax.Array, rest: Any) -> Any:
        return jax.vmap(lambda x: tree_leaves(function([x, *rest])))(batch)

    return batched(batch, rest)


def _terms(xs: Any, ys: Any) -> np.ndarray:
    """The terms of the inner product of two lists of tensors or arrays."""
    products = [
        (to_numpy(x).astype(complex) * to_numpy(y).astype(complex)).ravel()
        for x, y in zip(xs, ys, strict=True)
    ]
    return np.concatenate([np.zeros(0), *products])


@contextlib.contextmanager
def _filled_memory(name: str) -> Iterator[None]:
    """torch fills memory that is left uninitialised."""
    torch.use_deterministic_algorithms(name in UNINITIALISED)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
