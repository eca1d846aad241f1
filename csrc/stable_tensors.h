// Access through torch's stable interface: the metadata of an operator's arguments, and new tensors.
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

#include <initializer_list>

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

// A tensor's metadata with its dtype.
struct TypedView : TensorView {
  DLDataType type;
};

// The real type `dtype`; real types come before the complex types of the same dtype.
inline const KnownType& known_type(DType dtype) {
  const KnownType* type = kKnownTypes;
  while (type->element.dtype != dtype) ++type;
  return *type;
}

// What kernels read a type as; null if they do not read it.
inline const ElementType* element_of(DLDataType type) {
  for (const KnownType& known : kKnownTypes) {
    if (known.code == type.code && known.bits == type.bits && type.lanes == 1) return &known.element;
  }
  return nullptr;
}

// DLPack's type of a tensor; one that equals no other for a dtype that no operator takes.
inline DLDataType type_of(AtenTensorHandle tensor) {
  int32_t dtype = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor, &dtype));
  for (const KnownType& known : kKnownTypes) {
    if (known.torch_code() == dtype) return {known.code, known.bits, 1};
  }
  if (dtype == aoti_torch_dtype_int64()) return {kDLInt, 64, 1};
  return {kDLOpaqueHandle, 0, 0};
}

inline bool is_on(const Tensor& tensor, int32_t device_type) {
  int32_t type = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor.get(), &type));
  return type == device_type;
}

// Whether memory of a tensor's storage is at the address of its `view`, with as many adjacent elements. Storage
// may have been freed or shrunk; then a view into it still has the address it would have.
inline bool is_stored(AtenTensorHandle tensor, const TypedView& view) {
  int64_t bytes = 0, offset = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_size(tensor, &bytes));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_offset(tensor, &offset));
  const int64_t size = view.type.bits * view.type.lanes / 8;
  if (size == 0 || view.numel > bytes / size - offset) return false;
  return reinterpret_cast<uintptr_t>(view.data) != static_cast<uintptr_t>(offset * size);
}

// The metadata of a strided tensor. Its address is null if no memory is there, see `is_stored`.
inline TypedView view_of(const Tensor& tensor) {
  AtenTensorHandle handle = tensor.get();
  TypedView view{{}, type_of(handle)};
  int64_t *sizes = nullptr, *strides = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(handle, &view.device_index));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dim(handle, &view.dims));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_numel(handle, &view.numel));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(handle, &sizes));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides(handle, &strides));
  view.sizes = sizes;
  view.strides = strides;
  if (view.numel == 0) return view;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(handle, &view.data));
  if (!is_stored(handle, view)) view.data = nullptr;
  return view;
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
