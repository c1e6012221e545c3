"""A converted module is called like the torch module, whatever its forward does."""

import collections
import dataclasses
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from eqx_torch import from_torch, InputError, ModuleError, OutputError, t2j

from ..helpers import assert_trees_equal


X = np.arange(12, dtype=np.float32).reshape(4, 3) / 10


@dataclasses.dataclass
class Batch:
    x: Any
    mask: Any = None


class Pair(NamedTuple):
    left: Any
    right: Any


def module_of(forward: Any) -> torch.nn.Module:
    """A linear layer's module with this forward."""

    class Net(torch.nn.Linear):
        pass

    Net.forward = forward
    torch.manual_seed(0)
    return Net(3, 3)


def linear(self: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.linear(x, self.weight, self.bias)


def gradients(module: torch.nn.Module, x: Any = X) -> Any:
    """Of the sum of squares of a module's result, in torch: of the parameters and the input."""
    x = torch.from_numpy(x.copy()).requires_grad_()
    names, parameters = zip(*module.named_parameters(), strict=True)
    y = module(x)
    module.zero_grad()
    y.square().sum().backward()
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in (*parameters, x)]
    return y.detach(), dict(zip(names, grads, strict=False)), grads[-1]


def assert_gradients_as_in_torch(module: torch.nn.Module, x: Any = X) -> None:
    """Eager and jitted, and again, with other parameters."""
    model = from_torch(module)

    def value_and_gradients(model: Any, x: Any) -> Any:
        def loss(both: Any) -> Any:
            y = both[0](both[1])
            return jnp.sum(y**2), y

        (_, y), grads = eqx.filter_value_and_grad(loss, has_aux=True)((model, jnp.asarray(x)))
        return y, grads[0].params, grads[1]

    jitted = eqx.filter_jit(value_and_gradients)
    for factor in (1, 2):
        params = {name: factor * p for name, p in model.params.items()}
        scaled = eqx.tree_at(lambda m: m.params, model, params)
        with torch.no_grad():
            for p in module.parameters():
                p.mul_(factor)
        expected = gradients(module, x)
        for call in (value_and_gradients, jitted, jitted):
            assert_trees_equal(call(scaled, x), expected, rtol=1e-4, atol=1e-5)


# Arguments and results.


def test_keyword_nested_and_static_arguments():
    def forward(self, batch, *, options, scale=1.0, reduction="none", names=()):
        y = linear(self, batch["x"][0]) * scale
        if "bias" in names:
            y = y + options[0]["shift"]
        return y.sum() if reduction == "sum" else y

    module = module_of(forward)
    model = from_torch(module)
    cases = [
        {"scale": 2.0},
        {"scale": 2, "reduction": "sum"},
        {"reduction": "sum", "names": ("bias",)},
    ]
    for case in cases:
        y = eqx.filter_jit(model)({"x": [X]}, options=({"shift": X[0]},), **case)
        tensors = {"x": [torch.from_numpy(X)]}, ({"shift": torch.from_numpy(X[0])},)
        expected = module(tensors[0], options=tensors[1], **case)
        assert_trees_equal(y, expected.detach(), rtol=1e-5)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda y: (y, None, [y + 1]),
        lambda y: {"a": y, "b": {"c": (y, None)}},
        lambda y: collections.OrderedDict(b=y, a=y + 1),
        lambda y: Pair(y, None),
        lambda y: [y[0], Pair(left=y, right=(y,))],
    ],
)
def test_results_keep_their_structure(wrap):
    module = module_of(lambda self, x: wrap(linear(self, x)))
    expected = module(torch.from_numpy(X))
    for call in (from_torch(module), eqx.filter_jit(from_torch(module))):
        actual = call(X)
        assert_trees_equal(actual, jax.tree.map(lambda y: y.detach(), expected))


