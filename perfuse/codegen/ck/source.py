"""`ck_source`: the C++ that launches one instance of Composable Kernel, for any sizes.

Sizes, strides and factors are arguments: one library serves every matmul that the instance and the
kind of epilogue fit. Only types that are used are named, since older headers lack newer ones.
"""

from __future__ import annotations

from dataclasses import dataclass

from perfuse.codegen.ck.instance import Instance, spelled
from perfuse.codegen.ck.problem import CkProblem
from perfuse.codegen.triton.sources import RUN, WORKSPACE
from perfuse.codegen.writer import Writer

MOST_POINTERS = 6  # A, B, a bias, two scales, C
REFUSED = -23  # the code of a launch that CK does not support

# Positions in the table of sizes that both functions take.
SIZES = (
    *("M", "N", "K", "Batch", "StrideA", "StrideB", "StrideD", "StrideC"),
    *("BatchStrideA", "BatchStrideB", "BatchStrideD", "BatchStrideC", "KBatch"),
)
FACTORS = ("alpha", "beta")

_TYPES = {
    "F16": "ck::half_t",
    "BF16": "ck::bhalf_t",
    "F8": "ck::f8_t",
    "F32": "float",
    "I4": "ck::pk_i4_t",
}
_LAYOUTS = {"Row": "RowMajor", "Col": "ColumnMajor"}


@dataclass(frozen=True, slots=True)
class CkEpilogue:
    """The rest of a matmul: alpha, a bias with beta, scales of one element."""

    bias_dtype: str = ""  # "" without a bias
    bias_vector: int = 1  # elements of the bias that are read at once
    has_alpha: bool = False
    is_scaled: bool = False

    @property
    def is_plain(self) -> bool:
        return not (self.bias_dtype or self.has_alpha or self.is_scaled)


def epilogue_of(problem: CkProblem, instance: Instance) -> CkEpilogue:
    """The epilogue that a problem needs, with the widest reads that its bias allows."""
    d = problem.d
    vector = instance.c_vector
    is_whole = d is not None and not any(n % vector for n in (d.stride, d.batch_stride, d.offset))
    return CkEpilogue(
        "" if d is None else d.dtype,
        vector if is_whole else 1,
        problem.alpha != 1.0,
        problem.is_scaled,
    )


def size_table(problem: CkProblem, k_batch: int = 1) -> tuple[int, ...]:
    """The values of `SIZES` for a problem."""
    p, d = problem, problem.d
    strides = (p.a.stride, p.b.stride, 0 if d is None else d.stride, p.c.stride)
    of_batch = (p.a.batch_stride, p.b.batch_stride, 0 if d is None else d.batch_stride)
    return (p.m, p.n, p.k, p.batch or 1, *strides, *of_batch, p.c.batch_stride, k_batch)


def ck_source(instance: Instance, epilogue: CkEpilogue, *, is_batched: bool) -> str:
    """The text of the launcher: workspace query with support check, and the launch."""
    w = Writer()
    w.line(f"// {instance.name}")
    for line in _includes(is_batched):
        w.line(line)
    w.line("")
    w.line("namespace {")
    w.line("")
    for line in _names(instance, epilogue):
        w.line(line)
    w.line("")
    if not epilogue.is_plain:
        _write_epilogue(w, epilogue)
    _write_type(w, instance, epilogue, is_batched)
    _write_argument(w, epilogue, is_batched)
    w.line("}  // namespace")
    w.line("")
    return w.text() + _FUNCTIONS


def _includes(is_batched: bool) -> list[str]:
    device = "ck/tensor_operation/gpu/device"
    kind = "batched_gemm" if is_batched else "gemm"
    return [
        "#include <array>",
        "#include <cstdint>",
        "#include <exception>",
        "#include <hip/hip_runtime.h>",
        '#include "ck/ck.hpp"',
        '#include "ck/stream_config.hpp"',
        f'#include "{device}/tensor_layout.hpp"',
        f'#include "{device}/gemm_specialization.hpp"',
        '#include "ck/tensor_operation/gpu/element/element_wise_operation.hpp"',
        f'#include "{device}/impl/device_{kind}_multiple_d_xdl_cshuffle_v3.hpp"',
    ]


