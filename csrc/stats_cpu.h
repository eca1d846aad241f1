// The CPU traversals: rows of many tensors, and scaling of many tensors by one number.
#pragma once

#include <cstdint>
#include <vector>

#include "entry.h"
#include "stat.h"

namespace gradstat {

// Fills table[i] with the row of entries[i] and returns the merge of them all. Parallel; the result does
// not depend on the number of threads.
Row rows_cpu(const std::vector<Entry>& entries, Row* table);

// Multiplies every element by `coefficient`, in float32 for types narrower than that.
void scale_cpu(const std::vector<Entry>& entries, double coefficient);

// Writes `value` as one element of `dtype`, rounded to nearest even.
void write_norm_cpu(double value, DType dtype, void* out);

// The instruction set chosen for this machine, for `python -m gradstat info`.
const char* cpu_instructions();

}  // namespace gradstat
