// Counter-based random numbers: element i of a stream depends on the seed and on i alone, so any split of a loop
// over threads and lanes gives the same values. Philox4x32-10 (Salmon et al., 2011); its test vectors are in the tests.

namespace pf {

template <class U> struct philox4 { U x0, x1, x2, x3; };

template <class U> PF_FN U mul_high(U a, uint32_t b) {
  return convert<uint32_t>((like<U, uint64_t>)((convert<uint64_t>(a) * uint64_t(b)) >> 32));
}
// Ten rounds; the counter is (c0, c1, c2, c3), the key (k0, k1).
template <class U> PF_FN philox4<U> philox_rounds(U c0, U c1, U c2, U c3, uint32_t k0, uint32_t k1) {
  for (int i = 0; i < 10; i++) {
    const U h0 = mul_high(c0, 0xD2511F53u), l0 = c0 * 0xD2511F53u;
    const U h1 = mul_high(c2, 0xCD9E8D57u), l1 = c2 * 0xCD9E8D57u;
    c0 = h1 ^ c1 ^ k0;
    c1 = l1;
    c2 = h0 ^ c3 ^ k1;
    c3 = l0;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {c0, c1, c2, c3};
}
template <class L> PF_FN philox4<like<L, uint32_t>> philox_at(uint64_t seed, L index) {
  using U = like<L, uint32_t>;
  const like<L, uint64_t> i = (like<L, uint64_t>)index;
  return philox_rounds(convert<uint32_t>(i), convert<uint32_t>(i >> 32), U{}, U{}, uint32_t(seed), uint32_t(seed >> 32));
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
