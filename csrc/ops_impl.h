// The operations on lists of tensors, written once for all devices and for both callers: torch's dispatcher
// (Ops below) and Python (python_ops.h). A `Device` (ops.cpp, ops_cuda.cpp) has
//   type()               torch's device type code
//   measure              norm and factor may be null; with a factor no address may occur twice
//   is_known_identity    decided without a host sync
//   scale                one pass over entries at distinct addresses
//   decide, guard        decide about a clip's coefficients or about a step, on the device with the given index
//   update               takes one set of coefficients and writes one row of sums for each entry
//   kDLPackType          the same device type in DLPack's numbering, for python_ops.h
// A `Memory` is a new tensor: constructed from sizes, dtype and device index; has data().
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>
#include <tuple>
#include <type_traits>
#include <unordered_set>
#include <utility>
#include <vector>

#include "decide.h"
#include "stable_tensors.h"
#include "update.h"

namespace gradstat {

// Whether two nonempty entries have the same address. Uses a flat hash table, as this runs on every clip.
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

// Keeps the first entry of each address in `entries` and returns the others. Both lists have the original
// length, with empty entries in place of those in the other list, so that an entry keeps its index.
inline std::vector<Entry> take_repeated(std::vector<Entry>& entries) {
  std::unordered_set<const void*> seen;
  std::vector<Entry> repeated = entries;
  for (size_t i = 0; i < entries.size(); ++i) {
    const bool is_first = entries[i].numel == 0 || seen.insert(entries[i].data).second;
    (is_first ? repeated : entries)[i].numel = 0;
  }
  return repeated;
}

// A tensor listed twice is scaled twice, as torch does. Each repetition takes a pass of its own, as a kernel
// works on all entries of a pass at once.
template <class Device>
void scale_list(const TensorList& list, const Coefficients& coefficients) {
  if (Device::is_known_identity(coefficients)) return;
  if (!has_repeated(list.entries())) {
    return Device::scale(list.entries(), list.device_index(), coefficients);
  }
  std::vector<Entry> pass = list.entries();
  while (has_repeated(pass)) {
    std::vector<Entry> repeated = take_repeated(pass);
    Device::scale(pass, list.device_index(), coefficients);
    pass = std::move(repeated);
  }
  Device::scale(pass, list.device_index(), coefficients);
}

template <class Device, class Memory>
struct Operations {
  static Memory new_table(const TensorList& list) {
    return Memory({list.size(), kFields}, DType::kFloat64, list.device_index());
  }

  static Memory check(const TensorList& list, const float* factor = nullptr) {
    Memory table = new_table(list);
    Device::measure(list, static_cast<Row*>(table.data()), nullptr, factor);
    return table;
  }

  // `coefficient_and_norm` in float64. `verdict` as in entry.h.
  struct Step {
    Memory table, norm, coefficient_and_norm, verdict;
  };
  static Step measure_step(const TensorList& list, double max_norm, double norm_type, const float* loss_scale,
                           int64_t* counters) {
    const int32_t device = list.device_index();
    Memory table = new_table(list), norm({}, list.norm_dtype(), device);
    Memory coefficient_and_norm({2}, DType::kFloat64, device), verdict({kVerdict}, DType::kFloat32, device);
    measure_norm(list, max_norm, norm_type, norm, static_cast<double*>(coefficient_and_norm.data()),
                 static_cast<Row*>(table.data()), {loss_scale, static_cast<float*>(verdict.data()), counters});
    return {std::move(table), std::move(norm), std::move(coefficient_and_norm), std::move(verdict)};
  }

  // `memory` holds the coefficient, followed by the rows, which are not used any more.
  struct Norm {
    Memory norm, memory;
  };
  static Norm measure(const TensorList& list, double max_norm, double norm_type) {
    Memory norm({}, list.norm_dtype(), list.device_index());
    Memory memory({1 + list.size() * kFields}, DType::kFloat64, list.device_index());
    auto* coefficient = static_cast<double*>(memory.data());
    measure_norm(list, max_norm, norm_type, norm, coefficient, reinterpret_cast<Row*>(coefficient + 1), {});
    return {std::move(norm), std::move(memory)};
  }

