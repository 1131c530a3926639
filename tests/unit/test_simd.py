"""The vector library of the C++ kernels, built for each ISA and held to float64 and to eager.

One shared library per ISA holds a loop around every function; the tables say what each must give.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import mmap
import platform
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mpmath
import numpy as np
import pytest
import torch

from perfuse.torch_compat.ops import fp8_cast_saturates

HEADERS = Path(__file__).parents[2] / "perfuse" / "codegen" / "cpp"
COMMON = (
    "-O3 -std=c++20 -fno-math-errno -ffp-contract=off -fopenmp -fPIC -shared -Wno-psabi".split()
)
ISAS = {
    "avx512": "-mavx512f -mavx512bw -mavx512dq -mavx512vl -mfma -mf16c -mbmi2 -DPF_LANES=16",
    "avx2": "-mavx2 -mfma -mf16c -mbmi2 -DPF_LANES=8",
    "plain": "-DPF_LANES=8",
}

# The flag of <fenv.h>.
UNDERFLOW = 0x10 if platform.machine() == "x86_64" else 0x08

Array = np.ndarray[Any, Any]
Unary = Callable[[torch.Tensor], torch.Tensor]
Binary = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def by_numpy(
    f: Callable[[Array, Array], Array],
) -> Binary:
    def g(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        with np.errstate(all="ignore"):
            return torch.from_numpy(f(a.numpy(), b.numpy()))

    return g


# name: (reference in float64, largest error in ulp), as the table of simd_math.h states it.
UNARY: dict[str, tuple[Unary, float]] = {
    "exp": (torch.exp, 1.1),
    "exp2": (torch.exp2, 1.1),
    "expm1": (torch.expm1, 1.8),
    "log": (torch.log, 1.0),
    "log2": (torch.log2, 1.9),
    "log10": (torch.log10, 2.5),
    "log1p": (torch.log1p, 1.1),
    "tanh": (torch.tanh, 2.6),
    "sigmoid": (torch.sigmoid, 2.6),
    "sinh": (torch.sinh, 2.6),
    "cosh": (torch.cosh, 2.6),
    "sin": (torch.sin, 1.7),
    "cos": (torch.cos, 1.7),
    "tan": (torch.tan, 3.4),
    "asin": (torch.asin, 2.5),
    "acos": (torch.acos, 1.5),
    "atan": (torch.atan, 1.6),
    "asinh": (torch.asinh, 2.0),
    "acosh": (torch.acosh, 2.2),
    "atanh": (torch.atanh, 2.2),
    "erf": (torch.erf, 1.6),
    "erfc": (torch.erfc, 5.0),
    "erfinv": (torch.erfinv, 3.6),
    "lgamma": (torch.lgamma, 8.0),
    "digamma": (torch.digamma, 1.0),
    "sqrt": (torch.sqrt, 0.51),
    "rsqrt": (torch.rsqrt, 1.6),
    "reciprocal": (torch.reciprocal, 0.51),
    "floor": (torch.floor, 0),
    "ceil": (torch.ceil, 0),
    "trunc": (torch.trunc, 0),
    "round": (torch.round, 0),
    "abs": (torch.abs, 0),
    "neg": (torch.neg, 0),
    "sign": (torch.sign, 0),
}
# Those that promise something within a range only: (reference, the range, largest error in ulp).
RANGED: dict[str, tuple[Unary, float, float, float]] = {
    "exp_mid": (torch.exp, -87, 88, 1.1),
    "exp2_mid": (torch.exp2, -126, 127, 1.1),
}
# Binary functions of float with the error allowed against float64; 0: the very value of eager.
BINARY: dict[str, tuple[Binary, float]] = {
    "pow": (torch.pow, 0.6),
    "atan2": (torch.atan2, 2.0),
    "hypot": (torch.hypot, 0.6),
    "fmod": (by_numpy(np.fmod), 0),  # eager's gives NaN where a / b overflows
    "mod": (by_numpy(np.remainder), 0),
    "floordiv": (torch.floor_divide, 0),
    "nextafter": (torch.nextafter, 0),
    "min": (torch.minimum, 0),
    "max": (torch.maximum, 0),
    "fmin": (torch.fmin, 0),
    "fmax": (torch.fmax, 0),
    "copysign": (torch.copysign, 0),
}
INTEGER: dict[str, Binary] = {
    "floordiv": lambda a, b: a // b,
    "mod": lambda a, b: a % b,
    "truncdiv": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "fmod": torch.fmod,
    "add": torch.add,
    "mul": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
}
INTEGER_TYPES = {
    "int8_t": torch.int8,
    "int16_t": torch.int16,
    "int32_t": torch.int32,
    "int64_t": torch.int64,
    "uint8_t": torch.uint8,
}
COMPUTE_TYPES = {
    **INTEGER_TYPES,
    "float": torch.float32,
    "double": torch.float64,
    "bool": torch.bool,
}
SMALL_FLOATS = {
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "f8e4m3fn": torch.float8_e4m3fn,
    "f8e5m2": torch.float8_e5m2,
    "f8e4m3fnuz": torch.float8_e4m3fnuz,
    "f8e5m2fnuz": torch.float8_e5m2fnuz,
    "f8e8m0fnu": torch.float8_e8m0fnu,
}


def source() -> str:
    """A loop around everything that is tested; `_1` is the scalar form of the same."""
    loop = "for (int64_t i = 0; i < n; i += PF_LANES)"
    each = "for (int64_t i = 0; i < n; i++)"
    out = ['#include "perfuse_simd.h"', '#include "simd_reduce.h"']
    out += ["using namespace pf;", 'extern "C" {']
    for f in (*UNARY, *RANGED):
        out += [
            f"void u_{f}(const float* x, float* y, int64_t n)"
            f" {{ {loop} storev<float>(y + i, pf::{f}(loadv<float>(x + i))); }}",
            f"void ud_{f}(const double* x, double* y, int64_t n)"
            f" {{ {loop} storev<double>(y + i, pf::{f}(loadv<double>(x + i))); }}",
            f"void u1_{f}(const float* x, float* y, int64_t n) {{ {each} y[i] = pf::{f}(x[i]); }}",
            f"void ud1_{f}(const double* x, double* y, int64_t n)"
            f" {{ {each} y[i] = pf::{f}(x[i]); }}",
        ]
    for f in BINARY:
        out += [
            f"void b_{f}(const float* a, const float* b, float* y, int64_t n)"
            f" {{ {loop} storev<float>(y + i,"
            f" pf::{f}(loadv<float>(a + i), loadv<float>(b + i))); }}",
            f"void bd_{f}(const double* a, const double* b, double* y, int64_t n)"
            f" {{ {loop} storev<double>(y + i,"
            f" pf::{f}(loadv<double>(a + i), loadv<double>(b + i))); }}",
        ]
    for t in INTEGER_TYPES:
        for f in INTEGER:
            out += [
                f"void i_{f}_{t}(const {t}* a, const {t}* b, {t}* y, int64_t n)"
                f" {{ {loop} storev<{t}>(y + i, pf::{f}(loadv<{t}>(a + i), loadv<{t}>(b + i))); }}"
            ]
    for t in COMPUTE_TYPES:
        out += [
            f"void choose_{t}(const {t}* a, const {t}* b, {t}* y, int64_t n) {{ {loop} {{"
            f" const auto s = loadv<{t}>(a + i), t = loadv<{t}>(b + i);"
            f" const auto m = lor(lt(s, t), eq(s, splat<{t}>({t}(1))));"
            f" storev<{t}>(y + i, where(m, add(s, t), s)); }} }}"
        ]
        for to in COMPUTE_TYPES:
            out += [
                f"void c_{t}_{to}(const {t}* x, {to}* y, int64_t n)"
                f" {{ {loop} storev<{to}>(y + i, cast<{to}>(loadv<{t}>(x + i))); }}"
            ]
    for s in (*SMALL_FLOATS, *COMPUTE_TYPES):
        out += [
            f"void copy_n_{s}(const {s}* x, {s}* y, int n)"
            f" {{ storev_n<{s}>(y, loadv_n<{s}>(x, n), n); }}",
            f"void copy_strided_{s}(const {s}* x, {s}* y, int n)"
            f" {{ store_strided_n<{s}>(y, 2, load_strided_n<{s}>(x, 2, n), n); }}",
            f"void copy_mask_{s}(const {s}* x, {s}* y, int n)"
            " { const mask m = first_lanes(n); const auto at = iota<int64_t>(0);"
            f" scatter_mask<{s}>(y, at, load_mask<{s}>(x, m, {{}}), m);"
            f" scatter_n<{s}>(y, at, gather_n<{s}>(x, at, n), n);"
            f" scatter_mask<{s}>(y, at, gather_mask<{s}>(x, at, m, {{}}), m); }}",
            f"void stream_{s}(const {s}* x, {s}* y, int64_t n)"
            f" {{ {loop} streamv<{s}>(y + i, loadv<{s}>(x + i)); stream_fence(); }}",
            f"void tile_{s}(const {s}* x, {s}* y, int r, int c)"
            f" {{ transpose_tile<{s}>(x, c, y, r, r, c); }}",
        ]
    for s in SMALL_FLOATS:
        out += [
            f"void q_{s}(const float* x, {s}* y, int64_t n)"
            f" {{ {loop} storev<{s}>(y + i, loadv<float>(x + i)); }}",
            f"void q1_{s}(const float* x, {s}* y, int64_t n)"
            f" {{ {each} store1<{s}>(y + i, x[i]); }}",
            f"void d_{s}(const {s}* x, float* y, int64_t n)"
            f" {{ {loop} storev<float>(y + i, loadv<{s}>(x + i)); }}",
            f"void d1_{s}(const {s}* x, float* y, int64_t n)"
            f" {{ {each} y[i] = load1<{s}>(x + i); }}",
            f"void r_{s}(const float* x, float* y, int64_t n)"
            f" {{ {loop} storev<float>(y + i, round_to<{s}>(loadv<float>(x + i))); }}",
        ]
    out += [
        "void philox_words(uint32_t* c, uint32_t k0, uint32_t k1)"
        " { auto r = philox_rounds<uint64_t>(c[0], c[1], c[2], c[3], k0, k1);"
        " c[0] = r.x0; c[1] = r.x1; c[2] = r.x2; c[3] = r.x3; }",
        f"void random_v(int64_t seed, float* u, float* g, int64_t* k, int64_t n) {{ {loop} {{"
        " const auto at = iota<int64_t>(i); storev<float>(u + i, rand_f32(seed, at));"
        " storev<float>(g + i, randn_f32(seed, at));"
        " storev<int64_t>(k + i, randint64(seed, at, -5, 20)); } }",
        f"void random_1(int64_t seed, float* u, float* g, int64_t* k, int64_t n) {{ {each} {{"
        " u[i] = rand_f32(seed, i); g[i] = randn_f32(seed, i);"
        " k[i] = randint64(seed, i, -5, 20); } }",
        "void random_one(int64_t seed, float* u, int64_t i) { *u = rand_f32(seed, i); }",
        f"void random_row(int64_t seed, float* u, int64_t first, int64_t n)"
        f" {{ {loop} storev<float>(u + i, rand_f32_row(seed, first + i)); }}",
        "void across(const float* x, float* y) { const auto v = loadv<float>(x);"
        " y[0] = hsum(v); y[1] = hprod(v); y[2] = hmin(v); y[3] = hmax(v);"
        " y[4] = hany(gt(v, splat<float>(0))); y[5] = hall(gt(v, splat<float>(0))); }",
        "void checked_index(int64_t* at, int64_t size, int64_t* status, int64_t n)"
        " { storev<int64_t>(at, checked_n(loadv<int64_t>(at), size, size, status, (int)n)); }",
        "int num_lanes() { return PF_LANES; }",
        "}",
    ]
    return "\n".join(out)


def cpu_has(isa: str) -> bool:
    flags = Path("/proc/cpuinfo").read_text()
    return {"avx512": "avx512dq" in flags, "avx2": "avx2" in flags}.get(isa, True)


@pytest.fixture(scope="module", params=ISAS)
def lib(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    isa: str = request.param
    if not cpu_has(isa):
        pytest.skip(f"this CPU has no {isa}")
    folder = tmp_path_factory.mktemp(isa)
    (folder / "simd.cpp").write_text(source())
    as_eager = f"-DPF_FP8_SATURATE={int(fp8_cast_saturates())}"
    flags = [*COMMON, *ISAS[isa].split(), as_eager, f"-I{HEADERS}"]
    command = ["g++", *flags, "simd.cpp", "-o", "simd.so"]
    subprocess.run(command, cwd=folder, check=True)
    return ctypes.CDLL(str(folder / "simd.so"))


def call(lib: ctypes.CDLL, name: str, *args: Array | int) -> None:
    getattr(lib, name)(
        *[ctypes.c_int64(a) if isinstance(a, int) else ctypes.c_void_p(a.ctypes.data) for a in args]
    )


def samples(seed: int = 0) -> Array:
    """Every scale of float32, many near 1, the special values; a multiple of 16 long."""
    rng = np.random.default_rng(seed)
    scaled = [rng.standard_normal(20_000) * s for s in (1e-3, 0.1, 1, 10, 60, 3000)]
    any_bits = rng.integers(0, 2**32, 40_000, dtype=np.uint32).view(np.float32)
    unit = rng.uniform(-1, 1, 40_000)
    special = [0.0, -0.0, np.inf, -np.inf, np.nan, 1, -1, 0.5, -0.5, 2.5, 3.5, 1e-45, -1e-45, 88.72]
    special += [88.73, -87.34, -103.9, -104.5, 3.4e38, 1.1754944e-38, 10, 1e9, 32768, 1e-30, np.pi]
    with np.errstate(all="ignore"):
        x = np.concatenate([np.array(special), *scaled, unit, any_bits]).astype(np.float32)
    return np.concatenate([x, np.ones(-len(x) % 16, np.float32)])


def errors_in_ulp(got: Array, exact: Array) -> Array:
    with np.errstate(all="ignore"):
        nearest = exact.astype(np.float32)
        error = np.abs(got.astype(np.float64) - exact) / np.spacing(np.abs(nearest)).astype(
            np.float64
        )
    error[(got == nearest) | (np.isnan(got) & np.isnan(nearest))] = 0
    error[np.isnan(error)] = np.inf
    return error


def assert_within(got: Array, exact: Array, bound: float, *inputs: Array) -> None:
    error = errors_in_ulp(got, exact)
    i = int(error.argmax())
    at = ", ".join(repr(float(x[i])) for x in inputs)
    assert error[i] <= bound, f"{error[i]:.2f} ulp at {at}: got {got[i]}, exact {exact[i]}"


def same(a: Array, b: Array) -> Array:
    equal: Array = (a == b) | (np.isnan(a) & np.isnan(b))
    return equal


@pytest.mark.parametrize("name", UNARY)
def test_unary(lib: ctypes.CDLL, name: str) -> None:
    x = samples()
    if name == "lgamma":  # near its zeros left of -2 only the absolute error is small
        x = np.where(x < 0, np.float32(3.7), x)
    got, one = np.empty_like(x), np.empty_like(x)
    call(lib, f"u_{name}", x, got, len(x))
    call(lib, f"u1_{name}", x, one, len(x))
    assert same(got, one).all(), "a scalar and a vector disagree"
    reference, bound = UNARY[name]
    exact = reference(torch.from_numpy(x).double()).numpy()
    if name == "sigmoid":  # 1 / (1 + exp(-x)) ends with exp's range, in eager too
        got = np.where(exact < 1.2e-38, exact.astype(np.float32), got)
    assert_within(got, exact, bound, x)


@pytest.mark.parametrize("name", ["exp", "exp2"])
def test_a_power_of_a_masked_score_does_not_underflow(lib: ctypes.CDLL, name: str) -> None:
    """Intel's processors take a hundred times as long for a vector whose results underflow."""
    libm = ctypes.CDLL(ctypes.util.find_library("m"))
    is_wide = lib.num_lanes() == 16
    scores = [-np.inf, -3.4e38, -1e9, -1e4, -300, *([-155.0] if is_wide else []), -1, np.nan]
    x = np.resize(np.array(scores, np.float32), 16 * len(scores))
    got, one = np.ones_like(x), np.ones_like(x)
    libm.feclearexcept(UNDERFLOW)
    call(lib, f"u_{name}", x, got, len(x))
    assert libm.fetestexcept(UNDERFLOW) == 0
    call(lib, f"u1_{name}", x, one, len(x))
    assert same(got, one).all() and (got[x < -150] == 0).all()


