"""What a converted module says where it is used as a torch module, or as JAX cannot use it."""

import re
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import PartitionSpec as P

from eqx_torch import from_torch, InputError, ModuleError, OutputError, ShardingError, to_torch

from ..helpers import assert_trees_equal


X = np.arange(12, dtype=np.float32).reshape(4, 3) / 10
KEY = jax.random.key(0)


class Net(torch.nn.Module):
    """A module that changes buffers, draws random numbers and has what torch modules have."""

    limit = 3

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
        self.head = torch.nn.Linear(3, 3)
        self.tied = self.head
        self.scale = torch.nn.Parameter(torch.ones(3))
        self.drop = torch.nn.Dropout(0.5)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("shift", torch.ones(3))
        self.width = 3

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        self.calls += 1
        y = self.head(self.stem(x)) * self.scale + self.shift
        return {"y": self.drop(y), "x": x}

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.stem(x)

    @property
    def double_width(self) -> int:
        raise AssertionError("is not to be computed for a message")


def with_state(**options: Any) -> Any:
    return eqx.nn.make_with_state(from_torch)(Net(), state=["calls"], **options)


HEAD = '`model.params["head.weight"]`, `model.params["head.bias"]`.'
IN_TORCH = "eqx_torch.to_torch(model, state)"
ATTRIBUTES = {
    "calls": 'Write `state.get(model.buffers)["calls"]`: the forward changes it.',
    "double_width": f"The torch module has one: `{IN_TORCH}.double_width`.",
    "encode": 'Write `from_torch(model, method="encode")`, which shares its parameters.',
    "eval": "Write `model = eqx.nn.inference_mode(model)`.",
    "training": "Read `model.inference`, which is its opposite.",
    "zero_grad": "Gradients are results, not kept in the model: "
    "`grads = eqx.filter_grad(loss)(model)`.",
    "to": "`model = eqx.filter_shard(model, jax.devices()[0])`. For another dtype convert",
    "cuda": "torch runs where the arrays are: `model = eqx.filter_shard(model, jax.devices()[0])`.",
    "half": "convert the torch module, `from_torch(module.half())`, or cast the parameters",
    "named_modules": f"The torch module has one: `{IN_TORCH}.named_modules`.",
}


@pytest.mark.parametrize(("name", "remedy"), ATTRIBUTES.items(), ids=ATTRIBUTES)
def test_attributes_of_the_torch_module(name, remedy):
    model, _ = with_state()
    message = re.escape(f"a TorchModule has no attribute `{name}`. ") + ".*" + re.escape(remedy)
    with pytest.raises(AttributeError, match=f"^{message}"):
        getattr(model, name)


@pytest.mark.parametrize(
    ("name", "listed"),
    [("wieght", " .*'weight'"), ("nothing", " .*'weight'"), ("__array__", "$"), ("_private", "$")],
)
def test_attributes_that_nobody_has(name, listed):
    with pytest.raises(AttributeError, match=f"^a TorchModule has no attribute `{name}`.{listed}"):
        getattr(from_torch(torch.nn.Linear(3, 3)), name)


def test_what_the_messages_say_works():
    module = Net()
    model, state = with_state()
    for name in ("head.weight", "head.bias", "stem.0.weight", "scale"):
        assert_trees_equal(model.params[name], module.get_parameter(name).detach())
    assert_trees_equal(state.get(model.buffers)["calls"], module.calls)
    assert_trees_equal(to_torch(model, state).shift, module.shift)
    encode = from_torch(model, method="encode")
    encoded, _ = encode(X, state=state)
    assert_trees_equal(encoded, module.encode(torch.from_numpy(X)).detach())
    moved = eqx.filter_shard(model, jax.devices()[1])
    assert {d for p in moved.params.values() for d in p.devices()} == {jax.devices()[1]}
    params, rest = eqx.partition(from_torch(torch.nn.Linear(3, 3)), eqx.is_inexact_array)
    half = eqx.combine(jax.tree.map(lambda a: a.astype(jnp.float16), params), rest)
    expected = to_torch(eqx.combine(params, rest)).half()(torch.from_numpy(X).half())
    assert_trees_equal(half(X.astype(np.float16)), expected.detach())


