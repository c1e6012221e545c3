"""Handwritten digits: one torch network, trained by JAX on four devices and by torch on one.

The network has BatchNorm and dropout. `from_torch` makes an Equinox module of it, whose BatchNorm
statistics live in an `equinox.nn.State` and whose dropout draws from a JAX key. Each batch is split
over a mesh of four simulated CPU devices, the parameters are replicated, and JAX sums the gradients
over the devices. Then plain torch trains the same network, from the same weights, on the same
batches.

    python examples/digits.py

prints one table, draws the loss curves in `examples/out/digits.png`, and records the torch calls of
a few steps: `examples/out/digits_timeline.png` shows what each device did, and
`examples/out/digits_timeline.json` the same to https://ui.perfetto.dev.
"""

import os


# JAX reads this when it is first imported.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")

import contextlib
import copy
import time
from dataclasses import dataclass, field
from pathlib import Path

import equinox as eqx
import jax
import matplotlib.figure
import numpy as np
import optax
import sklearn.datasets
import sklearn.model_selection
import torch
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, Key
from tqdm.auto import tqdm

from eqx_torch import from_torch, Timeline, timeline


DEVICES = 4
PICTURE = Path("examples/out/digits.png")
TIMED_STEPS = 4


@dataclass(frozen=True)
class Settings:
    """What both trainings share."""

    epochs: int = 25
    batch_size: int = 128
    learning_rate: float = 2e-3
    weight_decay: float = 0.1
    dropout: float = 0.5
    seed: int = 0


@dataclass(frozen=True)
class Digits:
    """Images with values from 0 to 1, and the digits that they show."""

    images: Float[np.ndarray, "batch 1 8 8"]
    labels: Int[np.ndarray, " batch"]


@dataclass
class Record:
    """The loss and the duration of each step, and the accuracy in the end.

    JAX's training also has the torch calls of its last steps.
    """

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    accuracy: float = 0.0
    calls: Timeline | None = None

    def add(self, loss: float, start: float) -> None:
        """Notes a step that began at `start` and is done."""
        self.losses.append(loss)
        self.seconds.append(time.perf_counter() - start)


# The data and the network


def load_digits(seed: int) -> tuple[Digits, Digits]:
    """1437 digits to train with and 360 to test with."""
    pixels, labels = sklearn.datasets.load_digits(return_X_y=True)
    images = (pixels / 16).astype(np.float32).reshape(-1, 1, 8, 8)
    train_images, test_images, train_labels, test_labels = sklearn.model_selection.train_test_split(
        images, labels.astype(np.int32), test_size=0.2, random_state=seed, stratify=labels
    )
    return Digits(train_images, train_labels), Digits(test_images, test_labels)


def make_batches(data: Digits, settings: Settings) -> list[Digits]:
    """The batches of all epochs, shuffled; what is left over in an epoch is dropped."""
    random = np.random.default_rng(settings.seed)
    size = settings.batch_size
    orders = [random.permutation(len(data.labels)) for _ in range(settings.epochs)]
    picks = [order[i : i + size] for order in orders for i in range(0, len(order) - size + 1, size)]
    return [Digits(data.images[pick], data.labels[pick]) for pick in picks]


def make_network(settings: Settings) -> torch.nn.Module:
    """A small convolutional network, in torch."""
    torch.manual_seed(settings.seed)
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 32, kernel_size=3, padding=1, bias=False),  # BatchNorm has one
        torch.nn.BatchNorm2d(32),
        torch.nn.SiLU(),
        torch.nn.Conv2d(32, 64, kernel_size=3, stride=2, padding=1, bias=False),
        torch.nn.BatchNorm2d(64),
        torch.nn.SiLU(),
        torch.nn.Flatten(),
        torch.nn.Dropout(settings.dropout),
        torch.nn.Linear(64 * 4 * 4, 10),
    )


# The training by JAX


def loss_fn(
    model: eqx.nn.StatefulLayer,
    state: eqx.nn.State,
    images: Float[Array, "batch 1 8 8"],
    labels: Int[Array, " batch"],
    key: Key[Array, ""],
) -> tuple[Float[Array, ""], eqx.nn.State]:
    """The mean loss of a batch, and the state with new BatchNorm statistics."""
    logits, state = model(images, state=state, key=key)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), state


@eqx.filter_jit
def train_step(model, state, opt_state, optimizer, images, labels, key):
    """One step of the optimizer: the new model, state and optimizer state, and the loss."""
    value_and_grad = eqx.filter_value_and_grad(loss_fn, has_aux=True)
    (loss, state), grads = value_and_grad(model, state, images, labels, key)
    params = eqx.filter(model, eqx.is_inexact_array)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return eqx.apply_updates(model, updates), state, opt_state, loss


@eqx.filter_jit
def accuracy(model, state, images, labels):
    """The part of a data set that is classified correctly, by the model in evaluation mode."""
    logits, _ = eqx.nn.inference_mode(model)(images, state=state)
    return (logits.argmax(axis=-1) == labels).mean()


