// The operations on lists of tensors, written once for all devices and for both callers: torch's dispatcher
// (Dispatcher below) and Python (python_ops.h). A `Device` (ops.cpp, ops_cuda.cpp) has
//   type()               torch's device type code
//   measure              norm and factor may be null; with a factor no address may occur twice
//   is_known_identity    decided without a host sync
//   scale                one pass over entries at distinct addresses
//   decide               about a clip's multipliers or about a step, on the device with the given index
//   kDLPackType          the same device type in DLPack's numbering, for python_ops.h
// A `Caller` has the types of arguments and results, and reads arguments, or throws if it cannot:
//   Tensors, Argument, Result  a list of tensors, a single tensor, a new tensor
//   list                 the TensorList of a list, by tensor or by unit
//   view                 the metadata of a single tensor on a device of this type; errors call it `what`
//   require(holds, why)  throws unless an argument is as expected
//   kMultipliers         how many numbers scale_ takes; -1 for any number of which it takes the first
//   Memory               a new tensor: constructed from sizes, dtype and device index; has data() and result()
#pragma once

#include <algorithm>
#include <climits>
#include <cstring>
#include <optional>
#include <tuple>
#include <type_traits>
#include <unordered_set>
#include <utility>
#include <vector>

#include "decide.h"
#include "stable_tensors.h"

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

// Calls scale(entries) once for each pass over the entries, and returns the number of passes. A tensor listed
// twice is scaled twice, as by torch, in two passes, because a kernel works on all entries of a pass at once.
template <class Scale>
int scale_in_passes(const std::vector<Entry>& entries, const Scale& scale) {
  if (!has_repeated(entries)) {
    scale(entries);
    return 1;
  }
  std::vector<Entry> pass = entries, repeated = take_repeated(pass);
  scale(pass);
  return 1 + scale_in_passes(repeated, scale);
}

constexpr const char* kNotBeside = " must be on the device of the other tensors";

template <class Caller>
struct Operations {
  using Device = typename Caller::Device;
  using Memory = typename Caller::Memory;
  using Tensors = typename Caller::Tensors;
  using Argument = typename Caller::Argument;
  using Optional = std::optional<Argument>;
  using Result = typename Caller::Result;
  using Signed = std::tuple<Result, int64_t>;  // a table, and the signature of the list

  static Result stats(const Tensors& tensors) { return table_of(Caller::list(tensors)); }

  static Result unit_stats(const Tensors& tensors) { return table_of(units_of(tensors)); }

  static Signed check(const Tensors& tensors) {
    const TensorList& list = Caller::list(tensors);
    return {table_of(list), list.signature()};
  }

  // scale_ and check in one pass. A tensor listed twice is scaled twice before it is measured.
  static Signed unscale_(const Tensors& tensors, const Argument& factor) {
    const TensorList& list = Caller::list(tensors);
    const float* by = numbers<float>(factor, 1, home_of(list), "factor");
    Memory table({list.size(), kFields}, DType::kFloat64, list.device_index());
    auto* const rows = static_cast<Row*>(table.data());
    const int passes = scale_in_passes(list.entries(), [&](const std::vector<Entry>& entries) {
      Device::measure(entries, list.device_index(), rows, nullptr, by);
    });
    if (passes > 1) Device::measure(list.entries(), list.device_index(), rows, nullptr, nullptr);
    return {table.result(), list.signature()};
  }

  // Table, signature, norm, `scaling` in float64, `verdict` as in entry.h.
  static std::tuple<Result, int64_t, Result, Result, Result> measure_step(const Tensors& tensors,
                                                                          double max_norm, double norm_type,
                                                                          const Optional& loss_scale,
                                                                          const Optional& counters) {
    const TensorList& list = Caller::list(tensors);
    const int32_t device = list.device_index();
    StepRequest step{};
    if (loss_scale) step.loss_scale = numbers<float>(*loss_scale, 1, home_of(list), "loss_scale");
    if (counters) step.counters = numbers<int64_t>(*counters, kCounters, home_of(list), "counters");
    Memory table({list.size(), kFields}, DType::kFloat64, device), norm({}, list.norm_dtype(), device);
    Memory scaling({2}, DType::kFloat64, device), verdict({kVerdict}, DType::kFloat32, device);
    step.verdict = static_cast<float*>(verdict.data());
    measure_into(list, max_norm, norm_type, norm, static_cast<double*>(scaling.data()),
                 static_cast<Row*>(table.data()), step);
    return {table.result(), list.signature(), norm.result(), scaling.result(), verdict.result()};
  }

  // The norm; and the multiplier, followed by the rows, which nothing uses any more.
  static std::tuple<Result, Result> measure_norm(const Tensors& tensors, double max_norm, double norm_type) {
    auto [norm, memory] = norm_and_memory(Caller::list(tensors), max_norm, norm_type);
    return {norm.result(), memory.result()};
  }