  static Memory update_sums(const TensorList& operands, const std::vector<int64_t>& rules,
                            const double* coefficients) {
    const std::vector<UpdateEntry> entries = update_entries(operands.entries(), rules);
    const int32_t device = operands.device_index();
    Memory table({static_cast<int64_t>(entries.size()), kUpdateSums}, DType::kFloat64, device);
    Device::update(entries, device, reinterpret_cast<const UpdateCoefficients<double>*>(coefficients),
                   static_cast<UpdateSums<double>*>(table.data()));
    return table;
  }

  // `request` is complete except for `out`.
  static Memory guard(GuardRequest request, int32_t device) {
    Memory verdict({kGuardVerdict}, DType::kFloat32, device);
    request.out = static_cast<float*>(verdict.data());
    Device::guard(request, device);
    return verdict;
  }

  static Memory clip(const TensorList& list, double max_norm, double norm_type) {
    Norm measured = measure(list, max_norm, norm_type);
    if (max_norm != kInf) {
      scale_list<Device>(list, static_cast<const double*>(measured.memory.data()));
    }
    return std::move(measured.norm);
  }

 private:
  static void measure_norm(const TensorList& list, double max_norm, double norm_type, const Memory& norm,
                           double* coefficient, Row* rows, const StepRequest& step) {
    STD_TORCH_CHECK(norm_type == 2.0 || norm_type == kInf, "gradstat: norm_type must be 2 or inf, got ",
                    norm_type);
    const NormRequest request = {max_norm,    norm_type == kInf, list.norm_dtype(),
                                 norm.data(), coefficient,       step};
    Device::measure(list, rows, &request, nullptr);
  }
};

// The data of a tensor with exactly `count` numbers; errors call the tensor `what`.
template <class Number>
Number* numbers_in(const Tensor& numbers, int64_t count, const char* what) {
  const auto [type, name] = std::is_same_v<Number, double>  ? std::pair{aoti_torch_dtype_float64(), "float64"}
                            : std::is_same_v<Number, float> ? std::pair{aoti_torch_dtype_float32(), "float32"}
                                                            : std::pair{aoti_torch_dtype_int64(), "int64"};
  int32_t dtype = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(numbers.get(), &dtype));
  STD_TORCH_CHECK(dtype == type, "gradstat: ", what, " must be ", name);
  STD_TORCH_CHECK(numbers.numel() == count && numbers.is_contiguous(), "gradstat: ", what, " must have ", count,
                  " contiguous numbers, got ", numbers.numel());
  STD_TORCH_CHECK(is_stored(numbers.get(), count, sizeof(Number)), "gradstat: ", what, " has no memory");
  return static_cast<Number*>(numbers.data_ptr());
}

// The data of a tensor with `count` numbers that accompanies `list` and must be on its device.
template <class Number>
Number* numbers_of(const Tensor& numbers, int64_t count, const TensorList& list, const char* what) {
  STD_TORCH_CHECK(list.size() == 0 || numbers.get_device_index() == list.device_index(), "gradstat: ", what,
                  " must be on the device of the tensors");
  return numbers_in<Number>(numbers, count, what);
}

// The operators as called by torch's dispatcher, with the schemas of ops.cpp.
template <class Device>
struct Ops {
  struct Memory {
    Tensor tensor;

    Memory(std::initializer_list<int64_t> sizes, DType dtype, int32_t device_index)
        : tensor(new_tensor(sizes, known_type(dtype).torch_code(), Device::type(), device_index)) {}
    void* data() const { return tensor.data_ptr(); }
  };
  using Impl = Operations<Device, Memory>;
  using Tensors = std::vector<Tensor>;

  static TensorList tensors_of(const Tensors& tensors) { return list_of(tensors, Device::type()); }
  static TensorList units_of(const Tensors& tensors) {
    return list_of(tensors, Device::type(), Granularity::kUnits);
  }

  static Tensor stats(const Tensors& tensors) { return Impl::check(tensors_of(tensors)).tensor; }

  static std::tuple<Tensor, int64_t> check(const Tensors& tensors) {
    const TensorList list = tensors_of(tensors);
    return {Impl::check(list).tensor, list.signature()};
  }

