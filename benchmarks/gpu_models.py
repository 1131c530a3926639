"""The models of the GPU's baselines: bfloat16, random weights, no dropout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from benchmarks.cases import Case
from benchmarks.models import T5_SMALL, ModelRow, problem

LLAMA = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32_000,
}
HEADS = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
TINY: dict[str, Mapping[str, Any]] = {
    "BertConfig": {**HEADS, "intermediate_size": 64},
    "GPT2Config": {"n_embd": 64, "n_layer": 1, "n_head": 2},
    "LlamaConfig": {**HEADS, "num_key_value_heads": 2, "intermediate_size": 64},
    "T5Config": {"d_model": 64, "num_layers": 1, "num_heads": 2, "d_ff": 64},
    "ViTConfig": {**HEADS, "intermediate_size": 64},
}

R = partial(ModelRow, dtype=torch.bfloat16)
ROWS = (
    R("bert-base", "BertModel", "BertConfig", "input_ids", (16, 512)),
    R("gpt2", "GPT2LMHeadModel", "GPT2Config", "input_ids", (8, 1024)),
    R("llama-1b-ish", "LlamaForCausalLM", "LlamaConfig", "input_ids", (4, 2048), LLAMA),
    R("t5-small", "T5ForConditionalGeneration", "T5Config", "input_ids", (16, 512), T5_SMALL, True),
    R("vit-base", "ViTModel", "ViTConfig", "pixel_values", (32, 3, 224, 224)),
)


def for_training(row: ModelRow) -> ModelRow:
    is_language = row.model.endswith(("LMHeadModel", "ForCausalLM"))
    return replace(row, name=f"{row.name} train", has_labels=row.has_labels or is_language)


def shrunk(row: ModelRow) -> ModelRow:
    shape = (2, 16) if row.input_name == "input_ids" else (2, *row.shape[1:])
    return replace(row, shape=shape, settings={**row.settings, **TINY[row.config]})


def model_cases(is_small: bool) -> list[Case]:
    found = []
    for train in (False, True):
        for base in ROWS:
            row = for_training(base) if train else base
            row = shrunk(row) if is_small else row
            what = f"{row.model} {'x'.join(map(str, row.shape))}"
            found.append(Case(row.name, "model", what, partial(problem, row, train)))
    return found
