"""Forces, products with Hessians and training on forces and energies, against torch.

`python -m tests.benchmarks.forces` takes a potential in torch, the energy of atoms by a network of
all distances, and computes in JAX and in torch: the forces; the product of a Hessian with a
vector; the gradient of a loss of the forces by the parameters (for one structure, with the energy
and without, and for a batch of them, by `jax.vmap` against `torch.func.vmap`); and that of a loss
of what a few steps of dynamics end at, by a `lax.scan` against a loop. All give the same, which is
checked first. Times are of the processor, so that they compare on a machine that others use too.
torch has one thread.
"""

import argparse
import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.func import grad, vmap

from eqx_torch import torch2jax, tree_t2j

from .harness import Burst, in_turns, OUT, pair, ratio, report, Row


BATCH = 16
STEPS = 8
STEP = 0.01

Call = Callable[[], Any]
Params = dict[str, torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Case:
    """A number of atoms, and the width of the network of their distances."""

    atoms: int
    width: int

    @property
    def name(self) -> str:
        return f"{self.atoms} atoms, width {self.width}"

    def start(self) -> tuple[Params, dict[str, torch.Tensor]]:
        """The parameters of the potential, and positions, forces and so on."""
        torch.manual_seed(0)
        width = self.width
        params = {
            "b0": 0.1 * torch.randn(width),
            "b1": 0.1 * torch.randn(width),
            "out": torch.randn(width) / width**0.5,
            "w0": torch.randn(1, width),
            "w1": torch.randn(width, width) / width**0.5,
        }
        one, batch = (self.atoms, 3), (BATCH, self.atoms, 3)
        shapes = {"x": one, "target": one, "v": one, "xs": batch, "targets": batch}
        return params, {name: torch.randn(shape) for name, shape in shapes.items()}


def cases() -> list[Case]:
    return [Case(16, 64), Case(32, 128)]


def energy(params: Params, x: torch.Tensor) -> torch.Tensor:
    """The energy of atoms at `x`."""
    distances = (((x[:, None] - x[None]) ** 2).sum(-1) + 0.5).sqrt()
    h = torch.nn.functional.silu(distances.reshape(-1, 1) @ params["w0"] + params["b0"])
    h = torch.nn.functional.silu(h @ params["w1"] + params["b1"])
    return (h @ params["out"]).sum()


def in_torch(case: Case) -> dict[str, Call]:
    """What is computed, by torch."""
    params, data = case.start()
    leaves = {name: p.clone().requires_grad_() for name, p in params.items()}
    x, target, v, xs, targets = data.values()

    def forces(of: Params, x: torch.Tensor, again: bool) -> torch.Tensor:
        if not x.requires_grad:
            x = x.clone().requires_grad_()
        return -torch.autograd.grad(energy(of, x), x, create_graph=again)[0]

    def product() -> torch.Tensor:
        at = x.clone().requires_grad_()
        return torch.autograd.grad(forces(params, at, True), at, v)[0]

    def training() -> Any:
        loss = ((forces(leaves, x, True) - target) ** 2).mean()
        return torch.autograd.grad(loss, list(leaves.values()))

    def with_energy() -> Any:
        at = x.clone().requires_grad_()
        e = energy(leaves, at)
        (slope,) = torch.autograd.grad(e, at, create_graph=True)
        loss = e**2 + ((-slope - target) ** 2).mean()
        return torch.autograd.grad(loss, list(leaves.values()))

    def batched(of: Params) -> torch.Tensor:
        return ((-vmap(grad(energy, 1), (None, 0))(of, xs) - targets) ** 2).mean()

    def dynamics() -> Any:
        at, speed = x.clone().requires_grad_(), torch.zeros_like(x)
        for _ in range(STEPS):
            speed = speed + STEP * forces(leaves, at, True)
            at = at + STEP * speed
        return torch.autograd.grad(((at - target) ** 2).mean(), list(leaves.values()))

    return {
        "forces": lambda: forces(params, x, False),
        "Hessian product": product,
        "force training": training,
        "energy and force training": with_energy,
        "force training, vmapped": lambda: tuple(grad(batched)(params).values()),
        "training on dynamics": dynamics,
    }


def in_jax(case: Case) -> dict[str, Call]:
    """The same, by JAX."""
    params, (x, target, v, xs, targets) = map(tree_t2j, _arrays(case))
    potential = torch2jax(energy)

    def forces(params: Any, x: jax.Array) -> jax.Array:
        return -jax.grad(potential, 1)(params, x)

    def product(x: jax.Array) -> jax.Array:
        return jax.jvp(functools.partial(forces, params), (x,), (v,))[1]

    def loss(params: Any) -> jax.Array:
        return ((forces(params, x) - target) ** 2).mean()

    def with_energy(params: Any) -> jax.Array:
        e, slope = jax.value_and_grad(potential, 1)(params, x)
        return e**2 + ((-slope - target) ** 2).mean()

    def batched(params: Any) -> jax.Array:
        return ((jax.vmap(forces, (None, 0))(params, xs) - targets) ** 2).mean()

    def dynamics(params: Any) -> jax.Array:
        def step(carry: Any, _: None) -> Any:
            at, speed = carry
            speed = speed + STEP * forces(params, at)
            return (at + STEP * speed, speed), None

        (at, _), _ = jax.lax.scan(step, (x, jnp.zeros_like(x)), None, STEPS)
        return ((at - target) ** 2).mean()

    def on_params(f: Callable[[Any], Any]) -> Call:
        return functools.partial(jax.jit(jax.grad(f)), params)

    return {
        "forces": functools.partial(jax.jit(forces), params, x),
        "Hessian product": functools.partial(jax.jit(product), x),
        "force training": on_params(loss),
        "energy and force training": on_params(with_energy),
        "force training, vmapped": on_params(batched),
        "training on dynamics": on_params(dynamics),
    }


def _arrays(case: Case) -> tuple[Params, list[torch.Tensor]]:
    params, data = case.start()
    return params, list(data.values())


# The aims for ours against torch.
AIMS = {
    "forces": 1.15,
    "Hessian product": 1.2,
    "force training": 1.15,
    "energy and force training": 1.15,
    "force training, vmapped": 1.3,
    "training on dynamics": 1.3,
}


def measure(case: Case, what: str, ours: Call, torchs: Call, burst: Burst) -> Row:
    """One line of the table."""
    for _ in range(4):  # the first runs find out how to run
        actual = jax.block_until_ready(ours())
    _check(f"{case.name}, {what}", actual, torchs())
    arms = {"ours": burst_of(ours), "torch": burst_of(torchs)}
    times = in_turns(arms, burst, time.process_time)
    return {
        "call": f"{what}, {case.name}",
        "torch, ms": pair(times["torch"], 1000),
        "ours, ms": pair(times["ours"], 1000),
        "ours / torch": ratio(times["ours"], times["torch"]),
        "at most": AIMS[what],
    }


def _check(what: str, actual: Any, expected: Any) -> None:
    pairs = zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
    for found, wanted in pairs:
        wanted = wanted.detach().numpy()
        atol = 1e-3 * max(1e-3, float(np.abs(wanted).max()))
        np.testing.assert_allclose(found, wanted, 2e-3, atol, err_msg=what)


def burst_of(call: Call) -> Callable[[int], Any]:
    """Calls that are each waited for."""

    def run(calls: int) -> None:
        for _ in range(calls):
            jax.block_until_ready(call())

    return run


def run(chosen: Sequence[Case], burst: Burst, out: Path = OUT, only: str = "") -> dict[str, Any]:
    """Measures, prints and writes."""
    torch.set_num_threads(1)
    rows = []
    for case in chosen:
        ours, torchs = in_jax(case), in_torch(case)
        rows += [
            measure(case, what, ours[what], torchs[what], burst) for what in ours if only in what
        ]
    return report("forces", rows, out)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="calls with this in their name")
    parser.add_argument("--seconds", type=float, default=4.0, help="for each line")
    args = parser.parse_args(arguments)
    run(cases(), Burst(seconds=args.seconds), only=args.only)


if __name__ == "__main__":
    main()
