"""Ctrl-C, forked and spawned processes, and how many threads there are.

Each in a process of its own, with a time-out. What a script measures, it prints.
"""

import json
import signal

import pytest

from ..helpers.isolated import run_file, run_script


INTERRUPT = """
import json, os, signal, sys, threading, time
import jax, jax.numpy as jnp, numpy as np, torch
from jax.sharding import PartitionSpec as P
from eqx_torch import torch2jax

mode, work = sys.argv[1:]
torch.set_num_threads(1)
started = threading.Event()
busy = torch.ones(500, 500)
jax.block_until_ready(jax.jit(torch2jax(torch.sin))(jnp.ones(2)))

def f(x):
    end = time.monotonic() + 6
    started.set()
    while time.monotonic() < end:
        time.sleep(0.01) if work == "python" else busy @ busy
    return x * 2

x = jnp.ones(8)
if mode == "mesh":
    jax.set_mesh(jax.make_mesh((8,), ("x",)))
    x = jax.device_put(x, P("x"))
wrapped = torch2jax(f, output_shapes=x, out_specs=P("x"))
if mode == "behind":  # of a computation, so that torch runs in a thread of XLA's
    matrix = jnp.ones((1500, 1500))
    slow = jax.jit(lambda a: (a @ a @ a @ a)[0, :8] * 0 + 1)
    slow(matrix).block_until_ready()
    call = lambda x: jax.jit(wrapped)(slow(matrix))
else:
    call = wrapped if mode == "eager" else jax.jit(wrapped)
sent = []

def interrupt():
    started.wait()
    time.sleep(0.2)
    sent.append(time.monotonic())
    os.kill(os.getpid(), signal.SIGINT)

threading.Thread(target=interrupt).start()
retries = 0
try:
    while True:
        try:
            jax.block_until_ready(call(x))
            break
        except Exception:  # a program that tries again must not swallow Ctrl-C
            retries += 1
            for _ in range(100):
                time.sleep(0.01)
    result = "finished"
except KeyboardInterrupt:
    result = "interrupted"
print(json.dumps([result, time.monotonic() - sent[0], retries]))
"""


def _interrupted(mode, work):
    out, _ = run_script(INTERRUPT, mode, work, timeout=240)
    result, seconds, retries = json.loads(out)
    assert result == "interrupted"
    assert retries <= 1
    return seconds


@pytest.mark.parametrize(
    ("mode", "work"),
    [
        ("jit", "python"),
        ("mesh", "torch"),
        *(
            pytest.param(mode, work, marks=pytest.mark.slow)
            for mode, work in [
                ("jit", "torch"),
                ("eager", "python"),
                ("eager", "torch"),
                ("behind", "python"),
                ("behind", "torch"),
                ("mesh", "python"),
            ]
        ),
    ],
)
def test_ctrl_c_during_a_torch_call_of_six_seconds(mode, work):
    """`KeyboardInterrupt` arrives in the main thread long before the call would end."""
    assert _interrupted(mode, work) < 4


FORK = """
import os, sys, warnings
import jax, numpy as np, torch
import eqx_torch

warnings.filterwarnings("ignore", message="os.fork", category=RuntimeWarning)
f = eqx_torch.torch2jax(torch.sin)
x = np.ones(3, np.float32)
if sys.argv[1] == "used":
    jax.block_until_ready((f(x), jax.jit(f)(x)))
process = os.fork()
if process == 0:
    try:
        print(np.asarray(f(x)))
    except eqx_torch.EqxTorchError as error:
        print(error)
    sys.stdout.flush()
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0
print(np.asarray(f(x)))
"""


def test_a_forked_process_is_refused_where_it_would_hang():
    out, _ = run_script(FORK, "used", timeout=240)
    assert out.splitlines() == [
        "`sin` was called in a process that was forked from one in which JAX has run programs. "
        "JAX's threads do not exist here, so the call would never return. Start the process by "
        '"spawn" or "forkserver" (`torch.utils.data.DataLoader(..., '
        'multiprocessing_context="spawn")`), or call only torch in it.',
        "[0.84147096 0.84147096 0.84147096]",
    ]


def test_a_process_forked_before_the_first_call_may_call():
    out, _ = run_script(FORK, "unused", timeout=240)
    assert out.splitlines() == ["[0.84147096 0.84147096 0.84147096]"] * 2


