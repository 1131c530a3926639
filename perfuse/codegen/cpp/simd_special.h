// Circular, inverse and special functions, and powers.

namespace pf {

// ---- sin, cos, tan -----------------------------------------------------------------------------
// x = k pi/2 + r with |r| <= pi/4, pi/2 in three parts. It needs the fused multiply-add and |x| < 2^15
// (of double 1e9): libm has the rest.

template <class F> PF_FN circle<F> on_circle(F x) {
  if constexpr (!in_float<F>) return on_circle_double(x);
  else {
    using I = like<F, int32_t>;
    const F magic = all<F>(12582912.0f), t = fma(x, all<F>(0.636619772f), magic), k = t - magic;
    F r = fma(k, all<F>(-1.57079637f), x);
    r = fma(k, all<F>(4.37113883e-8f), r);
    r = fma(k, all<F>(1.71512451e-15f), r);
    const F s = r * r;
    const F sine = fma(s * r, poly(s, -0.166666672f, 0.00833332911f, -0.000198393274f, 2.71823728e-06f), r);
    const F cosine = fma(s * s, poly(s, 0.0416666456f, -0.00138873619f, 2.44377279e-05f), fma(s, all<F>(-0.5f), all<F>(1.0f)));
    return {sine, cosine, bits_as<I>(t) & 3};
  }
}
// y where x is near enough, libm's value in the other lanes.
#define PF_NEAR_CIRCLE(NAME, Y)                                        \
  const auto near = lt(abs(x), all<X>(in_float<X> ? 32768 : 1e9));     \
  if (hall(near)) return Y;                                            \
  return where(near, Y, PF_LANEWISE(NAME));

template <class X> PF_MATH X sin(X x) {
  if constexpr (!fused) return PF_LANEWISE(sin);
  else {
    using I = signed_of<X>;
    const auto c = on_circle(x);
    const X y = where(ne(c.quadrant & 1, I{}), c.cos, c.sin);
    PF_NEAR_CIRCLE(sin, where(eq(x, X{}), x, where(ne(c.quadrant & 2, I{}), -y, y)))
  }
}
template <class X> PF_MATH X cos(X x) {
  if constexpr (!fused) return PF_LANEWISE(cos);
  else {
    using I = signed_of<X>;
    const auto c = on_circle(x);
    const X y = where(ne(c.quadrant & 1, I{}), c.sin, c.cos);
    PF_NEAR_CIRCLE(cos, where(ne((c.quadrant + 1) & 2, I{}), -y, y))
  }
}
template <class X> PF_MATH X tan(X x) {
  if constexpr (!fused) return PF_LANEWISE(tan);
  else {
    using I = signed_of<X>;
    const auto c = on_circle(x);
    const auto odd = ne(c.quadrant & 1, I{});
    const X y = where(odd, -c.cos, c.sin) / where(odd, c.sin, c.cos);
    PF_NEAR_CIRCLE(tan, where(eq(x, X{}), x, y))
  }
}
#undef PF_NEAR_CIRCLE

// ---- their inverses ----------------------------------------------------------------------------

template <class F> constexpr elem<F> half_pi = (elem<F>)1.5707963267948966;
template <class F> constexpr elem<F> half_pi_rest = in_float<F> ? (elem<F>)-4.37113883e-8f : (elem<F>)6.123233995736766e-17;

// asin on [0, 1/2]
template <class F> PF_FN F asin_small(F x) {
  if constexpr (!in_float<F>) return asin_small_double(x);
  else {
    const F s = x * x;
    return fma(x * s, poly(s, 0.166666597f, 0.0750051215f, 0.0445154719f, 0.0318198204f, 0.0143938055f, 0.0375781581f), x);
  }
}
template <class X> PF_MATH X asin(X x) {
  const X a = abs(x);
  const auto far = gt(a, all<X>(0.5f));
  const X y = asin_small((X)where(far, sqrt((X)((all<X>(1) - a) * all<X>(0.5f))), a));
  return copysign(where(far, fma(y, all<X>(-2), all<X>(half_pi_rest<X>)) + half_pi<X>, y), x);
}
template <class X> PF_MATH X acos(X x) {
  const X a = abs(x);
  const auto far = gt(a, all<X>(0.5f)), minus = lt(x, X{});
  const X y = asin_small((X)where(far, sqrt((X)((all<X>(1) - a) * all<X>(0.5f))), a));
  const X near_one = where(minus, 2 * half_pi<X> - fma(y, all<X>(2), all<X>(-2 * half_pi_rest<X>)), y + y);
  const X middle = half_pi<X> - (where(minus, -y, y) - half_pi_rest<X>);
  return where(far, near_one, middle);
}

// atan on [0, 1]
template <class F> PF_FN F atan_small(F x) {
  if constexpr (!in_float<F>) return atan_small_double(x);
  else {
    const F s = x * x;
    const F p = poly(s, -0.333333284f, 0.19999671f, -0.142798334f, 0.110582218f, -0.0881108493f, 0.0674158186f,
                     -0.0446897298f, 0.0225396883f, -0.00731787179f, 0.00111377181f);
    return fma(x * s, p, x);
  }
}
template <class X> PF_MATH X atan(X x) {
  const X a = abs(x);
  const auto far = gt(a, all<X>(1));
  const X y = atan_small((X)where(far, all<X>(1) / a, a));
  return copysign(where(far, half_pi<X> - (y - half_pi_rest<X>), y), x);
}
template <class X> PF_MATH X atan2(X y, X x) {
  const X ax = abs(x), ay = abs(y), more = high(ax, ay), less = low(ax, ay);
  X t = less / more;
  t = where(eq(less, more), all<X>(1), t);  // two infinities
  t = where(eq(more, X{}), more, t);        // two zeros
  X r = atan_small(t);
  r = where(gt(ay, ax), half_pi<X> - (r - half_pi_rest<X>), r);
  r = where(signbit(x), 2 * half_pi<X> - (r - 2 * half_pi_rest<X>), r);
  return where(lor(isnan(x), isnan(y)), x + y, copysign(r, y));
}

// ---- hyperbolic --------------------------------------------------------------------------------

// e^|x| overflows soon, before its half does.
template <class X> PF_FN auto overflows_soon(X a) { return gt(a, all<X>(in_float<X> ? 80 : 700)); }
template <class X> PF_MATH X sinh(X x) {
  const X a = abs(x), e = expm1(a), half = exp((X)(a * all<X>(0.5f)));
  const X y = where(overflows_soon(a), all<X>(0.5f) * half * half, all<X>(0.5f) * (e + e / (e + all<X>(1))));
  return copysign(y, x);
}
template <class X> PF_MATH X cosh(X x) {
  const X a = abs(x), e = exp(a), half = exp((X)(a * all<X>(0.5f)));
  return where(overflows_soon(a), all<X>(0.5f) * half * half, fma(e, all<X>(0.5f), all<X>(0.5f) / e));
}
template <class X> constexpr elem<X> ln2 = (elem<X>)0.6931471805599453;
// From here on 1 + x is x.
template <class X> constexpr elem<X> far_of_one = in_float<X> ? elem<X>(1e9) : elem<X>(1e18);
template <class X> PF_MATH X asinh(X x) {
  const X a = abs(x), s = a * a, one = all<X>(1);
  const auto far = gt(a, all<X>(far_of_one<X>));
  const X y = log1p((X)where(far, a, a + s / (sqrt((X)(s + one)) + one)));
  return copysign(where(far, y + ln2<X>, y), x);
}
template <class X> PF_MATH X acosh(X x) {
  const X one = all<X>(1), t = x - one;
  const auto far = gt(x, all<X>(far_of_one<X>));
  const X y = log1p((X)where(far, x, t + sqrt((X)(t * (t + all<X>(2))))));
  return where(lt(x, one), all<X>(__builtin_nanf("")), where(far, y + ln2<X>, y));
}
template <class X> PF_MATH X atanh(X x) {
  const X a = abs(x);
  return copysign(all<X>(0.5f) * log1p((X)((a + a) / (all<X>(1) - a))), x);
}

// ---- error function ----------------------------------------------------------------------------

// erf on [-1, 1]
template <class F> PF_FN F erf_near(F x) {
  const F s = x * x;
  return fma(x, poly(s, 0.128379166f, -0.376126379f, 0.112837821f, -0.0268654004f, 0.00522094546f, -0.000848282885f,
                     0.000112569476f, -9.64151604e-06f), x);
}
template <class X> PF_MATH X erf(X x) {
  if constexpr (!in_float<X>) return erf_double(x);
  else {
    const X a = abs(x), near = erf_near(a);
    const X t = low(all<X>(4.05f), a);  // 1 - exp(-q(t)) is 1 from here
    const X q = poly(t, 0.000188031685f, -1.12957835f, -0.633219957f, -0.108418494f, 0.0252082031f, -0.00420454191f,
                     0.000441332348f, -2.16865064e-05f);
    const auto p = exp_reduce(q);
    const X far = fma(exp_small(p.r), -power_of_two(p.n), all<X>(1.0f));
    return copysign(where(lt(a, all<X>(1.0f)), near, far), x);
  }
}
// exp(-x^2) h(q) / (1 + 2x) for x >= 0, with q = (x - 3) / (x + 3); what x * x loses is put back as a factor.
template <class X> PF_MATH X erfc(X x) {
  if constexpr (!fused) return PF_LANEWISE(erfc);
  else if constexpr (!in_float<X>) return erfc_double(x);
  else {
    const X a = low(all<X>(10.5f), abs(x)), s = a * a, lost = fma(a, a, -s);
    const X q = (a - 3.0f) / (a + 3.0f);
    const X h = poly(q, 1.25300801f, -0.135621145f, -0.047562398f, 0.12964642f, -0.119270973f, 0.0682957694f,
                     -0.0237975288f, 0.00256737857f, 0.00200181152f, -0.000777586072f, -0.000268129079f);
    const auto p = exp_reduce((X)-s);
    const X e = exp_small(p.r), y = scale(fma(e, -lost, e) * (h / fma(a, all<X>(2.0f), all<X>(1.0f))), p.k, p.n);
    return where(lt(abs(x), all<X>(0.5f)), 1.0f - erf_near(x), where(lt(x, X{}), 2.0f - y, y));
  }
}

// x times a function of w = -log(1 - x^2) that is smooth, in w where it is small and in sqrt(w) beyond.
template <class X> PF_MATH X erfinv(X x) {
  if constexpr (!in_float<X>) return erfinv_double(x);
  else {
    const X a = abs(x), w = -log((1.0f - a) * (1.0f + a)), t = w - 2.5f, u = sqrt(w) - 3.0f;
    const X near = poly(t, 1.50140941f, 0.24664028f, -0.00417738827f, -0.00125274365f, 0.000218345813f, -4.96213534e-06f,
                        -3.46311572e-06f, 4.6586419e-07f, 2.32702586e-08f, -8.76589024e-09f);
    const X far = poly(u, 2.83297682f, 1.00167501f, 0.00944530126f, -0.00763725303f, 0.00568682887f, -0.00359750283f,
                       0.00148554891f, -5.68269606e-05f, -0.000310021278f, 0.000115940195f);
    const X y = x * where(lt(w, all<X>(5.0f)), near, far);
    return where(eq(a, all<X>(1.0f)), x * __builtin_inff(), y);
  }
}

// ---- gamma -------------------------------------------------------------------------------------

template <class X> PF_MATH X lgamma(X x) { return PF_LANEWISE(lgamma); }

// Recurrence up to 10, then the asymptotic series; the reflection for negative arguments.
PF_FN double digamma1(double x) {
  if (x == 0) return __builtin_copysign(__builtin_inf(), -x);
  double y = 0;
  if (x < 0) {
    if (x == __builtin_trunc(x)) return __builtin_nan("");
    const double f = x - __builtin_trunc(x);
    y = -3.141592653589793 / __builtin_tan(3.141592653589793 * f);
    x = 1 - x;
  }
  for (; x < 10; x += 1) y -= 1 / x;
  const double z = 1 / (x * x);
  const double tail = z * (1.0 / 12 - z * (1.0 / 120 - z * (1.0 / 252 - z * (1.0 / 240 - z * (1.0 / 132 - z * (691.0 / 32760 - z / 12))))));
  return y + __builtin_log(x) - 0.5 / x - tail;
}
template <class X> PF_MATH X digamma(X x) {
  return each([](elem<X> t) { return (elem<X>)digamma1(t); }, x);
}

// ---- pow ---------------------------------------------------------------------------------------

// 2^(y log2 x) in double for 0 < x < inf and finite y.
template <class F> PF_FN F pow_positive(F x, F y) {
  using D = like<F, double>;
  using I = like<F, int32_t>;
  using L = like<F, int64_t>;
  const auto tiny = lt(x, all<F>(1.17549435e-38f));
  const I b = bits_as<I>(where(tiny, x * 33554432.0f, x));
  const I n = (b - 0x3f3504f3) >> 23;
  const D m = convert<double>(bits_as<F>((I)(b - (n << 23))));
  const D e = convert<double>(convert<float>(n) - where(tiny, all<F>(25.0f), F{}));
  const D s = (m - 1.0) / (m + 1.0);
  const D l = fma(s, poly(D(s * s), 2.885390081777846, 0.9617966941192926, 0.5770779405160181, 0.41220944993926534,
                          0.3198971862483245, 0.28302720620270544), e);
  const D z = low(all<D>(200.0), high(all<D>(-200.0), convert<double>(y) * l));
  const D magic = all<D>(6755399441055744.0), t = z + magic;
  const D p = poly(D(z - (t - magic)), 1.0000000005541876, 0.693147205737198, 0.24022646890480584, 0.05550328777076456,
                   0.009618488973740617, 0.0013399931183567981, 0.00015345807533693204);
  const L shift = (bits_as<L>(t) - bits_as<L>(magic)) << 52;
  return convert<float>(bits_as<D>((L)(bits_as<L>(p) + shift)));
}
template <class X> PF_MATH X pow(X x, X y) {
  using T = elem<X>;
  if constexpr (!is_float<T>) {
    // Integers: by squaring. A negative exponent gives 0 but for 1 and -1, as in eager.
    return each([](T a, T n) {
      T r = 1;
      if (is_signed<T> && n < T(0)) return a == T(1) ? T(1) : a == T(-1) ? (n % 2 ? T(-1) : T(1)) : T(0);
      for (; n > T(0); n = T(n / 2), a = mul(a, a))
        if (n % 2) r = mul(r, a);
      return r;
    }, x, y);
  } else if constexpr (!in_float<X> && fused) return pow_double(x, y);
  else if constexpr (!in_float<X>) return each([](T a, T b) { return libm_pow(a, b); }, x, y);
  else {
    const auto plain = land(land(gt(x, X{}), lt(x, all<X>(__builtin_inff()))), isfinite(y));
    X r = pow_positive(x, y);
    if (hall(plain)) return r;
    return where(plain, r, each([](T a, T b) { return libm_pow(a, b); }, x, y));
  }
}

// ---- hypot -------------------------------------------------------------------------------------

template <class X> PF_MATH X hypot(X a, X b) {
  if constexpr (!in_float<X>) return hypot_double(a, b);
  else {
    const auto x = convert<double>(a), y = convert<double>(b);
    const X r = convert<float>(sqrt(x * x + y * y));
    return where(lor(isinf(a), isinf(b)), all<X>(__builtin_inff()), r);
  }
}

}  // namespace pf
