"""Parameters of every kind are arrays of JAX that a module computes with, and are trained."""

import copy
import io
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from torch.nn.utils import parametrizations

from eqx_torch import (
    from_torch,
    InputError,
    ModuleError,
    state_dict,
    t2j,
    to_torch,
    trainable,
    tree_t2j,
)

from ..helpers import assert_trees_equal


old_weight_norm = pytest.param(
    torch.nn.utils.weight_norm, marks=pytest.mark.filterwarnings("ignore::FutureWarning")
)


def torch_step(module: torch.nn.Module, *args: Any) -> Any:
    """The loss, the gradients, and the parameters after one step of gradient descent."""
    module.zero_grad()
    loss = module(*args).abs().square().sum()
    loss.backward()
    names = [name for name, _ in module.named_parameters()]
    grads = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
    with torch.no_grad():
        for p in module.parameters():
            if p.grad is not None:
                p.sub_(0.1 * p.grad)
    assert names
    return loss.detach(), grads


@eqx.filter_jit
def jax_step(model: Any, *args: Any) -> Any:
    loss = lambda m: jnp.sum(jnp.abs(m(*args)) ** 2)  # noqa: E731
    value, grads = eqx.filter_value_and_grad(loss)(model)
    # JAX's gradient of a complex parameter is the conjugate of the direction of ascent.
    model = eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g.conj(), grads))
    return value, grads.params, model


def assert_trains_as_in_torch(module: torch.nn.Module, *args: torch.Tensor) -> Any:
    """Three steps of both; returns the trained model."""
    model = from_torch(module)
    for _ in range(3):
        loss, grads = torch_step(module, *args)
        value, jax_grads, model = jax_step(model, *tree_t2j(list(args)))
        assert_trees_equal(value, loss, rtol=1e-4)
        own = {n: jax_grads[n].conj() for n in grads}
        assert_trees_equal(own, grads, rtol=1e-3, atol=1e-4)
    expected = {n: p.detach() for n, p in module.named_parameters()}
    assert_trees_equal(model.params, expected, rtol=1e-4, atol=1e-5)
    return model


@pytest.fixture
def x(getkey) -> torch.Tensor:
    getkey()
    return torch.randn(4, 3)


# Tied weights.


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(5, 3)
        self.inner = torch.nn.Sequential(torch.nn.Linear(3, 3))
        self.head = torch.nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.same = self.inner[0]
        self.register_parameter("alias", self.inner[0].bias)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.same(torch.tanh(self.inner(self.embedding(ids)))) + self.alias
        return self.head(hidden)


def test_tied_weights_are_one_array(getkey):
    getkey()
    module = Tied()
    ids = torch.tensor([0, 3, 3, 1])
    model = assert_trains_as_in_torch(module, ids)
    assert sorted(model.params) == ["alias", "embedding.weight", "inner.0.weight"]
    back = to_torch(model)
    assert back.head.weight is back.embedding.weight
    assert back.same is back.inner[0]
    assert back.alias is back.inner[0].bias
    assert sorted(state_dict(model)) == sorted(module.state_dict())


def test_tied_weights_with_donation(getkey):
    getkey()
    module = Tied()
    ids = torch.tensor([0, 3, 3, 1])
    step = eqx.filter_jit(jax_step.__wrapped__, donate="all")
    model = from_torch(module)
    for _ in range(3):
        loss, _ = torch_step(module, ids)
        value, _, model = step(model, t2j(ids.clone()))
        assert_trees_equal(value, loss, rtol=1e-4)


# Parametrizations.


def with_parametrization(normalised: Any, *args: Any) -> torch.nn.Module:
    return torch.nn.Sequential(
        normalised(torch.nn.Linear(3, 3), *args), torch.nn.Tanh(), torch.nn.Linear(3, 2)
    )


@pytest.mark.parametrize(
    "normalised", [parametrizations.weight_norm, parametrizations.orthogonal, old_weight_norm]
)
def test_parametrizations(normalised, x):
    assert_trains_as_in_torch(with_parametrization(normalised), x)


