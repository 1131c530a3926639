// Matrix multiplication: blocked, packed and register-tiled, for template kernels. Included after simd_reduce.h.
//
// A thread owns a rectangle of the result and computes it in blocks of `block_rows` x `block_columns`. A block is summed
// in float32 in scratch memory that the caches hold, padded to whole register tiles, so that no tile needs a mask; then
// `finish(block, ld, row, column, rows, columns)` reads it once: bias, activation, conversion and store.

namespace pf {

// An operand: element (i, j) is at p[i * down + j * across].
template <class S> struct Matrix {
  const S* p;
  int64_t down, across;
};

typedef native<float> floats;
constexpr int native_lanes = native_bytes / sizeof(float);

PF_FN floats multiply_add(floats a, floats b, floats c) {
#ifdef PF_HAS_FMA
  return native_fma(a, b, c);
#else
  return a * b + c;
#endif
}
PF_FN floats load_floats(const float* p) {
  floats r;
  __builtin_memcpy(&r, p, sizeof r);
  return r;
}
PF_FN void store_floats(float* p, floats v) { __builtin_memcpy(p, &v, sizeof v); }

PF_FN int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
PF_FN int64_t round_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

// ---- how a thread's share is cut -----------------------------------------------------------------

struct Range {
  int64_t begin, end;
};
// Share `part` of `parts` of n, in whole steps.
PF_FN Range share_of(int64_t n, int64_t step, int part, int parts) {
  const int64_t steps = (n + step - 1) / step;
  return {least(steps * part / parts * step, n), least(steps * (part + 1) / parts * step, n)};
}

// Threads side by side along the rows: the divisor of `threads` with which a thread reads the fewest rows and columns.
PF_FN int threads_down(int threads, int64_t rows, int64_t columns, int64_t row_step, int64_t column_step) {
  int best = 1;
  int64_t best_cost = -1;
  for (int down = 1; down <= threads; down++) {
    if (threads % down) continue;
    const int64_t tall = round_up((rows + down - 1) / down, row_step);
    const int64_t wide = round_up((columns + threads / down - 1) / (threads / down), column_step);
    const int64_t cost = tall * wide * 64 + (tall + wide) * 1024;
    if (best_cost < 0 || cost < best_cost) { best = down; best_cost = cost; }
  }
  return best;
}

// ---- packing -------------------------------------------------------------------------------------

// `rows` x `depth` of `a` as rows of `ld` floats that lie one after another; rows up to `padded` are 0.
template <class S>
PF_FN void pack_rows(Matrix<S> a, int64_t rows, int64_t depth, float* to, int64_t ld, int64_t padded) {
  for (int64_t i = 0; i < rows; i++) {
    const S* from = a.p + i * a.down;
    float* out = to + i * ld;
    if (a.across == 1) {
      int64_t k = 0;
      for (; k + lanes <= depth; k += lanes) storev<float>(out + k, cast<float>(loadv<S>(from + k)));
      for (; k < depth; k++) out[k] = cast<float>(load1<S>(from + k));
    } else {
      for (int64_t k = 0; k < depth; k++) out[k] = cast<float>(load1<S>(from + k * a.across));
    }
  }
  for (int64_t i = rows; i < padded; i++)
    for (int64_t k = 0; k < depth; k++) to[i * ld + k] = 0;
}

// A square of `lanes` x `lanes` elements whose rows are `from_step` apart, transposed: to[c * to_step + r].
template <class S> PF_FN void widen_transposed(const S* from, int64_t from_step, float* to, int64_t to_step) {
  vec<float> row[lanes];
#pragma GCC unroll 16
  for (int i = 0; i < lanes; i++) row[i] = cast<float>(loadv<S>(from + i * from_step));
  if constexpr (lanes == 16) exchange_rows<lanes / 2>(row);
  exchange_rows<4>(row);
  exchange_rows<2>(row);
  exchange_rows<1>(row);
#pragma GCC unroll 16
  for (int i = 0; i < lanes; i++) storev<float>(to + i * to_step, row[i]);
}

// `depth` x `columns` of `b`, columns <= WIDE, as `depth` rows of WIDE floats; missing columns are 0.
template <int WIDE, class S> PF_FN void pack_sliver(Matrix<S> b, int64_t depth, int64_t columns, float* to) {
  if (columns == WIDE && b.across == 1) {
    for (int64_t k = 0; k < depth; k++)
#pragma GCC unroll 8
      for (int j = 0; j < WIDE; j += lanes) storev<float>(to + k * WIDE + j, cast<float>(loadv<S>(b.p + k * b.down + j)));
    return;
  }
  int64_t whole = 0;
  if (columns == WIDE && b.down == 1) {
    whole = depth - depth % lanes;
    for (int64_t k = 0; k < whole; k += lanes)
      for (int j = 0; j < WIDE; j += lanes) widen_transposed(b.p + k + j * b.across, b.across, to + k * WIDE + j, WIDE);
  }
  for (int64_t k = whole; k < depth; k++)
    for (int j = 0; j < WIDE; j++)
      to[k * WIDE + j] = j < columns ? cast<float>(load1<S>(b.p + k * b.down + j * b.across)) : 0;
}

// ---- the register tile ---------------------------------------------------------------------------

// c[R][V vectors] (+)= a[R][depth] b[depth][V vectors]; rows of `a` are `lda` floats apart.
template <int R, int V>
PF_FN void tile(int64_t depth, const float* __restrict a, int64_t lda, const float* __restrict b, int64_t ldb,
                float* __restrict c, int64_t ldc, bool adds) {
  floats sum[R][V] = {};
#pragma GCC unroll 4
  for (int64_t k = 0; k < depth; k++) {
    floats right[V];
#pragma GCC unroll 8
    for (int j = 0; j < V; j++) right[j] = load_floats(b + k * ldb + j * native_lanes);
#pragma GCC unroll 16
    for (int i = 0; i < R; i++) {
      const floats left = a[i * lda + k] - floats{};
#pragma GCC unroll 8
      for (int j = 0; j < V; j++) sum[i][j] = multiply_add(left, right[j], sum[i][j]);
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < R; i++)
#pragma GCC unroll 8
    for (int j = 0; j < V; j++) {
      float* at = c + i * ldc + j * native_lanes;
      store_floats(at, adds ? load_floats(at) + sum[i][j] : sum[i][j]);
    }
}

// ---- large matrices: both operands packed --------------------------------------------------------

// The tile of registers (R rows, V vectors), the depth of a packed part, and the block that is finished at once.
template <int R, int V, int DEPTH, int ROWS, int COLUMNS> struct Blocking {
  static constexpr int tile_rows = R, vectors = V, tile_columns = V * native_lanes;
  static constexpr int depth = DEPTH, block_rows = ROWS, block_columns = COLUMNS;
  // Rows of the packed left operand: 16 floats more, lest all of them fall on the same lines of the cache.
  static constexpr int lda = DEPTH + 16;
  static_assert(ROWS % R == 0 && COLUMNS % (V * native_lanes) == 0, "blocks are whole tiles");
};

template <class X> PF_CALLED void multiply_block(int64_t depth, const float* a, const float* b, float* c, int64_t rows,
                                                 int64_t columns, bool adds) {
  for (int64_t j = 0; j < columns; j += X::tile_columns)
    for (int64_t i = 0; i < rows; i += X::tile_rows)
      tile<X::tile_rows, X::vectors>(depth, a + i * X::lda, X::lda, b + j * depth, X::tile_columns,
                                     c + i * X::block_columns + j, X::block_columns, adds);
}

// One thread's rectangle of a @ b.
template <class X, class SA, class SB, class F>
PF_FN void multiply_packed(Matrix<SA> a, Matrix<SB> b, int64_t depth, Range rows, Range columns, F finish) {
  constexpr int64_t a_floats = int64_t(X::block_rows) * X::lda, c_floats = int64_t(X::block_rows) * X::block_columns;
  float* const left = (float*)scratch(1, 4 * (a_floats + c_floats + depth * X::block_columns));
  float* const block = left + a_floats;
  float* const right = block + c_floats;
  for (int64_t j0 = columns.begin; j0 < columns.end; j0 += X::block_columns) {
    const int64_t wide = least(columns.end - j0, X::block_columns), padded_wide = round_up(wide, X::tile_columns);
    for (int64_t k0 = 0; k0 < depth; k0 += X::depth) {
      const int64_t deep = least(depth - k0, X::depth);
      for (int64_t j = 0; j < wide; j += X::tile_columns) {
        const Matrix<SB> sliver = {b.p + k0 * b.down + (j0 + j) * b.across, b.down, b.across};
        pack_sliver<X::tile_columns>(sliver, deep, least(wide - j, X::tile_columns), right + k0 * padded_wide + j * deep);
      }
    }
    for (int64_t i0 = rows.begin; i0 < rows.end; i0 += X::block_rows) {
      const int64_t tall = least(rows.end - i0, X::block_rows), padded_tall = round_up(tall, X::tile_rows);
      int64_t k0 = 0;
      do {
        const int64_t deep = least(depth - k0, X::depth);
        const Matrix<SA> part = {a.p + i0 * a.down + k0 * a.across, a.down, a.across};
        pack_rows(part, tall, deep, left, X::lda, padded_tall);
        multiply_block<X>(deep, left, right + k0 * padded_wide, block, padded_tall, padded_wide, k0 > 0);
        k0 += X::depth;
      } while (k0 < depth);
      finish(block, X::block_columns, i0, j0, tall, wide);
    }
  }
}

template <class X, class SA, class SB, class F>
PF_FN void gemm_packed(Matrix<SA> a, Matrix<SB> b, int64_t rows, int64_t columns, int64_t depth, int threads, F finish) {
  parallel(threads, [=](int thread, int count) PF_INLINED {
    const int down = threads_down(count, rows, columns, X::tile_rows, X::tile_columns);
    const Range own_rows = share_of(rows, X::tile_rows, thread % down, down);
    const Range own_columns = share_of(columns, X::tile_columns, thread / down, count / down);
    multiply_packed<X>(a, b, depth, own_rows, own_columns, finish);
  });
}

}  // namespace pf
