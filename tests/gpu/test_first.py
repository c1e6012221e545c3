"""The script for the first quarter of an hour on a GPU works where there is none."""

import json
import os
import subprocess
import sys

import pytest

from .devices import ON_GPU
from .first import in_process, STEPS


pytestmark = pytest.mark.skipif(ON_GPU, reason="runs the tests of this folder")


def test_each_step_prints_a_line():
    command = [sys.executable, "-m", "tests.gpu.first", "--brief"]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ)
    lines = [json.loads(line) for line in ran.stdout.splitlines()]
    assert [line["step"] for line in lines] == ["versions", *STEPS]
    assert [line for line in lines if "error" in line] == []
    pairs = next(line for line in lines if line["step"] == "pairing")
    assert all(case["as expected"] for name, case in pairs.items() if ", " in name)


def test_a_step_that_fails_has_a_line_too():
    line = in_process("no such step", brief=True)
    assert line["step"] == "no such step"
    assert "KeyError" in line["said"]
