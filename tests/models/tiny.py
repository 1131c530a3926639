"""Any architecture of `transformers`, made small by the names of its settings, and fed by its
signature.

Nothing here knows an architecture: settings are recognised by what they are called, and what cannot
be made this way says why. Several recipes are tried, from the smallest on, as an architecture may
tie a width to something that no name tells.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

from tests.models.zoo import BATCH, LENGTH, Inputs, seeded, silence_dropout

NUM_SPECIAL = 24  # tokens at the end of a vocabulary: an image's place, the end


class NotMade(Exception):
    """Why there is no small model of this type."""


@dataclass(frozen=True, slots=True)
class Scale:
    """How large a model becomes, and its inputs."""

    width: int = 32
    heads: int = 2
    key_value_heads: int = 1
    head_dim: int = 16
    rotary_dim: int = 8
    rank: int = 8  # also of states
    layers: int = 2
    inner: int = 64
    channels: int = 16  # of the first of several stages
    vocabulary: int = 64
    positions: int = 64
    image: int = 32
    patch: int = 8
    batch: int = BATCH
    length: int = LENGTH
    samples: int = 2000  # of a waveform
    frames: int = 24  # of a spectrogram
    max_parameters: int = 40_000_000

    @property
    def first_special(self) -> int:
        """Below it are tokens of text; the special ones come after."""
        return self.vocabulary - NUM_SPECIAL


TINY = Scale()
FIRST_SPECIAL = TINY.first_special


@dataclass(frozen=True, slots=True)
class Made:
    model: nn.Module
    inputs: Inputs
    recipe: str


@dataclass(frozen=True, slots=True)
class Rule:
    """Settings whose whole name matches, of a whole number above `value`, become `value`."""

    pattern: str
    value: int


Rules = tuple[Rule, ...]


def counts(scale: Scale) -> Rules:
    return (
        Rule(r"(num_|n_)?(.*_)?(layers?|blocks|depth)", scale.layers),
        Rule(r"num_.*_layers", scale.layers),
        Rule(r"vocab_size|.*_vocab_size|codebook_size|.*num_codes|n_vocab", scale.vocabulary),
        Rule(
            r"max_position_embeddings|n_positions|max_.*_positions|n_ctx|seq_length",
            scale.positions,
        ),
        Rule(r"(num|n|moe_num)_?(local_|routed_)?experts|moe_num_experts", 4),
        Rule(r"num_experts_per_tok|moe_k|moe_topk|num_experts_per_token|experts_per_token", 2),
        Rule(r"n_group|topk_group", 1),
        Rule(r"num_queries|num_query_tokens|num_latents", 8),
    )


def pictures(scale: Scale) -> Rules:
    return (
        Rule(r"image_size|img_size|input_size", scale.image),
        Rule(r"patch_size", scale.patch),
    )


def widths(scale: Scale) -> Rules:
    names = "hidden_size|hidden_dim|d_model|n_embd|embed_dim|projection_dim|dim"
    inner = "intermediate_size|intermediate_dim|ffn_dim|d_ff|d_inner|mlp_dim|ffn_hidden_size"
    head = r"(.*_)?(nope|v|k|q|key|value)_head_dim"
    return (
        Rule(rf"(.*_)?({names})", scale.width),
        Rule(r"(.*_)?(embedding_size|embed_proj_dim|rank|d_latents|feature_size)", scale.width),
        Rule(
            r"(.*_)?(attention_heads|num_heads|n_heads?|encoder_heads|decoder_heads)", scale.heads
        ),
        Rule(
            r"(.*_)?(key_value_heads|kv_heads|num_kv_heads|num_global_key_value_heads)",
            scale.key_value_heads,
        ),
        Rule(rf"head_dim|global_head_dim|d_kv|{head}|attention_head_size", scale.head_dim),
        Rule(r"qk_rope_head_dim|rotary_dim", scale.rotary_dim),
        Rule(rf"(.*_)?({inner})", scale.inner),
        Rule(r"(.*_)?(lora_rank|state_size|d_state)", scale.rank),
    )


# Two heads of 128, which is what most architectures have: sections of a head keep their sizes.
MIDDLES = (
    Rule(r"(.*_)?(hidden_size|hidden_dim|d_model|n_embd|embed_dim|dim)", 256),
    Rule(r"(.*_)?(attention_heads|num_heads|n_heads?|key_value_heads)", 2),
    Rule(r"(.*_)?(intermediate_size|ffn_dim|d_ff|d_inner|mlp_dim)", 512),
)


def recipes(scale: Scale) -> dict[str, Rules]:
    """The rules to try, from the smallest model on."""
    return {
        "tiny": (*counts(scale), *pictures(scale), *widths(scale)),
        "middle": (*counts(scale), *pictures(scale), *MIDDLES),
        "wide": (*counts(scale), *pictures(scale)),
        "few": counts(scale),
    }


RECIPES = recipes(TINY)
# The length of lists, whatever its name says.
KEPT = ("num_feat_extract_layers",)
# Written by the configuration itself, or another's idea of what it is.
NOT_SETTINGS = ("transformers_version", "architectures", "dtype", "layer_types", "stage_names")
NOT_SETTINGS += ("out_features", "out_indices", "_out_features", "_out_indices")
LISTS_OF_ONES = re.compile(r"depths|layers|.*_depths|num_blocks|encoder_layers|.*num_layers")
LISTS_OF_WIDTHS = re.compile(r"(.*_)?(hidden_sizes|embed_dims?|conv_dim|channels|hidden_dims|dims)")
LISTS_OF_HEADS = re.compile(r"(.*_)?(num_heads|num_attention_heads|heads)")


def model_types() -> list[str]:
    """Every type that has a base model."""
    return sorted(MODEL_MAPPING_NAMES)


def make(model_type: str, scale: Scale = TINY, head: str = "AutoModel") -> Made:
    """The smallest model of the type that eager runs, with the head of an auto class."""
    reasons = []
    for recipe, rules in recipes(scale).items():
        try:
            model = built(model_type, rules, scale, head)
            return Made(model, accepted_inputs(model, scale), recipe)
        except Exception as error:
            reasons.append(
                f"{recipe}: {type(error).__name__}: {' '.join(str(error).split())[:160]}"
            )
    raise NotMade("; ".join(reasons))


def built(model_type: str, rules: Rules, scale: Scale, head: str) -> nn.Module:
    kind = transformers.CONFIG_MAPPING[model_type]
    create = getattr(transformers, head).from_config
    settings = shrunk(kind().to_dict(), rules, scale)
    settings.pop("model_type", None)  # a part keeps its own: it says which class it is
    config = kind(**settings)
    silence_dropout(config)
    with torch.device("meta"):
        size = sum(p.numel() for p in create(config).parameters())
    if size > scale.max_parameters:
        raise NotMade(f"{size:,} parameters")
    torch.manual_seed(0)
    return create(config, dtype=torch.float32).eval()  # type: ignore[no-any-return]


def shrunk(settings: dict[str, Any], rules: Rules, scale: Scale = TINY) -> dict[str, Any]:
    """Settings with smaller values, those of parts too; lists along the layers get as short."""
    specials = iter(range(scale.first_special, scale.vocabulary))
    made: dict[str, Any] = {}
    depth = next((v for k, v in settings.items() if k in ("num_hidden_layers", "n_layer")), None)
    for name, value in settings.items():
        if name in NOT_SETTINGS or name.startswith("_"):
            continue
        if name == "use_cache":
            made[name] = False
        elif isinstance(value, dict):
            is_part = "model_type" in value
            made[name] = (shrunk if is_part else rotated)(value, rules, scale)
        elif isinstance(value, list | tuple):
            made[name] = shorter(name, value, depth, rules, scale)
        elif isinstance(value, int) and not isinstance(value, bool):
            made[name] = smaller(name, value, rules, specials, scale)
        else:
            made[name] = value
    return made


def rotated(settings: dict[str, Any], rules: Rules, scale: Scale) -> dict[str, Any]:
    """Rotary angles in sections fill half of a head."""
    if "mrope_section" in settings and is_narrow(rules, scale):
        half = scale.head_dim // 2
        first, second = half // 4, (half - half // 4) // 2
        return settings | {"mrope_section": [first, second, half - first - second]}
    return settings


def is_narrow(rules: Rules, scale: Scale) -> bool:
    return any(rule in rules for rule in widths(scale))


def smaller(name: str, value: int, rules: Rules, specials: Iterator[int], scale: Scale) -> int:
    if re.fullmatch(r".*_token_(id|index)|.*_token", name):
        return value if value < scale.first_special else next(specials)
    if name in KEPT:
        return value
    for rule in reversed(rules):
        if value > rule.value and re.fullmatch(rule.pattern, name):
            return rule.value
    return value


def shorter(name: str, value: Any, depth: int | None, rules: Rules, scale: Scale) -> Any:
    """A list of a setting for each stage keeps its length, one for each layer does not."""
    is_layers = depth is not None and len(value) == depth
    if not all(isinstance(v, int) and not isinstance(v, bool) for v in value):
        return value[: scale.layers] if is_layers else value
    narrow = is_narrow(rules, scale)
    if re.fullmatch(LISTS_OF_ONES, name):
        return [1] * len(value)
    if narrow and re.fullmatch(LISTS_OF_WIDTHS, name):
        least = min(value)
        return [scale.channels * v // max(1, least) if least else v for v in value]
    if narrow and re.fullmatch(LISTS_OF_HEADS, name):
        return [scale.heads] * len(value)
    if re.fullmatch(r"image_size|img_size", name) and len(value) == 2:
        return [scale.image, scale.image]
    return value[: scale.layers] if is_layers else value


# -- inputs ------------------------------------------------------------------------------------


def accepted_inputs(model: nn.Module, scale: Scale) -> Inputs:
    """The richest inputs that eager takes and answers with numbers."""
    reason = "no inputs for this signature"
    for inputs in candidates(model, scale):
        try:
            with torch.no_grad():
                torch.manual_seed(0)
                results = numbers(model(**inputs))
        except Exception as error:
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
            continue
        if not results:
            reason = "no floats among the results"
        elif not all(bool(r.isfinite().any()) for r in results if r.numel()):
            reason = "eager gives no finite number"
        else:
            return inputs
    raise NotMade(reason)


def numbers(outputs: Any) -> list[Tensor]:
    found = pytree.tree_leaves(dict(outputs) if hasattr(outputs, "items") else outputs)
    return [x for x in found if isinstance(x, Tensor) and x.is_floating_point()]


def candidates(model: nn.Module, scale: Scale) -> Iterator[Inputs]:
    """Several sets of inputs, each by names that the model's forward takes."""
    taken = set(inspect.signature(model.forward).parameters)
    main = getattr(model, "main_input_name", "input_ids")
    config = model.config
    texts = [tokens(taken, scale)] if "input_ids" in taken else []
    sounds = [
        {n: s}
        for n in ("input_features", "input_values", "audio_values")
        if n in taken
        for s in spoken(n, config, scale)
    ]
    pictures = [
        {n: s}
        for n in ("pixel_values", "pixel_values_videos")
        if n in taken
        for s in seen(n, config, scale)
    ]
    if main == "input_ids":
        yield from (text | picture for text in texts for picture in pictures)
        yield from (text | sound for text in texts for sound in sounds)
        yield from texts
        yield from ({"input_ids": text["input_ids"]} for text in texts)
    yield from (sound | later(taken, scale) for sound in sounds)
    yield from (picture | text for picture in pictures for text in texts)
    yield from (picture | later(taken, scale) for picture in pictures)
    yield from texts


