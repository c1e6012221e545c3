import pytest
import torch
from jaxtyping import Array, Float, PyTree, Scalar, Shaped
from torch import Tensor

from ..helpers.annotations import arr, bind, predict, refused


def one(dims, result=None):
    """A function of one array annotated with `dims`."""

    def f(x): ...

    f.__annotations__ = {"x": Float[Tensor, dims]}
    if result is not None:
        f.__annotations__["return"] = Float[Tensor, result]
    return f


def two(first, second, result):
    def f(x, y): ...

    f.__annotations__ = {
        "x": Float[Tensor, first],
        "y": Float[Tensor, second],
        "return": Float[Tensor, result],
    }
    return f


@pytest.mark.parametrize(
    ("dims", "shape"),
    [
        ("", ()),
        ("3", (3,)),
        ("3 4", (3, 4)),
        ("n", (0,)),
        ("n n", (2, 2)),
        ("rows=3 cols=4", (3, 4)),
        ("_ 4", (9, 4)),
        ("_batch 4", (9, 4)),
        ("...", ()),
        ("...", (1, 2, 3)),
        ("... 4", (4,)),
        ("... 4", (2, 3, 4)),
        ("3 ... 4", (3, 4)),
        ("3 ... 4", (3, 5, 6, 4)),
        ("*b", ()),
        ("*b n", (7,)),
        ("n *b n", (7, 1, 7)),
        ("#4", (1,)),
        ("#4", (4,)),
        ("#n n", (1, 5)),
        ("n #n", (5, 1)),
        ("*#b", (3, 1)),
        ("n n-1", (5, 4)),
        ("n 2*n", (5, 10)),
        ("n m max(n,m)", (5, 7, 7)),
        ("n {len(x.shape)}", (5, 2)),
    ],
)
def test_accepted(dims, shape):
    bind(one(dims), arr(*shape))


@pytest.mark.parametrize(
    ("dims", "shape"),
    [
        ("", (1,)),
        ("3", (4,)),
        ("3", ()),
        ("3 4", (4, 3)),
        ("n n", (2, 3)),
        ("rows=3 cols=4", (3, 5)),
        ("_ 4", (4, 9)),
        ("... 4", ()),
        ("... 4", (4, 3)),
        ("3 ... 4", (3,)),
        ("n *b n", (7,)),
        ("n *b n", (7, 8)),
        ("#4", (2,)),
        ("#4", (0,)),
        ("n #n", (5, 4)),
        ("n n-1", (5, 5)),
        ("n m max(n,m)", (5, 7, 5)),
        ("n {len(x.shape)}", (5, 3)),
    ],
)
def test_refused(dims, shape):
    assert refused(one(dims), arr(*shape)).startswith("f: argument `x` does not match")


@pytest.mark.parametrize(
    ("first", "second", "result", "shapes", "expected"),
    [
        ("n k", "k m", "n m", [(2, 3), (3, 4)], (2, 4)),
        ("*b n k", "*b k m", "*b n m", [(5, 6, 2, 3), (5, 6, 3, 4)], (5, 6, 2, 4)),
        ("*b", "n", "n *b n", [(), (2,)], (2, 2)),
        ("n", "m", "n+m", [(2,), (3,)], (5,)),
        ("n", "m", "n//m 2*n-1", [(7,), (3,)], (2, 13)),
        ("n", "m", "n/m", [(6,), (3,)], (2,)),
        ("*#b", "*#b", "*b", [(3, 1), (1, 4)], (3, 4)),
        ("*#b", "*#b", "*#b", [(5, 3, 1), (4,)], (5, 3, 4)),
        ("*b", "*#b", "*b", [(5, 3), (1,)], (5, 3)),
        ("#n d", "#n d", "n d", [(1, 2), (4, 2)], (4, 2)),
        ("#n d", "#n d", "n d", [(1, 2), (1, 2)], (1, 2)),
        ("n d", "#n d", "#n d", [(4, 2), (1, 2)], (4, 2)),
        ("#n", "#n", "#n n+1", [(1,), (1,)], (1, 2)),
        ("a=3 n", "n", "b=4 n 5", [(3, 2), (2,)], (4, 2, 5)),
        ("n 4", "n-1", "n", [(5, 4), (4,)], (5,)),
        ("n-1", "n", "n", [(4,), (5,)], (5,)),  # what binds a name may come later
        ("n", "m", "", [(2,), (3,)], ()),
        ("n", "m", "min(n,m)", [(2,), (3,)], (2,)),
    ],
)
def test_results(first, second, result, shapes, expected):
    out = predict(two(first, second, result), *(arr(*shape) for shape in shapes))
    assert out == arr(*expected)


