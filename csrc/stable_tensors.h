// Access through torch's stable interface: a TensorList from an operator's arguments, and new tensors.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

// DLPack's header is plain C with its own versioning, but torch ships it in a folder that it closes entirely to
// users of the stable interface.
#pragma push_macro("TORCH_TARGET_VERSION")
#undef TORCH_TARGET_VERSION
#include <ATen/dlpack.h>
#pragma pop_macro("TORCH_TARGET_VERSION")

#include <algorithm>
#include <initializer_list>
#include <iterator>

#include "tensor_list.h"

namespace gradstat {

using torch::stable::Tensor;

// The dtypes that kernels read, with torch's and DLPack's codes. torch's codes are queried at run time, as they
// are not part of the stable interface.
struct KnownType {
  ElementType element;
  uint8_t code, bits;
  int32_t (*torch_code)();
};
constexpr KnownType kKnownTypes[] = {
    {{DType::kFloat32, false}, kDLFloat, 32, aoti_torch_dtype_float32},
    {{DType::kBFloat16, false}, kDLBfloat, 16, aoti_torch_dtype_bfloat16},
    {{DType::kFloat16, false}, kDLFloat, 16, aoti_torch_dtype_float16},
    {{DType::kFloat64, false}, kDLFloat, 64, aoti_torch_dtype_float64},
    {{DType::kFloat32, true}, kDLComplex, 64, aoti_torch_dtype_complex64},
    {{DType::kFloat64, true}, kDLComplex, 128, aoti_torch_dtype_complex128},
    {{DType::kFloat16, true}, kDLComplex, 32, aoti_torch_dtype_complex32},
    {{DType::kFloat8E4M3FN, false}, kDLFloat8_e4m3fn, 8, aoti_torch_dtype_float8_e4m3fn},
    {{DType::kFloat8E5M2, false}, kDLFloat8_e5m2, 8, aoti_torch_dtype_float8_e5m2},
    {{DType::kFloat8E4M3FNUZ, false}, kDLFloat8_e4m3fnuz, 8, aoti_torch_dtype_float8_e4m3fnuz},
    {{DType::kFloat8E5M2FNUZ, false}, kDLFloat8_e5m2fnuz, 8, aoti_torch_dtype_float8_e5m2fnuz},
};

// The real type `dtype`; real types come before the complex types of the same dtype.
inline const KnownType& known_type(DType dtype) {
  const KnownType* type = kKnownTypes;
  while (type->element.dtype != dtype) ++type;
  return *type;
}

// Whether a tensor's storage, which may have been freed or shrunk, holds `count` adjacent numbers of `size`
// bytes.
inline bool is_stored(AtenTensorHandle tensor, int64_t count, int64_t size) {
  int64_t bytes = 0, offset = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_size(tensor, &bytes));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_offset(tensor, &offset));
  return count == 0 || (count <= bytes / size && offset <= bytes / size - count);
}

inline void add_tensor(TensorList& list, const Tensor& tensor, int32_t device_type) {
  static const int32_t strided = aoti_torch_layout_strided();
  AtenTensorHandle handle = tensor.get();
  int32_t layout = 0, type = 0, scalar = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_layout(handle, &layout));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(handle, &type));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(handle, &scalar));
  if (layout != strided) list.reject("is not strided");
  if (type != device_type) list.reject("is on a different device type than the operator");
  const auto* known = std::find_if(std::begin(kKnownTypes), std::end(kKnownTypes),
                                   [&](const KnownType& type) { return type.torch_code() == scalar; });
  if (known == std::end(kKnownTypes)) list.reject("has an unsupported dtype");

  TensorView view{};
  view.element = known->element;
  int64_t *sizes = nullptr, *strides = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(handle, &view.device_index));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dim(handle, &view.dims));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_numel(handle, &view.numel));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(handle, &sizes));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides(handle, &strides));
  if (view.numel > 0) {
    const int64_t size = size_of(view.element.dtype) * (view.element.is_pair ? 2 : 1);
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(handle, &view.data));
    if (!is_stored(handle, view.numel, size) || view.data == nullptr) list.reject("has no memory");
  }
  view.sizes = sizes;
  view.strides = strides;
  if (const char* why = list.add(view)) list.reject(why);
}

// Throws std::runtime_error naming the first tensor that cannot be read in place.
inline TensorList list_of(const std::vector<Tensor>& tensors, int32_t device_type,
                          Granularity granularity = Granularity::kTensors) {
  TensorList list(tensors.size(), device_type, granularity);
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
