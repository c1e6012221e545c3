"""The first quarter of an hour on a GPU: what only hardware can say, in order of what hangs on it.

`make gpu-first` runs it. Each step is a process of its own and prints one line of JSON as soon as
it is done, or why it is not; the next one runs in any case. `--brief` is the same at sizes at which
it runs on a CPU within minutes, where what no CPU has is left out.

    python -m tests.gpu.first [--brief] [STEP ...]
"""

import argparse
import contextlib
import functools
import gc
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import torch
from jax.experimental.compute_on import compute_on

from eqx_torch import check_errors, from_torch, j2t, t2j, torch2jax
from eqx_torch._call import pairs, runtime
from eqx_torch._call.pairs import PAIRS
from eqx_torch._call.streams import XlaStreams
from eqx_torch._program import TAPES

from ..runtime.test_pairs import CASES, counted, reference, X


ON_GPU = jax.default_backend() == "gpu"
DEVICE = torch.device("cuda:0" if ON_GPU else "cpu")
MODES = {"recomputed": "off", "paired": "audit", "waiting": "read"}

Found = dict[str, Any]


@contextlib.contextmanager
def graphs(mode: str) -> Iterator[None]:
    """What is compiled meanwhile finds graphs in this way."""
    os.environ[pairs.VARIABLE] = mode
    PAIRS.reset()
    try:
        yield
    finally:
        del os.environ[pairs.VARIABLE]
        jax.clear_caches()
        gc.collect()


def wait() -> None:
    if ON_GPU:
        torch.cuda.synchronize()


def best(run: Callable[[], Any], rounds: int, count: int) -> float:
    """The least time of a call, in microseconds, by so many calls at a time."""
    least = float("inf")
    for _ in range(rounds + 1):
        start = time.perf_counter()
        for _ in range(count):
            result = run()
        jax.block_until_ready(result)
        wait()
        least = min(least, (time.perf_counter() - start) / count)
    return round(least * 1e6, 1)


def attempt(run: Callable[[], Any]) -> Any:
    """What it gives, or the error."""
    try:
        return run()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).strip().splitlines()[-1][:300]}"


def callback(brief: bool) -> Found:
    """The thread and the stream of a callback, and what it leaves behind."""
    del brief
    seen: Found = {}

    def f(x):
        seen["own thread"] = threading.get_ident() == caller
        if ON_GPU:
            seen["stream"] = torch.cuda.current_stream().cuda_stream
            seen["device"] = torch.cuda.current_device()
        return x.sin()

    caller = threading.get_ident()
    call = jax.jit(torch2jax(f, output_shapes=X))
    before = torch.cuda.current_stream() if ON_GPU else None
    jax.block_until_ready(call(X))
    seen.clear()
    y = call(X)
    seen["called before the caller had its array"] = bool(seen)
    jax.block_until_ready(y)
    if ON_GPU:
        seen["stream is back"] = torch.cuda.current_stream() == before
    return seen


def pairing(brief: bool) -> Found:
    """Each case of pairs: against the tokens, and by the audit."""
    names = ("layers", "inner jit", "outside of jit") if brief else tuple(CASES)
    rounds = 2 if brief else 20
    found: Found = {}
    for mode in ("check", "audit"):
        for name in names:
            with graphs(mode):
                found[f"{name}, {mode}"] = attempt(functools.partial(_one_case, name, rounds))
    found["ended"] = PAIRS.ended
    return found


def _one_case(name: str, rounds: int) -> Found:
    derivative, expected = CASES[name]
    f = counted()
    run, wanted = derivative(torch2jax(f)), derivative(reference)
    jax.block_until_ready(run(X))
    f.calls.clear()
    PAIRS.counts.clear()
    results = [run(X + i / 8) for i in range(rounds)]  # ahead of the device
    errors = [float(jnp.abs(y - wanted(X + i / 8)).max()) for i, y in enumerate(results)]
    check_errors()
    each = [PAIRS.counts[n] / rounds for n in ("paired", "missed", "unproven")]
    return {
        "paired, missed, unproven": each,
        "as expected": each == list(expected),
        "forwards": len(f.calls) / rounds,
        "largest error": max(errors),
    }


