"""The exceptions that eqx_torch raises itself, all under `EqxTorchError`."""


class EqxTorchError(Exception):
    """What every exception of this library derives from."""


class AnnotationError(EqxTorchError, TypeError):
    """An annotation cannot be used; raised when a function or module is wrapped."""


class ShapeError(EqxTorchError, ValueError):
    """The arguments of a call do not match the annotations; raised when the call is traced."""
