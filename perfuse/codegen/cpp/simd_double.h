// Elementary functions of double, for a vector and for a scalar; simd_math.h and simd_special.h have them by name.
//
// The reductions of float with fdlibm's splitting of ln2 and polynomials as long as 53 bits need: fdlibm's, series, and
// for erf, erfc, erfinv, asin, atan and pow weighted least squares at Chebyshev points, in 60 digits.
// Largest error in ulp where it is not float's (tests/unit/test_simd.py): atan 2.0, erf 2.1, pow 1.2, hypot 1.2, atan2 2.2.

namespace pf {

// c0 + c1 x + c2 x^2 + ...
template <class F> PF_FN F poly(F, elem<F> c0) { return all<F>(c0); }
template <class F, class... C> PF_FN F poly(F x, elem<F> c0, C... rest) { return fma(poly(x, (elem<F>)rest...), x, all<F>(c0)); }
// The same in two chains, of the even and of the odd powers: for series so long that a chain of them waits.
template <class F, class... C> PF_FN F skip_one(F square, elem<F>, C... rest);
template <class F, class... C> PF_FN F even_terms(F square, elem<F> c0, C... rest) {
  if constexpr (sizeof...(rest) < 2) return all<F>(c0);
  else return fma(skip_one(square, rest...), square, all<F>(c0));
}
template <class F, class... C> PF_FN F skip_one(F square, elem<F>, C... rest) { return even_terms(square, (elem<F>)rest...); }
template <class F, class... C> PF_FN F long_poly(F x, elem<F> c0, C... rest) {
  if constexpr (!fused) return poly(x, c0, (elem<F>)rest...);  // its roundings would add up
  else {
    const F square = x * x;
    return fma(even_terms(square, (elem<F>)rest...), x, even_terms(square, c0, (elem<F>)rest...));
  }
}

#define PF_LIBM(NAME)                                                   \
  PF_FN float libm_##NAME(float x) { return __builtin_##NAME##f(x); }   \
  PF_FN double libm_##NAME(double x) { return __builtin_##NAME(x); }
#define PF_LANEWISE(NAME) each([](elem<X> t) { return libm_##NAME(t); }, x)
PF_LIBM(sin) PF_LIBM(cos) PF_LIBM(tan) PF_LIBM(erfc) PF_LIBM(lgamma)
PF_FN float libm_pow(float x, float y) { return __builtin_powf(x, y); }
PF_FN double libm_pow(double x, double y) { return __builtin_pow(x, y); }
template <class X> constexpr bool in_float = is_same<elem<X>, float>;

// ---- exp and log -------------------------------------------------------------------------------

// a < b ? x : y by parts: a mask of half the width in between takes five instructions more.
template <class D> PF_FN D where_lt(D a, D b, D x, D y) {
  if constexpr (!is_wide<D>) return a < b ? x : y;
  else {
    auto s = bits_as<parts<D>>(a), t = bits_as<parts<D>>(b), u = bits_as<parts<D>>(x), v = bits_as<parts<D>>(y);
    for (int i = 0; i < num_parts<D>; i++) u.part[i] = s.part[i] < t.part[i] ? u.part[i] : v.part[i];
    return bits_as<D>(u);
  }
}

constexpr double whole_double = 6755399441055744.0;  // 1.5 * 2^52: its sum with a small whole number ends with it
template <class D> struct exp_parts_double { D r, k; like<D, int64_t> n; };  // k is n
template <class D> PF_FN exp_parts_double<D> exp_reduce_double(D x) {
  using I = like<D, int64_t>;
  const D magic = all<D>(whole_double), t = fma(x, all<D>(1.4426950408889634), magic), k = t - magic;
  const D r = fma(k, all<D>(-1.90821492927058770002e-10), fma(k, all<D>(-6.93147180369123816490e-01), x));
  return {r, k, bits_as<I>(t) - bits_as<I>(magic)};
}
// exp(r) - 1
template <class D> PF_FN D expm1_small_double(D r) {
  return fma(r * r, long_poly(r, 1.0 / 2, 1.0 / 6, 1.0 / 24, 1.0 / 120, 1.0 / 720, 1.0 / 5040, 1.0 / 40320, 1.0 / 362880, 1.0 / 3628800, 1.0 / 39916800, 1.0 / 479001600, 1.0 / 6227020800), r);
}
template <class I> PF_FN like<I, double> power_of_two_double(I n) { return bits_as<like<I, double>>((I)((n + 1023) << 52)); }
// y 2^n (k is n), without AVX-512 in two steps, so that the result may be subnormal.
template <class D, class I> PF_FN D scale_double(D y, D k, I n) {
#ifdef __AVX512F__
  if constexpr (is_vec<D>) return by_parts([](auto s, auto t) { return __builtin_ia32_scalefpd512_mask(s, t, s, -1, 4); }, y, k);
#endif
  using U = like<D, uint64_t>;
  const I half = (I)((U)(n + 2048) >> 1) - 1024;
  return y * power_of_two_double(half) * power_of_two_double((I)((U)n - (U)half));
}
template <class D> PF_FN D exp_double(D x) {
  const auto p = exp_reduce_double(low(all<D>(710.0), high(all<D>(-746.0), x)));
  return scale_double(expm1_small_double(p.r) + 1.0, p.k, p.n);
}
template <class D> PF_FN D exp2_double(D x) {
  using I = like<D, int64_t>;
  x = low(all<D>(1025.0), high(all<D>(-1076.0), x));
  const D magic = all<D>(whole_double), t = x + magic, k = t - magic, r = (x - k) * 0.6931471805599453;
  return scale_double(expm1_small_double(r) + 1.0, k, (I)(bits_as<I>(t) - bits_as<I>(magic)));
}
template <class D> PF_FN D expm1_double(D x) {
  const auto p = exp_reduce_double(low(all<D>(710.0), high(all<D>(-40.0), x)));
  const D s = power_of_two_double(p.n - 1), h = fma(s, expm1_small_double(p.r), s - 0.5);
  return where(eq(x, D{}), x, h + h);
}
template <class D> PF_FN D tanh_double(D x) {
  const D a = abs(x);
  const auto p = exp_reduce_double(low(all<D>(44.0), a + a));
  const D s = power_of_two_double(p.n), e = fma(s, expm1_small_double(p.r), s - 1.0);
  const auto near_one = gt(a, all<D>(0.6));
  const D q = where(near_one, all<D>(2.0), e) / (e + 2.0);
  return copysign(where(near_one, 1.0 - q, q), x);
}
// x = m 2^k with sqrt(1/2) <= m < sqrt(2); f = m - 1, s = f / (m + 1), and log(m) = f - (square - tail).
template <class D> struct log_parts_double { D f, s, square, tail, k; };
template <class D> PF_FN void split_exponent(D x, D& m, D& k) {
#ifdef __AVX512F__
  if constexpr (is_vec<D>) {  // the machine's [1, 2), and its exponent
    const D one = by_parts([](auto t) { return __builtin_ia32_getmantpd512_mask(t, 0, t, -1, 4); }, x);
    const D exponent = by_parts([](auto t) { return __builtin_ia32_getexppd512_mask(t, t, -1, 4); }, x);
    const D root = all<D>(1.4142135623730951);
    m = where_lt(one, root, one, (D)(one * 0.5));
    k = where_lt(one, root, exponent, (D)(exponent + 1.0));
    return;
  }
#endif
  using I = like<D, int64_t>;
  using U = like<D, uint64_t>;
  const D least_normal = all<D>(2.2250738585072014e-308);
  const I b = bits_as<I>(where_lt(x, least_normal, (D)(x * 18014398509481984.0), x)), one = all<I>(1023), least = all<I>(0x3fe6a09e667f3bcd);
  const I n = (I)(((U)b - (U)least + ((U)(one + 1) << 52)) >> 52) - 1024;
  const D whole = all<D>(whole_double);
  k = bits_as<D>((I)(n + bits_as<I>(whole))) - whole - where_lt(x, least_normal, all<D>(54.0), D{});
  m = bits_as<D>((U)b - ((U)n << 52));
}
template <class D> PF_FN log_parts_double<D> log_reduce_double(D x) {
  D m, k;
  split_exponent(x, m, k);
  const D f = m - 1.0, s = f / (f + 2.0), z = s * s, square = f * f * 0.5;
  const D tail = z * poly(z, 6.666666666666735130e-01, 3.999999999940941908e-01, 2.857142874366239149e-01, 2.222219843214978396e-01,
                          1.818357216161805012e-01, 1.531383769920937332e-01, 1.479819860511658591e-01);
  return {f, s, square, square + tail, k};
}
// What log has outside of (0, inf).
template <class D> PF_FN D log_limits_double(D x, D y) {
  const D inf = all<D>(__builtin_inf()), end = where_lt(x, inf, y, x);
  return where_lt(D{}, x, end, where_lt(x, D{}, all<D>(__builtin_nan("")), (D)(x - inf)));  // x is 0 or NaN
}
// log(x + lost) where lost is small against x.
template <class D> PF_FN D log_double(D x, D lost) {
  const auto p = log_reduce_double(x);
  const D low_part = fma(p.s, p.tail, fma(p.k, all<D>(1.90821492927058770002e-10), lost));
  return log_limits_double(x, fma(p.k, all<D>(6.93147180369123816490e-01), p.f - (p.square - low_part)));
}
// log(x) / log(base), of which the halves of log(2) / log(base) and 1 / log(base) are given.
template <class D> PF_FN D log_to_base_double(D x, double two, double two_low, double factor) {
  const auto p = log_reduce_double(x);
  const D y = p.f - (p.square - p.s * p.tail);
  return log_limits_double(x, fma(p.k, all<D>(two), fma(y, all<D>(factor), p.k * two_low)));
}
template <class D> PF_FN D log1p_double(D x) {
  const D u = x + 1.0;
  const D y = log_double(u, (x - (u - 1.0)) / u);
  return where(eq(x, D{}), x, where(eq(u, all<D>(__builtin_inf())), u, y));
}

// ---- circle ------------------------------------------------------------------------------------

template <class F> struct circle { F sin, cos; signed_of<F> quadrant; };
// x = k pi/2 + r with |r| <= pi/4 and pi/2 in three parts, for |x| < 1e9: the first product leaves x - k pi/2 exact.
template <class D> PF_FN circle<D> on_circle_double(D x) {
  using I = like<D, int64_t>;
  const D magic = all<D>(whole_double), t = fma(x, all<D>(0.6366197723675814), magic), k = t - magic;
  D r = fma(k, all<D>(-1.5707963267948966), x);
  r = fma(k, all<D>(-6.123233995736766e-17), r);
  r = fma(k, all<D>(1.4973849048591833e-33), r);
  const D s = r * r, half = s * 0.5, top = 1.0 - half;
  const D sine = fma(s * r, poly(s, -1.66666666666666324348e-01, 8.33333333332248946124e-03, -1.98412698298579493134e-04,
                                 2.75573137070700676789e-06, -2.50507602534068634195e-08, 1.58969099521155010221e-10), r);
  const D cosine = fma(s * s, poly(s, 4.16666666666666019037e-02, -1.38888888888741095749e-03, 2.48015872894767294178e-05,
                                   -2.75573143513906633035e-07, 2.08757232129817482790e-09, -1.13596475577881948265e-11),
                       (1.0 - top) - half) + top;
  return {sine, cosine, bits_as<I>(t) & 3};
}
// asin on [0, 1/2], atan on [0, 1]
template <class D> PF_FN D asin_small_double(D x) {
  const D s = x * x;
  const D p = poly(s, 0.16666666666665386, 0.0750000000034192, 0.04464285682460113, 0.030381959280815645,
           0.022371754791159684, 0.017359751509074272, 0.013884794231118804, 0.012171990575433058,
           0.006516410597852085, 0.019558799130637964, -0.016270585016915407, 0.03194304080613267);
  return fma(x * s, p, x);
}
template <class D> PF_FN D atan_small_double(D x) {
  const D s = x * x;
  const D p = poly(s, -0.33333333333331816, 0.1999999999974909, -0.14285714271043418, 0.11111110671323808,
           -0.09090901120806233, 0.07692211760044428, -0.06665851989111632, 0.05877264196084789,
           -0.052390637959244805, 0.046734509479167866, -0.040915116775406435, 0.03404822585416291,
           -0.02580065401687739, 0.01695148997940144, -0.009164430226116575, 0.0038449415265089863,
           -0.001159943493841647, 0.00022207921310916007, -2.015931250543046e-05);
  return fma(x * s, p, x);
}

// ---- error function ----------------------------------------------------------------------------

// 1 - exp(-u) with u = -log(erfc(|x|)), which is smooth and, for small x, 2 |x| / sqrt(pi).
template <class D> PF_FN D erf_double(D x) {
  const D a = low(all<D>(5.95), abs(x));  // erf is 1 from here
  const D q = long_poly(a, 0.6366197723675815, 0.10277260330192771, -0.019128447008748665, -0.00020919464344527208,
           0.0016962059477832847, -0.0005901230693257658, 2.586867262629024e-05, 6.452103138009709e-05,
           -2.9788866520022067e-05, 3.5186661385222124e-06, 2.6846072733488155e-06, -1.5796458190503616e-06,
           1.9654997224566182e-07, 2.3469214837419298e-07, -1.9685139847111412e-07, 9.095493612023962e-08,
           -3.0296783201433054e-08, 7.774059778394082e-09, -1.5654197204070233e-09, 2.4675839243841533e-10,
           -2.9925168252662566e-11, 2.6993398933872654e-12, -1.7062956591925544e-13, 6.7434752669779825e-15,
           -1.2533853848536021e-16);
  const auto p = exp_reduce_double((D)(-a * fma(a, q, all<D>(1.1283791670955126))));
  const D s = power_of_two_double(p.n - 1), h = fma(s, expm1_small_double(p.r), s - 0.5);
  return copysign(h + h, x);
}
// exp(-a^2) h(q) / (1 + 2a) for a = |x|, with q = (a - 3) / (a + 3); what a * a loses is put back as a factor.
template <class D> PF_FN D erfc_double(D x) {
  const D a = low(all<D>(28.0), abs(x)), s = a * a, lost = fma(a, a, -s);
  const D q = (a - 3.0) / (a + 3.0);
  const D h = poly(q, 1.2530080582697296, -0.13562110612458114, -0.047562294353450905, 0.12964515870275686,
           -0.1192736634152928, 0.0683080273441423, -0.02377051491915512, 0.0025293918128689334,
           0.0018886903663975746, -0.0007798322382318382, -0.00010515985277179479, 0.00012509913664885997,
           4.9497042309580575e-06, -2.009969605770612e-05, -7.320287337481479e-07, 3.4701231709373576e-06,
           3.574507557304956e-07, -6.127445501346039e-07, -1.4164534145491838e-07, 9.770610951569396e-08,
           4.101465994572269e-08, -1.080102874349353e-08, -7.612963598698812e-09, 3.2343778486178006e-10,
           5.666212066394488e-10);
  const auto p = exp_reduce_double((D)-s);
  const D e = expm1_small_double(p.r) + 1.0;
  const D y = scale_double(fma(e, -lost, e) * (h / fma(a, all<D>(2.0), all<D>(1.0))), p.k, p.n);
  return where(lt(x, D{}), 2.0 - y, y);
}
// x times a function of w = -log(1 - x^2) that is smooth, in w where it is small and in sqrt(w) beyond.
template <class D> PF_FN D erfinv_double(D x) {
  const D a = abs(x), w = -log_double((D)((1.0 - a) * (1.0 + a)), D{});
  const D near = poly((D)(w - 3.0), 1.62354200646483, 0.24163040416615844, -0.005738135221006313, -0.0008361817769108906,
           0.00019506132441522099, -1.2716422634067947e-05, -1.7480020992032895e-06, 4.499854191609083e-07,
           -2.3688724127828226e-08, -5.467174280151596e-09, 1.1107963617330853e-09, -3.142768784222953e-11,
           -1.7328211107455868e-11, 2.6995860179893954e-12, 6.126010568333709e-15, -5.304759265944067e-14,
           6.347210677341826e-15, 2.8861666541477035e-16, -1.631921338924021e-16, 1.1747629233660694e-17,
           2.0697148891430343e-18, -3.4197143498802905e-19, -1.0755254315892246e-20, 3.3865664456769312e-21);
  const auto is_near = lt(w, all<D>(6.25));
  if (hall(is_near)) return x * near;
  const D root = sqrt(w);
  const D middle = poly((D)(root - 3.25), 3.0838856104922208, 1.005258967694166, 0.005370914553575223, -0.003751208508271407,
           0.0024914420967954913, -0.0016882755340193892, 0.000953289367467363, -0.00035503783369112514,
           2.403122009218093e-05, 6.828726757698206e-05, -4.7318780144428134e-05, 1.246436248504635e-05,
           2.9250717981991838e-06, -3.983921971912972e-06, 1.499940697319879e-06, -3.045865212763866e-08,
           -2.725751520761749e-07, 1.3406215194134474e-07, 1.2082161150438726e-09, -1.6213620003812916e-08);
  const D far = poly((D)(root - 5.0), 4.849906401408584, 1.0103004648645402, -0.00013871931833759528, -0.00021503011958221848,
           7.599527709907129e-05, -1.9681774109694952e-05, 4.526061732609803e-06, -9.930083140708886e-07,
           2.2900937080401752e-07, -6.762487980800983e-08, 2.9135985662182977e-08, -1.512847133573837e-08,
           7.63227769960486e-09, -3.604008737228986e-09, 1.496108541998584e-09, -3.6381289416210366e-10,
           -2.3921501590051965e-11, 2.598384051701067e-11);
  const D y = x * where(is_near, near, where(lt(w, all<D>(16.0)), middle, far));
  return where(eq(a, all<D>(1.0)), x * __builtin_inf(), y);
}

// ---- pow ---------------------------------------------------------------------------------------

// A value and what it lacks.
template <class D> struct with_rest { D value, rest; };
// log(x) for 0 < x < inf in twice the digits: with s = f / (f + 2), it is s (2 + s^2 (2/3 + s^2 P(s^2))).
template <class D> PF_FN with_rest<D> log_twice(D x) {
  D m, k;
  split_exponent(x, m, k);
  const D f = m - 1.0, d = f + 2.0, inverse = 1.0 / d, s = f * inverse;
  const D s_rest = fma(-s, (D)(f - (d - 2.0)), fma(-s, d, f)) * inverse;
  const D z = s * s, z_rest = fma(s, s, -z) + 2.0 * s * s_rest;
  const D p = z * poly(z, 0.3999999999999998, 0.2857142857144523, 0.22222222217513035, 0.18181818872744815,
           0.15384556728493645, 0.13336322193653816, 0.11674733194251273, 0.11989644163074074);
  const D w = p + 0.6666666666666666, w_rest = (0.6666666666666666 - w) + p + 3.700743415417188e-17;
  const D t = z * w, t_rest = fma(z, w, -t) + fma(z, w_rest, z_rest * w);
  const D v = s * t, v_rest = fma(s, t, -v) + fma(s, t_rest, s_rest * (t + 2.0));
  const D sum = fma(s, all<D>(2.0), v), sum_rest = fma(s, all<D>(2.0), -sum) + v + v_rest;
  const D whole = k * 6.93147180369123816490e-01, y = whole + sum;  // exact: the constant ends with 21 zeros
  return {y, (whole - y) + sum + fma(k, all<D>(1.90821492927058770002e-10), sum_rest)};
}
// |x|^y for finite x other than 0 and finite y.
template <class D> PF_FN D pow_positive_double(D x, D y) {
  const auto l = log_twice(x);
  const D e = y * l.value, rest = fma(y, l.value, -e) + y * l.rest;
  const auto p = exp_reduce_double(low(all<D>(720.0), high(all<D>(-760.0), e)));
  const D r = p.r + low(high(rest, all<D>(-1.0)), all<D>(1.0));  // where e overflows, it is NaN
  return scale_double(expm1_small_double(r) + 1.0, p.k, p.n);
}
// x^y for finite x and y.
template <class D> PF_FN D pow_finite_double(D x, D y) {
  const D a = abs(x), half = y * 0.5;
  const auto is_whole = eq(trunc(y), y), is_odd = land(is_whole, ne(trunc(half), half));
  const D of_zero = where(lt(y, D{}), all<D>(__builtin_inf()), where(eq(y, D{}), all<D>(1.0), D{}));
  const D r = where(eq(a, D{}), of_zero, pow_positive_double(a, y));
  const auto has_none = land(lt(x, D{}), lnot(is_whole));
  return where(is_odd, copysign(r, x), where(has_none, all<D>(__builtin_nan("")), r));
}
// Two paths of vector code; libm has the infinities and NaN.
template <class D> PF_FN D pow_double(D x, D y) {
  const auto finite = lt(abs(x) + abs(y), all<D>(__builtin_inf()));
  if (hall(land(finite, gt(x, D{})))) return pow_positive_double(x, y);
  const D r = pow_finite_double(x, y);
  if (hall(finite)) return r;
  return where(finite, r, each([](double s, double t) { return libm_pow(s, t); }, x, y));
}

// ---- hypot -------------------------------------------------------------------------------------

// The larger is scaled to [1, 2) by a power of two, so that no square overflows.
template <class D> PF_FN D hypot_double(D x, D y) {
  using I = like<D, int64_t>;
  const D a = abs(x), b = abs(y), inf = all<D>(__builtin_inf());
  const D more = high(a, b), less = low(a, b);
  const D e = bits_as<D>((I)(bits_as<I>(more) & 0x7ff0000000000000));
  const D power = low(all<D>(0x1p1022), high(all<D>(0x1p-1022), e));
  const D inverse = bits_as<D>((I)(0x7fe0000000000000 - bits_as<I>(power)));
  const D s = more * inverse, t = less * inverse, r = sqrt(fma(s, s, t * t)) * power;
  return where(eq(more, inf), inf, where(isnan(a + b), where(lor(eq(a, inf), eq(b, inf)), inf, a + b), r));
}

}  // namespace pf