@pytest.mark.parametrize("name", RANGED)
def test_ranged(lib: ctypes.CDLL, name: str) -> None:
    reference, least, largest, bound = RANGED[name]
    x = np.linspace(least, largest, 1 << 20, dtype=np.float32)
    x[: len(samples())] = np.clip(np.nan_to_num(samples()), least, largest)
    x[:16] = np.nan
    got, one = np.empty_like(x), np.empty_like(x)
    call(lib, f"u_{name}", x, got, len(x))
    call(lib, f"u1_{name}", x, one, len(x))
    assert same(got, one).all(), "a scalar and a vector disagree"
    assert_within(got, reference(torch.from_numpy(x).double()).numpy(), bound, x)


@pytest.mark.parametrize("name", UNARY)
def test_unary_of_double(lib: ctypes.CDLL, name: str) -> None:
    x = samples().astype(np.float64)
    if name == "lgamma":
        x = np.where(x < 0, 3.7, x)
    if name in ("sinh", "cosh"):  # eager's overflow before their results do
        x = np.where(np.abs(x) > 700, 1.0, x)
    got, reference = np.empty_like(x), UNARY[name][0](torch.from_numpy(x)).numpy()
    call(lib, f"ud_{name}", x, got, len(x))
    tolerance = 0 if UNARY[name][1] == 0 else 1e-14
    if name in ("digamma", "lgamma", "tan"):  # eager's own error near the poles and zeros is larger
        tolerance = 1e-9
    np.testing.assert_allclose(got, reference, rtol=tolerance, atol=1e-300)


