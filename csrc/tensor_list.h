// Turns a list of tensors into what kernels need: address, number of elements and dtype of each tensor, or of
// each unit. Accepts only tensors that kernels can read in place: dense, strided, floating or complex, on one
// device. Anything else raises; gradstat/_core/tensors.py then converts the tensor or explains why it cannot.
#pragma once

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "entry.h"

namespace gradstat {

struct ElementType {
  DType dtype;
  bool is_pair;
};

// A tensor's metadata, independent of the interface it was read by. `sizes` and `strides` have `dims` elements.
struct TensorView {
  void* data;
  int64_t numel;
  int64_t dims;
  const int64_t* sizes;
  const int64_t* strides;
  int32_t device_index;
};

// torch's promotion restricted to the types a norm can have: bf16 with fp16 gives fp32.
inline DType promote(DType a, DType b) {
  if (a == b) return a;
  if (a == DType::kFloat64 || b == DType::kFloat64) return DType::kFloat64;
  return DType::kFloat32;
}

inline bool is_row_major(const TensorView& view) {
  int64_t expected = 1;
  for (int64_t d = view.dims - 1; d >= 0; --d) {
    if (view.sizes[d] == 1) continue;
    if (view.strides[d] != expected) return false;
    expected *= view.sizes[d];
  }
  return true;
}

// Dense and non-overlapping: the elements fill one contiguous range of memory, in any order of the dimensions.
inline bool is_dense(const TensorView& view) {
  if (view.numel <= 1 || is_row_major(view)) return true;
  constexpr int64_t kMaxDims = 64;
  if (view.dims > kMaxDims) return false;
  std::pair<int64_t, int64_t> by_stride[kMaxDims];  // (stride, size) of dimensions longer than 1
  int64_t used = 0;
  for (int64_t d = 0; d < view.dims; ++d) {
    if (view.sizes[d] != 1) by_stride[used++] = {view.strides[d], view.sizes[d]};
  }
  std::sort(by_stride, by_stride + used);
  int64_t expected = 1;
  for (int64_t d = 0; d < used; ++d) {
    if (by_stride[d].first != expected) return false;
    expected *= by_stride[d].second;
  }
  return true;
}

// Order-dependent 64-bit mixing (the finaliser of SplitMix64) for layout signatures.
inline uint64_t mix(uint64_t hash, uint64_t value) {
  uint64_t z = (hash ^ value) + 0x9e3779b97f4a7c15ull;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}

// What becomes an entry: a tensor or a unit. A unit is a slice along dimension 0 of a tensor with two or more
// dimensions; any other tensor is one unit.
enum class Granularity { kTensors, kUnits };

// Units without elements take no memory in a tensor, but in the list: a tensor may have 2**60 of them.
constexpr int64_t kMostEmptyUnits = int64_t{1} << 24;

class TensorList {
 public:
  // `device_type`: torch's code of the device type that all tensors are on.
  TensorList(size_t capacity, int32_t device_type, Granularity granularity = Granularity::kTensors)
      : granularity_(granularity), device_type_(device_type) {
    entries_.reserve(capacity);
  }

  // Returns null, or the reason why the tensor cannot be read in place; then nothing was added.
  const char* add(const TensorView& view, ElementType element) {
    if (tensors_ > 0 && view.device_index != device_index_) return "is on a different device than tensor 0";
    if (!is_dense(view)) return "is not dense in memory";
    const bool has_units = granularity_ == Granularity::kUnits && view.dims > 1;
    if (has_units && view.numel > 1 && !is_row_major(view)) {
      return "is not contiguous, but its units must be; call .contiguous() first";
    }
    if (has_units && view.numel == 0) {
      if (view.sizes[0] > kMostEmptyUnits - empty_units_) {
        return "has too many units without elements: at most 16777216 in a list, so leave it out";
      }
      empty_units_ += view.sizes[0];
    }
    device_index_ = view.device_index;
    const DType real = size_of(element.dtype) == 1 ? DType::kFloat32 : element.dtype;
    norm_dtype_ = tensors_ == 0 ? real : promote(norm_dtype_, real);

    const auto type = static_cast<uint64_t>(element.dtype) * 2 + (element.is_pair ? 1 : 0);
    // The CPU has index -1 in torch's operators and 0 in DLPack.
    const auto device = static_cast<uint32_t>(device_type_ * 256 + std::max(view.device_index, 0));
    signature_ = mix(signature_, (type << 40) ^ (static_cast<uint64_t>(view.dims) << 32) ^ device);
    for (int64_t d = 0; d < view.dims; ++d) {
      signature_ = mix(signature_, static_cast<uint64_t>(view.sizes[d]) * 0x2545f4914f6cdd1dull +
                                       static_cast<uint64_t>(view.strides[d]));
    }
    ++tensors_;
    if (has_units) {
      add_units({view.data, view.numel, element.dtype, element.is_pair}, view.sizes[0]);
    } else {
      entries_.push_back({view.data, view.numel, element.dtype, element.is_pair});
    }
    return nullptr;
  }

  // Throws std::runtime_error naming the position of the tensor that would be added next.
  [[noreturn]] void reject(const char* why) const {
    throw std::runtime_error("gradstat: tensor " + std::to_string(tensors_) + " " + why);
  }

  const std::vector<Entry>& entries() const { return entries_; }
  int64_t size() const { return static_cast<int64_t>(entries_.size()); }
  int32_t device_index() const { return device_index_; }
  // The dtype of the norm: the tensors' real dtypes promoted, with float32 for 8-bit ones.
  DType norm_dtype() const { return norm_dtype_; }
  // Equal only for lists whose sizes, strides, dtypes and devices all agree (up to 64-bit collisions).
  int64_t signature() const { return static_cast<int64_t>(signature_); }

 private:
  void add_units(const Entry& whole, int64_t units) {
    if (units == 0) return;
    Entry unit = whole;
    unit.numel /= units;
    const int64_t bytes = unit.values() * size_of(unit.dtype);
    for (int64_t i = 0; i < units; ++i) {
      unit.data = static_cast<char*>(whole.data) + i * bytes;
      entries_.push_back(unit);
    }
  }

  Granularity granularity_;
  std::vector<Entry> entries_;
  int64_t tensors_ = 0;
  int64_t empty_units_ = 0;
  int32_t device_type_;
  int32_t device_index_ = 0;
  DType norm_dtype_ = DType::kFloat32;
  uint64_t signature_ = 0;
};

}  // namespace gradstat
