"""Extensions from outside, one row each.

A backend, a kind of launch, passes, a tuner, a source of candidates, a template, a lowering. A kind
of cache entry is in test_keys.py, a generator of kernels in codegen/test_emitter.py.
"""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import perfuse
from perfuse.autotune import tune
from perfuse.backends import BACKENDS, Backend
from perfuse.build import UNIT_LIBRARY
from perfuse.build.compiler import CompilerRun, built_library
from perfuse.cache import keys
from perfuse.cache.access import open_store
from perfuse.cache.keys import key_of
from perfuse.cache.manifest import Entry
from perfuse.candidates.library import CpuMatmul, LibraryMatmul
from perfuse.candidates.site import Site
from perfuse.candidates.source import Contractions, Offer, Source
from perfuse.candidates.sources import SOURCES
from perfuse.codegen.host.source import HostSource
from perfuse.codegen.host.tables import FillRow, GpuTables
from perfuse.codegen.triton.emit import Dialect
from perfuse.codegen.triton.frame import KernelText
from perfuse.codegen.triton.sources import HostCall, HostLaunch, HostUnit
from perfuse.codegen.triton.templates.frame import ContractionFrame
from perfuse.codegen.triton.templates.pointers import pointers_text
from perfuse.codegen.triton.templates.template import Template
from perfuse.codegen.triton.templates.texts import TEXTS, template_texts, written_in
from perfuse.context import Context
from perfuse.decision import Choice
from perfuse.graph.passes import ATEN_PASSES, DYNAMO_PASSES, JOINT_PASSES, PassRow
from perfuse.ir import expr as ex
from perfuse.ir import index as ix
from perfuse.ir.expr import Expr
from perfuse.ir.program import Matmul, Program, View
from perfuse.lower.builder import Builder
from perfuse.lower.registry import LOWERINGS, lowers
from perfuse.lower.tensor import Tensor
from perfuse.runtime.frame import GpuFrame
from perfuse.runtime.host_names import run_host
from perfuse.runtime.interpreted import Interpreter
from perfuse.runtime.records import KINDS, RecordKind
from perfuse.runtime.saved import SavedProgram, files_of, read_program
from perfuse.schedule.plan import Kernel, Plan
from tests.triton.contractions import Problem as Contracted
from tests.triton.contractions import sources_of

OPS = {"add": "({0} + {1})", "mul": "({0} * {1})"}
HOST = HostSource("", 1, 1, 0, (), (), (), 0, (), ())


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    with perfuse.testing.fresh_cache():
        yield


@dataclass(frozen=True)
class PythonSources:
    """Kernels as Python statements."""

    texts: tuple[str, ...]


def spelled(value: Expr) -> str:
    if value.op == "load":
        return f"{value.buffer}.view(-1)[{value.index!r}]"
    return OPS[value.op].format(*map(spelled, value.args))


def generate(plan: Plan, context: Any) -> PythonSources:
    lines = []
    for kernel in plan.kernels:
        for member in kernel.members:
            indent = "  "
            for axis in kernel.axes:
                lines.append(f"{indent}for {axis.name} in range({axis.size}):")
                indent += "  "
            place = f"{member.loop.out}.view(-1)[{member.loop.index!r}]"
            lines.append(f"{indent}{place} = {spelled(member.loop.value)}")
    return PythonSources(("\n".join(lines),))


def host(plan: Plan, sources: PythonSources, context: Any) -> HostSource:
    made = {m.loop.out: plan.program.buffers[m.loop.out] for k in plan.kernels for m in k.members}
    lines = ["def call(args):", f"  {', '.join(plan.program.inputs)}, = args", "  args.clear()"]
    lines += [f"  {name} = torch.empty({buffer.shape})" for name, buffer in made.items()]
    outputs = [out.buffer for out in plan.program.outputs if isinstance(out, View)]
    lines += [*sources.texts, f"  return ({', '.join(outputs)},)"]
    return replace(HOST, text="\n".join(lines), num_inputs=len(plan.program.inputs))


def load(
    program: HostSource, built: Sequence[Any], constants: Mapping[str, Any], context: Any
) -> Any:
    return run_host(program, {"torch": torch}, constants)


PYTHON = Backend("python", lambda target: True, generate, lambda sources, context: (), host, load)


def test_a_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perfuse.backends.BACKENDS", [PYTHON, *BACKENDS])
    x, y = torch.randn(3, 4), torch.randn(4)
    function = torch.compile(lambda x, y: x * y + x, backend="perfuse")
    got, (text, _) = perfuse.testing.run_and_get_code(function, x, y)
    assert torch.equal(got, x * y + x)
    assert "for x" in text
    torch._dynamo.reset()  # and from the cache, without generating anything
    monkeypatch.setattr("perfuse.backends.BACKENDS", [replace(PYTHON, generate=None), *BACKENDS])
    assert torch.equal(torch.compile(lambda x, y: x * y + x, backend="perfuse")(x, y), got)


