"""Lifetimes: what the simulation says is held is what the host program holds."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from perfuse import config
from perfuse.codegen.cpp.unit import generate_sources
from perfuse.codegen.host.gpu import generate_gpu_host
from perfuse.codegen.host.program import generate_host
from perfuse.codegen.triton.unit import generate_triton
from perfuse.context import Context
from perfuse.counters import Counters
from perfuse.schedule.lifetimes import (
    HeldAs,
    Lifetime,
    Lifetimes,
    Placement,
    buffer_bytes,
    lifetimes,
)
from perfuse.schedule.plan import Plan
from perfuse.schedule.timeline import Link, Moment, Timeline, step_timeline
from perfuse.target import target_of
from perfuse.torch_compat.graphs import GraphKind
from tests.unit.planning import CONTEXT, plans_of, wants_grad

MADE = (HeldAs.TEMPORARY, HeldAs.RESULT)
FRUGAL = Context.default(config.Settings().with_overrides({"memory_budget": 0.5}))
# No temporary is large enough to be allocated on its own.
ONLY_ARENAS = Context.default(config.Settings().with_overrides({"thresholds.pool_bytes": 1 << 30}))


def mlp(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return F.layer_norm(F.gelu(x @ a) @ b + x, x.shape[-1:]).square().sum()


def convolution(x: Tensor, weight: Tensor) -> Tensor:
    return F.max_pool2d(torch.relu(F.conv2d(x, weight)), 2).sum()


def plain(x: Tensor, y: Tensor) -> Tensor:
    return (x * y).tanh().sum(0).exp()


PROGRAMS = [
    (mlp, ((512, 256), (256, 1024), (1024, 256))),
    (convolution, ((4, 3, 64, 64), (16, 3, 3, 3))),
    (plain, ((256, 512), (256, 512))),
]


def held_by_host(plan: Plan) -> list[set[str]]:
    """The buffers that each turn of the host program's text runs with, inputs left out.

    One that is written over another counts as that.
    """
    text = generate_host(plan, generate_sources(plan, CONTEXT)).text
    alive: set[str] = set()
    turns: list[set[str]] = []
    for line in map(str.strip, text.splitlines()):
        if line.startswith("del "):
            alive -= set(line.removeprefix("del ").split(", "))
        elif any(f"= {made}(" in line for made in ("empty_small", "empty_strided", "new_seeds")):
            alive.add(line.split(" = ")[0])
        elif match := re.match(r"(b\d+) = (?:as_strided\()?b\d+(?:,|$)", line):
            alive.add(match[1])
        elif line.startswith("segment") or re.match(r"(.* = )?op_\w+\(", line):
            if " = op_" in line:
                names = line.split(" = op_")[0].strip(", ").split(", ")
                alive |= {n for n in names if n in plan.program.buffers}
            turns.append({plan.over.get(name, name) for name in alive})
    return turns


@pytest.mark.parametrize("context", [CONTEXT, FRUGAL], ids=["default", "frugal"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda row: row[0].__name__)
def test_as_the_host_program_does(program: tuple, context: Context) -> None:  # type: ignore[type-arg]
    fn, shapes = program
    for plan in plans_of(fn, *wants_grad(*(torch.randn(s) for s in shapes)), context=context):
        found = lifetimes(plan)
        made = [i for i in found.items if i.kind in MADE]
        said = [
            {plan.over.get(i.buffer, i.buffer) for i in made if i.first <= turn <= i.last}
            for turn in range(found.num_turns)
        ]
        assert said == held_by_host(plan)


@pytest.mark.parametrize("context", [CONTEXT, FRUGAL], ids=["default", "frugal"])
def test_large_temporaries_leave_the_arena_where_that_saves_memory(context: Context) -> None:
    inputs = wants_grad(*(torch.randn(s) for s in PROGRAMS[0][1]))
    (whole, whole_back), (apart, apart_back) = (
        plans_of(mlp, *inputs, context=c) for c in (ONLY_ARENAS, context)
    )
    assert lifetimes(apart).peak() <= lifetimes(whole).peak()
    assert lifetimes(apart_back).peak() < lifetimes(whole_back).peak()


def test_saved_values_go_after_their_last_reader() -> None:
    forward, backward = plans_of(mlp, *wants_grad(*(torch.randn(s) for s in PROGRAMS[0][1])))
    saved = [i for i in lifetimes(backward).items if i.kind is HeldAs.INPUT]
    assert saved and any(i.last < lifetimes(backward).num_turns - 1 for i in saved)
    assert not [i for i in lifetimes(forward).items if i.kind is HeldAs.INPUT]


def test_symbols_count_with_the_sizes_seen() -> None:
    def fn(x: Tensor) -> Tensor:
        return (x.exp() @ x.t()).relu()

    x = torch.randn(96, 48, requires_grad=True)
    fixed, dynamic = (
        [lifetimes(plan) for plan in plans_of(fn, x, dynamic=d, context=FRUGAL)]
        for d in (False, True)
    )
    sizes = [
        [sum(i.num_bytes for i in half.items if i.kind is HeldAs.RESULT) for half in halves]
        for halves in (fixed, dynamic)
    ]
    assert sizes[0] == sizes[1]


def lives(rows: list[tuple[str, str, int, int, int]], turns: int, **others: object) -> Lifetimes:
    items = tuple(Lifetime(name, HeldAs(kind), *rest) for name, kind, *rest in rows)
    labels = tuple(f"k{i}" for i in range(turns))
    return replace(Lifetimes(labels, 0, items, (), ()), **others)  # type: ignore[arg-type]


def test_a_step_by_hand() -> None:
    """Result r and saved s; the backward frees s after its first turn, and makes gradient g."""
    forward = lives(
        [("s", "result", 100, 0, 2), ("t", "temporary", 7, 0, 0), ("r", "result", 10, 1, 2)],
        2,
        arena_bytes=1,
        outputs=("r", "s"),
    )
    backward = lives(
        [("i0", "input", 100, 0, 0), ("i1", "input", 10, 0, 1), ("g", "result", 50, 1, 3)],
        3,
        arena_bytes=2,
        outputs=("g",),
        inputs=("i0", "i1"),
    )
    expected = Timeline(
        (
            Moment(GraphKind.FORWARD, "k0", 0, 100, 0, 8),
            Moment(GraphKind.FORWARD, "k1", 10, 100, 0, 1),
            Moment(GraphKind.BACKWARD, "k0", 10, 100, 10, 2),
            Moment(GraphKind.BACKWARD, "k1", 10, 0, 60, 2),
            Moment(GraphKind.BACKWARD, "k2", 10, 0, 50, 2),
        )
    )
    made = step_timeline(forward, backward, 1, [Link(1, 0)])
    assert made == expected
    assert (made.peak, made.saved_bytes) == (122, 100)
    kept = step_timeline(forward, backward, 1, [Link(1, 0)], keeps_arenas=True)
    assert kept.peak == 123


SETTINGS = config.Settings()
# Traced with tensors of the CPU, and spelled for a GPU.
H100 = Context(target_of("cuda:90", SETTINGS), SETTINGS, Counters())


def twice_normalised(x: Tensor, y: Tensor) -> Tensor:
    """Kernels in a row, without a call between them."""
    for weight in (y, y + 1):
        x = (x.t() * weight).cumsum(0).softmax(-1).t().cumsum(-1)
    return x


def bytes_held_by_gpu_host(plan: Plan) -> list[int]:
    """Memory in use at each launch or call of the host, without inputs and scratch."""
    text = generate_gpu_host(plan, generate_triton(plan, H100), H100.device).text
    sizes = {name: buffer_bytes(b, {}, "cuda") for name, b in plan.program.buffers.items()}
    memory: dict[str, str] = {}  # a name, and the one that its memory was made for
    turns: list[int] = []
    for line in map(str.strip, text.splitlines()):
        name, _, made = line.partition(" = ")
        if line.startswith("del "):
            for gone in line.removeprefix("del ").split(", "):
                memory.pop(gone, None)
        elif name in sizes and made in memory:
            memory[name] = memory.pop(made)
        elif name in sizes and made.startswith("empty("):
            memory[name] = name
        elif "launch(F[" in line or " = op_" in line or line.startswith("op_"):
            turns.append(sum(sizes[first] for first in set(memory.values())))
    return turns


@pytest.mark.parametrize("rows", [256, 4096], ids=["small", "large"])
def test_as_the_host_program_of_a_gpu_does(rows: int) -> None:
    """Turns end where much dies; what dies inside one is used again."""
    (plan,) = plans_of(twice_normalised, torch.ones(rows, 2048), torch.ones(rows), context=H100)
    found = lifetimes(plan, Placement("cuda", 132))
    temporaries, results = (found.series(kind) for kind in MADE)
    said = [a + b for a, b in zip(temporaries, results, strict=True)]
    assert said == bytes_held_by_gpu_host(plan)
    assert len(said) == 1 if rows == 256 else len(said) > 3
