"""What goes wrong here, by type.

Every exception that this package raises on purpose is an `EqxTorchError`, and also the builtin
exception that a caller who does not know this package would expect. Messages say what was passed,
why it cannot work, and what to write instead.
"""


class EqxTorchError(Exception):
    """The base of every exception that `eqx_torch` raises on purpose."""


class DtypeError(EqxTorchError, TypeError):
    """A dtype that only one of PyTorch and JAX has."""


class ConversionError(EqxTorchError, ValueError):
    """An array or a tensor that holds no values which the other library could take."""
