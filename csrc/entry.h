// What the kernels are asked: one tensor as they see it, what to multiply it by, and the norm of them all.
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

// Where and how the total norm of all tensors is to be written, next to the table.
struct NormRequest {
  double max_norm;
  bool infinity_norm;  // else the L2 norm
  DType dtype;         // of the 0-d tensor at `norm`
  void* norm;
  double* coefficient;  // what clipping multiplies by
};

}  // namespace gradstat
