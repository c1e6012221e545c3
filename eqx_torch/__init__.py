from ._function import torch2jax as torch2jax
