"""Names of `wrap_torch2jax` that have another here; asked for, they say which."""

from typing import Any


_MOVED = {
    "torch2jax_with_vjp": "write `torch2jax(f, ...)`, which has derivatives of every order",
    "torch2jax_without_vjp": "write `torch2jax(f, ..., depth=0)`",
    "torch2jax_auto": "write `torch2jax(f)`, which needs no example arguments",
    "wrap_torch_fn": "write `torch2jax`",
    "compile_and_import_module": "leave it out, since nothing is compiled",
}


def __getattr__(name: str) -> Any:
    """The `__getattr__` of the package."""
    if name in _MOVED:
        # An ImportError, since `from eqx_torch import name` drops the text of an AttributeError.
        raise ImportError(
            f"`eqx_torch` has no `{name}` of `wrap_torch2jax`: {_MOVED[name]}.", name=name
        )
    raise AttributeError(f"module 'eqx_torch' has no attribute '{name}'")
