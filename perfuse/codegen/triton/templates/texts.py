"""`template_texts`: the functions that compute a kernel with a contraction."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from perfuse.codegen.triton.emit import Dialect
from perfuse.codegen.triton.frame import KernelText
from perfuse.codegen.triton.templates.frame import ContractionFrame
from perfuse.codegen.triton.templates.gluon import GluonFrame, gluon_text
from perfuse.codegen.triton.templates.persistent import mapped_text, persistent_text
from perfuse.codegen.triton.templates.pointers import pointers_text
from perfuse.codegen.triton.templates.template import (
    MAPPED,
    PERSISTENT,
    POINTERS,
    SPECIALISED,
    VECTOR,
    Template,
)
from perfuse.ir.program import Buffer
from perfuse.schedule.plan import Kernel

TritonFrame = TypeVar("TritonFrame", bound=ContractionFrame)
Write = Callable[[Kernel, Mapping[str, Buffer], Template, Dialect], KernelText]


def written_in(frame: type[TritonFrame], text: Callable[[TritonFrame], KernelText]) -> Write:
    """The writer of templates whose text is written in this kind of frame."""
    return lambda kernel, buffers, template, dialect: text(
        frame(kernel, buffers, template, dialect)
    )


# A template of another kind is a row here, and in propose.py what it can compute.
TEXTS: dict[str, Write] = {
    POINTERS: written_in(ContractionFrame, pointers_text),
    VECTOR: written_in(ContractionFrame, pointers_text),
    PERSISTENT: written_in(ContractionFrame, persistent_text),
    MAPPED: written_in(ContractionFrame, mapped_text),
    **dict.fromkeys(SPECIALISED, written_in(GluonFrame, gluon_text)),
}


def template_texts(
    kernel: Kernel, buffers: Mapping[str, Buffer], template: Template, dialect: Dialect
) -> list[KernelText]:
    """The functions that run one kernel with a contraction, in order."""
    return [TEXTS[template.kind](kernel, buffers, template, dialect)]
