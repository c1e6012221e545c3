"""No tensor of the run that finds out shapes survives it, and nothing else is touched."""

import collections
import functools
import gc
import logging
import sys
import threading
import time
import weakref

import jax
import jax.numpy as jnp
import pytest
import torch

from eqx_torch import from_torch, ShapeError, torch2jax

from ..helpers import assert_trees_equal


X = jax.ShapeDtypeStruct((3,), "float32")


def traced(f):
    return jax.eval_shape(torch2jax(f), X)


def is_valueless(x):
    if not issubclass(type(x), torch.Tensor):
        return False
    return x.is_meta or type(x).__name__ == "FakeTensor"


def test_former_values_come_back_in_the_very_slots_that_held_tensors():
    old = torch.zeros(1)
    store = {"kept": old, "count": 0}
    items = [old, 1]
    ring = collections.deque([old, old], maxlen=2)
    some = {old}

    class Holder:
        best = None

    holder = Holder()
    holder.last = old

    def f(x):
        y = x.sin()
        store["kept"], store["new"] = y, (y, {"inner": [y]})
        store["count"] += 1
        items[0] = y
        items.append(y)
        items.append("text")
        ring.append(y)
        some.add(y)
        holder.last, holder.seen, holder.calls = y, lambda: y, 1
        Holder.best = y
        return y

    traced(f)
    assert store == {"kept": old, "count": 1}
    assert items == [old, 1, "text"]
    assert list(map(id, ring)) == [id(old), id(old)]
    assert some == {old}
    assert vars(holder) == {"last": old, "calls": 1}
    assert Holder.best is None


def test_caches_are_emptied_only_of_tensors():
    @functools.lru_cache
    def length(n):
        return n + 1

    @functools.cache
    def grid(n):
        return torch.arange(float(n))

    traced(lambda x: x + grid(3) + length(2))
    assert grid.cache_info().currsize == 0
    assert length.cache_info().currsize == 1


def test_what_an_error_kept_is_forgotten_too():
    kept = {}

    def f(x):
        kept["x"] = x * 2
        return x.numpy() if x.is_meta else torch.from_numpy(x.numpy() * 2)

    with pytest.warns(UserWarning, match="on zeros"):
        traced(f)
    assert kept == {}


class _Hidden:
    """Outside of what is looked at beforehand."""

    __slots__ = ("kept",)


HIDDEN = _Hidden()


def test_what_cannot_be_taken_out_is_refused_by_name():
    def f(x):
        HIDDEN.kept = x * 2
        return x

    with pytest.raises(ShapeError, match=r"`f` keeps a tensor of the run.*`output_shapes=`"):
        traced(f)
    del HIDDEN.kept
    declared = torch2jax(f, output_shapes=lambda x: x)
    assert_trees_equal(declared(jnp.ones(3)), jnp.ones(3))
    del HIDDEN.kept


def test_large_containers_are_not_copied():
    large = dict.fromkeys(range(10**5))

    def f(x):
        large["new"] = x * 2
        return x

    traced(f)
    assert list(large) == list(range(10**5))

    def replaces(x):
        large[0] = x * 2
        return x

    with pytest.raises(ShapeError, match="keeps a tensor of the run"):
        traced(replaces)


class Caching(torch.nn.Module):
    store: dict = {}  # noqa: RUF012

    def forward(self, x):
        self.store.setdefault("grid", torch.arange(3.0))
        return x + self.store["grid"]


def test_what_a_class_of_a_module_keeps():
    model = from_torch(torch.nn.Sequential(Caching()))
    for _ in range(2):
        jax.eval_shape(model, X)
        assert not any(map(is_valueless, Caching.store.values()))
        assert_trees_equal(model(jnp.ones(3)), 1 + jnp.arange(3.0))
        Caching.store.clear()


def test_no_tensor_without_values_is_alive():
    class Keeper(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(3, 3)

        def forward(self, x):
            self.last = self.linear(x)
            self.me = self  # a cycle
            return self.last.sin()

    gc.collect()
    before = {id(x) for x in gc.get_objects() if is_valueless(x)}
    for wrap in (torch2jax, from_torch):
        function = wrap(Keeper())
        known = before | {id(x) for x in gc.get_objects() if is_valueless(x)}
        jax.eval_shape(function, X)
        alive = [x for x in gc.get_objects() if is_valueless(x) and id(x) not in known]
        assert [tuple(x.shape) for x in alive if x.shape == (3,)] == []


def test_what_another_thread_does_meanwhile_is_kept():
    items, table, done = [], {}, threading.Event()

    def f(x):
        return x * (1 + 0 * len(items) + 0 * len(table))

    def fill():
        n = 0
        while not done.is_set():
            items.append(n)
            table[n] = n
            n += 1
            time.sleep(0)
        items.append(n)

    thread = threading.Thread(target=fill)
    thread.start()
    try:
        for _ in range(1000):
            traced(lambda x: f(x))
    finally:
        done.set()
        thread.join()
    assert items == list(range(len(items)))
    assert list(table) == items[:-1]


@pytest.mark.parametrize("kind", ["dict", "list", "nested"])
def test_what_is_reachable_costs_nothing(kind):
    def seconds(count):
        held = {
            "dict": lambda: {i: str(i) for i in range(count)},
            "list": lambda: [[i] for i in range(count)],
            "nested": lambda: {"a": {i: (i, [i]) for i in range(count)}},
        }[kind]()
        best = float("inf")
        for _ in range(100):
            f = torch2jax(lambda x: x.sin() if held is not None else x)
            start = time.thread_time()
            jax.eval_shape(f, X)
            best = min(best, time.thread_time() - start)
        return best

    seconds(0)
    gc.disable()  # its own cost does grow
    try:
        times = [seconds(count) for count in (0, 10**4, 10**6)]
    finally:
        gc.enable()
    assert max(times[1:]) < 1.2 * times[0] + 1e-3, times


def test_no_switch_of_the_process_is_touched():
    hooks = torch.nn.modules.module._global_forward_pre_hooks
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    seen = []

    def f(x):
        with torch.autocast("cpu"):  # asks for fake tensors
            seen.append((len(hooks), logger.disabled, sys.getprofile()))
            return x @ x

    before = len(hooks), logger.disabled, None
    traced(f)
    assert set(seen) == {before}


def test_other_threads_log_during_a_run(caplog):
    from eqx_torch._fakes import _QUIET

    logger = logging.getLogger("torch._subclasses.fake_tensor")
    with _QUIET.here():
        logger.warning("mine")
        thread = threading.Thread(target=logger.warning, args=("another's",))
        thread.start()
        thread.join()
    logger.warning("later")
    assert [r.message for r in caplog.records if r.name == logger.name] == ["another's", "later"]


def test_gradients_of_parameters_near_the_function_are_put_back():
    weight = torch.nn.Parameter(torch.ones(3))
    weight.grad = torch.full((3,), 7.0)
    before = weight.grad

    def f(x):
        weight.grad = None
        (weight * x).sum().backward()
        return x * 1

    traced(f)
    assert weight.grad is before
    assert weakref.ref(before)() is before
