"""The order between XLA's streams and torch's, on a stand-in for `torch.cuda`."""

import inspect
import threading
import types

import jax
import jax.numpy as jnp
import pytest
import torch

from eqx_torch import torch2jax
from eqx_torch._call import runtime, torch_call_p
from eqx_torch._call.streams import Cuda, Stream, XlaStreams

from ..helpers import assert_trees_equal
from ..helpers.simulated_cuda import RaceError, SimulatedCuda


XLA = 0x7F00
KDLCUDA, KDLROCM = 2, 10


class Buffer:
    """What XLA passes: memory, and the device it is on. The memory is a CPU tensor's here."""

    def __init__(self, device=0, tensor=None, kind=KDLCUDA):
        self.device, self.tensor, self.kind = device, tensor, kind

    def __dlpack_device__(self):
        return self.kind, self.device

    def __dlpack__(self):
        return self.tensor.__dlpack__()


def context(address=XLA):
    return types.SimpleNamespace(stream=address)


@pytest.fixture
def cuda():
    return SimulatedCuda()


@pytest.fixture
def streams(cuda):
    return XlaStreams(cuda)


def xla_stream(cuda, device=0):
    return cuda.ExternalStream(XLA, device)


def test_torch_runs_between_the_producer_and_the_consumer(cuda, streams):
    xla = xla_stream(cuda)
    producer = cuda.launch(on=xla)
    with streams.entered(context(), [Buffer()]):
        kernel = cuda.launch()
    consumer = cuda.launch(on=xla)
    assert kernel.stream.address == XLA
    assert producer in kernel.after
    assert kernel in consumer.after


def test_the_current_stream_is_ordered_with_it(cuda, streams):
    before = cuda.launch()
    with streams.entered(context(), [Buffer()]):
        kernel = cuda.launch()
    after = cuda.launch()
    assert before.stream.address == after.stream.address == 0
    assert before in kernel.after
    assert kernel in after.after


def test_side_streams_run_at_the_same_time(cuda, streams):
    side = cuda.ExternalStream(5, 0)
    beside = cuda.launch(on=side)
    with streams.entered(context(), [Buffer()]):
        kernel = cuda.launch()
        other = cuda.launch(on=side)
    assert beside not in kernel.after
    assert kernel not in other.after


def test_the_users_side_stream_is_the_current_one(cuda, streams):
    side = cuda.ExternalStream(5, 0)
    with cuda.stream(side):
        before = cuda.launch()
        with streams.entered(context(), [Buffer()]):
            kernel = cuda.launch()
        after = cuda.launch()
    assert before in kernel.after
    assert kernel in after.after
    assert kernel not in cuda.launch().after


def test_nothing_waits_for_the_device(cuda, streams):
    with streams.entered(context(), [Buffer()]):
        cuda.launch()
    assert cuda.synchronized == []


def test_streams_are_joined_after_an_error_too(cuda, streams):
    kernels = []

    def fail():
        kernels.append(cuda.launch())
        raise KeyError("torch")

    with pytest.raises(KeyError, match="torch"), streams.entered(context(), [Buffer()]):
        fail()
    (kernel,) = kernels
    after = cuda.launch()
    assert after.stream.address == 0
    assert kernel in after.after
    assert kernel in cuda.launch(on=xla_stream(cuda)).after


@pytest.mark.parametrize("kind", [KDLCUDA, KDLROCM], ids=["CUDA", "ROCm"])
@pytest.mark.parametrize("device", [0, 1, 3])
def test_the_buffers_say_which_device_is_meant(cuda, streams, device, kind):
    before = cuda.launch(on=cuda.current_stream(device))
    with streams.entered(context(), [Buffer(device, kind=kind), Buffer(device, kind=kind)]):
        assert cuda.current_device() == device
        kernel = cuda.launch()
    assert (kernel.stream.device, kernel.stream.address) == (device, XLA)
    assert before in kernel.after
    assert cuda.current_device() == 0
    assert kernel in cuda.launch(on=cuda.current_stream(device)).after


def test_devices_do_not_wait_for_each_other(cuda, streams):
    with streams.entered(context(), [Buffer(0)]):
        first = cuda.launch()
    with streams.entered(context(), [Buffer(1)]):
        second = cuda.launch()
    assert first not in second.after
    assert second not in cuda.launch(on=xla_stream(cuda, 0)).after


