"""Annotations as strings, some of names that exist only for type checkers, for the tests."""

from __future__ import annotations

from typing import NamedTuple, TYPE_CHECKING

from beartype import beartype
from jaxtyping import Float, Int, jaxtyped, PyTree
from torch import nn, Tensor


if TYPE_CHECKING:
    from somewhere import Config, Matrix  # pyright: ignore[reportMissingImports]


class Out(NamedTuple):
    left: Float[Tensor, "n"]
    right: Float[Tensor, "m"]


def plain(x: Float[Tensor, "n m"], k: int = 2) -> Float[Tensor, "m n"]: ...


def nested(x: tuple[Float[Tensor, "n"], list[Float[Tensor, "m"]]]) -> Out: ...


def tree(x: PyTree[Float[Tensor, "?n"], "T"]) -> PyTree[Float[Tensor, "?n"], "T"]: ...


def partly_unknown(x: Float[Tensor, "n"], config: Config | None = None) -> Float[Tensor, "n"]: ...


def unknown(x: Float[Matrix, "n"], y: Int[Tensor, "n"]): ...


def half_string(x): ...


half_string.__annotations__ = {"x": list["Float[Matrix, 'n']"]}


def invalid(x: Float[Tensor, "*a *b"]): ...


@jaxtyped(typechecker=beartype)
def checked(x: Float[Tensor, "n 4"]) -> Float[Tensor, "n 4"]:
    return x


class Net(nn.Module):
    def forward(self, x: Float[Tensor, "n m"]) -> Float[Tensor, "m n"]:
        return x.T
