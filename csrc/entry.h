// One tensor as the kernels see it.
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

}  // namespace gradstat
