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
  bool has_natural_sums;  // not of base 2
  PF_INLINE S* row(int64_t b, int64_t h, int64_t i) const { return p + b * batch + h * head + i * down; }
};

// Blocks of a mask have `row_block` queries and `key_block` keys; without a mask there is one.
struct AttentionSizes {
  int64_t batch, heads, groups, queries, keys, row_block, key_block;
};

// The blocks of a causal mask, in which key k counts for queries from k on. Of a block of rows, first to `full` are
// through the diagonal on one side of those that count whole: `full` to `end`, or 0 to `first`.
struct CausalBlocks {
  AttentionSizes n;
  bool is_by_key;
  // Of queries: keys before the block count whole, those up to its last query in part. Of keys: queries from its last key
  // on count whole, those from its first key in part.
  PF_INLINE int64_t through(int64_t size, int64_t block) const { return (size + block - 1) / block; }
  PF_INLINE int64_t first(int64_t row) const { return least(row * n.row_block / n.key_block, all()); }
  PF_INLINE int64_t all() const { return through(is_by_key ? n.queries : n.keys, n.key_block); }
  PF_INLINE int64_t behind(int64_t row) const {
    const int64_t end = least((row + 1) * n.row_block, is_by_key ? n.keys : n.queries);
    return least(through(is_by_key ? end - 1 : end, n.key_block), all());
  }
  PF_INLINE int64_t operator()(int64_t, int64_t, int64_t row, bool is_full) const {
    if (!is_full) return behind(row) - first(row);
    return is_by_key ? all() - behind(row) : first(row);
  }
  PF_INLINE int64_t operator()(int64_t, int64_t, int64_t row, int64_t number, bool is_full) const {
    const int64_t start = !is_full ? first(row) : is_by_key ? behind(row) : 0;
    return (start + number) * n.key_block;
  }
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
PF_FN vec<float> weight_of(vec<float> x) { return exp_of_low(x); }
// What scores are taken less: their largest, but where nothing counts so far the weights are zero, not NaN.
template <class F> PF_FN F shift_of(F top) { return where(eq(top, all<F>(-__builtin_inff())), F{}, top); }

// The sum of powers of e by its parts, in base 2. Where a score is infinite the sum of weights is NaN; eager's is not.
template <class F> PF_FN F sums_of(F top, F total) {
  const F infinite = all<F>(__builtin_inff()), sums = (top + log(total)) * log2_e;
  return where(eq(top, infinite), infinite, where(eq(total, F{}), -infinite, sums));
}
// The same in base e: no factor rounds the largest score, nor makes it overflow. A query without keys has 0, as eager's.
template <class F> PF_FN F natural_sums_of(F top, F total) { return where(eq(total, F{}), F{}, top + log(total)); }
template <class F> PF_FN F divisor_of(F total) { return where(eq(total, F{}), all<F>(1.0f), total); }

// ---- queries as lanes ----------------------------------------------------------------------------

// products[row][lane] = rows[row][d] panel[d][lane] over DEPTH features; rows of products are written up to whole tiles.
template <class X, int DEPTH> PF_CALLED void multiply_rows(const float* rows, const float* panel, float* products,
                                                           int64_t count, int vectors) {
  constexpr int R = X::tile_rows, V = X::vectors, wide = X::wide;
  for (int64_t i = 0; i < count; i += R) {
    const float* const from = rows + i * DEPTH;
    float* const to = products + i * wide;
    if (2 * vectors > V) tile<R, V>(DEPTH, from, DEPTH, panel, wide, to, wide, false);
    else
      for (int j = 0; j < vectors; j++)
        tile<R, 1>(DEPTH, from, DEPTH, panel + j * lanes, wide, to + j * lanes, wide, false);
  }
}

template <class X, int R, int WIDTH> PF_FN void add_features(const float* rows, const float* weights, float* to,
                                                             int64_t count, int vectors) {
  constexpr int V = X::vectors, wide = X::wide;
  if (2 * vectors > V) tile<R, V>(count, rows, 1, weights, wide, to, wide, true, WIDTH);
  else
    for (int j = 0; j < vectors; j++)
      tile<R, 1>(count, rows, 1, weights + j * lanes, wide, to + j * lanes, wide, true, WIDTH);
}
// acc[d][lane] += rows[row][d] weights[row][lane] over the rows, for WIDTH features.
template <class X, int WIDTH> PF_CALLED void add_rows_by(const float* rows, const float* weights, float* acc, int64_t count,
                                                         int vectors) {
  constexpr int R = X::tile_rows, rest = WIDTH % R;
  int64_t i = 0;
  for (; i + R <= WIDTH; i += R) add_features<X, R, WIDTH>(rows + i, weights, acc + i * X::wide, count, vectors);
  if constexpr (rest > 0) add_features<X, rest, WIDTH>(rows + i, weights, acc + i * X::wide, count, vectors);
}

// A vector of queries: scores become weights. `most` is the largest of them, and `factor` what they are multiplied with.
// The return value is the factor of what was summed before. No fused product: the largest score is rounded, and a score
// that is not would be greater than it, by thousands where scores are large.
template <int LD> PF_FN vec<float> weigh(float* scores, int64_t count, vec<float> most, float factor, float* top,
                                         float* total) {
  const vec<float> before = loadv<float>(top), higher = max(before, most), shift = shift_of(higher);
  const vec<float> rescale = weight_of(before - shift);
  vec<float> sum = {};
  for (int64_t i = 0; i < count; i++) {
    const vec<float> w = weight_of(loadv<float>(scores + i * LD) * factor - shift);
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

// f(first feature) for every vector of WIDTH features: the last ones overlap those before them where they are no whole one.
template <int WIDTH, class F> PF_FN void over_features(F f) {
  constexpr int last = WIDTH - lanes;
  for (int d = 0; d < last; d += lanes) f(d);
  f(last);
}

// Features of a vector of lanes become rows of a result; `last(x)` is done to each vector first.
template <class X, int WIDTH, class S, class F>
PF_FN void store_features(const float* acc, S* to, int64_t down, int live, F last) {
  if constexpr (WIDTH >= lanes) {
    over_features<WIDTH>([=](int d) PF_INLINED {
      vec<float> row[lanes];
#pragma GCC unroll 16
      for (int i = 0; i < lanes; i++) row[i] = last(loadv<float>(acc + (d + i) * X::wide));
      transpose_rows<lanes>(row);
#pragma GCC unroll 16
      for (int i = 0; i < lanes; i++)
        if (i < live) storev<S>(to + i * down + d, row[i]);
    });
  } else {
    for (int d = 0; d < WIDTH; d++) {
      const vec<float> feature = last(loadv<float>(acc + d * X::wide));
      for (int i = 0; i < live; i++) store1<S>(to + i * down + d, feature[i]);
    }
  }
}

// `lanes` features of the rows from `first` on, transposed: to[feature * to_step + row]. Behind the last row it is repeated.
template <class S>
PF_FN void pack_lanes(const S* rows, int64_t down, int64_t first, int64_t count, float* to, int64_t to_step) {
  if (first + lanes <= count) return pack_transposed(rows + first * down, down, to, to_step);
  vec<float> row[lanes];
#pragma GCC unroll 16
  for (int i = 0; i < lanes; i++) row[i] = load_floats(rows + least(first + i, count - 1) * down);
  transpose_rows<lanes>(row);
#pragma GCC unroll 16
  for (int i = 0; i < lanes; i++) storev<float>(to + i * to_step, row[i]);
}

// Rows of an operand as panels: features by lanes. Lanes behind the last row repeat it: nobody reads their results.
template <class X, int WIDTH, class S> PF_FN void pack_panels(Matrix<S> from, int64_t count, float* to) {
  for (int64_t i = 0; i < count; i += X::wide) {
    const int64_t live = least(count - i, X::wide);
    const S* const rows = from.p + i * from.down;
    float* const panel = to + i * WIDTH;
    if (WIDTH < lanes || from.across != 1) {
      pack_sliver<X::wide>(Matrix<S>{rows, from.across, from.down}, WIDTH, live, panel);
      continue;
    }
    const int64_t needed = 2 * live > X::wide ? X::wide : live;  // a whole panel is multiplied where half of it counts
    if constexpr (WIDTH >= lanes)
      for (int64_t j = 0; j < needed; j += lanes)
        over_features<WIDTH>([=](int d) PF_INLINED { pack_lanes(rows + d, from.down, j, live, panel + d * X::wide + j, X::wide); });
  }
}
PF_FN void clear(float* p, int64_t count) {
  for (int64_t i = 0; i < count; i += lanes) storev<float>(p + i, vec<float>{});
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
    pack_panels<X, X::inner>(from, count, queries);
    const int64_t whole = round_up(count, X::wide);
    clear(acc, whole * X::outer);
    clear(total, whole);
    for (int64_t i = 0; i < whole; i += lanes) storev<float>(top + i, minus_infinity());
  }
  // All queries of the block meet the keys of one tile. `score(products, query, live, ...)` makes scores of the products
  // of a vector of queries, and returns the largest.
  template <class F> PF_INLINE void meet(int64_t count, int64_t num_keys, float factor, F score) {
    for (int64_t i = 0; i < count; i += X::wide) {
      const int64_t live = least(count - i, X::wide);
      const int vectors = int((live + lanes - 1) / lanes);
      float* const own = acc + i * X::outer;
      multiply_rows<X, X::inner>(keys, queries + i * X::inner, scores, num_keys, vectors);
      for (int j = 0; j < vectors; j++) {
        const int64_t at = i + j * lanes;
        const vec<float> most = score(scores + j * lanes, at, (int)least(count - at, lanes));
        const vec<float> rescale = weigh<X::wide>(scores + j * lanes, num_keys, most, factor, top + at, total + at);
        scale_features<X::wide, X::outer>(own + j * lanes, rescale);
      }
      add_rows_by<X, X::outer>(values, scores, own, num_keys, vectors);
    }
  }
  template <class S> PF_INLINE void finish(AttentionResults<S> to, int64_t b, int64_t h, int64_t first, int64_t count,
                                           AttentionSizes n) {
    for (int64_t at = 0; at < count; at += lanes) {
      const int64_t panel = at / X::wide * X::wide, query = first + at;
      const int live = (int)least(count - at, lanes);
      const vec<float> sum = loadv<float>(total + at), most = loadv<float>(top + at);
      const int64_t number = (b * n.heads + h) * n.queries + query;
      const vec<float> divisor = divisor_of(sum);
      if (to.p)
        store_features<X, X::outer>(acc + panel * X::outer + (at - panel), to.row(b, h, query), to.down, live,
                                    [=](vec<float> x) PF_INLINED { return x / divisor; });
      const vec<float> sums = to.has_natural_sums ? natural_sums_of(most, sum) : sums_of(most, sum);
      if (to.sums) storev_n<float>(to.sums + number, sums, live);
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

// ---- keys as lanes, for few queries --------------------------------------------------------------

// Sizes of a head, queries at most, keys of a tile.
template <int INNER, int OUTER, int QUERIES, int COLUMNS> struct AttentionFew {
  static constexpr int inner = INNER, outer = OUTER, queries = QUERIES, columns = COLUMNS;
  static constexpr int padded_inner = (INNER + lanes - 1) / lanes * lanes;
  static constexpr int padded_outer = (OUTER + lanes - 1) / lanes * lanes;
  static constexpr int part = padded_outer + 2;  // of what is found of a query: features, largest score, sum of weights
  static constexpr int64_t floats = QUERIES * (padded_inner + part) + COLUMNS * (1 + padded_inner + padded_outer);
};

// f(first row, step to the next) of rows of contiguous elements, copied first where they are not, or IN_PLACE is not.
template <int WIDTH, int PADDED, bool IN_PLACE, class S, class F>
PF_FN void with_rows(Matrix<S> from, int64_t count, float* copy, F f) {
  if constexpr (IN_PLACE) {
    if (from.across == 1) return f(from.p, from.down);
  }
  pack_rows(from, count, WIDTH, copy, PADDED, count, PADDED);
  f((const float*)copy, int64_t(PADDED));
}

// The products of a query, in whole vectors, with rows of keys.
template <class X, class S> PF_FN void dot_keys(const float* query, const S* keys, int64_t down, int64_t count, float* to) {
  constexpr int C = 4;
  int64_t i = 0;
  for (; i + C <= count; i += C) dots<1, C>(X::inner, query, 0, keys + i * down, down, to + i, 0);
  for (; i < count; i++) dots<1, 1>(X::inner, query, 0, keys + i * down, down, to + i, 0);
}

// The features of one query, V vectors at once.
template <class X, int V, class S>
PF_FN void add_rows(const S* values, int64_t down, const float* weights, int64_t count, float* acc) {
  constexpr int64_t whole = X::padded_outer - X::padded_outer % (V * lanes);
  for (int64_t j = 0; j < whole; j += V * lanes) tile<1, V>(count, weights, 0, values + j, down, acc + j, 0, true);
  if constexpr (whole < X::padded_outer)
    for (int64_t j = whole; j < X::padded_outer; j += lanes) tile<1, 1>(count, weights, 0, values + j, down, acc + j, 0, true);
}

// Scores of one query become weights, in whole vectors; `found` is what is known of it so far.
template <class X> PF_FN void weigh_row(float* scores, int64_t count, float most, float factor, float* found) {
  float *top = found + X::padded_outer, *total = top + 1;
  const float higher = max(*top, most), shift = shift_of(higher), rescale = exp(*top - shift);
  vec<float> sum = {};
  for (int64_t i = 0; i < count; i += lanes) {
    const vec<float> w = weight_of(loadv<float>(scores + i) * factor - shift);
    storev<float>(scores + i, w);
    sum = sum + w;
  }
  if (rescale != 1.0f)
    for (int i = 0; i < X::padded_outer; i += lanes) storev<float>(found + i, loadv<float>(found + i) * rescale);
  *total = fma(*total, rescale, hsum(sum));
  *top = higher;
}

template <class X> PF_FN void start_part(float* found) {
  for (int i = 0; i < X::padded_outer; i += lanes) storev<float>(found + i, vec<float>{});
  found[X::padded_outer] = -__builtin_inff();
  found[X::padded_outer + 1] = 0;
}

// What the parts of a query's keys contributed, joined: the result of the query.
template <class X, class S>
PF_FN void join_parts(float* parts, int64_t splits, AttentionResults<S> to, int64_t b, int64_t h, int64_t query, AttentionSizes n) {
  float* const first = parts;
  float *top = first + X::padded_outer, *total = top + 1;
  for (int64_t i = 1; i < splits; i++) {
    const float* const other = parts + i * X::part;
    const float its_top = other[X::padded_outer], higher = max(*top, its_top), shift = shift_of(higher);
    const float mine = exp(*top - shift), its = exp(its_top - shift);
    for (int j = 0; j < X::padded_outer; j += lanes)
      storev<float>(first + j, fma(loadv<float>(other + j), splat(its), loadv<float>(first + j) * mine));
    *total = fma(*total, mine, other[X::padded_outer + 1] * its);
    *top = higher;
  }
  const float divisor = divisor_of(*total);
  const int64_t number = (b * n.heads + h) * n.queries + query;
  if (to.p)
    for (int j = 0; j < X::outer; j += lanes)
      storev_n<S>(to.row(b, h, query) + j, loadv<float>(first + j) / divisor, (int)least(X::outer - j, lanes));
  if (to.sums) to.sums[number] = to.has_natural_sums ? natural_sums_of(*top, *total) : sums_of(*top, *total);
  if (to.largest) to.largest[number] = *top * log2_e;
}

// Heads that share keys are the work of one item, keys and values of which are in cache for the next head: at most this.
constexpr int64_t shared_bytes = 256 << 10;

// As `attention`; `score(products, b, h, query, first key, keys, is_full)` makes scores of products, pads them with -inf
// to whole vectors, and returns the largest.
template <class X, class S, class C, class P, class F>
PF_FN void attention_few(Operand<S> q, Operand<S> k, Operand<S> v, AttentionResults<S> out, AttentionSizes n, float factor,
                         int threads, C count, P place, F score) {
  const int64_t shared_heads = n.heads / n.groups, pairs = n.batch * shared_heads;
  const int64_t tiles = (n.key_block + X::columns - 1) / X::columns;
  const int64_t most = (n.keys + X::columns - 1) / X::columns;
  const int64_t bytes = n.keys * (X::inner + X::outer) * int64_t(sizeof(S));
  const int64_t wanted = n.groups > 1 ? (bytes + shared_bytes - 1) / shared_bytes : 1;
  const int64_t needed = pairs > 0 ? (threads + pairs - 1) / pairs : 1;
  const int64_t splits = most < 1 ? 1 : least(most, wanted < needed ? needed : wanted), items = pairs * splits;
  float* const parts = (float*)scratch(0, 4 * n.batch * n.heads * n.queries * splits * X::part + 4);
  int64_t taken = 0;
  int64_t* const next = &taken;
  if (items < threads) threads = items > 0 ? (int)items : 1;
  parallel(threads, [=](int, int) PF_INLINED {
    float* const queries = (float*)scratch(1, 4 * X::floats);
    float* const scores = queries + X::queries * X::padded_inner;
    float* const key_rows = scores + X::columns;
    float* const value_rows = key_rows + X::columns * X::padded_inner;
    for (;;) {
      const int64_t item = __atomic_fetch_add(next, 1, __ATOMIC_RELAXED);
      if (item >= items) break;
      const int64_t split = item % splits, shared = item / splits % shared_heads, b = item / splits / shared_heads;
      for (int64_t h = shared * n.groups; h < (shared + 1) * n.groups; h++) {
        float* const found = parts + ((b * n.heads + h) * n.queries * splits + split) * X::part;
        const int64_t apart = splits * X::part;  // from query to query
        pack_rows(q.rows(b, h, 0), n.queries, X::inner, queries, X::padded_inner, n.queries, X::padded_inner);
        for (int64_t i = 0; i < n.queries; i++) start_part<X>(found + i * apart);
        const int64_t partial = count(b, h, 0, false), steps = (partial + count(b, h, 0, true)) * tiles;
        const int64_t last = steps * (split + 1) / splits;
        for (int64_t step = steps * split / splits; step < last; step++) {
          const int64_t block = step / tiles;
          const bool is_full = block >= partial;
          const int64_t start = place(b, h, 0, is_full ? block - partial : block, is_full);
          const int64_t k0 = start + step % tiles * X::columns;
          const int64_t keys = least(least(start + n.key_block, n.keys) - k0, X::columns);
          if (keys <= 0) continue;
          for (int64_t i = 0; i < n.queries; i++) {
            const float* const query = queries + i * X::padded_inner;
            float* const own = found + i * apart;
            with_rows<X::inner, X::padded_inner, true>(k.rows(b, shared, k0), keys, key_rows, [=](auto* rows, int64_t down) PF_INLINED {
              dot_keys<X>(query, rows, down, keys, scores);
            });
            weigh_row<X>(scores, keys, score(scores, b, h, i, k0, keys, is_full), factor, own);
            with_rows<X::outer, X::padded_outer, X::outer % lanes == 0>(v.rows(b, shared, k0), keys, value_rows,
              [=](auto* rows, int64_t down) PF_INLINED { add_rows<X, 4>(rows, down, scores, keys, own); });
          }
        }
      }
    }
  });
  for (int64_t row = 0; row < n.batch * n.heads * n.queries; row++) {
    const int64_t query = row % n.queries, h = row / n.queries % n.heads, b = row / n.queries / n.heads;
    join_parts<X>(parts + row * splits * X::part, splits, out, b, h, query, n);
  }
}

}  // namespace pf
