"""How timelines are drawn, written and printed, and torch calls in profiles of JAX."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from matplotlib.colors import to_hex

from eqx_torch import EqxTorchError, timeline, torch2jax
from eqx_torch._timeline import draw, Timeline

from ..helpers import assert_trees_equal
from ..helpers.meshes import explicit_mesh, put
from ..helpers.timelines import energy, made_up, X


def test_the_trace_file_has_each_call_once(tmp_path):
    mesh = explicit_mesh(4)
    f = torch2jax(energy)
    g = jax.jit(jax.grad(lambda x: jax.vmap(f)(x).sum()))
    h = jax.jit(torch2jax(lambda x: x.sin(), out_specs=P("x")))
    with timeline() as record:
        jax.block_until_ready(g(jnp.ones((2, 3))))
        with jax.set_mesh(mesh):
            jax.block_until_ready(h(put(jnp.ones(8), mesh, "x")))
    record.save(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    named = [event for event in events if event["name"] == "process_name"]
    devices = {event["pid"]: event["args"]["name"] for event in named}
    assert sorted(devices.values()) == ["cpu:0", "cpu:1", "cpu:2", "cpu:3"]
    spans = [e for e in events if e["ph"] == "X"]
    assert len(spans) + sum(e["ph"] == "M" for e in events) == len(events)
    starts = [span["ts"] for span in spans]
    assert min(starts) >= 0
    written = [(s["name"], s["cat"], devices[s["pid"]], s["dur"], s["args"]) for s in spans]
    recorded = [
        (
            c.function,
            c.kind,
            c.device,
            c.duration * 1e6,
            {
                "kind": c.kind,
                "program": c.program,
                "thread": c.thread,
                "core time (ms)": c.core_time * 1e3,
            },
        )
        for c in record.events
    ]
    assert sorted(written, key=lambda w: w[3]) == sorted(recorded, key=lambda r: r[3])
    apart = max(c.end for c in record.events) - min(c.start for c in record.events)
    assert_trees_equal(max(e["ts"] + e["dur"] for e in spans) - min(starts), apart * 1e6, rtol=1e-4)


def test_calls_that_overlap_on_a_device_have_rows_in_the_trace(tmp_path):
    record = Timeline()
    record.start = 1.0
    record.ended = [
        made_up("cpu:0", 1, 3),
        made_up("cpu:0", 2, 4, "g"),
        made_up("cpu:1", 1, 2),
    ]
    record.save(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert [(e["name"], e["pid"], e["tid"], e["ts"], e["dur"]) for e in spans] == [
        ("f", 1, 1, 0.0, 2e6),
        ("g", 1, 2, 1e6, 2e6),
        ("f", 2, 1, 0.0, 1e6),
    ]


def bars(figure):
    """Colour and number of the bars that are drawn."""
    (axes,) = figure.axes
    drawn = {}
    for collection in axes.collections:
        for colour, _ in zip(collection.get_facecolor(), collection.get_paths(), strict=True):
            drawn[to_hex(colour)] = drawn.get(to_hex(colour), 0) + 1
    return drawn


def test_the_picture_has_a_lane_a_device_and_a_bar_a_call(tmp_path):
    mesh = explicit_mesh(4)
    f = torch2jax(lambda x: x.sin(), out_specs=P("x"))
    with jax.set_mesh(mesh), timeline() as record:
        x = put(jnp.ones(8), mesh, "x")
        jax.block_until_ready(jax.jit(jax.grad(lambda x: f(x).sum()))(x))
    figure = record.plot(tmp_path / "timeline.png")
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == [f"cpu:{i}" for i in range(4)]
    assert axes.get_title(loc="left") == "8 torch calls on 4 devices"
    assert str(record.overlap()) in [text.get_text() for text in axes.texts]
    assert [text.get_text() for text in axes.get_legend().texts] == ["4 forward", "4 backward"]
    assert bars(figure) == {"#4c72b0": 4, "#dd8452": 4}


def test_names_stand_in_bars_that_have_room():
    calls = [made_up("cpu:0", 0, 9, "wide"), made_up("cpu:0", 9.5, 9.6, "narrow", "tangent")]
    figure = draw(calls)
    texts = [text.get_text() for text in figure.axes[0].texts]
    assert "wide" in texts
    assert "narrow" not in texts
    assert bars(figure) == {"#4c72b0": 1, "#55a868": 1}


def test_calls_that_overlap_on_a_device_are_drawn_side_by_side():
    calls = [made_up("cpu:0", 0, 9), made_up("cpu:0", 1, 8), made_up("cpu:1", 0, 9)]
    (axes,) = draw(calls).axes
    extents = [
        path.get_extents() for collection in axes.collections for path in collection.get_paths()
    ]
    assert len(extents) == 3
    middles = sorted((box.y0 + box.y1) / 2 for box in extents)
    assert_trees_equal(middles, [0.5, 1.5, 2.5])
    assert axes.get_yticks().tolist() == [1.0, 2.5]


def test_on_gpus_the_picture_says_what_is_measured():
    (axes,) = draw([made_up("cuda:0", 0, 1), made_up("cuda:1", 0, 1)]).axes
    assert axes.get_title(loc="left") == (
        "2 torch calls on 2 devices (on GPUs the time until the work was enqueued)"
    )


def test_nothing_cannot_be_drawn():
    with timeline() as record:
        pass
    with pytest.raises(EqxTorchError, match="nothing to draw: .*await the results"):
        record.plot()
    assert repr(record).startswith("Timeline of no torch calls: only calls that begin and end")


def test_repr_counts_and_sums():
    f = jax.jit(jax.grad(torch2jax(energy)))
    with timeline() as record:
        for _ in range(3):
            f(X).block_until_ready()
    head, measured, columns, *rows = repr(record).splitlines()
    assert head == f"Timeline of 6 torch calls on 1 device in {1e3 * record.duration:.1f} ms"
    assert measured == str(record.overlap())
    assert columns.split() == ["function", "kind", "calls", "total", "ms", "mean", "ms"]
    shown = {}
    for row in rows:
        function, kind, calls, total, mean = row.split()
        shown[function, kind, int(calls)] = (float(total), float(mean))
    for kind in ("forward", "backward"):
        spent = [1e3 * call.duration for call in record.events if call.kind == kind]
        assert_trees_equal(
            shown["energy", kind, 3], (float(sum(spent)), float(np.mean(spent))), atol=1e-3
        )


# Profiles of JAX


def test_operations_of_xla_have_the_functions_name():
    @jax.jit
    def program(x):
        with jax.named_scope("outer"):
            return jax.value_and_grad(torch2jax(energy))(x)

    text = program.lower(X).compile().as_text()
    names = [
        line.partition('op_name="')[2].partition('"')[0]
        for line in text.splitlines()
        if "custom-call(" in line
    ]
    forward, backward = sorted(names, key=len)
    assert forward.endswith("/energy")
    assert backward.endswith("/energy_backward")
    assert all("outer" in name for name in names)


PROFILED = """
import sys
import jax, jax.numpy as jnp, torch
from eqx_torch import torch2jax

