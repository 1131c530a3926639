"""C++ sources: complete tables, stable text, equal kernels once, and every instruction set.

A golden source that changed for a good reason is rewritten: python -m tests.unit.codegen.goldens
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from perfuse.build.compiler import HEADERS
from perfuse.codegen.cpp import spelling
from perfuse.codegen.cpp.unit import CALLS_MATH, LONG_UNIT, WIDE_UNIT, generate_sources
from perfuse.config import Settings
from perfuse.context import Context
from perfuse.counters import Counters
from perfuse.ir.dtype import DType
from perfuse.ir.expr import SCALAR_OPS
from tests.unit.codegen.goldens import CONTEXT as GOLDEN_CONTEXT
from tests.unit.codegen.goldens import GOLDEN, golden_path, kernels_text, sources_of
from tests.unit.lower.samples import f32, u8
from tests.unit.planning import CONTEXT, plans_of

HEADER_TEXT = "\n".join(path.read_text() for path in sorted(HEADERS.glob("*.h")))
REDUCTIONS = ("sum", "prod", "max", "min", "any", "all", "argmax", "argmin")
SCANS = ("cumsum", "cumprod")


@pytest.mark.parametrize("name", SCALAR_OPS)
def test_every_scalar_op_is_a_function(name: str) -> None:
    defined = rf"PF_(?:FN|MATH)[^;{{]*?\b{name}\("
    by_macro = rf"^(?:.*\s)?PF_[A-Z0-9_]+\({name}[,)]"
    is_special = name in ("cast", "round_to")  # spelled with the type they make
    assert is_special or spelling.SPELLING[name] == f"pf::{name}"
    wanted = "convert" if name == "cast" else name
    found = re.search(defined.replace(name, wanted), HEADER_TEXT) or re.search(
        by_macro, HEADER_TEXT, re.MULTILINE
    )
    assert found, f"no header defines {name}"


@pytest.mark.parametrize("kind", REDUCTIONS)
def test_every_reduction_has_an_accumulator(kind: str) -> None:
    name = spelling.ACCUMULATOR[kind].removeprefix("pf::")
    assert re.search(rf"\b(?:struct|using) {name}\b", HEADER_TEXT)


@pytest.mark.parametrize("kind", [k for k in REDUCTIONS if not k.startswith("arg")] + [*SCANS])
def test_every_reduction_starts_and_combines(kind: str) -> None:
    assert spelling.COMBINE[kind].removeprefix("pf::") in SCALAR_OPS
    dtypes = (DType.BOOL,) if kind in ("any", "all") else spelling.COMPUTE_TYPE
    assert all(spelling.identity(kind, dtype) for dtype in dtypes)


def test_tables_hold_every_dtype() -> None:
    assert set(spelling.STORAGE_TYPE) == set(DType)
    assert set(spelling.COMPUTE_TYPE) == {d.compute for d in DType}


LITERALS = [
    (1.0, DType.F32, "1.0f"),
    (-0.0, DType.F32, "(-0.0f)"),
    (0.1, DType.F64, "0x1.999999999999ap-4"),
    (float("nan"), DType.F32, '__builtin_nanf("")'),
    (float("-inf"), DType.F64, "(-__builtin_inf())"),
    (-(2**63), DType.I64, "int64_t(-9223372036854775807LL - 1)"),
    (2**64 - 1, DType.U64, "uint64_t(18446744073709551615ULL)"),
    (2**40, DType.I64, "int64_t(1099511627776LL)"),
    (True, DType.BOOL, "true"),
]


@pytest.mark.parametrize("row", LITERALS, ids=lambda row: row[2])
def test_literals(row: tuple[bool | int | float, DType, str]) -> None:
    assert spelling.literal(row[0], row[1]) == row[2]


@pytest.mark.parametrize("name", GOLDEN)
def test_golden(name: str) -> None:
    wanted = golden_path(name).read_text()
    assert kernels_text(name) == wanted, "if it is right: python -m tests.unit.codegen.goldens"


@pytest.mark.parametrize("name", GOLDEN)
def test_same_program_gives_the_same_bytes(name: str) -> None:
    assert sources_of(name) == sources_of(name)


def layers(x: Tensor, *parameters: Tensor) -> Tensor:
    for weight, bias in zip(parameters[::2], parameters[1::2], strict=True):
        x = F.gelu(F.linear(x, weight, bias))
    return x


def test_equal_layers_share_one_function() -> None:
    parameters = [f32(16, 16) if i % 2 == 0 else f32(16) for i in range(24)]
    (plan,) = plans_of(layers, f32(8, 16), *parameters)
    sources = generate_sources(plan, CONTEXT)
    assert len(plan.kernels) == 12 and sources.num_distinct <= 2
    assert sources.units[0][1].count("static void kernel") == sources.num_distinct


def test_long_kernels_are_units_of_their_own() -> None:
    def chain(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        for i in range(700):
            x = x * 0.5 + i
        return x, y.softmax(-1)

    (plan,) = plans_of(chain, f32(52), f32(7, 9))
    first, *rest = generate_sources(plan, CONTEXT).units
    assert first[0] == "kernels" and "static void kernel" in first[1]
    assert rest and all(name.startswith(LONG_UNIT) for name, _ in rest)
    long = "".join(text for _, text in rest)
    assert long.count("pf::loadv") == long.count("pf::storev")  # each body once, not twice
    assert "void kernel" in long and "static void kernel" not in long
    assert 1399 <= long.count("pf::mul(") + long.count("pf::add(") <= 1400
    assert all(text.startswith(CALLS_MATH) for _, text in rest) and CALLS_MATH not in first[1]


def test_long_maps_of_little_arithmetic_are_units_of_their_own() -> None:
    def chain(x: Tensor, y: Tensor) -> list[Tensor]:
        rows = [x]
        for i in range(60):
            rows.append(rows[-1] * 0.5 + y[:, i])
        return [*rows[1:], y.softmax(-1)]

    (plan,) = plans_of(chain, f32(52), f32(52, 61))
    first, *rest = generate_sources(plan, CONTEXT).units
    assert rest and all(name.startswith(WIDE_UNIT) for name, _ in rest)
    assert "pf::exp" in first[1] and not any("pf::exp" in text for _, text in rest)
    assert not any(CALLS_MATH in text for _, text in rest)


def test_many_kernels_are_shared_out_to_several_units() -> None:
    def many(x: Tensor, *others: Tensor) -> list[Tensor]:
        return [(x.sin() * (k + 2) + y).var(-1) for k, y in enumerate(others)]

    (plan,) = plans_of(many, f32(8, 33), *(f32(8 + k, 1, 33 + k)[:, :, :33] for k in range(40)))
    sources = generate_sources(plan, CONTEXT)
    _, *rest = sources.units
    assert len(rest) >= 2 and all(name.startswith("more_kernels") for name, _ in rest)
    defined = sum(text.count("void kernel") for _, text in sources.units)
    declared = sum(text.count("void kernel") for _, text in rest)
    assert defined == sources.num_distinct + declared
    assert not any("pf::scratch(" in text for _, text in rest)


def test_scratch_rows_hold_the_last_vector_of_a_row_in_pieces() -> None:
    """A row of three pieces of five: the last vector begins at ten and is eight or sixteen long."""

    def softmax(x: Tensor) -> Tensor:
        x = (x[:, :, :5] - 1).exp()
        return x / x.sum((1, 2), keepdim=True)

    (plan,) = plans_of(softmax, f32(4, 3, 7), context=GOLDEN_CONTEXT)
    ((_, text),) = generate_sources(plan, GOLDEN_CONTEXT).units
    (num_bytes,) = re.findall(r"pf::scratch\(0, (\d+)\)", text)
    assert int(num_bytes) >= 8 * (10 + GOLDEN_CONTEXT.target.lanes)


def test_nothing_to_compute_is_no_source() -> None:
    (plan,) = plans_of(lambda x: torch.mm(x, x), f32(8, 8))
    assert generate_sources(plan, CONTEXT).units == ()


# What is divided: as often as there are elements, unless a sigmoid is shared.
SIGMOIDS = {
    "swish": (lambda x: x * torch.sigmoid(x), (f32(4, 64),), True),
    "gate": (lambda x, g: x * torch.sigmoid(g), (f32(4, 64), f32(4, 64)), True),
    "one gate a row": (lambda x, g: x * torch.sigmoid(g), (f32(4, 64), f32(4, 1)), False),
    "used twice": (lambda x: x * torch.sigmoid(x) + torch.sigmoid(x), (f32(4, 64),), False),
    "a result as well": (lambda x: (x * torch.sigmoid(x), torch.sigmoid(x)), (f32(4, 64),), False),
}


@pytest.mark.parametrize("name", SIGMOIDS)
def test_a_product_with_a_sigmoid_is_a_division(name: str) -> None:
    fn, inputs, wanted = SIGMOIDS[name]
    (plan,) = plans_of(fn, *inputs)
    assert ("pf::times_sigmoid" in generate_sources(plan, CONTEXT).units[0][1]) is wanted


def streams(fn: Callable[..., Any], *inputs: Tensor, limit: int | None = None) -> bool:
    """Whether a kernel of `fn` uses non-temporal stores with a last-level cache of 64 KiB."""
    target = replace(GOLDEN_CONTEXT.target, l3_bytes=64 << 10)
    settings = Settings(cpu=replace(GOLDEN_CONTEXT.settings.cpu, stream_store_bytes=limit))
    context = Context(target, settings, Counters())
    (plan,) = plans_of(fn, *inputs, context=context)
    return "pf::streamv" in generate_sources(plan, context).units[0][1]


# x, y and the sum are 24 KiB each; x and its square 16 KiB, or 8; bytes and their floats 8 and 32,
# or 16 and 64.
STREAMED = {
    "moves as much as half the cache": (lambda x, y: x + y, (f32(96, 64), f32(96, 64)), None, True),
    "fits": (lambda x: x * x, (f32(32, 64),), None, False),
    "is most of what is moved": (lambda x: x.float(), (u8(128, 64),), None, False),
    "is more than the cache": (lambda x: x.float(), (u8(256, 64),), None, True),
    "is read by the next step": (lambda x, y: torch.mm(x + y, x), (f32(96, 96),) * 2, None, False),
    "as large as the cache": (lambda x: torch.mm(x + 1, x), (f32(128, 128),), None, False),
    "twice the cache": (lambda x: torch.mm(x + 1, x), (f32(192, 192),), None, True),
    "small beside what is read": (lambda x: x.sum(1), (f32(1024, 64),), None, False),
    "at the limit that was set": (lambda x: x * x, (f32(32, 64),), 8 << 10, True),
    "below the limit that was set": (lambda x, y: x + y, (f32(96, 64),) * 2, 1 << 20, False),
    "never": (lambda x, y: x + y, (f32(96, 64), f32(96, 64)), 0, False),
}


@pytest.mark.parametrize("name", STREAMED)
def test_streams_what_the_cache_would_lose(name: str) -> None:
    fn, inputs, limit, wanted = STREAMED[name]
    assert streams(fn, *inputs, limit=limit) is wanted
