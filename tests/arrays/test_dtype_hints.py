"""Errors of torch about dtypes say what to write in JAX, at run time, with torch's own messages."""

import re

import jax
import jax.numpy as jnp
import pytest
import torch
from torch import nn
from torch.nn import functional

from eqx_torch import from_torch, torch2jax
from eqx_torch._program.hints import hint_for

from ..helpers import assert_trees_equal


INT64 = (
    "JAX holds int64 in 32 bits: where torch wants int64, as for class labels, convert with the "
    'arguments of a whole call as examples, as in `from_torch(module, ids, example_kw={"labels": '
    "torch.zeros(2, 3, dtype=torch.int64)})`. In torch code of your own, write `.long()`, or "
    'annotate the argument, `labels: Int64[Tensor, "batch"]`, there or in a `signature=`.'
)
SCORES, LABELS = jnp.ones((2, 4)), jnp.zeros(2, jnp.int32)


def _raised(f, *args, shape=(2, 4), dtype="float32"):
    """The message of a call whose outputs are declared, so that torch first runs at run time."""
    options = {"output_shapes": jax.ShapeDtypeStruct(shape, dtype)}
    wrapped = from_torch(f, **options) if isinstance(f, nn.Module) else torch2jax(f, **options)
    with pytest.raises(Exception) as info:  # noqa: PT011
        jax.block_until_ready(wrapped(*args))
    return str(info.value)


_LSTM = nn.LSTM(4, 4)


def _lstm(x):
    return _LSTM(x)[0]


LAYERS = {
    "linear": (nn.Linear(4, 4), (2, 4)),
    "convolution": (nn.Conv1d(4, 4, 1), (2, 4, 4)),
    "attention": (nn.TransformerEncoderLayer(4, 1, 4).eval(), (2, 4)),
    "recurrent": (_lstm, (2, 4)),
    "product": (lambda x: x @ torch.ones(4, 4), (2, 4)),
    "batched product": (lambda x: torch.bmm(torch.ones(1, 4, 4), x), (1, 4, 4)),
}


@pytest.mark.parametrize("dtype", ["int32", "bfloat16", "float16", "uint8", "bool"])
@pytest.mark.parametrize(("layer", "shape"), LAYERS.values(), ids=LAYERS)
@pytest.mark.covering
def test_a_layer_of_floats_given_another_dtype(layer, shape, dtype):
    message = _raised(layer, jnp.ones(shape, dtype), shape=shape)
    hint = f"argument 0 is {dtype}, and nothing is cast for you: pass `x.astype(jax.numpy.float32)`"
    assert hint in message
    assert "int64" not in message
    whole = from_torch(layer) if isinstance(layer, nn.Module) else torch2jax(layer)
    assert whole(jnp.ones(shape, dtype).astype(jnp.float32)).shape == shape


def test_a_layer_of_bfloat16_given_float32():
    layer = nn.Linear(4, 4).bfloat16()
    message = _raised(layer, jnp.ones((2, 4)), dtype="bfloat16")
    assert "argument 0 is float32, and nothing is cast for you: pass " in message
    assert "`x.astype(jax.numpy.bfloat16)`." in message
    expected = layer(torch.ones(2, 4, dtype=torch.bfloat16))
    assert_trees_equal(from_torch(layer)(jnp.ones((2, 4)).astype(jnp.bfloat16)), expected)


FLOATS_ONLY = {
    "softmax": lambda x: x.softmax(1),
    "mean": lambda x: x.mean(1),
    "gelu": functional.gelu,
    "std": lambda x: x.std(),
    "norm": torch.linalg.norm,
    "layer norm": lambda x: functional.layer_norm(x, (4,), torch.ones(4), torch.ones(4)),
    "in place": lambda x: x.add_(0.5),
}


@pytest.mark.parametrize("f", FLOATS_ONLY.values(), ids=FLOATS_ONLY)
def test_a_function_of_floats_given_integers(f):
    message = _raised(f, jnp.ones((2, 4), jnp.int32))
    assert "argument 0 is int32, and nothing is cast for you: pass `x.astype(" in message


CLASSES = {
    "cross_entropy": (functional.cross_entropy, SCORES, LABELS),
    "nll_loss": (functional.nll_loss, SCORES, LABELS),
    "multi_margin_loss": (functional.multi_margin_loss, SCORES, LABELS),
    "one_hot": (lambda i: functional.one_hot(i, 4), LABELS),
    "take": (torch.take, SCORES, LABELS),
}


@pytest.mark.parametrize(("f", "args"), [(f, a) for f, *a in CLASSES.values()], ids=CLASSES)
def test_int64_is_wanted(f, args):
    message = _raised(f, *args)
    assert message.count(INT64) == 1
    assert "astype" not in message
    *scores, labels = (torch.tensor(a.tolist()) for a in args)
    longer = torch2jax(lambda *xs: f(*xs[:-1], xs[-1].long()))
    assert_trees_equal(longer(*args), f(*scores, labels.long()))


UNRELATED = {
    "embedding out of range": (nn.Embedding(1, 3), LABELS + 5),
    "label out of range": (lambda x, i: functional.cross_entropy(x, i.long() + 9), SCORES, LABELS),
    "index out of range": (lambda x, i: x[i + 9], SCORES, LABELS),
    "gather out of range": (lambda x, i: x.gather(1, i[:, None].long() + 9), SCORES, LABELS),
    "shapes": (lambda x, i: x @ x, SCORES, LABELS),
    "the user's own": (lambda i: (_ for _ in ()).throw(ValueError("no luck")), LABELS),
    "short index": (lambda x, i: x[i.short()], SCORES, LABELS),
    "bool wanted": (lambda x, i: torch.where(i, x[0, :2], x[1, :2]), SCORES, LABELS),
    "floats refused": (lambda x, i: x & i[:, None], SCORES, LABELS),
    "floats as index": (lambda x, i: x.index_add(0, i.float(), x), SCORES, LABELS),
    "floats to embed": (lambda x, i: nn.Embedding(3, 3)(x), SCORES, LABELS),
}


@pytest.mark.parametrize(("f", "args"), [(f, a) for f, *a in UNRELATED.values()], ids=UNRELATED)
def test_neither_hint_where_it_would_not_help(f, args):
    message = _raised(f, *args)
    assert "was called on" in message
    assert "JAX holds int64" not in message
    assert "astype" not in message


def test_with_64_bits_nothing_is_held_in_32():
    with jax.enable_x64(True):
        assert "JAX holds int64" not in _raised(
            functional.cross_entropy, SCORES, LABELS, dtype="float64"
        )
        hint = (
            "argument 0 is float64, and nothing is cast for you: pass `x.astype(jax.numpy.float32)`"
        )
        assert hint in _raised(nn.Linear(4, 4), jnp.ones((2, 4), "float64"))


def test_the_message_of_a_loss_of_class_labels_on_a_gpu():
    text = "\"nll_loss_forward_reduce_cuda_kernel_2d_index\" not implemented for 'Int'"
    inputs = [("argument 0", torch.float32), ("argument 1", torch.int32)]
    assert hint_for(RuntimeError(text), inputs, x64=False) == INT64
    other = re.sub("_index", "", text)
    assert "argument 1 is int32" in hint_for(RuntimeError(other), inputs, x64=False)