LOADER = """
import sys
import jax, jax.numpy as jnp, numpy as np, torch
from jax.sharding import PartitionSpec as P
from torch.utils.data import DataLoader, TensorDataset
from eqx_torch import t2j, torch2jax

if __name__ == "__main__":
    import warnings
    warnings.filterwarnings("ignore", message=".*os.fork", category=RuntimeWarning)
    data = torch.arange(64.0).reshape(16, 4)
    layer = torch.nn.Linear(4, 3)
    torch.matmul(torch.ones(600, 600), torch.ones(600, 600))  # starts torch's threads
    jax.set_mesh(jax.make_mesh((8,), ("x",)))
    f = torch2jax(lambda x: layer(x).sin().sum(-1), out_specs=P("x"))
    step = jax.jit(jax.value_and_grad(lambda x: f(x).sum()))
    batches = DataLoader(
        TensorDataset(data), batch_size=8, num_workers=2, multiprocessing_context=sys.argv[1]
    )
    for epoch in range(2):
        for (batch,) in batches:
            value, gradient = step(jax.device_put(t2j(batch), P("x")))
            leaf = batch.clone().requires_grad_()
            expected = layer(leaf).sin().sum()
            expected.backward()
            np.testing.assert_allclose(value, expected.detach(), rtol=1e-4)
            np.testing.assert_allclose(gradient, leaf.grad, rtol=1e-3, atol=1e-4)
    print("finished")
"""


@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_a_data_loader_with_workers(tmp_path, context):
    """Workers that only load may be forked; spawned ones import the script, so it is a file."""
    script = tmp_path / "train.py"
    script.write_text(LOADER)
    out, _ = run_file(script, context, timeout=240)
    assert out == "finished\n"


THREADS = """
import json, os, sys
import jax, jax.numpy as jnp, torch
from jax.sharding import PartitionSpec as P
from eqx_torch import torch2jax

calls, torch_threads = map(int, sys.argv[1:])
torch.set_num_threads(torch_threads)
jax.set_mesh(jax.make_mesh((8,), ("x",)))
x = jax.device_put(jnp.ones((8 * 64, 256)), P("x"))
weight = torch.ones(256, 256) / 256
f = torch2jax(lambda x: (x @ weight).sin(), out_specs=P("x"))
step = jax.jit(jax.value_and_grad(lambda x: f(x).sum()))

def count():
    return len(os.listdir("/proc/self/task"))

def run(calls):
    most = 0
    for _ in range(calls):
        jax.block_until_ready(step(x))
        most = max(most, count())
    return most

before = count()
print(json.dumps([before, run(calls // 4), run(calls)]))
"""


def _threads(calls, torch_threads):
    out, _ = run_script(THREADS, str(calls), str(torch_threads), timeout=500)
    return json.loads(out)


@pytest.mark.parametrize(
    ("calls", "torch_threads"),
    [(100, 2), *(pytest.param(3000, n, marks=pytest.mark.slow) for n in (1, 2, 4))],
)
def test_the_number_of_threads_stays_bounded(calls, torch_threads):
    """XLA has a thread for each device; torch gives each thread that calls it a pool, once."""
    before, early, late = _threads(calls, torch_threads)
    assert early <= before + 8 * (1 + torch_threads)
    assert late <= early + torch_threads


UNAWAITED = """
import atexit, sys, threading, time

calls = []
atexit.register(lambda: print(len(calls)))  # the last hook to run, since it is the first

import jax, jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from eqx_torch import torch2jax

where, thread = sys.argv[1:]

def slow(x):
    time.sleep(0.05)
    calls.append(None)
    return x.sin()

x = jnp.ones(8)
if where == "behind":  # of a computation, so that torch runs in a thread of XLA's
    matrix = jnp.ones((1000, 1000))
    before = jax.jit(lambda a: (a @ a @ a @ a)[0, :8] * 0)
    f = jax.jit(lambda x: torch2jax(slow, output_shapes=x)(x))
    call = lambda: f(x + before(matrix))
else:
    jax.set_mesh(jax.make_mesh((8,), ("x",)))
    x = jax.device_put(x, P("x"))
    f = jax.jit(lambda x: torch2jax(slow, output_shapes=x, out_specs=P("x"))(x))
    call = lambda: f(x)
jax.block_until_ready(call())
calls.clear()

def run():
    for _ in range(5):
        call()

if thread == "main":
    run()
else:
    other = threading.Thread(target=run)
    other.start()
    other.join()
print(len(calls))
"""


@pytest.mark.parametrize(
    ("where", "thread", "expected"),
    [("behind", "main", 5), ("mesh", "main", 40), ("mesh", "other", 40)],
)
def test_a_program_that_ends_first_finishes_its_torch_calls(where, thread, expected):
    out, _ = run_script(UNAWAITED, where, thread, timeout=240)
    at_the_end, after = map(int, out.split())
    assert at_the_end < expected, "or this test is in vain"
    assert after == expected


ENDING = """
import os, signal, sys, threading, time
import jax, jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from eqx_torch import torch2jax

def slow(x):
    time.sleep(6)
    return x

jax.set_mesh(jax.make_mesh((8,), ("x",)))
x = jax.device_put(jnp.ones(8), P("x"))
y = jax.jit(torch2jax(slow, output_shapes=x, out_specs=P("x")))(x)
timer = threading.Timer(1.5, os.kill, (os.getpid(), signal.SIGINT))
timer.daemon = True  # the interpreter waits for other threads first
timer.start()
print("the end")
"""


def test_ctrl_c_at_the_end_ends_the_wait():
    out, log = run_script(ENDING, timeout=120, status=-signal.SIGINT)
    assert out == "the end\n"
    assert "Fatal" not in log
