"""`template_texts`: the functions that compute a kernel with a contraction."""

from __future__ import annotations

from collections.abc import Callable, Mapping

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

# A template of another kind is a row here, and in propose.py what it can compute.
TEXTS: dict[str, Callable[[ContractionFrame], KernelText]] = {
    POINTERS: pointers_text,
    VECTOR: pointers_text,
    PERSISTENT: persistent_text,
    MAPPED: mapped_text,
}


def template_texts(
    kernel: Kernel, buffers: Mapping[str, Buffer], template: Template, dialect: Dialect
) -> list[KernelText]:
    """The functions that run one kernel with a contraction, in order."""
    if template.kind in SPECIALISED:
        return [gluon_text(GluonFrame(kernel, buffers, template, dialect))]
    return [TEXTS[template.kind](ContractionFrame(kernel, buffers, template, dialect))]