def test_dataclasses_as_arguments_and_results():
    def forward(self, batch):
        assert isinstance(batch, Batch)
        return Batch(linear(self, batch.x), mask=batch.mask)

    model = from_torch(module_of(forward))
    for mask in (None, X > 0.5):
        for call in (
            model,
            lambda batch: eqx.filter_jit(lambda x, m: model(Batch(x, m)))(batch.x, batch.mask),
        ):
            result = call(Batch(X, mask))
            assert isinstance(result, Batch)
            assert result.x.shape == X.shape
            assert_trees_equal(result.mask, mask)


def test_dataclass_results_are_trees_afterwards():
    model = from_torch(module_of(lambda self, x: Batch(linear(self, x))))
    doubled = jax.tree.map(lambda y: 2 * y, eqx.filter_jit(model)(X))
    assert_trees_equal(doubled.x, 2 * model(X).x)
    batched = jax.vmap(model)(np.stack([X, X]))
    assert batched.x.shape == (2, 4, 3)


def test_examples_of_a_dataclass_that_is_returned_too():
    """JAX learns of the class in between."""

    @dataclasses.dataclass
    class Own:
        x: Any

    model = from_torch(module_of(lambda self, own: Own(linear(self, own.x))), Own(X))
    assert model(Own(X)).x.shape == X.shape
    assert model(model(Own(X))).x.shape == X.shape


def test_results_of_torch_s_own_types():
    model = from_torch(module_of(lambda self, x: linear(self, x).max(dim=1)))
    result = eqx.filter_jit(model)(X)
    assert isinstance(result, torch.return_types.max)
    assert result.values.shape == (4,)
    assert result.indices.dtype == jnp.int32


class Cache:
    """Holds tensors, but is no container that anyone has registered."""

    def __init__(self, name: str):
        self.name = name
        self.entries: list[Any] = []

    def extended(self, entry: Any) -> "Cache":
        self.entries.append(entry)
        return self


def test_objects_that_hold_tensors():
    def forward(self, x, cache=None):
        cache = Cache("mine") if cache is None else cache
        assert isinstance(cache, Cache)
        assert cache.name == "mine"
        return sum(cache.extended(linear(self, x)).entries), cache

    module = module_of(forward)
    model = from_torch(module)
    call = eqx.filter_jit(lambda model, x, cache: model(x, cache=cache))
    y, cache = call(model, X, None)
    z, cache = call(model, X, cache)
    assert_trees_equal(z, 2 * y)
    assert cache.name == "mine"
    assert len(cache.entries) == 2
    assert len(jax.tree.leaves(cache)) == 2
    gradient = jax.grad(lambda x: jnp.sum(model(x, cache=model(x)[1])[0]))(jnp.asarray(X))
    expected = 2 * jax.grad(lambda x: jnp.sum(model(x)[0]))(jnp.asarray(X))
    assert_trees_equal(gradient, expected)


def test_objects_that_hold_themselves_are_refused():
    def forward(self, x):
        cache = Cache("mine").extended(x)
        cache.parent = cache
        return cache

    with pytest.raises(OutputError, match="of type Cache, but JAX can only take torch tensors"):
        from_torch(module_of(forward))(X)


def test_distributions_are_refused():
    module = module_of(lambda self, x: torch.distributions.Normal(linear(self, x), 1.0))
    with pytest.raises(OutputError, match="of type Normal, but JAX can only take torch tensors"):
        from_torch(module)(X)


def test_views_and_repeated_results():
    def forward(self, x):
        y = linear(self, x)
        return y.T, y[:1].expand(4, 3), y[::2], y.flip(0), y.sum(), x, y, y

    module = module_of(forward)
    expected = [y.detach() for y in module(torch.from_numpy(X))]
    assert_trees_equal(list(eqx.filter_jit(from_torch(module))(X)), expected)


