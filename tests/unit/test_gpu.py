"""GPU targets: found by name, from what a device says of itself, and in the target's key."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from perfuse import config, gpu
from perfuse.context import Context
from perfuse.errors import ConfigError
from perfuse.target import target_of


@pytest.mark.parametrize(
    ("name", "kind", "arch", "warp"),
    [
        ("cuda:90", "cuda", "sm_90", 32),
        ("sm_80", "cuda", "sm_80", 32),
        ("cuda:100", "cuda", "sm_100", 32),
        ("hip:gfx942", "hip", "gfx942", 64),
        ("gfx90a", "hip", "gfx90a", 64),
    ],
)
def test_targets_by_name(name: str, kind: str, arch: str, warp: int) -> None:
    target = target_of(name, config.snapshot())
    assert target.gpu is not None
    assert (target.kind, target.gpu.kind, target.gpu.arch, target.gpu.warp) == (
        kind,
        kind,
        arch,
        warp,
    )
    assert target.gpu.triton_arch == (int(arch[3:]) if kind == "cuda" else arch)


@pytest.mark.parametrize("name", ["cuda:31", "hip:90", "cuda:gfx942", "tpu"])
def test_an_unknown_name_lists_the_known_ones(name: str) -> None:
    with pytest.raises(ConfigError, match="cuda:90"):
        target_of(name, config.snapshot())


def test_a_device_says_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    told = SimpleNamespace(
        major=9,
        minor=0,
        multi_processor_count=66,
        warp_size=32,
        L2_cache_size=30 << 20,
        shared_memory_per_block_optin=200 << 10,
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=2048,
        memory_clock_rate=3201000,
        memory_bus_width=6144,
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: told)
    monkeypatch.setattr(torch.version, "hip", None)
    gpu.gpu_of_device.cache_clear()
    found = gpu.gpu_of_device(0)
    gpu.gpu_of_device.cache_clear()
    assert (found.arch, found.multiprocessors, found.shared_bytes) == ("sm_90", 66, 200 << 10)
    assert found.bandwidth == pytest.approx(4.9e12, rel=0.01)
    assert found.flops_f32 == gpu.KNOWN["sm_90"].flops_f32 / 2


def test_interpreting_compiles_cpu_tensors_for_a_gpu() -> None:
    cpu = torch.device("cpu")
    with config.patch({"gpu.interpret": True}):
        assert Context.on(cpu, config.snapshot()).target.kind == "cuda"
    with config.patch({"gpu.interpret": True, "triton.arch": "gfx942"}):
        assert Context.on(cpu, config.snapshot()).target.kind == "hip"
    assert Context.on(cpu, config.snapshot()).target.gpu is None
