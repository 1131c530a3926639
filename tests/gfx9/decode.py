"""An instruction -> a function over waves; branches are `machine.py`'s."""

from __future__ import annotations

from collections.abc import Callable

from tests.gfx9 import atomics, matrix, memory_ops, packed, scalar, vector
from tests.gfx9.assembly import Instruction
from tests.gfx9.errors import KernelFailed, UnknownInstruction
from tests.gfx9.waves import Waves

Run = Callable[[Waves], None]

# Waiting, caches and priorities have no effect here: every access is complete when it is made.
WITHOUT_EFFECT = """s_waitcnt s_nop s_setprio s_sleep s_sendmsg s_sched_barrier s_icache_inv
s_dcache_wb buffer_inv buffer_wbl2""".split()
FAILING = ("s_trap", "s_swappc_b64", "s_setpc_b64", "s_endpgm_saved")


def _nothing(i: Instruction) -> Run:
    return lambda w: None


def _failure(i: Instruction) -> Run:
    def run(w: Waves) -> None:
        raise KernelFailed(f"{i.op}: the kernel reports a failed assertion")

    return run


DECODERS: dict[str, Callable[[Instruction], Run]] = {
    **dict.fromkeys(WITHOUT_EFFECT, _nothing),
    **dict.fromkeys(FAILING, _failure),
    **scalar.SPECIAL,
    **vector.SPECIAL,
    **packed.SPECIAL,
    **memory_ops.SPECIAL,
    **atomics.SPECIAL,
}


def decode(i: Instruction) -> Run:
    """The effect of an instruction on waves."""
    found = DECODERS.get(i.op)
    if found is not None:
        return found(i)
    if i.op.startswith("v_cmp"):
        return vector.compare(i)
    if i.op.startswith("v_mfma_"):
        return matrix.mfma(i)
    if i.op.endswith("_saveexec_b64"):
        return scalar.save_exec(i)
    raise UnknownInstruction(i.text)
