"""Timelines: what they record, and how overlap is measured."""

import concurrent.futures
import itertools
import threading
import time

import equinox as eqx
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import PartitionSpec as P

from eqx_torch import from_torch, timeline, torch2jax
from eqx_torch._timeline import ACTIVE, by_lane, overlap

from ..helpers import assert_trees_equal
from ..helpers.meshes import explicit_mesh, put
from ..helpers.timelines import energy, made_up, X


def kinds(record):
    return [call.kind for call in record.events]


# What is recorded


def test_a_call_has_its_function_its_thread_and_its_times():
    threads = []

    def slow(x):
        threads.append(threading.get_native_id())
        time.sleep(0.05)
        return x * 2

    f = jax.jit(torch2jax(slow))
    jax.block_until_ready(f(jnp.ones(3)))
    threads.clear()
    before = time.perf_counter()
    with timeline() as record:
        y = f(jnp.ones(3)).block_until_ready()
    after = time.perf_counter()
    assert_trees_equal(y, 2 * jnp.ones(3))
    (call,) = record.events
    assert (call.function, call.kind, call.program, call.device) == (
        "slow",
        "forward",
        "slow",
        "cpu:0",
    )
    assert [call.thread] == threads
    assert before <= call.start < call.end <= after
    assert call.duration == call.end - call.start >= 0.05
    assert 0 <= call.core_time < 0.05  # it slept
    assert call.duration <= record.duration <= after - before


def test_core_time_is_the_time_on_a_core():
    def busy(x):
        end = time.thread_time() + 0.03
        while time.thread_time() < end:
            pass
        return x * 2

    f = torch2jax(busy)
    with timeline() as record:
        jax.block_until_ready(f(jnp.ones(3)))
    (call,) = record.events
    assert 0.03 <= call.core_time <= call.duration


@pytest.mark.parametrize(
    ("transform", "expected"),
    [
        (lambda f: f, ["forward"]),
        (jax.grad, ["forward", "backward"]),
        (lambda f: lambda x: jax.jvp(f, (x,), (x,)), ["forward", "tangent"]),
        (lambda f: lambda x: jax.vmap(f)(x[None]), ["forward"]),
        (lambda f: lambda x: jax.vmap(jax.grad(f))(x[None]), ["forward", "backward"]),
    ],
    ids=["call", "grad", "jvp", "vmap", "vmap of grad"],
)
def test_kinds(transform, expected):
    program = jax.jit(transform(torch2jax(energy)))
    with timeline() as record:
        jax.block_until_ready(program(X))
    assert kinds(record) == expected
    assert {call.function for call in record.events} == {"energy"}


def test_the_last_derivative_is_the_kind():
    f = torch2jax(energy)
    with timeline() as record:
        tangent_of_backward = jax.jit(lambda x: jax.jvp(jax.grad(f), (x,), (x,))[1])(X)
        jax.block_until_ready(tangent_of_backward)
    assert_trees_equal(tangent_of_backward, -np.sin(X) * X)
    assert record.events[-1].kind == "tangent"
    assert "vjp(" in record.events[-1].program
    with timeline() as record:
        backward_of_tangent = jax.jit(jax.grad(lambda x: jax.jvp(f, (x,), (x,))[1]))(X)
        jax.block_until_ready(backward_of_tangent)
    assert_trees_equal(backward_of_tangent, np.cos(X) - X * np.sin(X), rtol=1e-5)
    assert record.events[-1].kind == "backward"
    assert "jvp(" in record.events[-1].program


def test_modules_are_named_by_their_class():
    model = from_torch(torch.nn.Linear(3, 2))
    gradient = eqx.filter_jit(eqx.filter_grad(lambda model, x: model(x).sum()))
    with timeline() as record:
        jax.block_until_ready(eqx.filter(gradient(model, X), eqx.is_array))
    assert {call.function for call in record.events} == {"Linear"}
    assert kinds(record) == ["forward", "backward"]