@pytest.mark.parametrize("dtype", COMPUTE_TYPES)
def test_choose(lib: ctypes.CDLL, dtype: str) -> None:
    generator = torch.Generator().manual_seed(7)
    a, b = torch.randint(-3, 4, (2, 1024), generator=generator).to(COMPUTE_TYPES[dtype])
    got = torch.empty_like(a)
    call(lib, f"choose_{dtype}", a.numpy(), b.numpy(), got.numpy(), 1024)
    assert torch.equal(got, torch.where((a < b) | (a == 1), a + b, a))


def test_overflow_of_e4m3_can_be_nan(tmp_path: Path) -> None:
    code = "void q(const float* x, pf::f8e4m3fn* y, int n)"
    code += " { for (int i = 0; i < n; i++) pf::store1(y + i, x[i]); }"
    (tmp_path / "q.cpp").write_text('#include "perfuse_simd.h"\nextern "C" ' + code)
    flags = [*COMMON, *ISAS["plain"].split(), "-DPF_FP8_SATURATE=0", f"-I{HEADERS}"]
    subprocess.run(["g++", *flags, "q.cpp", "-o", "q.so"], cwd=tmp_path, check=True)
    x = np.array([448, 464, 464.1, 480, -1e9, np.inf, np.nan, 1], np.float32)
    y = np.zeros(8, np.uint8)
    ctypes.CDLL(str(tmp_path / "q.so")).q(
        ctypes.c_void_p(x.ctypes.data), ctypes.c_void_p(y.ctypes.data), 8
    )
    assert y.tolist() == [0x7E, 0x7E, 0x7F, 0x7F, 0xFF, 0x7F, 0x7F, 0x38]


