// The operators as functions of a Python extension module, for lists of ordinary tensors: the path of `check`
// and `clip_grad_norm_` on every step. torch's dispatcher takes about 0.3 us per tensor of a list; reading the
// tensor through DLPack's C exchange interface takes a tenth of that. For any tensor that is not ordinary these
// functions do nothing and return None.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <chrono>
#include <cstring>
#include <memory>
#include <optional>
#include <thread>

#include "ops_impl.h"

namespace gradstat {

struct Decref {
  void operator()(PyObject* object) const { Py_DECREF(object); }
};
using Ref = std::unique_ptr<PyObject, Decref>;  // an owned reference

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
  // Where in a Python tensor the pointer to torch's tensor is, which is all that one of its C++ tensors holds.
  size_t pointer_at = 0;
  // DLPack raises an error for a sparse tensor, and torch needs half a millisecond to build its message. After
  // the first such error, each tensor is asked whether it is sparse, which takes 0.1 us.
  bool check_sparse_first = false;
};

inline Exchange& exchange() {
  static Exchange instance;
  return instance;
}

// The pointer to torch's tensor at an offset in a Python tensor.
inline void* pointer_in(PyObject* tensor, size_t offset) {
  void* pointer = nullptr;
  std::memcpy(&pointer, reinterpret_cast<const char*>(tensor) + offset, sizeof(pointer));
  return pointer;
}

// use_exchange(capsule, Tensor, Parameter, is_conj, is_neg, is_sparse, a tensor, its _cdata, size of a Python
// tensor) -> bool: whether this version of the interface is supported.
inline PyObject* use_exchange(PyObject*, PyObject* arguments) {
  PyObject *capsule = nullptr, *tensor = nullptr;
  Exchange torchs;
  unsigned long long address = 0;
  Py_ssize_t size = 0;
  if (!PyArg_ParseTuple(arguments, "OOOOOOOKn", &capsule, &torchs.tensor_type, &torchs.parameter_type,
                        &torchs.is_conj, &torchs.is_neg, &torchs.is_sparse, &tensor, &address, &size)) {
    return nullptr;
  }
  torchs.api = static_cast<const DLPackExchangeAPI*>(PyCapsule_GetPointer(capsule, "dlpack_exchange_api"));
  if (torchs.api == nullptr) return nullptr;
  if (torchs.api->header.version.major != DLPACK_MAJOR_VERSION ||
      torchs.api->dltensor_from_py_object_no_sync == nullptr) {
    Py_RETURN_FALSE;
  }
  const auto end = static_cast<size_t>(size) - sizeof(void*);
  torchs.pointer_at = sizeof(PyObject);
  while (reinterpret_cast<uintptr_t>(pointer_in(tensor, torchs.pointer_at)) != address) {
    torchs.pointer_at += sizeof(void*);
    if (torchs.pointer_at > end) Py_RETURN_FALSE;
  }
  for (PyObject* kept :
       {torchs.tensor_type, torchs.parameter_type, torchs.is_conj, torchs.is_neg, torchs.is_sparse}) {
    Py_INCREF(kept);
  }
  exchange() = torchs;
  Py_RETURN_TRUE;
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
    DLManagedTensorVersioned* made = nullptr;
    if (exchange().api->managed_tensor_allocator(&prototype, &made, nullptr, ignore_error) != 0) {
      throw UseDispatcher();
    }
    tensor_.reset(made);
    if (made->dl_tensor.data == nullptr) throw UseDispatcher();
  }

  void* data() const { return static_cast<char*>(tensor_->dl_tensor.data) + tensor_->dl_tensor.byte_offset; }

  Ref result() {
    void* object = nullptr;
    if (exchange().api->managed_tensor_to_py_object_no_sync(tensor_.release(), &object) != 0) {
      throw PythonError();
    }
    return Ref(static_cast<PyObject*>(object));
  }

 private:
  struct Delete {
    void operator()(DLManagedTensorVersioned* tensor) const { tensor->deleter(tensor); }
  };
  std::unique_ptr<DLManagedTensorVersioned, Delete> tensor_;
};

inline bool call_predicate(PyObject* method, PyObject* tensor) {
  return owned(PyObject_CallFunctionObjArgs(method, tensor, nullptr)).get() == Py_True;
}

// A plain tensor or parameter with memory on a device of this type; the dtype is not checked.
inline TypedView ordinary_view(PyObject* tensor, DLDeviceType device_type) {
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
  TypedView view{{}, dl.dtype};
  view.numel = 1;
  for (int32_t d = 0; d < dl.ndim; ++d) view.numel *= dl.shape[d];
  view.data = static_cast<char*>(dl.data) + dl.byte_offset;
  view.dims = dl.ndim;
  view.sizes = dl.shape;
  view.strides = dl.strides;
  view.device_index = dl.device.device_id;
  void* pointer = pointer_in(tensor, exchange().pointer_at);
  if (view.numel > 0 && !is_stored(reinterpret_cast<AtenTensorHandle>(&pointer), view)) throw UseDispatcher();
  // DLPack does not report lazily conjugated or negated tensors. A real tensor is lazily negated only as the
  // imaginary part of a conjugate: its elements are not adjacent then, and it is dense only with one element.
  const bool is_pair = dl.dtype.code == kDLComplex;
  if (is_pair && call_predicate(exchange().is_conj, tensor)) throw UseDispatcher();
  if ((is_pair || view.numel == 1) && call_predicate(exchange().is_neg, tensor)) throw UseDispatcher();
  return view;
}

