"""Functions that write to their inputs work on copies; JAX arrays never change."""

import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from eqx_torch import from_torch, InputError, torch2jax

from ..helpers import assert_trees_equal
from ..helpers.twins import random_array


def _in_place(x):
    return x.add_(1)


def _item(x):
    x[0] = 0
    return x * 2


def _by_view(x):
    x.view(-1)[1:].mul_(3)
    return x


def _by_data(x):
    x.data.add_(1)
    return x * 1


def _by_numpy(x):
    x.detach().numpy()[0] = 5
    return x * 1


def _by_numpy_zero(x):
    x.detach().numpy()[:] = 0
    return x * 1


def _by_out(x):
    torch.sin(x.detach(), out=x.detach())
    return x * 1


def _by_array_protocol(x):
    import numpy as np

    np.asarray(x.detach())[0] = 7
    return x * 1


WRITERS = {
    "in place": (_in_place, lambda x: x + 1),
    "item": (_item, lambda x: x.at[0].set(0) * 2),
    "view": (_by_view, lambda x: x.at[1:].multiply(3)),
    "data": (_by_data, lambda x: x + 1),
    "numpy": (_by_numpy, lambda x: x.at[0].set(5)),
    "numpy zero": (_by_numpy_zero, lambda x: x * 0),
    "out": (_by_out, jnp.sin),
    "array protocol": (_by_array_protocol, lambda x: x.at[0].set(7)),
}
every_writer = pytest.mark.parametrize(("f", "twin"), WRITERS.values(), ids=WRITERS)
zeros_run = pytest.mark.filterwarnings("ignore:the output shapes of")


@zeros_run
@every_writer
@pytest.mark.parametrize("declared", [False, True], ids=["inferred", "declared"])
@pytest.mark.parametrize("start", [0.0, 2.0])
@pytest.mark.covering
def test_the_argument_keeps_its_values(f, twin, declared, start):
    """Also where the first call happens to write what was there."""
    wrapped = torch2jax(f, output_shapes=(lambda x: x) if declared else None)
    jitted = jax.jit(wrapped)
    for values in (jnp.full(4, start), jnp.arange(4.0) + 1, jnp.arange(4.0) - 7):
        before = jnp.array(values)
        for call in (wrapped, jitted):
            assert_trees_equal(call(values), twin(before))
            assert_trees_equal(values, before, exact=True)


@pytest.mark.parametrize("name", ["in place", "item", "view"])
@pytest.mark.parametrize("declared", [False, True], ids=["inferred", "declared"])
@pytest.mark.covering
def test_under_transformations(getkey, name, declared):
    f, twin = WRITERS[name]
    x = random_array(getkey, (3, 4))
    before = jnp.array(x)
    f = torch2jax(f, output_shapes=(lambda x: x) if declared else None)

    def everything(f):
        gradient = jax.grad(lambda x: (f(x) ** 3).sum())
        return jax.jit(
            lambda x: (
                f(x),
                gradient(x),
                jax.vmap(f)(x),
                jax.vmap(gradient)(x),
                jax.jvp(f, (x,), (x,)),
                jax.jvp(gradient, (x,), (x,)),
                jax.grad(lambda x: (jax.vmap(f)(x) ** 3).sum())(x),
            )
        )(x)

    if name == "view":
        twin = lambda x: x.reshape(-1).at[1:].multiply(3).reshape(x.shape)  # noqa: E731
    assert_trees_equal(everything(f), everything(twin), rtol=1e-5)
    assert_trees_equal(jax.grad(lambda x: f(x).sum())(x), jax.grad(lambda x: twin(x).sum())(x))
    assert_trees_equal(x, before, exact=True)


def test_only_what_is_written_is_copied_where_the_code_names_no_way_to_write():
    addresses = []
    address = operator.methodcaller("data_ptr")

    def f(x, y):
        # Seen, this would give the memory away to who may write to it.
        with torch._C.DisableTorchFunction():
            addresses.append((address(x), address(y)))
        return operator.iadd(x, y)

    x, y = jnp.ones(16), jnp.ones(16)
    g = torch2jax(f, output_shapes=x)
    for _ in range(2):
        assert_trees_equal(g(x, y), x + y)
    assert addresses[1][0] != x.unsafe_buffer_pointer()
    assert addresses[1][1] == y.unsafe_buffer_pointer()


