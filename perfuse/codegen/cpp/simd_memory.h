// Loads and stores. `_n` touches the first n lanes only, `_mask` the true ones only: no byte beyond them is read.

namespace pf {

template <class S> using vcompute = vform<compute<S>>;
template <class S> using vraw = vec<raw<S>>;

// ---- scalars -----------------------------------------------------------------------------------

template <class S> PF_FN compute<S> load1(const S* p) {
  raw<S> r;
  __builtin_memcpy(&r, p, sizeof r);
  return from_raw<S>(r);
}
template <class S> PF_FN void store1(S* p, compute<S> x) {
  const raw<S> r = to_raw<S>(x);
  __builtin_memcpy(p, &r, sizeof r);
}

// ---- whole vectors, and the first n lanes ------------------------------------------------------

template <class S> PF_FN vcompute<S> loadv(const S* p) {
  vraw<S> r;
  __builtin_memcpy(&r, p, sizeof r);
  return from_raw<S>(r);
}
template <class S> PF_FN void storev(S* p, vcompute<S> v) {
  const vraw<S> r = to_raw<S>(v);
  __builtin_memcpy(p, &r, sizeof r);
}

// n elements of SIZE bytes, n < lanes, in four steps at most and without a call.
template <int SIZE> PF_FN void copy_n(void* to, const void* from, int n) {
  char* d = (char*)to;
  const char* s = (const char*)from;
  int done = 0;
  if (n & 8) { __builtin_memcpy(d, s, 8 * SIZE); done = 8 * SIZE; }
  if (n & 4) { __builtin_memcpy(d + done, s + done, 4 * SIZE); done += 4 * SIZE; }
  if (n & 2) { __builtin_memcpy(d + done, s + done, 2 * SIZE); done += 2 * SIZE; }
  if (n & 1) { __builtin_memcpy(d + done, s + done, SIZE); }
}

#ifdef __clang__  // the two compilers declare the same built-in with another pointer
#define PF_POINTER(T) vec<T>*
#else
#define PF_POINTER(T) T*
#endif
// Raw lanes under masks of 16 bits; those of 64 bits in two halves. A partial vector put together in memory is one
// that the machine waits for.
#if defined(__AVX512BW__) && defined(__AVX512VL__) && PF_LANES == 16
#define PF_MASKED 1
typedef vec_n<long long, 8>::type eight;
template <class T> PF_FN vec<T> load_bits(const T* p, unsigned short k) {
  if constexpr (sizeof(T) == 8) {
    struct { eight low, high; } r;
    r.low = __builtin_ia32_loaddqudi512_mask((const long long*)p, eight{}, (unsigned char)k);
    r.high = __builtin_ia32_loaddqudi512_mask((const long long*)p + 8, eight{}, (unsigned char)(k >> 8));
    return bits_as<vec<T>>(r);
  } else if constexpr (sizeof(T) == 4) return (vec<T>)__builtin_ia32_loaddqusi512_mask((const int*)p, vec<int>{}, k);
  else if constexpr (sizeof(T) == 2) return (vec<T>)__builtin_ia32_loaddquhi256_mask((const PF_POINTER(short))p, vec<short>{}, k);
  else return (vec<T>)__builtin_ia32_loaddquqi128_mask((const PF_POINTER(char))p, vec<char>{}, k);
}
template <class T> PF_FN void store_bits(T* p, vec<T> v, unsigned short k) {
  if constexpr (sizeof(T) == 8) {
    struct halves { eight low, high; };
    const halves r = bits_as<halves>(v);
    __builtin_ia32_storedqudi512_mask((long long*)p, r.low, (unsigned char)k);
    __builtin_ia32_storedqudi512_mask((long long*)p + 8, r.high, (unsigned char)(k >> 8));
  } else if constexpr (sizeof(T) == 4) __builtin_ia32_storedqusi512_mask((int*)p, (vec<int>)v, k);
  else if constexpr (sizeof(T) == 2) __builtin_ia32_storedquhi256_mask((PF_POINTER(short))p, (vec<short>)v, k);
  else __builtin_ia32_storedquqi128_mask((PF_POINTER(char))p, (vec<char>)v, k);
}
PF_FN unsigned short first_bits(int n) { return n >= lanes ? 0xffff : n > 0 ? (1u << n) - 1 : 0; }
#endif

template <class S> PF_FN vcompute<S> loadv_n(const S* p, int n) {
#ifdef PF_MASKED
  return from_raw<S>(load_bits((const raw<S>*)p, first_bits(n)));
#elif defined(__AVX2__) && PF_LANES == 8
  if constexpr (sizeof(S) == 4) {
    const vec<int> first = (vec<int>)(vec<int>{0, 1, 2, 3, 4, 5, 6, 7} < vec<int>{} + n);
    return from_raw<S>((vraw<S>)__builtin_ia32_maskloadd256((const vec<int>*)p, first));
  }
#endif
  vraw<S> r{};
  if (n >= lanes) __builtin_memcpy(&r, p, sizeof r);
  else if (n > 0) copy_n<sizeof(S)>(&r, p, n);
  return from_raw<S>(r);
}
template <class S> PF_FN void storev_n(S* p, vcompute<S> v, int n) {
  const vraw<S> r = to_raw<S>(v);
#ifdef PF_MASKED
  return store_bits((raw<S>*)p, r, first_bits(n));
#endif
  if (n >= lanes) __builtin_memcpy(p, &r, sizeof r);
  else if (n > 0) copy_n<sizeof(S)>(p, &r, n);
}

// ---- past the cache ----------------------------------------------------------------------------

#ifdef __SSE2__
template <int BYTES> struct stream_part { typedef float type __attribute__((vector_size(BYTES))); };
template <> struct stream_part<8> { typedef long long type; };
#ifdef __clang__
template <class T> PF_FN void stream1(T* p, T v) { __builtin_nontemporal_store(v, p); }
#else
PF_FN void stream1(long long* p, long long v) { __builtin_ia32_movnti64(p, v); }
PF_FN void stream1(stream_part<16>::type* p, stream_part<16>::type v) { __builtin_ia32_movntps((float*)p, v); }
#ifdef __AVX__
PF_FN void stream1(stream_part<32>::type* p, stream_part<32>::type v) { __builtin_ia32_movntps256((float*)p, v); }
#endif
#ifdef __AVX512F__
PF_FN void stream1(stream_part<64>::type* p, stream_part<64>::type v) { __builtin_ia32_movntps512((float*)p, v); }
#endif
#endif
#endif

template <class S> PF_FN void streamv(S* p, vcompute<S> v) {
  const vraw<S> r = to_raw<S>(v);
#ifdef __SSE2__
  constexpr int bytes = sizeof r < native_bytes ? sizeof r : native_bytes;
  typedef typename stream_part<bytes>::type part;
  if (((unsigned long long)p & (bytes - 1)) == 0) {
    part t[sizeof r / bytes];
    __builtin_memcpy(t, &r, sizeof r);
    for (int i = 0; i < int(sizeof r / bytes); i++) stream1((part*)p + i, t[i]);
    return;
  }
#endif
  __builtin_memcpy(p, &r, sizeof r);
}
PF_FN void stream_fence() {
#ifdef __SSE2__
  __builtin_ia32_sfence();
#endif
}

// ---- lane by lane ------------------------------------------------------------------------------

template <class S> PF_FN raw<S> raw_at(const S* p) {
  raw<S> r;
  __builtin_memcpy(&r, p, sizeof r);
  return r;
}
template <class S> PF_FN void put_raw(S* p, raw<S> r) { __builtin_memcpy(p, &r, sizeof r); }

// A vector from f(0), f(1), ..., in two halves: g++ puts 16 scalars together through memory otherwise. Written out, not
// looped over: storing lanes one by one into a hundred such vectors costs g++ five seconds of alias analysis.
template <class T, class F> PF_FN vec<T> from_lanes(F f) {
  using half = typename vec_n<T, lanes / 2>::type;
  struct { half low, high; } r;
  if constexpr (lanes == 8) {
    r = {half{f(0), f(1), f(2), f(3)}, half{f(4), f(5), f(6), f(7)}};
  } else {
    r = {half{f(0), f(1), f(2), f(3), f(4), f(5), f(6), f(7)}, half{f(8), f(9), f(10), f(11), f(12), f(13), f(14), f(15)}};
  }
  return bits_as<vec<T>>(r);
}

// Every other of 31 elements, of two vectors that overlap in one: none beyond the last is read.
template <class V> PF_FN V every_other(V a, V b) {
#ifdef __clang__
#define PF_SHUFFLE(...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define PF_SHUFFLE(...) __builtin_shuffle(a, b, V{__VA_ARGS__})
#endif
#if PF_LANES == 16
  return PF_SHUFFLE(0, 2, 4, 6, 8, 10, 12, 14, 17, 19, 21, 23, 25, 27, 29, 31);
#else
  return PF_SHUFFLE(0, 2, 4, 6, 9, 11, 13, 15);
#endif
#undef PF_SHUFFLE
}
template <class S> PF_FN vcompute<S> load_strided(const S* p, int64_t stride) {
  if constexpr (sizeof(S) == 4) {
    if (stride == 2) {
      vec<int32_t> a, b;
      __builtin_memcpy(&a, p, sizeof a);
      __builtin_memcpy(&b, p + lanes - 1, sizeof b);
      return from_raw<S>((vraw<S>)every_other(a, b));
    }
  }
  return from_raw<S>(from_lanes<raw<S>>([=](int i) { return raw_at(p + i * stride); }));
}
// What is left of a row, strided, is read by a call: a branch for each lane of fifty loads takes g++ longer than all
// the rest of a kernel.
template <class S> PF_CALLED vcompute<S> load_strided_n(const S* p, int64_t stride, int n) {
  vraw<S> r{};
  for (int i = 0; i < lanes; i++)
    if (i < n) r[i] = raw_at(p + i * stride);
  return from_raw<S>(r);
}
template <class S> PF_FN void store_strided(S* p, int64_t stride, vcompute<S> v) {
  const vraw<S> r = to_raw<S>(v);
  for (int i = 0; i < lanes; i++) put_raw(p + i * stride, r[i]);
}
template <class S> PF_CALLED void store_strided_n(S* p, int64_t stride, vcompute<S> v, int n) {
  const vraw<S> r = to_raw<S>(v);
  for (int i = 0; i < lanes; i++)
    if (i < n) put_raw(p + i * stride, r[i]);
}

template <class S> PF_FN vcompute<S> gather(const S* base, vec<int64_t> at) {
  int64_t index[lanes];
  __builtin_memcpy(index, &at, sizeof at);
  return from_raw<S>(from_lanes<raw<S>>([&](int i) { return raw_at(base + index[i]); }));
}
// The machine's gather costs as much as one load a lane, but has a mask.
#if defined(PF_MASKED) && PF_LANES == 16 && !defined(__clang__)
#define PF_GATHERS 1
template <class T> PF_FN vec<T> gather_bits(const T* base, vec<int64_t> at, uint32_t bits) {
  typedef vec_n<long long, 8>::type places;
  const auto p = bits_as<parts<vec<int64_t>>>(at);
  if constexpr (sizeof(T) == 8) {
    const auto low = __builtin_ia32_gatherdiv8df(vec_n<double, 8>::type{}, base, (places)p.part[0], bits & 255, 8);
    const auto high = __builtin_ia32_gatherdiv8df(vec_n<double, 8>::type{}, base, (places)p.part[1], bits >> 8, 8);
    return bits_as<vec<T>>(parts<vec<double>>{{low, high}});
  } else {
    typedef vec_n<float, 8>::type half;
    struct { half low, high; } r;
    r.low = __builtin_ia32_gatherdiv16sf(half{}, base, (places)p.part[0], bits & 255, 4);
    r.high = __builtin_ia32_gatherdiv16sf(half{}, base, (places)p.part[1], bits >> 8, 4);
    return bits_as<vec<T>>(r);
  }
}
#endif
// The lanes that must not be read read what the first of the others does: branches that depend on data cost more.
template <class S> PF_CALLED vcompute<S> gather_part(const S* base, vec<int64_t> at, int n) {
  if (n <= 0) return from_raw<S>(vraw<S>{});
  const mask live = first_lanes(n);
  return where(live, gather(base, where(live, at, splat<int64_t>(at[0]))), vcompute<S>{});
}
template <class S> PF_FN vcompute<S> gather_n(const S* base, vec<int64_t> at, int n) {
#ifdef PF_GATHERS
  if constexpr (sizeof(S) >= 4) return from_raw<S>(gather_bits((const raw<S>*)base, at, first_bits(n)));
#endif
  return gather_part(base, at, n);
}
// As in gather_part.
template <class S> PF_CALLED vcompute<S> gather_mask(const S* base, vec<int64_t> at, mask m, compute<S> fill) {
  const uint32_t bits = mask_bits(m);
  if (bits == 0) return all<vcompute<S>>(fill);
#ifdef PF_GATHERS
  if constexpr (sizeof(S) >= 4)
    return where(m, from_raw<S>(gather_bits((const raw<S>*)base, at, bits)), all<vcompute<S>>(fill));
#endif
  int64_t index[lanes];
  __builtin_memcpy(index, &at, sizeof at);
  const int64_t other = index[__builtin_ctz(bits)];
  return where(m, gather(base, where(m, at, splat<int64_t>(other))), all<vcompute<S>>(fill));
}
// The raw lanes of a mask, the others 0: the machine's masked load where it has one for the size.
template <class T> PF_FN vec<T> load_raw_mask(const T* p, mask m) {
#ifdef PF_MASKED
  return load_bits(p, mask_bits(m));
#elif defined(__AVX2__) && PF_LANES == 8
  if constexpr (sizeof(T) == 4) return (vec<T>)__builtin_ia32_maskloadd256((const vec<int>*)p, m.bits);
#endif
  vec<T> r{};
  if (hall(m)) __builtin_memcpy(&r, p, sizeof r);
  else if (hany(m))
    for (int i = 0; i < lanes; i++)
      if (m.bits[i]) r[i] = raw_at(p + i);
  return r;
}
template <class S> PF_FN vcompute<S> load_mask(const S* p, mask m, compute<S> fill) {
  return where(m, from_raw<S>(load_raw_mask((const raw<S>*)p, m)), all<vcompute<S>>(fill));
}

template <class S> PF_FN void scatter(S* base, vec<int64_t> at, vcompute<S> v) {
  const vraw<S> r = to_raw<S>(v);
  for (int i = 0; i < lanes; i++) put_raw(base + at[i], r[i]);
}
template <class S> PF_FN void scatter_n(S* base, vec<int64_t> at, vcompute<S> v, int n) {
  const vraw<S> r = to_raw<S>(v);
  for (int i = 0; i < lanes; i++)
    if (i < n) put_raw(base + at[i], r[i]);
}
template <class S> PF_FN void scatter_mask(S* base, vec<int64_t> at, vcompute<S> v, mask m) {
  const vraw<S> r = to_raw<S>(v);
  for (int i = 0; i < lanes; i++)
    if (m.bits[i]) put_raw(base + at[i], r[i]);
}

}  // namespace pf
