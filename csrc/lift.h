// The lift, from elements to their row. It is the only part of the statistics that is written once per
// language: here one value at a time, for stat.h, and in SIMD lanes, for the fast loops. The latter include
// this file a second time with GRADSTAT_INLINE defined as their function specifier, inside the namespace that
// declares `fma` for their registers. Hence no include guard.

#if !defined(GRADSTAT_INLINE)

// Adds one finite value to the columns that describe magnitudes. Values whose square would overflow or
// underflow in float64 are scaled first; gradstat/_fields.py gives the source of the constants.
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

// Adds one real element of any value at flat index `index`: the exact path of every loop over memory.
GRADSTAT_HD void lift(Row& row, double x, double index) {
  if (is_nan(x) || is_inf(x)) {
    (is_nan(x) ? row.nan_count : row.inf_count) += 1;
    row.first_nonfinite = merge::min(row.first_nonfinite, index);
    return;
  }
  row.zero_count += x == 0;
  lift_finite(row, x);
}

// Adds one complex element: NaN if either part is, else Inf if either part is, zero if both parts are. The
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

// The sums of the fast loops, over finite values of ordinary magnitude, with zeros in place of all others. A
// new sum must be added to every function here.
template <class Real>
struct Sums {
  Real sq_sum = {}, sum = {};

  GRADSTAT_INLINE static Sums of(Real x) { return {x * x, x}; }
  GRADSTAT_INLINE static Sums of_pair(Real a, Real b) { return {fma(b, b, a * a), a + b}; }
  GRADSTAT_INLINE Sums with_pair(Real a, Real b) const { return {fma(b, b, fma(a, a, sq_sum)), sum + a + b}; }
  GRADSTAT_INLINE Sums operator+(const Sums& other) const { return {sq_sum + other.sq_sum, sum + other.sum}; }

  // The sum of two groups in float64, converted by `promote`: with kTogether squares are added before that.
  template <class Wide, bool kTogether, class Promote>
  GRADSTAT_INLINE static Sums<Wide> promoted(const Sums& a, const Sums& b, const Promote& promote) {
    return {kTogether ? promote(a.sq_sum + b.sq_sum) : promote(a.sq_sum) + promote(b.sq_sum),
            promote(a.sum + b.sum)};
  }
  // Calls body(column, sum) for each sum.
  template <class Body>
  GRADSTAT_INLINE void each(Row& row, const Body& body) const {
    body(row.sq_sum, sq_sum), body(row.sum, sum);
  }
};

// Added up as a balanced tree.
template <int kCount, class Real>
GRADSTAT_INLINE Sums<Real> sums_of(const Real* x) {
  if constexpr (kCount == 2) {
    return Sums<Real>::of_pair(x[0], x[1]);
  } else {
    return sums_of<kCount / 2>(x) + sums_of<kCount / 2>(x + kCount / 2);
  }
}

#endif
