"""Gates of mixtures of experts on a CPU: eager, the peer and Perfuse, processor time of one thread.

python -m benchmarks.gating_cpu [--forms softmax groups] [--rows 1 4096] [--backends perfuse]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

BACKENDS = ("eager", "inductor", "perfuse")
Gate = Callable[[Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class Case:
    """One gate: its form, rows, experts, experts for each row, dtype."""

    form: str
    rows: int
    experts: int
    top: int
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        return f"{self.form} {self.rows} x {self.experts} k={self.top} {kind}"


def plain(top: int) -> Gate:
    return lambda x: torch.topk(x, top, dim=-1)


def softmax(top: int) -> Gate:
    """Qwen's and OLMoE's: the weights are those of all experts, scaled to a sum of 1."""

    def gate(x: Tensor) -> tuple[Tensor, Tensor]:
        weights, chosen = torch.topk(torch.softmax(x.float(), -1), top, dim=-1)
        return (weights / weights.sum(-1, keepdim=True)).to(x.dtype), chosen

    return gate


def after(top: int) -> Gate:
    """GPT-OSS': a softmax over what was chosen."""

    def gate(x: Tensor) -> tuple[Tensor, Tensor]:
        best, chosen = torch.topk(x, top, dim=-1)
        return torch.softmax(best, -1), chosen

    return gate


def sigmoid(top: int) -> Gate:
    """Llama 4's and others'."""

    def gate(x: Tensor) -> tuple[Tensor, Tensor]:
        weights, chosen = torch.topk(torch.sigmoid(x.float()), top, dim=-1)
        return (weights / (weights.sum(-1, keepdim=True) + 1e-20)).to(x.dtype), chosen

    return gate


def groups(top: int) -> Gate:
    """DeepSeek V3's: experts of the 4 best of 8 groups, by the sum of the two best in each."""

    def gate(x: Tensor) -> tuple[Tensor, Tensor]:
        scores = torch.sigmoid(x.float())
        grouped = scores.view(x.shape[0], 8, -1)
        best = torch.topk(grouped.topk(2, dim=-1)[0].sum(-1), 4, dim=-1, sorted=False)[1]
        mask = torch.zeros(x.shape[0], 8).scatter_(1, best, 1)
        wide = mask.unsqueeze(-1).expand(grouped.shape).reshape(scores.shape)
        kept = scores.masked_fill(~wide.bool(), 0.0)
        chosen = torch.topk(kept, top, dim=-1, sorted=False)[1]
        weights = scores.gather(1, chosen)
        return weights / (weights.sum(-1, keepdim=True) + 1e-20) * 2.5, chosen

    return gate


FORMS = {"plain": plain, "softmax": softmax, "after": after, "sigmoid": sigmoid, "groups": groups}


def cases(forms: list[str], rows: list[int], sizes: list[tuple[int, int]]) -> Iterator[Case]:
    for form in forms:
        for count in rows:
            for experts, top in sizes:
                yield Case(form, count, experts, top)
                if form == "plain" and top == sizes[0][1]:
                    yield Case(form, count, experts, top, torch.bfloat16)


def measured(case: Case, backends: list[str], rounds: int) -> dict[str, float]:
    """Median microseconds of processor time by backend, with interleaved rounds."""
    x = torch.randn(case.rows, case.experts).to(case.dtype)
    fns: dict[str, Gate] = {}
    for name in backends:
        torch._dynamo.reset()
        gate = FORMS[case.form](case.top)
        fns[name] = gate if name == "eager" else torch.compile(gate, backend=name)
        for _ in range(3):
            fns[name](x)
    times: dict[str, list[float]] = {name: [] for name in backends}
    calls = max(1, 200_000 // (case.rows * case.experts))
    for _ in range(rounds):
        for name, fn in fns.items():
            start = time.thread_time()
            for _ in range(calls):
                fn(x)
            times[name].append((time.thread_time() - start) / calls * 1e6)
    return {name: median(found) for name, found in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--forms", nargs="*", default=list(FORMS), choices=list(FORMS))
    parser.add_argument("--rows", nargs="*", type=int, default=[1, 64, 4096])
    parser.add_argument("--backends", nargs="*", default=list(BACKENDS), choices=list(BACKENDS))
    parser.add_argument("--sizes", nargs="*", default=["64,8", "8,2", "128,8", "256,8"])
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print("case," + ",".join(f"{name}_us" for name in options.backends), flush=True)
    sizes = [(int(n), int(k)) for n, k in (text.split(",") for text in options.sizes)]
    for case in cases(options.forms, options.rows, sizes):
        if case.form == "groups" and case.experts < 64:
            continue
        found = measured(case, options.backends, options.rounds)
        print(f"{case}," + ",".join(f"{found[name]:.1f}" for name in options.backends), flush=True)


if __name__ == "__main__":
    main()
