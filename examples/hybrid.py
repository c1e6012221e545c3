"""A torch network whose middle is an Equinox layer: it fills gaps that torch's layers cannot span.

Signals of a few frequencies have a gap. A torch network of convolutions is to fill it, but sees
only some points to each side. `replace_module` puts an Equinox layer in place of its middle block:
a filter on the Fourier transform of the whole signal. JAX computes it in the middle of torch's
forward, and optax trains all of it at once. The network as it was in torch is trained beside it.

    python examples/hybrid.py

prints the errors inside of the gap, and draws a signal in `examples/out/hybrid.png`.
"""

from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import matplotlib.figure
import numpy as np
import optax
import torch
from jaxtyping import Array, Complex, Float
from tqdm.auto import trange

from eqx_torch import from_torch, replace_module


PICTURE = Path("examples/out/hybrid.png")
POINTS, GAP, CHANNELS = 96, slice(36, 60), 16


class Block(torch.nn.Module):
    """Sees two points to each side."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv1d(CHANNELS, CHANNELS, 5, padding=2, padding_mode="circular")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.nn.functional.gelu(self.conv(x))


def network() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv1d(2, CHANNELS, 1),
        Block(),
        Block(),  # the one that is replaced
        Block(),
        torch.nn.Conv1d(CHANNELS, 1, 1),
    )


class Spectral(eqx.Module):
    """Mixes the channels of each frequency, over the whole length of the signal."""

    real: Float[Array, "frequencies channels channels"]
    imaginary: Float[Array, "frequencies channels channels"]

    def __init__(self, key: jax.Array) -> None:
        shape = (POINTS // 2 + 1, CHANNELS, CHANNELS)
        normal = jax.random.normal(key, (2, *shape)) / CHANNELS
        self.real, self.imaginary = normal

    def __call__(self, x: Float[Array, "batch channels points"]) -> Float[Array, "..."]:
        spectrum: Complex[Array, "..."] = jnp.fft.rfft(x)
        weight = jax.lax.complex(self.real, self.imaginary)
        return x + jnp.fft.irfft(jnp.einsum("bcf,fcd->bdf", spectrum, weight), POINTS)


def signals(random: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Each with its gap and a channel that says where that is; and the whole."""
    time = np.linspace(0, 2 * np.pi, POINTS, endpoint=False)
    frequency = np.arange(1, 5)
    sizes, phases = random.normal(size=(count, 4, 1)), random.uniform(0, 7, (count, 4, 1))
    whole = (sizes * np.sin(frequency[:, None] * time + phases)).sum(1)[:, None] / 2
    known = np.ones_like(whole)
    known[..., GAP] = 0
    return np.concatenate([whole * known, known], 1).astype(np.float32), whole.astype(np.float32)


def error_in_gap(model, x, y):
    return ((model(x) - y)[..., GAP] ** 2).mean()


@eqx.filter_jit
def train_step(model, opt_state, optimizer, x, y):
    loss, grads = eqx.filter_value_and_grad(error_in_gap)(model, x, y)
    updates, opt_state = optimizer.update(grads, opt_state)
    return eqx.apply_updates(model, updates), opt_state, loss


def train(model, steps: int):
    random = np.random.default_rng(0)
    optimizer = optax.adam(optax.cosine_decay_schedule(3e-3, steps))
    opt_state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    for _ in (bar := trange(steps, disable=None)):
        model, opt_state, loss = train_step(model, opt_state, optimizer, *signals(random, 64))
        bar.set_postfix(loss=f"{loss:.4f}", refresh=False)
    return model


def draw(whole, filled: dict[str, np.ndarray], path: Path) -> None:
    figure = matplotlib.figure.Figure(figsize=(8, 4), dpi=120, layout="constrained")
    axes = figure.subplots()
    inside = np.arange(POINTS)[GAP]
    axes.axvspan(inside[0], inside[-1], color="#eeeeee", label="the gap")
    axes.plot(whole, "--", color="#333333", linewidth=1.2, label="truth")
    for (name, y), color in zip(filled.items(), ("#dd8452", "#4c72b0"), strict=True):
        axes.plot(inside, y[GAP], color=color, linewidth=2, label=name)
    axes.set(xlim=(0, POINTS - 1), xlabel="time", ylabel="signal")
    axes.set_title("An Equinox layer in the middle of a torch network sees across the gap")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def main(picture: Path = PICTURE, steps: int = 300) -> dict[str, float]:
    """Trains both; returns their errors inside of the gap."""
    torch.set_num_threads(1)  # the tensors are small
    plain = from_torch(network())
    models = {
        "torch alone": plain,
        "with an Equinox layer": replace_module(plain, "2", Spectral(jax.random.key(0))),
    }
    models = {name: train(model, steps) for name, model in models.items()}
    x, y = signals(np.random.default_rng(1), 200)
    errors = {name: float(error_in_gap(model, x, y)) for name, model in models.items()}
    print()
    for name, error in errors.items():
        print(f"{name:<24}{error / np.var(y[..., GAP]):>6.1%} of the variance in the gap is left")
    draw(y[3, 0], {name: np.asarray(m(x[3:4])[0, 0]) for name, m in models.items()}, picture)
    print(f"\nA signal is in {picture}.")
    return errors


if __name__ == "__main__":
    main()
