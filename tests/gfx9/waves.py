"""`Waves`: the registers of waves that are at the same instruction, as arrays over waves and lanes.

A scalar register is an array (waves,), a vector register an array (waves, 64), both of uint32; a
64-bit value is two registers. Every lane of every wave computes; `exec` says which lanes are kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tests.gfx9.assembly import EXEC

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from tests.gfx9.memory import LocalMemory, Memory

    Array = np.ndarray[Any, Any]

LANES = 64
NUM_SCALARS = 128
U32, U64 = np.dtype(np.uint32), np.dtype(np.uint64)
LOW = np.uint64(0xFFFFFFFF)


@dataclass(slots=True)
class Waves:
    """Waves in step. `group` is the number of each wave's workgroup among those that run."""

    scalars: Array
    vectors: dict[str, Array]  # "v" and "a": (register, wave, lane)
    exec: Array  # bool (waves, 64)
    scc: Array  # bool (waves,)
    group: Array
    memory: Memory
    local: LocalMemory
    place: int = 0  # the next instruction

    @property
    def count(self) -> int:
        return len(self.group)

    def chosen(self, which: Array) -> Waves:
        """A copy of some of the waves."""
        return Waves(
            self.scalars[:, which],
            {kind: array[:, which] for kind, array in self.vectors.items()},
            self.exec[which],
            self.scc[which],
            self.group[which],
            self.memory,
            self.local,
            self.place,
        )

    def scalar(self, number: int) -> Array:
        """A scalar register of each wave."""
        if number in (EXEC, EXEC + 1):
            return words_of(self.exec)[number - EXEC]
        found: Array = self.scalars[number]
        return found

    def set_scalar(self, number: int, value: Array) -> None:
        if number not in (EXEC, EXEC + 1):
            self.scalars[number] = value
            return
        words = words_of(self.exec)
        words[number - EXEC] = value
        self.exec = mask_of(words[0], words[1])

    def scalar64(self, number: int) -> Array:
        if number == EXEC:
            low, high = words_of(self.exec)
        else:
            low, high = self.scalars[number], self.scalars[number + 1]
        return joined(low, high)

    def set_scalar64(self, number: int, value: Array) -> None:
        low, high = halves(value)
        if number == EXEC:
            self.exec = mask_of(*(np.broadcast_to(part, self.group.shape) for part in (low, high)))
        else:
            self.scalars[number], self.scalars[number + 1] = low, high

    def mask(self, number: int) -> Array:
        """A pair of scalar registers as a bit of each lane."""
        if number == EXEC:
            return self.exec
        return mask_of(self.scalars[number], self.scalars[number + 1])

    def set_mask(self, number: int, lanes: Array) -> None:
        if number == EXEC:
            self.exec = np.array(lanes)
        else:
            self.scalars[number], self.scalars[number + 1] = words_of(lanes)


def merged(several: Sequence[Waves]) -> Waves:
    """Waves that arrived at the same instruction, in step from now on."""
    first = several[0]
    return Waves(
        np.concatenate([w.scalars for w in several], axis=1),
        {
            kind: np.concatenate([w.vectors[kind] for w in several], axis=1)
            for kind in first.vectors
        },
        np.concatenate([w.exec for w in several]),
        np.concatenate([w.scc for w in several]),
        np.concatenate([w.group for w in several]),
        first.memory,
        first.local,
        first.place,
    )


def joined(low: Array, high: Array) -> Array:
    """A 64-bit value from its registers."""
    found: Array = low.astype(U64) | (high.astype(U64) << np.uint64(32))
    return found


def halves(value: Array) -> tuple[Array, Array]:
    """The registers of a 64-bit value."""
    bits = np.ascontiguousarray(value).view(U64)
    return (bits & LOW).astype(U32), (bits >> np.uint64(32)).astype(U32)


def words_of(lanes: Array) -> Array:
    """Bits of 64 lanes -> (2, waves) words."""
    packed = np.packbits(lanes, axis=-1, bitorder="little")
    return np.ascontiguousarray(packed.view(U32).T)


def mask_of(low: Array, high: Array) -> Array:
    """Two words of each wave -> bits of its 64 lanes."""
    words = np.stack([low, high], axis=-1).astype(U32)
    return np.unpackbits(words.view(np.uint8), axis=-1, bitorder="little").astype(bool)
