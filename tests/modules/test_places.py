"""Modules that hold their tensors in other places than registered attributes, as in torch."""

import collections
import copy
import dataclasses
import functools
import types
import weakref

import equinox as eqx
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from eqx_torch import from_torch, ModuleError, t2j, to_torch

from ..helpers import assert_trees_equal


X = np.arange(1.0, 5.0, dtype=np.float32)


class Plain:
    """An object with attributes."""

    def __init__(self, value):
        self.value = value


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value):
        self.value = value


@dataclasses.dataclass(frozen=True)
class Frozen:
    value: torch.Tensor


class Pair(collections.namedtuple("Pair", ["value", "other"])):
    """A named tuple."""


def _defaulted(w):
    def get(*, w=w):
        return w

    return get


def _decorated(w):
    @functools.wraps(_defaulted)
    def get():
        return get.kept["w"]

    get.kept = {"w": w}
    return get


def _nested(w):
    def outer():
        return (lambda: w)()

    return [{"a": (outer,)}]


# How a module keeps a tensor beside its parameters: what makes the holder, what reads it.
HOLDERS = {
    "attribute": (lambda w: w, lambda h: h),
    "list": (lambda w: [0, w], lambda h: h[1]),
    "deque": (lambda w: collections.deque([w]), lambda h: h[0]),
    "dict": (lambda w: {"a": {"b": w}}, lambda h: h["a"]["b"]),
    "tuple": (lambda w: (1, (w, 2)), lambda h: h[1][0]),
    "named tuple": (lambda w: Pair(w, 1), lambda h: h.value),
    "set": (lambda w: {w}, lambda h: next(iter(h))),
    "frozenset": (lambda w: frozenset([w]), lambda h: next(iter(h))),
    "object": (Plain, lambda h: h.value),
    "object in a tuple": (lambda w: (Plain((w,)),), lambda h: h[0].value[0]),
    "namespace": (lambda w: types.SimpleNamespace(value=w), lambda h: h.value),
    "slots": (Slotted, lambda h: h.value),
    "frozen dataclass": (Frozen, lambda h: h.value),
    "closure": (lambda w: lambda: w, lambda h: h()),
    "nested closures": (_nested, lambda h: h[0]["a"][0]()),
    "default": (_defaulted, lambda h: h()),
    "attribute of a function": (_decorated, lambda h: h()),
    "partial": (lambda w: functools.partial(torch.mul, w), lambda h: h(torch.ones(()))),
    "partial by name": (
        lambda w: functools.partial(torch.mul, other=w),
        lambda h: h(torch.ones(())),
    ),
    "method of the tensor": (lambda w: w.mul, lambda h: h(torch.ones(()))),
    "method in a tuple": (lambda w: (w.norm,), lambda h: h[0].__self__),
    "method of an object": (lambda w: Plain(w).__getattribute__, lambda h: h("value")),
    "bound function": (
        lambda w: types.MethodType(lambda own: own.value, Plain(w)),
        lambda h: h(),
    ),
    "weak reference": (weakref.ref, lambda h: h()),
}

# What is kept: the parameter itself, or a view of it.
KEPT = {
    "itself": lambda w: w,
    "view": lambda w: w.view(2, 2),
    "transposed": lambda w: w.view(2, 2).t(),
    "slice": lambda w: w[1:3],
    "expanded": lambda w: w[:1].expand(4),
    "strided": lambda w: w[::2],
    "detached": lambda w: w.detach(),
    "data": lambda w: w.data,
}


class Holding(torch.nn.Module):
    """Keeps its parameter a second time."""

    def __init__(self, holder, kept="itself"):
        super().__init__()
        make, self.read = HOLDERS[holder]
        self.w = torch.nn.Parameter(torch.tensor([1.0, -2.0, 3.0, 0.5]))
        self.alive = KEPT[kept](self.w)
        self.held = make(self.alive)

    def forward(self, x):
        w = self.read(self.held)
        return x * x.sum() * self.w + (w * w).sum()


def _loss(model, x):
    return jnp.sin(model(x)).sum()


