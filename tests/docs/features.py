"""What this library and its neighbours can do, tried.

`python -m tests.docs.features LIBRARY` tries each feature with one of `eqx_torch`,
`wrap_torch2jax`, `torch_jax_interop`, `torchax` and `pure_callback`, and compares with the table
that the README shows. The neighbours are not dependencies: install the one that is to be tried.
`python -m tests.docs.features` prints the table.

Each feature is a function of a `Library`, which fails or raises if the library does not have it.
"""

import os
import sys
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple


os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import PartitionSpec as P


Wrap = Callable[..., Callable[..., Any]]


class Library(NamedTuple):
    """A bridge: how it wraps a torch function, given examples of the arguments."""

    wrap: Wrap
    on_shards: tuple[tuple[str, Any], ...] = ()  # options that call the function on each shard


def eqx_torch() -> Library:
    """This library; it needs no examples."""
    from eqx_torch import torch2jax

    return Library(
        lambda fn, *examples, **options: torch2jax(fn, **options), (("out_specs", P("x")),)
    )


def wrap_torch2jax() -> Library:
    """`wrap_torch2jax`, which compiles its extension when it first wraps a function."""
    from wrap_torch2jax import torch2jax

    return Library(torch2jax, (("out_specs", P("x")),))


def torch_jax_interop() -> Library:
    """`torch_jax_interop`, whose derivatives and jit are for modules."""
    from torch_jax_interop import torch_to_jax

    class Function(torch.nn.Module):
        def __init__(self, fn: Callable[..., Any]) -> None:
            super().__init__()
            self.fn = fn

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return self.fn(*args, **kwargs)

    def wrap(fn: Callable[..., Any], *examples: Any, **_: Any) -> Callable[..., Any]:
        apply, params = torch_to_jax(Function(fn), example_output=fn(*examples))
        return lambda *args, **kwargs: apply(params, *args, **kwargs)

    return Library(wrap)


def torchax() -> Library:
    """torchax, which traces torch code into JAX operations."""
    from torchax import interop

    return Library(lambda fn, *examples, **options: interop.jax_view(fn))


def pure_callback() -> Library:
    """`jax.pure_callback`, with the results as the examples make them."""

    def wrap(fn: Callable[..., Any], *examples: Any, **_: Any) -> Callable[..., Any]:
        def host(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = jax.tree.map(lambda a: torch.from_numpy(np.array(a)), (args, kwargs))
            return jax.tree.map(lambda t: t.detach().numpy(), fn(*args, **kwargs))

        results = jax.tree.map(
            lambda t: jax.ShapeDtypeStruct(tuple(t.shape), str(t.dtype).removeprefix("torch.")),
            fn(*examples),
        )
        return lambda *args, **kwargs: jax.pure_callback(
            host, results, *args, vmap_method="sequential", **kwargs
        )

    return Library(wrap)


LIBRARIES = {
    f.__name__: f for f in (eqx_torch, wrap_torch2jax, torch_jax_interop, torchax, pure_callback)
}


def runs_under_jit(library: Library) -> None:
    f = library.wrap(torch.sin, torch.zeros(4))
    x = jnp.arange(4.0)
    assert jnp.allclose(jax.jit(f)(x), jnp.sin(x), atol=1e-6)


def infers_shapes(library: Library) -> None:
    assert library.wrap is not pure_callback
    f = library.wrap(lambda x: x.repeat(2), torch.zeros(4))
    assert jax.eval_shape(f, jnp.zeros(5)).shape == (10,)


def branches_on_values(library: Library) -> None:
    f = library.wrap(lambda x: x if x.sum() > 0 else 2 * x, torch.ones(4))
    assert jnp.array_equal(jax.jit(f)(-jnp.ones(4)), -2 * jnp.ones(4))


def gradient(library: Library) -> None:
    f = library.wrap(lambda x: x.sin().sum(), torch.zeros(4))
    x = jnp.arange(4.0)
    assert jnp.allclose(jax.jit(jax.grad(f))(x), jnp.cos(x), atol=1e-6)


def forward_mode(library: Library) -> None:
    f = library.wrap(torch.sin, torch.zeros(4))
    x = jnp.arange(4.0)
    assert jnp.allclose(jax.jvp(f, (x,), (x,))[1], x * jnp.cos(x), atol=1e-6)


def hessian(library: Library) -> None:
    f = library.wrap(lambda x: x.sin().sum(), torch.zeros(4))
    x = jnp.arange(4.0)
    assert jnp.allclose(jax.hessian(f)(x), jnp.diag(-jnp.sin(x)), atol=1e-6)


def third_derivative(library: Library) -> None:
    f = library.wrap(lambda x: x.sin().sum(), torch.zeros(1))
    third = jax.jacrev(jax.jacrev(jax.jacrev(f)))(jnp.ones(1))
    assert jnp.allclose(third.ravel(), -jnp.cos(1.0), atol=1e-6)


def custom_backward(library: Library) -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        def backward(ctx, cotangent):
            return 7 * cotangent

    f = library.wrap(lambda x: Double.apply(x).sum(), torch.zeros(4))
    assert jnp.array_equal(jax.grad(f)(jnp.ones(4)), 7 * jnp.ones(4))


def forward_once_per_step(library: Library) -> None:
    calls = []

    def loss(x):
        calls.append(x)
        return x.sin().sum()

    f = library.wrap(loss, torch.zeros(4))
    step = jax.jit(jax.value_and_grad(f))
    jax.block_until_ready(step(jnp.ones(4)))
    calls.clear()
    jax.block_until_ready(step(jnp.ones(4)))
    assert len(calls) <= 1


def complex_gradient(library: Library) -> None:
    f = library.wrap(lambda z: z * (1 + 2j), torch.zeros(3, dtype=torch.complex64))
    z = jnp.ones(3, jnp.complex64)
    expected = jax.grad(lambda z: jnp.sum(jnp.real(z * (1 + 2j))))(z)
    assert jnp.allclose(jax.grad(lambda z: jnp.sum(jnp.real(f(z))))(z), expected)


def one_call_under_vmap(library: Library) -> None:
    calls = []

    def f(x):
        calls.append(x)
        return x.sin()

    batched = jax.jit(jax.vmap(library.wrap(f, torch.zeros(4))))
    jax.block_until_ready(batched(jnp.ones((16, 4))))
    calls.clear()
    assert jnp.allclose(batched(jnp.ones((16, 4))), jnp.sin(1.0), atol=1e-6)
    assert len(calls) <= 1


def keywords_and_strings(library: Library) -> None:
    f = library.wrap(
        lambda x, *, reduction="none": x.mean() if reduction == "mean" else x, torch.zeros(4)
    )
    assert jnp.array_equal(jax.grad(lambda x: f(x, reduction="mean"))(jnp.ones(4)), jnp.ones(4) / 4)


def inputs_are_never_written(library: Library) -> None:
    f = library.wrap(lambda x: x.add_(1), torch.zeros(4))
    x = jnp.zeros(4)
    jax.block_until_ready(f(x))
    assert jnp.array_equal(x, jnp.zeros(4))


def stays_sharded(library: Library) -> None:
    f = library.wrap(torch.sin, torch.zeros(16, 4), **dict(library.on_shards))
    mesh = jax.make_mesh((8,), ("x",))
    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.ones((16, 4)), P("x"))
        y = jax.jit(f)(x)
        assert y.sharding.is_equivalent_to(x.sharding, 2)
        assert "all-gather" not in jax.jit(f).lower(x).compile().as_text()


