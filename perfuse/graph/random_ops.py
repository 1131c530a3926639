"""Random numbers as ops: seeds, which are drawn, and numbers, which follow from a seed.

`perfuse::seeds` is the only random one. `perfuse::uniform_at` and `normal_at` are functions of
their arguments, so a backward can redraw the numbers from eight bytes. Their lowering is in
`lower/families/random.py`; what is here runs where a graph runs eagerly, and gives the same
numbers. Philox4x32-10 makes four words of a counter: neighbours in fours take one each for a
uniform number; a normal one takes the first two of its own counter.
"""

from collections.abc import Sequence
from math import pi, prod
from typing import Any

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF
_NUM_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)

# Bits of a significand: a uniform number keeps to them, so that rounding never reaches 1.
_NUM_BITS = {torch.bfloat16: 8, torch.float16: 11}

_open_library: Any = torch.library.Library  # untyped in torch
_library = _open_library("perfuse", "DEF")
_library.define(
    "seeds(int count, *, Device device) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,)
)
for _name in ("uniform_at", "normal_at"):
    _library.define(f"{_name}(Tensor seeds, int index, SymInt[] size, ScalarType dtype) -> Tensor")

seeds = torch.ops.perfuse.seeds.default
uniform_at = torch.ops.perfuse.uniform_at.default
normal_at = torch.ops.perfuse.normal_at.default


def _draw_seeds(count: int, *, device: torch.device) -> Tensor:
    return torch.empty(count, dtype=torch.int64, device=device).random_()


def _uniform_at(seeds: Tensor, index: int, size: Sequence[int], dtype: torch.dtype) -> Tensor:
    count = prod(size)
    counters = torch.arange((count + 3) // 4, device=seeds.device)
    drawn = torch.stack(_words(seeds[index], counters), -1).flatten()[:count]
    value = _unit(drawn)
    if dtype in _NUM_BITS:
        scale = float(1 << _NUM_BITS[dtype])
        value = (value * scale).floor() / scale
    return value.to(dtype).view(tuple(size))


def _normal_at(seeds: Tensor, index: int, size: Sequence[int], dtype: torch.dtype) -> Tensor:
    first, second, *_ = _words(seeds[index], torch.arange(prod(size), device=seeds.device))
    radius = (-2 * (_unit(first) + 2.0**-24).log()).sqrt()
    return (radius * (_unit(second) * (2 * pi)).cos()).to(dtype).view(tuple(size))


def _unit(words: Tensor) -> Tensor:
    """Uniform in [0, 1), from the upper 24 bits of each."""
    return (words >> 8).to(torch.float32) * 2.0**-24


def _words(seed: Tensor, counter: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four words that Philox makes of each counter."""
    c0, c1 = counter & _WORD, (counter >> 32) & _WORD
    c2 = c3 = torch.zeros_like(counter)
    k0, k1 = seed & _WORD, (seed >> 32) & _WORD
    for _ in range(_NUM_ROUNDS):
        # The products wrap around, which leaves their 64 bits as they should be.
        p, q = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c2 = ((q >> 32) & _WORD) ^ c1 ^ k0, ((p >> 32) & _WORD) ^ c3 ^ k1
        c1, c3 = q & _WORD, p & _WORD
        k0, k1 = (k0 + _KEY_STEPS[0]) & _WORD, (k1 + _KEY_STEPS[1]) & _WORD
    return c0, c1, c2, c3


def _fake_numbers_at(seeds: Tensor, index: int, size: Sequence[int], dtype: torch.dtype) -> Tensor:
    return seeds.new_empty(tuple(size), dtype=dtype)


_library.impl("seeds", _draw_seeds, "BackendSelect")
_library.impl("uniform_at", _uniform_at, "CompositeExplicitAutograd")
_library.impl("normal_at", _normal_at, "CompositeExplicitAutograd")
for _name in ("uniform_at", "normal_at"):
    _library.impl(_name, _fake_numbers_at, "Meta")
