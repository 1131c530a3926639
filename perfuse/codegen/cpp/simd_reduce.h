// Accumulators of reductions, threads and scratch memory. Each accumulator keeps one value a lane.

// GNU OpenMP's entry by its own name, not by a pragma: whatever compiler builds the kernels, they run on the one
// runtime that torch has loaded. clang's pragmas would call LLVM's, a second team of threads, and zig has none. LLVM's
// and Intel's runtimes have this entry too.
extern "C" void GOMP_parallel(void (*)(void*), void*, unsigned, unsigned);
extern "C" int omp_get_thread_num(void);
extern "C" int omp_get_num_threads(void);
extern "C" void* aligned_alloc(unsigned long, unsigned long);
extern "C" void free(void*);

namespace pf {

template <class T> PF_FN constexpr T highest() {
  if constexpr (is_same<T, float>) return __builtin_inff();
  else if constexpr (is_same<T, double>) return __builtin_inf();
  else if constexpr (is_signed<T>) return T((typename ints<sizeof(T)>::u)(-1) >> 1);
  else return T(-1);
}
template <class T> PF_FN constexpr T lowest() {
  if constexpr (is_float<T>) return -highest<T>();
  else if constexpr (is_signed<T>) return T(-highest<T>() - 1);
  else return T(0);
}

template <class T> struct Sum {
  vec<T> v = vec<T>{};
  PF_INLINE void step(vec<T> x) { v = v + x; }
  PF_INLINE void step_n(vec<T> x, int n) { v = where(first_lanes(n), v + x, v); }
  PF_INLINE void merge(const Sum& o) { v = v + o.v; }
  PF_INLINE T finish() const { return hsum(v); }
};
// The sum of many rows' sums: recent ones are added to the total 32 rows at a time. What that addition rounds off is
// exact (Knuth's two-sum) and kept apart; it is not a number where the total is infinite.
struct Total {
  vec<float> v = vec<float>{}, lost = vec<float>{}, recent = vec<float>{};
  int rows = 0;
  PF_INLINE void merge(const Sum<float>& o) {
    recent = recent + o.v;
    if (++rows == 32) flush();
  }
  PF_INLINE void flush() {
    const vec<float> sum = v + recent, added = sum - v;
    lost = lost + ((v - (sum - added)) + (recent - added));
    v = sum;
    recent = vec<float>{};
    rows = 0;
  }
  PF_INLINE float finish() {
    flush();
    const float total = hsum(v), rest = hsum(lost);
    return rest == rest ? total + rest : total;
  }
};
template <class T> struct Prod {
  vec<T> v = splat<T>(T(1));
  PF_INLINE void step(vec<T> x) { v = v * x; }
  PF_INLINE void step_n(vec<T> x, int n) { v = where(first_lanes(n), v * x, v); }
  PF_INLINE void merge(const Prod& o) { v = v * o.v; }
  PF_INLINE T finish() const { return hprod(v); }
};
template <class T> struct Max {
  vec<T> v = splat<T>(lowest<T>());
  PF_INLINE void step(vec<T> x) { v = max(v, x); }
  PF_INLINE void step_n(vec<T> x, int n) { v = max(v, where(first_lanes(n), x, v)); }
  PF_INLINE void merge(const Max& o) { v = max(v, o.v); }
  PF_INLINE T finish() const { return hmax(v); }
};
template <class T> struct Min {
  vec<T> v = splat<T>(highest<T>());
  PF_INLINE void step(vec<T> x) { v = min(v, x); }
  PF_INLINE void step_n(vec<T> x, int n) { v = min(v, where(first_lanes(n), x, v)); }
  PF_INLINE void merge(const Min& o) { v = min(v, o.v); }
  PF_INLINE T finish() const { return hmin(v); }
};
#if defined(__AVX512F__) && PF_LANES == 16
// Which lanes met a NaN is kept apart, so that from step to step there is one instruction to wait for, not two.
template <bool GREATEST> struct Extreme {
  vec<float> v = splat(GREATEST ? lowest<float>() : highest<float>());
  uint16_t nan = 0;
  static PF_INLINE uint16_t nans(vec<float> x) { return __builtin_ia32_cmpps512_mask(x, x, 3, -1, 4); }
  // x first: where it is NaN, the machine gives the other.
  static PF_INLINE vec<float> pick(vec<float> x, vec<float> v) { return GREATEST ? high(x, v) : low(x, v); }
  PF_INLINE void step(vec<float> x) { v = pick(x, v); nan |= nans(x); }
  PF_INLINE void step_n(vec<float> x, int n) { step(where(first_lanes(n), x, v)); }
  PF_INLINE void merge(const Extreme& o) { v = pick(o.v, v); nan |= o.nan; }
  // No lane of v is NaN: one instruction for each half.
  PF_INLINE float finish() const {
    const float found = fold(v, [](auto a, auto b) { return GREATEST ? high_part(a, b) : low_part(a, b); });
    return nan ? __builtin_nanf("") : found;
  }
  PF_INLINE vec<float> by_lane() const {
    return where(mask{-((splat<int32_t>(nan) >> iota<int32_t>(0)) & 1)}, splat(__builtin_nanf("")), v);
  }
};
template <> struct Max<float> : Extreme<true> {};
template <> struct Min<float> : Extreme<false> {};
#endif
template <class T> struct Any {
  mask v = splat(false);
  PF_INLINE void step(mask x) { v = lor(v, x); }
  PF_INLINE void step_n(mask x, int n) { v = lor(v, land(x, first_lanes(n))); }
  PF_INLINE void merge(const Any& o) { v = lor(v, o.v); }
  PF_INLINE bool finish() const { return hany(v); }
};
template <class T> struct All {
  mask v = splat(true);
  PF_INLINE void step(mask x) { v = land(v, x); }
  PF_INLINE void step_n(mask x, int n) { v = land(v, lor(x, lnot(first_lanes(n)))); }
  PF_INLINE void merge(const All& o) { v = land(v, o.v); }
  PF_INLINE bool finish() const { return hall(v); }
};

// The position of the greatest (least) value; NaN beats all, the first of equals wins. Where nothing beat the first
// value of all, every element is that, and position 0 the first of them. P holds the positions: half as many
// instructions where 32 bits do.
template <class T, bool GREATEST, class P> struct Arg {
  typedef vform<T> value;
  value v = all<value>(GREATEST ? lowest<T>() : highest<T>());
  vec<P> v_at = splat<P>(-1);
  typedef typename ints<sizeof(P)>::u U;  // in which no position is the largest
  static PF_INLINE mask better(value x, value y) {
    if constexpr (is_same<T, bool>) return GREATEST ? land(x, lnot(y)) : land(lnot(x), y);
    else if constexpr (is_float<T>) return land(lnot(GREATEST ? le(x, y) : ge(x, y)), eq(y, y));
    else return GREATEST ? gt(x, y) : lt(x, y);
  }
  PF_INLINE void take(mask m, value x, vec<P> at) {
    v = where(m, x, v);
    v_at = where(m, at, v_at);
  }
  PF_INLINE void step(value x, vec<P> at) { take(better(x, v), x, at); }
  PF_INLINE void step_n(value x, vec<P> at, int n) { take(land(better(x, v), first_lanes(n)), x, at); }
  PF_INLINE void merge(const Arg& o) {
    const mask wins = better(o.v, v), loses = better(v, o.v);
    take(lor(wins, land(lnot(loses), lt((vec<U>)o.v_at, (vec<U>)v_at))), o.v, o.v_at);
  }
  // The lanes with the best value of all.
  PF_INLINE mask best() const {
    if constexpr (is_same<T, bool>) {
      const mask wanted = GREATEST ? v : lnot(v);
      return hany(wanted) ? wanted : splat(true);
    } else {
      const T x = GREATEST ? hmax(v) : hmin(v);
      return x != x ? ne(v, v) : eq(v, splat<T>(x));
    }
  }
  PF_INLINE int64_t finish() const {
    const P at = (P)hmin(where(best(), (vec<U>)v_at, splat<U>(U(-1))));
    return at < 0 ? 0 : at;
  }
};
template <class T, class P> using ArgMax = Arg<T, true, P>;
template <class T, class P> using ArgMin = Arg<T, false, P>;

// What an accumulator holds lane by lane, for kernels whose lanes are different rows.
template <class A> PF_FN auto by_lane(const A& a) {
  if constexpr (requires { a.by_lane(); }) return a.by_lane();
  else return a.v;
}
template <class T, bool G, class P> PF_FN vec<int64_t> by_lane(const Arg<T, G, P>& a) {
  return convert<int64_t>(where(lt(a.v_at, vec<P>{}), vec<P>{}, a.v_at));
}

// A vector of running results that go on from `carry`, which becomes the last of them. Within a vector of the machine
// they take a step for each power of two; only one operation of each such vector waits for the one before.
template <int N, class V> PF_FN V moved_up(V v, V first) {
  constexpr int count = sizeof(V) / sizeof(v[0]);
#ifdef __clang__
#define PF_MOVED(...) __builtin_shufflevector(first, v, __VA_ARGS__)
#else
#define PF_MOVED(...) __builtin_shuffle(first, v, decltype(v < v){__VA_ARGS__})
#endif
  if constexpr (count == 8 && N == 1) return PF_MOVED(0, 8, 9, 10, 11, 12, 13, 14);
  else if constexpr (count == 8 && N == 2) return PF_MOVED(0, 1, 8, 9, 10, 11, 12, 13);
  else if constexpr (count == 8 && N == 4) return PF_MOVED(0, 1, 2, 3, 8, 9, 10, 11);
  else if constexpr (count == 4 && N == 1) return PF_MOVED(0, 4, 5, 6);
  else if constexpr (count == 4 && N == 2) return PF_MOVED(0, 1, 4, 5);
  else {
    for (int i = 0; i < count; i++)
      if (i >= N) first[i] = v[i - N];
    return first;
  }
#undef PF_MOVED
}
#define PF_RUNNING(NAME, OP, FIRST)                                                \
  template <class T> PF_FN vec<T> NAME(vec<T> v, T& carry) {                       \
    auto x = bits_as<parts<vec<T>>>(v);                                            \
    for (int p = 0; p < num_parts<vec<T>>; p++) {                                  \
      auto& part = x.part[p];                                                      \
      constexpr int count = lanes / num_parts<vec<T>>;                             \
      const auto first = decltype(x.part[p] + part){} + T(FIRST);                  \
      if constexpr (count > 1) part = moved_up<1>(part, first) OP part;           \
      if constexpr (count > 2) part = moved_up<2>(part, first) OP part;           \
      if constexpr (count > 4) part = moved_up<4>(part, first) OP part;           \
      if constexpr (count > 8) part = moved_up<8>(part, first) OP part;           \
      const T last = part[count - 1];                                              \
      part = part OP carry;                                                        \
      carry = carry OP last;                                                       \
    }                                                                              \
    return bits_as<vec<T>>(x);                                                     \
  }
PF_RUNNING(running_sum, +, 0) PF_RUNNING(running_product, *, 1)
#undef PF_RUNNING

// Memory of the calling thread that grows and is used again; `slot` tells apart what lives at once.
PF_FN char* scratch(int slot, int64_t bytes) {
  static thread_local char* memory[2] = {nullptr, nullptr};
  static thread_local int64_t size[2] = {0, 0};
  if (size[slot] < bytes) {
    free(memory[slot]);
    size[slot] = (bytes + 4095) / 4096 * 4096;
    memory[slot] = (char*)aligned_alloc(4096, (unsigned long)size[slot]);
  }
  return memory[slot];
}

// f by value: what it captured is this call's own and lives in registers, where a shared one would be read again
// after every store.
template <class F> static __attribute__((noinline)) void run(F f, int thread, int threads) { f(thread, threads); }

template <class F> struct Team {
  F f;
  int used;  // written by the first thread
};
template <class F> static void run_member(void* data) {
  Team<F>* team = (Team<F>*)data;
  const int thread = omp_get_thread_num(), count = omp_get_num_threads();
  if (thread == 0) team->used = count;
  run(team->f, thread, count);
}

// Runs f(thread, threads) on up to `threads` threads and says how many there were.
template <class F> static int parallel(int threads, F f) {
  if (threads <= 1) {
    run(f, 0, 1);
    return 1;
  }
  Team<F> team = {f, 1};
  GOMP_parallel(run_member<F>, &team, (unsigned)threads, 0);
  return team.used;
}

// The part of a batch in which an element lies: the last one that starts at it or before it.
PF_FN int64_t part_at(const int64_t* starts, int64_t parts, int64_t element) {
  int64_t low = 0, high = parts;
  while (low + 1 < high) {
    const int64_t middle = (low + high) / 2;
    if (starts[middle] <= element) low = middle;
    else high = middle;
  }
  return low;
}

// Adds a vector of recent sums to their totals and starts it again. What the addition rounds off is exact (Knuth's
// two-sum) and kept apart; it is not a number where a total is infinite.
PF_FN void flush_sums(float* total, float* recent, float* lost) {
  const vec<float> a = loadv<float>(total), b = loadv<float>(recent), sum = a + b, added = sum - a;
  storev<float>(lost, loadv<float>(lost) + ((a - (sum - added)) + (b - added)));
  storev<float>(total, sum);
  storev<float>(recent, vec<float>{});
}

// An index that came from data: outside [0, size) it is reported and replaced by 0. `from_end` is what was added to
// an index that is negative now.
PF_FN int64_t checked(int64_t at, int64_t size, int64_t from_end, int64_t* status) {
  if (__builtin_expect((uint64_t)at < (uint64_t)size, 1)) return at;
  *status = at < 0 ? (int64_t)((uint64_t)at - (uint64_t)from_end - 1) : (int64_t)((uint64_t)at + 1);
  return 0;
}
// Whether any of the first n is negative or not below size: then the sign of one of two words of its lane is set.
PF_FN bool any_outside(vec<int64_t> at, int64_t size, int n) {
  const vec<int64_t> signs = at | (splat<int64_t>(size - 1) - at);
  if (n < lanes) return hany(land(first_lanes(n), lt(signs, splat<int64_t>(0))));
  const auto p = bits_as<parts<vec<int64_t>>>(signs);
  auto all = p.part[0];
  for (int i = 1; i < num_parts<vec<int64_t>>; i++) all |= p.part[i];
#if defined(__AVX512DQ__)
  return __builtin_ia32_cvtq2mask512((vec_n<long long, 8>::type)all) != 0;
#elif defined(__AVX__)
  return __builtin_ia32_movmskpd256((vec_n<double, 4>::type)all) != 0;
#else
  bool any = false;
  for (unsigned i = 0; i < sizeof all / 8; i++) any |= all[i] < 0;
  return any;
#endif
}
PF_FN vec<int64_t> checked_n(vec<int64_t> at, int64_t size, int64_t from_end, int64_t* status, int n) {
  if (n < lanes) at = where(first_lanes(n), at, splat<int64_t>(0));
  if (__builtin_expect(!any_outside(at, size, n), 1)) return at;
  for (int i = 0; i < lanes; i++) at[i] = i < n ? checked(at[i], size, from_end, status) : 0;
  return at;
}

template <class S> PF_FN void scatter_add_n(S* base, vec<int64_t> at, vform<compute<S>> v, int n) {
  for (int i = 0; i < n; i++) store1<S>(base + at[i], load1<S>(base + at[i]) + v[i]);
}

}  // namespace pf
