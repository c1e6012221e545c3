"""Container classes that JAX does not know: results are of the class, but JAX is not told of it."""

import collections
import copy
import dataclasses
import pickle
from collections.abc import Mapping
from typing import ClassVar

import jax
import jax.numpy as jnp
import pytest
import torch
from transformers.modeling_outputs import BaseModelOutput

from eqx_torch import torch2jax, tree_t2j

from ..helpers import assert_trees_equal


@dataclasses.dataclass
class Plain:
    x: object
    y: object = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: object
    y: object = None

    def total(self):
        return self.x + self.y


@dataclasses.dataclass(slots=True)
class Slotted:
    x: object
    y: object = None


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenSlotted:
    x: object
    y: object = None


class Registering:
    """A base class that keeps a list of its subclasses, each of which has to have a name."""

    subclasses: ClassVar[list[str]] = []

    def __init_subclass__(cls, name, **kwargs):
        super().__init_subclass__(**kwargs)
        cls.subclasses.append(name)


@dataclasses.dataclass
class Registered(Registering, name="registered"):
    x: object
    y: object = None


class Bag(Mapping):
    def __init__(self, items):
        self.items_ = dict(items)

    def __getitem__(self, key):
        return self.items_[key]

    def __iter__(self):
        return iter(self.items_)

    def __len__(self):
        return len(self.items_)


class Tokens(collections.UserDict):
    def names(self):
        return list(self)


DATACLASSES = [Plain, Frozen, Slotted, FrozenSlotted, Registered]
every_dataclass = pytest.mark.parametrize("cls", DATACLASSES)
MAKERS = {
    **{cls.__name__: cls for cls in DATACLASSES},
    "ModelOutput": lambda x, y: BaseModelOutput(last_hidden_state=x, hidden_states=(y,)),
    "mapping": lambda x, y: Bag({"b": x, "a": y}),
}
every_class = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


def _leaves(make, x, y):
    value = make(x, y)
    return list(value.values()) if isinstance(value, Mapping) else [value.x, value.y]


@every_class
def test_results_are_of_the_class_and_leave_jit(make):
    f = torch2jax(lambda x: make(x * 2, x + 1))
    x = jnp.arange(3.0)
    cls = type(make(0, 0))
    for result in (f(x), jax.jit(f)(x), tree_t2j(make(torch.arange(3.0) * 2, torch.ones(3)))):
        assert isinstance(result, cls)
        assert result.__class__ is cls
    doubled = jax.tree.map(lambda a: 2 * a, f(x))
    assert isinstance(doubled, cls)
    assert_trees_equal(jax.tree.leaves(doubled), jax.tree.leaves(_leaves(make, 4 * x, 2 * x + 2)))


@every_class
def test_torch_is_given_the_class_itself(make):
    cls = type(make(0, 0))
    y = torch2jax(lambda x: make(x * 2, x + 1))(jnp.arange(3.0))
    seen = []
    jax.jit(torch2jax(lambda r: seen.append(type(r)) or 0))(y)
    assert set(seen) == {cls}


@every_class
def test_jax_is_told_nothing_of_the_class(make):
    torch2jax(lambda x: make(x * 2, x + 1))(jnp.ones(2))
    assert jax.tree_util.all_leaves([make(1, 2)])


@every_dataclass
def test_results_behave_as_the_class_does(cls):
    result = torch2jax(lambda x: cls(x * 2, None))(jnp.float32(1))
    own = cls(jnp.float32(2))
    assert result == own
    assert own == result
    assert result != cls(jnp.float32(3))
    assert repr(result) == repr(own)
    for again in (copy.copy(result), copy.deepcopy(result), pickle.loads(pickle.dumps(result))):
        assert again == result
        assert isinstance(again, cls)
        assert len(jax.tree.leaves(again)) == 1
    with pytest.raises(TypeError, match="unhashable"):
        hash(result)


