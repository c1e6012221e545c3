"""The example of typed calls runs."""

import os
import subprocess
import sys
from pathlib import Path


ROOT = Path(__file__).parents[2]


def test_the_example_runs():
    program = [sys.executable, "-W", "error", str(ROOT / "examples" / "typed_calls.py")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(program, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    one, eight, *message = done.stdout.splitlines()
    assert one == "one device: (16, 10, 32)"
    assert eight.startswith("eight devices: (16, 10, 32) P")
    assert message == [
        "Attention.forward: argument `mask` does not match its annotation.",
        "  annotation: Bool[Tensor, '#batch time time']",
        "  expected: Bool (#batch=16, time=10, time=10)",
        "  actual: bool (1, 9, 10)",
        "  dimension 1 (`time`) is 9, must be 10",
        "names bound in this call:",
        "  batch = 16, from argument `x`, dimension 0",
        "  time = 10, from argument `x`, dimension 1",
    ]
