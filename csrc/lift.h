// The lift, from elements to their row. It is the only part of the statistics that is written once per
// language: here one value at a time, for stat.h, and in SIMD lanes, for the fast loops. The latter include
// this file a second time with GRADSTAT_INLINE defined as their function specifier, inside a namespace that
// has `fma` and `absolute` for their registers. So there is no include guard.

#if !defined(GRADSTAT_INLINE)
#define GRADSTAT_LIFT GRADSTAT_HD
#else
#define GRADSTAT_LIFT GRADSTAT_INLINE
#endif

// The fields that are sums over finite values. Nothing but `lifts` needs to know a new one.
#define GRADSTAT_SUMS(EACH) EACH(sq_sum) EACH(sum)

// What a value adds to each of them. All of +, -, *, `fma` and `absolute` are there for numbers and registers.
//   of(x, ordinary)  what a finite x adds: nothing if x is 0, and nothing that float32 cannot hold where it
//   holds
//                    the square. `ordinary`: x, or 0 if the square of x leaves the range of float64.
//   add(sum, x)      sum + of(x, x) for ordinary x, in as few roundings as possible
//   kIsExact         whether of(x, x) is exact in the type of x. Eight such terms of float32 are summed before
//                    they are promoted to float64, of others four. 16-bit values are in float32 already.
namespace lifts {

struct sq_sum {
  static constexpr bool kIsExact = false;
  template <class Real>
  GRADSTAT_LIFT static Real of(Real, Real ordinary) {
    return ordinary * ordinary;
  }
  template <class Real>
  GRADSTAT_LIFT static Real add(Real sum, Real x) {
    return fma(x, x, sum);
  }
};

struct sum {
  static constexpr bool kIsExact = true;
  template <class Real>
  GRADSTAT_LIFT static Real of(Real x, Real) {
    return x;
  }
  template <class Real>
  GRADSTAT_LIFT static Real add(Real sum, Real x) {
    return sum + x;
  }
};

}  // namespace lifts
#undef GRADSTAT_LIFT

#if !defined(GRADSTAT_INLINE)

// All other fields. Every loop has its own code for those that are not left to the exact path.
#define GRADSTAT_NOT_SUMS(EACH) \
  EACH(nan_count)               \
  EACH(inf_count)               \
  EACH(zero_count) EACH(sq_sum_large) EACH(sq_sum_small) EACH(min) EACH(max) EACH(first_nonfinite)
#define GRADSTAT_BIT(name) | 1u << offsetof(Row, name) / sizeof(double)
constexpr uint32_t kSums = 0 GRADSTAT_SUMS(GRADSTAT_BIT), kNotSums = 0 GRADSTAT_NOT_SUMS(GRADSTAT_BIT);
static_assert(
    (kSums | kNotSums) == (1u << kFields) - 1 && (kSums & kNotSums) == 0,
    "a field is in neither or both of GRADSTAT_SUMS and GRADSTAT_NOT_SUMS: CONTRIBUTING.md, \"Add a field\"");
#undef GRADSTAT_BIT
#undef GRADSTAT_NOT_SUMS

// Adds one finite value to the columns that describe magnitudes. Values whose square would overflow or
// underflow in float64 are scaled first; gradstat/_fields.py gives the source of the constants.
GRADSTAT_HD void lift_finite(Row& row, double x) {
  const double magnitude = absolute(x);
  double ordinary = 0;
  if (magnitude > GRADSTAT_LARGE) {
    const double scaled = x * GRADSTAT_LARGE_SCALE;
    row.sq_sum_large += scaled * scaled;
  } else if (magnitude < GRADSTAT_SMALL) {
    const double scaled = x * GRADSTAT_SMALL_SCALE;
    row.sq_sum_small += scaled * scaled;
  } else {
    ordinary = x;
  }
#define GRADSTAT_SUM(name) row.name += lifts::name::of(x, ordinary);
  GRADSTAT_SUMS(GRADSTAT_SUM)
#undef GRADSTAT_SUM
  row.min = merge::min(row.min, x);
  row.max = merge::max(row.max, x);
}

GRADSTAT_HD bool is_nan(double x) { return x != x; }
GRADSTAT_HD bool is_inf(double x) { return x == kInf || x == -kInf; }

// Adds one element of any value at flat index `index`: the exact path of every loop over memory. A complex
// element, of two parts, is NaN if either part is, else Inf if either part is, zero if both parts are. The
// other columns take both parts of a finite element.
template <class... Parts>
GRADSTAT_HD void lift(Row& row, double index, Parts... parts) {
  const bool nan = (is_nan(parts) || ...);
  if (nan || (is_inf(parts) || ...)) {
    (nan ? row.nan_count : row.inf_count) += 1;
    row.first_nonfinite = merge::min(row.first_nonfinite, index);
    return;
  }
  row.zero_count += ((parts == 0) && ...);
  (lift_finite(row, parts), ...);
}

#else

// The sums of the fast loops, over finite values of ordinary magnitude, with zeros in place of all others.
template <class Real>
struct Sums {
#define GRADSTAT_SUM(name) Real name = {};
  GRADSTAT_SUMS(GRADSTAT_SUM)
#undef GRADSTAT_SUM

#define GRADSTAT_SUM(name) lifts::name::of(x, x),
  GRADSTAT_INLINE static Sums of(Real x) { return {GRADSTAT_SUMS(GRADSTAT_SUM)}; }
#undef GRADSTAT_SUM
#define GRADSTAT_SUM(name) lifts::name::add(name, x),
  GRADSTAT_INLINE Sums with(Real x) const { return {GRADSTAT_SUMS(GRADSTAT_SUM)}; }
#undef GRADSTAT_SUM
  GRADSTAT_INLINE static Sums of_pair(Real a, Real b) { return of(a).with(b); }
#define GRADSTAT_SUM(name) name + other.name,
  GRADSTAT_INLINE Sums operator+(const Sums& other) const { return {GRADSTAT_SUMS(GRADSTAT_SUM)}; }
#undef GRADSTAT_SUM

  // In float64, converted by `promote`.
  template <class Wide, class Promote>
  GRADSTAT_INLINE Sums<Wide> promoted(const Promote& promote) const {
#define GRADSTAT_SUM(name) promote(name),
    return {GRADSTAT_SUMS(GRADSTAT_SUM)};
#undef GRADSTAT_SUM
  }
  // The sum of two groups, in float64. Exact terms are added before the conversion; kTogether adds all before.
  template <class Wide, bool kTogether, class Promote>
  GRADSTAT_INLINE static Sums<Wide> promoted(const Sums& a, const Sums& b, const Promote& promote) {
#define GRADSTAT_SUM(name) \
  kTogether || lifts::name::kIsExact ? promote(a.name + b.name) : promote(a.name) + promote(b.name),
    return {GRADSTAT_SUMS(GRADSTAT_SUM)};
#undef GRADSTAT_SUM
  }
  // Calls body(column, sum) for each sum.
  template <class Body>
  GRADSTAT_INLINE void each(Row& row, const Body& body) const {
#define GRADSTAT_SUM(name) body(row.name, name);
    GRADSTAT_SUMS(GRADSTAT_SUM)
#undef GRADSTAT_SUM
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
