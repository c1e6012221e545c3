"""The split of a call over explicit mesh axes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec as P

from eqx_torch import ShardingError
from eqx_torch._program import Spec
from eqx_torch._sharding import local_spec, out_spec_list, plan
from eqx_torch._trees import flatten

from ..helpers.meshes import explicit_mesh, put


F32 = np.dtype("float32")


def test_without_a_mesh_there_is_nothing_to_split():
    assert plan("f", [jnp.ones(3)], None) is None
    assert plan("f", [jnp.ones(3)], P("x")) is None
    assert plan("f", [], None) is None


def test_a_plan_has_the_axes_in_use():
    mesh = explicit_mesh(2, 4)
    x, y = put(jnp.ones((8, 8)), mesh, "x", None), put(jnp.ones(8), mesh)
    split = plan("f", [x, y, jnp.ones(3)], P("x"))
    assert split.axes == {"x"}
    assert [tuple(s) for s in split.in_specs[:2]] == [("x", None), (None,)]
    assert plan("f", [y], None) is None
    both = plan("f", [put(jnp.ones(8), mesh, ("x", "y"))], P(("x", "y")))
    assert both.axes == {"x", "y"}


def test_auto_axes_are_not_split():
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Explicit, AxisType.Auto))
    x = put(jnp.ones((8, 8)), mesh, "x", None)
    assert plan("f", [x], P("x")).axes == {"x"}
    with pytest.raises(ShardingError, match="names the Auto mesh axes"):
        plan("f", [x], P("x", "y"))


@pytest.mark.parametrize(
    ("shape", "spec", "local"),
    [
        ((8, 3), P("x"), (4, 3)),
        ((8, 4), P("x", "y"), (4, 1)),
        ((8, 4), P(None, ("x", "y")), None),
        ((16,), P(("x", "y")), (2,)),
        ((8,), P(), (8,)),
        ((0,), P("x"), (0,)),
        ((3,), P("x"), None),
        ((), P("x"), None),
    ],
    ids=str,
)
def test_local_shapes(shape, spec, local):
    mesh = explicit_mesh(2, 4)
    if local is None:
        with pytest.raises(
            ShardingError, match="cannot be divided by|has 0 dimensions, but its spec"
        ):
            local_spec("f", "output", Spec(shape, F32), spec, mesh)
    else:
        assert local_spec("f", "output", Spec(shape, F32), spec, mesh) == Spec(local, F32)


def test_out_specs_are_a_prefix():
    structure = flatten({"a": (0, None), "b": [0, 0]})[1]
    x, y = P("x"), P("y")
    assert out_spec_list("f", x, structure) == [x, x, x]
    assert out_spec_list("f", {"a": x, "b": y}, structure) == [x, y, y]
    assert out_spec_list("f", {"a": (x, None), "b": [y, x]}, structure) == [x, y, x]
    with pytest.raises(ShardingError, match="is not a prefix of its outputs"):
        out_spec_list("f", {"a": x}, structure)
