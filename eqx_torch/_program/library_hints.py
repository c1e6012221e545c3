"""What to write where torch code met JAX or NumPy, which do not take its tensors as torch does."""

import traceback


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


def library_hint(error: BaseException) -> str:
    """What to write instead; nothing if the error is torch's own affair."""
    if "numpy() on Tensor that requires grad" in str(error):
        return _NUMPY
    return _JAX if _is_about_jax(error) else ""


def _is_about_jax(error: BaseException) -> bool:
    """Whether torch code met a JAX array, or JAX code a tensor."""
    frames = traceback.walk_tb(error.__traceback__)
    modules = [frame.f_globals.get("__name__", "") for frame, _ in frames]
    named = any(name in str(error) for name in ("ArrayImpl", "Tracer", "<class 'torch.Tensor'>"))
    return named or any(name.split(".")[0] in ("jax", "jaxlib") for name in modules)