def test_parametrization_of_the_user_s(x):
    class Symmetric(torch.nn.Module):
        def forward(self, x):
            return x.triu() + x.triu(1).transpose(-1, -2)

    layer = torch.nn.Linear(3, 3)
    torch.nn.utils.parametrize.register_parametrization(layer, "weight", Symmetric())
    model = assert_trains_as_in_torch(layer, x)
    assert torch.allclose(to_torch(model).weight, to_torch(model).weight.T)


@pytest.mark.parametrize(
    "normalised",
    [
        parametrizations.weight_norm,
        parametrizations.spectral_norm,
        old_weight_norm,
        pytest.param(
            torch.nn.utils.spectral_norm, marks=pytest.mark.filterwarnings("ignore::FutureWarning")
        ),
    ],
)
def test_modules_parametrized_alike_share_a_trace(normalised, x):
    traces = []

    @eqx.filter_jit
    def call(model: Any, x: Any, state: Any) -> Any:
        traces.append(model)
        return model(x, state=state)

    modules = [with_parametrization(normalised) for _ in range(2)]
    for module in modules:
        model, state = eqx.nn.make_with_state(from_torch)(module)
        y, _ = call(model, t2j(x), state)
        assert_trees_equal(y, module(x).detach(), rtol=1e-5)
    assert len(traces) == 1


# Layers that keep their parameters elsewhere too.


class Recurrent(torch.nn.Module):
    def __init__(self, kind: Any, **options: Any):
        super().__init__()
        self.rnn = kind(3, 4, batch_first=True, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rnn(x)[0]


@pytest.mark.parametrize("kind", [torch.nn.RNN, torch.nn.GRU, torch.nn.LSTM])
@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True}])
@pytest.mark.covering
def test_recurrent_layers_use_changed_parameters(kind, options, getkey):
    getkey()
    assert_trains_as_in_torch(Recurrent(kind, **options), torch.randn(2, 5, 3))


def test_recurrent_layers_made_alike_share_a_trace():
    assert from_torch(Recurrent(torch.nn.LSTM)).core == from_torch(Recurrent(torch.nn.LSTM)).core


# What tells modules apart.


def double(module: Any, args: Any, result: Any) -> Any:
    return 2 * result


def scaled(factor: float) -> Any:
    return lambda module, args, result: factor * result


def hooked(*hooks: Any) -> torch.nn.Module:
    layer = torch.nn.Linear(3, 3)
    for hook in hooks:
        layer.register_forward_hook(hook)
    return layer


def test_hooks_tell_modules_apart():
    assert from_torch(hooked(double)).core == from_torch(hooked(double)).core
    assert from_torch(hooked(double)).core != from_torch(hooked()).core
    assert from_torch(hooked(scaled(2))).core == from_torch(hooked(scaled(2))).core
    assert from_torch(hooked(scaled(2))).core != from_torch(hooked(scaled(3))).core
    both, reverse = (double, scaled(3)), (scaled(3), double)
    assert from_torch(hooked(*both)).core == from_torch(hooked(*both)).core
    assert from_torch(hooked(*both)).core != from_torch(hooked(*reverse)).core


def test_hooks_that_keep_something_tell_modules_apart():
    """Each must write to its own list."""

    def recording(into: list[int]) -> Any:
        return lambda module, args, result: into.append(1)

    first, second = from_torch(hooked(recording([]))), from_torch(hooked(recording([])))
    assert first.core == first.core
    assert first.core != second.core


def test_kind_of_parametrization_tells_modules_apart():
    one = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(3, 3), dim=0)
    other = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(3, 3), dim=1)
    assert from_torch(one).core != from_torch(other).core


def test_lambdas_of_one_definition_are_alike():
    class Net(torch.nn.Module):
        def __init__(self, slope):
            super().__init__()
            self.linear = torch.nn.Linear(3, 3)
            self.act = lambda x: slope * x

        def forward(self, x):
            return self.act(self.linear(x))

    assert from_torch(Net(1.0)).core == from_torch(Net(1.0)).core
    assert from_torch(Net(1.0)).core != from_torch(Net(2.0)).core


