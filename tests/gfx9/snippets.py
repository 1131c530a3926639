"""Hand-written instructions to test the interpreter with: inputs in v0, v2, v4, the result in v8.

Tests name their instructions in tables, so that one test can have LLVM assemble them all:
the interpreter is not tested on instructions that gfx942 does not have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tests.gfx9.assembly import parse_assembly, parse_instruction
from tests.gfx9.decode import decode
from tests.gfx9.machine import Kernel
from tests.gfx9.memory import LocalMemory, Memory
from tests.gfx9.waves import LANES, NUM_SCALARS, Waves

Array = np.ndarray[Any, Any]

NUM_WAVES, NUM_VECTORS = 3, 64
UNTOUCHED = 0xCAFE0000


def new_waves(memory: Memory | None = None, local_bytes: int = 0) -> Waves:
    """Waves of one workgroup each, with all lanes on."""
    shape = (NUM_VECTORS, NUM_WAVES, LANES)
    return Waves(
        np.full((NUM_SCALARS, NUM_WAVES), UNTOUCHED, np.uint32),
        {kind: np.full(shape, UNTOUCHED, np.uint32) for kind in ("v", "a")},
        np.ones((NUM_WAVES, LANES), bool),
        np.zeros(NUM_WAVES, bool),
        np.arange(NUM_WAVES),
        memory or Memory([]),
        LocalMemory(NUM_WAVES, local_bytes),
    )


def set_vector(w: Waves, number: int, values: Array) -> None:
    """Fill a vector register, or a pair of them, with values of any type."""
    if values.dtype.itemsize == 2:
        values = values.view(np.uint16).astype(np.uint32)
    words = np.ascontiguousarray(np.broadcast_to(values, w.exec.shape)).view(np.uint32)
    for k in range(words.shape[1] // LANES):
        w.vectors["v"][number + k] = words.reshape(NUM_WAVES, LANES, -1)[:, :, k]


def vector(w: Waves, number: int, dtype: Any) -> Array:
    """A vector register, or a pair of them, as values of a type."""
    size = np.dtype(dtype).itemsize
    if size == 2:
        return w.vectors["v"][number].astype(np.uint16).view(dtype)
    words = [w.vectors["v"][number + k] for k in range(size // 4)]
    return np.ascontiguousarray(np.stack(words, axis=-1)).view(dtype)[..., 0]


def execute(w: Waves, *lines: str) -> Waves:
    """Run instructions without branches."""
    with np.errstate(all="ignore"):
        for line in lines:
            decode(parse_instruction(line))(w)
    return w


def computed(line: str, inputs: Sequence[Array], result: Any) -> tuple[Array, Waves]:
    """The result of an instruction in v8, and the waves; every third lane is off."""
    w = new_waves()
    for number, values in enumerate(inputs):
        set_vector(w, 2 * number, values)
    w.exec[:, ::3] = False
    execute(w, line)
    return vector(w, 8, result), w


ENTRY = """
.amdhsa_kernel test
.amdhsa_kernarg_size 64
.amdhsa_user_sgpr_count 2
.amdhsa_system_sgpr_workgroup_id_x 1
.amdhsa_system_sgpr_workgroup_id_y 1
.amdhsa_system_sgpr_workgroup_id_z 0
.end_amdhsa_kernel
test:
"""
METADATA = """
.amdgpu_metadata
      - .offset: 0
        .size: 8
        .value_kind: global_buffer
"""


def kernel_of(text: str, num_threads: int = LANES, local_bytes: int = 0) -> Kernel:
    """A kernel of one pointer, which it finds at s[0:1]; its workgroup is in s2 and s3."""
    return Kernel(parse_assembly(f"{ENTRY}{text}\ns_endpgm\n{METADATA}"), num_threads, local_bytes)


def launched(
    text: str, memory: Array, *, grid: tuple[int, int, int] = (1, 1, 1), **options: Any
) -> Array:
    """The memory that a kernel leaves: v1 is set to zero, and s[4:5] to its address, before it."""
    prologue = "s_load_dwordx2 s[4:5], s[0:1], 0x0\nv_mov_b32_e32 v1, 0\n"
    region = memory.ctypes.data, memory.nbytes
    kernel_of(prologue + text, **options).launch(grid, [region[0]], Memory([region]))
    return memory


def random_inputs(*kinds: str, seed: int = 0) -> list[Array]:
    """Values of each lane: small and large ones, with the special ones among floats."""
    draw = np.random.default_rng(seed)
    made = []
    for number, kind in enumerate(kinds):
        dtype = np.dtype({"u": "uint", "i": "int", "f": "float"}[kind[0]] + kind[1:])
        bits = draw.integers(0, 256, (NUM_WAVES, LANES, dtype.itemsize), np.uint8)
        values = bits.view(dtype)[..., 0].copy()
        values[:, ::4] = draw.integers(0, 40, values[:, ::4].shape).astype(dtype)
        if kind[0] == "f":
            values[:, 1::4] = (draw.standard_normal(values[:, 1::4].shape) * 3).astype(dtype)
            special: Mapping[int, float] = {5: np.inf, 7: -np.inf, 11: np.nan, 13: -0.0}
            for lane, value in special.items():
                values[number % NUM_WAVES, lane] = value
        made.append(values)
    return made
