"""jaxtyping annotations of torch functions: checking the inputs of a call and predicting its result."""

from .bindings import Bindings as Bindings
from .signature import Signature as Signature
from .signature import read_signature as read_signature
