"""Indices of 32 bits, which are all that JAX has without x64, pick what those of 64 bits do.

In any layout: torch's own kernels for CPUs misread some expanded ones.
"""

import itertools
import threading
import warnings
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_leaves

from eqx_torch import from_torch, torch2jax

from ..helpers import assert_trees_equal
from ..helpers.operators import OPERATORS
from ..helpers.sets import sampled


LAYOUTS = {
    "contiguous": lambda i: i.contiguous(),
    "expanded first": lambda i: i[:1].contiguous().expand(i.shape),
    "expanded last": lambda i: i[..., :1].contiguous().expand(i.shape),
    "transposed": lambda i: i.transpose(0, -1).contiguous().transpose(0, -1),
    "sliced": lambda i: torch.stack([i, i], -1)[..., 0],
}

# Those that take an index of 32 bits; torch refuses it for the others.
INDEXED = [
    "gather",
    "index_add",
    "index_put",
    "index_reduce.amax",
    "index_reduce.amin",
    "index_reduce.mean",
    "index_reduce.prod",
    "index_select",
    "narrow",
    "nn.functional.ctc_loss",
    "nn.functional.embedding",
    "nn.functional.embedding_bag",
    "repeat_interleave",
    "scatter",
    "scatter_add",
    "scatter_reduce.amax",
    "scatter_reduce.amin",
    "scatter_reduce.mean",
    "scatter_reduce.prod",
    "scatter_reduce.sum",
    "take_along_dim",
]
FAST = ["gather", "scatter", "scatter_add", "scatter_reduce.amax"]

SIZES = {"nodes": 10, "edges": 24, "channels": 20}  # from 16 channels on torch has other kernels
NODES, EDGES, CHANNELS = SIZES.values()
REDUCTIONS = ["sum", "prod", "mean", "amax", "amin"]


