"""The page on releases names the versions that the package asks for and that the tests run with."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version


ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "releases.md").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MAKEFILE = (ROOT / "Makefile").read_text()
ROWS = {
    cells[0]: cells[1:]
    for line in PAGE.splitlines()
    if line.startswith("| ")
    for cells in [[cell.strip() for cell in line.strip("|").split("|")]]
}


def _pinned(name: str, file: str = "constraints.txt") -> str:
    return re.search(rf"^{name}==(.*)$", (ROOT / file).read_text(), re.MULTILINE)[1]


@pytest.mark.parametrize("name", ["JAX", "torch", "Equinox"])
def test_versions_are_those_of_the_metadata(name):
    oldest, newest, exact = ROWS[name]
    (required,) = (r for r in map(Requirement, PROJECT["dependencies"]) if r.name == name.lower())
    assert exact == _pinned(name.lower())
    assert Version(oldest) in required.specifier
    assert Version(newest) in required.specifier
    if name != "Equinox":  # whose private names are not used
        major, minor = Version(newest).release[:2]
        assert Version(f"{major}.{minor + 1}") not in required.specifier


def test_versions_are_those_of_the_make_targets():
    assert ROWS["JAX"][0] == _pinned("jax", "constraints-floor.txt")
    assert f"'jax=={ROWS['JAX'][1]}.*'" in MAKEFILE
    assert f"torch=={ROWS['torch'][1]}." in MAKEFILE
    assert f"PYTHON_NEWEST ?= python{ROWS['Python'][1]}" in MAKEFILE
    assert PROJECT["requires-python"] == f">={ROWS['Python'][0]}"


@pytest.mark.parametrize("name", ["jax", "torch"])
def test_the_page_on_installation_asks_for_the_same(name):
    page = (ROOT / "docs" / "installation.md").read_text()
    (required,) = (r for r in map(Requirement, PROJECT["dependencies"]) if r.name == name)
    asked = re.findall(rf'"({name}(?:\[\S+\])?[<>]\S+)"', page)
    assert len(asked) == 3  # for CPUs, and GPUs of two makers
    assert {Requirement(text).specifier for text in asked} == {required.specifier}
