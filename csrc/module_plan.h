// Finds parameters and their gradients without running Python code per parameter, for
// gradstat/_core/parameters.py, on every step.
#pragma once

#include <unordered_map>

#include "python_ops.h"

namespace gradstat {

// Where the parameters of a module are held, and the state this depends on: the keys and values of the
// dictionaries of parameters and submodules of the module and all its submodules. Holds modules by weak
// reference and values by address, so that it keeps no part of the model alive.
class ModulePlan {
 public:
  static constexpr const char* kName = "gradstat.ModulePlan";

  // `modules`: a list of weak references; `parameters`: the list to find. Returns false if a parameter is held
  // by none of the modules.
  bool remember(PyObject* modules, PyObject* parameters) {
    for (Py_ssize_t i = 0; i < PyList_Size(modules); ++i) {
      modules_.emplace_back(Py_NewRef(PyList_GetItem(modules, i)));
    }
    std::unordered_map<const void*, size_t> place;
    const bool are_there = visit([&](PyObject* key, PyObject* value) {
      place.emplace(value, values_.size());
      keys_.emplace_back(Py_NewRef(key));
      values_.push_back(value);
      return true;
    });
    if (!are_there) return false;
    for (Py_ssize_t i = 0; i < PyList_Size(parameters); ++i) {
      const auto position = place.find(PyList_GetItem(parameters, i));
      if (position == place.end()) return false;
      places_.push_back(position->second);
    }
    return true;
  }

  // Returns a new list of the current parameters; null without an error if the module was changed.
  //
  // An address that was freed and reused is not noticed. It can only be another parameter under the same name
  // in the same module, and the current values are returned.
  PyObject* parameters() const {
    std::vector<Ref> values;  // owned: reading a module's attributes may run arbitrary Python code
    values.reserve(values_.size());
    const bool same = visit([&](PyObject* key, PyObject* value) {
      const size_t i = values.size();
      if (i == values_.size() || key != keys_[i].get() || value != values_[i]) return false;
      values.emplace_back(Py_NewRef(value));
      return true;
    });
    if (!same || values.size() != values_.size()) return nullptr;
    Ref list = owned(PyList_New(static_cast<Py_ssize_t>(places_.size())));
    for (size_t i = 0; i < places_.size(); ++i) {
      PyList_SetItem(list.get(), static_cast<Py_ssize_t>(i), Py_NewRef(values[places_[i]].get()));
    }
    return list.release();
  }

 private:
  // Calls body(key, value) for all current items until it returns false; then, or if a module is gone, false.
  template <class Body>
  bool visit(const Body& body) const {
    static PyObject* const names[] = {PyUnicode_InternFromString("_parameters"),
                                      PyUnicode_InternFromString("_modules")};
    for (const Ref& reference : modules_) {
      PyObject* borrowed = PyWeakref_GetObject(reference.get());
      if (borrowed == nullptr) {
        PyErr_Clear();
        throw std::runtime_error("gradstat: expected weak references to modules");
      }
      if (borrowed == Py_None) return false;
      const Ref module(Py_NewRef(borrowed));
      for (PyObject* name : names) {
        const Ref dictionary = owned(PyObject_GetAttr(module.get(), name));
        if (!PyDict_Check(dictionary.get())) return false;
        PyObject *key = nullptr, *value = nullptr;
        Py_ssize_t position = 0;
        while (PyDict_Next(dictionary.get(), &position, &key, &value)) {
          if (!body(key, value)) return false;
        }
      }
    }
    return true;
  }

