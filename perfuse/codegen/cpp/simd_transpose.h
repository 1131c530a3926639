// Transposing a tile: square blocks held in registers, the edges element by element.

namespace pf {

// A block of N rows is transposed in log2(N) steps: step d exchanges, between rows i and i + d, the lanes whose number
// has bit d for those that have not.
template <int D, int N, class R> PF_FN void exchange(R& a, R& b) {
#if defined(__clang__) || __GNUC__ >= 12
#define PF_PICK(L) int(((L) & D) == 0 ? (L) : (L) - D + N), int(((L + 1) & D) == 0 ? (L + 1) : (L + 1) - D + N)
#define PF_TAKE(L) int(((L) & D) == 0 ? (L) + D : (L) + N), int(((L + 1) & D) == 0 ? (L + 1) + D : (L + 1) + N)
#define PF_2(M) M(0)
#define PF_4(M) PF_2(M), M(2)
#define PF_8(M) PF_4(M), M(4), M(6)
#define PF_16(M) PF_8(M), M(8), M(10), M(12), M(14)
#define PF_EXCHANGE(ALL) \
  const R x = __builtin_shufflevector(a, b, ALL(PF_PICK)), y = __builtin_shufflevector(a, b, ALL(PF_TAKE)); \
  a = x, b = y
  if constexpr (N == 16) { PF_EXCHANGE(PF_16); }
  else if constexpr (N == 8) { PF_EXCHANGE(PF_8); }
  else if constexpr (N == 4) { PF_EXCHANGE(PF_4); }
  else { PF_EXCHANGE(PF_2); }
#undef PF_PICK
#undef PF_TAKE
#undef PF_2
#undef PF_4
#undef PF_8
#undef PF_16
#undef PF_EXCHANGE
#else
  typedef typename vec_n<typename ints<sizeof(a[0])>::s, N>::type I;
  I pick{}, take{};
  for (int i = 0; i < N; i++) {
    pick[i] = (i & D) == 0 ? i : i - D + N;
    take[i] = (i & D) == 0 ? i + D : i + N;
  }
  const R x = __builtin_shuffle(a, b, pick), y = __builtin_shuffle(a, b, take);
  a = x, b = y;
#endif
}
template <int D, int N, class R> PF_FN void exchange_rows(R* row) {
  if constexpr (D < N)
    for (int i = 0; i < N; i++)
      if ((i & D) == 0) exchange<D, N>(row[i], row[i + D]);
}
template <int N, class R> PF_FN void transpose_rows(R* row) {
  exchange_rows<8, N>(row);
  exchange_rows<4, N>(row);
  exchange_rows<2, N>(row);
  exchange_rows<1, N>(row);
}

// The rows of a block: one for each lane of a vector of the machine. g++ exchanges wider ones lane by lane in memory.
template <class T> constexpr int block_rows = is_wide<vec<T>> ? native_bytes / int(sizeof(T)) : lanes;

template <class T> PF_FN void transpose_block(const T* src, int64_t ld_src, T* dst, int64_t ld_dst) {
  constexpr int n = block_rows<T>;
  typename vec_n<T, n>::type row[n];
#pragma GCC unroll 16
  for (int i = 0; i < n; i++) __builtin_memcpy(&row[i], src + i * ld_src, sizeof row[i]);
  transpose_rows<n>(row);
#pragma GCC unroll 16
  for (int i = 0; i < n; i++) __builtin_memcpy(dst + i * ld_dst, &row[i], sizeof row[i]);
}

template <class T>
PF_FN void transpose_edge(const T* src, int64_t ld_src, T* dst, int64_t ld_dst, int r0, int r1, int c0, int c1) {
  for (int c = c0; c < c1; c++)
    for (int r = r0; r < r1; r++) dst[c * ld_dst + r] = src[r * ld_src + c];
}

// dst[c][r] = src[r][c]
template <class S>
static __attribute__((noinline, unused)) void transpose_tile(
    const S* src, int64_t ld_src, S* dst, int64_t ld_dst, int rows, int cols) {
  typedef typename ints<sizeof(S)>::u T;
  const T* s = (const T*)src;
  T* d = (T*)dst;
  constexpr int block = block_rows<T>;
  const int whole_rows = rows - rows % block, whole_cols = cols - cols % block;
  for (int c = 0; c < whole_cols; c += block)
    for (int r = 0; r < whole_rows; r += block) transpose_block(s + r * ld_src + c, ld_src, d + c * ld_dst + r, ld_dst);
  transpose_edge(s, ld_src, d, ld_dst, 0, whole_rows, whole_cols, cols);
  transpose_edge(s, ld_src, d, ld_dst, whole_rows, rows, 0, cols);
}

}  // namespace pf
