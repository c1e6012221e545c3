import pathlib
import subprocess
import sys
import timeit

from jaxtyping import Float, Int, PyTree
from torch import nn, Tensor

import eqx_torch._annotations
from eqx_torch._annotations import read_signature

from ..helpers.annotations import arr, refused


class Attention(nn.Module):
    def forward(
        self,
        q: Float[Tensor, "*batch t d"],
        kv: tuple[Float[Tensor, "*batch s d"], Float[Tensor, "*batch s 64"]],
        bias: Float[Tensor, "#heads t s"] | None = None,
        *,
        lengths: dict[str, Int[Tensor, "*#batch"]],
    ) -> Float[Tensor, "*batch t 64"]: ...


Q, K, V = arr(5, 7, 32), arr(5, 9, 32), arr(5, 9, 64)
LENGTHS = {"q": arr(5, dtype="int32")}


def test_a_wrong_dimension():
    assert refused(Attention(), arr(5, 7, 31), (K, V), lengths=LENGTHS) == (
        "Attention.forward: argument `kv[0]` does not match its annotation.\n"
        "  annotation: Float[Tensor, '*batch s d']\n"
        "  expected: Float (*batch=(5,), s=9, d=31)\n"
        "  actual: float32 (5, 9, 32)\n"
        "  dimension 2 (`d`) is 32, must be 31\n"
        "names bound in this call:\n"
        "  t = 7, from argument `q`, dimension 1\n"
        "  d = 31, from argument `q`, dimension 2\n"
        "  s = 9, from argument `kv[0]`, dimension 1\n"
        "  batch = (5,), from argument `q`, dimension 0"
    )


def test_two_wrong_dimensions_and_a_wrong_dtype():
    assert refused(Attention(), Q, (K, arr(5, 8, 63, dtype="int32")), lengths=LENGTHS) == (
        "Attention.forward: argument `kv[1]` does not match its annotation.\n"
        "  annotation: Float[Tensor, '*batch s 64']\n"
        "  expected: Float (*batch=(5,), s=9, 64)\n"
        "  actual: int32 (5, 8, 63)\n"
        "  dtype int32 is not in Float\n"
        "  dimension 1 (`s`) is 8, must be 9\n"
        "  dimension 2 is 63, must be 64\n"
        "names bound in this call:\n"
        "  t = 7, from argument `q`, dimension 1\n"
        "  d = 32, from argument `q`, dimension 2\n"
        "  s = 9, from argument `kv[0]`, dimension 1\n"
        "  batch = (5,), from argument `q`, dimension 0"
    )


def test_broadcasting():
    assert refused(Attention(), Q, (K, V), arr(1, 7, 3), lengths=LENGTHS) == (
        "Attention.forward: argument `bias` does not match its annotation.\n"
        "  annotation: Float[Tensor, '#heads t s']\n"
        "  expected: Float (#heads, t=7, s=9)\n"
        "  actual: float32 (1, 7, 3)\n"
        "  dimension 2 (`s`) is 3, must be 9\n"
        "names bound in this call:\n"
        "  t = 7, from argument `q`, dimension 1\n"
        "  d = 32, from argument `q`, dimension 2\n"
        "  s = 9, from argument `kv[0]`, dimension 1\n"
        "  batch = (5,), from argument `q`, dimension 0"
    )
    message = refused(Attention(), Q, (K, V), lengths={"q": arr(4, dtype="int32")})
    assert message.splitlines()[:5] == [
        "Attention.forward: argument `lengths['q']` does not match its annotation.",
        "  annotation: Int[Tensor, '*#batch']",
        "  expected: Int (*#batch=(5,),)",
        "  actual: int32 (4,)",
        "  `*#batch` is (4,), must broadcast with (5,)",
    ]

    def f(x: Float[Tensor, "n"], y: Float[Tensor, "#n #3"]): ...

    assert refused(f, arr(4), arr(2, 2)) == (
        "f: argument `y` does not match its annotation.\n"
        "  annotation: Float[Tensor, '#n #3']\n"
        "  expected: Float (#n=4, #3)\n"
        "  actual: float32 (2, 2)\n"
        "  dimension 0 (`#n`) is 2, must be 4 or 1\n"
        "  dimension 1 (`#3`) is 2, must be 3 or 1\n"
        "names bound in this call:\n"
        "  n = 4, from argument `x`, dimension 0"
    )


def test_the_wrong_number_of_dimensions():
    assert refused(Attention(), arr(7), (K, V), lengths=LENGTHS) == (
        "Attention.forward: argument `q` does not match its annotation.\n"
        "  annotation: Float[Tensor, '*batch t d']\n"
        "  expected: Float (*batch, t, d)\n"
        "  actual: float32 (7,)\n"
        "  it has 1 dimension, must have at least 2"
    )


