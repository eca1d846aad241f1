// The operators as functions of a Python extension module, for lists of ordinary tensors: the path of `check`
// and `clip_grad_norm_` on every step. torch's dispatcher takes about 0.3 us per tensor of a list; reading the
// tensor through DLPack's C exchange interface takes a tenth of that. For any tensor that is not ordinary these
// functions do nothing and return None.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <chrono>
#include <optional>
#include <thread>

#include "ops_impl.h"

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

// Thrown when Python's error indicator is set.
struct PythonError {};

// Takes ownership of a new reference, as returned by Python's functions; null becomes PythonError.
inline Ref owned(PyObject* object) {
  if (object == nullptr) throw PythonError();
  return Ref(object);
}

// Thrown when this path does not support the arguments; nothing has been done then.
struct UseDispatcher {};

// Turns C++ exceptions into Python's: none may leave a function that Python calls.
template <class Body>
PyObject* translating_exceptions(const Body& body) {
  try {
    return body();
  } catch (const UseDispatcher&) {
    Py_RETURN_NONE;
  } catch (const PythonError&) {
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

// Releases the GIL while in scope. If the interpreter is finalized in the meantime, up to Python 3.13
// reacquiring the GIL in a daemon thread unwinds the stack, whose destructors need the GIL. Hence the thread
// blocks here, which is what Python itself does since 3.14.
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

// torch's types, methods and DLPack interface, as passed to use_exchange.
struct Exchange {
  const DLPackExchangeAPI* api = nullptr;
  PyObject* tensor_type = nullptr;
  PyObject* parameter_type = nullptr;
  PyObject* is_conj = nullptr;
  PyObject* is_neg = nullptr;
  PyObject* is_sparse = nullptr;
  // DLPack raises an error for a sparse tensor, whose message takes torch half a millisecond to build. Once
  // that has happened, tensors are asked first, at 0.1 us each.
  bool check_sparse_first = false;
};

inline Exchange& exchange() {
  static Exchange instance;
  return instance;
}

// use_exchange(capsule, Tensor, Parameter, is_conj, is_neg, is_sparse) -> bool: whether this version of the
// interface is supported.
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

inline ElementType element_of(DLDataType type) {
  for (const KnownType& known : kKnownTypes) {
    if (known.code == type.code && known.bits == type.bits && type.lanes == 1) return known.element;
  }
  throw UseDispatcher();
}

// New memory from torch's allocator, which becomes a Python tensor or is freed. Throws UseDispatcher if torch
// currently wraps new tensors: in torch.func transforms and in FakeTensorMode.
template <class Device>
class NewTensor {
 public:
  NewTensor(std::initializer_list<int64_t> sizes, DType dtype, int32_t device_index) {
    DLTensor prototype{};
    prototype.device = {Device::kDLPackType, device_index};
    prototype.ndim = static_cast<int32_t>(sizes.size());
    prototype.dtype = {known_type(dtype).code, known_type(dtype).bits, 1};
    prototype.shape = const_cast<int64_t*>(sizes.begin());
    // On out-of-memory, fall back to the dispatcher, which reports it.
    const auto ignore_error = [](void*, const char*, const char*) {};
    if (exchange().api->managed_tensor_allocator(&prototype, &tensor_, nullptr, ignore_error) != 0) {
      throw UseDispatcher();
    }
    if (tensor_->dl_tensor.data == nullptr) {
      tensor_->deleter(tensor_);
      throw UseDispatcher();
    }
  }
  NewTensor(NewTensor&& other) noexcept : tensor_(std::exchange(other.tensor_, nullptr)) {}
  NewTensor(const NewTensor&) = delete;
  NewTensor& operator=(const NewTensor&) = delete;
  ~NewTensor() {
    if (tensor_ != nullptr) tensor_->deleter(tensor_);
  }

  void* data() const { return static_cast<char*>(tensor_->dl_tensor.data) + tensor_->dl_tensor.byte_offset; }

  Ref to_python() {
    void* object = nullptr;
    if (exchange().api->managed_tensor_to_py_object_no_sync(std::exchange(tensor_, nullptr), &object) != 0) {
      throw PythonError();
    }
    return Ref(static_cast<PyObject*>(object));
  }

 private:
  DLManagedTensorVersioned* tensor_ = nullptr;
};

inline bool call_predicate(PyObject* method, PyObject* tensor) {
  return owned(PyObject_CallFunctionObjArgs(method, tensor, nullptr)).get() == Py_True;
}

// A plain tensor or parameter with memory on a device of this type, and its dtype, which is not checked.
inline std::pair<TensorView, DLDataType> ordinary_view(PyObject* tensor, DLDeviceType device_type) {
  const auto* type = reinterpret_cast<PyObject*>(Py_TYPE(tensor));
  if (type != exchange().tensor_type && type != exchange().parameter_type) throw UseDispatcher();
  if (exchange().check_sparse_first && call_predicate(exchange().is_sparse, tensor)) throw UseDispatcher();
  DLTensor dl;
  if (exchange().api->dltensor_from_py_object_no_sync(tensor, &dl) != 0) {
    PyErr_Clear();
    exchange().check_sparse_first = true;
    throw UseDispatcher();
  }
  if (dl.device.device_type != device_type || dl.strides == nullptr) throw UseDispatcher();
  TensorView view{};
  view.numel = 1;
  for (int32_t d = 0; d < dl.ndim; ++d) view.numel *= dl.shape[d];
  view.data = static_cast<char*>(dl.data) + dl.byte_offset;
  view.dims = dl.ndim;
  view.sizes = dl.shape;
  view.strides = dl.strides;
  view.device_index = dl.device.device_id;
  // ZeroTensors, which have no memory, and views at an offset into storage that was freed. No process is given
  // addresses this low.
  constexpr uintptr_t kLowest = 1 << 22;
  if (view.numel > 0 && reinterpret_cast<uintptr_t>(view.data) < kLowest) throw UseDispatcher();
  // DLPack does not report lazily conjugated or negated tensors. A real tensor is lazily negated only as the
  // imaginary part of a conjugate: its elements are not adjacent then, and it is dense only with one element.
  const bool is_pair = dl.dtype.code == kDLComplex;
  if (is_pair && call_predicate(exchange().is_conj, tensor)) throw UseDispatcher();
  if ((is_pair || view.numel == 1) && call_predicate(exchange().is_neg, tensor)) throw UseDispatcher();
  return {view, dl.dtype};
}

// A device that releases the GIL while it works.
template <class Device>
struct ReleasingGil : Device {
  static void measure(const TensorList& list, Row* table, const NormRequest* norm, const float* factor) {
    const WithoutGil others_may_run;
    Device::measure(list, table, norm, factor);
  }
  static void scale(const std::vector<Entry>& entries, int32_t device_index, const Coefficients& coefficients) {
    const WithoutGil others_may_run;
    Device::scale(entries, device_index, coefficients);
  }
  static void update(const std::vector<UpdateEntry>& entries, int32_t device_index,
                     const UpdateCoefficients<double>* coefficients, UpdateSums<double>* table) {
    const WithoutGil others_may_run;
    Device::update(entries, device_index, coefficients, table);
  }
};

template <class Device>
struct PythonOps {
  using Impl = Operations<ReleasingGil<Device>, NewTensor<Device>>;

  // A list that can be read in place, and references that keep its tensors alive while the GIL is released.
  struct HeldList {
    Ref tensors;
    TensorList list;
  };

  static HeldList held_list(PyObject* tensors) {
    const Py_ssize_t size = exchange().api != nullptr && PyList_Check(tensors) ? PyList_Size(tensors) : 0;
    if (size == 0) throw UseDispatcher();
    HeldList held{owned(PyList_GetSlice(tensors, 0, size)),
                  TensorList(static_cast<size_t>(size), Device::type())};
    for (Py_ssize_t i = 0; i < size; ++i) {
      auto [view, type] = ordinary_view(PyList_GetItem(held.tensors.get(), i), Device::kDLPackType);
      view.element = element_of(type);
      if (held.list.add(view) != nullptr) throw UseDispatcher();
    }
    return held;
  }

  // Calls body(list) with the tensors of the first argument; the rest of `format` is parsed into `others`.
  template <class Body, class... Others>
  static PyObject* with_list(const Body& body, PyObject* arguments, const char* format, Others*... others) {
    PyObject* tensors = nullptr;
    if (!PyArg_ParseTuple(arguments, format, &tensors, others...)) return nullptr;
    return translating_exceptions([&] { return body(held_list(tensors).list); });
  }

  // check(tensors) -> (table, signature) | None
  static PyObject* check(PyObject*, PyObject* tensors) {
    return translating_exceptions([&] {
      const HeldList held = held_list(tensors);
      return with_signature(Impl::check(held.list), held.list);
    });
  }

  // unscale_(tensors, factor) -> (table, signature) | None, the latter also if a tensor is listed twice.
  static PyObject* unscale_(PyObject*, PyObject* arguments) {
    PyObject* factor = nullptr;
    const auto body = [&](const TensorList& list) {
      if (has_repeated(list.entries())) throw UseDispatcher();
      return with_signature(Impl::check(list, numbers_of<float>(factor, 1, list.device_index())), list);
    };
    return with_list(body, arguments, "OO", &factor);
  }

  // clip_(tensors, max_norm, norm_type) -> norm | None
  static PyObject* clip_(PyObject*, PyObject* arguments) {
    double max_norm = 0, norm_type = 0;
    const auto body = [&](const TensorList& list) {
      return Impl::clip(list, max_norm, norm_type).to_python().release();
    };
    return with_list(body, arguments, "Odd", &max_norm, &norm_type);
  }

  // measure(tensors, max_norm, norm_type) -> (norm, memory that starts with the coefficient) | None
  static PyObject* measure(PyObject*, PyObject* arguments) {
    double max_norm = 0, norm_type = 0;
    const auto body = [&](const TensorList& list) {
      auto [norm, memory] = Impl::measure(list, max_norm, norm_type);
      Ref made[] = {norm.to_python(), memory.to_python()};
      return Py_BuildValue("(NN)", made[0].release(), made[1].release());
    };
    return with_list(body, arguments, "Odd", &max_norm, &norm_type);
  }

  // measure_step(tensors, max_norm, norm_type, loss_scale | None, counters | None)
  //   -> (table, signature, norm, coefficient_and_norm, verdict) | None
  static PyObject* measure_step(PyObject*, PyObject* arguments) {
    PyObject *loss_scale = nullptr, *counters = nullptr;
    double max_norm = 0, norm_type = 0;
    const auto body = [&](const TensorList& list) {
      const int32_t device = list.device_index();
      auto [table, norm, coefficient_and_norm, verdict] = Impl::measure_step(
          list, max_norm, norm_type, loss_scale != Py_None ? numbers_of<float>(loss_scale, 1, device) : nullptr,
          counters != Py_None ? numbers_of<int64_t>(counters, kCounters, device) : nullptr);
      Ref made[] = {table.to_python(), norm.to_python(), coefficient_and_norm.to_python(), verdict.to_python()};
      return Py_BuildValue("(NLNNN)", made[0].release(), static_cast<long long>(list.signature()),
                           made[1].release(), made[2].release(), made[3].release());
    };
    return with_list(body, arguments, "OddOO", &max_norm, &norm_type, &loss_scale, &counters);
  }

  // update_sums(operands, list of rules, coefficients) -> table | None
  static PyObject* update_sums(PyObject*, PyObject* arguments) {
    PyObject *rules = nullptr, *coefficients = nullptr;
    const auto body = [&](const TensorList& list) {
      if (!PyList_Check(rules)) throw UseDispatcher();
      std::vector<int64_t> numbers(PyList_Size(rules));
      for (size_t i = 0; i < numbers.size(); ++i) {
        numbers[i] = PyLong_AsLong(PyList_GetItem(rules, static_cast<Py_ssize_t>(i)));
        if (numbers[i] == -1 && PyErr_Occurred() != nullptr) throw PythonError();
      }
      const auto count = static_cast<int64_t>(numbers.size()) * kUpdateCoefficients;
      return Impl::update_sums(list, numbers, numbers_of<double>(coefficients, count, list.device_index()))
          .to_python()
          .release();
    };
    return with_list(body, arguments, "OOO", &rules, &coefficients);
  }

  // guard_(options, state, window, coefficient_and_norm, verdict, loss | None, update | None, counters | None)
  //   -> verdict | None
  static PyObject* guard_(PyObject*, PyObject* arguments) {
    GuardRequest request{};
    auto& [by_sigmas, threshold, warmup, most_in_a_row, scale, limits] = request.options;
    PyObject *state = nullptr, *coefficient_and_norm = nullptr, *verdict = nullptr;
    PyObject *loss = nullptr, *update = nullptr, *counters = nullptr;
    long long window = 0;
    if (!PyArg_ParseTuple(arguments, "(dddddddd)OLOOOOO", &by_sigmas, &threshold, &warmup, &most_in_a_row,
                          &scale, &limits[0], &limits[1], &limits[2], &state, &window, &coefficient_and_norm,
                          &verdict, &loss, &update, &counters)) {
      return nullptr;
    }
    return translating_exceptions([&] {
      if (exchange().api == nullptr || window <= 0 || window > kMostWindow) throw UseDispatcher();
      const int32_t device = ordinary_view(state, Device::kDLPackType).first.device_index;
      request.state = numbers_of<double>(state, kGuardTotals + kGuarded * window, device);
      request.window = window;
      request.coefficient_and_norm = numbers_of<double>(coefficient_and_norm, 2, device);
      request.verdict = numbers_of<float>(verdict, kVerdict, device);
      request.loss = number_of(loss, request.dtypes[0], device);
      request.update = number_of(update, request.dtypes[2], device);
      if (counters != Py_None) request.counters = numbers_of<int64_t>(counters, kCounters, device);
      return Impl::guard(request, device).to_python().release();
    });
  }

  // scale_(tensors, memory that starts with the coefficient) -> True | None
  static PyObject* scale_(PyObject*, PyObject* arguments) { return scaled(arguments, 0); }

  // scale_each_(tensors, coefficients) -> True | None
  static PyObject* scale_each_(PyObject*, PyObject* arguments) { return scaled(arguments, 1); }

 private:
  static PyObject* scaled(PyObject* arguments, int64_t stride) {
    PyObject* coefficients = nullptr;
    const auto body = [&](const TensorList& list) -> PyObject* {
      const int64_t count = stride == 0 ? kAtLeastOne : list.size();
      const double* by = numbers_of<double>(coefficients, count, list.device_index());
      scale_list<ReleasingGil<Device>>(list, {by, stride});
      Py_RETURN_TRUE;
    };
    return with_list(body, arguments, "OO", &coefficients);
  }

  // The data of a contiguous tensor with `count` numbers on the given device.
  static constexpr int64_t kAtLeastOne = -1;
  template <class Number>
  static Number* numbers_of(PyObject* tensor, int64_t count, int32_t device_index) {
    const auto [view, type] = ordinary_view(tensor, Device::kDLPackType);
    const auto code = std::is_integral_v<Number> ? kDLInt : kDLFloat;
    const bool is_enough = count == kAtLeastOne ? view.numel > 0 : view.numel == count;
    if (type.code != code || type.bits != 8 * sizeof(Number) || type.lanes != 1 || !is_enough ||
        !is_row_major(view) || view.device_index != device_index) {
      throw UseDispatcher();
    }
    return static_cast<Number*>(view.data);
  }

  // The data of a tensor with one real number on the given device, and its dtype; null for None.
  static const void* number_of(PyObject* tensor, DType& dtype, int32_t device_index) {
    if (tensor == Py_None) return nullptr;
    const auto [view, type] = ordinary_view(tensor, Device::kDLPackType);
    const ElementType element = element_of(type);
    if (element.is_pair || view.numel != 1 || view.device_index != device_index) throw UseDispatcher();
    dtype = element.dtype;
    return view.data;
  }

  static PyObject* with_signature(NewTensor<Device> table, const TensorList& list) {
    return Py_BuildValue("(NL)", table.to_python().release(), static_cast<long long>(list.signature()));
  }
};

inline PyObject* fingerprint(PyObject*, PyObject*) { return PyUnicode_FromString(GRADSTAT_FINGERPRINT); }

// Creates the extension module of a device: functions that all devices have, and its `own`.
template <class Device>
PyObject* make_module(const char* name, PyMethodDef* own) {
  using Methods = PythonOps<Device>;
  static PyMethodDef methods[] = {{"fingerprint", fingerprint, METH_NOARGS, nullptr},
                                  {"use_exchange", use_exchange, METH_VARARGS, nullptr},
                                  {"check", Methods::check, METH_O, nullptr},
                                  {"clip_", Methods::clip_, METH_VARARGS, nullptr},
                                  {"guard_", Methods::guard_, METH_VARARGS, nullptr},
                                  {"measure", Methods::measure, METH_VARARGS, nullptr},
                                  {"measure_step", Methods::measure_step, METH_VARARGS, nullptr},
                                  {"scale_", Methods::scale_, METH_VARARGS, nullptr},
                                  {"scale_each_", Methods::scale_each_, METH_VARARGS, nullptr},
                                  {"unscale_", Methods::unscale_, METH_VARARGS, nullptr},
                                  {"update_sums", Methods::update_sums, METH_VARARGS, nullptr},
                                  {nullptr, nullptr, 0, nullptr}};
  static PyModuleDef definition = {
      PyModuleDef_HEAD_INIT, name, nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};
  Ref module(PyModule_Create(&definition));
  if (!module || PyModule_AddFunctions(module.get(), own) != 0) return nullptr;
  return module.release();
}

}  // namespace gradstat
