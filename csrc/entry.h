// The arguments of the kernels: a tensor, what to multiply it by, the norm of all tensors, and the decision
// about the optimizer step that follows from it.
#pragma once

#include <cstdint>

#include "stat.h"

namespace gradstat {

// A dense range of memory. If is_pair (complex), `numel` counts elements of two values of `dtype` each.
struct Entry {
  void* data;
  int64_t numel;
  DType dtype;
  bool is_pair;

  int64_t values() const { return is_pair ? 2 * numel : numel; }
};

// Multipliers in device memory: one number for all entries, or one for each.
struct Multipliers {
  const double* first;
  int64_t stride;  // 0 or 1

  Multipliers(const double* numbers, int64_t stride = 0) : first(numbers), stride(stride) {}
  GRADSTAT_HD double of(int64_t entry) const { return first[entry * stride]; }
};

// For an optimizer step that is decided on the device. All pointers may be null.
struct StepRequest {
  const float* loss_scale;  // the factor that the gradients contain; null: 1
  float* verdict;           // kVerdict numbers; null: no verdict is written
  int64_t* counters;        // kCounters numbers; null: not counted
};
// 1 if the step is to be skipped, else 0; the divisor for the gradients in the optimizer; the loss scale.
constexpr int kVerdict = 3;
// Numbers of steps, of skipped steps, and of skipped steps since the last one that was taken.
constexpr int kCounters = 3;

GRADSTAT_HD void count_step(int64_t* counters, bool skip) {
  if (counters == nullptr) return;
  // Unsigned, as counters that were set from outside may overflow.
  const auto plus = [](int64_t count, bool one) {
    return static_cast<int64_t>(static_cast<uint64_t>(count) + one);
  };
  counters[0] = plus(counters[0], true);
  counters[1] = plus(counters[1], skip);
  counters[2] = skip ? plus(counters[2], true) : 0;
}

// What a step multiplies its gradients by, and their norm.
struct Scaling {
  double multiplier, norm;
};

// Where and how to write the total norm of all tensors, in addition to the table.
struct NormRequest {
  double max_norm;
  bool infinity_norm;  // else the L2 norm
  DType dtype;         // of the 0-d tensor at `norm`
  void* norm;
  double* multiplier;  // of clipping; for a step, of a `Scaling`
  StepRequest step;
};

// Writes everything the request asks for except the norm, which it returns. Norm and `max_norm` refer to
// gradients without the loss scale; the multiplier applies to gradients that still contain it, and removes it.
GRADSTAT_HD double decide(const NormRequest& request, const Row& total) {
  const StepRequest& step = request.step;
  const double loss_scale = step.loss_scale != nullptr ? static_cast<double>(*step.loss_scale) : 1.0;
  const double norm = reported_norm(total, request.infinity_norm) / loss_scale;
  const double clip = clip_multiplier(norm, request.max_norm);
  request.multiplier[0] = clip / loss_scale;
  if (step.verdict == nullptr) return norm;
  request.multiplier[1] = norm;
  const auto divisor = static_cast<float>(loss_scale / clip);
  // An infinite or zero loss scale skips the step, since it would make any gradient look finite.
  const bool is_usable = loss_scale > 0 && loss_scale < kInf && (clip == 0 || !is_inf(divisor));
  const bool skip = total.nan_count + total.inf_count > 0 || !is_usable;
  step.verdict[0] = skip ? 1.0f : 0.0f;
  step.verdict[1] = divisor;
  step.verdict[2] = static_cast<float>(loss_scale);
  count_step(step.counters, skip);
  return norm;
}

}  // namespace gradstat
