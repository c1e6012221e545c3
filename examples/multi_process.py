"""Handwritten digits, learnt by several processes together.

    python examples/multi_process.py

starts two processes on this computer, with two simulated CPU devices each (`--processes`,
`--devices`). All run the same program: the parameters are on every device, each process reads what
its own devices need of a batch, and JAX sums the gradients over the devices of all processes. The
network and the training step are those of `digits.py`, and so is the result.

With `--checkpoint DIRECTORY` the training is saved after each epoch. Started again, also with
another number of processes, it goes on from there.

On a cluster, start the script once for each process, with one directory for all. JAX finds the
others in a SLURM step, under Open MPI, and in an indexed job of Kubernetes (where it needs
`pip install "jax[k8s]"`):

    srun --ntasks=8 --kill-on-bad-exit python examples/multi_process.py --cluster

Elsewhere, say which is which; process 0 listens at the address, and all must reach it:

    JAX_COORDINATOR_ADDRESS=10.0.0.1:9999 python examples/multi_process.py \\
        --cluster --processes 8 --process 0
"""

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path


os.environ.setdefault("XLA_FLAGS", "")  # otherwise `digits.py` simulates four devices

import digits
import equinox as eqx
import jax
import numpy as np
import orbax.checkpoint as ocp
import torch
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, PyTree, Shaped
from tqdm.auto import tqdm

from eqx_torch import check_errors


# Processes end when another has been silent, or has not ended with them, for so many seconds.
TIMEOUT = 20


# What each process runs


def work(options: argparse.Namespace) -> None:
    """Joins the other processes and trains with them."""
    jax.distributed.initialize(
        num_processes=None if options.process is None else options.processes,
        process_id=options.process,
        cluster_detection_method=None if options.process is None else "deactivate",
        heartbeat_timeout_seconds=TIMEOUT,
        shutdown_timeout_seconds=TIMEOUT,
    )
    torch.set_num_threads(1)  # JAX calls torch from a thread of its own for each device
    start = time.perf_counter()
    with jax.set_mesh(jax.make_mesh((jax.device_count(),), ("batch",))):
        accuracy = train(digits.Settings(epochs=options.epochs), options.checkpoint)
    if jax.process_index() == 0:
        print(
            f"{jax.process_count()} processes with {jax.device_count()} devices in all: "
            f"{accuracy:.1%} of test digits right after {time.perf_counter() - start:.0f} seconds"
        )


def train(settings: digits.Settings, directory: Path | None) -> float:
    """Trains on the devices of all processes, and returns the accuracy."""
    train_set, test_set = digits.load_digits(settings.seed)
    batches = digits.make_batches(train_set, settings)
    keys = jax.random.split(jax.random.key(settings.seed), len(batches))
    optimizer, training = digits.begin(digits.make_network(settings), settings)
    with checkpoints(directory, every=len(batches) // settings.epochs) as saved:
        done, training = restore(saved, training)
        remaining = range(done, len(batches))
        bar = tqdm(
            remaining, initial=done, total=len(batches), disable=jax.process_index() > 0 or None
        )
        for i in bar:
            images, labels = split(batches[i].images), split(batches[i].labels)
            *training, loss = digits.train_step(*training, optimizer, images, labels, keys[i])
            jax.block_until_ready(training)
            check_errors()  # of torch on a device of this process, which the others wait for
            bar.set_postfix(loss=f"{float(loss):.3f}", refresh=False)
            if saved:  # at the end of each epoch
                saved.save(i + 1, args=ocp.args.StandardSave(eqx.filter(training, eqx.is_array)))
    model, state, _ = training
    return float(digits.accuracy(model, state, split(test_set.images), split(test_set.labels)))


def split(data: Shaped[np.ndarray, "batch ..."]) -> Shaped[Array, "batch ..."]:
    """An array over all devices. Each process reads only the rows that its own devices hold."""
    sharding = jax.NamedSharding(jax.sharding.get_mesh(), P("batch"))
    return jax.make_array_from_callback(data.shape, sharding, data.__getitem__)


def checkpoints(
    directory: Path | None, every: int
) -> contextlib.AbstractContextManager[ocp.CheckpointManager | None]:
    """What saves and restores in this directory, in steps of `every`."""
    if directory is None:
        return contextlib.nullcontext()
    options = ocp.CheckpointManagerOptions(save_interval_steps=every, max_to_keep=1)
    return ocp.CheckpointManager(directory.absolute(), options=options)


def restore(saved: ocp.CheckpointManager | None, training: PyTree) -> tuple[int, PyTree]:
    """How many steps were saved, and the training after them, on the devices of `training`."""
    if saved is None or saved.latest_step() is None:
        return 0, training
    arrays, rest = eqx.partition(training, eqx.is_array)
    arrays = saved.restore(saved.latest_step(), args=ocp.args.StandardRestore(arrays))
    return saved.latest_step(), eqx.combine(arrays, rest)


# The launcher


def launch(options: argparse.Namespace) -> None:
    """Starts the processes on this computer; when one fails, ends all."""
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind(("127.0.0.1", 0))  # a free port, which stays ours until process 0 listens
        address = f"127.0.0.1:{reserved.getsockname()[1]}"
        environment = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={options.devices}",
            "JAX_COORDINATOR_ADDRESS": address,
            "JAX_COORDINATOR_BIND_ADDRESS": address,
        }
        command = [sys.executable, __file__, *sys.argv[1:], "--cluster", "--process"]
        ids = range(options.processes)
        workers = [subprocess.Popen([*command, str(i)], env=environment) for i in ids]
        try:
            wait(workers)
        finally:
            for worker in workers:
                worker.kill()  # `terminate` asks JAX for a last checkpoint


def wait(workers: list[subprocess.Popen]) -> None:
    """Returns when all have succeeded; exits as soon as one has failed."""
    while True:
        codes = [worker.poll() for worker in workers]
        for i, code in enumerate(codes):
            if code:
                how = f"by {signal.Signals(-code).name}" if code < 0 else f"with status {code}"
                sys.exit(f"Process {i} ended {how}, and so the others are ended.")
        if None not in codes:
            return
        time.sleep(0.1)


def main() -> None:
    """Starts processes, or is one of them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=2, help="how many (default: 2)")
    parser.add_argument("--devices", type=int, default=2, help="of each process (default: 2)")
    parser.add_argument("--epochs", type=int, default=digits.Settings.epochs)
    parser.add_argument("--checkpoint", type=Path, metavar="DIRECTORY")
    parser.add_argument("--cluster", action="store_true", help="be one process, start none")
    parser.add_argument("--process", type=int, help="which one, if JAX cannot find out")
    options = parser.parse_args()
    if options.cluster:
        work(options)
    else:
        launch(options)


if __name__ == "__main__":
    main()
