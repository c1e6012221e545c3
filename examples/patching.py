"""Where in a transformer is the answer? Activation patching between two inputs, drawn as a map.

A small torch transformer reads six digits and a pointer, and has to say the digit that is pointed
at. Once it is trained, one digit is changed, and with it the answer. Then the hidden state after
one block, at one place of the sequence, is put back to what it was for the first input
(`capture` reads it, `patch` writes it), and the change of the answer shows what that state knows:
at first it is at the place of the digit, and after some block at the place of the pointer.

    python examples/patching.py

prints the map and draws it in `examples/out/patching.png`.
"""

from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import matplotlib.figure
import numpy as np
import optax
import torch
from jaxtyping import Array, Float, Int
from tqdm.auto import trange

from eqx_torch import capture, from_torch, patch


PICTURE = Path("examples/out/patching.png")
LENGTH, BLOCKS, WIDTH = 6, 4, 32


class Block(torch.nn.Module):
    """Attention and a perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm2 = torch.nn.LayerNorm(WIDTH), torch.nn.LayerNorm(WIDTH)
        self.qkv = torch.nn.Linear(WIDTH, 3 * WIDTH)
        self.up, self.down = torch.nn.Linear(WIDTH, 64), torch.nn.Linear(64, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + torch.nn.functional.scaled_dot_product_attention(q, k, v)
        return x + self.down(torch.relu(self.up(self.norm2(x))))


class Reader(torch.nn.Module):
    """Digits are the tokens 0 to 9, the pointer to place `i` is the token 10 + `i`."""

    def __init__(self) -> None:
        super().__init__()
        self.token = torch.nn.Embedding(10 + LENGTH, WIDTH)
        self.place = torch.nn.Parameter(0.5 * torch.randn(LENGTH + 1, WIDTH))
        self.blocks = torch.nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = torch.nn.Linear(WIDTH, 10)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens) + self.place
        for block in self.blocks:
            x = block(x)
        return self.head(x[:, -1])


def batch(random: np.random.Generator, size: int) -> tuple[Int[np.ndarray, "b n"], np.ndarray]:
    """Random digits with a pointer, and the digits pointed at."""
    digits, pointer = random.integers(0, 10, (size, LENGTH)), random.integers(0, LENGTH, size)
    return np.c_[digits, 10 + pointer].astype(np.int32), digits[np.arange(size), pointer]


def loss_fn(model, tokens, answers):
    return optax.softmax_cross_entropy_with_integer_labels(model(tokens), answers).mean()


@eqx.filter_jit
def train_step(model, opt_state, optimizer, tokens, answers):
    loss, grads = eqx.filter_value_and_grad(loss_fn)(model, tokens, answers)
    updates, opt_state = optimizer.update(grads, opt_state)
    return eqx.apply_updates(model, updates), opt_state, loss


@eqx.filter_jit
def patched_logits(model, block: str, clean: Float[Array, "1 n w"], corrupt: Int[Array, "1 n"]):
    """The logits for `corrupt` with one place of the output of `block` as it was in `clean`."""

    def at(place):
        return patch(model, {block: lambda h: h.at[:, place].set(clean[:, place])})(corrupt)[0]

    return jax.lax.map(at, jnp.arange(LENGTH + 1))


def recovery(model, tokens: Int[np.ndarray, " n"], changed: int) -> Float[np.ndarray, "blocks n"]:
    """How much of the answer to `tokens` each state brings back: 0 is nothing, 1 is all of it."""
    clean, place = tokens[None], tokens[-1] - 10
    corrupt = clean.copy()
    corrupt[0, place] = changed
    right, hidden = eqx.filter_jit(capture(model, "blocks.*"))(clean)
    wrong = eqx.filter_jit(model)(corrupt)
    score = lambda logits: logits[..., clean[0, place]] - logits[..., changed]  # noqa: E731
    low, high = score(wrong[0]), score(right[0])
    patched = [patched_logits(model, name, h, corrupt) for name, h in hidden.items()]
    return np.asarray((score(jnp.stack(patched)) - low) / (high - low))


def draw(recovered, tokens, path: Path) -> None:
    figure = matplotlib.figure.Figure(figsize=(7, 4), dpi=120, layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(recovered, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    places = [*map(str, tokens[:-1]), f"pointer to\nplace {tokens[-1] - 9}"]
    axes.set_xticks(range(LENGTH + 1), places)
    axes.set_yticks(range(BLOCKS), [f"after block {i + 1}" for i in range(BLOCKS)])
    for (row, column), value in np.ndenumerate(recovered):
        color = "white" if value > 0.6 else "#333333"
        axes.text(column, row, f"{value:.0%}", ha="center", va="center", color=color)
    axes.set_title("How much of the answer a hidden state brings back")
    axes.set_xlabel("the digits, and what is asked")
    figure.colorbar(image, ax=axes, format=lambda x, _: f"{x:.0%}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def main(picture: Path = PICTURE, steps: int = 300) -> dict[str, float]:
    """Trains, patches, draws; returns what it measured."""
    torch.set_num_threads(1)  # the tensors are small
    torch.manual_seed(0)
    random = np.random.default_rng(0)
    model = from_torch(Reader())
    optimizer = optax.adam(optax.cosine_decay_schedule(3e-3, steps))
    opt_state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    for _ in (bar := trange(steps, disable=None)):
        model, opt_state, loss = train_step(model, opt_state, optimizer, *batch(random, 128))
        bar.set_postfix(loss=f"{loss:.4f}", refresh=False)
    tokens, answers = batch(random, 1000)
    accuracy = float((model(tokens).argmax(-1) == answers).mean())

    tokens = np.array([3, 1, 4, 7, 5, 9, 12], np.int32)  # asks for the third digit
    recovered = recovery(model, tokens, changed=8)
    print(f"\nIt names {accuracy:.0%} of the digits. What brings the answer back:")
    print(f"{'':<16}" + "".join(f"{t:>8}" for t in tokens[:-1]) + f"{'pointer':>10}")
    for i, row in enumerate(recovered):
        print(
            f"after block {i + 1:<4}"
            + "".join(f"{v:>8.0%}" for v in row[:-1])
            + f"{row[-1]:>10.0%}"
        )
    draw(recovered, tokens, picture)
    print(f"\nThe map is in {picture}.")
    return {
        "accuracy": accuracy,
        "at the digit first": float(recovered[0, 2]),
        "at the pointer last": float(recovered[-1, -1]),
        "elsewhere": float(np.abs(recovered[:, [0, 1, 3, 4, 5]]).max()),
    }


if __name__ == "__main__":
    main()
