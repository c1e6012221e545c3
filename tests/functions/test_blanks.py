"""The first run of a process, which finds shapes out without torch's compiler."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from eqx_torch import _fakes, _probe, from_torch, ModuleError, ShapeError, torch2jax

from ..helpers import assert_trees_equal
from ..helpers.by_values import BY_VALUES, VALUE_DEPENDENT
from ..helpers.isolated import run_script


FIRST_CALLS = """
import sys
import equinox, jax, torch
from torch import nn
from eqx_torch import from_torch, torch2jax

x = jax.numpy.ones((8, 8))
print(jax.jit(torch2jax(torch.add))(x, x).shape)
MODELS = {
    (32768, 256): nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.LayerNorm(256)),
    (2, 3, 64, 64): nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.MaxPool2d(2)),
    (4, 50, 64): nn.TransformerEncoderLayer(64, 2, 128, dropout=0, batch_first=True),
    (4, 5, 8): nn.LSTM(8, 8),
}
for shape, model in MODELS.items():
    out = jax.eval_shape(from_torch(model), jax.ShapeDtypeStruct(shape, "float32"))
    print(jax.tree.leaves(out)[0].shape)
print("torch._dynamo" in sys.modules, "sympy" in sys.modules)
"""


def test_first_calls_import_no_compiler():
    out, _ = run_script(FIRST_CALLS, timeout=120)
    shapes = [(8, 8), (32768, 256), (2, 8, 31, 31), (4, 50, 64), (4, 5, 8)]
    assert out.splitlines() == [*map(str, shapes), "False False"]


@pytest.fixture
def ways(monkeypatch):
    """Has blanks tried although the compiler was imported, and says which way was taken."""
    taken = []
    run = _probe._run

    def noted(question, way, before):
        outputs = run(question, way, before)
        taken.append(way)
        return outputs

    monkeypatch.setattr(_probe, "_run", noted)
    monkeypatch.setattr(_probe, "blanks_serve", lambda device: True)
    return taken


X = torch.linspace(-1, 1, 24).reshape(4, 6)
SAME = {
    "pointwise": lambda x: (x.sin() + x[:1], x > 0, torch.where(x > 0, x, 2), x.clamp(0, 1)),
    "types": lambda x: (
        x.half() * 2,
        x.int() / 2,
        x * x[0, 0].double(),
        x.to(torch.complex64).abs(),
    ),
    "products": lambda x: (x @ x.T, x.T @ x.half().float(), torch.addmm(x[:, 0], x, x.T[:, :4])),
    "batched": lambda x: torch.baddbmm(x[:2, None, :1], x.view(2, 2, 6), x.view(2, 6, 2)[..., :1]),
    "transposed": lambda x: (x.T.relu(), x.T.relu().T.view(-1)),
    "in place": lambda x: x.clone().mul_(2).unsqueeze_(0),
    "out": lambda x: torch.sin(x, out=torch.empty(0)),
    "written": lambda x: x.mul_(2).sum(0),
    "reductions": lambda x: (
        x.sum(),
        x.mean(0),
        x.softmax(-1),
        x.argmax(1),
        x.var(1, keepdim=True),
    ),
    "shuffles": lambda x: (x.repeat(3, 2), torch.cat([x, x]), x.sort()[1], x.topk(2)[0], x.flip(0)),
    "rows": lambda x: x[torch.tensor([0, 2, 2, 1, 3])],
    "embedding": lambda x: torch.nn.functional.embedding(x.long().abs(), x),
    "convolution": lambda x: torch.conv1d(x.view(4, 2, 3), x[:, :4].reshape(8, 2, 1)),
    "transposed convolution": lambda x: torch.conv_transpose1d(x.view(4, 2, 3), x.view(2, 4, 3)),
    "gradient": lambda x: torch.func.grad(lambda x: x.exp().sum())(x),
    "empty": lambda x: x[:0].sin(),
    "number": lambda x: x.sum(),
    "vmap": lambda x: torch.vmap(lambda r: r @ r)(x),
}


@pytest.mark.parametrize("small", [True, False])
@pytest.mark.parametrize("f", SAME.values(), ids=SAME)
def test_it_is_what_torch_returns(monkeypatch, ways, f, small):
    """With and without what is not computed, which has to be large otherwise."""
    monkeypatch.setattr(_fakes, "_SMALL", 2**12 if small else 0)
    expected = jax.tree.map(lambda y: (y.shape, str(y.dtype)[6:]), f(X.clone()))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "An output with one or more elements was resized")
        actual = jax.eval_shape(torch2jax(f), jax.ShapeDtypeStruct((4, 6), "float32"))
    narrow = {"float64": "float32", "int64": "int32"}
    expected = [
        (tuple(shape), narrow.get(dtype, dtype))
        for shape, dtype in jax.tree.leaves(expected, is_leaf=lambda x: isinstance(x[-1], str))
    ]
    assert [(y.shape, str(y.dtype)) for y in jax.tree.leaves(actual)] == expected
    assert ways[-1] is (_probe._ON_FAKES if f is SAME["empty"] else _probe._ON_BLANKS)


READERS = {
    **VALUE_DEPENDENT,
    "array": lambda x: torch.as_tensor(np.asarray(x.detach())),
    "dlpack": lambda x: torch.from_dlpack(x.detach()) * 1,
    "address": lambda x: x + 0 * (x.data_ptr() > 0),
    "equal": lambda x: x if torch.equal(x, x) else x[0],
}


@pytest.mark.parametrize("f", READERS.values(), ids=READERS)
def test_nobody_reads_a_value(ways, f):
    with pytest.warns(UserWarning, match="inferred by running it on zeros"):
        jax.eval_shape(torch2jax(f), jax.ShapeDtypeStruct((4,), "float32"))
    assert ways == [_probe._ON_ZEROS]


@pytest.mark.parametrize(("f", "args"), BY_VALUES.values(), ids=BY_VALUES)
def test_shapes_are_never_those_of_zeros(ways, f, args):
    torch2jax(f)(*args)
    assert len(ways) == 1
    assert ways[0].source == "one run on values"


def _caught(x):
    try:
        return torch.linalg.cholesky(x)
    except RuntimeError:
        return x[0]


def test_what_zeros_raise_and_code_catches(ways):
    assert torch2jax(_caught)(jnp.eye(3)).shape == (3, 3)
    assert _probe._ON_BLANKS not in ways


def test_packed_sequences_are_read(ways):
    def f(x, lengths):
        packed = torch.nn.utils.rnn.PackedSequence(x, lengths.long())
        return torch.nn.utils.rnn.pad_packed_sequence(packed)[0]

    assert torch2jax(f)(jnp.ones((5, 3)), jnp.array([2, 2, 1])).shape == (3, 2, 3)
    assert _probe._ON_BLANKS not in ways


@pytest.mark.parametrize(
    "f",
    [
        lambda x: (x[:, None] * x[None]).softmax(0),
        lambda x: x.repeat(x.shape[0], 1),
        lambda x: x.sum() + torch.zeros(x.shape[0], x.shape[0]),
        lambda x: torch.linalg.svdvals(x.view(500, 1000)),
    ],
)
def test_what_takes_long_is_left_to_fakes(ways, f):
    jax.eval_shape(torch2jax(f), jax.ShapeDtypeStruct((500_000,), "float32"))
    assert ways == [_probe._ON_FAKES]


def test_what_is_large_takes_no_memory(ways):
    """A terabyte, which nobody computes."""
    f = torch2jax(lambda x: torch.sin(x[:, None] @ x[None]).T)
    out = jax.eval_shape(f, jax.ShapeDtypeStruct((200_000,), "float32"))
    assert out.shape == (200_000, 200_000)
    x = jax.ShapeDtypeStruct((200_000, 200_000), "float32")
    assert jax.eval_shape(torch2jax(lambda x: x.mul_(2)), x) == x


@pytest.mark.parametrize("reads", [False, True])
def test_draws_are_seen(ways, reads):
    """Whatever they are drawn from while the function runs on blanks or values."""

    class Noisy(torch.nn.Module):
        def forward(self, x):
            y = torch.nn.functional.dropout(x, 0.5, self.training) + torch.rand(8)
            return y + 0 * y.sum().item() if reads else y

    model, key, x = from_torch(Noisy()), jax.random.key(0), jnp.ones(8)
    assert_trees_equal(model(x, key=key), model(x, key=key), exact=True)
    assert ways[0] is not _probe._ON_FAKES
    with pytest.raises(ModuleError, match="called without `key=`"):
        model(x)
    own = torch.Generator().manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.eval_shape(torch2jax(lambda x: x + torch.rand(8, generator=own)), x)


def test_no_blank_survives(ways):
    kept = []

    def f(x):
        kept.append(x * 2)
        return x.sin()

    jax.eval_shape(torch2jax(f), jax.ShapeDtypeStruct((3,), "float32"))
    assert (kept, ways) == ([], [_probe._ON_BLANKS])


def test_an_error_is_that_of_the_shapes(ways):
    with pytest.raises(ShapeError, match=r"argument 0 float32\[2, 3\]: running"):
        jax.eval_shape(torch2jax(lambda x: x @ x), jax.ShapeDtypeStruct((2, 3), "float32"))
    assert ways == []
