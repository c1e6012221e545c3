"""How long the first call takes: `from_torch` and compilation against torch with a copy.

`python -m tests.benchmarks.first_call` converts a BERT of 12 layers, 768 wide, calls it once under
`eqx.filter_jit`, and compares with torch's first call and one `copy.deepcopy` of the module. It
prints a table and writes `tests/benchmarks/out/first_call.json`. The target is at most 1.5 times
torch's time plus two seconds.
"""

import argparse
import copy
import json
import time
from pathlib import Path

import equinox as eqx
import jax
import torch
import transformers

from eqx_torch import from_torch, t2j


OUT = Path(__file__).parent / "out" / "first_call.json"


def bert(layers, width):
    """A BERT with random weights, in evaluation mode."""
    config = transformers.BertConfig(
        num_hidden_layers=layers,
        hidden_size=width,
        num_attention_heads=max(1, width // 64),
        intermediate_size=4 * width,
    )
    return transformers.BertModel(config).eval()


def seconds(f, *args):
    """The seconds that `f(*args)` takes, and its result."""
    start = time.perf_counter()
    result = f(*args)
    return time.perf_counter() - start, result


def measure(layers=12, width=768, batch=8, length=128):
    """Seconds of torch's first call with a copy, of ours, the target and whether it is met."""
    module = bert(layers, width)
    ids = torch.randint(0, 1000, (batch, length))

    def in_torch():
        copy.deepcopy(module)
        with torch.no_grad():
            return module(input_ids=ids).last_hidden_state

    def in_jax():
        model = from_torch(module)
        call = eqx.filter_jit(lambda model, ids: model(input_ids=ids).last_hidden_state)
        return jax.block_until_ready(call(model, t2j(ids)))

    torch_time, expected = seconds(in_torch)
    jax_time, result = seconds(in_jax)
    target = 1.5 * torch_time + 2
    figures = {"torch": torch_time, "eqx_torch": jax_time, "target": target}
    return figures, (result, expected)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    args = parser.parse_args()
    measure(1, 64)  # what a process does once is charged to neither
    figures, _ = measure(args.layers, args.width)
    print("| first call | seconds |\n|---|---|")
    for name, value in figures.items():
        print(f"| {name} | {value:.2f} |")
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
