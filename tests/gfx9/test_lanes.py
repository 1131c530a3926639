"""Moves between lanes, and matrix instructions, which multiply what lanes hold together."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.gfx9.assembler import are_assembled
from tests.gfx9.errors import UnknownInstruction
from tests.gfx9.floats import FP8
from tests.gfx9.snippets import NUM_WAVES, execute, new_waves, set_vector, vector
from tests.gfx9.waves import LANES

Array = np.ndarray[Any, Any]
OLD = 900
NONE = -1

# Which lane each lane reads; NONE where there is no such lane.
MOVES = {
    "quad_perm:[1,0,3,2]": lambda k: k ^ 1,
    "quad_perm:[2,2,2,2]": lambda k: k // 4 * 4 + 2,
    "row_shr:1": lambda k: k - 1 if k % 16 else NONE,
    "row_shr:8": lambda k: k - 8 if k % 16 > 7 else NONE,
    "row_shl:3": lambda k: k + 3 if k % 16 < 13 else NONE,
    "row_ror:4": lambda k: k // 16 * 16 + (k - 4) % 16,
    "row_mirror": lambda k: k // 16 * 16 + 15 - k % 16,
    "row_half_mirror": lambda k: k // 8 * 8 + 7 - k % 8,
    "row_bcast:15": lambda k: k // 16 * 16 - 1,
    "row_bcast:31": lambda k: 31 if k > 31 else NONE,
    "row_newbcast:5": lambda k: k // 16 * 16 + 5,
    "wave_shl:1": lambda k: k + 1 if k < 63 else NONE,
}


def dpp(move: str, extra: str = "") -> str:
    return f"v_mov_b32_dpp v8, v0 {move} row_mask:0xf bank_mask:0xf{extra}"


@pytest.mark.parametrize("move", MOVES)
def test_data_parallel_moves(move: str) -> None:
    sources = [MOVES[move](k) for k in range(LANES)]
    for extra, missing in (("", OLD), (" bound_ctrl:1", 0)):
        w = new_waves()
        set_vector(w, 0, np.arange(100, 100 + LANES, dtype=np.uint32))
        set_vector(w, 8, np.full(LANES, OLD, np.uint32))
        execute(w, dpp(move, extra))
        expected = [missing if source == NONE else 100 + source for source in sources]
        assert (vector(w, 8, np.uint32) == expected).all()


def test_rows_and_banks_that_are_not_written() -> None:
    w = new_waves()
    set_vector(w, 0, np.arange(LANES, dtype=np.uint32))
    set_vector(w, 8, np.full(LANES, OLD, np.uint32))
    execute(w, "v_add_u32_dpp v8, v0, v0 row_shr:1 row_mask:0xa bank_mask:0x3")
    lane = np.arange(LANES)
    is_written = np.isin(lane // 16, (1, 3)) & (lane % 16 < 8) & (lane % 16 > 0)
    assert (vector(w, 8, np.uint32) == np.where(is_written, 2 * lane - 1, OLD)).all()


SWIZZLES = {
    "swizzle(SWAP,16)": lambda k: k ^ 16,
    "swizzle(REVERSE,8)": lambda k: k ^ 7,
    "swizzle(BROADCAST,4,2)": lambda k: k // 4 * 4 + 2,
    "swizzle(QUAD_PERM,3,2,1,0)": lambda k: k ^ 3,
    'swizzle(BITMASK_PERM,"01pi0")': lambda k: k & 32 | 8 | k & 4 | ~k & 2,
    "0x041f": lambda k: k ^ 1,
}


@pytest.mark.parametrize("offset", SWIZZLES)
def test_swizzles(offset: str) -> None:
    w = new_waves()
    set_vector(w, 0, np.arange(LANES, dtype=np.uint32))
    execute(w, f"ds_swizzle_b32 v8, v0 offset:{offset}")
    assert vector(w, 8, np.uint32)[1].tolist() == [SWIZZLES[offset](k) for k in range(LANES)]


def test_permutations_through_addresses() -> None:
    w, lane = new_waves(), np.arange(LANES)
    target = (lane * 5 + 3) % LANES
    set_vector(w, 0, (4 * target).astype(np.uint32))
    set_vector(w, 2, (100 + lane).astype(np.uint32))
    execute(w, "ds_bpermute_b32 v8, v0, v2", "ds_permute_b32 v9, v0, v2")
    assert (vector(w, 8, np.uint32) == 100 + target).all()
    assert (vector(w, 9, np.uint32)[:, target] == 100 + lane).all()


def test_single_lanes_and_counts() -> None:
    w, lane = new_waves(), np.arange(LANES)
    set_vector(w, 0, (100 + lane).astype(np.uint32))
    w.exec[:, :9] = False
    w.scalars[4] = 7
    execute(
        w,
        "v_readfirstlane_b32 s5, v0",
        "v_readlane_b32 s6, v0, 63",
        "v_readlane_b32 s7, v0, s4",
        "v_writelane_b32 v0, s6, 2",
        "v_mbcnt_lo_u32_b32 v8, exec_lo, 0",
        "v_mbcnt_hi_u32_b32 v8, exec_hi, v8",
    )
    assert [int(w.scalars[k, 0]) for k in (5, 6, 7)] == [109, 163, 107]
    assert int(vector(w, 0, np.uint32)[2, 2]) == 163
    assert (vector(w, 8, np.uint32)[:, 9:] == lane[9:] - 9).all()


def as_bf16(x: Array) -> Array:
    return (x.view(np.uint32) >> 16).astype(np.uint16)


# Instruction -> rows, depth, and how a value of an operand becomes bits.
MATRICES = {
    "v_mfma_f32_32x32x8_f16": (32, 8, np.float16),
    "v_mfma_f32_16x16x16_f16": (16, 16, np.float16),
    "v_mfma_f32_32x32x8_bf16": (32, 8, as_bf16),
    "v_mfma_f32_16x16x16_bf16": (16, 16, as_bf16),
    "v_mfma_f32_32x32x2_f32": (32, 2, np.float32),
    "v_mfma_f32_16x16x4_f32": (16, 4, np.float32),
    "v_mfma_f32_32x32x16_fp8_fp8": (32, 16, FP8.encoded),
    "v_mfma_f32_16x16x32_fp8_fp8": (16, 32, FP8.encoded),
    "v_mfma_i32_32x32x16_i8": (32, 16, np.int8),
    "v_mfma_i32_16x16x32_i8": (16, 32, np.int8),
}


def matrix_line(op: str) -> str:
    size, depth, encode = MATRICES[op]
    num_bytes = size * depth * np.asarray(encode(np.zeros(1, np.float32))).dtype.itemsize
    words, results = num_bytes // LANES // 4, size * size // LANES
    span = [f"v{k}" if words == 1 else f"v[{k}:{k + words - 1}]" for k in (0, 4)]
    return f"{op} a[0:{results - 1}], {span[0]}, {span[1]}, a[0:{results - 1}]"


@pytest.mark.parametrize("op", MATRICES)
def test_matrix_products(op: str) -> None:
    """Small whole numbers, so that every format is exact."""
    size, depth, encode = MATRICES[op]
    draw = np.random.default_rng(3)
    w = new_waves()
    left, right, start = (
        draw.integers(-4, 5, shape).astype(np.float32)
        for shape in ((NUM_WAVES, size, depth), (NUM_WAVES, depth, size), (NUM_WAVES, size, size))
    )
    of_lane = depth * size // LANES
    for first, matrix in ((0, left), (4, right.transpose(0, 2, 1))):
        for wave in range(NUM_WAVES):
            for lane in range(LANES):
                k = lane // size * of_lane
                bits = np.asarray(encode(matrix[wave, lane % size, k : k + of_lane].copy()))
                for number, word in enumerate(bits.view(np.uint32)):
                    w.vectors["v"][first + number][wave, lane] = word
    kind = np.int32 if op.startswith("v_mfma_i32") else np.float32
    number, lane = np.meshgrid(np.arange(size * size // LANES), np.arange(LANES), indexing="ij")
    rows = (
        number // 4 * 8 + lane // size * 4 + number % 4 if size == 32 else lane // 16 * 4 + number
    )
    sums = w.vectors["a"].view(kind)
    for wave in range(NUM_WAVES):
        sums[number, wave, lane] = start[wave, rows, lane % size].astype(kind)
    execute(w, matrix_line(op))
    product = left @ right + start
    for wave in range(NUM_WAVES):
        assert np.array_equal(sums[number, wave, lane], product[wave, rows, lane % size])


def test_what_changes_matrix_operands_is_refused() -> None:
    with pytest.raises(UnknownInstruction, match="cbsz"):
        execute(new_waves(), f"{matrix_line('v_mfma_f32_32x32x2_f32')} cbsz:1")


def test_llvm_has_these_instructions() -> None:
    lines = [dpp(move, extra) for move in MOVES for extra in ("", " bound_ctrl:1")]
    lines += [f"ds_swizzle_b32 v8, v0 offset:{offset}" for offset in SWIZZLES]
    assert are_assembled([*lines, *map(matrix_line, MATRICES)])
