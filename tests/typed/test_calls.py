"""Functions with jaxtyping annotations: checked when JAX traces, run only by the program."""

import dataclasses
import functools
from typing import NamedTuple, TypedDict

import jax
import jax.numpy as jnp
import pytest
import torch
import typeguard
from beartype import beartype
from jaxtyping import Bool, Float, Float32, Float64, Int, Int64, jaxtyped, PyTree, Shaped
from torch import Tensor

from eqx_torch import AnnotationError, InputError, ShapeError, torch2jax

from ..helpers import assert_trees_equal
from ..helpers.annotations import Runs


# typeguard reads aliases, but not jaxtyping's strings in place.
Rows = Float[Tensor, "n d"]
Scale = Float[Tensor, "d"]

CHECKERS = {
    "none": lambda fn: fn,
    "beartype": beartype,
    "jaxtyped": jaxtyped(typechecker=beartype),
    "jaxtyped none": lambda fn: jaxtyped(typechecker=None)(beartype(fn)),
    "typeguard": typeguard.typechecked,
    "jaxtyped typeguard": jaxtyped(typechecker=typeguard.typechecked),
}
every_checker = pytest.mark.parametrize("checker", CHECKERS.values(), ids=CHECKERS)
# typeguard does not find functions that are defined in functions under another decorator.
pytestmark = pytest.mark.filterwarnings("ignore:instrumentor did not find")

X = jnp.arange(12.0).reshape(4, 3) / 12
S = jnp.array([1.0, 2.0, 3.0])


@pytest.fixture
def runs():
    """The shape of the first argument, for each time that torch runs."""
    return Runs()


def softmax(runs, checker=lambda fn: fn):
    """An annotated function that takes note of its runs."""

    @checker
    def softmax(x: Rows, scale: Scale) -> Rows:
        runs.append(tuple(x.shape))
        return torch.softmax(x * scale, -1)

    return softmax


def twin(x, scale):
    return jax.nn.softmax(x * scale, -1)


def unannotated(runs):
    def softmax(x, scale):
        runs.append(tuple(x.shape))
        return torch.softmax(x * scale, -1)

    return softmax


def stub(x: Rows, scale: Scale) -> Rows: ...


DECLARED = {
    "annotations": lambda runs: torch2jax(softmax(runs)),
    "signature": lambda runs: torch2jax(unannotated(runs), signature=stub),
    "output_shapes": lambda runs: torch2jax(
        unannotated(runs), output_shapes=jax.ShapeDtypeStruct((4, 3), "float32")
    ),
    "function": lambda runs: torch2jax(unannotated(runs), output_shapes=lambda x, scale: x),
    "both": lambda runs: torch2jax(softmax(runs), output_shapes=lambda x, scale: x),
    "examples": lambda runs: torch2jax(softmax(runs), X, S),
}

TRANSFORMED = {
    "jit": lambda f: f,
    "grad": lambda f: jax.grad(lambda x, scale: f(x, scale)[:, 0].sum(), (0, 1)),
    "jvp": lambda f: lambda x, scale: jax.jvp(f, (x, scale), (x, scale)),
    "hessian": lambda f: jax.hessian(lambda x, scale: f(x, scale)[0, 0]),
    "vmap": lambda f: lambda x, s: jax.vmap(f, (None, 0))(x, jnp.stack([s, 2 * s])),
    "vmap of grad": lambda f: (
        lambda x, s: jax.vmap(jax.grad(lambda x: f(x, s)[0, 0]))(jnp.stack([x, 2 * x]))
    ),
    "checkpoint": lambda f: jax.grad(lambda x, s: jax.checkpoint(f)(x, s)[:, 0].sum()),
    "scan": lambda f: lambda x, s: jax.lax.scan(lambda c, s: (f(c, s), None), x, s[None])[0],
}


