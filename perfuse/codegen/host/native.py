"""`generate_native`: a program as a table of lines, for hosts with neither Python nor PyTorch.

`perfuse/native/perfuse.cpp` reads it. The kernels are the same library; what the host program does
in Python (memory, pointers, calls in order) is a line each. Of the library calls, only float32
matmuls can run without PyTorch; a program with others, or with dynamic sizes, is refused with the
reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from perfuse.codegen.cpp.unit import CppSources, Segment
from perfuse.errors import ArtefactError
from perfuse.ir.dtype import DType, to_torch
from perfuse.ir.program import ARGUMENTS, Buffer, BufferKind, LibraryCall, Matmul, View
from perfuse.schedule.plan import Plan
from perfuse.schedule.turns import Allocation, MemorySource

NO_MATRIX = "- 0 0 0 0"


def cannot(reason: str) -> ArtefactError:
    """The refusal of a program that C++ alone cannot run."""
    return ArtefactError(
        f"cannot run without PyTorch: {reason}",
        hint="remove native=True and load the artefact from Python.",
    )


def generate_native(plan: Plan, sources: CppSources) -> list[str]:
    """The lines that run a plan; inputs are buffers by the names that the program gives them."""
    if plan.program.symbols or sources.sizes:
        raise cannot("sizes are not fixed")
    return list(_Native(plan, sources).lines())


class _Native:
    def __init__(self, plan: Plan, sources: CppSources) -> None:
        self.plan = plan
        self.sources = sources
        self.buffers = plan.program.buffers
        self.places = {name: k + 1 for k, name in enumerate(sources.pointers)}

    def lines(self) -> Iterator[str]:
        yield f"tables {len(self.places) + 1} {len(self.sources.sizes) + 1} {self.plan.arena_bytes}"
        for name in self.sources.pointers:
            if self.buffers[name].kind in ARGUMENTS:
                yield f"point {self.places[name]} {name}"
        for turn, step in zip(self.plan.memory.turns, self.sources.steps, strict=True):
            if isinstance(step, LibraryCall) and not (step.into_out and isinstance(step, Matmul)):
                raise cannot(f"it calls {step.op}")
            for added in turn.allocated:
                for made in added:
                    yield from self._made(made)
            if isinstance(step, Segment):
                yield f"segment {step.name} {step.checks_indices:d}"
            else:
                assert isinstance(step, Matmul)
                yield self._matmul(step)
        for made in self.plan.memory.at_exit:
            yield from self._made(made)
        for out in self.plan.program.outputs:
            yield self._output(out)

    def _made(self, made: Allocation) -> Iterator[str]:
        name = made.name
        if self.buffers[name].kind == BufferKind.SEEDS:
            raise cannot("it draws random numbers")
        if made.source is MemorySource.ARENA:
            yield f"place {name} {made.offset}"
        elif made.source is MemorySource.REUSED:
            yield f"same {name} {made.of}"
        else:
            yield f"make {name} {_known(made.num_bytes)}"
        if name in self.places:
            yield f"point {self.places[name]} {name}"

    def _matmul(self, step: Matmul) -> str:
        whole = self.buffers[step.out]
        out = step.window or View(step.out, whole.shape, whole.strides, 0)
        a, b, bias = step.operands.a, step.operands.b, step.operands.bias
        numbers = (float(step.alpha), float(step.beta))
        views = [out, a, b]
        if any(self.buffers[v.buffer].dtype is not DType.F32 for v in views):
            raise cannot(f"{step.op} of a dtype other than float32")
        batch = out.shape[0] if len(out.shape) == 3 else 1
        sizes = (batch, out.shape[-2], out.shape[-1], a.shape[-1])
        third = NO_MATRIX if bias is None else _matrix(bias, out.shape)
        head = " ".join(str(_known(n)) for n in sizes)
        rest = " ".join([*(_matrix(v, v.shape) for v in views), third])
        return f"product {head} {numbers[0]!r} {numbers[1]!r} {rest}"

    def _output(self, out: Any) -> str:
        if not isinstance(out, View):
            raise cannot("a result is not a tensor that it computes")
        buffer = self.buffers[out.buffer]
        if buffer.kind in ARGUMENTS or out.buffer in self.plan.places:
            raise cannot("a result shares memory with an argument")
        return f"output {layout(out.buffer, out.offset, buffer, out)}"


def layout(name: str, offset: Any, buffer: Buffer, view: View | Buffer) -> str:
    """A window on memory: name, offset in elements, dtype, rank, sizes, strides."""
    dims = [*view.shape, *view.strides]
    dtype = str(to_torch(buffer.dtype)).removeprefix("torch.")
    numbers = " ".join(str(_known(n)) for n in dims)
    return f"{name} {_known(offset)} {dtype} {len(view.shape)} {numbers}".rstrip()


def _matrix(view: View, shape: tuple[Any, ...]) -> str:
    """A matrix, or one for each of a batch, broadcast to a shape: buffer, offset, strides."""
    lead = len(shape) - len(view.shape)
    strides = [0] * lead + [
        0 if n == 1 and m != 1 else s
        for n, m, s in zip(view.shape, shape[lead:], view.strides, strict=True)
    ]
    batch = strides[0] if len(strides) == 3 else 0
    return " ".join([view.buffer, *(str(_known(n)) for n in (view.offset, batch, *strides[-2:]))])


def _known(number: Any) -> int:
    if not isinstance(number, int):
        raise cannot("sizes are not fixed")
    return number