# Modules without values.


def test_lazy_modules(x):
    module = torch.nn.Sequential(torch.nn.LazyLinear(2), torch.nn.LazyBatchNorm1d())
    message = (
        "`Sequential` is lazy: 0.weight, 0.bias, .* will be made by its first call. Run it once, "
        r"`module\(torch.zeros\(...\)\)`, and then convert it"
    )
    with pytest.raises(ModuleError, match=message):
        from_torch(module)
    module(x)
    assert_trees_equal(from_torch(module.eval())(t2j(x)), module(x).detach())


def test_modules_on_the_meta_device():
    with torch.device("meta"):
        module = torch.nn.Linear(3, 2)
    with pytest.raises(ModuleError, match="on the meta device: weight, bias .*to_empty"):
        from_torch(module)


def _quantized() -> torch.nn.Module:
    module = torch.ao.quantization.QuantWrapper(torch.nn.Linear(3, 2)).eval()
    module.qconfig = torch.ao.quantization.get_default_qconfig("fbgemm")
    prepared = torch.ao.quantization.prepare(module)
    prepared(torch.randn(4, 3))
    return torch.ao.quantization.convert(prepared)


def _dynamically_quantized() -> torch.nn.Module:
    module = torch.nn.Sequential(torch.nn.Linear(3, 2))
    return torch.ao.quantization.quantize_dynamic(module, {torch.nn.Linear})


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("made", [_quantized, _dynamically_quantized])
def test_quantized_modules_can_be_called(made, x):
    """They have no parameters, hence nothing to train."""
    module = made()
    model = from_torch(module)
    assert model.params == {}
    assert_trees_equal(eqx.filter_jit(model)(t2j(x)), module(x))


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")  # torch's own
def test_quantized_tensors():
    module = torch.nn.Module()
    quantized = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    module.register_buffer("table", quantized)
    with pytest.raises(ModuleError, match="`Module` is quantized: table have a dtype that JAX"):
        from_torch(module)


# Frozen parameters.


def test_frozen_parameters(x):
    module = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 2))
    module[0].requires_grad_(False)
    model = from_torch(module)
    spec = trainable(model)
    assert spec.params == {"0.weight": False, "0.bias": False, "1.weight": True, "1.bias": True}
    params, rest = eqx.partition(model, spec)
    optimiser = optax.sgd(0.1, momentum=0.9)
    opt_state = optimiser.init(params)
    reference = torch.optim.SGD(
        [p for p in module.parameters() if p.requires_grad], 0.1, momentum=0.9
    )

    @eqx.filter_jit
    def step(params: Any, opt_state: Any, x: Any) -> Any:
        loss = lambda params: jnp.sum(eqx.combine(params, rest)(x) ** 2)  # noqa: E731
        grads = eqx.filter_grad(loss)(params)
        updates, opt_state = optimiser.update(grads, opt_state)
        return eqx.apply_updates(params, updates), opt_state

    for _ in range(3):
        params, opt_state = step(params, opt_state, t2j(x))
        reference.zero_grad()
        module(x).square().sum().backward()
        reference.step()
    expected = {n: p.detach() for n, p in module.named_parameters()}
    trained = eqx.combine(params, rest)
    assert_trees_equal(trained.params, expected, rtol=1e-4, atol=1e-5)
    assert not to_torch(trained)[0].weight.requires_grad
    assert to_torch(trained)[1].weight.requires_grad


def test_half_of_a_model_cannot_be_called(x):
    params, _ = eqx.partition(from_torch(torch.nn.Linear(3, 2)), eqx.is_array)
    _, rest = eqx.partition(from_torch(torch.nn.Linear(3, 2)), eqx.is_array)
    assert params(t2j(x)).shape == (4, 2)
    with pytest.raises(InputError, match="weight of `Linear` is None: this is part of a model"):
        rest(t2j(x))


# Memory and dtypes.


