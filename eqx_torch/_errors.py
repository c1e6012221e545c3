"""The exceptions of eqx_torch.

Each message says what was passed, what was expected and what to write instead. The classes also
derive from the built-in exception that Python or JAX would raise for the same mistake.
"""


class EqxTorchError(Exception):
    """Base class of every error that eqx_torch raises."""


class DtypeError(EqxTorchError, TypeError):
    """A dtype that torch or JAX does not have."""


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
