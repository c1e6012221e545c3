import collections
import contextlib
import dataclasses
import gc
import types
import weakref

import equinox as eqx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.modeling_outputs import ModelOutput

import eqx_torch
from eqx_torch import _arrays, ConversionError, dtype_j2t, DtypeError, j2t, t2j, tree_j2t, tree_t2j
from eqx_torch._trees import flatten

from ..helpers import assert_trees_equal, to_numpy


DTYPES = [
    torch.bool,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
    torch.complex64,
    torch.complex128,
]
SHAPES = [(), (0,), (1,), (7,), (2, 3), (0, 3), (3, 0, 2), (3, 1), (1, 3), (2, 1, 3, 1)]
all_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
all_shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)
vias = pytest.mark.parametrize("via", ["dlpack", "host"])


def random_bits(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Random bit patterns: NaNs with payloads, infinities and subnormals among them."""
    if dtype is torch.bool:
        return torch.rand(shape) < 0.5
    width = torch.empty((), dtype=dtype).element_size()
    flat = torch.randint(0, 256, (torch.Size(shape).numel() * width,), dtype=torch.uint8)
    return flat.view(dtype).view(shape)


def shares_memory(array: jax.Array, tensor: torch.Tensor) -> bool:
    return array.unsafe_buffer_pointer() == tensor.data_ptr()


def is_row_major(array: jax.Array) -> bool:
    return array.format.layout.major_to_minor == tuple(range(array.ndim))


@all_dtypes
@all_shapes
@vias
def test_every_dtype_and_shape_is_bit_exact(getkey, x64, dtype, shape, via):
    tensor = random_bits(dtype, shape)
    array = t2j(tensor, via)
    assert_trees_equal(array, tensor, exact=True)
    assert is_row_major(array)
    assert array.devices() == {jax.devices()[0]}

    back = j2t(array, via)
    assert back.dtype is dtype
    assert_trees_equal(back, array, exact=True)

    started_in_jax = jnp.asarray(to_numpy(tensor))
    assert_trees_equal(j2t(started_in_jax, via), tensor, exact=True)


@all_dtypes
def test_memory_is_shared(getkey, x64, dtype):
    array = jnp.asarray(to_numpy(random_bits(dtype, (2, 3))))
    tensor = j2t(array)
    assert shares_memory(array, tensor)
    assert shares_memory(t2j(tensor), tensor)
    assert not shares_memory(t2j(tensor, via="host"), tensor)
    assert not shares_memory(array, j2t(array, via="cpu"))


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint64, torch.float64, torch.complex128])
def test_64_bits_with_x64_off_are_converted_by_value(getkey, dtype):
    tensor = torch.tensor([0, 1, 100, 2**24 + 1]).to(dtype)
    assert_trees_equal(t2j(tensor), jnp.asarray(tensor.numpy()), exact=True)
    assert_trees_equal(t2j(tensor), tensor, exact=True)
    assert t2j(tensor).dtype.itemsize == tensor.element_size() // 2


def test_64_bits_with_x64_off_overflow_as_in_jax():
    integers = torch.tensor([2**31, -(2**31) - 1, 2**40 + 5])
    assert_trees_equal(t2j(integers), jnp.asarray(integers.numpy()), exact=True)
    floats = torch.tensor([1e300, -1e300], dtype=torch.float64)
    assert_trees_equal(t2j(floats), np.array([np.inf, -np.inf], np.float32), exact=True)


def test_64_bits_made_under_x64_keep_their_width_going_to_torch():
    with jax.enable_x64(True):
        array = jnp.asarray(np.array([2**40, -1]))
    assert j2t(array).dtype is torch.int64
    assert j2t(array).tolist() == [2**40, -1]


def test_bfloat16_nan_payloads():
    bits = np.array([0x7FC1, 0xFFC2, 0x7F81, 0x7F80, 0xFF80, 0x8000], np.uint16)
    tensor = torch.from_numpy(bits).view(torch.bfloat16)
    array = t2j(tensor)
    assert np.asarray(array).view(np.uint16).tolist() == bits.tolist()
    assert j2t(array).view(torch.uint16).tolist() == bits.tolist()
    assert j2t(bits.view(ml_dtypes.bfloat16)).view(torch.uint16).tolist() == bits.tolist()


def _base() -> torch.Tensor:
    return torch.arange(24.0).view(2, 3, 4)


def _complex() -> torch.Tensor:
    return torch.complex(_base(), _base() + 1)


LAYOUTS = {
    "transposed": lambda: _base().mT,
    "permuted": lambda: _base().permute(2, 0, 1),
    "expanded": lambda: torch.ones(1, 3).expand(4, 3),
    "expanded scalar": lambda: torch.ones(()).expand(2, 2),
    "sliced": lambda: _base()[:, ::2, 1:3],
    "offset": lambda: _base().flatten()[1:],
    "overlapping": lambda: torch.arange(6.0).as_strided((3, 3), (1, 1)),
    "flipped": lambda: _base().flip(0),
    "diagonal": lambda: torch.diagonal(_base(), dim1=1, dim2=2),
    "channels last": lambda: torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "ambiguous channels last": lambda: torch.rand(2, 1, 3, 1).to(memory_format=torch.channels_last),
    "strange stride of a size-1 axis": lambda: torch.rand(3, 1).as_strided((3, 1), (1, 77)),
    "small stride of a size-1 axis": lambda: torch.rand(1, 3).as_strided((1, 3), (1, 1)),
    "zero-size slice": lambda: _base()[:0, ::2],
    "zero-size transpose": lambda: torch.rand(3, 0).T,
    "conjugated": lambda: _complex().conj(),
    "conjugated and transposed": lambda: _complex().mH,
    "negated": lambda: _complex().conj().imag,
    "real part": lambda: _complex().real,
    "unaligned": lambda: torch.frombuffer(bytearray(range(67)), dtype=torch.uint8)[3:],
    "misaligned for its dtype": lambda: torch.frombuffer(
        bytearray(range(67)), dtype=torch.float32, count=16, offset=3
    ),
    "view": lambda: _base()[1],
    "parameter": lambda: torch.nn.Parameter(_base()),
    "parameter, transposed": lambda: torch.nn.Parameter(_base()).mT,
    "buffer": lambda: torch.nn.Buffer(_base()),
    "inside a graph": lambda: _base().requires_grad_() * 2,
    "subclass": lambda: _base().as_subclass(type("Subclass", (torch.Tensor,), {})),
}


@pytest.mark.parametrize("make", LAYOUTS.values(), ids=LAYOUTS)
@vias
def test_every_layout(make, via):
    tensor = make()
    array = t2j(tensor, via)
    assert_trees_equal(array, tensor, exact=True)
    assert is_row_major(array)
    # Whatever layout it came from, it is an argument that compiled functions take.
    double = jax.jit(lambda x: x + x).lower(jax.ShapeDtypeStruct(array.shape, array.dtype))
    assert_trees_equal(double.compile()(array), tensor + tensor)


@given(st.data())
def test_random_views(data):
    shape = data.draw(st.lists(st.integers(0, 4), max_size=4))
    tensor = torch.arange(torch.Size(shape).numel(), dtype=torch.int32).view(shape)
    tensor = tensor.permute(data.draw(st.permutations(range(tensor.ndim))))
    for axis in range(tensor.ndim):
        tensor = tensor.narrow(axis, 0, data.draw(st.integers(0, tensor.shape[axis])))
    if data.draw(st.booleans()):
        tensor = tensor.expand(2, *tensor.shape)
    array = t2j(tensor)
    assert_trees_equal(array, tensor, exact=True)
    assert is_row_major(array)


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64], ids=str)
def test_inference_mode_tensors(dtype):
    with torch.inference_mode():
        tensor = torch.ones(2, 3, dtype=dtype)
        inside = t2j(tensor)
        view = tensor.T.conj()
        assert j2t(jnp.ones(2)).is_inference()
    assert_trees_equal((inside, t2j(tensor), t2j(view)), (tensor, tensor, view), exact=True)
    assert not j2t(inside).requires_grad


def test_pinned_tensors_are_copied(monkeypatch):
    tensor = j2t(jnp.ones(3))
    assert shares_memory(t2j(tensor), tensor)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: self.data_ptr() == address)
    address = tensor.data_ptr()
    array = t2j(tensor)
    assert not shares_memory(array, tensor)
    assert_trees_equal(array, tensor, exact=True)


def test_cuda_tensors_are_exported_with_their_device_current(monkeypatch):
    entered = []

    @contextlib.contextmanager
    def enter(device):
        entered.append(device)
        yield
        entered.append("left")

    export = jax.dlpack.from_dlpack
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.cuda, "device", enter)
    monkeypatch.setattr(
        jax.dlpack, "from_dlpack", lambda t: (entered.append("export"), export(t))[1]
    )
    tensor = torch.ones(3)
    array = t2j(tensor)
    assert entered == [tensor.device, "export", "left"]
    assert_trees_equal(array, np.ones(3, np.float32), exact=True)


def test_the_source_is_unchanged():
    parameter = torch.nn.Parameter(torch.ones(3))
    t2j(parameter)
    assert parameter.requires_grad
    assert parameter.grad is None


def test_array_keeps_the_memory_of_the_tensor():
    tensor = j2t(jnp.arange(1000.0)).clone()
    array = t2j(tensor)
    expected = np.array(array)
    del tensor
    gc.collect()
    [torch.full((1000,), -1.0) for _ in range(20)]
    assert_trees_equal(array, expected, exact=True)


def test_tensor_keeps_the_memory_of_the_array():
    array = jnp.arange(1000.0) * 1
    expected = np.array(array)
    tensor = j2t(array)
    alive = weakref.ref(array)
    del array
    gc.collect()
    assert alive() is None
    [jnp.full((1000,), -1.0).block_until_ready() for _ in range(20)]
    assert_trees_equal(tensor, expected, exact=True)


@pytest.mark.parametrize("start", [jnp.arange, torch.arange])
def test_donating_an_array_leaves_its_tensor_alone(start):
    source = start(1000.0) * 1
    tensor = j2t(source) if start is jnp.arange else source
    array = source if start is jnp.arange else t2j(source)
    expected = tensor.clone()
    jax.jit(lambda x: x + 1, donate_argnums=0)(array).block_until_ready()
    assert_trees_equal(tensor, expected, exact=True)


@vias
def test_replicated_array_gives_its_first_copy(via):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Explicit,))
    array = jax.device_put(jnp.arange(16.0), NamedSharding(mesh, P()))
    tensor = j2t(array, via)
    assert_trees_equal(tensor, array, exact=True)
    if via == "dlpack":
        assert shares_memory(array.addressable_data(0), tensor)


def test_array_on_another_device():
    array = jax.device_put(jnp.arange(3.0), jax.devices()[3])
    assert_trees_equal(j2t(array), array, exact=True)


@vias
def test_sharded_array_is_an_error(via):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Explicit,))
    array = jax.device_put(jnp.arange(16.0), NamedSharding(mesh, P("x")))
    message = r"(?s)float32\[16\] that is sharded over 8 devices.*j2t\(jax.device_get\(array\)\)"
    with pytest.raises(ConversionError, match=message):
        j2t(array, via)
    remedies = [
        j2t(jax.device_get(array)),
        j2t(jax.device_put(array, jax.devices()[0])),
        torch.cat([j2t(shard.data) for shard in array.addressable_shards]),
    ]
    assert_trees_equal(remedies, [np.asarray(array)] * 3, exact=True)


@pytest.mark.parametrize("transform", [jax.jit, jax.vmap, jax.grad])
def test_tracer_is_an_error(transform):
    def through_torch(x):
        return t2j(j2t(x).sum())

    argument = jnp.ones(()) if transform is jax.grad else jnp.ones(3)
    with pytest.raises(ConversionError, match=r"that JAX is tracing.*eqx_torch.torch2jax"):
        transform(through_torch)(argument)


def test_deleted_array_is_an_error():
    array = jnp.ones(3)
    array.delete()
    with pytest.raises(ConversionError, match=r"float32\[3\] that has been deleted or donated"):
        j2t(array)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: jax.random.key(0), r"key<fry>. Pass `jax.random.key_data\(key\)`"),
        (lambda: jnp.ones(3, jnp.int4), "int4. Cast it to `int8` first"),
        (lambda: np.array(["a"]), "Cast it to one of these first"),
    ],
)
def test_arrays_of_dtypes_that_torch_lacks(make, message):
    with pytest.raises(DtypeError, match=message):
        j2t(make())


def test_prng_key_data_crosses():
    key = jax.random.key(5)
    back = jax.random.wrap_key_data(t2j(j2t(jax.random.key_data(key))))
    assert_trees_equal(back, key)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
def test_tensor_of_a_dtype_that_jax_lacks():
    with pytest.raises(DtypeError, match="torch.complex32. Cast it to `complex64` first"):
        t2j(torch.zeros(2, dtype=torch.complex32))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: torch.eye(3).to_sparse(), r"its layout is torch.sparse_coo. Call `.to_dense\(\)`"),
        (lambda: torch.ones(3).to_mkldnn(), r"its layout is torch._mkldnn. Call `.to_dense\(\)`"),
        (lambda: torch.ones(3, device="meta"), "on the meta device and has no values"),
        (
            lambda: torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged),
            "it is nested. Call `torch.nested.to_padded_tensor`",
        ),
    ],
)
@vias
def test_tensor_without_memory(make, message, via):
    with pytest.raises(ConversionError, match=message):
        t2j(make(), via)


def test_fake_tensor():
    with FakeTensorMode():
        tensor = torch.ones(3)
        with pytest.raises(ConversionError, match="it is fake and has no values"):
            t2j(tensor)
    with pytest.raises(ConversionError, match="it is fake and has no values"):
        t2j(tensor)


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vmap])
def test_tensor_inside_a_torch_transformation(transform):
    def through_jax(x):
        t2j(x)
        return x.sum()

    with pytest.raises(ConversionError, match=r"inside a `torch.func` transformation"):
        transform(through_jax)(torch.ones(3))


def test_tensor_that_jax_refuses(monkeypatch):
    def refuse(tensor):
        raise RuntimeError("Unknown backend cuda")

    monkeypatch.setattr(jax.dlpack, "from_dlpack", refuse)
    message = r"(?s)torch.float32 tensor of shape \(3,\) on cpu: Unknown backend cuda.*\.cpu\(\)"
    with pytest.raises(ConversionError, match=message):
        t2j(torch.ones(3))


def test_wrong_types():
    with pytest.raises(ConversionError, match=r"expected a torch.Tensor, got numpy.ndarray"):
        t2j(np.ones(3))
    with pytest.raises(ConversionError, match=r"expected a JAX array.*got torch.Tensor"):
        j2t(torch.ones(3))
    with pytest.raises(ConversionError, match=r"expected a JAX array.*got builtins.str"):
        j2t("array")
    with pytest.raises(ConversionError, match="via must be one of .* got 'disk'"):
        t2j(torch.ones(3), via="disk")
    with pytest.raises(ConversionError, match="via must be one of .* got 'disk'"):
        j2t(jnp.ones(3), via="disk")


@all_dtypes
@all_shapes
def test_numpy_arrays_are_copied_to_torch(getkey, x64, dtype, shape):
    array = to_numpy(random_bits(dtype, shape))
    tensor = j2t(array)
    assert tensor.dtype is dtype
    assert_trees_equal(tensor, array, exact=True)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(5.0, dtype=np.float32)[::-1],
        np.arange(6, dtype=np.int32).reshape(2, 3).T,
        np.broadcast_to(np.float32(1), (3,)),
        np.arange(3, dtype=">i4"),
        np.float32(2.5),
        np.bool_(True),
    ],
    ids=["reversed", "transposed", "read-only", "big-endian", "float scalar", "bool scalar"],
)
def test_numpy_layouts(array):
    assert_trees_equal(j2t(array), array, exact=True)
    assert j2t(array).dtype is dtype_j2t(array.dtype)


@pytest.mark.parametrize("x64_enabled", [False, True])
@pytest.mark.parametrize("number", [True, 3, 2.5, 1 + 2j])
def test_python_numbers_have_the_dtype_that_jax_gives_them(number, x64_enabled):
    with jax.enable_x64(x64_enabled):
        expected = jnp.asarray(number)
        assert j2t(number).dtype is dtype_j2t(expected.dtype)
        assert_trees_equal(j2t(number), expected, exact=True)


def test_python_integer_that_does_not_fit():
    with pytest.raises(OverflowError, match="out of bounds for int32"):
        j2t(2**40)


@vias
def test_trees(via):
    tree = {"a": torch.ones(2), "b": (torch.arange(3), None, "name", 2.0, np.ones(1))}
    converted = tree_t2j(tree, via)
    assert isinstance(converted["a"], jax.Array)
    assert converted["b"][2:4] == ("name", 2.0)
    assert converted["b"][4] is tree["b"][4]
    assert_trees_equal(converted, tree, exact=True)

    back = tree_j2t(converted, via)
    assert isinstance(back["b"][0], torch.Tensor)
    assert back["b"][4] is tree["b"][4]
    assert_trees_equal(back, converted, exact=True)


def test_state_dict_as_a_tree():
    module = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    state = module.state_dict()
    back = tree_j2t(tree_t2j(state))
    assert list(back) == list(state)
    assert_trees_equal(dict(back), dict(state), exact=True)


def test_equinox_module_as_a_tree(getkey):
    linear = eqx.nn.Linear(2, 3, key=getkey())
    assert_trees_equal(tree_j2t(linear), linear, exact=True)


@dataclasses.dataclass
class Pair:
    first: object
    second: object


@pytest.mark.parametrize(
    "container",
    [
        lambda x, y: collections.UserDict(first=x, second=[y]),  # what tokenizers return is one
        lambda x, y: transformers.BatchEncoding({"first": x, "second": [y]}),
        lambda x, y: ModelOutput(first=x, second=(y, "name")),
        Pair,
        lambda x, y: {"outer": Pair(x, collections.UserDict(inner=y))},
    ],
)
def test_containers_of_torch_code_as_trees(container):
    x, y = torch.arange(3.0), torch.ones(2, 2)
    converted = tree_t2j(container(x, y))
    arrays = jax.tree.leaves(eqx.filter(converted, eqx.is_array))  # JAX knows the classes
    assert_trees_equal(arrays, [x, y], exact=True)
    back = tree_j2t(converted)
    assert type(back) is type(container(x, y))
    tensors = [leaf for leaf in flatten(back)[0] if isinstance(leaf, torch.Tensor)]
    assert_trees_equal(tensors, [x, y], exact=True)
    assert jax.tree.structure(tree_t2j(back)) == jax.tree.structure(converted)


def test_objects_with_tensors_pass_as_trees():
    cache = transformers.DynamicCache()
    keys, values = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3, 4)
    cache.update(keys, values, 0)
    converted = tree_t2j({"cache": cache})
    assert_trees_equal(jax.tree.leaves(converted), [keys, values], exact=True)
    back = tree_j2t(converted)["cache"]
    assert isinstance(back, transformers.DynamicCache)
    assert_trees_equal((back.layers[0].keys, back.layers[0].values), (keys, values), exact=True)


def test_tree_errors_name_the_leaf():
    with pytest.raises(ConversionError) as raised:
        tree_t2j({"a": [torch.ones(1), torch.ones(1, device="meta")]})
    assert raised.value.__notes__ == ["The leaf is at tree['a'][1]."]
    with pytest.raises(DtypeError) as raised:
        tree_j2t((jnp.ones(1), jax.random.key(0)))
    assert raised.value.__notes__ == ["The leaf is at tree[1]."]
    with pytest.raises(ConversionError) as raised:
        tree_t2j([Pair(1, collections.UserDict(a=torch.ones(1, device="meta")))])
    assert raised.value.__notes__ == ["The leaf is at tree[0].second['a']."]


def test_size_is_torch_size():
    assert eqx_torch.Size is torch.Size


def test_the_gpu_of_a_tensor_is_found_where_jax_has_some_of_them(monkeypatch):
    """By torch's number, which is not the position among JAX's devices."""

    class OnGpu:
        is_cuda, device = True, "cuda:3"

        def __init__(self, index):
            self.get_device = lambda: index

    gpus = [types.SimpleNamespace(local_hardware_id=i) for i in (1, 3)]
    monkeypatch.setattr(jax, "local_devices", lambda backend: gpus)
    assert _arrays._jax_device(OnGpu(3)) is gpus[1]
    with pytest.raises(ConversionError, match="not among the GPUs that JAX has"):
        _arrays._jax_device(OnGpu(0))
