// Matmuls of groups of consecutive rows, each group with a matrix of its own: the experts of a mixture. Included after
// gemm.h. How many rows a group has is read from memory, so that the way of its matmul is chosen while it runs.

namespace pf {

// `ends` has the row behind each of `count` groups of `rows` rows.
template <class I> struct Groups {
  const I* ends;
  int64_t count, rows;

  int64_t place(int64_t row) const { return row < 0 ? 0 : least(row, rows); }
  Range at(int64_t group) const { return {group ? place(ends[group - 1]) : 0, place(ends[group])}; }
  // Whether no group ends before it begins.
  bool are_rising() const {
    for (int64_t g = 0; g < count; g++)
      if (at(g).end < at(g).begin) return false;
    return true;
  }
};

// A finished block of sums into a matrix whose rows are `step` apart.
PF_FN void store_block(const float* block, int64_t ld, float* to, int64_t step, int64_t rows, int64_t columns) {
  for (int64_t i = 0; i < rows; i++) {
    int64_t j = 0;
    for (; j + lanes <= columns; j += lanes) storev<float>(to + i * step + j, loadv<float>(block + i * ld + j));
    for (; j < columns; j++) to[i * step + j] = block[i * ld + j];
  }
}

// The matrices of groups: element (i, j) of matrix g is at p[g * step + i * down + j * across].
template <class S> struct Matrices {
  const S* p;
  int64_t step, down, across;
  Matrix<S> at(int64_t group) const { return {p + group * step, down, across}; }
};

// out = the rows of each group times its matrix; rows of no group are 0. X blocks large groups. A matrix is read in place
// for groups of up to FEW_DOTS rows where its columns are contiguous, and FEW where its rows are; R rows, and C columns of dot
// products, are summed at once then. One function serves all matmuls of a unit: it takes long to compile.
template <class X, int FEW_DOTS, int FEW, int R, int C, int COLUMNS, class S, class I>
PF_CALLED void grouped_matmul(Matrix<S> a, Matrices<S> b, Groups<I> groups, int64_t columns, int64_t depth, float* out,
                              int threads) {
  const bool rises = groups.are_rising();
  if (!rises) threads = 1;  // groups overlap: the later one counts
  if (!rises || groups.count == 0 || groups.at(groups.count - 1).end < groups.rows)
    for (int64_t n = 0; n < groups.rows * columns; n++) out[n] = 0;
  parallel(threads, [=](int thread, int count) PF_INLINED {
    for (int64_t g = 0; g < groups.count; g++) {
      const Range own = groups.at(g);
      const int64_t rows = own.end - own.begin;
      if (rows <= 0) continue;
      const Matrix<S> left = {a.p + own.begin * a.down, a.down, a.across}, right = b.at(g);
      float* const to = out + own.begin * columns;
      const auto finish = [=](const float* block, int64_t ld, int64_t top, int64_t first, int64_t tall, int64_t wide)
                              PF_INLINED { store_block(block, ld, to + top * columns + first, columns, tall, wide); };
      if (rows <= FEW_DOTS && right.down == 1) {
        dots_of_columns<R, C, COLUMNS>(left, right, rows, depth, share_of(columns, C, thread, count), finish);
        continue;
      }
      if (rows <= FEW && right.across == 1) {
        const Range own_columns = share_of(columns, X::tile_columns, thread, count);
        rows_of_columns<R, X::vectors, 128, COLUMNS>(left, right, rows, depth, own_columns, finish);
        continue;
      }
      const int down = threads_down(count, rows, columns, X::tile_rows, X::tile_columns);
      const Range own_rows = share_of(rows, X::tile_rows, thread % down, down);
      multiply_packed<X>(left, right, depth, own_rows, share_of(columns, X::tile_columns, thread / down, count / down),
                         finish);
    }
  });
}

#if PF_LANES == 16 && defined(__AVX512F__) && defined(__x86_64__)
// The same of bfloat16, where the columns of the matrices are contiguous: some rows of a group at a time, so that the
// first-level cache holds DEPTH of them.
template <bool NATIVE, int DEPTH, int COLUMNS, class I>
PF_FN void grouped_pairs_of(Matrix<bf16> a, Matrices<bf16> b, Groups<I> groups, Range own, int64_t columns, int64_t depth,
                            bf16* out) {
  constexpr int64_t most = 32;
  for (int64_t g = 0; g < groups.count; g++) {
    const Range rows = groups.at(g);
    for (int64_t i = rows.begin; i < rows.end; i += most) {
      bf16* const to = out + i * columns;
      pairs_of_columns<NATIVE, DEPTH, COLUMNS>(
          Matrix<bf16>{a.p + i * a.down, a.down, a.across}, b.at(g), least(rows.end - i, most), depth, own,
          [=](const float* block, int64_t ld, int64_t top, int64_t first, int64_t tall, int64_t wide) PF_INLINED {
            for (int64_t n = 0; n < tall; n++) {
              bf16* const row = to + (top + n) * columns + first;
              int64_t j = 0;
              for (; j + lanes <= wide; j += lanes) put<NATIVE>(row + j, loadv<float>(block + n * ld + j));
              if (j < wide) storev_n<bf16>(row + j, loadv_n<float>(block + n * ld + j, (int)(wide - j)), (int)(wide - j));
            }
          });
    }
  }
}

template <int DEPTH, int COLUMNS, class I>
PF_CALLED void grouped_pairs(Matrix<bf16> a, Matrices<bf16> b, Groups<I> groups, int64_t columns, int64_t depth, bf16* out,
                             int threads) {
  const bool rises = groups.are_rising();
  if (!rises) threads = 1;  // groups overlap: the later one counts
  if (!rises || groups.count == 0 || groups.at(groups.count - 1).end < groups.rows)
    for (int64_t n = 0; n < groups.rows * columns; n++) out[n] = bf16{0};
  parallel(threads, [=](int thread, int count) PF_INLINED {
    const Range own = share_of(columns, 4, thread, count);
    if (own.begin >= own.end) return;
    if (has_pairs()) grouped_pairs_of<true, DEPTH, COLUMNS>(a, b, groups, own, columns, depth, out);
    else grouped_pairs_of<false, DEPTH, COLUMNS>(a, b, groups, own, columns, depth, out);
  });
}
#endif

// out[g] = the rows of group g of `a`, transposed, times those of `b`: gradients of matrices.
template <class X, class S, class I>
PF_CALLED void grouped_outer(Matrix<S> a, Matrix<S> b, Groups<I> groups, int64_t rows, int64_t columns, float* out,
                             int threads) {
  parallel(threads, [=](int thread, int count) PF_INLINED {
    const int down = threads_down(count, rows, columns, X::tile_rows, X::tile_columns);
    const Range own_rows = share_of(rows, X::tile_rows, thread % down, down);
    const Range own_columns = share_of(columns, X::tile_columns, thread / down, count / down);
    for (int64_t g = 0; g < groups.count; g++) {
      const Range own = groups.at(g);
      const int64_t depth = own.end > own.begin ? own.end - own.begin : 0;
      const Matrix<S> left = {a.p + own.begin * a.down, a.across, a.down}, right = {b.p + own.begin * b.down, b.down, b.across};
      float* const to = out + g * rows * columns;
      const auto finish = [=](const float* block, int64_t ld, int64_t top, int64_t first, int64_t tall, int64_t wide)
                              PF_INLINED { store_block(block, ld, to + top * columns + first, columns, tall, wide); };
      if (depth > 0) {
        multiply_packed<X>(left, right, depth, own_rows, own_columns, finish);
        continue;
      }
      for (int64_t i = own_rows.begin; i < own_rows.end; i++)
        for (int64_t j = own_columns.begin; j < own_columns.end; j++) to[i * columns + j] = 0;
    }
  });
}

}  // namespace pf
