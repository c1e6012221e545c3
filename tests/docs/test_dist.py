"""The wheel and the source distribution, and the wheel in an environment of its own."""

import email.parser
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import eqx_torch


ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder with both, the wheel built from the source distribution."""
    folder = tmp_path_factory.mktemp("dist")
    program = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def _only(folder: Path, pattern: str) -> Path:
    (path,) = folder.glob(pattern)
    return path


def test_wheel_holds_the_package_and_nothing_else(built):
    with zipfile.ZipFile(_only(built, "*.whl")) as wheel:
        names = set(wheel.namelist())
    info = f"eqx_torch-{eqx_torch.__version__}.dist-info"
    package = {str(path.relative_to(ROOT)) for path in (ROOT / "eqx_torch").rglob("*.py")}
    expected = package | {"eqx_torch/py.typed"}
    assert {name for name in names if not name.startswith(info)} == expected
    assert f"{info}/licenses/LICENSE" in names


def test_wheel_says_what_it_is(built):
    with zipfile.ZipFile(_only(built, "*-py3-none-any.whl")) as wheel:
        (path,) = (name for name in wheel.namelist() if name.endswith("/METADATA"))
        metadata = email.parser.Parser().parsestr(wheel.read(path).decode())
    assert metadata["Version"] == eqx_torch.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Description-Content-Type"] == "text/markdown"
    required = [r for r in metadata.get_all("Requires-Dist") if "extra ==" not in r]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert required == project["dependencies"]


def test_source_distribution_holds_what_the_tests_need(built):
    with tarfile.open(_only(built, "*.tar.gz")) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    needed = ["README.md", "LICENSE", "Makefile", "mkdocs.yml", "constraints.txt", "docs/index.md"]
    needed += ["tests/conftest.py", "examples/readme.py", "CHANGELOG.md", "eqx_torch/__init__.py"]
    assert set(needed) <= names


def test_changelog_has_a_section_for_the_version():
    text = (ROOT / "CHANGELOG.md").read_text()
    versions = re.findall(r"^## \[(.*?)\] - (?:unreleased|\d{4}-\d\d-\d\d)$", text, re.MULTILINE)
    assert versions[0] == eqx_torch.__version__


@pytest.mark.slow
def test_installed_wheel_works_without_a_compiler(built, tmp_path):
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    python = str(tmp_path / "venv" / "bin" / "python")
    install = [python, "-m", "pip", "install", "-q", "-c", str(ROOT / "constraints.txt")]
    subprocess.run([*install, str(_only(built, "*.whl"))], check=True, timeout=1200)
    environment = {"PATH": str(tmp_path / "venv" / "bin"), "HOME": str(tmp_path)}
    smoke = [python, "-I", str(Path(__file__).parent / "smoke.py"), eqx_torch.__version__]
    done = subprocess.run(
        smoke, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "ok\n"
    told = subprocess.run(
        [python, "-I", "-m", "eqx_torch"],
        cwd=tmp_path,
        env={**environment, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert told.returncode == 0, told.stdout
    assert f"eqx_torch {eqx_torch.__version__}" in " ".join(told.stdout.split())
