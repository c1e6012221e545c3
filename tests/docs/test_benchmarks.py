"""The benchmarks run, compare what computes the same, and write what they print."""

import importlib.metadata
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest
import torch

from eqx_torch import j2t, t2j

from ..benchmarks import (
    arms,
    call_overhead,
    devices,
    forces,
    harness,
    memory,
    models,
    parameters,
    report,
    startup,
    trace,
    train_step,
    vmap,
)
from ..helpers import assert_trees_equal


ROOT = Path(__file__).parents[2]
SHORT = harness.Burst(milliseconds=0.1, seconds=0, rounds=2, pause=0)


@pytest.fixture
def promoting():
    """optax raises floats to the power of integers, which strict promotion forbids."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def assert_written(result, out, capsys):
    """The file holds the result, and the rows of its table were printed."""
    path = out / f"{result['benchmark']}.json"
    assert json.loads(path.read_text()) == result
    assert harness.table(result["rows"]) in capsys.readouterr().out
    libraries = result["environment"]["libraries"]
    assert libraries["torch"] == importlib.metadata.version("torch")


def assert_figures(row, *columns):
    """The cells are pairs of positive numbers."""
    for column in columns:
        assert set(row[column]) == {"median", "best"}
        assert all(value > 0 for value in row[column].values())


# The harness


def test_arms_take_turns():
    calls = []

    def arm(name):
        return lambda count: calls.extend([name] * count)

    times = harness.in_turns({"a": arm("a"), "b": arm("b")}, SHORT)
    assert [len(values) for values in times.values()] == [2, 2]
    # The second round begins with the arm that the first ended with.
    assert [name for name, _ in itertools.groupby(calls)][-3:] == ["a", "b", "a"]


def test_bursts_last_as_long_as_they_should(monkeypatch):
    now = 0.0

    def arm(calls):
        nonlocal now
        now += calls / 1000

    monkeypatch.setattr(harness.time, "perf_counter", lambda: now)
    assert harness._calls_in(arm, 0.02) == 20
    assert harness._calls_in(arm, 0.0001) == 1


def test_ratios_are_of_neighbours():
    over, under = [2.0, 12.0, 6.0], [1.0, 4.0, 3.0]
    assert harness.ratio(over, under) == {"median": 2.0, "best": 2.0}
    assert harness.pair(over, 1000) == {"median": 6000.0, "best": 2000.0}


def test_tables_are_markdown():
    rows = [
        {"what": "a", "ratio": {"median": 1.234, "best": 1.0}, "aim": 1.0},
        {"what": "longer", "ratio": {"median": 123.4, "best": 99.0}, "aim": ""},
    ]
    assert harness.table(rows).splitlines() == [
        "| what   | ratio       | aim  |",
        "|--------|-------------|------|",
        "| a      | 1.23 (1.00) | 1.00 |",
        "| longer | 123 (99.00) |      |",
    ]


@pytest.mark.slow
def test_a_restricted_process_sees_fewer_cores():
    program = (
        "import os; from tests.benchmarks.harness import use_cores; use_cores(1); "
        "import torch; print(len(os.sched_getaffinity(0)), torch.get_num_threads())"
    )
    environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, check=True
    )
    assert done.stdout.split() == [b"1", b"1"]


# What is compared


@pytest.mark.parametrize("task", models.small_tasks(), ids=lambda task: task.name)
@pytest.mark.slow
def test_losses_are_torchs(task):
    module, x, target = task.start()
    y = module(x)
    expected = task.torch_loss(y, target)
    assert_trees_equal(task.jax_loss(t2j(y.detach()), t2j(target)), expected.detach(), rtol=1e-5)


@pytest.mark.usefixtures("promoting")
@pytest.mark.slow
def test_training_steps(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(arms, "wrap_torch2jax", None)
    tasks = [task for task in models.small_tasks() if not task.name.startswith(("trans", "3"))]
    compared = arms.eager_arms(), train_step.EAGER_RATIOS
    result = train_step.run("train_step", tasks, *compared, SHORT, tmp_path)
    assert [row["network"] for row in result["rows"]] == [task.name for task in tasks]
    for row in result["rows"]:
        assert_figures(row, "torch, fused Adam, ms", "ours, ms")
        assert_figures(row, "ours / fused", "ours / plain", "filter_jit / ours")
        assert "wrap_torch2jax / ours" not in row
    assert_written(result, tmp_path, capsys)


def test_arms_that_differ_are_not_timed():
    def faster(task):
        step = arms.with_torch(task, fused=True)
        return lambda: 2 * step()

    compared = {"torch": lambda task: arms.with_torch(task, fused=True), "faster": faster}
    with pytest.raises(AssertionError, match="MLP 8, batch 4, faster"):
        train_step.measure(models.mlp(8, 4), compared, SHORT)


@pytest.mark.usefixtures("promoting")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # torch.compile's
@pytest.mark.slow
def test_training_steps_of_compiled_modules(tmp_path, capsys):
    compared = arms.compiled_arms("aot_eager"), train_step.COMPILED_RATIOS
    result = train_step.run("compiled", [models.mlp(8, 4)], *compared, SHORT, tmp_path)
    assert_figures(result["rows"][0], "torch.compile, ms", "ours / torch.compile")
    assert_written(result, tmp_path, capsys)


@pytest.mark.skipif(
    arms.wrap_torch2jax is None, reason="wrap_torch2jax comes with the extra `bench`"
)
@pytest.mark.usefixtures("promoting")
@pytest.mark.slow
def test_the_neighbour_trains_alike(tmp_path):
    everything = arms.eager_arms()
    compared = {name: everything[name] for name in ("torch, fused Adam", "ours", "wrap_torch2jax")}
    ratios = (("wrap_torch2jax / ours", "wrap_torch2jax", "ours"),)
    tasks = [models.mlp(8, 4), models.resnet((4, 8), depth=1, batch=4, size=8)]
    result = train_step.run("neighbour", tasks, compared, ratios, SHORT, tmp_path)
    for row in result["rows"]:
        assert_figures(row, "wrap_torch2jax / ours")


@pytest.mark.parametrize("function", [None, vmap.layer], ids=["module", "function"])
@pytest.mark.slow
def test_batches(tmp_path, capsys, function):
    case = vmap.Case("linear", lambda: torch.nn.Linear(4, 4), (4,), function)
    result = vmap.run([case], SHORT, tmp_path, batch=3)
    assert [row["call"] for row in result["rows"]] == ["linear, forward", "linear, gradient"]
    for row in result["rows"]:
        assert_figures(row, "jax.vmap / batched", "jax.vmap / torch", "torch.vmap / torch")
    assert_written(result, tmp_path, capsys)


@pytest.mark.parametrize("case", vmap.cases(), ids=lambda case: case.name)
@pytest.mark.slow
def test_every_batched_forward_is_torchs(case):
    vmap.check(case.name, vmap.forwards(case, 2))


@pytest.mark.slow
def test_forces(tmp_path, capsys):
    result = forces.run([forces.Case(3, 4)], SHORT, tmp_path)
    calls = [row["call"] for row in result["rows"]]
    assert calls == [f"{what}, 3 atoms, width 4" for what in forces.AIMS]
    for row in result["rows"]:
        assert_figures(row, "torch, ms", "ours, ms", "ours / torch")
    assert_written(result, tmp_path, capsys)


@pytest.mark.slow
def test_parameters(tmp_path, capsys, promoting):
    result = parameters.run([1], SHORT, tmp_path)
    assert len(result["rows"]) == 5
    for row in result["rows"]:
        assert_figures(row, "us", "compared with, us", "ratio")
    assert_written(result, tmp_path, capsys)


def test_devices(tmp_path, capsys):
    case = devices.Case("MLP", lambda: devices.mlp(8), (4, 8))
    result = devices.run([case], SHORT, tmp_path)
    assert [row["call"] for row in result["rows"]] == ["MLP, forward", "MLP, gradient"]
    for row in result["rows"]:
        assert_figures(row, "1 / 2 devices", "1 / 2 threads of plain torch")
    assert_written(result, tmp_path, capsys)


@pytest.mark.usefixtures("promoting")
@pytest.mark.slow
def test_memory(tmp_path, capsys, monkeypatch):
    def child(*arguments, threads=None):
        memory.main(list(map(str, arguments)))
        return json.loads(capsys.readouterr().out)

    monkeypatch.setattr(memory, "child", child)
    monkeypatch.setattr(memory, "imported", {"torch": 100.0, "eqx_torch": 150.0}.get)
    result = memory.run(rows=8, steps=2, repeats=4, out=tmp_path)
    imports, peak, *_, steps, pullbacks = result["rows"]
    assert imports["ratio"] == 1.5
    assert peak["ratio"] > 0
    assert steps["memory"] == "growth in the last 2 of 4 steps"
    assert pullbacks["memory"] == "growth in the last 2 of 4 forwards, pullback dropped"
    assert_written(result, tmp_path, capsys)


@pytest.mark.slow
def test_memory_of_a_program():
    assert 1 < memory.imported("json") < memory.imported("numpy") < 1000


@pytest.mark.slow
def test_startup(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # the machine may be busy
    text = startup.PROGRAMS["eqx_torch, first call"]
    assert startup.program(text) == startup.program("print('128.0')")
    monkeypatch.setattr(startup, "PROGRAMS", dict.fromkeys(startup.PROGRAMS, "import json"))
    result = startup.run(rounds=2, out=tmp_path)
    for row in result["rows"]:
        assert_figures(row, "ours, s", "ratio")
    assert_written(result, tmp_path, capsys)


@pytest.mark.slow
def test_first_calls(tmp_path, capsys):
    result = trace.run(layers=1, width=64, batch=2, length=8, rounds=2, repeats=2, out=tmp_path)
    names = [row["step"] for row in result["rows"]]
    assert "BERT: first trace of the gradient" in names
    assert "typed network: trace, annotations" in names
    assert_written(result, tmp_path, capsys)


@pytest.mark.slow
def test_a_first_call_computes_what_torch_does():
    _, result, expected = trace.first_call(trace.bert(2, 64), batch=2, length=8)
    assert_trees_equal(result, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_both_ways_to_declare_shapes_trace_the_same():
    annotated, explicit = trace.typed_models().values()
    assert trace.typed_trace(annotated, 3)[0] == trace.typed_trace(explicit, 3)[0]
    assert trace.typed_trace(annotated, 3)[0] == jax.ShapeDtypeStruct((3, 10), "float32")
    arguments = [jax.numpy.ones(shape) for shape in ((3, 784), (1,), (10,))]
    assert_trees_equal(annotated(*arguments), explicit(*arguments))


# Calls


@pytest.mark.slow
def test_calls_compute_what_torch_does():
    for name, (function, arrays) in call_overhead.cases().items():
        tensors = [j2t(x) for x in arrays]
        expected = torch.add(*tensors) if name.endswith("add") else tensors[0] + 1
        assert_trees_equal(function(*arrays), expected)


def test_slopes_are_the_costs_of_a_further_array():
    figures = {
        f"torch, {count} arrays": {"median": 7 + 2.5 * count, "best": 5 + 2.0 * count}
        for count in call_overhead.COUNTS
    }
    assert_trees_equal(call_overhead.slopes(figures, "torch"), {"median": 2.5, "best": 2.0})


@pytest.mark.slow
def test_calls(tmp_path, capsys):
    result = call_overhead.run(SHORT, tmp_path)
    figures = {row["call"]: row["us"] for row in result["rows"]}
    for kind in ("median", "best"):
        beyond = figures["torch.add"][kind] - figures["jnp.add"][kind]
        assert figures["torch.add beyond jnp.add"][kind] == beyond
    assert_written(result, tmp_path, capsys)


# The page


def test_tables_go_into_the_page(tmp_path):
    rows = [{"what": "a", "ratio": {"median": 1.5, "best": 1.25}}]
    harness.report("one", rows, tmp_path)
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- table one -->\nold\n<!-- end -->\nafter\n")
    report.main(page, tmp_path)
    text = page.read_text()
    assert text.startswith("before\n<!-- table one -->\n| what | ratio       |\n")
    assert "| a    | 1.50 (1.25) |" in text
    assert f"torch {importlib.metadata.version('torch')}" in text
    assert "old" not in text
    assert text.endswith("<!-- end -->\nafter\n")


def test_tables_without_a_file_stay(tmp_path, capsys):
    page = tmp_path / "page.md"
    text = "<!-- table one -->\nold\n<!-- end -->\n"
    page.write_text(text)
    report.main(page, tmp_path)
    assert page.read_text() == text
    assert "no one.json" in capsys.readouterr().out


def test_the_page_has_a_table_for_each_benchmark():
    marked = set(re.findall(r"<!-- table (\w+) -->", report.PAGE.read_text()))
    folder = Path(report.__file__).parent
    for name in re.findall(r"tests\.benchmarks\.(\w+)", (ROOT / "Makefile").read_text()):
        assert (folder / f"{name}.py").exists()
        assert name == "report" or name in marked
