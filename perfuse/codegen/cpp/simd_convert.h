// Storage types and conversions, bit for bit as eager PyTorch's on the CPU (NaN payloads apart).

#ifndef PF_FP8_SATURATE
#define PF_FP8_SATURATE 1  // float8_e4m3fn: overflow gives 448; 0: NaN, as PyTorch before 2.13
#endif

namespace pf {

struct f16 { uint16_t bits; };
struct bf16 { uint16_t bits; };
struct f8e4m3fn { uint8_t bits; };
struct f8e5m2 { uint8_t bits; };
struct f8e4m3fnuz { uint8_t bits; };
struct f8e5m2fnuz { uint8_t bits; };
struct f8e8m0fnu { uint8_t bits; };

// raw: what lies in memory, compute: what a kernel computes with.
template <class S> struct storage { typedef S raw; typedef S compute; };
template <> struct storage<bool> { typedef uint8_t raw; typedef bool compute; };
template <> struct storage<f16> { typedef uint16_t raw; typedef float compute; };
template <> struct storage<bf16> { typedef uint16_t raw; typedef float compute; };
template <> struct storage<f8e4m3fn> { typedef uint8_t raw; typedef float compute; };
template <> struct storage<f8e5m2> { typedef uint8_t raw; typedef float compute; };
template <> struct storage<f8e4m3fnuz> { typedef uint8_t raw; typedef float compute; };
template <> struct storage<f8e5m2fnuz> { typedef uint8_t raw; typedef float compute; };
template <> struct storage<f8e8m0fnu> { typedef uint8_t raw; typedef float compute; };
template <class S> using raw = typename storage<S>::raw;
template <class S> using compute = typename storage<S>::compute;

// Between 32-bit lanes and smaller ones. g++ takes a conversion by a factor of four apart lane by lane.
#if !defined(__clang__) && defined(__AVX2__)
typedef char bytes16 __attribute__((vector_size(16)));
typedef char bytes32 __attribute__((vector_size(32)));
typedef short shorts __attribute__((vector_size(2 * PF_LANES)));
template <class R> PF_FN vec<int32_t> widen(R r) {
  if constexpr (sizeof(elem<R>) == 1) {
#ifdef __AVX512F__
    const bytes16 b = (bytes16)r;
    if constexpr (is_signed<elem<R>>) return __builtin_ia32_pmovsxbd512_mask(b, vec<int32_t>{}, -1);
    else return __builtin_ia32_pmovzxbd512_mask(b, vec<int32_t>{}, -1);
  } else {
    if constexpr (is_signed<elem<R>>) return __builtin_ia32_pmovsxwd512_mask((shorts)r, vec<int32_t>{}, -1);
    else return __builtin_ia32_pmovzxwd512_mask((shorts)r, vec<int32_t>{}, -1);
#else
    typedef long long pair __attribute__((vector_size(16)));
    const bytes16 b = (bytes16)pair{bits_as<long long>(r), 0};
    if constexpr (is_signed<elem<R>>) return __builtin_ia32_pmovsxbd256(b);
    else return __builtin_ia32_pmovzxbd256(b);
  } else {
    if constexpr (is_signed<elem<R>>) return __builtin_ia32_pmovsxwd256((shorts)r);
    else return __builtin_ia32_pmovzxwd256((shorts)r);
#endif
  }
}
template <class T> PF_FN vec<T> narrow(vec<int32_t> x) {
#ifdef __AVX512F__
  if constexpr (sizeof(T) == 1) return (vec<T>)__builtin_ia32_pmovdb512_mask(x, bytes16{}, -1);
  else return (vec<T>)__builtin_ia32_pmovdw512_mask(x, shorts{}, -1);
#else
  // Inside each half the wanted bytes come first; then the two halves side by side.
  constexpr char z = -1;
  const bytes32 order = sizeof(T) == 1
    ? bytes32{0, 4, 8, 12, z, z, z, z, z, z, z, z, z, z, z, z, 0, 4, 8, 12, z, z, z, z, z, z, z, z, z, z, z, z}
    : bytes32{0, 1, 4, 5, 8, 9, 12, 13, z, z, z, z, z, z, z, z, 0, 1, 4, 5, 8, 9, 12, 13, z, z, z, z, z, z, z, z};
  const vec<int32_t> at = sizeof(T) == 1 ? vec<int32_t>{0, 4, 1, 1, 1, 1, 1, 1} : vec<int32_t>{0, 1, 4, 5, 2, 2, 2, 2};
  const vec<int32_t> packed = __builtin_ia32_permvarsi256((vec<int32_t>)__builtin_ia32_pshufb256((bytes32)x, order), at);
  vec<T> r;
  __builtin_memcpy(&r, &packed, sizeof r);
  return r;
#endif
}
#else
template <class R> PF_FN vec<int32_t> widen(R r) {
  typedef typename ints<2>::s s;
  typedef typename ints<2>::u u;
  if constexpr (sizeof(elem<R>) == 2) return __builtin_convertvector(r, vec<int32_t>);
  else if constexpr (is_signed<elem<R>>) return __builtin_convertvector(__builtin_convertvector(r, vec<s>), vec<int32_t>);
  else return __builtin_convertvector(__builtin_convertvector(r, vec<u>), vec<int32_t>);
}
template <class T> PF_FN vec<T> narrow(vec<int32_t> x) {
  if constexpr (sizeof(T) == 1) return __builtin_convertvector(__builtin_convertvector(x, vec<int16_t>), vec<T>);
  else return __builtin_convertvector(x, vec<T>);
}
#endif

// The value of every lane as T, converted as C converts (no bool on either side).
template <class T, class X> PF_FN like<X, T> convert(X x) {
  using From = elem<X>;
  constexpr bool small_from = sizeof(From) < 4, small_to = sizeof(T) < 4;
  if constexpr (!is_vec<X>) return (T)x;
  else if constexpr (sizeof(From) == sizeof(T) && is_float<From> == is_float<T>) return (vec<T>)x;
  else if constexpr (is_same<T, uint32_t> && small_from) return (vec<T>)widen(x);
  else if constexpr (is_same<From, uint32_t> && small_to) return narrow<T>((vec<int32_t>)x);
  else if constexpr (is_same<T, int32_t> && small_from) return widen(x);
  else if constexpr (is_same<From, int32_t> && small_to) return narrow<T>(x);
  else if constexpr (small_from || small_to) return convert<T>(convert<int32_t>(x));
  else return __builtin_convertvector(x, vec<T>);
}

template <class To, class X> PF_FN like<X, To> cast(X x) {
  using From = elem<X>;
  if constexpr (is_same<To, From>) return x;
  else if constexpr (is_same<To, bool>) return ne(x, X{});
  else if constexpr (is_same<From, bool>) {
    if constexpr (is_vec<X>) return convert<To>(x.bits & 1);
    else return (To)x;
  } else if constexpr (is_float<From> && !is_float<To> && sizeof(To) < 4) return convert<To>(convert<int32_t>(x));
  else return convert<To>(x);
}

// ---- small floats by integer arithmetic --------------------------------------------------------
// A format with EXP exponent bits, MAN mantissa bits and BIAS; its magnitude fits EXP + MAN bits.

// Both sides below 2^31: the signed comparison is the one that every machine has.
template <class U> PF_FN auto less(U a, uint32_t b) {
  using I = like<U, int32_t>;
  return lt((I)a, all<I>((int32_t)b));
}

constexpr uint32_t inf_bits = 0x7f800000u;

template <int EXP, int MAN, int BIAS> struct small {
  static constexpr int shift = 23 - MAN;
  static constexpr uint32_t rebias = uint32_t(127 - BIAS) << MAN;
  static constexpr uint32_t min_normal = uint32_t(128 - BIAS) << 23;  // as float bits
  static constexpr uint32_t magic = uint32_t(127 + 1 - BIAS - MAN + 23) << 23;  // its ulp is the format's least value

  // Rounds a magnitude (float bits, not NaN, not past the format's range) to the format's bits.
  template <class U> static PF_INLINE U encode(U a) {
    using F = like<U, float>;
    const U normal = (a + (((1u << (shift - 1)) - 1) - (rebias << shift)) + ((a >> shift) & 1)) >> shift;
    const U tiny = bits_as<U>((F)(bits_as<F>(a) + bits_as<F>(all<U>(magic)))) - magic;
    return where(less(a, min_normal), tiny, normal);
  }
  // The power of two at or below a magnitude, at least the least normal one.
  template <class U> static PF_INLINE like<U, float> binade(U a) {
    using I = like<U, int32_t>;
    return bits_as<like<U, float>>(high((I)(a & inf_bits), all<I>((int32_t)min_normal)));
  }
  // Times the binade, a number to add: the sum's ulp is the format's there, so that the sum is rounded as the format
  // asks, subnormals included. It is 1.5 times a power of two, so that the sum stays in its own binade.
  static constexpr float above = 1.5f * (1 << shift);
  // Rounds a magnitude to a float that the format has.
  template <class U> static PF_INLINE like<U, float> rounded(U a) {
    using F = like<U, float>;
    const F m = binade(a) * above;
    return (bits_as<F>(a) + m) - m;
  }
  // As encode, for formats of one byte and in the last byte only. The sum ends with the magnitude in ulps, and above
  // them stand its exponent and the half; both are added. What they hold besides the code is known, and `extra` ulps
  // make it a multiple of 256: they are even, so ties go to the same side.
  template <class U> static PF_INLINE U encode_byte(U a) {
    using F = like<U, float>;
    constexpr uint32_t extra = (0u - (((min_normal + (uint32_t(shift) << 23)) + 0x400000u) >> shift)) & 0xff;
    static_assert(extra % 2 == 0, "ties must stay even");
    constexpr float addend = above + float(extra) / (1 << MAN);
    const U sum = bits_as<U>(fma(binade(a), all<F>(addend), bits_as<F>(a)));
    return sum + (sum >> shift);
  }
  // The format's magnitude bits as a float; the top exponent is read as a number.
  template <class U> static PF_INLINE like<U, float> decode(U m) {
    using F = like<U, float>;
    const U wide = m << shift;
    const F normal = bits_as<F>((U)(wide + (rebias << shift)));
    const F tiny = bits_as<F>((U)(wide + min_normal)) - bits_as<F>(all<U>(min_normal));
    return where(less(m, 1u << MAN), tiny, normal);
  }
};

template <class F> PF_FN auto float_bits(F x) { return bits_as<like<F, uint32_t>>(x); }
template <class U> PF_FN auto bits_float(U x) { return bits_as<like<U, float>>(x); }

// A magnitude held at `top`; NaN (above infinity) stays where it is by the caller's own test.
template <class U> PF_FN U at_most(U a, uint32_t top) {
  using I = like<U, int32_t>;
  return (U)low((I)a, all<I>((int32_t)top));
}

// encode<S>: float -> bits of S, in 32-bit lanes, of which one byte counts for float8. decode<S>: back.
template <class S, class F> PF_FN like<F, uint32_t> encode(F x) {
  using U = like<F, uint32_t>;
  const U b = float_bits(x), a = b & 0x7fffffffu;
  const auto nan = lnot(less(a, inf_bits + 1));
  if constexpr (is_same<S, bf16>) {
    return where(nan, all<U>(0x7fc0), (b + 0x7fff + ((b >> 16) & 1)) >> 16);
  } else if constexpr (is_same<S, f16>) {
    const U m = small<5, 10, 15>::encode(at_most(a, 0x47800000u));  // 65536 encodes as infinity
    return where(nan, all<U>(0x7e00), m) | ((b >> 16) & 0x8000);
  } else if constexpr (is_same<S, f8e5m2>) {
    const U m = small<5, 2, 15>::encode_byte(at_most(a, 0x47800000u));
    return where(nan, all<U>(0x7f), m) | ((b >> 24) & 0x80);
  } else if constexpr (is_same<S, f8e4m3fn>) {
    constexpr uint32_t top = PF_FP8_SATURATE ? 0x43e00000u : 0x43f00000u;  // 448, or 480, which encodes as NaN
    const U m = small<4, 3, 7>::encode_byte(at_most(a, top));
    return where(nan, all<U>(0x7f), m) | ((b >> 24) & 0x80);
  } else if constexpr (is_same<S, f8e8m0fnu>) {
    // The exponent alone. Halfway between powers goes up, but to the least one, 2^-127, it goes down. Infinity is NaN.
    const U m = at_most(a, inf_bits);
    return (m + where(less(m, 0x800000u), all<U>(0x3fffffu), all<U>(0x400000u))) >> 23;
  } else {
    // fnuz: one zero, one NaN (0x80), no infinity; what rounds past the largest value is NaN.
    constexpr bool e4 = is_same<S, f8e4m3fnuz>;
    using format = small<e4 ? 4 : 5, e4 ? 3 : 2, e4 ? 8 : 16>;
    const U m = format::encode(at_most(a, e4 ? 0x43800000u : 0x47800000u));  // 256, 65536: 0x80
    const U signed_m = m | ((b >> 24) & 0x80);
    return where(lor(nan, gt(m, all<U>(0x7f))), all<U>(0x80), where(eq(m, U{}), U{}, signed_m));
  }
}

template <class S, class U> PF_FN like<U, float> decode(U b) {
  using F = like<U, float>;
  if constexpr (is_same<S, bf16>) {
    return bits_float((U)(b << 16));
  } else if constexpr (is_same<S, f16> || is_same<S, f8e5m2>) {
    if constexpr (is_same<S, f8e5m2>) b = b << 8;
    const U m = b & 0x7fff, sign = (b & 0x8000) << 16;
    const U special = (m << 13) | inf_bits;
    const U number = float_bits(small<5, 10, 15>::decode(m));
    return bits_float((U)(where(less(m, 0x7c00), number, special) | sign));
  } else if constexpr (is_same<S, f8e4m3fn>) {
    const U m = b & 0x7f, sign = (b & 0x80) << 24;
    const U number = float_bits(small<4, 3, 7>::decode(m));
    return bits_float((U)(where(eq(m, all<U>(0x7f)), all<U>(0x7fc00000u), number) | sign));
  } else if constexpr (is_same<S, f8e8m0fnu>) {
    const U number = where(eq(b, U{}), all<U>(0x400000u), (U)(b << 23));
    return bits_float(where(eq(b, all<U>(0xff)), all<U>(0x7fc00000u), number));
  } else {
    constexpr bool e4 = is_same<S, f8e4m3fnuz>;
    const U m = b & 0x7f, sign = (b & 0x80) << 24;
    const F number = small<e4 ? 4 : 5, e4 ? 3 : 2, e4 ? 8 : 16>::decode(m);
    return where(eq(b, all<U>(0x80)), all<F>(__builtin_nanf("")), bits_float((U)(float_bits(number) | sign)));
  }
}

// ---- between the memory's type and the kernel's ------------------------------------------------

#ifdef __F16C__
typedef short half8 __attribute__((vector_size(16)));
typedef short half16 __attribute__((vector_size(32)));
PF_FN vec<float> half_to_float(vec<uint16_t> h) {
#ifdef __AVX512F__
  return __builtin_ia32_vcvtph2ps512_mask((half16)h, vec<float>{}, -1, 4);
#elif defined(__clang__) && !__has_builtin(__builtin_ia32_vcvtph2ps256)  // clang 22
  typedef _Float16 halves __attribute__((vector_size(16)));
  return __builtin_convertvector((halves)h, vec<float>);
#else
  return __builtin_ia32_vcvtph2ps256((half8)h);
#endif
}
PF_FN vec<uint16_t> float_to_half(vec<float> x) {
#ifdef __AVX512F__
  return (vec<uint16_t>)__builtin_ia32_vcvtps2ph512_mask(x, 0, half16{}, -1);
#else
  return (vec<uint16_t>)__builtin_ia32_vcvtps2ph256(x, 0);
#endif
}
// Shifted into a half its exponent is 8 too small. The sign goes to the top, and a NaN's exponent is filled.
PF_FN vec<float> e4m3_to_float(vec<uint8_t> b) {
  using U = vec<uint16_t>;
  const U wide = convert<uint16_t>(b), nan = (U)((wide << 9) == (uint16_t)0xfe00);
  const U half = (U)((vec<int16_t>)(wide << 8) >> 1) & 0xbfff;
  return half_to_float(half | (nan & 0x7c00)) * 256.0f;
}
#endif

template <class S, class R> PF_FN like<R, compute<S>> from_raw(R r) {
  if constexpr (is_same<S, bool>) return ne(r, R{});
  else if constexpr (is_same<S, compute<S>>) return r;
#ifdef __F16C__
  else if constexpr (is_vec<R> && is_same<S, f16>) return half_to_float(r);
  else if constexpr (is_vec<R> && is_same<S, f8e5m2>) return half_to_float(convert<uint16_t>(r) << 8);
  else if constexpr (is_vec<R> && is_same<S, f8e4m3fn>) return e4m3_to_float(r);
#endif
  else return decode<S>(convert<uint32_t>(r));
}

template <class S, class X> PF_FN like<X, raw<S>> to_raw(X x) {
  if constexpr (is_same<S, bool>) {
    if constexpr (is_vec<X>) return convert<uint8_t>(x.bits & 1);
    else return (uint8_t)x;
  } else if constexpr (is_same<S, compute<S>>) return x;
#ifdef __F16C__
  else if constexpr (is_vec<X> && is_same<S, f16>) return float_to_half(x);
#endif
  else return convert<raw<S>>(encode<S>(x));
}

// Rounds a float through float8_e4m3fn or float8_e5m2 and back, without their bits.
template <class S, class X> PF_FN X round_to_float8(X x) {
  using U = like<X, uint32_t>;
  constexpr bool e4 = is_same<S, f8e4m3fn>, saturates = e4 && PF_FP8_SATURATE;
  using format = small<e4 ? 4 : 5, e4 ? 3 : 2, e4 ? 7 : 15>;
  const U b = float_bits(x), a = b & 0x7fffffffu;
  // The constant first: NaN goes through. What is past the largest number rounds to the next one in the format's steps.
  X r = format::rounded(float_bits(low(all<X>(saturates ? 448.0f : e4 ? 480.0f : 65536.0f), bits_as<X>(a))));
  if constexpr (!saturates) r = where(gt(r, all<X>(e4 ? 448.0f : 57344.0f)), all<X>(e4 ? __builtin_nanf("") : __builtin_inff()), r);
  return bits_as<X>((U)(float_bits(r) | (b & 0x80000000u)));
}

// Rounds a float through a smaller type and back.
template <class S, class X> PF_FN X round_to(X x) {
  if constexpr (is_same<S, compute<S>>) return x;
#ifdef __F16C__
  else if constexpr (is_vec<X> && is_same<S, f16>) return half_to_float(float_to_half(x));
#endif
  else if constexpr (is_same<S, f8e4m3fn> || is_same<S, f8e5m2>) return round_to_float8<S>(x);
  else return decode<S>(encode<S>(x));
}

}  // namespace pf
