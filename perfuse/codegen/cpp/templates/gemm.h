// Matrix multiplication: blocked, packed and register-tiled, for template kernels. Included after simd_reduce.h.
//
// A thread owns a rectangle of the result and computes it in blocks of `block_rows` x `block_columns`. A block is summed
// in float32 in scratch memory that the caches hold, padded to whole register tiles, so that no tile needs a mask; then
// `finish(block, ld, row, column, rows, columns)` reads it once: bias, activation, conversion and store.

namespace pf {

template <bool B> struct Flag {
  static constexpr bool value = B;
};

// An operand: element (i, j) is at p[i * down + j * across].
template <class S> struct Matrix {
  typedef S Element;
  static constexpr bool is_computed = false;
  const S* p;
  int64_t down, across;
  // Rows from k on of the columns from j on.
  template <bool NATIVE> __attribute__((always_inline)) Matrix columns(S*, int64_t, int64_t k, int64_t, int64_t j, int64_t) const {
    return {p + k * down + j * across, down, across};
  }
};

// A right operand that is computed where it is needed: `fill(native, to, ld, k, deep, j, wide)` writes `deep` rows of `wide`
// columns, which are contiguous and `ld` apart.
template <class S, class F> struct Computed {
  typedef S Element;
  static constexpr bool is_computed = true;
  F fill;
  template <bool NATIVE>
  __attribute__((always_inline)) Matrix<S> columns(S* room, int64_t ld, int64_t k, int64_t deep, int64_t j, int64_t wide) const {
    fill(Flag<NATIVE>{}, room, ld, k, deep, j, wide);
    return {room, 1, ld};
  }
};

// Elements in the type that is summed in.
template <class S> PF_FN vec<float> load_floats(const S* p) { return cast<float>(loadv<S>(p)); }
template <class S> PF_FN float load_float(const S* p) { return cast<float>(load1<S>(p)); }

PF_FN int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
PF_FN int64_t round_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

// A vector into memory of a narrower type. By name, as the products of pairs below: bfloat16 is rounded by the instruction
// that comes with them where the machine has it (NATIVE).
template <bool NATIVE, class S> PF_FN void put(S* p, vcompute<S> v) {
#if PF_LANES == 16 && defined(__AVX512F__) && defined(__x86_64__)
  if constexpr (NATIVE && is_same<S, bf16>) {
    vec<uint16_t> r;
    asm("vcvtneps2bf16 %1, %0" : "=v"(r) : "v"(v));
    __builtin_memcpy(p, &r, sizeof r);
    return;
  }
#endif
  storev<S>(p, v);
}

// Two vectors as pairs: a[0], b[0], a[1], b[1], ...
template <class T> PF_FN void interleave(vec<T>& a, vec<T>& b) {
#if (defined(__clang__) || __GNUC__ >= 12) && (PF_LANES == 16 || PF_LANES == 8)
  const vec<T> x = a, y = b;
#if PF_LANES == 16
  a = __builtin_shufflevector(x, y, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  b = __builtin_shufflevector(x, y, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
#else
  a = __builtin_shufflevector(x, y, 0, 8, 1, 9, 2, 10, 3, 11);
  b = __builtin_shufflevector(x, y, 4, 12, 5, 13, 6, 14, 7, 15);
#endif
#else
  vec<T> low{}, high{};
  for (int i = 0; i < lanes; i++) {
    low[i] = (i % 2 ? b : a)[i / 2];
    high[i] = (i % 2 ? b : a)[lanes / 2 + i / 2];
  }
  a = low, b = high;
#endif
}

template <bool NATIVE, class S> PF_FN void put_pairs(S* p, vcompute<S> a, vcompute<S> b) {
#if PF_LANES == 16 && defined(__AVX512F__) && defined(__x86_64__) && (defined(__clang__) || __GNUC__ >= 12)
  if constexpr (NATIVE && is_same<S, bf16>) {
    vec_n<uint16_t, 2 * lanes>::type pairs;  // all of a, then all of b
    asm("vcvtne2ps2bf16 %1, %2, %0" : "=v"(pairs) : "v"(a), "v"(b));
    pairs = __builtin_shufflevector(pairs, pairs, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23,
                                    8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    __builtin_memcpy(p, &pairs, sizeof pairs);
    return;
  }
#endif
  if constexpr (sizeof(S) == 2) {
    const vec<uint32_t> pairs = convert<uint32_t>(to_raw<S>(a)) | convert<uint32_t>(to_raw<S>(b)) << 16;
    __builtin_memcpy(p, &pairs, sizeof pairs);
  } else {
    vraw<S> low = to_raw<S>(a), high = to_raw<S>(b);
    interleave<raw<S>>(low, high);
    __builtin_memcpy(p, &low, sizeof low);
    __builtin_memcpy(p + lanes, &high, sizeof high);
  }
}
// The first n pairs.
template <class S> PF_FN void put_pairs_n(S* p, vcompute<S> a, vcompute<S> b, int n) {
  S all[2 * lanes];
  put_pairs<false, S>(all, a, b);
  for (int i = 0; i < 2 * n; i++) p[i] = all[i];
}

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

// A square of `lanes` x `lanes` elements whose rows are `from_step` apart, transposed: to[c * to_step + r].
template <class S> PF_FN void pack_transposed(const S* from, int64_t from_step, float* to, int64_t to_step) {
  vec<float> row[lanes];
#pragma GCC unroll 16
  for (int i = 0; i < lanes; i++) row[i] = load_floats(from + i * from_step);
  transpose_rows<lanes>(row);
#pragma GCC unroll 16
  for (int i = 0; i < lanes; i++) storev<float>(to + i * to_step, row[i]);
}

// `rows` x `depth` of `a` as rows of `ld` floats. Rows up to `padded_rows` and elements up to `padded_depth` are 0.
template <class S>
PF_FN void pack_rows(Matrix<S> a, int64_t rows, int64_t depth, float* to, int64_t ld, int64_t padded_rows,
                     int64_t padded_depth) {
  int64_t whole_rows = 0, whole = depth - depth % lanes;
  if (a.across == 1) {
    for (; whole_rows < rows; whole_rows++)
      for (int64_t k = 0; k < whole; k += lanes)
        storev<float>(to + whole_rows * ld + k, load_floats(a.p + whole_rows * a.down + k));
  } else if (a.down == 1) {
    for (; whole_rows + lanes <= rows; whole_rows += lanes)
      for (int64_t k = 0; k < whole; k += lanes)
        pack_transposed(a.p + whole_rows + k * a.across, a.across, to + whole_rows * ld + k, ld);
  }
  for (int64_t i = 0; i < rows; i++) {
    for (int64_t k = i < whole_rows ? whole : 0; k < depth; k++)
      to[i * ld + k] = load_float(a.p + i * a.down + k * a.across);
    for (int64_t k = depth; k < padded_depth; k++) to[i * ld + k] = 0;
  }
  for (int64_t i = rows; i < padded_rows; i++)
    for (int64_t k = 0; k < padded_depth; k++) to[i * ld + k] = 0;
}

// `depth` x `columns` of `b`, columns <= WIDE, as `depth` rows of WIDE floats; missing columns are 0.
template <int WIDE, class S> PF_FN void pack_sliver(Matrix<S> b, int64_t depth, int64_t columns, float* to) {
  if (columns == WIDE && b.across == 1) {
    for (int64_t k = 0; k < depth; k++)
#pragma GCC unroll 8
      for (int j = 0; j < WIDE; j += lanes) storev<float>(to + k * WIDE + j, load_floats(b.p + k * b.down + j));
    return;
  }
  int64_t whole = 0;
  if (columns == WIDE && b.down == 1) {
    whole = depth - depth % lanes;
    for (int64_t k = 0; k < whole; k += lanes)
      for (int j = 0; j < WIDE; j += lanes) pack_transposed(b.p + k + j * b.across, b.across, to + k * WIDE + j, WIDE);
  }
  for (int64_t k = whole; k < depth; k++)
    for (int j = 0; j < WIDE; j++)
      to[k * WIDE + j] = j < columns ? load_float(b.p + k * b.down + j * b.across) : 0;
}

// ---- the register tile ---------------------------------------------------------------------------

// c[R][V vectors] (+)= a[R][depth] b[depth][V vectors]; `lda`, `ldb` and `ldc` are the steps from row to row, and `step`
// is that along the depth of a.
template <int R, int V, class S>
PF_FN void tile(int64_t depth, const float* __restrict a, int64_t lda, const S* __restrict b, int64_t ldb,
                float* __restrict c, int64_t ldc, bool adds, int64_t step = 1) {
  vec<float> sum[R][V] = {};
#pragma GCC unroll 4
  for (int64_t k = 0; k < depth; k++) {
    vec<float> right[V];
#pragma GCC unroll 8
    for (int j = 0; j < V; j++) right[j] = load_floats(b + k * ldb + j * lanes);
#pragma GCC unroll 16
    for (int i = 0; i < R; i++) {
      const vec<float> left = splat(a[i * lda + k * step]);
#pragma GCC unroll 8
      for (int j = 0; j < V; j++) sum[i][j] = fma(left, right[j], sum[i][j]);
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < R; i++)
#pragma GCC unroll 8
    for (int j = 0; j < V; j++) {
      float* const at = c + i * ldc + j * lanes;
      storev<float>(at, adds ? loadv<float>(at) + sum[i][j] : sum[i][j]);
    }
}

// ---- large matrices: both operands packed --------------------------------------------------------

// The tile of registers (R rows, V vectors), the depth of a packed part, and the block that is finished at once.
template <int R, int V, int DEPTH, int ROWS, int COLUMNS> struct Blocking {
  static constexpr int tile_rows = R, vectors = V, tile_columns = V * lanes;
  static constexpr int depth = DEPTH, block_rows = ROWS, block_columns = COLUMNS;
  // Rows of the packed left operand: 16 floats more, lest all of them fall on the same lines of the cache.
  static constexpr int lda = DEPTH + 16;
  static_assert(ROWS % R == 0 && COLUMNS % (V * lanes) == 0, "blocks are whole tiles");
};

// `b` is in the last-level cache: while the tiles of one sliver are computed, the next is fetched into the second level.
template <class X> PF_CALLED void multiply_block(int64_t depth, const float* a, const float* b, float* c, int64_t rows,
                                                 int64_t columns, bool adds) {
  const int64_t sliver = depth * X::tile_columns, part = round_up(sliver * X::tile_rows / (rows > 0 ? rows : 1), 16);
  for (int64_t j = 0; j < columns; j += X::tile_columns, b += sliver) {
    const float* next = b + sliver;
    for (int64_t i = 0; i < rows; i += X::tile_rows, next += part) {
      for (int64_t n = 0; n < part; n += 16) __builtin_prefetch(next + n, 0, 2);
      tile<X::tile_rows, X::vectors>(depth, a + i * X::lda, X::lda, b, X::tile_columns, c + i * X::block_columns + j,
                                     X::block_columns, adds);
    }
  }
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
        pack_rows(part, tall, deep, left, X::lda, padded_tall, deep);
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

// ---- few rows: the right operand is read where it is, once -----------------------------------------

template <int N> struct Count {
  static constexpr int value = N;
};
// f with the number of rows as a constant, 1 to MOST.
template <int MOST, class F> PF_FN void with_count(int64_t rows, F f) {
  if constexpr (MOST == 1) f(Count<1>{});
  else if (rows == MOST) f(Count<MOST>{});
  else with_count<MOST - 1>(rows, f);
}
// f(first row, number of rows) for groups of at most MOST rows that differ by one at most.
template <int MOST, class F> PF_FN void in_groups(int64_t rows, F f) {
  const int64_t groups = (rows + MOST - 1) / MOST;
  for (int64_t g = 0; g < groups; g++) {
    const int64_t first = rows * g / groups;
    with_count<MOST>(rows * (g + 1) / groups - first, [=](auto count) PF_INLINED { f(first, count); });
  }
}

// c[R][C] (+)= a[R][depth] times C rows of b that are `step` apart; rows of `a` are padded with 0 to whole vectors.
template <int R, int C, class S>
PF_FN void dots(int64_t depth, const float* __restrict a, int64_t lda, const S* __restrict b, int64_t step,
                float* __restrict c, int64_t ldc, bool adds = false) {
  constexpr int U = R == 1 ? 2 : 1;  // one row alone has too few sums to hide the latency of an addition
  vec<float> sum[U][R][C] = {};
  int64_t k = 0;
  for (; k + U * lanes <= depth; k += U * lanes)
#pragma GCC unroll 2
    for (int u = 0; u < U; u++) {
      vec<float> left[R];
#pragma GCC unroll 16
      for (int i = 0; i < R; i++) left[i] = loadv<float>(a + i * lda + k + u * lanes);
#pragma GCC unroll 8
      for (int j = 0; j < C; j++) {
        const vec<float> right = load_floats(b + j * step + k + u * lanes);
#pragma GCC unroll 16
        for (int i = 0; i < R; i++) sum[u][i][j] = fma(left[i], right, sum[u][i][j]);
      }
    }
  for (; k < depth; k += lanes)
#pragma GCC unroll 8
    for (int j = 0; j < C; j++) {
      const vec<float> right = cast<float>(loadv_n<S>(b + j * step + k, (int)least(depth - k, lanes)));
#pragma GCC unroll 16
      for (int i = 0; i < R; i++) sum[0][i][j] = fma(loadv<float>(a + i * lda + k), right, sum[0][i][j]);
    }
#pragma GCC unroll 16
  for (int i = 0; i < R; i++)
#pragma GCC unroll 8
    for (int j = 0; j < C; j++) {
      const float total = hsum(U == 2 ? sum[0][i][j] + sum[U - 1][i][j] : sum[0][i][j]);
      c[i * ldc + j] = adds ? c[i * ldc + j] + total : total;
    }
}

// R rows and C columns are summed at once; columns of b are contiguous (b.down == 1), as in the weight of a linear layer.
// `own` are the columns of a thread.
template <int R, int C, int COLUMNS, class SA, class B, class F>
PF_FN void dots_of_columns(Matrix<SA> a, B b, int64_t rows, int64_t depth, Range own, F finish) {
  typedef typename B::Element SB;
  // The first-level cache holds the part of a few columns that is computed at once.
  constexpr int64_t most = 1024, apart = most + 2 * lanes;
  const int64_t lda = round_up(depth, lanes), part = B::is_computed ? most : depth;
  const int64_t room_bytes = B::is_computed ? C * apart * (int64_t)sizeof(SB) : 0;
  float* const left = (float*)scratch(1, 4 * (rows * lda + rows * COLUMNS) + room_bytes);
  float* const block = left + rows * lda;
  SB* const room = (SB*)(block + rows * COLUMNS);
  if (own.begin < own.end) pack_rows(a, rows, depth, left, lda, rows, lda);
  for (int64_t j0 = own.begin; j0 < own.end; j0 += COLUMNS) {
    const int64_t wide = least(own.end - j0, COLUMNS);
    for (int64_t j = 0; j < wide; j += C) {
      int64_t k = 0;
      do {
        const int64_t deep = least(depth - k, part);
        const Matrix<SB> from = b.template columns<false>(room, apart, k, deep, j0 + j, least(wide - j, C));
        in_groups<R>(rows, [=](int64_t i, auto group) PF_INLINED {
          const float* const own_rows = left + i * lda + k;
          float* const to = block + i * COLUMNS + j;
          if (j + C <= wide) dots<group.value, C>(deep, own_rows, lda, from.p, from.across, to, COLUMNS, k > 0);
          else
            for (int64_t n = 0; n < wide - j; n++)
              dots<group.value, 1>(deep, own_rows, lda, from.p + n * from.across, from.across, to + n, COLUMNS, k > 0);
        });
        k += part;
      } while (k < depth);
    }
    finish(block, COLUMNS, 0, j0, rows, wide);
  }
}

template <int R, int C, int COLUMNS, class SA, class B, class F>
PF_FN void gemm_dots(Matrix<SA> a, B b, int64_t rows, int64_t columns, int64_t depth, int threads, F finish) {
  parallel(threads, [=](int thread, int count) PF_INLINED {
    dots_of_columns<R, C, COLUMNS>(a, b, rows, depth, share_of(columns, C, thread, count), finish);
  });
}

// ---- few rows of bfloat16: two products an instruction ----------------------------------------------

#if PF_LANES == 16 && defined(__AVX512F__) && defined(__x86_64__)
// Sixteen pairs of bfloat16.
typedef vec<int32_t> Pairs;
PF_FN Pairs load_pairs(const bf16* p) {
  Pairs r;
  __builtin_memcpy(&r, p, sizeof r);
  return r;
}
// The first n elements, and 0.
PF_FN Pairs load_pairs_n(const bf16* p, int64_t n) {
  bf16 all[2 * lanes] = {};
  __builtin_memcpy(all, p, n * sizeof(bf16));
  return load_pairs(all);
}
// Both products of every pair added to its sum. By name, not by a flag of the compiler: the rest of the library runs on
// machines without the instruction, and there this is computed in two steps.
template <bool NATIVE> PF_FN vec<float> add_products(vec<float> sum, Pairs a, Pairs b) {
  if constexpr (NATIVE) {
    asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
    return sum;
  } else {
    const Pairs high = splat<int32_t>(-65536);
    sum = fma(bits_as<vec<float>>((Pairs)(a << 16)), bits_as<vec<float>>((Pairs)(b << 16)), sum);
    return fma(bits_as<vec<float>>((Pairs)(a & high)), bits_as<vec<float>>((Pairs)(b & high)), sum);
  }
}

// Lane i of the result is the sum of v[i].
PF_FN vec<float> sums_of(vec<float>* v) {
#define PF_HALVE(D)                  \
  for (int i = 0; i < D; i++) {      \
    exchange<D, lanes>(v[i], v[i + D]); \
    v[i] = v[i] + v[i + D];          \
  }
  PF_HALVE(8) PF_HALVE(4) PF_HALVE(2) PF_HALVE(1)
#undef PF_HALVE
  return v[0];
}

// c[R][4] (+)= a[R][depth] times four rows of b, of which there are `last` + 1 at least; rows of `a` are padded with 0.
// The four rows after them are fetched meanwhile.
template <bool NATIVE, int R>
PF_FN void pair_dots(int64_t depth, const bf16* __restrict a, int64_t lda, const bf16* __restrict b, int64_t step,
                     int64_t last, float* __restrict c, int64_t ldc, bool adds) {
  constexpr int C = 4, U = R == 1 ? 4 : R == 2 ? 2 : 1, deep = 2 * lanes;
  static_assert(R <= 4, "sixteen sums are added up at once");
  const bf16* right[C];
  for (int j = 0; j < C; j++) right[j] = b + least(j, last) * step;
  vec<float> sum[U][16] = {};
  int64_t k = 0;
  for (; k + U * deep <= depth; k += U * deep)
#pragma GCC unroll 4
    for (int u = 0; u < U; u++) {
      Pairs left[R];
#pragma GCC unroll 4
      for (int i = 0; i < R; i++) left[i] = load_pairs(a + i * lda + k + u * deep);
#pragma GCC unroll 4
      for (int j = 0; j < C; j++) {
        const Pairs column = load_pairs(right[j] + k + u * deep);
        __builtin_prefetch(right[j] + C * step + k + u * deep);
#pragma GCC unroll 4
        for (int i = 0; i < R; i++) sum[u][C * i + j] = add_products<NATIVE>(sum[u][C * i + j], left[i], column);
      }
    }
  for (; k < depth; k += deep)
#pragma GCC unroll 4
    for (int j = 0; j < C; j++) {
      const Pairs column = load_pairs_n(right[j] + k, least(depth - k, deep));
#pragma GCC unroll 4
      for (int i = 0; i < R; i++)
        sum[0][C * i + j] = add_products<NATIVE>(sum[0][C * i + j], load_pairs(a + i * lda + k), column);
    }
#pragma GCC unroll 4
  for (int u = 1; u < U; u++)
#pragma GCC unroll 16
    for (int i = 0; i < C * R; i++) sum[0][i] = sum[0][i] + sum[u][i];
  const vec<float> all = sums_of(sum[0]);
#pragma GCC unroll 4
  for (int i = 0; i < R; i++)
#pragma GCC unroll 4
    for (int j = 0; j < C; j++) c[i * ldc + j] = adds ? c[i * ldc + j] + all[C * i + j] : all[C * i + j];
}

// As gemm_dots, of bfloat16: groups of four rows and four columns, COLUMNS finished at once. The first-level cache holds
// DEPTH of all rows, packed, so that the columns find them there.
template <bool NATIVE, int DEPTH, int COLUMNS, class B, class F>
PF_FN void pairs_of_columns(Matrix<bf16> a, B b, int64_t rows, int64_t depth, Range own, F finish) {
  constexpr int64_t lda = DEPTH + 2 * lanes;
  const int64_t parts = (depth + DEPTH - 1) / DEPTH;
  float* const block = (float*)scratch(1, 4 * rows * COLUMNS + 2 * (parts * rows + (B::is_computed ? 4 : 0)) * lda);
  bf16* const left = (bf16*)(block + rows * COLUMNS);
  bf16* const room = left + parts * rows * lda;
  for (int64_t part = 0; part < parts; part++)
    for (int64_t i = 0; i < rows; i++) {
      const int64_t deep = least(depth - part * DEPTH, DEPTH);
      const bf16* const from = a.p + i * a.down + part * DEPTH * a.across;
      bf16* const to = left + (part * rows + i) * lda;
      if (a.across == 1) __builtin_memcpy(to, from, deep * sizeof(bf16));
      else
        for (int64_t k = 0; k < deep; k++) to[k] = from[k * a.across];
      for (int64_t k = deep; k < round_up(deep, 2 * lanes); k++) to[k] = bf16{0};
    }
  for (int64_t j0 = own.begin; j0 < own.end; j0 += COLUMNS) {
    const int64_t wide = least(own.end - j0, COLUMNS);
    int64_t part = 0;
    do {
      const int64_t deep = least(depth - part * DEPTH, DEPTH);
      for (int64_t j = 0; j < wide; j += 4) {
        const Matrix<bf16> right = b.template columns<NATIVE>(room, lda, part * DEPTH, deep, j0 + j, least(wide - j, 4));
        in_groups<4>(rows, [=](int64_t i, auto group) PF_INLINED {
          pair_dots<NATIVE, group.value>(deep, left + (part * rows + i) * lda, lda, right.p, right.across, wide - j - 1,
                                         block + i * COLUMNS + j, COLUMNS, part > 0);
        });
      }
    } while (++part < parts);
    finish(block, COLUMNS, 0, j0, rows, wide);
  }
}

// Whether this machine has the instruction (bit 5 of leaf 7.1). The compiler's own query needs a library that zig does not
// link; where the machine is virtual, asking the processor takes microseconds.
PF_FN bool has_pairs() {
  static int known = 0;  // 1: it has not, 2: it has
  int found = __atomic_load_n(&known, __ATOMIC_RELAXED);
  if (found == 0) {
    int a = 7, b, c = 1, d;
    asm("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
    found = 1 + (a >> 5 & 1);
    __atomic_store_n(&known, found, __ATOMIC_RELAXED);
  }
  return found == 2;
}

template <int DEPTH, int COLUMNS, class B, class F>
PF_FN void gemm_pairs(Matrix<bf16> a, B b, int64_t rows, int64_t columns, int64_t depth, int threads, F finish) {
  static_assert(DEPTH % (2 * lanes) == 0 && COLUMNS % 4 == 0, "parts are whole vectors, blocks whole groups");
  parallel(threads, [=](int thread, int count) PF_INLINED {
    const Range own = share_of(columns, 4, thread, count);
    if (own.begin >= own.end) return;
    if (has_pairs()) pairs_of_columns<true, DEPTH, COLUMNS>(a, b, rows, depth, own, finish);
    else pairs_of_columns<false, DEPTH, COLUMNS>(a, b, rows, depth, own, finish);
  });
}
#endif

// R rows and V vectors of columns are summed at once, DEPTH deep; rows of b are contiguous (b.across == 1). `own` are the
// columns of a thread.
template <int R, int V, int DEPTH, int COLUMNS, class SA, class SB, class F>
PF_FN void rows_of_columns(Matrix<SA> a, Matrix<SB> b, int64_t rows, int64_t depth, Range own, F finish) {
  constexpr int wide_tile = V * lanes;
  float* const left = (float*)scratch(1, 4 * (rows * depth + rows * COLUMNS + DEPTH * wide_tile));
  float* const block = left + rows * depth;
  float* const edge = block + rows * COLUMNS;  // the last columns, padded
  if (own.begin < own.end) pack_rows(a, rows, depth, left, depth, rows, depth);
  for (int64_t j0 = own.begin; j0 < own.end; j0 += COLUMNS) {
    const int64_t wide = least(own.end - j0, COLUMNS);
    int64_t k0 = 0;
    do {
      const int64_t deep = least(depth - k0, DEPTH);
      for (int64_t j = 0; j < wide; j += wide_tile) {
        const SB* const from = b.p + k0 * b.down + j0 + j;
        const bool is_edge = j + wide_tile > wide;
        if (is_edge) pack_sliver<wide_tile>(Matrix<SB>{from, b.down, 1}, deep, wide - j, edge);
        in_groups<R>(rows, [=](int64_t i, auto group) PF_INLINED {
          const float* const own_rows = left + i * depth + k0;
          float* const to = block + i * COLUMNS + j;
          if (is_edge) tile<group.value, V>(deep, own_rows, depth, edge, wide_tile, to, COLUMNS, k0 > 0);
          else tile<group.value, V>(deep, own_rows, depth, from, b.down, to, COLUMNS, k0 > 0);
        });
      }
      k0 += DEPTH;
    } while (k0 < depth);
    finish(block, COLUMNS, 0, j0, rows, wide);
  }
}

template <int R, int V, int DEPTH, int COLUMNS, class SA, class SB, class F>
PF_FN void gemm_rows(Matrix<SA> a, Matrix<SB> b, int64_t rows, int64_t columns, int64_t depth, int threads, F finish) {
  parallel(threads, [=](int thread, int count) PF_INLINED {
    rows_of_columns<R, V, DEPTH, COLUMNS>(a, b, rows, depth, share_of(columns, V * lanes, thread, count), finish);
  });
}

}  // namespace pf
