"""Random annotations, the shapes that fit them, and a torch function that does what they say."""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
from hypothesis import HealthCheck, settings, strategies as st
from jaxtyping import AnnotationError, Float, Float32, jaxtyped, PyTree
from torch import Tensor

from .annotations import arr


quick = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
thorough = settings(max_examples=2000, deadline=None, suppress_health_check=list(HealthCheck))

SIZES = st.integers(0, 4)
DTYPES = st.sampled_from(["float16", "bfloat16", "float32"])
WRAPS = st.sampled_from(["none", "tuple", "list", "dict", "tree"])


class Dim(NamedTuple):
    """One dimension of a random annotation: how it is written and the sizes it gets."""

    text: str
    sizes: tuple[int, ...]
    name: str | None = None


@dataclass
class Case:
    arrays: list[list[Dim]]
    wraps: list[str]
    dtypes: list[str]
    result: list[Dim]
    result_dtype: type

    def annotation(self, index):
        row = Float[Tensor, " ".join(dim.text for dim in self.arrays[index])]
        return wrap(self.wraps[index], row, row, f"T{index}", annotation=True)

    def function(self):
        names = [f"x{index}" for index in range(len(self.arrays))]
        scope = {}
        exec(f"def f({', '.join(names)}): ...", scope)
        annotations = {name: self.annotation(index) for index, name in enumerate(names)}
        row = self.result_dtype[Tensor, " ".join(dim.text for dim in self.result)]
        scope["f"].__annotations__ = {**annotations, "return": tuple[row, row]}
        return scope["f"]

    def shapes(self):
        return [[size for dim in array for size in dim.sizes] for array in self.arrays]


def wrap(kind, first, second, name, annotation=False):
    match kind:
        case "tuple":
            return tuple[first, second] if annotation else (first, second)
        case "list":
            return list[first] if annotation else [first, second]
        case "dict":
            return dict[str, first] if annotation else {"a": first, "b": second}
        case "tree":
            return PyTree[first, name] if annotation else {"a": [first], "b": second}
    return first


@st.composite
def dims(draw, single, variadic):
    found = []
    for _ in range(draw(st.integers(0, 3))):
        name = draw(st.sampled_from(sorted(single)))
        size = single[name]
        kind = draw(
            st.sampled_from(["name", "name", "broadcast", "fixed", "alias", "any", "fixed #"])
        )
        one = draw(st.booleans())
        found.append(
            {
                "name": Dim(name, (size,), name),
                "broadcast": Dim(f"#{name}", (1 if one else size,), name),
                "fixed": Dim("3", (3,)),
                "alias": Dim("k=2", (2,)),
                "any": Dim("_", (draw(SIZES),)),
                "fixed #": Dim("#4", (1 if one else 4,)),
            }[kind]
        )
    kind = draw(st.sampled_from(["none", "names", "broadcast", "dots"]))
    if kind != "none":
        name = draw(st.sampled_from(sorted(variadic)))
        shape = variadic[name]
        part = shape[draw(st.integers(0, len(shape))) :]
        part = tuple(1 if draw(st.booleans()) else size for size in part)
        star = {
            "names": Dim(f"*{name}", shape, name),
            "broadcast": Dim(f"*#{name}", part, name),
            "dots": Dim("...", tuple(draw(st.lists(SIZES, max_size=2)))),
        }[kind]
        found.insert(draw(st.integers(0, len(found))), star)
    return found


@st.composite
def cases(draw):
    single = {name: draw(SIZES) for name in "nmk"}
    variadic = {name: tuple(draw(st.lists(SIZES, max_size=2))) for name in "pq"}
    count = draw(st.integers(1, 3))
    arrays = [draw(dims(single, variadic)) for _ in range(count)]
    plain = sorted({dim.text for array in arrays for dim in array if dim.text in single})
    if plain and draw(st.booleans()):
        name = draw(st.sampled_from(plain))
        arrays.append([Dim(f"2*{name}+1", (2 * single[name] + 1,))])
    written = {dim.text for array in arrays for dim in array}
    # A result may say whatever the inputs bind, and `#` where one of them broadcasts.
    choices = [Dim("5", (5,)), Dim("c=2", (2,))]
    for name in single:
        texts = written & {name, f"#{name}"}
        choices += [Dim(text, (), name) for text in {name, *texts} if texts]
        choices += [Dim(f"{name}+2", (), name)] if texts else []
    result = draw(st.lists(st.sampled_from(choices), max_size=3))
    for name in variadic:
        texts = written & {f"*{name}", f"*#{name}"}
        if texts and draw(st.booleans()):
            result.append(Dim(draw(st.sampled_from(sorted({f"*{name}", *texts}))), (), name))
            break
    return Case(
        arrays,
        [draw(WRAPS) for _ in arrays],
        [draw(DTYPES) for _ in arrays],
        result,
        draw(st.sampled_from([Float, Float32])),
    )


def torch_function(case):
    """What a torch function does that is annotated as `case` says, reading all from its tensors."""

    def size(name, tensors):
        found = []
        for array, tensor in zip(case.arrays, tensors, strict=True):
            start = 0
            for dim in array:
                stop = start + len(dim.sizes)
                found += [tensor.shape[start:stop]] if dim.name == name else []
                start = stop
        return torch.broadcast_shapes(*found)

    def call(*tensors):
        shape = []
        for dim in case.result:
            sizes = dim.sizes if dim.name is None else size(dim.name, tensors)
            shape += [one + 2 for one in sizes] if dim.text.endswith("+2") else sizes
        like = [tensor.new_zeros((1,) if tensor.ndim else ()) for tensor in tensors]
        dtype = functools.reduce(torch.mul, sorted(like, key=lambda one: -one.ndim)).dtype
        out = torch.zeros(shape, dtype=torch.float32 if case.result_dtype is Float32 else dtype)
        return out, out.clone()

    return call


def tensors_of(case, shapes):
    return [
        torch.zeros(shape, dtype=getattr(torch, dtype))
        for shape, dtype in zip(shapes, case.dtypes, strict=True)
    ]


def structs_of(case, shapes):
    structs = [arr(*shape, dtype=dtype) for shape, dtype in zip(shapes, case.dtypes, strict=True)]
    return tuple(wrap(kind, one, one, "") for kind, one in zip(case.wraps, structs, strict=True))


def admitted_by_jaxtyping(case, shapes):
    with jaxtyped("context"):
        for array, tensor in zip(case.arrays, tensors_of(case, shapes), strict=True):
            try:
                if not isinstance(tensor, Float[Tensor, " ".join(dim.text for dim in array)]):
                    return False
            except AnnotationError:
                return False
    return True


def changed(case, data):
    """The shapes with one size of one array changed."""
    shapes = case.shapes()
    index = data.draw(st.integers(0, len(shapes) - 1))
    shape = list(shapes[index])
    if shape and data.draw(st.booleans()):
        axis = data.draw(st.integers(0, len(shape) - 1))
        shape[axis] += data.draw(st.sampled_from([1, 2, 5]))
    else:
        shape.insert(0, data.draw(SIZES))
    shapes[index] = shape
    return shapes
