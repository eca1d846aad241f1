// Schemas of all operators and their CPU implementations.
#include "denormals.h"
#include "module_plan.h"
#include "ops_impl.h"
#include "python_ops.h"
#include "stats_cpu.h"

namespace gradstat {

// The team of decide.h for a single thread.
struct SingleThread {
  int64_t rank() const { return 0; }
  int64_t size() const { return 1; }
  void barrier() const {}
  template <class How>
  double all_reduce(double value, const How&) const {
    return value;
  }
};

// Quickselect with branch-free partitions that always swap, as branches on random numbers are mispredicted.
// Values below the pivot come first, then those equal to it.
template <class Numbers>
Neighbours neighbours(const SingleThread&, const Numbers& numbers, int64_t count, int64_t k) {
  std::vector<double> sorted(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) sorted[i] = numbers(i);
  double *first = sorted.data(), *const end = first + count, *const at = first + k, *last = end;
  const auto moved_to_front = [&](auto&& belongs) {
    double* middle = first;
    for (double* p = first; p != last; ++p) {
      std::swap(*p, *middle);
      middle += belongs(*middle) ? 1 : 0;
    }
    return middle;
  };
  while (last - first > 1) {
    const double pivot = first[(last - first) / 2];
    double* const below = moved_to_front([&](double x) { return x < pivot; });
    if (at < below) {
      last = below;
      continue;
    }
    first = below;
    first = moved_to_front([&](double x) { return !(x > pivot); });
    if (at < first) break;
  }
  return {*at, at + 1 < end ? *std::min_element(at + 1, end) : *at};
}

// Throws std::runtime_error if numbers of recorded values, in the state of a clip or guard, cannot be right.
inline void require_counts(const double* recorded, int64_t number) {
  for (int64_t i = 0; i < number; ++i) {
    if (count_of(recorded[i]) != recorded[i] || std::floor(recorded[i]) != recorded[i]) {
      throw std::runtime_error("gradstat: state: expected whole numbers of recorded values, got " +
                               std::to_string(recorded[i]));
    }
  }
}

inline void decide_step(const ClipRequest& request) {
  require_counts(&reinterpret_cast<const ClipTotals*>(request.state)->recorded, 1);
  decide_clip(request, SingleThread{});
}

inline void decide_step(const GuardRequest& request) {
  require_counts(reinterpret_cast<const GuardTotals*>(request.state)->recorded, kGuarded);
  int judgements[kGuarded];
  for (int series = 0; series < kGuarded; ++series)
    judgements[series] = guards::judge(request, series, SingleThread{});
  guards::conclude(request, judgements);
}

struct Cpu {
  static constexpr DLDeviceType kDLPackType = kDLCPU;

  static int32_t type() {
    static const int32_t cpu = aoti_torch_device_type_cpu();
    return cpu;
  }

  static void measure(const std::vector<Entry>& entries, int32_t, Row* table, const NormRequest* norm,
                      const float* factor) {
    const KeepsDenormals kept;
    const Row total = rows_cpu(entries, table, factor != nullptr ? *factor : 1.0);
    if (norm != nullptr) write_value(norm->norm, norm->dtype, gradstat::decide(*norm, total));
  }

  static bool is_known_identity(const Multipliers& multipliers) {
    return multipliers.stride == 0 && *multipliers.first == 1.0;
  }

  static void scale(const std::vector<Entry>& entries, int32_t, const Multipliers& multipliers) {
    const KeepsDenormals kept;
    scale_cpu(entries, multipliers);
  }

