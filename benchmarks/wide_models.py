"""Architectures of the wide benchmark: names, sizes, and how each is built without a download.

Rows are called library/architecture/size/task. A small row is what a user tries first, or serves:
few layers of a moderate width, a batch of four, 64 tokens or 64 x 64 pixels. A middle row is a
published width (timm: a published model) at usual lengths, with a batch that suits the device.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from tests.models import tiny
from tests.sweep import diffusers_inputs, timm_models
from tests.sweep.subject import NotMade, Subject, deterministic, noise, stirred

SIZES, TASKS = ("small", "middle"), ("forward", "train")
MIDDLE_IMAGES = {"cpu": 4, "cuda": 32}  # in a batch

TIMM = """
beit_base_patch16_224 caformer_s18 cait_xxs24_224 coatnet_nano_rw_224 convit_tiny convmixer_768_32
convnext_tiny convnextv2_nano crossvit_9_240 densenet121 dla34 dm_nfnet_f0 edgenext_x_small
efficientformer_l1 efficientnet_b0 efficientnetv2_rw_t efficientvit_b0 eva02_tiny_patch14_224
fastvit_t8 focalnet_tiny_srf ghostnet_100 gmlp_s16_224 hrnet_w18_small inception_v3 levit_128s
mambaout_femto maxvit_pico_rw_256 mixer_s32_224 mnasnet_100 mobilenetv2_100 mobilenetv3_small_100
mobileone_s0 mobilevit_s poolformer_s12 pvt_v2_b0 regnety_004 repvit_m1 res2net50_26w_4s
resmlp_12_224 resnet18 resnet50 resnetv2_50 resnext50_32x4d swin_tiny_patch4_window7_224
swinv2_tiny_window8_256 tiny_vit_5m_224 twins_svt_small vit_small_patch16_224
xcit_nano_12_p8_224
""".split()

BASE, CAUSAL, MASKED = "AutoModel", "AutoModelForCausalLM", "AutoModelForMaskedLM"
TRANSFORMERS = {
    **dict.fromkeys(
        """albert bert deberta-v2 distilbert electra fnet funnel mobilebert modernbert mpnet
        roberta squeezebert""".split(),
        MASKED,
    ),
    **dict.fromkeys(
        """bloom cohere falcon gemma2 gemma3_text gpt2 codegen gpt_bigcode gpt_neox gptj granite
        llama mamba mistral mixtral mpt olmo2 opt phi phi3 qwen2 qwen2_moe qwen3 stablelm
        starcoder2""".split(),
        CAUSAL,
    ),
    **dict.fromkeys(("bart", "t5"), "AutoModelForSeq2SeqLM"),
    **dict.fromkeys(
        """audio-spectrogram-transformer clip dinov2 hubert segformer siglip swin vit
        wav2vec2 whisper xlnet""".split(),
        BASE,
    ),
}
# Masked and random choices in training, which no two backends draw alike.
DETERMINISTIC = {"apply_spec_augment": False, "mask_time_prob": 0.0, "mask_feature_prob": 0.0}

SMALL = tiny.Scale(
    width=256,
    heads=4,
    key_value_heads=2,
    head_dim=64,
    rotary_dim=32,
    rank=16,
    layers=2,
    inner=1024,
    channels=64,
    vocabulary=1024,
    positions=128,
    image=64,
    patch=8,
    batch=4,
    length=64,
    samples=16_000,
    frames=128,
)
MIDDLE = tiny.Scale(
    width=768,
    heads=12,
    key_value_heads=4,
    head_dim=64,
    rotary_dim=32,
    rank=16,
    layers=4,
    inner=3072,
    channels=96,
    vocabulary=8192,
    positions=1024,
    image=224,
    patch=16,
    batch=2,
    length=128,
    samples=32_000,
    frames=256,
    max_parameters=200_000_000,
)
SCALES = {
    ("small", "cpu"): SMALL,
    ("small", "cuda"): SMALL,
    ("middle", "cpu"): MIDDLE,
    ("middle", "cuda"): replace(MIDDLE, batch=8, length=512, samples=64_000, frames=1024),
}


def timm_subject(name: str, size: str, device: str) -> Subject:
    if size == "small":
        recipe = timm_models.recipe_of(name)
        if isinstance(recipe, str):
            raise NotMade(recipe)
        return timm_models.subject_of(name, recipe)
    import timm

    side = timm.models.get_pretrained_cfg(name).input_size[-1]
    recipe = timm_models.Recipe({}, side, is_shallow=False)
    return timm_models.subject_of(name, recipe, MIDDLE_IMAGES[device])


def transformers_subject(name: str, size: str, device: str) -> Subject:
    import transformers

    transformers.logging.set_verbosity_error()
    head = TRANSFORMERS[name]
    try:
        made = tiny.make(name, SCALES[size, device], head)
    except tiny.NotMade as error:
        raise NotMade(str(error)) from None
    config: Any = made.model.config
    for setting, value in DETERMINISTIC.items():
        if hasattr(config, setting):
            setattr(config, setting, value)
    inputs: dict[str, Any] = dict(made.inputs)
    if head != BASE:
        inputs["labels"] = inputs["input_ids"].clone()
        inputs.pop("decoder_input_ids", None)  # the labels, shifted
        if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
            config.decoder_start_token_id = 0
    return Subject(made.model, ((), inputs), f"{head} {made.recipe}")


@dataclass(frozen=True, slots=True)
class Latents:
    """Sizes of a diffusion model: images, their latents, channels, heads and text."""

    batch: int
    side: int
    channels: tuple[int, int]
    heads: int
    layers: int
    tokens: int = 77
    text: int = 256

    def latent(self, channels: int = 4) -> torch.Tensor:
        return noise(self.batch, channels, self.side, self.side)

    def denoised(self, **more: Any) -> dict[str, Any]:
        return {"timestep": torch.arange(self.batch) * 100 + 3, **more}

    def texts(self) -> torch.Tensor:
        return noise(self.batch, self.tokens, self.text)


LATENTS = {
    ("small", "cpu"): Latents(2, 16, (32, 64), 4, 2),
    ("small", "cuda"): Latents(2, 16, (32, 64), 4, 2),
    ("middle", "cpu"): Latents(1, 32, (128, 256), 12, 4, text=768),
    ("middle", "cuda"): Latents(8, 64, (128, 256), 12, 4, text=768),
}


def unet_2d(at: Latents) -> diffusers_inputs.Row:
    return diffusers_inputs.Row(
        {
            "sample_size": at.side,
            "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
            "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
            "block_out_channels": at.channels,
            "layers_per_block": 2,
        },
        lambda: at.denoised(sample=at.latent(3)),
    )


def unet_2d_condition(at: Latents) -> diffusers_inputs.Row:
    return diffusers_inputs.Row(
        {
            "sample_size": at.side,
            "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
            "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
            "block_out_channels": at.channels,
            "layers_per_block": 2,
            "cross_attention_dim": at.text,
        },
        lambda: at.denoised(sample=at.latent(), encoder_hidden_states=at.texts()),
    )


def autoencoder_kl(at: Latents) -> diffusers_inputs.Row:
    return diffusers_inputs.Row(
        {
            "down_block_types": ("DownEncoderBlock2D",) * 2,
            "up_block_types": ("UpDecoderBlock2D",) * 2,
            "block_out_channels": at.channels,
            "layers_per_block": 2,
        },
        lambda: {"sample": noise(at.batch, 3, 4 * at.side, 4 * at.side)},
    )


def dit(at: Latents) -> diffusers_inputs.Row:
    return diffusers_inputs.Row(
        {
            "num_attention_heads": at.heads,
            "attention_head_dim": 64,
            "num_layers": at.layers,
            "sample_size": at.side,
        },
        lambda: at.denoised(hidden_states=at.latent(), class_labels=torch.arange(at.batch)),
    )


def pixart(at: Latents) -> diffusers_inputs.Row:
    return diffusers_inputs.Row(
        {
            "num_attention_heads": at.heads,
            "attention_head_dim": 64,
            "num_layers": at.layers,
            "sample_size": at.side,
            "cross_attention_dim": 64 * at.heads,
            "caption_channels": at.text,
        },
        lambda: at.denoised(hidden_states=at.latent(), encoder_hidden_states=at.texts()),
    )


def sd3(at: Latents) -> diffusers_inputs.Row:
    return diffusers_inputs.Row(
        {
            "num_attention_heads": at.heads,
            "attention_head_dim": 64,
            "num_layers": at.layers,
            "sample_size": at.side,
            "in_channels": 4,
            "out_channels": 4,
            "joint_attention_dim": at.text,
            "caption_projection_dim": 64 * at.heads,
            "pooled_projection_dim": at.text,
            "pos_embed_max_size": at.side,
        },
        lambda: at.denoised(
            hidden_states=at.latent(),
            encoder_hidden_states=at.texts(),
            pooled_projections=noise(at.batch, at.text),
        ),
    )


DIFFUSERS: dict[str, Callable[[Latents], diffusers_inputs.Row]] = {
    "AutoencoderKL": autoencoder_kl,
    "DiTTransformer2DModel": dit,
    "PixArtTransformer2DModel": pixart,
    "SD3Transformer2DModel": sd3,
    "UNet2DConditionModel": unet_2d_condition,
    "UNet2DModel": unet_2d,
}


def diffusers_subject(name: str, size: str, device: str) -> Subject:
    import diffusers

    row = DIFFUSERS[name](LATENTS[size, device])
    torch.manual_seed(0)
    model = getattr(diffusers, name)(**row.settings)
    return Subject(stirred(deterministic(model)).eval(), ((), row.inputs()), str(row.settings))


Make = Callable[[str, str, str], Subject]
LIBRARIES: dict[str, tuple[list[str], Make]] = {
    "timm": (TIMM, timm_subject),
    "transformers": (list(TRANSFORMERS), transformers_subject),
    "diffusers": (list(DIFFUSERS), diffusers_subject),
}


def row_names() -> list[str]:
    """Every row: the small ones first, forward before training, libraries mixed, so that whatever
    a time limit cuts off, what was measured is a sample of all of them."""
    found = []
    for size in SIZES:
        for task in TASKS:
            rows = [
                f"{lib}/{name}/{size}/{task}" for lib in LIBRARIES for name in LIBRARIES[lib][0]
            ]
            found += sorted(rows, key=lambda row: zlib.crc32(row.rsplit("/", 2)[0].encode()))
    return found


def subject_of(row: str, device: str) -> Subject:
    """The row's model and inputs on the CPU in float32, in the mode of its task."""
    library, name, size, task = row.split("/")
    subject = partial(LIBRARIES[library][1], name)(size, device)
    subject.model.train(task == "train")
    return subject
