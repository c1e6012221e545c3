import functools
import gc
import operator
import types
import warnings
import weakref

import jax
import pytest
import torch
from beartype import beartype
from jaxtyping import Float, Float32, jaxtyped
from torch import nn, Tensor
from typeguard import typechecked

from eqx_torch._annotations import read_signature

from ..helpers import annotation_strings as strings
from ..helpers.annotations import arr, predict, refused, unreadable


Wide = Float[Tensor, "n m"]  # typeguard reads strings inside annotations as code
High = Float[Tensor, "m n"]
Row = Float[Tensor, "n"]
WEIGHT = torch.ones(3, 4)


def transpose(x: Wide, k: int = 2) -> High:
    return x.T


@typechecked
def guarded(x: Wide, k: int = 2) -> High:
    return x.T


def user_decorator(fn):
    @functools.wraps(fn)
    def wrapper(*args, **kwargs):
        return fn(*args, **kwargs)

    return wrapper


class Methods:
    def method(self, x: Wide) -> High: ...

    @classmethod
    def of_class(cls, x: Wide) -> High: ...

    @staticmethod
    def static(x: Wide) -> High: ...

    def __call__(self, x: Wide) -> High: ...

    @beartype
    def checked(self, x: Wide) -> High: ...


class Net(nn.Module):
    def forward(self, x: Wide) -> High:
        return x.T


class CheckedNet(nn.Module):
    @jaxtyped(typechecker=beartype)
    def forward(self, x: Wide) -> High:
        return x.T


def local_scope():
    Local = Wide

    def f(x: "Local") -> High:
        return Local and x

    return f


CALLABLES = {
    "function": transpose,
    "guarded": guarded,
    "jaxtyped": jaxtyped(typechecker=beartype)(transpose),
    "jaxtyped none": jaxtyped(typechecker=None)(transpose),
    "old style": jaxtyped(typechecker=None)(beartype(transpose)),
    "beartype": beartype(transpose),
    "wraps": user_decorator(transpose),
    "no_grad": torch.no_grad()(jaxtyped(typechecker=beartype)(transpose)),
    "twice": user_decorator(user_decorator(beartype(transpose))),
    "partial": functools.partial(transpose, k=3),
    "partial of partial": functools.partial(functools.partial(transpose), k=3),
    "tree partial": jax.tree_util.Partial(transpose, k=3),
    "method": Methods().method,
    "unbound": functools.partial(Methods.method, Methods()),
    "classmethod": Methods.of_class,
    "static": Methods.static,
    "object": Methods(),
    "checked method": Methods().checked,
    "module": Net(),
    "forward": Net().forward,
    "checked module": CheckedNet(),
    "eval module": CheckedNet().eval(),
    "strings": strings.plain,
    "strings module": strings.Net(),
    "strings wrapped": user_decorator(strings.plain),
    "strings partial": functools.partial(strings.plain, k=3),
    "closure": local_scope(),
}


@pytest.mark.parametrize("fn", CALLABLES.values(), ids=CALLABLES.keys())
def test_read(fn):
    assert predict(fn, arr(2, 3)) == arr(3, 2)
    message = refused(fn, arr(2, 3, 4))
    assert "it has 3 dimensions, must have 2" in message


@pytest.mark.parametrize("name", ["method", "module", "checked module", "function", "jaxtyped"])
def test_names_in_messages(name):
    expected = {
        "method": "Methods.method",
        "module": "Net.forward",
        "checked module": "CheckedNet.forward",
    }
    assert read_signature(CALLABLES[name]).name == expected.get(name, "transpose")


def test_compiled_modules_and_functions():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.compile's own imports
        compiled = [torch.compile(transpose), torch.compile(Net())]
    for fn in compiled:
        assert predict(fn, arr(2, 3)) == arr(3, 2)


def test_strings():
    assert predict(strings.nested, (arr(2), [arr(3)])) == strings.Out(arr(2), arr(3))
    assert predict(strings.tree, {"a": arr(2), "b": arr(3)}) == {"a": arr(2), "b": arr(3)}
    assert predict(strings.checked, arr(2, 4)) == arr(2, 4)
    assert predict(strings.partly_unknown, arr(2), object()) == arr(2)


def test_strings_that_cannot_be_evaluated():
    with pytest.warns(UserWarning, match="`x` is not checked.*name 'Matrix' is not defined"):
        signature = read_signature(strings.unknown)
    with pytest.warns(UserWarning, match="`x` is not checked.*name 'Matrix' is not defined"):
        assert read_signature(strings.half_string) is None
    signature.bind((arr(2, 2), arr(2, dtype="int32")), {})
    assert not signature.determines_output
    message = unreadable(strings.invalid)
    assert message == (
        "invalid: the annotation \"Float[Tensor, '*a *b']\" of `x` is invalid: Cannot use variadic"
        " specifiers (`*name` or `...`) more than once."
    )