def suite(brief: bool) -> Found:
    """The tests of this folder."""
    chosen = ["tests/gpu/test_waiting.py", "-k", "jvp"] if brief else ["tests/gpu"]
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not sweep", "-W", "default"]
    ran = subprocess.run([*command, *chosen], capture_output=True, text=True, timeout=300)
    lines = ran.stdout.strip().splitlines()
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return {"status": ran.returncode, "summary": lines[-1:], "failed": failed}


class Residual(torch.nn.Module):
    """A block of two convolutions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = torch.nn.Conv2d(width, width, 3, padding=1)
        self.second = torch.nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(self.first(x).relu()).relu()


def _models(brief: bool) -> dict[str, tuple[torch.nn.Module, tuple[int, ...], torch.dtype]]:
    width, depth, batch = (16, 2, 2) if brief else (512, 12, 16)
    layer = functools.partial(torch.nn.TransformerEncoderLayer, dropout=0.0, batch_first=True)
    blocks = [torch.nn.Conv2d(3, width // 4, 3, padding=1)]
    blocks += [Residual(width // 4) for _ in range(depth)]
    linear = [torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.GELU()) for _ in range(4)]
    return {
        "mlp": (torch.nn.Sequential(*linear), (128, width), torch.float32),
        "transformer": (
            torch.nn.TransformerEncoder(layer(width, 4, 4 * width), depth),
            (batch, 4 * width // 8, width),
            torch.bfloat16,
        ),
        "resnet": (torch.nn.Sequential(*blocks), (batch, 3, 32, 32), torch.float32),
    }


def training(brief: bool) -> Found:
    """A step by torch, and by JAX with the forward computed again, paired, and waited for."""
    rounds, count = (1, 1) if brief else (5, 10)
    found: Found = {}
    for name, (module, shape, dtype) in _models(brief).items():
        module = module.to(DEVICE, dtype)
        x = torch.randn(shape, device=DEVICE, dtype=dtype)
        parameters = list(module.parameters())

        def by_torch(module=module, x=x, parameters=parameters):
            gradients = torch.autograd.grad((module(x) ** 2).mean(), parameters)
            with torch.no_grad():
                torch._foreach_add_(parameters, gradients, alpha=-1e-4)

        found[f"{name}, torch"] = best(by_torch, rounds, count)
        for way, mode in MODES.items():
            with graphs(mode):
                run = functools.partial(_by_jax, module, t2j(x.clone()), rounds, count)
                found[f"{name}, {way}"] = attempt(run)
    return found


def _by_jax(module: torch.nn.Module, x: jax.Array, rounds: int, count: int) -> float:
    model = from_torch(module)
    arrays, static = eqx.partition(model, eqx.is_inexact_array)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(arrays):
        loss = lambda arrays: (eqx.combine(arrays, static)(x) ** 2).mean()  # noqa: E731
        gradients = jax.grad(loss)(arrays)
        return jax.tree.map(lambda p, g: p - jnp.asarray(1e-4, p.dtype) * g, arrays, gradients)

    def run():
        nonlocal arrays
        arrays = step(arrays)
        return arrays

    return best(run, rounds, count)


class WithoutEvents(XlaStreams):
    """Not right, but shows what events cost."""

    @contextlib.contextmanager
    def entered(self, context, buffers, settled=False):
        device = buffers[0].__dlpack_device__()[1]
        with self._cuda.stream(self._external(context.stream, device)):
            yield


class WithQuery(XlaStreams):
    """Waits for the stream that was current only if that has work."""

    @contextlib.contextmanager
    def entered(self, context, buffers, settled=False):
        device = buffers[0].__dlpack_device__()[1]
        before: Any = self._cuda.current_stream(device)
        stream = self._external(context.stream, device)
        if not before.query():
            stream.wait_stream(before)
        try:
            with self._cuda.stream(stream):
                yield
        finally:
            before.wait_stream(stream)


def overhead(brief: bool) -> Found:
    """Microseconds of a call that computes nothing, and of a backward."""
    rounds, count = (2, 10) if brief else (10, 500)
    found: Found = {}
    kinds = {"as it is": XlaStreams, "no events": WithoutEvents, "query": WithQuery}
    for name, kind in kinds.items() if ON_GPU else [("as it is", XlaStreams)]:
        before, runtime.XLA_STREAMS = runtime.XLA_STREAMS, kind(torch.cuda)
        try:
            call = jax.jit(torch2jax(lambda x: x))
            found[name] = attempt(lambda call=call: best(lambda: call(X), rounds, count))
        finally:
            runtime.XLA_STREAMS = before
    empty = jax.jit(lambda x: x + 1)
    found["jit alone"] = best(lambda: empty(X), rounds, count)
    for way, mode in MODES.items():
        with graphs(mode):
            gradient = jax.jit(jax.grad(lambda x: torch2jax(torch.sin)(x).sum()))
            found[f"gradient, {way}"] = best(lambda gradient=gradient: gradient(X), rounds, count)
    return found


def unproven(brief: bool) -> Found:
    """Layers in a scan and pullbacks outside of `jax.jit`, for forwards of some lengths."""
    rounds = 1 if brief else 3
    found: Found = {}
    for milliseconds in (0.05,) if brief else (0.05, 0.5, 5):

        def f(x, milliseconds=milliseconds):
            if ON_GPU:
                torch.cuda._sleep(int(milliseconds * 1.5e6))
            return (x * x).sin()

        for name in ("layers in a scan", "outside of jit"):
            for way, mode in MODES.items():
                with graphs(mode):
                    run = CASES[name][0](torch2jax(f, output_shapes=X))
                    time_of = functools.partial(best, functools.partial(run, X), rounds, 5)
                    found[f"{name}, {milliseconds} ms, {way}"] = attempt(time_of)
    return found


def lifetimes(brief: bool) -> Found:
    """How often memory is overwritten that one library has given up and the other still reads."""
    size, rounds = (2**10, 3) if brief else (2**24, 50)
    wrong = {"t2j": 0, "j2t": 0}
    slow = jax.jit(lambda x: jax.lax.fori_loop(0, 50, lambda _, y: jnp.sin(y) + x, x).sum())
    clobber = jax.jit(lambda i: jnp.full(size, -1.0) * i)
    expected = slow(jnp.ones(size))
    for i in range(rounds):
        tensor = torch.ones(size, device=DEVICE)
        wait()
        y = slow(t2j(tensor))
        del tensor
        junk = [torch.full((size,), -1.0, device=DEVICE) for _ in range(4)]
        wrong["t2j"] += not bool(jnp.allclose(y, expected))
        del junk
        array = jax.block_until_ready(jnp.ones(size) + i - i)
        tensor = j2t(array)
        total = torch.zeros((), device=DEVICE)
        for _ in range(50):
            total = total + tensor.sum()
        del array, tensor
        junk = [clobber(float(i + 1)) for _ in range(4)]
        jax.block_until_ready(junk)
        wrong["j2t"] += abs(float(total) / (50 * size) - 1) > 1e-3
    return {"rounds": rounds, "wrong": wrong}


def raising(brief: bool) -> Found:
    """What XLA holds after calls that raise."""
    size, rounds = (2**10, 3) if brief else (2**22, 20)
    device = jax.devices()[0]

    def fail(x):
        raise RuntimeError("on purpose")

    x = jnp.ones(size)
    call = jax.jit(lambda x: torch2jax(fail, output_shapes=x)(jnp.sin(x) * 2) + 1)

    def held() -> int | None:
        gc.collect()
        wait()
        return (device.memory_stats() or {}).get("bytes_in_use")

    attempt(lambda: jax.block_until_ready(call(x)))
    before = held()
    for _ in range(rounds):
        attempt(lambda: jax.block_until_ready(call(x)))
    return {"calls": rounds, "bytes each": 4 * size, "before": before, "after": held()}


_POOL = """
import jax, jax.numpy as jnp, torch
from eqx_torch import torch2jax
f = torch2jax(lambda x: (x @ x / 512).sin())
step = jax.jit(jax.grad(lambda x: f(f(x)).sum()))
x = jnp.ones((512, 512))
for _ in range(20):
    x = step(x)
