"""Small models trained on synthetic data in any precision: the loss at the end is what counts.

The data has noise that no model can learn, so that the loss tends to a limit well above zero, and
what a precision loses shows against it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import perfuse
from perfuse.precision import LayerRules, Recipe, Scaling

WIDTH, VOCABULARY, LENGTH, BATCH, ROWS = 128, 128, 32, 8, 128
# Everything but named heads: these models are small.
RULES = LayerRules(min_features=16, keeps_head=False)
RECIPES = {f"fp8-{scaling}": Recipe(scaling, layers=RULES) for scaling in Scaling}
# The most by which the loss may differ from that in float32.
LIMITS: Mapping[str, float] = {"bf16": 0.01, **dict.fromkeys(RECIPES, 0.03)}


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=WIDTH, n_layer=2, n_head=4,
        bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
    )  # fmt: skip
    return LanguageModel(transformers.GPT2LMHeadModel(config))


def llama() -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, max_position_embeddings=LENGTH, hidden_size=WIDTH,
        intermediate_size=2 * WIDTH, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=4, use_cache=False,
    )  # fmt: skip
    return LanguageModel(transformers.LlamaForCausalLM(config))


class LanguageModel(nn.Module):
    """Tokens -> logits."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.inner(input_ids=tokens).logits
        return logits


def regression(seed: int) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Inputs, and the loss against a function of them with noise."""
    random = torch.Generator().manual_seed(seed)
    fixed = torch.Generator().manual_seed(0)
    teacher = torch.randn(WIDTH, WIDTH, generator=fixed) / math.sqrt(WIDTH)
    x = torch.randn(ROWS, WIDTH, generator=random)
    target = torch.tanh(x @ teacher) + 0.5 * torch.randn(ROWS, WIDTH, generator=random)
    return x, lambda result: F.mse_loss(result.float(), target)


def chain(seed: int) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Tokens of a Markov chain, each with eight successors, and the loss of predicting the next."""
    random = torch.Generator().manual_seed(seed)
    fixed = torch.Generator().manual_seed(0)
    successors = torch.randint(VOCABULARY, (VOCABULARY, 8), generator=fixed)
    tokens = [torch.randint(VOCABULARY, (BATCH,), generator=random)]
    for _ in range(LENGTH):
        drawn = torch.randint(8, (BATCH,), generator=random)
        tokens.append(successors[tokens[-1], drawn])
    text = torch.stack(tokens, 1)
    target = text[:, 1:].flatten()
    return text[:, :-1], lambda logits: F.cross_entropy(logits.float().flatten(0, 1), target)


@dataclass(frozen=True, slots=True)
class Training:
    """A model and its data."""

    model: Callable[[], nn.Module]
    batch: Callable[[int], tuple[Tensor, Callable[[Tensor], Tensor]]]


TRAININGS = {
    "mlp": Training(mlp, regression),
    "gpt2": Training(gpt2, chain),
    "llama": Training(llama, chain),
}


def final_loss(
    name: str, precision: str | None, num_steps: int, *, device: str = "cpu", compiles: bool = True
) -> float:
    """The loss over fresh data after training, in the precision that it was trained in."""
    training = TRAININGS[name]
    torch.manual_seed(0)
    model = training.model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    run = runner(model, precision, device, compiles)
    for step in range(num_steps):
        x, loss_of = training.batch(step + 1)
        loss = loss_of(run(x.to(device)).cpu())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        losses = []
        for seed in range(100_000, 100_004):
            x, loss_of = training.batch(seed)
            losses.append(float(loss_of(run(x.to(device)).cpu())))
    return sum(losses) / len(losses)


def runner(
    model: nn.Module, precision: str | None, device: str, compiles: bool
) -> Callable[[Tensor], Tensor]:
    """The model in a precision, compiled or in eager regions."""
    way: Any = RECIPES.get(precision or "", precision)
    if compiles:
        return perfuse.compile(model, precision=way, fullgraph=True, dynamic=False)
    if precision is None:
        return model
    if precision == "bf16":
        return perfuse.autocast(device, torch.bfloat16)(model.forward)
    layers = perfuse.precision.prepare(model, way)
    return perfuse.autocast(device, torch.float8_e4m3fn, recipe=layers)(model.forward)