def test_each_thread_has_its_own_current_stream(cuda, streams):
    entered, leave = threading.Barrier(3, timeout=30), threading.Event()
    seen = {}

    def call(device):
        with streams.entered(context(XLA + device), [Buffer(device)]):
            entered.wait()
            seen[device] = cuda.launch().stream
            assert leave.wait(30)

    threads = [threading.Thread(target=call, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    entered.wait()
    assert cuda.current_stream(0).address == cuda.current_stream(1).address == 0
    leave.set()
    for thread in threads:
        thread.join(30)
    assert [(seen[i].device, seen[i].address) for i in range(2)] == [(0, XLA), (1, XLA + 1)]


def test_each_stream_is_made_once(cuda, streams):
    for _ in range(3):
        for address, device in ((XLA, 0), (XLA, 1), (XLA + 1, 0)):
            with streams.entered(context(address), [Buffer(device)]):
                assert cuda.current_stream(device).address == address
                assert cuda.current_device() == device
    assert cuda.made == [(XLA, 0), (XLA, 1), (XLA + 1, 0)]


def test_what_the_function_frees_is_used_again_behind_it(cuda, streams):
    with streams.entered(context(), [Buffer()]):
        temporary = cuda.allocate()
        cuda.launch(temporary, name="slow")
        cuda.free(temporary)
    with streams.entered(context(), [Buffer()]):
        again = cuda.allocate()
        assert cuda.launch(again).after >= again.former != frozenset()


def test_what_the_function_leaves_to_the_user_may_be_freed_while_it_is_read(cuda, streams):
    with streams.entered(context(), [Buffer()]):
        kept = cuda.allocate()
        written = cuda.launch(kept)
    read = cuda.launch(kept, name="the user's")
    assert written in read.after
    cuda.free(kept)
    with streams.entered(context(), [Buffer()]):
        again = cuda.allocate()
        assert read in again.former
        cuda.launch(again)


def test_the_stand_in_finds_races(cuda, streams):
    """As `torch.Tensor.record_stream` is for: a side stream that nothing is joined to."""
    side = cuda.ExternalStream(5, 0)
    with streams.entered(context(), [Buffer()]):
        kept = cuda.allocate()
        cuda.launch(kept)
    side.wait_stream(cuda.current_stream(0))
    cuda.launch(kept, on=side, name="the side stream's")
    cuda.free(kept)
    with (
        streams.entered(context(), [Buffer()]),
        pytest.raises(RaceError, match="the side stream's"),
    ):
        cuda.launch(cuda.allocate())


def test_backwards_run_on_the_stream_in_the_threads_of_autograd(cuda, streams):
    """Each node of a backward runs in the device's thread, on the stream of its forward."""
    kernels = {}

    def node(stream):
        with cuda.stream(stream):
            kernels["backward"] = cuda.launch()

    with streams.entered(context(), [Buffer(1)]):
        forward = cuda.launch()
        engine = threading.Thread(target=node, args=(forward.stream,))
        engine.start()
        engine.join(30)
        cuda.current_stream(1).wait_stream(forward.stream)
        copied = cuda.launch(name="the copy into XLA's buffer")
    consumer = cuda.launch(on=xla_stream(cuda, 1))
    assert forward in kernels["backward"].after
    assert {forward, kernels["backward"], copied} <= consumer.after


def test_before_a_shared_lock_a_device_finishes_what_it_has(cuda, streams):
    with streams.entered(context(), [Buffer(1)], settled=True):
        assert cuda.synchronized == [(1, XLA)]


def test_a_lock_and_a_collective_do_not_wait_for_each_other(cuda, streams):
    """Device 0 is a call ahead, behind a collective that device 1 has yet to come to."""
    lock = threading.Lock()
    ahead, arrived = threading.Event(), threading.Event()
    finished = []

    def wait_for_the_collective():
        if cuda.current_device() == 0:
            ahead.set()
            assert arrived.wait(30)

    cuda.when_synchronized = wait_for_the_collective

    def first():
        with streams.entered(context(), [Buffer(0)], settled=True), lock:
            cuda.current_stream(0).synchronize()  # as `.item()` in the function does
            finished.append(0)

    def second():
        assert ahead.wait(30)
        with streams.entered(context(), [Buffer(1)], settled=True), lock:
            finished.append(1)
        arrived.set()

    threads = [threading.Thread(target=f) for f in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert finished == [1, 0]


def program_of(f, *args):
    (eqn,) = (e for e in jax.make_jaxpr(f)(*args).eqns if e.primitive is torch_call_p)
    return eqn.params["program"]


@pytest.fixture
def on_gpu(cuda, monkeypatch):
    """What XLA would call on a GPU, with CPU memory in its buffers."""
    monkeypatch.setattr(runtime, "XLA_STREAMS", XlaStreams(cuda))

    def call(f, *arrays, device=0, devices=1):
        program = program_of(f, *arrays)
        inputs = [torch.from_numpy(jax.device_get(x).copy()) for x in arrays]
        outputs = [torch.empty(s.shape, dtype=torch.float32) for s in program.outs]
        buffers = [Buffer(device, x) for x in (*inputs, *outputs)]
        runtime.callback(program, "cuda", devices)(context(), *buffers)
        return outputs

    return call


@pytest.mark.parametrize("device", [0, 1])
def test_calls_run_on_the_stream_of_their_buffers(cuda, on_gpu, device):
    seen = []

    def f(x):
        seen.append((cuda.current_device(), cuda.current_stream(device).address))
        return x.sin()

    x = jnp.arange(3.0)
    (y,) = on_gpu(torch2jax(f, output_shapes=x), x, device=device)
    assert seen == [(device, XLA)]
    assert_trees_equal(y, jnp.sin(x))
    assert cuda.synchronized == []


def test_errors_leave_no_stream_current(cuda, on_gpu):
    def f(x):
        raise ValueError("torch's own")

    x = jnp.arange(3.0)
    with pytest.raises(ValueError, match="torch's own"):
        on_gpu(torch2jax(f, output_shapes=x), x, device=1)
    assert cuda.current_device() == 0
    assert cuda.current_stream(1).address == 0


class Noted:
    """A lock that notes what was waited for before it was taken."""

    def __init__(self, cuda):
        self.cuda, self.noted = cuda, []

    def __enter__(self):
        self.noted.append((self.cuda.current_device(), list(self.cuda.synchronized)))

    def __exit__(self, *_):
        self.noted.append("released")


@pytest.mark.parametrize("devices", [1, 2])
def test_locks_are_taken_on_the_stream_and_on_meshes_after_it(cuda, on_gpu, devices):
    lock = Noted(cuda)
    x = jnp.arange(3.0)
    f = torch2jax(torch.sin, output_shapes=x, lock=lock)
    (y,) = on_gpu(f, x, device=1, devices=devices)
    assert lock.noted == [(1, [(1, XLA)] if devices > 1 else []), "released"]
    assert_trees_equal(y, jnp.sin(x))


def test_on_a_cpu_no_stream_is_entered(cuda, monkeypatch):
    monkeypatch.setattr(runtime, "XLA_STREAMS", XlaStreams(cuda))
    x = jnp.arange(3.0)
    lock = Noted(cuda)
    assert_trees_equal(torch2jax(torch.sin, output_shapes=x, lock=lock)(x), jnp.sin(x))
    assert cuda.made == []
    assert len(lock.noted) == 2


INTERFACES = [
    (protocol, name) for protocol in (Cuda, Stream) for name in vars(protocol) if name[0] != "_"
]


@pytest.mark.parametrize(("protocol", "name"), INTERFACES, ids=[name for _, name in INTERFACES])
def test_torch_and_the_stand_in_have_the_interface(protocol, name):
    """Its arguments are positional, so they may be called otherwise."""
    _, *arguments = inspect.signature(getattr(protocol, name)).parameters
    for owner in (torch.cuda, SimulatedCuda()) if protocol is Cuda else (torch.cuda.Stream,):
        itself = () if protocol is Cuda else ("self",)
        inspect.signature(getattr(owner, name)).bind(*itself, *arguments)


@pytest.mark.parametrize(("lock", "gpus", "waits"), [(True, 2, 1), (True, 1, 0), (False, 2, 0)])
def test_a_locked_call_on_one_of_several_gpus_waits_before_it_takes_the_lock(
    cuda, on_gpu, monkeypatch, lock, gpus, waits
):
    """The program may be on one device: other programs have others."""
    monkeypatch.setattr(runtime, "local_gpus", lambda: gpus)
    x = jnp.arange(3.0)
    on_gpu(torch2jax(torch.sin, output_shapes=x, lock=lock), x)
    assert len(cuda.synchronized) == waits
