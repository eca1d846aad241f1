// From elements to their row, the only part of the statistic that is written for each language: one value at a
// time, for stat.h, and lanes of them, for the fast loops. Those include this once more where GRADSTAT_INLINE
// is what their functions are declared with, in the namespace of their registers, in which `fma` takes them.
// Hence no include guard.

#if !defined(GRADSTAT_INLINE)

// Adds one finite value to the columns that describe magnitudes. Squares of values whose own square would
// leave float64's range are scaled first; see gradstat/_fields.py for the source of the constants.
GRADSTAT_HD void lift_finite(Row& row, double x) {
  const double magnitude = x < 0 ? -x : x;
  row.sum += x;
  if (magnitude > GRADSTAT_LARGE) {
    const double scaled = x * GRADSTAT_LARGE_SCALE;
    row.sq_sum_large += scaled * scaled;
  } else if (magnitude < GRADSTAT_SMALL) {
    const double scaled = x * GRADSTAT_SMALL_SCALE;
    row.sq_sum_small += scaled * scaled;
  } else {
    row.sq_sum += x * x;
  }
  row.min = merge::min(row.min, x);
  row.max = merge::max(row.max, x);
}

GRADSTAT_HD bool is_nan(double x) { return x != x; }
GRADSTAT_HD bool is_inf(double x) { return x == kInf || x == -kInf; }

// One real element at flat index `index`, whatever its value: the exact path of every traversal.
GRADSTAT_HD void lift(Row& row, double x, double index) {
  if (is_nan(x) || is_inf(x)) {
    (is_nan(x) ? row.nan_count : row.inf_count) += 1;
    row.first_nonfinite = merge::min(row.first_nonfinite, index);
    return;
  }
  row.zero_count += x == 0;
  lift_finite(row, x);
}

// One complex element: NaN if either part is, else Inf if either part is, zero if both parts are; the
// other columns take both parts of a finite element.
GRADSTAT_HD void lift_pair(Row& row, double re, double im, double index) {
  const bool nan = is_nan(re) || is_nan(im);
  if (nan || is_inf(re) || is_inf(im)) {
    (nan ? row.nan_count : row.inf_count) += 1;
    row.first_nonfinite = merge::min(row.first_nonfinite, index);
    return;
  }
  row.zero_count += re == 0 && im == 0;
  lift_finite(row, re);
  lift_finite(row, im);
}

#else

// What the fast loops add up of finite values of ordinary magnitude, and zeros that stand in for others. A
// further sum has its name in every line of this.
template <class Real>
struct Sums {
  Real sq_sum = {}, sum = {};

  GRADSTAT_INLINE static Sums of(Real x) { return {x * x, x}; }
  GRADSTAT_INLINE static Sums of_pair(Real a, Real b) { return {fma(b, b, a * a), a + b}; }
  GRADSTAT_INLINE Sums with_pair(Real a, Real b) const { return {fma(b, b, fma(a, a, sq_sum)), sum + a + b}; }
  GRADSTAT_INLINE Sums operator+(const Sums& other) const { return {sq_sum + other.sq_sum, sum + other.sum}; }

  // Of two groups in float64, given how a number is promoted. Their squares may have to be promoted apart.
  template <class Wide, bool kTogether, class Promote>
  GRADSTAT_INLINE static Sums<Wide> promoted(const Sums& a, const Sums& b, const Promote& promote) {
    return {kTogether ? promote(a.sq_sum + b.sq_sum) : promote(a.sq_sum) + promote(b.sq_sum),
            promote(a.sum + b.sum)};
  }
  // Calls body(column, sum) for each.
  template <class Body>
  GRADSTAT_INLINE void each(Row& row, const Body& body) const {
    body(row.sq_sum, sq_sum), body(row.sum, sum);
  }
};

// As a balanced tree.
template <int kCount, class Real>
GRADSTAT_INLINE Sums<Real> sums_of(const Real* x) {
  if constexpr (kCount == 2) {
    return Sums<Real>::of_pair(x[0], x[1]);
  } else {
    return sums_of<kCount / 2>(x) + sums_of<kCount / 2>(x + kCount / 2);
  }
}

#endif
