// The few machine instructions that GNU vectors cannot spell: fused multiply-add, square root, rounding,
// half floats, masked and streaming access. Each has a plain form for machines without it.

namespace pf {

template <class T> using native = typename vec_n<T, native_bytes / sizeof(T)>::type;

#ifdef __SSE2__
typedef native<float> f32n;
typedef native<double> f64n;
#endif

// clang spells them for vectors of any size, and takes away the machine's own names one by one (22 has neither).
#if defined(__SSE2__) && defined(__clang__) && __has_builtin(__builtin_elementwise_fma) && \
    __has_builtin(__builtin_elementwise_sqrt)
#ifdef __FMA__
#define PF_HAS_FMA 1
PF_FN f32n native_fma(f32n a, f32n b, f32n c) { return __builtin_elementwise_fma(a, b, c); }
PF_FN f64n native_fma(f64n a, f64n b, f64n c) { return __builtin_elementwise_fma(a, b, c); }
#endif
PF_FN f32n native_sqrt(f32n a) { return __builtin_elementwise_sqrt(a); }
PF_FN f64n native_sqrt(f64n a) { return __builtin_elementwise_sqrt(a); }
#elif defined(__AVX512F__)
#define PF_HAS_FMA 1
PF_FN f32n native_fma(f32n a, f32n b, f32n c) { return __builtin_ia32_vfmaddps512_mask(a, b, c, -1, 4); }
PF_FN f64n native_fma(f64n a, f64n b, f64n c) { return __builtin_ia32_vfmaddpd512_mask(a, b, c, -1, 4); }
#ifdef __clang__
PF_FN f32n native_sqrt(f32n a) { return __builtin_ia32_sqrtps512(a, 4); }
PF_FN f64n native_sqrt(f64n a) { return __builtin_ia32_sqrtpd512(a, 4); }
#else
PF_FN f32n native_sqrt(f32n a) { return __builtin_ia32_sqrtps512_mask(a, f32n{}, -1, 4); }
PF_FN f64n native_sqrt(f64n a) { return __builtin_ia32_sqrtpd512_mask(a, f64n{}, -1, 4); }
#endif
#elif defined(__AVX__)
#ifdef __FMA__
#define PF_HAS_FMA 1
PF_FN f32n native_fma(f32n a, f32n b, f32n c) { return __builtin_ia32_vfmaddps256(a, b, c); }
PF_FN f64n native_fma(f64n a, f64n b, f64n c) { return __builtin_ia32_vfmaddpd256(a, b, c); }
#endif
PF_FN f32n native_sqrt(f32n a) { return __builtin_ia32_sqrtps256(a); }
PF_FN f64n native_sqrt(f64n a) { return __builtin_ia32_sqrtpd256(a); }
#elif defined(__SSE2__)
PF_FN f32n native_sqrt(f32n a) { return __builtin_ia32_sqrtps(a); }
PF_FN f64n native_sqrt(f64n a) { return __builtin_ia32_sqrtpd(a); }
#endif

#if defined(__AVX512F__)
#define PF_HAS_ROUND 1
template <int MODE> PF_FN f32n native_round(f32n a) { return __builtin_ia32_rndscaleps_mask(a, MODE, f32n{}, -1, 4); }
template <int MODE> PF_FN f64n native_round(f64n a) { return __builtin_ia32_rndscalepd_mask(a, MODE, f64n{}, -1, 4); }
#elif defined(__AVX__)
#define PF_HAS_ROUND 1
template <int MODE> PF_FN f32n native_round(f32n a) { return __builtin_ia32_roundps256(a, MODE); }
template <int MODE> PF_FN f64n native_round(f64n a) { return __builtin_ia32_roundpd256(a, MODE); }
#endif

PF_FN float fma1(float a, float b, float c) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}
PF_FN double fma1(double a, double b, double c) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
  return __builtin_fma(a, b, c);
#else
  return a * b + c;
#endif
}

// a * b + c, rounded once where the machine has the instruction.
template <class X> PF_FN X fma(X a, X b, X c) {
  if constexpr (!is_float<elem<X>>) return add(mul(a, b), c);
  else if constexpr (!is_vec<X>) return fma1(a, b, c);
  else {
#ifdef PF_HAS_FMA
    auto x = bits_as<parts<X>>(a), y = bits_as<parts<X>>(b), z = bits_as<parts<X>>(c);
    for (int i = 0; i < num_parts<X>; i++) z.part[i] = native_fma(x.part[i], y.part[i], z.part[i]);
    return bits_as<X>(z);
#elif defined(__ARM_FEATURE_FMA)
    X r;
    for (int i = 0; i < lanes; i++) r[i] = fma1(a[i], b[i], c[i]);
    return r;
#else
    return a * b + c;
#endif
  }
}

// Whether fma rounds once.
#if defined(PF_HAS_FMA) || defined(__ARM_FEATURE_FMA)
constexpr bool fused = true;
#else
constexpr bool fused = false;
#endif

PF_FN float sqrt1(float a) { return __builtin_sqrtf(a); }
PF_FN double sqrt1(double a) { return __builtin_sqrt(a); }
template <class X> PF_FN X sqrt(X a) {
#ifdef __SSE2__
  if constexpr (is_vec<X>) return by_parts([](auto t) { return native_sqrt(t); }, a);
  else
#endif
    return each([](elem<X> t) { return sqrt1(t); }, a);
}
template <class X> PF_FN X rsqrt(X a) { return all<X>(1) / sqrt(a); }

// Rounding to a whole number; the modes are the machine's: 0 nearest even, 1 down, 2 up, 3 towards zero.
template <int MODE> PF_FN float round1(float a) {
  return MODE == 0 ? __builtin_rintf(a) : MODE == 1 ? __builtin_floorf(a) : MODE == 2 ? __builtin_ceilf(a) : __builtin_truncf(a);
}
template <int MODE> PF_FN double round1(double a) {
  return MODE == 0 ? __builtin_rint(a) : MODE == 1 ? __builtin_floor(a) : MODE == 2 ? __builtin_ceil(a) : __builtin_trunc(a);
}
template <int MODE, class X> PF_FN X round_mode(X a) {
  if constexpr (!is_float<elem<X>>) return a;
  else {
#ifdef PF_HAS_ROUND
    if constexpr (is_vec<X>) return by_parts([](auto t) { return native_round<MODE | 8>(t); }, a);
    else
#endif
      return each([](elem<X> t) { return round1<MODE>(t); }, a);
  }
}
template <class X> PF_FN X round(X a) { return round_mode<0>(a); }
template <class X> PF_FN X floor(X a) { return round_mode<1>(a); }
template <class X> PF_FN X ceil(X a) { return round_mode<2>(a); }
template <class X> PF_FN X trunc(X a) { return round_mode<3>(a); }

}  // namespace pf