def in_120_bits(f: Callable[[Any], Any]) -> Callable[[Array], Array]:
    """A function of mpmath, rounded to long double."""

    def one(x: float) -> Any:
        with mpmath.workprec(120):
            exact = f(mpmath.mpf(float(x)))
            nearest = float(exact)
            rest = float(exact - nearest) if np.isfinite(nearest) else 0.0
        return np.longdouble(nearest) + np.longdouble(rest)

    return lambda x: np.array([one(v) for v in x], np.longdouble)


def erfinv(x: Any) -> Any:
    if abs(x) < 1:
        return mpmath.erfinv(x)
    return x * mpmath.inf if abs(x) == 1 else mpmath.nan


# Vector code of double: (reference in long double, largest error in ulp).
OF_DOUBLE: dict[str, tuple[Callable[[Array], Array], float]] = {
    "exp": (np.exp, 1.0),
    "exp2": (np.exp2, 1.1),
    "expm1": (np.expm1, 1.8),
    "log": (np.log, 1.0),
    "log2": (np.log2, 1.9),
    "log10": (np.log10, 2.5),
    "log1p": (np.log1p, 1.1),
    "tanh": (np.tanh, 2.6),
    "sinh": (np.sinh, 2.6),
    "cosh": (np.cosh, 2.6),
    "sin": (np.sin, 1.7),
    "cos": (np.cos, 1.7),
    "tan": (np.tan, 3.4),
    "asin": (np.arcsin, 2.5),
    "acos": (np.arccos, 1.5),
    "atan": (np.arctan, 2.0),
    "asinh": (np.arcsinh, 2.0),
    "acosh": (np.arccosh, 2.2),
    "atanh": (np.arctanh, 2.2),
    "erf": (in_120_bits(mpmath.erf), 2.1),
    "erfc": (in_120_bits(lambda x: mpmath.erfc(min(x, 1e3)) if x == x else x), 5.0),
    "erfinv": (in_120_bits(erfinv), 3.6),
}
IN_120_BITS = ("erf", "erfc", "erfinv")
BINARY_OF_DOUBLE = {"pow": (np.power, 1.2), "atan2": (np.arctan2, 2.2), "hypot": (np.hypot, 1.2)}
needs_wider_float = pytest.mark.skipif(
    np.finfo(np.longdouble).nmant < 63, reason="needs a wider float"
)