  static Result clip_(const Tensors& tensors, double max_norm, double norm_type) {
    const TensorList& list = Caller::list(tensors);
    auto [norm, memory] = norm_and_memory(list, max_norm, norm_type);
    if (max_norm != kInf) scale_list(list, static_cast<const double*>(memory.data()));
    return norm.result();
  }

  static void scale_(const Tensors& tensors, const Argument& multiplier) {
    const TensorList& list = Caller::list(tensors);
    scale_list(list, numbers<double>(multiplier, Caller::kMultipliers, home_of(list), "multiplier"));
  }

  static void scale_each_(const Tensors& tensors, const Argument& multipliers) {
    scale_entries(Caller::list(tensors), multipliers);
  }

  static void scale_units_(const Tensors& tensors, const Argument& multipliers) {
    scale_entries(units_of(tensors), multipliers);
  }

  // The verdict of the guard (decide.h).
  static Result guard_(const std::vector<double>& options, const Argument& state, int64_t window,
                       const Argument& scaling, const Argument& verdict, const Optional& loss,
                       const Optional& counters) {
    STD_TORCH_CHECK(options.size() == kGuardOptions, "gradstat: expected ", kGuardOptions, " options, got ",
                    options.size());
    require_window(window);
    const int32_t device = Caller::view(state, "state").device_index;
    GuardRequest request{};
    std::memcpy(&request.options, options.data(), sizeof(GuardOptions));
    const int64_t count = kGuardTotals + kGuarded * window;
    request.state = numbers<double>(state, count, device, "state");
    request.window = window;
    request.scaling = reinterpret_cast<Scaling*>(numbers<double>(scaling, 2, device, "scaling"));
    request.verdict = numbers<float>(verdict, kVerdict, device, "verdict");
    if (loss) request.loss = number(*loss, request.loss_dtype, device, "loss");
    if (counters) request.counters = numbers<int64_t>(*counters, kCounters, device, "counters");
    Memory out({kGuardVerdict}, DType::kFloat32, device);
    request.out = static_cast<float*>(out.data());
    Device::decide(request, device);
    return out.result();
  }

  // `measured`: the norm as a 0-d tensor, or the rows of tensors or units.
  static Result decide_clip_(int64_t method, const std::vector<double>& options, const Argument& state,
                             int64_t window, const Argument& measured, const Optional& weights,
                             const Optional& factor, const Optional& skip) {
    STD_TORCH_CHECK(method >= 0 && method < kClipMethods, "gradstat: unknown clip method ", method);
    const int32_t device = Caller::view(state, "state").device_index;
    const TypedView view = Caller::view(measured, "measured");
    ClipRequest request{};
    request.method = static_cast<ClipMethod>(method);
    const bool is_each = decides_each(request.method), is_table = view.dims == 2;
    STD_TORCH_CHECK(is_table ? view.sizes[1] == kFields : !is_each,
                    "gradstat: measured must be a table of rows for this method, of ", kFields, " columns");
    request.count = is_table ? view.sizes[0] : 0;
    const int64_t of_method = request.method == ClipMethod::kZScore    ? kZScoreNumbers
                              : request.method == ClipMethod::kTensors ? request.count
                                                                       : 0;
    STD_TORCH_CHECK(options.size() <= kClipOptions, "gradstat: expected at most ", kClipOptions,
                    " options, got ", options.size());
    const double percentile = request.method == ClipMethod::kPercentile && !options.empty() ? options[0] : 0.0;
    STD_TORCH_CHECK(percentile >= 0 && percentile <= 100,
                    "gradstat: options[0], the percentile, must be from 0 to 100, got ", percentile);
    require_window(window);
    STD_TORCH_CHECK(weights.has_value() == (request.method == ClipMethod::kUnits),
                    "gradstat: weights are required for units and only for units");
    std::copy(options.begin(), options.end(), request.options);
    request.state = numbers<double>(state, kClipTotals + window + of_method, device, "state");
    request.window = window;
    if (is_table) {
      request.rows = rows(measured, request.count, device, "measured");
    } else {
      request.norm = numbers<double>(measured, 1, device, "measured");
    }
    if (weights) request.weights = rows(*weights, request.count, device, "weights");
    if (factor) request.factor = numbers<float>(*factor, 1, device, "factor");
    if (skip) request.skip = numbers<float>(*skip, 1, device, "skip");
    Memory out({is_each ? request.count + 1 : 2}, DType::kFloat64, device);
    request.out = static_cast<double*>(out.data());
    Device::decide(request, device);
    return out.result();
  }

 private:
  static TensorList units_of(const Tensors& tensors) { return Caller::list(tensors, Granularity::kUnits); }

  static void require_window(int64_t window) {
    STD_TORCH_CHECK(window > 0 && window <= kMostWindow, "gradstat: window must be from 1 to ", kMostWindow,
                    ", got ", window);
  }

  // The device of tensors that accompany `list`: for one without entries, any of the same type.
  static constexpr int32_t kAnywhere = INT_MIN;
  static int32_t home_of(const TensorList& list) { return list.size() > 0 ? list.device_index() : kAnywhere; }

