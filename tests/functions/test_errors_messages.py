"""Bad input: what is said, word for word, and that the next good call is right."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import AxisType, PartitionSpec as P

from eqx_torch import (
    check_errors,
    ConversionError,
    DepthError,
    DtypeError,
    EqxTorchError,
    InputError,
    OutputError,
    ShapeError,
    ShardingError,
    torch2jax,
)

from ..helpers import assert_trees_equal
from ..helpers.meshes import explicit_mesh, put


X = jnp.arange(4.0)


@dataclasses.dataclass
class Case:
    """A bad call."""

    error: type[EqxTorchError]
    message: str
    call: object


def _returns(value):
    def f(x):
        return value

    return f


CASES = {
    "not a function": Case(
        InputError,
        "`torch2jax` takes a function of torch tensors, but got 3 of type int.",
        lambda: torch2jax(3),
    ),
    "depth": Case(
        InputError,
        "`depth=-1`: pass a number of derivatives (0 for none), or None for any.",
        lambda: torch2jax(torch.sin, depth=-1),
    ),
    "depth of another type": Case(
        InputError,
        "`depth=True`: pass a number of derivatives (0 for none), or None for any.",
        lambda: torch2jax(torch.sin, depth=True),
    ),
    "vmap_method": Case(
        InputError,
        "`vmap_method='loop'`: pass one of torch, sequential, broadcast_all, expand_dims.",
        lambda: torch2jax(torch.sin, vmap_method="loop"),
    ),
    "lock": Case(
        InputError,
        "`lock='mine'` is of type str; pass True, False or a context manager that can be entered "
        "any number of times, such as `threading.RLock()`.",
        lambda: torch2jax(torch.sin, lock="mine"),
    ),
    "both nondiff": Case(
        InputError,
        "`sin` was wrapped with both `nondiff_argnums` and `nondiff_mask`; pass one.",
        lambda: torch2jax(torch.sin, nondiff_argnums=0, nondiff_mask=(True,)),
    ),
    "nondiff_argnums": Case(
        InputError,
        "`nondiff_argnums` of `sin` names the positional arguments [1], but it was called with 1. "
        "Keyword arguments can be left out of derivatives by `jax.lax.stop_gradient`.",
        lambda: torch2jax(torch.sin, nondiff_argnums=1)(X),
    ),
    "nondiff_mask": Case(
        InputError,
        "`nondiff_mask=(True, False)` of `sin` is not a prefix of its 1 positional arguments. "
        "Pass a tuple with a bool (or a tree of them) for each.",
        lambda: torch2jax(torch.sin, nondiff_mask=(True, False))(X),
    ),
    "torch tensor": Case(
        InputError,
        "`sin` takes JAX arrays, but got a Tensor as argument 0. Convert it by `eqx_torch.t2j(x)`, "
        "or on a mesh by `jax.numpy.asarray(x.numpy())`; in torch code, where there are tensors "
        "only, call the torch function or module itself.",
        lambda: torch2jax(torch.sin)(torch.ones(2)),
    ),
    "struct": Case(
        InputError,
        "`sin` takes JAX arrays, but got a ShapeDtypeStruct as argument 0. Convert it by "
        "`eqx_torch.t2j(x)`, or on a mesh by `jax.numpy.asarray(x.numpy())`; in torch code, where "
        "there are tensors only, call the torch function or module itself.",
        lambda: torch2jax(torch.sin)(jax.ShapeDtypeStruct((2,), "float32")),
    ),
    "structure unlike the examples": Case(
        InputError,
        "`add` was called with arguments of another structure than its examples have.\n"
        "  examples: args=(array, array) kwargs={}\n"
        "  call:     args=(array,) kwargs={'other': array}\n"
        "Call it like the examples, which are those of a whole call, or wrap it without them "
        "(`from_torch(model)` of a converted model drops them). Where they are there for dtypes "
        "only, annotate the arguments in place of that, in the function or by `signature=`: "
        '`labels: Int64[Tensor, "batch"]`.',
        lambda: torch2jax(torch.add, X, X)(X, other=X),
    ),
    "key": Case(
        DtypeError,
        "`sin` got a JAX key, key<fry>[], as argument 0, and torch has no dtype for keys. A "
        "function has no `key=`: draw in JAX and pass it the numbers, for instance "
        "`jax.random.normal(key, shape)`, or pass the words of the key, "
        "`jax.random.key_data(key)`. A model made by `from_torch` takes `key=`.",
        lambda: torch2jax(torch.sin)(jax.random.key(0)),
    ),
    "set instead of a tensor": Case(
        OutputError,
        "`f` returned {3.0} of type set at output[1], but JAX can only take torch tensors, "
        "numbers and strings (in any nesting of tuples, lists, dicts, dataclasses and None). "
        "Return `torch.as_tensor(...)` of it, or leave it out.",
        lambda: torch2jax(_returns((torch.ones(2), {3.0})))(X),
    ),
    "sparse tensor": Case(
        OutputError,
        "`f` returned a tensor of layout torch.sparse_coo, but JAX arrays are dense. Return "
        "`.to_dense()` of it.",
        lambda: torch2jax(_returns(torch.eye(2).to_sparse()))(X),
    ),
    "output_shapes of a wrong type": Case(
        ShapeError,
        "`output_shapes` of `sin` holds 'float32' of type str; it takes "
        "`jax.ShapeDtypeStruct(shape, dtype)`, a tensor, an array or a `Size` for each output.",
        lambda: torch2jax(torch.sin, output_shapes="float32")(X),
    ),
    "shape without a dtype": Case(
        ShapeError,
        "`output_shapes` of `sin` gives a shape without a dtype, which then is that of the "
        "floating point inputs, but their dtypes are: none. Use `jax.ShapeDtypeStruct(shape, "
        "dtype)`.",
        lambda: torch2jax(torch.sin, output_shapes=(4,))(jnp.arange(4)),
    ),
    "depth=0": Case(
        DepthError,
        "`sin` was differentiated to order 1, but was wrapped with depth=0 and so cannot be "
        "differentiated at all. Wrap it with `depth=1` or leave `depth` out; to take no "
        "derivative here, use `jax.lax.stop_gradient` on its inputs.",
        lambda: jax.jvp(torch2jax(torch.sin, depth=0), (X,), (X,)),
    ),
    "depth=1": Case(
        DepthError,
        "`sin` was differentiated to order 2, but was wrapped with depth=1 and so cannot be "
        "differentiated more than depth=1 times. Wrap it with `depth=2` or leave `depth` out; to "
        "take no derivative here, use `jax.lax.stop_gradient` on its inputs.",
        lambda: jax.hessian(lambda x: torch2jax(torch.sin, depth=1)(x).sum())(X),
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_message(case):
    with pytest.raises(case.error) as info:
        case.call()
    assert str(info.value) == case.message
    assert_trees_equal(torch2jax(torch.sin)(X), jnp.sin(X))


def _sharded(**kwargs):
    def call(f=torch.sin, shape=(8,), spec=("x",), axis_type=AxisType.Explicit):
        mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(axis_type,) * 2)
        with jax.set_mesh(mesh):
            return jax.jit(torch2jax(f, **kwargs))(put(jnp.ones(shape), mesh, *spec))

    return call


SHARDED = {
    "missing out_specs": Case(
        ShardingError,
        "inputs of `sin` are sharded over the explicit mesh axes ['x']. A torch function is "
        "opaque to JAX, so say how its results lie: either (1) pass `out_specs=`, for instance "
        '`out_specs=P("x")`, to run it on each shard, or (2) replicate the inputs, '
        "`jax.sharding.reshard(x, P())`, to run it on the full arrays.",
        lambda: _sharded()(),
    ),
    "auto axes": Case(
        ShardingError,
        "`out_specs` of `sin` names the Auto mesh axes ['x'], over which JAX does not know the "
        "shardings of the inputs when it traces, and XLA would gather them. Make the axes "
        "explicit, `jax.make_mesh(shape, names, axis_types=(AxisType.Explicit,) * len(names))`, "
        "or call the function inside `jax.shard_map`.",
        lambda: _sharded(out_specs=P("x"))(axis_type=AxisType.Auto),
    ),
    "unknown axis": Case(
        ShardingError,
        "`out_specs` of `sin` names the mesh axes ['z'], but the mesh has ['x', 'y'].",
        lambda: _sharded(out_specs=P("z"))(),
    ),
    "not a spec": Case(
        ShardingError,
        "`out_specs` holds 'x' of type str. Pass a `jax.sharding.PartitionSpec`, for instance "
        '`out_specs=P("x")`, or a tree of them.',
        lambda: _sharded(out_specs="x")(),
    ),
    "not a prefix": Case(
        ShardingError,
        f"`out_specs={(P('x'), P('x'))}` of `sin` is not a prefix of its "
        "outputs *. Pass one PartitionSpec for all outputs, or a tree of them like the outputs.",
        lambda: _sharded(out_specs=(P("x"), P("x")))(),
    ),
    "axis left out": Case(
        ShardingError,
        f"inputs of `sin` are sharded over ['x'], but `out_specs` has {P()}, as if the "
        "results of all shards along ['x'] were equal. Name these axes in it. For a sum or mean "
        "over all shards, return one row for each shard, `x.sum(0, keepdim=True)`, with "
        '`out_specs=P("x")`, and add the rows up in JAX, `.sum(0)`.',
        lambda: _sharded(out_specs=P())(),
    ),
    "axis of no input": Case(
        ShardingError,
        f"`out_specs` of `sin` has {P('x', 'y')}, but no input is sharded over ['y'], so "
        "that every device along it would compute the same. Shard an input, for instance "
        '`jax.sharding.reshard(x, P("y"))`, or leave the axis out. A model without `out_specs`, '
        "with the weights of `model` and for the same state, is `from_torch(model)`.",
        lambda: _sharded(out_specs=P("x", "y"))(shape=(8, 8)),
    ),
    "undividable output": Case(
        ShardingError,
        f"the output of `<lambda>`, of global shape [9], cannot be divided by {P('x')} over "
        "the mesh axes {'x': 2, 'y': 4}. Each sharded dimension must be a multiple of the number "
        "of devices along its axes: pad the batch, or choose other specs.",
        lambda: _sharded(out_specs=P("x"), output_shapes=jnp.ones(9))(lambda x: x),
    ),
    "too many entries": Case(
        ShardingError,
        f"the output of `sum` has 0 dimensions, but its spec {P('x')} has 1 entries. Return one "
        "value for each shard, `y[None]`, or if it is a mean over the batch one for each example "
        '(`reduction="none"`), and take the mean in JAX.',
        lambda: _sharded(out_specs=P("x"))(torch.sum),
    ),
}


@pytest.mark.parametrize("case", SHARDED.values(), ids=SHARDED)
def test_sharding_message(case):
    with pytest.raises(case.error) as info:
        case.call()
    assert str(info.value) == case.message
    assert_trees_equal(_sharded(out_specs=P("x"))(), jnp.sin(jnp.ones(8)))


@pytest.mark.parametrize("dtype", ["int4", "float8_e3m4"])
def test_a_dtype_that_torch_does_not_have(dtype):
    with pytest.raises(DtypeError, match="PyTorch has no dtype with the values of"):
        torch2jax(torch.sin)(jnp.zeros(2, dtype))


def test_arrays_of_python_objects():
    with pytest.raises(DtypeError, match="PyTorch has no dtype with the values of object"):
        torch2jax(torch.sin)(np.array([None, "a"]))


def test_an_output_that_cannot_be_inferred():
    def f(x):
        return torch.ones(4) / (1 if x.sum() > 0 else None)

    message = (
        "cannot infer what `f` returns for argument 0 float32[4]: running it on zeros of these "
        "shapes raised TypeError: "
    )
    with pytest.raises(ShapeError, match=re.escape(message)) as info:
        jax.jit(torch2jax(f))(X)
    advice = (
        "\nIf zeros are no good inputs, wrap the function with example arguments that are, which "
        "it is then run on: `torch2jax(fn, *examples)`. Or declare the outputs: `output_shapes=` "
        "takes a tree of `jax.ShapeDtypeStruct`, and the function is then not run to infer them."
    )
    assert advice in str(info.value)
    assert_trees_equal(jax.jit(torch2jax(f, X))(X), jnp.ones(4))
    assert_trees_equal(torch2jax(f, output_shapes=X)(X), jnp.ones(4))


@pytest.mark.parametrize("f", [torch.sin, lambda x, y: y.sin() + x])
def test_a_number_where_torch_needs_a_tensor(f):
    args = (X, 2.5) if f is not torch.sin else (2.5,)
    message = (
        f"Python numbers reach torch as they are (argument {len(args) - 1} 2.5). Where it needs a "
        "tensor, pass `jax.numpy.asarray` of them."
    )
    with pytest.raises(ShapeError, match=re.escape(message)):
        torch2jax(f)(*args)
    arrays = [jnp.asarray(x) for x in args]
    assert_trees_equal(torch2jax(f)(*arrays), f(*map(torch.from_dlpack, arrays)))


def _keyword_only(x, *, y):
    return x + y


MISFITS = {
    "missing": (lambda f: f(X), "missing a required (keyword-only )?argument: 'y'"),
    "by position": (lambda f: f(X, X), "too many positional arguments"),
    "unknown": (lambda f: f(X, y=X, z=1), "got an unexpected keyword argument 'z'"),
}


@pytest.mark.parametrize(("call", "reason"), MISFITS.values(), ids=MISFITS)
def test_arguments_that_do_not_fit(call, reason):
    message = f"^`_keyword_only` was called with wrong arguments: {reason}.$"
    with pytest.raises(InputError, match=message):
        call(torch2jax(_keyword_only))


@pytest.mark.parametrize(
    "f", [lambda x: x * X, lambda x: X + x, lambda x: jnp.sin(x), lambda x: torch.sin(X)]
)
def test_jax_arrays_in_torch_code(f):
    message = (
        "\nTorch code met a JAX array, or JAX a tensor. In torch code there are tensors only: pass "
        "arrays as arguments instead of closing over them, call torch's functions on them, and "
        "apply JAX functions and Equinox layers outside of it, to what `torch2jax(f)(x)` returns."
    )
    with pytest.raises(ShapeError) as info:
        torch2jax(f)(X)
    assert str(info.value).endswith(message)


def test_labels_that_torch_wants_in_64_bits():
    with pytest.raises(ShapeError, match="\nJAX holds int64 in 32 bits: where torch wants int64"):
        torch2jax(lambda i: torch.nn.functional.one_hot(i, 3))(jnp.arange(3))


def test_random_numbers_of_torchs_own():
    f = torch2jax(lambda x: x + torch.rand(4))
    with pytest.warns(UserWarning, match="`<lambda>` draws random numbers from torch's own gen"):
        jax.eval_shape(f, X)


@pytest.mark.parametrize("wrap", [lambda m: m, lambda m: lambda x: m(x)])
def test_buffers_of_a_module_that_was_not_converted(wrap):
    module = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    with pytest.warns(UserWarning, match="changes the buffers 1.running_mean, .* are state"):
        torch2jax(wrap(module))(jnp.ones((2, 3)))
    expected = module.eval()(torch.ones(2, 3)).detach()
    assert_trees_equal(torch2jax(wrap(module))(jnp.ones((2, 3))), expected, rtol=1e-5)


def test_a_mistake_that_no_values_are_needed_for_gets_no_advice_on_values():
    with pytest.raises(ShapeError) as info:
        torch2jax(lambda x: x @ torch.ones(7))(X)
    assert "output_shapes" not in str(info.value)


def test_a_wrong_shape_of_inputs_is_torchs_own_message():
    f = torch2jax(torch.matmul)
    message = "inner_dim|size mismatch|must have the same reduction dim|cannot be multiplied"
    with pytest.raises(ShapeError, match=message):
        f(jnp.ones((2, 3)), jnp.ones((4, 5)))
    assert_trees_equal(f(jnp.ones((2, 3)), jnp.ones((3, 5))), jnp.full((2, 5), 3.0))


RUNTIME = {
    "shape": (
        lambda x: torch.ones(2),
        "ShapeError: `f` returned another shape than was declared.\n"
        "  declared by output_shapes: float32[4]\n"
        "  returned: float32[2]\n"
        "Nothing is broadcast or cast for you: return what was declared, or declare what is "
        "returned, in the annotation or by `output_shapes=`.",
    ),
    "dtype": (
        lambda x: x.to(torch.float16),
        "OutputError: `f` returned another dtype than was declared.\n"
        "  declared by output_shapes: float32[4]\n"
        "  returned: float16[4]\n"
        "Nothing is broadcast or cast for you: return what was declared, or declare what is "
        "returned, in the annotation or by `output_shapes=`.",
    ),
    "structure": (
        lambda x: (x, x),
        "OutputError: `f` returned another structure than was declared.\n"
        "  declared by output_shapes: *\n"
        "  returned: (*, *)\n"
        "Return the same structure on every call, or declare the right one, in the annotation or "
        "by `output_shapes=`.",
    ),
    "set": (
        lambda x: {3.0},
        "OutputError: `f` returned {3.0} of type set, but JAX can only take torch tensors, "
        "numbers and strings (in any nesting of tuples, lists, dicts, dataclasses and None). "
        "Return `torch.as_tensor(...)` of it, or leave it out.",
    ),
    "set in a tuple": (
        lambda x: (x, {3.0}),
        "OutputError: `f` returned {3.0} of type set at output[1], but JAX can only take torch "
        "tensors, numbers and strings (in any nesting of tuples, lists, dicts, dataclasses and "
        "None). Return `torch.as_tensor(...)` of it, or leave it out.",
    ),
    "exception": (lambda x: torch.ones(2) @ torch.ones(3), "RuntimeError: "),
    "python exception": (lambda x: {}["missing"], "KeyError: 'missing'"),
}


def _eager(f):
    return f


def _grad(f):
    return jax.grad(lambda x: f(x).sum())


def _vmapped(f):
    return lambda x: jax.vmap(f)(jnp.stack([x, x]))[0]


@pytest.mark.parametrize("how", [_eager, jax.jit, _grad, _vmapped], ids=lambda f: f.__name__)
@pytest.mark.parametrize(("returns", "message"), RUNTIME.values(), ids=RUNTIME)
@pytest.mark.covering
def test_an_error_at_run_time(how, returns, message):
    bad = [True]

    def f(x):
        return returns(x) if bad else x * 2

    g = how(torch2jax(f, output_shapes=X))
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError)) as info:
        jax.block_until_ready(g(X))
    assert message in str(info.value).replace("eqx_torch._errors.", "")
    assert "test_errors_messages.py" in str(info.value), "torch's traceback is part of it"
    bad.clear()
    expected = jnp.full(4, 2.0) if how is _grad else 2 * X
    assert_trees_equal(g(X), expected)


def test_where_in_the_output_it_is_wrong():
    f = torch2jax(lambda x: {"a": x, "b": [x.sum()]}, output_shapes={"a": X, "b": [X]})
    with pytest.raises(Exception, match=re.escape("than was declared at output['b'][0].")):
        jax.block_until_ready(f(X))


def test_a_bad_call_on_replicated_inputs():
    mesh = explicit_mesh(2)
    with jax.set_mesh(mesh):
        f = jax.jit(torch2jax(lambda x: x[:2], output_shapes=X))
        assert_trees_equal(f(put(X, mesh)), jnp.full(4, jnp.nan))
        with pytest.raises(ShapeError, match="returned another shape"):
            check_errors()
        assert_trees_equal(jax.jit(torch2jax(torch.sin))(put(X, mesh)), jnp.sin(X))


def test_the_deprecated_name_of_out_specs():
    message = "`output_sharding_spec` is deprecated; its name is now `out_specs`."
    mesh = explicit_mesh(4)
    with jax.set_mesh(mesh):
        with pytest.warns(DeprecationWarning, match="out_specs") as warned:
            f = torch2jax(torch.sin, output_sharding_spec=P("x"))
        assert_trees_equal(f(put(X, mesh, "x")), jnp.sin(X))
    assert [str(w.message) for w in warned] == [message]
    assert warned[0].filename == __file__


def test_every_error_is_also_what_python_programs_expect():
    assert issubclass(InputError, TypeError)
    assert issubclass(ShapeError, ValueError)
    assert issubclass(ShardingError, ValueError)
    assert issubclass(ConversionError, ValueError)


def test_another_platform_is_refused():
    f = jax.jit(torch2jax(torch.sin))
    message = (
        "`sin` was lowered for tpu, but torch functions run on one of CPU, CUDA and ROCm. Lower "
        "the program for one of these (for instance under "
        '`jax.default_device(jax.devices("cpu")[0])`), or call the function outside of it.'
    )
    with pytest.raises(EqxTorchError) as info:
        f.trace(X).lower(lowering_platforms=("tpu",))
    assert str(info.value) == message


def test_a_gpu_that_torch_does_not_see_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    f = jax.jit(torch2jax(torch.sin))
    message = (
        f"`sin` was lowered for cuda, but the installed torch ({torch.__version__}) sees no GPU: "
        "it is a build for CPUs, or for another kind of GPU or driver. Install the build of torch "
        "for this GPU, or run the program on the CPU (for instance under "
        '`jax.default_device(jax.devices("cpu")[0])`).'
    )
    with pytest.raises(EqxTorchError) as info:
        f.trace(X).lower(lowering_platforms=("cuda",))
    assert str(info.value) == message


KEYS = {
    "keyword": ("'key'", lambda f, key: f(key=key)),
    "in a tree": ("0['k'][1]", lambda f, key: f({"k": (X, key)})),
    "jit": ("0", lambda f, key: jax.jit(f)(key)),
    "several": ("0", lambda f, key: f(jax.random.split(key, 3))),
}


@pytest.mark.parametrize(("where", "call"), KEYS.values(), ids=KEYS)
def test_a_key_for_a_function(where, call):
    with pytest.raises(DtypeError, match="A function has no `key=`: draw in JAX") as info:
        call(torch2jax(lambda x=None, key=None: x), jax.random.key(0))
    assert f", as argument {where}, and torch has no dtype for keys." in str(info.value)
    words = jax.random.key_data(jax.random.key(0))
    assert_trees_equal(torch2jax(lambda key: key)(words), words)


def test_an_error_on_one_of_several_devices_is_logged(caplog):
    def f(x):
        if x[0] == 3:
            raise ValueError("the third shard")
        return x

    mesh = jax.make_mesh((8,), ("x",))
    x = jax.device_put(jnp.arange(8.0), jax.NamedSharding(mesh, P("x")))
    with jax.set_mesh(mesh):
        jax.block_until_ready(torch2jax(f, output_shapes=x, out_specs=P("x"))(x))
    (record,) = [r for r in caplog.records if r.name == "eqx_torch"]
    assert record.getMessage() == (
        "torch raised in `f` on device cpu:3, one of 8. Its outputs there are NaN (integers: the "
        "smallest; bools: False). The next torch call that can raises this error, or "
        "`eqx_torch.check_errors()`."
    )
    assert "the third shard" in caplog.text
    with pytest.raises(ValueError, match="the third shard") as info:
        check_errors()
    assert info.value.__notes__ == [
        "Raised by `f` on device cpu:3, one of 8, where its outputs were then filled with NaN."
    ]


def test_errors_of_torch_say_what_torch_was_given():
    f = torch2jax(
        torch.nn.functional.cross_entropy, output_shapes=jax.ShapeDtypeStruct((), "float32")
    )
    with pytest.raises(Exception, match="expected target dtype to be Long") as info:
        jax.block_until_ready(f(jnp.ones((2, 3)), jnp.zeros(2, jnp.int32)))
    assert (
        "`cross_entropy` was called on argument 0 float32[2, 3], argument 1 int32[2]. JAX holds "
        "int64 in 32 bits: where torch wants int64, as for class labels, convert with the "
        "arguments of a whole call as examples, as in `from_torch(module, ids, "
        'example_kw={"labels": torch.zeros(2, 3, dtype=torch.int64)})`. In torch code of '
        'your own, write `.long()`, or annotate the argument, `labels: Int64[Tensor, "batch"]`, '
        "there or in a `signature=`."
    ) in str(info.value)


def test_shapes_that_depend_on_values():
    with pytest.raises(ShapeError) as info:
        jax.eval_shape(torch2jax(lambda x: x[x > 0]), jnp.ones(3))
    assert str(info.value).startswith(
        "the shapes that `<lambda>` returns seem to depend on the values of its inputs "
        "(DynamicOutputShapeException: aten.nonzero.default; for zeros it returns an empty "
        "tensor), but in JAX they are fixed when a program is traced. Return a mask or "
        "`torch.where(...)` of fixed shape, or pad to one shape. Wrap it with example arguments of "
        "which the values give that shape, or declare it by `output_shapes=`."
    )


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):  # noqa: N818
    """Refuses that its arguments and notes are set."""

    text: str


def test_an_exception_that_cannot_be_changed():
    def f(x):
        raise Frozen("the reason")

    with pytest.raises(Exception, match="Frozen: the reason|Frozen\\(text='the reason'\\)"):
        jax.block_until_ready(jax.jit(torch2jax(f, output_shapes=X))(X))
