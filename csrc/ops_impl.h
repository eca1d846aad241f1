// The operations on lists of tensors, written once for all devices and for both callers: torch's dispatcher
// (Dispatcher below) and Python (python_ops.h). A `Device` (ops.cpp, ops_cuda.cpp) has
//   type()               torch's device type code
//   measure              norm and factor may be null; with a factor no address may occur twice
//   is_known_identity    decided without a host sync
//   scale                one pass over entries at distinct addresses
//   decide, guard        decide about a clip's multipliers or about a step, on the device with the given index
//   update               takes one set of coefficients and writes one row of sums for each entry
//   kDLPackType          the same device type in DLPack's numbering, for python_ops.h
// A `Caller` has the types of arguments and results, and reads arguments, or throws if it cannot:
//   Tensors, Argument, Result  a list of tensors, a single tensor, a new tensor
//   list                 the TensorList of a list
//   device_index         of a single tensor
//   numbers              the contiguous data of a tensor on the given device; errors call it `what`
//   number               the data of a tensor of one real number, and its dtype
//   kMultipliers        how many numbers scale_ takes
//   Memory               a new tensor: constructed from sizes, dtype and device index; has data() and result()
//   widened              a float32 factor as a float64 in new memory
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
void scale_list(const TensorList& list, const Multipliers& multipliers) {
  if (Device::is_known_identity(multipliers)) return;
  if (!has_repeated(list.entries())) {
    return Device::scale(list.entries(), list.device_index(), multipliers);
  }
  std::vector<Entry> pass = list.entries();
  while (has_repeated(pass)) {
    std::vector<Entry> repeated = take_repeated(pass);
    Device::scale(pass, list.device_index(), multipliers);
    pass = std::move(repeated);
  }
  Device::scale(pass, list.device_index(), multipliers);
}

template <class Caller>
struct Operations {
  using Device = typename Caller::Device;
  using Memory = typename Caller::Memory;
  using Tensors = typename Caller::Tensors;
  using Argument = typename Caller::Argument;
  using Optional = std::optional<Argument>;
  using Result = typename Caller::Result;
  using Signed = std::tuple<Result, int64_t>;  // a table, and the signature of the list

  static Signed check(const Tensors& tensors) {
    const TensorList& list = Caller::list(tensors);
    return {table_of(list), list.signature()};
  }

  // scale_ and check in one pass. A tensor listed twice is scaled twice before it is measured.
  static Signed unscale_(const Tensors& tensors, const Argument& factor) {
    const TensorList& list = Caller::list(tensors);
    const float* by = numbers<float>(factor, 1, list, "factor");
    if (has_repeated(list.entries())) {
      const Memory wide = Caller::widened(factor, list.device_index());
      scale_list<Device>(list, static_cast<const double*>(wide.data()));
      by = nullptr;
    }
    return {table_of(list, by), list.signature()};
  }

  // Table, signature, norm, `scaling` in float64, `verdict` as in entry.h.
  static std::tuple<Result, int64_t, Result, Result, Result> measure_and_sign(const Tensors& tensors,
                                                                              double max_norm, double norm_type,
                                                                              const Optional& loss_scale,
                                                                              const Optional& counters) {
    const TensorList& list = Caller::list(tensors);
    const int32_t device = list.device_index();
    StepRequest step{};
    if (loss_scale) step.loss_scale = numbers<float>(*loss_scale, 1, list, "loss_scale");
    if (counters) step.counters = numbers<int64_t>(*counters, kCounters, list, "counters");
    Memory table({list.size(), kFields}, DType::kFloat64, device), norm({}, list.norm_dtype(), device);
    Memory scaling({2}, DType::kFloat64, device), verdict({kVerdict}, DType::kFloat32, device);
    step.verdict = static_cast<float*>(verdict.data());
    measure_into(list, max_norm, norm_type, norm, static_cast<double*>(scaling.data()),
                 static_cast<Row*>(table.data()), step);
    return {table.result(), list.signature(), norm.result(), scaling.result(), verdict.result()};
  }

  // The norm; and the multiplier, followed by the rows, which are not used any more.
  static std::tuple<Result, Result> measure_norm(const Tensors& tensors, double max_norm, double norm_type) {
    auto [norm, memory] = norm_and_memory(Caller::list(tensors), max_norm, norm_type);
    return {norm.result(), memory.result()};
  }

  static Result clip_(const Tensors& tensors, double max_norm, double norm_type) {
    const TensorList& list = Caller::list(tensors);
    auto [norm, memory] = norm_and_memory(list, max_norm, norm_type);
    if (max_norm != kInf) scale_list<Device>(list, static_cast<const double*>(memory.data()));
    return norm.result();
  }

