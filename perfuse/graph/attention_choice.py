"""Which kernel computes attention on a CPU: the library's, or a generated one.

Measured by benchmarks/attention_cpu.py on Zen 5, one thread. With AVX-512 ours is faster for every
size and mask, forward, backward and with one query, in float32 (1.2 to 3.4 times) and bfloat16 (1.3
to 24 times). With AVX2 it is so without a mask and with one query (1.05 to 1.9 times), but not
with a mask of 1024 queries and keys (0.97) nor backward (0.96 to 1.1). So it is a rule, not a race.
"""

from dataclasses import dataclass

from perfuse.config import Settings
from perfuse.ir.index import Dim
from perfuse.torch_compat.ops import has_matrix_units

_FEW_QUERIES = 7  # for which keys are lanes with AVX2


@dataclass(frozen=True, slots=True)
class AttentionProblem:
    """The facts that the choice depends on."""

    is_half: bool
    has_mask: bool = False  # that is given, not causal
    is_gradient: bool = False
    queries: Dim = 0


def library_reason(settings: Settings, isa: str, problem: AttentionProblem) -> str | None:
    """Why the library computes attention; None if a generated kernel does."""
    wanted = settings.cpu.attention
    if wanted == "library" or settings.gpu.interpret:
        return "cpu.attention asks for the library"
    if wanted == "kernel":
        return None
    if isa not in ("avx512", "avx2"):
        return f"our kernel was not measured with {isa}"
    if problem.is_half and has_matrix_units():
        return "the processor has matrix units for halves"
    if isa == "avx2" and problem.is_gradient:
        return "gradients of attention are not faster with AVX2"
    is_few = isinstance(problem.queries, int) and problem.queries <= _FEW_QUERIES
    if isa == "avx2" and problem.has_mask and not is_few:
        return "attention with a mask is not faster with AVX2"
    return None
