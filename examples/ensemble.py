"""How sure is the network? An ensemble of torch networks, trained by one JAX program.

`stack_modules` makes one model of sixteen conversions of a torch module with different random
weights: each parameter has a leading axis. `eqx.filter_vmap` trains and evaluates all of them at
once, by one batched torch call each time. Every member is the sum of a network that is trained and
of a random one that is frozen (a randomized prior, Osband et al. 2018). The first makes up for the
second where there are measurements; elsewhere the members disagree, and their spread says so.

    python examples/ensemble.py

prints how far apart the members are where there are data and where there are none, and draws them
in `examples/out/ensemble.png`.
"""

from pathlib import Path

import equinox as eqx
import jax.numpy as jnp
import matplotlib.figure
import numpy as np
import optax
import torch
from jaxtyping import Array, Float, PyTree
from tqdm.auto import trange

from eqx_torch import from_torch, stack_modules, trainable


PICTURE = Path("examples/out/ensemble.png")
NOISE = 0.1
MEASURED = ((-4.0, -1.5), (0.5, 4.0))  # there are no data between, before and after these


def truth(x: np.ndarray) -> np.ndarray:
    """What is measured."""
    return np.sin(1.5 * x) + 0.3 * x


def measure(count: int) -> tuple[Float[Array, "count 1"], Float[Array, "count 1"]]:
    """Points at random places, with noise."""
    random = np.random.default_rng(0)
    x = np.concatenate([random.uniform(*ends, count // 2) for ends in MEASURED])
    y = truth(x) + NOISE * random.standard_normal(x.size)
    return jnp.asarray(x[:, None], jnp.float32), jnp.asarray(y[:, None], jnp.float32)


class Member(torch.nn.Module):
    """A network that is trained, on top of a random one that stays as it is."""

    def __init__(self, seed: int, std: float = 2.0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.learned, self.prior = self.network(), self.network().requires_grad_(False)
        for layer in self.prior[::2]:
            torch.nn.init.normal_(layer.weight, std=std / layer.in_features**0.5)
            torch.nn.init.normal_(layer.bias, std=std)

    @staticmethod
    def network() -> torch.nn.Sequential:
        return torch.nn.Sequential(
            torch.nn.Linear(1, 64),
            torch.nn.Tanh(),
            torch.nn.Linear(64, 64),
            torch.nn.Tanh(),
            torch.nn.Linear(64, 1),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.learned(x) + self.prior(x)


def loss_fn(
    trained: PyTree, frozen: PyTree, x: Float[Array, "batch 1"], y: Float[Array, "batch 1"]
) -> Float[Array, ""]:
    """Of one member; there is no sign of the ensemble in it."""
    return ((eqx.combine(trained, frozen)(x) - y) ** 2).mean()


@eqx.filter_jit
def train_step(trained, frozen, opt_state, optimizer, x, y):
    """One step of every member."""
    members = (eqx.if_array(0), eqx.if_array(0), None, None)
    value_and_grad = eqx.filter_vmap(eqx.filter_value_and_grad(loss_fn), in_axes=members)
    losses, grads = value_and_grad(trained, frozen, x, y)
    updates, opt_state = optimizer.update(grads, opt_state)
    return eqx.apply_updates(trained, updates), opt_state, losses


@eqx.filter_jit
def predict(ensemble, x):
    """The prediction of each member, of shape (members, batch)."""
    call = eqx.filter_vmap(lambda model, x: model(x), in_axes=(eqx.if_array(0), None))
    return call(ensemble, x)[..., 0]


def draw(x, y, places, predictions, path: Path) -> None:
    """Data, truth, members, and the band of two standard deviations around their mean."""
    figure = matplotlib.figure.Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    axes = figure.subplots()
    mean, spread = predictions.mean(axis=0), predictions.std(axis=0)
    blue = "#4c72b0"
    band = {"color": blue, "alpha": 0.2, "linewidth": 0, "label": "± 2 standard deviations"}
    axes.fill_between(places, mean - 2 * spread, mean + 2 * spread, **band)
    axes.plot(places, predictions.T, color=blue, linewidth=0.5, alpha=0.4)
    axes.plot(places, mean, color=blue, linewidth=2, label="mean of the members")
    axes.plot(places, truth(places), "--", color="#333333", linewidth=1.2, label="truth")
    axes.plot(x, y, "o", color="#dd8452", markersize=4, label="data")
    axes.set(xlim=(places[0], places[-1]), ylim=(-4, 4.5), xlabel="x", ylabel="y")
    axes.set_title(f"{len(predictions)} torch networks agree where there are data")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def main(picture: Path = PICTURE, members: int = 16, steps: int = 1000) -> dict[str, float]:
    """Trains and predicts; returns what it measured."""
    torch.set_num_threads(1)  # the tensors are small
    x, y = measure(60)
    ensemble = stack_modules([from_torch(Member(seed)) for seed in range(members)])
    trained, frozen = eqx.partition(ensemble, trainable(ensemble))
    optimizer = optax.adam(optax.cosine_decay_schedule(1e-2, steps))
    opt_state = optimizer.init(trained)
    for _ in (bar := trange(steps, disable=None)):
        trained, opt_state, losses = train_step(trained, frozen, opt_state, optimizer, x, y)
        bar.set_postfix(loss=f"{losses.mean():.4f}", refresh=False)
    ensemble = eqx.combine(trained, frozen)

    places = np.linspace(-5.5, 5.5, 301, dtype=np.float32)
    predictions = np.asarray(predict(ensemble, jnp.asarray(places[:, None])))
    spread = predictions.std(axis=0)
    error = np.abs(predictions.mean(axis=0) - truth(places))
    known = np.any([(places > a) & (places < b) for a, b in MEASURED], axis=0)

    print(f"\n{'':<16}{'spread':>8}{'error':>8}")
    for name, where in {"with data": known, "without data": ~known}.items():
        print(f"{name:<16}{spread[where].mean():>8.3f}{error[where].mean():>8.3f}")
    draw(x, y, places, predictions, picture)
    print(f"\nThe members are in {picture}.")
    return {
        "loss": float(losses.mean()),
        "spread with data": float(spread[known].mean()),
        "spread without": float(spread[~known].mean()),
        "error with data": float(error[known].mean()),
    }


if __name__ == "__main__":
    main()