@pytest.mark.parametrize(
    ("declared", "transform"),
    [("annotations", one) for one in TRANSFORMED] + [(one, "grad") for one in DECLARED],
)
def test_torch_runs_only_in_the_compiled_program(declared, transform, runs):
    transformed = TRANSFORMED[transform]
    f = transformed(DECLARED[declared](runs))
    traced = jax.jit(f).lower(X, S)
    compiled = traced.compile()
    assert jax.tree.leaves(traced.out_info)[0].shape is not None
    jax.eval_shape(f, X, S)
    jax.make_jaxpr(f)(X, S)
    assert runs == []
    actual = compiled(X, S)
    assert runs != []
    assert_trees_equal(actual, transformed(twin)(X, S), rtol=1e-5)


def test_one_run_for_one_call(runs):
    f = torch2jax(softmax(runs))
    jax.jit(f)(X, S).block_until_ready()
    assert runs == [(4, 3)]
    jax.vmap(f, (0, None))(jnp.stack([X, X]), S).block_until_ready()
    assert len(runs) == 2


def test_without_a_declaration_it_is_run(runs):
    jax.eval_shape(torch2jax(unannotated(runs)), X, S)
    assert runs == [(4, 3)]


def test_only_arguments_are_annotated(runs):
    def f(x: Float[Tensor, "n d"], scale: Float[Tensor, "d"]):
        runs.append(tuple(x.shape))
        return x * scale

    with pytest.raises(ShapeError, match="dimension 0 \\(`d`\\) is 4, must be 3"):
        jax.eval_shape(torch2jax(f), X, jnp.ones(4))
    assert runs == []
    assert jax.eval_shape(torch2jax(f), X, S).shape == (4, 3)
    assert runs == [(4, 3)]


WRONG = (
    "softmax: argument `scale` does not match its annotation.\n"
    "  annotation: Float[Tensor, 'd']\n"
    "  expected: Float (d=3,)\n"
    "  actual: float32 (2,)\n"
    "  dimension 0 (`d`) is 2, must be 3\n"
    "names bound in this call:\n"
    "  n = 4, from argument `x`, dimension 0\n"
    "  d = 3, from argument `x`, dimension 1"
)
TRACED = {
    "eager": lambda f: f,
    "jit": jax.jit,
    "eval_shape": lambda f: functools.partial(jax.eval_shape, f),
    "grad": lambda f: jax.grad(lambda x, s: f(x, s).sum()),
    "vmap": lambda f: lambda x, s: jax.vmap(f)(jnp.stack([x, x]), jnp.stack([s, s])),
    "cond": lambda f: lambda x, s: jax.lax.cond(True, f, lambda x, s: x, x, s),
}


@pytest.mark.parametrize(
    ("checker", "traced"),
    [("jaxtyped", one) for one in TRACED] + [(one, "jit") for one in CHECKERS],
)
def test_a_wrong_shape_is_refused_when_traced(checker, traced, runs):
    with pytest.raises(ShapeError) as caught:
        TRACED[traced](torch2jax(softmax(runs, CHECKERS[checker])))(X, S[:2])
    assert str(caught.value) == WRONG
    assert runs == []


@every_checker
def test_checkers_do_not_disturb(checker, runs):
    f = torch2jax(softmax(runs, checker))
    loss = jax.jit(jax.value_and_grad(lambda x, s: f(x, s)[:, 0].sum(), (0, 1)))
    expected = jax.value_and_grad(lambda x, s: twin(x, s)[:, 0].sum(), (0, 1))
    assert_trees_equal(loss(X, S), expected(X, S), rtol=1e-5)
    batch = jnp.stack([X, 2 * X])
    assert_trees_equal(
        jax.vmap(f, (0, None))(batch, S), jax.vmap(twin, (0, None))(batch, S), rtol=1e-5
    )