def doubles(count: int) -> Array:
    """The special values, then every scale, the unit interval and both sides of 1."""
    rng = np.random.default_rng(1)
    special = [0.0, -0.0, np.inf, -np.inf, np.nan, 1, -1, 5e-324, 709.78, 709.79, -745.1, -745.2]
    special += [1e-310, -708.5, 2, -2, 1 - 2**-53, 1 + 2**-52, 5.95, -27.3, 27.2, 1024, -1074.5, 3]
    scaled = [
        rng.standard_normal(count) * s
        for s in (1e-300, 1e-160, 1e-9, 0.1, 1, 10, 300, 1e5, 1e9, 1e160, 1e300)
    ]
    unit = [rng.uniform(-1, 1, count), 1 - 10 ** rng.uniform(-16, 0, count)]
    x = np.concatenate([special, *scaled, *unit, rng.uniform(0.5, 2, count)])
    return np.concatenate([x, np.ones(-len(x) % 16)])


def assert_doubles(got: Array, exact: Array, bound: float, *inputs: Array) -> None:
    with np.errstate(all="ignore"):
        nearest = exact.astype(np.float64)
        error = np.abs(got - exact) / np.spacing(np.abs(nearest))
    error[same(got, nearest)] = 0
    i = int(np.nan_to_num(error, nan=np.inf).argmax())
    at = ", ".join(repr(float(x[i])) for x in inputs)
    assert error[i] <= bound, f"{error[i]:.2f} ulp at {at}: got {got[i]}, exact {exact[i]}"
    zero = (nearest == 0) & ~np.isnan(got)
    np.testing.assert_array_equal(np.signbit(got[zero]), np.signbit(nearest[zero]))


@pytest.mark.parametrize("name", OF_DOUBLE)
@needs_wider_float
def test_double_in_ulp(lib: ctypes.CDLL, name: str) -> None:
    x = doubles(100 if name in IN_120_BITS else 20_000)
    if name in ("erf", "erfinv"):  # whose reference has no -0
        x = x[x != 0]
        x = np.concatenate([x, np.ones(-len(x) % 16)])
    got, one = np.empty_like(x), np.empty_like(x)
    call(lib, f"ud_{name}", x, got, len(x))
    call(lib, f"ud1_{name}", x, one, len(x))
    assert same(got, one).all(), "a scalar and a vector disagree"
    reference, bound = OF_DOUBLE[name]
    with np.errstate(all="ignore"):
        exact = reference(x.astype(np.longdouble))
    assert_doubles(got, exact, bound, x)


@pytest.mark.parametrize("name", ["sin", "tan", "asin", "atan", "sinh", "asinh", "erf", "erfinv"])
def test_double_keeps_the_sign_of_zero(lib: ctypes.CDLL, name: str) -> None:
    x = np.array([0.0, -0.0] * 8)
    got = np.empty_like(x)
    call(lib, f"ud_{name}", x, got, len(x))
    assert (got == 0).all() and (np.signbit(got) == np.signbit(x)).all()


