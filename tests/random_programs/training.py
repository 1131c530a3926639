"""Programs like people's: small networks, chains of scatters, views, optimiser steps.

As in `generate`, a statement is tried in eager before it is kept, here with every set of sizes that
the program will be called with; parameters, buffers and indices are made as statements need them.
"""

from __future__ import annotations

import re
import warnings
from random import Random
from typing import Any

import torch
from torch import Tensor

from tests.random_programs.net_draft import Filling, NetDraft, add_input, scope_of
from tests.random_programs.program import Program, Statement
from tests.random_programs.row import NetRow
from tests.random_programs.training_rows import GROUPS

MAX_ELEMENTS = 4_000
MAX_MAGNITUDE = 200.0
EAGER_REFUSES = (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError)
CHANNELS = (1, 2, 3, 4, 6, 8)

# What the first input looks like, and how often each group is drawn.
IMAGE = {"conv": 5, "pool": 3, "norm": 4, "pointwise": 3, "shape": 2, "reduce": 1, "linear": 1}
RECIPES: dict[str, tuple[str, dict[str, int]]] = {
    "image": ("image", IMAGE),
    "image_views": ("image", IMAGE | {"shape": 6, "scatter": 2, "inplace": 3, "assign": 2}),
    "sequence": ("signal", {"conv": 4, "pool": 2, "norm": 3, "pointwise": 2, "complex": 2}),
    "tokens": ("tokens", {"linear": 3, "attention": 4, "norm": 3, "pointwise": 3, "loop": 1}),
    "embedded": ("ids", {"attention": 4, "linear": 2, "norm": 2, "integer": 2, "pointwise": 2}),
    "recurrent": ("tokens", {"loop": 3, "linear": 2, "pointwise": 2, "norm": 1, "shape": 1}),
    "scatters": ("table", {"scatter": 6, "shape": 2, "pointwise": 2, "reduce": 2, "linear": 1}),
    "views": ("table", {"shape": 5, "inplace": 3, "assign": 2, "pointwise": 2, "reduce": 2}),
    "spectrum": ("table", {"complex": 4, "pointwise": 2, "reduce": 1, "shape": 2}),
    "ordered": ("table", {"order": 4, "integer": 4, "pointwise": 2, "scatter": 2, "shape": 2}),
    "mixed": ("table", {"cast": 3, "pointwise": 3, "reduce": 3, "norm": 2, "order": 1, "shape": 2}),
    "optimiser": ("table", {"optimiser": 6, "pointwise": 1}),
}
SHAPES = {
    "image": ("a, {C}, b, c",),
    "signal": ("a, {C}, b", "a, {C}, b", "a, b"),
    "tokens": ("a, b, {D}",),
    "ids": ("a, b",),
    "table": ("a, b, {D}", "a, b", "b, c", "{D}, b", "a, {C}, b, c", "b"),
}