def test_under_vmap_the_annotation_speaks_of_one_example(runs):
    @jaxtyped(typechecker=beartype)
    def norm(x: Float[Tensor, "3"]) -> Float[Tensor, ""]:
        runs.append(tuple(x.shape))
        return x.norm()

    f = torch2jax(norm)
    batch = jnp.ones((5, 3))
    assert_trees_equal(jax.vmap(f)(batch), jnp.linalg.norm(batch, axis=1))
    assert_trees_equal(
        jax.vmap(jax.vmap(f), 1)(batch[None]), jnp.linalg.norm(batch[:, None], axis=2)
    )
    runs.clear()
    with pytest.raises(ShapeError) as caught:
        jax.vmap(f, 1)(batch)
    assert str(caught.value) == (
        "norm: argument `x` does not match its annotation.\n"
        "  annotation: Float[Tensor, '3']\n"
        "  expected: Float (3,)\n"
        "  actual: float32 (5,)\n"
        "  dimension 0 is 5, must be 3"
    )
    with pytest.raises(ShapeError, match="it has 2 dimensions, must have 1"):
        f(batch)
    assert runs == []


# Results in containers


class Pair(NamedTuple):
    top: Float[Tensor, "k=2"]
    rest: tuple[Float[Tensor, "n-2"], None]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Stats:
    mean: Float[Tensor, ""]
    spread: Float[Tensor, "n n"]


class Named(TypedDict):
    sign: Bool[Tensor, "n"]
    order: Int64[Tensor, "n"]


def to_tuple(x: Float[Tensor, "n"]) -> tuple[Float[Tensor, "n n"], tuple[Int64[Tensor, "n"], None]]:
    return x[:, None] * x, (x.argsort(), None)


def to_pair(x: Float[Tensor, "n"]) -> Pair:
    return Pair(x[:2], (x[2:], None))


def to_stats(x: Float[Tensor, "n"]) -> Stats:
    return Stats(x.mean(), x[:, None] - x)


def to_dict(x: Float[Tensor, "n"]) -> Named:
    return {"sign": x > 0, "order": x.argsort()}


def to_tree(x: PyTree[Float[Tensor, "?n"], "T"]) -> PyTree[Float[Tensor, "?n 2"], "T"]:
    return jax.tree.map(lambda one: torch.stack([one, -one], -1), x)


def topk(x: Float[Tensor, "n"]) -> tuple[Float[Tensor, "2"], Int64[Tensor, "2"]]:
    return torch.topk(x, 2)


V = jnp.array([0.5, -1.0, 3.0, 0.0])
RESULTS = {
    to_tuple: lambda x: (x[:, None] * x, (x.argsort(), None)),
    to_pair: lambda x: Pair(x[:2], (x[2:], None)),
    to_stats: lambda x: Stats(x.mean(), x[:, None] - x),
    to_dict: lambda x: {"sign": x > 0, "order": x.argsort()},
    topk: lambda x: tuple(jax.lax.top_k(x, 2)),
}


@dataclasses.dataclass
class Unregistered:
    least: Float[Tensor, ""]
    rest: tuple[Float[Tensor, "n"], None]


def test_results_of_classes_that_jax_does_not_know():
    def least(x: Float[Tensor, "n"]) -> Unregistered:
        return Unregistered(x.min(), (x - x.min(), None))

    for f in (torch2jax(least), jax.jit(torch2jax(least))):
        result = f(V)
        assert isinstance(result, Unregistered)
        assert_trees_equal((result.least, result.rest), (V.min(), (V - V.min(), None)))


@pytest.mark.parametrize("fn", RESULTS, ids=lambda fn: fn.__name__)
def test_results_in_containers(fn):
    f, expected = torch2jax(fn), RESULTS[fn](V)
    assert jax.tree.structure(jax.eval_shape(f, V)) == jax.tree.structure(expected)
    assert_trees_equal(f(V), expected)
    assert_trees_equal(jax.jit(f)(V), expected)
    batch = jnp.stack([V, 2 * V])
    assert_trees_equal(jax.vmap(f)(batch), jax.vmap(RESULTS[fn])(batch))


def test_trees_keep_their_structure():
    tree = {"a": (jnp.ones(2), jnp.zeros(3)), "b": [jnp.ones(0)]}
    expected = jax.tree.map(lambda one: jnp.stack([one, -one], -1), tree)
    assert_trees_equal(torch2jax(to_tree)(tree), expected)


# Arguments of all kinds


