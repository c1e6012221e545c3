"""A torch transformer learns a second task by low-rank updates (LoRA), on four devices.

A transformer is trained to sort six digits. Then it is frozen, and `reparametrise` adds to each
matrix of its blocks the product of two thin ones, which are all that is trained to make it sort the
other way round. `fsdp` leaves on each of the four devices a quarter of the frozen matrices, and
`to_torch` gives back a torch module that has the updates in its weights.

    python examples/lora.py

prints how many digits each is right about, and how many numbers were trained.
"""

import os


# JAX reads this when it is first imported.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float
from tqdm.auto import trange

from eqx_torch import from_torch, fsdp, reparametrise, select, to_torch, trainable


DEVICES, LENGTH, WIDTH, BLOCKS = 4, 6, 64, 2


class Block(torch.nn.Module):
    """Attention and a perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm2 = torch.nn.LayerNorm(WIDTH), torch.nn.LayerNorm(WIDTH)
        self.qkv, self.out = torch.nn.Linear(WIDTH, 3 * WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        self.up, self.down = torch.nn.Linear(WIDTH, 2 * WIDTH), torch.nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = [
            a.unflatten(-1, (4, -1)).transpose(1, 2) for a in self.qkv(self.norm(x)).chunk(3, -1)
        ]
        x = x + self.out(
            torch.nn.functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
        )
        return x + self.down(torch.relu(self.up(self.norm2(x))))


class Sorter(torch.nn.Module):
    """The logits of each digit of the sorted sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.token = torch.nn.Embedding(10, WIDTH)
        self.place = torch.nn.Parameter(0.5 * torch.randn(LENGTH, WIDTH))
        self.blocks = torch.nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = torch.nn.Linear(WIDTH, 10)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens) + self.place
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class LowRank(eqx.Module):
    """At first it changes nothing, as one factor is zero."""

    a: Float[Array, "rank m"]
    b: Float[Array, "n rank"]

    def __init__(self, weight: Float[Array, "n m"], rank: int, key: jax.Array) -> None:
        n, m = weight.shape
        self.a, self.b = jax.random.normal(key, (rank, m)) / m**0.5, jnp.zeros((n, rank))

    def __call__(self, weight: Float[Array, "n m"]) -> Float[Array, "n m"]:
        return weight + self.b @ self.a


def with_updates(model, patterns: list[str], rank: int, key: jax.Array):
    """The model with a low-rank update of each parameter that the patterns name."""
    names = [name for name, chosen in select(model, patterns).params.items() if chosen]
    keys = jax.random.split(key, len(names))
    updates = {n: LowRank(model.params[n], rank, k) for n, k in zip(names, keys, strict=True)}
    return reparametrise(model, updates)


def loss_fn(trained, frozen, tokens, answers):
    logits = eqx.combine(trained, frozen)(tokens)
    return optax.softmax_cross_entropy_with_integer_labels(logits, answers).mean()


@eqx.filter_jit
def train_step(trained, frozen, opt_state, optimizer, tokens, answers):
    loss, grads = eqx.filter_value_and_grad(loss_fn)(trained, frozen, tokens, answers)
    updates, opt_state = optimizer.update(grads, opt_state)
    return eqx.apply_updates(trained, updates), opt_state, loss


def batch(random: np.random.Generator, size: int, descending: bool):
    tokens = random.integers(0, 10, (size, LENGTH)).astype(np.int32)
    answers = np.sort(tokens)[:, ::-1] if descending else np.sort(tokens)
    return jax.device_put((tokens, answers), P("batch"))


def train(model, steps: int, descending: bool, rate: float):
    random = np.random.default_rng(0)
    trained, frozen = eqx.partition(model, trainable(model))
    optimizer = optax.adam(optax.cosine_decay_schedule(rate, steps))
    opt_state = optimizer.init(trained)
    for _ in (bar := trange(steps, disable=None)):
        data = batch(random, 128, descending)
        trained, opt_state, loss = train_step(trained, frozen, opt_state, optimizer, *data)
        bar.set_postfix(loss=f"{loss:.4f}", refresh=False)
    return eqx.combine(trained, frozen)


def accuracy(model, descending: bool) -> float:
    tokens, answers = batch(np.random.default_rng(1), 1000, descending)
    return float((eqx.filter_jit(model)(tokens).argmax(-1) == answers).mean())


def count(tree) -> int:
    return sum(a.size for a in jax.tree.leaves(eqx.filter(tree, eqx.is_inexact_array)))


def main(steps: int = 400, rank: int = 4) -> dict[str, float]:
    """Trains both; returns what it measured."""
    torch.set_num_threads(1)  # one core for each device
    torch.manual_seed(0)
    jax.set_mesh(jax.make_mesh((DEVICES,), ("batch",)))
    base = train(from_torch(Sorter(), out_specs=P("batch")), steps, descending=False, rate=3e-3)

    frozen = from_torch(to_torch(base).requires_grad_(False), out_specs=P("batch"))
    updated = with_updates(
        frozen,
        [f"blocks.*.{n}.weight" for n in ("qkv", "out", "up", "down")],
        rank,
        jax.random.key(0),
    )
    updated = train(fsdp(updated, "batch"), steps, descending=True, rate=1e-2)
    merged = from_torch(to_torch(updated), out_specs=P("batch"))

    trained = count(eqx.filter(updated, trainable(updated)))
    figures = {
        "ascending": accuracy(base, descending=False),
        "descending without": accuracy(base, descending=True),
        "descending": accuracy(updated, descending=True),
        "merged": accuracy(merged, descending=True),
        "trained": trained / count(base),
    }
    print(f"\nsorts up, all {count(base):,} numbers trained:     {figures['ascending']:.0%}")
    print(f"sorts down, as it is:                     {figures['descending without']:.0%}")
    print(f"sorts down, {trained:,} numbers trained:        {figures['descending']:.0%}")
    print(f"the same in torch's weights:              {figures['merged']:.0%}")
    return figures


if __name__ == "__main__":
    main()