def test_channels_last(getkey):
    getkey()
    module = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    model = assert_trains_as_in_torch(module, torch.randn(2, 3, 5, 5))
    assert to_torch(model).weight.is_contiguous(memory_format=torch.channels_last)


def test_parameters_that_are_views(x):
    module = torch.nn.Linear(3, 3)
    whole = torch.randn(6, 6)
    module.weight = torch.nn.Parameter(whole[::2, 1:4].T)
    module.bias = torch.nn.Parameter(torch.ones(1).expand(3).detach().clone())
    assert not module.weight.is_contiguous()
    model = from_torch(module)
    before = np.asarray(model.params["weight"]).copy()
    whole.zero_()
    assert_trees_equal(model.params["weight"], before, exact=True)
    module.weight.data.copy_(torch.from_numpy(before))
    assert_trains_as_in_torch(module, x)


def test_mixed_dtypes(getkey):
    getkey()

    class Mixed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.low = torch.nn.Linear(3, 3, dtype=torch.bfloat16)
            self.single = torch.nn.Linear(3, 2)

        def forward(self, x):
            return self.single(self.low(x.bfloat16()).float())

    module = Mixed()
    model = from_torch(module)
    x = torch.randn(4, 3)
    loss, grads = torch_step(copy.deepcopy(module), x)
    value, jax_grads, _ = jax_step(model, t2j(x))
    assert model.params["low.weight"].dtype == jnp.bfloat16
    assert_trees_equal(value, loss, rtol=1e-4)
    assert_trees_equal(jax_grads, grads, rtol=2e-2, atol=1e-3)


def test_double_precision(getkey, x64):
    getkey()
    assert_trains_as_in_torch(torch.nn.Linear(3, 2).double(), torch.randn(4, 3).double())


def test_double_precision_where_jax_has_single(getkey):
    getkey()
    module = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2)).double().eval()
    x = torch.randn(4, 3)
    model = from_torch(module)
    assert_trees_equal(model(t2j(x)), module(x.double()).float().detach(), rtol=1e-5)
    assert state_dict(model)["0.weight"].dtype == torch.float64


def test_complex_parameters(getkey):
    getkey()

    class Complex(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(3, 2, dtype=torch.complex64))

        def forward(self, x):
            return torch.fft.fft(x.to(torch.complex64)) @ self.weight

    assert_trains_as_in_torch(Complex(), torch.randn(4, 3))


def test_parameters_in_pinned_or_shared_memory(x):
    module = torch.nn.Linear(3, 2)
    module.share_memory()
    assert_trains_as_in_torch(module, x)


def test_parameters_under_parameter_lists_and_dicts(x):
    class Listed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.rows = torch.nn.ParameterList([torch.randn(3) for _ in range(2)])
            self.named = torch.nn.ParameterDict({"a": torch.randn(3)})

        def forward(self, x):
            return x * self.rows[0] + self.rows[1] * self.named["a"]

    model = assert_trains_as_in_torch(Listed(), x)
    assert sorted(model.params) == ["named.a", "rows.0", "rows.1"]


def test_module_without_parameters(x):
    assert_trees_equal(from_torch(torch.nn.Softmax(-1))(t2j(x)), x.softmax(-1))


# Hooks.


def test_hooks_fire_as_in_torch(x):
    calls = []

    def pre_hook(module, args):
        calls.append("before")
        return (2 * args[0],)

    def hook(module, args, kwargs, result):
        calls.append("after")
        return result + kwargs.get("offset", 0)

    def backward_hook(module, grad_input, grad_output):
        calls.append("backward")
        return tuple(3 * g for g in grad_input)

    module = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 2))
    module[1].register_forward_pre_hook(pre_hook)
    module[1].register_forward_hook(hook, with_kwargs=True)
    module[1].register_full_backward_hook(backward_hook)
    assert_trains_as_in_torch(module, x)
    assert calls.count("backward") >= 6
    assert {"before", "after"} <= set(calls)


