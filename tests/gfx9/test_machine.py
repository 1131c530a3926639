"""Scalar instructions, branches, memory and barriers: small kernels, launched."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.gfx9 import machine
from tests.gfx9.assembler import are_assembled
from tests.gfx9.errors import BadAddress, KernelFailed, UnknownInstruction
from tests.gfx9.memory import Memory
from tests.gfx9.snippets import (
    NUM_WAVES,
    execute,
    kernel_of,
    launched,
    new_waves,
    set_vector,
    vector,
)
from tests.gfx9.waves import LANES

Array = np.ndarray[Any, Any]
M32 = (1 << 32) - 1

# An instruction on s4 = 7, s5 = 0xfffffff0 (-16) and s[6:7] = 5 << 32 | 1: its result in s8, SCC.
SCALARS = [
    ("s_add_i32 s8, s4, s5", -9, False),
    ("s_add_u32 s8, s4, s5", M32 - 8, False),
    ("s_add_u32 s8, s5, 0x7ffffff0", 0x7FFFFFE0, True),
    ("s_sub_u32 s8, s4, s5", 23, True),
    ("s_add_i32 s8, s4, 0x7fffffff", -(1 << 31) + 6, True),
    ("s_mul_i32 s8, s4, s5", -112, None),
    ("s_mul_hi_u32 s8, s4, s5", 6, None),
    ("s_mul_hi_i32 s8, s4, s5", -1, None),
    ("s_lshl_b32 s8, s4, 3", 56, True),
    ("s_lshr_b32 s8, s5, 28", 15, True),
    ("s_ashr_i32 s8, s5, 2", -4, True),
    ("s_lshr_b64 s[8:9], s[6:7], 31", 10, True),
    ("s_and_b32 s8, s4, s5", 0, False),
    ("s_andn2_b32 s8, s4, 3", 4, True),
    ("s_xor_b64 s[8:9], s[6:7], s[6:7]", 0, False),
    ("s_bfe_u32 s8, s5, 0x40002", 12, True),
    ("s_bfe_i32 s8, s5, 0x40002", -4, True),
    ("s_abs_i32 s8, s5", 16, True),
    ("s_min_i32 s8, s4, s5", -16, False),
    ("s_max_u32 s8, s4, s5", -16, False),
    ("s_min_u32 s8, s4, s5", 7, True),
    ("s_brev_b32 s8, s4", -(1 << 29), None),
    ("s_bcnt1_i32_b64 s8, s[6:7]", 3, True),
    ("s_ff1_i32_b32 s8, s5", 4, None),
    ("s_flbit_i32_b32 s8, s4", 29, None),
    ("s_sext_i32_i8 s8, s5", -16, None),
    ("s_movk_i32 s8, 0xfff0", -16, None),
    ("s_cselect_b32 s8, s4, s5", -16, False),
    ("s_pack_ll_b32_b16 s8, s4, s5", 7 - (16 << 16), None),
    ("s_cmp_lt_i32 s5, s4", None, True),
    ("s_cmp_lt_u32 s5, s4", None, False),
    ("s_cmpk_lt_i32 s5, 0xfff1", None, True),
    ("s_bitcmp1_b32 s4, 2", None, True),
    ("s_cmp_eq_u64 s[6:7], s[6:7]", None, True),
]


@pytest.mark.parametrize(("line", "result", "scc"), SCALARS)
def test_scalar_instructions(line: str, result: int | None, scc: bool | None) -> None:
    w = new_waves()
    w.scalars[4], w.scalars[5], w.scalars[6], w.scalars[7] = 7, M32 - 15, 1, 5
    execute(w, line)
    if result is not None:
        assert (w.scalars[8] == result & M32).all()
    if scc is not None:
        assert (w.scc == scc).all()


def test_carry_over_registers() -> None:
    w = new_waves()
    w.scalars[4], w.scalars[5] = M32, 6
    execute(w, "s_add_u32 s4, s4, 1", "s_addc_u32 s5, s5, 0")
    execute(w, "s_sub_u32 s6, 0, 1", "s_subb_u32 s7, 9, 0")
    assert w.scalars[4:8, 0].tolist() == [0, 7, M32, 8]


def test_saved_masks() -> None:
    w = new_waves()
    w.exec[:, 40:] = False
    set_vector(w, 0, np.arange(LANES, dtype=np.uint32))
    execute(w, "v_cmp_gt_u32_e32 vcc, 10, v0", "s_and_saveexec_b64 s[4:5], vcc")
    assert (w.exec.sum(axis=1) == 10).all() and w.scc.all()
    execute(w, "s_andn2_saveexec_b64 s[6:7], s[4:5]", "v_mov_b32_e32 v8, 1")
    assert (w.exec.sum(axis=1) == 30).all()
    assert (vector(w, 8, np.uint32) == 1).sum() == 30 * NUM_WAVES
    execute(w, "s_or_b64 exec, exec, s[6:7]")
    assert (w.exec == (np.arange(LANES) < 40)).all()


# Lane k of workgroup g runs k % 4 + g times around, and stores how often.
LOOP = """
v_and_b32_e32 v2, 3, v0
v_add_u32_e32 v2, s2, v2
v_mov_b32_e32 v3, 0
s_mov_b64 s[6:7], exec
.LOOP:
v_cmp_gt_u32_e32 vcc, v2, v3
s_and_b64 exec, exec, vcc
s_cbranch_execz .DONE
v_add_u32_e32 v3, 1, v3
s_branch .LOOP
.DONE:
s_mov_b64 exec, s[6:7]
v_lshl_or_b32 v4, s2, 6, v0
v_lshlrev_b32_e32 v4, 2, v4
global_store_dword v4, v3, s[4:5]
"""


def test_loops_of_lanes_and_waves_that_part() -> None:
    got = launched(LOOP, np.zeros(5 * LANES, np.int32), grid=(5, 1, 1)).reshape(5, LANES)
    assert (got == np.arange(LANES) % 4 + np.arange(5)[:, None]).all()


# Each wave stores its lanes, and after a barrier reads what the other one stored.
EXCHANGE = """
v_lshlrev_b32_e32 v2, 2, v0
v_lshl_or_b32 v3, s2, 8, v0
ds_write_b32 v2, v3 offset:16
s_waitcnt lgkmcnt(0)
s_barrier
v_xor_b32_e32 v4, 0x100, v2
ds_read_b32 v5, v4 offset:16
s_waitcnt lgkmcnt(0)
s_lshl_b32 s6, s2, 9
v_add_u32_e32 v6, s6, v2
global_store_dword v6, v5, s[4:5]
"""


def test_waves_exchange_through_local_memory() -> None:
    options = {"num_threads": 128, "local_bytes": 528}
    got = launched(EXCHANGE, np.zeros(3 * 128, np.int32), grid=(3, 1, 1), **options)
    group, thread = np.divmod(np.arange(3 * 128), 128)
    assert (got == group * 256 + (thread ^ 64)).all()


def test_batches_of_workgroups(monkeypatch: pytest.MonkeyPatch) -> None:
    """More waves than run in step at once."""
    monkeypatch.setattr(machine, "MAX_WAVES", 2)
    got = launched(LOOP, np.zeros(5 * LANES, np.int32), grid=(5, 1, 1)).reshape(5, LANES)
    assert (got == np.arange(LANES) % 4 + np.arange(5)[:, None]).all()


WIDE = """
v_lshlrev_b32_e32 v2, 4, v0
global_load_dwordx4 v[4:7], v2, s[4:5]
v_lshlrev_b32_e32 v3, 4, v0
v_mov_b32_e32 v8, v7
v_mov_b32_e32 v9, v6
ds_write_b64 v3, v[4:5]
ds_write2_b32 v3, v8, v9 offset0:2 offset1:3
ds_read_b128 v[12:15], v3
ds_read_u16 v16, v3 offset:2
ds_read2st64_b32 v[18:19], v1 offset0:0 offset1:1
v_add_u32_e32 v15, v15, v16
v_add_u32_e32 v15, v15, v19
global_store_dwordx4 v2, v[12:15], s[4:5]
global_load_ushort v20, v2, s[4:5] offset:2
global_store_byte v2, v20, s[4:5]
"""


def test_accesses_of_every_width() -> None:
    memory = np.random.default_rng(0).integers(0, M32, (LANES, 4), np.uint32)
    expected = memory[:, [0, 1, 3, 2]].copy()
    expected[:, 3] += (memory[:, 0] >> 16) + memory[16, 0]
    expected.view(np.uint8)[:, 0] = memory.view(np.uint8)[:, 2]
    assert np.array_equal(launched(WIDE, memory, local_bytes=1024), expected)


BUFFER = """
s_mov_b32 s6, 40
s_mov_b32 s7, 0x27000
v_lshlrev_b32_e32 v2, 2, v0
buffer_load_dword v3, v2, s[4:7], 0 offen offset:4
v_add_u32_e32 v3, 1, v3
buffer_store_dword v3, v2, s[4:7], 0 offen
"""


def test_buffers_have_a_range() -> None:
    """40 bytes: ten loads see nine values and a zero, and ten stores are made."""
    got = launched(BUFFER, np.arange(100, 100 + LANES, dtype=np.int32))
    assert got.tolist() == [*range(102, 111), 1, *range(110, 100 + LANES)]


SHARED = """
s_mov_b32 s6, 12
s_mov_b32 s7, 0x27000
buffer_load_dwordx3 v[3:5], off, s[4:7], 0
v_lshlrev_b32_e32 v2, 2, v0
global_store_dword v2, v5, s[4:5]
"""


def test_a_buffer_is_read_without_an_offset_of_lanes() -> None:
    got = launched(SHARED, np.arange(100, 100 + LANES, dtype=np.int32))
    assert got.tolist() == [102] * LANES


ATOMICS = """
v_mov_b32_e32 v2, 1.0
v_mov_b32_e32 v3, 3
v_and_b32_e32 v4, 1, v0
v_lshlrev_b32_e32 v4, 2, v4
global_atomic_add_f32 v4, v2, s[4:5]
global_atomic_add v5, v1, v3, s[4:5] offset:8 sc0
global_atomic_smax v1, v0, s[4:5] offset:12
v_add_u32_e32 v8, 1, v0
v_mov_b32_e32 v9, 0
v_mov_b32_e32 v10, v0
v_mov_b32_e32 v11, 0
global_atomic_cmpswap_x2 v[6:7], v1, v[8:11], s[4:5] offset:16 sc0
v_lshlrev_b32_e32 v2, 2, v0
global_store_dword v2, v5, s[4:5] offset:24
"""


def test_atomics_count_every_lane() -> None:
    memory = np.zeros(6 + LANES, np.int32)
    launched(ATOMICS, memory)
    assert memory[:2].view(np.float32).tolist() == [32.0, 32.0]
    assert memory[2:6].tolist() == [3 * LANES, LANES - 1, LANES, 0]
    assert sorted(memory[6:]) == list(range(0, 3 * LANES, 3))


@pytest.mark.parametrize(
    ("text", "error", "told"),
    [
        (
            "v_mov_b32_e32 v2, 0x400\nglobal_store_dword v2, v0, s[4:5]",
            BadAddress,
            "768 bytes after",
        ),
        ("v_mov_b32_e32 v2, 64\nds_write_b32 v2, v0", BadAddress, "has 64 bytes"),
        ("v_frobnicate_b32 v0, v1", UnknownInstruction, "kernel test, .*v_frobnicate_b32 v0, v1"),
        ("s_trap 2", KernelFailed, "assertion"),
        (".LOOP:\ns_branch .LOOP", KernelFailed, "kernel test has not ended"),
    ],
)
def test_errors_name_the_kernel_and_the_instruction(
    text: str, error: type[Exception], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "MAX_STEPS", 1000)
    with pytest.raises(error, match="(?s)kernel test.*" + told if "test" not in told else told):
        launched(text, np.zeros(LANES, np.int32), local_bytes=64)


def test_what_is_unknown_may_stand_where_it_is_not_reached() -> None:
    kernel = kernel_of("s_branch .END\nv_frobnicate_b32 v0, v1\n.END:")
    kernel.launch((1, 1, 1), [0], Memory([]))


def test_llvm_has_these_instructions() -> None:
    lines = [line for line, _, _ in SCALARS]
    for text in (LOOP, EXCHANGE, WIDE, BUFFER, ATOMICS):
        own = text.replace(".LOOP", f".L{len(lines)}").replace(".DONE", f".D{len(lines)}")
        lines += own.splitlines()
    assert are_assembled(lines)
