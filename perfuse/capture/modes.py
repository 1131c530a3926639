"""Modes and options of a compile: both are overrides of the settings."""

from collections.abc import Mapping
from typing import Any

from perfuse.config import AS_MAPPING, Settings
from perfuse.errors import ConfigError, UnknownOption

# CPUs have no CUDA graphs: there, modes with and without them are equal.
MODES: Mapping[str, Mapping[str, Any]] = {
    "default": {},
    "reduce-overhead": {"cudagraphs": True},
    "max-autotune": {"max_autotune": True, "cudagraphs": True},
    "max-autotune-no-cudagraphs": {"max_autotune": True},
}


def overrides_of(mode: str | None, options: Mapping[str, Any] | None) -> dict[str, Any]:
    """The settings that a mode and options change, options last; unknown modes raise."""
    name: object = "default" if mode is None else mode
    if not isinstance(name, str):
        message = f"a mode must be a string, got {name!r}"
        raise ConfigError(message, hint=f"choose one of: {', '.join(MODES)}.")
    if name not in MODES:
        raise UnknownOption(name, MODES, what="mode")
    if not isinstance(options or {}, Mapping):
        raise ConfigError(f"options must be a mapping, got {options!r}", hint=AS_MAPPING)
    return {**MODES[name], **(options or {})}


def settings_for(
    settings: Settings, mode: str | None, options: Mapping[str, Any] | None
) -> Settings:
    """The settings of one compile; an unknown option is an error that names the nearest."""
    return settings.with_overrides(overrides_of(mode, options))
