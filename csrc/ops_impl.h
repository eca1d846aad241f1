// The operators, written once for every kind of device. A `Device` provides
//   static int32_t type();
//   static void measure(const TensorList&, Row* table, const NormRequest* norm);
//   static void unscale(const TensorList&, Row* table, const float* factor);   no address may occur twice
//   static bool are_known_to_be_one(const Coefficients&);   without waiting for the device
//   static void scale(const std::vector<Entry>&, int32_t device_index, const Coefficients&,
//                     bool follows_measure);   whether nothing was enqueued since measure wrote the coefficient
// and gets the schemas of ops.cpp in return. All pointers are to the device's memory.
#pragma once

#include <algorithm>
#include <cmath>
#include <optional>
#include <tuple>
#include <type_traits>
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

// Leaves in `entries` only the first of those with the same address, and returns the others: each list as long
// as before, with empty entries for what is in the other one, so that an entry keeps its number.
inline std::vector<Entry> take_repeated(std::vector<Entry>& entries) {
  std::unordered_set<const void*> seen;
  std::vector<Entry> repeated = entries;
  for (size_t i = 0; i < entries.size(); ++i) {
    const bool is_first = entries[i].numel == 0 || seen.insert(entries[i].data).second;
    (is_first ? repeated : entries)[i].numel = 0;
  }
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
void scale_list(const TensorList& list, const Coefficients& coefficients, bool follows_measure) {
  if (Device::are_known_to_be_one(coefficients)) return;
  if (!has_repeated(list.entries())) {
    return Device::scale(list.entries(), list.device_index(), coefficients, follows_measure);
  }
  std::vector<Entry> pass = list.entries();
  while (has_repeated(pass)) {
    std::vector<Entry> repeated = take_repeated(pass);
    Device::scale(pass, list.device_index(), coefficients, follows_measure);
    pass = std::move(repeated);
    follows_measure = false;
  }
  Device::scale(pass, list.device_index(), coefficients, follows_measure);
}

// Where the `count` numbers lie that come along with `list`.
template <class Number>
Number* numbers_of(const Tensor& numbers, int64_t count, const TensorList& list) {
  constexpr bool kIsDouble = std::is_same_v<Number, double>, kIsFloat = std::is_same_v<Number, float>;
  static_assert(kIsDouble || kIsFloat || std::is_same_v<Number, int64_t>, "a type that is asked for");
  int32_t dtype = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(numbers.get(), &dtype));
  STD_TORCH_CHECK(dtype == (kIsDouble  ? aoti_torch_dtype_float64()
                            : kIsFloat ? aoti_torch_dtype_float32()
                                       : aoti_torch_dtype_int64()),
                  "gradstat: the numbers that come with the tensors must be ",
                  kIsDouble  ? "float64"
                  : kIsFloat ? "float32"
                             : "int64");
  STD_TORCH_CHECK(numbers.numel() == count && numbers.is_contiguous(), "gradstat: expected ", count,
                  " contiguous numbers to come with the tensors, got ", numbers.numel());
  STD_TORCH_CHECK(list.size() == 0 || numbers.get_device_index() == list.device_index(),
                  "gradstat: the numbers that come with the tensors must be on their device");
  return static_cast<Number*>(numbers.data_ptr());
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
    if (loss_scale) step.loss_scale = numbers_of<float>(*loss_scale, 1, list);
    if (counters) step.counters = numbers_of<int64_t>(*counters, kCounters, list);
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

  static void scale_(const std::vector<Tensor>& tensors, const Tensor& coefficient) {
    const TensorList list = list_of(tensors, Device::type());
    scale_list<Device>(list, numbers_of<double>(coefficient, 1, list), false);
  }

  static void scale_each_(const std::vector<Tensor>& tensors, const Tensor& coefficients) {
    scale_entries(list_of(tensors, Device::type()), coefficients);
  }

  static Tensor unit_stats(const std::vector<Tensor>& tensors) {
    const TensorList list = list_of(tensors, Device::type(), Division::kUnits);
    Tensor table = new_table(list);
    Device::measure(list, static_cast<Row*>(table.data_ptr()), nullptr);
    return table;
  }

  static void scale_units_(const std::vector<Tensor>& tensors, const Tensor& coefficients) {
    scale_entries(list_of(tensors, Device::type(), Division::kUnits), coefficients);
  }

  static void scale_entries(const TensorList& list, const Tensor& coefficients) {
    scale_list<Device>(list, {numbers_of<double>(coefficients, list.size(), list), 1}, false);
  }

  // scale_ and check in one pass. A tensor listed twice is scaled twice before either is measured.
  static std::tuple<Tensor, int64_t> unscale_(const std::vector<Tensor>& tensors, const Tensor& factor) {
    const TensorList list = list_of(tensors, Device::type());
    const float* by = numbers_of<float>(factor, 1, list);
    Tensor table = new_table(list);
    auto* rows = static_cast<Row*>(table.data_ptr());
    if (has_repeated(list.entries())) {
      Tensor wide = new_tensor({}, aoti_torch_dtype_float64(), Device::type(), list.device_index());
      torch::stable::copy_(wide, factor);
      scale_list<Device>(list, static_cast<const double*>(wide.data_ptr()), false);
      Device::measure(list, rows, nullptr);
    } else {
      Device::unscale(list, rows, by);
    }
    return {table, list.signature()};
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

#define GRADSTAT_REGISTER(library, Device)                                       \
  library.impl("stats", TORCH_BOX(&gradstat::Ops<Device>::stats));               \
  library.impl("check", TORCH_BOX(&gradstat::Ops<Device>::check));               \
  library.impl("measure", TORCH_BOX(&gradstat::Ops<Device>::measure));           \
  library.impl("scale_", TORCH_BOX(&gradstat::Ops<Device>::scale_));             \
  library.impl("scale_each_", TORCH_BOX(&gradstat::Ops<Device>::scale_each_));   \
  library.impl("unscale_", TORCH_BOX(&gradstat::Ops<Device>::unscale_));         \
  library.impl("unit_stats", TORCH_BOX(&gradstat::Ops<Device>::unit_stats));     \
  library.impl("scale_units_", TORCH_BOX(&gradstat::Ops<Device>::scale_units_)); \
  library.impl("clip_", TORCH_BOX(&gradstat::Ops<Device>::clip_))
