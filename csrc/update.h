// The update that an optimizer is about to make: what is known of each tensor, and sums over its elements. One
// set of coefficients says what any of torch's Adam family, or SGD, does (gradstat/_step/updates.py makes
// them); what it does to one element says update_element.h. Plain C++ for host and device.
#pragma once

#include <stdexcept>
#include <string>
#include <vector>

#include "entry.h"
#include "stat.h"

namespace gradstat {

// Numbered as UPDATE_RULES of gradstat/_fields.py. Operands in this order: gradient, weight, momentum, second
// moment (Adamax: infinity norm), its maximum.
enum class UpdateRule : int32_t { kGradient, kMomentum, kAdam, kAmsgrad, kAdamax };
constexpr int kUpdateRules = 5;
constexpr int kMostOperands = 5;
GRADSTAT_HD int operands_of(UpdateRule rule) {
  return rule == UpdateRule::kAdamax ? 4 : static_cast<int>(rule) + 2;
}

// UPDATE_COEFFICIENTS of gradstat/_fields.py: as float64 a row of their table, bit for bit.
template <class Number>
struct UpdateCoefficients {
  Number gradient_scale;                 // what a gradient is multiplied by first
  Number weight_decay;                   // L2 penalty that then joins it
  Number momentum_decay, momentum_gain;  // of the new momentum: the old one, and the gradient
  Number second_decay, second_gain;      // of the new second moment: the old one, and the gradient's square
  Number from_gradient, from_momentum;   // of the update: the gradient, and the new momentum
  Number root_scale, eps;                // of the divisor: the second moment's root, and what is added
  Number is_adaptive;                    // whether the update is divided by it
  Number lr;                             // for the host, which multiplies sums by it
};
constexpr int kUpdateCoefficients = sizeof(UpdateCoefficients<double>) / sizeof(double);

GRADSTAT_HD UpdateCoefficients<float> narrowed(const UpdateCoefficients<double>& by) {
  UpdateCoefficients<float> narrow;
  const double* from = &by.gradient_scale;
  float* to = &narrow.gradient_scale;
  for (int i = 0; i < kUpdateCoefficients; ++i) to[i] = static_cast<float>(from[i]);
  return narrow;
}

// UPDATE_SUMS of gradstat/_fields.py: squares, but for the product of gradient and momentum, and the second
// moment, which shows whether it is finite. As float64 a row of a table.
template <class Real>
struct UpdateSums {
  Real update, weight, scaled, product, gradient, momentum, second;
};
constexpr int kUpdateSums = sizeof(UpdateSums<double>) / sizeof(double);

GRADSTAT_HD void merge_into(UpdateSums<double>& into, const UpdateSums<double>& other) {
  double* to = &into.update;
  const double* from = &other.update;
  for (int i = 0; i < kUpdateSums; ++i) to[i] += from[i];
}

// What float32 lanes may be trusted with. Below, squares that vanished could matter; above, one may have
// overflowed. NaN is neither.
template <class Real>
GRADSTAT_HD bool is_safe_square(Real sum) {
  return sum >= Real(0x1p-90) && sum <= Real(0x1p+120);
}

// Where float32 squares of small gradients vanish in the divisor unless eps is larger.
GRADSTAT_HD bool fits_float(const UpdateCoefficients<double>& by, UpdateRule rule) {
  return rule < UpdateRule::kAdam || rule == UpdateRule::kAdamax || by.eps >= 0x1p-50;
}

// Whether sums made in float32 lanes are those of the elements, given which operands are known to be zero.
template <class Real>
GRADSTAT_HD bool is_safe(const UpdateSums<Real>& sums, bool no_gradient, bool no_momentum, bool no_weight,
                         UpdateRule rule) {
  return (no_gradient || is_safe_square(sums.gradient)) && (no_momentum || is_safe_square(sums.momentum)) &&
         (no_weight || is_safe_square(sums.weight)) &&
         (no_gradient || rule < UpdateRule::kAdam || is_safe_square(sums.scaled)) &&
         ((no_gradient && no_momentum) || is_safe_square(sums.update)) && sums.second <= Real(0x1p+120);
}

// On a GPU the library's are calls, which cost a kernel more registers than it has. These are approximations of
// 22 bits, in float64 made good by two steps of Newton's method.
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
  double y;
  asm("rsqrt.approx.ftz.f64 %0, %1;" : "=d"(y) : "d"(x));
  for (int i = 0; i < 2; ++i) y *= 1.5 - 0.5 * x * y * y;
  return x == 0 ? x : x * y;
}
GRADSTAT_HD double inverse_of(double x) {
  double y;
  asm("rcp.approx.ftz.f64 %0, %1;" : "=d"(y) : "d"(x));
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

// Calls body(rule) with the rule as a type's `value`.
template <class Body>
GRADSTAT_HD void with_rule(UpdateRule rule, const Body& body) {
  switch (rule) {
    case UpdateRule::kGradient:
      return body(std::integral_constant<UpdateRule, UpdateRule::kGradient>());
    case UpdateRule::kMomentum:
      return body(std::integral_constant<UpdateRule, UpdateRule::kMomentum>());
    case UpdateRule::kAdam:
      return body(std::integral_constant<UpdateRule, UpdateRule::kAdam>());
    case UpdateRule::kAmsgrad:
      return body(std::integral_constant<UpdateRule, UpdateRule::kAmsgrad>());
    default:
      return body(std::integral_constant<UpdateRule, UpdateRule::kAdamax>());
  }
}

// One tensor and what belongs to it: operands of one length.
struct UpdateEntry {
  Entry operands[kMostOperands];
  UpdateRule rule;

  int64_t numel() const { return operands[0].numel; }
};

// Groups the operands of many tensors, one behind the other. Throws std::runtime_error if they do not fit.
inline std::vector<UpdateEntry> update_entries(const std::vector<Entry>& operands,
                                               const std::vector<int64_t>& rules) {
  std::vector<UpdateEntry> entries;
  entries.reserve(rules.size());
  size_t at = 0;
  for (const int64_t number : rules) {
    if (number < 0 || number >= kUpdateRules) {
      throw std::runtime_error("gradstat: unknown rule " + std::to_string(number) + " for an update");
    }
    UpdateEntry entry = {{}, static_cast<UpdateRule>(number)};
    for (int i = 0; i < operands_of(entry.rule); ++i, ++at) {
      if (at >= operands.size()) throw std::runtime_error("gradstat: an operand of an update is missing");
      entry.operands[i] = operands[at];
      if (entry.operands[i].is_pair || entry.operands[i].numel != entry.numel()) {
        throw std::runtime_error("gradstat: operand " + std::to_string(at) +
                                 " of an update is complex, or not as long as the gradient");
      }
    }
    entries.push_back(entry);
  }
  if (at != operands.size()) throw std::runtime_error("gradstat: too many operands for the rules of an update");
  return entries;
}

}  // namespace gradstat
