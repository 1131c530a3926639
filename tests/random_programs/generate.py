"""From a stream of random choices to a program that eager runs.

Statements are tried on real tensors as they are drawn, so shapes need no rules of their own: what
eager refuses, or what leaves the range where rounding is harmless, is drawn again.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.random_programs.ops import IN_PLACE, PURE, OpRow
from tests.random_programs.program import DTYPES, NAME, Program, Statement

SIZES = (1, 2, 3, 5, 7, 8, 9, 16, 17, 31, 33, 64, 70)
MAX_ELEMENTS = 30_000
MAX_MAGNITUDE = 200.0  # far from the overflow of float16, where eager and fused code may part
FLOAT_WEIGHTS = (("f32", 6), ("f16", 1), ("bf16", 2), ("f64", 1))
OTHER_WEIGHTS = (("i64", 3), ("i32", 1), ("u8", 1), ("b8", 2))


@dataclass
class Draft:
    """A program in the making: its values as eager computed them."""

    rng: Random
    seed: int
    sizes: tuple[int, ...]
    has_backward: bool
    scope: dict[str, Any]
    inputs: list[Statement] = field(default_factory=list)
    body: list[Statement] = field(default_factory=list)
    values: dict[str, Tensor] = field(default_factory=dict)
    is_exact: dict[str, bool] = field(default_factory=dict)
    writable: set[str] = field(default_factory=set)


def generate(rng: Random, seed: int = 0) -> Program:
    sizes = draw_sizes(rng)
    is_dynamic = rng.random() < 0.35
    scope = {"torch": torch, "F": F, **DTYPES, **dict(zip("abc", sizes, strict=True))}
    scope["g"] = torch.Generator().manual_seed(7)
    draft = Draft(rng, seed, sizes, rng.random() < 0.3, scope)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for i in range(rng.randint(2, 4)):
            add_input(draft, f"x{i}", as_index=i == 1)
        goal = rng.randint(3, 12)
        for _ in range(goal * 12):
            if len(draft.body) < goal:
                add_statement(draft)
    others = tuple(draw_sizes(rng) for _ in range(2)) if is_dynamic else ()
    return Program(
        seed=seed,
        inputs=tuple(draft.inputs),
        body=tuple(draft.body),
        outputs=draw_outputs(draft),
        sizes=(sizes, *others),
        is_dynamic=is_dynamic,
        has_backward=draft.has_backward,
    )


def from_seed(seed: int) -> Program:
    return generate(Random(seed), seed)


def draw_sizes(rng: Random) -> tuple[int, ...]:
    return tuple(0 if rng.random() < 0.02 else rng.choice(SIZES) for _ in range(3))


def weighted(rng: Random, pairs: tuple[tuple[str, int], ...]) -> str:
    return rng.choice([name for name, weight in pairs for _ in range(weight)])


def add_input(draft: Draft, name: str, *, as_index: bool) -> None:
    """A tensor of random dtype and layout; the second one is always usable as an index."""
    rng = draft.rng
    is_index = as_index or rng.random() < 0.1
    dtype = weighted(rng, OTHER_WEIGHTS if is_index else FLOAT_WEIGHTS)
    if draft.has_backward and not is_index:
        dtype = rng.choice(("f32", "f32", "f32", "f64"))
    shape = [rng.choice("abcabc14") for _ in range(rng.choice((0, 1, 2, 2, 2, 3, 3)))]
    text, is_dense = layout(rng, shape, filling(rng, dtype))
    if draft.has_backward and not is_index:
        text += ".requires_grad_()"
    value = attempt(draft, text)
    if value is None:
        text, is_dense = f"torch.ones((a, 3)).to({dtype})", True
        value = eval(text, draft.scope)
    draft.inputs.append(Statement(name, text))
    keep(draft, name, value.detach() if draft.has_backward else value, exact=True)
    if is_dense and not draft.has_backward:
        draft.writable.add(name)


def filling(rng: Random, dtype: str) -> str:
    """Text of a tensor of `SHAPE`: mostly spread out, sometimes full of ties."""
    if dtype == "b8":
        return "(torch.rand(SHAPE, generator=g) < 0.5)"
    low = 0 if dtype == "u8" else -4
    if dtype in ("i64", "i32", "u8") or rng.random() < 0.15:
        return f"torch.randint({low}, 9, SHAPE, generator=g).to({dtype})"
    return f"torch.randn(SHAPE, generator=g).to({dtype})"


def layout(rng: Random, shape: list[str], text: str) -> tuple[str, bool]:
    """The tensor's text in some memory layout, and whether elements have memory of their own."""

    def filled(dims: list[str]) -> str:
        return text.replace("SHAPE", f"({', '.join(dims)}{',' if len(dims) == 1 else ''})")

    kind = rng.choice(
        ("plain", "plain", "plain", "transposed", "stepped", "expanded", "overlapping")
    )
    if kind == "transposed" and len(shape) >= 2:
        return f"{filled([shape[-1], *shape[1:-1], shape[0]])}.transpose(0, -1)", True
    if kind == "stepped" and shape:
        return f"{filled([*shape[:-1], f'2 * {shape[-1]}'])}[..., ::2]", True
    if kind == "expanded" and shape:
        return f"{filled(['1', *shape[1:]])}.expand({shape[0]}, *[-1] * {len(shape) - 1})", False
    if kind == "overlapping" and len(shape) == 2:
        return (
            f"{filled([f'{shape[0]} + {shape[1]}'])}.as_strided(({shape[0]}, {shape[1]}), (1, 1))",
            False,
        )
    return filled(shape), True


