"""torch's database of modules: each on samples of its arguments, in torch and in JAX."""

import copy
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import torch
from torch.testing._internal.common_modules import module_db, ModuleInfo

from eqx_torch import from_torch, t2j, tree_t2j
from eqx_torch._dtypes import is_inexact
from eqx_torch._module.rng import _as_seed
from eqx_torch._trees import flatten, Structure


MODULES: dict[str, ModuleInfo] = {info.name: info for info in module_db}
KEY = jax.random.key(7)

# A module is tested in training, and in evaluation too if that differs.
CONFIGURATIONS = [
    (name, training)
    for name, info in MODULES.items()
    for training in ([True, False] if info.train_and_eval_differ else [True])
]


class Sample:
    """A module on one sample of its arguments. Tensors are traced, everything else is static.

    Attributes:
        module: the torch module.
        name: what the sample is about.
        active: which of the tensors among the arguments derivatives are taken by.
    """

    def __init__(self, module: torch.nn.Module, sample: Any) -> None:
        self.module = module
        self.name = sample.desc
        call = sample.forward_input.args, sample.forward_input.kwargs
        self._leaves, self._structure = flatten(call)
        tensors = [x.detach().clone() for x in self._leaves if isinstance(x, torch.Tensor)]
        self.tensors = tensors
        wanted = [x.requires_grad for x in self._leaves if isinstance(x, torch.Tensor)]
        self.active = [i for i, x in enumerate(tensors) if is_inexact(x.dtype) and wanted[i]]

    def call_with(self, tensors: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments, with these in place of the tensors."""
        rest = iter(tensors)
        leaves = [next(rest) if isinstance(x, torch.Tensor) else x for x in self._leaves]
        return self._structure.unflatten(leaves)

    def in_torch(self, tensors: Sequence[torch.Tensor]) -> "Results":
        """What torch gives on these tensors, seeded as a call with `key=KEY` is."""
        module = copy.deepcopy(self.module)
        inputs = [x.clone() for x in tensors]
        for i in self.active:
            inputs[i].requires_grad_()
        args, kwargs = self.call_with(inputs)
        torch.manual_seed(seed_of(KEY))
        outputs, structure = flatten(module(*args, **kwargs))
        grads = _gradients(outputs, [*module.parameters(), *(inputs[i] for i in self.active)])
        split = len(grads) - len(self.active)
        names = [name for name, _ in module.named_parameters()]
        return Results(
            outputs,
            structure,
            dict(zip(names, grads[:split], strict=True)),
            grads[split:],
            dict(module.named_buffers()),
        )

    def in_jax(self, output_shapes: Any) -> tuple[Any, Any, Any]:
        """The converted module, its state, and its step: results of a call on a list of arrays."""
        args, kwargs = self.call_with(self.tensors)
        convert = eqx.nn.make_with_state(from_torch)
        model, state = convert(self.module, *args, example_kw=kwargs, output_shapes=output_shapes)

        def step(model: Any, state: Any, arrays: list[Any]) -> Any:
            def loss(differentiated: Any, state: Any) -> Any:
                model, active = differentiated
                inputs = list(arrays)
                for i, x in zip(self.active, active, strict=True):
                    inputs[i] = x
                args, kwargs = self.call_with(inputs)
                result, state = model(*args, **kwargs, state=state, key=KEY)
                outputs = flatten(result)[0]
                pairs = zip(outputs, cotangents_of(outputs), strict=True)
                terms = [jnp.sum(y * u) for y, u in pairs if u is not None]
                return sum(terms, jnp.zeros(())), (outputs, state)

            differentiated = model, [arrays[i] for i in self.active]
            (_, aux), grads = eqx.filter_value_and_grad(loss, has_aux=True)(differentiated, state)
            outputs, state = aux
            buffers = {} if model.buffers is None else state.get(model.buffers)
            return outputs, grads[0].params, grads[1], buffers

        return model, state, step


class Results:
    """What a module gives: outputs, gradients of its parameters and inputs, its buffers after."""

    def __init__(
        self,
        outputs: list[torch.Tensor],
        structure: Structure,
        parameters: dict[str, torch.Tensor],
        inputs: list[torch.Tensor],
        buffers: dict[str, torch.Tensor],
    ) -> None:
        self.outputs = outputs
        self.structure = structure
        self.parameters = parameters
        self.inputs = inputs
        self.buffers = buffers

    def tree(self, changing: Sequence[str]) -> Any:
        """The results as a tree, with these buffers."""
        buffers = {name: self.buffers[name] for name in changing}
        return [x.detach() for x in self.outputs], self.parameters, self.inputs, buffers


def samples(name: str, training: bool) -> Iterator[Sample]:
    """A module in one mode, on all samples of its constructor's and its forward's arguments."""
    info = MODULES[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        inputs = info.module_inputs_func(
            info, device="cpu", dtype=torch.float32, requires_grad=True, training=training
        )
        for i, sample in enumerate(inputs):
            if sample.forward_input is None:
                continue
            torch.manual_seed(i)
            constructor = sample.constructor_input
            module = info.module_cls(*constructor.args, **constructor.kwargs).train(training)
            forward = sample.forward_input
            if hasattr(module, "_random_samples"):  # torch makes them in float64, and refuses that
                module._random_samples = module._random_samples.float()
            if info.is_lazy:
                module(*forward.args, **forward.kwargs)
            yield Sample(module, sample)


def other_values(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Other arguments that are as valid: the same numbers in other places."""
    return [x.flatten().roll(1).view(x.shape) if is_inexact(x.dtype) else x for x in tensors]


def cotangents_of(outputs: Sequence[Any]) -> list[Any]:
    """Random numbers like the outputs, None for those without derivatives."""
    cotangents = []
    for i, y in enumerate(outputs):
        if not is_inexact(y.dtype):
            cotangents.append(None)
            continue
        u = torch.randn(tuple(y.shape), generator=torch.Generator().manual_seed(i))
        cotangents.append(u if isinstance(y, torch.Tensor) else t2j(u))
    return cotangents


def seed_of(key: jax.Array) -> int:
    """The number with which torch is seeded for a call with this key."""
    high, low = jax.random.bits(key, (2,), jnp.uint32).tolist()
    return _as_seed(high, low)


def arrays(tensors: Sequence[torch.Tensor]) -> list[jax.Array]:
    """The tensors as JAX arrays, in memory of their own."""
    return tree_t2j([x.clone() for x in tensors])


def _gradients(
    outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    pairs = zip(outputs, cotangents_of(outputs), strict=True)
    pairs = [(y, u) for y, u in pairs if u is not None and y.requires_grad]
    if not pairs or not inputs:
        return [torch.zeros_like(x) for x in inputs]
    ys, us = zip(*pairs, strict=True)
    wanted = [x for x in inputs if x.requires_grad]
    grads = iter(torch.autograd.grad(ys, wanted, us, allow_unused=True, materialize_grads=True))
    return [next(grads) if x.requires_grad else torch.zeros_like(x) for x in inputs]
