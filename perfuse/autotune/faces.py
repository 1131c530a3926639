"""Classes under the names that users of other compilers know: thin wrappers of Perfuse's own.

`perfuse.autotune`, `perfuse.kernels` and `perfuse.ir` export them. Of Perfuse itself, only
`select.py` uses one: measurements of matmul candidates go through `AlgorithmSelector.lookup`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch.fx import GraphModule

from perfuse import config
from perfuse.autotune.compile_together import compile_together, num_compile_threads
from perfuse.autotune.pool import TuningProcessPool, shared_pool
from perfuse.candidates.request import BenchmarkRequest, RandomTensor, milliseconds
from perfuse.context import Context
from perfuse.errors import NoValidChoicesError

Timings = Mapping[Any, float]
Benchmark = Callable[[list[Any]], Timings]


class FixedLayout:
    """Device, dtype, sizes and strides of a tensor; contiguous unless strides are given."""

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        size: Sequence[int],
        stride: Sequence[int] | None = None,
    ) -> None:
        self.device, self.dtype, self.size = device, dtype, tuple(size)
        self.stride = tuple(stride) if stride is not None else _contiguous(self.size)

    def operand(self, seed: int = 0) -> RandomTensor:
        """Perfuse's own description of such a tensor."""
        return RandomTensor(self.size, self.stride, self.dtype, str(self.device), seed)


def _contiguous(size: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(max(n, 1) for n in size[i + 1 :]) for i in range(len(size)))


@dataclass(frozen=True)
class Buffer:
    """A tensor of a graph by its name and layout."""

    name: str
    layout: FixedLayout


class GraphLowering:
    """A graph to be compiled. Perfuse has no current graph, so entering one does nothing."""

    def __init__(self, module: GraphModule) -> None:
        self.module = module

    def __enter__(self) -> GraphLowering:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        pass


class ChoiceCaller:
    """A candidate for an operation on some inputs."""

    def __init__(self, name: str, input_nodes: Sequence[Any], layout: Any) -> None:
        self.name, self.input_nodes, self.layout = name, list(input_nodes), layout

    def benchmark(self, *args: torch.Tensor, out: torch.Tensor) -> float:
        """Run it into `out`; the milliseconds of a run."""
        function = self.to_callable()
        return milliseconds(lambda: function(*args, out=out))

    def precompile(self) -> None:
        """Compile it, so that a benchmark need not."""

    def call_name(self) -> str:
        """Name of the function that it calls."""
        return self.name

    def to_callable(self) -> Callable[..., Any]:
        """The function that computes it: takes tensors, and `out`."""
        raise NotImplementedError(f"{self.name} cannot be called")

    def hash_key(self) -> str:
        """Text that is equal for equal kernels."""
        return self.name

    def output_node(self) -> Any:
        """The result of the operation where this candidate is chosen."""
        return self

    def __str__(self) -> str:
        return f"{type(self).__name__}({self.name})"


class TritonTemplateCaller(ChoiceCaller):
    """A candidate that a benchmark request describes, so that a worker can measure it."""

    def __init__(
        self, name: str, input_nodes: Sequence[Any], layout: Any, bmreq: BenchmarkRequest
    ) -> None:
        super().__init__(name, input_nodes, layout)
        self.bmreq = bmreq

    def benchmark(self, *args: torch.Tensor, out: torch.Tensor) -> float:
        return self.bmreq.benchmark(*args, output_tensor=out)


class ExternKernelCaller(ChoiceCaller):
    """A candidate that calls a library, by the name of a function of this file."""

    def to_callable(self) -> Callable[..., Any]:
        return EXTERN_KERNELS[self.name].function


@dataclass(frozen=True)
class ExternKernelChoice:
    """A library function that computes an operation."""

    name: str
    function: Callable[..., torch.Tensor]

    def bind(self, input_nodes: Sequence[Any], layout: FixedLayout) -> ExternKernelCaller:
        """The candidate for these inputs."""
        return ExternKernelCaller(self.name, input_nodes, layout)


def _mm_plus_mm(
    a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, d: torch.Tensor, *, out: torch.Tensor
) -> torch.Tensor:
    """a @ b + c @ d by two library calls."""
    torch.mm(a, b, out=out)
    return out.addmm_(c, d)


aten_mm_plus_mm = ExternKernelChoice("aten_mm_plus_mm", _mm_plus_mm)
EXTERN_KERNELS = {choice.name: choice for choice in (aten_mm_plus_mm,)}


class AlgorithmSelector:
    """Chooses among candidates by their times."""

    def __call__(
        self, name: str, choices: Sequence[ChoiceCaller], input_nodes: Sequence[Any], layout: Any
    ) -> Any:
        """The result node of the fastest candidate; all are compiled in threads first."""
        measured = self.make_benchmark_fn(choices, input_nodes, layout)

        def benchmark(asked: list[ChoiceCaller]) -> Timings:
            _precompile(asked)
            return measured(asked)

        timings = self.lookup(list(choices), name, repr(input_nodes), benchmark)
        finite = {choice: ms for choice, ms in timings.items() if math.isfinite(ms)}
        if not finite:
            reason = "its time is infinite" if timings else "it was not measured"
            raise NoValidChoicesError(name, {str(choice): reason for choice in choices})
        return min(finite, key=lambda choice: finite[choice]).output_node()

    def lookup(
        self, choices: list[Any], name: str, inputs: str, benchmark: Benchmark | None
    ) -> Timings:
        """Milliseconds of each choice; infinity for one that failed."""
        return {} if benchmark is None else benchmark(choices)

    def make_benchmark_fn(
        self, choices: Sequence[ChoiceCaller], input_nodes: Sequence[Any], layout: Any
    ) -> Benchmark:
        """A function that measures choices, in this process or in workers."""
        settings = config.snapshot()
        if settings.autotune_in_subproc and all(hasattr(choice, "bmreq") for choice in choices):
            pool: TuningProcessPool = shared_pool(settings)
            return pool.benchmark

        def benchmark(asked: list[Any]) -> Timings:
            inputs = [self.benchmark_example_value(node) for node in input_nodes]
            out = self.benchmark_example_value(layout)
            return {choice: _time_of(choice, inputs, out) for choice in asked}

        return benchmark

    @staticmethod
    def benchmark_example_value(node: Buffer | FixedLayout) -> torch.Tensor:
        """A random tensor with the layout of a node."""
        layout = node.layout if isinstance(node, Buffer) else node
        return layout.operand().tensor()


def _time_of(choice: ChoiceCaller, inputs: Sequence[torch.Tensor], out: torch.Tensor) -> float:
    try:
        return choice.benchmark(*inputs, out=out)
    except (RuntimeError, MemoryError):  # of a candidate that lacks resources or support
        return math.inf


def _precompile(choices: Sequence[ChoiceCaller]) -> None:
    """Compile each distinct kernel once; a failure shows where it is measured."""
    context = Context.default()
    builds = [(choice.hash_key() or id(choice), choice.precompile) for choice in choices]
    compile_together(builds, num_compile_threads(context, len(builds)), context.counters)