assert "matplotlib" not in sys.modules

def energy(x):
    return x.sin().sum()

def callee(x):
    return x.cos()

inner = torch2jax(callee)
f = jax.jit(jax.grad(torch2jax(energy)))
g = jax.jit(jax.shard_map(
    lambda x: jax.lax.fori_loop(0, 2, lambda _, x: inner(x), x),
    mesh=jax.make_mesh((2,), ("x",)), out_specs=jax.P("x"),
))
x = jnp.ones(4)
sharded = jax.device_put(x, jax.NamedSharding(jax.make_mesh((2,), ("x",)), jax.P("x")))
jax.block_until_ready((f(x), g(sharded)))
with jax.profiler.trace(sys.argv[1]):
    jax.block_until_ready((f(x), g(sharded)))
"""


@pytest.mark.slow
def test_profiles_of_jax_have_the_functions_names(tmp_path):
    environment = {
        **os.environ,
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "OMP_NUM_THREADS": "1",
    }
    program = [sys.executable, "-c", PROFILED, str(tmp_path)]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (path,) = Path(tmp_path).rglob("*.trace.json.gz")
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    operations = [event for event in events if "hlo_op" in event.get("args", {})]
    counts = {}
    for event in operations:
        name = event["name"].rstrip("0123456789").rstrip(".")
        counts[name] = counts.get(name, 0) + 1
        assert event["dur"] > 0
    assert (counts["energy"], counts["energy_backward"]) == (1, 1)
    assert counts["callee"] == 4  # twice on each of two devices
