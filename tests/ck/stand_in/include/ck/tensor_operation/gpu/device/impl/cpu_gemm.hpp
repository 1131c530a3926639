// A stand-in: loops on a CPU for the universal GEMM, with CK's limits and CK's traps.
//
// A split of the depth clears C as if it were contiguous, and each part applies the epilogue and
// adds its result in C's type, as CK does. Sums are rounded to the type of the tile in shared
// memory before an epilogue reads them. Included once for each name, CK_STAND_IN.

#include "ck/tensor_operation/gpu/device/impl/cpu_gemm_common.hpp"

namespace ck::tensor_operation::device {

template <typename ALayout, typename BLayout, typename DsLayout, typename CLayout, typename A,
          typename B, typename Ds, typename C, typename Acc, typename CShuffle, typename AOp,
          typename BOp, typename COp, GemmSpecialization Spec, index_t BlockSize, index_t MPerBlock,
          index_t NPerBlock, index_t KPerBlock, index_t AK1, index_t BK1, index_t MPerXDL,
          index_t NPerXDL, index_t MXdlPerWave, index_t NXdlPerWave, typename ACluster,
          typename AOrder, typename ASourceOrder, index_t AVectorDim, index_t AVector,
          index_t AStoreVector, bool AExtra, typename BCluster, typename BOrder,
          typename BSourceOrder, index_t BVectorDim, index_t BVector, index_t BStoreVector,
          bool BExtra, index_t MShuffle, index_t NShuffle, typename CCluster, typename CVectors,
          BlockGemmPipelineScheduler Scheduler = BlockGemmPipelineScheduler::Intrawave,
          BlockGemmPipelineVersion Version = BlockGemmPipelineVersion::v1,
          typename ComputeA = C, typename ComputeB = ComputeA>
struct CK_STAND_IN {
  static constexpr index_t num_d = Ds::Size();
  static_assert(CVectors::Size() == num_d + 1, "a vector for C and one for each D");
  static_assert((KPerBlock / AK1 / ACluster::At(0)) > 0 && (KPerBlock / BK1 / BCluster::At(0)) > 0,
                "a thread copies something");
  using D = typename First<Ds>::type;

  struct Argument : BaseArgument {
    const void *a, *b;
    std::array<const void *, num_d> ds;
    void *c;
    index_t M, N, K, Batch, StrideA, StrideB;
    std::array<index_t, num_d> StrideDs;
    index_t StrideC, BatchStrideA, BatchStrideB;
    std::array<index_t, num_d> BatchStrideDs;
    index_t BatchStrideC, KBatch;
    COp c_op;
  };

  static index_t Stages() {
    using V = BlockGemmPipelineVersion;
    if (Version == V::v1) return 1;
    if (Version == V::v3) return 2;
    if (Version == V::v4) return 4;
    if (Version == V::v5) return 3;
    index_t groups = BlockSize >= 256 ? 1 : 256 / BlockSize;
    index_t bytes = (MPerBlock * sizeof(A) + NPerBlock * sizeof(B)) * KPerBlock;
    index_t wanted = (32768 / groups + bytes - 1) / bytes;
    return wanted < 2 ? 2 : wanted > 8 ? 8 : wanted;
  }

  static bool IsSupportedArgument(const Argument &x) {
    index_t split = x.KBatch * KPerBlock;
    if (PadsK(Spec)) {
      index_t step = std::lcm(AK1, BK1);
      index_t part = (x.K + x.KBatch * step - 1) / (x.KBatch * step) * step;
      if (part * (x.KBatch - 1) >= x.K) return false;
    } else if (x.K % AK1 || x.K % BK1 || x.K % split) {
      return false;
    }
    if (!ALayout::is_row && !PadsM(Spec) && x.M % MPerBlock) return false;
    if (BLayout::is_row && !PadsN(Spec) && x.N % NPerBlock) return false;
    if ((ALayout::is_row ? x.K : x.M) % AVector) return false;
    if ((BLayout::is_row ? x.N : x.K) % BVector) return false;
    if ((CLayout::is_row ? x.N : x.M) % CVectors::At(0)) return false;
    index_t loops = (x.K + split - 1) / split;
    return Version == BlockGemmPipelineVersion::v1 || loops > Stages();
  }

  size_t GetWorkSpaceSize(const BaseArgument *) const { return 0; }
  void SetWorkSpacePointer(BaseArgument *, void *, const StreamConfig &) const {}

