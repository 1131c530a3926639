"""`Row`: one function with its inputs, traced by AOTAutograd, lowered, evaluated, compared.

Gradients are rows too: with `grad`, the sum of the floating results is differentiated for every
floating input, so that the backward graph goes through lowering as well.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from functorch.compile import aot_function  # type: ignore[import-untyped]
from torch import Tensor
from torch.fx import GraphModule
from torch.utils._pytree import tree_leaves, tree_map

from perfuse.context import Context
from perfuse.graph.decompositions import decomposition_table
from perfuse.ir.program import LibraryCall, Program
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
    grad: bool = False

    def __str__(self) -> str:
        return self.name

    def check(self) -> None:
        programs: list[Program] = []
        traced = compiled(self.fn, programs, self.dynamic)
        ours = self._run(traced, self.inputs)
        eager = self._run(self.fn, self.inputs)
        text = "\n".join(map(str, programs))
        calls = [n for p in programs for n in p.nodes if isinstance(n, LibraryCall)]
        refused = [f"{n.op}: {n.reason}" for n in calls if n.op not in self.calls]
        assert not refused, f"{refused}\n{text}"
        if any(_is_narrow(leaf) for leaf in (*tree_leaves(self.inputs), *eager)):
            compare_narrow(ours, eager, self._run(self.fn, tree_map(_widened, self.inputs)), text)
        else:
            compare(ours, eager, text)

    def _run(self, fn: Callable[..., Any], inputs: tuple[Any, ...]) -> list[Any]:
        given = tree_map(_own, inputs)
        floats = [x for x in given if isinstance(x, Tensor) and x.is_floating_point()]
        if self.grad:
            for x in floats:
                x.requires_grad_()
        results = tree_leaves(fn(*given))
        if not self.grad:
            return [*results, *given]
        loss = torch.stack([_weighted(r) for r in results if r.requires_grad]).sum()
        return [*results, *torch.autograd.grad(loss, floats)]


def compiled(
    fn: Callable[..., Any],
    programs: list[Program],
    dynamic: bool = False,
    context: Context = CONTEXT,
) -> Callable[..., Any]:
    """The function as its lowered programs, forward and backward, interpreted."""

    def lowered(module: GraphModule, example: Sequence[Any]) -> Callable[..., Any]:
        program = lower_graph(module, context)
        programs.append(program)
        return lambda *args: evaluate(program, args)

    made: Callable[..., Any] = aot_function(
        fn, fw_compiler=lowered, bw_compiler=lowered, decompositions=TABLE, dynamic=dynamic
    )
    return made


def _own(value: Any) -> Any:
    """A copy with the same strides, gaps included."""
    if not isinstance(value, Tensor):
        return value
    return copy.deepcopy(value.detach())


def _weighted(result: Tensor) -> Tensor:
    weight = torch.linspace(0.5, 1.5, result.numel(), dtype=torch.float64).reshape(result.shape)
    return (result * weight.to(result.dtype)).sum().double()


def _is_narrow(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)


def _widened(value: Any) -> Any:
    return value.double() if _is_narrow(value) else value


def compare(ours: Sequence[Any], eager: Sequence[Any], program: str) -> None:
    assert len(ours) == len(eager)
    for have, want in zip(ours, eager, strict=True):
        if not isinstance(want, Tensor):
            assert have == want
            continue
        _same_kind(have, want)
        try:
            torch.testing.assert_close(have, want, equal_nan=True)
        except AssertionError as different:
            raise AssertionError(f"{different}\n{program}") from None


def compare_narrow(
    ours: Sequence[Any], eager: Sequence[Any], exact: Sequence[Any], program: str
) -> None:
    """At most twice eager's error, plus one ulp: between two ops we do not round as eager does."""
    for have, want, true in zip(ours, eager, exact, strict=True):
        _same_kind(have, want)
        if not want.is_floating_point():
            assert torch.equal(have, want), program
            continue
        exact64 = true.double()
        limit = 2 * (want.double() - exact64).abs() + torch.finfo(want.dtype).eps * exact64.abs()
        error = (have.double() - exact64).abs()
        fine = (
            (error <= limit.nan_to_num(0, 0, 0).max())
            | (have.isnan() & want.isnan())
            | (have == want)
        )
        assert bool(fine.all()), f"{have}\n{want}\n{program}"


def _same_kind(have: Tensor, want: Tensor) -> None:
    assert have.dtype is want.dtype and have.shape == want.shape, (have, want)
