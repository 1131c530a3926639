// Vectors, masks and the arithmetic on them. Every function takes a vector or a scalar.
//
// A kernel is compiled for one number of lanes (PF_LANES), and every vector in it has that many lanes
// whatever the size of an element, so lane i of any two vectors belongs to the same element of the loop.
// No header is included: <immintrin.h> alone costs the compiler 0.4 s per file.

#ifndef PF_LANES
#error "compile with -DPF_LANES=16 (AVX-512) or -DPF_LANES=8"
#endif

typedef __INT8_TYPE__ int8_t;
typedef __INT16_TYPE__ int16_t;
typedef __INT32_TYPE__ int32_t;
typedef __INT64_TYPE__ int64_t;
typedef __UINT8_TYPE__ uint8_t;
typedef __UINT16_TYPE__ uint16_t;
typedef __UINT32_TYPE__ uint32_t;
typedef __UINT64_TYPE__ uint64_t;

#define PF_FN static inline __attribute__((always_inline, unused))
#define PF_CALLED static __attribute__((noinline, unused))
// A kernel of hundreds of functions calls them: inlined, 1,000 of them take g++ 12 seven seconds.
#ifdef PF_CALLS_MATH
#define PF_MATH PF_CALLED
#else
#define PF_MATH PF_FN
#endif
#define PF_INLINED __attribute__((always_inline))
#define PF_INLINE inline PF_INLINED
#pragma GCC diagnostic ignored "-Wpragmas"
#pragma GCC diagnostic ignored "-Wunknown-warning-option"
#pragma GCC diagnostic ignored "-Wpsabi"