def _names(instance: Instance, epilogue: CkEpilogue) -> list[str]:
    i = instance
    types = {i.a_dtype, i.b_dtype, i.c_dtype, i.accumulator_dtype, i.shuffle_dtype}
    types |= {i.a_compute_dtype, i.b_compute_dtype, epilogue.bias_dtype} - {""}
    layouts = {i.a_layout, i.b_layout, i.c_layout, "Row" if epilogue.bias_dtype else i.c_layout}
    lines = [f"using {name} = {_TYPES[name]};" for name in sorted(types)]
    lines += [f"using {n} = ck::tensor_layout::gemm::{_LAYOUTS[n]};" for n in sorted(layouts)]
    lines += [
        "using PassThrough = ck::tensor_operation::element_wise::PassThrough;",
        "using ck::BlockGemmPipelineScheduler;",
        "using ck::BlockGemmPipelineVersion;",
        "using ck::tensor_operation::device::GemmSpecialization;",
        "template <ck::index_t... Is> using S = ck::Sequence<Is...>;",
    ]
    return lines


def _write_epilogue(w: Writer, epilogue: CkEpilogue) -> None:
    has_bias = bool(epilogue.bias_dtype)
    value = "ck::type_convert<float>(c)"
    value = f"alpha * {value}" if epilogue.has_alpha else value
    value = f"{value} * *scale_a * *scale_b" if epilogue.is_scaled else value
    value = f"{value} + beta * ck::type_convert<float>(d)" if has_bias else value
    w.line("// Computed in float of each element of the tile in shared memory.")
    with w.block("struct Epilogue {", "};"):
        w.line("float alpha, beta;")
        if epilogue.is_scaled:
            w.line("const float *scale_a, *scale_b;  // one element each, in the GPU's memory")
        kinds, given = ["E", "C"], ["E &e", "const C &c"]
        if has_bias:
            kinds, given = [*kinds, "D"], [*given, "const D &d"]
        w.line(f"template <{', '.join(f'typename {kind}' for kind in kinds)}>")
        head = f"__host__ __device__ constexpr void operator()({', '.join(given)}) const"
        with w.block(f"{head} {{"):
            w.line(f"e = ck::type_convert<E>({value});")
    w.line("")


def _write_type(w: Writer, instance: Instance, epilogue: CkEpilogue, is_batched: bool) -> None:
    name = "DeviceBatchedGemmMultiD_Xdl_CShuffle_V3" if is_batched else ""
    name = name or "DeviceGemmMultiD_Xdl_CShuffle_V3"
    w.line(f"using Gemm = ck::tensor_operation::device::{name}<")
    rows = _arguments(instance, epilogue)
    for number, (comment, cells) in enumerate(rows):
        end = ">;" if number == len(rows) - 1 else ","
        w.line(f"    {', '.join(cells)}{end}  // {comment}")
    w.line("")


def _arguments(i: Instance, epilogue: CkEpilogue) -> list[tuple[str, list[str]]]:
    """The template arguments in order, in lines with a comment each."""
    bias = epilogue.bias_dtype
    c_op = "PassThrough" if epilogue.is_plain else "Epilogue"
    d_layouts = "ck::Tuple<Row>" if bias else "ck::Tuple<>"
    vectors = (i.c_vector, epilogue.bias_vector) if bias else (i.c_vector,)
    compute = [name for name in (i.a_compute_dtype, i.b_compute_dtype) if name]
    return [
        ("layouts of A, B, D, C", [i.a_layout, i.b_layout, d_layouts, i.c_layout]),
        ("types of A, B, D, C", [i.a_dtype, i.b_dtype, f"ck::Tuple<{bias}>", i.c_dtype]),
        ("accumulator, tile of C in shared memory", [i.accumulator_dtype, i.shuffle_dtype]),
        ("functions of elements of A, B, C", [i.a_op, i.b_op, c_op]),
        ("padding, threads of a block", [i.padding, spelled(i.block_size)]),
        ("tile: M, N, K", _cells(i.m_per_block, i.n_per_block, i.k_per_block)),
        ("contiguous K of A and B in shared memory", _cells(i.a_k1, i.b_k1)),
        ("M and N of a matrix instruction", _cells(i.m_per_xdl, i.n_per_xdl)),
        ("matrix instructions of a wave", _cells(i.m_xdl_per_wave, i.n_xdl_per_wave)),
        ("threads that copy A", _cells(i.a_cluster, i.a_cluster_order, i.a_source_order)),
        ("vectors of A", _cells(i.a_vector_dim, i.a_vector, i.a_store_vector, i.a_extra)),
        ("threads that copy B", _cells(i.b_cluster, i.b_cluster_order, i.b_source_order)),
        ("vectors of B", _cells(i.b_vector_dim, i.b_vector, i.b_store_vector, i.b_extra)),
        ("how C is stored, and D read", _cells(i.m_shuffle, i.n_shuffle, i.c_cluster, vectors)),
        ("pipeline", [i.scheduler, i.version, *compute]),
    ]