# Each writes to its argument for some dtypes, and to a copy of it for the others.
ALIASING = {
    "float, by NumPy": (lambda x: x.float(), lambda y: y.detach().numpy()),
    "bfloat16, by data": (lambda x: x.to(torch.bfloat16), lambda y: y.data),
    "contiguous rows": (lambda x: x.T.contiguous() if x.ndim == 2 else x, lambda y: y.detach()),
    "as the first element says": (lambda x: x.double() if x.ndim else x, lambda y: y.data),
}
KINDS = [
    (dtype, shape)
    for dtype in ("float32", "bfloat16", "float16", "float32", "bfloat16")
    for shape in ((4,), (2, 3), ())
]


@zeros_run
@pytest.mark.parametrize("declared", [False, True], ids=["inferred", "declared"])
@pytest.mark.parametrize(("alias", "memory"), ALIASING.values(), ids=ALIASING)
@pytest.mark.covering(4)
def test_what_is_written_depends_on_dtype_and_shape(alias, memory, declared):
    def f(x):
        y = alias(x)
        m = memory(y)
        m *= 2
        return y * 1

    def expected(x):
        return f(torch.tensor(x.astype(jnp.float32).tolist()).to(getattr(torch, str(x.dtype))))

    like = lambda x: jax.ShapeDtypeStruct(*_like(expected(jnp.ones(x.shape, x.dtype))))  # noqa: E731
    wrapped = torch2jax(f, output_shapes=like if declared else None)
    for call in (wrapped, jax.jit(wrapped)):
        for dtype, shape in [*KINDS, *reversed(KINDS)]:
            x = (jnp.arange(1, 1 + np.prod(shape, dtype=int)).reshape(shape)).astype(dtype)
            before = np.array(x)
            y = call(x)
            assert_trees_equal(y, expected(jnp.asarray(before)))
            np.testing.assert_array_equal(np.asarray(x), before)


def _like(x):
    return tuple(x.shape), str(x.dtype).removeprefix("torch.").replace("float64", "float32")


class WritesWideGradient(torch.autograd.Function):
    """x * 2, whose backward doubles its gradient where it is of 32 bits, in ways hard to see."""

    way = "numpy"

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        g = g.float()
        memory = g.numpy() if WritesWideGradient.way == "numpy" else g.data
        memory *= 2
        return g


@pytest.mark.parametrize("way", ["numpy", "data"])
@pytest.mark.parametrize("residuals", ["tape", "recompute"])
@pytest.mark.parametrize("start", [0.0, 3.0])
@pytest.mark.covering
def test_what_a_backward_writes_depends_on_dtype_and_shape(monkeypatch, way, residuals, start):
    """Also where the first call happens to write what was there."""
    monkeypatch.setattr(WritesWideGradient, "way", way)
    f = torch2jax(lambda x: WritesWideGradient.apply(x), residuals=residuals)
    for shape in ((4,), (2, 3), (4,)):
        for dtype in ("bfloat16", "float32", "bfloat16", "float32"):
            x = jnp.ones(shape, dtype)
            for u in (jnp.full(shape, start, dtype), jnp.full(shape, 5, dtype)):
                before = np.array(u)
                for pull in (jax.vjp(f, x)[1], jax.jit(lambda u, x=x: jax.vjp(f, x)[1](u))):
                    assert_trees_equal(pull(u)[0], jnp.asarray(2 * before))
                    np.testing.assert_array_equal(np.asarray(u), before)


def test_one_array_as_two_arguments():
    x = jnp.arange(4.0)
    f = torch2jax(lambda x, y: (x.add_(1), y * 1))
    assert_trees_equal(f(x, x), (x + 1, x))
    assert_trees_equal(jax.jit(lambda x: f(x, x))(x), (x + 1, x))


def test_a_write_that_comes_later_is_an_error_once():
    """Whether it writes depends on values, and how it does is not in its code."""
    zero = operator.methodcaller("zero_")

    def f(x):
        y = x * 2
        if (x > 0).all():
            zero(x)
        return y

    wrapped = jax.jit(torch2jax(f, output_shapes=lambda x: x))
    assert_trees_equal(wrapped(-jnp.ones(3)), -2 * jnp.ones(3))
    message = (
        "`f` wrote to its input argument 0 on this call, but not on the first one, so the JAX "
        "array behind it has been changed in place. Later calls work on a copy. To avoid this, "
        "write to a copy in the function itself: `x = x.clone()`."
    )
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError)) as info:
        jax.block_until_ready(wrapped(jnp.ones(3)))
    assert message in str(info.value)
    assert InputError.__name__ in str(info.value)
    x = jnp.ones(3)
    assert_trees_equal(wrapped(x), 2 * x)
    assert_trees_equal(x, jnp.ones(3))


