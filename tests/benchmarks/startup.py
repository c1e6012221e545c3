"""How long a program takes to import the library and to make its first call.

`python -m tests.benchmarks.startup` runs programs of their own, in turns: what imports JAX and
torch and does no more, what imports this library too, and both again with a first call, of
`jnp.add` under jit and of `torch.add` against `torch2jax(torch.add)` under jit.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .harness import OUT, pair, ratio, report, Times


AIM = 1.15
LIBRARIES = "import jax, torch\n"
PROGRAMS = {
    "both libraries": LIBRARIES,
    "eqx_torch": LIBRARIES + "import eqx_torch\n",
    "both libraries, first calls": LIBRARIES
    + "x = jax.numpy.ones((8, 8))\n"
    + "print(jax.jit(jax.numpy.add)(x, x).sum())\n"
    + "torch.add(torch.ones(8, 8), torch.ones(8, 8))\n",
    "eqx_torch, first call": LIBRARIES
    + "import eqx_torch\n"
    + "x = jax.numpy.ones((8, 8))\n"
    + "print(jax.jit(eqx_torch.torch2jax(torch.add))(x, x).sum())\n",
    "eqx_torch, first call of known shapes": LIBRARIES
    + "import eqx_torch\n"
    + "x = jax.numpy.ones((8, 8))\n"
    + "print(jax.jit(eqx_torch.torch2jax(torch.add, output_shapes=x))(x, x).sum())\n",
}
RATIOS = (
    ("import", "eqx_torch", "both libraries", AIM),
    ("import and first call, against imports", "eqx_torch, first call", "both libraries", AIM),
    ("import and first call", "eqx_torch, first call", "both libraries, first calls", ""),
    (
        "the same with output_shapes=",
        "eqx_torch, first call of known shapes",
        "both libraries, first calls",
        "",
    ),
)


def program(text: str) -> str:
    """What a program prints."""
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    return done.stdout


def seconds(programs: Mapping[str, str], rounds: int) -> Times:
    """Seconds of each program, by turns, after one run that fills the caches of the system."""
    times: Times = {name: [] for name in programs}
    for done in range(rounds + 1):
        for name, text in programs.items():
            start = time.perf_counter()
            program(text)
            times[name] += [time.perf_counter() - start] if done else []
    return times


def run(rounds: int, out: Path = OUT) -> dict[str, Any]:
    """Measures, prints and writes."""
    times = seconds(PROGRAMS, rounds)
    rows = [
        {
            "program": name,
            "libraries alone, s": pair(times[under]),
            "ours, s": pair(times[over]),
            "ratio": ratio(times[over], times[under]),
            "at most": aim,
        }
        for name, over, under, aim in RATIOS
    ]
    return report("startup", rows, out)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=6)
    args = parser.parse_args(arguments)
    run(args.rounds)


if __name__ == "__main__":
    main()