template <class Device>
struct ReleasingGil : Device {
  template <class... Arguments>
  static void measure(const Arguments&... arguments) {
    const WithoutGil others_may_run;
    Device::measure(arguments...);
  }
  template <class... Arguments>
  static void scale(const Arguments&... arguments) {
    const WithoutGil others_may_run;
    Device::scale(arguments...);
  }
};

// Operations as Python calls them.
template <class OnDevice>
struct PythonCaller {
  using Device = ReleasingGil<OnDevice>;
  using Memory = NewTensor<OnDevice>;
  using Tensors = Ref;  // a new list, which keeps its tensors alive while the GIL is released
  using Argument = PyObject*;
  using Result = Ref;
  static constexpr int64_t kMultipliers = -1;  // at least one

  static TensorList list(const Tensors& tensors, Granularity granularity = Granularity::kTensors) {
    const Py_ssize_t size = PyList_Size(tensors.get());
    TensorList list(static_cast<size_t>(size), Device::type(), granularity);
    for (Py_ssize_t i = 0; i < size; ++i) {
      const TypedView view = ordinary_view(PyList_GetItem(tensors.get(), i), Device::kDLPackType);
      const ElementType* element = element_of(view.type);
      if (element == nullptr || list.add(view, *element) != nullptr) throw UseDispatcher();
    }
    return list;
  }

  static TypedView view(const Argument& argument, const char*) {
    return ordinary_view(argument, Device::kDLPackType);
  }

  template <class... Parts>
  static void require(bool holds, const Parts&...) {
    if (!holds) throw UseDispatcher();
  }

  static void read(PyObject* object, Tensors& tensors) {
    const Py_ssize_t size = PyList_Check(object) ? PyList_Size(object) : 0;
    if (size == 0) throw UseDispatcher();
    tensors = owned(PyList_GetSlice(object, 0, size));
  }
  static void read(PyObject* object, Argument& argument) { argument = object; }
  static void read(PyObject* object, std::optional<Argument>& argument) {
    if (object != Py_None) argument = object;
  }
  static void read(PyObject* object, double& number) {
    number = PyFloat_AsDouble(object);
    if (number == -1 && PyErr_Occurred() != nullptr) throw PythonError();
  }
  static void read(PyObject* object, int64_t& number) {
    number = PyLong_AsLongLong(object);
    if (number == -1 && PyErr_Occurred() != nullptr) throw PythonError();
  }
  template <class Number>
  static void read(PyObject* object, std::vector<Number>& numbers) {
    if (!PyList_Check(object) && !PyTuple_Check(object)) throw UseDispatcher();
    const Py_ssize_t size = PySequence_Size(object);
    numbers.resize(static_cast<size_t>(size));
    for (Py_ssize_t i = 0; i < size; ++i) read(owned(PySequence_GetItem(object, i)).get(), numbers[i]);
  }

  static Ref to_python(Ref tensor) { return tensor; }
  static Ref to_python(int64_t number) { return owned(PyLong_FromLongLong(number)); }
  template <class... Parts>
  static Ref to_python(std::tuple<Parts...> parts) {
    const auto pack = [](auto&... part) {
      return owned(PyTuple_Pack(sizeof...(part), to_python(std::move(part)).get()...));
    };
    return std::apply(pack, parts);
  }

  // An operation as a function of a Python module: returns its result, or True if it has none.
  template <auto operation>
  static PyObject* function(PyObject*, PyObject* arguments) {
    return called(operation, arguments);
  }

 private:
  template <class Out, class... In>
  static PyObject* called(Out (*operation)(In...), PyObject* arguments) {
    if (PyTuple_Size(arguments) != sizeof...(In)) {
      return PyErr_Format(PyExc_TypeError, "expected %zu arguments, got %zd", sizeof...(In),
                          PyTuple_Size(arguments));
    }
    return translating_exceptions([&]() -> PyObject* {
      if (exchange().api == nullptr) throw UseDispatcher();
      std::tuple<std::decay_t<In>...> values;
      Py_ssize_t i = 0;
      std::apply([&](auto&... each) { (read(PyTuple_GetItem(arguments, i++), each), ...); }, values);
      if constexpr (std::is_void_v<Out>) {
        std::apply(operation, values);
        Py_RETURN_TRUE;
      } else {
        return to_python(std::apply(operation, values)).release();
      }
    });
  }
};

inline PyObject* fingerprint(PyObject*, PyObject*) { return PyUnicode_FromString(GRADSTAT_FINGERPRINT); }

// Creates the extension module of a device: functions that all devices have, and its own ones.
template <class Device>
PyObject* make_module(const char* name, PyMethodDef* more) {
  using Caller = PythonCaller<Device>;
  using Do = Operations<Caller>;
#define GRADSTAT_FUNCTION(name, schema) {#name, Caller::template function<&Do::name>, METH_VARARGS, nullptr},
  static PyMethodDef methods[] = {{"fingerprint", fingerprint, METH_NOARGS, nullptr},
                                  {"use_exchange", use_exchange, METH_VARARGS, nullptr},
                                  GRADSTAT_OPERATORS(GRADSTAT_FUNCTION){nullptr, nullptr, 0, nullptr}};
#undef GRADSTAT_FUNCTION
  static PyModuleDef definition = {
      PyModuleDef_HEAD_INIT, name, nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};
  Ref module(PyModule_Create(&definition));
  if (!module || PyModule_AddFunctions(module.get(), more) != 0) return nullptr;
  return module.release();
}

}  // namespace gradstat