  template <typename T, typename Layout>
  static float At(const void *p, int64_t start, index_t row, index_t column, index_t stride) {
    int64_t place = Layout::is_row ? int64_t(row) * stride + column : int64_t(column) * stride + row;
    return to_float(static_cast<const T *>(p)[start + place]);
  }

  static void Store(const Argument &x, index_t batch, index_t m, index_t n, float sum, bool is_added) {
    int64_t place = int64_t(batch) * x.BatchStrideC +
                    (CLayout::is_row ? int64_t(m) * x.StrideC + n : int64_t(n) * x.StrideC + m);
    C *to = static_cast<C *>(x.c) + place, made;
    const CShuffle tile = type_convert<CShuffle>(sum);
    if constexpr (num_d == 0) {
      x.c_op(made, tile);
    } else {
      const D *d = static_cast<const D *>(x.ds[0]) + int64_t(batch) * x.BatchStrideDs[0];
      x.c_op(made, tile, d[int64_t(m) * x.StrideDs[0] + n]);
    }
    *to = is_added ? type_convert<C>(to_float(*to) + to_float(made)) : made;
  }

  // Four steps of depth at a time: tests multiply matrices of some size.
  static void Slice(const Argument &x, index_t batch, index_t first, index_t last) {
    int64_t at_a = int64_t(batch) * x.BatchStrideA, at_b = int64_t(batch) * x.BatchStrideB;
    index_t depth = (last - first + 3) / 4 * 4;
    std::vector<float> b(size_t(depth) * x.N), a(depth), sums(x.N);
    for (index_t k = first; k < last; ++k)
      for (index_t n = 0; n < x.N; ++n)
        b[size_t(k - first) * x.N + n] = At<B, BLayout>(x.b, at_b, k, n, x.StrideB);
    for (index_t m = 0; m < x.M; ++m) {
      for (index_t k = first; k < last; ++k)
        a[k - first] = At<A, ALayout>(x.a, at_a, m, k, x.StrideA);
      std::fill(sums.begin(), sums.end(), 0.0f);
      for (index_t k = 0; k < depth; k += 4) {
        const float *r = &b[size_t(k) * x.N];
        float *to = sums.data();
        for (index_t n = 0; n < x.N; ++n)
          to[n] += a[k] * r[n] + a[k + 1] * r[x.N + n] + a[k + 2] * r[2 * x.N + n] +
                   a[k + 3] * r[3 * x.N + n];
      }
      for (index_t n = 0; n < x.N; ++n) Store(x, batch, m, n, sums[n], x.KBatch > 1);
    }
  }

  struct Invoker {
    float Run(const Argument &x, const StreamConfig & = StreamConfig{}) {
      if (!IsSupportedArgument(x)) throw std::runtime_error("unsupported sizes");
      if (x.KBatch > 1) std::memset(x.c, 0, size_t(x.M) * x.N * sizeof(C));
      index_t part = (x.K + x.KBatch - 1) / x.KBatch;
      for (index_t batch = 0; batch < x.Batch; ++batch)
        for (index_t k = 0; k < x.K; k += part) Slice(x, batch, k, std::min(x.K, k + part));
      return 0;
    }
  };
  static Invoker MakeInvoker() { return {}; }

  using Pointers = std::array<const void *, num_d>;
  using Numbers = std::array<index_t, num_d>;

  static Argument MakeArgument(const void *a, const void *b, Pointers ds, void *c, index_t m,
                               index_t n, index_t k, index_t stride_a, index_t stride_b,
                               Numbers stride_ds, index_t stride_c, index_t k_batch, AOp, BOp,
                               COp c_op) {
    return {{}, a, b, ds, c, m, n, k, 1, stride_a, stride_b, stride_ds, stride_c, 0, 0, {}, 0,
            k_batch, c_op};
  }

  static Argument MakeArgument(const void *a, const void *b, Pointers ds, void *c, index_t m,
                               index_t n, index_t k, index_t batch, index_t stride_a,
                               index_t stride_b, Numbers stride_ds, index_t stride_c,
                               index_t batch_a, index_t batch_b, const Numbers &batch_ds,
                               index_t batch_c, AOp, BOp, COp c_op, index_t k_batch = 1) {
    return {{}, a, b, ds, c, m, n, k, batch, stride_a, stride_b, stride_ds, stride_c, batch_a,
            batch_b, batch_ds, batch_c, k_batch, c_op};
  }
};

}  // namespace ck::tensor_operation::device
