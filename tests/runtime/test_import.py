"""Importing the package changes nothing outside of it."""

import subprocess
import sys

import eqx_torch


PROGRAM = """
import os, random, sys, threading, warnings
import equinox, jax, jaxtyping, numpy, torch

def settings():
    return {
        "environment": dict(os.environ),
        "jax": dict(jax.config.values),
        "torch dtype": torch.get_default_dtype(),
        "torch device": torch.get_default_device(),
        "torch threads": torch.get_num_threads(),
        "torch grad": torch.is_grad_enabled(),
        "torch random": torch.random.get_rng_state().tolist(),
        "random": random.getstate(),
        "warnings": list(warnings.filters),
        "threads": threading.active_count(),
        "sys.path": list(sys.path),
    }

before = settings()
import eqx_torch
after = settings()
changed = [name for name in before if before[name] != after[name]]
assert not changed, changed
"""


def test_importing_changes_no_setting():
    subprocess.run([sys.executable, "-c", PROGRAM], check=True)


def test_version():
    assert eqx_torch.__version__.count(".") == 2