def generate_training(rng: Random, seed: int = 0) -> Program:
    is_dynamic = rng.choice((False, False, False, True, None))
    base = draw_sizes(rng)
    sizes = [(*base, k) for k in range(2)]
    if is_dynamic is not False:
        sizes = [(*draw_sizes(rng), k) for k in range(3)]
    kind, groups = RECIPES[rng.choice(tuple(RECIPES))]
    has_backward = "optimiser" not in groups and rng.random() < 0.7
    dtype = rng.choice(("f32",) * 6 + ("f64", "bf16", "f16"))
    scopes = [scope_of(s) for s in sizes]
    draft = NetDraft(rng, tuple(sizes), has_backward, dtype, scopes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        add_first_inputs(draft, kind)
        goal = rng.randint(2, 8)
        for _ in range(goal * 10):
            if len(draft.body) < goal:
                add_statement(draft, groups)
        program = finished(draft, seed, is_dynamic)
        return without_refusals(program)


def from_seed(seed: int) -> Program:
    return generate_training(Random(f"training {seed}"), seed)


def draw_sizes(rng: Random) -> tuple[int, int, int]:
    return rng.choice((1, 2, 2, 3, 4)), rng.randint(3, 9), rng.choice((3, 4, 5, 6, 7, 8, 12))


def add_first_inputs(draft: NetDraft, kind: str) -> None:
    rng = draft.rng
    for _ in range(rng.randint(1, 2) if kind != "image" else 1):
        shape = rng.choice(SHAPES[kind]).format(C=rng.choice(CHANNELS), D=rng.choice(CHANNELS))
        if kind == "ids":
            text = f"torch.randint(0, 9, ({shape},), generator=g)"
        else:
            text = laid_out(draft, shape)
        add_input(draft, text, shape)
    if kind == "table" and rng.random() < 0.4:
        shape = rng.choice(SHAPES[kind]).format(C=3, D=4)
        add_input(draft, f"torch.randint(-4, 9, ({shape},), generator=g)", shape)


def laid_out(draft: NetDraft, shape: str) -> str:
    """A float tensor of that shape in some memory layout."""
    rng, dims = draft.rng, shape.split(", ")
    text = f"torch.randn(({shape},), generator=g).to({draft.float_dtype})"
    layout = rng.choice(("plain", "plain", "plain", "channels_last", "offset", "turned", "spaced"))
    if layout == "channels_last" and len(dims) == 4:
        text += ".contiguous(memory_format=torch.channels_last)"
    elif layout == "offset":
        text = f"offset_view({text})"
    elif layout == "turned" and len(dims) >= 2:
        swapped = ", ".join([dims[-1], *dims[1:-1], dims[0]])
        text = text.replace(shape, swapped) + ".transpose(0, -1)"
    elif layout == "spaced":
        text = text.replace(f"({shape},)", f"({', '.join([*dims[:-1], f'2 * {dims[-1]}'])},)")
        text += "[..., ::2]"
    if draft.has_backward and rng.random() < 0.8:
        text += ".requires_grad_()"
    return text


def add_statement(draft: NetDraft, groups: dict[str, int]) -> None:
    rng = draft.rng
    group = rng.choices(list(groups), weights=list(groups.values()))[0]
    x = draw_operand(draft, is_first=group == "optimiser")
    rows = [r for r in GROUPS[group] if fits(draft, r, x)]
    if not rows:
        return
    row = rng.choice(rows)
    num_inputs = len(draft.inputs)
    text = Filling(draft, x).filled(row.text)
    if text is None or not kept(draft, row, x, text):
        for statement in draft.inputs[num_inputs:]:
            draft.is_exact.pop(statement.target or "", None)
        del draft.inputs[num_inputs:]


def draw_operand(draft: NetDraft, *, is_first: bool) -> str:
    """Mostly the last value; an optimiser works on inputs."""
    names = list(draft.is_exact)
    if is_first:
        return draft.rng.choice([n for n in names if draft.shapes.get(n)])
    made = [s.target for s in draft.body if s.target is not None]
    if made and draft.rng.random() < 0.75:
        return made[-1]
    return draft.rng.choice([n for n in names if draft.shapes.get(n) or n in made])


def fits(draft: NetDraft, row: NetRow, x: str) -> bool:
    value = draft.value(x)
    kinds = {"float": value.is_floating_point(), "complex": value.is_complex()}
    kinds |= {"bool": value.dtype == torch.bool}
    kinds |= {"int": not any(kinds.values())}
    if not kinds[row.operand] or value.dim() not in row.ranks:
        return False
    if row.kind == "step":
        return draft.is_exact[x] and not draft.is_low
    # Eager rounds to the small type at every step, so a kink parts its gradient from ours.
    return row.kind != "kink" or not (draft.is_low and draft.has_backward)


def kept(draft: NetDraft, row: NetRow, x: str, text: str) -> bool:
    """Whether eager runs the statement with all sizes; then it is part of the program."""
    if row.kind == "inplace":
        return kept_in_place(draft, text)
    name = f"t{sum(s.target is not None for s in draft.body)}"
    values = [attempt(scope, text) for scope in draft.scopes]
    if any(v is None for v in values):
        return False
    for scope, value in zip(draft.scopes, values, strict=True):
        scope[name] = value
    draft.body.append(Statement(name, text))
    read = [n for n in draft.is_exact if re.search(rf"\b{n}\b", text)]
    exact = row.kind in ("keep", "step") and all(draft.is_exact[n] for n in read)
    value = draft.value(name)
    draft.is_exact[name] = exact or not (value.is_floating_point() or value.is_complex())
    return True


def kept_in_place(draft: NetDraft, text: str) -> bool:
    saved = [{n: scope[n].detach().clone() for n in draft.is_exact} for scope in draft.scopes]
    for scope in draft.scopes:
        if not runs(scope, text) or not all(is_tame(scope[n]) for n in draft.is_exact):
            for changed, before in zip(draft.scopes, saved, strict=True):
                restore(changed, before)
            return False
    draft.body.append(Statement(None, text))
    # Everything that may share its memory is as inexact as it has become.
    for name in draft.is_exact:
        if draft.value(name).is_floating_point():
            draft.is_exact[name] = False
    return True


def restore(scope: dict[str, Any], before: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, value in before.items():
            if not torch.equal(scope[name].detach(), value):
                scope[name].copy_(value)


def attempt(scope: dict[str, Any], text: str) -> Tensor | None:
    try:
        value = eval(text, scope)
    except EAGER_REFUSES:
        return None
    return value if isinstance(value, Tensor) and is_tame(value) else None


def runs(scope: dict[str, Any], text: str) -> bool:
    try:
        exec(text, scope)
    except EAGER_REFUSES:
        return False
    return True


def is_tame(x: Tensor) -> bool:
    if x.numel() > MAX_ELEMENTS or x.dim() > 6 or x.numel() == 0:
        return False
    size = x.detach().abs().double() if x.dtype != torch.bool else x.double()
    return bool(size.isfinite().all()) and float(size.max()) <= MAX_MAGNITUDE


def finished(draft: NetDraft, seed: int, is_dynamic: bool | None) -> Program:
    made = [s.target for s in draft.body if s.target is not None]
    read = set().union(*(s.reads() for s in draft.body if s.target is not None))
    # A value that no other value is made of is an output: no statement is dead.
    outputs = [n for n in made if n not in read or draft.rng.random() < 0.15]
    outputs = outputs or [next(iter(draft.is_exact))]
    has_scalars = any((s.target or "")[0] == "s" for s in draft.inputs)
    # Without scalars a second static call would only repeat the first.
    sizes = draft.sizes if is_dynamic is not False or has_scalars else draft.sizes[:1]
    if has_scalars and is_dynamic is False:
        sizes = (*sizes, (*sizes[0][:3], 2))
    inputs, body = tuple(draft.inputs), tuple(draft.body)
    return Program(seed, inputs, body, tuple(outputs), sizes, is_dynamic, draft.has_backward)


def without_refusals(program: Program) -> Program:
    """Less the in-place statements that autograd refuses, which only the backward shows."""
    for index in reversed(range(len(program.body))):
        if is_accepted(program):
            break
        if program.body[index].target is None:
            program = program.without(index) or program
    return program


def is_accepted(program: Program) -> bool:
    inputs, function = program.functions()
    try:
        for sizes in program.sizes[:1]:
            outputs = function(*inputs(*sizes))
            roots = [o for o in outputs if o.requires_grad]
            if program.has_backward and roots:
                torch.autograd.backward(roots, [torch.ones_like(r) for r in roots])
    except EAGER_REFUSES:
        return False
    return True
