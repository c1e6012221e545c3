"""One training step, in each of the ways that are compared.

Every function takes a task, from the same initial weights, and returns a function that takes one
step and returns the loss before it. A step is the forward, the loss, the backward and Adam, with
the same hyperparameters; where JAX runs it, parameters, optimiser state and statistics are donated.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import optax
import torch

from eqx_torch import from_torch, t2j, tree_t2j

from .models import floats, Task


try:
    import wrap_torch2jax
except ImportError:  # it comes with the extra `bench` only
    wrap_torch2jax = None

RATE = 1e-3
Step = Callable[[], Any]


def with_torch(task: Task, *, fused: bool, backend: str | None = None) -> Step:
    """Plain torch, as in its tutorials; a backend is one of `torch.compile`."""
    module, x, target = task.start()
    forward = torch.compile(module, backend=backend) if backend else module
    optimizer = torch.optim.Adam(module.parameters(), RATE, fused=fused)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = task.torch_loss(forward(x), target)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def with_jit(task: Task, *, backend: str | None = None) -> Step:
    """This library under `jax.jit`: the arrays of the model are arguments, the rest is closed over.

    The fastest way to call a compiled function, since JAX's C++ code flattens its arguments.
    """
    module, x, target = task.start()
    module = torch.compile(module, backend=backend) if backend else module
    model, state = eqx.nn.make_with_state(from_torch)(module)
    params, static = eqx.partition(model, eqx.is_inexact_array)
    optimizer = optax.adam(RATE)

    def loss_of(params, state, x, target):
        y, state = eqx.combine(params, static)(x, state=state)
        return task.jax_loss(y, target), state

    def update(carry, x, target):
        params, opt_state, state = carry
        (loss, state), grads = jax.value_and_grad(loss_of, has_aux=True)(params, state, x, target)
        updates, opt_state = optimizer.update(grads, opt_state)
        return (optax.apply_updates(params, updates), opt_state, state), loss

    carry = params, optimizer.init(params), state
    return _carrying(jax.jit(update, donate_argnums=0), carry, t2j(x), t2j(target))


def with_loss_in_torch(task: Task) -> Step:
    """As `with_jit`, but torch computes the loss too, so that it comes with its gradient.

    For networks without buffers.
    """
    module, x, target = task.start()
    params, static = eqx.partition(from_torch(_Loss(module, task)), eqx.is_inexact_array)
    optimizer = optax.adam(RATE)

    def loss_of(params, x, target):
        return eqx.combine(params, static)(x, target)

    def update(carry, x, target):
        params, opt_state = carry
        loss, grads = jax.value_and_grad(loss_of)(params, x, target)
        updates, opt_state = optimizer.update(grads, opt_state)
        return (optax.apply_updates(params, updates), opt_state), loss

    carry = params, optimizer.init(params)
    return _carrying(jax.jit(update, donate_argnums=0), carry, t2j(x), t2j(target))


class _Loss(torch.nn.Module):
    def __init__(self, module: torch.nn.Module, task: Task) -> None:
        super().__init__()
        self.module = module
        self.loss = task.torch_loss

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self.loss(self.module(x), target)


def with_filter_jit(task: Task) -> Step:
    """This library as in its README: the model itself is an argument of `eqx.filter_jit`."""
    module, x, target = task.start()
    model, state = eqx.nn.make_with_state(from_torch)(module)
    optimizer = optax.adam(RATE)

    def loss_of(model, state, x, target):
        y, state = model(x, state=state)
        return task.jax_loss(y, target), state

    def update(batch, carry):
        model, opt_state, state = carry
        (loss, state), grads = eqx.filter_value_and_grad(loss_of, has_aux=True)(
            model, state, *batch
        )
        updates, opt_state = optimizer.update(grads, opt_state)
        return (eqx.apply_updates(model, updates), opt_state, state), loss

    jitted = eqx.filter_jit(update, donate="all-except-first")
    carry = model, optimizer.init(eqx.filter(model, eqx.is_inexact_array)), state
    batch = t2j(x), t2j(target)
    return _carrying(lambda carry, *batch: jitted(batch, carry), carry, *batch)


def with_neighbour(task: Task) -> Step:
    """`wrap_torch2jax`, as in its README: `functional_call` of a dict of parameters, under jit.

    Its gradients allow no integers among the outputs, so that of BatchNorm's buffers only the
    statistics are carried, and the number of batches is not.
    """
    module, x, target = task.start()
    params = {name: p.detach() for name, p in module.named_parameters()}
    buffers = dict(module.named_buffers())
    stats = floats(buffers)

    def forward(params, stats, x):
        changed = {name: b.clone() for name, b in {**buffers, **stats}.items()}
        y = torch.func.functional_call(module, {**params, **changed}, x)
        return y, {name: changed[name] for name in stats}

    jax_forward = wrap_torch2jax.torch2jax(
        forward, params, stats, x, depth=1, nondiff_argnums=(1, 2)
    )
    optimizer = optax.adam(RATE)

    def loss_of(params, stats, x, target):
        y, stats = jax_forward(params, stats, x)
        return task.jax_loss(y, target), stats

    def update(carry, x, target):
        params, opt_state, stats = carry
        (loss, stats), grads = jax.value_and_grad(loss_of, has_aux=True)(params, stats, x, target)
        updates, opt_state = optimizer.update(grads, opt_state)
        return (optax.apply_updates(params, updates), opt_state, stats), loss

    arrays = tree_t2j(params)
    carry = arrays, optimizer.init(arrays), tree_t2j(stats)
    return _carrying(jax.jit(update, donate_argnums=0), carry, t2j(x), t2j(target))


def _carrying(update: Callable[..., tuple[Any, Any]], carry: Any, *batch: jax.Array) -> Step:
    carry = jax.tree.map(lambda x: x.copy() if eqx.is_array(x) else x, carry)  # to be donated

    def step() -> jax.Array:
        nonlocal carry
        carry, loss = update(carry, *batch)
        return loss

    return step


def eager_arms() -> dict[str, Callable[[Task], Step]]:
    """What is compared where torch runs eagerly, by name."""
    arms: dict[str, Callable[[Task], Step]] = {
        "torch, fused Adam": lambda task: with_torch(task, fused=True),
        "torch, plain Adam": lambda task: with_torch(task, fused=False),
        "ours": with_jit,
        "ours, filter_jit": with_filter_jit,
    }
    if wrap_torch2jax is not None:
        arms["wrap_torch2jax"] = with_neighbour
    return arms


def compiled_arms(backend: str = "inductor") -> dict[str, Callable[[Task], Step]]:
    """What is compared where the module is compiled by torch."""
    return {
        "torch.compile": lambda task: with_torch(task, fused=True, backend=backend),
        "ours": lambda task: with_jit(task, backend=backend),
    }
