"""Kernels of attention in C++: a writer for each part."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from perfuse.codegen.cpp.kernel import KernelText
from perfuse.codegen.cpp.templates.attention_forward import forward_text
from perfuse.codegen.cpp.templates.attention_frame import CppAttentionFrame
from perfuse.codegen.cpp.templates.attention_gradient import gradient_text
from perfuse.context import Context
from perfuse.ir.attention import AttentionPart
from perfuse.ir.program import Buffer
from perfuse.schedule.plan import Kernel

TEXTS: dict[AttentionPart, Callable[[CppAttentionFrame], KernelText]] = {
    AttentionPart.FORWARD: forward_text,
    AttentionPart.QUERY_GRADIENT: gradient_text,
    AttentionPart.KEY_GRADIENT: gradient_text,
}


def generate_attention(
    kernel: Kernel, buffers: Mapping[str, Buffer], context: Context, over: Mapping[str, str]
) -> KernelText:
    """The function that computes one part of attention."""
    assert kernel.attention is not None
    write = TEXTS[kernel.attention.part]
    return write(CppAttentionFrame(kernel, buffers, context, over))
