// Elementary functions, the same code for a vector and for a scalar. Those of double are in simd_double.h.
//
// Largest error in ulp of the result, special values and subnormal results included (tests/unit/test_simd.py):
//   exp 1.1     exp2 1.1    expm1 1.8   log 1.0     log2 1.9    log10 2.5   log1p 1.1    tanh 2.6    sigmoid 2.6
//   sin 1.7     cos 1.7     tan 3.4     asin 2.5    acos 1.5    atan 1.6    atan2 2.0    sinh 2.6    cosh 2.6
//   asinh 2.0   acosh 2.2   atanh 2.2   erf 1.6     erfc 5.0    erfinv 3.6  pow 0.6      hypot 0.6   rsqrt 1.6
// sqrt and the division are correctly rounded; lgamma is libm's; digamma is computed in double.
// sigmoid gives 0 where exp(-x) overflows (x < -88.7), as eager's does.

namespace pf {

// ---- exp and its family ------------------------------------------------------------------------
// x = n ln2 + r with |r| <= ln2/2. n comes from adding 1.5 * 2^23, which leaves the nearest whole number in the
// low bits; ln2 is split in two so that n times the first part is exact.

template <class F> struct exp_parts { F r, k; like<F, int32_t> n; };  // k is n

template <class F> PF_FN exp_parts<F> exp_reduce(F x) {
  const F magic = all<F>(12582912.0f), t = fma(x, all<F>(1.44269504f), magic), k = t - magic;
  const F r = fma(k, all<F>(2.12194440e-4f), fma(k, all<F>(-0.693359375f), x));
  using I = like<F, int32_t>;
  return {r, k, bits_as<I>(t) - bits_as<I>(magic)};
}
// (exp(r) - 1 - r) / r^2
template <class F> PF_FN F exp_tail(F r) {
  return poly(r, 0.5f, 0.16666538f, 0.041666266f, 0.0083672469f, 0.00139475951f);
}
template <class F> PF_FN F expm1_small(F r) { return fma(r * r, exp_tail(r), r); }
template <class F> PF_FN F exp_small(F r) { return fma(r * r, exp_tail(r), r) + 1.0f; }
// 2^n for -126 <= n <= 127
template <class I> PF_FN like<I, float> power_of_two(I n) { return bits_as<like<I, float>>((I)((n + 127) << 23)); }
// y 2^n for any n (k rounded down) that a clamped exp can ask for: two steps, so that the result may be subnormal.
template <class F, class I> PF_FN F scale(F y, F k, I n) {
#ifdef __AVX512F__
  if constexpr (is_vec<F>) return __builtin_ia32_scalefps512_mask(y, k, F{}, -1, 4);
#endif
  const I half = n >> 1;
  return y * power_of_two(half) * power_of_two((I)(n - half));
}

// The argument x of a power whose result is zero below LEAST. On Intel's processors a vector of results that underflow, also
// to zero, takes 65 ns (Sapphire Rapids) instead of one: with AVX-512 `scale_above` leaves such lanes out; elsewhere one factor
// of `scale` is zero at FAR.
template <class F> PF_FN F not_below([[maybe_unused]] float far, F x) {
#ifdef __AVX512F__
  if constexpr (is_vec<F>) return x;
#endif
  return high(all<F>(far), x);  // the constant first: NaN goes through
}
template <class F, class I> PF_FN F scale_above([[maybe_unused]] float least, [[maybe_unused]] F x, F y, F k, I n) {
#ifdef __AVX512F__
  if constexpr (is_vec<F>) {
    const auto lanes_above = __builtin_ia32_cmpps512_mask(x, all<F>(least), 22, -1, 4);  // not <=, so NaN is
    return __builtin_ia32_scalefps512_mask(y, k, F{}, lanes_above, 4);
  }
#endif
  return scale(y, k, n);
}

// FACTOR e^x as y 2^n; whole is n, or more by less than 1.
template <class F> struct exp_scaled { F y, whole; like<F, int32_t> n; };

template <int FACTOR, class F> PF_FN exp_scaled<F> exp_series(F x) {
  constexpr float f = FACTOR;
  const auto p = exp_reduce(x);
  if constexpr (!fused) return {exp_small(p.r) * f, p.k, p.n};  // each rounding of the other would count
  else return {poly(p.r, f, f, f * 0.5f, f * 0.16666538f, f * 0.041666266f, f * 0.0083672469f, f * 0.00139475951f), p.k, p.n};
}
#if defined(__AVX512F__) && PF_LANES == 16
// Here a register holds the powers of two by sixteenths: with |r| <= ln2/32 two coefficients do for four.
constexpr float sixteenths[16] = {
  0x1p+0f, 0x1.0b5586p+0f, 0x1.172b84p+0f, 0x1.2387a6p+0f, 0x1.306fep+0f, 0x1.3dea64p+0f, 0x1.4bfdaep+0f, 0x1.5ab07ep+0f,
  0x1.6a09e6p+0f, 0x1.7a1148p+0f, 0x1.8ace54p+0f, 0x1.9c4918p+0f, 0x1.ae89fap+0f, 0x1.c199bep+0f, 0x1.d5818ep+0f, 0x1.ea4afap+0f};
template <class I> PF_FN like<I, float> power_of_sixteenths(I n) {
  if constexpr (!is_vec<I>) return sixteenths[n & 15];
  else {
    vec<float> table;
    __builtin_memcpy(&table, sixteenths, sizeof table);
#ifdef __clang__
    return __builtin_ia32_permvarsf512(table, n);
#else
    return __builtin_ia32_permvarsf512_mask(table, n, table, -1);
#endif
  }
}
// The magic number's ulp is a sixteenth, and the last four bits of the sum say which.
template <class F> PF_FN exp_scaled<F> exp_split(F x) {
  using I = like<F, int32_t>;
  const F magic = all<F>(786432.0f), t = fma(x, all<F>(1.44269504f), magic), k = t - magic;
  const F r = fma(k, all<F>(2.12194440e-4f), fma(k, all<F>(-0.693359375f), x));
  const I n = bits_as<I>(t);
  const F y = power_of_sixteenths(n);
  return {fma(y * r, poly(r, 1.0f, 0.500016265f, 0.166666672f), y), k, (n - bits_as<I>(magic)) >> 4};
}
#else
template <class F> PF_FN exp_scaled<F> exp_split(F x) { return exp_series<1>(x); }
#endif

// e^x for x < 90
template <class F> PF_FN F exp_of_low(F x) {
  x = not_below(-176.0f, x);
  const auto p = exp_split(x);
  return scale_above(-104.0f, x, p.y, p.whole, p.n);
}
template <class X> PF_MATH X exp(X x) {
  if constexpr (!in_float<X>) return exp_double(x);
  else return exp_of_low(low(all<X>(89.0f), x));  // the constant first: NaN goes through
}
// exp of what lies within [-87, 88] (elsewhere: anything), without the care for overflow and denormals.
template <class X> PF_MATH X exp_mid(X x) {
  if constexpr (!in_float<X>) return exp_double(x);
  else {
    using I = like<X, int32_t>;
    const auto p = exp_split(x);
    return bits_as<X>((I)(bits_as<I>(p.y) + (p.n << 23)));
  }
}
// Two to a power within [-126, 127] (elsewhere: anything). The part that is whole, or whole sixteenths, is left in the
// low bits by a number whose ulp is that.
template <class X> PF_MATH X exp2_mid(X x) {
  if constexpr (!in_float<X>) return exp2_double(x);
  else {
    using I = like<X, int32_t>;
#if defined(__AVX512F__) && PF_LANES == 16
    const X magic = all<X>(786432.0f), t = x + magic, r = x - (t - magic);
    const I n = bits_as<I>(t), whole = n >> 4;
    const X power = power_of_sixteenths(n), y = fma(power * r, poly(r, 0.693147182f, 0.240234286f, 0.0555041097f), power);
#else
    const X magic = all<X>(12582912.0f), t = x + magic, r = x - (t - magic);
    const I whole = bits_as<I>(t);
    const X y = poly(r, 1.0f, 0.693147182f, 0.240226507f, 0.0555036813f, 0.00961803645f, 0.00133878202f, 0.000154686393f);
#endif
    return bits_as<X>((I)(bits_as<I>(y) + (whole << 23)));
  }
}
template <class X> PF_MATH X exp2(X x) {
  if constexpr (!in_float<X>) return exp2_double(x);
  else {
    x = low(all<X>(129.0f), not_below(-254.0f, x));
    using I = like<X, int32_t>;
    const X magic = all<X>(12582912.0f), t = x + magic, k = t - magic;
    const X r = (x - k) * 0.693147181f;
    return scale_above(-151.0f, x, exp_small(r), k, (I)(bits_as<I>(t) - bits_as<I>(magic)));
  }
}
template <class X> PF_MATH X expm1(X x) {
  if constexpr (!in_float<X>) return expm1_double(x);
  else {
    const auto p = exp_reduce(low(all<X>(89.0f), high(all<X>(-18.0f), x)));
    const X s = power_of_two(p.n - 1);  // half of 2^n, which may overflow
    const X h = fma(s, expm1_small(p.r), s - 0.5f);
    return where(eq(x, X{}), x, h + h);
  }
}
// With e = exp(2|x|) - 1: e / (e + 2), and where that nears 1, 1 - 2 / (e + 2): its slope is made of 1 - tanh^2.
template <class X> PF_MATH X tanh(X x) {
  if constexpr (!in_float<X>) return tanh_double(x);
  else {
    const X a = abs(x);
    const auto p = exp_reduce(low(all<X>(20.0f), a + a));
    const X s = power_of_two(p.n), e = fma(s, expm1_small(p.r), s - 1.0f);
    const auto near_one = gt(a, all<X>(0.6f));
    const X q = where(near_one, all<X>(2.0f), e) / (e + 2.0f);
    return copysign(where(near_one, 1.0f - q, q), x);
  }
}
// a sigmoid(x) with one division and no product.
template <class X> PF_MATH X times_sigmoid(X a, X x) {
  if constexpr (!in_float<X>) return a / (exp(-x) + 1.0);
  else {
    // Twice e^-x times half of 2^n, which alone would overflow. The series: a table's rounding would show.
    const auto p = exp_series<2>(low(all<X>(89.0f), high(all<X>(-86.0f), -x)));
    return a / fma(p.y, power_of_two(p.n - 1), all<X>(1.0f));
  }
}
template <class X> PF_MATH X sigmoid(X x) { return times_sigmoid(all<X>(1), x); }

// ---- log and its family ------------------------------------------------------------------------

// x = m 2^n with sqrt(1/2) <= m < sqrt(2); f = m - 1, and tail such that log(m) = f + tail.
template <class F> struct log_parts { F f, tail, n; };

template <class F> PF_FN log_parts<F> log_reduce(F x) {
  using I = like<F, int32_t>;
  const auto tiny = lt(x, all<F>(1.17549435e-38f));
  const I b = bits_as<I>(where(tiny, x * 33554432.0f, x));
  const I n = (b - 0x3f3504f3) >> 23;
  const F f = bits_as<F>((I)(b - (n << 23))) - 1.0f, f2 = f * f;
  const F p = poly(f, 0.33333311f, -0.24999985f, 0.20002273f, -0.16669357f, 0.14217716f, -0.12381806f, 0.11877915f, -0.11807859f, 0.069258653f);
  return {f, fma(f2, all<F>(-0.5f), f2 * f * p), convert<float>(n) - where(tiny, all<F>(25.0f), F{})};
}
// What log has outside of (0, inf).
template <class F> PF_FN F log_limits(F x, F y) {
  y = where(lt(x, all<F>(__builtin_inff())), y, x);
  y = where(lt(x, F{}), all<F>(__builtin_nanf("")), y);
  return where(eq(x, F{}), all<F>(-__builtin_inff()), y);
}
template <class F> PF_FN F log_join(log_parts<F> p) {
  return fma(p.n, all<F>(0.693359375f), p.f + fma(p.n, all<F>(-2.12194440e-4f), p.tail));
}
template <class X> PF_MATH X log(X x) {
  if constexpr (!in_float<X>) return log_double(x, X{});
  else return log_limits(x, log_join(log_reduce(x)));
}
template <class X> PF_MATH X log1p(X x) {
  if constexpr (!in_float<X>) return log1p_double(x);
  else {
    const X u = x + 1.0f;
    auto p = log_reduce(u);
    p.tail = p.tail + (x - (u - 1.0f)) / u;  // what was lost in 1 + x
    return where(eq(x, X{}), x, log_limits(u, log_join(p)));
  }
}
template <class X> PF_MATH X log2(X x) {
  if constexpr (!in_float<X>) return log_to_base_double(x, 1.0, 0.0, 1.4426950408889634);
  else {
    const auto p = log_reduce(x);
    return log_limits(x, fma(p.f + p.tail, all<X>(1.44269504f), p.n));
  }
}
template <class X> PF_MATH X log10(X x) {
  if constexpr (!in_float<X>) return log_to_base_double(x, 0.30102999566361177, 3.694239077158931e-13, 0.4342944819032518);
  else {
    const auto p = log_reduce(x);
    const X small = fma(p.f + p.tail, all<X>(0.434294482f), p.n * 7.90341e-6f);
    return log_limits(x, fma(p.n, all<X>(0.301022093f), small));
  }
}

}  // namespace pf
