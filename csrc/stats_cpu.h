// The CPU loops over tensors: rows, scaling, and rows of quantization.
#pragma once

#include <cstdint>
#include <vector>

#include "entry.h"
#include "quantization.h"

namespace gradstat {

// Fills table[i] with the row of entries[i] and returns all rows merged. Parallel; the result does not depend
// on the number of threads. Elements are first multiplied by `factor` in place, unless it is 1; the rows are
// bitwise those of the products read back.
Row rows_cpu(const std::vector<Entry>& entries, Row* table, double factor = 1.0);

// Multiplies the elements of each entry by its multiplier, in float32 for types narrower than that. Entries
// whose multiplier is exactly 1 are not touched.
void scale_cpu(const std::vector<Entry>& entries, const Multipliers& multipliers);

// Fills table[i] with what entries[i], in blocks of shapes[i], would lose in a format. Parallel as rows_cpu.
// `largest`: the largest finite magnitude of each tensor, if the format needs it.
void quantize_cpu(const std::vector<Entry>& entries, const std::vector<BlockShape>& shapes,
                  const QuantizationFormat& format, const float* largest, QuantizationRow* table);

// The instruction set chosen for this machine, for `python -m gradstat info`.
const char* cpu_instructions();

}  // namespace gradstat