  static std::tuple<Tensor, Tensor, Tensor, Tensor> measure(const Tensors& tensors, double max_norm,
                                                            double norm_type,
                                                            const std::optional<Tensor>& loss_scale,
                                                            const std::optional<Tensor>& counters) {
    const TensorList list = tensors_of(tensors);
    const auto step = Impl::measure_step(
        list, max_norm, norm_type, loss_scale ? numbers_of<float>(*loss_scale, 1, list, "loss_scale") : nullptr,
        counters ? numbers_of<int64_t>(*counters, kCounters, list, "counters") : nullptr);
    return {step.table.tensor, step.norm.tensor, step.coefficient_and_norm.tensor, step.verdict.tensor};
  }

  static Tensor clip_(const Tensors& tensors, double max_norm, double norm_type) {
    return Impl::clip(tensors_of(tensors), max_norm, norm_type).tensor;
  }

  static Tensor update_sums(const Tensors& operands, const std::vector<int64_t>& rules,
                            const Tensor& coefficients) {
    const TensorList list = tensors_of(operands);
    const auto count = static_cast<int64_t>(rules.size()) * kUpdateCoefficients;
    return Impl::update_sums(list, rules, numbers_of<double>(coefficients, count, list, "coefficients")).tensor;
  }

  static void scale_(const Tensors& tensors, const Tensor& coefficient) {
    const TensorList list = tensors_of(tensors);
    scale_list<Device>(list, numbers_of<double>(coefficient, 1, list, "coefficient"));
  }

  static void scale_each_(const Tensors& tensors, const Tensor& coefficients) {
    scale_entries(tensors_of(tensors), coefficients);
  }

  static Tensor unit_stats(const Tensors& tensors) { return Impl::check(units_of(tensors)).tensor; }

  static void scale_units_(const Tensors& tensors, const Tensor& coefficients) {
    scale_entries(units_of(tensors), coefficients);
  }

  static void scale_entries(const TensorList& list, const Tensor& coefficients) {
    scale_list<Device>(list, {numbers_of<double>(coefficients, list.size(), list, "coefficients"), 1});
  }

