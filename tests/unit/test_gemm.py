"""The matrix multiplications of the C++ templates, for each ISA and compiler, held to float64.

Blocks are small, so that small matrices have whole blocks, whole tiles and edges. Operands end at a
page that cannot be read; results lie between bands that must not change.
"""

from __future__ import annotations

import ctypes
import mmap
import shutil
import subprocess
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from perfuse.target import BASE_FLAGS, GCC_FLAGS, ISA_FLAGS, LANES, machine_isas

HEADERS = Path(__file__).parents[2] / "perfuse" / "codegen" / "cpp"
COMPILERS = [c for c in ("g++", "clang++-19") if shutil.which(c)] or ["c++"]
TYPES = {
    "f32": ("float", "float", torch.float32, torch.float32),
    "bf16": ("bf16", "bf16", torch.bfloat16, torch.bfloat16),
    "i8_weight": ("float", "int8_t", torch.float32, torch.int8),
}
# Of the register tile (rows, vectors), the depth of a part, and the block; by ISA.
BLOCKINGS = {
    "avx512": "14, 2, 16, 28, 64",
    "avx2": "6, 2, 16, 12, 32",
    "scalar": "4, 1, 16, 8, 16",
}
# Of bfloat16 with AVX-512; the second as on machines without the instruction.
PAIRS = {
    "pairs": "gemm_pairs<32, 8>",
    "emulated_pairs": "gemm_emulated_pairs<32, 8>",
}
EMULATED = """
template <int DEPTH, int COLUMNS, class F>
void gemm_emulated_pairs(
    Matrix<bf16> a, Matrix<bf16> b, int64_t m, int64_t n, int64_t k, int, F finish) {
  if (n) pairs_of_columns<false, DEPTH, COLUMNS>(a, b, m, k, Range{0, n}, finish);
}
"""
KINDS = {
    "packed": "gemm_packed<Blocking<{blocking}>>",
    "dots": "gemm_dots<3, 4, 8>",
    "rows": "gemm_rows<6, 2, 16, 64>",
}
# Rows, columns and depth: nothing, one, primes, whole tiles, several blocks.
SIZES = [
    (0, 5, 3), (5, 0, 3), (5, 3, 0), (1, 1, 1), (1, 17, 37), (2, 3, 16), (7, 32, 5), (12, 32, 16),
    (29, 67, 41), (61, 130, 53),
]  # fmt: skip


def functions(isa: str) -> dict[str, str]:
    return KINDS | (PAIRS if isa == "avx512" else {})


def types_of(kind: str) -> list[str]:
    return ["bf16"] if kind in PAIRS else list(TYPES)


def source(isa: str) -> str:
    """One function for each kind and pair of types: c = a @ b, one float after another."""
    out = ['#include "perfuse_simd.h"', '#include "simd_reduce.h"', '#include "templates/gemm.h"']
    out += ["using namespace pf;", EMULATED if isa == "avx512" else "", 'extern "C" {']
    for kind, function in functions(isa).items():
        for name in types_of(kind):
            a, b, *_ = TYPES[name]
            called = function.format(blocking=BLOCKINGS[isa])
            out += [
                f"void {kind}_{name}(const {a}* a, int64_t ad, int64_t aa, const {b}* b,"
                " int64_t bd, int64_t ba, float* c, int64_t m, int64_t n, int64_t k, int t) {",
                f"  {called}(Matrix<{a}>{{a, ad, aa}}, Matrix<{b}>{{b, bd, ba}}, m, n, k, t,",
                "    [=](const float* s, int64_t ld, int64_t i0, int64_t j0, int64_t r, int64_t w)",
                "      { for (int64_t i = 0; i < r; i++) for (int64_t j = 0; j < w; j++)",
                "        c[(i0 + i) * n + j0 + j] = s[i * ld + j]; }); }",
            ]
    return "\n".join([*out, "}"])


def build(isa: str, compiler: str, folder: Path) -> Path:
    text, library = folder / "gemm.cpp", folder / "gemm.so"
    text.write_text(source(isa))
    own = GCC_FLAGS if compiler == "g++" else ()
    flags = ("-O1", *BASE_FLAGS, *own, *ISA_FLAGS[isa], f"-DPF_LANES={LANES[isa]}", f"-I{HEADERS}")
    subprocess.run([compiler, *flags, "-shared", text, "-o", library, "-lgomp"], check=True)
    return library


class Page:
    """Memory that ends at a page which cannot be read."""

    def __init__(self, num_bytes: int) -> None:
        self.size = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self.map = mmap.mmap(-1, self.size + mmap.PAGESIZE)
        self.start = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        assert libc.mprotect(self.start + self.size, mmap.PAGESIZE, 0) == 0

    def place(self, values: Tensor) -> int:
        """The address of a copy of these contiguous values, which end where the page does."""
        num_bytes = values.numel() * values.element_size()
        raw = values.contiguous().view(-1).view(torch.uint8).numpy()
        whole = np.frombuffer(self.map, np.uint8, self.size)
        whole[self.size - num_bytes :] = raw
        return self.start + self.size - num_bytes


