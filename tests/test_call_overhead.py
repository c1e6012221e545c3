"""The benchmark of call overhead runs and says what it claims to."""

import json

import numpy as np
import torch

from .benchmarks import call_overhead
from .helpers import assert_trees_equal


def test_cases_compute_what_torch_does():
    for name, (function, arrays) in call_overhead.cases().items():
        tensors = [torch.from_numpy(np.array(x)) for x in arrays]
        expected = torch.add(*tensors) if name.endswith("add") else tensors[0] + 1
        assert_trees_equal(function(*arrays), expected)


def test_slope_is_the_cost_of_a_further_array():
    values = {f"torch, {count} arrays": 7.0 + 2.5 * count for count in call_overhead.COUNTS}
    assert_trees_equal(call_overhead.slope(values, "torch"), 2.5)


def test_table_and_file_hold_every_case(tmp_path, capsys):
    path = tmp_path / "out" / "call_overhead.json"
    result = call_overhead.main(rounds=2, calls=2, out=path)
    assert json.loads(path.read_text()) == result
    table = capsys.readouterr().out
    assert len(table.splitlines()) == 1 + len(call_overhead.cases()) + 3
    for kind, figures in result["microseconds"].items():
        assert all(figure > 0 for figure in figures.values())
        difference = figures["torch.add"] - figures["jnp.add"]
        assert result["torch.add beyond jnp.add"][kind] == difference
