"""Interatomic potentials as people deploy them: scripted, traced or frozen, from a file.

`TensorProduct` is generated code, as equivariant networks make it: a graph of `torch.fx`, compiled
by TorchScript, with the coupling coefficients in buffers.
"""

import io

import torch
import torch.fx


CUTOFF = 3.0


class TensorProduct(torch.nn.Module):
    """Scalars and vectors of two inputs, multiplied in each way that turns with the axes."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(4, channels))
        epsilon = torch.zeros(3, 3, 3)
        for i in range(3):
            epsilon[i, (i + 1) % 3, (i + 2) % 3] = 1.0
            epsilon[i, (i + 2) % 3, (i + 1) % 3] = -1.0
        self.register_buffer("epsilon", epsilon)
        self.code = torch.jit.script(_generated())

    def forward(self, s: torch.Tensor, v: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return self.code(s, v, t, self.weight, self.epsilon)


def _generated() -> torch.fx.GraphModule:
    """Computes scalars from channels `s`, their vectors `v`, and one vector `t` for each edge."""
    graph = torch.fx.Graph()
    s, v, t, w, epsilon = (graph.placeholder(name) for name in ("s", "v", "t", "w", "epsilon"))
    dot = graph.call_function(torch.einsum, ("nci,ni->nc", v, t))
    crossed = graph.call_function(torch.einsum, ("nci,nj,ijk->nck", v, t, epsilon))
    length = graph.call_function(torch.einsum, ("nck,nck->nc", crossed, crossed))
    terms = [s, dot, length]
    total = None
    for i, term in enumerate(terms):
        row = graph.call_function(torch.select, (w, 0, i))
        product = graph.call_function(torch.mul, (term, row))
        total = product if total is None else graph.call_function(torch.add, (total, product))
    graph.output(total)
    return torch.fx.GraphModule(torch.nn.Module(), graph)


class Potential(torch.nn.Module):
    """The energy of atoms: of each pair, by a tensor product, from its distance."""

    def __init__(self, product: torch.nn.Module | None = None, channels: int = 4) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(3, channels)
        self.radial = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.SiLU())
        self.mix = torch.nn.Linear(8, channels)
        self.product = TensorProduct(channels) if product is None else product
        self.out = torch.nn.Linear(channels, 1)
        self.register_buffer("centres", torch.linspace(0.5, CUTOFF, 6))
        self.register_buffer("shift", torch.tensor([-1.0, 0.5, 2.0], dtype=torch.float64))

    def forward(self, positions: torch.Tensor, species: torch.Tensor) -> torch.Tensor:
        n = positions.shape[0]
        i = torch.arange(n).repeat_interleave(n - 1)
        j = (i + 1 + torch.arange(n - 1).repeat(n)) % n
        edge = positions[j] - positions[i]
        distance = edge.pow(2).sum(-1, keepdim=True).sqrt()
        weights = self.mix(self.radial(torch.exp(-((distance - self.centres) ** 2))))
        s = weights * self.embedding(species[j])
        v = s.unsqueeze(-1) * edge.unsqueeze(1)
        energy = self.out(torch.tanh(self.product(s, v, edge / distance))).sum()
        return energy + self.shift[species].sum().to(energy.dtype)


def loaded(module: torch.nn.Module) -> torch.nn.Module:
    """A TorchScript module, saved and read."""
    file = io.BytesIO()
    torch.jit.save(module, file)
    file.seek(0)
    return torch.jit.load(file)