def add_statement(draft: Draft) -> None:
    if draft.writable and draft.rng.random() < 0.08:
        add_in_place(draft)
        return
    row = draft.rng.choices(PURE, weights=[r.weight for r in PURE])[0]
    filled = fill(draft, row, list(draft.values))
    value = attempt(draft, filled) if filled else None
    if value is None or filled is None:
        return
    name = f"t{sum(s.target is not None for s in draft.body)}"
    draft.body.append(Statement(name, filled))
    exact = row.kind != "round" and all(draft.is_exact[n] for n in NAME.findall(filled))
    keep(draft, name, value, exact=exact or not value.is_floating_point())


def add_in_place(draft: Draft) -> None:
    """Change an input, or a copy made for it; aliases of it see the change, as in eager."""
    row = draft.rng.choice(IN_PLACE)
    filled = fill(draft, row, sorted(draft.writable))
    if filled is None:
        return
    target = NAME.findall(filled)[0]
    before = draft.values[target].clone()
    if attempt(draft, filled) is None or not is_tame(draft.values[target]):
        draft.values[target].copy_(before)
        return
    draft.body.append(Statement(None, filled))
    # Everything that may share its memory is as inexact as it has become.
    if row.kind == "round" or not all(draft.is_exact[n] for n in NAME.findall(filled)):
        changed = draft.values[target].untyped_storage().data_ptr()
        for name, value in draft.values.items():
            if value.untyped_storage().data_ptr() == changed:
                draft.is_exact[name] = False


def fill(draft: Draft, row: OpRow, candidates: list[str]) -> str | None:
    """The row's text with operands that fit its kind, or None when there are none."""
    rng, values = draft.rng, draft.values

    def usable(name: str) -> bool:
        floats = values[name].is_floating_point()
        return (floats or not row.is_float) and (row.kind != "step" or draft.is_exact[name])

    firsts = [n for n in candidates if usable(n)]
    if not firsts:
        return None
    x = firsts[-1] if rng.random() < 0.5 else rng.choice(firsts)
    alike = [n for n in values if usable(n) and values[n].shape == values[x].shape]
    anyone = [n for n in values if usable(n)]
    masks = [n for n in values if values[n].dtype == torch.bool]
    indices = [n for n in values if values[n].dtype in (torch.int64, torch.int32)]
    if ("{m}" in row.text and not masks) or ("{i}" in row.text and not indices):
        return None
    num_dims = max(values[x].dim(), 1)
    order = list(range(values[x].dim()))
    rng.shuffle(order)
    return row.text.format(
        x=x,
        y=rng.choice(alike if rng.random() < 0.6 else anyone),
        z=rng.choice(alike),
        d=rng.randrange(-num_dims, num_dims),
        e=rng.randrange(num_dims),
        dd=tuple(sorted(rng.sample(range(num_dims), rng.randint(1, num_dims)))),
        k=rng.random() < 0.5,
        n=rng.choice((0, 1, 0.5, 2)),
        m=rng.choice(masks) if masks else "",
        i=rng.choice(indices) if indices else "",
        perm=", ".join(map(str, order)),
        ints=rng.choice(("i64", "i32", "u8" if is_positive(values[x]) else "i64", "b8")),
        floats=rng.choice(("f32", "f32", "f64") if draft.has_backward else ("f32", "f16", "bf16")),
    )


def is_positive(x: Tensor) -> bool:
    """A negative float cast to an unsigned integer has no defined value."""
    return x.numel() > 0 and bool((x >= 0).all())


def attempt(draft: Draft, text: str) -> Tensor | None:
    try:
        value = eval(text, draft.scope)
    except (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError):
        return None
    return value if isinstance(value, Tensor) and is_tame(value) else None


def is_tame(x: Tensor) -> bool:
    if x.numel() > MAX_ELEMENTS or x.dim() > 5:
        return False
    if x.numel() == 0 or x.dtype == torch.bool:
        return True
    wide = x.detach().double()
    return bool(wide.isfinite().all()) and float(wide.abs().max()) <= MAX_MAGNITUDE


def keep(draft: Draft, name: str, value: Tensor, *, exact: bool) -> None:
    draft.values[name] = draft.scope[name] = value
    draft.is_exact[name] = exact


def draw_outputs(draft: Draft) -> tuple[str, ...]:
    """The last value, some others, and now and then an input itself or the same value twice."""
    made = [s.target for s in draft.body if s.target is not None]
    names = made or [s.target for s in draft.inputs if s.target is not None]
    extra = [n for n in made[:-1] if draft.rng.random() < 0.25]
    if draft.rng.random() < 0.1:
        extra.append(draft.inputs[0].target or "")
    if draft.rng.random() < 0.05:
        extra.append(names[-1])
    return (names[-1], *extra)