  static void scale_(const Tensors& tensors, const Argument& multiplier) {
    const TensorList& list = Caller::list(tensors);
    scale_list<Device>(list, numbers<double>(multiplier, Caller::kMultipliers, list, "multiplier"));
  }

  static void scale_each_(const Tensors& tensors, const Argument& multipliers) {
    scale_entries(Caller::list(tensors), multipliers);
  }

  static Result update_sums(const Tensors& operands, const std::vector<int64_t>& rules,
                            const Argument& coefficients) {
    const TensorList& list = Caller::list(operands);
    const auto count = static_cast<int64_t>(rules.size()) * kUpdateCoefficients;
    const double* by = numbers<double>(coefficients, count, list, "coefficients");
    const std::vector<UpdateEntry> entries = update_entries(list.entries(), rules);
    Memory table({static_cast<int64_t>(entries.size()), kUpdateSums}, DType::kFloat64, list.device_index());
    Device::update(entries, list.device_index(), reinterpret_cast<const UpdateCoefficients<double>*>(by),
                   static_cast<UpdateSums<double>*>(table.data()));
    return table.result();
  }

  // The verdict of the guard (decide.h).
  static Result guard_(const std::vector<double>& options, const Argument& state, int64_t window,
                       const Argument& scaling, const Argument& verdict, const Optional& loss,
                       const Optional& update, const Optional& counters) {
    STD_TORCH_CHECK(options.size() == kGuardOptions, "gradstat: expected ", kGuardOptions, " options, got ",
                    options.size());
    require_window(window);
    const int32_t device = Caller::device_index(state);
    GuardRequest request{};
    std::memcpy(&request.options, options.data(), sizeof(GuardOptions));
    const int64_t count = kGuardTotals + kGuarded * window;
    request.state = Caller::template numbers<double>(state, count, device, "state");
    request.window = window;
    request.scaling =
        reinterpret_cast<Scaling*>(Caller::template numbers<double>(scaling, 2, device, "scaling"));
    request.verdict = Caller::template numbers<float>(verdict, kVerdict, device, "verdict");
    if (loss) request.loss = Caller::number(*loss, request.dtypes[0], device, "loss");
    if (update) request.update = Caller::number(*update, request.dtypes[2], device, "update");
    if (counters) {
      request.counters = Caller::template numbers<int64_t>(*counters, kCounters, device, "counters");
    }
    Memory out({kGuardVerdict}, DType::kFloat32, device);
    request.out = static_cast<float*>(out.data());
    Device::guard(request, device);
    return out.result();
  }

 protected:
  static void require_window(int64_t window) {
    STD_TORCH_CHECK(window > 0 && window <= kMostWindow, "gradstat: window must be from 1 to ", kMostWindow,
                    ", got ", window);
  }

  // The data of a tensor that accompanies `list`.
  template <class Number>
  static Number* numbers(const Argument& tensor, int64_t count, const TensorList& list, const char* what) {
    const int32_t device = list.size() > 0 ? list.device_index() : Caller::device_index(tensor);
    return Caller::template numbers<Number>(tensor, count, device, what);
  }

  static void scale_entries(const TensorList& list, const Argument& multipliers) {
    scale_list<Device>(list, {numbers<double>(multipliers, list.size(), list, "multipliers"), 1});
  }

  static Result table_of(const TensorList& list, const float* factor = nullptr) {
    Memory table({list.size(), kFields}, DType::kFloat64, list.device_index());
    Device::measure(list, static_cast<Row*>(table.data()), nullptr, factor);
    return table.result();
  }

  static std::pair<Memory, Memory> norm_and_memory(const TensorList& list, double max_norm, double norm_type) {
    Memory norm({}, list.norm_dtype(), list.device_index());
    Memory memory({1 + list.size() * kFields}, DType::kFloat64, list.device_index());
    auto* multiplier = static_cast<double*>(memory.data());
    measure_into(list, max_norm, norm_type, norm, multiplier, reinterpret_cast<Row*>(multiplier + 1), {});
    return {std::move(norm), std::move(memory)};
  }

  static void measure_into(const TensorList& list, double max_norm, double norm_type, const Memory& norm,
                           double* multiplier, Row* rows, const StepRequest& step) {
    STD_TORCH_CHECK(norm_type == 2.0 || norm_type == kInf, "gradstat: norm_type must be 2 or inf, got ",
                    norm_type);
    const NormRequest request = {max_norm, norm_type == kInf, list.norm_dtype(), norm.data(), multiplier, step};
    Device::measure(list, rows, &request, nullptr);
  }
};

