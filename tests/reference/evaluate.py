"""`evaluate`: a slow, plain interpreter of Program, to test lowering without generated code.

Every loop is evaluated over its whole iteration space at once: loop variables are broadcast
`arange`s, a buffer is a flat piece of storage, and a load is an indexing of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from perfuse.ir import index as ix
from perfuse.ir.atoms import Atom, Division, Indirect, Quotient, Symbol, Variable
from perfuse.ir.dtype import DType, to_torch
from perfuse.ir.expr import Expr
from perfuse.ir.index import Dim
from perfuse.ir.program import Buffer, LibraryCall, Loop, Program, View
from tests.reference import scalar_ops

Env = dict[Atom, Tensor]
_POISON = {DType.BOOL: True, DType.I8: 77, DType.U8: 77}


def evaluate(program: Program, inputs: Sequence[Tensor | int]) -> list[Any]:
    """The results of a Program; inputs that it mutates are changed in place."""
    run = _Run(program)
    run.bind(inputs)
    for node in program.nodes:
        if isinstance(node, Loop):
            run.loop(node)
        else:
            run.extern(node)
    return [run.result(out) for out in program.outputs]


class _Run:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.storage: dict[str, Tensor] = {}
        self.opaque: dict[str, Any] = {}
        self.sizes: dict[str, int] = {}

    # -- leaves ------------------------------------------------------------------------------

    def bind(self, inputs: Sequence[Tensor | int]) -> None:
        for name, value in zip(self.program.inputs, inputs, strict=True):
            if isinstance(value, int):
                self.sizes[name] = value
                continue
            buffer = self.program.buffers.get(name)
            if buffer is None:
                self.opaque[name] = value
                continue
            for dims, actual in ((buffer.shape, value.shape), (buffer.strides, value.stride())):
                for dim, size in zip(dims, actual, strict=True):
                    atom = ix.as_atom(dim)
                    if isinstance(atom, Symbol):
                        self.sizes.setdefault(atom.name, size)
            self.storage[name] = _flat_storage(value)
        for name, formula in self.program.symbols:
            self.sizes[name] = int(eval(formula, {"math": math, **self.sizes}))
        for name, value in self.program.constants.items():
            if isinstance(value, Tensor) and name in self.program.buffers:
                self.storage[name] = _flat_storage(value)
            else:
                self.opaque[name] = value

    def size(self, dim: Dim) -> int:
        return int(self.index(dim, {}))

    def _storage_of(self, name: str) -> Tensor:
        if name not in self.storage:
            buffer = self.program.buffers[name]
            self.storage[name] = self._fresh(buffer)
        return self.storage[name]

    def _fresh(self, buffer: Buffer) -> Tensor:
        count = max(self.size(buffer.num_elements), 1)
        if buffer.kind == "seeds":
            return torch.randint(-(2**62), 2**62, (count,), dtype=torch.int64)
        poison = math.nan if buffer.dtype.is_float else _POISON.get(buffer.dtype, 7777)
        return torch.full((count,), poison, dtype=to_torch(buffer.dtype))

    # -- values ------------------------------------------------------------------------------

    def index(self, index: Dim, env: Env) -> Tensor:
        if isinstance(index, int):
            return torch.tensor(index)
        total = torch.tensor(index.const)
        for monomial, coefficient in index.terms:
            factor = torch.tensor(coefficient)
            for atom in monomial:
                factor = factor * self._atom(atom, env)
            total = total + factor
        return total

    def _atom(self, atom: Atom, env: Env) -> Tensor:
        if isinstance(atom, Variable):
            return env[atom]
        if isinstance(atom, Symbol):
            return torch.tensor(self.sizes[atom.name])
        if isinstance(atom, Indirect):
            found = self.value(atom.value, env, {})
            limit = self.size(atom.size)
            if found.numel() and not bool(((found >= 0) & (found < limit)).all()):
                raise IndexError(f"index out of range of size {limit}")
            return found.to(torch.int64)
        assert isinstance(atom, Division)
        a, b = (self.index(part, env) for part in atom.operands)
        return a.div(b, rounding_mode="floor") if isinstance(atom, Quotient) else a.remainder(b)

    def value(self, expr: Expr, env: Env, done: dict[Expr, Tensor]) -> Tensor:
        found = done.get(expr)
        if found is None:
            found = done[expr] = self._compute(expr, env, done)
            assert found.dtype is to_torch(expr.dtype), f"{expr.op}: {found.dtype}, {expr.dtype}"
        return found

    def _compute(self, expr: Expr, env: Env, done: dict[Expr, Tensor]) -> Tensor:
        if expr.op == "const":
            return torch.tensor(expr.attr, dtype=to_torch(expr.dtype))
        if expr.op == "index":
            return self.index(expr.attr, env)
        args = [self.value(a, env, done) for a in expr.args]
        if expr.op == "load":
            return self._load(expr, args, env)
        return scalar_ops.apply(expr.op, args, expr.dtype, expr.attr)

    def _load(self, expr: Expr, args: list[Tensor], env: Env) -> Tensor:
        name, index = expr.attr
        at = self.index(index, env)
        storage = self._storage_of(name)
        if not args:
            return storage[at].to(to_torch(expr.dtype))
        mask, fill = args
        shape = (mask.long() + at + fill.isnan()).shape
        mask, at = mask.expand(shape), at.expand(shape)
        result = fill.expand(shape).clone()
        result[mask] = storage[at[mask]].to(result.dtype)
        return result

    # -- nodes -------------------------------------------------------------------------------

    def loop(self, node: Loop) -> None:
        env: Env = {}
        shape = [self.size(axis.size) for axis in node.axes]
        for i, axis in enumerate(node.axes):
            atom = axis.atom
            assert atom is not None, f"axis {axis} of one step"
            env[atom] = torch.arange(shape[i]).reshape(
                [-1 if j == i else 1 for j in range(len(shape))]
            )
        buffer = self.program.buffers[node.out]
        value = self.value(node.value, env, {}).expand(shape)
        reduced = [i for i, axis in enumerate(node.axes) if axis.reduced]
        for i in reduced:
            env[node.axes[i].atom] = torch.zeros([1] * len(shape), dtype=torch.int64)  # type: ignore[index]
        index = self.index(node.index, env)
        index = index.expand([1 if i in reduced else n for i, n in enumerate(shape)])
        if reduced:
            value = REDUCTIONS[node.kind](value, reduced)
        elif node.kind in SCANS:
            value = SCANS[node.kind](value)
        value = value.to(to_torch(buffer.dtype)).reshape(-1)
        accumulate = node.kind == "scatter_add"
        assert reduced or accumulate or node.kind in ("map", *SCANS), node.kind
        self._storage_of(node.out).index_put_((index.reshape(-1),), value, accumulate=accumulate)

    def extern(self, node: LibraryCall) -> None:
        op = self.opaque.get(node.op) or _resolve(node.op)
        args = [self._argument(a) for a in node.args]
        kwargs = {k: self._argument(v) for k, v in node.kwargs}
        if node.into_out:
            buffer = self.program.buffers[str(node.outs[0])]
            whole = View(buffer.name, buffer.shape, buffer.strides)
            kwargs["out"] = self._window(node.window or whole)
            op(*args, **kwargs)
            return
        made = op(*args, **kwargs)
        results = made if node.returns_list else [made]
        for name, result in zip(node.outs, results, strict=True):
            if name is None:
                continue
            if name in self.program.buffers:
                buffer = self.program.buffers[name]
                shape = [self.size(d) for d in buffer.shape]
                strides = [self.size(d) for d in buffer.strides]
                own = torch.empty_strided(shape, strides, dtype=result.dtype)
                self.storage[name] = _flat_storage(own.copy_(result))
            elif isinstance(result, int):
                self.sizes[name] = result
            else:
                self.opaque[name] = result

    def _argument(self, value: Any) -> Any:
        if isinstance(value, View):
            return self._window(value)
        if isinstance(value, ix.Index):
            return self.size(value)
        if isinstance(value, list | tuple):
            return [self._argument(v) for v in value]
        name = getattr(value, "name", None)
        return self.opaque[name] if isinstance(name, str) and name in self.opaque else value

    def _window(self, view: View) -> Tensor:
        shape = [self.size(d) for d in view.shape]
        strides = [self.size(d) for d in view.strides]
        return self._storage_of(view.buffer).as_strided(shape, strides, self.size(view.offset))

    def result(self, out: Any) -> Any:
        return self._argument(out)


def _flat_storage(value: Tensor) -> Tensor:
    span = 1 + sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True))
    if not value.numel():
        return value.new_zeros(1)
    return value.detach().as_strided((span,), (1,), value.storage_offset())


def _resolve(name: str) -> Any:
    found: Any = torch.ops
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _over(reduce: Callable[[Tensor, int], Tensor]) -> Callable[[Tensor, list[int]], Tensor]:
    """A reduction of one dimension, applied to several from the last to the first."""

    def run(value: Tensor, dims: list[int]) -> Tensor:
        for dim in reversed(dims):
            value = reduce(value, dim)
        return value

    return run


def _position(reduce: Callable[..., Tensor]) -> Callable[[Tensor, list[int]], Tensor]:
    def run(value: Tensor, dims: list[int]) -> Tensor:
        assert len(dims) == 1, "positions are reduced over one axis"
        return reduce(value, dims[0])

    return run


REDUCTIONS: dict[str, Callable[[Tensor, list[int]], Tensor]] = {
    "sum": lambda value, dims: torch.sum(value, dims),
    "prod": _over(lambda value, dim: torch.prod(value, dim)),
    "max": lambda value, dims: torch.amax(value, dims),
    "min": lambda value, dims: torch.amin(value, dims),
    "any": _over(lambda value, dim: torch.any(value, dim)),
    "all": _over(lambda value, dim: torch.all(value, dim)),
    "argmax": _position(torch.argmax),
    "argmin": _position(torch.argmin),
}
SCANS: dict[str, Callable[[Tensor], Tensor]] = {
    "cumsum": lambda value: torch.cumsum(value, -1),
    "cumprod": lambda value: torch.cumprod(value, -1),
}
