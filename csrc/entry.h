// What the kernels are asked: one tensor as they see it, and the norm of them all.
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

// Where and how the total norm of all tensors is to be written, next to the table.
struct NormRequest {
  double max_norm;
  bool infinity_norm;  // else the L2 norm
  DType dtype;         // of the 0-d tensor at `norm`
  void* norm;
  double* coefficient;  // what clipping multiplies by
};

}  // namespace gradstat