// Operators as torch's dispatcher calls them.
template <class DeviceType>
struct Dispatcher {
  using Device = DeviceType;
  using Tensors = std::vector<Tensor>;
  using Argument = Tensor;
  using Result = Tensor;
  static constexpr int64_t kMultipliers = 1;

  struct Memory {
    Tensor tensor;

    Memory(std::initializer_list<int64_t> sizes, DType dtype, int32_t device_index)
        : tensor(new_tensor(sizes, known_type(dtype).torch_code(), Device::type(), device_index)) {}
    void* data() const { return tensor.data_ptr(); }
    Tensor result() const { return tensor; }
  };

  static TensorList list(const Tensors& tensors, Granularity granularity = Granularity::kTensors) {
    return list_of(tensors, Device::type(), granularity);
  }

  static int32_t device_index(const Tensor& tensor) { return tensor.get_device_index(); }

  static void require_device(const Tensor& tensor, int32_t device_index, const char* what) {
    int32_t type = 0;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor.get(), &type));
    STD_TORCH_CHECK(type == Device::type() && tensor.get_device_index() == device_index, "gradstat: ", what,
                    " must be on the device of the other tensors");
  }

  template <class Number>
  static Number* numbers(const Tensor& tensor, int64_t count, int32_t device_index, const char* what) {
    require_device(tensor, device_index, what);
    const auto [type, name] = std::is_same_v<Number, double>  ? std::pair{aoti_torch_dtype_float64(), "float64"}
                              : std::is_same_v<Number, float> ? std::pair{aoti_torch_dtype_float32(), "float32"}
                                                              : std::pair{aoti_torch_dtype_int64(), "int64"};
    int32_t dtype = 0;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor.get(), &dtype));
    STD_TORCH_CHECK(dtype == type, "gradstat: ", what, " must be ", name);
    STD_TORCH_CHECK(tensor.numel() == count && tensor.is_contiguous(), "gradstat: ", what, " must have ", count,
                    " contiguous numbers, got ", tensor.numel());
    STD_TORCH_CHECK(is_stored(tensor.get(), count, sizeof(Number)), "gradstat: ", what, " has no memory");
    return static_cast<Number*>(tensor.data_ptr());
  }

  static const void* number(const Tensor& tensor, DType& dtype, int32_t device_index, const char* what) {
    require_device(tensor, device_index, what);
    int32_t code = 0;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor.get(), &code));
    const auto* known = std::find_if(std::begin(kKnownTypes), std::end(kKnownTypes),
                                     [&](const KnownType& type) { return type.torch_code() == code; });
    STD_TORCH_CHECK(known != std::end(kKnownTypes) && !known->element.is_pair && tensor.numel() == 1,
                    "gradstat: ", what, " must be one real floating-point number");
    dtype = known->element.dtype;
    STD_TORCH_CHECK(is_stored(tensor.get(), 1, size_of(dtype)), "gradstat: ", what, " has no memory");
    return tensor.data_ptr();
  }

  static Memory widened(const Tensor& factor, int32_t device_index) {
    Memory wide({}, DType::kFloat64, device_index);
    torch::stable::copy_(wide.tensor, factor);
    return wide;
  }
};

// All operators, with the schemas below.
template <class Device>
struct Ops : Operations<Dispatcher<Device>> {
  using Base = Operations<Dispatcher<Device>>;
  using Caller = Dispatcher<Device>;
  using typename Base::Tensors;

  static TensorList units_of(const Tensors& tensors) { return Caller::list(tensors, Granularity::kUnits); }

  static Tensor stats(const Tensors& tensors) { return Base::table_of(Caller::list(tensors)); }

  static std::tuple<Tensor, Tensor, Tensor, Tensor> measure(const Tensors& tensors, double max_norm,
                                                            double norm_type,
                                                            const std::optional<Tensor>& loss_scale,
                                                            const std::optional<Tensor>& counters) {
    const auto [table, signature, norm, scaling, verdict] =
        Base::measure_and_sign(tensors, max_norm, norm_type, loss_scale, counters);
    return {table, norm, scaling, verdict};
  }

  static Tensor unit_stats(const Tensors& tensors) { return Base::table_of(units_of(tensors)); }

  static void scale_units_(const Tensors& tensors, const Tensor& multipliers) {
    Base::scale_entries(units_of(tensors), multipliers);
  }

