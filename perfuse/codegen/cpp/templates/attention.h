// Attention: softmax(score(scale q k^T)) v with a running softmax, so that no more scores than a tile's are in memory.
// Included after gemm.h.
//
// Queries are lanes. A block of them is transposed into panels of `wide` queries; a tile of keys and values is copied as
// rows of floats, of which each element multiplies whole vectors of queries. So a query's largest score, its sum of
// weights and the factor of what was summed before are lanes of vectors, and nothing else is transposed but the result.
// Few queries would leave lanes idle: then keys are lanes, and threads share the keys of a head.

namespace pf {

// Element [b][h][i][j] of an operand.
template <class S> struct Operand {
  const S* p;
  int64_t batch, head, down, across;
  PF_INLINE Matrix<S> rows(int64_t b, int64_t h, int64_t i) const {
    return {p + b * batch + h * head + i * down, down, across};
  }
};

// The result, features side by side; one number for each query of the other two, which nobody may want (null).
template <class S> struct AttentionResults {
  S* p;
  int64_t batch, head, down;
  float* sums;
  float* largest;
};

// Blocks of a mask have `row_block` queries and `key_block` keys; without a mask there is one.
struct AttentionSizes {
  int64_t batch, heads, groups, queries, keys, row_block, key_block;
};

// Sizes of a head; the tile of registers (R rows, V vectors); queries of a block and keys of a tile.
template <int INNER, int OUTER, int R, int V, int ROWS, int COLUMNS> struct AttentionTile {
  static constexpr int inner = INNER, outer = OUTER, tile_rows = R, vectors = V, wide = V * lanes;
  static constexpr int rows = ROWS, columns = COLUMNS, padded_columns = (COLUMNS + R - 1) / R * R;
  static_assert(ROWS % wide == 0, "blocks are whole panels");
};

constexpr float log2_e = 1.44269504f;
PF_FN vec<float> minus_infinity() { return splat(-__builtin_inff()); }

// e^x for x <= 0.
PF_FN vec<float> weight_of(vec<float> x) {
  const auto p = exp_split(high(splat(-104.0f), x));  // the constant first: NaN goes through
  return scale(p.y, p.whole, p.n);
}
// What scores are taken less: their largest, but where nothing counts so far the weights are zero, not NaN.
PF_FN vec<float> shift_of(vec<float> top) { return where(eq(top, minus_infinity()), vec<float>{}, top); }

// The sum of powers of e by its parts, in base 2. Where a score is infinite the sum of weights is NaN; eager's is not.
PF_FN vec<float> sums_of(vec<float> top, vec<float> total) {
  const vec<float> infinite = splat(__builtin_inff()), sums = (top + log(total)) * log2_e;
  return where(eq(top, infinite), infinite, where(eq(total, vec<float>{}), minus_infinity(), sums));
}
PF_FN vec<float> divisor_of(vec<float> total) { return where(eq(total, vec<float>{}), splat(1.0f), total); }

// ---- queries as lanes ----------------------------------------------------------------------------

// Of a panel: rows of `keys` times its queries. Rows of products are as many as keys, up to whole tiles.
template <class X> PF_CALLED void multiply_keys(const float* keys, const float* queries, float* products, int64_t count,
                                                int vectors) {
  constexpr int R = X::tile_rows, V = X::vectors, wide = X::wide;
  for (int64_t i = 0; i < count; i += R) {
    const float* const from = keys + i * X::inner;
    float* const to = products + i * wide;
    if (2 * vectors > V) tile<R, V>(X::inner, from, X::inner, queries, wide, to, wide, false);
    else
      for (int j = 0; j < vectors; j++)
        tile<R, 1>(X::inner, from, X::inner, queries + j * lanes, wide, to + j * lanes, wide, false);
  }
}

template <class X, int R> PF_FN void add_features(const float* values, const float* weights, float* to, int64_t count,
                                                  int vectors) {
  constexpr int V = X::vectors, wide = X::wide;
  if (2 * vectors > V) tile<R, V>(count, values, 1, weights, wide, to, wide, true, X::outer);
  else
    for (int j = 0; j < vectors; j++)
      tile<R, 1>(count, values, 1, weights + j * lanes, wide, to + j * lanes, wide, true, X::outer);
}
// Of a panel: rows of values times weights are added to what its queries have of each feature.
template <class X> PF_CALLED void add_values(const float* values, const float* weights, float* acc, int64_t count,
                                             int vectors) {
  constexpr int R = X::tile_rows, rest = X::outer % R;
  int64_t i = 0;
  for (; i + R <= X::outer; i += R) add_features<X, R>(values + i, weights, acc + i * X::wide, count, vectors);
  if constexpr (rest > 0) add_features<X, rest>(values + i, weights, acc + i * X::wide, count, vectors);
}

// A vector of queries: scores become weights. `most` is the largest of them, and `factor` what they are multiplied with.
// The return value is the factor of what was summed before.
template <int LD> PF_FN vec<float> weigh(float* scores, int64_t count, vec<float> most, float factor, float* top,
                                         float* total) {
  const vec<float> before = loadv<float>(top), higher = max(before, most), shift = shift_of(higher);
  const vec<float> rescale = weight_of(before - shift);
  vec<float> sum = {};
  for (int64_t i = 0; i < count; i++) {
    const vec<float> w = weight_of(fma(loadv<float>(scores + i * LD), splat(factor), -shift));
    storev<float>(scores + i * LD, w);
    sum = sum + w;
  }
  storev<float>(total, fma(loadv<float>(total), rescale, sum));
  storev<float>(top, higher);
  return rescale;
}

template <int LD, int OUTER> PF_FN void scale_features(float* acc, vec<float> factor) {
  if (hall(eq(factor, splat(1.0f)))) return;
  for (int i = 0; i < OUTER; i++) storev<float>(acc + i * LD, loadv<float>(acc + i * LD) * factor);
}

// Features of a vector of queries, divided by their sums of weights, become rows of the result.
template <class X, class S> PF_FN void store_features(const float* acc, vec<float> total, S* to, int64_t down, int live) {
  constexpr int whole = X::outer - X::outer % lanes;
  const vec<float> divisor = divisor_of(total);
  for (int d = 0; d < whole; d += lanes) {
    vec<float> row[lanes];
#pragma GCC unroll 16
    for (int i = 0; i < lanes; i++) row[i] = loadv<float>(acc + (d + i) * X::wide) / divisor;
    if constexpr (lanes == 16) exchange_rows<lanes / 2>(row);
    exchange_rows<4>(row);
    exchange_rows<2>(row);
    exchange_rows<1>(row);
#pragma GCC unroll 16
    for (int i = 0; i < lanes; i++)
      if (i < live) storev<S>(to + i * down + d, row[i]);
  }
  for (int d = whole; d < X::outer; d++) {
    const vec<float> feature = loadv<float>(acc + d * X::wide) / divisor;
    for (int i = 0; i < live; i++) store1<S>(to + i * down + d, feature[i]);
  }
}

// What a thread has of a block of queries, panel by panel, and of a tile of keys.
template <class X> struct AttentionBlock {
  float *queries, *acc, *top, *total, *keys, *values, *scores;
  static constexpr int64_t floats = int64_t(X::rows) * (X::inner + X::outer + 2) +
                                    int64_t(X::padded_columns) * (X::inner + X::wide) + int64_t(X::columns) * X::outer;
  PF_INLINE explicit AttentionBlock(float* p)
    : queries(p), acc(queries + X::rows * X::inner), top(acc + X::rows * X::outer), total(top + X::rows),
      keys(total + X::rows), values(keys + X::padded_columns * X::inner), scores(values + X::columns * X::outer) {}

  template <class S> PF_INLINE void start(Matrix<S> from, int64_t count) {
    for (int64_t i = 0; i < count; i += X::wide) {
      const Matrix<S> panel = {from.p + i * from.down, from.across, from.down};
      pack_sliver<X::wide>(panel, X::inner, least(count - i, X::wide), queries + i * X::inner);
    }
    const int64_t whole = round_up(count, X::wide);
    for (int64_t i = 0; i < whole * X::outer; i += lanes) storev<float>(acc + i, vec<float>{});
    for (int64_t i = 0; i < whole; i += lanes) {
      storev<float>(top + i, minus_infinity());
      storev<float>(total + i, vec<float>{});
    }
  }
  // All queries of the block meet the keys of one tile. `score(products, query, live, ...)` makes scores of the products
  // of a vector of queries, and returns the largest.
  template <class F> PF_INLINE void meet(int64_t count, int64_t num_keys, float factor, F score) {
    for (int64_t i = 0; i < count; i += X::wide) {
      const int64_t live = least(count - i, X::wide);
      const int vectors = int((live + lanes - 1) / lanes);
      float* const own = acc + i * X::outer;
      multiply_keys<X>(keys, queries + i * X::inner, scores, num_keys, vectors);
      for (int j = 0; j < vectors; j++) {
        const int64_t at = i + j * lanes;
        const vec<float> most = score(scores + j * lanes, at, (int)least(count - at, lanes));
        const vec<float> rescale = weigh<X::wide>(scores + j * lanes, num_keys, most, factor, top + at, total + at);
        scale_features<X::wide, X::outer>(own + j * lanes, rescale);
      }
      add_values<X>(values, scores, own, num_keys, vectors);
    }
  }
  template <class S> PF_INLINE void finish(AttentionResults<S> to, int64_t b, int64_t h, int64_t first, int64_t count,
                                           AttentionSizes n) {
    for (int64_t at = 0; at < count; at += lanes) {
      const int64_t panel = at / X::wide * X::wide, query = first + at;
      const int live = (int)least(count - at, lanes);
      const vec<float> sum = loadv<float>(total + at), most = loadv<float>(top + at);
      S* const rows = to.p + b * to.batch + h * to.head + query * to.down;
      store_features<X>(acc + panel * X::outer + (at - panel), sum, rows, to.down, live);
      const int64_t number = (b * n.heads + h) * n.queries + query;
      if (to.sums) storev_n<float>(to.sums + number, sums_of(most, sum), live);
      if (to.largest) storev_n<float>(to.largest + number, most * log2_e, live);
    }
  }
};

// `count(b, h, row, is_full)` and `place(b, h, row, number, is_full)` have the lists of a block mask; in full blocks all
// scores count.
template <class X, class S, class C, class P, class F>
PF_FN void attention(Operand<S> q, Operand<S> k, Operand<S> v, AttentionResults<S> out, AttentionSizes n, float factor,
                     int threads, C count, P place, F score) {
  const int64_t row_blocks = (n.queries + n.row_block - 1) / n.row_block;
  const int64_t parts = (least(n.row_block, n.queries) + X::rows - 1) / X::rows;
  const int64_t items = n.batch * n.heads * row_blocks * parts;
  int64_t taken = 0;
  int64_t* const next = &taken;
  if (items < threads) threads = items > 0 ? (int)items : 1;
  parallel(threads, [=](int, int) PF_INLINED {
    AttentionBlock<X> block((float*)scratch(1, 4 * AttentionBlock<X>::floats));
    for (;;) {
      // The last blocks first: under a causal mask they have the most keys.
      const int64_t item = items - 1 - __atomic_fetch_add(next, 1, __ATOMIC_RELAXED);
      if (item < 0) break;
      const int64_t part = item % parts, row = item / parts % row_blocks, head = item / parts / row_blocks;
      const int64_t h = head % n.heads, b = head / n.heads, first = row * n.row_block + part * X::rows;
      const int64_t queries = least(least(first + X::rows, (row + 1) * n.row_block), n.queries) - first;
      if (queries <= 0) continue;
      block.start(q.rows(b, h, first), queries);
      const int64_t partial = count(b, h, row, false), all_blocks = partial + count(b, h, row, true);
      for (int64_t i = 0; i < all_blocks; i++) {
        const bool is_full = i >= partial;
        const int64_t start = place(b, h, row, is_full ? i - partial : i, is_full);
        const int64_t end = least(start + n.key_block, n.keys);
        for (int64_t k0 = start; k0 < end; k0 += X::columns) {
          const int64_t keys = least(end - k0, X::columns), shared = h / n.groups;
          pack_rows(k.rows(b, shared, k0), keys, X::inner, block.keys, X::inner, round_up(keys, X::tile_rows), X::inner);
          pack_rows(v.rows(b, shared, k0), keys, X::outer, block.values, X::outer, keys, X::outer);
          block.meet(queries, keys, factor, [=](float* x, int64_t at, int live) PF_INLINED {
            return score(x, b, h, first + at, live, k0, keys, is_full);
          });
        }
      }
      block.finish(out, b, h, first, queries, n);
    }
  });
}

}  // namespace pf
