// Statistics of the update that an optimizer is about to make: the inputs per tensor, and sums over elements.
// One set of coefficients describes any of torch's Adam family or SGD (gradstat/_step/updates.py computes
// them); update_element.h applies them to one element. Plain C++ for host and device.
#pragma once

#include <stdexcept>
#include <string>
#include <vector>

#include "entry.h"
#include "stat.h"

namespace gradstat {

// Numbered as UPDATE_FORMULAS of gradstat/_fields.py. The order of operands is: gradient, weight, momentum,
// second moment (Adamax: infinity norm), its maximum.
enum class UpdateFormula : int32_t { kGradient, kMomentum, kAdam, kAmsgrad, kAdamax };
constexpr int kUpdateFormulas = 5;
constexpr int kMaxOperands = 5;
GRADSTAT_HD constexpr int operands_of(UpdateFormula formula) {
  return formula == UpdateFormula::kAdamax ? 4 : static_cast<int>(formula) + 2;
}

// UPDATE_COEFFICIENTS of gradstat/_fields.py; in float64 it has the memory layout of a row of their table.
template <class Number>
struct UpdateCoefficients {
  Number gradient_scale;                 // multiplies the gradient first
  Number weight_decay;                   // L2 penalty, added to the gradient after that
  Number momentum_decay, momentum_gain;  // of the new momentum: factors of the old one and the gradient
  Number second_decay, second_gain;      // of the new second moment: factors of the old one and the square
  Number from_gradient, from_momentum;   // of the update: factors of the gradient and the new momentum
  Number root_scale, eps;  // of the divisor: factor of the second moment's root, and what is added
  Number is_adaptive;      // whether the update is divided by the divisor
  Number lr;               // for the host, which multiplies the sums by it
};
constexpr int kUpdateCoefficients = sizeof(UpdateCoefficients<double>) / sizeof(double);

GRADSTAT_HD UpdateCoefficients<float> narrowed(const UpdateCoefficients<double>& by) {
  UpdateCoefficients<float> narrow;
  const double* from = &by.gradient_scale;
  float* to = &narrow.gradient_scale;
  for (int i = 0; i < kUpdateCoefficients; ++i) to[i] = static_cast<float>(from[i]);
  return narrow;
}

// UPDATE_SUMS of gradstat/_fields.py: sums of squares, except the product of gradient and momentum, and the
// second moment, summed to detect NaN and Inf. In float64 it has the memory layout of a table row.
template <class Real>
struct UpdateSums {
  Real update, weight, scaled, product, gradient, momentum, second;
};
constexpr int kUpdateSums = sizeof(UpdateSums<double>) / sizeof(double);

template <class Real>
GRADSTAT_HD void merge_into(UpdateSums<double>& into, const UpdateSums<Real>& other) {
  double* to = &into.update;
  const Real* from = &other.update;
  for (int i = 0; i < kUpdateSums; ++i) to[i] += from[i];
}

// The range in which a float32 sum of squares is trusted. Below it, underflowed squares could matter; above it,
// a square may have overflowed. NaN is outside.
template <class Real>
GRADSTAT_HD bool is_safe_square(Real sum) {
  return sum >= Real(0x1p-90) && sum <= Real(0x1p+120);
}

// False if float32 squares of small gradients could underflow in the divisor and eps is too small to hide that.
GRADSTAT_HD bool fits_float(const UpdateCoefficients<double>& by, UpdateFormula formula) {
  return formula < UpdateFormula::kAdam || formula == UpdateFormula::kAdamax || by.eps >= 0x1p-50;
}

// Whether sums formed in float32 are accurate, given which operands are known to be zero.
template <class Real>
GRADSTAT_HD bool is_safe(const UpdateSums<Real>& sums, bool no_gradient, bool no_momentum, bool no_weight,
                         UpdateFormula formula) {
  return (no_gradient || is_safe_square(sums.gradient)) && (no_momentum || is_safe_square(sums.momentum)) &&
         (no_weight || is_safe_square(sums.weight)) &&
         (no_gradient || formula < UpdateFormula::kAdam || is_safe_square(sums.scaled)) &&
         ((no_gradient && no_momentum) || is_safe_square(sums.update)) && sums.second <= Real(0x1p+120);
}

// CUDA's own square root and division involve calls, which need more registers than the kernel has left. These
// use approximations of 22 bits, refined in float64 by two Newton steps; a step with 0 or infinity would give
// NaN. The root of a subnormal, below 2**-511, is taken for 0.
#if defined(__CUDA_ARCH__)
GRADSTAT_HD float root(float x) {
  asm("sqrt.approx.f32 %0, %0;" : "+f"(x));
  return x;
}
GRADSTAT_HD float inverse_of(float x) {
  asm("rcp.approx.f32 %0, %0;" : "+f"(x));
  return x;
}
GRADSTAT_HD double root(double x) {
  if (x >= 0 && x < 0x1p-1022) return 0;
  if (x == kInf) return x;
  double y;
  asm("rsqrt.approx.ftz.f64 %0, %1;" : "=d"(y) : "d"(x));
  for (int i = 0; i < 2; ++i) y *= 1.5 - 0.5 * x * y * y;
  return x * y;
}
GRADSTAT_HD double inverse_of(double x) {
  double y;
  asm("rcp.approx.ftz.f64 %0, %1;" : "=d"(y) : "d"(x));
  if (y == 0 || is_inf(y)) return y;
  for (int i = 0; i < 2; ++i) y *= 2.0 - x * y;
  return y;
}
#else
GRADSTAT_HD float root(float x) { return sqrtf(x); }
GRADSTAT_HD double root(double x) { return sqrt(x); }
template <class Real>
GRADSTAT_HD Real inverse_of(Real x) {
  return Real(1) / x;
}
#endif
template <class Real>
GRADSTAT_HD Real larger(Real a, Real b) {
  return a > b ? a : b;
}
template <class Real>
GRADSTAT_HD Real magnitude(Real x) {
  return x < 0 ? -x : x;
}

#include "update_element.h"

// Calls body(formula) with the formula as an integral_constant.
template <class Body>
GRADSTAT_HD void with_formula(UpdateFormula formula, const Body& body) {
  switch (formula) {
    case UpdateFormula::kGradient:
      return body(std::integral_constant<UpdateFormula, UpdateFormula::kGradient>());
    case UpdateFormula::kMomentum:
      return body(std::integral_constant<UpdateFormula, UpdateFormula::kMomentum>());
    case UpdateFormula::kAdam:
      return body(std::integral_constant<UpdateFormula, UpdateFormula::kAdam>());
    case UpdateFormula::kAmsgrad:
      return body(std::integral_constant<UpdateFormula, UpdateFormula::kAmsgrad>());
    default:
      return body(std::integral_constant<UpdateFormula, UpdateFormula::kAdamax>());
  }
}

// A tensor and its optimizer state: operands of equal length.
struct UpdateEntry {
  Entry operands[kMaxOperands];
  UpdateFormula formula;