  // Throws unless `state` and all tensors that are not null are on the same device, of this type.
  static void require_same_device(const Tensor& state, std::initializer_list<const Tensor*> tensors) {
    for (const Tensor* tensor : tensors) {
      if (tensor == nullptr) continue;
      int32_t type = 0;
      TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor->get(), &type));
      STD_TORCH_CHECK(type == Device::type() && tensor->get_device_index() == state.get_device_index(),
                      "gradstat: all tensors must be on the device of state");
    }
  }

  static void require_window(int64_t window) {
    STD_TORCH_CHECK(window > 0 && window <= kMostWindow, "gradstat: window must be from 1 to ", kMostWindow,
                    ", got ", window);
  }

  // `measured`: the norm as a 0-d tensor, or the rows of tensors or units.
  static Tensor decide_clip_(int64_t rule, const std::vector<double>& options, Tensor state, int64_t window,
                             const Tensor& measured, const std::optional<Tensor>& weights,
                             const std::optional<Tensor>& factor, const std::optional<Tensor>& skip) {
    require_same_device(state, {&state, &measured, weights ? &*weights : nullptr, factor ? &*factor : nullptr,
                                skip ? &*skip : nullptr});
    STD_TORCH_CHECK(rule >= 0 && rule < kClipRules, "gradstat: unknown clip rule ", rule);
    const auto rule_ = static_cast<ClipRule>(rule);
    const bool is_each = decides_each(rule_), is_table = measured.dim() == 2;
    STD_TORCH_CHECK(is_table ? measured.size(1) == kFields : !is_each,
                    "gradstat: measured must be a table of rows for this rule, of ", kFields, " columns");
    const int64_t rows = is_table ? measured.size(0) : 0;
    const int64_t own = rule_ == ClipRule::kZScore ? 2 : rule_ == ClipRule::kTensors ? rows : 0;
    STD_TORCH_CHECK(options.size() <= kClipOptions, "gradstat: expected at most ", kClipOptions,
                    " options, got ", options.size());
    const double percentile = rule_ == ClipRule::kPercentile && !options.empty() ? options[0] : 0.0;
    STD_TORCH_CHECK(percentile >= 0 && percentile <= 100,
                    "gradstat: options[0], the percentile, must be from 0 to 100, got ", percentile);
    require_window(window);
    STD_TORCH_CHECK(weights.has_value() == (rule_ == ClipRule::kUnits),
                    "gradstat: weights are required for units and only for units");
    ClipRequest request{};
    request.rule = rule_;
    std::copy(options.begin(), options.end(), request.options);
    request.state = numbers_in<double>(state, kClipTotals + window + own, "state");
    request.window = window;
    auto* const numbers = numbers_in<double>(measured, is_table ? rows * kFields : 1, "measured");
    request.rows = reinterpret_cast<const Row*>(numbers);
    request.norm = is_table ? nullptr : numbers;
    request.count = rows;
    if (weights) {
      request.weights = reinterpret_cast<const Row*>(numbers_in<double>(*weights, rows * kFields, "weights"));
    }
    if (factor) request.factor = numbers_in<float>(*factor, 1, "factor");
    if (skip) request.skip = numbers_in<float>(*skip, 1, "skip");
    const int32_t device = state.get_device_index();
    const Memory out({is_each ? rows + 1 : 2}, DType::kFloat64, device);
    request.out = static_cast<double*>(out.data());
    Device::decide(request, device);
    return out.tensor;
  }

  static Tensor guard_(const std::vector<double>& options, Tensor state, int64_t window,
                       Tensor coefficient_and_norm, const Tensor& verdict, const std::optional<Tensor>& loss,
                       const std::optional<Tensor>& update, std::optional<Tensor> counters) {
    require_same_device(state, {&state, &coefficient_and_norm, &verdict, loss ? &*loss : nullptr,
                                update ? &*update : nullptr, counters ? &*counters : nullptr});
    STD_TORCH_CHECK(options.size() == kGuardOptions, "gradstat: expected ", kGuardOptions, " options, got ",
                    options.size());
    require_window(window);
    GuardRequest request{};
    std::memcpy(&request.options, options.data(), sizeof(GuardOptions));
    request.state = numbers_in<double>(state, kGuardTotals + kGuarded * window, "state");
    request.window = window;
    request.coefficient_and_norm = numbers_in<double>(coefficient_and_norm, 2, "coefficient_and_norm");
    request.verdict = numbers_in<float>(verdict, kVerdict, "verdict");
    if (loss) request.loss = number_of(*loss, request.dtypes[0]);
    if (update) request.update = number_of(*update, request.dtypes[2]);
    if (counters) request.counters = numbers_in<int64_t>(*counters, kCounters, "counters");
    return Impl::guard(request, state.get_device_index()).tensor;
  }

  // The address of a single number of any real type, and its type.
  static const void* number_of(const Tensor& tensor, DType& dtype) {
    int32_t code = 0;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor.get(), &code));
    const auto* known = std::find_if(std::begin(kKnownTypes), std::end(kKnownTypes),
                                     [&](const KnownType& type) { return type.torch_code() == code; });
    STD_TORCH_CHECK(known != std::end(kKnownTypes) && !known->element.is_pair && tensor.numel() == 1,
                    "gradstat: loss and update must be one real floating-point number each");
    dtype = known->element.dtype;
    STD_TORCH_CHECK(is_stored(tensor.get(), 1, size_of(dtype)), "gradstat: loss or update has no memory");
    return tensor.data_ptr();
  }

  // scale_ and check in one pass. A tensor listed twice is scaled twice before it is measured.
  static std::tuple<Tensor, int64_t> unscale_(const Tensors& tensors, const Tensor& factor) {
    const TensorList list = tensors_of(tensors);
    const float* by = numbers_of<float>(factor, 1, list, "factor");
    if (!has_repeated(list.entries())) return {Impl::check(list, by).tensor, list.signature()};
    const Memory wide({}, DType::kFloat64, list.device_index());
    Tensor copied = wide.tensor;
    torch::stable::copy_(copied, factor);
    scale_list<Device>(list, static_cast<const double*>(wide.data()));
    return {Impl::check(list).tensor, list.signature()};
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
  library.impl("guard_", TORCH_BOX(&gradstat::Ops<Device>::guard_));             \
  library.impl("decide_clip_", TORCH_BOX(&gradstat::Ops<Device>::decide_clip_)); \
  library.impl("update_sums", TORCH_BOX(&gradstat::Ops<Device>::update_sums));   \
  library.impl("clip_", TORCH_BOX(&gradstat::Ops<Device>::clip_))