namespace pf {

constexpr int lanes = PF_LANES;

template <class T> struct vec_of { typedef T type __attribute__((vector_size(sizeof(T) * PF_LANES))); };
template <class T> using vec = typename vec_of<T>::type;

// The vector form of bool: every lane is 0 or -1. A type of its own, so that a cast knows it from vec<int32_t>.
struct mask { vec<int32_t> bits; };

// ---- what a type is ----------------------------------------------------------------------------

template <class X> struct kind { typedef X elem; static constexpr bool vector = false; };
template <> struct kind<mask> { typedef bool elem; static constexpr bool vector = true; };
#define PF_KIND(T) \
  template <> struct kind<vec<T>> { typedef T elem; static constexpr bool vector = true; };
PF_KIND(float) PF_KIND(double)
PF_KIND(int8_t) PF_KIND(int16_t) PF_KIND(int32_t) PF_KIND(int64_t)
PF_KIND(uint8_t) PF_KIND(uint16_t) PF_KIND(uint32_t) PF_KIND(uint64_t)
#undef PF_KIND

template <class X> using elem = typename kind<X>::elem;
template <class X> constexpr bool is_vec = kind<X>::vector;

template <class A, class B> constexpr bool is_same = false;
template <class A> constexpr bool is_same<A, A> = true;
template <class T> constexpr bool is_float = is_same<T, float> || is_same<T, double>;
template <class T> constexpr bool is_signed = T(-1) < T(1);

template <class T> struct vector_form { typedef vec<T> type; };
template <> struct vector_form<bool> { typedef mask type; };
template <class T> using vform = typename vector_form<T>::type;

template <bool V, class T> struct pick_form { typedef T type; };
template <class T> struct pick_form<true, T> { typedef vform<T> type; };
// `like<X, T>`: T in the form of X, so a vector if X is one and a scalar if not.
template <class X, class T> using like = typename pick_form<is_vec<X>, T>::type;

template <int BYTES> struct ints;
template <> struct ints<1> { typedef int8_t s; typedef uint8_t u; };
template <> struct ints<2> { typedef int16_t s; typedef uint16_t u; };
template <> struct ints<4> { typedef int32_t s; typedef uint32_t u; };
template <> struct ints<8> { typedef int64_t s; typedef uint64_t u; };
template <class X> using signed_of = like<X, typename ints<sizeof(elem<X>)>::s>;
template <class X> using unsigned_of = like<X, typename ints<sizeof(elem<X>)>::u>;
template <class X, bool FLOAT> struct pick_wrapping { typedef unsigned_of<X> type; };
template <class X> struct pick_wrapping<X, true> { typedef X type; };

template <class To, class From> PF_FN To bits_as(From x) {
  static_assert(sizeof(To) == sizeof(From), "bits_as keeps the size");
  To r;
  __builtin_memcpy(&r, &x, sizeof r);
  return r;
}

// ---- parts -------------------------------------------------------------------------------------
// A vector wider than the machine's is an array of the machine's.

#if defined(__AVX512F__)
constexpr int native_bytes = 64;
#elif defined(__AVX__)
constexpr int native_bytes = 32;
#else
constexpr int native_bytes = 16;
#endif

template <class T, int N> struct vec_n { typedef T type __attribute__((vector_size(sizeof(T) * N))); };
template <class X> constexpr bool is_wide = is_vec<X> && sizeof(X) > native_bytes;
// How many parts X has, and how many lanes are in each; T in vectors of that many lanes.
template <class X> constexpr int num_parts = is_wide<X> ? sizeof(X) / native_bytes : 1;
template <class X, class T = elem<X>> struct parts { typename vec_n<T, lanes / num_parts<X>>::type part[num_parts<X>]; };

// ---- making vectors ----------------------------------------------------------------------------

template <class T, class V> PF_FN V splat_part(T x) {
  if constexpr (is_float<T>) return x - V{};  // keeps -0
  else return V{} + x;
}
// A vector wider than the machine's is put together from the machine's: g++ fills one through memory, lane by lane.
template <class T> PF_FN vform<T> splat(T x) {
  if constexpr (is_same<T, bool>) return mask{vec<int32_t>{} - int32_t(x)};
  else if constexpr (is_wide<vec<T>>) {
    parts<vec<T>> r;
    for (int i = 0; i < num_parts<vec<T>>; i++) r.part[i] = splat_part<T, decltype(r.part[0] + r.part[0])>(x);
    return bits_as<vec<T>>(r);
  } else return splat_part<T, vec<T>>(x);
}

// A constant in the form of X.
template <class X> PF_FN X all(elem<X> x) {
  if constexpr (is_vec<X>) return splat<elem<X>>(x);
  else return x;
}

template <class T> PF_FN vec<T> iota(T start) {
#if PF_LANES == 16
  const vec<T> step = {T(0), T(1), T(2), T(3), T(4), T(5), T(6), T(7),
                       T(8), T(9), T(10), T(11), T(12), T(13), T(14), T(15)};
#else
  const vec<T> step = {T(0), T(1), T(2), T(3), T(4), T(5), T(6), T(7)};
#endif
  return splat<T>(start) + step;
}

PF_FN mask first_lanes(int n) { return mask{iota<int32_t>(0) < splat<int32_t>(n)}; }

// f lane by lane: for the functions that have no vector code.
template <class T, class F> PF_FN T each(F f, T a) {
  if constexpr (is_vec<T>) {
    T r;
    for (int i = 0; i < lanes; i++) r[i] = f(a[i]);
    return r;
  } else return f(a);
}
template <class T, class F> PF_FN T each(F f, T a, T b) {
  if constexpr (is_vec<T>) {
    T r;
    for (int i = 0; i < lanes; i++) r[i] = f(a[i], b[i]);
    return r;
  } else return f(a, b);
}

// ---- by parts ----------------------------------------------------------------------------------
// The compiler splits + and * of wide vectors by itself, but takes comparisons and selections apart lane by lane unless
// it is given the parts.

template <class X, class F> PF_FN X by_parts(F f, X a) {
  if constexpr (!is_wide<X>) return f(a);
  else {
    auto x = bits_as<parts<X>>(a);
    for (int i = 0; i < num_parts<X>; i++) x.part[i] = f(x.part[i]);
    return bits_as<X>(x);
  }
}
template <class X, class F> PF_FN X by_parts(F f, X a, X b) {
  if constexpr (!is_wide<X>) return f(a, b);
  else {
    auto x = bits_as<parts<X>>(a), y = bits_as<parts<X>>(b);
    for (int i = 0; i < num_parts<X>; i++) x.part[i] = f(x.part[i], y.part[i]);
    return bits_as<X>(x);
  }
}
// Of two vectors, the even lanes of one and then of the other.
template <class V> PF_FN V even_lanes(V a, V b) {
#ifdef __clang__
#define PF_SHUFFLE(...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define PF_SHUFFLE(...) __builtin_shuffle(a, b, V{__VA_ARGS__})
#endif
#if PF_LANES == 16
  return PF_SHUFFLE(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
#else
  return PF_SHUFFLE(0, 2, 4, 6, 8, 10, 12, 14);
#endif
#undef PF_SHUFFLE
}
template <class X, class F> PF_FN mask compare_parts(F f, X a, X b) {
  auto x = bits_as<parts<X>>(a), y = bits_as<parts<X>>(b);
  if constexpr (sizeof(elem<X>) == 8 && num_parts<X> == 2) {
    // g++ 12 narrows 64 bits to 32 through memory: a softmax with a mask by position took 352 us, and so takes 148.
    using I = vec<int32_t>;
    return mask{even_lanes(bits_as<I>(f(x.part[0], y.part[0])), bits_as<I>(f(x.part[1], y.part[1])))};
  } else {
    parts<X, int32_t> m;
    for (int i = 0; i < num_parts<X>; i++) m.part[i] = __builtin_convertvector(f(x.part[i], y.part[i]), decltype(m.part[0] + 0));
    return bits_as<mask>(m);
  }
}

// ---- comparisons, logic, selection -------------------------------------------------------------

#define PF_COMPARE(NAME, OP)                                                                     \
  template <class X> PF_FN auto NAME(X a, X b) {                                                 \
    if constexpr (!is_vec<X>) return a OP b;                                                     \
    else if constexpr (is_wide<X>) return compare_parts([](auto s, auto t) { return s OP t; }, a, b); \
    else return mask{__builtin_convertvector(a OP b, vec<int32_t>)};                             \
  }
PF_COMPARE(eq, ==) PF_COMPARE(ne, !=) PF_COMPARE(lt, <) PF_COMPARE(le, <=) PF_COMPARE(gt, >) PF_COMPARE(ge, >=)

// How first, first + STEP, ... compare with a limit: in 32 bits a lane, which is half a vector of positions.
PF_FN int32_t distance(int64_t first, int64_t limit) {
  constexpr int64_t most = 1 << 30;
  int64_t d;
  if (__builtin_sub_overflow(limit, first, &d)) d = limit;
  return int32_t(d < -most ? -most : d > most ? most : d);
}
#define PF_COMPARE_PLACES(NAME, OP)                                                      \
  template <int32_t STEP> PF_FN mask NAME##_places(int64_t first, int64_t limit) {       \
    return mask{iota<int32_t>(0) * STEP OP splat<int32_t>(distance(first, limit))};      \
  }
PF_COMPARE_PLACES(eq, ==) PF_COMPARE_PLACES(ne, !=) PF_COMPARE_PLACES(lt, <)
PF_COMPARE_PLACES(le, <=) PF_COMPARE_PLACES(gt, >) PF_COMPARE_PLACES(ge, >=)
#undef PF_COMPARE_PLACES
#undef PF_COMPARE

PF_FN mask land(mask a, mask b) { return mask{a.bits & b.bits}; }
PF_FN mask lor(mask a, mask b) { return mask{a.bits | b.bits}; }
PF_FN mask lxor(mask a, mask b) { return mask{a.bits ^ b.bits}; }
PF_FN mask lnot(mask a) { return mask{~a.bits}; }
PF_FN bool land(bool a, bool b) { return a & b; }
PF_FN bool lor(bool a, bool b) { return a | b; }
PF_FN bool lxor(bool a, bool b) { return a ^ b; }
PF_FN bool lnot(bool a) { return !a; }
PF_FN mask operator&(mask a, mask b) { return land(a, b); }
PF_FN mask operator|(mask a, mask b) { return lor(a, b); }
PF_FN mask operator^(mask a, mask b) { return lxor(a, b); }
PF_FN mask operator~(mask a) { return lnot(a); }
PF_FN mask eq(mask a, mask b) { return lnot(a ^ b); }
PF_FN mask ne(mask a, mask b) { return a ^ b; }
PF_FN mask lt(mask a, mask b) { return ~a & b; }
PF_FN mask le(mask a, mask b) { return ~a | b; }
PF_FN mask gt(mask a, mask b) { return a & ~b; }
PF_FN mask ge(mask a, mask b) { return a | ~b; }

template <class X> PF_FN X where(mask m, X a, X b) {
  if constexpr (is_same<X, mask>) return mask{(m.bits & a.bits) | (~m.bits & b.bits)};
  else if constexpr (!is_wide<X>) return __builtin_convertvector(m.bits, signed_of<X>) ? a : b;
  else {
    auto x = bits_as<parts<X>>(a), y = bits_as<parts<X>>(b);
    auto c = bits_as<parts<X, int32_t>>(m);
    for (int i = 0; i < num_parts<X>; i++)
      x.part[i] = __builtin_convertvector(c.part[i], decltype(x.part[i] < x.part[i])) ? x.part[i] : y.part[i];
    return bits_as<X>(x);
  }
}
template <class X> PF_FN X where(bool c, X a, X b) { return c ? a : b; }

// ---- arithmetic --------------------------------------------------------------------------------
// Integers go through the unsigned type: a signed overflow wraps, as in eager, and is never undefined.

#define PF_WRAPPING(NAME, OP)                                        \
  template <class X> PF_FN X NAME(X a, X b) {                        \
    if constexpr (is_float<elem<X>>) return a OP b;                  \
    else return (X)((unsigned_of<X>)a OP (unsigned_of<X>)b);         \
  }
PF_WRAPPING(add, +) PF_WRAPPING(sub, -) PF_WRAPPING(mul, *)
#undef PF_WRAPPING
template <class X> PF_FN X div(X a, X b) { return a / b; }
template <class X> PF_FN X reciprocal(X a) { return all<X>(1) / a; }
template <class X> PF_FN X neg(X a) {
  if constexpr (is_float<elem<X>>) return -a;
  else return sub(X{}, a);
}

template <class X> PF_FN X bit_and(X a, X b) { return a & b; }
template <class X> PF_FN X bit_or(X a, X b) { return a | b; }
template <class X> PF_FN X bit_xor(X a, X b) { return a ^ b; }
template <class X> PF_FN X bit_not(X a) { return ~a; }
// On truth values + is or, * is and, as in eager.
PF_FN bool bit_not(bool a) { return !a; }
PF_FN mask add(mask a, mask b) { return a | b; }
PF_FN mask mul(mask a, mask b) { return a & b; }

// A shift by the width or more gives 0 (or the sign, to the right), and so does a negative one: as in eager.
template <class R> PF_FN vec<int32_t> widen(R r);  // simd_convert.h
template <class T> PF_FN vec<T> narrow(vec<int32_t> x);
// Short vectors of bytes are shifted as numbers of 32 bits: g++ takes them apart lane by lane, if n is a constant too.
template <class X> constexpr bool shifts_wide = is_vec<X> && sizeof(elem<X>) == 1 && lanes < 16;
template <class X> PF_FN X shifted_left(X a, X n) {
  if constexpr (shifts_wide<X>) return narrow<elem<X>>(widen(a) << widen(n));
  else return a << n;
}
template <class X> PF_FN X shifted_right(X a, X n) {
  if constexpr (shifts_wide<X>) return narrow<elem<X>>(widen(a) >> widen(n));
  else return a >> n;
}
template <class X> PF_FN X shl(X a, X b) {
  using U = unsigned_of<X>;
  const U width = all<U>(sizeof(elem<X>) * 8), n = (U)b;
  return where(lt(n, width), (X)shifted_left<U>((U)a, n & (width - 1)), X{});
}
template <class X> PF_FN X shr(X a, X b) {
  using U = unsigned_of<X>;
  const U last = all<U>(sizeof(elem<X>) * 8 - 1), n = (U)b;
  if constexpr (is_signed<elem<X>>) return shifted_right<X>(a, (X)where(lt(n, last), n, last));
  else return where(le(n, last), shifted_right<X>(a, n & last), X{});
}

template <class X> PF_FN X abs(X a) {
  using E = elem<X>;
  if constexpr (is_float<E>) {
    using U = unsigned_of<X>;
    return bits_as<X>((U)(bits_as<U>(a) & all<U>(elem<U>(-1) >> 1)));
  } else if constexpr (is_signed<E>) return where(lt(a, X{}), neg(a), a);
  else return a;
}
template <class X> PF_FN auto isnan(X a) { return ne(a, a); }
template <class X> PF_FN auto isinf(X a) {
  if constexpr (is_float<elem<X>>) return eq(abs(a), all<X>(__builtin_inf()));
  else return ne(a, a);
}
template <class X> PF_FN auto isfinite(X a) {
  if constexpr (is_float<elem<X>>) return lt(abs(a), all<X>(__builtin_inf()));
  else return eq(a, a);
}
template <class X> PF_FN auto signbit(X a) {
  if constexpr (is_signed<elem<X>>) {
    using S = signed_of<X>;
    return lt(bits_as<S>(a), S{});
  } else return lt(a, a);
}
template <class X> PF_FN auto to_bits(X a) { return bits_as<signed_of<X>>(a); }
template <class X> PF_FN auto from_bits(X a) { return bits_as<like<X, float>>(a); }
template <class X> PF_FN X copysign(X a, X b) {
  using U = unsigned_of<X>;
  const U sign = all<U>(elem<U>(1) << (sizeof(elem<U>) * 8 - 1));
  return bits_as<X>((U)((bits_as<U>(a) & ~sign) | (bits_as<U>(b) & sign)));
}

// low/high: the one instruction of the machine, which gives b when either is NaN. g++ makes a comparison and a
// selection of the plain form for floats, since it may not see that this is what the instruction does.
template <class V> PF_FN V low_part(V a, V b) { return a < b ? a : b; }
template <class V> PF_FN V high_part(V a, V b) { return a > b ? a : b; }
#ifndef __clang__
#define PF_EXTREME(T, BYTES, MIN, MAX, ...)                                                                            \
  PF_FN vec_n<T, BYTES / sizeof(T)>::type low_part(vec_n<T, BYTES / sizeof(T)>::type a, vec_n<T, BYTES / sizeof(T)>::type b) { \
    return MIN(a, b __VA_ARGS__);                                                                                      \
  }                                                                                                                    \
  PF_FN vec_n<T, BYTES / sizeof(T)>::type high_part(vec_n<T, BYTES / sizeof(T)>::type a, vec_n<T, BYTES / sizeof(T)>::type b) { \
    return MAX(a, b __VA_ARGS__);                                                                                      \
  }
#if defined(__AVX512F__)
PF_EXTREME(float, 64, __builtin_ia32_minps512_mask, __builtin_ia32_maxps512_mask, , a, -1, 4)
PF_EXTREME(double, 64, __builtin_ia32_minpd512_mask, __builtin_ia32_maxpd512_mask, , a, -1, 4)
#endif
#if defined(__AVX__)
PF_EXTREME(float, 32, __builtin_ia32_minps256, __builtin_ia32_maxps256)
PF_EXTREME(double, 32, __builtin_ia32_minpd256, __builtin_ia32_maxpd256)
#endif
#if defined(__SSE2__)
PF_EXTREME(float, 16, __builtin_ia32_minps, __builtin_ia32_maxps)
PF_EXTREME(double, 16, __builtin_ia32_minpd, __builtin_ia32_maxpd)
#endif
#undef PF_EXTREME
#endif
template <class X> PF_FN X low(X a, X b) {
  return by_parts([](auto s, auto t) { return low_part(s, t); }, a, b);
}
template <class X> PF_FN X high(X a, X b) {
  return by_parts([](auto s, auto t) { return high_part(s, t); }, a, b);
}
#if defined(__AVX512F__) && !defined(__clang__)
// a where a is NaN, else the machine's: two instructions by a mask, where comparison and selection take three.
constexpr int ordered = 7;
#define PF_KEEPING_NAN(NAME, PS, PD)                                                                                 \
  PF_FN vec_n<float, 16>::type NAME##_part(vec_n<float, 16>::type a, vec_n<float, 16>::type b) {                     \
    return PS(a, b, a, __builtin_ia32_cmpps512_mask(a, a, ordered, -1, 4), 4);                                       \
  }                                                                                                                  \
  PF_FN vec_n<double, 8>::type NAME##_part(vec_n<double, 8>::type a, vec_n<double, 8>::type b) {                     \
    return PD(a, b, a, __builtin_ia32_cmppd512_mask(a, a, ordered, -1, 4), 4);                                       \
  }                                                                                                                  \
  template <class X> PF_FN X NAME(X a, X b) {                                                                        \
    if constexpr (!is_float<elem<X>>) return low_or_high_##NAME(a, b);                                               \
    else if constexpr (!is_vec<X>) return a != a ? a : low_or_high_##NAME(a, b);                                     \
    else return by_parts([](auto s, auto t) { return NAME##_part(s, t); }, a, b);                                    \
  }
template <class X> PF_FN X low_or_high_min(X a, X b) { return low(a, b); }
template <class X> PF_FN X low_or_high_max(X a, X b) { return high(a, b); }
PF_KEEPING_NAN(min, __builtin_ia32_minps512_mask, __builtin_ia32_minpd512_mask)
PF_KEEPING_NAN(max, __builtin_ia32_maxps512_mask, __builtin_ia32_maxpd512_mask)
#undef PF_KEEPING_NAN
#else
template <class X> PF_FN X min(X a, X b) {
  if constexpr (is_float<elem<X>>) return where(isnan(a), a, low(a, b));
  else return low(a, b);
}
template <class X> PF_FN X max(X a, X b) {
  if constexpr (is_float<elem<X>>) return where(isnan(a), a, high(a, b));
  else return high(a, b);
}
#endif
template <class X> PF_FN X fmin(X a, X b) { return where(isnan(b), a, low(a, b)); }
template <class X> PF_FN X fmax(X a, X b) { return where(isnan(b), a, high(a, b)); }
PF_FN mask min(mask a, mask b) { return a & b; }
PF_FN mask max(mask a, mask b) { return a | b; }
PF_FN bool min(bool a, bool b) { return a & b; }
PF_FN bool max(bool a, bool b) { return a | b; }

template <class X> PF_FN X sign(X a) {
  const X zero{}, one = all<X>(1);
  X r = where(gt(a, zero), one, zero);
  if constexpr (is_signed<elem<X>>) r = where(lt(a, zero), all<X>(elem<X>(-1)), r);
  return r;  // 0 for NaN, as in eager
}

// ---- across the lanes --------------------------------------------------------------------------

// The first half of the lanes with the second, until one is left: on ever shorter vectors, never through memory.
template <class T, int N, class F> PF_FN T fold_n(typename vec_n<T, N>::type v, F f) {
  if constexpr (N == 2) return f(v[0], v[1]);
  else {
    struct halves { typename vec_n<T, N / 2>::type part[2]; };
    const auto h = bits_as<halves>(v);
    return fold_n<T, N / 2>(f(h.part[0], h.part[1]), f);
  }
}
template <class X, class F> PF_FN elem<X> fold(X v, F f) {
  // gcc 12 reads {1, 1, 1, 1, 0, ...} back as all ones: a vector it knows is hidden from it.
  if (__builtin_constant_p(v[0])) asm("" : "+m"(v));
  return fold_n<elem<X>, lanes>(v, f);
}
// A sum or product of integers wraps: it is taken in the unsigned type.
template <class X> using wrapping = typename pick_wrapping<X, is_float<elem<X>>>::type;
template <class X> PF_FN elem<X> hsum(X v) { return (elem<X>)fold((wrapping<X>)v, [](auto a, auto b) { return a + b; }); }
template <class X> PF_FN elem<X> hprod(X v) { return (elem<X>)fold((wrapping<X>)v, [](auto a, auto b) { return a * b; }); }
template <class X> PF_FN elem<X> hmin(X v) {
  return fold(v, [](auto a, auto b) { const auto less = a < b ? a : b; return a != a ? a : less; });
}
template <class X> PF_FN elem<X> hmax(X v) {
  return fold(v, [](auto a, auto b) { const auto more = a > b ? a : b; return a != a ? a : more; });
}
// One bit a lane.
PF_FN uint32_t mask_bits(mask m) {
#if defined(__AVX512DQ__) && PF_LANES == 16
  return (uint16_t)__builtin_ia32_cvtd2mask512(m.bits);
#elif defined(__AVX__) && PF_LANES == 8
  return (uint32_t)__builtin_ia32_movmskps256((vec<float>)m.bits);
#else
  uint32_t r = 0;
  for (int i = 0; i < lanes; i++) r |= uint32_t(m.bits[i] & 1) << i;
  return r;
#endif
}
PF_FN bool hany(mask m) { return mask_bits(m) != 0; }
PF_FN bool hall(mask m) { return mask_bits(m) == (1u << lanes) - 1; }
PF_FN bool hany(bool m) { return m; }
PF_FN bool hall(bool m) { return m; }

}  // namespace pf
