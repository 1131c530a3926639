"""Models written with einops: options of x-transformers and architectures of vit-pytorch.

One tiny model for each option or architecture; every one is trained for a step.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor, nn

from tests.sweep.subject import NotMade, Subject, deterministic, noise, stirred, variant_of, why

# Options of x_transformers.Decoder, by the name of the row.
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rotary": {"rotary_pos_emb": True},
    "rotary_xpos": {"rotary_xpos": True},
    "alibi": {"alibi_pos_bias": True},
    "relative_bias": {"rel_pos_bias": True},
    "dynamic_bias": {"dynamic_pos_bias": True},
    "polar": {"polar_pos_emb": True},
    "cope": {"attn_use_cope": True},
    "rms_norm_glu": {"use_rmsnorm": True, "ff_glu": True, "ff_swish": True},
    "dynamic_tanh": {"use_dynamic_tanh": True},
    "qk_norm": {"attn_qk_norm": True},
    "sparse_topk": {"attn_sparse_topk": 4},
    "gated_values": {"attn_gate_values": True},
    "one_kv_head": {"attn_kv_heads": 1},
    "flash": {"attn_flash": True},
    "memories": {"attn_num_mem_kv": 4},
    "soft_clamp": {"attn_softclamp_logits": True},
    "laser": {"attn_laser": True},
    "selective": {"attn_selective": True},
    "head_scale": {"attn_head_scale": True},
    "macaron": {"macaron": True},
    "sandwich": {"sandwich_coef": 1},
    "shifted_tokens": {"shift_tokens": 1},
    "residual_attention": {"residual_attn": True},
    "residual_streams": {"num_residual_streams": 2},
}

# Classes of vit_pytorch by their modules; what they take besides `COMMON`, or instead of it.
COMMON = {
    "image_size": 32,
    "patch_size": 8,
    "num_classes": 5,
    "dim": 16,
    "depth": 1,
    "heads": 2,
    "mlp_dim": 32,
}
VISION: dict[str, tuple[str, dict[str, Any]]] = {
    "vit": ("ViT", COMMON),
    "simple_vit": ("SimpleViT", COMMON),
    "simple_vit_with_qk_norm": ("SimpleViT", COMMON),
    "simple_vit_with_register_tokens": ("SimpleViT", COMMON),
    "simple_vit_with_fft": ("SimpleViT", {**COMMON, "freq_patch_size": 8}),
    "normalized_vit": ("nViT", COMMON),
    "deepvit": ("DeepViT", COMMON),
    "parallel_vit": ("ViT", {**COMMON, "num_parallel_branches": 2}),
    "learnable_memory_vit": ("ViT", COMMON),
    "vit_for_small_dataset": ("ViT", COMMON),
    "rvt": ("RvT", COMMON),
    "cait": ("CaiT", {**COMMON, "cls_depth": 1}),
    "ats_vit": ("ViT", {**COMMON, "max_tokens_per_depth": (8,)}),
    "xcit": ("XCiT", {**COMMON, "cls_depth": 1, "local_patch_kernel_size": 3}),
    "pit": ("PiT", {**COMMON, "depth": (1, 1)}),
    "max_vit": (
        "MaxViT",
        {
            "num_classes": 5,
            "dim_conv_stem": 8,
            "dim": 8,
            "dim_head": 8,
            "depth": (1, 1),
            "window_size": 4,
            "mbconv_expansion_rate": 2,
            "mbconv_shrinkage_rate": 0.5,
        },
    ),
    "nest": (
        "NesT",
        {
            "image_size": 32,
            "patch_size": 4,
            "dim": 16,
            "heads": 2,
            "num_classes": 5,
            "num_hierarchies": 2,
            "block_repeats": (1, 1),
        },
    ),
    "regionvit": (
        "RegionViT",
        {"dim": (8, 8, 8, 8), "depth": (1, 1, 1, 1), "window_size": 4, "num_classes": 5},
    ),
}
SIDES = {"regionvit": 64}


def names() -> list[str]:
    importlib.import_module("x_transformers")
    importlib.import_module("vit_pytorch")
    return [*(f"x_transformers.{name}" for name in OPTIONS), *(f"vit_pytorch.{n}" for n in VISION)]


def make(name: str, variant: str) -> Subject:
    package, _, what = name.partition(".")
    torch.manual_seed(0)
    try:
        model, inputs = decoder(what) if package == "x_transformers" else vision(what)
    except (ImportError, TypeError, AssertionError) as error:  # another version of the package
        raise NotMade(why(error)) from error
    model = stirred(deterministic(model)).eval()
    return variant_of(Subject(model, ((inputs,), {})), variant)


def decoder(option: str) -> tuple[nn.Module, Tensor]:
    package: Any = importlib.import_module("x_transformers")
    layers = package.Decoder(dim=16, depth=2, heads=2, attn_dim_head=8, **OPTIONS[option])
    model = package.TransformerWrapper(num_tokens=20, max_seq_len=16, attn_layers=layers)
    words = torch.randint(0, 20, (2, 16), generator=torch.Generator().manual_seed(2))
    return model, words


def vision(architecture: str) -> tuple[nn.Module, Tensor]:
    cls, options = VISION[architecture]
    made = getattr(importlib.import_module(f"vit_pytorch.{architecture}"), cls)(**options)
    side = SIDES.get(architecture, 32)
    return made, noise(2, 3, side, side)
