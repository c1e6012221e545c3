"""A torch network of blocks with what makes the inside of a forward hard: a container, keywords,
dropout, statistics, and an activation that writes to its input."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import torch
from torch.utils import _pytree as torch_tree


WIDTH = 8
X = np.linspace(-1, 1, 15, dtype=np.float32).reshape(5, 3)


class Block(torch.nn.Module):
    kind = "residual"

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.fc = torch.nn.Linear(WIDTH, WIDTH)
        self.drop = torch.nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return x + scale * self.drop(torch.tanh(self.fc(self.norm(x))))


class Net(torch.nn.Module):
    def __init__(self, blocks: int = 3, dropout: float = 0.0, statistics: bool = False) -> None:
        super().__init__()
        self.embed = torch.nn.Linear(3, WIDTH)
        self.before = torch.nn.BatchNorm1d(WIDTH) if statistics else torch.nn.Identity()
        self.layers = torch.nn.ModuleList(Block(dropout) for _ in range(blocks))
        self.after = torch.nn.BatchNorm1d(WIDTH) if statistics else torch.nn.Identity()
        self.relu = torch.nn.ReLU(inplace=True)
        self.head = torch.nn.Linear(WIDTH, 2)
        self.config = {"blocks": blocks}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.before(self.embed(x))
        for layer in self.layers:
            h = layer(h, scale=0.5)
        return self.head(self.relu(self.after(h)))


def hooked(net: torch.nn.Module, call: Callable[[], Any]) -> dict[str, list[Any]]:
    """What forward hooks of torch's see of each submodule: args, kwargs and output of each call."""
    seen: dict[str, list[Any]] = {}
    handles = []
    for path, module in net.named_modules():

        def hook(_: Any, args: Any, kwargs: Any, output: Any, path: str = path) -> None:
            seen.setdefault(path, []).append(_copies((args, kwargs, output)))

        if path:
            handles.append(module.register_forward_hook(hook, with_kwargs=True))
    with torch.no_grad():
        call()
    for handle in handles:
        handle.remove()
    return seen


def fresh(state: Any) -> Any:
    """A state like this one; each may be used once."""
    leaves, structure = jax.tree.flatten(state)
    return jax.tree.unflatten(structure, leaves)


def _copies(tree: Any) -> Any:
    return torch_tree.tree_map(
        lambda x: x.detach().clone() if isinstance(x, torch.Tensor) else x, tree
    )
