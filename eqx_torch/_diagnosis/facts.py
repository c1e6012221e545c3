"""What the diagnosis looks at: the facts about an interpreter and its machine.

They are gathered once, and the checks see nothing else, so that each can be tested with made-up
facts.
"""

import contextlib
import dataclasses
import importlib.metadata
import multiprocessing
import os
import platform
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import torch

from .. import __version__
from .._versions import unsupported


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
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "CUDA_VISIBLE_DEVICES",
)


@dataclasses.dataclass(frozen=True)
class Facts:
    """An interpreter, its libraries and its machine.

    Attributes:
        versions: of Python, of this package and of those that it needs.
        unsupported: a sentence for each package whose version is not supported.
        environment: those of `VARIABLES` that are set.
        cores: the cores that this process may use.
        memory: the bytes of main memory, None if unknown.
        jax_devices: what JAX runs on by default: the number and the kind of its devices.
        jax_platform: "cpu", "cuda", "rocm" or another of JAX's platforms, "none" after an error.
        jax_error: why JAX finds no devices, if it does not.
        jax_platforms: the platforms that JAX was told to use, by `JAX_PLATFORMS`; None: any.
        x64: whether JAX has 64-bit dtypes.
        torch_platform: what torch was built for: "cpu", "cuda" or "rocm".
        torch_gpus: the GPUs that torch sees, with the bytes of their memory.
        torch_threads: the threads with which torch computes one operation on the CPU.
        start_method: how `multiprocessing` starts processes.
    """

    versions: Mapping[str, str]
    unsupported: tuple[str, ...]
    environment: Mapping[str, str]
    cores: int
    memory: int | None
    jax_devices: tuple[int, str]
    jax_platform: str
    jax_error: str | None
    jax_platforms: str | None
    x64: bool
    torch_platform: str
    torch_gpus: tuple[tuple[str, int], ...]
    torch_threads: int
    start_method: str


def gather() -> Facts:
    """The facts about this process. Starts JAX's backend."""
    environment = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    config: Any = jax.config
    return Facts(
        versions=_versions(),
        unsupported=tuple(unsupported()),
        environment=environment,
        cores=_cores(),
        memory=_memory(),
        **_jax_devices(),
        jax_platforms=config.jax_platforms or None,
        x64=config.jax_enable_x64,
        torch_platform=_torch_platform(),
        torch_gpus=_torch_gpus(),
        torch_threads=torch.get_num_threads(),
        start_method=multiprocessing.get_start_method(),
    )


def _versions() -> dict[str, str]:
    installed = {package: importlib.metadata.version(package) for package in PACKAGES}
    return {"python": platform.python_version(), "eqx_torch": __version__, **installed}


def _cores() -> int:
    """The cores that this process may run on, or that its container pays for if those are fewer."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, min(cores, round(int(quota) / int(period))))  # int("max") raises
    return cores


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError):
        return None


def _jax_devices() -> dict[str, Any]:
    try:
        with _without_preallocation():
            devices = jax.devices()
    except Exception as error:
        return {"jax_devices": (0, ""), "jax_platform": "none", "jax_error": str(error)}
    kind, version = devices[0].device_kind, devices[0].client.platform_version.lower()
    name = devices[0].platform
    if name == "gpu":
        name = "rocm" if "rocm" in version else "cuda"
    return {"jax_devices": (len(devices), kind), "jax_platform": name, "jax_error": None}


@contextlib.contextmanager
def _without_preallocation() -> Iterator[None]:
    """Leaves a GPU's memory to the programs that run on it while JAX starts."""
    name = "XLA_PYTHON_CLIENT_PREALLOCATE"
    before = os.environ.get(name)
    os.environ[name] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _torch_platform() -> str:
    if torch.version.hip:
        return "rocm"
    return "cuda" if torch.version.cuda else "cpu"


def _torch_gpus() -> tuple[tuple[str, int], ...]:
    if not torch.cuda.is_available():
        return ()
    found = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return tuple((gpu.name, gpu.total_memory) for gpu in found)
