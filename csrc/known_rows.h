// Rows that were measured while backward made the gradients (gradstat/in_backward.py), for as long as they
// hold: until a gradient is another tensor, has other memory, another version, or other values where they are
// looked at.
#pragma once

#include <algorithm>
#include <cstring>
#include <iterator>
#include <unordered_map>
#include <vector>

#include "python_ref.h"
#include "tensor_list.h"

namespace gradstat {

// Of tensors on the CPU. All functions need Python's lock.
class KnownRows {
 public:
  static KnownRows& all() {
    static auto& rows = *new KnownRows;  // never destroyed, for Python ends before static objects do
    return rows;
  }

  // What tells later whether a tensor is still as it was.
  struct State {
    Ref tensor;  // a weak reference
    int64_t version;
    Entry entry;
    uint64_t sample;
  };

  // The states of a list of tensors, with memory as in `entries`.
  static std::vector<State> states_of(PyObject* tensors, const std::vector<Entry>& entries) {
    std::vector<State> states;
    for (size_t i = 0; i < entries.size(); ++i) {
      PyObject* tensor = PyList_GetItem(tensors, static_cast<Py_ssize_t>(i));
      states.push_back(
          {owned(PyWeakref_NewRef(tensor, nullptr)), version_of(tensor), entries[i], sample_of(entries[i])});
    }
    return states;
  }

  void add(std::vector<State> states, const std::vector<Row>& rows) {
    if (rows_.size() >= sweep_at_) {
      for (auto it = rows_.begin(); it != rows_.end();) {
        it = referent(it->second.state) == it->first ? std::next(it) : rows_.erase(it);
      }
      sweep_at_ = 2 * rows_.size() + kSweep;
    }
    for (size_t i = 0; i < states.size(); ++i) {
      PyObject* tensor = referent(states[i]);
      if (states[i].version != kNoVersion) rows_.insert_or_assign(tensor, Known{std::move(states[i]), rows[i]});
    }
  }

  // The rows that are known of a list of tensors, with memory as in `entries`.
  std::vector<KnownRow> of(PyObject* tensors, const std::vector<Entry>& entries) {
    std::vector<KnownRow> found;
    for (size_t i = 0; i < entries.size() && !rows_.empty(); ++i) {
      PyObject* tensor = PyList_GetItem(tensors, static_cast<Py_ssize_t>(i));
      const int64_t version = version_of(tensor);  // may run Python code, so before anything is looked up
      const auto known = rows_.find(tensor);
      if (known == rows_.end()) continue;
      const State& then = known->second.state;
      if (referent(then) != tensor || then.version != version || !is_same(then.entry, entries[i])) {
        rows_.erase(known);
      } else if (then.sample != sample_of(entries[i])) {
        // Somebody writes past versions, as torch's loss scaler does on the CPU, and rarely to one tensor
        // alone.
        rows_.clear();
        return {};
      } else {
        found.push_back({i, known->second.row});
      }
    }
    return found;
  }

  void forget() { rows_.clear(); }

 private:
  struct Known {
    State state;
    Row row;
  };

  static PyObject* referent(const State& state) { return PyWeakref_GetObject(state.tensor.get()); }

  static bool is_same(const Entry& a, const Entry& b) {
    return a.data == b.data && a.numel == b.numel && a.dtype == b.dtype && a.is_pair == b.is_pair;
  }

  // How often torch's operations have changed a tensor in place; tensors made in inference mode do not count.
  static int64_t version_of(PyObject* tensor) {
    static PyObject* const name = PyUnicode_InternFromString("_version");
    const Ref version(PyObject_GetAttr(tensor, name));
    const int64_t number = version ? PyLong_AsLongLong(version.get()) : kNoVersion;
    if (number == kNoVersion) PyErr_Clear();
    return number;
  }

  // A hash of some values from all over the memory, bit by bit.
  static uint64_t sample_of(const Entry& entry) {
    const int64_t values = entry.values(), samples = std::min(values, kSamples);
    const int64_t size = size_of(entry.dtype);
    uint64_t hash = 0;
    for (int64_t i = 0; i < samples; ++i) {
      uint64_t bits = 0;
      std::memcpy(&bits, static_cast<const char*>(entry.data) + i * (values / samples) * size, size);
      hash = mix(hash, bits);
    }
    return hash;
  }

  static constexpr int64_t kNoVersion = -1, kSamples = 16;
  static constexpr size_t kSweep = 256;
  std::unordered_map<PyObject*, Known> rows_;
  size_t sweep_at_ = kSweep;
};

}  // namespace gradstat
