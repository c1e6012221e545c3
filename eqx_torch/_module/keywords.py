"""`state=` and `key=` of a call, which are ours among arguments that are torch's."""

from typing import Any

import equinox as eqx
import jax
import jax.tree_util as jtu
import numpy as np

from .._dtypes import is_key
from .._errors import InputError
from .._program import argument_name
from .core import Core


_KEY = ("a key of JAX's", "key", "y = model(x, key=key)")
_STATE = ("an `equinox.nn.State`", "state", "y, state = model(x, state=state)")


class Keywords:
    """The keyword arguments of a call, with those taken out that are not the forward's.

    Raises:
        InputError: `state=` is no state, `key=` not one key, or either stands elsewhere.
    """

    def __init__(self, core: Core, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.rest = dict(kwargs)
        self.state: eqx.nn.State | None = None
        self.key: jax.Array | None = None
        state, key = self.rest.get("state"), self.rest.get("key")
        if "state" not in core.arguments or _is_state(state):
            self.state = _checked_state(core, self.rest.pop("state", None))
        if "key" not in core.arguments or is_key(key):
            self.key = _checked_key(core, self.rest.pop("key", None))
        _refuse_elsewhere(core, (args, self.rest))


def _checked_state(core: Core, state: Any) -> eqx.nn.State | None:
    if state is not None and not _is_state(state):
        raise InputError(
            f"`state=` of `{core.name}` is a {type(state).__name__}, but takes the "
            "`equinox.nn.State` of "
            "`model, state = eqx.nn.make_with_state(from_torch)(module)`."
        )
    return state


def _checked_key(core: Core, key: Any) -> jax.Array | None:
    if key is None:
        return None
    try:
        typed = key if is_key(key) else jax.random.wrap_key_data(key)
    except (TypeError, ValueError) as error:
        raise InputError(
            f"`key=` of `{core.name}` is {_shown(key)}, but takes a key of JAX's: "
            "`key=jax.random.key(0)`."
        ) from error
    if typed.ndim:
        raise InputError(
            f"`key=` of `{core.name}` is an array of keys, of shape {list(typed.shape)}, but a "
            "call draws from one key: `key=keys[0]`. To call it with each of them, "
            "`jax.vmap(lambda key: model(x, key=key))(keys)`."
        )
    return typed


def _refuse_elsewhere(core: Core, arguments: Any) -> None:
    if not any(map(_is_ours, jax.tree.leaves(arguments, is_leaf=_is_state))):
        return
    for path, leaf in jtu.tree_flatten_with_path(arguments, is_leaf=_is_state)[0]:
        if _is_ours(leaf):
            what, name, call = _KEY if is_key(leaf) else _STATE
            raise InputError(
                f"`{core.name}` got {what} as {argument_name(jtu.keystr(path))}, but what is not "
                f"passed as `state=` or `key=` is for torch's `{core.options.method}`. Write "
                f"`{name}={name}`, as in `{call}`."
            )


def _is_ours(x: Any) -> bool:
    return _is_state(x) or is_key(x)


def _is_state(x: Any) -> bool:
    return isinstance(x, eqx.nn.State)


def _shown(x: Any) -> str:
    if isinstance(x, jax.Array | np.ndarray):
        return f"an array {x.dtype}{list(x.shape)}"
    return f"{x!r} of type {type(x).__name__}"
