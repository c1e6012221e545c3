"""A pendulum: a torch vector field inside `diffrax`, trained through the solver.

A small torch network says how fast the angle and the speed of a pendulum change. `diffrax`
integrates it by an adaptive Runge-Kutta method, and the network learns the law of motion from noisy
observations of a few seconds each, by gradients through the solve. There are three ways to these,
which are compared: backwards through the steps of the solver (`RecursiveCheckpointAdjoint`), by an
adjoint equation that is solved backwards in time (`BacksolveAdjoint`), and forwards (`ForwardMode`,
by `jax.jvp`).

    python examples/neural_ode.py

prints how they agree and how far predictions are off, and draws the spirals on which a pendulum
comes to rest, for eight times as long as any observation, in `examples/out/neural_ode.png`.
"""

from pathlib import Path

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import matplotlib.figure
import numpy as np
import optax
import torch
from jaxtyping import Array, Float, PyTree
from tqdm.auto import trange

from eqx_torch import from_torch


PICTURE = Path("examples/out/neural_ode.png")
TIMES = jnp.linspace(0, 16, 401)  # seconds
EARLY = slice(0, 51, 5)  # what is observed: two seconds
BACKWARDS = diffrax.RecursiveCheckpointAdjoint()


def make_network() -> torch.nn.Module:
    """From angle and speed to their rates of change."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(2, 64), torch.nn.Tanh(), torch.nn.Linear(64, 2))


def pendulum(states: Float[Array, "batch 2"]) -> Float[Array, "batch 2"]:
    """The true law: a rod of five metres with friction."""
    angle, speed = states.T
    return jnp.stack([speed, -1.96 * jnp.sin(angle) - 0.2 * speed], axis=1)


def solve(
    law: PyTree,
    starts: Float[Array, "batch 2"],
    times: Float[Array, " times"],
    adjoint: diffrax.AbstractAdjoint = BACKWARDS,
    tolerance: float = 1e-3,
) -> Float[Array, "times batch 2"]:
    """The states of pendulums at these times."""
    solution = diffrax.diffeqsolve(
        diffrax.ODETerm(lambda t, states, law: law(states)),
        diffrax.Bosh3(),
        times[0],
        times[-1],
        dt0=None,
        y0=starts,
        args=law,
        saveat=diffrax.SaveAt(ts=times),
        stepsize_controller=diffrax.PIDController(rtol=tolerance, atol=tolerance),
        adjoint=adjoint,
    )
    return solution.ys


def loss_fn(
    model: PyTree,
    observed: Float[Array, "times batch 2"],
    tolerance: float,
    adjoint: diffrax.AbstractAdjoint = BACKWARDS,
) -> Float[Array, ""]:
    """The mean square distance to what was observed."""
    return ((solve(model, observed[0], TIMES[EARLY], adjoint, tolerance) - observed) ** 2).mean()


value_and_grad = eqx.filter_jit(eqx.filter_value_and_grad(loss_fn))


def compare_adjoints(model: PyTree, observed: Float[Array, "times batch 2"]) -> dict[str, float]:
    """How far two other ways to the gradient are from the first, relative to its norm."""
    tight = jnp.array(1e-5)
    _, grads = value_and_grad(model, observed, tight)
    _, others = value_and_grad(model, observed, tight, diffrax.BacksolveAdjoint())
    norm = optax.tree.norm(grads)
    backsolve = optax.tree.norm(jax.tree.map(jnp.subtract, grads, others)) / norm

    params, static = eqx.partition(model, eqx.is_inexact_array)
    along = jax.tree.map(lambda g: g / norm, grads)  # in this direction the slope is the norm

    @jax.jit
    def slope(params):
        def loss(params):
            whole = eqx.combine(params, static)
            return loss_fn(whole, observed, tight, diffrax.ForwardMode())

        return jax.jvp(loss, (params,), (along,))[1]

    forward = jnp.abs(slope(params) - norm) / norm
    return {"backsolve": float(backsolve), "forward": float(forward)}


def train(
    model: PyTree, observed: Float[Array, "times batch 2"], steps: int
) -> tuple[PyTree, list[float]]:
    """Adam, with a learning rate that decays; also the loss of each step."""
    optimizer = optax.adam(optax.cosine_decay_schedule(5e-2, steps))
    opt_state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit
    def update(model, opt_state, grads):
        updates, opt_state = optimizer.update(grads, opt_state)
        return eqx.apply_updates(model, updates), opt_state

    tolerance, losses = jnp.array(1e-3), []
    for _ in (bar := trange(steps, disable=None)):
        loss, grads = value_and_grad(model, observed, tolerance)
        model, opt_state = update(model, opt_state, grads)
        losses.append(float(loss))
        bar.set_postfix(loss=f"{loss:.5f}", refresh=False)
    return model, losses


def draw(observed, expected, predicted, path: Path) -> None:
    """The paths in the plane of angle and speed, and the angles over time."""
    figure = matplotlib.figure.Figure(figsize=(10, 4.4), dpi=110, layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(2, 3))
    left.plot(*observed.T, ".", color="#999999", markersize=3)
    left.set_title("all observations, and two pendulums", fontsize="medium")
    for i, colour in enumerate(("#dd8452", "#4c72b0")):
        for axes, true, learned in (
            (left, expected[:, i].T, predicted[:, i].T),
            (right, (TIMES, expected[:, i, 0]), (TIMES, predicted[:, i, 0])),
        ):
            axes.plot(*true, color=colour, linewidth=5, alpha=0.3)
            axes.plot(*learned, color=colour, linewidth=1.3)
            axes.plot(true[0][0], true[1][0], "o", color=colour)
    right.plot([], color="#999999", linewidth=5, alpha=0.3, label="true")
    right.plot([], color="#999999", linewidth=1.3, label="predicted")
    right.axvspan(0, 2, color="#999999", alpha=0.2, linewidth=0)
    right.text(2.2, -140, "as long as an observation", color="#777777")
    left.set(xlabel="angle (degrees)", ylabel="speed (degrees / s)")
    right.set(xlabel="time (s)", ylabel="angle (degrees)", ylim=(-150, 170))
    right.legend(frameon=False, ncols=2)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle("A torch network learns how a pendulum swings")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def main(picture: Path = PICTURE, steps: int = 200, pieces: int = 32) -> dict[str, float]:
    """Compares gradients, trains and predicts; returns what it measured."""
    torch.set_num_threads(1)  # the tensors are small
    key, start_key = jax.random.split(jax.random.key(0))
    released = jnp.radians(jnp.array([[120.0, 0.0], [-60.0, -90.0]]))  # not trained on
    others = jax.random.uniform(start_key, (pieces, 2), minval=-1) * jnp.array([2.3, 1.0])
    true = solve(pendulum, jnp.concatenate([released, others]), TIMES, tolerance=1e-5)
    observed = true[EARLY, 2:]
    observed += 0.02 * jax.random.normal(key, observed.shape)
    model = from_torch(make_network())

    figures = compare_adjoints(model, observed)
    print(f"Gradients by BacksolveAdjoint differ by {figures['backsolve']:.1e} of their norm,")
    print(f"and the slope by ForwardMode by {figures['forward']:.1e}.")

    model, losses = train(model, observed, steps)
    figures |= {"first loss": losses[0], "last loss": losses[-1]}
    expected = jnp.degrees(true[:, :2])
    predicted = jnp.degrees(solve(model, released, TIMES))
    figures["error"] = float(jnp.abs(predicted - expected)[..., 0].mean())
    print(f"\nOver 16 seconds, predicted angles are off by {figures['error']:.1f} degrees.")
    draw(*map(np.asarray, (jnp.degrees(observed), expected, predicted)), picture)
    print(f"The spirals are in {picture}.")
    return figures


if __name__ == "__main__":
    main()