def test_programs_compiled_before_are_seen_and_none_afterwards():
    f = jax.jit(torch2jax(energy))
    f(X).block_until_ready()
    with timeline() as record:
        assert record.events == ()
        f(X).block_until_ready()
        assert len(record.events) == 1
        f(X).block_until_ready()
    f(X).block_until_ready()
    assert len(record.events) == 2
    duration = record.duration
    time.sleep(0.01)
    assert record.duration == duration
    assert ACTIVE == []


def test_calls_in_a_loop_are_recorded_one_by_one():
    f = torch2jax(lambda x: x * 2)
    loop = jax.jit(lambda x: jax.lax.fori_loop(0, 5, lambda _, x: f(x), x))
    with timeline() as record:
        assert_trees_equal(loop(X), 32 * X)
    assert len(record.events) == 5
    starts = [call.start for call in record.events]
    assert starts == sorted(starts)


def test_errors_end_a_call_and_a_timeline():
    fails = False

    def f(x):
        if fails:
            raise RuntimeError("no")
        return x * 2

    g = jax.jit(torch2jax(f))
    g(X).block_until_ready()
    fails = True
    with pytest.raises(Exception, match="no"), timeline() as record:
        g(X).block_until_ready()
    assert [call.function for call in record.events] == ["f"]
    assert ACTIVE == []


@pytest.mark.parametrize("number", [0, 3, 7])
def test_a_call_has_the_device_that_made_it(number):
    x = jax.device_put(X, jax.devices()[number])
    with timeline() as record:
        y = jax.jit(torch2jax(energy))(x).block_until_ready()
    assert y.devices() == {jax.devices()[number]}
    assert [call.device for call in record.events] == [f"cpu:{number}"]


def test_each_shard_is_a_call_of_its_device():
    mesh = explicit_mesh(8)
    thread_of_shard = {}

    def f(x):
        thread_of_shard[x.tolist()[0]] = threading.get_native_id()
        time.sleep(0.02)  # so that no thread makes two of the calls
        return x * 2

    shape = jax.ShapeDtypeStruct((8,), jnp.float32)
    g = jax.jit(torch2jax(f, output_shapes=shape, out_specs=P("x")))
    with jax.set_mesh(mesh):
        x = put(jnp.arange(8.0), mesh, "x")
        g(x).block_until_ready()
        with timeline() as record:
            assert_trees_equal(g(x), 2 * np.arange(8.0))
    by_device = {call.device: call.thread for call in record.events}
    assert len(record.events) == 8
    assert by_device == {f"cpu:{i}": thread_of_shard[i] for i in range(8)}


# Which timelines are told


def test_inner_timelines_get_a_part_of_what_outer_ones_get():
    f, g = (jax.jit(torch2jax(h)) for h in (energy, torch.cos))
    with timeline() as outer:
        f(X).block_until_ready()
        with timeline() as inner:
            g(X).block_until_ready()
        f(X).block_until_ready()
    assert [call.function for call in outer.events] == ["energy", "cos", "energy"]
    assert inner.events == outer.events[1:2]


def test_a_timeline_gets_the_calls_that_begin_and_end_while_it_is_on():
    entered, release = threading.Event(), threading.Event()

    def waits(x):
        entered.set()
        assert release.wait(20)
        return x * 2

    release.set()
    f = jax.jit(torch2jax(waits))
    f(X).block_until_ready()
    release.clear()
    entered.clear()
    with concurrent.futures.ThreadPoolExecutor(1) as pool, timeline() as whole:
        with timeline() as ended_too_soon:
            done = pool.submit(lambda: f(X).block_until_ready())
            assert entered.wait(20)
        with timeline() as began_too_late:
            release.set()
            done.result(20)
    assert len(whole.events) == 1
    assert ended_too_soon.events == began_too_late.events == ()


def test_timelines_of_threads_see_all_threads():
    f = jax.jit(torch2jax(torch.sin))
    f(X).block_until_ready()
    barrier = threading.Barrier(3, timeout=20)

    def work(_):
        with timeline() as record:
            barrier.wait()
            for _ in range(10):
                f(X).block_until_ready()
            barrier.wait()
        return record.events

    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        first, *others = pool.map(work, range(3))
    assert len(first) == 30
    assert all(events == first for events in others)


