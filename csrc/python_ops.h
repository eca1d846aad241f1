// The operators as plain functions of a Python extension module, for lists of ordinary tensors: the way that
// `check` and `clip_grad_norm_` take on every step. torch's dispatcher needs about 0.3 us for each tensor of a
// list; asking the tensor itself, through DLPack's C exchange interface, takes a tenth of that. Where something
// is not ordinary the functions here return None (or False) and have done nothing.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "ops_impl.h"

// DLPack's header is plain C and versioned by itself. torch ships it in a folder that it closes to users of the
// stable interface as a whole.
#pragma push_macro("TORCH_TARGET_VERSION")
#undef TORCH_TARGET_VERSION
#include <ATen/dlpack.h>
#pragma pop_macro("TORCH_TARGET_VERSION")

#include <chrono>
#include <optional>
#include <thread>

namespace gradstat {

// An owned reference; may be null.
class Ref {
 public:
  explicit Ref(PyObject* owned = nullptr) : object_(owned) {}
  Ref(Ref&& other) noexcept : object_(other.release()) {}
  Ref& operator=(Ref&& other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  Ref(const Ref&) = delete;
  Ref& operator=(const Ref&) = delete;
  ~Ref() { Py_XDECREF(object_); }

  static Ref borrow(PyObject* object) {
    Py_XINCREF(object);
    return Ref(object);
  }
  PyObject* get() const { return object_; }
  PyObject* release() { return std::exchange(object_, nullptr); }
  explicit operator bool() const { return object_ != nullptr; }

 private:
  PyObject* object_;
};

// Python's error indicator is set.
struct PythonError {};

// This way is not for what was asked, and nothing has been done.
struct NotOrdinary {};

// A C++ exception may not leave a function that Python calls.
template <class Body>
PyObject* guarded(const Body& body) {
  try {
    return body();
  } catch (const NotOrdinary&) {
    Py_RETURN_NONE;
  } catch (const PythonError&) {
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

// Lets other threads run Python meanwhile. When the interpreter ends in that time, a daemon thread never gets
// on: up to Python 3.13 asking for the lock then unwinds the stack, which C++ may not outlive, and the
// destructors on it need the lock. So the thread stays here until the process is gone, as Python does it itself
// since 3.14.
class WithoutGil {
 public:
  WithoutGil() : state_(PyEval_SaveThread()) {}
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;
  ~WithoutGil() {
    try {
      PyEval_RestoreThread(state_);
    } catch (...) {
      while (true) std::this_thread::sleep_for(std::chrono::hours(1));
    }
  }

 private:
  PyThreadState* state_;
};

// What torch gave us to look at tensors with. Set once, by use_exchange.
struct Exchange {
  const DLPackExchangeAPI* api = nullptr;
  PyObject* tensor_type = nullptr;
  PyObject* parameter_type = nullptr;
  PyObject* is_conj = nullptr;
  PyObject* is_neg = nullptr;
  PyObject* is_sparse = nullptr;
  // Asking DLPack for a sparse tensor raises an error that takes torch half a millisecond to describe. Where
  // that has happened once it will again, and asking first costs 0.1 us for each tensor.
  bool ask_for_sparse = false;
};

inline Exchange& exchange() {
  static Exchange instance;
  return instance;
}

// use_exchange(capsule, Tensor, Parameter, is_conj, is_neg, is_sparse) -> bool: whether the interface has
// what is needed.
inline PyObject* use_exchange(PyObject*, PyObject* arguments) {
  PyObject* capsule = nullptr;
  Exchange given;
  if (!PyArg_ParseTuple(arguments, "OOOOOO", &capsule, &given.tensor_type, &given.parameter_type,
                        &given.is_conj, &given.is_neg, &given.is_sparse)) {
    return nullptr;
  }
  given.api = static_cast<const DLPackExchangeAPI*>(PyCapsule_GetPointer(capsule, "dlpack_exchange_api"));
  if (given.api == nullptr) return nullptr;
  if (given.api->header.version.major != DLPACK_MAJOR_VERSION ||
      given.api->dltensor_from_py_object_no_sync == nullptr) {
    Py_RETURN_FALSE;
  }
  for (PyObject* kept :
       {given.tensor_type, given.parameter_type, given.is_conj, given.is_neg, given.is_sparse}) {
    Py_INCREF(kept);
  }
  exchange() = given;
  Py_RETURN_TRUE;
}

inline bool element_of(DLDataType type, ElementType& out) {
  if (type.lanes != 1) return false;
  out.is_pair = type.code == kDLComplex;
  const int32_t bits = out.is_pair ? type.bits / 2 : type.bits;
  switch (type.code) {
    case kDLFloat:
    case kDLComplex:
      out.dtype = bits == 32 ? DType::kFloat32 : bits == 64 ? DType::kFloat64 : DType::kFloat16;
      return bits == 16 || bits == 32 || bits == 64;
    case kDLBfloat:
      out.dtype = DType::kBFloat16;
      return type.bits == 16;
    case kDLFloat8_e4m3fn:
      out.dtype = DType::kFloat8E4M3FN;
      return true;
    case kDLFloat8_e5m2:
      out.dtype = DType::kFloat8E5M2;
      return true;
    case kDLFloat8_e4m3fnuz:
      out.dtype = DType::kFloat8E4M3FNUZ;
      return true;
    case kDLFloat8_e5m2fnuz:
      out.dtype = DType::kFloat8E5M2FNUZ;
      return true;
    default:
      return false;
  }
}

inline DLDataType dlpack_type_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat64:
      return {kDLFloat, 64, 1};
    case DType::kFloat32:
      return {kDLFloat, 32, 1};
    case DType::kFloat16:
      return {kDLFloat, 16, 1};
    case DType::kBFloat16:
      return {kDLBfloat, 16, 1};
    default:
      throw std::logic_error("gradstat: a norm of this dtype does not exist");
  }
}

// New memory from torch's allocator, on its way to becoming a tensor or to being given back. Throws NotOrdinary
// if torch makes something else of new tensors now: inside of torch.func transforms and of FakeTensorMode.
class NewTensor {
 public:
  NewTensor(std::initializer_list<int64_t> sizes, DLDataType type, DLDevice device) {
    DLTensor prototype{};
    prototype.device = device;
    prototype.ndim = static_cast<int32_t>(sizes.size());
    prototype.dtype = type;
    prototype.shape = const_cast<int64_t*>(sizes.begin());
    // If memory is short, the general way will say so.
    const auto ignore_error = [](void*, const char*, const char*) {};
    if (exchange().api->managed_tensor_allocator(&prototype, &tensor_, nullptr, ignore_error) != 0) {
      throw NotOrdinary();
    }
    if (tensor_->dl_tensor.data == nullptr) {
      tensor_->deleter(tensor_);
      throw NotOrdinary();
    }
  }
  NewTensor(const NewTensor&) = delete;
  NewTensor& operator=(const NewTensor&) = delete;
  ~NewTensor() {
    if (tensor_ != nullptr) tensor_->deleter(tensor_);
  }

