"""Runs of Python in a process of their own, where a hang is a failure after a time-out."""

import os
import subprocess
import sys
from pathlib import Path


ROOT = Path(__file__).parents[2]
DEVICES = "--xla_force_host_platform_device_count=8"


def run_tests(file: str, timeout: float) -> None:
    """Runs a file under `tests/`, of a name that pytest does not collect."""
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-o", "addopts=", "--tb=short"]
    done = _run(["-m", "pytest", *options, str(ROOT / "tests" / file)], timeout)
    assert done.returncode == 0, done.stdout + done.stderr


def run_script(script: str, *arguments: str, timeout: float, status: int = 0) -> tuple[str, str]:
    """What a script, which ends with this status, prints to standard output and standard error."""
    return _output(["-c", script, *arguments], timeout, status)


def run_file(path: Path, *arguments: str, timeout: float) -> tuple[str, str]:
    """What a file prints, where a script would not do: child processes import it."""
    return _output([str(path), *arguments], timeout)


def _output(arguments: list[str], timeout: float, status: int = 0) -> tuple[str, str]:
    done = _run(arguments, timeout)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout, done.stderr


def _run(arguments: list[str], timeout: float) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    variables = {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": DEVICES}
    environment = {**os.environ, **variables}
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=timeout, cwd=ROOT, env=environment
        )
    except subprocess.TimeoutExpired as expired:
        output = b"".join(filter(None, (expired.stdout, expired.stderr))).decode()
        raise AssertionError(f"still running after {timeout} s:\n{output}") from None
