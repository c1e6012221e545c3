"""`python -m eqx_torch`: what this installation runs on, and what looks wrong with it.

The exit status is 1 if something does, else 0. The facts about the process are gathered once, and
what looks wrong follows from them alone, so that it can be tested with made-up facts. A finding
says what is, why it matters and what exactly to set.
"""

import contextlib
import dataclasses
import importlib.metadata
import os
import platform
import sys
import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import torch

from . import __version__
from ._versions import unsupported


PACKAGES = ("jax", "jaxlib", "equinox", "jaxtyping", "torch")
VARIABLES = (
    "EQX_TORCH_DEBUG",
    "JAX_PLATFORMS",
    "JAX_NUM_CPU_DEVICES",
    "JAX_ENABLE_X64",
    "XLA_FLAGS",
    "XLA_PYTHON_CLIENT_PREALLOCATE",
    "XLA_CLIENT_MEM_FRACTION",
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
    "XLA_PYTHON_CLIENT_ALLOCATOR",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "CUDA_VISIBLE_DEVICES",
)
_MARKS = ("  - ", "    ", "    -> ")
_DEFAULT_FRACTION = 0.75  # of a GPU's memory: what JAX takes when it starts
_TAKING_AS_NEEDED = ("cuda_async", "vmm", "address", "platform")  # allocators of JAX's


@dataclasses.dataclass(frozen=True)
class Facts:
    """An interpreter, its libraries and its machine.

    Attributes:
        versions: of Python, of this package and of those that it needs.
        unsupported: a sentence for each package whose version is not supported.
        environment: those of `VARIABLES` that are set.
        cores: the cores that this process may use.
        memory: the bytes of main memory.
        jax_devices: what JAX runs on by default: the number and the kind of its devices.
        jax_platform: "cpu", "cuda", "rocm" or another of JAX's platforms, "none" after an error.
        jax_error: why JAX finds no devices, if it does not.
        jax_platforms: the platforms that JAX was told to use, by `JAX_PLATFORMS`; None: any.
        x64: whether JAX has 64-bit dtypes.
        torch_platform: what torch was built for: "cpu", "cuda" or "rocm".
        torch_gpus: the GPUs that torch sees, with the bytes of their memory.
        torch_threads: the threads with which torch computes one operation on the CPU.
    """

    versions: Mapping[str, str]
    unsupported: tuple[str, ...]
    environment: Mapping[str, str]
    cores: int
    memory: int
    jax_devices: tuple[int, str]
    jax_platform: str
    jax_error: str | None
    jax_platforms: str | None
    x64: bool
    torch_platform: str
    torch_gpus: tuple[tuple[str, int], ...]
    torch_threads: int


def gather() -> Facts:
    """The facts about this process. Starts JAX's backend."""
    environment = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    # The memory of a GPU is left to the programs that run on it.
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    installed = {package: importlib.metadata.version(package) for package in PACKAGES}
    config: Any = jax.config
    return Facts(
        versions={
            "python": platform.python_version(),
            "eqx_torch": __version__,
            **installed,
        },
        unsupported=tuple(unsupported()),
        environment=environment,
        cores=_cores(),
        memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        **_jax_devices(),
        jax_platforms=config.jax_platforms or None,
        x64=config.jax_enable_x64,
        torch_platform="rocm" if torch.version.hip else "cuda" if torch.version.cuda else "cpu",
        torch_gpus=tuple(
            (gpu.name, gpu.total_memory)
            for gpu in map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
        ),
        torch_threads=torch.get_num_threads(),
    )


def _cores() -> int:
    """The cores that this process may run on, or that its container pays for if those are fewer."""
    affinity = getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count() or 1))
    cores = len(affinity(0))
    with contextlib.suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        cores = max(1, min(cores, round(int(quota) / int(period))))  # int("max") raises
    return cores


def _jax_devices() -> dict[str, Any]:
    try:
        first, *_ = devices = jax.devices()
    except RuntimeError as error:
        return {"jax_devices": (0, ""), "jax_platform": "none", "jax_error": str(error)}
    gpu = "rocm" if "rocm" in first.client.platform_version.lower() else "cuda"
    return {
        "jax_devices": (len(devices), first.device_kind),
        "jax_platform": gpu if first.platform == "gpu" else first.platform,
        "jax_error": None,
    }


class Finding(NamedTuple):
    """What is wrong, why it matters, and what to set."""

    what: str
    why: str
    remedy: str