  void* data() const { return static_cast<char*>(tensor_->dl_tensor.data) + tensor_->dl_tensor.byte_offset; }

  PyObject* to_python() {
    void* object = nullptr;
    if (exchange().api->managed_tensor_to_py_object_no_sync(std::exchange(tensor_, nullptr), &object) != 0) {
      throw PythonError();
    }
    return static_cast<PyObject*>(object);
  }

 private:
  DLManagedTensorVersioned* tensor_ = nullptr;
};

// A list that can be read as it is, and references that keep its tensors alive while others may run.
struct DirectList {
  Ref held;
  TensorList list;
};

inline bool is_true_of(PyObject* method, PyObject* tensor) {
  const Ref result(PyObject_CallFunctionObjArgs(method, tensor, nullptr));
  if (!result) throw PythonError();
  return result.get() == Py_True;
}

// Adds a tensor, or returns false if it is not ordinary.
inline bool add_tensor(TensorList& list, PyObject* tensor, DLDeviceType device_type) {
  const auto* type = reinterpret_cast<PyObject*>(Py_TYPE(tensor));
  if (type != exchange().tensor_type && type != exchange().parameter_type) return false;
  if (exchange().ask_for_sparse && is_true_of(exchange().is_sparse, tensor)) return false;
  DLTensor dl;
  if (exchange().api->dltensor_from_py_object_no_sync(tensor, &dl) != 0) {
    PyErr_Clear();
    exchange().ask_for_sparse = true;
    return false;
  }
  TensorView view{};
  if (dl.device.device_type != device_type || dl.strides == nullptr || !element_of(dl.dtype, view.element)) {
    return false;
  }
  view.numel = 1;
  for (int32_t d = 0; d < dl.ndim; ++d) view.numel *= dl.shape[d];
  view.data = static_cast<char*>(dl.data) + dl.byte_offset;
  view.dims = dl.ndim;
  view.sizes = dl.shape;
  view.strides = dl.strides;
  view.device_index = dl.device.device_id;
  // torch's zeros that take no memory, and storage that was freed, into which a view may point with an offset.
  // No program is given memory so low.
  constexpr uintptr_t kLowest = 1 << 22;
  if (view.numel > 0 && reinterpret_cast<uintptr_t>(view.data) < kLowest) return false;
  // DLPack does not tell lazily conjugated and negated tensors. Real ones are negated as the imaginary part of
  // a conjugate, every other number of an array of complex ones, so only one of a single element is dense.
  if (view.element.is_pair && is_true_of(exchange().is_conj, tensor)) return false;
  if ((view.element.is_pair || view.numel == 1) && is_true_of(exchange().is_neg, tensor)) return false;
  return list.add(view) == nullptr;
}

inline std::optional<DirectList> direct_list(PyObject* tensors, DLDeviceType device_type,
                                             int32_t torch_device_type) {
  if (exchange().api == nullptr || !PyList_Check(tensors) || PyList_Size(tensors) == 0) return std::nullopt;
  const Py_ssize_t size = PyList_Size(tensors);
  DirectList direct{Ref(PyList_GetSlice(tensors, 0, size)),
                    TensorList(static_cast<size_t>(size), torch_device_type)};
  if (!direct.held) throw PythonError();
  for (Py_ssize_t i = 0; i < size; ++i) {
    if (!add_tensor(direct.list, PyList_GetItem(direct.held.get(), i), device_type)) return std::nullopt;
  }
  return direct;
}

template <class Device>
struct PythonOps {
  static std::optional<DirectList> list_from(PyObject* tensors) {
    return direct_list(tensors, Device::kDLPackType, Device::type());
  }