class ScalesGradient(torch.autograd.Function):
    """x * 2, whose backward may write to the gradient that it is given, by no name in its code."""

    writes = True
    double = operator.methodcaller("mul_", 2)

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return ScalesGradient.double(g) if ScalesGradient.writes else g * 2


GRADIENTS = {
    "eager": lambda f, x: jax.grad(f)(x),
    "jit": lambda f, x: jax.jit(jax.grad(f))(x),
    "vmap": lambda f, x: jax.vmap(jax.grad(lambda x: f(x[None])))(x),
    "second derivative": lambda f, x: jax.grad(lambda x: (jax.grad(f)(x) ** 2).sum())(x),
    "pullback": lambda f, x: jax.vjp(jax.grad(f), x)[1](x),
    "remat": lambda f, x: jax.grad(jax.checkpoint(f))(x),
}


@pytest.mark.parametrize("how", GRADIENTS.values(), ids=GRADIENTS)
@pytest.mark.parametrize("residuals", ["tape", "recompute"])
@pytest.mark.covering
def test_a_backward_that_writes_to_the_gradient_it_is_given(getkey, how, residuals):
    f = torch2jax(ScalesGradient.apply, residuals=residuals, vmap_method="sequential")
    x = random_array(getkey, (5,))
    for _ in range(2):
        actual = how(lambda x: (f(x) ** 3).sum(), x)
        assert_trees_equal(actual, how(lambda x: ((2 * x) ** 3).sum(), x), rtol=1e-4)


def test_a_cotangent_of_the_user_keeps_its_values(getkey):
    x, u = random_array(getkey, (5,)), random_array(getkey, (5,))
    before = jnp.array(u)
    _, pull = jax.vjp(torch2jax(ScalesGradient.apply, residuals="recompute"), x)
    for _ in range(2):
        assert_trees_equal(pull(u)[0], 2 * before)
    assert_trees_equal(u, before, exact=True)


def test_a_backward_that_writes_later_is_an_error_once(monkeypatch):
    monkeypatch.setattr(ScalesGradient, "writes", False)
    x = jnp.arange(3.0)
    f = torch2jax(ScalesGradient.apply)
    gradient = jax.jit(jax.grad(lambda x: (f(x) ** 2).sum()))
    assert_trees_equal(gradient(x), 8 * x)
    monkeypatch.setattr(ScalesGradient, "writes", True)
    message = "wrote to its input gradient on this call, but not on the first one"
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match=message):
        jax.block_until_ready(gradient(x))
    for _ in range(2):
        assert_trees_equal(gradient(x), 8 * x)


@pytest.mark.filterwarnings("ignore:.*changes the buffers")
def test_normalisation_statistics_of_a_closed_over_module():
    """They are the module's own, and inference leaves them alone."""
    model = torch.nn.Sequential(torch.nn.Conv1d(2, 3, 1), torch.nn.BatchNorm1d(3))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    x = torch.randn(4, 2, 5)
    f = torch2jax(model)
    f.__wrapped__.train()
    jax.eval_shape(f, jnp.asarray(x.numpy()))
    after = model.state_dict()
    assert all(torch.equal(before[k], after[k]) for k in before)
    model.eval()
    actual = torch2jax(model)(jnp.asarray(x.numpy()))
    assert_trees_equal(actual, model(x), rtol=1e-5)
    after = model.state_dict()
    assert all(torch.equal(before[k], after[k]) for k in before)


class WritesWhatItSaved(torch.autograd.Function):
    """The square of x, whose backward doubles x before it gives the derivative."""

    way = "numpy"

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        x = x.detach()
        memory = {"numpy": x.numpy, "data": lambda: x.data, "in place": lambda: x}
        m = memory[WritesWhatItSaved.way]()
        m *= 2
        return g * x


