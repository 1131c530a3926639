// Counter-based random numbers: element i of a stream depends on the seed and on i alone, so any split of a loop
// over threads and lanes gives the same values. Philox4x32-10 (Salmon et al., 2011); its test vectors are in the tests.

namespace pf {

template <class U> struct philox4 { U x0, x1, x2, x3; };

// The product of the low halves of 64-bit lanes: one instruction, which g++ does not find by itself.
template <class W> PF_FN W mul_low(W a, W b) { return (a & 0xffffffffu) * (b & 0xffffffffu); }
#ifndef __clang__
#define PF_MUL_LOW(BYTES, CALL, ...)                                                                         \
  PF_FN vec_n<uint64_t, BYTES / 8>::type mul_low(vec_n<uint64_t, BYTES / 8>::type a, vec_n<uint64_t, BYTES / 8>::type b) { \
    typedef vec_n<int32_t, BYTES / 4>::type I;                                                               \
    return (vec_n<uint64_t, BYTES / 8>::type)CALL((I)a, (I)b __VA_ARGS__);                                   \
  }
#if defined(__AVX512F__)
PF_MUL_LOW(64, __builtin_ia32_pmuludq512_mask, , vec_n<long long, 8>::type{}, -1)
#endif
#if defined(__AVX2__)
PF_MUL_LOW(32, __builtin_ia32_pmuludq256)
#endif
#if defined(__SSE2__)
PF_MUL_LOW(16, __builtin_ia32_pmuludq128)
#endif
#undef PF_MUL_LOW
#endif
template <class W> PF_FN W mul_halves(W a, uint32_t b) {
  if constexpr (is_same<W, uint64_t>) return uint64_t(uint32_t(a)) * b;
  else if constexpr (sizeof(W) > native_bytes)
    return by_parts([b](auto x) { return mul_low(x, decltype(x){} + b); }, a);
  else return mul_low(a, W{} + b);
}

// Ten rounds; the counter is (c0, c1, c2, c3), the key (k0, k1). The words stay in the low halves of 64-bit lanes,
// where products are made; what is left in the high halves is never read.
template <class W> PF_FN philox4<W> philox_rounds(W c0, W c1, W c2, W c3, uint32_t k0, uint32_t k1) {
  for (int i = 0; i < 10; i++) {
    const W p = mul_halves(c0, 0xD2511F53u), q = mul_halves(c2, 0xCD9E8D57u);
    c0 = (q >> 32) ^ c1 ^ uint64_t(k0);
    c1 = q;
    c2 = (p >> 32) ^ c3 ^ uint64_t(k1);
    c3 = p;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {c0, c1, c2, c3};
}
template <class L> PF_FN philox4<like<L, uint32_t>> philox_at(uint64_t seed, L index) {
  using W = like<L, uint64_t>;
  const W i = (W)index;
  const auto p = philox_rounds(i, (W)(i >> 32), W{}, W{}, uint32_t(seed), uint32_t(seed >> 32));
  return {convert<uint32_t>(p.x0), convert<uint32_t>(p.x1), convert<uint32_t>(p.x2), convert<uint32_t>(p.x3)};
}
PF_FN philox4<uint32_t> philox(uint64_t seed, uint64_t offset) { return philox_at(seed, (int64_t)offset); }

// Element i of a uniform stream is word i % 4 of counter i / 4.
template <class L> PF_FN like<L, uint32_t> word_at(int64_t seed, L index) {
  const auto p = philox_at(seed, (L)(index >> 2));
  const auto is_odd = ne((L)(index & 1), L{}), is_late = ne((L)(index & 2), L{});
  return where(is_late, where(is_odd, p.x3, p.x2), where(is_odd, p.x1, p.x0));
}
// The words of as many elements as there are lanes, from a quarter as many counters on.
PF_FN vec<uint32_t> words_from(int64_t seed, int64_t counter) {
  typedef vec_n<uint64_t, lanes / 4>::type W;
#if PF_LANES == 16
  const W i = W{0, 1, 2, 3} + uint64_t(counter);
#else
  const W i = W{0, 1} + uint64_t(counter);
#endif
  const auto p = philox_rounds(i, (W)(i >> 32), W{}, W{}, uint32_t(seed), uint32_t(uint64_t(seed) >> 32));
  const W a = (p.x0 & 0xffffffffu) | (p.x1 << 32), b = (p.x2 & 0xffffffffu) | (p.x3 << 32);
#if !defined(__clang__) && __GNUC__ < 12
  struct { W part[2]; } pair = {{a, b}};
  const auto joined = bits_as<vec_n<uint64_t, lanes / 2>::type>(pair);
  vec_n<uint64_t, lanes / 2>::type order;
  for (int lane = 0; lane < lanes / 2; lane++) order[lane] = lane / 2 + (lane & 1) * (lanes / 4);
  return (vec<uint32_t>)__builtin_shuffle(joined, order);
#elif PF_LANES == 16
  return (vec<uint32_t>)__builtin_shufflevector(a, b, 0, 4, 1, 5, 2, 6, 3, 7);
#else
  return (vec<uint32_t>)__builtin_shufflevector(a, b, 0, 2, 1, 3);
#endif
}
// The words of neighbours, of which `first` is the first.
PF_FN vec<uint32_t> row_of_words(int64_t seed, int64_t first) {
  const int64_t counter = first >> 2;
  if ((first & 3) == 0) return words_from(seed, counter);
  const vec<uint32_t> both[2] = {words_from(seed, counter), words_from(seed, counter + lanes / 4)};
  vec<uint32_t> r;
  __builtin_memcpy(&r, (const uint32_t*)both + (first & 3), sizeof r);
  return r;
}

// 24 bits: uniform in [0, 1)
template <class U> PF_FN like<U, float> unit(U x) { return convert<float>((like<U, int32_t>)(x >> 8)) * 5.9604644775390625e-8f; }

template <class L> PF_FN like<L, float> rand_f32(int64_t seed, L index) { return unit(word_at(seed, index)); }
PF_FN vec<float> rand_f32_row(int64_t seed, int64_t first) { return unit(row_of_words(seed, first)); }

// Box-Muller: the radius from a uniform in (0, 1], the angle from another.
template <class L> PF_FN like<L, float> randn_f32(int64_t seed, L index) {
  const auto p = philox_at(seed, index);
  const auto u = unit(p.x0) + 5.9604644775390625e-8f;
  return sqrt(log(u) * -2.0f) * cos(unit(p.x1) * 6.28318531f);
}

// Uniform in [lo, hi): 64 random bits modulo the width.
template <class L> PF_FN L randint64(int64_t seed, L index, int64_t lo, int64_t hi) {
  using W = like<L, uint64_t>;
  const auto p = philox_at(seed, index);
  const W bits = (convert<uint64_t>(p.x1) << 32) | convert<uint64_t>(p.x0);
  const uint64_t width = hi > lo ? uint64_t(hi) - uint64_t(lo) : 1;
  return (L)(each([width](uint64_t b) { return b % width; }, bits) + uint64_t(lo));
}

}  // namespace pf
