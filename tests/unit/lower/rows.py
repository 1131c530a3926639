"""`Row`: one function with its inputs, traced, lowered, evaluated and compared with eager."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves

from perfuse.context import Context
from perfuse.graph.decompositions import decomposition_table
from perfuse.ir.program import Extern, Program
from perfuse.lower.graph import lower_graph
from tests.reference.evaluate import evaluate

TABLE = decomposition_table()
CONTEXT = Context.default()


@dataclass(frozen=True)
class Row:
    """`calls`: the ATen ops that may remain in the program; every other op must be lowered."""

    name: str
    fn: Callable[..., Any]
    inputs: tuple[Any, ...]
    calls: tuple[str, ...] = ()
    dynamic: bool = False

    def __str__(self) -> str:
        return self.name

    def program(self, context: Context = CONTEXT) -> Program:
        return lower(self.fn, self.inputs, self.dynamic, context)

    def check(self) -> None:
        program = self.program()
        ours = evaluate(program, copy.deepcopy(self.inputs))
        eager = tree_leaves(self.fn(*copy.deepcopy(self.inputs)))
        used = sorted({n.op for n in program.nodes if isinstance(n, Extern)})
        reasons = [f"{n.op}: {n.reason}" for n in program.nodes if isinstance(n, Extern)]
        assert set(used) <= set(self.calls), f"{reasons}\n{program}"
        compare(ours, eager, str(program))


def lower(
    fn: Callable[..., Any],
    inputs: Sequence[Any],
    dynamic: bool = False,
    context: Context = CONTEXT,
) -> Program:
    def flat(*args: Any) -> list[Any]:
        return tree_leaves(fn(*args))

    mode = "symbolic" if dynamic else "fake"
    functional = torch.func.functionalize(flat, remove="mutations")
    module = make_fx(functional, decomposition_table=TABLE, tracing_mode=mode)(
        *copy.deepcopy(tuple(inputs))
    )
    return lower_graph(module, context)


def compare(ours: Sequence[Any], eager: Sequence[Any], program: str) -> None:
    assert len(ours) == len(eager)
    for have, want in zip(ours, eager, strict=True):
        if not isinstance(want, Tensor):
            assert have == want
            continue
        assert have.dtype is want.dtype and have.shape == want.shape, (have, want)
        try:
            torch.testing.assert_close(have, want, equal_nan=True)
        except AssertionError as different:
            raise AssertionError(f"{different}\n{program}") from None