  static DLDevice device_of(const TensorList& list) { return {Device::kDLPackType, list.device_index()}; }

  // check(tensors) -> (table, signature) | None
  static PyObject* check(PyObject*, PyObject* tensors) {
    return guarded([&]() -> PyObject* {
      const std::optional<DirectList> direct = list_from(tensors);
      if (!direct) Py_RETURN_NONE;
      const TensorList& list = direct->list;
      NewTensor table({list.size(), kFields}, dlpack_type_of(DType::kFloat64), device_of(list));
      {
        const WithoutGil others_may_run;
        Device::measure(list, static_cast<Row*>(table.data()), nullptr);
      }
      return Py_BuildValue("(NL)", table.to_python(), static_cast<long long>(list.signature()));
    });
  }

  // unscale_(tensors, factor) -> (table, signature) | None. A tensor listed twice is not ordinary here.
  static PyObject* unscale_(PyObject*, PyObject* arguments) {
    PyObject *tensors = nullptr, *factor = nullptr;
    if (!PyArg_ParseTuple(arguments, "OO", &tensors, &factor)) return nullptr;
    return guarded([&]() -> PyObject* {
      const std::optional<DirectList> direct = list_from(tensors);
      if (!direct || has_repeated(direct->list.entries())) Py_RETURN_NONE;
      const TensorList& list = direct->list;
      const auto* by = static_cast<const float*>(numbers(factor, DType::kFloat32, 1, list));
      if (by == nullptr) Py_RETURN_NONE;
      NewTensor table({list.size(), kFields}, dlpack_type_of(DType::kFloat64), device_of(list));
      {
        const WithoutGil others_may_run;
        Device::unscale(list, static_cast<Row*>(table.data()), by);
      }
      return Py_BuildValue("(NL)", table.to_python(), static_cast<long long>(list.signature()));
    });
  }

  // clip_(tensors, max_norm, norm_type) -> norm | None
  static PyObject* clip_(PyObject*, PyObject* arguments) {
    return measured(arguments, [](const TensorList& list, double max_norm, NewTensor& norm, NewTensor& memory) {
      if (max_norm != kInf) {
        const WithoutGil others_may_run;
        scale_list<Device>(list, static_cast<const double*>(memory.data()), true);
      }
      return norm.to_python();
    });
  }

