// Counter-based random numbers: element i of a stream depends on the seed and on i alone, so any split of a loop
// over threads and lanes gives the same values. Philox4x32-10 (Salmon et al., 2011); its test vectors are in the tests.

namespace pf {

template <class U> struct philox4 { U x0, x1, x2, x3; };

#if !defined(__clang__) && defined(__AVX512F__)
PF_FN auto mul_low(native<int32_t> a, native<int32_t> b) { return __builtin_ia32_pmuludq512_mask(a, b, native<long long>{}, -1); }
#elif !defined(__clang__) && defined(__AVX2__)
PF_FN auto mul_low(native<int32_t> a, native<int32_t> b) { return __builtin_ia32_pmuludq256(a, b); }
#elif !defined(__clang__) && defined(__SSE2__)
PF_FN auto mul_low(native<int32_t> a, native<int32_t> b) { return __builtin_ia32_pmuludq128(a, b); }
#else
PF_FN auto mul_low(native<int32_t> a, native<int32_t> b) {
  return ((native<uint64_t>)a & 0xffffffffu) * ((native<uint64_t>)b & 0xffffffffu);
}
#endif
// The product of the low halves of 64-bit lanes.
template <class W> PF_FN W mul_halves(W a, uint32_t b) {
  if constexpr (!is_vec<W>) return uint64_t(uint32_t(a)) * b;
  else {
    const auto y = (native<int32_t>)(native<uint64_t>{} + b);
    return by_parts([y](auto x) { return (native<uint64_t>)mul_low((native<int32_t>)x, y); }, a);
  }
}

// Ten rounds; the counter is (c0, c1, c2, c3), the key (k0, k1). The words stay in the low halves of 64-bit lanes,
// where products are made; what is left in the high halves is never read.
template <class W> PF_FN philox4<like<W, uint32_t>> philox_rounds(W c0, W c1, W c2, W c3, uint32_t k0, uint32_t k1) {
  for (int i = 0; i < 10; i++) {
    const W p = mul_halves(c0, 0xD2511F53u), q = mul_halves(c2, 0xCD9E8D57u);
    c0 = (q >> 32) ^ c1 ^ uint64_t(k0);
    c1 = q;
    c2 = (p >> 32) ^ c3 ^ uint64_t(k1);
    c3 = p;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {convert<uint32_t>(c0), convert<uint32_t>(c1), convert<uint32_t>(c2), convert<uint32_t>(c3)};
}
template <class L> PF_FN philox4<like<L, uint32_t>> philox_at(uint64_t seed, L index) {
  using W = like<L, uint64_t>;
  const W i = (W)index;
  return philox_rounds(i, (W)(i >> 32), W{}, W{}, uint32_t(seed), uint32_t(seed >> 32));
}
PF_FN philox4<uint32_t> philox(uint64_t seed, uint64_t offset) { return philox_at(seed, (int64_t)offset); }

// 24 bits: uniform in [0, 1)
template <class U> PF_FN like<U, float> unit(U x) { return convert<float>((like<U, int32_t>)(x >> 8)) * 5.9604644775390625e-8f; }

template <class L> PF_FN like<L, float> rand_f32(int64_t seed, L index) { return unit(philox_at(seed, index).x0); }

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
