"""The first program of the README: the part between the two marks stands there word for word."""

import os


# JAX reads this when it is first imported.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

# README: begin
import equinox as eqx
import jax
import optax
import torch
from jax.sharding import PartitionSpec as P
from sklearn.datasets import load_digits

from eqx_torch import from_torch


jax.set_mesh(jax.make_mesh((8,), ("batch",)))
x, y = load_digits(return_X_y=True)
x, y = jax.device_put((x[:1792], y[:1792]), P("batch"))  # an eighth for each device
network = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.SiLU(), torch.nn.Linear(32, 10))

model = from_torch(network, out_specs=P("batch"))
optimizer = optax.adam(1e-2)
opt_state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))


def loss_fn(model, x, y):
    return optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()


@eqx.filter_jit
def step(model, opt_state, x, y):
    loss, grads = eqx.filter_value_and_grad(loss_fn)(model, x, y)
    updates, opt_state = optimizer.update(grads, opt_state)
    return eqx.apply_updates(model, updates), opt_state, loss


for _ in range(50):
    model, opt_state, loss = step(model, opt_state, x, y)
# README: end

print(f"loss {loss:.3f}")