def test_methods_and_frozenness_remain():
    result = torch2jax(lambda x: Frozen(x * 2, x))(jnp.float32(1))
    assert result.total() == 3
    with pytest.raises(dataclasses.FrozenInstanceError):
        result.x = 1
    names = torch2jax(lambda x: (x, Frozen("a", "b")))(jnp.float32(1))[1]
    assert hash(names) == hash(Frozen("a", "b"))


def test_results_cannot_be_changed():
    batch = torch2jax(lambda x: Tokens({"ids": x, "mask": {"b": x, "a": -x}}))(jnp.ones(2))
    assert isinstance(batch, Tokens)
    assert batch.names() == ["ids", "mask"]
    with pytest.raises(TypeError, match="`pop` changes a `Tokens` that a torch function"):
        batch.pop("mask")
    with pytest.raises(TypeError, match="does not support item assignment"):
        batch["ids"] = 1
    doubled = jax.tree.map(lambda x: 2 * x, batch)
    assert_trees_equal(dict(doubled)["ids"], jnp.full(2, 2.0))
    # What is in it keeps its order, too.
    assert torch2jax(lambda b: torch.cat(list(b["mask"].values())))(doubled).tolist()[:2] == [2, 2]


def test_model_outputs_behave_as_their_class_does():
    result = torch2jax(lambda x: BaseModelOutput(last_hidden_state=x * 2))(jnp.ones(2))
    assert result[0].tolist() == result["last_hidden_state"].tolist() == [2, 2]
    assert len(result.to_tuple()) == 1
    again = pickle.loads(pickle.dumps(result))
    assert isinstance(again, BaseModelOutput)
    assert again.last_hidden_state.tolist() == [2, 2]


def test_what_classes_do_with_their_subclasses_is_not_done():
    torch2jax(lambda x: Registered(x))(jnp.ones(2))
    assert Registering.subclasses == ["registered"]
    torch2jax(lambda x: BaseModelOutput(last_hidden_state=x))(jnp.ones(2))
    known = torch.utils._pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE
    name = f"{BaseModelOutput.__module__}.BaseModelOutput"
    assert known.get(name, BaseModelOutput) is BaseModelOutput


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_the_users_own_registration_is_used(before, frozen):
    @dataclasses.dataclass(frozen=frozen)
    class Own:
        x: object
        name: str
        y: object

    def register():
        jax.tree_util.register_dataclass(Own, ["y", "x"], ["name"])

    f = torch2jax(lambda x: Own(x * 2, "a", x + 1))
    x = jnp.arange(2.0)
    step = jax.jit(lambda x: f(x).x)
    if before:
        register()
    else:
        assert f(x).x.tolist() == step(x).tolist() == [0, 2]
        register()
    for result in (f(x), jax.jit(f)(x)):
        assert type(result) is Own
        assert [a.tolist() for a in jax.tree.leaves(result)] == [[1, 2], [0, 2]]
        assert result.name == "a"
    assert step(x).tolist() == [0, 2]
    seen = []
    torch2jax(lambda r: seen.append(type(r)) or r.y)(f(x))
    assert set(seen) == {Own}


def test_a_class_may_be_registered_as_any_node():
    class Cache:
        def __init__(self, x):
            self.x = x

    f = torch2jax(lambda x: Cache(x * 2))
    x = jnp.ones(2)
    assert type(f(x)) is not Cache
    jax.tree_util.register_pytree_node(Cache, lambda c: ((c.x,), None), lambda _, xs: Cache(*xs))
    assert type(f(x)) is type(jax.jit(f)(x)) is Cache


def test_named_tuples_and_torchs_own_return_types():
    Point = collections.namedtuple("Point", "a b")
    f = torch2jax(lambda x: (Point(x, x * 2), torch.sort(x), torch.topk(x, 1)))
    point, ordered, top = jax.jit(f)(jnp.array([2.0, 1.0]))
    assert type(point) is Point
    assert isinstance(ordered, torch.return_types.sort)
    assert ordered.values.tolist() == [1, 2]
    assert top.indices.tolist() == [0]