def exports(library: Library) -> None:
    f = library.wrap(torch.sin, torch.zeros(4))
    jax.export.export(jax.jit(f), platforms=["tpu"])(jnp.zeros(4))


class Feature(NamedTuple):
    """A row of the table."""

    text: str
    check: Callable[[Library], None]
    had_by: set[str]


OURS, THEIRS, INTEROP = "eqx_torch", "wrap_torch2jax", "torch_jax_interop"
TRACED, HOST = "torchax", "pure_callback"
FEATURES = [
    Feature("runs under `jax.jit`", runs_under_jit, {OURS, THEIRS, TRACED, HOST, INTEROP}),
    Feature("infers the shapes of results", infers_shapes, {OURS, THEIRS, TRACED}),
    Feature("torch code may branch on values", branches_on_values, {OURS, THEIRS, HOST, INTEROP}),
    Feature("`jax.grad`", gradient, {OURS, THEIRS, TRACED, INTEROP}),
    Feature("`jax.jvp`", forward_mode, {OURS, TRACED}),
    Feature("`jax.hessian`", hessian, {OURS, TRACED}),
    Feature("third derivatives", third_derivative, {OURS, TRACED}),
    Feature("uses the `backward` of `autograd.Function`", custom_backward, {OURS, THEIRS}),
    Feature("one forward per training step", forward_once_per_step, {OURS, TRACED}),
    Feature("complex gradients are JAX's", complex_gradient, {OURS, TRACED}),
    Feature("`jax.vmap` is one batched call", one_call_under_vmap, {OURS, TRACED, INTEROP}),
    Feature("strings and keywords as arguments", keywords_and_strings, {OURS, TRACED}),
    Feature(
        "arguments are never overwritten", inputs_are_never_written, {OURS, TRACED, HOST, INTEROP}
    ),
    Feature("sharded arrays stay sharded", stays_sharded, {OURS, THEIRS, TRACED}),
    Feature("`jax.export`, TPUs", exports, {TRACED}),
]


def table() -> str:
    """The table in Markdown."""
    rows = [
        ["", *(f"`{name}`" for name in LIBRARIES)],
        *([f.text, *("yes" if n in f.had_by else "no" for n in LIBRARIES)] for f in FEATURES),
    ]
    first, *others = (f"| {' | '.join(row)} |\n" for row in rows)
    return first.replace("|  |", "| |") + "|---|" + ":-:|" * len(LIBRARIES) + "\n" + "".join(others)


def has(library: Library, feature: Feature) -> bool:
    """Whether the check of a feature passes."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            feature.check(library)
    except Exception as error:
        print(f"{feature.text}: {type(error).__name__} {str(error)[:200]}", file=sys.stderr)
        return False
    return True


def main(name: str) -> None:
    """Tries all features with one library."""
    library = LIBRARIES[name]()
    for feature in FEATURES:
        found, stated = has(library, feature), name in feature.had_by
        verdict = "" if found == stated else "   but the table says otherwise"
        print(f"{feature.text:<45} {'yes' if found else 'no'}{verdict}")


if __name__ == "__main__":
    main(sys.argv[1]) if sys.argv[1:] else print(table())
