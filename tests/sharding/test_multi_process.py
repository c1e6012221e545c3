"""Several processes train as one does, and none outlives another."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np
import orbax.checkpoint as ocp
import psutil
import pytest
from jax.sharding import PartitionSpec as P

from examples import digits

from ..helpers import assert_trees_equal


EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPT = EXAMPLES / "multi_process.py"

# Process 1 calls a layer that raises once, on one of its two devices.
WITH_A_LAYER_THAT_RAISES = f"""
import itertools, sys
sys.path.insert(0, {str(EXAMPLES)!r})
import digits, multi_process, torch

calls = itertools.count()

class Raises(torch.nn.Module):
    def forward(self, x):
        if next(calls) == 20 and sys.argv[-1] == "1":
            raise RuntimeError("the torch layer gave up")
        return x

make_network = digits.make_network
digits.make_network = lambda settings: torch.nn.Sequential(make_network(settings), Raises())
multi_process.main()
"""


@pytest.fixture(autouse=True)
def promotion():
    """optax needs JAX's standard promotion."""
    with jax.numpy_dtype_promotion("standard"):
        yield


# Running processes


@contextmanager
def started(command: list[Any], log: Path, **environment: str) -> Iterator[subprocess.Popen]:
    """A process whose output goes to a file; it and its children end with the block."""
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLES.parent), **environment}
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, *map(str, command)], env=environment, stdout=file, stderr=file
        )
        try:
            yield process
        finally:
            for one in [*children(process), process]:
                one.kill()
            process.wait()


def children(process: subprocess.Popen) -> list[psutil.Process]:
    try:
        return sorted(psutil.Process(process.pid).children(), key=lambda p: p.create_time())
    except psutil.NoSuchProcess:
        return []


@contextmanager
def started_without_launcher(program: list[Any], path: Path) -> Iterator[list[Any]]:
    """Two processes that train for long, and their logs, as a cluster would start them."""
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{reserved.getsockname()[1]}"
        environment = {
            "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
            "JAX_COORDINATOR_ADDRESS": address,
            "JAX_COORDINATOR_BIND_ADDRESS": address,
        }
        logs = [path / "0.log", path / "1.log"]
        commands = [[*program, "--cluster", "--epochs", 500, "--process", i] for i in (0, 1)]
        with (
            started(commands[0], logs[0], **environment) as first,
            started(commands[1], logs[1], **environment) as second,
        ):
            yield [(first, logs[0]), (second, logs[1])]


def wait_for_steps(log: Path) -> None:
    """Waits until the progress bar has moved."""
    deadline = time.monotonic() + 120
    while not re.search(r"\b[1-9]\d*/\d+ \[", log.read_text()):
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)


def run_example(path: Path, *arguments: Any) -> str:
    """What the example prints."""
    with started([SCRIPT, *arguments], path / "example.log") as process:
        process.wait(timeout=300)
    output = (path / "example.log").read_text()
    assert process.returncode == 0, output
    return output


# The same result


def by_one_process(epochs: int, devices: int) -> tuple[Any, float]:
    """The model, its state and the optimizer's as one process trains them; the accuracy."""
    settings = digits.Settings(epochs=epochs)
    train, test = digits.load_digits(settings.seed)
    batches = digits.make_batches(train, settings)
    keys = jax.random.split(jax.random.key(settings.seed), len(batches))
    with mesh(devices):
        optimizer, training = digits.begin(digits.make_network(settings), settings)
        for batch, key in zip(batches, keys, strict=True):
            images, labels = jax.device_put((batch.images, batch.labels), P("batch"))
            *training, _ = digits.train_step(*training, optimizer, images, labels, key)
        images, labels = jax.device_put((test.images, test.labels), P("batch"))
        model, state, _ = training
        return training, float(digits.accuracy(model, state, images, labels))


def restored(path: Path, devices: int) -> Any:
    """What the example has saved last, on devices of this process."""
    settings = digits.Settings(epochs=1)
    with mesh(devices), ocp.CheckpointManager(path) as manager:
        _, training = digits.begin(digits.make_network(settings), settings)
        arrays, rest = eqx.partition(list(training), eqx.is_array)
        step = manager.latest_step()
        return eqx.combine(manager.restore(step, args=ocp.args.StandardRestore(arrays)), rest)


