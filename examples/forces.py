"""Argon melts: an interatomic energy in torch, its forces by `jax.grad`, dynamics by JAX.

The energy is a torch module as potentials are written there: it searches the neighbours of each
atom within a cutoff, whose number changes from step to step, and sums over the pairs. `from_torch`
makes a JAX function of it, `jax.value_and_grad` gives energy and forces by one forward and one
backward of torch, and `jax.lax.scan` runs velocity Verlet, compiled as a whole. Nothing but the
integrator keeps the energy constant: if the forces were not the gradient of the energy, it would
drift.

    python examples/forces.py

simulates eight picoseconds of a cold crystal and of one with so much heat in it that it melts, and
draws both in `examples/out/forces.png`.
"""

from dataclasses import dataclass
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import matplotlib.figure
import numpy as np
import torch
from jaxtyping import Array, Float, Float64
from tqdm.auto import trange

from eqx_torch import from_torch


PICTURE = Path("examples/out/forces.png")

# Electronvolts, angstroms and femtoseconds; a mass of one unit is then this many eV (fs / A)**2.
MASS = 39.948 * 103.64269
BOLTZMANN = 8.617333e-5
CELLS, CELL = 3, 5.6  # cells of the crystal in each direction, with four atoms at these places
PLACES = np.array([[0, 0, 0], [0, 0.5, 0.5], [0.5, 0, 0.5], [0.5, 0.5, 0]])


