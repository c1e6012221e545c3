"""Every test sees eight CPU devices, strict dtype promotion, and one torch thread a device."""

import os


# JAX reads both when it is first imported.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)

import collections
import zlib
from collections.abc import Callable, Iterator
from typing import Any

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


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a test marked `covering`, what shows no new value of a parameter is slow.

    So is what goes beyond a number that the mark names.
    """
    cases = collections.defaultdict(list)
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        if "covering" in marks and not marks & {"slow", "sweep"}:
            cases[item.nodeid.partition("[")[0]].append(item)
    for several in cases.values():
        kept = _covering(several)
        most = next(iter(several[0].get_closest_marker("covering").args), len(kept))
        kept = kept[:: -(-len(kept) // most)]
        for item in several:
            if item not in kept:
                item.add_marker(pytest.mark.slow)


def _covering(items: list[Any]) -> list[Any]:
    """The case with the most unseen values, again and again until all are seen."""
    # Pytest tells the value of each decorator apart by its id, and has no public name for these.
    unseen = {item: set(enumerate(item.callspec._idlist)) for item in items}
    kept = []
    while any(unseen.values()):
        kept.append(max(unseen, key=lambda item: len(unseen[item])))
        seen = unseen.pop(kept[-1])
        unseen = {item: values - seen for item, values in unseen.items()}
    return kept


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