def diagnose(facts: Facts) -> list[Finding]:
    """All that looks wrong."""
    needed = "Names that eqx_torch needs may be missing there, or mean something else."
    update = "Run `pip install --upgrade eqx-torch`, which installs versions that are supported."
    unsupported = [Finding(f"{sentence}.", needed, update) for sentence in facts.unsupported]
    checks = (_backend, _torch_without_gpu, _jax_without_gpu, *_MEMORY, _threads)
    return unsupported + [finding for check in checks if (finding := check(facts))]


def _backend(facts: Facts) -> Finding | None:
    """JAX without devices, or on devices that torch functions do not run on."""
    if facts.jax_error is not None:
        return Finding(
            f"JAX finds no devices: {facts.jax_error}",
            "No JAX program can run.",
            "Set JAX_PLATFORMS=cpu to run on the CPU, or repair what the message names.",
        )
    if facts.jax_platform in ("cpu", "cuda", "rocm"):
        return None
    return Finding(
        f"JAX runs on {facts.jax_platform}.",
        "JAX programs that call torch run on the CPU, CUDA and ROCm only.",
        'Set JAX_PLATFORMS=cpu, or call torch under `jax.default_device(jax.devices("cpu")[0])`.',
    )


def _torch_without_gpu(facts: Facts) -> Finding | None:
    name = {"cuda": "CUDA", "rocm": "ROCm"}.get(facts.jax_platform)
    built = facts.torch_platform == facts.jax_platform
    if name is None or (built and facts.torch_gpus):
        return None
    lacks = "it, but sees no GPU" if built else facts.torch_platform
    see = (
        "See what `python -c 'import torch; torch.cuda.init()'` says: most often the driver is "
        "older than torch needs;"
    )
    install = f"Install torch for {name} (https://pytorch.org/get-started/locally),"
    return Finding(
        f"JAX runs on {name}, but torch {facts.versions['torch']} was built for {lacks}.",
        "JAX hands arrays on the GPU to torch, which fails where torch cannot use that GPU.",
        f"{see if built else install} or set JAX_PLATFORMS=cpu to run JAX on the CPU too.",
    )


def _jax_without_gpu(facts: Facts) -> Finding | None:
    if facts.jax_platform != "cpu" or facts.jax_platforms is not None or not facts.torch_gpus:
        return None
    extra = "rocm" if facts.torch_platform == "rocm" else "cuda13"
    return Finding(
        f"torch sees {len(facts.torch_gpus)} x {facts.torch_gpus[0][0]}, but JAX runs on the CPU.",
        "Torch functions run where JAX has their arguments, so they do not use the GPU either.",
        f"Install JAX for the GPU (`pip install 'jax[{extra}]'`). If it is installed, see what "
        "`python -c 'import jax; jax.devices(\"gpu\")'` says. If the CPU is meant, set "
        "JAX_PLATFORMS=cpu.",
    )


def _preallocation(facts: Facts) -> Finding | None:
    """JAX taking the memory of a GPU that torch allocates from too."""
    fraction = _fraction(facts)
    if fraction is None or fraction < _DEFAULT_FRACTION:
        return None
    jax_share, torch_share = _shares(facts, fraction)
    return Finding(
        f"JAX takes {fraction:.0%} of a GPU's memory when it starts ({jax_share}), and torch "
        f"allocates from the rest ({torch_share}).",
        "Torch then runs out of memory while JAX holds memory that it does not use. In torch's "
        "part are the activations and graphs of torch functions.",
        "Set XLA_PYTHON_CLIENT_PREALLOCATE=false in the environment, and JAX takes memory as it "
        "needs it; or XLA_CLIENT_MEM_FRACTION=0.4 (XLA_PYTHON_CLIENT_MEM_FRACTION in older "
        "versions), the part for parameters, the optimiser's state and JAX's own work.",
    )


def _both_fractions(facts: Facts) -> Finding | None:
    """One of which JAX does not read."""
    newer, older = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"
    if not facts.torch_gpus or not {newer, older} <= facts.environment.keys():
        return None
    return Finding(
        f"{newer} and {older} are both set.",
        "They are two names of one setting, and JAX refuses both or reads one of them.",
        f"Unset {older}, the old name.",
    )


def _waiting_allocator(facts: Facts) -> Finding | None:
    if facts.jax_platform not in ("cuda", "rocm") or _allocator(facts) != "platform":
        return None
    return Finding(
        "JAX allocates with the platform's allocator.",
        "It frees memory when a program ends, and so waits for the GPU at the end of each.",
        "Unset XLA_PYTHON_CLIENT_ALLOCATOR and set XLA_PYTHON_CLIENT_PREALLOCATE=false; or set "
        "XLA_PYTHON_CLIENT_ALLOCATOR=cuda_async.",
    )