def _cells(*values: int | tuple[int, ...]) -> list[str]:
    return [spelled(value) for value in values]


def _write_argument(w: Writer, epilogue: CkEpilogue, is_batched: bool) -> None:
    pointers = iter(range(MOST_POINTERS))
    a, b = next(pointers), next(pointers)
    ds = [next(pointers)] if epilogue.bias_dtype else []
    scales = [next(pointers), next(pointers)] if epilogue.is_scaled else []
    c, num_ds = next(pointers), len(ds)
    w.line("// Positions in the table of sizes.")
    w.line(f"enum Size {{ {', '.join(SIZES[:8])},")
    w.line(f"            {', '.join(SIZES[8:])} }};")
    w.line("")
    head = "auto argument(void *const *pointers, const int64_t *sizes, const double *factors)"
    with w.block(f"{head} {{"):
        w.line("const auto size = [&](Size at) { return static_cast<ck::index_t>(sizes[at]); };")
        d_pointers = ", ".join(f"pointers[{place}]" for place in ds)
        w.line(f"const std::array<const void *, {num_ds}> ds{{{d_pointers}}};")
        w.line(f"const std::array<ck::index_t, {num_ds}> strides{{{_of_ds('StrideD', ds)}}};")
        of_batch = []
        if is_batched:
            values = _of_ds("BatchStrideD", ds)
            w.line(f"const std::array<ck::index_t, {num_ds}> batch_strides{{{values}}};")
            of_batch = ["size(BatchStrideA)", "size(BatchStrideB)", "batch_strides"]
            of_batch += ["size(BatchStrideC)"]
        sizes = ["size(M)", "size(N)", "size(K)", *(["size(Batch)"] if is_batched else [])]
        strides = ["size(StrideA)", "size(StrideB)", "strides", "size(StrideC)"]
        w.line(f"const {_epilogue_value(epilogue, scales)};")
        split = [] if is_batched else ["size(KBatch)"]
        w.line(f"return Gemm::MakeArgument(pointers[{a}], pointers[{b}], ds, pointers[{c}],")
        w.line(f"                          {', '.join(sizes)},")
        w.line(f"                          {', '.join([*strides, *of_batch, *split])},")
        w.line("                          PassThrough{}, PassThrough{}, epilogue);")
    w.line("")


def _of_ds(name: str, ds: list[int]) -> str:
    return f"size({name})" if ds else ""


def _epilogue_value(epilogue: CkEpilogue, scales: list[int]) -> str:
    if epilogue.is_plain:
        return "PassThrough epilogue{}"
    parts = [f"static_cast<float>(factors[{k}])" for k in range(len(FACTORS))]
    parts += [f"static_cast<const float *>(pointers[{place}])" for place in scales]
    return f"Epilogue epilogue{{{', '.join(parts)}}}"


_FUNCTIONS = f"""// Bytes of workspace that a launch needs; -1 where CK does not support it.
extern "C" int64_t {WORKSPACE}(const int64_t *sizes, const double *factors) {{
  void *const none[{MOST_POINTERS}] = {{}};
  const auto made = argument(none, sizes, factors);
  if (!Gemm::IsSupportedArgument(made)) return -1;
  return static_cast<int64_t>(Gemm{{}}.GetWorkSpaceSize(&made));
}}

// Launches on a stream: pointers to A, B, what the epilogue reads, and C. 0, or an error code.
extern "C" int {RUN}(void *const *pointers, const int64_t *sizes, const double *factors,
                     void *workspace, void *stream) {{
  const StreamConfig on{{static_cast<hipStream_t>(stream), false, 0}};
  auto made = argument(pointers, sizes, factors);
  if (workspace) Gemm{{}}.SetWorkSpacePointer(&made, workspace, on);
  try {{
    Gemm::MakeInvoker().Run(made, on);
  }} catch (const std::exception &) {{
    return {REFUSED};
  }}
  return static_cast<int>(hipGetLastError());
}}
"""
