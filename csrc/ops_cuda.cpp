// CUDA implementations of the operators of ops_impl.h. A separate library, because it needs
// symbols that a CPU-only torch lacks.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include "cuda_launch.h"
#include "ops_impl.h"
#include "python_ops.h"

namespace gradstat {

struct Cuda {
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
                      const float* factor) {
    const Tensor memory = workspace(stats_workspace_bytes(entries, device), device);
    launch_stats(entries, table, norm, factor, memory.data_ptr(), device, current_stream(device));
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

template <class Call>
auto without_gil(const Call& call) {
  const WithoutGil others_may_run;
  return call();
}

Slot& slot_in(PyObject* capsule) { return *static_cast<Slot*>(PyCapsule_GetPointer(capsule, nullptr)); }

// receive(wait) of a copy to the host: its bytes, or None if they have not arrived.
PyObject* receive(PyObject* capsule, PyObject* wait) {
  return translating_exceptions([&]() -> PyObject* {
    const Slot& slot = slot_in(capsule);
    if (!without_gil([&] { return has_arrived(slot, wait == Py_True); })) Py_RETURN_NONE;
    return PyByteArray_FromStringAndSize(static_cast<char*>(slot.memory), static_cast<Py_ssize_t>(slot.bytes));
  });
}

// The function `receive` of a contiguous tensor's copy, or None during graph capture.
PyObject* to_host(PyObject*, PyObject* tensor) {
  static PyMethodDef method = {"receive", receive, METH_O, nullptr};
  return translating_exceptions([&]() -> PyObject* {
    const TypedView view = ordinary_view(tensor, Cuda::kDLPackType);
    if (view.numel == 0 || !is_row_major(view)) throw UseDispatcher();
    HeldSlot slot = without_gil([&] {
      const size_t bytes = view.numel * view.type.bits / 8;
      return copy_to_host(view.data, bytes, view.device_index, Cuda::current_stream(view.device_index));
    });
    if (slot == nullptr) Py_RETURN_NONE;
    const auto release = [](PyObject* owner) { ReleaseSlot()(&slot_in(owner)); };
    const Ref capsule = owned(PyCapsule_New(slot.get(), nullptr, release));
    static_cast<void>(slot.release());
    return PyCFunction_NewEx(&method, capsule.get(), nullptr);
  });
}

// The operator check, and the copy of its table.
PyObject* check_to_host(PyObject* module, PyObject* listed) {
  using Caller = PythonCaller<Cuda>;
  return translating_exceptions([&] {
    Ref tensors;
    Caller::read(listed, tensors);
    const auto [table, number] = Operations<Caller>::check(tensors);
    const Ref signature = Caller::to_python(number), copy = owned(to_host(module, table.get()));
    return PyTuple_Pack(3, table.get(), signature.get(), copy.get());
  });
}

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
  static PyMethodDef methods[] = {{"architectures", architectures, METH_NOARGS, nullptr},
                                  {"load_kernels", load_kernels, METH_O, nullptr},
                                  {"check_to_host", check_to_host, METH_O, nullptr},
                                  {"to_host", to_host, METH_O, nullptr},
                                  {nullptr, nullptr, 0, nullptr}};
  return make_module<Cuda>("_C_cuda", methods);
}
