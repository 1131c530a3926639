"""The first screen of an explanation: it fits a terminal and speaks the author's language."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

import perfuse
from perfuse.report.explanation import Explanation
from perfuse.report.rows import library_kind
from perfuse.report.screen import HEIGHT, WIDTH, clip
from perfuse.report.stages import STAGES


def assert_fits(explanation: Explanation) -> str:
    text = str(explanation)
    lines = text.splitlines()
    assert len(lines) <= HEIGHT == 40, text
    assert max(map(len, lines)) <= WIDTH == 80, text
    assert repr(explanation) == text
    return text


def gpt2(num_layers: int) -> GPT2LMHeadModel:
    config = GPT2Config(
        n_layer=num_layers, n_embd=32, n_head=2, vocab_size=64, n_positions=32,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


class Net(nn.Module):
    """Two blocks with a convolution, and an op that no backend covers."""

    def __init__(self) -> None:
        super().__init__()
        make = (nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.GELU())
        self.blocks = nn.ModuleList([nn.Sequential(*make) for _ in range(2)])
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return torch.linalg.svdvals(self.head(x.mean((2, 3)))) + 1


def test_gpt2_fits_a_screen_and_names_its_modules() -> None:
    """Many layers, whose equal kernels are one row."""
    tokens = torch.randint(0, 64, (1, 8))
    with torch.no_grad():
        explanation = perfuse.explain(gpt2(6).eval(), tokens)
    text = assert_fits(explanation)
    assert re.search(r"^\d+ ops -> \d+ kernels, \d+ library calls$", text, re.MULTILINE)
    assert re.search(r"transformer\.h\.\d+\.(mlp|ln_\d|attn)", text)
    assert re.search(r"\b[56]x ", text), "equal kernels of the layers share a row"
    assert re.search(r"modeling_gpt2\.py:\d+|activations\.py:\d+", text)
    assert "matmul" in text and "attention" in text
    modules = {m for graph in explanation.graphs for k in graph.kernels for m in k.modules}
    assert {f"transformer.h.{k}.mlp.act" for k in range(6)} <= modules
    called = {c.module for graph in explanation.graphs for c in graph.library_calls}
    assert {"transformer.h.3.attn.c_attn", "transformer.h.5.mlp.c_proj", "lm_head"} <= called


def test_training_says_what_is_saved_and_recomputed() -> None:
    explanation = perfuse.explain(gpt2(2), torch.randint(0, 64, (1, 8)))
    text = assert_fits(explanation)
    assert "(backward):" in text
    assert re.search(r"Backward: \d+ values saved \(.+\), \d+ recomputed \(.+ flops\)", text)
    assert re.search(r"^  saved .* transformer\.\S+$", text, re.MULTILINE)
    backward = next(graph for graph in explanation.graphs if graph.is_backward)
    with_module = [k for k in backward.kernels if k.modules]
    assert len(with_module) >= 0.9 * len(backward.kernels), "modules survive the backward"


def test_calls_are_named_with_their_reason() -> None:
    with torch.no_grad():
        text = assert_fits(perfuse.explain(Net().eval(), torch.randn(2, 4, 8, 8)))
    assert re.search(r"2x convolution .*aten\.convolution", text)
    assert "Fallbacks" in text and "svd" in text
    assert "blocks.0." in text or "blocks.1." in text


@pytest.mark.parametrize(
    "settings",
    [{"gpu.interpret": True}, {"memory_budget": 0.9}, {"recompute_level": 3}],
    ids=["gpu", "budget", "recompute"],
)
@pytest.mark.filterwarnings("ignore:memory_budget")
def test_settings_are_those_of_the_program(settings: dict[str, Any]) -> None:
    weight = torch.randn(16, 16, requires_grad=True)

    def program(x: Tensor) -> Tensor:
        return torch.tanh(torch.tanh(x @ weight) @ weight).softmax(-1).sum()

    with perfuse.config.patch(settings):
        text = assert_fits(perfuse.explain(program, torch.randn(4, 16)))
    ((name, value),) = settings.items()
    assert re.search(rf"^  with .*{re.escape(f'{name}={value!r}')}", text, re.MULTILINE)
    assert ("sm_90" in text) == (name == "gpu.interpret")


def test_graph_breaks_and_recompiles_are_told() -> None:
    def inner(x: Tensor) -> Tensor:
        return (x * 2).softmax(0)

    def broken(x: Tensor) -> Tensor:
        y = torch.sin(x)
        torch._dynamo.graph_break()
        return torch.cos(y)

    text = assert_fits(perfuse.explain(broken, torch.randn(8)))
    assert "1 graph break: Call to `torch._dynamo.graph_break()`" in text
    assert "graph 0 (forward)" in text and "graph 1 (forward)" in text

    def again(x: Tensor) -> Tensor:
        y = inner(x)
        torch._dynamo.graph_break()
        return inner(y[:4]) + inner(x[:4])

    assert_fits(perfuse.explain(again, torch.randn(8)))

    def in_two(x: Tensor) -> Tensor:
        y = x * 2
        torch._dynamo.graph_break()
        return y.softmax(0)

    def at_two_sizes(x: Tensor) -> Tensor:
        return in_two(x)[:4] + in_two(x[:4])

    text = assert_fits(perfuse.explain(at_two_sizes, torch.randn(8)))
    found = re.findall(r"^  1 recompile: .*tensor '(\w)' size mismatch", text, re.MULTILINE)
    assert sorted(found) == ["x", "y"], text  # before the break and after it


def test_dynamic_sizes_are_reckoned_with_the_likely_ones() -> None:
    x = torch.randn(6, 8)
    torch._dynamo.mark_dynamic(x, 0)
    explanation = perfuse.explain(lambda x: torch.layer_norm(x, (8,)) * 2, x)
    assert re.search(r"dynamic sizes; figures below are for s\d+ = 6", assert_fits(explanation))
    ((kernel,),) = (graph.kernels for graph in explanation.graphs)
    assert kernel.num_bytes == 2 * 6 * 8 * 4 and kernel.num_flops > 6 * 8


@pytest.mark.parametrize("function", [lambda x: x.shape[0], lambda x: x], ids=["size", "input"])
def test_a_function_that_computes_nothing(function: Callable[[Tensor], Any]) -> None:
    assert_fits(perfuse.explain(function, torch.randn(3)))


def test_a_kernel_is_named_for_what_it_computes_and_moves() -> None:
    def program(ids: Tensor, table: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        hidden = torch.tanh(torch.nn.functional.embedding(ids, table))
        return torch.sigmoid(torch.nn.functional.linear(hidden, weight, bias)) * 2

    ids, table = torch.randint(0, 5000, (4,)), torch.randn(5000, 8)
    (graph,) = perfuse.explain(program, ids, table, torch.randn(8, 8), torch.randn(8)).graphs
    before, after = graph.kernels
    assert before.ops == ("embedding", "tanh"), "not the matmul that wants it in memory"
    assert after.ops == ("addmm", "sigmoid", "mul"), "nothing of what the matmul was given"
    assert before.num_bytes == 4 * 8 + 2 * 4 * 8 * 4, "four rows, not the table"


def test_stages_on_request() -> None:
    explanation = perfuse.explain(lambda x: torch.relu(x).sum(-1), torch.randn(4, 8))
    expected = {"graph": "aten.relu", "program": "program(", "plan": "k0(", "host": "def call"}
    for stage, word in {**expected, "sources": "#include", "kernels": "k0"}.items():
        assert word in explanation.stage(stage), stage
        assert "# graph 0" not in explanation.stage(stage, graph=0)
    assert all(isinstance(explanation.stage(name), str) for name in STAGES)
    with pytest.raises(perfuse.UnknownOption, match="unknown stage 'plam'") as caught:
        explanation.stage("plam")
    assert caught.value.nearest == "plan"
    with pytest.raises(perfuse.PerfuseError, match="no graph 7"):
        explanation.stage("plan", graph=7)


def test_a_terminal_gets_titles_in_bold_and_a_file_does_not() -> None:
    explanation = perfuse.explain(lambda x: x + 1, torch.randn(4))
    for is_terminal in (True, False):
        file = io.StringIO()
        Console(file=file, width=60, force_terminal=is_terminal).print(explanation)
        assert ("\x1b[1m" in file.getvalue()) == is_terminal
        assert len(file.getvalue().splitlines()) == len(str(explanation).splitlines())


@pytest.mark.parametrize(
    ("op", "kind"),
    [
        ("aten.mm.out", "matmul"),
        ("mkldnn._linear_pointwise.default", "matmul"),
        ("aten.convolution_backward.default", "convolution"),
        ("aten._scaled_dot_product_flash_attention_for_cpu.default", "attention"),
        ("aten._linalg_svd.default", ""),
        ("aten.sum.dim_IntList", ""),
        ("py:cond", ""),
    ],
)
def test_kinds_of_library_calls(op: str, kind: str) -> None:
    assert library_kind(op) == kind


def test_clip() -> None:
    assert clip("a\nb", 80) == "a b"
    assert clip("x" * 90, 80) == "x" * 78 + ".."
