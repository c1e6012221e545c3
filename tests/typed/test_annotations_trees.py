import threading
from typing import Any

import pytest
from jaxtyping import Float, PyTree
from torch import Tensor

from eqx_torch._annotations import read_signature

from ..helpers.annotations import arr, predict, refused, unreadable


Row = Float[Tensor, "n"]


def test_trees():
    def f(x: PyTree[Row, "T"], y: PyTree[Row, "T"]) -> PyTree[Float[Tensor, "2*n"], "T"]: ...

    tree = {"a": arr(3), "b": [arr(3), (arr(3),)]}
    assert predict(f, tree, tree) == {"a": arr(6), "b": [arr(6), (arr(6),)]}
    message = refused(f, tree, [arr(3)])
    assert "its structure is PyTreeDef([*]), which is not `T`" in message
    assert "T = PyTreeDef({'a': *, 'b': [*, (*,)]}), from argument `x`" in message
    assert "argument `x['b'][1][0]`" in refused(f, {"a": arr(3), "b": [arr(3), (arr(4),)]}, tree)
    assert "it is an int, not an array" in refused(f, {"a": 3}, {"a": 3})


def test_trees_without_a_name():
    def f(x: PyTree[Row]) -> Row: ...

    assert predict(f, {"a": arr(3), "b": [arr(3)]}) == arr(3)
    refused(f, {"a": arr(3), "b": [arr(4)]})


def test_trees_of_mixed_leaves():
    def f(x: PyTree[Row | int | None, "T"], y: PyTree[Any, "S"], z: PyTree[int]) -> Row: ...

    assert predict(f, {"a": arr(3), "b": [4, None]}, [1, arr(2, 2)], [1]) == arr(3)
    assert "it is a str, not one of these" in refused(f, {"a": arr(3), "b": "no"}, 1, 1)


def test_composed_trees():
    def f(
        z: PyTree[Row, "S T"], x: PyTree[Row, "S"], y: PyTree[Row, "T"]
    ) -> PyTree[Row, "T S"]: ...

    s, t = [arr(3), arr(3)], {"a": arr(3)}
    assert predict(f, [t, t], s, t) == {"a": s}
    assert "which is not `S T`" in refused(f, {"a": s}, s, t)


@pytest.mark.parametrize(
    ("structure", "good", "bad"),
    [
        ("T ...", [{"a": arr(3)}, arr(3)], {"a": arr(3)}),
        ("... T", {"a": [arr(3), arr(3)]}, {"a": arr(3)}),
    ],
)
def test_open_trees(structure, good, bad):
    def f(x, y): ...

    f.__annotations__ = {"x": PyTree[Row, "T"], "y": PyTree[Row, structure], "return": Row}
    assert predict(f, [arr(3), arr(3)], good) == arr(3)
    assert f"which is not `{structure}`" in refused(f, [arr(3), arr(3)], bad)
    f.__annotations__["return"] = PyTree[Row, structure]
    assert "`...` leaves the tree's structure open" in unreadable(f)


def test_trees_of_tuples():
    def f(x: PyTree[tuple[Row, Row], "T"]) -> PyTree[Row, "T"]: ...

    assert predict(f, {"a": (arr(3), arr(3))}) == {"a": arr(3)}


def test_several_threads_at_once():
    def f(x: PyTree[Float[Tensor, "?n"], "T"], k: int) -> PyTree[Float[Tensor, "?n {k}"], "T"]: ...

    signature, found = read_signature(f), {}

    def call(k):
        for _ in range(50):
            bindings = signature.bind(([arr(k), arr(k + 1)], k), {})
            found.setdefault(k, set()).add(str(signature.output(bindings)))

    threads = [threading.Thread(target=call, args=(k,)) for k in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {k: {str([arr(k, k), arr(k + 1, k)])} for k in range(6)}
