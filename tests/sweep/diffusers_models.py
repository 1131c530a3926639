"""Architectures of diffusers, each with a configuration small enough to train on a CPU.

Their configurations go together in ways that names do not tell, so each is a row; a class that has
none is listed as left out.
"""

from __future__ import annotations

import torch

from tests.sweep.diffusers_inputs import (
    AUTOENCODER,
    BLOCKS,
    CONDITIONED,
    HEADS,
    LATENT,
    TEXT,
    Row,
    denoised,
    image,
)
from tests.sweep.diffusers_more import MORE_ROWS
from tests.sweep.subject import NotMade, Subject, deterministic, noise, stirred, variant_of, why

ROWS: dict[str, Row] = {
    "UNet2DModel": Row(
        {
            "sample_size": 16,
            "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
            "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
            "attention_head_dim": 4,
            **BLOCKS,
        },
        lambda: denoised(**image()),
    ),
    "UNet1DModel": Row(
        {
            "sample_size": 16,
            "in_channels": 14,
            "out_channels": 14,
            "time_embedding_type": "positional",
            "use_timestep_embedding": True,
            "act_fn": "mish",
            "freq_shift": 1.0,
            "flip_sin_to_cos": False,
            "block_out_channels": (16, 32),
            "out_block_type": "OutConv1DBlock",
            "mid_block_type": "MidResTemporalBlock1D",
            "down_block_types": ("DownResnetBlock1D", "DownResnetBlock1D"),
            "up_block_types": ("UpResnetBlock1D",),
            "norm_num_groups": 8,
            "layers_per_block": 1,
        },
        lambda: denoised(sample=noise(2, 14, 16)),
    ),
    "UNet2DConditionModel": Row(
        CONDITIONED | {"up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D")},
        lambda: denoised(sample=LATENT, encoder_hidden_states=TEXT),
    ),
    "UNet3DConditionModel": Row(
        {
            "sample_size": 8,
            "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"),
            "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D"),
            "cross_attention_dim": 8,
            "attention_head_dim": 4,
            **BLOCKS,
        },
        lambda: denoised(sample=noise(2, 4, 2, 8, 8), encoder_hidden_states=TEXT),
    ),
    "ControlNetModel": Row(
        {k: v for k, v in CONDITIONED.items() if k != "sample_size"}
        | {"conditioning_embedding_out_channels": (4, 8)},
        lambda: denoised(
            sample=LATENT, encoder_hidden_states=TEXT, controlnet_cond=noise(2, 3, 16, 16)
        ),
    ),
    "AutoencoderKL": Row(AUTOENCODER, image),
    "AutoencoderTiny": Row(
        {
            "encoder_block_out_channels": (8, 8),
            "decoder_block_out_channels": (8, 8),
            "num_encoder_blocks": (1, 2),
            "num_decoder_blocks": (2, 1),
        },
        image,
    ),
    "VQModel": Row(AUTOENCODER | {"latent_channels": 3, "num_vq_embeddings": 16}, image),
    "AutoencoderDC": Row(
        {
            "latent_channels": 4,
            "attention_head_dim": 2,
            "encoder_block_types": ("ResBlock", "EfficientViTBlock"),
            "decoder_block_types": ("ResBlock", "EfficientViTBlock"),
            "encoder_block_out_channels": (8, 8),
            "decoder_block_out_channels": (8, 8),
            "encoder_layers_per_block": (1, 1),
            "decoder_layers_per_block": (1, 1),
            "encoder_qkv_multiscales": ((), (5,)),
            "decoder_qkv_multiscales": ((), (5,)),
        },
        image,
    ),
    "DiTTransformer2DModel": Row(
        HEADS | {"sample_size": 8, "num_embeds_ada_norm": 8},
        lambda: denoised(
            hidden_states=LATENT, timestep=torch.tensor([1, 5]), class_labels=torch.tensor([1, 2])
        ),
    ),
    "PixArtTransformer2DModel": Row(
        HEADS | {"sample_size": 8, "cross_attention_dim": 16, "caption_channels": 8},
        lambda: denoised(hidden_states=LATENT, encoder_hidden_states=TEXT),
    ),
    "SD3Transformer2DModel": Row(
        HEADS
        | {
            "sample_size": 8,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 2,
            "joint_attention_dim": 8,
            "caption_projection_dim": 16,
            "pooled_projection_dim": 8,
            "pos_embed_max_size": 8,
        },
        lambda: denoised(
            hidden_states=LATENT, encoder_hidden_states=TEXT, pooled_projections=noise(2, 8)
        ),
    ),
    "FluxTransformer2DModel": Row(
        HEADS
        | {
            "in_channels": 4,
            "num_single_layers": 1,
            "joint_attention_dim": 8,
            "pooled_projection_dim": 8,
            "axes_dims_rope": (2, 2, 4),
        },
        lambda: denoised(
            hidden_states=noise(2, 9, 4),
            encoder_hidden_states=TEXT,
            pooled_projections=noise(2, 8),
            timestep=torch.tensor([0.3, 0.7]),
            img_ids=torch.arange(27.0).reshape(9, 3) % 3,
            txt_ids=torch.zeros(5, 3),
        ),
    ),
    "AuraFlowTransformer2DModel": Row(
        {
            "sample_size": 8,
            "num_mmdit_layers": 1,
            "num_single_dit_layers": 1,
            "attention_head_dim": 8,
            "num_attention_heads": 2,
            "joint_attention_dim": 8,
            "caption_projection_dim": 16,
            "pos_embed_max_size": 64,
        },
        lambda: denoised(
            hidden_states=LATENT, encoder_hidden_states=TEXT, timestep=torch.tensor([0.3, 0.7])
        ),
    ),
    "SanaTransformer2DModel": Row(
        HEADS
        | {
            "in_channels": 4,
            "out_channels": 4,
            "num_cross_attention_heads": 2,
            "cross_attention_head_dim": 8,
            "cross_attention_dim": 16,
            "caption_channels": 8,
            "sample_size": 8,
        },
        lambda: denoised(hidden_states=LATENT, encoder_hidden_states=TEXT),
    ),
    "PriorTransformer": Row(
        HEADS | {"embedding_dim": 8, "num_embeddings": 5},
        lambda: denoised(
            hidden_states=noise(2, 8), proj_embedding=noise(2, 8), encoder_hidden_states=TEXT
        ),
    ),
    "T2IAdapter": Row(
        {"channels": [8, 8, 16, 16], "num_res_blocks": 1}, lambda: {"x": noise(2, 3, 64, 64)}
    ),
    "WanTransformer3DModel": Row(
        {
            "num_attention_heads": 2,
            "attention_head_dim": 12,
            "in_channels": 4,
            "out_channels": 4,
            "text_dim": 8,
            "freq_dim": 16,
            "ffn_dim": 16,
            "num_layers": 1,
            "rope_max_seq_len": 16,
        },
        lambda: denoised(hidden_states=noise(2, 4, 2, 8, 8), encoder_hidden_states=TEXT),
    ),
    "LTXVideoTransformer3DModel": Row(
        HEADS
        | {"in_channels": 4, "out_channels": 4, "cross_attention_dim": 16, "caption_channels": 8},
        lambda: denoised(
            hidden_states=noise(2, 16, 4),
            encoder_hidden_states=TEXT,
            encoder_attention_mask=torch.ones(2, 5, dtype=torch.bool),
            num_frames=1,
            height=4,
            width=4,
        ),
    ),
    "CogVideoXTransformer3DModel": Row(
        HEADS
        | {
            "in_channels": 4,
            "out_channels": 4,
            "time_embed_dim": 8,
            "text_embed_dim": 8,
            "sample_width": 8,
            "sample_height": 8,
            "sample_frames": 5,
            "max_text_seq_length": 5,
        },
        lambda: denoised(hidden_states=noise(2, 2, 4, 8, 8), encoder_hidden_states=TEXT),
    ),
    "UVit2DModel": Row(
        {
            "hidden_size": 16,
            "cond_embed_dim": 8,
            "micro_cond_encode_dim": 4,
            "micro_cond_embed_dim": 20,
            "encoder_hidden_size": 8,
            "vocab_size": 32,
            "codebook_size": 32,
            "in_channels": 16,
            "block_out_channels": 16,
            "num_res_blocks": 1,
            "block_num_heads": 2,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "intermediate_size": 16,
            "sample_size": 4,
        },
        lambda: {
            "input_ids": torch.arange(32).reshape(2, 4, 4) % 31,
            "encoder_hidden_states": TEXT,
            "pooled_text_emb": noise(2, 8),
            "micro_conds": noise(2, 5),
        },
    ),
}
ROWS |= MORE_ROWS
NO_ROW = "no small configuration is written for it"
NO_MODELS = ("Mixin", "Config", "AutoModel", "Name", "Multi", "Projection", "Adapter")


def names() -> list[str]:
    from diffusers import models

    classes = [n for n in dir(models) if n[0].isupper() and not n.endswith(NO_MODELS)]
    return sorted({*ROWS, *(n for n in classes if not n.startswith("Multi"))})


def make(name: str, variant: str) -> Subject:
    if name not in ROWS:
        raise NotMade(NO_ROW)
    import diffusers

    row = ROWS[name]
    torch.manual_seed(0)
    try:
        model = getattr(diffusers, name)(**row.settings)
        subject = Subject(stirred(deterministic(model)).eval(), ((), row.inputs()))
        return variant_of(subject, variant)
    except (TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise NotMade(f"this version of diffusers: {why(error)}") from error
