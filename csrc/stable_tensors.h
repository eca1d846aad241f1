// torch's stable interface: a TensorList from the tensors of an operator's arguments, and new tensors.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <array>
#include <initializer_list>

#include "tensor_list.h"

namespace gradstat {

using torch::stable::Tensor;

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

inline const KnownType* known_type(int32_t torch_code) {
  for (const KnownType& type : known_types()) {
    if (type.torch_code == torch_code) return &type;
  }
  return nullptr;
}

inline int32_t torch_code_of(DType dtype) {
  for (const KnownType& type : known_types()) {
    if (type.element.dtype == dtype && !type.element.is_pair) return type.torch_code;
  }
  throw std::logic_error("gradstat: a dtype that torch has no name for");
}

inline void add_tensor(TensorList& list, const Tensor& tensor, int32_t device_type) {
  static const int32_t strided = aoti_torch_layout_strided();
  AtenTensorHandle handle = tensor.get();
  int32_t layout = 0, type = 0, scalar = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_layout(handle, &layout));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(handle, &type));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(handle, &scalar));
  if (layout != strided) list.reject("is not strided");
  if (type != device_type) list.reject("is on another type of device than the first");
  const KnownType* known = known_type(scalar);
  if (known == nullptr) list.reject("has a dtype without gradient statistics");

  TensorView view{};
  view.element = known->element;
  int64_t *sizes = nullptr, *strides = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(handle, &view.device_index));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dim(handle, &view.dims));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_numel(handle, &view.numel));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(handle, &sizes));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides(handle, &strides));
  if (view.numel > 0) {
    int64_t stored = 0;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_size(handle, &stored));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(handle, &view.data));
    if (stored == 0 || view.data == nullptr) list.reject("has no memory");
  }
  view.sizes = sizes;
  view.strides = strides;
  if (const char* why = list.add(view)) list.reject(why);
}

// Throws std::runtime_error naming the first tensor that cannot be read in place.
inline TensorList list_of(const std::vector<Tensor>& tensors, int32_t device_type,
                          Division division = Division::kTensors) {
  TensorList list(tensors.size(), device_type, division);
  for (const Tensor& tensor : tensors) add_tensor(list, tensor, device_type);
  return list;
}

inline Tensor new_tensor(std::initializer_list<int64_t> sizes, int32_t torch_dtype, int32_t device_type,
                         int32_t device_index) {
  int64_t strides[2] = {1, 1};
  if (sizes.size() == 2) strides[0] = *(sizes.begin() + 1);
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.begin(), strides,
                                                  torch_dtype, device_type, device_index, &handle));
  return Tensor(handle);
}

}  // namespace gradstat
