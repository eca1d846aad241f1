// The CPU traversals: rows of many tensors, and scaling of many tensors.
#pragma once

#include <cstdint>
#include <vector>

#include "entry.h"
#include "stat.h"
#include "update.h"

namespace gradstat {

// Fills table[i] with the row of entries[i] and returns the merge of them all. Parallel; the result does
// not depend on the number of threads. Elements are multiplied by `factor` in place first, unless it is 1; the
// rows are those of the products, with the same bits as if they had been read later.
Row rows_cpu(const std::vector<Entry>& entries, Row* table, double factor = 1.0);

// Multiplies every element of an entry by its coefficient, in float32 for types narrower than that. Entries
// with a coefficient of exactly 1 are not touched.
void scale_cpu(const std::vector<Entry>& entries, const Coefficients& coefficients);

// Fills table[i] with the sums of entries[i], by its coefficients; as rows_cpu otherwise.
void update_cpu(const std::vector<UpdateEntry>& entries, const UpdateCoefficients<double>* coefficients,
                UpdateSums<double>* table);

// The instruction set chosen for this machine, for `python -m gradstat info`.
const char* cpu_instructions();

}  // namespace gradstat
