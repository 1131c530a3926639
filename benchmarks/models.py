"""Models of the baselines: random weights, sizes that keep one eager call in the hundreds of ms."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor

from benchmarks.cases import Case, Function, Problem, is_float
from tests.harness.compare import moved
from tests.harness.draws import moved_model


@dataclass(frozen=True, slots=True)
class ModelRow:
    name: str
    model: str
    config: str
    input_name: str
    shape: tuple[int, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)
    has_labels: bool = False  # labels make the loss; without, the first output is summed
    dtype: torch.dtype = torch.float32


LLAMA = {
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 8,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "vocab_size": 32_000,
}
VIT_SMALL = {"hidden_size": 384, "num_attention_heads": 6, "intermediate_size": 1536}
WHISPER_BASE = {
    "d_model": 512,
    "encoder_layers": 6,
    "encoder_attention_heads": 8,
    "encoder_ffn_dim": 2048,
    "decoder_layers": 1,  # built with the encoder, never run
    "decoder_attention_heads": 8,
}
T5_SMALL = {"decoder_start_token_id": 0, "d_model": 512, "d_ff": 2048, "num_layers": 6}

R = ModelRow
FORWARD = (
    R("bert", "BertModel", "BertConfig", "input_ids", (2, 128)),
    R("gpt2", "GPT2LMHeadModel", "GPT2Config", "input_ids", (2, 64)),
    R("llama", "LlamaForCausalLM", "LlamaConfig", "input_ids", (2, 96), LLAMA),
    R("t5", "T5ForConditionalGeneration", "T5Config", "input_ids", (2, 128), T5_SMALL, True),
    R("vit", "ViTModel", "ViTConfig", "pixel_values", (2, 3, 224, 224), VIT_SMALL),
    R("distilbert", "DistilBertForMaskedLM", "DistilBertConfig", "input_ids", (2, 128)),
    R("mobilebert", "MobileBertModel", "MobileBertConfig", "input_ids", (2, 128)),
    R(
        "whisper_enc",
        "WhisperModel.encoder",
        "WhisperConfig",
        "input_features",
        (1, 80, 3000),
        WHISPER_BASE,
    ),
    R("convnext", "ConvNextModel", "ConvNextConfig", "pixel_values", (2, 3, 224, 224)),
    R("resnet", "ResNetModel", "ResNetConfig", "pixel_values", (2, 3, 224, 224)),
)
TRAIN = (
    R("bert train", "BertForMaskedLM", "BertConfig", "input_ids", (2, 96), {}, True),
    R("gpt2 train", "GPT2LMHeadModel", "GPT2Config", "input_ids", (2, 64), {}, True),
    R("vit train", "ViTModel", "ViTConfig", "pixel_values", (2, 3, 224, 224), VIT_SMALL),
)


def build_model(row: ModelRow) -> Any:
    config = getattr(transformers, row.config)(**row.settings)
    for name, value in vars(config).items():
        if "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)  # so that a training step can be checked against eager
    if hasattr(config, "use_cache"):
        config.use_cache = False
    torch.manual_seed(0)
    name, _, part = row.model.partition(".")
    model = getattr(transformers, name)(config)
    return getattr(model, part) if part else model


def build_inputs(row: ModelRow) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    if row.input_name != "input_ids":
        drawn = torch.randn(row.shape, generator=generator, device="cpu").to(row.dtype)
        return {row.input_name: drawn.to(torch.get_default_device())}
    tokens = torch.randint(5, 30_000, row.shape, generator=generator, device="cpu")
    tokens = tokens.to(torch.get_default_device())
    labels = {"labels": tokens.clone()} if row.has_labels else {}
    return {"input_ids": tokens, **labels}


def problem(row: ModelRow, train: bool) -> Problem:
    model = build_model(row).to(row.dtype).train(train)
    inputs = build_inputs(row)
    step = train_step if train else forward_step
    is_half = row.dtype != torch.float32
    wide, eps = torch.float32 if is_half else torch.float64, torch.finfo(row.dtype).eps

    def exact(direction: str) -> Any:
        if direction and not is_half:
            return None  # eager's error says enough, and a step in float64 takes long
        wider = copy.deepcopy(model).to(wide)
        with torch.no_grad():
            for own, given in zip(wider.parameters(), model.parameters(), strict=True):
                own.copy_(moved(given, eps, direction))
        wide_inputs = {
            k: moved(v, eps, direction).to(wide) if is_float(v) else v for k, v in inputs.items()
        }
        return step(wider, wide_inputs, wider)

    def draw(direction: str) -> tuple[Any, Any]:
        other = moved_model(model, direction)
        wider = copy.deepcopy(other).to(wide)
        wide_inputs = {k: v.to(wide) if is_float(v) else v for k, v in inputs.items()}
        return step(other, inputs, other), step(wider, wide_inputs, wider)

    run = partial(step, model, inputs)
    return Problem(model, (inputs,), run, exact, has_backward=train, draw=draw)


def forward_step(model: Any, inputs: dict[str, Tensor], candidate: Function) -> Any:
    with torch.no_grad():
        return floats(candidate(**inputs))


def train_step(model: Any, inputs: dict[str, Tensor], candidate: Function) -> Any:
    """Loss and the gradients of all parameters."""
    outputs = candidate(**inputs)
    loss = outputs["loss"] if "labels" in inputs else outputs[0].square().mean()
    model.zero_grad(set_to_none=True)
    loss.backward()
    # What no output depends on has no gradient, or one of zeros: both are right.
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return [loss.detach(), *grads]


def floats(outputs: Any) -> list[Tensor]:
    values = [v for v in outputs.values() if isinstance(v, Tensor)]
    return [v for v in values if v.is_floating_point()]


def models() -> list[Case]:
    return [
        Case(row.name, "model", f"{row.model} {row.shape}", partial(problem, row, train))
        for rows, train in ((FORWARD, False), (TRAIN, True))
        for row in rows
    ]
