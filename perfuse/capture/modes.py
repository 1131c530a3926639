"""Modes and options of a compile: both are overrides of the settings."""

from collections.abc import Mapping
from typing import Any

from perfuse.config import Settings
from perfuse.errors import UnknownOption

# CPUs have no CUDA graphs: there, modes with and without them are equal.
MODES: Mapping[str, Mapping[str, Any]] = {
    "default": {},
    "reduce-overhead": {"cudagraphs": True},
    "max-autotune": {"max_autotune": True, "cudagraphs": True},
    "max-autotune-no-cudagraphs": {"max_autotune": True},
}


def overrides_of(mode: str | None, options: Mapping[str, Any] | None) -> dict[str, Any]:
    """The settings that a mode and options change, options last; unknown modes raise."""
    name = "default" if mode is None else mode
    if name not in MODES:
        raise UnknownOption(name, MODES, what="mode")
    return {**MODES[name], **(options or {})}


def settings_for(
    settings: Settings, mode: str | None, options: Mapping[str, Any] | None
) -> Settings:
    """The settings of one compile; an unknown option is an error that names the nearest."""
    return settings.with_overrides(overrides_of(mode, options))