  // The contiguous numbers of an argument, `count` of them.
  template <class Number>
  static Number* numbers(const Argument& argument, int64_t count, int32_t device, const char* what) {
    const TypedView view = view_on(argument, device, what);
    const bool is_type = view.type.code == (std::is_integral_v<Number> ? kDLInt : kDLFloat) &&
                         view.type.bits == 8 * sizeof(Number) && view.type.lanes == 1;
    Caller::require(is_type, what, " must be ", std::is_integral_v<Number> ? "int" : "float",
                    8 * sizeof(Number));
    const bool is_enough = count < 0 ? view.numel > 0 : view.numel == count;
    Caller::require(is_enough && (view.numel == 0 || is_row_major(view)), what, " must have ", count,
                    " contiguous numbers, got ", view.numel);
    Caller::require(view.numel == 0 || view.data != nullptr, what, " has no memory");
    return static_cast<Number*>(view.data);
  }

  static const Row* rows(const Argument& argument, int64_t count, int32_t device, const char* what) {
    return reinterpret_cast<const Row*>(numbers<double>(argument, count * kFields, device, what));
  }

  // The only number of an argument of any real type, which is written to `dtype`.
  static const void* number(const Argument& argument, DType& dtype, int32_t device, const char* what) {
    const TypedView view = view_on(argument, device, what);
    const ElementType* element = element_of(view.type);
    Caller::require(element != nullptr && !element->is_pair && view.numel == 1, what,
                    " must be one real floating-point number");
    Caller::require(view.data != nullptr, what, " has no memory");
    dtype = element->dtype;
    return view.data;
  }

  static TypedView view_on(const Argument& argument, int32_t device, const char* what) {
    const TypedView view = Caller::view(argument, what);
    Caller::require(device == kAnywhere || view.device_index == device, what, kNotBeside);
    return view;
  }

  static void scale_list(const TensorList& list, const Multipliers& multipliers) {
    if (Device::is_known_identity(multipliers)) return;
    scale_in_passes(list.entries(), [&](const std::vector<Entry>& entries) {
      Device::scale(entries, list.device_index(), multipliers);
    });
  }

  static void scale_entries(const TensorList& list, const Argument& multipliers) {
    scale_list(list, {numbers<double>(multipliers, list.size(), home_of(list), "multipliers"), 1});
  }

  static Result table_of(const TensorList& list) {
    Memory table({list.size(), kFields}, DType::kFloat64, list.device_index());
    Device::measure(list.entries(), list.device_index(), static_cast<Row*>(table.data()), nullptr, nullptr);
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
    Device::measure(list.entries(), list.device_index(), rows, &request, nullptr);
  }
};

// Operations as torch's dispatcher calls them.
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

  // Throws std::runtime_error naming the first tensor that cannot be read in place.
  static TensorList list(const Tensors& tensors, Granularity granularity = Granularity::kTensors) {
    static const int32_t strided = aoti_torch_layout_strided();
    TensorList list(tensors.size(), Device::type(), granularity);
    for (const Tensor& tensor : tensors) {
      int32_t layout = 0;
      TORCH_ERROR_CODE_CHECK(aoti_torch_get_layout(tensor.get(), &layout));
      if (layout != strided) list.reject("is not strided");
      if (!is_on(tensor, Device::type())) list.reject("is on a different device type than the operator");
      const TypedView view = view_of(tensor);
      const ElementType* element = element_of(view.type);
      if (element == nullptr) list.reject("has an unsupported dtype");
      if (view.numel > 0 && view.data == nullptr) list.reject("has no memory");
      if (const char* why = list.add(view, *element)) list.reject(why);
    }
    return list;
  }

  static TypedView view(const Tensor& tensor, const char* what) {
    require(is_on(tensor, Device::type()), what, kNotBeside);
    return view_of(tensor);
  }

  template <class... Parts>
  static void require(bool holds, const Parts&... why) {
    STD_TORCH_CHECK(holds, "gradstat: ", why...);
  }
};

}  // namespace gradstat

// All operations: X(name, schema).
#define GRADSTAT_OPERATORS(X)                                                                                 \
  X(stats, "(Tensor[] tensors) -> Tensor")                                                                    \
  X(check, "(Tensor[] tensors) -> (Tensor table, int signature)")                                             \
  X(measure_step,                                                                                             \
    "(Tensor[] tensors, float max_norm, float norm_type, Tensor? loss_scale=None, Tensor(a!)? counters=None)" \
    " -> (Tensor table, int signature, Tensor norm, Tensor scaling, Tensor verdict)")                         \
  X(measure_norm, "(Tensor[] tensors, float max_norm, float norm_type) -> (Tensor norm, Tensor multiplier)")  \
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
    "Tensor? loss=None, Tensor(c!)? counters=None) -> Tensor")                                                \
  X(clip_, "(Tensor(a!)[] tensors, float max_norm, float norm_type) -> Tensor")