def assert_follows(make, x, names=("w",), transformed=True):
    """Values and gradients are those of torch, before and after an update."""
    model = from_torch(make())
    for scale in (1.0, 1.5):
        module = scaled(make(), scale)
        v = torch.from_numpy(x).requires_grad_()
        y = module(v)
        parameters = [dict(module.named_parameters())[name] for name in names]
        wanted = torch.autograd.grad(y.sin().sum(), [*parameters, v], allow_unused=True)
        pairs = zip([*parameters, v], wanted, strict=True)
        wanted = [torch.zeros_like(p) if g is None else g for p, g in pairs]
        for run in (lambda f: f, eqx.filter_jit)[: 1 + transformed]:
            assert_trees_equal(run(lambda m, x: m(x))(model, x), y.detach(), rtol=1e-5)
            grads = run(eqx.filter_grad(_loss))(model, jnp.asarray(x))
            got = [grads.params[name] for name in names]
            got.append(run(jax.grad(lambda x, m: _loss(m, x)))(jnp.asarray(x), model))
            assert_trees_equal(got, wanted, rtol=1e-4, atol=1e-5)
        if transformed:
            batch = jax.vmap(model)(np.stack([x, 2 * x]))
            assert_trees_equal(batch[0], y.detach(), rtol=1e-5)
        new = jax.tree.map(lambda w: 1.5 * w, model.params)
        model = eqx.tree_at(lambda m: m.params, model, new)


def scaled(module, scale):
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(scale)
    return module


@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.covering(12)
def test_a_parameter_is_followed_wherever_it_is_kept(holder):
    assert_follows(lambda: Holding(holder), X)


@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("holder", ["attribute", "tuple", "closure", "object"])
@pytest.mark.covering
def test_views_are_followed_with_their_values_and_gradients(holder, kept):
    assert_follows(lambda: Holding(holder, kept), X)


@pytest.mark.parametrize("kept", KEPT)
def test_views_share_memory_on_the_way_back(kept):
    module = to_torch(from_torch(Holding("tuple", kept)))
    module, other = scaled(module, 3), scaled(Holding("tuple", kept), 3)
    x = torch.from_numpy(X)
    assert_trees_equal(module(x).detach(), other(x).detach())


# Random modules.


def _hooked(module, get):
    """Adds the tensor in a hook, which closes over what gives it."""
    module.register_forward_hook(lambda m, args, y: y + get().sum() * args[0])


def _patched(module, get):
    """Adds it in a forward of one instance."""
    forward = module.forward
    module.forward = lambda x: forward(x) * get().sum()


def _prehooked(module, get):
    module.register_forward_pre_hook(lambda m, args: (args[0] + get().sum(),))


def _activation(module, get):
    module.act = lambda x: torch.tanh(x * get().mean())


USES = {"hook": _hooked, "forward": _patched, "pre-hook": _prehooked, "activation": _activation}


class Drawn(torch.nn.Module):
    """Two layers and what was drawn to be kept of them."""

    def __init__(self, tied, draws):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        if tied:
            self.second.weight = self.first.weight
        self.act = torch.sin
        self.holders = []
        for layer, kept, holder, use in draws:
            owner = self.first if layer else self.second
            make, read = HOLDERS[holder]
            alive = KEPT[kept](owner.weight[0] if kept != "itself" else owner.weight)
            self.holders.append(alive)  # which weak references do not keep alive
            held = make(alive)
            self.holders.append(held)
            if use is not None:
                USES[use](self if use == "activation" else owner, functools.partial(read, held))

    def forward(self, x):
        y = self.second(self.act(self.first(x)))
        alive = [h for h in self.holders if isinstance(h, torch.Tensor)]
        return y + sum((h * h).sum() for h in alive)


_draw = st.tuples(
    st.booleans(),
    st.sampled_from(list(KEPT)),
    st.sampled_from(list(HOLDERS)),
    st.sampled_from([None, *USES]),
)


@hypothesis.settings(max_examples=25, phases=[hypothesis.Phase.generate])
@hypothesis.given(st.booleans(), st.lists(_draw, max_size=3))
def test_random_modules_are_followed(tied, draws):
    names = [name for name, _ in Drawn(tied, draws).named_parameters()]
    assert_follows(lambda: Drawn(tied, draws), X, names, transformed=False)


# What cannot be followed is refused.


class TwoLayers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
        self.register_buffer("total", torch.zeros(3))

    def forward(self, x):
        return self.decoder(self.encoder(x)) + self.total


def _same_memory(m):
    m.decoder.weight = torch.nn.Parameter(m.encoder.weight.data)


def _transposed(m):
    m.decoder.weight = torch.nn.Parameter(m.encoder.weight.data.t())


def _buffer_of_a_parameter(m):
    m.register_buffer("first", m.encoder.weight.data[:1])