def test_partial_arguments_bind_names():
    def linear(w: Float[Tensor, "out in"], x: Float[Tensor, "b in"]) -> Float[Tensor, "b out"]: ...

    f = functools.partial(linear, torch.zeros(5, 3))
    assert predict(f, arr(2, 3)) == arr(2, 5)
    message = refused(f, arr(2, 4))
    assert "in = 3, from argument `w`, dimension 1" in message
    g = functools.partial(linear, x=torch.zeros(2, 3))
    assert predict(g, arr(5, 3)) == arr(2, 5)
    assert predict(g, arr(5, 4), x=arr(7, 4)) == arr(7, 5)

    def star(*xs: Float[Tensor, "n"], k: int = 0) -> Float[Tensor, "n"]: ...

    def named(x: Float[Tensor, "n"], **xs: Float[Tensor, "n"]) -> Float[Tensor, "n"]: ...

    assert predict(functools.partial(named, y=torch.zeros(3)), arr(3)) == arr(3)
    refused(functools.partial(named, y=torch.zeros(3)), arr(4))
    assert predict(functools.partial(star, torch.zeros(3), torch.zeros(3)), arr(3)) == arr(3)
    refused(functools.partial(star, torch.zeros(3), torch.zeros(4)), arr(3))


def test_given_arguments_are_not_kept_alive():
    module = Net()
    signature = read_signature(module)
    tensor = torch.zeros(3, 4)
    bound = read_signature(functools.partial(transpose, tensor))
    references = weakref.ref(module), weakref.ref(tensor)
    del module, tensor
    gc.collect()
    assert [reference() for reference in references] == [None, None]
    assert signature.output(signature.bind((arr(2, 3),), {})) == arr(3, 2)
    assert bound.output(bound.bind((), {})) == arr(4, 3)


def test_keyword_arguments_and_defaults():
    assert predict(transpose, x=arr(2, 3), k=7) == arr(3, 2)


def test_nothing_to_read():
    class Plain(nn.Module):
        def forward(self, x: Tensor) -> Tensor: ...

    def plain(x, y: Tensor, z: int) -> tuple[Tensor, int]: ...

    for fn in (plain, Plain(), nn.Linear(2, 3), operator.add, torch.sin, len, nn.Linear):
        assert read_signature(fn) is None


def test_inputs_only():
    def f(x: Wide) -> Tensor: ...

    signature = read_signature(f)
    assert not signature.determines_output
    assert signature.output(signature.bind((arr(2, 3),), {})) is None
    assert "must have 2" in refused(f, arr(2))


def test_result_only():
    def f(x) -> tuple[Float32[Tensor, "3"], None]: ...

    def g(x) -> Float[Tensor, "3"]: ...

    def h(x) -> jax.Array: ...

    assert "no annotated input has a dtype" in unreadable(g)
    assert predict(f, arr(7)) == (arr(3), None)
    assert read_signature(h) is None


def test_result_ignored_on_request():
    def f(x: Wide) -> Float[Tensor, "..."]: ...

    unreadable(f)
    signature = read_signature(f, result=False)
    assert not signature.determines_output
    assert signature.bind((arr(2, 3),), {}).names == {"n": 2, "m": 3}
    assert read_signature(lambda: 0, result=False) is None


def test_a_stub_for_a_module_that_cannot_be_edited():
    def stub(
        self, x: Float[Tensor, "b {self.in_features}"]
    ) -> Float[Tensor, "b {self.out_features}"]: ...

    assert predict(types.MethodType(stub, nn.Linear(3, 5)), arr(2, 3)) == arr(2, 5)


def test_arguments_that_do_not_fit():
    def f(x: Wide): ...

    with pytest.raises(TypeError, match=r"f: missing a required argument: 'x'"):
        read_signature(f).bind((), {})


def test_star_arguments():
    def f(*xs: Row, k: int = 3, **named: Float[Tensor, "n 2"]) -> Row: ...

    assert predict(f, arr(3), arr(3), a=arr(3, 2)) == arr(3)
    assert "argument `xs[1]`" in refused(f, arr(3), arr(4))
    assert "argument `b`" in refused(f, arr(3), a=arr(3, 2), b=arr(4, 2))


def test_defaults():
    def f(x: Row, y: Row = None, z: Row = 1.0) -> Row: ...

    assert predict(f, arr(3)) == predict(f, arr(3), None, 1.0) == arr(3)
    refused(f, arr(3), arr(4))
    refused(f, arr(3), arr(3), 2.0)

    def g(x: Row, w: Float[Tensor, "n m"] = WEIGHT) -> Float[Tensor, "m"]: ...

    assert predict(g, arr(3)) == arr(4)
    assert "argument `w`" in refused(g, arr(4))