_MEMORY = (_preallocation, _both_fractions, _waiting_allocator)


def _allocator(facts: Facts) -> str:
    return facts.environment.get("XLA_PYTHON_CLIENT_ALLOCATOR", "").lower()


def _fraction(facts: Facts) -> float | None:
    """The part of a GPU's memory that JAX takes when it starts; None if it takes none."""
    given = facts.environment
    as_needed = given.get("XLA_PYTHON_CLIENT_PREALLOCATE") in ("false", "False", "0")
    as_needed = as_needed or _allocator(facts) in _TAKING_AS_NEEDED
    if facts.jax_platform not in ("cuda", "rocm") or not facts.torch_gpus or as_needed:
        return None
    older = given.get("XLA_PYTHON_CLIENT_MEM_FRACTION")
    return float(given.get("XLA_CLIENT_MEM_FRACTION") or older or _DEFAULT_FRACTION)


def _shares(facts: Facts, fraction: float) -> tuple[str, str]:
    """What JAX and torch have of the first GPU, or all of it if JAX takes more than there is."""
    total = facts.torch_gpus[0][1]
    own = min(fraction, 1.0) * total
    return _gibibytes(own), _gibibytes(total - own)


def _gpu_memory(facts: Facts) -> dict[str, str]:
    """A row on who has which part of it."""
    if facts.jax_platform not in ("cuda", "rocm") or not facts.torch_gpus:
        return {}
    fraction = _fraction(facts)
    if fraction is None:
        return {"memory of a GPU": "both take it as they need it"}
    jax_share, torch_share = _shares(facts, fraction)
    return {"memory of a GPU": f"{jax_share} for JAX from the start, {torch_share} for torch"}


def _threads(facts: Facts) -> Finding | None:
    """More threads than cores."""
    devices, each = facts.jax_devices[0], facts.torch_threads
    if facts.jax_platform != "cpu" or each == 1 or devices * each <= facts.cores:
        return None
    fitting = max(1, facts.cores // devices)
    return Finding(
        f"JAX has {devices} CPU device(s), each with {each} torch threads: {devices * each} "
        f"threads on {facts.cores} core(s).",
        "Each device calls torch from a thread of its own, and torch starts its threads for each "
        "of them. Threads that wait for a core make all of them slow.",
        f"Call `torch.set_num_threads({fitting})` when the program starts, or set "
        f"OMP_NUM_THREADS={fitting} in the environment.",
    )


def report(facts: Facts, findings: Iterable[Finding]) -> str:
    """The facts, and then what is wrong with them."""
    count, kind = facts.jax_devices
    jax_runs_on = f"{count} x {kind}" + f" ({facts.jax_platform})" * (kind != facts.jax_platform)
    gpus = ", ".join(f"{name} ({_gibibytes(size)})" for name, size in facts.torch_gpus)
    tables = {
        "Versions": facts.versions,
        "Devices": {
            "jax": "none" if facts.jax_error else jax_runs_on,
            "torch": f"built for {facts.torch_platform}, {gpus or 'no GPU'}",
        },
        "Memory and threads": {
            "main memory": _gibibytes(facts.memory),
            **_gpu_memory(facts),
            "cores": facts.cores,
            "torch threads": f"{facts.torch_threads} for each device that calls torch",
            "64-bit dtypes": "kept" if facts.x64 else "converted to 32 bits (jax_enable_x64=False)",
        },
        "Environment": facts.environment or {"none of its variables": "is set"},
    }
    lines = []
    for title, rows in tables.items():
        width = max(map(len, rows)) + 2
        lines += [title, *(f"  {name:<{width}}{value}" for name, value in rows.items()), ""]
    lines.append("What looks wrong")
    parts = [part for finding in findings for part in zip(_MARKS, finding, strict=True)]
    lines += [_wrapped(*part) for part in parts] or ["  nothing"]
    return "\n".join(lines)


def _gibibytes(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"


def _wrapped(mark: str, text: str) -> str:
    lines = textwrap.wrap(text, 80, break_long_words=False, break_on_hyphens=False)
    return mark + f"\n{' ' * len(mark)}".join(lines)


def main() -> int:
    """Prints the diagnosis of this process, and gives the exit status."""
    facts = gather()
    findings = diagnose(facts)
    print(report(facts, findings))
    return int(bool(findings))


if __name__ == "__main__":
    sys.exit(main())
