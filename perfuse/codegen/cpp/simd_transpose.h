// Transposing a tile: square blocks held in registers, the edges element by element.

namespace pf {

// A block of `lanes` rows is transposed in log2(lanes) steps: step d exchanges, between rows i and i + d, the lanes
// whose number has bit d for those that have not.
template <int D, class R> PF_FN void exchange(R& a, R& b) {
#if defined(__clang__) || __GNUC__ >= 12
#define PF_PICK(L) int(((L) & D) == 0 ? (L) : (L) - D + lanes), int(((L + 1) & D) == 0 ? (L + 1) : (L + 1) - D + lanes)
#define PF_TAKE(L) int(((L) & D) == 0 ? (L) + D : (L) + lanes), int(((L + 1) & D) == 0 ? (L + 1) + D : (L + 1) + lanes)
#if PF_LANES == 16
#define PF_ALL(M) M(0), M(2), M(4), M(6), M(8), M(10), M(12), M(14)
#else
#define PF_ALL(M) M(0), M(2), M(4), M(6)
#endif
  const R x = __builtin_shufflevector(a, b, PF_ALL(PF_PICK)), y = __builtin_shufflevector(a, b, PF_ALL(PF_TAKE));
#undef PF_PICK
#undef PF_TAKE
#undef PF_ALL
#else
  typedef typename ints<sizeof(elem<R>)>::s I;
  const vec<I> lane = iota<I>(0);
  const vec<I> bit = (lane & I(D)) != 0;
  const R x = __builtin_shuffle(a, b, bit ? lane - I(D) + I(lanes) : lane);
  const R y = __builtin_shuffle(a, b, bit ? lane + I(lanes) : lane + I(D));
#endif
  a = x;
  b = y;
}
template <int D, class R> PF_FN void exchange_rows(R* row) {
  for (int i = 0; i < lanes; i++)
    if ((i & D) == 0) exchange<D>(row[i], row[i + D]);
}

template <class T> PF_FN void transpose_block(const T* src, int64_t ld_src, T* dst, int64_t ld_dst) {
  vec<T> row[lanes];
#pragma GCC unroll 16
  for (int i = 0; i < lanes; i++) __builtin_memcpy(&row[i], src + i * ld_src, sizeof row[i]);
  if constexpr (lanes == 16) exchange_rows<lanes / 2>(row);
  exchange_rows<4>(row);
  exchange_rows<2>(row);
  exchange_rows<1>(row);
#pragma GCC unroll 16
  for (int i = 0; i < lanes; i++) __builtin_memcpy(dst + i * ld_dst, &row[i], sizeof row[i]);
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
  // A vector wider than the machine's would be exchanged lane by lane in memory: those go element by element.
  constexpr int block = is_wide<vec<T>> ? 1 << 30 : lanes;
  const int whole_rows = rows - rows % block, whole_cols = cols - cols % block;
  for (int c = 0; c < whole_cols; c += lanes)
    for (int r = 0; r < whole_rows; r += lanes) transpose_block(s + r * ld_src + c, ld_src, d + c * ld_dst + r, ld_dst);
  transpose_edge(s, ld_src, d, ld_dst, 0, whole_rows, whole_cols, cols);
  transpose_edge(s, ld_src, d, ld_dst, whole_rows, rows, 0, cols);
}

}  // namespace pf
