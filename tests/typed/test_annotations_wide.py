"""Annotations of one 64-bit dtype, while JAX has only 32 bits: torch is given the 64."""

import jax
import jax.numpy as jnp
import pytest
import torch
from jaxtyping import Complex128, Float, Float32, Float64, Int, Int32, Int64, PyTree, UInt64
from torch import Tensor

from eqx_torch import from_torch, torch2jax

from ..helpers import assert_trees_equal


def seen_by(annotation, array, **options):
    """The dtype that a function with this annotation is given."""
    seen = []

    def f(x):
        seen.append(x.dtype)
        return x

    f.__annotations__ = {"x": annotation}
    y = torch2jax(f, **options)(array)
    assert y.dtype == array.dtype
    assert len(set(seen)) == 1
    return seen[0]


ANNOTATIONS = {
    "Int64": (Int64[Tensor, "n"], jnp.int32, torch.int64),
    "UInt64": (UInt64[Tensor, "n"], jnp.uint32, torch.uint64),
    "Float64": (Float64[Tensor, "n"], jnp.float32, torch.float64),
    "Complex128": (Complex128[Tensor, "n"], jnp.complex64, torch.complex128),
    "optional": (Int64[Tensor, "n"] | None, jnp.int32, torch.int64),
    "one of two shapes": (Float32[Tensor, "n m"] | Int64[Tensor, "n"], jnp.int32, torch.int64),
    "a family": (Int[Tensor, "n"], jnp.int32, torch.int32),
    "two dtypes": (Int64[Tensor, "n"] | Int32[Tensor, "n"], jnp.int32, torch.int32),
    "32 bits": (Int32[Tensor, "n"], jnp.int32, torch.int32),
}


@pytest.mark.parametrize(("annotation", "dtype", "given"), ANNOTATIONS.values(), ids=ANNOTATIONS)
def test_torch_is_given_the_64_bits_of_an_annotation(annotation, dtype, given):
    assert seen_by(annotation, jnp.ones(3, dtype)) == given


def test_under_x64_arrays_have_their_own_dtypes(x64):
    assert seen_by(Int64[Tensor, "n"], jnp.ones(3, jnp.int64)) == torch.int64


def test_a_torch_tensor_among_the_examples_decides():
    options = {"output_shapes": lambda x: x}
    seen = []

    def f(x: Int64[Tensor, "n"]):
        seen.append(x.dtype)
        return x

    y = jnp.arange(3)
    torch2jax(f, torch.zeros(3, dtype=torch.int32), **options)(y)
    assert set(seen) == {torch.int32}
    for example in (torch.zeros(3, dtype=torch.int64), y, jax.ShapeDtypeStruct((3,), "int32")):
        seen.clear()
        torch2jax(f, example, **options)(y)
        assert set(seen) == {torch.int64}


def labelled(x: Float[Tensor, "n c"], y: Int64[Tensor, "n"]) -> Float[Tensor, ""]:
    return torch.nn.functional.cross_entropy(x, y)


def by_keyword(x: Float[Tensor, "n c"], **labels: Int64[Tensor, "n"]) -> Float[Tensor, ""]:
    return torch.nn.functional.cross_entropy(x, labels["y"])


def nested(x: Float[Tensor, "n c"], d: dict[str, list[Int64[Tensor, "n"]]]) -> Float[Tensor, ""]:
    return torch.nn.functional.cross_entropy(x, d["y"][0])


def in_a_tree(x: Float[Tensor, "n c"], d: PyTree[Int64[Tensor, "n"]]) -> Float[Tensor, ""]:
    return torch.nn.functional.cross_entropy(x, d["y"][0])


def unannotated_result(x: Float[Tensor, "n c"], y: Int64[Tensor, "n"]):
    return torch.nn.functional.cross_entropy(x, y)


class Loss(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(3)
        self.register_buffer("weight", torch.ones(3))

    def forward(self, x: Float[Tensor, "n c"], y: Int64[Tensor, "n"]) -> Float[Tensor, ""]:
        assert self.norm.num_batches_tracked.dtype == torch.int64
        return torch.nn.functional.cross_entropy(x, y, self.weight)

    def method(self, x: Float[Tensor, "n c"], *, y: Int64[Tensor, "n"]):
        return self(x, y)


def stub(x: Float[Tensor, "n c"], y: Int64[Tensor, "n"]) -> Float[Tensor, ""]: ...


X = jnp.arange(12.0).reshape(4, 3) ** 0.5
Y = jnp.array([0, 2, 1, 1])
LOSSES = {
    "function": lambda x: torch2jax(labelled)(x, Y),
    "keyword": lambda x: torch2jax(labelled)(x, y=Y),
    "keywords": lambda x: torch2jax(by_keyword)(x, y=Y),
    "in containers": lambda x: torch2jax(nested)(x, {"y": [Y]}),
    "in a tree": lambda x: torch2jax(in_a_tree)(x, {"y": [Y]}),
    "result not annotated": lambda x: torch2jax(unannotated_result)(x, Y),
    "stub": lambda x: torch2jax(torch.nn.functional.cross_entropy, signature=stub)(x, Y),
    "examples of JAX": lambda x: torch2jax(unannotated_result, X, Y)(x, Y),
    "module": lambda x: from_torch(Loss().eval())(x, Y),
    "module with examples of JAX": lambda x: from_torch(Loss().eval(), X, Y)(x, Y),
    "method": lambda x: from_torch(Loss().eval(), method="method")(x, y=Y),
    "bound method": lambda x: torch2jax(Loss().eval().method)(x, y=Y),
}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_class_labels(loss):
    def expected(x):
        return -jnp.take_along_axis(jax.nn.log_softmax(x), Y[:, None], 1).mean()

    assert_trees_equal(loss(X), expected(X))
    assert_trees_equal(jax.jit(loss)(X), expected(X))
    assert_trees_equal(jax.grad(loss)(X), jax.grad(expected)(X))


def test_batches_of_annotated_functions():
    f = torch2jax(labelled)
    batch = jnp.stack([X, X + 1])
    y = jax.vmap(lambda x: f(x, Y))(batch)
    assert_trees_equal(y, jnp.stack([f(X, Y), f(X + 1, Y)]))


def test_results_of_64_bits_stand_for_32():
    def f(x: Float64[Tensor, "n"]) -> tuple[Float64[Tensor, "n"], Int64[Tensor, "n"]]:
        return x * 2, x.argsort()

    y, order = torch2jax(f)(jnp.array([2.0, 1.0]))
    assert (y.dtype, order.dtype) == (jnp.float32, jnp.int32)
    assert_trees_equal((y, order), (jnp.array([4.0, 2.0]), jnp.array([1, 0])))
