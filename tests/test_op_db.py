"""Every operator of torch's own database gives in JAX what it gives in torch.

Under `jax.jit`: values, gradients and forward derivatives.
"""

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_leaves

from eqx_torch import tree_t2j
from eqx_torch._errors import ShapeError

from .helpers import assert_trees_equal, to_numpy
from .operators import Case, cases, inexact_leaves, normal_like, OPERATORS


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

# Their outputs cannot be inferred from shapes, so they are declared.
DECLARED = frozenset(
    [
        "allclose",
        "argwhere",
        "bincount",
        "combinations",
        "corrcoef",
        "cov",
        "equal",
        "istft",
        "item",
        "linalg.lstsq",
        "linalg.lstsq.grad_oriented",
        "masked_select",
        "narrow",
        "nn.functional.ctc_loss",
        "nn.functional.gaussian_nll_loss",
        "nn.functional.one_hot",
        "nonzero",
        "tensor_split",
        "unique",
        "unique_consecutive",
    ]
)

# Their outputs are uninitialised memory, which torch can be asked to fill.
UNINITIALISED = frozenset(
    ["empty", "empty_like", "empty_permuted", "empty_strided"]
    + ["new_empty", "new_empty_strided", "resize_", "resize_as_"]
)

# Of every kind: plain, reducing, with lists, integers, complex numbers, random numbers, writes,
# several results, linear algebra, normalisation, sparse.
FAST = frozenset()


def operators(names: Any) -> pytest.MarkDecorator:
    marks = lambda name: () if name in FAST else pytest.mark.slow  # noqa: E731
    params = [pytest.param(name, marks=marks(name)) for name in sorted(names)]
    return pytest.mark.parametrize("name", params)


@operators(OPERATORS.keys() - EXCLUDED.keys())
def test_values(name):
    with _initialised(name):
        for case in cases(name):
            _check_values(case, declared=name in DECLARED)


@operators(OPERATORS.keys() - EXCLUDED.keys())
def test_gradients(name):
    for case in cases(name):
        if case.active:
            _check_gradients(case, declared=name in DECLARED)


@operators(OPERATORS.keys() - EXCLUDED.keys())
def test_tangents(name):
    for case in cases(name):
        if case.active:
            _check_tangents(case, declared=name in DECLARED)


@operators(EXCLUDED)
def test_excluded_operators_do_not_apply(name):
    error, message = EXCLUDED[name]
    with pytest.raises(error, match=message):
        for case in cases(name):
            _check_values(case, declared=False)


@operators(DECLARED)
def test_declared_outputs_cannot_be_inferred(name):
    undeclared = (ShapeError, UserWarning)
    with pytest.raises(undeclared, match="cannot infer what|were inferred by running it on zeros"):
        for case in cases(name):
            case.outputs(case.run)
            case.as_jax(case.run)


def test_tables_name_operators():
    assert OPERATORS.keys() >= EXCLUDED.keys() | DECLARED | UNINITIALISED | FAST
    assert not EXCLUDED.keys() & (DECLARED | UNINITIALISED | FAST)


def _check_values(case: Case, *, declared: bool) -> None:
    expected = case.outputs(case.run)
    function = case.as_jax(case.run, **({"output_shapes": expected} if declared else {}))
    actual = jax.jit(function)(case.arrays())
    assert_trees_equal(tree_leaves(actual), tree_leaves(expected))


def _check_gradients(case: Case, *, declared: bool) -> None:
    outputs = case.outputs(case.run_differentiable)
    function = case.as_jax(
        case.run_differentiable, **({"output_shapes": outputs} if declared else {})
    )
    cotangents = normal_like(inexact_leaves(outputs), seed=0)

    @jax.jit
    def pullback(arrays: Any, cotangents: Any) -> Any:
        on_active = lambda xs: inexact_leaves(function(case.with_active(arrays, xs)))  # noqa: E731
        return jax.vjp(on_active, [arrays[i] for i in case.active])[1](cotangents)[0]

    actual = lambda: jax.block_until_ready(pullback(case.arrays(), tree_t2j(cotangents)))  # noqa: E731
    try:
        expected = case.gradients(cotangents)
    except Exception as error:
        with pytest.raises(Exception, match=re.escape(str(error).splitlines()[0])):
            actual()
    else:
        assert_trees_equal(actual(), expected)


def _check_tangents(case: Case, *, declared: bool) -> None:
    """<u, J t> is <J^T u, t>, and J^T u is known from torch."""
    outputs = case.outputs(case.run_differentiable)
    function = case.as_jax(
        case.run_differentiable, **({"output_shapes": outputs} if declared else {})
    )
    cotangents = normal_like(inexact_leaves(outputs), seed=0)
    tangents = normal_like([case.tensors[i] for i in case.active], seed=1)
    try:
        gradients = case.gradients(cotangents)
    except Exception:
        return

    @jax.jit
    def pushforward(arrays: Any, tangents: Any) -> Any:
        on_active = lambda xs: inexact_leaves(function(case.with_active(arrays, xs)))  # noqa: E731
        return jax.jvp(on_active, ([arrays[i] for i in case.active],), (tangents,))[1]

    out_tangents = pushforward(case.arrays(), tree_t2j(tangents))
    left, right = _terms(cotangents, out_tangents), _terms(gradients, tangents)
    scale = np.abs(left).sum() + np.abs(right).sum()
    np.testing.assert_allclose(left.sum().real, right.sum().real, atol=1e-5 * scale)


def _terms(xs: Any, ys: Any) -> np.ndarray:
    products = [
        (to_numpy(x).astype(complex) * to_numpy(y).astype(complex)).ravel()
        for x, y in zip(xs, ys, strict=True)
    ]
    return np.concatenate(products) if products else np.zeros(0)


@contextlib.contextmanager
def _initialised(name: str) -> Iterator[None]:
    torch.use_deterministic_algorithms(name in UNINITIALISED)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
