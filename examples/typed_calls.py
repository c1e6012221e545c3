"""An attention block, annotated once: checked when JAX traces, on one device and on eight.

The annotations say what the block returns, so torch never runs to find out; a wrong shape is an
error before anything is compiled.
"""

import os


# JAX reads this when it is first imported.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import equinox as eqx
import jax
import jax.numpy as jnp
import torch
from jax.sharding import AxisType, PartitionSpec as P
from jaxtyping import Bool, Float
from torch import nn, Tensor

from eqx_torch import from_torch, ShapeError


class Attention(nn.Module):
    """Self-attention with a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.width, self.heads = width, heads
        self.project = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(
        self,
        x: Float[Tensor, "batch time {self.width}"],
        mask: Bool[Tensor, "#batch time time"] | None = None,
    ) -> Float[Tensor, "batch time {self.width}"]:
        # (batch, time, 3 * width) becomes three times (batch, heads, time, width // heads)
        q, k, v = self.project(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mask = None if mask is None else mask[:, None]
        y = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return x + self.out(y.transpose(1, 2).flatten(2))


def main() -> None:
    """Calls the block on one device and on eight, and wrongly."""
    torch.manual_seed(0)
    block = Attention(width=32, heads=4)
    model = from_torch(block)
    x = jax.random.normal(jax.random.key(0), (16, 10, 32))
    causal = jnp.tril(jnp.ones((1, 10, 10), bool))
    one = eqx.filter_jit(model)(x, causal)
    print("one device:", one.shape)

    # The same block on an eighth of the batch on each of eight devices; the annotation speaks of
    # the whole batch.
    mesh = jax.make_mesh((8,), ("batch",), axis_types=(AxisType.Explicit,))
    sharded = jax.device_put(x, jax.NamedSharding(mesh, P("batch")))
    eight = eqx.filter_jit(from_torch(block, out_specs=P("batch")))(sharded, causal)
    print("eight devices:", eight.shape, eight.sharding.spec)
    assert jnp.allclose(one, eight, atol=1e-5)

    try:
        jax.eval_shape(model, x, causal[:, :9])
    except ShapeError as error:
        print(error)


if __name__ == "__main__":
    main()