@pytest.fixture
def graph(getkey) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Features of nodes, messages along edges, and where each of these ends."""
    nodes = jax.random.normal(getkey(), (NODES, CHANNELS))
    messages = jax.random.normal(getkey(), (EDGES, CHANNELS))
    return nodes, messages, jax.random.randint(getkey(), (EDGES,), 0, NODES)


def expanded(index: torch.Tensor) -> torch.Tensor:
    return index.view(-1, 1).expand(-1, CHANNELS)


def gathering(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return torch.gather(x, 0, expanded(index))


def _samples(name: str) -> list[list[Any]]:
    torch.manual_seed(0)
    op = OPERATORS[name]
    samples = op.sample_inputs("cpu", torch.float32, requires_grad=False)
    return [[s.input, *s.args, s.kwargs] for s in itertools.islice(samples, 6)]


@pytest.mark.filterwarnings("ignore:.*draws random numbers", "ignore:.*inferred by running")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", sampled(INDEXED, FAST))
@pytest.mark.covering
def test_operators_with_an_index_of_32_bits(name, layout):
    """Values and gradients are those of torch with a contiguous index of 64 bits."""
    seen = 0
    for sample in _samples(name):
        leaves, structure = jax.tree.flatten(sample)
        tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
        indices = [i for i, x in enumerate(tensors) if x.dtype is torch.int64]
        if not indices or not all(x.numel() for x in tensors):
            continue

        def call(*xs, wide, leaves=leaves, structure=structure, indices=indices):
            xs = list(xs)
            for i in indices:
                xs[i] = LAYOUTS[layout](xs[i]) if xs[i].dim() else xs[i]
                xs[i] = xs[i].long().contiguous() if wide else xs[i]
            rest = iter(xs)
            filled = [next(rest) if isinstance(x, torch.Tensor) else x for x in leaves]
            *args, kwargs = jax.tree.unflatten(structure, filled)
            out = tree_leaves(OPERATORS[name](*args, **kwargs))
            return [y for y in out if isinstance(y, torch.Tensor)]

        active = [i for i, x in enumerate(tensors) if x.is_floating_point()]
        leafs = [x.clone().requires_grad_(i in active) for i, x in enumerate(tensors)]
        try:
            expected = call(*leafs, wide=True)
        except Exception:  # not for an index that repeats
            continue
        arrays = [jnp.asarray(x.numpy()) for x in tensors]
        wrapped = torch2jax(
            lambda *xs, call=call: call(*xs, wide=False),
            output_shapes=[jax.ShapeDtypeStruct(y.shape, _dtype(y)) for y in expected],
        )

        def of_active(xs, arrays=arrays, active=active, wrapped=wrapped):
            filled = list(arrays)
            for i, x in zip(active, xs, strict=True):
                filled[i] = x
            return wrapped(*filled)

        actual, pull = jax.vjp(of_active, [arrays[i] for i in active])
        assert_trees_equal(actual, [y.detach() for y in expected], rtol=1e-5)
        seen += 1
        ends = [y for y in expected if y.requires_grad]
        if not ends:
            continue
        seeds = [torch.linspace(1, 2, y.numel()).reshape(y.shape) for y in expected]
        try:
            grads = torch.autograd.grad(
                ends,
                [leafs[i] for i in active],
                [u for y, u in zip(expected, seeds, strict=True) if y.requires_grad],
                allow_unused=True,
                materialize_grads=True,
            )
        except RuntimeError:  # torch has no gradient of `scatter(reduce=...)`
            continue
        cotangents = [
            jnp.asarray(u.numpy()) if y.requires_grad else _no_cotangent(y)
            for y, u in zip(expected, seeds, strict=True)
        ]
        assert_trees_equal(pull(cotangents)[0], list(grads), rtol=1e-5)
    assert seen


def _dtype(y: torch.Tensor) -> Any:
    return jax.dtypes.canonicalize_dtype(y.detach().numpy().dtype)


def _no_cotangent(y: torch.Tensor) -> Any:
    if y.is_floating_point():
        return jnp.zeros(y.shape, _dtype(y))
    return np.zeros(y.shape, jax.dtypes.float0)


@pytest.mark.slow
def test_the_table_has_all_operators_that_take_32_bits():
    """Tried with a contiguous index, where torch has no fault."""
    taking = set()
    for name, op in OPERATORS.items():
        if torch.float32 not in op.dtypes or "segment_reduce" in name or name.startswith("_"):
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                samples = _samples(name)
            except Exception:  # not on a CPU
                continue
        for sample in samples:
            leaves, structure = jax.tree.flatten(sample)
            wide = [isinstance(x, torch.Tensor) and x.dtype is torch.int64 for x in leaves]
            if not any(wide):
                continue
            narrow = [x.int() if w else x for x, w in zip(leaves, wide, strict=True)]
            *args, kwargs = jax.tree.unflatten(structure, narrow)
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    op(*args, **kwargs)
            except Exception:  # torch refuses it
                continue
            taking.add(name)
    of_values = {"linspace.tensor_overload", "logspace.tensor_overload"}
    assert taking - of_values <= set(INDEXED)


def test_gather_everywhere(graph, monkeypatch):
    """Eager and jitted, in a batch, in debug mode, and in derivatives of either mode and order."""
    x, _, index = graph
    pick = torch2jax(gathering)
    assert_trees_equal(pick(x, index), x[index], exact=True)
    assert_trees_equal(jax.jit(pick)(x, index), x[index], exact=True)
    xs, many = jnp.stack([x, 2 * x]), jnp.stack([index, index[::-1]])
    batched = jax.vmap(pick)(xs, many)
    assert_trees_equal(batched, jnp.stack([xs[0][many[0]], xs[1][many[1]]]), exact=True)
    assert_trees_equal(jax.vmap(pick, (0, None))(xs, index), xs[:, index], exact=True)
    cubed = lambda f: lambda x: (f(x) ** 3).sum()  # noqa: E731
    ours, jaxs = cubed(lambda x: pick(x, index)), cubed(lambda x: x[index])
    for derivative in (
        jax.grad,
        lambda f: jax.grad(jax.checkpoint(f)),
        lambda f: lambda x: jax.jvp(f, (x,), (jnp.cos(x),))[1],
        lambda f: lambda x: jax.jvp(jax.grad(f), (x,), (jnp.cos(x),))[1],
        lambda f: jax.grad(lambda x: (jax.grad(f)(x) ** 2).sum()),
        lambda f: lambda x: jax.vmap(jax.grad(f))(jnp.stack([x, jnp.sin(x)])),
    ):
        assert_trees_equal(derivative(ours)(x), derivative(jaxs)(x), rtol=1e-5)
        assert_trees_equal(jax.jit(derivative(ours))(x), derivative(jaxs)(x), rtol=1e-5)
    monkeypatch.setenv("EQX_TORCH_DEBUG", "1")
    assert_trees_equal(torch2jax(gathering)(x, index), x[index], exact=True)


@pytest.mark.filterwarnings("ignore:The reduce argument of torch.scatter")
def test_all_forms_of_gather_and_scatter(graph):
    x, messages, index = graph
    rows = jnp.arange(EDGES) % NODES

    def calls(x, messages, index, rows):
        i = expanded(index)
        out = torch.empty_like(messages)
        torch.gather(x, 0, i, out=out)
        added = x.clone().scatter_add_(0, i, messages)
        named = torch.scatter(x, 0, i, messages, reduce="add")
        reduced = x.clone().scatter_reduce_(0, i, messages, "amax")
        multiplied = torch.scatter(x, 0, i, 2.0, reduce="multiply")
        written = x.clone().scatter_(0, i, 3.0)
        return (
            out,
            torch.take_along_dim(x, i.long(), 0),
            added,
            named,
            reduced,
            multiplied,
            written,
            torch.scatter(x, 0, expanded(rows)[:NODES], messages[:NODES]),
        )

    count = jnp.zeros(NODES).at[index].add(1.0)[:, None]
    expected = (
        x[index],
        x[index],
        x.at[index].add(messages),
        x.at[index].add(messages),
        x.at[index].max(messages),
        x * 2.0**count,
        jnp.where(count > 0, 3.0, x),
        messages[:NODES],
    )
    assert_trees_equal(torch2jax(calls)(x, messages, index, rows), expected, rtol=1e-5)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_gradients_of_reductions(graph, reduction):
    """By all that they reduce, against JAX on all pairs of a node and an edge."""
    x, messages, index = graph

    def reduced(x, messages, index):
        return torch.scatter_reduce(x, 0, expanded(index), messages, reduction)

    def by_hand(x, messages):
        ends = (index[None] == jnp.arange(NODES)[:, None])[..., None]  # nodes, edges, 1
        neutral = {"prod": 1.0, "amax": -jnp.inf, "amin": jnp.inf}.get(reduction, 0.0)
        terms = jnp.where(ends, messages[None], neutral)
        terms = jnp.concatenate([x[:, None], terms], 1)
        reduce = {"amax": jnp.max, "amin": jnp.min, "prod": jnp.prod}.get(reduction, jnp.sum)
        count = ends.astype(x.dtype).sum(1) if reduction == "mean" else 0.0
        return reduce(terms, 1) / (1.0 + count)

    weights = jnp.cos(jnp.arange(NODES * CHANNELS).reshape(NODES, CHANNELS))
    of = torch2jax(reduced)
    assert_trees_equal(of(x, messages, index), by_hand(x, messages), rtol=1e-5)
    ours = jax.jit(jax.grad(lambda x, m: (weights * of(x, m, index)).sum(), (0, 1)))
    jaxs = jax.grad(lambda x, m: (weights * by_hand(x, m)).sum(), (0, 1))
    assert_trees_equal(ours(x, messages), jaxs(x, messages), rtol=1e-4, atol=1e-5)


class MessagePassing(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(CHANNELS, CHANNELS)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        start, end = map(expanded, edges)
        messages = self.linear(torch.gather(x, 0, start))
        return torch.zeros_like(x).scatter_add(0, end, messages)


def test_message_passing_in_a_module(graph, getkey):
    x, _, index = graph
    edges = jnp.stack([index, jax.random.randint(getkey(), (EDGES,), 0, NODES)])
    model = from_torch(MessagePassing())
    weight, bias = model.params["linear.weight"], model.params["linear.bias"]

    def by_hand(weight, bias, x):
        return jnp.zeros_like(x).at[edges[1]].add(x[edges[0]] @ weight.T + bias)

    loss = lambda both: (both[0](both[1], edges) ** 2).sum()  # noqa: E731
    expected = jax.grad(lambda *args: (by_hand(*args) ** 2).sum(), (0, 1, 2))(weight, bias, x)
    assert_trees_equal(model(x, edges), by_hand(weight, bias, x), rtol=1e-4, atol=1e-5)
    grads, by_x = eqx.filter_jit(eqx.filter_grad(loss))((model, x))
    found = (grads.params["linear.weight"], grads.params["linear.bias"], by_x)
    assert_trees_equal(found, expected, rtol=1e-4, atol=1e-4)


def test_an_index_of_64_bits_is_passed_as_it_is(graph, x64):
    x, _, index = graph
    wide = index.astype(jnp.int64)
    assert_trees_equal(torch2jax(gathering)(x, wide), x[index], exact=True)


def test_the_fault_is_still_torch_s(graph):
    """If not, or in another form, this is to go."""
    x, _, index = (torch.from_numpy(np.array(a)) for a in graph)
    assert not torch.equal(gathering(x, index), x[index.long()])
    torch.gather(x, 0, expanded(index).long())


def test_torch_code_of_other_threads_is_left_alone(graph):
    """While a call runs, whose index is read right."""
    x, _, index = graph
    inside, done = threading.Event(), threading.Event()

    def f(x, index):
        inside.set()
        done.wait(30)
        return gathering(x, index)

    call = torch2jax(f, output_shapes=jax.ShapeDtypeStruct((EDGES, CHANNELS), jnp.float32))
    results = []
    thread = threading.Thread(target=lambda: results.append(np.asarray(call(x, index))))
    thread.start()
    assert inside.wait(30)
    tensors = [torch.from_numpy(np.array(a)) for a in (x, index)]
    wrong = not torch.equal(gathering(*tensors), tensors[0][tensors[1].long()])
    done.set()
    thread.join()
    assert wrong
    assert_trees_equal(results[0], x[index], exact=True)


class Gathering(torch.nn.Module):
    """Has an index of 32 bits."""

    def __init__(self, index, kind):
        super().__init__()
        if kind == "attribute":
            self.index = index
        else:
            self.register_buffer("index", index)

    def forward(self, x):
        return gathering(x, self.index)


@pytest.mark.parametrize("kind", ["constant", "state", "attribute", "variable"])
def test_indices_of_32_bits_that_a_function_holds(kind, graph):
    nodes, _, index = graph
    held = torch.from_numpy(np.array(index))
    if kind == "variable":
        got = torch2jax(lambda x: gathering(x, held))(nodes)
    elif kind == "state":
        make = eqx.nn.make_with_state(from_torch)
        model, state = make(Gathering(held, kind), state=["index"])
        got, _ = model(nodes, state=state)
    else:
        got = from_torch(Gathering(held, kind))(nodes)
    assert_trees_equal(got, nodes[index])
