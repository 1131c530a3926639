// Division with a rule for the remainder. No lane traps: a zero divisor gives some number, so the lanes past the
// end of a loop may hold anything. Zero among the lanes that count is reported, and the caller raises as eager does.

namespace pf {

// What `status` holds after a division by zero; an index that is out of bounds never leaves this.
constexpr int64_t division_by_zero = -0x7fffffffffffffff - 1;

// A divisor, reported where it is zero; of a vector, the first n lanes count.
template <class T> PF_FN T divisor(T b, int64_t* status) {
  if (__builtin_expect(b == T(0), 0)) *status = division_by_zero;
  return b;
}
template <class X> PF_FN X divisor(X b, int64_t* status, int n) {
  if (__builtin_expect(!hall(ne(b, X{})), 0))
    for (int i = 0; i < n; i++) divisor(b[i], status);
  return b;
}

// Towards zero. 32 bits and less go through floating point: the quotient of two such integers, rounded to the
// nearest double (float for 16 bits), never reaches the next whole number unless it is one.
template <class X> PF_MATH X truncdiv(X a, X b) {
  using T = elem<X>;
  if constexpr (is_float<T>) return trunc(a / b);
  else {
    X d = where(eq(b, X{}), all<X>(1), b);
    if constexpr (is_vec<X> && sizeof(T) <= 2) return convert<T>(convert<int32_t>(convert<float>(a) / convert<float>(d)));
    else if constexpr (is_vec<X> && is_same<T, int32_t>) {
      const auto overflow = eq(d, all<X>(-1));
      const X q = convert<int32_t>(convert<double>(a) / convert<double>(d));
      return where(overflow, neg(a), q);
    } else {
      if constexpr (!is_signed<T>) return each([](T s, T t) { return T(s / t); }, a, d);
      else {
        const auto minus = eq(d, all<X>(T(-1)));
        return where(minus, neg(a), each([](T s, T t) { return T(s / t); }, a, where(minus, all<X>(1), d)));
      }
    }
  }
}

PF_FN float libm_fmod(float a, float b) { return __builtin_fmodf(a, b); }
PF_FN double libm_fmod(double a, double b) { return __builtin_fmod(a, b); }

// The remainder with the sign of a.
template <class X> PF_MATH X fmod(X a, X b) {
  using T = elem<X>;
  if constexpr (!is_float<T>) return sub(a, mul(truncdiv(a, b), b));
  else {
#ifdef PF_HAS_FMA
    if constexpr (is_same<X, vec<float>>) {
      // The quotient may be one too large; what is left is exact, and then has the wrong sign.
      const X x = abs(a), y = abs(b), q = trunc(x / y);
      X r = fma(-q, y, x);
      r = where(lt(r, X{}), r + y, r);
      const mask exact = land(lt(q, all<X>(4194304.0f)), lt(y, all<X>(__builtin_inff())));
      if (hall(exact)) return copysign(r, a);
    }
#endif
    return each([](T s, T t) { return libm_fmod(s, t); }, a, b);
  }
}
// The remainder with the sign of b: a % b of Python, torch.remainder.
template <class X> PF_MATH X mod(X a, X b) {
  const X r = fmod(a, b), zero{};
  if constexpr (!is_signed<elem<X>>) return r;
  else return where(land(ne(r, zero), ne(lt(r, zero), lt(b, zero))), add(r, b), r);
}
// The quotient that belongs to mod: a // b of Python, torch.floor_divide.
template <class X> PF_MATH X floordiv(X a, X b) {
  using T = elem<X>;
  const X zero{};
  if constexpr (!is_float<T>) {
    const X q = truncdiv(a, b);
    if constexpr (!is_signed<T>) return q;
    else {
      const X r = sub(a, mul(q, b));
      return where(land(ne(r, zero), ne(lt(r, zero), lt(b, zero))), sub(q, all<X>(1)), q);
    }
  } else {
    const X r = fmod(a, b);
    X q = (a - r) / b;
    q = where(land(ne(r, zero), ne(lt(r, zero), lt(b, zero))), q - T(1), q);
    X whole = floor(q);
    whole = where(gt(q - whole, all<X>(T(0.5))), whole + T(1), whole);
    whole = where(eq(q, zero), copysign(zero, a / b), whole);
    return where(eq(b, zero), a / b, whole);
  }
}

// The same of places, which are from 0 to 2^50, by a constant: half a step away from any whole quotient, the error
// of the product does not reach one.
PF_FN vec<int64_t> place_floordiv(vec<int64_t> a, int64_t b) {
  return convert<int64_t>((convert<double>(a) + 0.5) * (1.0 / b));
}
PF_FN vec<int64_t> place_mod(vec<int64_t> a, int64_t b) { return a - place_floordiv(a, b) * b; }

PF_FN float libm_nextafter(float a, float b) { return __builtin_nextafterf(a, b); }
PF_FN double libm_nextafter(double a, double b) { return __builtin_nextafter(a, b); }
template <class X> PF_MATH X nextafter(X a, X b) {
  return each([](elem<X> s, elem<X> t) { return libm_nextafter(s, t); }, a, b);
}

}  // namespace pf