def test_one_name_twice_in_an_array():
    def f(x: Float[Tensor, "n n"]): ...

    assert refused(f, arr(3, 4)) == (
        "f: argument `x` does not match its annotation.\n"
        "  annotation: Float[Tensor, 'n n']\n"
        "  expected: Float (n=3, n=3)\n"
        "  actual: float32 (3, 4)\n"
        "  dimension 1 (`n`) is 4, must be 3\n"
        "names bound in this call:\n"
        "  n = 3, from argument `x`, dimension 0"
    )


def test_expressions():
    def f(x: Float[Tensor, "n"], y: Float[Tensor, "2*n-1 width=3"]): ...

    assert refused(f, arr(4), arr(8, 4)) == (
        "f: argument `y` does not match its annotation.\n"
        "  annotation: Float[Tensor, '2*n-1 width=3']\n"
        "  expected: Float (2*n-1=7, width=3)\n"
        "  actual: float32 (8, 4)\n"
        "  dimension 0 (`2*n-1`) is 8, must be 7\n"
        "  dimension 1 (`width=3`) is 4, must be 3\n"
        "names bound in this call:\n"
        "  n = 4, from argument `x`, dimension 0"
    )

    def g(x: Float[Tensor, "n"], y: Float[Tensor, "1//n {k.size}"], k=None): ...

    assert refused(g, arr(0), arr(8, 4)) == (
        "g: argument `y` does not match its annotation.\n"
        "  annotation: Float[Tensor, '1//n {k.size}']\n"
        "  expected: Float (1//n, {k.size})\n"
        "  actual: float32 (8, 4)\n"
        "  dimension 0 (`1//n`) cannot be evaluated: ZeroDivisionError: integer division or modulo"
        " by zero\n"
        "  dimension 1 (`{k.size}`) cannot be evaluated: AttributeError: 'NoneType' object has no"
        " attribute 'size'\n"
        "names bound in this call:\n"
        "  n = 0, from argument `x`, dimension 0"
    )


def test_trees():
    Rows = PyTree[Float[Tensor, "b ?n"], "T"]

    def f(x: Rows, y: Rows): ...

    tree = {"w": arr(2, 3), "z": arr(2, 4)}
    assert refused(f, tree, {"w": arr(2, 3), "z": arr(2, 5)}) == (
        "f: argument `y['z']` does not match its annotation.\n"
        "  annotation: Float[Tensor, 'b ?n']\n"
        "  expected: Float (b=2, ?n=4)\n"
        "  actual: float32 (2, 5)\n"
        "  dimension 1 (`?n`) is 5, must be 4\n"
        "names bound in this call:\n"
        "  b = 2, from argument `x['w']`, dimension 0\n"
        "  (Leaf 0 in structure T) n = 3, from argument `x['w']`, dimension 1\n"
        "  (Leaf 1 in structure T) n = 4, from argument `x['z']`, dimension 1\n"
        "  T = PyTreeDef({'w': *, 'z': *}), from argument `x`"
    )
    assert refused(f, tree, {"w": arr(2, 3)}).splitlines()[:3] == [
        "f: argument `y` does not match its annotation.",
        "  annotation: PyTree[Float[Tensor, 'b ?n'], 'T']",
        "  its structure is PyTreeDef({'w': *}), which is not `T`",
    ]


def test_what_is_no_array():
    def f(x: Float[Tensor, "n"], y: Float[Tensor, "n"] | None): ...

    assert refused(f, arr(3), [arr(3)]) == (
        "f: argument `y` does not match its annotation.\n"
        "  annotation: Float[Tensor, 'n'] | None\n"
        "  it is a list of 1, not one of these\n"
        "names bound in this call:\n"
        "  n = 3, from argument `x`, dimension 0"
    )
    assert "  it is None, not an array" in refused(f, None, None)
    assert "  it is an int, not an array" in refused(f, 3, None)

    def g(x: None, y: list[Float[Tensor, "n"]], z: tuple[None, Float[Tensor, "n"]]): ...

    message = refused(g, None, arr(3), (None, arr(3)))
    assert "  it is an array, float32 (3,), not a list" in message
    message = refused(g, None, [arr(3)], (arr(), arr(3)))
    assert "argument `z[0]`" in message
    assert "  it is an array, float32 (), not None" in message


def test_no_checker_is_imported():
    code = (
        "import sys, eqx_torch._annotations; "
        "assert not {'beartype', 'typeguard'} & set(sys.modules), 'a checker is imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_private_names_of_jaxtyping_stand_in_one_file():
    package = pathlib.Path(eqx_torch._annotations.__file__).parents[1]
    found = [path.name for path in package.rglob("*.py") if "jaxtyping._" in path.read_text()]
    assert found == ["_compat_jaxtyping.py"]


def test_speed():
    signature = read_signature(Attention())
    args, kwargs = (Q, (K, V)), {"lengths": LENGTHS}

    def call():
        signature.output(signature.bind(args, kwargs))

    call()
    assert min(timeit.repeat(call, number=20, repeat=5)) / 20 < 1e-3
