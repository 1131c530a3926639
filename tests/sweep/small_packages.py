"""Small packages of research code: quantisers, metric losses, sparse softmax, solvers of ODEs.

Each row is a module or a function of theirs, evaluated and trained for a step.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.sweep.subject import NotMade, Subject, deterministic, noise, stirred, variant_of, why

# Classes of vector_quantize_pytorch with what they take besides `dim`, by the name of the row.
QUANTISERS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("VectorQuantize", {"codebook_size": 16}),
    "cosine": ("VectorQuantize", {"codebook_size": 16, "use_cosine_sim": True}),
    "rotation": ("VectorQuantize", {"codebook_size": 16, "rotation_trick": True}),
    "orthogonal": ("VectorQuantize", {"codebook_size": 16, "orthogonal_reg_weight": 1.0}),
    "learned": (
        "VectorQuantize",
        {"codebook_size": 16, "learnable_codebook": True, "ema_update": False},
    ),
    "heads": (
        "VectorQuantize",
        {"codebook_size": 16, "heads": 2, "separate_codebook_per_head": True, "codebook_dim": 4},
    ),
    "residual": ("ResidualVQ", {"num_quantizers": 3, "codebook_size": 8}),
    "grouped": ("GroupedResidualVQ", {"groups": 2, "num_quantizers": 2, "codebook_size": 8}),
    "finite": ("FSQ", {"levels": [4, 3, 3]}),
    "residual_finite": ("ResidualFSQ", {"levels": [4, 3], "num_quantizers": 2}),
    "lookup_free": ("LFQ", {"codebook_size": 16}),
    "simple": ("SimVQ", {"codebook_size": 16}),
}
PROXIES = {"num_classes": 4, "embedding_size": 6}
# Losses of pytorch_metric_learning with what they take.
LOSSES: dict[str, dict[str, Any]] = {
    **{
        f"{name}Loss": {}
        for name in (
            "TripletMargin Contrastive NTXent SupCon Circle MultiSimilarity LiftedStructure "
            "Angular NPairs FastAP IntraPairVariance SignalToNoiseRatioContrastive NCA"
        ).split()
    },
    **{f"{name}Loss": PROXIES for name in "ArcFace CosFace SphereFace ProxyAnchor".split()},
}
SOFTMAXES = ("sparsemax", "entmax15", "entmax_bisect", "normmax_bisect", "budget_bisect")
METHODS = ("euler", "midpoint", "rk4", "heun3", "explicit_adams")  # of torchdiffeq, fixed steps
PACKAGES = {
    "vector_quantize_pytorch": QUANTISERS,
    "pytorch_metric_learning": LOSSES,
    "entmax": SOFTMAXES,
    "torchdiffeq": METHODS,
}


class Function(nn.Module):
    """A function, as a module without parameters."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


def names() -> list[str]:
    for package in PACKAGES:
        importlib.import_module(package)
    return [f"{package}.{row}" for package, rows in PACKAGES.items() for row in rows]


def make(name: str, variant: str) -> Subject:
    package, _, row = name.partition(".")
    torch.manual_seed(0)
    try:
        model, inputs = MAKERS[package](row)
    except (ImportError, TypeError, AttributeError) as error:  # another version of the package
        raise NotMade(why(error)) from error
    if not any(True for _ in model.parameters()):
        inputs[0].requires_grad_()
    model = stirred(deterministic(model)).eval()
    # Losses choose pairs by data: a graph that Dynamo alone keeps may end there in AOTAutograd.
    return variant_of(Subject(model, (tuple(inputs), {}), counts_graphs=False), variant)


def quantiser(row: str) -> tuple[nn.Module, list[Tensor]]:
    cls, options = QUANTISERS[row]
    package: Any = importlib.import_module("vector_quantize_pytorch")
    return getattr(package, cls)(dim=8, **options), [noise(2, 6, 8)]


def metric_loss(row: str) -> tuple[nn.Module, list[Tensor]]:
    losses: Any = importlib.import_module("pytorch_metric_learning.losses")
    return getattr(losses, row)(**LOSSES[row]), [noise(8, 6), torch.arange(8) // 2]


def sparse_softmax(row: str) -> tuple[nn.Module, list[Tensor]]:
    function = getattr(importlib.import_module("entmax"), row)
    options = {"entmax_bisect": {"alpha": 1.3}, "normmax_bisect": {"alpha": 2.0}}.get(row, {})
    options |= {"n_iter": 20} if "bisect" in row else {}
    options |= {"budget": 2} if "budget" in row else {}
    return Function(lambda x: function(x, dim=-1, **options)), [noise(4, 6)]


def solver(row: str) -> tuple[nn.Module, list[Tensor]]:
    package: Any = importlib.import_module("torchdiffeq")

    def solved(y: Tensor, w: Tensor) -> Any:
        times = torch.linspace(0, 1, 5, dtype=y.dtype)
        return package.odeint(lambda t, y: torch.tanh(y @ w) * t.cos(), y, times, method=row)

    return Function(solved), [noise(3, 4), noise(4, 4)]


MAKERS: dict[str, Callable[[str], tuple[nn.Module, list[Tensor]]]] = {
    "vector_quantize_pytorch": quantiser,
    "pytorch_metric_learning": metric_loss,
    "entmax": sparse_softmax,
    "torchdiffeq": solver,
}
