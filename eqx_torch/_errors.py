"""The exceptions that eqx_torch raises on purpose.

Each is an `EqxTorchError`, and also the built-in exception that a caller who does not know this
package would expect. Messages say what was passed, what was expected and what to write instead.
"""


class EqxTorchError(Exception):
    """The base of every exception that `eqx_torch` raises on purpose.

    Exceptions of the torch code itself are not among them, and what is raised while a program runs
    arrives inside the text of a JAX error.

    !!! example

        >>> import jax.numpy as jnp, torch
        >>> from eqx_torch import EqxTorchError, torch2jax
        >>> try:
        ...     torch2jax(torch.matmul)(jnp.ones((2, 3)), jnp.ones((2, 3)))
        ... except EqxTorchError as error:
        ...     print(type(error).__name__)
        ShapeError
    """


class DtypeError(EqxTorchError, TypeError):
    """A dtype that only one of PyTorch and JAX has.

    !!! example

        >>> from eqx_torch import dtype_j2t
        >>> dtype_j2t("int4")
        Traceback (most recent call last):
            ...
        eqx_torch._errors.DtypeError: PyTorch has no dtype with the values of int4. Cast it to ...
    """


class ConversionError(EqxTorchError, ValueError):
    """An array or a tensor that holds no values which the other library could take.

    !!! example

        >>> import torch
        >>> from eqx_torch import t2j
        >>> t2j(torch.zeros(3, device="meta"))
        Traceback (most recent call last):
            ...
        eqx_torch._errors.ConversionError: t2j cannot convert ... it is on the meta device ...
    """


class InputError(EqxTorchError, TypeError):
    """Arguments that a wrapped function cannot take.

    !!! example

        >>> import torch
        >>> from eqx_torch import torch2jax
        >>> torch2jax(torch.relu, depth=-1)
        Traceback (most recent call last):
            ...
        eqx_torch._errors.InputError: `depth=-1`: pass a number of derivatives (0 for none), ...
    """


class OutputError(EqxTorchError, TypeError):
    """A torch function returned something other than was declared.

    It is raised when JAX traces, or while the program runs (and then by JAX, with this text).

    !!! example

        >>> import jax.numpy as jnp
        >>> from eqx_torch import torch2jax
        >>> torch2jax(lambda x: x.to_sparse())(jnp.ones(3))
        Traceback (most recent call last):
            ...
        eqx_torch._errors.OutputError: `<lambda>` returned a tensor of layout torch.sparse_coo, ...
    """


class ShapeError(EqxTorchError, ValueError):
    """Shapes that do not fit, or cannot be known.

    !!! example

        >>> import jax.numpy as jnp
        >>> from jaxtyping import Float
        >>> from torch import Tensor
        >>> from eqx_torch import torch2jax
        >>> def total(x: Float[Tensor, "n 3"]) -> Float[Tensor, "n"]:
        ...     return x.sum(1)
        >>> torch2jax(total)(jnp.ones((2, 4)))
        Traceback (most recent call last):
            ...
        eqx_torch._errors.ShapeError: total: argument `x` does not match its annotation.
          annotation: Float[Tensor, 'n 3']
          expected: Float (n=2, 3)
          actual: float32 (2, 4)
          dimension 1 is 4, must be 3
        names bound in this call:
          n = 2, from argument `x`, dimension 0
    """


class ShardingError(EqxTorchError, ValueError):
    """A sharding under which a torch function cannot be called.

    !!! example

        >>> import jax, jax.numpy as jnp, torch
        >>> from jax.sharding import PartitionSpec as P
        >>> from eqx_torch import torch2jax
        >>> mesh = jax.make_mesh((1,), ("x",))
        >>> x = jax.device_put(jnp.ones(4), jax.NamedSharding(mesh, P("x")))
        >>> torch2jax(torch.relu)(x)
        Traceback (most recent call last):
            ...
        eqx_torch._errors.ShardingError: inputs of `relu` are sharded over the explicit mesh ...
    """


class DepthError(EqxTorchError, TypeError):
    """A derivative of higher order than was allowed.

    !!! example

        >>> import jax, torch
        >>> from eqx_torch import torch2jax
        >>> jax.grad(torch2jax(torch.relu, depth=0))(1.0)
        Traceback (most recent call last):
            ...
        eqx_torch._errors.DepthError: `relu` was differentiated to order 1, but was wrapped ...
    """


class ModuleError(EqxTorchError, TypeError):
    """A torch module that cannot be converted, or a converted one that cannot be called so.

    !!! example

        >>> import jax.numpy as jnp, torch
        >>> from eqx_torch import from_torch
        >>> from_torch(torch.nn.Dropout(0.5))(jnp.ones(3))
        Traceback (most recent call last):
            ...
        eqx_torch._errors.ModuleError: the forward of `Dropout` draws random numbers in ...
    """


class AnnotationError(EqxTorchError, TypeError):
    """An annotation that cannot be used; raised when a function or module is wrapped.

    !!! example

        >>> from jaxtyping import Float
        >>> from torch import Tensor
        >>> from eqx_torch import torch2jax
        >>> def unique(x: Float[Tensor, "n"]) -> Float[Tensor, "k"]:
        ...     return x.unique()
        >>> torch2jax(unique)
        Traceback (most recent call last):
            ...
        eqx_torch._errors.AnnotationError: unique: the annotation Float[Tensor, 'k'] does not ...
        Bind it by an input, use a number, or pass output_shapes=.
    """
