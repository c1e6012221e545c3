"""jaxtyping annotations of torch functions check the inputs of a call and predict its result."""

from .bindings import Bindings as Bindings
from .checkers import strip_checkers as strip_checkers, unchecked as unchecked
from .signature import read_signature as read_signature, Signature as Signature
from .stub import read_signature_for as read_signature_for
