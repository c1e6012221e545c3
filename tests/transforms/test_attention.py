"""Batches of attention, which on a CPU torch itself computes in a loop."""

import re

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from eqx_torch import from_torch, stack_modules, torch2jax

from ..helpers import assert_trees_equal


BATCH, ENTRIES, HEADS, QUERIES, KEYS, WIDTH = 9, 2, 4, 3, 6, 8
SHAPES = [(ENTRIES, HEADS, n, WIDTH) for n in (QUERIES, KEYS, KEYS)]

by_torch = torch2jax(lambda q, k, v, mask=None: scaled_dot_product_attention(q, k, v, mask))


def by_jax(q, k, v, mask=None):
    scores = jnp.einsum("bhqd,bhkd->bhqk", q, k) / q.shape[-1] ** 0.5
    if mask is not None:
        scores = jnp.where(mask, scores, -jnp.inf) if mask.dtype == bool else scores + mask
    return jnp.einsum("bhqk,bhkd->bhqd", jax.nn.softmax(scores), v)


def random(key, shape, axis):
    """An array with a batch axis at `axis`, or without one."""
    full = shape if axis is None else (*shape[:axis], BATCH, *shape[axis:])
    return jax.random.normal(key, full)


def gradient(attention):
    """The gradient of a loss by queries, keys and values."""
    return jax.grad(lambda q, k, v, *mask: (attention(q, k, v, *mask) ** 2).sum(), (0, 1, 2))


def test_a_batch_is_one_operator(getkey):
    args = [random(getkey(), shape, 0) for shape in SHAPES]
    batched = jax.jit(jax.vmap(gradient(by_torch)))
    jax.block_until_ready(batched(*args))
    with torch.profiler.profile() as profile:
        jax.block_until_ready(batched(*args))
    names = [event.key for event in profile.events()]
    # On each level of transformations an operator is called again.
    for suffix in ("", "_backward"):
        operator = f"aten::_scaled_dot_product_flash_attention_for_cpu{suffix}"
        assert 0 < names.count(operator) < BATCH


@pytest.mark.parametrize("axes", [(0, 0, 0), (3, 0, 4), (None, 1, 2), (0, None, None)], ids=str)
@pytest.mark.parametrize("transformed", [lambda f: f, gradient], ids=["forward", "gradient"])
def test_axes(getkey, axes, transformed):
    args = [random(getkey(), shape, axis) for shape, axis in zip(SHAPES, axes, strict=True)]
    actual, expected = (jax.jit(jax.vmap(transformed(f), axes)) for f in (by_torch, by_jax))
    assert_trees_equal(actual(*args), expected(*args), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "shape",
    [(QUERIES, KEYS), (1, 1, 1, KEYS), (ENTRIES, 1, QUERIES, KEYS), (1, HEADS, QUERIES, KEYS)],
    ids=str,
)
@pytest.mark.parametrize("axis", [None, 0, 1])
@pytest.mark.parametrize("dtype", [bool, "float32"])
def test_masks(getkey, shape, axis, dtype):
    args = [random(getkey(), s, 0) for s in SHAPES]
    mask = random(getkey(), shape, axis)
    if dtype is bool:
        mask = (mask > 0) | (jnp.arange(mask.shape[-1]) == 0)  # a key for every query
    axes = (0, 0, 0, axis)
    actual, expected = (jax.vmap(gradient(f), axes) for f in (by_torch, by_jax))
    assert_trees_equal(actual(*args, mask), expected(*args, mask), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("inner", "entries"), [(3, 2), (1, 1), (3, 0)])
def test_batches_of_batches(getkey, inner, entries):
    shapes = [(inner, entries, *shape[1:]) for shape in SHAPES]
    args = [random(getkey(), shape, -1) for shape in shapes]

    def nested(attention):
        return jax.vmap(jax.vmap(gradient(attention)), in_axes=-1, out_axes=1)

    assert_trees_equal(nested(by_torch)(*args), nested(by_jax)(*args), rtol=1e-4, atol=1e-5)


def test_options_of_attention_are_those_of_each_member(getkey):
    def attend(q, k, v):
        return scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3, enable_gqa=True)

    q = random(getkey(), (ENTRIES, HEADS, QUERIES, WIDTH), 0)
    k, v = (random(getkey(), (ENTRIES, HEADS // 2, QUERIES, WIDTH), 0) for _ in range(2))
    batched = jax.vmap(torch2jax(attend))(q, k, v)
    members = [attend(*map(torch.from_dlpack, qkv)) for qkv in zip(q, k, v, strict=True)]
    assert_trees_equal(batched, torch.stack(members), rtol=1e-4, atol=1e-5)


def test_an_ensemble_of_transformers(getkey):
    def layer():
        return torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)

    members = [from_torch(layer()) for _ in range(3)]
    x = jax.random.normal(getkey(), (2, 5, 16))
    call_all = eqx.filter_vmap(lambda model: model(x), in_axes=eqx.if_array(0))
    ensemble = call_all(stack_modules(members))
    assert_trees_equal(ensemble, jnp.stack([m(x) for m in members]), rtol=1e-4, atol=1e-5)


def test_a_second_derivative_says_how_to_turn_fused_attention_off(getkey):
    q = random(getkey(), SHAPES[0], None)
    loss = torch2jax(lambda q: scaled_dot_product_attention(q, q, q).square().sum())
    hint = (
        "Fused attention has one derivative only. Turn it off before the first call, by "
        "`torch.backends.cuda.enable_flash_sdp(False)`"
    )
    with pytest.raises(Exception, match=re.escape(hint)):
        jax.block_until_ready(jax.hessian(loss)(q))
    enabled = torch.backends.cuda.flash_sdp_enabled()
    torch.backends.cuda.enable_flash_sdp(False)
    try:
        actual = jax.block_until_ready(jax.hessian(loss)(q))
    finally:
        torch.backends.cuda.enable_flash_sdp(enabled)
    expected = jax.hessian(lambda q: (by_jax(q, q, q) ** 2).sum())(q)
    assert_trees_equal(actual, expected, rtol=1e-3, atol=1e-4)
