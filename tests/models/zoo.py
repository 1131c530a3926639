"""Architectures of `transformers` as rows: tiny, random weights, no download."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor, nn

BATCH, LENGTH, VOCABULARY, WIDTH = 2, 12, 64, 32
Inputs = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Architecture:
    name: str
    config: str
    model: str  # a class, or `Class.part` for a part of it
    inputs: Callable[[], Inputs]
    settings: Mapping[str, Any] = field(default_factory=dict)
    is_slow: bool = False

    def __str__(self) -> str:
        return self.name

    def build(self) -> nn.Module:
        config = getattr(transformers, self.config)(**self.settings)
        silence_dropout(config)
        torch.manual_seed(0)
        model, _, part = self.model.partition(".")
        built = getattr(transformers, model)(config)
        return getattr(built, part) if part else built  # type: ignore[no-any-return]


def silence_dropout(config: Any) -> None:
    """Training in the comparison draws no random numbers."""
    for name, value in vars(config).items():
        if "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)
        if isinstance(value, transformers.PretrainedConfig):
            silence_dropout(value)


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(1)


def tokens() -> Inputs:
    return {"input_ids": torch.randint(3, VOCABULARY, (BATCH, LENGTH), generator=seeded())}


def labelled_tokens() -> Inputs:
    drawn = tokens()["input_ids"]
    return {"input_ids": drawn, "labels": drawn.clone()}


def translation() -> Inputs:
    return {**labelled_tokens(), "attention_mask": torch.ones(BATCH, LENGTH, dtype=torch.int64)}


def image() -> Inputs:
    return {"pixel_values": torch.randn(BATCH, 3, 32, 32, generator=seeded())}


def spectrogram() -> Inputs:
    return {"input_features": torch.randn(BATCH, 8, 24, generator=seeded())}


def waveform() -> Inputs:
    return {"input_values": torch.randn(BATCH, 800, generator=seeded())}


def image_and_text() -> Inputs:
    return {**tokens(), **image(), "attention_mask": torch.ones(BATCH, LENGTH, dtype=torch.int64)}


ENCODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 32,
}
DECODER = {**ENCODER, "num_key_value_heads": 1, "use_cache": False, "pad_token_id": 0}
DECODER |= {"bos_token_id": 1, "eos_token_id": 2}
PATCHES = {
    "image_size": 32,
    "patch_size": 8,
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}
GPT = {"vocab_size": VOCABULARY, "n_embd": WIDTH, "n_layer": 2, "n_head": 2, "n_positions": 32}
GPT |= {"use_cache": False, "bos_token_id": 1, "eos_token_id": 2}
T5 = {
    "vocab_size": VOCABULARY,
    "d_model": WIDTH,
    "d_kv": 16,
    "d_ff": 64,
    "num_layers": 2,
    "num_heads": 2,
    "decoder_start_token_id": 0,
    "use_cache": False,
}
SEQ2SEQ = {
    "vocab_size": VOCABULARY,
    "d_model": WIDTH,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 32,
    "use_cache": False,
}
WHISPER = {**SEQ2SEQ, "num_mel_bins": 8, "max_source_positions": 12}
WHISPER |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
CONVNET = {"hidden_sizes": [8, 16], "depths": [1, 1]}
MOBILE = {**ENCODER, "embedding_size": 16, "intra_bottleneck_size": 16, "true_hidden_size": 16}
MAMBA = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "state_size": 4,
    "num_hidden_layers": 2,
    "use_cache": False,
}
WAV2VEC = {
    **ENCODER,
    "conv_dim": (16, 16),
    "conv_stride": (4, 2),
    "conv_kernel": (8, 4),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
    "apply_spec_augment": False,
    "mask_time_prob": 0.0,
    "mask_feature_prob": 0.0,
}
CLIP = {
    "text_config": {**ENCODER, "eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0},
    "vision_config": PATCHES,
    "projection_dim": 16,
}
XLNET = {"vocab_size": VOCABULARY, "d_model": WIDTH, "n_layer": 2, "n_head": 2, "d_inner": 64}
SWIN = {"image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2]}
OPT = {**DECODER, "ffn_dim": 64, "word_embed_proj_dim": WIDTH}
BLOOM = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "n_layer": 2, "n_head": 2}
BLOOM |= {"use_cache": False, "bos_token_id": 1, "eos_token_id": 2}
DISTIL = {"vocab_size": VOCABULARY, "dim": WIDTH, "n_layers": 2, "n_heads": 2, "hidden_dim": 64}
DISTIL |= {"max_position_embeddings": 32}
ROBERTA = {**ENCODER, "max_position_embeddings": 40}
DEBERTA = {**ENCODER, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]}

A = Architecture
NAMED = (
    A("bert", "BertConfig", "BertForMaskedLM", labelled_tokens, ENCODER),
    A("gpt2", "GPT2Config", "GPT2LMHeadModel", labelled_tokens, GPT),
    A("llama", "LlamaConfig", "LlamaForCausalLM", labelled_tokens, DECODER),
    A("t5", "T5Config", "T5ForConditionalGeneration", translation, T5),
    A("vit", "ViTConfig", "ViTModel", image, PATCHES),
    A("whisper_encoder", "WhisperConfig", "WhisperModel.encoder", spectrogram, WHISPER),
    A("resnet", "ResNetConfig", "ResNetModel", image, {**CONVNET, "embedding_size": 8}),
    A("convnext", "ConvNextConfig", "ConvNextModel", image, {**CONVNET, "num_stages": 2}),
    A("mobilebert", "MobileBertConfig", "MobileBertForMaskedLM", labelled_tokens, MOBILE),
    A("mamba", "MambaConfig", "MambaForCausalLM", labelled_tokens, MAMBA),
)
FURTHER = (
    A("distilbert", "DistilBertConfig", "DistilBertForMaskedLM", labelled_tokens, DISTIL, True),
    A("mistral", "MistralConfig", "MistralForCausalLM", labelled_tokens, DECODER, True),
    A("qwen2", "Qwen2Config", "Qwen2ForCausalLM", labelled_tokens, DECODER, True),
    A("phi", "PhiConfig", "PhiForCausalLM", labelled_tokens, DECODER, True),
    A("opt", "OPTConfig", "OPTForCausalLM", labelled_tokens, OPT, True),
    A("bloom", "BloomConfig", "BloomForCausalLM", labelled_tokens, BLOOM, True),
    A("falcon", "FalconConfig", "FalconForCausalLM", labelled_tokens, DECODER, True),
    A("roberta", "RobertaConfig", "RobertaForMaskedLM", labelled_tokens, ROBERTA, True),
    A("albert", "AlbertConfig", "AlbertForMaskedLM", labelled_tokens, ENCODER, True),
    A("deberta", "DebertaConfig", "DebertaForMaskedLM", labelled_tokens, DEBERTA, True),
    A("electra", "ElectraConfig", "ElectraForMaskedLM", labelled_tokens, ENCODER, True),
    A("xlnet", "XLNetConfig", "XLNetModel", tokens, XLNET, True),
    A("swin", "SwinConfig", "SwinModel", image, {**SWIN, "window_size": 4}, True),
    A("deit", "DeiTConfig", "DeiTModel", image, PATCHES, True),
    A("clip", "CLIPConfig", "CLIPModel", image_and_text, CLIP, True),
    A("wav2vec2", "Wav2Vec2Config", "Wav2Vec2Model", waveform, WAV2VEC, True),
    A("bart", "BartConfig", "BartForConditionalGeneration", translation, SEQ2SEQ, True),
    A("gpt_neox", "GPTNeoXConfig", "GPTNeoXForCausalLM", labelled_tokens, DECODER, True),
    A(
        "gemma",
        "GemmaConfig",
        "GemmaForCausalLM",
        labelled_tokens,
        {**DECODER, "head_dim": 16},
        True,
    ),
    A(
        "gemma2",
        "Gemma2Config",
        "Gemma2ForCausalLM",
        labelled_tokens,
        {**DECODER, "head_dim": 16},
        True,
    ),
)
