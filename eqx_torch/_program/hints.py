"""What to write where torch code met what it does not take: other dtypes, JAX, or NumPy.

Of dtypes torch has no type of error, only messages, which spell one in several ways: `Int`, `int`,
`torch.int32`, `IntTensor`. Two such mistakes come from JAX. It holds int64 in 32 bits, while torch
wants class labels to be int64. And nothing is cast where an array meets a layer's parameters.
"""

import re
import traceback
from collections.abc import Sequence
from typing import TypeAlias

import torch


Named: TypeAlias = Sequence[tuple[str, torch.dtype]]

_SPELLINGS = {
    torch.bool: "Bool|bool|boolean",
    torch.uint8: "Byte|uint8|unsigned char",
    torch.int8: "Char|int8|signed char",
    torch.int16: "Short|int16|short",
    torch.int32: "Int|int32|int",
    torch.int64: "Long|int64|long",
    torch.float16: "Half|float16|c10::Half",
    torch.bfloat16: "BFloat16|bfloat16|c10::BFloat16",
    torch.float32: "Float|float32|float",
    torch.float64: "Double|float64|double",
}
_DTYPES = {
    dtype: re.compile(rf"(?<![\w:])(?:{names})(?:Tensor)?\b") for dtype, names in _SPELLINGS.items()
}
_ABOUT_DTYPES = re.compile(
    r"dtype|datatype|scalar type|(?:Input|result) type|Type promoting|Integral inputs|"
    r"floating point|[Ll]ong ?[Tt]ensor|not implemented for '"
)
_FOUND = re.compile(r"\b(?:[Gg]ot|found)\b")
# An operator that is chosen by the dtype of its index, as losses of class labels are on GPUs.
_OF_INDEX = re.compile(r"index\w*\" not implemented for 'Int'")

_INT64 = (
    "JAX holds int64 in 32 bits: where torch wants int64, as for class labels, convert with the "
    'arguments of a whole call as examples, as in `from_torch(module, ids, example_kw={"labels": '
    "torch.zeros(2, 3, dtype=torch.int64)})`. In torch code of your own, write `.long()`, or "
    'annotate the argument, `labels: Int64[Tensor, "batch"]`, there or in a `signature=`.'
)
_JAX = (
    "Torch code met a JAX array, or JAX a tensor. In torch code there are tensors only: pass "
    "arrays as arguments instead of closing over them, call torch's functions on them, and apply "
    "JAX functions and Equinox layers outside of it, to what `torch2jax(f)(x)` returns."
)
_NUMPY = (
    "NumPy has no derivatives, and after `detach()` JAX would silently take this one for zero. "
    "Write torch operators, a `torch.autograd.Function` with a `backward`, or "
    "`jax.pure_callback` in a `jax.custom_vjp`; if it is a constant, pass "
    "`jax.lax.stop_gradient(x)`."
)


def hint_for(error: BaseException, inputs: Named, x64: bool) -> str:
    """What to write instead; nothing if the error is torch's own affair.

    Args:
        error: what torch raised.
        inputs: what torch was given, by the names that messages have for it.
        x64: whether JAX has 64-bit types.
    """
    return _of_dtypes(error, inputs, x64) or _of_libraries(error)


def _of_dtypes(error: BaseException, inputs: Named, x64: bool) -> str:
    message = str(error).partition("\n")[0]
    if isinstance(error, IndexError) or not _ABOUT_DTYPES.search(message):
        return ""
    if not _is_of_integers(message):
        return _cast(message, inputs)
    held = not x64 and any(dtype is torch.int32 for _, dtype in inputs)
    return _INT64 if held and _wants_int64_for_int32(message) else ""


def _is_of_integers(message: str) -> bool:
    """Whether torch wants integers or bools there, so that a cast to floats would not help."""
    wanted = _named(_FOUND.split(message)[0])
    if any(dtype.is_floating_point for dtype in wanted):
        return False
    other = torch.int64 in wanted or torch.bool in wanted
    return other or _OF_INDEX.search(message) is not None


def _wants_int64_for_int32(message: str) -> bool:
    wanted, *found = _FOUND.split(message)
    accepted, refused = _named(wanted), _named(" ".join(found)) or [torch.int32]
    strict = torch.int64 in accepted and torch.int32 not in accepted
    return (strict and torch.int32 in refused) or _OF_INDEX.search(message) is not None


def _cast(message: str, inputs: Named) -> str:
    named = _named(message)
    arguments = [(name, dtype) for name, dtype in inputs if name.startswith("argument")]
    dtype = _computed_in(named, {d for name, d in inputs if name.startswith("parameter")})
    unlike = [(n, d) for n, d in arguments if d is not dtype and (d in named or not named)]
    if not unlike:
        return ""
    shown = ", ".join(f"{name} is {_short(d)}" for name, d in unlike)
    return f"{shown}, and nothing is cast for you: pass `x.astype(jax.numpy.{_short(dtype)})`."


def _computed_in(named: Sequence[torch.dtype], parameters: set[torch.dtype]) -> torch.dtype:
    """The dtype that the arguments should have: the parameters', if the message names it."""
    floats = [dtype for dtype in named or parameters if dtype.is_floating_point]
    own = [dtype for dtype in floats if dtype in parameters]
    return own[0] if own else torch.float32


def _named(text: str) -> list[torch.dtype]:
    return [dtype for dtype, pattern in _DTYPES.items() if pattern.search(text)]


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _of_libraries(error: BaseException) -> str:
    if "numpy() on Tensor that requires grad" in str(error):
        return _NUMPY
    return _JAX if _is_about_jax(error) else ""


def _is_about_jax(error: BaseException) -> bool:
    """Whether torch code met a JAX array, or JAX code a tensor."""
    frames = traceback.walk_tb(error.__traceback__)
    modules = [frame.f_globals.get("__name__", "") for frame, _ in frames]
    named = any(name in str(error) for name in ("ArrayImpl", "Tracer", "<class 'torch.Tensor'>"))
    return named or any(name.split(".")[0] in ("jax", "jaxlib") for name in modules)