@dataclass(frozen=True)
class CopyRow:
    """Bytes copied from one address of the table to another."""

    source: int
    target: int
    count: int

    @property
    def grid(self) -> tuple[int, int, int]:
        return self.count, 1, 1


def copy(interpreter: Interpreter, frame: GpuFrame, number: int, row: CopyRow) -> None:
    places = frame.pointers[row.target], frame.pointers[row.source]
    ctypes.memmove(*places, frame.grid(number)[0])


def test_a_kind_of_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = RecordKind("copy", CopyRow, lambda *_: (0,) * 8, copy)
    monkeypatch.setattr("perfuse.runtime.records.KINDS", [*KINDS, kind])
    rows = (FillRow(1, "07", 4), CopyRow(1, 2, 8))
    program = replace(HOST, num_pointers=3, gpu=GpuTables("cpu", rows, ((0, 2),), (), ()))
    saved = read_program(files_of(SavedProgram(program, (), {}, {})).__getitem__)
    assert saved.host.gpu == program.gpu
    frame = GpuFrame(saved.host, [])
    x, y = torch.arange(8, dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8)
    frame.pointers[1], frame.pointers[2] = x.data_ptr(), y.data_ptr()
    launcher = Interpreter("import triton\n", ())
    launcher.prepare(frame)
    assert launcher.launch(frame.segments[0], 0) == 0
    assert y.tolist() == [7, 7, 7, 7, 4, 5, 6, 7]


@pytest.mark.parametrize(
    "level", [DYNAMO_PASSES, JOINT_PASSES, ATEN_PASSES], ids=["dynamo", "joint", "aten"]
)
def test_a_pass(level: list[PassRow]) -> None:
    sums, product = (operator.add, torch.ops.aten.add.Tensor), torch.ops.aten.mul.Tensor

    def multiplied(module: torch.fx.GraphModule, context: Any) -> torch.fx.GraphModule:
        for node in module.graph.nodes:
            node.target = product if node.target in sums else node.target
        module.recompile()
        return module

    x, y = torch.randn(5, requires_grad=True), torch.randn(5)
    level.append(("multiplied", multiplied))
    try:
        assert torch.equal(torch.compile(lambda x, y: x + y, backend="perfuse")(x, y), x * y)
    finally:
        level.pop()


def test_a_tuner(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Plan] = []

    def watching(plan: Plan, context: Any) -> Plan:
        seen.append(plan)
        return plan

    monkeypatch.setattr(tune, "TUNERS", [*tune.TUNERS, watching])
    torch.compile(lambda x: x.exp(), backend="perfuse")(torch.randn(5))
    assert len(seen) == 1 and not seen[0].places