@pytest.mark.parametrize("way", ["numpy", "data", "in place"])
@pytest.mark.parametrize("residuals", ["tape", "recompute"])
def test_a_backward_that_writes_to_what_it_saved(monkeypatch, way, residuals):
    """The tangent is computed by the backward too. Graphs recorded before that is known are two."""
    monkeypatch.setattr(WritesWhatItSaved, "way", way)
    x = jnp.arange(4.0)
    before = jnp.array(x)
    f = torch2jax(lambda x: WritesWhatItSaved.apply(x), residuals=residuals)
    _, first = jax.vjp(f, x)
    _, second = jax.vjp(f, x)
    for pull in (first, second):
        assert_trees_equal(pull(jnp.ones(4)), (2 * before,))
        assert_trees_equal(x, before, exact=True)
    gradient = jax.grad(lambda x: f(x).sum())
    tangent = lambda x: jax.jvp(torch2jax(lambda x: WritesWhatItSaved.apply(x)), (x,), (x,))[1]  # noqa: E731
    for derivative, expected in ((gradient, 2 * before), (tangent, 2 * before**2)):
        for call in (derivative, jax.jit(derivative)):
            for _ in range(3):
                assert_trees_equal(call(x), expected)
                assert_trees_equal(x, before, exact=True)


def _set_item(x):
    x[...] = 3


def _augment(x):
    x *= 3


def _augment_by_numpy(x):
    memory = x.detach().numpy()
    memory *= 3


def _in_buffer(x):
    torch.frombuffer(memoryview(x.detach().numpy()), dtype=torch.float32).mul_(3)


def _cut_off(x):
    torch.nn.functional.hardtanh(x, 0.0, 1.0, inplace=True)


WAYS = {
    "data": lambda x: x.data.mul_(3),
    "masked data": lambda x: operator.setitem(x.data, x > 1, 0),
    "NumPy": _augment_by_numpy,
    "array": lambda x: np.multiply(np.asarray(x.detach()), 3, out=np.asarray(x.detach())),
    "out": lambda x: torch.sin(x.detach(), out=x.data),
    "DLPack": lambda x: torch.from_dlpack(x.detach()).mul_(3),
    "storage": lambda x: x.untyped_storage().fill_(0),
    "buffer": _in_buffer,
    "in place": lambda x: x.mul_(3),
    "item": _set_item,
    "augmented": _augment,
    "in place by argument": _cut_off,
}
WHEN = {
    "always": lambda x: True,
    "by value": lambda x: bool((x.detach() > 1).any()),
}
VALUES = [[0.5, 0.25, 1.0], [0.5, 2.0, 3.0], [4.0, 0.5, 1.5], [0.5, 2.0, 3.0]]
every_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
every_when = pytest.mark.parametrize("when", WHEN.values(), ids=WHEN)
hows = pytest.mark.parametrize("how", [lambda f: f, jax.jit], ids=["eager", "jit"])
every_residuals = pytest.mark.parametrize("residuals", ["tape", "recompute"])


@hows
@every_when
@every_way
@pytest.mark.covering
def test_no_forward_changes_an_array_however_and_whenever_it_writes(way, when, how):
    def f(x, y):
        if when(x):
            way(x)
            way(y)
        return x + y

    wrapped = how(torch2jax(f, output_shapes=lambda x, y: x))
    for values in VALUES:
        x, y = jnp.array(values), jnp.array(values) + 1
        before = np.array(x), np.array(y)
        assert_trees_equal(wrapped(x, y), f(*map(torch.tensor, before)), exact=True)
        assert_trees_equal((x, y), before, exact=True)


def _square(way, when, what):
    """x**2, whose backward writes to the primal that it has saved or to its gradient."""

    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x**2

        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            if when(x):
                way(x if what == "primal" else g)
            return 2 * g * x

    return Square.apply


def _pulled(f, x, u):
    x = torch.tensor(x, requires_grad=True)
    (gradient,) = torch.autograd.grad(f(x), x, torch.tensor(u))
    return gradient


def _check_pullbacks(f, how, residuals):
    wrapped = torch2jax(f, residuals=residuals)
    pull = how(lambda x, u: jax.vjp(wrapped, x)[1](u)[0])
    for values in VALUES:
        x, u = jnp.array(values), jnp.array(values) + 2
        before = np.array(x), np.array(u)
        for _ in range(2):
            assert_trees_equal(pull(x, u), _pulled(f, *before), rtol=1e-6)
            assert_trees_equal((x, u), before, exact=True)


@every_residuals
@hows
@every_when
@every_way
@pytest.mark.parametrize("what", ["primal", "cotangent"])
@pytest.mark.covering
def test_no_backward_changes_an_array_however_and_whenever_it_writes(
    what, way, when, how, residuals
):
    _check_pullbacks(_square(way, when, what), how, residuals)