class Classifier(eqx.Module):
    body: eqx.Module

    def __call__(self, x: Any) -> Any:
        return self.body(x)


@pytest.mark.parametrize("wrap", [lambda model: model, Classifier], ids=["model", "inside another"])
@pytest.mark.parametrize(
    "use",
    [
        lambda model: jax.jit(model)(X),
        lambda model: jax.checkpoint(model)(X),
        lambda model: {model: 1},
        hash,
    ],
    ids=["jit", "checkpoint", "dict", "hash"],
)
@pytest.mark.covering
def test_models_cannot_be_hashed(use, wrap):
    model = wrap(from_torch(torch.nn.Linear(3, 3)))
    message = (
        r"^`Linear` cannot be hashed, as its parameters are arrays, so it cannot be what `jax.jit` "
        r"compiles, .* Write `eqx.filter_jit\(model\)`, .*"
        r"`jax.jit\(lambda model, x: model\(x\)\)\(model, x\)`; .* write `lambda x: model\(x\)`\."
    )
    with pytest.raises(ModuleError, match=message):
        use(model)
    expected = eqx.filter_jit(model)(X)
    assert_trees_equal(jax.jit(lambda model, x: model(x))(model, X), expected)
    assert_trees_equal(jax.checkpoint(lambda x: model(x))(X), expected)


STATE_MESSAGE = (
    "`Net` got an `equinox.nn.State` as {}, but what is not passed as `state=` or `key=` is for "
    "torch's `forward`. Write `state=state`, as in `y, state = model(x, state=state)`."
)
KEY_MESSAGE = (
    "`Net` got a JAX key as {}, but what is not passed as `state=` or `key=` is for torch's "
    "`forward`. Write `key=key`, as in `y = model(x, key=key)`."
)
CALLS = {
    "state": (lambda m, s: m(X, s), STATE_MESSAGE, "argument 1"),
    "state and key": (lambda m, s: m(X, s, KEY), STATE_MESSAGE, "argument 1"),
    "key": (lambda m, s: m(X, KEY, state=s), KEY_MESSAGE, "argument 1"),
    "keys": (lambda m, s: m(X, jax.random.split(KEY), state=s), KEY_MESSAGE, "argument 1"),
    "state in a tuple": (lambda m, s: m((X, s)), STATE_MESSAGE, "argument 0[1]"),
    "state by another name": (lambda m, s: m(X, old=s), STATE_MESSAGE, "argument 'old'"),
    "key by another name": (lambda m, s: m(X, state=s, rng=KEY), KEY_MESSAGE, "argument 'rng'"),
}


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize(("call", "message", "where"), CALLS.values(), ids=CALLS)
@pytest.mark.covering
def test_states_and_keys_among_the_arguments_of_torch(call, message, where, jit):
    model, state = with_state()
    with pytest.raises(InputError) as info:
        (eqx.filter_jit(call) if jit else call)(model, state)
    assert str(info.value) == message.format(where)


NO_KEY = "`key=` of `Dropout` is {}, but takes a JAX key: `key=jax.random.key(0)`."
KEYS = (
    "`key=` of `Dropout` is an array of keys, of shape {}, but a call draws from one key: "
    "`key=keys[0]`. To call it with each of them, "
    "`jax.vmap(lambda key: model(x, key=key))(keys)`."
)
WRONG_KEYS = {
    "int": (0, NO_KEY.format("0 of type int")),
    "float": (1.5, NO_KEY.format("1.5 of type float")),
    "text": ("0", NO_KEY.format("'0' of type str")),
    "list": ([0, 1], NO_KEY.format("[0, 1] of type list")),
    "floats": (jnp.ones(2), NO_KEY.format("an array float32[2]")),
    "too long": (np.zeros(3, np.uint32), NO_KEY.format("an array uint32[3]")),
    "keys": (jax.random.split(KEY, 2), KEYS.format("[2]")),
    "a grid of keys": (jax.random.split(KEY, (2, 3)), KEYS.format("[2, 3]")),
    "raw keys": (jax.random.key_data(jax.random.split(KEY, 2)), KEYS.format("[2]")),
}