def test_hooks_on_tensors_fire(x):
    class Clipped(torch.nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            if y.requires_grad:
                y.register_hook(lambda g: g.clamp(-1, 1))
            return y

    assert_trains_as_in_torch(Clipped(3, 2), x)


# TorchScript.


class Scripted(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(3, 3)
        self.second = torch.nn.Linear(3, 3)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


def _script(module: torch.nn.Module) -> torch.nn.Module:
    return torch.jit.script(module)


def _trace(module: torch.nn.Module) -> torch.nn.Module:
    return torch.jit.trace(module, torch.zeros(4, 3))


def _loaded(module: torch.nn.Module) -> torch.nn.Module:
    file = io.BytesIO()
    torch.jit.save(torch.jit.script(module), file)
    file.seek(0)
    return torch.jit.load(file)


def _inside(module: torch.nn.Module) -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(3, 3), torch.jit.script(module))


@pytest.mark.filterwarnings("ignore:.torch.jit")
@pytest.mark.parametrize("made", [_script, _trace, _loaded, _inside])
def test_torchscript_parameters_are_trained(made, x):
    module = made(Scripted())
    model = assert_trains_as_in_torch(module, x)
    expected = {name: value.detach() for name, value in module.state_dict().items()}
    assert_trees_equal(state_dict(model), expected, rtol=1e-4, atol=1e-5)
    assert all(p.is_leaf for p in to_torch(model).parameters())


@pytest.mark.filterwarnings("ignore:.torch.jit")
def test_torchscript_buffers_are_state(x):
    module = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    scripted = torch.jit.script(module)
    model, state = eqx.nn.make_with_state(from_torch)(scripted)
    y, state = eqx.filter_jit(model)(t2j(x), state=state)
    assert_trees_equal(y, module(x).detach(), atol=1e-5)
    expected = dict(module.named_buffers())
    assert_trees_equal(dict(state.get(model.buffers)), expected)


# Wrapped modules.


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_compiled_modules(x):
    module = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Tanh())
    model = assert_trains_as_in_torch(torch.compile(module, backend="aot_eager"), x)
    assert sorted(model.params) == ["_orig_mod.0.bias", "_orig_mod.0.weight"]


def test_data_parallel_without_gpus(x):
    """`DataParallel` calls its module as it is where there is no GPU."""
    if torch.cuda.is_available():
        pytest.skip("DataParallel splits batches over GPUs")
    assert_trains_as_in_torch(torch.nn.DataParallel(torch.nn.Linear(3, 2)), x)


