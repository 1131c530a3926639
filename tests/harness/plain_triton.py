"""The simplest code generator that the seam allows: a launch for every loop, nothing fused.

Tests of the host half use it, so that they say nothing about the real generator. Values that a
fused kernel would keep in registers go through scratch memory here.
"""

from __future__ import annotations

from typing import Any

from perfuse.codegen.triton.sources import Launch, TritonKernel, TritonSources
from perfuse.ir import index as ix
from perfuse.ir.atoms import Division, Quotient, Symbol, Variable
from perfuse.ir.dtype import DType
from perfuse.ir.expr import Expr
from perfuse.ir.program import Loop
from perfuse.schedule.plan import Kernel, Plan
from perfuse.schedule.turns import Scratch

TYPES = {
    DType.F32: "fp32", DType.F64: "fp64", DType.F16: "fp16", DType.BF16: "bf16",
    DType.I64: "i64", DType.I32: "i32", DType.BOOL: "i1", DType.U8: "u8", DType.I8: "i8",
}  # fmt: skip
LANGUAGE = {
    "i64": "int64", "i32": "int32", "i1": "int1", "u8": "uint8", "i8": "int8", "fp32": "float32",
    "fp64": "float64", "fp16": "float16", "bf16": "bfloat16",
}  # fmt: skip
BINARY = {"add": "+", "sub": "-", "mul": "*", "div": "/", "lt": "<", "gt": ">", "ge": ">="}
UNARY = {"exp": "tl.exp", "sqrt": "tl.sqrt", "abs": "tl.abs", "neg": "-"}
COMBINE = {"sum": "{0} + {1}", "max": "tl.maximum({0}, {1})", "min": "tl.minimum({0}, {1})"}
START = {"sum": 0, "max": float("-inf"), "min": float("inf")}
BLOCK = 16


def generate_triton(plan: Plan, context: Any, writers: Any = None) -> TritonSources:
    """One kernel function for each loop."""
    texts, kernels, launches = [HEADER], [], []
    for step in plan.kernels:
        made = [
            _loop(member.loop, step, plan, len(kernels) + k)
            for k, member in enumerate(step.members)
        ]
        texts += [text for text, _, _ in made]
        kernels += [kernel for _, kernel, _ in made]
        launches.append(tuple(launch for _, _, launch in made))
    return TritonSources("\n".join(texts), tuple(kernels), tuple(launches))


HEADER = "import triton\nimport triton.language as tl\n\n"


def _loop(loop: Loop, step: Kernel, plan: Plan, number: int) -> tuple[str, TritonKernel, Launch]:
    buffers = plan.program.buffers
    reads = list(dict.fromkeys(r.buffer for r in loop.reads()))
    names = [*reads, *([loop.out] if loop.out not in reads else [])]
    kept = [a for a in loop.axes if not a.reduced]
    total = ix.product([a.size for a in kept])
    inner = ix.product([a.size for a in loop.axes if a.reduced])
    dims = [total, inner, *(a.size for a in loop.axes), loop.index, *_indices(loop.value)]
    symbols = sorted({a.name for d in dims for a in ix.atoms_of(d) if isinstance(a, Symbol)})
    name = f"loop{number}"
    parameters = [*names, *symbols]
    lines = ["@triton.jit", f"def {name}({', '.join(parameters)}):"]
    lines += [f"  at = tl.program_id(0).to(tl.int64) * {BLOCK} + tl.arange(0, {BLOCK})"]
    lines += [f"  mask = at < {_dim(total)}", *_places("at", kept, 1)]
    dtype = buffers[loop.out].dtype
    if loop.kind == "map":
        lines += [f"  result = {_expr(loop.value)}"]
    else:
        start = START[loop.kind]
        value = f"float('{start}')" if isinstance(start, float) else start
        lines += [f"  result = tl.full([{BLOCK}], {value}, tl.{LANGUAGE[TYPES[dtype.compute]]})"]
        lines += [
            f"  for r in range({_dim(inner)}):",
            *_places("r", [a for a in loop.axes if a.reduced], 2),
        ]
        lines += [f"    result = {COMBINE[loop.kind].format('result', _expr(loop.value))}"]
    stored = f"tl.cast(result, tl.{LANGUAGE[TYPES[dtype]]})"
    place = f"({_dim(loop.index)} + tl.zeros([{BLOCK}], tl.int64))"
    lines += [f"  tl.store({loop.out} + {place}, {stored}, mask)\n"]
    inside = {m.loop.out for m in step.members} - step.stored
    scratch = tuple(
        Scratch(n, buffers[n].dtype, buffers[n].num_elements) for n in names if n in inside
    )
    signature = [(n, f"*{TYPES[buffers[n].dtype]}") for n in names] + [(s, "i64") for s in symbols]
    divisible = frozenset(n for n in names if buffers[n].is_aligned)
    kernel = TritonKernel(name, tuple(signature), (), divisible, 4, 1)
    grid = ix.floordiv(ix.add(total, BLOCK - 1), BLOCK)
    return (
        "\n".join(lines),
        kernel,
        Launch(name, tuple(names), tuple(symbols), (grid, 1, 1), scratch),
    )


def _indices(value: Expr) -> list[Any]:
    found = [value.attr] if value.op == "index" else [value.index] if value.op == "load" else []
    return found + [d for a in value.args for d in _indices(a)]


def _places(flat: str, axes: list[Any], depth: int) -> list[str]:
    lines, rest = [], flat
    for axis in reversed(axes):
        lines.append(f"{'  ' * depth}{axis.name} = {rest} % {_dim(axis.size)}")
        rest = f"({rest} // {_dim(axis.size)})"
    return lines


def _dim(dim: Any) -> str:
    return f"({ix.render(dim, _atom)})"


def _atom(atom: Any) -> str:
    if isinstance(atom, Variable | Symbol):
        return atom.name
    assert isinstance(atom, Division)
    a, b = map(_dim, atom.operands)
    return f"({a} {'//' if isinstance(atom, Quotient) else '%'} {b})"


def _expr(e: Expr) -> str:
    kind = LANGUAGE[TYPES[e.dtype]]
    if e.op == "load":
        place = f"({_dim(e.index)} + tl.zeros([{BLOCK}], tl.int64))"
        return f"tl.load({e.buffer} + {place}, mask, 0).to(tl.{kind})"
    if e.op == "const":
        return f"tl.full([{BLOCK}], {e.attr!r}, tl.{kind})"
    if e.op == "index":
        return f"({_dim(e.attr)} + tl.zeros([{BLOCK}], tl.int64)).to(tl.{kind})"
    args = [_expr(a) for a in e.args]
    if e.op in BINARY:
        return f"({args[0]} {BINARY[e.op]} {args[1]})"
    if e.op in UNARY:
        return f"{UNARY[e.op]}({args[0]})"
    if e.op == "where":
        return f"tl.where({', '.join(args)})"
    if e.op == "max":
        return f"tl.maximum({', '.join(args)})"
    if e.op == "cast":
        return f"{args[0]}.to(tl.{kind})"
    if e.op == "round_to":
        return f"{args[0]}.to(tl.{LANGUAGE[TYPES[e.attr]]}).to(tl.{kind})"
    raise NotImplementedError(e.op)
