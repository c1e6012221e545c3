"""The networks that are trained, each with data and its loss in both libraries.

All are small enough for a step to take 0.2 to 100 ms on two cores, so that what a call costs shows.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import torch
from torch import nn


@dataclasses.dataclass(frozen=True)
class Task:
    """A network to train on one batch, again and again."""

    name: str
    build: Callable[[], nn.Module]
    data: Callable[[], tuple[torch.Tensor, torch.Tensor]]
    torch_loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    jax_loss: Callable[[jax.Array, jax.Array], jax.Array]

    def start(self) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
        """The network, the input and the target; the same in each call."""
        torch.manual_seed(0)
        return self.build(), *self.data()


def squares(y: jax.Array, target: jax.Array) -> jax.Array:
    """As `torch.nn.functional.mse_loss`."""
    return jnp.mean((y - target) ** 2)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """As `torch.nn.functional.cross_entropy` of logits whose last axis are the classes."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def torch_cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten())


def regression(name: str, build: Callable[[], nn.Module], *shapes: tuple[int, ...]) -> Task:
    """A task with normal inputs and targets of these two shapes."""

    def data() -> tuple[torch.Tensor, torch.Tensor]:
        x, target = (torch.randn(shape) for shape in shapes)
        return x, target

    return Task(name, build, data, nn.functional.mse_loss, squares)


def mlp(width: int, batch: int) -> Task:
    """Three linear layers of one width, with SiLU between."""

    def build() -> nn.Module:
        layers: list[nn.Module] = [nn.Linear(width, width)]
        for _ in range(2):
            layers += [nn.SiLU(), nn.Linear(width, width)]
        return nn.Sequential(*layers)

    return regression(f"MLP {width}, batch {batch}", build, (batch, width), (batch, width))


def encoder_layer(width: int) -> nn.Module:
    """A transformer layer with heads 32 wide, without dropout."""
    return nn.TransformerEncoderLayer(
        width, width // 32, 4 * width, dropout=0.0, batch_first=True, norm_first=True
    )


def transformer_layer(width: int, batch: int = 8, length: int = 64) -> Task:
    shape = (batch, length, width)
    return regression(f"transformer layer {width}", lambda: encoder_layer(width), shape, shape)


def convolutions(batch: int = 16, size: int = 32) -> Task:
    """Three convolutions, the second and third with stride 2."""

    def build() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 32, 3, stride=2, padding=1),
        )

    shapes = (batch, 3, size, size), (batch, 32, size // 4, size // 4)
    return regression("3 convolutions", build, *shapes)


class Transformer(nn.Module):
    """Tokens to logits: embedding, layers, head."""

    def __init__(self, layers: int, width: int, words: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.layers = nn.ModuleList(encoder_layer(width) for _ in range(layers))
        self.head = nn.Linear(width, words)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def transformer(
    layers: int = 4, width: int = 256, words: int = 512, batch: int = 8, length: int = 64
) -> Task:
    """The next token of a sequence, from all of it (that it is easy does not matter)."""

    def data() -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.randint(words, (batch, length + 1), dtype=torch.int32)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].long()

    return Task(
        f"{layers}-layer transformer",
        lambda: Transformer(layers, width, words),
        data,
        torch_cross_entropy,
        cross_entropy,
    )


class ResidualBlock(nn.Module):
    """Two convolutions with BatchNorm and a shortcut, which is 1x1 where the shape changes."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, out, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(out),
            nn.ReLU(),
            nn.Conv2d(out, out, 3, padding=1, bias=False),
            nn.BatchNorm2d(out),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != out:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.relu(self.body(x) + self.shortcut(x))


def resnet(
    widths: tuple[int, ...] = (16, 32, 64), depth: int = 2, batch: int = 16, size: int = 32
) -> Task:
    """The ResNet of the CIFAR experiments, 14 layers deep by default."""

    def build() -> nn.Module:
        first = widths[0]
        stem = [nn.Conv2d(3, first, 3, padding=1, bias=False), nn.BatchNorm2d(first), nn.ReLU()]
        blocks, channels = [], first
        for stage, width in enumerate(widths):
            for i in range(depth):
                blocks.append(ResidualBlock(channels, width, 2 if stage and not i else 1))
                channels = width
        head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10)]
        return nn.Sequential(*stem, *blocks, *head)

    def data() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(batch, 3, size, size), torch.randint(10, (batch,))

    return Task("ResNet, BatchNorm", build, data, torch_cross_entropy, cross_entropy)


def tasks() -> list[Task]:
    """What `train_step` trains."""
    return [
        mlp(64, 32),
        mlp(512, 128),
        mlp(1024, 512),
        transformer_layer(128),
        transformer_layer(256),
        convolutions(),
        transformer(),
        resnet(),
    ]


def small_tasks() -> list[Task]:
    """One of each kind that takes no time."""
    return [
        mlp(8, 4),
        transformer_layer(32, batch=2, length=4),
        convolutions(batch=2, size=8),
        transformer(layers=1, width=32, words=11, batch=2, length=4),
        resnet((4, 8), depth=1, batch=4, size=8),
    ]


def floats(tree: dict[str, Any]) -> dict[str, Any]:
    """The entries with floating dtypes."""
    return {name: x for name, x in tree.items() if x.is_floating_point()}
