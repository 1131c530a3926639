"""More rows of diffusers: video, audio, controls, and transformers of other makers."""

from __future__ import annotations

import torch

from tests.sweep.diffusers_inputs import (
    BLOCKS,
    HEADS,
    LATENT,
    TEXT,
    Row,
    denoised,
    image,
)
from tests.sweep.subject import noise

FRAMES = noise(2, 3, 5, 16, 16)
TOKENS = {
    "hidden_states": noise(2, 9, 4),
    "encoder_hidden_states": TEXT,
    "timestep": torch.tensor([0.3, 0.7]),
    "img_ids": torch.arange(27.0).reshape(9, 3) % 3,
    "txt_ids": torch.zeros(5, 3),
}
FLUX = HEADS | {
    "in_channels": 4,
    "num_single_layers": 1,
    "joint_attention_dim": 8,
    "axes_dims_rope": (2, 2, 4),
}
MICRO = {k: torch.tensor([[8, 8], [8, 8]]) for k in ("original_size", "target_size", "crop_coords")}
COGVIEW = HEADS | {
    "in_channels": 4,
    "out_channels": 4,
    "text_embed_dim": 8,
    "time_embed_dim": 8,
    "condition_dim": 4,
    "pos_embed_max_size": 8,
    "sample_size": 8,
}

