"""Runs that leave no trace: what they wrote, drew and kept is seen and undone."""

import functools

import pytest
import torch

from eqx_torch import torch2jax
from eqx_torch._watch import Watch

from ..helpers import assert_trees_equal


def _watched(f, *tensors):
    watch = Watch()
    with watch:
        f(*tensors)
    return watch


@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.add_(1),
        lambda x: x[1:].zero_(),
        lambda x: x.view(-1)[0].fill_(7),
        lambda x: x.__setitem__(0, 3.0),
        lambda x: x.data.mul_(2),
        lambda x: x.detach().copy_(torch.ones(3)),
        lambda x: torch.sin(x, out=x),
        lambda x: torch._foreach_add_([x], 1.0),
        lambda x: torch.nn.init.normal_(x),
        lambda x: x.index_add_(0, torch.tensor([0]), torch.ones(1)),
    ],
)
def test_writes_are_seen_and_undone(write):
    x, other = torch.randn(3), torch.randn(3)
    before = x.clone()
    watch = _watched(lambda x, y: (write(x), y.sin()), x, other)
    assert watch.wrote(x)
    assert not watch.wrote(other)
    assert not torch.equal(x, before)
    watch.undo()
    assert torch.equal(x, before)


def test_reads_are_not_writes():
    x = torch.randn(3, 3)
    watch = _watched(lambda x: (x.T @ x, x.view(9).sum(), x.to(torch.float64), x.contiguous()), x)
    assert not watch.wrote(x)


@pytest.mark.parametrize("training", [True, False])
def test_statistics_of_a_normalisation_are_written_in_training_only(training):
    norm = torch.nn.BatchNorm1d(3).train(training)
    before = norm.running_mean.clone()
    watch = _watched(norm, torch.randn(4, 3))
    assert watch.wrote(norm.running_mean) is training
    watch.undo()
    assert torch.equal(norm.running_mean, before)
    assert norm.num_batches_tracked == 0


def test_random_operators_are_named():
    watch = _watched(lambda x: torch.nn.functional.dropout(x), torch.ones(3))
    assert watch.random
    assert not _watched(torch.sin, torch.ones(3)).random


_GLOBAL = None
_GLOBAL_DICT: dict = {}


def _rebinds_a_global(x):
    global _GLOBAL
    _GLOBAL = torch.arange(3.0) if _GLOBAL is None else _GLOBAL
    return x + _GLOBAL


def _fills_a_global_dict(x):
    return x + _GLOBAL_DICT.setdefault("grid", torch.arange(3.0))


def _fills_a_dict():
    cache: dict = {}
    return lambda x: x + cache.setdefault(3, torch.arange(3.0))


def _rebinds_a_closure():
    grid = None

    def f(x):
        nonlocal grid
        grid = torch.arange(3.0) if grid is None else grid
        return x + grid

    return f


def _appends_to_a_list():
    seen: list = []

    def f(x):
        seen.append(torch.arange(3.0))
        return x + seen[0]

    return f


def _caches_a_call():
    @functools.lru_cache
    def grid(n):
        return torch.arange(float(n))

    return lambda x: x + grid(3)


def _sets_a_function_attribute():
    def f(x):
        f.grid = getattr(f, "grid", torch.arange(3.0))
        return x + f.grid

    return f


class _Grid(torch.nn.Module):
    grid = None

    def forward(self, x):
        if self.grid is None:
            self.grid = torch.arange(3.0)
        return x + self.grid


class _Buffers(torch.nn.Module):
    def forward(self, x):
        if "grid" not in self._buffers:
            self.register_buffer("grid", torch.arange(3.0))
        return x + self.grid


class _Callable:
    def __init__(self):
        self.cache = {}

    def __call__(self, x):
        return x + self.cache.setdefault("grid", torch.arange(3.0))

    def method(self, x):
        return self(x)


class _Holder:
    def __init__(self):
        self.model = torch.nn.Sequential(_Grid(), _Grid())


def _closed_over(model):
    return lambda x: model(x)


def _attribute_of(holder):
    return lambda x: holder.model(x)


def _default(x, model=_Grid()):  # noqa: B008
    return model(x)


CACHING = {
    "module": lambda: _Grid(),
    "buffer": lambda: _Buffers(),
    "nested module": lambda: torch.nn.Sequential(_Grid(), _Grid()),
    "closed over": lambda: _closed_over(_Grid()),
    "attribute of an object": lambda: _attribute_of(_Holder()),
    "bound method": lambda: _Grid().forward,
    "method of an object": lambda: _Callable().method,
    "callable object": _Callable,
    "partial": lambda: functools.partial(lambda m, x: m(x), _Grid()),
    "default argument": lambda: _default,
    "dict": _fills_a_dict,
    "closure": _rebinds_a_closure,
    "list": _appends_to_a_list,
    "global": lambda: _rebinds_a_global,
    "global dict": lambda: _fills_a_global_dict,
    "lru_cache": _caches_a_call,
    "function attribute": _sets_a_function_attribute,
}
every_caching = pytest.mark.parametrize("make", CACHING.values(), ids=CACHING)


@every_caching
def test_functions_that_cache_what_they_computed(make):
    """Values of tensors without memory must not stay anywhere."""
    x = torch.ones(3)
    f = make()
    wrapped = torch2jax(f)
    wrapped(x.numpy())
    expected = make()(x)
    for _ in range(2):
        assert_trees_equal(wrapped(x.numpy()), expected)
    assert_trees_equal(f(x), expected)


def test_gradients_of_parameters_are_restored():
    parameter = torch.nn.Parameter(torch.ones(3))

    def f(x):
        (parameter * x).sum().backward()
        return parameter.grad * x

    x = torch.full((3,), 2.0)
    actual = torch2jax(f)(x.numpy())
    assert_trees_equal(actual, x * x)
