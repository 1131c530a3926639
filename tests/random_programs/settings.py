"""Settings drawn by seed: one to three that change code or memory, each off its default."""

from __future__ import annotations

import importlib
from contextlib import AbstractContextManager
from random import Random
from typing import Any

SETTINGS = ("default", "drawn")
MOST = 3
NEVER = 1 << 50
SEARCH_SECONDS = 2

CHOICES: dict[str, tuple[Any, ...]] = {
    "memory_budget": (0.0, 0.3, 0.7, "1KiB"),
    "recompute_level": (0, 2, 3),
    "freeze": (True,),
    "max_autotune": (True,),
    "max_autotune_gemm_backends": ("ATEN", "CPP", "aten,cpp"),
    "benchmark_epilogue_fusion": (False,),
    "benchmark_kernel": (True,),
    "max_fusion_size": (1, 2, 4),
    "fallback_random": (True,),
    "logits_chunk_bytes": (0, 16, 1024),
    "cudagraphs": (True,),
    "cache.enabled": (False,),
    "cpu.simd": ("avx2", "scalar"),
    "cpu.threads": (1, 2, 7),
    "cpu.opt_level": (0, 1),
    "cpu.stream_store_bytes": (0, 1),
    "cpu.grain_elements": (0, 16),
    "cpu.tune_matmuls": (False,),
    "cpu.attention": ("kernel", "library"),
    "cpu.pool_limit_bytes": (0,),
    "thresholds.pool_bytes": (0, NEVER),
    "thresholds.forget_bytes": (0, NEVER),
    "thresholds.many_inputs": (0, NEVER),
    "thresholds.tuned_matmul_work": (0, NEVER),
}
# What has an effect only beside another setting.
NEEDS: dict[str, dict[str, Any]] = {
    "max_autotune_gemm_backends": {"max_autotune": True},
    "benchmark_epilogue_fusion": {"max_autotune": True},
    "max_autotune": {"thresholds.tuned_matmul_work": 0, "tune_seconds": SEARCH_SECONDS},
}


def settings_of(seed: int) -> dict[str, Any]:
    """The settings of a seed: the same in every process."""
    rng = Random(f"settings {seed}")
    names = rng.sample(sorted(CHOICES), rng.randint(1, MOST))
    drawn = {name: rng.choice(CHOICES[name]) for name in names}
    for name, needed in NEEDS.items():  # in an order in which needs of needs come later
        if name in drawn:
            drawn = {**needed, **drawn}
    return drawn


def under_settings(settings: dict[str, Any]) -> AbstractContextManager[Any]:
    """A block in which Perfuse compiles under these settings, without vectors if need be."""
    isas = importlib.import_module("perfuse.target").machine_isas()
    if settings.get("cpu.simd", "scalar") not in isas:
        settings = {**settings, "cpu.simd": "scalar"}
    return importlib.import_module("perfuse").config.patch(settings)  # type: ignore[no-any-return]
