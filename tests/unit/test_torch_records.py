"""Names of modules as PyTorch records them, and as a model's author knows them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

import perfuse
from perfuse.torch_compat.records import module_path


@pytest.mark.parametrize(
    ("stack", "expected"),
    [
        (["L['self'].transformer", "L['self'].transformer.h.1.mlp"], "transformer.h.1.mlp"),
        (["L['fn']", "L['fn'].0.norm1"], "0.norm1"),  # a module that torch.compile wraps
        (["L['s'].layers.0"], "layers.0"),  # another name for self
        (["L['model']", "L['model'].layers.0"], "model.layers.0"),  # an argument
        (["G['net']", "G['net'].head"], "net.head"),  # a global
        (["G['nets'][0]", "G['nets'][0].head"], "nets.0.head"),
        (["L['self']._modules['layers']._modules['0']"], "layers.0"),
        (["L['self']._orig_mod.layers.0"], "layers.0"),
        (["L['self']"], ""),
        (["", "layers.0"], "layers.0"),  # of a program that torch.export made
        ([""], ""),
        ([], ""),
    ],
)
@pytest.mark.parametrize("key", ["nn_module_stack", "fwd_nn_module_stack"])
def test_module_path(stack: list[str], expected: str, key: str) -> None:
    entries = {str(number): (path, nn.Module) for number, path in enumerate(stack)}
    assert module_path(SimpleNamespace(meta={key: entries})) == expected


class Inner(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x).softmax(-1)


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({"first": Inner(), "second": Inner()})

    def forward(self, x: Tensor) -> Tensor:
        return self.parts["second"](self.parts["first"](x) @ x)


OUTER = Outer()


def test_names_reach_kernels_from_a_module_and_from_a_function() -> None:
    x = torch.randn(4, 4, requires_grad=True)
    for fn, prefix in ((OUTER, ""), (lambda x: OUTER(x), "OUTER.")):
        graphs = perfuse.explain(fn, x).graphs
        assert len(graphs) == 2
        for graph in graphs:
            found = {module for kernel in graph.kernels for module in kernel.modules}
            assert {f"{prefix}parts.first", f"{prefix}parts.second"} <= found
