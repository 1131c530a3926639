// ck f8xf8->bf16 RCR 16x32x128 v1 interwave MNK 4c5676
#include <array>
#include <cstdint>
#include <exception>
#include <hip/hip_runtime.h>
#include "ck/ck.hpp"
#include "ck/stream_config.hpp"
#include "ck/tensor_operation/gpu/device/tensor_layout.hpp"
#include "ck/tensor_operation/gpu/device/gemm_specialization.hpp"
#include "ck/tensor_operation/gpu/element/element_wise_operation.hpp"
#include "ck/tensor_operation/gpu/device/impl/device_gemm_multiple_d_xdl_cshuffle_v3.hpp"

namespace {

using BF16 = ck::bhalf_t;
using F32 = float;
using F8 = ck::f8_t;
using Col = ck::tensor_layout::gemm::ColumnMajor;
using Row = ck::tensor_layout::gemm::RowMajor;
using PassThrough = ck::tensor_operation::element_wise::PassThrough;
using ck::BlockGemmPipelineScheduler;
using ck::BlockGemmPipelineVersion;
using ck::tensor_operation::device::GemmSpecialization;
template <ck::index_t... Is> using S = ck::Sequence<Is...>;

// Computed in float of each element of the tile in shared memory.
struct Epilogue {
  float alpha, beta;
  const float *scale_a, *scale_b;  // one element each, in the GPU's memory
  template <typename E, typename C>
  __host__ __device__ constexpr void operator()(E &e, const C &c) const {
    e = ck::type_convert<E>(ck::type_convert<float>(c) * *scale_a * *scale_b);
  }
};

using Gemm = ck::tensor_operation::device::DeviceGemmMultiD_Xdl_CShuffle_V3<
    Row, Col, ck::Tuple<>, Row,  // layouts of A, B, D, C
    F8, F8, ck::Tuple<>, BF16,  // types of A, B, D, C
    F32, BF16,  // accumulator, tile of C in shared memory
    PassThrough, PassThrough, Epilogue,  // functions of elements of A, B, C
    GemmSpecialization::MNKPadding, 128,  // padding, threads of a block
    16, 32, 128,  // tile: M, N, K
    16, 16,  // contiguous K of A and B in shared memory
    16, 16,  // M and N of a matrix instruction
    1, 1,  // matrix instructions of a wave
    S<8, 16, 1>, S<1, 0, 2>, S<1, 0, 2>,  // threads that copy A
    2, 16, 16, 0,  // vectors of A
    S<8, 16, 1>, S<1, 0, 2>, S<1, 0, 2>,  // threads that copy B
    2, 16, 16, 0,  // vectors of B
    1, 1, S<1, 16, 1, 8>, S<4>,  // how C is stored, and D read
    BlockGemmPipelineScheduler::Interwave, BlockGemmPipelineVersion::v1, F8>;  // pipeline

// Positions in the table of sizes.
enum Size { M, N, K, Batch, StrideA, StrideB, StrideD, StrideC,
            BatchStrideA, BatchStrideB, BatchStrideD, BatchStrideC, KBatch };

auto argument(void *const *pointers, const int64_t *sizes, const double *factors) {
  const auto size = [&](Size at) { return static_cast<ck::index_t>(sizes[at]); };
  const std::array<const void *, 0> ds{};
  const std::array<ck::index_t, 0> strides{};
  const Epilogue epilogue{static_cast<float>(factors[0]), static_cast<float>(factors[1]), static_cast<const float *>(pointers[2]), static_cast<const float *>(pointers[3])};
  return Gemm::MakeArgument(pointers[0], pointers[1], ds, pointers[4],
                            size(M), size(N), size(K),
                            size(StrideA), size(StrideB), strides, size(StrideC), size(KBatch),
                            PassThrough{}, PassThrough{}, epilogue);
}

}  // namespace

// Bytes of workspace that a launch needs; -1 where CK does not support it.
extern "C" int64_t pf_host_workspace(const int64_t *sizes, const double *factors) {
  void *const none[6] = {};
  const auto made = argument(none, sizes, factors);
  if (!Gemm::IsSupportedArgument(made)) return -1;
  return static_cast<int64_t>(Gemm{}.GetWorkSpaceSize(&made));
}

// Launches on a stream: pointers to A, B, what the epilogue reads, and C. 0, or an error code.
extern "C" int pf_host_run(void *const *pointers, const int64_t *sizes, const double *factors,
                     void *workspace, void *stream) {
  const StreamConfig on{static_cast<hipStream_t>(stream), false, 0};
  auto made = argument(pointers, sizes, factors);
  if (workspace) Gemm{}.SetWorkSpacePointer(&made, workspace, on);
  try {
    Gemm::MakeInvoker().Run(made, on);
  } catch (const std::exception &) {
    return -23;
  }
  return static_cast<int>(hipGetLastError());
}
