"""What `python -m eqx_torch` prints, and each thing that it finds."""

import dataclasses
import os
import subprocess
import sys

import jax
import pytest
import torch

import eqx_torch
from eqx_torch.__main__ import diagnose, Facts, gather, report


LAPTOP = Facts(
    versions={"python": "3.11.7", "eqx_torch": "0.1.0", "torch": "2.13.0+cpu"},
    unsupported=(),
    environment={},
    cores=8,
    memory=16 * 2**30,
    jax_devices=(1, "cpu"),
    jax_platform="cpu",
    jax_error=None,
    jax_platforms=None,
    x64=False,
    torch_platform="cpu",
    torch_gpus=(),
    torch_threads=8,
)
GPU = dataclasses.replace(
    LAPTOP,
    environment={"XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
    jax_devices=(1, "NVIDIA H200"),
    jax_platform="cuda",
    torch_platform="cuda",
    torch_gpus=(("NVIDIA H200", 139 * 2**30),),
)


def changed(facts, environment=None, **changes):
    environment = facts.environment if environment is None else environment
    return dataclasses.replace(facts, environment=environment, **changes)


HEALTHY = {
    "a laptop": LAPTOP,
    "as many threads as cores": changed(LAPTOP, jax_devices=(4, "cpu"), torch_threads=2),
    "one thread on one core": changed(LAPTOP, cores=1, torch_threads=1),
    "a GPU without preallocation": GPU,
    "a GPU with an allocator of CUDA's": changed(
        GPU, {"XLA_PYTHON_CLIENT_ALLOCATOR": "cuda_async"}
    ),
    "a GPU with virtual addresses": changed(GPU, {"XLA_PYTHON_CLIENT_ALLOCATOR": "VMM"}),
    "a GPU of which JAX takes half": changed(GPU, {"XLA_CLIENT_MEM_FRACTION": ".5"}),
    "the same by the older name": changed(GPU, {"XLA_PYTHON_CLIENT_MEM_FRACTION": ".5"}),
    "many torch threads beside a GPU": changed(GPU, jax_devices=(8, "H200"), torch_threads=64),
    "a GPU of AMD": changed(GPU, jax_platform="rocm", torch_platform="rocm"),
    "the CPU of a machine with a GPU": changed(GPU, jax_platform="cpu", jax_platforms="cpu"),
    "torch for GPUs without one": changed(LAPTOP, torch_platform="cuda"),
}


@pytest.mark.parametrize("facts", HEALTHY.values(), ids=HEALTHY)
def test_healthy_machines_have_no_findings(facts):
    assert diagnose(facts) == []
    assert report(facts, []).endswith("What looks wrong\n  nothing")


@pytest.mark.parametrize(
    ("facts", "row"),
    [
        (changed(GPU, {"XLA_CLIENT_MEM_FRACTION": ".5"}), "69.5 GiB for JAX from the start, 69.5"),
        (GPU, "both take it as they need it"),
    ],
)
def test_the_shares_of_a_gpus_memory_are_printed(facts, row):
    assert f"memory of a GPU  {row}" in report(facts, [])
    assert "memory of a GPU" not in report(LAPTOP, [])


# Facts, what is said of them, and what is to be set.
WRONG = {
    "versions": (
        changed(LAPTOP, unsupported=("jax 0.4.30 is installed, jax>=0.10 is needed",)),
        "jax 0.4.30 is installed",
        "pip install --upgrade eqx-torch",
    ),
    "no devices": (
        changed(LAPTOP, jax_platform="none", jax_error="Unable to initialize backend 'cuda'"),
        "JAX finds no devices: Unable to initialize backend 'cuda'",
        "JAX_PLATFORMS=cpu",
    ),
    "a TPU": (
        changed(LAPTOP, jax_platform="tpu", jax_devices=(4, "TPU v5e")),
        "JAX runs on tpu",
        "JAX_PLATFORMS=cpu",
    ),
    "torch for the CPU only": (
        changed(GPU, torch_platform="cpu", torch_gpus=()),
        "JAX runs on CUDA, but torch 2.13.0+cpu was built for cpu",
        "Install torch for CUDA",
    ),
    "torch for other GPUs": (
        changed(GPU, torch_platform="rocm", torch_gpus=()),
        "was built for rocm",
        "Install torch for CUDA",
    ),
    "torch for CUDA beside ROCm": (
        changed(GPU, jax_platform="rocm", torch_gpus=()),
        "JAX runs on ROCm, but torch 2.13.0+cpu was built for cuda",
        "Install torch for ROCm",
    ),
    "torch without a GPU": (
        changed(GPU, torch_gpus=()),
        "sees no GPU",
        "torch.cuda.init()",
    ),
    "JAX for the CPU only": (
        changed(GPU, jax_platform="cpu", jax_devices=(1, "cpu")),
        "torch sees 1 x NVIDIA H200, but JAX runs on the CPU",
        "pip install 'jax[cuda13]'",
    ),
    "JAX for the CPU only, beside ROCm": (
        changed(GPU, jax_platform="cpu", jax_devices=(1, "cpu"), torch_platform="rocm"),
        "JAX runs on the CPU",
        "pip install 'jax[rocm]'",
    ),
    "preallocation": (
        changed(GPU, {}),
        "JAX takes 75% of a GPU's memory when it starts (104.2 GiB), and torch allocates from the "
        "rest (34.8 GiB)",
        "XLA_PYTHON_CLIENT_PREALLOCATE=false",
    ),
    "the platform's allocator": (
        changed(GPU, {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}),
        "the platform's allocator",
        "XLA_PYTHON_CLIENT_ALLOCATOR=cuda_async",
    ),
    "two names of one fraction": (
        changed(GPU, {"XLA_CLIENT_MEM_FRACTION": ".4", "XLA_PYTHON_CLIENT_MEM_FRACTION": ".5"}),
        "are both set",
        "Unset XLA_PYTHON_CLIENT_MEM_FRACTION",
    ),
    "preallocation of a fraction": (
        changed(GPU, {"XLA_CLIENT_MEM_FRACTION": "0.9"}),
        "JAX takes 90% of a GPU's memory",
        "XLA_CLIENT_MEM_FRACTION=0.4 (XLA_PYTHON_CLIENT_MEM_FRACTION",
    ),
    "preallocation by the older name": (
        changed(GPU, {"XLA_PYTHON_CLIENT_MEM_FRACTION": ".95"}),
        "JAX takes 95% of a GPU's memory",
        "XLA_PYTHON_CLIENT_PREALLOCATE=false",
    ),
    "preallocation that is asked for": (
        changed(GPU, {"XLA_PYTHON_CLIENT_PREALLOCATE": "true"}),
        "JAX takes 75% of a GPU's memory",
        "XLA_PYTHON_CLIENT_PREALLOCATE=false",
    ),
    "threads": (
        changed(LAPTOP, jax_devices=(8, "cpu")),
        "8 CPU device(s), each with 8 torch threads: 64 threads on 8 core(s).",
        "`torch.set_num_threads(1)` when the program starts, or set OMP_NUM_THREADS=1",
    ),
    "threads of which some fit": (
        changed(LAPTOP, jax_devices=(3, "cpu")),
        "3 CPU device(s), each with 8 torch threads: 24 threads on 8 core(s).",
        "`torch.set_num_threads(2)`",
    ),
    "threads of one device": (
        changed(LAPTOP, cores=1, torch_threads=64),
        "1 CPU device(s), each with 64 torch threads: 64 threads on 1 core(s).",
        "OMP_NUM_THREADS=1",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_each_finding_is_made_alone_and_printed(case):
    facts, what, remedy = WRONG[case]
    (finding,) = diagnose(facts)
    assert what in finding.what
    assert remedy in finding.remedy
    assert finding.why.endswith(".")
    text = " ".join(report(facts, [finding]).split())
    shown = f"What looks wrong - {finding.what} {finding.why} -> {finding.remedy}"
    assert text.endswith(" ".join(shown.split()))


def test_the_facts_are_those_of_this_process(monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "true")
    facts = gather()
    assert facts.environment["XLA_PYTHON_CLIENT_PREALLOCATE"] == "true"
    assert facts.versions["eqx_torch"] == eqx_torch.__version__
    assert facts.versions["jax"] == jax.__version__
    # Which build it is, `+cu130`, is not always part of what is installed by pip's account.
    assert facts.versions["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    assert facts.unsupported == ()
    assert (facts.jax_devices[0], facts.jax_platform, facts.jax_error) == (8, "cpu", None)
    assert (facts.torch_threads, facts.x64) == (1, False)
    assert facts.environment["XLA_FLAGS"] == os.environ["XLA_FLAGS"]
    assert 1 <= facts.cores <= os.cpu_count()


def run(**environment):
    """The diagnosis of a process with these variables, and no others that matter."""
    given = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_", "OMP_"))}
    program = [sys.executable, "-W", "error", "-m", "eqx_torch"]
    return subprocess.run(
        program, env={**given, **environment}, capture_output=True, text=True, timeout=120
    )


@pytest.mark.slow
def test_a_process_with_nothing_wrong():
    done = run(JAX_PLATFORMS="cpu", OMP_NUM_THREADS="1", JAX_ENABLE_X64="1")
    assert (done.returncode, done.stderr) == (0, "")
    assert "What looks wrong\n  nothing" in done.stdout
    assert f"  jax        {jax.__version__}\n" in done.stdout
    assert "JAX_ENABLE_X64   1\n" in done.stdout
    assert "  jax    1 x cpu\n" in done.stdout
    assert "torch threads  1 for each device" in done.stdout
    assert "  64-bit dtypes  kept\n" in done.stdout


@pytest.mark.slow
def test_a_process_with_too_many_threads():
    done = run(JAX_PLATFORMS="cpu", OMP_NUM_THREADS=f"{os.cpu_count()}", JAX_NUM_CPU_DEVICES="8")
    assert done.returncode == 1, done.stderr
    assert f"8 CPU device(s), each with {os.cpu_count()} torch threads" in done.stdout
    assert "torch.set_num_threads(1)" in done.stdout


@pytest.mark.slow
def test_a_process_in_which_jax_does_not_start():
    done = run(JAX_PLATFORMS="nonesuch", OMP_NUM_THREADS="1")
    assert done.returncode == 1, done.stderr
    assert "JAX finds no devices" in done.stdout
    assert "nonesuch" in done.stdout