# Overlap


def test_overlap_of_calls_that_are_known():
    calls = [
        made_up("cpu:0", 0, 4, core_time=3),
        made_up("cpu:0", 3, 5, core_time=1),  # of the same device: nothing is gained by it
        made_up("cpu:1", 2, 6, core_time=2),
        made_up("cpu:2", 8, 9, core_time=1),
    ]
    measured = overlap(calls)
    assert (measured.busy, measured.overlapped) == (7, 3)
    assert measured.fraction == 3 / 7
    assert_trees_equal((measured.mean_devices, measured.mean_cores), (10 / 7, 1.0))
    assert str(measured) == (
        "several devices ran at once for 43% of the busy time: 1.4 devices and 1.0 cores on average"
    )


def test_nothing_has_no_overlap():
    measured = overlap([])
    assert (measured.busy, measured.fraction, measured.mean_devices) == (0, 0, 0)


CALLS = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 20), st.integers(0, 8)).map(
        lambda c: made_up(f"cpu:{c[0]}", c[1], c[1] + c[2], core_time=c[2] / 2)
    )
)


@hypothesis.given(CALLS)
def test_overlap_is_what_counting_gives(calls):
    running = np.zeros((4, 30), bool)
    for call in calls:
        running[int(call.device[-1]), call.start : call.end] = True
    count = running.sum(0)
    busy = (count > 0).sum()
    measured = overlap(calls)
    assert (measured.busy, measured.overlapped) == (busy, (count > 1).sum())
    if busy:
        cores = sum(call.core_time for call in calls) / busy
        assert_trees_equal(
            (measured.mean_devices, measured.mean_cores), (count.sum() / busy, cores)
        )


@hypothesis.given(CALLS)
def test_rows_keep_calls_apart(calls):
    lanes = by_lane(calls)
    assert list(lanes) == sorted({call.device for call in calls})
    rows = [row for lane in lanes.values() for row in lane]
    assert sorted(map(id, calls)) == sorted(id(call) for row in rows for call in row)
    for device, lane in lanes.items():
        at_once = [sum(c.start <= t < c.end for row in lane for c in row) for t in range(30)]
        assert len(lane) >= max(at_once)
        for row in lane:
            assert {call.device for call in row} == {device}
            assert all(a.end <= b.start for a, b in itertools.pairwise(row))


def test_devices_are_in_the_order_of_their_numbers():
    lanes = by_lane([made_up(f"cpu:{i}", 0, 1) for i in (10, 2, 0)])
    assert list(lanes) == ["cpu:0", "cpu:2", "cpu:10"]


def heavy(x):
    for _ in range(6):
        x = torch.tanh(x @ x.transpose(-1, -2))
    return x


@pytest.mark.parametrize("devices", [1, 2, 4])
@pytest.mark.parametrize("lock", [False, True])
@pytest.mark.covering(3)
def test_heavy_calls_on_several_devices_overlap_unless_locked(devices, lock, getkey):
    mesh = explicit_mesh(devices)
    x = jax.random.normal(getkey(), (devices, 500, 500))
    f = jax.jit(torch2jax(heavy, out_specs=P("x"), lock=lock))
    with jax.set_mesh(mesh):
        shards = put(x, mesh, "x")
        jax.block_until_ready(f(shards))
        with timeline() as record:
            y = jax.block_until_ready(f(shards))
    assert_trees_equal(y, heavy(torch.from_numpy(np.array(x))), atol=1e-4)
    assert len(record.events) == len(by_lane(record.events)) == devices
    measured = record.overlap()
    if lock or devices == 1:
        assert measured.fraction == 0
        assert_trees_equal(measured.mean_devices, 1.0)
    else:
        assert measured.fraction > 0.3
        assert measured.mean_devices > 1.3
