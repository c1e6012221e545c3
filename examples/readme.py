"""The first program of the README: the part between the two marks stands there word for word."""

# README: begin
import equinox as eqx
import jax
import optax
import torch
from sklearn.datasets import load_digits

from eqx_torch import from_torch


x, y = map(jax.numpy.asarray, load_digits(return_X_y=True))
network = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.SiLU(), torch.nn.Linear(32, 10))

model = from_torch(network)  # its inexact arrays are the parameters
optimizer = optax.adam(1e-2)
opt_state = optimizer.init(model)


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
