"""Triton kernels run by Triton's interpreter, on CPU tensors: for checking values without a GPU.

Triton decides when a function is decorated whether it will be interpreted, and its own library was
decorated when it was imported. So for the time of a launch the functions of that library are
replaced by interpreted ones, which is seen by the whole process: launches take turns.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch

from perfuse.build.triton_compile import load_module
from perfuse.codegen.host.tables import LaunchRow
from perfuse.codegen.triton.sources import TritonKernel
from perfuse.forking import ForkLock
from perfuse.runtime.frame import GpuFrame
from perfuse.runtime.interpreted_math import NumpyLibdevice
from perfuse.runtime.records import kind_of

_TURN = ForkLock()
_LIBRARY = ("triton.language", "triton.language.standard", "triton.language.random")

Run = Callable[[], None]


class Interpreter:
    """Launches the kernels of one generated module."""

    keeps_memory = False

    def __init__(self, text: str, kernels: tuple[TritonKernel, ...]) -> None:
        self.kernels = {kernel.name: kernel for kernel in kernels}
        with _TURN, _interpreting():
            self.module = load_module(text)
            vars(self.module)["libdevice"] = NumpyLibdevice()

    def prepare(self, frame: GpuFrame) -> None:
        """Give the frame what `launch` runs."""
        tables = frame.tables
        rows = enumerate(tables.records)
        records = [partial(kind_of(row).run, self, frame, k, row) for k, row in rows]
        frame.segments = [records[first : first + count] for first, count in tables.segments]

    def launch(self, segment: list[Run], stream: int) -> int:
        """Run the records of a segment in order; nothing is left to fail later."""
        torch.compiler.disable(_run_all)(segment)  # type: ignore[no-untyped-call]
        return 0

    def failed(self, code: int) -> None:
        raise AssertionError("an interpreted launch fails by raising")

    def interpret(self, frame: GpuFrame, number: int, row: LaunchRow) -> None:
        """Run one launch."""
        arguments = _arguments(self.kernels[row.kernel], frame, row)
        _interpret(getattr(self.module, row.kernel), arguments, frame.grid(number))


def _run_all(segment: list[Run]) -> None:
    with _TURN, _interpreting():
        for run in segment:
            run()


def _arguments(kernel: TritonKernel, frame: GpuFrame, row: LaunchRow) -> dict[str, Any]:
    """The kernel's parameters as the interpreter holds them, of exactly the promised types."""
    addresses = [frame.pointers[place] for place in row.pointers]
    values = [*addresses, *(frame.sizes[place] for place in row.sizes)]
    passed = [(name, kind) for name, kind in kernel.signature if kind != "constexpr"]
    found: dict[str, Any] = dict(kernel.constants)
    for (name, kind), value in zip(passed, values, strict=True):
        if name in kernel.divisible and value % 16:
            raise ValueError(f"{kernel.name}: {name} is {value}, promised to be divisible by 16")
        found[name] = _scalar(value, kind)
    return found


def _scalar(value: int, kind: str) -> Any:
    language = importlib.import_module("triton.language")
    interpreter = importlib.import_module("triton.runtime.interpreter")
    is_pointer = kind.startswith("*")
    dtype = np.uint64 if is_pointer else np.dtype({"i32": np.int32, "i64": np.int64}[kind])
    of_triton = language.str_to_ty(kind, None)
    return language.tensor(
        interpreter.TensorHandle(np.array([value], dtype=dtype), of_triton), of_triton
    )


def _interpret(function: Any, arguments: Mapping[str, Any], grid: tuple[int, int, int]) -> None:
    """Run every program of the grid, one after another."""
    interpreter = importlib.import_module("triton.runtime.interpreter")
    body = function.rewrite()
    builder = interpreter.interpreter_builder
    with _interpreted_language():
        builder.set_grid_dim(*grid)
        for x in range(grid[0]):
            for y in range(grid[1]):
                for z in range(grid[2]):
                    builder.set_grid_idx(x, y, z)
                    body(**arguments)


