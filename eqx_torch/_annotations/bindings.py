"""What one call binds: the value of every name in its annotations, and where each name got it.

The dictionaries `single` and `variadic` are jaxtyping's own memo of a call, so its check of a
shape reads and extends them. `origins` is kept next to them, for messages. A `#name` dimension of
size 1 binds nothing in jaxtyping; if no other dimension binds the name, what was broadcast along
it has size 1, which `settle` records.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from .._compat_jaxtyping import check_dim, check_shape, Dim, evaluate, leaf_prefix
from .dtypes import Seen
from .specs import Array
from .structures import Structure


@dataclass(frozen=True)
class Origin:
    """The argument that bound a name, and which of its dimensions (None: its structure) did."""

    path: str
    start: int | None = None
    stop: int | None = None


@dataclass
class Bindings:
    """The bindings of one call.

    **Attributes:**

    - `names`: sizes of single names, tuples of sizes of variadic ones, tree structures of
      structure names.
    - `origins`: for each of them the `Origin`.
    """

    arguments: Mapping[str, Any]
    single: dict[str, int] = field(default_factory=dict)
    variadic: dict[str, tuple[bool, tuple[int, ...]]] = field(default_factory=dict)
    structures: dict[str, Structure] = field(default_factory=dict)
    origins: dict[str, Origin] = field(default_factory=dict)
    ones: dict[str, Origin] = field(default_factory=dict)
    seen: list[Seen] = field(default_factory=list)

    @property
    def names(self) -> dict[str, Any]:
        variadic = {name: tuple(shape) for name, (_, shape) in self.variadic.items()}
        return {**self.single, **variadic, **self.structures}

    def copy(self) -> "Bindings":
        """Independent bindings, to try something on."""
        return Bindings(
            self.arguments,
            self.single.copy(),
            self.variadic.copy(),
            self.structures.copy(),
            self.origins.copy(),
            self.ones.copy(),
            self.seen.copy(),
        )

    def become(self, other: "Bindings") -> None:
        """Takes over what was tried on a copy."""
        self.__dict__.update(other.__dict__)

    def settle(self) -> None:
        """After the last argument: names that were broadcast and never larger than 1 are 1."""
        for name, origin in self.ones.items():
            if self.single.setdefault(name, 1) == 1:
                self.origins.setdefault(name, origin)


def add_array(array: Array, value: Any, path: str, bindings: Bindings) -> bool:
    """Checks the shape of `value` and binds its names; False if it does not match.

    What was bound up to the dimension that fails stays, to tell the caller of the call's failure.
    Raises what an expression among the dimensions raises.
    """
    single, variadic = bindings.single, bindings.variadic
    before = len(single) + len(variadic)
    if check_shape(array.annotation, value, single, variadic, bindings.arguments) != "":
        return False
    if array.broadcasts or len(single) + len(variadic) > before:
        _note_origins(array, value.shape, path, bindings)
    return True


def add_dim(
    array: Array, index: int, size: int, path: str, position: int, bindings: Bindings
) -> bool:
    """`add_array` for one dimension that is not variadic."""
    dim = array.dims[index]
    if check_dim(array.annotation, index, size, bindings.single, bindings.arguments) != "":
        return False
    if dim.kind == "name":
        bindings.origins.setdefault(key(dim), Origin(path, position, position + 1))
    return True


def placed(dims: tuple[Dim, ...], rank: int) -> Iterator[tuple[int, Dim, int, int]]:
    """Index, dimension and the range of axes each one stands for in an array of that rank."""
    start = 0
    for index, dim in enumerate(dims):
        stop = start + (rank - len(dims) + 1 if dim.kind in ("names", "anys") else 1)
        yield index, dim, start, stop
        start = stop


def key(dim: Dim) -> str:
    """The name under which jaxtyping keeps the value of a named dimension."""
    return leaf_prefix() + str(dim.value) if dim.per_leaf else str(dim.value)


def dim_value(dim: Dim, bindings: Bindings) -> Any:
    """What `dim` is: a size, a tuple of sizes if variadic, the value of an expression; None if
    nothing binds it.

    Raises whatever an expression raises.
    """
    match dim.kind:
        case "fixed":
            return dim.value
        case "name":
            return bindings.single.get(key(dim))
        case "names":
            found = bindings.variadic.get(key(dim))
            return None if found is None else tuple(found[1])
        case "expression":
            return evaluate(str(dim.value), bindings.single, bindings.arguments)
        case _:
            return None


def _note_origins(array: Array, shape: tuple[int, ...], path: str, bindings: Bindings) -> None:
    for _, dim, start, stop in placed(array.dims, len(shape)):
        if dim.kind not in ("name", "names"):
            continue
        name, origin = key(dim), Origin(path, start, stop)
        if dim.kind == "name" and dim.broadcastable and shape[start] == 1:
            bindings.ones.setdefault(name, origin)
        else:
            bindings.origins.setdefault(name, origin)