@pytest.mark.parametrize("write", [lambda x: x.add_(1), lambda x: x.__setitem__(0, 0)])
def test_argument_is_written_to(write):
    def forward(self, x):
        write(x)
        return linear(self, x)

    module = module_of(forward)
    x = jnp.asarray(X)
    for call in (from_torch(module), eqx.filter_jit(from_torch(module))):
        y = call(x)
        assert_trees_equal(x, X, exact=True)
        assert_trees_equal(y, module(torch.from_numpy(X.copy())).detach())


def test_parameter_is_written_to_by_nobody():
    """A forward that writes to a parameter does so in torch; here it does not outlive the call."""

    def forward(self, x):
        with torch.no_grad():
            self.weight.add_(1)
        return linear(self, x)

    model = from_torch(module_of(forward))
    before = np.asarray(model.params["weight"]).copy()
    with pytest.warns(UserWarning, match="writes to its parameter weight"):
        first = model(X)
    assert_trees_equal(model(X), first, exact=True)
    assert_trees_equal(model.params["weight"], before, exact=True)


# Names that are ours too.


def test_forward_with_a_key_of_its_own():
    module = torch.nn.MultiheadAttention(4, 2, batch_first=True)
    x = torch.randn(2, 3, 4)
    expected = module(x, x, x)[0].detach()
    model = from_torch(module)
    assert_trees_equal(model(t2j(x), t2j(x), t2j(x))[0], expected, atol=1e-6)
    assert_trees_equal(model(query=t2j(x), key=t2j(x), value=t2j(x))[0], expected, atol=1e-6)


def test_random_key_beside_a_key_of_the_forward():
    module = torch.nn.MultiheadAttention(4, 2, dropout=0.5, batch_first=True)
    model = from_torch(module)
    x = t2j(torch.randn(2, 3, 4))
    first, again = (model(x, x, x, key=jax.random.key(0))[0] for _ in range(2))
    assert_trees_equal(first, again, exact=True)
    with pytest.raises(ModuleError, match="called without `key=`"):
        model(query=x, key=x, value=x)


def test_forward_with_a_state_of_its_own():
    class Cell(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = torch.nn.BatchNorm1d(3)

        def forward(self, x, state):
            return self.norm(x) + state

    module = Cell()
    model, state = eqx.nn.make_with_state(from_torch)(module)
    y, state = model(X, X, state=state)
    expected = module(torch.from_numpy(X), torch.from_numpy(X))
    assert_trees_equal(y, expected.detach())
    evaluated = from_torch(module.eval())(X, state=X)
    assert_trees_equal(evaluated, module(torch.from_numpy(X), torch.from_numpy(X)).detach())


# Other methods.


class Autoencoder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(3, 2))
        self.drop = torch.nn.Dropout(0.5)

    def encode(self, x):
        return x @ self.weight

    def decode(self, z, *, scale=1.0):
        return scale * z @ self.weight.T

    def noisy(self, x):
        return self.drop(x)

    def forward(self, x):
        return self.decode(self.encode(x))


def test_methods_share_parameters():
    module = Autoencoder()
    model = from_torch(module)

    @eqx.filter_jit
    def loss(model: Any, x: Any) -> Any:
        encode, decode = from_torch(model, method="encode"), from_torch(model, method="decode")
        return jnp.sum(decode(encode(x), scale=2.0) ** 2)

    grads = eqx.filter_grad(loss)(model, X)
    x = torch.from_numpy(X)
    module.decode(module.encode(x), scale=2.0).square().sum().backward()
    assert_trees_equal(grads.params, {"weight": module.weight.grad}, rtol=1e-4)
    assert_trees_equal(model(X), module(x).detach(), rtol=1e-5)
    encode = from_torch(module, method="encode")
    assert_trees_equal(encode(X), module.encode(x).detach(), rtol=1e-5)


def test_methods_need_keys_of_their_own():
    model = from_torch(Autoencoder())
    assert model(X).shape == (4, 3)
    noisy = from_torch(model, method="noisy")
    with pytest.raises(ModuleError, match="without `key=`"):
        noisy(X)
    assert noisy(X, key=jax.random.key(0)).shape == (4, 3)


