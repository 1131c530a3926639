"""Triton kernels run by Triton's interpreter, on CPU tensors: for checking values without a GPU.

Triton decides when a function is decorated whether it will be interpreted, and its own library was
decorated when it was imported. So for the time of a launch the functions of that library are
replaced by interpreted ones, which is seen by the whole process: launches take turns.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch

from perfuse.build.triton_compile import load_module
from perfuse.codegen.host.tables import LaunchRow, MappedLaunchRow
from perfuse.codegen.triton.sources import TritonKernel
from perfuse.forking import ForkLock
from perfuse.runtime.frame import GpuFrame
from perfuse.runtime.host_library import NO_UNITS, HostLibrary
from perfuse.runtime.interpreted_math import NumpyLibdevice
from perfuse.runtime.records import kind_of

_TURN = ForkLock()
_LIBRARY = ("triton.language", "triton.language.standard", "triton.language.random")

Run = Callable[[], None]


class Interpreter:
    """Launches the kernels of one generated module."""

    keeps_memory = False

    def __init__(
        self,
        text: str,
        kernels: tuple[TritonKernel, ...],
        units: Mapping[str, HostLibrary] = NO_UNITS,
    ) -> None:
        self.units: Mapping[str, HostLibrary] = units
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

    def refuse(self, row: MappedLaunchRow) -> None:
        """Raise: the interpreter does not support tensor maps of the host."""
        raise NotImplementedError(f"{row.kernel} takes tensor maps, which are not interpreted")


def _run_all(segment: list[Run]) -> None:
    with _TURN, _interpreting():
        for run in segment:
            run()


def _arguments(kernel: TritonKernel, frame: GpuFrame, row: LaunchRow) -> dict[str, Any]:
    """The kernel's parameters as the interpreter holds them, of exactly the declared types."""
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
    handle = interpreter.TensorHandle(np.array([value], dtype=dtype), of_triton)
    return language.tensor(handle, of_triton)


def _interpret(function: Any, arguments: Mapping[str, Any], grid: tuple[int, int, int]) -> None:
    """Run every program of the grid, one after another."""
    interpreter = importlib.import_module("triton.runtime.interpreter")
    body = function.rewrite()
    builder = interpreter.interpreter_builder
    with _interpreted_language():
        builder.set_grid_dim(*grid)
        for place in itertools.product(*map(range, grid)):
            builder.set_grid_idx(*place)
            body(**arguments)


@contextmanager
def _set(owner: Any, name: str, value: Any) -> Iterator[None]:
    """A block in which an attribute has this value."""
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextmanager
def _interpreted_language() -> Iterator[None]:
    """A block in which the language's own functions compute, for kernels and all they call.

    By default the interpreter does this again at each function call in a kernel, and does not undo
    it: what is compiled later in the process would find a language that computes.
    """
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    language: Any = importlib.import_module("triton.language")
    everything = SimpleNamespace(__globals__={"tl": language, "core": language.core})
    scope = interpreter._patch_lang(everything)
    with _set(interpreter, "_patch_lang", lambda function: scope):
        try:
            yield
        finally:
            scope.restore()


@contextmanager
def _interpreting() -> Iterator[None]:
    """A block in which Triton and its library are interpreted."""
    knobs = importlib.import_module("triton.knobs")
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    builder = interpreter.InterpreterBuilder
    with ExitStack() as stack:
        stack.enter_context(knobs.runtime.scope())
        knobs.runtime.interpret = True
        for module in map(importlib.import_module, _LIBRARY):
            stack.enter_context(_replaced(module))
        whole_numbers = _whole_numbers(interpreter._patch_lang_tensor)
        stack.enter_context(_set(interpreter, "_patch_lang_tensor", whole_numbers))
        stack.enter_context(_set(builder, "binary_op", _truth(builder.binary_op)))
        stack.enter_context(_set(builder, "create_fma", _one_rounding(builder.create_fma)))
        stack.enter_context(_set(builder, "create_dot", _wide_products(builder.create_dot)))
        yield


def _whole_numbers(original: Any) -> Any:
    """The interpreter holds scalars as one-element arrays, which NumPy does not accept as ints."""

    def patch(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda scalar: int(scalar.handle.data.item()))

    return patch


def _truth(original: Any) -> Any:
    """The interpreter gives what a comparison finds the dtype of what was compared: doubles and
    broadcast scalars know no `and`."""
    handle = importlib.import_module("triton.runtime.interpreter").TensorHandle
    int1 = importlib.import_module("triton.language").int1

    def binary_op(self: Any, left: Any, right: Any, op: Any) -> Any:
        made = op(left.data, right.data)
        return handle(made, int1) if made.dtype == np.bool_ else original(self, left, right, op)

    return binary_op


def _one_rounding(original: Any) -> Any:
    """The interpreter rounds the product of a fused multiply-add: of float32 it need not."""
    handle = importlib.import_module("triton.runtime.interpreter").TensorHandle

    def create_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        if z.data.dtype != np.float32:
            return original(self, x, y, z)
        with np.errstate(all="ignore"):
            made = x.data.astype(np.float64) * y.data + z.data
            return handle(made.astype(np.float32), z.dtype.scalar)

    return create_fma


def _wide_products(original: Any) -> Any:
    """The interpreter holds bfloat16 as bits, which it would multiply as integers."""
    language: Any = importlib.import_module("triton.language")
    handle: Any = importlib.import_module("triton.runtime.interpreter").TensorHandle

    def widened(operand: Any) -> Any:
        if operand.dtype.scalar != language.bfloat16:
            return operand
        wide = (operand.data.astype(np.uint32) << 16).view(np.float32)
        return handle(wide, language.float32)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return original(self, widened(a), widened(b), *rest)

    return create_dot


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