class LennardJones(torch.nn.Module):
    """Argon in a periodic box. From `inner` to `cutoff` the energy of a pair goes smoothly to 0."""

    def __init__(self, box: float, inner: float = 6.5, cutoff: float = 7.5) -> None:
        super().__init__()
        self.box, self.inner, self.cutoff = box, inner, cutoff
        self.depth = torch.nn.Parameter(torch.tensor(0.01032))
        self.diameter = torch.nn.Parameter(torch.tensor(3.405))

    def forward(self, positions: Float64[torch.Tensor, "atoms 3"]) -> Float64[torch.Tensor, ""]:
        i, j = self.neighbours(positions.detach())
        distances = self.wrapped(positions[i] - positions[j]).norm(dim=-1)
        power = (self.diameter / distances) ** 6
        t = ((distances - self.inner) / (self.cutoff - self.inner)).clamp(min=0)
        smooth = 1 - t**3 * (10 - 15 * t + 6 * t**2)
        return (4 * self.depth * (power**2 - power) * smooth).sum()

    def neighbours(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The pairs of atoms that are nearer than the cutoff: as many as there are."""
        near = self.wrapped(positions[:, None] - positions).square().sum(-1) < self.cutoff**2
        return near.triu(diagonal=1).nonzero(as_tuple=True)

    def wrapped(self, vectors: torch.Tensor) -> torch.Tensor:
        """To the nearest periodic image."""
        return vectors - self.box * (vectors / self.box).round()


def crystal(cells: int, temperature: float) -> tuple[Float[Array, "atoms 3"], Float[Array, "..."]]:
    """Positions of a perfect crystal, and random velocities without a total momentum."""
    corners = np.stack(np.meshgrid(*[np.arange(cells)] * 3), axis=-1).reshape(-1, 1, 3)
    positions = CELL * jnp.asarray((corners + PLACES).reshape(-1, 3))
    speed = np.sqrt(BOLTZMANN * temperature / MASS)
    velocities = speed * jax.random.normal(jax.random.key(0), positions.shape)
    return positions, velocities - velocities.mean(axis=0)


@eqx.filter_jit
def simulate(energy, positions, velocities, step, length):
    """Velocity Verlet; also the kinetic and the potential energy after each step."""
    value_and_grad = jax.value_and_grad(energy)

    def verlet(carry, _):
        positions, velocities, grad = carry
        velocities = velocities - step / 2 * grad / MASS
        positions = positions + step * velocities
        potential, grad = value_and_grad(positions)
        velocities = velocities - step / 2 * grad / MASS
        return (positions, velocities, grad), (MASS / 2 * (velocities**2).sum(), potential)

    carry = positions, velocities, value_and_grad(positions)[1]
    (positions, velocities, _), energies = jax.lax.scan(verlet, carry, length=length)
    return positions, velocities, jnp.stack(energies)


@dataclass(frozen=True)
class Run:
    """What happened: positions at the start and after each chunk, energies after each step."""

    frames: Float[np.ndarray, "frames atoms 3"]
    kinetic: Float[np.ndarray, " steps"]
    potential: Float[np.ndarray, " steps"]

    @property
    def drift(self) -> Float[np.ndarray, " steps"]:
        """How far the total energy is from what it was after the first step."""
        total = self.kinetic + self.potential
        return total - total[0]

    @property
    def temperature(self) -> float:
        """In the second half."""
        half = self.kinetic[len(self.kinetic) // 2 :]
        return float(half.mean() / (1.5 * BOLTZMANN * self.frames.shape[1]))

    @property
    def displacement(self) -> float:
        """How far an atom is in the end from its place in the crystal, as a root mean square."""
        moved = self.frames[-1] - self.frames[0]
        return float(np.sqrt((moved**2).sum(-1).mean()))


def run(energy, cells: int, temperature: float, step: float, chunks: int, chunk: int) -> Run:
    """Starts from a crystal, and keeps its state once a chunk."""
    positions, velocities = crystal(cells, temperature)
    frames, energies = [np.asarray(positions)], []
    for _ in trange(chunks, desc=f"crystal at {temperature:g} K", disable=None):
        positions, velocities, some = simulate(energy, positions, velocities, step, chunk)
        frames.append(np.asarray(positions))
        energies.append(np.asarray(some))
    return Run(np.stack(frames), *np.concatenate(energies, axis=1))


def pair_density(frames: Float[np.ndarray, "frames atoms 3"], box: float, bins: np.ndarray):
    """How many atoms are at a distance from another, against what chance would put there."""
    i, j = np.triu_indices(frames.shape[1], 1)
    vectors = frames[:, i] - frames[:, j]
    distances = np.linalg.norm(vectors - box * np.round(vectors / box), axis=-1)
    expected = distances.size * 4 / 3 * np.pi * np.diff(bins**3) / box**3
    return np.histogram(distances, bins)[0] / expected


def draw(runs: dict[str, Run], box: float, step: float, path: Path) -> None:
    """The energies of the last run over time, and how far apart the atoms are in all."""
    figure = matplotlib.figure.Figure(figsize=(10, 4.6), dpi=110, layout="constrained")
    parts = figure.subplot_mosaic(
        [["energies", "distances"], ["drift", "distances"]],
        width_ratios=(3, 2),
        height_ratios=(3, 1),
    )
    *_, shown = runs.values()
    times = step / 1000 * np.arange(1, len(shown.kinetic) + 1)
    top, below, right = parts["energies"], parts["drift"], parts["distances"]
    for name, energy, colour in (
        ("kinetic", shown.kinetic, "#dd8452"),
        ("total", shown.kinetic + shown.potential, "#333333"),
        ("potential", shown.potential, "#4c72b0"),
    ):
        top.plot(times, energy, color=colour, linewidth=2 if name == "total" else 1)
        above = (0, 8 if name == "total" else 14)
        top.annotate(
            name,
            (times[-1], energy[-1]),
            above,
            textcoords="offset points",
            ha="right",
            color=colour,
        )
    top.set(ylabel="energy (eV)", title="A crystal melts; its total energy is conserved")
    top.tick_params(labelbottom=False)
    below.plot(times, 1000 * shown.drift, color="#333333", linewidth=0.8)
    below.set(xlabel="time (ps)", ylabel="drift of\nthe total (meV)")
    bins = np.linspace(2.8, box / 2, 80)
    for (name, one), colour in zip(runs.items(), ("#55a868", "#c44e52"), strict=True):
        density = pair_density(one.frames[len(one.frames) // 2 :], box, bins)
        right.stairs(density, bins, label=f"crystal at {name}", color=colour, linewidth=1.5)
    right.set(
        xlabel="distance of two atoms (Å)", ylabel="density of pairs", title="Solid and melted"
    )
    right.legend(frameon=False)
    for axes in parts.values():
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def main(
    picture: Path = PICTURE,
    step: float = 4.0,
    chunks: int = 50,
    chunk: int = 40,
    temperatures: tuple[float, float] = (50.0, 400.0),
) -> dict[str, dict[str, float]]:
    """Simulates `chunks * chunk` steps of `step` femtoseconds twice; returns what it measured."""
    jax.config.update("jax_enable_x64", True)
    torch.set_num_threads(1)  # the tensors are small
    box = CELLS * CELL
    energy = from_torch(LennardJones(box).double())
    runs = {f"{t:g} K": run(energy, CELLS, t, step, chunks, chunk) for t in temperatures}

    figures = {}
    print(f"\n{'crystal at':<12}{'comes to':>10}{'atoms moved':>14}{'energy drifts':>16}")
    for name, one in runs.items():
        drift = float(np.abs(one.drift).max())
        figures[name] = {
            "drift": drift,
            "exchanged": float(np.ptp(one.potential)),
            "temperature": one.temperature,
            "displacement": one.displacement,
        }
        print(
            f"{name:<12}{one.temperature:>8.0f} K{one.displacement:>12.2f} Å"
            f"{1000 * drift:>12.3f} meV"
        )
    draw(runs, box, step, picture)
    print(f"\nThe curves are in {picture}.")
    return figures


if __name__ == "__main__":
    main()
