// From a list of torch tensors to what a kernel needs: address, number of elements, element type.
// Accepts only what the kernels read in place (dense, strided, floating or complex, one device); anything
// else raises, and gradstat/_tensors.py then either turns it into something accepted or explains.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "entry.h"
#include "stat.h"

namespace gradstat {

using torch::stable::Tensor;

struct ElementType {
  DType dtype;
  bool is_pair;
};

// What torch calls the types the kernels read. Its numbers for them are asked for, not assumed: the values are
// not part of the stable interface.
struct KnownType {
  int32_t torch_code;
  ElementType element;
};

inline const std::array<KnownType, 11>& known_types() {
  static const std::array<KnownType, 11> types = {{
      {aoti_torch_dtype_float32(), {DType::kFloat32, false}},
      {aoti_torch_dtype_bfloat16(), {DType::kBFloat16, false}},
      {aoti_torch_dtype_float16(), {DType::kFloat16, false}},
      {aoti_torch_dtype_float64(), {DType::kFloat64, false}},
      {aoti_torch_dtype_complex64(), {DType::kFloat32, true}},
      {aoti_torch_dtype_complex128(), {DType::kFloat64, true}},
      {aoti_torch_dtype_complex32(), {DType::kFloat16, true}},
      {aoti_torch_dtype_float8_e4m3fn(), {DType::kFloat8E4M3FN, false}},
      {aoti_torch_dtype_float8_e5m2(), {DType::kFloat8E5M2, false}},
      {aoti_torch_dtype_float8_e4m3fnuz(), {DType::kFloat8E4M3FNUZ, false}},
      {aoti_torch_dtype_float8_e5m2fnuz(), {DType::kFloat8E5M2FNUZ, false}},
  }};
  return types;
}

inline bool element_type_of(int32_t torch_code, ElementType& out) {
  for (const KnownType& type : known_types()) {
    if (type.torch_code == torch_code) {
      out = type.element;
      return true;
    }
  }
  return false;
}

inline int32_t torch_code_of(DType dtype) {
  for (const KnownType& type : known_types()) {
    if (type.element.dtype == dtype && !type.element.is_pair) return type.torch_code;
  }
  throw std::logic_error("gradstat: a dtype that torch has no name for");
}

// torch's promotion restricted to the types a norm can have: bf16 with fp16 gives fp32.
inline DType promote(DType a, DType b) {
  if (a == b) return a;
  if (a == DType::kFloat64 || b == DType::kFloat64) return DType::kFloat64;
  return DType::kFloat32;
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
  // The dtype of the norm: the promotion over all tensors' real types, float32 for 8-bit ones.
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
    if (!element_type_of(scalar, element)) {
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
    const DType real = size_of(element.dtype) == 1 ? DType::kFloat32 : element.dtype;
    norm_dtype_ = position == 0 ? real : promote(norm_dtype_, real);
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