  std::vector<Ref> modules_;
  std::vector<Ref> keys_;
  std::vector<const void*> values_;
  std::vector<size_t> places_;
};

// make_plan(weak references to modules, parameters) -> plan | None
inline PyObject* make_plan(PyObject*, PyObject* arguments) {
  PyObject *modules = nullptr, *parameters = nullptr;
  if (!PyArg_ParseTuple(arguments, "OO", &modules, &parameters)) return nullptr;
  return translating_exceptions([&]() -> PyObject* {
    if (!PyList_Check(modules) || !PyList_Check(parameters)) {
      throw std::runtime_error("gradstat: expected a list of weak references to modules and one of parameters");
    }
    auto plan = std::make_unique<ModulePlan>();
    if (!plan->remember(modules, parameters)) Py_RETURN_NONE;
    const auto destroy = [](PyObject* capsule) {
      delete static_cast<ModulePlan*>(PyCapsule_GetPointer(capsule, ModulePlan::kName));
    };
    PyObject* capsule = PyCapsule_New(plan.get(), ModulePlan::kName, destroy);
    if (capsule != nullptr) plan.release();
    return capsule;
  });
}

// planned_parameters(plan) -> list | None
inline PyObject* planned_parameters(PyObject*, PyObject* capsule) {
  const auto* plan = static_cast<const ModulePlan*>(PyCapsule_GetPointer(capsule, ModulePlan::kName));
  if (plan == nullptr) return nullptr;
  return translating_exceptions([&]() -> PyObject* {
    PyObject* list = plan->parameters();
    if (list == nullptr) Py_RETURN_NONE;
    return list;
  });
}

// holds_exactly(param_groups, parameters) -> bool: whether the groups of an optimizer hold these parameters, in
// order
inline PyObject* holds_exactly(PyObject*, PyObject* arguments) {
  static PyObject* const params = PyUnicode_InternFromString("params");
  PyObject *groups = nullptr, *parameters = nullptr;
  if (!PyArg_ParseTuple(arguments, "OO", &groups, &parameters)) return nullptr;
  if (!PyList_Check(groups) || !PyList_Check(parameters)) Py_RETURN_FALSE;
  Py_ssize_t next = 0;
  const Py_ssize_t count = PyList_Size(parameters);
  for (Py_ssize_t g = 0; g < PyList_Size(groups); ++g) {
    PyObject* group = PyList_GetItem(groups, g);
    PyObject* members = PyDict_Check(group) ? PyDict_GetItemWithError(group, params) : nullptr;
    if (members == nullptr || !PyList_Check(members)) {
      if (PyErr_Occurred() != nullptr) return nullptr;
      Py_RETURN_FALSE;
    }
    for (Py_ssize_t i = 0; i < PyList_Size(members); ++i, ++next) {
      if (next == count || PyList_GetItem(members, i) != PyList_GetItem(parameters, next)) Py_RETURN_FALSE;
    }
  }
  return PyBool_FromLong(next == count);
}

inline Ref list_of_positions(const std::vector<Py_ssize_t>& positions) {
  Ref list = owned(PyList_New(static_cast<Py_ssize_t>(positions.size())));
  for (size_t i = 0; i < positions.size(); ++i) {
    PyList_SetItem(list.get(), static_cast<Py_ssize_t>(i), owned(PyLong_FromSsize_t(positions[i])).release());
  }
  return list;
}

// gradients_of(parameters) -> (gradients, positions of the parameters that have one, positions of those that
// require one but have none). Both positions are None if every parameter has one.
inline PyObject* gradients_of(PyObject*, PyObject* parameters) {
  static PyObject* const grad = PyUnicode_InternFromString("grad");
  static PyObject* const requires_grad = PyUnicode_InternFromString("requires_grad");
  return translating_exceptions([&]() -> PyObject* {
    if (!PyList_Check(parameters)) throw std::runtime_error("gradstat: expected a list of parameters");
    Ref gradients = owned(PyList_New(0));
    std::vector<Py_ssize_t> positions, missing;
    const Py_ssize_t size = PyList_Size(parameters);
    positions.reserve(static_cast<size_t>(size));
    for (Py_ssize_t i = 0; i < size; ++i) {
      PyObject* parameter = PyList_GetItem(parameters, i);  // null if the list was shortened in the meantime
      if (parameter == nullptr) throw PythonError();
      const Ref kept_alive(Py_NewRef(parameter));
      const Ref gradient = owned(PyObject_GetAttr(parameter, grad));
      if (gradient.get() != Py_None) {
        if (PyList_Append(gradients.get(), gradient.get()) != 0) throw PythonError();
        positions.push_back(i);
      } else if (owned(PyObject_GetAttr(parameter, requires_grad)).get() == Py_True) {
        missing.push_back(i);
      }
    }
    if (static_cast<Py_ssize_t>(positions.size()) == size) {
      return Py_BuildValue("(NOO)", gradients.release(), Py_None, Py_None);
    }
    Ref present = list_of_positions(positions), absent = list_of_positions(missing);
    return Py_BuildValue("(NNN)", gradients.release(), present.release(), absent.release());
  });
}

}  // namespace gradstat
