"""What can be wrong with an installation and its settings.

A check is a function from facts to findings. A finding says what is, why it matters and what
exactly to set. It is wrong, or only worth knowing.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import TypeAlias

from .facts import Facts


@dataclasses.dataclass(frozen=True)
class Finding:
    """Something to tell the user.

    Attributes:
        what: what is.
        why: why it matters.
        remedy: what to set.
        wrong: whether something has to be done; else it is a note.
    """

    what: str
    why: str
    remedy: str
    wrong: bool = True


Check: TypeAlias = Callable[[Facts], Iterator[Finding]]

_DEFAULT_FRACTION = 0.75  # of a GPU's memory: what JAX takes when it starts


def diagnose(facts: Facts) -> list[Finding]:
    """All findings, what is wrong first."""
    found = [finding for check in CHECKS for finding in check(facts)]
    return sorted(found, key=lambda finding: not finding.wrong)


def versions(facts: Facts) -> Iterator[Finding]:
    """Versions that are not supported."""
    for sentence in facts.unsupported:
        yield Finding(
            f"{sentence}.",
            "Names that eqx_torch needs may be missing there, or mean something else.",
            "Run `pip install --upgrade eqx-torch`, which installs versions that are supported.",
        )


def backend(facts: Facts) -> Iterator[Finding]:
    """JAX without devices, or on devices that torch functions do not run on."""
    if facts.jax_error is not None:
        yield Finding(
            f"JAX finds no devices: {facts.jax_error}",
            "No JAX program can run.",
            "Set JAX_PLATFORMS=cpu to run on the CPU, or repair what the message names.",
        )
    elif facts.jax_platform not in ("cpu", "cuda", "rocm"):
        yield Finding(
            f"JAX runs on {facts.jax_platform}.",
            "JAX programs that call torch run on the CPU, CUDA and ROCm only.",
            "Set JAX_PLATFORMS=cpu, or call torch under "
            '`jax.default_device(jax.devices("cpu")[0])`.',
        )


def torch_without_gpu(facts: Facts) -> Iterator[Finding]:
    """JAX on GPUs that torch cannot use."""
    if not _jax_on_gpu(facts):
        return
    name = {"cuda": "CUDA", "rocm": "ROCm"}[facts.jax_platform]
    why = "JAX hands arrays on the GPU to torch, which fails where torch cannot use that GPU."
    otherwise = "or set JAX_PLATFORMS=cpu to run JAX on the CPU too."
    if facts.torch_platform != facts.jax_platform:
        yield Finding(
            f"JAX runs on {name}, but torch {facts.versions['torch']} was built for "
            f"{facts.torch_platform}.",
            why,
            f"Install torch for {name} (https://pytorch.org/get-started/locally), {otherwise}",
        )
    elif not facts.torch_gpus:
        yield Finding(
            f"JAX runs on {name}, and torch was built for it, but sees no GPU.",
            why,
            "See what `python -c 'import torch; torch.cuda.init()'` says: most often the driver "
            f"is older than torch needs; {otherwise}",
        )


def jax_without_gpu(facts: Facts) -> Iterator[Finding]:
    """Torch on GPUs that JAX does not use."""
    if facts.jax_platform != "cpu" or facts.jax_platforms is not None or not facts.torch_gpus:
        return
    extra = "rocm" if facts.torch_platform == "rocm" else "cuda13"
    yield Finding(
        f"torch sees {len(facts.torch_gpus)} x {facts.torch_gpus[0][0]}, but JAX runs on the CPU.",
        "Torch functions run where JAX has their arguments, so they do not use the GPU either.",
        f"Install JAX for the GPU (`pip install 'jax[{extra}]'`). If it is installed, see what "
        "`python -c 'import jax; jax.devices(\"gpu\")'` says. If the CPU is meant, set "
        "JAX_PLATFORMS=cpu.",
    )


def preallocation(facts: Facts) -> Iterator[Finding]:
    """JAX taking the memory of a GPU that torch allocates from too."""
    if not _jax_on_gpu(facts) or not facts.torch_gpus:
        return
    given = facts.environment
    if given.get("XLA_PYTHON_CLIENT_ALLOCATOR", "").lower() == "platform":
        return
    if given.get("XLA_PYTHON_CLIENT_PREALLOCATE") in ("false", "False", "0"):
        return
    older = given.get("XLA_PYTHON_CLIENT_MEM_FRACTION")
    fraction = float(given.get("XLA_CLIENT_MEM_FRACTION") or older or _DEFAULT_FRACTION)
    if fraction < _DEFAULT_FRACTION:
        return
    yield Finding(
        f"JAX takes {fraction:.0%} of a GPU's memory when it starts, and torch allocates from the "
        "rest.",
        "Torch then runs out of memory while JAX holds memory that it does not use.",
        "Set XLA_PYTHON_CLIENT_PREALLOCATE=false in the environment, and JAX takes memory as it "
        "needs it; or XLA_CLIENT_MEM_FRACTION=0.4 (XLA_PYTHON_CLIENT_MEM_FRACTION in older "
        "versions), the part that JAX takes.",
    )


def threads(facts: Facts) -> Iterator[Finding]:
    """More threads than cores."""
    devices, each = facts.jax_devices[0], facts.torch_threads
    if facts.jax_platform != "cpu" or each == 1 or devices * each <= facts.cores:
        return
    fitting = max(1, facts.cores // devices)
    yield Finding(
        f"{_counted(devices, 'CPU device')} with {each} torch threads each are {devices * each} "
        f"threads on {_counted(facts.cores, 'core')}.",
        "Each device calls torch from a thread of its own, and torch starts its threads for each "
        "of them. Threads that wait for a core make all of them slow.",
        f"Call `torch.set_num_threads({fitting})` when the program starts, or set "
        f"OMP_NUM_THREADS={fitting} in the environment.",
    )


def simulated_devices(facts: Facts) -> Iterator[Finding]:
    """More CPU devices than cores."""
    devices = facts.jax_devices[0]
    if facts.jax_platform != "cpu" or devices <= facts.cores:
        return
    yield Finding(
        f"JAX simulates {devices} CPU devices on {_counted(facts.cores, 'core')}.",
        "This is right for tests of sharded programs. It is not faster than one device a core.",
        f"For speed, set JAX_NUM_CPU_DEVICES={facts.cores}, and take "
        "--xla_force_host_platform_device_count out of XLA_FLAGS.",
        wrong=False,
    )


def wide_dtypes(facts: Facts) -> Iterator[Finding]:
    """JAX making 64-bit arrays where torch makes 32-bit ones."""
    if not facts.x64:
        return
    yield Finding(
        "JAX has 64-bit dtypes (JAX_ENABLE_X64).",
        "New JAX arrays are float64, new torch parameters float32, and torch's layers do not mix "
        "the two.",
        "Convert the module by `module.double()`, or say the dtype where JAX makes the arrays "
        "(`jnp.ones(3, jnp.float32)`).",
        wrong=False,
    )


def debugging(facts: Facts) -> Iterator[Finding]:
    """Debug mode left on."""
    if facts.environment.get("EQX_TORCH_DEBUG", "0") in ("", "0"):
        return
    yield Finding(
        "EQX_TORCH_DEBUG is on.",
        "Torch calls then copy their inputs and compare them with the copies, to find functions "
        "that keep or change what is not theirs. This takes time and memory.",
        "Unset EQX_TORCH_DEBUG once the error is found.",
        wrong=False,
    )


def forking(facts: Facts) -> Iterator[Finding]:
    """Processes that are copies of one in which JAX has threads."""
    if facts.start_method != "fork":
        return
    yield Finding(
        "multiprocessing starts processes by fork, Python's default here.",
        "JAX and torch have threads, and a forked process has their locks without the threads "
        "that would release them: it may hang. Workers of a torch DataLoader are such processes.",
        'If the program starts processes, call `multiprocessing.set_start_method("forkserver")` '
        'first, or pass `multiprocessing_context="forkserver"` to the DataLoader.',
        wrong=False,
    )


CHECKS: tuple[Check, ...] = (
    versions,
    backend,
    torch_without_gpu,
    jax_without_gpu,
    preallocation,
    threads,
    simulated_devices,
    wide_dtypes,
    debugging,
    forking,
)


def _jax_on_gpu(facts: Facts) -> bool:
    return facts.jax_platform in ("cuda", "rocm")


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"
