"""The mode of a model, training or evaluation, as a part of its structure.

Torch code has to know its mode when JAX traces. As a bool among the leaves, as Equinox's own layers
have it, it would be traced, or refused, by each transformation that is not Equinox's; as a static
field, `equinox.nn.inference_mode` would not find it, which replaces the node `inference` of each
module by a bool. So it is a node without leaves, and whatever bool is set there becomes one.
"""

from typing import Any

import jax.tree_util as jtu
import numpy as np


@jtu.register_static
class Mode(int):
    """A bool that is a node of a PyTree, but no leaf."""

    def __repr__(self) -> str:
        return repr(bool(self))


class ModeField:
    """The attribute `inference` of a model, a `Mode`.

    Each model has an instance of its own, since `equinox.tree_at` tells nodes apart by identity.
    """

    def __get__(self, model: Any, owner: type) -> Any:
        try:
            return vars(model)["inference"]
        except (KeyError, TypeError):  # of the class, or while a model is being made
            raise AttributeError("inference") from None

    def __set__(self, model: Any, value: Any) -> None:
        flag = isinstance(value, bool | np.bool_ | Mode)
        vars(model)["inference"] = Mode(value) if flag else value
