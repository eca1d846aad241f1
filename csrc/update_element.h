// What an optimizer is about to do to one element, or to SIMD lanes: the only part of the update statistics
// that is written once per language (also kernels/update.py and gradstat/_core/reference.py). update.h includes
// this for one value at a time; the CPU kernels include it with GRADSTAT_INLINE as their function specifier,
// after root, inverse_of, larger and magnitude for their registers. Hence no include guard.

#if defined(GRADSTAT_INLINE)
#define GRADSTAT_ELEMENT GRADSTAT_INLINE
#else
#define GRADSTAT_ELEMENT GRADSTAT_HD
#endif

// `x`: the operands in order.
template <UpdateFormula kFormula, class Real, class Number>
GRADSTAT_ELEMENT void add_update(UpdateSums<Real>& sums, const Real* x, const UpdateCoefficients<Number>& by) {
  constexpr bool kHasSecond = kFormula >= UpdateFormula::kAdam;
  const Real weight = x[1];
  Real gradient = x[0] * by.gradient_scale;
  if (by.weight_decay != 0) gradient += weight * by.weight_decay;
  Real new_momentum = gradient * by.momentum_gain;
  sums.gradient += gradient * gradient;
  sums.weight += weight * weight;
  if constexpr (kFormula != UpdateFormula::kGradient) {
    const Real momentum = x[2];
    new_momentum += momentum * by.momentum_decay;
    sums.product += gradient * momentum;
    sums.momentum += momentum * momentum;
  }
  Real update = gradient * by.from_gradient + new_momentum * by.from_momentum;
  if constexpr (kHasSecond) {
    Real divisor = x[3];
    sums.second += divisor;
    if constexpr (kFormula == UpdateFormula::kAdamax) {
      divisor = larger(divisor * by.second_decay, magnitude(gradient) + by.eps);
    } else {
      divisor = divisor * by.second_decay + gradient * gradient * by.second_gain;
      if constexpr (kFormula == UpdateFormula::kAmsgrad) {
        sums.second += x[4];
        divisor = larger(divisor, x[4]);
      }
      divisor = root(divisor) * by.root_scale + by.eps;
    }
    const Real inverse = inverse_of(divisor);
    const Real scaled = gradient * inverse;
    sums.scaled += scaled * scaled;
    if (by.is_adaptive != 0) update *= inverse;
  }
  sums.update += update * update;
}

#undef GRADSTAT_ELEMENT
