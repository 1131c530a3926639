"""A small network for the C++ host: see main.cpp beside it."""

import torch

torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Linear(64, 128),
    torch.nn.GELU(),
    torch.nn.LayerNorm(128),
    torch.nn.Linear(128, 10),
    torch.nn.Softmax(-1),
).eval()


def example_args() -> torch.Tensor:
    return torch.randn(4, 64)