def pairs_of_doubles(name: str) -> tuple[Array, Array]:
    """Every pair of special values, then random ones; a multiple of 16 long."""
    rng, n = np.random.default_rng(2), 16_000
    special = [0.0, -0.0, np.inf, -np.inf, np.nan, 1, -1, 5e-324, -5e-324, 0.5, -0.5, 2, -2, 3, -3]
    special += [1e308, -1e308, 1e16, 9007199254740993.0, 1e-308]
    a, b = (x.ravel() for x in np.meshgrid(special, special))
    normal, wide = rng.standard_normal(n), 10 ** rng.uniform(-300, 300, n)
    if name == "pow":
        bases = [abs(normal), normal, wide, 1 + normal * 1e-9, 10 ** rng.uniform(-323, -300, n)]
        signs = rng.integers(-20, 20, n)
        powers = [normal[::-1] * 3, signs, normal[::-1], normal[::-1] * 1e11, normal[::-1]]
    else:
        bases = [normal, wide, normal * 1e-310, normal]
        powers = [normal[::-1] * 1e3, wide[::-1], normal[::-1] * 1e-310, normal * (1 + 1e-12)]
    return np.concatenate([a, *bases]), np.concatenate([b, *powers])


@pytest.mark.parametrize("name", BINARY_OF_DOUBLE)
@needs_wider_float
def test_binary_of_double_in_ulp(lib: ctypes.CDLL, name: str) -> None:
    a, b = pairs_of_doubles(name)
    got = np.empty_like(a)
    call(lib, f"bd_{name}", a, b, got, len(a))
    reference, bound = BINARY_OF_DOUBLE[name]
    with np.errstate(all="ignore"):
        exact = reference(a.astype(np.longdouble), b.astype(np.longdouble))
    assert_doubles(got, exact, bound, a, b)


def test_no_function_of_a_double_relies_on_overflow(tmp_path: Path) -> None:
    """An integer that overflows has no value: clang's pow of 1.4e308 was infinity for 0."""
    values = "0.0, -0.0, 5e-324, 1, -1, 0.7, 3, -3, 1.4e308, -1.4e308, 1e305, -1e305, "
    values += '__builtin_inf(), -__builtin_inf(), __builtin_nan(""), -__builtin_nan("")'
    unary = "".join(f"y = pf::{f}(double(a)); " for f in OF_DOUBLE)
    binary = "".join(f"y = pf::{f}(double(a), double(b)); " for f in BINARY_OF_DOUBLE)
    code = f"volatile double y, x[] = {{{values}}};\n"
    code += f"int main() {{ for (double a : x) {{ {unary} for (double b : x) {{ {binary} }} }} }}"
    (tmp_path / "all.cpp").write_text('#include "perfuse_simd.h"\n' + code)
    traps = "-fsanitize=signed-integer-overflow -fsanitize-undefined-trap-on-error".split()
    flags = [f for f in COMMON if f not in ("-O3", "-shared", "-fPIC")]
    isa = next(name for name in ("avx2", "plain") if cpu_has(name))
    command = ["g++", "-O0", *flags, *ISAS[isa].split(), *traps, f"-I{HEADERS}"]
    subprocess.run([*command, "all.cpp", "-o", "all", "-lm"], cwd=tmp_path, check=True)
    subprocess.run([str(tmp_path / "all")], check=True)


@pytest.mark.parametrize("name", BINARY)
def test_binary(lib: ctypes.CDLL, name: str) -> None:
    a, b = samples(1), samples(2)
    if name == "pow":
        a[:50_000] = np.abs(a[:50_000])
    got = np.empty_like(a)
    call(lib, f"b_{name}", a, b, got, len(a))
    reference, bound = BINARY[name]
    x, y = torch.from_numpy(a), torch.from_numpy(b)
    if bound == 0:
        assert_within(got, reference(x, y).double().numpy(), 0, a, b)
    else:
        assert_within(got, reference(x.double(), y.double()).numpy(), bound, a, b)


@pytest.mark.parametrize("dtype", INTEGER_TYPES)
@pytest.mark.parametrize("name", INTEGER)
def test_integer(lib: ctypes.CDLL, name: str, dtype: str) -> None:
    info = torch.iinfo(INTEGER_TYPES[dtype])
    rng = np.random.default_rng(3)
    kind = torch.empty(0, dtype=INTEGER_TYPES[dtype]).numpy().dtype
    a = rng.integers(info.min, info.max, 4096, kind, endpoint=True)
    b = rng.integers(info.min, info.max, 4096, kind, endpoint=True)
    b[::2] = rng.integers(1, 20, 2048)
    b[1::4] = a[1::4]
    b = np.where(b == 0, kind.type(3), b)
    if info.min < 0:
        a[0], b[0] = info.min, info.max
    got = np.empty_like(a)
    call(lib, f"i_{name}_{dtype}", a, b, got, len(a))
    expected = INTEGER[name](torch.from_numpy(a), torch.from_numpy(b)).numpy()
    np.testing.assert_array_equal(got, expected)
    call(lib, f"i_{name}_{dtype}", a, np.zeros_like(b), got, len(a))  # must not trap
    if info.min < 0:
        call(lib, f"i_{name}_{dtype}", np.full_like(a, info.min), np.full_like(b, -1), got, len(a))