print("sum", float(x.sum()))
print("free", torch.cuda.mem_get_info() if torch.cuda.is_available() else None)
"""


def one_pool(brief: bool) -> Found:
    """Both libraries on one allocator of CUDA's, and as they are."""
    del brief
    own = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    shared = {
        "XLA_PYTHON_CLIENT_ALLOCATOR": "cuda_async",
        "PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync",
    }
    found: Found = {}
    for name, settings in (("two pools", own), ("one pool", shared)):
        start = time.perf_counter()
        ran = subprocess.run(
            [sys.executable, "-c", _POOL],
            env=os.environ | settings,
            capture_output=True,
            text=True,
            timeout=120,
        )
        lines = (ran.stdout + ran.stderr).strip().splitlines()
        seconds = round(time.perf_counter() - start, 1)
        found[name] = {"status": ran.returncode, "seconds": seconds, "said": lines[-2:]}
    return found


def features(brief: bool) -> Found:
    """What users reach for on GPUs, each by its gradient."""
    rounds = 1 if brief else 3
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()).to(DEVICE)

    def gradient(f: Callable[..., torch.Tensor]) -> Any:
        g = jax.jit(jax.grad(lambda x: torch2jax(f, output_shapes=x)(x).sum()))
        x = jnp.ones((3, 4))
        return {"us": best(lambda: g(x), rounds, 3), "sum": float(g(x).sum())}

    def graphed() -> Any:
        sample = (torch.ones(3, 4, device=DEVICE, requires_grad=True),)
        return gradient(torch.cuda.make_graphed_callables(net, sample))

    def pinned() -> Any:
        device = jax.devices()[0]
        sharding = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
        x = jax.device_put(jnp.ones((3, 4)), sharding)
        return float(jax.jit(torch2jax(lambda x: x + 1, output_shapes=x))(x).sum())

    def computed_on() -> Any:
        f = torch2jax(lambda x: (x * x).sin())

        @jax.jit
        def run(x):
            with compute_on("gpu_stream:1"):
                return jax.grad(lambda x: f(x).sum())(x)

        return float(run(X).sum())

    cases: dict[str, Callable[[], Any]] = {"eager": lambda: gradient(net)}
    if ON_GPU:
        cases["torch.compile"] = lambda: gradient(torch.compile(net))
        overheads = torch.compile(net, mode="reduce-overhead")
        cases["torch.compile, reduce-overhead"] = lambda: gradient(overheads)
        cases["make_graphed_callables"] = graphed
        cases["compute_on"] = computed_on
    cases["pinned_host"] = pinned
    return {name: attempt(case) for name, case in cases.items()}


