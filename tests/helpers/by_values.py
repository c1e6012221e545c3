"""Functions the shapes of whose results depend on values, or that read values on the way."""

import jax.numpy as jnp
import numpy as np
import torch


VALUE_DEPENDENT = {
    "item": lambda x: x * x.sum().item(),
    "numpy": lambda x: torch.from_numpy(np.cumsum(x.detach().numpy())),
    "branch": lambda x: x.sin() if x.sum() > 0 else x.cos(),
    "tolist": lambda x: x * len(x.tolist()),
    "loop": lambda x: x * sum(1 for v in x if v < 100),
}

MASK = jnp.array([True, False, True, True])
X = jnp.array([3.0, -1.0, 2.0, 5.0])
BY_VALUES = {
    "nonzero": (torch.nonzero, (MASK,)),
    "argwhere": (torch.argwhere, (X,)),
    "masked_select": (torch.masked_select, (X, MASK)),
    "mask": (lambda x: x[x > 0], (X,)),
    "unique": (torch.unique, (X.round(),)),
    "where": (lambda x: torch.where(x > 0), (X,)),
    "repeat": (lambda x, n: x.repeat_interleave(n), (X, jnp.array([1, 0, 2, 1]))),
    "split": (lambda x, i: torch.tensor_split(x, i.long().cpu()), (X, jnp.array([1, 3]))),
    "lstsq": (lambda a, b: torch.linalg.lstsq(a, b), (jnp.eye(4)[:, :2] + 1, X[:, None])),
    "bincount": (torch.bincount, (jnp.array([0, 2, 2, 5]),)),
    "sliced": (lambda x, n: x[: int(n)], (X, jnp.array(2))),
}
