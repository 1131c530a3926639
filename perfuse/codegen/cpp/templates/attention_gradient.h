// Gradients of attention: scores are recomputed, and weights from the sums that were saved. Included after attention.h.
//
// One side of the scores is lanes, the other is rows of a tile. Of both sides there are two operands: a query and the
// gradient of its result, a key and its value. With panels of lanes and tiles of rows,
//   scores = rows0 panel0, gradients of weights = rows1 panel1, both [row][lane];
//   gradient of the lanes' first operand = rows0^T slopes, of their second (values) rows1^T weights.

namespace pf {

// Rows of a result, features side by side.
template <class S> struct GradientRows {
  S* p;
  int64_t batch, head, down;
  PF_INLINE S* row(int64_t b, int64_t h, int64_t i) const { return p + b * batch + h * head + i * down; }
};

// Adds to an element that other threads add to as well.
PF_FN void add_shared(float* p, float x) {
  int32_t old = __atomic_load_n((int32_t*)p, __ATOMIC_RELAXED);
  while (!__atomic_compare_exchange_n((int32_t*)p, &old, bits_as<int32_t>(bits_as<float>(old) + x), true, __ATOMIC_RELAXED,
                                      __ATOMIC_RELAXED)) {}
}
PF_FN void add_shared(float* p, vec<int64_t> at, vec<float> x, int live) {
  for (int i = 0; i < live; i++) add_shared(p + at[i], x[i]);
}

template <class X, bool HAS_VALUES> struct GradientBlock {
  static constexpr int width = X::inner + X::outer;
  static constexpr int64_t floats = int64_t(X::rows) * 2 * width + int64_t(X::padded_columns) * (width + 2 * X::wide);
  float *panel0, *panel1, *acc0, *acc1, *rows0, *rows1, *products, *grads;
  PF_INLINE explicit GradientBlock(float* p)
    : panel0(p), panel1(panel0 + X::rows * X::inner), acc0(panel1 + X::rows * X::outer), acc1(acc0 + X::rows * X::inner),
      rows0(acc1 + X::rows * X::outer), rows1(rows0 + X::padded_columns * X::inner),
      products(rows1 + X::padded_columns * X::outer), grads(products + X::padded_columns * X::wide) {}

  template <class S> PF_INLINE void start(Matrix<S> first, Matrix<S> second, int64_t count) {
    pack_panels<X, X::inner>(first, count, panel0);
    pack_panels<X, X::outer>(second, count, panel1);
    clear(acc0, round_up(count, X::wide) * X::inner);
    if (HAS_VALUES) clear(acc1, round_up(count, X::wide) * X::outer);
  }
  template <class S> PF_INLINE void take_rows(Matrix<S> first, Matrix<S> second, int64_t count) {
    const int64_t padded = round_up(count, X::tile_rows);
    pack_rows(first, count, X::inner, rows0, X::inner, padded, X::inner);
    pack_rows(second, count, X::outer, rows1, X::outer, padded, X::outer);
  }
  // All lanes of the block meet the rows of one tile. `slope(products, grads, lane, live)` makes weights and slopes of them.
  template <class F> PF_INLINE void meet(int64_t count, int64_t rows, F slope) {
    for (int64_t i = 0; i < count; i += X::wide) {
      const int vectors = int((least(count - i, X::wide) + lanes - 1) / lanes);
      multiply_rows<X, X::inner>(rows0, panel0 + i * X::inner, products, rows, vectors);
      multiply_rows<X, X::outer>(rows1, panel1 + i * X::outer, grads, rows, vectors);
      for (int j = 0; j < vectors; j++) {
        const int64_t at = i + j * lanes;
        slope(products + j * lanes, grads + j * lanes, at, (int)least(count - at, lanes));
      }
      add_rows_by<X, X::inner>(rows0, grads, acc0 + i * X::inner, rows, vectors);
      if (HAS_VALUES) add_rows_by<X, X::outer>(rows1, products, acc1 + i * X::outer, rows, vectors);
    }
  }
  template <int WIDTH, class S>
  PF_INLINE void finish(const float* acc, GradientRows<S> to, int64_t b, int64_t h, int64_t first, int64_t count, float factor) {
    if (!to.p) return;
    for (int64_t at = 0; at < count; at += lanes) {
      const int64_t panel = at / X::wide * X::wide;
      store_features<X, WIDTH>(acc + panel * WIDTH + (at - panel), to.row(b, h, first + at), to.down,
                               (int)least(count - at, lanes), [=](vec<float> x) PF_INLINED { return x * factor; });
    }
  }
};

// f(block, b, head, block of the mask, first lane, number of lanes) for every block of lanes.
template <class X, bool HAS_VALUES, class F>
PF_FN void over_lane_blocks(int64_t batch, int64_t heads, int64_t size, int64_t mask_block, int threads, F f) {
  const int64_t row_blocks = (size + mask_block - 1) / mask_block;
  const int64_t parts = (least(mask_block, size) + X::rows - 1) / X::rows, items = batch * heads * row_blocks * parts;
  int64_t taken = 0;
  int64_t* const next = &taken;
  if (items < threads) threads = items > 0 ? (int)items : 1;
  parallel(threads, [=](int, int) PF_INLINED {
    GradientBlock<X, HAS_VALUES> block((float*)scratch(1, 4 * GradientBlock<X, HAS_VALUES>::floats));
    for (;;) {
      const int64_t item = __atomic_fetch_add(next, 1, __ATOMIC_RELAXED);
      if (item >= items) break;
      const int64_t part = item % parts, row = item / parts % row_blocks, head = item / parts / row_blocks;
      const int64_t first = row * mask_block + part * X::rows;
      const int64_t count = least(least(first + X::rows, (row + 1) * mask_block), size) - first;
      if (count > 0) f(block, head / heads, head % heads, row, first, count);
    }
  });
}

// f(first position, number of them, is_full) for every tile of the other side.
template <class X, class C, class P, class F>
PF_FN void over_tiles(C count, P place, int64_t b, int64_t h, int64_t row, int64_t size, int64_t mask_block, F f) {
  const int64_t partial = count(b, h, row, false), all_blocks = partial + count(b, h, row, true);
  for (int64_t i = 0; i < all_blocks; i++) {
    const bool is_full = i >= partial;
    const int64_t start = place(b, h, row, is_full ? i - partial : i, is_full);
    const int64_t end = least(start + mask_block, size);
    for (int64_t at = start; at < end; at += X::columns) f(at, least(end - at, X::columns), is_full);
  }
}

template <class X, class S, class C, class P, class F>
PF_FN void query_gradient(Operand<S> q, Operand<S> k, Operand<S> v, Operand<S> grad, GradientRows<S> of_queries,
                          AttentionSizes n, float scale, int threads, C count, P place, F slope) {
  over_lane_blocks<X, false>(n.batch, n.heads, n.queries, n.row_block, threads,
    [=](auto& block, int64_t b, int64_t h, int64_t row, int64_t first, int64_t queries) PF_INLINED {
      block.start(q.rows(b, h, first), grad.rows(b, h, first), queries);
      over_tiles<X>(count, place, b, h, row, n.keys, n.key_block, [=, &block](int64_t k0, int64_t keys, bool is_full) PF_INLINED {
        block.take_rows(k.rows(b, h / n.groups, k0), v.rows(b, h / n.groups, k0), keys);
        block.meet(queries, keys, [=](float* products, float* grads, int64_t at, int live) PF_INLINED {
          slope(products, grads, b, h, first + at, live, k0, keys, is_full);
        });
      });
      block.template finish<X::inner>(block.acc0, of_queries, b, h, first, queries, scale);
    });
}

// Here a block of the mask's rows has `row_block` keys, and others have `key_block` queries.
template <class X, class S, class C, class P, class F>
PF_FN void key_gradient(Operand<S> q, Operand<S> k, Operand<S> v, Operand<S> grad, GradientRows<S> of_keys,
                        GradientRows<S> of_values, AttentionSizes n, float scale, int threads, C count, P place, F slope) {
  over_lane_blocks<X, true>(n.batch, n.heads / n.groups, n.keys, n.row_block, threads,
    [=](auto& block, int64_t b, int64_t shared, int64_t row, int64_t first, int64_t keys) PF_INLINED {
      block.start(k.rows(b, shared, first), v.rows(b, shared, first), keys);
      for (int64_t h = shared * n.groups; h < (shared + 1) * n.groups; h++)
        over_tiles<X>(count, place, b, h, row, n.queries, n.key_block, [=, &block](int64_t q0, int64_t queries, bool is_full) PF_INLINED {
          block.take_rows(q.rows(b, h, q0), grad.rows(b, h, q0), queries);
          block.meet(keys, queries, [=](float* products, float* grads, int64_t at, int live) PF_INLINED {
            slope(products, grads, b, h, first + at, live, q0, queries, is_full);
          });
        });
      block.template finish<X::inner>(block.acc0, of_keys, b, shared, first, keys, scale);
      block.template finish<X::outer>(block.acc1, of_values, b, shared, first, keys, 1.0f);
    });
}

}  // namespace pf