def tokens(taken: set[str], scale: Scale) -> Inputs:
    drawn = words(scale)
    mask = {"attention_mask": torch.ones_like(drawn)} if "attention_mask" in taken else {}
    return {"input_ids": drawn} | mask | later(taken, scale)


def later(taken: set[str], scale: Scale) -> Inputs:
    """Arguments of a decoder beside an encoder's input."""
    drawn = words(scale)
    return {"decoder_input_ids": drawn} if "decoder_input_ids" in taken else {}


def words(scale: Scale) -> Tensor:
    shape = (scale.batch, scale.length)
    return torch.randint(3, scale.first_special, shape, generator=seeded())


def spoken(name: str, config: Any, scale: Scale) -> Iterator[Tensor]:
    batch = scale.batch
    bins = setting(config, "num_mel_bins", "feature_size", "input_dim", "mel_bins", default=80)
    if name == "input_features":
        length = 2 * setting(config, "max_source_positions", default=scale.frames // 2)
        yield noise(batch, bins, length)
        yield noise(batch, scale.frames, bins)
        yield noise(
            batch, scale.frames, setting(config, "feature_projection_input_dim", default=160)
        )
    yield noise(batch, scale.samples)
    yield noise(batch, 1, scale.samples)
    yield noise(batch, setting(config, "max_length", default=scale.frames), bins)


def seen(name: str, config: Any, scale: Scale) -> Iterator[Tensor]:
    batch = scale.batch
    side = setting(config, "image_size", "img_size", "input_size", default=64)
    height, width = side if isinstance(side, list | tuple) else (side, side)
    channels = setting(config, "num_channels", "in_channels", "in_chans", default=3)
    frames = setting(config, "num_frames", "frames_per_clip", default=2)
    if name == "pixel_values" and not hasattr(config, "num_frames"):
        yield noise(batch, channels, height, width)
    yield noise(batch, frames, channels, height, width)
    yield noise(batch, channels, 64, 64)
    yield noise(batch, channels, 224, 224)


def noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=seeded())


def setting(config: Any, *names: str, default: Any) -> Any:
    """The first setting of one of these names, in the configuration or in one of its parts."""
    parts = [v for v in vars(config).values() if isinstance(v, transformers.PretrainedConfig)]
    for name in names:
        for part in (config, *parts):
            value = getattr(part, name, None)
            if value is not None:
                return value
    return default
