"""Which linear layers run in FP8: rules as data, and the reason why a layer is excluded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import nn

# Dotted names of layers, as patterns of the shell. Small errors in logits, embeddings and routers
# cost more than what FP8 saves there.
SENSITIVE_NAMES = (
    *("lm_head", "*.lm_head", "output_projection", "*.output_projection"),
    *("*embed*", "*wte", "*wpe"),
    *("*router", "*router.*", "mlp.gate", "*.mlp.gate"),
    *("classifier", "*.classifier", "score", "*.score"),
)
WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class LayerRules:
    """Rules that exclude layers; a layer that none of them matches runs in FP8."""

    min_features: int = 256  # of inputs and of results: below, casts cost more than FP8 saves
    multiple: int = 16  # of both: what FP8 units work on
    names: tuple[str, ...] = SENSITIVE_NAMES
    keeps_head: bool = True  # exclude the last linear layer if it is a direct child of the model
    # A rule of the user's: a dotted name and its module -> whether the layer may run in FP8.
    accepts: Callable[[str, nn.Module], bool] | None = None

    def reason_by_size(self, in_features: int, out_features: int) -> str | None:
        """Why a weight of this size is excluded; None if it is not."""
        if in_features < self.min_features or out_features < self.min_features:
            return f"fewer than {self.min_features} features"
        if in_features % self.multiple != 0 or out_features % self.multiple != 0:
            return f"features are not a multiple of {self.multiple}"
        return None

    def reason_by_name(self, name: str, module: nn.Module) -> str | None:
        """Why the layer of this name is excluded; None if it is not."""
        pattern = next((p for p in self.names if fnmatchcase(name, p)), None)
        if pattern is not None:
            return f"named like {pattern!r}"
        if self.accepts is not None and not self.accepts(name, module):
            return "excluded by your rule"
        return None
