"""The benchmark of tracing and the example of typed calls run."""

import os
import subprocess
import sys
from pathlib import Path

import jax

from .benchmarks import typed_trace
from .helpers import assert_trees_equal


ROOT = Path(__file__).parent.parent


def test_the_benchmark_compares_the_same_traces():
    annotated, explicit = typed_trace.models().values()
    assert typed_trace.trace(annotated, 3)[0] == typed_trace.trace(explicit, 3)[0]
    assert typed_trace.trace(annotated, 3)[0] == jax.ShapeDtypeStruct((3, 10), "float32")
    arguments = [jax.numpy.ones(shape) for shape in ((3, 784), (1,), (10,))]
    assert_trees_equal(annotated(*arguments), explicit(*arguments))


def test_figures_are_medians():
    figures = typed_trace.measure(3)
    assert set(figures) == {"annotations", "output_shapes", "added", "repeats"}
    assert figures["annotations"] > 0


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