  // measure(tensors, max_norm, norm_type) -> (norm, memory that begins with the coefficient) | None
  static PyObject* measure(PyObject*, PyObject* arguments) {
    return measured(arguments, [](const TensorList&, double, NewTensor& norm, NewTensor& memory) {
      Ref first(norm.to_python());
      return Py_BuildValue("(NN)", first.release(), memory.to_python());
    });
  }

  // measure_step(tensors, max_norm, norm_type, loss_scale | None, counters | None)
  //   -> (table, signature, norm, {coefficient, norm} as float64, verdict) | None
  static PyObject* measure_step(PyObject*, PyObject* arguments) {
    PyObject *tensors = nullptr, *loss_scale = nullptr, *counters = nullptr;
    double max_norm = 0, norm_type = 0;
    if (!PyArg_ParseTuple(arguments, "OddOO", &tensors, &max_norm, &norm_type, &loss_scale, &counters)) {
      return nullptr;
    }
    return guarded([&]() -> PyObject* {
      const std::optional<DirectList> direct = list_from(tensors);
      if (!direct) Py_RETURN_NONE;
      const TensorList& list = direct->list;
      const DLDevice device = device_of(list);
      NewTensor verdict({kVerdict}, dlpack_type_of(DType::kFloat32), device);
      StepRequest step{nullptr, static_cast<float*>(verdict.data()), nullptr};
      if (loss_scale != Py_None) {
        step.loss_scale = static_cast<const float*>(numbers(loss_scale, DType::kFloat32, 1, list));
        if (step.loss_scale == nullptr) Py_RETURN_NONE;
      }
      if (counters != Py_None) {
        step.counters = counters_of(counters, list);
        if (step.counters == nullptr) Py_RETURN_NONE;
      }
      NewTensor table({list.size(), kFields}, dlpack_type_of(DType::kFloat64), device);
      NewTensor norm({}, dlpack_type_of(list.norm_dtype()), device);
      NewTensor pair({2}, dlpack_type_of(DType::kFloat64), device);
      const NormRequest request =
          norm_request(list, max_norm, norm_type, norm.data(), static_cast<double*>(pair.data()), step);
      {
        const WithoutGil others_may_run;
        Device::measure(list, static_cast<Row*>(table.data()), &request);
      }
      Ref made[] = {Ref(table.to_python()), Ref(norm.to_python()), Ref(pair.to_python()),
                    Ref(verdict.to_python())};
      return Py_BuildValue("(NLNNN)", made[0].release(), static_cast<long long>(list.signature()),
                           made[1].release(), made[2].release(), made[3].release());
    });
  }

  // scale_(tensors, memory) -> bool: what measure returned for the same tensors.
  static PyObject* scale_(PyObject*, PyObject* arguments) {
    PyObject *tensors = nullptr, *memory = nullptr;
    if (!PyArg_ParseTuple(arguments, "OO", &tensors, &memory)) return nullptr;
    return guarded([&]() -> PyObject* {
      const std::optional<DirectList> direct = list_from(tensors);
      TensorList factor(1, Device::type());
      if (!direct || !add_tensor(factor, memory, Device::kDLPackType) ||
          factor.norm_dtype() != DType::kFloat64 || factor.entries()[0].numel == 0 ||
          factor.device_index() != direct->list.device_index()) {
        Py_RETURN_FALSE;
      }
      {
        const WithoutGil others_may_run;
        scale_list<Device>(direct->list, static_cast<const double*>(factor.entries()[0].data), false);
      }
      Py_RETURN_TRUE;
    });
  }

  // scale_each_(tensors, coefficients) -> bool
  static PyObject* scale_each_(PyObject*, PyObject* arguments) {
    PyObject *tensors = nullptr, *coefficients = nullptr;
    if (!PyArg_ParseTuple(arguments, "OO", &tensors, &coefficients)) return nullptr;
    return guarded([&]() -> PyObject* {
      const std::optional<DirectList> direct = list_from(tensors);
      if (!direct) Py_RETURN_FALSE;
      const TensorList& list = direct->list;
      const auto* first = static_cast<const double*>(numbers(coefficients, DType::kFloat64, list.size(), list));
      if (first == nullptr) Py_RETURN_FALSE;
      {
        const WithoutGil others_may_run;
        scale_list<Device>(list, {first, 1}, false);
      }
      Py_RETURN_TRUE;
    });
  }