UNNAMED = {
    "data": lambda x: _triple(operator.attrgetter("data")(x)),
    "NumPy": lambda x: operator.setitem(operator.methodcaller("numpy")(x), 0, 7.0),
    "in place": lambda x: _triple(x),
}
_triple = operator.methodcaller("mul_", 3)


@every_residuals
@hows
@pytest.mark.parametrize("way", UNNAMED.values(), ids=UNNAMED)
@pytest.mark.parametrize("what", ["primal", "cotangent"])
@pytest.mark.covering
def test_the_first_run_of_a_backward_shows_what_no_name_does(what, way, how, residuals):
    _check_pullbacks(_square(way, lambda x: True, what), how, residuals)


def test_a_pullback_is_pulled_again_from_the_same_primals():
    square = torch2jax(_square(UNNAMED["data"], lambda x: True, "primal"))
    x = jnp.array([0.5, 2.0])
    pulls = [jax.vjp(square, x)[1] for _ in range(2)]
    for pull in (*pulls, *pulls):
        assert_trees_equal(pull(jnp.ones(2))[0], 6 * jnp.array([0.5, 2.0]))
        assert_trees_equal(x, jnp.array([0.5, 2.0]), exact=True)


class Clamps(torch.nn.Module):
    """A linear map that cuts its weight off, whether or not that is needed."""

    def __init__(self, way, when):
        super().__init__()
        self.way, self.when = [way], when
        self.weight = torch.nn.Parameter(torch.tensor([0.5, 0.25, 1.0]))

    def forward(self, x):
        if self.when(x):
            with torch.no_grad():
                self.way[0](self.weight)
        return x * self.weight


@hows
@every_when
@every_way
@pytest.mark.filterwarnings("ignore:the forward of")
@pytest.mark.covering
def test_no_parameter_changes_under_a_forward_that_writes_to_it(way, when, how):
    example = Clamps(way, when)
    model = from_torch(example, output_shapes=lambda x: x)
    call = how(lambda model, x: model(x))
    for values in VALUES:
        example.weight = torch.nn.Parameter(torch.tensor([0.5, 0.25, 1.0]))
        assert_trees_equal(call(model, jnp.array(values)), example(torch.tensor(values)))
        assert_trees_equal(model.params["weight"], np.float32([0.5, 0.25, 1.0]), exact=True)


class SquaresWeight(torch.nn.Module):
    def __init__(self, way):
        super().__init__()
        self.square = [_square(way, lambda x: True, "primal")]
        self.weight = torch.nn.Parameter(torch.tensor([0.5, 0.25, 1.0]))

    def forward(self, x):
        return (self.square[0](self.weight) * x).sum()


@hows
@every_residuals
@pytest.mark.parametrize("way", UNNAMED.values(), ids=UNNAMED)
@pytest.mark.covering
def test_no_parameter_changes_under_a_backward_that_writes_to_it(way, residuals, how):
    model = from_torch(SquaresWeight(way), residuals=residuals)
    gradient = how(jax.grad(lambda model, x: model(x)))
    for values in VALUES:
        example = SquaresWeight(way)
        example(torch.tensor(values)).backward()
        actual = gradient(model, jnp.array(values)).params["weight"]
        assert_trees_equal(actual, example.weight.grad, rtol=1e-6)
        assert_trees_equal(model.params["weight"], np.float32([0.5, 0.25, 1.0]), exact=True)


class Careful(torch.nn.Module):
    """Writes to its weight where it makes it, and reads memory where no call comes to."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)
        self.reset_parameters()

    def reset_parameters(self):
        self.linear.weight.data.fill_(2)

    def validate(self, x):
        return self(x).detach().numpy()

    def _hidden(self, x):
        return x.data

    def forward(self, x):
        total = 0
        for _ in range(2):
            total += self.linear(x).relu()
        named = {}
        named["total"] = total
        return named["total"]


class Careless(Careful):
    def forward(self, x):
        return self.linear(self._hidden(x))


def _copied(function, count=3):
    return sorted(function.may_write(count))


def test_code_that_names_no_way_to_write_has_nothing_copied():
    assert _copied(from_torch(Careful()).core.function) == []
    assert _copied(from_torch(Careless()).core.function) == [0, 1, 2]


def test_a_way_that_torch_counts_has_the_arguments_of_a_module_copied():
    """Parameters require gradients, so that it is an error to write to them in a recording."""

    class Doubles(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x).mul_(2)

    assert _copied(from_torch(Doubles(2, 2)).core.function) == [2]
