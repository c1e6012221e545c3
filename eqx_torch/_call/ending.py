"""The end of the interpreter, which waits for the programs that call torch.

JAX returns before a program has run. A thread of XLA's that asks for Python while the interpreter
ends is stopped by Python, and the process aborts. JAX waits only for programs with effects, and a
torch call has none. So before the interpreter ends, this waits for every array that is alive, and
then for two small programs, one on all devices and one on the first. They run after those that were
asked for before: on a GPU by the order of its stream; on a CPU because XLA begins a program over
several devices when the last such program is done, and one on a single device when the last such
program of the same thread is done. So on a CPU only that of the kind which called torch is run.

What remains are threads that go on asking, and a program on one device of a CPU whose results
nobody holds, asked for in another thread than the main one.
"""

import atexit
import contextlib
import os
import signal
import sys

import jax
import numpy as np


class Ending:
    """The platforms on which torch is called, each with whether by programs over several devices.

    Invariant: unless `callers` is empty, `process` is the one in which they were noted. XLA's
    threads do not exist in those that were forked from it.
    """

    def __init__(self) -> None:
        self.callers: set[tuple[str, bool]] = set()
        self.process: int | None = None

    def waits_for(self, platform: str, devices: int) -> None:
        """Notes that programs over so many devices of a platform call torch."""
        self.callers.add((platform, devices > 1))
        self.process = os.getpid()

    def wait(self) -> None:
        """Returns when no program that was asked for in this process will call torch any more."""
        if self.process != os.getpid():
            return
        try:
            self._wait()
        except KeyboardInterrupt:
            _end_at_once()

    def _wait(self) -> None:
        for platform in {platform for platform, _ in self.callers}:
            kinds = {several for name, several in self.callers if name == platform}
            with contextlib.suppress(Exception):  # of a platform that is gone
                _wait_for(platform, kinds if platform == "cpu" else {True, False})


def _wait_for(platform: str, kinds: set[bool]) -> None:
    for array in jax.live_arrays(platform):
        with contextlib.suppress(Exception):  # a program that failed has ended, too
            array.block_until_ready()
    devices = jax.local_devices(backend=platform)
    for several in kinds:
        some = devices if several else devices[:1]
        _run_after_others(jax.make_mesh((len(some),), ("devices",), devices=some))


def _end_at_once() -> None:
    """Ends the process as Ctrl-C ends those that do not handle it, since no more may run in it."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)


def _run_after_others(mesh: jax.sharding.Mesh) -> None:
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("devices"))
    with jax.set_mesh(mesh):
        x = jax.device_put(np.zeros(mesh.size, np.float32), sharding)
        jax.jit(jax.lax.neg)(x).block_until_ready()


ENDING = Ending()
atexit.register(ENDING.wait)
