"""The curvature of a torch loss: its whole Hessian, and Hessian-vector products without it.

A torch network learns to read handwritten digits. Its loss, a torch function of all parameters, is
then differentiated twice by JAX: `jax.hessian` gives the matrix, and `jax.jvp` of `jax.grad` its
product with a vector (forward over reverse), at the cost of a few gradients. The Lanczos method of
SciPy finds the largest eigenvalues by such products alone; they are compared with those of the
matrix. A network that tells ten classes apart has about as many directions in which its loss is
steep, and is flat in all others.

    python examples/hessian.py

prints both sets of eigenvalues, and draws the spectrum and the loss along some of its directions in
`examples/out/hessian.png`.
"""

from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.figure
import numpy as np
import optax
import scipy.sparse.linalg
import torch
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float
from sklearn.datasets import load_digits
from tqdm.auto import tqdm, trange

from eqx_torch import torch2jax, tree_t2j


PICTURE = Path("examples/out/hessian.png")
Loss = Callable[[Float[Array, " parameters"]], Float[Array, ""]]


def make_loss(hidden: int) -> tuple[Loss, Float[Array, " parameters"]]:
    """A torch loss as a JAX function of one vector, and the vector to start from."""
    images, labels = load_digits(return_X_y=True)
    images, labels = torch.tensor(images / 16, dtype=torch.float64), torch.tensor(labels)
    torch.manual_seed(0)
    network = torch.nn.Sequential(
        torch.nn.Linear(64, hidden), torch.nn.Tanh(), torch.nn.Linear(hidden, 10)
    ).double()

    def torch_loss(parameters: dict[str, torch.Tensor]) -> torch.Tensor:
        logits = torch.func.functional_call(network, parameters, (images,))
        decay = sum(p.square().sum() for p in parameters.values())
        return torch.nn.functional.cross_entropy(logits, labels) + 1e-4 * decay

    start, unravel = ravel_pytree(tree_t2j(dict(network.named_parameters())))
    loss = torch2jax(torch_loss)
    return lambda vector: loss(unravel(vector)), start


def train(loss: Loss, vector: Float[Array, " parameters"], steps: int):
    """Adam on all images at once."""
    optimizer = optax.adam(optax.cosine_decay_schedule(3e-2, steps))
    opt_state = optimizer.init(vector)

    @jax.jit
    def train_step(vector, opt_state):
        value, grad = jax.value_and_grad(loss)(vector)
        updates, opt_state = optimizer.update(grad, opt_state)
        return optax.apply_updates(vector, updates), opt_state, value

    for _ in (bar := trange(steps, desc="training", disable=None)):
        vector, opt_state, value = train_step(vector, opt_state)
        bar.set_postfix(loss=f"{value:.4f}", refresh=False)
    return vector, float(value)


def top_eigenvalues(
    loss: Loss, vector: Float[Array, " parameters"], count: int
) -> tuple[Float[np.ndarray, " count"], Float[np.ndarray, "parameters count"], int]:
    """The largest eigenvalues, falling, their eigenvectors, and the number of products."""

    @jax.jit
    def product(tangent):
        return jax.jvp(jax.grad(loss), (vector,), (tangent,))[1]

    with tqdm(desc="Hessian-vector products", disable=None) as bar:

        def matvec(tangent):
            bar.update()
            return np.asarray(product(jnp.asarray(tangent).reshape(vector.shape)))

        size = vector.size
        operator = scipy.sparse.linalg.LinearOperator((size, size), matvec, dtype=np.float64)
        start = np.random.default_rng(0).standard_normal(size)
        values, vectors = scipy.sparse.linalg.eigsh(operator, count, which="LA", v0=start)
        return values[::-1], vectors[:, ::-1], bar.n


def draw(dense, lanczos, steps, slices: dict[str, np.ndarray], path: Path) -> None:
    """The spectrum on the left, slices through the loss on the right."""
    figure = matplotlib.figure.Figure(figsize=(10, 4.2), dpi=110, layout="constrained")
    left, right = figure.subplots(1, 2)
    ranks = np.arange(1, len(dense) + 1)
    left.plot(ranks, dense, ".", color="#4c72b0", markersize=5, label="jax.hessian")
    label = "Lanczos, by Hessian-vector products"
    left.plot(ranks[: len(lanczos)], lanczos, "o", color="#dd8452", fillstyle="none", label=label)
    left.axvline(10.5, color="#999999", linewidth=0.8, linestyle="--")
    left.text(11.5, dense[0], "ten classes", color="#777777", va="center")
    left.set(xscale="log", yscale="log", xlabel="rank", ylabel="eigenvalue", ylim=(1e-5, 3))
    left.set_title("Few directions are steep")
    left.legend(frameon=False, loc="lower left")
    for (name, values), colour in zip(
        slices.items(), ("#c44e52", "#dd8452", "#55a868"), strict=True
    ):
        right.plot(steps, values, color=colour, linewidth=2, label=name)
    right.set(
        xlabel="distance from the minimum", ylabel="loss", title="The loss along eigenvectors"
    )
    right.legend(frameon=False)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def main(
    picture: Path = PICTURE, hidden: int = 8, steps: int = 600, count: int = 12
) -> dict[str, float]:
    """Trains, and computes the curvature both ways; returns what it measured."""
    jax.config.update("jax_enable_x64", True)
    torch.set_num_threads(1)  # the tensors are small
    loss, vector = make_loss(hidden)
    vector, value = train(loss, vector, steps)

    lanczos, vectors, products = top_eigenvalues(loss, vector, count)
    dense = np.linalg.eigvalsh(np.asarray(jax.jit(jax.hessian(loss))(vector)))[::-1]
    difference = float(np.abs(lanczos - dense[:count]).max() / dense[0])

    print(f"\n{vector.size} parameters, loss {value:.4f}")
    print(f"{'':>6}{'Lanczos':>12}{'jax.hessian':>14}")
    for rank in range(count):
        print(f"{rank + 1:>6}{lanczos[rank]:>12.6f}{dense[rank]:>14.6f}")
    print(f"They differ by {difference:.0e} of the largest, after {products} products.")

    distances = np.linspace(-2, 2, 81)
    last = min(count, 10) - 1
    directions = {"largest": vectors[:, 0], f"number {last + 1}": vectors[:, last]}
    directions["a random direction"] = np.random.default_rng(1).standard_normal(vector.size)
    slices = {}
    for name, direction in directions.items():
        unit = direction / np.linalg.norm(direction)
        slices[name] = np.asarray(jax.lax.map(loss, vector + distances[:, None] * unit))
    draw(dense, lanczos, distances, slices, picture)
    print(f"\nThe spectrum is in {picture}.")
    return {
        "difference": difference,
        "products": products,
        "largest": float(lanczos[0]),
        "median": float(np.median(dense)),
        "parameters": vector.size,
        "loss": value,
    }


if __name__ == "__main__":
    main()
