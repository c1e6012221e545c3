"""How long the first trace and the first call of a module take, and what annotations add.

`python -m tests.benchmarks.trace` converts a BERT of 12 layers, 768 wide, and times the conversion,
the first trace, of the forward and of the gradient, and the first call under `eqx.filter_jit`, all
in all. Beside it stand torch's first call and one `copy.deepcopy` of the module; the aim for our
first call is 1.5 times those and two seconds. Then it traces one network with jaxtyping annotations
and the same with explicit `output_shapes`, in turns and each time at a new batch size.
"""

import argparse
import copy
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import torch
import transformers
from jaxtyping import Float
from torch import nn, Tensor

from eqx_torch import from_torch, t2j

from .harness import OUT, pair, report, Row


AIM_FACTOR, AIM_SECONDS = 1.5, 2.0


def bert(layers: int, width: int) -> nn.Module:
    """A BERT with random weights, in evaluation mode."""
    config = transformers.BertConfig(
        num_hidden_layers=layers,
        hidden_size=width,
        num_attention_heads=max(1, width // 64),
        intermediate_size=4 * width,
    )
    return transformers.BertModel(config).eval()


def last_state(model: Any, ids: Any) -> Any:
    return model(input_ids=ids).last_hidden_state


class Clock:
    """The seconds of each of several steps, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def __call__(self, name: str, f: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        result = f()
        self.seconds[name] = time.perf_counter() - start
        return result


def first_call(
    module: nn.Module, batch: int, length: int
) -> tuple[dict[str, float], jax.Array, Tensor]:
    """Seconds of each step of a first call, and what both libraries computed."""
    ids = torch.randint(0, 1000, (batch, length))
    clock = Clock()
    clock("torch, deepcopy", lambda: copy.deepcopy(module))
    with torch.no_grad():
        expected = clock("torch, first call", lambda: last_state(module, ids))
    ids = t2j(ids)
    model = clock("from_torch", lambda: from_torch(module))
    clock("first trace", lambda: eqx.filter_eval_shape(last_state, model, ids))
    loss = eqx.filter_grad(lambda model, ids: last_state(model, ids).mean())
    clock("first trace of the gradient", lambda: eqx.filter_eval_shape(loss, model, ids))
    jitted = eqx.filter_jit(last_state)
    result = clock("first call under jit", lambda: jax.block_until_ready(jitted(model, ids)))
    return clock.seconds, result, expected


def bert_rows(seconds: Mapping[str, Sequence[float]]) -> list[Row]:
    """One line for each step, and for the sums that the aim is about."""
    in_torch = [
        a + b for a, b in zip(seconds["torch, deepcopy"], seconds["torch, first call"], strict=True)
    ]
    steps = ("from_torch", "first trace", "first call under jit")
    ours = [sum(parts) for parts in zip(*(seconds[step] for step in steps), strict=True)]
    aim = 1000 * (AIM_FACTOR * statistics.median(in_torch) + AIM_SECONDS)
    rows = [row(f"BERT: {name}", values) for name, values in seconds.items()]
    rows.append(row("BERT: torch, both", in_torch))
    rows.append(row("BERT: from_torch, first trace and first call", ours, aim))
    return rows


def typed_rows(seconds: Mapping[str, Sequence[float]]) -> list[Row]:
    """One line for each way, and for the difference of neighbours."""
    rows = [row(f"typed network: trace, {name}", values) for name, values in seconds.items()]
    annotated, explicit = seconds.values()
    added = [a - b for a, b in zip(annotated, explicit, strict=True)]
    difference = {"median": statistics.median(added), "best": min(annotated) - min(explicit)}
    milliseconds = {kind: 1000 * value for kind, value in difference.items()}
    return [
        *rows,
        {"step": "typed network: added by annotations", "ms": milliseconds, "at most": ""},
    ]


def row(name: str, seconds: Sequence[float], aim: float | str = "") -> Row:
    return {"step": name, "ms": pair(seconds, 1000), "at most": aim}


class Plain(nn.Module):
    def __init__(self) -> None:
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


def output_shapes(x, scale, bias) -> jax.ShapeDtypeStruct:
    """What `Annotated.forward` says, as a function."""
    return jax.ShapeDtypeStruct((*x.shape[:-1], *bias.shape), x.dtype)


def typed_models() -> dict[str, Callable[..., jax.Array]]:
    """The network with its annotations, and with `output_shapes` only."""
    annotated, plain = Annotated(), Plain()
    plain.load_state_dict(annotated.state_dict())
    return {
        "annotations": from_torch(annotated),
        "output_shapes": from_torch(plain, output_shapes=output_shapes),
    }


def typed_trace(model: Callable[..., jax.Array], size: int) -> tuple[Any, float]:
    """Traces a call with a batch of that size; the result's struct, and the seconds it took."""
    arguments = [jax.ShapeDtypeStruct(s, "float32") for s in ((size, 784), (1,), (10,))]
    start = time.perf_counter()
    # A new function, which no cache of JAX knows.
    result = jax.eval_shape(lambda *args: model(*args), *arguments)
    return result, time.perf_counter() - start


def typed_seconds(repeats: int) -> dict[str, list[float]]:
    """Seconds of a trace each way, by turns, after five that warm up."""
    both = typed_models()
    times: dict[str, list[float]] = {name: [] for name in both}
    for size in range(1, repeats + 6):
        order = list(both) if size % 2 else list(both)[::-1]
        taken = {name: typed_trace(both[name], size)[1] for name in order}
        for name, seconds in taken.items():
            times[name] += [seconds] if size > 5 else []
    return times


def run(
    layers: int, width: int, batch: int, length: int, rounds: int, repeats: int, out: Path = OUT
) -> dict[str, Any]:
    """Measures, prints and writes."""
    first_call(bert(1, 64), 1, 8)  # what a process does once is charged to neither
    found = [first_call(bert(layers, width), batch, length)[0] for _ in range(rounds)]
    rows = bert_rows({name: [seconds[name] for seconds in found] for name in found[0]})
    rows += typed_rows(typed_seconds(repeats))
    return report("trace", rows, out, layers=layers, width=width)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args(arguments)
    run(args.layers, args.width, batch=8, length=128, rounds=args.rounds, repeats=200)


if __name__ == "__main__":
    main()
