"""Mixtures of experts on a CPU: eager, the peer and Perfuse, in processor time of one thread.

python -m benchmarks.experts_cpu [--forms where grouped] [--sizes small] [--dtype bfloat16]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, one_hot, silu

BACKENDS = ("eager", "inductor", "perfuse")


@dataclass(frozen=True, slots=True)
class Size:
    """The sizes of a layer: features, experts, experts for each token, tokens."""

    hidden: int
    experts: int
    top: int
    tokens: int

    def __str__(self) -> str:
        return f"{self.tokens} x {self.hidden}, {self.top} of {self.experts}"


SIZES = {
    "small": Size(64, 4, 1, 32),
    "decode": Size(256, 8, 2, 4),
    "medium": Size(128, 8, 2, 256),
    "many": Size(256, 16, 4, 128),
    "large": Size(512, 8, 2, 1024),
}


class Expert(nn.Module):
    """The MLP of an expert as models write it in a ModuleList."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.w1 = nn.Linear(size.hidden, 2 * size.hidden, bias=False)
        self.w3 = nn.Linear(size.hidden, 2 * size.hidden, bias=False)
        self.w2 = nn.Linear(2 * size.hidden, size.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(silu(self.w1(x)) * self.w3(x))


class Layer(nn.Module):
    """The gate of a mixture; subclasses compute the experts."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size = size
        self.gate = nn.Linear(size.hidden, size.experts, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        scores = torch.softmax(self.gate(x).float(), -1)
        weights, chosen = torch.topk(scores, self.size.top, dim=-1)
        weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
        return self.mix(x, weights, chosen)

    def mix(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        raise NotImplementedError


class Modules(Layer):
    """Experts in a ModuleList."""

    def __init__(self, size: Size) -> None:
        super().__init__(size)
        self.experts = nn.ModuleList(Expert(size) for _ in range(size.experts))


class Where(Modules):
    """A loop over experts, each with the rows of its own tokens: Mixtral's original code."""

    def mix(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        mask = one_hot(chosen, self.size.experts).permute(2, 1, 0)
        for number, expert in enumerate(self.experts):
            place, token = torch.where(mask[number])
            out.index_add_(0, token, expert(x[token]) * weights[token, place, None])
        return out


class Skipping(Modules):
    """The same by a boolean mask, without experts that no token chose."""

    def mix(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, place = torch.where(chosen == number)
            if token.numel() == 0:
                continue
            out[token] += expert(x[token]) * weights[token, place, None]
        return out


class Dense(Modules):
    """Every expert with all tokens."""

    def mix(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        gates = x.new_zeros(x.shape[0], self.size.experts).scatter(1, chosen, weights)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            out += expert(x) * gates[:, number : number + 1]
        return out


class Stacked(Layer):
    """Experts with weights in three tensors."""

    def __init__(self, size: Size) -> None:
        super().__init__(size)
        scale = size.hidden**-0.5
        wide, many = 2 * size.hidden, size.experts
        self.w13 = nn.Parameter(scale * torch.randn(many, 2 * wide, size.hidden))
        self.w2 = nn.Parameter(scale * torch.randn(many, size.hidden, wide))


class Grouped(Stacked):
    """Rows sorted by expert, and grouped matmuls."""

    def mix(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        order = torch.argsort(chosen.flatten(), stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=self.size.experts)
        ends = counts.cumsum(0).to(torch.int32)
        token = order // self.size.top
        hidden = torch._grouped_mm(x[token], self.w13.transpose(-2, -1), offs=ends)
        gate, up = hidden.chunk(2, -1)
        rows = torch._grouped_mm(silu(gate) * up, self.w2.transpose(-2, -1), offs=ends)
        rows = rows * weights.flatten()[order, None]
        return torch.zeros_like(x).index_add(0, token, rows)


class Split(Stacked):
    """Rows sorted by expert, split by counts read from the tensor: DeepSeek's inference."""

    def mix(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        order = chosen.flatten().argsort()
        counts = torch.bincount(chosen.flatten(), minlength=self.size.experts).tolist()
        pieces = []
        for number, rows in enumerate(x[order // self.size.top].split(counts)):
            gate, up = linear(rows, self.w13[number]).chunk(2, -1)
            pieces.append(linear(silu(gate) * up, self.w2[number]))
        found = torch.empty_like(torch.cat(pieces))
        found[order] = torch.cat(pieces)
        return (found.view(*chosen.shape, -1) * weights[..., None]).sum(1)


def _transformers(implementation: str) -> Callable[[Size], nn.Module]:
    def made(size: Size) -> nn.Module:
        from transformers import MixtralConfig
        from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

        config = MixtralConfig(
            hidden_size=size.hidden,
            intermediate_size=2 * size.hidden,
            num_local_experts=size.experts,
            num_experts_per_tok=size.top,
        )
        config._experts_implementation = implementation
        block = MixtralSparseMoeBlock(config)
        for parameter in block.parameters():
            nn.init.normal_(parameter, std=size.hidden**-0.5)
        return _Batched(block)

    return made


class _Batched(nn.Module):
    """A block that takes sequences, for one."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x[None])[0]


FORMS: dict[str, Callable[[Size], nn.Module]] = {
    "where": Where,
    "skipping": Skipping,
    "dense": Dense,
    "grouped": Grouped,
    "split": Split,
    "mixtral_eager": _transformers("eager"),
    "mixtral_grouped": _transformers("grouped_mm"),
    "mixtral_batched": _transformers("batched_mm"),
}


# Tracing torch._grouped_mm refuses other types than bfloat16 on a CPU.
UNTRACEABLE = {("grouped", "float32")}


def steps_of(form: str, size: Size, dtype: torch.dtype, training: bool) -> dict[str, Any]:
    """A call by each backend; a training step is forward and backward."""
    torch.manual_seed(0)
    model = FORMS[form](size).to(dtype)
    x = torch.randn(size.tokens, size.hidden, dtype=dtype)
    steps = {}
    for backend in BACKENDS:
        torch._dynamo.reset()
        call = model if backend == "eager" else torch.compile(model, backend=backend)
        steps[backend] = (_training if training else _inference)(call, model, x)
        for _ in range(3):
            steps[backend]()
    return steps


def _inference(call: Callable[[Tensor], Tensor], model: nn.Module, x: Tensor) -> Any:
    def step() -> Tensor:
        with torch.no_grad():
            return call(x)

    return step


def _training(call: Callable[[Tensor], Tensor], model: nn.Module, x: Tensor) -> Any:
    x = x.clone().requires_grad_()

    def step() -> Tensor:
        model.zero_grad(set_to_none=True)
        x.grad = None
        call(x).square().mean().backward()
        return x

    return step


def measure(steps: dict[str, Any], seconds: float) -> dict[str, float]:
    """The median of each step in milliseconds, taken in turns."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    began = time.perf_counter()
    while time.perf_counter() - began < seconds or len(times["eager"]) < 7:
        for name, step in steps.items():
            step()
            start = time.process_time()
            step()
            times[name].append(1e3 * (time.process_time() - start))
    return {name: median(values) for name, values in times.items()}


def num_graphs(form: str, size: Size, dtype: str) -> int:
    """Into how many graphs Dynamo divides a call."""
    torch._dynamo.reset()
    counts = [0]

    def count(module: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        def run(*args: Any) -> Any:
            counts[0] += 1
            return module.forward(*args)

        return run

    kind = getattr(torch, dtype)
    compiled = torch.compile(FORMS[form](size).to(kind), backend=count)
    x = torch.randn(size.tokens, size.hidden, dtype=kind)
    with torch.no_grad():
        for _ in range(3):
            counts[0] = 0
            compiled(x)
    return counts[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--forms", nargs="+", default=list(FORMS), choices=list(FORMS))
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--kinds", nargs="+", default=["forward", "step"])
    parser.add_argument("--seconds", type=float, default=1.5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    columns = "form | size | what | graphs | eager | peer | Perfuse | eager / Perfuse"
    print(f"| {columns} | peer / Perfuse |")
    print("|---|---|---|---|---|---|---|---|---|")
    forms = [form for form in arguments.forms if (form, arguments.dtype) not in UNTRACEABLE]
    for form in forms:
        for name in arguments.sizes:
            size = SIZES[name]
            for kind in arguments.kinds:
                graphs = num_graphs(form, size, arguments.dtype)
                steps = steps_of(form, size, getattr(torch, arguments.dtype), kind == "step")
                eager, peer, ours = measure(steps, arguments.seconds).values()
                times = f"{eager:.3f} | {peer:.3f} | {ours:.3f}"
                ratios = f"{eager / ours:.2f} | {peer / ours:.2f}"
                print(f"| {form} | {size} | {kind} | {graphs} | {times} | {ratios} |", flush=True)


if __name__ == "__main__":
    main()