@contextmanager
def _interpreted_language() -> Iterator[None]:
    """A block in which the language's own functions compute, for kernels and all they call.

    Left to itself the interpreter does this again at each call of a function in a kernel, and does
    not undo it: what is compiled later in the process would find a language that computes.
    """
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    language: Any = importlib.import_module("triton.language")
    original = interpreter._patch_lang
    everything = SimpleNamespace(__globals__={"tl": language, "core": language.core})
    scope = original(everything)
    interpreter._patch_lang = lambda function: scope
    try:
        yield
    finally:
        interpreter._patch_lang = original
        scope.restore()


@contextmanager
def _interpreting() -> Iterator[None]:
    """A block in which Triton and its library are interpreted."""
    knobs = importlib.import_module("triton.knobs")
    with ExitStack() as stack:
        stack.enter_context(knobs.runtime.scope())
        knobs.runtime.interpret = True
        for module in map(importlib.import_module, _LIBRARY):
            stack.enter_context(_replaced(module))
        stack.enter_context(_whole_numbers())
        stack.enter_context(_truth())
        stack.enter_context(_one_rounding())
        stack.enter_context(_wide_products())
        yield


@contextmanager
def _whole_numbers() -> Iterator[None]:
    """The interpreter holds scalars as arrays of one element, which NumPy takes for no int."""
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    original = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda scalar: int(scalar.handle.data.item()))

    interpreter._patch_lang_tensor = patch
    try:
        yield
    finally:
        interpreter._patch_lang_tensor = original


@contextmanager
def _truth() -> Iterator[None]:
    """The interpreter gives what a comparison finds the dtype of what was compared: doubles and
    broadcast scalars know no `and`."""
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    language: Any = importlib.import_module("triton.language")
    builder = interpreter.InterpreterBuilder
    original = builder.binary_op

    def binary_op(self: Any, left: Any, right: Any, op: Any) -> Any:
        made = op(left.data, right.data)
        if made.dtype == np.bool_:
            return interpreter.TensorHandle(made, language.int1)
        return original(self, left, right, op)

    builder.binary_op = binary_op
    try:
        yield
    finally:
        builder.binary_op = original


@contextmanager
def _one_rounding() -> Iterator[None]:
    """The interpreter rounds the product of a fused multiply-add: of float32 it need not."""
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    builder = interpreter.InterpreterBuilder
    original = builder.create_fma

    def create_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        if z.data.dtype != np.float32:
            return original(self, x, y, z)
        with np.errstate(all="ignore"):
            made = x.data.astype(np.float64) * y.data + z.data
            return interpreter.TensorHandle(made.astype(np.float32), z.dtype.scalar)

    builder.create_fma = create_fma
    try:
        yield
    finally:
        builder.create_fma = original


@contextmanager
def _wide_products() -> Iterator[None]:
    """The interpreter holds bfloat16 as bits, which it would multiply as integers."""
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    language: Any = importlib.import_module("triton.language")
    builder = interpreter.InterpreterBuilder
    original = builder.create_dot

    def widened(operand: Any) -> Any:
        if operand.dtype.scalar != language.bfloat16:
            return operand
        wide = (operand.data.astype(np.uint32) << 16).view(np.float32)
        return interpreter.TensorHandle(wide, language.float32)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return original(self, widened(a), widened(b), *rest)

    builder.create_dot = create_dot
    try:
        yield
    finally:
        builder.create_dot = original


@contextmanager
def _replaced(module: ModuleType) -> Iterator[None]:
    jit = importlib.import_module("triton.runtime.jit")
    compiled = {n: f for n, f in vars(module).items() if isinstance(f, jit.JITFunction)}
    vars(module).update({n: _interpreted(f) for n, f in compiled.items()})
    try:
        yield
    finally:
        vars(module).update(compiled)


_TWINS: dict[int, Any] = {}


def _interpreted(function: Any) -> Any:
    """The interpreted version of a compiled function, one each: combiners compare by identity."""
    interpreter = importlib.import_module("triton.runtime.interpreter")
    if id(function) not in _TWINS:
        _TWINS[id(function)] = interpreter.InterpretedFunction(function.fn)
    return _TWINS[id(function)]