@pytest.mark.parametrize("evaluated", [False, True])
@pytest.mark.parametrize(("key", "message"), WRONG_KEYS.values(), ids=WRONG_KEYS)
@pytest.mark.covering
def test_what_is_no_key(key, message, evaluated):
    model = eqx.nn.inference_mode(from_torch(torch.nn.Dropout(0.5)), value=evaluated)
    with pytest.raises(InputError) as info:
        model(X, key=key)
    assert str(info.value) == message


def test_a_call_with_each_of_several_keys():
    model, keys = from_torch(torch.nn.Dropout(0.5)), jax.random.split(KEY, 2)
    expected = [model(X, key=key) for key in keys]
    assert_trees_equal(jax.vmap(lambda key: model(X, key=key))(keys), jnp.stack(expected))


@pytest.mark.parametrize("buffers", [False, True])
def test_out_specs_that_do_not_fit_the_result(buffers):
    out_specs = {"y": P("batch")}
    with jax.set_mesh(jax.make_mesh((2,), ("batch",))):
        if buffers:
            model, state = eqx.filter_shard(with_state(out_specs=out_specs), P())
        else:
            module = torch.nn.Linear(3, 3)
            module.forward = lambda x: {"y": x, "x": x}
            model, state = from_torch(module, out_specs=out_specs), None
        model = eqx.filter_shard(model, P())
        message = (
            f"`out_specs={out_specs}` of `{'Net' if buffers else 'Linear'}` is not a prefix of its "
            "outputs {'y': *, 'x': *}. Pass one PartitionSpec"
        )
        with pytest.raises(ShardingError, match=re.escape(message)):
            model(jax.device_put(X, P("batch")), state=state, key=KEY)


@pytest.mark.parametrize("declared", ["x", "y and x"])
def test_declared_structure_that_is_not_returned(declared):
    spec = jax.ShapeDtypeStruct(X.shape, X.dtype)
    shapes = spec if declared == "x" else [spec, spec]
    model, state = with_state(output_shapes=shapes)
    shown = r"\*" if declared == "x" else r"\[\*, \*\]"
    message = rf"declared by output_shapes: {shown}\n  returned: {{'y': \*, 'x': \*}}\n"
    with pytest.raises(Exception, match=message) as info:
        jax.block_until_ready(model(X, state=state, key=KEY))
    assert OutputError.__name__ in str(info.value)


def test_a_state_is_not_made_twice():
    model, state = with_state()
    message = (
        "^`Net` has a state already, made by `eqx.nn.make_with_state`, and no longer holds the "
        r"initial one. Write `from_torch\(model, ...\)` without `make_with_state`, and pass the "
        "state of `model`, which the result shares.$"
    )
    for options in ({}, {"method": "encode"}, {"out_specs": P("batch")}):
        with pytest.raises(ModuleError, match=message):
            eqx.nn.make_with_state(from_torch)(model, **options)
    y, _ = from_torch(model)(X, state=jax.tree.map(lambda a: a, state), key=KEY)
    assert_trees_equal(y, model(X, state=state, key=KEY)[0], exact=True)


def test_a_state_is_made_of_a_model_that_has_its_initial_one():
    model, state = eqx.nn.make_with_state(from_torch)(from_torch(Net(), state=["calls"]))
    expected, expected_state = with_state()
    y, state = model(X, state=state, key=KEY)
    expected_y, expected_state = expected(X, state=expected_state, key=KEY)
    assert_trees_equal((y, state), (expected_y, expected_state), exact=True)


@pytest.mark.parametrize("state", [["calls"], [], None], ids=["names", "none", "a state"])
def test_the_state_of_a_model_is_not_chosen_twice(state):
    model, own = with_state()
    message = "^`state=` names the buffers .*, but `Net` is converted already, .* Leave it out.$"
    with pytest.raises(InputError, match=message):
        from_torch(model, state=own if state is None else state)


@pytest.mark.parametrize("of", [torch.nn.Linear, torch.nn.Linear(2, 2)], ids=["function", "bound"])
def test_a_method_is_passed_by_name(of):
    with pytest.raises(InputError, match='takes the name of a method.*write `method="forward"`'):
        from_torch(torch.nn.Linear(2, 2), method=of.forward)