@pytest.mark.parametrize("to", COMPUTE_TYPES)
@pytest.mark.parametrize("dtype", COMPUTE_TYPES)
def test_cast(lib: ctypes.CDLL, dtype: str, to: str) -> None:
    x = torch.randint(-128, 128, (4096,), generator=torch.Generator().manual_seed(1)).double() / 2
    if not to.startswith("u"):
        x[:2] = torch.tensor([0.0, -0.0])
    else:
        x = x.abs()  # a negative float to an unsigned integer has no defined value
    x = x.to(COMPUTE_TYPES[dtype])
    if "float" in dtype and to == "bool":
        x[3] = torch.nan
    got = torch.empty(4096, dtype=COMPUTE_TYPES[to])
    call(lib, f"c_{dtype}_{to}", x.numpy(), got.numpy(), 4096)
    assert torch.equal(got, x.to(COMPUTE_TYPES[to]))


def bits(x: torch.Tensor) -> Array:
    return x.view({1: torch.uint8, 2: torch.int16}[x.element_size()]).numpy()


def conversion_samples(dtype: torch.dtype) -> Array:
    """Random bits; every value of the type, every midpoint, and one float32 to either side."""
    kind = torch.int16 if dtype.itemsize == 2 else torch.int8
    codes = torch.arange(2 ** (8 * dtype.itemsize)).to(kind).view(dtype).double().numpy()
    values = np.unique(codes[np.isfinite(codes)])
    points = np.concatenate(
        [values, (values[1:] + values[:-1]) / 2, [2 * values[-1], 2 * values[0]]]
    )
    points = points.astype(np.float32)
    around = [np.nextafter(points, np.float32(s) * np.inf, dtype=np.float32) for s in (-1, 1)]
    any_bits = np.random.default_rng(5).integers(0, 2**32, 2**20, dtype=np.uint32).view(np.float32)
    x = np.concatenate([points, *around, any_bits, samples()])
    return np.concatenate([x, np.zeros(-len(x) % 16, np.float32)])


@pytest.mark.parametrize("name", SMALL_FLOATS)
def test_small_floats(lib: ctypes.CDLL, name: str) -> None:
    dtype = SMALL_FLOATS[name]
    x = conversion_samples(dtype)
    eager = torch.from_numpy(x).to(dtype)
    back = eager.float().numpy()
    for form in ("q", "q1"):
        got = torch.empty_like(eager)
        call(lib, f"{form}_{name}", x, bits(got), len(x))
        equal = (bits(got) == bits(eager)) | (np.isnan(got.float().numpy()) & np.isnan(back))
        assert equal.all(), f"{x[~equal][:4]} -> {got[~equal][:4]}, eager {eager[~equal][:4]}"
    rounded = np.empty_like(x)
    call(lib, f"r_{name}", x, rounded, len(x))
    assert same(rounded, back).all()

    codes = (
        torch.arange(2 ** (8 * dtype.itemsize)).to(torch.from_numpy(bits(eager)).dtype).view(dtype)
    )
    for form in ("d", "d1"):
        wide = np.empty(len(codes), np.float32)
        call(lib, f"{form}_{name}", bits(codes), wide, len(codes))
        expected = codes.float().numpy()
        equal = (wide.view(np.uint32) == expected.view(np.uint32)) | (
            np.isnan(wide) & np.isnan(expected)
        )
        assert equal.all()


class EndOfMemory:
    """Two pages of which the second can be neither read nor written."""

    def __init__(self) -> None:
        self.size = mmap.PAGESIZE
        self.map = mmap.mmap(-1, 2 * self.size)
        self.start = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.mprotect(ctypes.c_void_p(self.start + self.size), self.size, 0) == 0

    def last(self, num_bytes: int) -> int:
        return self.start + self.size - num_bytes

    def write(self, data: bytes) -> None:
        ctypes.memmove(self.last(len(data)), data, len(data))

    def read(self, num_bytes: int) -> bytes:
        return ctypes.string_at(self.last(num_bytes), num_bytes)


@pytest.mark.parametrize("form", ["copy_n", "copy_strided", "copy_mask"])
def test_partial_access_stays_inside(lib: ctypes.CDLL, form: str) -> None:
    source, target = EndOfMemory(), EndOfMemory()
    step = 2 if form == "copy_strided" else 1
    for name, dtype in {**SMALL_FLOATS, **COMPUTE_TYPES}.items():
        for n in range(lib.num_lanes() + 1):
            size = max(n * step - (step - 1), 0) * dtype.itemsize
            data = (
                bytes(i % 2 for i in range(size)) if name == "bool" else bytes(range(1, size + 1))
            )
            source.write(data)
            target.write(b"\0" * size)
            function = getattr(lib, f"{form}_{name}")
            function(ctypes.c_void_p(source.last(size)), ctypes.c_void_p(target.last(size)), n)
            width = dtype.itemsize * step
            got, want = target.read(size), data
            for i in range(n):
                one = slice(i * width, i * width + dtype.itemsize)
                assert got[one] == want[one], (name, n, i)


