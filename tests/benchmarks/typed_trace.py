"""What it costs to trace an annotated module: annotations against explicit `output_shapes`.

`python -m tests.benchmarks.typed_trace` traces the same network both ways in turn, each time at a
batch size that was not seen before, prints a table and writes
`tests/benchmarks/out/typed_trace.json`.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import jax
from jaxtyping import Float
from torch import nn, Tensor

from eqx_torch import from_torch


OUT = Path(__file__).parent / "out" / "typed_trace.json"


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)
        )

    def forward(self, x, scale, bias):
        return self.layers(x) * scale + bias


class Annotated(Plain):
    def forward(
        self,
        x: Float[Tensor, "*batch 784"],
        scale: Float[Tensor, "#classes"],
        bias: Float[Tensor, "classes"],
    ) -> Float[Tensor, "*batch classes"]:
        return super().forward(x, scale, bias)


def output_shapes(x, scale, bias):
    """What `Annotated.forward` says, as a function."""
    return jax.ShapeDtypeStruct((*x.shape[:-1], *bias.shape), x.dtype)


def models():
    """The network with its annotations, and with `output_shapes` only."""
    annotated, plain = Annotated(), Plain()
    plain.load_state_dict(annotated.state_dict())
    return {
        "annotations": from_torch(annotated),
        "output_shapes": from_torch(plain, output_shapes=output_shapes),
    }


def trace(model, size):
    """Traces a call with a batch of that size; the result's struct, and the seconds it took."""
    arguments = [jax.ShapeDtypeStruct(s, "float32") for s in ((size, 784), (1,), (10,))]
    start = time.perf_counter()
    # A new function, which no cache of JAX knows.
    result = jax.eval_shape(lambda *args: model(*args), *arguments)
    return result, time.perf_counter() - start


def measure(repeats):
    """Median milliseconds of a trace each way, and of the difference of neighbours."""
    both = models()
    times = {name: [] for name in both}
    for size in range(1, repeats + 6):
        order = list(both) if size % 2 else list(both)[::-1]
        taken = {name: trace(both[name], size)[1] for name in order}
        for name, seconds in taken.items():
            times[name] += [1e3 * seconds] if size > 5 else []
    found = {name: statistics.median(values) for name, values in times.items()}
    differences = [a - b for a, b in zip(*times.values(), strict=True)]
    return {**found, "added": statistics.median(differences), "repeats": repeats}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=300)
    figures = measure(parser.parse_args().repeats)
    print("| one trace | median ms |\n|---|---|")
    for name in ("annotations", "output_shapes", "added"):
        print(f"| {name} | {figures[name]:.3f} |")
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