  template <class Request>
  static void decide(const Request& request, int32_t) {
    const KeepsDenormals kept;
    decide_step(request);
  }
};

// The table of quantization. `shapes`: a BlockShape for each tensor; `format`: a QuantizationFormat; `largest`:
// a float32 for each tensor.
Tensor quantization_rows(const std::vector<Tensor>& tensors, const std::vector<int64_t>& shapes,
                         const std::vector<double>& format, const Tensor& largest) {
  using Caller = Dispatcher<Cpu>;
  const TensorList list = Caller::list(tensors);
  const auto count = static_cast<size_t>(list.size());
  Caller::require(shapes.size() == 5 * count && format.size() == 6, "expected 5 numbers for each of ", count,
                  " tensors and 6 of the format, got ", shapes.size(), " and ", format.size());
  const TypedView magnitudes = Caller::view(largest, "largest");
  Caller::require(magnitudes.numel == list.size() && is_row_major(magnitudes) && magnitudes.type.bits == 32,
                  "largest must have ", count, " contiguous float32 numbers");
  std::vector<BlockShape> each;
  for (size_t i = 0; i < count; ++i) {
    const Entry& entry = list.entries()[i];
    const int64_t* n = &shapes[5 * i];
    each.push_back({n[0], n[1], n[2], n[3], n[4]});
    Caller::require(!entry.is_pair && size_of(entry.dtype) > 1, "tensor ", i, " has an unsupported dtype");
    Caller::require(each[i].is_supported() && n[0] * n[1] * n[2] == entry.numel, "tensor ", i,
                    " has no such blocks");
  }
  const auto rule = static_cast<ScaleRule>(std::clamp(static_cast<int>(format[0]), 0, 3));
  const auto at = [&](int i) { return static_cast<float>(format[i]); };
  Caller::Memory table({list.size(), kQuantizationFields}, DType::kFloat64, list.device_index());
  quantize_cpu(list.entries(), each, {rule, format[1] != 0, at(2), at(3), at(4), static_cast<int>(format[5])},
               static_cast<const float*>(magnitudes.data), static_cast<QuantizationRow*>(table.data()));
  return table.result();
}

// A device type of which only the tensors are read. Signatures differ from those of any library's own type.
template <DLDeviceType kType>
struct Described {
  static constexpr DLDeviceType kDLPackType = kType;
  static int32_t type() { return 64 + kType; }
};

// What kernels/_table.py needs of each tensor, the signature, and the dtype of the norm.
template <DLDeviceType kType>
PyObject* describe(PyObject*, PyObject* listed) {
  using Caller = PythonCaller<Described<kType>>;
  return translating_exceptions([&] {
    Ref tensors;
    Caller::read(listed, tensors);
    const TensorList list = Caller::list(tensors);
    std::vector<int64_t> words;
    for (const Entry& entry : list.entries()) {
      const int64_t kind = static_cast<int64_t>(entry.dtype) + (entry.is_pair ? 16 : 0);
      words.insert(words.end(), {reinterpret_cast<int64_t>(entry.data), entry.values(), kind});
    }
    return Py_BuildValue("(y#Li)", words.data(), static_cast<Py_ssize_t>(words.size() * sizeof(int64_t)),
                         list.signature(), static_cast<int>(list.norm_dtype()));
  });
}

}  // namespace gradstat

STABLE_TORCH_LIBRARY(gradstat, library) {
#define GRADSTAT_DEFINE(name, schema) library.def(#name schema);
  GRADSTAT_OPERATORS(GRADSTAT_DEFINE)
  library.def("quantization_rows(Tensor[] tensors, int[] shapes, float[] format, Tensor largest) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(gradstat, CPU, library) {
#define GRADSTAT_REGISTER(name, schema) \
  library.impl(#name, TORCH_BOX(&gradstat::Operations<gradstat::Dispatcher<gradstat::Cpu>>::name));
  GRADSTAT_OPERATORS(GRADSTAT_REGISTER)
  library.impl("quantization_rows", TORCH_BOX(&gradstat::quantization_rows));
}

// The extension module gradstat._C, which gradstat/_core/native.py imports.
PyMODINIT_FUNC PyInit__C() {
  using namespace gradstat;
  static const auto instructions = [](PyObject*, PyObject*) {
    return PyUnicode_FromString(cpu_instructions());
  };
  static PyMethodDef methods[] = {{"instructions", instructions, METH_NOARGS, nullptr},
                                  {"make_plan", make_plan, METH_VARARGS, nullptr},
                                  {"planned_parameters", planned_parameters, METH_O, nullptr},
                                  {"holds_exactly", holds_exactly, METH_VARARGS, nullptr},
                                  {"gradients_of", gradients_of, METH_O, nullptr},
                                  {"describe_cpu", describe<kDLCPU>, METH_O, nullptr},
                                  {"describe_cuda", describe<kDLCUDA>, METH_O, nullptr},
                                  {nullptr, nullptr, 0, nullptr}};
  return make_module<Cpu>("_C", methods);
}