  int64_t numel() const { return operands[0].numel; }
};

// Groups consecutive operands by tensor. Throws std::runtime_error if they do not fit the formulas.
inline std::vector<UpdateEntry> update_entries(const std::vector<Entry>& operands,
                                               const std::vector<int64_t>& formulas) {
  std::vector<UpdateEntry> entries;
  entries.reserve(formulas.size());
  size_t at = 0;
  for (const int64_t number : formulas) {
    if (number < 0 || number >= kUpdateFormulas) {
      throw std::runtime_error("gradstat: unknown update formula " + std::to_string(number));
    }
    UpdateEntry entry = {{}, static_cast<UpdateFormula>(number)};
    for (int i = 0; i < operands_of(entry.formula); ++i, ++at) {
      if (at >= operands.size()) throw std::runtime_error("gradstat: too few operands for the update formulas");
      entry.operands[i] = operands[at];
      if (entry.operands[i].is_pair || entry.operands[i].numel != entry.numel()) {
        throw std::runtime_error("gradstat: update operand " + std::to_string(at) +
                                 " must be real and have as many elements as the gradient");
      }
    }
    entries.push_back(entry);
  }
  if (at != operands.size()) throw std::runtime_error("gradstat: too many operands for the update formulas");
  return entries;
}

}  // namespace gradstat
