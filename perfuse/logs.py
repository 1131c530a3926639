"""Logs: Python's `logging` under `perfuse.*`, one logger per channel, silent by default.

`PERFUSE_LOG=fusion,+cache` writes channels to stderr: a plain name its summaries (INFO), with `+`
everything (DEBUG), with `-` only errors; `all` is every channel. A program that configures
`logging` itself needs no variable: `logging.getLogger("perfuse").setLevel(logging.INFO)`.
"""

from __future__ import annotations

import logging
import warnings
from difflib import get_close_matches

from perfuse.errors import ConfigWarning

ROOT = "perfuse"

CHANNELS = {
    "capture": "each captured function: loaded or compiled, and why it is not cached",
    "cache": "hits, misses and damaged entries of the cache on disk",
    "fusion": "loops that became kernels, and fusions that were refused",
    "fallback": "ops that run as ordinary PyTorch ops, and why",
    "tuning": "what was measured and chosen",
    "compile": "the time each stage of a compile takes",
    "code": "the generated sources (+code prints them)",
}

# Counters that are also logged: the first part of their name, and the channel.
_COUNTED = {"cache": "cache", "build": "cache", "autotune": "tuning", "cudagraph": "compile"}

_LEVELS = {"+": logging.DEBUG, "-": logging.ERROR}


def channel(name: str) -> logging.Logger:
    """The logger of a channel."""
    assert name in CHANNELS, name
    return logging.getLogger(f"{ROOT}.{name}")


class _Stderr(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes what PERFUSE_LOG asked for, unless the program has handlers of its own."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            super().emit(record)


def parse(text: str) -> dict[str, int]:
    """Channels and their levels, as written in PERFUSE_LOG; an unknown name is a warning."""
    levels: dict[str, int] = {}
    for word in filter(None, (part.strip() for part in text.split(","))):
        level = _LEVELS.get(word[0], logging.INFO)
        name = word.lstrip("+-").lower()
        if name == "all":
            levels.update(dict.fromkeys(CHANNELS, level))
        elif name in CHANNELS:
            levels[name] = level
        else:
            _warn_unknown(name)
    return levels


def _warn_unknown(name: str) -> None:
    nearest = get_close_matches(name, [*CHANNELS, "all"], n=1, cutoff=0.5)
    hint = f"did you mean {nearest[0]!r}? " if nearest else ""
    known = ", ".join(["all", *CHANNELS])
    message = f"PERFUSE_LOG: unknown channel {name!r}; {hint}channels are: {known}"
    warnings.warn(message, ConfigWarning, stacklevel=2)


def set_up(text: str) -> None:
    """Stay silent by default, and write the channels that `text` requests to stderr."""
    root = logging.getLogger(ROOT)
    if not any(isinstance(handler, logging.NullHandler) for handler in root.handlers):
        root.addHandler(logging.NullHandler())
    levels = parse(text)
    for name, level in levels.items():
        channel(name).setLevel(level)
    if levels and not any(isinstance(handler, _Stderr) for handler in root.handlers):
        handler = _Stderr()
        handler.setFormatter(logging.Formatter("[%(name)s] %(message)s"))
        root.addHandler(handler)


def count(name: str, n: int) -> None:
    """Log an increment of a counter, if it belongs to an enabled channel."""
    home = _COUNTED.get(name.partition(".")[0])
    if home is not None and channel(home).isEnabledFor(logging.DEBUG):
        channel(home).debug("%s +%d", name, n)
