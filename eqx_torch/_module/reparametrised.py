"""Parameters that JAX computes at each call from arrays that stand in their place."""

from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax


class PlainFunction(eqx.Module):
    """A function that is no PyTree, as part of a model's structure."""

    function: Callable[..., Any] = eqx.field(static=True)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


class Reparametrised(eqx.Module):
    """Stands in a model's `params` for a parameter that is a function of an array.

    Attributes:
        weight: the array, or what itself stands for one.
        function: gives the parameter.
    """

    weight: Any
    function: Callable[[Any], jax.Array]

    def value(self) -> jax.Array:
        """The parameter."""
        inner = self.weight
        return self.function(inner.value() if isinstance(inner, Reparametrised) else inner)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"a parameter that JAX computes (`reparametrise`, `fsdp`) has no attribute `{name}`. "
            f"The array that is kept is `.weight`, so that this is `.weight.{name}` of it; the "
            "parameter is `.value()`."
        )


def computed(params: Mapping[str, Any]) -> Mapping[str, Any]:
    """The parameters, as torch is given them."""
    if not any(isinstance(p, Reparametrised) for p in params.values()):
        return params
    return {n: p.value() if isinstance(p, Reparametrised) else p for n, p in params.items()}


def as_node(function: Callable[..., Any]) -> Any:
    """The function as what a PyTree may hold: itself if it is a PyTree, such as a module."""
    is_leaf = jax.tree.structure(function) == jax.tree.structure(0)
    return PlainFunction(function) if is_leaf else function