def _two_owners(m):
    m.whole = torch.zeros(6)
    m.encoder.bias = torch.nn.Parameter(m.whole[:3])
    m.decoder.bias = torch.nn.Parameter(m.whole[3:])


def _of_another_dtype(m):
    m.bits = m.encoder.weight.data.view(torch.int32)


def _by_numpy(m):
    m.register_buffer("first", torch.from_numpy(m.encoder.weight.detach().numpy()[0]))


def _of_a_permuted_parameter(m):
    m.encoder.weight = torch.nn.Parameter(torch.randn(3, 3).t())
    m.rows = m.encoder.weight.data[0]


OVERLAPS = {
    "same": (_same_memory, r"module.decoder.weight = module.encoder.weight"),
    "transposed": (_transposed, r"`decoder.weight` shares memory with `encoder.weight`.*forward"),
    "buffer": (_buffer_of_a_parameter, r"`first` shares memory with `encoder.weight`"),
    "two owners": (_two_owners, r"`whole` shares memory with `(en|de)coder.bias`"),
    "dtype": (_of_another_dtype, r"`bits` shares memory with `encoder.weight`"),
    "numpy": (_by_numpy, r"`first` shares memory with `encoder.weight`"),
    "layout": (_of_a_permuted_parameter, r"`rows` shares memory with `encoder.weight`"),
}


@pytest.mark.parametrize(("change", "message"), OVERLAPS.values(), ids=OVERLAPS)
def test_tensors_that_overlap_are_named(change, message):
    module = TwoLayers()
    change(module)
    with pytest.raises(ModuleError, match=message):
        from_torch(module)


def test_state_that_overlaps_is_named():
    module = TwoLayers()
    module.register_buffer("part", module.total[:2])
    from_torch(module)
    with pytest.raises(ModuleError, match="`part` shares memory with `total`"):
        from_torch(module, state=["total"])


def test_parts_of_one_storage_are_no_overlap():
    module, whole = TwoLayers(), torch.randn(3, 6)
    module.encoder.weight = torch.nn.Parameter(whole[:, :3])
    module.decoder.weight = torch.nn.Parameter(whole[:, 3:])
    x = torch.randn(2, 3)
    assert_trees_equal(from_torch(module)(t2j(x)), module(x).detach(), rtol=1e-5)


_NETWORK = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
_HOLDER = types.SimpleNamespace(network=_NETWORK, calls=0)


def _helper(y):
    return y + _NETWORK[0].bias


GLOBALS = {
    "index": (lambda m, a, y: y + _NETWORK[0].bias, "0.bias", "lambda>"),
    "call": (lambda m, a, y: _NETWORK[0](y), "0.weight", "lambda>"),
    "attribute": (lambda m, a, y: y + _HOLDER.network[0].bias, "0.bias", "lambda>"),
    "method": (lambda m, a, y: y + next(_NETWORK.parameters()), "0.weight", "lambda>"),
    "view": (lambda m, a, y: y + _NETWORK[0].weight.data[:1], "0.weight", "lambda>"),
    "another function": (lambda m, a, y: _helper(y), "0.bias", "_helper"),
    "inner function": (lambda m, a, y: sum(y + _NETWORK[0].bias for _ in range(1)), "0.bias", ">"),
}


@pytest.mark.parametrize(("hook", "name", "reader"), GLOBALS.values(), ids=GLOBALS)
def test_functions_that_read_parameters_by_a_global_are_named(hook, name, reader):
    handle = _NETWORK[1].register_forward_hook(hook)
    try:
        model = from_torch(_NETWORK)
        with pytest.raises(ModuleError, match=rf"{reader}` reads its parameter {name} through"):
            model(jnp.ones((1, 3)))
    finally:
        handle.remove()


def test_methods_that_read_parameters_by_a_variable_are_named():
    layer = torch.nn.Linear(3, 3)

    class Local(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            return x @ layer.weight

    message = r"Local.forward` reads its parameter layer.weight"
    with pytest.raises(ModuleError, match=message):
        from_torch(Local())(jnp.ones((2, 3)))
    declared = from_torch(Local(), output_shapes=jax.ShapeDtypeStruct((2, 3), jnp.float32))
    with pytest.raises(Exception, match=message):
        declared(jnp.ones((2, 3)))


class Sharing(torch.nn.Module):
    def __init__(self, w=None):
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(3)) if w is None else w