def test_no_such_method():
    with pytest.raises(InputError, match="`Autoencoder` has no method `translate` to convert"):
        from_torch(Autoencoder(), method="translate")
    with pytest.raises(InputError, match="`Autoencoder` has no method `weight` to convert"):
        from_torch(from_torch(Autoencoder()), method="weight")


# What forwards do.


def test_derivative_inside_of_the_forward():
    """Forces from an energy, and a loss of both."""

    def forward(self, x):
        x = x if x.requires_grad else x.requires_grad_()
        energy = torch.tanh(linear(self, x)).square().sum()
        (forces,) = torch.autograd.grad(energy, x, create_graph=True)
        return -forces

    assert_gradients_as_in_torch(module_of(forward))


# torch does not know that a forward is not for training, as here where outputs are inferred.
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoints_of_torch(use_reentrant):
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)

        def body(self, x):
            return torch.tanh(self.second(torch.tanh(self.first(x))))

        def forward(self, x):
            return checkpoint(
                self.body,
                checkpoint(self.body, x, use_reentrant=use_reentrant),
                use_reentrant=use_reentrant,
            )

    torch.manual_seed(0)
    assert_gradients_as_in_torch(Net())


def test_forward_stores_a_tensor_on_the_module():
    def forward(self, x):
        self.last = linear(self, x)
        self.history = [*getattr(self, "history", []), self.last.detach()][-2:]
        return self.last

    assert_gradients_as_in_torch(module_of(forward))


def test_forward_caches_at_its_first_call():
    """What was cached when outputs were inferred holds no values, and must not be used."""

    def forward(self, x):
        if not hasattr(self, "grid"):
            self.grid = torch.arange(3.0) + x.new_ones(3)
            self.tables = {}
        self.tables.setdefault(x.shape, self.grid * 2)
        return linear(self, x) + self.grid + self.tables[x.shape]

    module = module_of(forward)
    assert_gradients_as_in_torch(module)
    model = from_torch(module_of(forward))
    fresh = lambda x: module_of(forward)(torch.from_numpy(x)).detach()  # noqa: E731
    assert_trees_equal(jax.vmap(model)(np.stack([X, X]))[0], fresh(X), rtol=1e-5)
    assert_trees_equal(model(X), fresh(X), rtol=1e-5)
    assert_trees_equal(model(X[:2]), fresh(X[:2]), rtol=1e-5)
    assert not hasattr(module_of(forward), "grid")


def test_conversion_leaves_no_trace_in_the_module():
    def forward(self, x):
        self.last = linear(self, x)
        return self.last

    module = module_of(forward)
    before = dict(vars(module))
    model = from_torch(module, X)
    model(X)
    assert vars(module) == before


class Adjoint(torch.autograd.Function):
    """One implicit step y = x + f(y), whose backward calls f again."""

    @staticmethod
    def forward(ctx, x, function, *parameters):
        ctx.function, ctx.parameters = function, parameters
        ctx.save_for_backward(x)
        with torch.no_grad():
            return x + function(x)

    @staticmethod
    def backward(ctx, cotangent):
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            y = x + ctx.function(x)
            grads = torch.autograd.grad(y, [x, *ctx.parameters], cotangent, allow_unused=True)
        return grads[0], None, *grads[1:]


def test_solver_that_calls_the_module_again_in_the_backward():
    class Solver(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.field = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Tanh())

        def forward(self, x):
            for _ in range(2):
                x = Adjoint.apply(x, self.field, *self.field.parameters())
            return x

    torch.manual_seed(0)
    assert_gradients_as_in_torch(Solver())


