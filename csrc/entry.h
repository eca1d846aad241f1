// What the kernels are asked: one tensor as they see it, what to multiply it by, the norm of them all, and what
// follows from it for the step of an optimizer.
#pragma once

#include <cstdint>

#include "stat.h"

namespace gradstat {

// A dense stretch of memory. A complex tensor has is_pair set: `numel` counts its complex elements, each
// of two values of `dtype`.
struct Entry {
  void* data;
  int64_t numel;
  DType dtype;
  bool is_pair;

  int64_t values() const { return is_pair ? 2 * numel : numel; }
};

// What entries are multiplied by, in the memory of their device: one number for all of them, or one for each.
struct Coefficients {
  const double* first;
  int64_t stride;  // 0 or 1

  Coefficients(const double* numbers, int64_t stride = 0) : first(numbers), stride(stride) {}
  GRADSTAT_HD double of(int64_t entry) const { return first[entry * stride]; }
};

// For the step of an optimizer, which takes its decisions from the device. All pointers may be null.
struct StepRequest {
  const float* loss_scale;  // what the gradients were multiplied by; null: 1
  float* verdict;           // kVerdict numbers; null: none of this is asked for
  int64_t* counters;        // kCounters numbers; null: not counted
};
// 1 if the step is to be skipped, else 0; what the optimizer has to divide gradients by; the loss scale.
constexpr int kVerdict = 3;
// Steps, those skipped, and skipped ones since the last that was not.
constexpr int kCounters = 3;

// Where and how the total norm of all tensors is to be written, next to the table.
struct NormRequest {
  double max_norm;
  bool infinity_norm;  // else the L2 norm
  DType dtype;         // of the 0-d tensor at `norm`
  void* norm;
  double* coefficient;  // what clipping multiplies by; for a step there follows the norm itself
  StepRequest step;
};

// Writes everything a request asks for but the norm, which it returns. Norms and `max_norm` are those of
// gradients without their loss scale; gradients as they are, with it, times the coefficient are clipped.
GRADSTAT_HD double decide(const NormRequest& request, const Row& total) {
  const StepRequest& step = request.step;
  const double loss_scale = step.loss_scale != nullptr ? static_cast<double>(*step.loss_scale) : 1.0;
  const double norm = reported_norm(total, request.infinity_norm) / loss_scale;
  const double clip = clip_coefficient(norm, request.max_norm);
  request.coefficient[0] = clip / loss_scale;
  if (step.verdict == nullptr) return norm;
  request.coefficient[1] = norm;
  const auto grad_scale = static_cast<float>(loss_scale / clip);
  // A loss scale that grew out of all bounds, or vanished, must not pass for gradients that are zero.
  const bool is_usable = loss_scale > 0 && loss_scale < kInf && (clip == 0 || !is_inf(grad_scale));
  const bool skip = total.nan_count + total.inf_count > 0 || !is_usable;
  step.verdict[0] = skip ? 1.0f : 0.0f;
  step.verdict[1] = grad_scale;
  step.verdict[2] = static_cast<float>(loss_scale);
  if (step.counters != nullptr) {
    step.counters[0] += 1;
    step.counters[1] += skip;
    step.counters[2] = skip ? step.counters[2] + 1 : 0;
  }
  return norm;
}

}  // namespace gradstat