@pytest.mark.parametrize(
    ("first", "second", "shapes"),
    [
        ("n k", "k m", [(2, 3), (2, 4)]),
        ("*b n", "*b m", [(5, 6), (6, 5)]),
        ("*#b", "*#b", [(3, 2), (3, 4)]),
        ("*b", "*#b", [(1,), (5,)]),
        ("*#b", "*b", [(5,), (1,)]),
        ("n", "#n", [(4,), (2,)]),
        ("n", "n-1", [(4,), (4,)]),
        ("n-1", "n", [(4,), (4,)]),
    ],
)
def test_two_arguments_refused(first, second, shapes):
    refused(two(first, second, "3"), *(arr(*shape) for shape in shapes))


def test_scalars():
    def f(x: Scalar, y: Float[Tensor, ""]) -> Shaped[Tensor, ""]: ...

    assert predict(f, arr(), arr()) == arr()
    refused(f, arr(1), arr())
    refused(f, 1.0, arr())


def test_fstring_reads_self_and_arguments():
    class Net(torch.nn.Module):
        width = 7

        def forward(
            self, x: Float[Tensor, "b {self.width}"], k: int = 2
        ) -> Float[Tensor, "b {k} {self.width}-1"]: ...

    assert predict(Net(), arr(3, 7)) == arr(3, 2, 6)
    assert predict(Net(), arr(3, 7), k=5) == arr(3, 5, 6)
    assert "dimension 1 (`{self.width}`) is 8, must be 7" in refused(Net(), arr(3, 8))


def test_fstring_reads_shapes_of_arrays():
    def f(x, y: Float[Tensor, "{x.shape[0]}"]) -> Float[Tensor, "2*{x.shape[0]}"]: ...

    assert predict(f, arr(3, 9), arr(3)) == arr(6)


def test_leaves_of_trees_have_their_own_sizes():
    def f(
        x: PyTree[Float[Tensor, "b ?n"], "T"], y: PyTree[Float[Tensor, "?n"], "T"]
    ) -> PyTree[Float[Tensor, "?n b"], "T"]: ...

    tree = {"a": arr(2, 3), "b": (arr(2, 4), arr(2, 5))}
    widths = {"a": arr(3), "b": (arr(4), arr(5))}
    assert predict(f, tree, widths) == {"a": arr(3, 2), "b": (arr(4, 2), arr(5, 2))}
    message = refused(f, tree, {"a": arr(3), "b": (arr(4), arr(6))})
    assert "argument `y['b'][1]`" in message
    assert "dimension 0 (`?n`) is 6, must be 5" in message


def test_leaves_of_trees_variadic():
    def f(x: PyTree[Float[Tensor, "?*n"], "T"]) -> PyTree[Float[Tensor, "?*n 2"], "T"]: ...

    assert predict(f, [arr(), arr(3, 4)]) == [arr(2), arr(3, 4, 2)]


def test_nested_annotations():
    Image = Float[Tensor, "h w"]

    def f(x: Float[Image, "b"]) -> Float[Image, "2*b"]: ...

    assert predict(f, arr(3, 4, 5)) == arr(6, 4, 5)


@pytest.mark.parametrize("array_type", [Tensor, torch.nn.Parameter, Array])
def test_array_types(array_type):
    def f(x: Float[array_type, "n"]) -> Float[array_type, "n"]: ...

    assert predict(f, arr(3)) == arr(3)


def test_an_expression_that_gives_no_size():
    assert "`n-3` is -1, which is no size" in refused(one("n", "n-3"), arr(2))
    assert "`n/2` is 1.5, which is no size" in refused(one("n", "n/2"), arr(3))
    message = refused(one("n", "1//n"), arr(0))
    assert "`1//n` cannot be evaluated, ZeroDivisionError" in message