def scaled(
    x: Float[Tensor, "n"],
    bias: Float[Tensor, "n"] | None = None,
    *,
    mask: Bool[Tensor, "n"] | Int[Tensor, "n"] | None = None,
    factor: float = 2.0,
) -> Float[Tensor, "n"]:
    y = factor * x if bias is None else factor * x + bias
    return y if mask is None else torch.where(mask.bool(), y, 0)


def test_optional_arguments_and_unions(runs):
    f, mask = torch2jax(scaled), V > 0
    assert_trees_equal(f(V), 2 * V)
    assert_trees_equal(f(V, V, factor=3.0), 4 * V)
    for one in (mask, mask.astype(jnp.int32)):
        assert_trees_equal(f(V, mask=one), jnp.where(mask, 2 * V, 0))
    assert_trees_equal(jax.grad(lambda b: f(V, b).sum())(V), jnp.ones(4))
    with pytest.raises(
        ShapeError, match="argument `bias`(.|\n)*dimension 0 \\(`n`\\) is 3, must be 4"
    ):
        f(V, V[:3])
    with pytest.raises(ShapeError, match="argument `mask`(.|\n)*dtype float32 is not"):
        f(V, mask=V)
    with pytest.raises(InputError, match="^scaled: got an unexpected keyword argument 'size'$"):
        f(V, size=3)


def test_partials():
    first = torch2jax(functools.partial(scaled, factor=3.0))
    assert_trees_equal(first(V), 3 * V)
    second = torch2jax(functools.partial(scaled, torch.ones(4)))
    assert_trees_equal(second(V), 2 + V)
    with pytest.raises(ShapeError) as caught:
        second(V[:3])
    assert str(caught.value) == (
        "scaled: argument `bias` does not match its annotation.\n"
        "  annotation: Float[Tensor, 'n']\n"
        "  expected: Float (n=4,)\n"
        "  actual: float32 (3,)\n"
        "  dimension 0 (`n`) is 3, must be 4\n"
        "names bound in this call:\n"
        "  n = 4, from argument `x`, dimension 0"
    )


