"""Every test sees eight CPU devices, strict dtype promotion, and one torch thread a device."""

import os


# JAX reads both when it is first imported.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)

import zlib
from collections.abc import Callable, Iterator

import hypothesis
import jax
import pytest
import torch

from eqx_torch import check_errors
from eqx_torch._call import primitive
from eqx_torch._program import TAPES


jax.config.update("jax_numpy_dtype_promotion", "strict")
torch.set_num_threads(1)
hypothesis.settings.register_profile("eqx_torch", deadline=None, derandomize=True)
hypothesis.settings.load_profile("eqx_torch")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Gradients are the same whatever becomes of the recorded graphs; see the Makefile."""
    parser.addoption(
        "--tape",
        choices=("off", "0", "1"),
        help="records no graphs, or keeps at most so many of a program",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Applies `--tape`."""
    tape = config.getoption("--tape")
    if tape == "off":
        primitive.is_recorded = lambda program: False
    elif tape is not None:
        TAPES.last_limit = int(tape)


@pytest.fixture(autouse=True)
def no_error_is_left() -> Iterator[None]:
    """An error on one of several devices that a test did not expect fails that test."""
    yield
    check_errors()


@pytest.fixture
def getkey(request: pytest.FixtureRequest) -> Callable[[], jax.Array]:
    """A function whose every call returns a new PRNG key; torch is seeded alike.

    The seed comes from the test's name, so a test draws the same numbers wherever it runs; a
    failing test's report shows it.
    """
    seed = zlib.crc32(request.node.nodeid.encode())
    request.node.add_report_section("call", "seed", f"getkey and torch were seeded with {seed}")
    torch.manual_seed(seed)
    key = jax.random.key(seed)

    def next_key() -> jax.Array:
        nonlocal key
        key, subkey = jax.random.split(key)
        return subkey

    return next_key


@pytest.fixture
def x64() -> Iterator[None]:
    """Turns on 64-bit dtypes for one test."""
    with jax.enable_x64(True):
        yield
