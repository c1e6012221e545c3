"""Each example, smaller than it is shown, in a process of its own: what it claims holds.

`digits.py` and `readme.py` are tested with what they are about.
"""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from docs import notebooks

from ..helpers.run_blocks import included


ROOT = Path(__file__).parents[2]


def run(name: str, **settings: Any) -> dict[str, Any]:
    """What the `main` of an example returns; it also has to print, and no progress bar."""
    program = f"""
import ast
import json
from pathlib import *  # the settings may hold a path

from examples.{name} import main

print(json.dumps(main(**{settings})))
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        cwd=ROOT,
        env={key: value for key, value in os.environ.items() if key != "XLA_FLAGS"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    *printed, figures = done.stdout.strip().splitlines()
    assert printed
    assert "it/s" not in done.stderr  # is no terminal
    return json.loads(figures)


@pytest.fixture
def picture(tmp_path):
    """Where an example is to draw, which it has to do."""
    path = tmp_path / "out" / "picture.png"
    yield path
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_sentence_head(picture):
    figures = run("sentence_head", picture=picture, steps=100)
    assert figures["difference"] < 1e-5  # from torch's embeddings, whose norm is 1
    assert figures["accuracy"] > 0.7  # of four departments


@pytest.mark.slow
def test_forces(picture):
    coarse = run("forces", picture=picture, step=4.0, chunks=2, chunk=30)
    fine = run("forces", picture=picture, step=2.0, chunks=2, chunk=60)
    for start, one in coarse.items():
        # Velocity Verlet conserves an energy that differs from the true one by O(step**2): so the
        # drift is bounded, and half the step leaves a quarter of it.
        assert one["drift"] < 1e-3 * one["exchanged"]
        assert 3.5 < one["drift"] / fine[start]["drift"] < 4.5
    assert coarse["400 K"]["temperature"] > 3 * coarse["50 K"]["temperature"]
    assert coarse["400 K"]["displacement"] > 2 * coarse["50 K"]["displacement"]


@pytest.mark.slow
def test_neural_ode(picture):
    figures = run("neural_ode", picture=picture, steps=30, pieces=8)
    # The solver's tolerance is 1e-5 a step. The forward mode goes the same steps as the backward.
    assert figures["backsolve"] < 1e-3
    assert figures["forward"] < 1e-5
    assert figures["last loss"] < 0.2 * figures["first loss"]


@pytest.mark.slow
def test_ensemble(picture):
    figures = run("ensemble", picture=picture, members=5, steps=500)
    assert figures["loss"] < 3 * 0.1**2  # the noise's variance
    assert figures["error with data"] < 0.2
    assert figures["spread without"] > 3 * figures["spread with data"]


@pytest.mark.slow
def test_finetune_transformer():
    figures = run("finetune_transformer", steps=60, batch_size=16)
    # The order of the names decides, which the head alone cannot tell.
    assert figures["head alone"] < 0.65
    assert figures["head and last layer"] > 0.65


@pytest.mark.slow
def test_lora():
    figures = run("lora", steps=150)
    assert figures["ascending"] > 0.9
    assert figures["descending without"] < 0.3
    assert figures["descending"] > 0.6  # by a tenth of the numbers
    assert figures["merged"] == figures["descending"]
    assert figures["trained"] < 0.1


@pytest.mark.slow
def test_hybrid(picture):
    errors = run("hybrid", picture=picture, steps=150)
    assert errors["with an Equinox layer"] < 0.2 * errors["torch alone"]


@pytest.mark.slow
def test_patching(picture):
    figures = run("patching", picture=picture, steps=100)
    assert figures["accuracy"] > 0.95
    # What is asked for moves from the place of the digit to that of the pointer, by no other.
    assert figures["at the digit first"] > 0.2
    assert figures["at the pointer last"] > 0.99
    assert figures["elsewhere"] < 0.2


@pytest.mark.slow
def test_hessian(picture):
    figures = run("hessian", picture=picture, hidden=3, steps=60, count=4)
    assert figures["difference"] < 1e-8
    assert figures["products"] < figures["parameters"]
    assert figures["largest"] > 100 * figures["median"]


@pytest.mark.slow
def test_typed_calls():
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


def test_every_example_is_in_the_documentation():
    names = {path.stem for path in (ROOT / "examples").glob("*.py")} - {"readme"}
    text = "".join(path.read_text() for path in (ROOT / "docs").rglob("*.md"))
    assert {name for name in names if f"examples/{name}.py" not in text} == set()


def test_every_page_of_an_example_includes_it():
    pages = {path.stem: path.read_text() for path in (ROOT / "docs" / "examples").glob("*.md")}
    del pages["index"]
    assert pages
    for name, text in pages.items():
        assert included(text) == [f"examples/{name}.py"]


@pytest.mark.parametrize("name", sorted(notebooks.SCRIPTS))
def test_notebooks_are_made_of_the_scripts(name):
    script = notebooks.SCRIPTS[name].read_text()
    first, *cells = notebooks.notebook(script).cells
    assert first.cell_type == "markdown"
    assert first.source.startswith("# ")
    code = "\n".join(cell.source for cell in cells if cell.cell_type == "code")
    wanted = ast.parse(script)
    made = ast.parse(code).body[: len(wanted.body) - 1]  # all of it but the docstring
    assert [ast.dump(node) for node in made] == [ast.dump(node) for node in wanted.body[1:]]


@pytest.mark.slow
def test_a_notebook_runs_cell_by_cell(tmp_path):
    cells = notebooks.notebook(notebooks.SCRIPTS["patching"].read_text()).cells
    sources = [cell.source for cell in cells if cell.cell_type == "code"]
    sources = [s.replace("    main()", "    main(steps=3)") for s in sources]
    program = f"""
import sys, types

ipython = types.ModuleType("IPython")  # what a notebook has of it
ipython.version_info, ipython.get_ipython = (9, 0), lambda: None
ipython.display = types.ModuleType("IPython.display")
ipython.display.Image = lambda path: print("shown:", path)
sys.modules |= {{"IPython": ipython, "IPython.display": ipython.display}}
namespace = {{"__name__": "__main__"}}
for source in {sources}:
    exec(source, namespace)
"""
    environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**environment, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "shown: examples/out/patching.png" in done.stdout
    assert (tmp_path / "examples" / "out" / "patching.png").exists()
