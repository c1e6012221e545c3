import copy
import functools
import gc
import threading
import weakref

import pytest
import torch
from beartype import beartype
from jaxtyping import Float, Int64, jaxtyped
from torch import nn, Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from eqx_torch._annotations import read_signature, strip_checkers, unchecked

from ..helpers.annotations import arr, predict


checked = jaxtyped(typechecker=beartype)


def triple(x: Float[Tensor, "8 d"]) -> Float[Tensor, "8 d"]:
    """Three times."""
    return 3 * x


def adding(fn):
    @functools.wraps(fn)
    def wrapper(*args, offset=1, **kwargs):
        return fn(*args, **kwargs) + offset

    return wrapper


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(3.0))
        self.register_buffer("calls", torch.tensor(0))

    @checked
    def forward(self, x: Float[Tensor, "8 d"]) -> Float[Tensor, "8 d"]:
        self.calls += 1
        self.last = tuple(x.shape)
        return super().extra_repr() or self.scale * x


class Methods:
    @checked
    def method(self, x: Float[Tensor, "8 d"]) -> Float[Tensor, "8 d"]:
        return 3 * x

    @classmethod
    @checked
    def of_class(cls, x: Float[Tensor, "8 d"]) -> Float[Tensor, "8 d"]:
        return 3 * x

    @checked
    def __call__(self, x: Float[Tensor, "8 d"]) -> Float[Tensor, "8 d"]:
        return 3 * x


CHECKED = {
    "jaxtyped": checked(triple),
    "beartype": beartype(triple),
    "old style": jaxtyped(typechecker=None)(beartype(triple)),
    "no_grad": torch.no_grad()(checked(triple)),
    "under two": torch.no_grad()(torch.autocast("cpu")(checked(triple))),
    "partial": functools.partial(checked(triple)),
    "method": Methods().method,
    "classmethod": Methods.of_class,
    "object": Methods(),
    "module": Net(),
    "forward": Net().forward,
    "partial of module": functools.partial(Net()),
}
STATEFUL = {"module", "forward", "partial of module"}  # buffers that change cannot be batched


@pytest.mark.parametrize("fn", CHECKED.values(), ids=CHECKED.keys())
def test_a_shard_is_refused_with_the_checker_and_not_without(fn):
    shard = torch.ones(2, 5)
    with pytest.raises(Exception, match="(?i)type|hint"):
        fn(shard)
    stripped = unchecked(fn)
    assert torch.equal(stripped(shard), 3 * shard)
    with pytest.raises(Exception, match="(?i)type|hint"):
        fn(shard)
    assert predict(stripped, arr(8, 5)) == predict(fn, arr(8, 5)) == arr(8, 5)


UNCHECKED = {
    "function": triple,
    "jaxtyped none": jaxtyped(typechecker=None)(triple),
    "wraps": adding(triple),
    "no_grad": torch.no_grad()(triple),
    "partial": functools.partial(triple),
    "module": nn.Linear(2, 3),
    "method": nn.Linear(2, 3).forward,
    "builtin": torch.sin,
    "class": Methods,
}


@pytest.mark.parametrize("fn", UNCHECKED.values(), ids=UNCHECKED.keys())
def test_what_has_no_checker_is_returned_itself(fn):
    assert unchecked(fn) is fn


def test_other_decorators_stay():
    both = adding(checked(triple))
    both.note = 5
    stripped = unchecked(both)
    assert torch.equal(stripped(torch.ones(2)), torch.full((2,), 4.0))
    assert torch.equal(stripped(torch.ones(2), offset=2), torch.full((2,), 5.0))
    assert (stripped.note, stripped.__doc__, stripped.__name__) == (5, "Three times.", "triple")
    x = torch.ones(2, requires_grad=True)
    assert not unchecked(CHECKED["no_grad"])(x).requires_grad
    assert unchecked(CHECKED["under two"])(x).dtype == torch.float32


def test_a_context_for_isinstance_in_the_body_stays():
    @jaxtyped(typechecker=None)
    @beartype
    def f(x: Float[Tensor, "8"], y):
        return isinstance(x, Float[Tensor, "n"]) and isinstance(y, Float[Tensor, "n"])

    stripped = unchecked(f)
    assert stripped(torch.ones(2), torch.ones(2))
    assert not stripped(torch.ones(2), torch.ones(3))


def test_a_view_shares_all_state_with_its_module():
    net = Net()
    view = unchecked(net)
    assert isinstance(view, Net)
    assert type(view).__qualname__ == type(net).__qualname__
    view(torch.ones(2, 5))
    assert net.calls == 1
    assert net.last == (2, 5)
    assert view.scale is net.scale
    seen = []
    net.register_forward_hook(lambda module, args, out: seen.append(tuple(out.shape)))
    view(torch.ones(3, 5))
    assert seen == [(3, 5)]
    net.eval()
    assert not view.training
    assert copy.deepcopy(view)(torch.ones(1, 1)).shape == (1, 1)


def test_the_copy_of_a_module_is_stripped_in_place():
    original = nn.Sequential(Net(), nn.Sequential(Net(), nn.ReLU()))
    copied = copy.deepcopy(original)
    strip_checkers(copied)
    assert torch.equal(copied(torch.ones(2, 5)), torch.full((2, 5), 9.0))
    strip_checkers(copied)
    assert torch.equal(copied(torch.ones(2, 5)), torch.full((2, 5), 9.0))
    with pytest.raises(Exception, match="(?i)type"):
        original(torch.ones(2, 5))


def test_int32_where_the_annotation_says_int64():
    @checked
    def pick(x: Int64[Tensor, "n"]) -> Int64[Tensor, "n"]:
        return x

    shard = torch.ones(2, dtype=torch.int32)
    with pytest.raises(Exception, match="(?i)type"):
        pick(shard)
    assert torch.equal(unchecked(pick)(shard), shard)


@pytest.mark.filterwarnings("ignore:.torch.jit")  # torch's own, at first use
@pytest.mark.parametrize("name", [name for name in CHECKED if name not in STATEFUL])
def test_fake_and_batched_tensors_are_taken(name):
    fn = CHECKED[name]
    for one in (fn, unchecked(fn)):
        with FakeTensorMode():
            assert one(torch.ones(8, 5)).shape == (8, 5)
        assert torch.func.vmap(one)(torch.ones(3, 8, 5)).shape == (3, 8, 5)
        assert torch.func.vmap(one, in_dims=1)(torch.ones(8, 3, 5)).shape == (3, 8, 5)
        assert torch.func.jvp(one, (torch.ones(8, 5),), (torch.ones(8, 5),))


def test_several_threads_at_once():
    stripped, failures = unchecked(checked(triple)), []
    original = checked(triple)

    def shards():
        try:
            for size in range(1, 8):
                assert stripped(torch.ones(size, 2)).shape == (size, 2)
        except Exception as error:
            failures.append(error)

    def whole():
        with pytest.raises(Exception, match="(?i)type"):
            original(torch.ones(2, 2))

    threads = [threading.Thread(target=target) for target in (shards, whole) * 4]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_nothing_is_kept_alive():
    def make():
        @checked
        def f(x: Float[Tensor, "8"]) -> Float[Tensor, "8"]:
            return x

        return f

    original = make()
    stripped, signature = unchecked(original), read_signature(original)
    references = [weakref.ref(original), weakref.ref(stripped)]
    del original, stripped
    gc.collect()
    assert [reference() for reference in references] == [None, None]
    assert signature.determines_output
