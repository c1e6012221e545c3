"""One warning where a dependency has a version that the package's metadata does not ask for."""

import importlib.metadata
import os
import subprocess
import sys
import warnings

import pytest

from eqx_torch._versions import unsupported, warn_of_unsupported


METADATA = """Metadata-Version: 2.4
Name: {name}
Version: 1.0
Requires-Dist: jax>=0.10
Requires-Dist: torch<3,>=2.11
Requires-Dist: pytest>=99; extra == 'dev'
Requires-Dist: pytest>=99; python_version < '3'
Provides-Extra: dev
"""


def write_metadata(folder, name, text=METADATA):
    info = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(text.format(name=name))


@pytest.fixture
def sample(tmp_path, monkeypatch):
    write_metadata(tmp_path, "sample-of-versions")
    monkeypatch.syspath_prepend(str(tmp_path))
    return "sample-of-versions"


@pytest.fixture
def install(monkeypatch):
    """Gives distributions these versions, and takes away all others."""

    def install(**versions):
        def version_of(name):
            if name not in versions:
                raise importlib.metadata.PackageNotFoundError(name)
            return versions[name]

        monkeypatch.setattr(importlib.metadata, "version", version_of)

    return install


@pytest.mark.parametrize(
    "versions",
    [
        {"jax": "0.10.0", "torch": "2.11.0"},
        {"jax": "0.12.0.1", "torch": "2.14.1+cu130"},
        {"jax": "0.10.0.dev20260101", "torch": "2.11.0a0+git145a3a7"},
        {"jax": "0.10.0rc1"},
        {},
    ],
    ids=["floor", "newest", "before a release", "one is not installed", "nothing is installed"],
)
def test_supported_versions(sample, install, versions):
    install(**versions)
    assert unsupported(sample) == []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_unsupported(sample)


def test_each_unsupported_version_is_named(sample, install):
    install(jax="0.9.2", torch="3.0.0+cpu")
    jax, torch = unsupported(sample)
    assert jax == "jax 0.9.2 is installed, jax>=0.10 is needed"
    assert torch == "torch 3.0.0+cpu is installed, torch<3,>=2.11 is needed"


def test_one_warning_for_all(sample, install):
    install(jax="0.9.2", torch="2.10.1")
    with pytest.warns(UserWarning, match="does not support") as caught:
        warn_of_unsupported(sample)
    (warning,) = caught
    assert str(warning.message) == (
        "sample-of-versions does not support what it runs with: jax 0.9.2 is installed, jax>=0.10 "
        "is needed; torch 2.10.1 is installed, torch<3,>=2.11 is needed. It may fail or give "
        "wrong results. Run `pip install 'jax>=0.10' 'torch<3,>=2.11'`."
    )


def test_without_metadata_nothing_is_known():
    assert unsupported("not-installed-anywhere") == []


@pytest.mark.parametrize("floor", ["99", "0"])
def test_importing_warns_once_and_before_the_rest(tmp_path, floor):
    """With a version so old that a name is missing, the warning has to precede the ImportError."""
    write_metadata(tmp_path, "eqx-torch", METADATA.replace("jax>=0.10", f"jax>={floor}"))
    program = """
import sys, warnings

def show(message, *_):
    print("jax._src" in sys.modules, message)

warnings.showwarning = show
import eqx_torch, eqx_torch
"""
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    ran = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": path},
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    lines = ran.stdout.splitlines()
    if floor == "0":
        assert lines == []
        return
    (line,) = lines
    assert line.startswith("False eqx-torch does not support what it runs with: jax ")
    assert line.endswith("Run `pip install 'jax>=99' 'torch<3,>=2.11'`.")


def test_the_environment_of_the_tests_is_supported():
    assert unsupported() == []
