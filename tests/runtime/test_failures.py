"""Torch raises on some of several devices: no hang, no wrong value, one error.

What would hang would take the test process with it, so the tests run in processes of their own.
"""

import pytest

from ..helpers.isolated import run_script, run_tests


def test_on_a_mesh_of_eight():
    run_tests("runtime/mesh_failures.py", timeout=300)


AT_EXIT = """
import jax, sys
from jax.sharding import PartitionSpec as P
import eqx_torch

def f(x):
    if x[0] == 3:
        raise ValueError("given up")
    return x

mesh = jax.make_mesh((8,), ("x",))
with jax.set_mesh(mesh):
    x = jax.device_put(jax.numpy.arange(8.0), P("x"))
    g = jax.jit(eqx_torch.torch2jax(f, output_shapes=x, out_specs=P("x")))
    loss = jax.jit(lambda x: g(x).sum())
    print(loss(x))
if sys.argv[1] == "asked":
    try:
        eqx_torch.check_errors()
    except ValueError as error:
        print("caught", error)
"""


@pytest.mark.parametrize("asked", ["asked", "never asked"])
def test_at_exit_it_is_logged_if_nobody_asked(asked):
    out, log = run_script(AT_EXIT, asked, timeout=240)
    assert out.startswith("nan\n")
    assert ("caught given up" in out) == (asked == "asked")
    assert log.count("ValueError: given up") == (1 if asked == "asked" else 2)
    at_exit = (
        "the program ends, and an error of torch on one of several devices was never raised. "
        "`eqx_torch.check_errors()` raises such errors.\n"
    )
    assert (at_exit in log) == (asked != "asked")
    assert 'File "<string>", line 8, in f\n' in log, "the traceback of torch code"