def mesh(devices: int) -> Any:
    return jax.set_mesh(jax.make_mesh((devices,), ("batch",), devices=jax.devices()[:devices]))


def assert_trained_alike(actual: Any, expected: Any) -> None:
    """Compares trainings whose gradients were summed over the devices in another order.

    A step moves a parameter by up to 2e-3.
    """
    arrays = [
        jax.tree.map(np.asarray, jax.tree.leaves(eqx.filter(training, eqx.is_array)))
        for training in (actual, expected)
    ]
    assert_trees_equal(*arrays, rtol=1e-4, atol=1e-6)


def accuracy_in(output: str) -> float:
    return float(re.search(r"([\d.]+)% of test digits right", output)[1]) / 100


def test_two_processes_train_as_one_does(tmp_path):
    output = run_example(tmp_path, "--epochs", 1, "--checkpoint", tmp_path / "saved")
    expected, accuracy = by_one_process(epochs=1, devices=4)
    assert_trained_alike(restored(tmp_path / "saved", devices=4), expected)
    assert "2 processes with 4 devices in all" in output
    assert output.count("11/11") >= 1  # the progress bar
    assert abs(accuracy_in(output) - accuracy) < 1.5 / 360


@pytest.mark.slow
def test_four_processes_train_as_one_does(tmp_path):
    arguments = ["--processes", 4, "--epochs", 1, "--checkpoint", tmp_path / "saved"]
    output = run_example(tmp_path, *arguments)
    expected, accuracy = by_one_process(epochs=1, devices=8)
    assert_trained_alike(restored(tmp_path / "saved", devices=1), expected)
    assert "4 processes with 8 devices in all" in output
    assert abs(accuracy_in(output) - accuracy) < 1.5 / 360


@pytest.mark.slow
def test_training_goes_on_with_another_number_of_processes(tmp_path):
    saved = ["--checkpoint", tmp_path / "saved"]
    run_example(tmp_path, "--epochs", 1, *saved)
    output = run_example(tmp_path, "--epochs", 2, "--processes", 4, "--devices", 1, *saved)
    assert re.search(r"(\d+)/22 \[", output)[1] == "11"  # where the progress bar begins
    expected, accuracy = by_one_process(epochs=2, devices=4)
    assert_trained_alike(restored(tmp_path / "saved", devices=2), expected)
    assert abs(accuracy_in(output) - accuracy) < 1.5 / 360


# One that dies


@pytest.mark.parametrize("victim", [0, 1])
def test_the_launcher_ends_all_when_one_dies(tmp_path, victim):
    log = tmp_path / "example.log"
    with started([SCRIPT, "--epochs", 500], log) as process:
        wait_for_steps(log)
        workers = children(process)
        workers[victim].kill()
        process.wait(timeout=30)
        _, alive = psutil.wait_procs(workers, timeout=5)
    assert not alive
    assert process.returncode == 1
    assert f"Process {victim} ended by SIGKILL, and so the others are ended." in log.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_without_launcher_jax_ends_the_other(tmp_path, victim):
    with started_without_launcher([SCRIPT], tmp_path) as workers:
        wait_for_steps(workers[0][1])
        workers[victim][0].kill()
        survivor, log = workers[1 - victim]
        survivor.wait(timeout=60)
    assert survivor.returncode == -signal.SIGABRT
    assert "This most likely indicates that another task died" in log.read_text()


@pytest.mark.slow
def test_what_torch_raises_on_one_device_ends_all_processes(tmp_path):
    with started_without_launcher(["-c", WITH_A_LAYER_THAT_RAISES], tmp_path) as workers:
        wait_for_steps(workers[0][1])
        for process, _ in workers:
            process.wait(timeout=60)
    (first, first_log), (second, second_log) = workers
    assert first.returncode != 0
    assert second.returncode != 0
    assert "the torch layer gave up" in second_log.read_text()
    assert "This most likely indicates that another task died" in first_log.read_text()
