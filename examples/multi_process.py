"""Handwritten digits, learnt by several processes together.

    python examples/multi_process.py

starts two processes on this computer, with two simulated CPU devices each (`--processes`,
`--devices`). All run the same program: the parameters are on all devices, each process reads what
its own devices need of a batch, and JAX sums the gradients over the devices of all. The network and
the training step are those of `digits.py`, and so is the result.

With `--checkpoint DIRECTORY` the training is saved after each epoch, and goes on from there when it
is started again, with any number of processes.

On a cluster, start the script once for each process, with one directory for all. In a SLURM step,
under Open MPI, or in an indexed job of Kubernetes (`pip install "jax[k8s]"`), JAX finds the others:

    srun --ntasks=8 --kill-on-bad-exit python examples/multi_process.py --cluster

Elsewhere, say who is who; all must reach the address, at which process 0 listens:

    python examples/multi_process.py --cluster --address 10.0.0.1:9999 --processes 8 --process 0
"""

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path


# `digits.py` would simulate four devices.
os.environ.setdefault("XLA_FLAGS", "")

import digits
import equinox as eqx
import jax
import numpy as np
import orbax.checkpoint as ocp
import torch
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Shaped
from tqdm import tqdm


TIMEOUT = 20  # seconds after which processes give up one that is silent, or does not end with them


# The launcher


def launch(processes: int, devices: int, arguments: list[str]) -> None:
    """Runs processes with simulated CPU devices on this computer; if one fails, ends all."""
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind(("127.0.0.1", 0))  # a port that is free, and kept for the processes
        address = f"127.0.0.1:{reserved.getsockname()[1]}"
        flags = f"--xla_force_host_platform_device_count={devices}"
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
        command = [sys.executable, __file__, *arguments, "--cluster", "--address", address]
        command += ["--processes", str(processes), "--process"]
        workers = [
            subprocess.Popen([*command, str(i)], env=environment) for i in range(processes)
        ]
        try:
            wait(workers)
        finally:
            for worker in workers:
                worker.kill()  # JAX handles what `terminate` sends


def wait(workers: list[subprocess.Popen]) -> None:
    """Returns when all have succeeded, and exits when one has failed."""
    while any(worker.poll() is None for worker in workers):
        for i, worker in enumerate(workers):
            if worker.returncode:
                code = worker.returncode
                how = signal.Signals(-code).name if code < 0 else f"exit status {code}"
                sys.exit(f"Process {i} ended with {how}, so all are ended.")
        time.sleep(0.1)


# What each process runs


def train(settings: digits.Settings, checkpoint: Path | None) -> float:
    """Trains on all devices of all processes; returns the accuracy on the digits to test with."""
    train_set, test_set = digits.load_digits(settings.seed)
    batches = digits.make_batches(train_set, settings)
    keys = jax.random.split(jax.random.key(settings.seed), len(batches))
    optimizer, training = digits.start(digits.make_network(settings), settings)
    bar = tqdm(total=len(batches), desc="training", disable=jax.process_index() > 0)
    for i, (batch, key) in enumerate(zip(batches, keys, strict=True)):
        images, labels = split(batch.images), split(batch.labels)
        *training, loss = digits.train_step(*training, optimizer, images, labels, key)
        bar.update()
        bar.set_postfix(loss=f"{float(loss):.3f}")
    model, state, _ = training
    images, labels = split(test_set.images), split(test_set.labels)
    return float(digits.accuracy(model, state, images, labels))


def split(data: Shaped[np.ndarray, "batch ..."]) -> Shaped[Array, "batch ..."]:
    """An array over all devices, of which each process reads the rows that its devices hold."""
    sharding = jax.NamedSharding(jax.sharding.get_mesh(), P("batch"))
    return jax.make_array_from_callback(data.shape, sharding, data.__getitem__)


def work(options) -> None:
    jax.distributed.initialize(
        options.address,
        options.processes,
        options.process,
        heartbeat_timeout_seconds=TIMEOUT,
        shutdown_timeout_seconds=TIMEOUT,
    )
    torch.set_num_threads(1)
    with jax.set_mesh(jax.make_mesh((jax.device_count(),), ("batch",))):
        accuracy = train(digits.Settings(), None)
    if jax.process_index() == 0:
        print(accuracy)

def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--cluster", action="store_true")
    parser.add_argument("--address")
    parser.add_argument("--process", type=int)
    parser.add_argument("--checkpoint", type=Path)
    options = parser.parse_args()
    if options.cluster:
        work(options)
    else:
        launch(options.processes, options.devices, [])


if __name__ == "__main__":
    main()