class Penalised(torch.nn.Module):
    """Asks its parameters whether they require gradients, as penalties and branches do."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 3)

    def forward(self, x):
        trained = [p for p in self.parameters() if p.requires_grad]
        return self.layer(x).square().mean() + 0.1 * sum(p.square().sum() for p in trained)


@pytest.mark.parametrize("declared", [False, True])
def test_parameters_require_gradients_in_every_call(declared, x):
    """Whether a call is differentiated, and by what, is nothing that code can see of them."""
    module = Penalised()
    shapes = jax.ShapeDtypeStruct((), jnp.float32) if declared else None
    model = from_torch(module, output_shapes=shapes)
    expected, a = module(x).detach(), t2j(x)
    assert_trees_equal(model(a), expected, rtol=1e-6)
    assert_trees_equal(eqx.filter_jit(model)(a), expected, rtol=1e-6)
    assert_trees_equal(jax.value_and_grad(lambda a: model(a))(a)[0], expected, rtol=1e-6)
    of_bias = lambda m: m.params["layer.bias"]  # noqa: E731
    bias, rest = eqx.partition(
        model, eqx.tree_at(of_bias, jax.tree.map(lambda _: False, model), True)
    )
    of_part = lambda b: eqx.combine(b, rest)(a)  # noqa: E731
    assert_trees_equal(eqx.filter_value_and_grad(of_part)(bias)[0], expected, rtol=1e-6)
    _, tangent = jax.jvp(lambda a: model(a), (a,), (a,))
    assert_trees_equal(tangent, torch.func.jvp(module, (x,), (x,))[1].detach(), rtol=1e-5)
    (module(x) ** 2).backward()
    value, grads = eqx.filter_value_and_grad(lambda m: eqx.filter_checkpoint(m)(a) ** 2)(model)
    assert_trees_equal(value, expected**2, rtol=1e-6)
    assert_trees_equal(grads.params["layer.bias"], module.layer.bias.grad, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:torch.func.vmap cannot batch")
def test_a_batch_of_parameters_that_are_asked_for_gradients(x):
    module = Penalised()
    expected = torch.stack([module(row) for row in x]).detach()
    assert_trees_equal(jax.vmap(from_torch(module))(t2j(x)), expected, rtol=1e-6)


def test_a_frozen_parameter_that_is_asked_stays_frozen_or_is_refused(x):
    module = Penalised()
    module.layer.weight.requires_grad_(False)
    model = from_torch(module)
    assert_trees_equal(model(t2j(x)), module(x).detach(), rtol=1e-6)
    trained, frozen = eqx.partition(model, trainable(model))
    loss = lambda trained: eqx.combine(trained, frozen)(t2j(x))  # noqa: E731
    module(x).backward()
    grads = eqx.filter_grad(loss)(trained)
    assert_trees_equal(grads.params["layer.bias"], module.layer.bias.grad, rtol=1e-5)
    with pytest.raises(Exception, match="`Penalised` asks whether .* layer.weight was frozen"):
        jax.block_until_ready(eqx.filter_grad(lambda m: m(t2j(x)))(model))


class OnlyIfParameter(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))

    def forward(self, x):
        assert isinstance(self.w, torch.nn.Parameter)
        known = all(isinstance(p, torch.nn.Parameter) for p in self._parameters.values())
        return x * self.w if known else x


def test_parameters_are_parameters_in_every_call(x):
    module = OnlyIfParameter()
    model, a = from_torch(module), t2j(x)
    expected = module(x).detach()
    assert_trees_equal(model(a), expected)
    assert_trees_equal(eqx.filter_jit(jax.vmap(lambda a: model(a)))(a), expected)
    value, grads = eqx.filter_value_and_grad(lambda m: m(a).sum())(model)
    assert_trees_equal(value, expected.sum())
    assert_trees_equal(grads.params["w"], x.sum(0))
    assert_trees_equal(jax.jvp(lambda a: model(a), (a,), (a,)), (expected, expected))


def _holding(what: Any) -> torch.nn.Module:
    module = torch.nn.Sequential(torch.nn.Linear(3, 3))
    module.held = what(module)
    return module


@pytest.mark.parametrize(
    ("what", "message"),
    {
        "parameter as key": (lambda m: {m[0].weight: 5.0}, r"`held` has `0.weight`, or its `id`"),
        "its id": (lambda m: [{id(m[0].bias): 5.0}], r"`held\[0\]` has `0.bias`, or its `id`"),
        "id of a layer": (lambda m: {id(m[0]): 5.0}, "`held` has `0`, or its `id`"),
        "NumPy": (lambda m: m[0].weight.detach().numpy(), "`ndarray`, is the memory of `0.weight`"),
        "view": (lambda m: m[0].weight.detach().numpy()[1:, 1], "is the memory of `0.weight`"),
        "storage": (lambda m: m[0].weight.untyped_storage(), "is the memory of `0.weight`"),
    }.values(),
)
def test_what_would_stay_with_the_original_s_parameters_is_refused(what, message):
    with pytest.raises(ModuleError, match=message):
        from_torch(_holding(what))


@pytest.mark.parametrize(
    "what",
    [
        lambda m: {7: 5.0, "0.weight": 5.0},
        lambda m: {m[0]: 5.0},
        lambda m: m[0].weight.detach().numpy().copy(),
        lambda m: np.array([None, m.training]),
    ],
)
def test_what_follows_calls_or_needs_not_is_taken(what, x):
    module = _holding(what)
    assert_trees_equal(from_torch(module)(t2j(x)), module(x).detach(), rtol=1e-6)