@pytest.mark.parametrize("name", [*SMALL_FLOATS, *COMPUTE_TYPES])
def test_stream(lib: ctypes.CDLL, name: str) -> None:
    width = {**SMALL_FLOATS, **COMPUTE_TYPES}[name].itemsize
    x = np.ones(1024 * width, np.uint8)
    for shift in (0, width):  # aligned or not
        room = np.zeros(2048 * width, np.uint8)
        start = (-room.ctypes.data % 64) + shift
        call(lib, f"stream_{name}", x, room[start:], 1024)
        assert room[start : start + len(x)].all() and room.sum() == len(x)


@pytest.mark.parametrize("name", [*SMALL_FLOATS, *COMPUTE_TYPES])
def test_transpose(lib: ctypes.CDLL, name: str) -> None:
    dtype = {**SMALL_FLOATS, **COMPUTE_TYPES}[name]
    kind = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[dtype.itemsize]
    for rows, cols in ((1, 1), (16, 16), (37, 50), (64, 33)):
        x = (np.arange(rows * cols) % 251).astype(kind).reshape(rows, cols)
        y = np.zeros((cols, rows), kind)
        getattr(lib, f"tile_{name}")(
            ctypes.c_void_p(x.ctypes.data), ctypes.c_void_p(y.ctypes.data), rows, cols
        )
        np.testing.assert_array_equal(y, x.T)


@pytest.mark.parametrize("bad", [-1, -(2**63), 5, 2**63 - 1])
def test_an_index_outside_is_reported_from_every_lane(lib: ctypes.CDLL, bad: int) -> None:
    lanes = lib.num_lanes()
    for n, lane in ((n, lane) for n in (lanes, 3) for lane in range(lanes)):
        at, status = np.arange(lanes, dtype=np.int64) % 5, np.zeros(1, np.int64)
        at[lane] = bad
        expected = np.where((np.arange(lanes) < n) & (np.arange(lanes) != lane), at, 0)
        call(lib, "checked_index", at, 5, status, n)
        np.testing.assert_array_equal(at, expected)
        assert (status[0] != 0) == (lane < n)


def test_across_lanes(lib: ctypes.CDLL) -> None:
    x, y = np.arange(1, 17, dtype=np.float32) / 4, np.zeros(6, np.float32)
    used = x[: lib.num_lanes()]
    call(lib, "across", x, y)
    np.testing.assert_allclose(y[:4], [used.sum(), used.prod(), used.min(), used.max()], rtol=1e-6)
    assert y[4] == 1 and y[5] == 1
    x[3] = np.nan
    call(lib, "across", x, y)
    assert np.isnan(y[:4]).all() and y[4] == 1 and y[5] == 0


# The known answers that come with the paper's own code: counter, key, result.
PHILOX = [
    (
        "00000000 00000000 00000000 00000000",
        "00000000 00000000",
        "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
    ),
    (
        "ffffffff ffffffff ffffffff ffffffff",
        "ffffffff ffffffff",
        "408f276d 41c83b0e a20bc7c6 6d5451fd",
    ),
    (
        "243f6a88 85a308d3 13198a2e 03707344",
        "a4093822 299f31d0",
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]


@pytest.mark.parametrize(("counter", "key", "result"), PHILOX)
def test_philox(lib: ctypes.CDLL, counter: str, key: str, result: str) -> None:
    words = np.array([int(w, 16) for w in counter.split()], np.uint32)
    k0, k1 = (int(w, 16) for w in key.split())
    lib.philox_words(ctypes.c_void_p(words.ctypes.data), ctypes.c_uint32(k0), ctypes.c_uint32(k1))
    assert [f"{w:08x}" for w in words] == result.split()


def test_random(lib: ctypes.CDLL) -> None:
    n = 1 << 16
    drawn = {}
    for form in ("random_v", "random_1"):
        u, g, k = np.empty(n, np.float32), np.empty(n, np.float32), np.empty(n, np.int64)
        call(lib, form, 1234, u, g, k, n)
        drawn[form] = (u, g, k)
    for v, one in zip(drawn["random_v"], drawn["random_1"], strict=True):
        np.testing.assert_array_equal(v, one)
    u, g, k = drawn["random_v"]
    assert u.min() >= 0 and u.max() < 1 and abs(u.mean() - 0.5) < 5 / np.sqrt(12 * n)
    assert (
        np.isfinite(g).all()
        and abs(g.mean()) < 5 / np.sqrt(n)
        and abs(g.var() - 1) < 10 / np.sqrt(n)
    )
    assert set(k.tolist()) == set(range(-5, 20))


@pytest.mark.parametrize("first", [0, 1, 2, 3, (1 << 34) - 6])
def test_random_rows(lib: ctypes.CDLL, first: int) -> None:
    """Neighbours drawn together are those drawn one by one, wherever a row begins."""
    n = 256
    row, single = np.empty(n, np.float32), np.empty(n, np.float32)
    call(lib, "random_row", 1234, row, first, n)
    for i in range(n):
        one = np.empty(1, np.float32)
        call(lib, "random_one", 1234, one, first + i)
        single[i] = one[0]
    np.testing.assert_array_equal(row, single)
    assert len(set(row.tolist())) > n - 4