MORE_ROWS: dict[str, Row] = {
    "AutoencoderKLTemporalDecoder": Row(
        {
            "down_block_types": ("DownEncoderBlock2D",) * 2,
            "block_out_channels": (32, 64),
            "latent_channels": 4,
        },
        lambda: image() | {"num_frames": 2},
    ),
    "AsymmetricAutoencoderKL": Row(
        {
            "down_block_types": ("DownEncoderBlock2D",) * 2,
            "down_block_out_channels": (8, 16),
            "up_block_types": ("UpDecoderBlock2D",) * 2,
            "up_block_out_channels": (8, 16),
            "norm_num_groups": 4,
        },
        image,
    ),
    "AutoencoderOobleck": Row(
        {
            "encoder_hidden_size": 8,
            "downsampling_ratios": [2, 4],
            "channel_multiples": [1, 2],
            "decoder_channels": 8,
            "decoder_input_channels": 4,
        },
        lambda: {"sample": noise(2, 2, 64)},
    ),
    "AutoencoderKLCogVideoX": Row(
        {
            "down_block_types": ("CogVideoXDownBlock3D",) * 2,
            "up_block_types": ("CogVideoXUpBlock3D",) * 2,
            "block_out_channels": (8, 8),
            "latent_channels": 4,
            "layers_per_block": 1,
            "norm_num_groups": 2,
            "temporal_compression_ratio": 2,
        },
        lambda: {"sample": FRAMES},
    ),
    "AutoencoderKLWan": Row(
        {
            "base_dim": 3,
            "z_dim": 16,
            "dim_mult": [1, 1, 1, 1],
            "num_res_blocks": 1,
            "temperal_downsample": [False, True, True],
        },
        lambda: {"sample": FRAMES},
    ),
    "UNetSpatioTemporalConditionModel": Row(
        {
            "sample_size": 8,
            "down_block_types": (
                "CrossAttnDownBlockSpatioTemporal",
                "DownBlockSpatioTemporal",
            ),
            "up_block_types": ("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
            "block_out_channels": (32, 64),
            "addition_time_embed_dim": 8,
            "projection_class_embeddings_input_dim": 24,
            "layers_per_block": 1,
            "cross_attention_dim": 8,
            "num_attention_heads": 2,
        },
        lambda: denoised(
            sample=noise(2, 2, 8, 8, 8),
            encoder_hidden_states=noise(2, 1, 8),
            added_time_ids=torch.tensor([[6.0, 127.0, 0.02]] * 2),
        ),
    ),
    "I2VGenXLUNet": Row(
        {
            "sample_size": 8,
            "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"),
            "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D"),
            "cross_attention_dim": 8,
            "attention_head_dim": 4,
            **BLOCKS,
        },
        lambda: denoised(
            sample=noise(2, 4, 2, 8, 8),
            fps=torch.tensor([4, 8]),
            image_latents=noise(2, 4, 2, 8, 8),
            image_embeddings=noise(2, 8),
            encoder_hidden_states=TEXT,
        ),
    ),
    "Kandinsky3UNet": Row(
        {
            "time_embedding_dim": 4,
            "groups": 2,
            "attention_head_dim": 4,
            "layers_per_block": 3,
            "block_out_channels": (8, 16),
            "cross_attention_dim": 8,
            "encoder_hid_dim": 8,
        },
        lambda: denoised(
            sample=LATENT,
            encoder_hidden_states=TEXT,
            encoder_attention_mask=torch.ones(2, 5),
        ),
    ),
    "SD3ControlNetModel": Row(
        HEADS
        | {
            "sample_size": 8,
            "in_channels": 4,
            "out_channels": 4,
            "joint_attention_dim": 8,
            "caption_projection_dim": 16,
            "pooled_projection_dim": 8,
            "pos_embed_max_size": 8,
        },
        lambda: denoised(
            hidden_states=LATENT,
            controlnet_cond=LATENT.flip(0),
            encoder_hidden_states=TEXT,
            pooled_projections=noise(2, 8),
        ),
    ),
    "FluxControlNetModel": Row(
        FLUX | {"pooled_projection_dim": 8},
        lambda: TOKENS | {"controlnet_cond": noise(2, 9, 4), "pooled_projections": noise(2, 8)},
    ),
    "ChromaTransformer2DModel": Row(
        FLUX
        | {
            "approximator_num_channels": 8,
            "approximator_hidden_dim": 16,
            "approximator_layers": 1,
        },
        lambda: dict(TOKENS),
    ),
    "QwenImageTransformer2DModel": Row(
        HEADS
        | {
            "in_channels": 16,
            "out_channels": 4,
            "joint_attention_dim": 8,
            "axes_dims_rope": (2, 2, 4),
        },
        lambda: {
            "hidden_states": noise(2, 9, 16),
            "encoder_hidden_states": TEXT,
            "encoder_hidden_states_mask": torch.ones(2, 5, dtype=torch.long),
            "timestep": torch.tensor([0.3, 0.7]),
            "img_shapes": [[(1, 3, 3)]] * 2,
        },
    ),
    "CogView3PlusTransformer2DModel": Row(
        COGVIEW,
        lambda: denoised(hidden_states=LATENT, encoder_hidden_states=TEXT, **MICRO),
    ),
    "CogView4Transformer2DModel": Row(
        COGVIEW | {"rope_axes_dim": (8, 8)},
        lambda: denoised(hidden_states=LATENT, encoder_hidden_states=TEXT, **MICRO),
    ),
    "LatteTransformer3DModel": Row(
        HEADS
        | {
            "sample_size": 8,
            "patch_size": 2,
            "in_channels": 4,
            "out_channels": 8,
            "cross_attention_dim": 16,
            "caption_channels": 8,
            "norm_type": "ada_norm_single",
            "num_embeds_ada_norm": 16,
            "norm_elementwise_affine": False,
            "video_length": 2,
            "activation_fn": "gelu-approximate",
            "attention_bias": True,
        },
        lambda: denoised(hidden_states=noise(2, 4, 2, 8, 8), encoder_hidden_states=TEXT),
    ),
    "MochiTransformer3DModel": Row(
        HEADS
        | {
            "in_channels": 4,
            "num_layers": 2,
            "pooled_projection_dim": 16,
            "text_embed_dim": 8,
            "time_embed_dim": 4,
            "max_sequence_length": 5,
        },
        lambda: denoised(
            hidden_states=noise(2, 4, 2, 8, 8),
            encoder_hidden_states=TEXT,
            encoder_attention_mask=torch.ones(2, 5, dtype=torch.bool),
        ),
    ),
    "StableAudioDiTModel": Row(
        HEADS
        | {
            "sample_size": 8,
            "in_channels": 4,
            "out_channels": 4,
            "num_key_value_attention_heads": 2,
            "cross_attention_dim": 8,
            "time_proj_dim": 8,
            "global_states_input_dim": 8,
            "cross_attention_input_dim": 8,
        },
        lambda: denoised(
            hidden_states=noise(2, 4, 8),
            encoder_hidden_states=TEXT,
            global_hidden_states=noise(2, 1, 8),
            rotary_embedding=(noise(9, 4), noise(9, 4)),
        ),
    ),
    "Transformer2DModel": Row(
        HEADS | {"in_channels": 8, "norm_num_groups": 4, "cross_attention_dim": 8},
        lambda: {"hidden_states": noise(2, 8, 8, 8), "encoder_hidden_states": TEXT},
    ),
    "TransformerTemporalModel": Row(
        HEADS | {"in_channels": 8, "norm_num_groups": 4},
        lambda: {"hidden_states": noise(4, 8, 4, 4), "num_frames": 2},
    ),
}
