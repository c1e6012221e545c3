"""What the tests of annotations share: structs in place of arrays, and a call's prediction."""

import collections

import jax
import jax.numpy as jnp
import pytest

from eqx_torch._annotations import read_signature
from eqx_torch._errors import AnnotationError, ShapeError


def arr(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def bind(fn, *args, **kwargs):
    return read_signature(fn).bind(args, kwargs)


def predict(fn, *args, **kwargs):
    signature = read_signature(fn)
    return signature.output(signature.bind(args, kwargs))


def refused(fn, *args, **kwargs):
    """The message with which the call is refused."""
    with pytest.raises(ShapeError) as caught:
        predict(fn, *args, **kwargs)
    return str(caught.value)


def unreadable(fn):
    """The message with which wrapping is refused."""
    with pytest.raises(AnnotationError) as caught:
        read_signature(fn)
    return str(caught.value)


class Runs(collections.deque):
    """What a function notes when it runs; a run that infers shapes would put a list back."""

    __slots__ = ()

    def __eq__(self, other):
        return list(self) == list(other)

    def __ne__(self, other):
        return not self == other