 private:
  // The numbers of an ordinary tensor, or null if they are not `count` of `dtype` on the list's device, in
  // order.
  static const void* numbers(PyObject* tensor, DType dtype, int64_t count, const TensorList& list) {
    TensorList one(1, Device::type(), Division::kUnits);  // more than one entry if it is no single row
    if (!add_tensor(one, tensor, Device::kDLPackType) || one.size() != 1) return nullptr;
    const Entry& entry = one.entries()[0];
    const bool fits = entry.dtype == dtype && !entry.is_pair && entry.numel == count &&
                      one.device_index() == list.device_index();
    return fits ? entry.data : nullptr;
  }

  // The same for a step's counters, which are integers.
  static int64_t* counters_of(PyObject* tensor, const TensorList& list) {
    DLTensor dl;
    if (exchange().api->dltensor_from_py_object_no_sync(tensor, &dl) != 0) throw PythonError();
    const bool fits = dl.dtype.code == kDLInt && dl.dtype.bits == 64 && dl.ndim == 1 &&
                      dl.shape[0] == kCounters && dl.strides[0] == 1 &&
                      dl.device.device_type == Device::kDLPackType &&
                      dl.device.device_id == list.device_index();
    return fits ? reinterpret_cast<int64_t*>(static_cast<char*>(dl.data) + dl.byte_offset) : nullptr;
  }

  // Norm and coefficient of a list, and what `then(list, max_norm, norm, memory)` makes of them; the
  // coefficient is the first number of the memory.
  template <class Then>
  static PyObject* measured(PyObject* arguments, const Then& then) {
    PyObject* tensors = nullptr;
    double max_norm = 0, norm_type = 0;
    if (!PyArg_ParseTuple(arguments, "Odd", &tensors, &max_norm, &norm_type)) return nullptr;
    return guarded([&]() -> PyObject* {
      const std::optional<DirectList> direct = list_from(tensors);
      if (!direct) Py_RETURN_NONE;
      const TensorList& list = direct->list;
      NewTensor norm({}, dlpack_type_of(list.norm_dtype()), device_of(list));
      // The coefficient, and the rows, which nobody will see.
      NewTensor memory({1 + list.size() * kFields}, dlpack_type_of(DType::kFloat64), device_of(list));
      auto* coefficient = static_cast<double*>(memory.data());
      const NormRequest request = norm_request(list, max_norm, norm_type, norm.data(), coefficient, {});
      {
        const WithoutGil others_may_run;
        Device::measure(list, reinterpret_cast<Row*>(coefficient + 1), &request);
      }
      return then(list, max_norm, norm, memory);
    });
  }
};

inline PyObject* fingerprint(PyObject*, PyObject*) { return PyUnicode_FromString(GRADSTAT_FINGERPRINT); }

template <class Device>
constexpr PyMethodDef kCheckMethod = {"check", PythonOps<Device>::check, METH_O, nullptr};
template <class Device>
constexpr PyMethodDef kClipMethod = {"clip_", PythonOps<Device>::clip_, METH_VARARGS, nullptr};
template <class Device>
constexpr PyMethodDef kMeasureMethod = {"measure", PythonOps<Device>::measure, METH_VARARGS, nullptr};
template <class Device>
constexpr PyMethodDef kMeasureStepMethod = {"measure_step", PythonOps<Device>::measure_step, METH_VARARGS,
                                            nullptr};
template <class Device>
constexpr PyMethodDef kScaleMethod = {"scale_", PythonOps<Device>::scale_, METH_VARARGS, nullptr};
template <class Device>
constexpr PyMethodDef kScaleEachMethod = {"scale_each_", PythonOps<Device>::scale_each_, METH_VARARGS, nullptr};
template <class Device>
constexpr PyMethodDef kUnscaleMethod = {"unscale_", PythonOps<Device>::unscale_, METH_VARARGS, nullptr};
constexpr PyMethodDef kUseExchangeMethod = {"use_exchange", use_exchange, METH_VARARGS, nullptr};
constexpr PyMethodDef kFingerprintMethod = {"fingerprint", fingerprint, METH_NOARGS, nullptr};
constexpr PyMethodDef kEndOfMethods = {nullptr, nullptr, 0, nullptr};

}  // namespace gradstat
