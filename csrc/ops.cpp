// Schemas of all operators and their CPU implementations. ops_cuda.cpp registers the CUDA implementations, in a
// separate library because it needs symbols that a CPU-only torch lacks.
#include "decide_cpu.h"
#include "denormals.h"
#include "module_plan.h"
#include "ops_impl.h"
#include "python_ops.h"
#include "stats_cpu.h"

namespace gradstat {

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

}  // namespace gradstat

STABLE_TORCH_LIBRARY(gradstat, library) {
#define GRADSTAT_DEFINE(name, schema) library.def(#name schema);
  GRADSTAT_OPERATORS(GRADSTAT_DEFINE)
}

STABLE_TORCH_LIBRARY_IMPL(gradstat, CPU, library) {
#define GRADSTAT_REGISTER(name, schema) \
  library.impl(#name, TORCH_BOX(&gradstat::Operations<gradstat::Dispatcher<gradstat::Cpu>>::name));
  GRADSTAT_OPERATORS(GRADSTAT_REGISTER)
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
                                  {nullptr, nullptr, 0, nullptr}};
  return make_module<Cpu>("_C", methods);
}