# Each with the seconds that it may take.
STEPS: dict[str, tuple[Callable[[bool], Found], int]] = {
    "callback": (callback, 60),
    "pairing": (pairing, 120),
    "suite": (suite, 200),
    "training": (training, 150),
    "overhead": (overhead, 60),
    "unproven": (unproven, 90),
    "lifetimes": (lifetimes, 60),
    "raising": (raising, 60),
    "one_pool": (one_pool, 100),
    "features": (features, 120),
}


def in_process(name: str, brief: bool) -> Found:
    """A step's line, by a process that may fail."""
    command = [sys.executable, "-m", "tests.gpu.first", "--within", name]
    start, limit = time.perf_counter(), STEPS[name][1] if name in STEPS else 60
    try:
        ran = subprocess.run(
            [*command, *["--brief"] * brief], capture_output=True, text=True, timeout=limit
        )
        lines = ran.stdout.strip().splitlines()
        if ran.returncode == 0:
            found = json.loads(lines[-1])
        else:
            found = {"error": f"status {ran.returncode}", "said": ran.stderr[-800:]}
    except Exception as error:
        found = {"error": f"{type(error).__name__}: {error}"[:300]}
    return {"step": name, "seconds": round(time.perf_counter() - start, 1), **found}


def main() -> None:
    """Runs the steps that are named, or all."""
    parser = argparse.ArgumentParser()
    parser.add_argument("steps", nargs="*", metavar="STEP")
    parser.add_argument("--brief", action="store_true")
    parser.add_argument("--within", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.within:
        TAPES.clear()
        print(json.dumps(STEPS[given.steps[0]][0](given.brief), default=str))
        return
    about = {"jax": jax.__version__, "torch": torch.__version__, "on": jax.devices()[0].device_kind}
    print(json.dumps({"step": "versions", **about}), flush=True)
    for name in given.steps or STEPS:
        print(json.dumps(in_process(name, given.brief), default=str), flush=True)


if __name__ == "__main__":
    main()