  // `measured`: the norm as a 0-d tensor, or the rows of tensors or units.
  static Tensor decide_clip_(int64_t method, const std::vector<double>& options, Tensor state, int64_t window,
                             const Tensor& measured, const std::optional<Tensor>& weights,
                             const std::optional<Tensor>& factor, const std::optional<Tensor>& skip) {
    const int32_t device = state.get_device_index();
    STD_TORCH_CHECK(method >= 0 && method < kClipMethods, "gradstat: unknown clip method ", method);
    const auto method_ = static_cast<ClipMethod>(method);
    const bool is_each = decides_each(method_), is_table = measured.dim() == 2;
    STD_TORCH_CHECK(is_table ? measured.size(1) == kFields : !is_each,
                    "gradstat: measured must be a table of rows for this method, of ", kFields, " columns");
    const int64_t rows = is_table ? measured.size(0) : 0;
    const int64_t own = method_ == ClipMethod::kZScore ? 2 : method_ == ClipMethod::kTensors ? rows : 0;
    STD_TORCH_CHECK(options.size() <= kClipOptions, "gradstat: expected at most ", kClipOptions,
                    " options, got ", options.size());
    const double percentile = method_ == ClipMethod::kPercentile && !options.empty() ? options[0] : 0.0;
    STD_TORCH_CHECK(percentile >= 0 && percentile <= 100,
                    "gradstat: options[0], the percentile, must be from 0 to 100, got ", percentile);
    Base::require_window(window);
    STD_TORCH_CHECK(weights.has_value() == (method_ == ClipMethod::kUnits),
                    "gradstat: weights are required for units and only for units");
    ClipRequest request{};
    request.method = method_;
    std::copy(options.begin(), options.end(), request.options);
    request.state = Caller::template numbers<double>(state, kClipTotals + window + own, device, "state");
    request.window = window;
    const int64_t count = is_table ? rows * kFields : 1;
    auto* const numbers = Caller::template numbers<double>(measured, count, device, "measured");
    request.rows = reinterpret_cast<const Row*>(numbers);
    request.norm = is_table ? nullptr : numbers;
    request.count = rows;
    if (weights) {
      request.weights = reinterpret_cast<const Row*>(
          Caller::template numbers<double>(*weights, rows * kFields, device, "weights"));
    }
    if (factor) request.factor = Caller::template numbers<float>(*factor, 1, device, "factor");
    if (skip) request.skip = Caller::template numbers<float>(*skip, 1, device, "skip");
    const typename Caller::Memory out({is_each ? rows + 1 : 2}, DType::kFloat64, device);
    request.out = static_cast<double*>(out.data());
    Device::decide(request, device);
    return out.tensor;
  }
};

}  // namespace gradstat

// X(name, schema)
#define GRADSTAT_OPERATORS(X)                                                                                 \
  X(stats, "(Tensor[] tensors) -> Tensor")                                                                    \
  X(check, "(Tensor[] tensors) -> (Tensor table, int signature)")                                             \
  X(measure,                                                                                                  \
    "(Tensor[] tensors, float max_norm, float norm_type, Tensor? loss_scale=None, Tensor(a!)? counters=None)" \
    " -> (Tensor table, Tensor norm, Tensor multiplier, Tensor verdict)")                                     \
  X(scale_, "(Tensor(a!)[] tensors, Tensor multiplier) -> ()")                                                \
  X(scale_each_, "(Tensor(a!)[] tensors, Tensor multipliers) -> ()")                                          \
  X(unscale_, "(Tensor(a!)[] tensors, Tensor factor) -> (Tensor table, int signature)")                       \
  X(unit_stats, "(Tensor[] tensors) -> Tensor")                                                               \
  X(scale_units_, "(Tensor(a!)[] tensors, Tensor multipliers) -> ()")                                         \
  X(decide_clip_,                                                                                             \
    "(int method, float[] options, Tensor(a!) state, int window, Tensor measured, Tensor? weights=None, "     \
    "Tensor? factor=None, Tensor? skip=None) -> Tensor")                                                      \
  X(guard_,                                                                                                   \
    "(float[] options, Tensor(a!) state, int window, Tensor(b!) scaling, Tensor verdict, "                    \
    "Tensor? loss=None, Tensor? update=None, Tensor(c!)? counters=None) -> Tensor")                           \
  X(update_sums, "(Tensor[] operands, int[] rules, Tensor coefficients) -> Tensor")                           \
  X(clip_, "(Tensor(a!)[] tensors, float max_norm, float norm_type) -> Tensor")
