"""Programs whose training step is measured for what it keeps between forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

Build = Callable[[torch.device], "Program"]


@dataclass(frozen=True, slots=True)
class Program:
    """The function that is compiled, and the caller's tensors."""

    function: Callable[..., Any]
    inputs: tuple[Tensor, ...]

    def owned(self) -> list[Tensor]:
        """Memory that is in use whatever is saved: arguments, parameters and buffers."""
        module = self.function
        state = [*module.parameters(), *module.buffers()] if isinstance(module, nn.Module) else []
        return [*self.inputs, *state]


def gelu_bias(bias: Tensor, y: Tensor) -> Tensor:
    x = bias + y
    return x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))


def swish(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


def mish(x: Tensor) -> Tensor:
    return x.mul(torch.tanh(F.softplus(x)))


def hard_sigmoid(x: Tensor) -> Tensor:
    return (x + 3.0).clamp(min=0.0, max=6.0).div(6.0)


def hard_swish(x: Tensor) -> Tensor:
    return x * (x + 3.0).clamp(min=0.0, max=6.0).div(6.0)


def hard_mish(x: Tensor) -> Tensor:
    return 0.5 * x * (x + 2.0).clamp(min=0.0, max=2.0)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    mean = torch.mean(x, -1, keepdim=True)
    centred = x - mean
    variance = torch.sum(centred * centred, -1, keepdim=True) / x.size(-1)
    return (x - mean) * (1.0 / torch.sqrt(variance + 1e-5)) * weight + bias


class T5LayerNorm(nn.Module):
    """RMS norm as T5 writes it."""

    def __init__(self, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        variance = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
        x = x * torch.rsqrt(variance + self.eps)
        if self.weight.dtype in (torch.float16, torch.bfloat16):
            x = x.to(self.weight.dtype)
        return self.weight * x


class Mlp(nn.Module):
    """Norm, up, gelu, down, dropout and the residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.1, self.training)


class AttentionBlock(nn.Module):
    """Norm, heads, softmax written out with a causal mask, projection and the residual."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.norm, self.num_heads = nn.LayerNorm(width), num_heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.norm(x)).view(batch, length, 3, self.num_heads, -1)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        causal = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        weights = scores.masked_fill(~causal, float("-inf")).softmax(-1)
        weights = F.dropout(weights, 0.1, self.training)
        return x + self.out((weights @ v).transpose(1, 2).reshape(batch, length, width))


def activation(function: Callable[..., Tensor], shapes: Any, device: torch.device) -> Program:
    return Program(function, tuple(made(shape, device) for shape in shapes))


def made(shape: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.randn(shape, device=device, requires_grad=True)


def module(build: Callable[[], nn.Module], shape: tuple[int, ...], device: torch.device) -> Program:
    torch.manual_seed(0)
    return Program(build().to(device).train(), (made(shape, device),))


def gpt2_layer() -> nn.Module:
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block

    block: nn.Module = GPT2Block(attending(transformers.GPT2Config()), layer_idx=0)
    return FirstResult(block)


def bert_layer() -> nn.Module:
    from transformers.models.bert.modeling_bert import BertLayer

    layer: nn.Module = BertLayer(attending(transformers.BertConfig()))
    return FirstResult(layer)


LLAMA = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16}


class LlamaLayer(nn.Module):
    """One decoder layer, with the rotations it is called with."""

    def __init__(self) -> None:
        super().__init__()
        from transformers.models.llama import modeling_llama as llama

        config = attending(transformers.LlamaConfig(**LLAMA))
        self.layer = llama.LlamaDecoderLayer(config, layer_idx=0)
        self.rotary = llama.LlamaRotaryEmbedding(config)

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1], device=x.device)[None]
        result = self.layer(x, position_embeddings=self.rotary(x, positions))
        found: Tensor = result[0] if isinstance(result, tuple) else result
        return found


class FirstResult(nn.Module):
    """A layer without what it returns beside its hidden states."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        result = self.layer(x)
        found: Tensor = result[0] if isinstance(result, tuple) else result
        return found


def attending(config: Any) -> Any:
    config._attn_implementation = "sdpa"
    return config


def cases(is_large: bool) -> dict[str, Build]:
    """Every program by name; large ones for a GPU."""
    rows, wide = (8192, 4096) if is_large else (1024, 2048)
    batch, length = (8, 1024) if is_large else (2, 128)
    flat = [(rows, wide)]
    one = {f.__name__: f for f in (mish, swish, hard_sigmoid, hard_swish, hard_mish)}
    found: dict[str, Build] = {
        "gelu_bias": partial(activation, gelu_bias, [(wide,), (rows, wide)]),
        **{name: partial(activation, f, flat) for name, f in one.items()},
        "layer_norm": partial(activation, layer_norm, [(rows, wide), (wide,), (wide,)]),
        "rms_norm_t5": partial(module, partial(T5LayerNorm, wide), (rows, wide)),
        "mlp": partial(module, partial(Mlp, 768), (batch, length, 768)),
        "attention": partial(module, partial(AttentionBlock, 768, 12), (batch, length, 768)),
        "gpt2_layer": partial(module, gpt2_layer, (batch, length, 768)),
        "llama_layer": partial(module, LlamaLayer, (batch, length, LLAMA["hidden_size"])),
        "bert_layer": partial(module, bert_layer, (batch, length, 768)),
    }
    return found
