"""No thread waits for its GPU while it holds the lock that threads of other GPUs wait for."""

import threading

import jax
import jax.numpy as jnp
import pytest
import torch

from eqx_torch import torch2jax
from eqx_torch._module import rng
from eqx_torch._module.rng import resumed, seeded
from eqx_torch._program import EXCLUSIVE, exclusive, forward
from eqx_torch._program.exclusive import settle

from ..helpers import assert_trees_equal
from ..helpers.simulated_cuda import SimulatedCuda


def is_held():
    """Whether any thread holds the lock: a new one cannot take it."""
    taken = []

    def attempt():
        if EXCLUSIVE.acquire(blocking=False):
            taken.append(True)
            EXCLUSIVE.release()

    thread = threading.Thread(target=attempt)
    thread.start()
    thread.join(30)
    return not taken


@pytest.mark.parametrize(
    ("device", "count", "expected"),
    [("cuda:1", 2, [(1, 0)]), ("cuda:0", 1, []), ("cpu", 2, [])],
)
def test_only_one_of_several_gpus_is_waited_for(monkeypatch, device, count, expected):
    cuda = SimulatedCuda()
    streams = lambda device: cuda.current_stream(device.index)  # noqa: E731
    monkeypatch.setattr(exclusive, "local_gpus", lambda: count)
    monkeypatch.setattr(torch.cuda, "current_stream", streams)
    settle(torch.device(device))
    assert cuda.synchronized == expected


@pytest.mark.parametrize("batched", [False, True], ids=["alone", "batched"])
def test_tangents_are_computed_once_the_device_is_done(monkeypatch, batched):
    held = []
    monkeypatch.setattr(forward, "settle", lambda device: held.append((str(device), is_held())))

    def f(x):
        held.append(is_held())
        return x.sin()

    x = jnp.arange(3.0)
    g = torch2jax(f, output_shapes=x)
    push = lambda x: jax.jvp(g, (x,), (x,))[1]  # noqa: E731
    tangents = jax.block_until_ready(jax.vmap(push)(x[None])[0] if batched else push(x))
    assert_trees_equal(tangents, x * jnp.cos(x))
    first = held.index(("cpu", False))
    assert True in held[first:]
    assert ("cpu", True) not in held


class Seed:
    """That of a call on a GPU; or on a CPU, if it is to be."""

    def __init__(self, held: list[bool], is_cuda: bool) -> None:
        self.held, self.is_cuda, self.device = held, is_cuda, torch.device("cuda", 0)

    def tolist(self) -> list[int]:
        self.held.append(is_held())
        return [0, 7]


def test_on_a_gpu_keys_are_read_before_the_lock_is_taken(monkeypatch):
    generator = torch.Generator()  # in the place of the GPU's
    monkeypatch.setattr(torch.cuda, "default_generators", (generator,))
    before = generator.get_state()
    held, ends, drawn = [], [], []
    for _ in range(2):
        with seeded(Seed(held, is_cuda=True), ends.append):
            held.append(is_held())
            drawn.append(torch.rand(3, generator=generator))
        assert torch.equal(generator.get_state(), before)
        held.append(is_held())
        while ends:
            ends.pop()()
        held.append(is_held())
    assert held == [False, True, True, False] * 2
    assert_trees_equal(*drawn, exact=True)


def test_on_a_cpu_a_key_takes_no_lock():
    held, ends = [], []
    with seeded(Seed(held, is_cuda=False), ends.append):
        held.append(is_held())
    held.append(is_held())
    while ends:
        ends.pop()()
    assert held == [False] * 3


def test_a_backward_that_may_seed_again_lets_its_device_finish_before_it_takes_the_lock(
    monkeypatch,
):
    held = []
    monkeypatch.setattr(rng, "settle", lambda device: held.append((device.type, is_held())))
    for device in ("cuda", "cpu"):
        with resumed(torch.Generator(), torch.device(device)):
            held.append(is_held())
    assert held == [("cuda", False), True, ("cpu", False), False]
