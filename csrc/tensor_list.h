// From a list of torch tensors to what a kernel needs: address, number of elements, element type.
// Accepts only what the kernels read in place (dense, strided, floating or complex, one device); anything
// else raises, and gradstat/_tensors.py then either turns it into something accepted or explains.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "entry.h"
#include "stat.h"

namespace gradstat {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

struct ElementType {
  DType dtype;
  bool is_pair;
};

inline bool element_type_of(ScalarType scalar_type, ElementType& out) {
  switch (scalar_type) {
    case ScalarType::Float:
      out = {DType::kFloat32, false};
      return true;
    case ScalarType::BFloat16:
      out = {DType::kBFloat16, false};
      return true;
    case ScalarType::Half:
      out = {DType::kFloat16, false};
      return true;
    case ScalarType::Double:
      out = {DType::kFloat64, false};
      return true;
    case ScalarType::Float8_e4m3fn:
      out = {DType::kFloat8E4M3FN, false};
      return true;
    case ScalarType::Float8_e5m2:
      out = {DType::kFloat8E5M2, false};
      return true;
    case ScalarType::Float8_e4m3fnuz:
      out = {DType::kFloat8E4M3FNUZ, false};
      return true;
    case ScalarType::Float8_e5m2fnuz:
      out = {DType::kFloat8E5M2FNUZ, false};
      return true;
    case ScalarType::ComplexHalf:
      out = {DType::kFloat16, true};
      return true;
    case ScalarType::ComplexFloat:
      out = {DType::kFloat32, true};
      return true;
    case ScalarType::ComplexDouble:
      out = {DType::kFloat64, true};
      return true;
    default:
      return false;
  }
}

// torch's promotion restricted to the real types a norm can have: bf16 with fp16 gives fp32.
inline DType promote(DType a, DType b) {
  if (a == b) return a;
  if (a == DType::kFloat64 || b == DType::kFloat64) return DType::kFloat64;
  return DType::kFloat32;
}

inline ScalarType scalar_type_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return ScalarType::Float;
    case DType::kBFloat16:
      return ScalarType::BFloat16;
    case DType::kFloat16:
      return ScalarType::Half;
    case DType::kFloat64:
      return ScalarType::Double;
    default:
      return ScalarType::Float;
  }
}

// Dense and non-overlapping: the elements fill one stretch of memory, in some order of the dimensions.
inline bool is_dense(const int64_t* sizes, const int64_t* strides, int64_t dims, int64_t numel) {
  if (numel <= 1) return true;
  constexpr int64_t kMaxDims = 64;
  if (dims > kMaxDims) return false;
  std::pair<int64_t, int64_t> by_stride[kMaxDims];  // (stride, size) of dimensions longer than 1
  int64_t used = 0;
  for (int64_t d = 0; d < dims; ++d) {
    if (sizes[d] != 1) by_stride[used++] = {strides[d], sizes[d]};
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

class TensorList {
 public:
  // `device_type` is the one these kernels serve. Throws std::runtime_error naming the first tensor that
  // cannot be read in place.
  TensorList(const std::vector<Tensor>& tensors, int32_t device_type) {
    entries_.reserve(tensors.size());
    for (size_t i = 0; i < tensors.size(); ++i) add(tensors[i], i, device_type);
  }

  const std::vector<Entry>& entries() const { return entries_; }
  int64_t size() const { return static_cast<int64_t>(entries_.size()); }
  int32_t device_index() const { return device_index_; }
  // The dtype of the norm: the promotion over all tensors' real types.
  DType norm_dtype() const { return norm_dtype_; }
  // Equal for two lists only if every size, stride, dtype and device agrees (up to a 64-bit collision).
  int64_t signature() const { return static_cast<int64_t>(signature_); }

 private:
  void add(const Tensor& tensor, size_t position, int32_t device_type) {
    AtenTensorHandle handle = tensor.get();
    int32_t layout = 0, type = 0, index = 0, scalar = 0;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_layout(handle, &layout));
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(handle, &type));
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(handle, &index));
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(handle, &scalar));
    if (layout != strided_layout()) reject(position, "is not strided");
    if (type != device_type) reject(position, "is on another type of device than the first");
    if (position == 0) {
      device_index_ = index;
    } else if (index != device_index_) {
      reject(position, "is on another device than the first");
    }
    ElementType element;
    if (!element_type_of(static_cast<ScalarType>(scalar), element)) {
      reject(position, "has a dtype without gradient statistics");
    }

    int64_t dims = 0, numel = 0;
    int64_t *sizes = nullptr, *strides = nullptr;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dim(handle, &dims));
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_numel(handle, &numel));
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(handle, &sizes));
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides(handle, &strides));
    if (!is_dense(sizes, strides, dims, numel)) reject(position, "is not dense in memory");

    signature_ = mix(signature_, (static_cast<uint64_t>(scalar) << 40) ^ (static_cast<uint64_t>(dims) << 32) ^
                                     static_cast<uint32_t>(type * 256 + index));
    for (int64_t d = 0; d < dims; ++d) {
      signature_ = mix(signature_, static_cast<uint64_t>(sizes[d]) * 0x2545f4914f6cdd1dull +
                                       static_cast<uint64_t>(strides[d]));
    }

    void* data = nullptr;
    if (numel > 0) STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(handle, &data));
    norm_dtype_ = position == 0 ? element.dtype : promote(norm_dtype_, element.dtype);
    entries_.push_back({data, numel, element.dtype, element.is_pair});
  }

  static int32_t strided_layout() {
    static const int32_t layout = aoti_torch_layout_strided();
    return layout;
  }

  [[noreturn]] static void reject(size_t position, const char* why) {
    throw std::runtime_error("gradstat: tensor " + std::to_string(position) + " " + why);
  }

  std::vector<Entry> entries_;
  int32_t device_index_ = 0;
  DType norm_dtype_ = DType::kFloat32;
  uint64_t signature_ = 0;
};

}  // namespace gradstat