def test_functions_of_both_styles():
    class Old(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.x = x
            return x.sin()

        @staticmethod
        def backward(ctx, cotangent):
            return cotangent * ctx.x.cos()

    class New(torch.autograd.Function):
        @staticmethod
        def forward(x):
            return x.cos()

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(*inputs)

        @staticmethod
        def backward(ctx, cotangent):
            return -cotangent * ctx.saved_tensors[0].sin()

    module = module_of(lambda self, x: New.apply(Old.apply(linear(self, x))))
    assert_gradients_as_in_torch(module)
    model = from_torch(module)
    f = lambda x: jnp.sum(model(x))  # noqa: E731
    second = jax.grad(lambda x: jnp.sum(jax.grad(f)(x)))(jnp.asarray(X))
    plain = from_torch(module_of(lambda self, x: linear(self, x).sin().cos()))
    plain = eqx.tree_at(lambda m: m.params, plain, model.params)
    f = lambda x: jnp.sum(plain(x))  # noqa: E731
    expected = jax.grad(lambda x: jnp.sum(jax.grad(f)(x)))(jnp.asarray(X))
    assert_trees_equal(second, expected, rtol=1e-4, atol=1e-5)


def test_input_that_the_forward_asks_derivatives_of_and_unused_parameters():
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)

        def forward(self, x):
            x.requires_grad_()
            return self.used(x)

    torch.manual_seed(0)
    assert_gradients_as_in_torch(Net())


def test_forward_without_derivative():
    def forward(self, x):
        with torch.no_grad():
            return linear(self, x)

    assert_gradients_as_in_torch(module_of(lambda self, x: x + forward(self, x).detach()))


def test_autocast_around_and_inside():
    x = torch.from_numpy(X)

    def inside(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return linear(self, x)

    model, module = from_torch(module_of(linear)), module_of(linear)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = eqx.filter_jit(model)(X)
        expected = module(x)
    assert y.dtype == jnp.bfloat16
    assert_trees_equal(y, expected.detach())
    assert_trees_equal(eqx.filter_jit(from_torch(module_of(inside)))(X), expected.detach())
    assert model(X).dtype == jnp.float32
    loss = lambda m: jnp.sum(m(X).astype(jnp.float32))  # noqa: E731
    grads = eqx.filter_grad(loss)(from_torch(module_of(inside)))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        module(x).float().sum().backward()
    assert_trees_equal(grads.params["weight"], module.weight.grad, rtol=2e-2)


# Errors.


def test_errors_of_the_forward_arrive():
    def forward(self, x):
        if x.sum() > 100:
            raise ValueError("too large")
        return linear(self, x)

    model = from_torch(module_of(forward), output_shapes=jax.ShapeDtypeStruct((4, 3), np.float32))
    for call in (
        model,
        eqx.filter_jit(model),
        eqx.filter_jit(eqx.filter_grad(lambda x: jnp.sum(model(x)))),
    ):
        with pytest.raises(Exception, match="ValueError: too large"):
            jax.block_until_ready(call(1000 * jnp.asarray(X)))
        jax.block_until_ready(call(jnp.asarray(X)))
    assert_trees_equal(model(X), module_of(linear)(torch.from_numpy(X)).detach())


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (lambda y: {1.0}, "`Net` returned {1.0} of type set, but JAX can only"),
        (lambda y: (y, object), r"`Net` returned .* of type type at output\[1\]"),
        (lambda y: y.to_sparse(), "returned a tensor of layout torch.sparse_coo"),
    ],
)
def test_results_that_are_no_tensors(result, message):
    with pytest.raises(OutputError, match=message):
        from_torch(module_of(lambda self, x: result(linear(self, x))))(X)


def test_tensors_as_arguments_are_refused():
    with pytest.raises(InputError, match=r"`Net` takes JAX arrays, but got a Tensor as argument 0"):
        from_torch(module_of(linear))(torch.from_numpy(X))


def test_wrong_shape_is_torch_s_error():
    with pytest.raises(Exception, match="mat1 and mat2 shapes cannot be multiplied|size mismatch"):
        from_torch(module_of(linear))(X[:, :2])
