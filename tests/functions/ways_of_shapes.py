"""Which way output shapes are found out: without values, by values at hand, or by zeros.

`python -m tests.functions.ways_of_shapes [operators|modules|transformers]` counts, for torch's
databases of operators and of modules and for the models of `transformer_models`, which run was the
first to say what a call returns, once with example arguments that have values and once with their
shapes alone.
"""

import collections
import contextlib
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import torch

from eqx_torch import _probe, from_torch, torch2jax

from ..helpers.module_samples import CONFIGURATIONS, samples
from ..helpers.operators import cases, OPERATORS
from ..helpers.transformer_models import ARCHITECTURES


def specs(tree: Any) -> Any:
    """Shapes in the place of tensors."""
    return jax.tree.map(
        lambda x: (
            jax.ShapeDtypeStruct(x.shape, str(x.dtype)[6:]) if isinstance(x, torch.Tensor) else x
        ),
        tree,
    )


def of_operators() -> Iterator[tuple[str, Callable[[], Any], Callable[[], Any]]]:
    for name in sorted(OPERATORS):
        with contextlib.suppress(Exception):
            for case in cases(name):
                args, kwargs = case._call(case.tensors)
                yield (
                    name,
                    lambda c=case, a=args, k=kwargs: torch2jax(c.run, *a, example_kw=k),
                    lambda c=case, a=args, k=kwargs: torch2jax(
                        c.run, *specs(a), example_kw=specs(k)
                    ),
                )


def of_modules() -> Iterator[tuple[str, Callable[[], Any], Callable[[], Any]]]:
    for name, training in CONFIGURATIONS:
        with contextlib.suppress(Exception):
            for sample in samples(name, training):
                args, kwargs = sample.call_with(sample.tensors)
                yield name, *_conversions(sample.module, args, kwargs)


def of_transformers() -> Iterator[tuple[str, Callable[[], Any], Callable[[], Any]]]:
    for name, architecture in ARCHITECTURES.items():
        yield name, *_conversions(architecture.make(), (), architecture.inputs())


def _conversions(module: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    convert = eqx.nn.make_with_state(from_torch)
    return (
        lambda: convert(module, *args, example_kw=kwargs),
        lambda: convert(module, *specs(args), example_kw=specs(kwargs)),
    )


def way(find: Callable[[], Any]) -> str:
    """The first run that said what a call returns, or why none did."""
    found: list[str] = []
    run = _probe._run

    def noted(question: Any, way: Any, before: Any) -> Any:
        outputs = run(question, way, before)
        fake = way.mode is _probe.on_fakes
        found.append("fake" if fake else way.source.removeprefix("one run on "))
        return outputs

    _probe._run = noted
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            find()
    except Exception as error:
        return type(error).__name__
    finally:
        _probe._run = run
    return found[-1] if found else "no run"


def main(which: str) -> None:
    calls = {"operators": of_operators, "modules": of_modules, "transformers": of_transformers}
    counts = collections.Counter[tuple[str, str]](), collections.Counter[tuple[str, str]]()
    names = collections.defaultdict[tuple[str, str], set[str]](set)
    start = time.perf_counter()
    for name, *finds in calls[which]():
        for kind, count, find in zip(("values", "shapes"), counts, finds, strict=True):
            found = way(find)
            count[kind, found] += 1
            names[kind, found].add(name)
    for key in names:
        total = counts[0][key] + counts[1][key]
        shown = "" if "without" in key[1] else ", ".join(sorted(names[key])[:60])
        print(f"{which}, examples with {key[0]}: {total} by {key[1]}. {shown}")
    print(f"{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main(sys.argv[1])
