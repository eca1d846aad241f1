// The operators, written once for every kind of device. A `Device` provides
//   static int32_t type();
//   static void measure(const TensorList&, Row* table, const NormRequest* norm);
//   static bool is_known_to_be_one(const double* coefficient);   without waiting for the device
//   static void scale(const std::vector<Entry>&, int32_t device_index, const double* coefficient,
//                     bool follows_measure);   whether nothing was enqueued since measure wrote *coefficient
// and gets the schemas of ops.cpp in return. All pointers are to the device's memory.
#pragma once

#include <algorithm>
#include <cmath>
#include <optional>
#include <tuple>
#include <unordered_set>
#include <utility>
#include <vector>

#include "stable_tensors.h"

namespace gradstat {

// Whether two entries with elements have the same address. A hash table, for this runs on every clip.
inline bool has_repeated(const std::vector<Entry>& entries) {
  int bits = 4;
  while ((size_t{1} << bits) < 2 * entries.size()) ++bits;
  std::vector<const void*> seen(size_t{1} << bits);
  for (const Entry& entry : entries) {
    if (entry.numel == 0) continue;
    size_t slot = (reinterpret_cast<uintptr_t>(entry.data) * 0x9e3779b97f4a7c15ull) >> (64 - bits);
    while (seen[slot] != nullptr) {
      if (seen[slot] == entry.data) return true;
      slot = (slot + 1) & (seen.size() - 1);
    }
    seen[slot] = entry.data;
  }
  return false;
}

// Removes from `entries` all but one of those with the same address, and returns the removed ones.
inline std::vector<Entry> take_repeated(std::vector<Entry>& entries) {
  std::unordered_set<const void*> seen;
  std::vector<Entry> once, repeated;
  for (const Entry& entry : entries) {
    const bool first = entry.numel == 0 || seen.insert(entry.data).second;
    (first ? once : repeated).push_back(entry);
  }
  entries = std::move(once);
  return repeated;
}

// What measuring `list` for its norm is asked.
inline NormRequest norm_request(const TensorList& list, double max_norm, double norm_type, void* norm,
                                double* coefficient, const StepRequest& step) {
  STD_TORCH_CHECK(norm_type == 2.0 || norm_type == kInf, "gradstat: norm_type must be 2 or inf, got ",
                  norm_type);
  return {max_norm, norm_type == kInf, list.norm_dtype(), norm, coefficient, step};
}

// A tensor listed twice is scaled twice, as torch does: one pass for each time, as kernels work on all
// entries of a pass at once. For `follows_measure` see above.
template <class Device>
void scale_list(const TensorList& list, const double* coefficient, bool follows_measure) {
  if (Device::is_known_to_be_one(coefficient)) return;
  if (!has_repeated(list.entries())) {
    return Device::scale(list.entries(), list.device_index(), coefficient, follows_measure);
  }
  std::vector<Entry> pass = list.entries();
  while (!pass.empty()) {
    std::vector<Entry> repeated = take_repeated(pass);
    Device::scale(pass, list.device_index(), coefficient, follows_measure);
    pass = std::move(repeated);
    follows_measure = false;
  }
}

template <class Device>
struct Ops {
  static Tensor new_table(const TensorList& list) {
    return new_tensor({list.size(), kFields}, aoti_torch_dtype_float64(), Device::type(), list.device_index());
  }

  static Tensor stats(const std::vector<Tensor>& tensors) { return std::get<0>(check(tensors)); }

  static std::tuple<Tensor, int64_t> check(const std::vector<Tensor>& tensors) {
    const TensorList list = list_of(tensors, Device::type());
    Tensor table = new_table(list);
    Device::measure(list, static_cast<Row*>(table.data_ptr()), nullptr);
    return {table, list.signature()};
  }

  // The table, the norm, {coefficient, norm} as float64, and the verdict.
  using Measured = std::tuple<Tensor, Tensor, Tensor, Tensor>;

  static Measured measure(const std::vector<Tensor>& tensors, double max_norm, double norm_type,
                          const std::optional<Tensor>& loss_scale, const std::optional<Tensor>& counters) {
    const TensorList list = list_of(tensors, Device::type());
    Tensor verdict = new_tensor({kVerdict}, aoti_torch_dtype_float32(), Device::type(), list.device_index());
    StepRequest step{nullptr, static_cast<float*>(verdict.data_ptr()), nullptr};
    if (loss_scale) {
      check_numbers(*loss_scale, aoti_torch_dtype_float32(), 1, list, "loss_scale must be one float32 number");
      step.loss_scale = static_cast<const float*>(loss_scale->data_ptr());
    }
    if (counters) {
      check_numbers(*counters, aoti_torch_dtype_int64(), kCounters, list,
                    "counters must be three int64 numbers");
      step.counters = static_cast<int64_t*>(counters->data_ptr());
    }
    auto [table, norm, numbers] = measure_list(list, max_norm, norm_type, step);
    return {table, norm, numbers, verdict};
  }

  static std::tuple<Tensor, Tensor, Tensor> measure_list(const TensorList& list, double max_norm,
                                                         double norm_type, const StepRequest& step) {
    const int32_t index = list.device_index();
    Tensor table = new_table(list);
    Tensor norm = new_tensor({}, torch_code_of(list.norm_dtype()), Device::type(), index);
    Tensor numbers = new_tensor({2}, aoti_torch_dtype_float64(), Device::type(), index);
    const NormRequest request = norm_request(list, max_norm, norm_type, norm.data_ptr(),
                                             static_cast<double*>(numbers.data_ptr()), step);
    Device::measure(list, static_cast<Row*>(table.data_ptr()), &request);
    return {table, norm, numbers};
  }

  // Refuses what is not `count` numbers of that dtype in a row on the list's device.
  static void check_numbers(const Tensor& tensor, int32_t dtype, int64_t count, const TensorList& list,
                            const char* expected) {
    int32_t actual = 0;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor.get(), &actual));
    STD_TORCH_CHECK(actual == dtype && tensor.numel() == count && tensor.is_contiguous(),
                    "gradstat: ", expected);
    STD_TORCH_CHECK(tensor.get_device_index() == list.device_index(), "gradstat: ", expected,
                    " on the tensors' device");
  }

  static void scale_(const std::vector<Tensor>& tensors, const Tensor& coefficient) {
    const TensorList list = list_of(tensors, Device::type());
    check_numbers(coefficient, aoti_torch_dtype_float64(), 1, list,
                  "the coefficient must be one float64 number");
    scale_list<Device>(list, static_cast<const double*>(coefficient.data_ptr()), false);
  }

  // measure and scale_ with the list unpacked once.
  static Tensor clip_(const std::vector<Tensor>& tensors, double max_norm, double norm_type) {
    const TensorList list = list_of(tensors, Device::type());
    auto [table, norm, numbers] = measure_list(list, max_norm, norm_type, {});
    if (max_norm != kInf) scale_list<Device>(list, static_cast<const double*>(numbers.data_ptr()), true);
    return norm;
  }
};

}  // namespace gradstat

#define GRADSTAT_REGISTER(library, Device)                             \
  library.impl("stats", TORCH_BOX(&gradstat::Ops<Device>::stats));     \
  library.impl("check", TORCH_BOX(&gradstat::Ops<Device>::check));     \
  library.impl("measure", TORCH_BOX(&gradstat::Ops<Device>::measure)); \
  library.impl("scale_", TORCH_BOX(&gradstat::Ops<Device>::scale_));   \
  library.impl("clip_", TORCH_BOX(&gradstat::Ops<Device>::clip_))
