"""The exceptions that eqx_torch raises on purpose.

Each is an `EqxTorchError`, and also the built-in exception that a caller who does not know this
package would expect. Messages say what was passed, what was expected and what to write instead.
"""


class EqxTorchError(Exception):
    """The base of every exception that `eqx_torch` raises on purpose."""


class DtypeError(EqxTorchError, TypeError):
    """A dtype that only one of PyTorch and JAX has."""


class ConversionError(EqxTorchError, ValueError):
    """An array or a tensor that holds no values which the other library could take."""


class InputError(EqxTorchError, TypeError):
    """Arguments that a wrapped function cannot take."""


class OutputError(EqxTorchError, TypeError):
    """A torch function returned something other than was declared."""


class ShapeError(EqxTorchError, ValueError):
    """Shapes that do not fit, or cannot be known."""


class ShardingError(EqxTorchError, ValueError):
    """A sharding under which a torch function cannot be called."""


class DepthError(EqxTorchError, TypeError):
    """A derivative of higher order than was allowed."""


class ModuleError(EqxTorchError, TypeError):
    """A torch module that cannot be converted."""


class AnnotationError(EqxTorchError, TypeError):
    """An annotation that cannot be used; raised when a function or module is wrapped."""