class Scaler:
    def __init__(self, width):
        self.width = width

    def __call__(self, x: Float[Tensor, "n {self.width}"]) -> Float[Tensor, "{self.width} n"]:
        return x.T

    @jaxtyped(typechecker=beartype)
    def double(self, x: Float[Tensor, "n"]) -> Float[Tensor, "2*n"]:
        return torch.cat([x, x])

    @staticmethod
    def plain(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return -x


def test_methods_and_callable_objects():
    assert_trees_equal(torch2jax(Scaler(3))(X), X.T)
    with pytest.raises(ShapeError, match="dimension 1 \\(`{self.width}`\\) is 3, must be 2"):
        torch2jax(Scaler(2))(X)
    assert_trees_equal(torch2jax(Scaler(3).double)(V), jnp.concatenate([V, V]))
    assert_trees_equal(torch2jax(Scaler.plain)(V), -V)


def test_any_dtype_and_structures_of_arguments():
    def join(
        xs: list[Shaped[Tensor, "_ d"]], index: dict[str, Int[Tensor, ""]]
    ) -> Shaped[Tensor, "d"]:
        return torch.cat(xs)[index["row"]]

    f = torch2jax(join)
    for dtype in (jnp.float32, jnp.int32, jnp.bool_):
        xs = [jnp.ones((2, 3), dtype), jnp.zeros((1, 3), dtype)]
        assert_trees_equal(f(xs, {"row": jnp.array(2)}), jnp.zeros(3, dtype))
    with pytest.raises(ShapeError, match="argument `xs\\[1\\]`"):
        f([jnp.ones((2, 3)), jnp.ones((2, 2))], {"row": jnp.array(0)})


# 64 bits


def labels(x: Float32[Tensor, "n c"]) -> tuple[Int64[Tensor, "n"], Float64[Tensor, "n"]]:
    return x.argmax(-1), x.double().sum(-1)


def test_64_bits_follow_the_setting_of_jax():
    f, x = torch2jax(labels), X.astype(jnp.float32)
    assert [one.dtype for one in f(x)] == [jnp.int32, jnp.float32]
    with jax.enable_x64(True):
        assert [one.dtype for one in jax.block_until_ready(f(x))] == [jnp.int64, jnp.float64]
    assert [one.dtype for one in jax.block_until_ready(f(x))] == [jnp.int32, jnp.float32]


def test_64_bit_arguments_without_x64(runs):
    @jaxtyped(typechecker=beartype)
    def nll(logits: Float[Tensor, "n c"], y: Int64[Tensor, "n"]) -> Float[Tensor, ""]:
        runs.append(y.dtype)
        return torch.nn.functional.cross_entropy(logits, y)

    y = jnp.array([0, 1, 2, 0], jnp.int32)
    f = torch2jax(nll, X, torch.zeros(4, dtype=torch.int64))
    assert runs == []
    expected = -jnp.take_along_axis(jax.nn.log_softmax(X), y[:, None], 1).mean()
    assert_trees_equal(f(X, y), expected)
    assert runs == [torch.int64]


def test_a_family_follows_the_inputs(x64):
    def mean(x: Float[Tensor, "n"], w: Float[Tensor, ""]) -> Float[Tensor, ""]:
        return (x * w).mean()

    f = torch2jax(mean)
    for dtype in (jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64):
        x = jnp.ones(3, dtype)
        assert f(x, jnp.ones((), dtype)).dtype == dtype
        assert f(x, jnp.ones((), jnp.float64)).dtype == dtype


# Stubs


def test_a_stub_speaks_for_the_function(runs):
    f = torch2jax(unannotated(runs), signature=functools.partial(stub))
    with pytest.raises(ShapeError, match="^stub: argument `scale` does not match"):
        f(X, S[:2])
    assert runs == []
    assert_trees_equal(f(X, S), twin(X, S), rtol=1e-5)

    def narrow(x: Float[Tensor, "4 3"], scale) -> Float[Tensor, "4 3"]: ...

    annotated = torch2jax(softmax(runs), signature=narrow)
    with pytest.raises(ShapeError, match="^narrow: argument `x`"):
        annotated(X[:2], S)


def test_a_stub_may_be_partial():
    def stub(x: Float[Tensor, "n"], size: int) -> Float[Tensor, "n {size}"]: ...

    f = torch2jax(lambda x: x[:, None].expand(-1, 5), signature=functools.partial(stub, size=5))
    assert_trees_equal(f(V), jnp.broadcast_to(V[:, None], (4, 5)))


def test_a_stub_may_have_self():
    def stub(self, x: Float[Tensor, "n {self.width}"]) -> Float[Tensor, "{self.width} n"]: ...

    for fn in (Scaler(3), Scaler(3).__call__, functools.partial(Scaler(3))):
        f = torch2jax(fn, signature=stub)
        assert_trees_equal(f(X), X.T)
        with pytest.raises(ShapeError, match="dimension 1 \\(`{self.width}`\\) is 4, must be 3"):
            f(X.T)

    def sized(self, x: Float[Tensor, "n m"]) -> Float[Tensor, "m n"]: ...

    assert_trees_equal(torch2jax(lambda x: x.T, signature=sized)(X), X.T)


def test_a_stub_says_something():
    with pytest.raises(AnnotationError) as caught:
        torch2jax(torch.sin, signature=lambda x: x)
    assert str(caught.value) == (
        "`signature=<lambda>` has no jaxtyping annotations. Pass a function such as "
        '`def stub(x: Float[Tensor, "b n"]) -> Float[Tensor, "b"]: ...`.'
    )
    with pytest.raises(InputError) as caught:
        torch2jax(torch.sin, signature=3)
    assert str(caught.value) == "`signature=3` is of type int; pass an annotated function."


def test_builtins_take_a_stub(runs):
    def stub(a: Float[Tensor, "*b n k"], b: Float[Tensor, "*b k m"]) -> Float[Tensor, "*b n m"]: ...

    f = torch2jax(torch.matmul, signature=stub)
    assert_trees_equal(f(X, X.T), X @ X.T)
    with pytest.raises(ShapeError, match="dimension 0 \\(`k`\\) is 4, must be 3"):
        f(X, X)


# What torch really returns


def mismatch(fn, *args, **options):
    """The last lines of the error that a call ends with."""
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        jax.block_until_ready(jax.jit(torch2jax(fn, **options))(*args))
    message = str(caught.value)
    start = max(message.find(kind) for kind in ("ShapeError: ", "OutputError: "))
    return message[start:].splitlines()[:3]


def test_another_shape_is_returned():
    def f(x: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
        return x[:, :-1]

    assert mismatch(f, X) == [
        "ShapeError: `f` returned another shape than was declared.",
        "  declared by its annotation Float[Tensor, 'n d']: float32[4, 3]",
        "  returned: float32[4, 2]",
    ]
    assert mismatch(lambda x: x[:2], X, output_shapes=lambda x: x)[1:] == [
        "  declared by output_shapes: float32[4, 3]",
        "  returned: float32[2, 3]",
    ]


def test_another_dtype_is_returned():
    def f(x: Float[Tensor, "n d"]) -> tuple[Float[Tensor, "n d"], Int64[Tensor, "n"]]:
        return x, x.argmax(1).float()

    assert mismatch(f, X) == [
        "OutputError: `f` returned another dtype than was declared at output[1].",
        "  declared by its annotation tuple[Float[Tensor, 'n d'], Int64[Tensor, 'n']]: int32[4]",
        "  returned: float32[4]",
    ]


def test_another_structure_is_returned():
    def f(x: Float[Tensor, "n d"]) -> tuple[Float[Tensor, "n d"], Float[Tensor, "n"]]:
        return {"a": x, "b": x[:, 0]}

    assert mismatch(f, X) == [
        "OutputError: `f` returned another structure than was declared.",
        "  declared by its annotation tuple[Float[Tensor, 'n d'], Float[Tensor, 'n']]: (*, *)",
        "  returned: {'a': *, 'b': *}",
    ]

    def g(x: Float[Tensor, "n d"]) -> Float[Tensor, ""]:
        return "text"

    message = "OutputError: `g` returned 'text' of type str, where a tensor was declared."
    assert mismatch(g, X)[0] == message


def test_a_good_call_after_a_bad_one():
    def f(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return x[1:] if x[0] < 0 else x

    call = jax.jit(torch2jax(f))
    with pytest.raises(jax.errors.JaxRuntimeError, match="returned another shape"):
        jax.block_until_ready(call(-V))
    assert_trees_equal(call(V), V)


# Refused when wrapped


def test_what_leaves_the_result_open_is_refused_when_wrapped(runs):
    def f(x: Float[Tensor, "n"]) -> Float[Tensor, "m"]:
        runs.append(0)
        return x

    with pytest.raises(AnnotationError) as caught:
        torch2jax(f)
    assert str(caught.value) == (
        "f: the annotation Float[Tensor, 'm'] does not determine the result: `m` is bound by no"
        " input.\nBind it by an input, use a number, or pass output_shapes=."
    )
    declared = torch2jax(f, output_shapes=lambda x: x)
    assert_trees_equal(declared(V), V)
    with pytest.raises(ShapeError, match="it has 2 dimensions, must have 1"):
        declared(X)

    def g(n: int) -> Float[Tensor, "3"]: ...

    with pytest.raises(AnnotationError, match="no annotated input has a dtype of it to follow"):
        torch2jax(g)


def test_output_shapes_as_a_function_sees_structs(runs):
    seen = []

    def shapes(x, *, parts, size):
        seen.append((x, parts, size))
        return (x.shape[0], size), parts

    def f(x, *, parts, size):
        runs.append(tuple(x.shape))
        return x[:, :1].expand(-1, size), parts

    call = torch2jax(f, output_shapes=shapes)
    assert_trees_equal(call(X, parts=[V], size=5), (jnp.broadcast_to(X[:, :1], (4, 5)), [V]))
    assert runs == [(4, 3)]
    struct = jax.ShapeDtypeStruct
    assert seen == [(struct((4, 3), "float32"), [struct((4,), "float32")], 5)]
