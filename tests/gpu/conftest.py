"""Exact arithmetic, and no quiet fall-back to the CPU where a GPU was asked for."""

import os
from pathlib import Path

import jax
import pytest
import torch


def pytest_configure(config):
    """Neither library fails where `make test-gpu` asks for a GPU and there is none."""
    if "cuda" in os.environ.get("JAX_PLATFORMS", ""):
        for library, found in (
            ("JAX", jax.default_backend() == "gpu"),
            ("torch", torch.cuda.is_available()),
        ):
            if not found:
                raise pytest.UsageError(f"CUDA was asked for, but {library} sees no device")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """On a CPU, where other tests show the same, these are slow."""
    if jax.default_backend() != "gpu":
        for item in items:
            if item.path.is_relative_to(Path(__file__).parent):
                item.add_marker(pytest.mark.slow)


def pytest_report_header(config):
    gpu = jax.devices()[0].device_kind if jax.default_backend() == "gpu" else "none"
    return f"GPU: {gpu}; jax {jax.__version__}, torch {torch.__version__}"


@pytest.fixture(autouse=True)
def full_precision():
    """Neither library rounds the operands of float32 products to 19 bits (TF32)."""
    cudnn = torch.backends.cudnn.flags(enabled=True, allow_tf32=False)
    with cudnn, jax.default_matmul_precision("highest"):
        yield