def test_a_candidate_source(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, put = Choice("toy", "aten.mm.out"), []

    def request(problem: CpuMatmul, choice: Choice, context: Any) -> LibraryMatmul:
        return LibraryMatmul(choice.name, problem)

    def apply(plan: Plan, matmul: Matmul, choice: Choice, context: Any) -> Plan:
        put.append(choice)
        chosen = replace(matmul, choice=choice)
        return replace(plan, steps=tuple(chosen if s is matmul else s for s in plan.steps))

    toy = Source("TOY", lambda target: True, lambda *_: [ours], request, apply=apply)
    monkeypatch.setattr("perfuse.candidates.sources.SOURCES", [*SOURCES, toy])
    settings = {
        "max_autotune_gemm": True,
        "max_autotune_gemm_backends": "TOY",
        "thresholds.tuned_matmul_work": 1,
    }
    x, y = torch.randn(8, 16), torch.randn(16, 8)
    got = torch.compile(torch.mm, backend="perfuse", options=settings)(x, y)
    torch.testing.assert_close(got, x @ y)
    assert put == [ours]


TOY = Choice("toy", "own kernel")


def toy_offer(site: Site, program: Program, context: Context) -> Offer:
    return Offer((TOY,) if len(site.alone) == 1 else (), "" if site.alone else "no matmul alone")


def write_toy(kernel: Kernel, plan: Plan, dialect: Dialect, context: Context) -> list[KernelText]:
    template = Template("pointers", 32, 32, 16, 4, 2, precision="ieee")
    (text,) = template_texts(kernel, plan.program.buffers, template, dialect)
    return [replace(text, body="  # by a source of a test\n" + text.body)]


CALLED = """
extern "C" long pf_host_workspace(const long *, const double *) { return 0; }
extern "C" int pf_host_run(void *const *at, const long *n, const double *, void *, void *) {
  const float *a = (const float *)at[0], *b = (const float *)at[1];
  for (long i = 0; i < n[0]; ++i)
    for (long j = 0; j < n[1]; ++j) {
      double sum = 0;
      for (long k = 0; k < n[2]; ++k) sum += a[i * n[2] + k] * b[k * n[1] + j];
      ((float *)at[2])[i * n[1] + j] = sum;
    }
  return 0;
}
"""


def write_call(kernel: Kernel, plan: Plan, dialect: Dialect, context: Context) -> HostLaunch:
    assert kernel.contraction is not None
    (matmul,) = kernel.contraction.matmuls
    a, b = matmul.operands.a, matmul.operands.b
    sizes: Any = (a.shape[0], b.shape[1], a.shape[1])
    return HostLaunch(CALLED, (a.buffer, b.buffer, matmul.out), HostCall((0, 0, 0), sizes, (1.0,)))


def build_call(unit: HostUnit, context: Context) -> Entry:
    def run(folder: Path) -> CompilerRun:
        return CompilerRun(folder, context.target.compiler_command(), context)

    library = built_library({"toy.cpp": unit.text.encode()}, run, context)
    return open_store(context).put(key_of(keys.LIBRARY, unit.text), {UNIT_LIBRARY: library})


@pytest.mark.parametrize(
    "ours",
    [
        Contractions(toy_offer, write_toy, is_timed_on_cpu=True),
        Contractions(toy_offer, write_call, build_call, is_timed_on_cpu=True),
    ],
    ids=["a kernel", "a host call"],
)
def test_a_candidate_source_for_gpus(monkeypatch: pytest.MonkeyPatch, ours: Contractions) -> None:
    """It proposes, is written, built, raced and chosen on a GPU's plan, here interpreted."""
    toy = Source("TOY", lambda target: target.kind == "cuda", contractions=ours)
    monkeypatch.setattr("perfuse.candidates.sources.SOURCES", [*SOURCES, toy])
    settings = {
        "gpu.interpret": True,
        "triton.arch": "sm_90",
        "max_autotune_gemm": True,
        "max_autotune_gemm_backends": "TOY",
        "autotune_fallback_to_aten": False,
    }
    x, y = torch.randn(48, 64), torch.randn(64, 40)
    with perfuse.config.patch(settings):
        compiled = torch.compile(lambda x, y: (x @ y).relu(), backend="perfuse")
        got, texts = perfuse.testing.run_and_get_code(compiled, x, y)
        (graph,) = perfuse.explain(lambda x, y: (x @ y).relu(), x, y).graphs
    torch.testing.assert_close(got, (x @ y).relu())
    assert CALLED in texts if ours.build else "# by a source of a test" in texts[0]
    assert [decision.chosen for decision in graph.decisions] == [TOY]
    assert [rival.choice.source for rival in graph.decisions[0].rivals] == ["library", "toy"]


def test_a_template(monkeypatch: pytest.MonkeyPatch) -> None:
    def marked(frame: ContractionFrame) -> KernelText:
        text = pointers_text(frame)
        return replace(text, body="  # by a template of a test\n" + text.body)

    monkeypatch.setitem(TEXTS, "toy", written_in(ContractionFrame, marked))
    problem = Contracted("mm", torch.mm, (torch.randn(50, 70), torch.randn(70, 90)))
    sources = sources_of(problem, Template("toy", 32, 32, 16, 4, 2), "sm_90")
    assert "# by a template of a test" in sources.text and "tl.dot" in sources.text


def test_a_lowering() -> None:
    library = torch.library.Library("perfuse_test", "FRAGMENT")
    library.define("doubled(Tensor x) -> Tensor")
    library.impl("doubled", lambda x: x + x, "CompositeExplicitAutograd")

    @lowers("perfuse_test.doubled.default")
    def doubled(builder: Builder, x: Tensor) -> Tensor:
        return Tensor(x.shape, x.dtype, ex.apply("add", x.value, x.value))

    op, x = torch.ops.perfuse_test.doubled.default, torch.randn(5)
    function = torch.compile(lambda x: op(x), backend="perfuse")
    try:
        got, (_, host) = perfuse.testing.run_and_get_code(function, x)
    finally:
        del LOWERINGS[op]
    assert torch.equal(got, x + x) and "doubled" not in host


def test_index_texts_are_python() -> None:
    """The toy backend writes indices as they print."""
    at = ix.add(ix.mul(ix.var("x0", 3), 4), ix.floordiv(ix.var("x1", 7), 2))
    assert eval(repr(at), {"x0": 2, "x1": 5}) == 10