def begin(network: torch.nn.Module, settings: Settings):
    """The optimizer and, replicated over the mesh in force, the model and what goes with it."""
    example = torch.zeros(settings.batch_size, 1, 8, 8)
    model, state = eqx.nn.make_with_state(from_torch)(network, example, out_specs=P("batch"))
    optimizer = optax.adamw(settings.learning_rate, weight_decay=settings.weight_decay)
    opt_state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    return optimizer, eqx.filter_shard((model, state, opt_state), P())


def train_with_jax(
    network: torch.nn.Module, train: list[Digits], test: Digits, settings: Settings
) -> Record:
    """Trains the converted network on the devices of the mesh in force (`jax.set_mesh`)."""
    optimizer, (model, state, opt_state) = begin(network, settings)
    keys = jax.random.split(jax.random.key(settings.seed), len(train))

    record = Record()
    with contextlib.ExitStack() as stack:
        for step, (batch, key) in enumerate(
            zip(tqdm(train, desc="JAX", disable=None), keys, strict=True)
        ):
            if step == max(0, len(train) - TIMED_STEPS):
                record.calls = stack.enter_context(timeline())
            start = time.perf_counter()
            images, labels = jax.device_put((batch.images, batch.labels), P("batch"))  # split
            model, state, opt_state, loss = train_step(
                model, state, opt_state, optimizer, images, labels, key
            )
            record.add(float(loss), start)
        jax.block_until_ready(opt_state)  # the loss is there before the gradients are

    images, labels = jax.device_put((test.images, test.labels), P("batch"))
    record.accuracy = float(accuracy(model, state, images, labels))
    return record


# The training by torch


def train_with_torch(
    network: torch.nn.Module, train: list[Digits], test: Digits, settings: Settings
) -> Record:
    """Trains a copy of the network as torch programs do."""
    network = copy.deepcopy(network)
    optimizer = torch.optim.AdamW(
        network.parameters(), settings.learning_rate, weight_decay=settings.weight_decay
    )

    record = Record()
    for batch in tqdm(train, desc="torch", disable=None):
        start = time.perf_counter()
        images, labels = torch.from_numpy(batch.images), torch.from_numpy(batch.labels).long()
        loss = torch.nn.functional.cross_entropy(network(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        record.add(loss.item(), start)

    with torch.no_grad():
        predicted = network.eval()(torch.from_numpy(test.images)).argmax(dim=-1)
    record.accuracy = float((predicted.numpy() == test.labels).mean())
    return record


# What is shown


def print_table(records: dict[str, Record]) -> None:
    """One line for each training, with the median duration of a step."""
    print(f"\n{'trained by':<20}{'test accuracy':>15}{'seconds per step':>17}")
    for name, record in records.items():
        print(f"{name:<20}{record.accuracy:>15.1%}{np.median(record.seconds):>17.4f}")


def draw(records: dict[str, Record], path: Path) -> None:
    """The losses as faint points, and the means of steps nearby as lines."""
    figure = matplotlib.figure.Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    axes = figure.subplots()
    for (name, record), colour in zip(records.items(), ("#4c72b0", "#dd8452"), strict=True):
        steps = np.arange(1, len(record.losses) + 1)
        axes.plot(steps, record.losses, ".", color=colour, markersize=3, alpha=0.3)
        label = f"{name}: {record.accuracy:.1%} of test digits right"
        axes.plot(steps, smoothed(record.losses), color=colour, linewidth=2, label=label)
    axes.set_yscale("log")
    axes.set_xlabel("step")
    axes.set_ylabel("training loss (cross entropy)")
    axes.set_title("The same torch network learns handwritten digits alike under JAX and torch")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def show_calls(calls: Timeline, stem: Path) -> None:
    """A picture of the torch calls, and a file for https://ui.perfetto.dev."""
    calls.plot(stem.with_suffix(".png"))
    calls.save(stem.with_suffix(".json"))
    print(f"\n{calls}\n")


def smoothed(losses: list[float], radius: int = 10) -> Float[np.ndarray, " steps"]:
    """The geometric mean over each step and `radius` steps on both sides, as far as there are any.

    At the beginning, where the losses fall steeply, the window stays symmetric.
    """
    logs = np.log(losses)
    radii = [min(i, radius) for i in range(len(logs))]
    return np.exp([logs[i - r : i + r + 1].mean() for i, r in enumerate(radii)])


def main(settings: Settings) -> None:
    """Trains both ways, and shows how they went."""
    train, test = load_digits(settings.seed)
    batches = make_batches(train, settings)
    network = make_network(settings)

    torch.set_num_threads(1)  # JAX calls torch from a thread of its own for each device
    with jax.set_mesh(jax.make_mesh((DEVICES,), ("batch",), devices=jax.devices()[:DEVICES])):
        by_jax = train_with_jax(network, batches, test, settings)
    by_torch = train_with_torch(network, batches, test, settings)

    records = {f"JAX on {DEVICES} devices": by_jax, "torch on 1 device": by_torch}
    print_table(records)
    draw(records, PICTURE)
    stem = PICTURE.with_name("digits_timeline")
    show_calls(by_jax.calls, stem)
    print(f"The loss curves are in {PICTURE}, the torch calls of the last steps in {stem}.png.")


if __name__ == "__main__":
    main(Settings())
