// CUDA implementations of the operators of ops_impl.h. A separate library, because it needs
// symbols that a CPU-only torch lacks.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include "cuda_launch.h"
#include "ops_impl.h"
#include "python_ops.h"

namespace gradstat {

struct Cuda {
  using HeldSlot = gradstat::HeldSlot;
  static constexpr DLDeviceType kDLPackType = kDLCUDA;

  static int32_t type() {
    static const int32_t cuda = aoti_torch_device_type_cuda();
    return cuda;
  }

  static void* current_stream(int32_t device) {
    void* stream = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
    return stream;
  }

  // Workspaces come from torch's caching allocator. They can be freed on return, while the kernel may still
  // run, because the allocator reuses memory in stream order.
  static Tensor workspace(int64_t bytes, int32_t device) {
    return new_tensor({bytes > 0 ? bytes : 1}, aoti_torch_dtype_uint8(), type(), device);
  }

  static void measure(const std::vector<Entry>& entries, int32_t device, Row* table, const NormRequest* norm,
                      const float* factor, HeldSlot* copy = nullptr) {
    const Tensor memory = workspace(stats_workspace_bytes(entries, device), device);
    launch_stats(entries, table, norm, factor, memory.data_ptr(), device, current_stream(device));
    if (copy != nullptr) *copy = to_host(table, entries.size() * sizeof(Row), device);
  }

  static HeldSlot to_host(const void* from, size_t bytes, int32_t device) {
    return copy_to_host(from, bytes, device, current_stream(device));
  }

  static Ref receiver(HeldSlot slot) {
    static PyMethodDef receive = {"receive", received, METH_O, nullptr};
    const auto release = [](PyObject* capsule) { ReleaseSlot()(slot_in(capsule)); };
    const Ref capsule = owned(PyCapsule_New(slot.get(), nullptr, release));
    static_cast<void>(slot.release());
    return owned(PyCFunction_NewEx(&receive, capsule.get(), nullptr));
  }

  static Slot* slot_in(PyObject* capsule) { return static_cast<Slot*>(PyCapsule_GetPointer(capsule, nullptr)); }

  static PyObject* received(PyObject* capsule, PyObject* wait) {
    return translating_exceptions([&]() -> PyObject* {
      const Slot& slot = *slot_in(capsule);
      bool is_done = false;
      {
        const WithoutGil others_may_run;
        is_done = has_arrived(slot, wait == Py_True);
      }
      if (!is_done) Py_RETURN_NONE;
      return PyByteArray_FromStringAndSize(static_cast<const char*>(slot.memory),
                                           static_cast<Py_ssize_t>(slot.bytes));
    });
  }

  // The kernel checks the multipliers itself.
  static bool is_known_identity(const Multipliers&) { return false; }

  static void scale(const std::vector<Entry>& entries, int32_t device, const Multipliers& multipliers) {
    const int64_t bytes = scale_workspace_bytes(entries, device);
    const std::optional<Tensor> memory = bytes > 0 ? std::optional(workspace(bytes, device)) : std::nullopt;
    void* const room = memory ? memory->data_ptr() : nullptr;
    launch_scale(entries, multipliers, room, device, current_stream(device));
  }

  template <class Request>
  static void decide(const Request& request, int32_t device) {
    launch_decide(request, device, current_stream(device));
  }
};

void* allocate_forever(size_t bytes, int32_t device, const char* /*torch says it*/) {
  return (new Tensor(Cuda::workspace(static_cast<int64_t>(bytes), device)))->data_ptr();
}

}  // namespace gradstat

STABLE_TORCH_LIBRARY_IMPL(gradstat, CUDA, library) {
#define GRADSTAT_REGISTER(name, schema) \
  library.impl(#name, TORCH_BOX(&gradstat::Operations<gradstat::Dispatcher<gradstat::Cuda>>::name));
  GRADSTAT_OPERATORS(GRADSTAT_REGISTER)
}

// The extension module gradstat._C_cuda, which gradstat/_core/native.py imports.
PyMODINIT_FUNC PyInit__C_cuda() {
  using namespace gradstat;
  using Caller = PythonCaller<Cuda>;
  // The architectures of this build, as set by setup.py: "sm_80 sm_86 ...".
  static const auto architectures = [](PyObject*, PyObject*) {
    return PyUnicode_FromString(GRADSTAT_CUDA_ARCHITECTURES);
  };
  static const auto load_kernels = [](PyObject*, PyObject* index) {
    return translating_exceptions([&]() -> PyObject* {
      const long device = PyLong_AsLong(index);
      if (device == -1 && PyErr_Occurred() != nullptr) return nullptr;
      load_all_kernels(static_cast<int32_t>(device));
      Py_RETURN_NONE;
    });
  };
  static PyMethodDef methods[] = {
      {"architectures", architectures, METH_NOARGS, nullptr},
      {"load_kernels", load_kernels, METH_O, nullptr},
      {"to_host", Caller::function<&Operations<Caller>::to_host>, METH_VARARGS, nullptr},
      {nullptr, nullptr, 0, nullptr}};
  return make_module<Cuda>("_C_cuda", methods);
}
