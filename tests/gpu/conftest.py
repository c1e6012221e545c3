"""Exact arithmetic, and no quiet fall-back to the CPU where a GPU was asked for."""

import os

import jax
import pytest
import torch


def pytest_configure(config):
    """`make test-gpu` asks for CUDA; JAX itself fails where it does not find it."""
    if "cuda" in os.environ.get("JAX_PLATFORMS", ""):
        assert jax.default_backend() == "gpu"
        if not torch.cuda.is_available():
            raise pytest.UsageError("JAX has a CUDA device, but torch sees none")


def pytest_report_header(config):
    gpu = jax.devices()[0].device_kind if jax.default_backend() == "gpu" else "none"
    return f"GPU: {gpu}; jax {jax.__version__}, torch {torch.__version__}"


@pytest.fixture(autouse=True)
def full_precision():
    """Neither library rounds the operands of float32 products to 19 bits (TF32)."""
    cudnn = torch.backends.cudnn
    before, cudnn.allow_tf32 = cudnn.allow_tf32, False
    with jax.default_matmul_precision("highest"):
        yield
    cudnn.allow_tf32 = before