class OnTheClass(Sharing):
    def __init__(self):
        super().__init__()
        OnTheClass.shared = self.w

    def forward(self, x):
        return x * self.shared


class Registry:
    items: dict = {}  # noqa: RUF012
    unread: list = []  # noqa: RUF012

    @classmethod
    def get(cls, name):
        return cls.items[name]


class InARegistry(Sharing):
    def __init__(self):
        super().__init__()
        Registry.items["w"] = self.w

    def forward(self, x):
        return x * Registry.items["w"]


class ByAClassMethod(Sharing):
    def __init__(self):
        super().__init__()
        Registry.items["w"] = self.w

    def forward(self, x):
        return x * Registry.get("w")


class Decorated(Sharing):
    def __init__(self):
        super().__init__()
        Registry.items["w"] = self.w

    @torch.no_grad()
    def scale(self):
        return Registry.items["w"].sum()

    @torch.autocast("cpu", enabled=False)
    def forward(self, x):
        return x * self.scale()


class OfALocalClass(Sharing):
    def __init__(self):
        super().__init__()

        class Scale:
            def go(_, x):  # noqa: N805
                return x * self.w

        self.scale = [Scale()]

    def forward(self, x):
        return self.scale[0].go(x)


def _scaling(w):
    class Scaling(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * w

        @staticmethod
        def backward(ctx, g):
            return g * w

    return Scaling


class ByAFunctionClass(Sharing):
    def __init__(self, keep=lambda f: f):
        super().__init__()
        self.scaling = keep(_scaling(self.w))

    def forward(self, x):
        return self.scaling.apply(x)


class InAVariable(ByAFunctionClass):
    def __init__(self):
        super().__init__(lambda f: lambda x: f.apply(x))

    def forward(self, x):
        return self.scaling(x)


class ByItsApply(ByAFunctionClass):
    def __init__(self):
        super().__init__(lambda f: {"apply": f.apply})

    def forward(self, x):
        return self.scaling["apply"](x)


CLASSES = [
    OnTheClass,
    InARegistry,
    ByAClassMethod,
    Decorated,
    OfALocalClass,
    ByAFunctionClass,
    InAVariable,
    ByItsApply,
]


@pytest.mark.parametrize("kind", CLASSES)
def test_parameters_that_are_reached_through_a_class_are_named(kind):
    module = kind()
    model = from_torch(module)
    with pytest.raises(ModuleError, match=r"cannot be converted.*parameter w.*original's. Make it"):
        model(X[:3])


class Options(dict):
    def __getattr__(self, name):
        return self[name]


class Listed(Sharing):
    """In a list of its class that no call reads, and with a method that reads another object."""

    every: list = []  # noqa: RUF012
    options = Options(a=1)
    add = functools.wraps(torch.add)(lambda self, x: x + x)
    scale = 2.0

    def __init__(self):
        super().__init__()
        Listed.every.append(self)
        Registry.unread.append(self.w)

    def forward(self, x):
        return x * self.w * self.scale * len(Registry.__name__) / 8


def test_classes_of_which_calls_read_no_parameter_are_left_alone():
    Registry.items.clear()
    assert_follows(Listed, X[:3])


def _counts(m, a, y):
    _HOLDER.calls += _NETWORK.training


def test_functions_that_read_something_else_by_a_global_are_left_alone():
    handle = _NETWORK[1].register_forward_hook(_counts)
    try:
        model, before = from_torch(_NETWORK), _HOLDER.calls
        model(jnp.ones((1, 3)))
        assert _HOLDER.calls > before
    finally:
        handle.remove()


class Shared:
    """An object of which there is one, so that copies have the original's parameters."""

    def __init__(self, value):
        self.value = value

    def __deepcopy__(self, memo):
        return self


def test_parameters_that_are_reached_through_objects_that_are_not_copied_are_named():
    module = TwoLayers()
    module.helper = {"a": Shared([module.encoder.weight])}
    x = jnp.ones((2, 3))
    assert_trees_equal(from_torch(module)(x), module(torch.ones(2, 3)).detach(), rtol=1e-5)
    module.encoder.register_forward_hook(lambda m, a, y: y + module.helper["a"].value[0])
    with pytest.raises(ModuleError, match=r"lambda>` reads its parameter encoder.weight"):
        from_torch(module)(x)


# What is no parameter is no parameter.


def test_tensors_that_are_not_registered_are_constants():
    """torch does not train them either: they are not among `parameters()`."""
    module, own = TwoLayers(), torch.nn.Parameter(torch.ones(3))
    module.held = (own,)
    module.decoder.register_forward_hook(lambda m, a, y: y * module.held[0] + module.encoder.bias)
    model = from_torch(module)
    x = torch.randn(2, 3)
    before = module(x).detach()
    with torch.no_grad():
        own.zero_()
    assert sorted(model.params) == sorted(name for name, _ in module.named_parameters())
    assert_trees_equal(model(t2j(x)), before, rtol=1e-5)


def test_hooks_go_on_to_write_to_what_is_the_user_s():
    module, seen = TwoLayers(), []
    module.decoder.register_forward_hook(lambda m, a, y: seen.append(y.shape))
    module.encoder.register_forward_hook(
        lambda m, a, y: seen.append(y.shape) or y + module.decoder.bias
    )
    model = from_torch(module)
    for _ in range(2):
        seen.clear()
        model(jnp.ones((2, 3)))
        assert len(seen) >= 2


# Hooks on tensors.


@pytest.mark.parametrize(
    ("register", "tensor"),
    [
        (lambda m, h: m.encoder.weight.register_hook(h), "encoder.weight"),
        (
            lambda m, h: m.decoder.bias.register_post_accumulate_grad_hook(lambda p: None),
            "decoder.bias",
        ),
        (lambda m, h: m.total.requires_grad_().register_hook(h), "total"),
    ],
    ids=["weight", "accumulated", "buffer"],
)
def test_hooks_on_tensors_are_refused(register, tensor):
    module = TwoLayers()
    handle = register(module, lambda g: 2 * g)
    with pytest.raises(ModuleError, match=f"hook on the gradient of its tensor {tensor}.*eqx.tree"):
        from_torch(module)
    handle.remove()
    from_torch(module)


def test_gradients_are_masked_as_the_message_about_hooks_says():
    module, mask = TwoLayers(), torch.tensor([1.0, 0.0, 1.0])
    model, x = from_torch(module), torch.randn(2, 3)
    grads = eqx.filter_grad(lambda m: (m(t2j(x)) ** 2).sum())(model)
    masked = lambda g: g * t2j(mask)  # noqa: E731
    grads = eqx.tree_at(lambda g: g.params["encoder.weight"], grads, replace_fn=masked)
    module.encoder.weight.register_hook(lambda g: g * mask)
    (module(x) ** 2).sum().backward()
    assert_trees_equal(grads.params["encoder.weight"], module.encoder.weight.grad, rtol=1e-4)


class Copies(torch.nn.Module):
    """Copies a layer in its forward, or all of itself."""

    def __init__(self, whole):
        super().__init__()
        self.layer, self.whole = torch.nn.Linear(4, 4), whole

    def forward(self, x):
        return copy.deepcopy(self).layer(x) if self.whole else copy.deepcopy(self.layer)(x)


@pytest.mark.filterwarnings("ignore:.*inferred by running it on zeros")  # fake tensors refuse
@pytest.mark.parametrize("whole", [False, True])
def test_copies_made_in_a_forward(whole):
    net = Copies(whole)
    expected = net(torch.from_numpy(X)).detach()
    assert_trees_equal(from_torch(net)(X), expected, atol=1e-6)
    assert_trees_equal(eqx.filter_jit(from_torch(net))(X), expected, atol=1e-6)


@pytest.mark.parametrize("holder", [weakref.proxy, lambda module: module])
def test_a_module_registered_in_itself_is_refused(holder):
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())
    net[1].up = holder(net)
    with pytest.raises(ModuleError, match=r'as its submodule 1.up, so.*__setattr__\(self, "up"'):
        from_torch(net)


class Held(torch.nn.Module):
    """Holds a parameter of a layer where only Python's garbage collector sees it."""

    def __init__(self, hold):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self.held = hold(self.layer.weight)

    def forward(self, x):
        return x @ next(iter(self.held))


def as_object(weight):
    array = np.empty(1, object)
    array[0] = weight
    return array


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("hold", [as_object, lambda w: iter([w]), lambda w: map(abs, [w])])
def test_parameters_where_none_can_be_put_are_named(hold, jit):
    model = from_torch(Held(hold))
    with pytest.raises(ModuleError, match=r"reads layer.weight from its attribute held \("):
        (eqx.filter_jit(model) if jit else model)(X)