PAGES = [Page(1 << 16), Page(1 << 16)]


def drawn(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(rows * 131 + columns)
    if dtype is torch.int8:
        return torch.randint(-128, 128, (rows, columns), generator=generator).to(dtype)
    return torch.randn(rows, columns, generator=generator).to(dtype)


def layouts(matrix: Tensor) -> Iterator[tuple[Tensor, tuple[int, int]]]:
    """The flat memory of a matrix and its strides: by rows, by columns, padded, every other one."""
    rows, columns = matrix.shape
    yield matrix, (columns, 1)
    yield matrix.mT, (1, rows)
    yield (
        torch.cat([matrix, matrix[:, :1]], 1).reshape(-1)[: rows * (columns + 1)],
        (columns + 1, 1),
    )
    yield matrix.repeat_interleave(2, 1), (2 * columns, 2)


def run(
    library: ctypes.CDLL,
    name: str,
    given: list[tuple[Tensor, tuple[int, int]]],
    sizes: tuple[int, int, int],
    threads: int,
) -> Tensor:
    """The result, once the bands around it are seen to be untouched."""
    m, n, k = sizes
    band = 64
    out = torch.full((m * n + 2 * band,), float("nan"))
    out[:band] = out[band + m * n :] = 7.0
    function = library[name]
    pointer, step = ctypes.c_void_p, ctypes.c_int64
    matrix = [pointer, step, step]
    function.argtypes = [*matrix, *matrix, pointer, step, step, step, ctypes.c_int]
    operands = [
        value
        for page, (memory, strides) in zip(PAGES, given, strict=True)
        for value in (page.place(memory), *strides)
    ]
    function(*operands, out.data_ptr() + 4 * band, m, n, k, threads)
    assert (out[:band] == 7).all() and (out[band + m * n :] == 7).all()
    return out[band : band + m * n].view(m, n)


def check(library: ctypes.CDLL, kind: str, types: str, sizes: tuple[int, int, int]) -> None:
    m, n, k = sizes
    a, b = drawn(m, k, TYPES[types][2]), drawn(k, n, TYPES[types][3])
    exact = a.double() @ b.double()
    # Rounding of a sum of k products, each at most this large.
    limit = (a.double().abs() @ b.double().abs()) * max(k, 1) * 2.0**-24
    left, right = list(layouts(a)), list(layouts(b))
    if kind == "dots" or kind in PAIRS:
        right = right[1:2]
    elif kind == "rows":
        right = [right[0], right[2]]
    for number, (first, second) in enumerate(product(left, right)):
        got = run(library, f"{kind}_{types}", [first, second], sizes, 1 + number % 3)
        assert ((got - exact).abs() <= limit).all(), (kind, types, sizes, first[1], second[1])


BUILDS = [("avx2", compiler) for compiler in COMPILERS] + [("scalar", COMPILERS[0])]


@pytest.fixture(scope="module", params=BUILDS, ids="-".join)
def library(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> ctypes.CDLL:
    isa, compiler = request.param
    if isa not in machine_isas():
        pytest.skip(f"this CPU has no {isa}")
    return ctypes.CDLL(str(build(isa, compiler, tmp_path_factory.mktemp("gemm"))))


@pytest.mark.parametrize("types", TYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_matches_float64(library: ctypes.CDLL, kind: str, types: str) -> None:
    for sizes in SIZES:
        check(library, kind, types, sizes)


@pytest.mark.parametrize("compiler", COMPILERS)
def test_compiles_for_avx512(compiler: str, tmp_path: Path) -> None:
    library = build("avx512", compiler, tmp_path)
    if "avx512" in machine_isas():
        loaded = ctypes.CDLL(str(library))
        for kind, sizes in product(functions("avx512"), SIZES):
            for types in types_of(kind):
                check(loaded, kind, types, sizes)


def test_nan_and_infinity_stay_where_they_are(library: ctypes.CDLL) -> None:
    """Padding never reaches a result: a row of infinities leaves the other rows alone."""
    a, b = drawn(7, 19, torch.float32), drawn(19, 17, torch.float32)
    a[3], b[:, 16] = float("inf"), float("nan")
    for kind, right in (
        ("packed", (b, (17, 1))),
        ("dots", (b.mT, (1, 19))),
        ("rows", (b, (17, 1))),
    ):
        got = run(library, f"{kind}_f32", [(a, (19, 1)), right], (7, 17, 19), 1)
        others = [0, 1, 2, 4, 5, 6]
        assert got[:, 16].isnan().all() and not got[others, :16].isnan().any()
        assert not got[3, :16].isfinite().any()
