// The CUDA backend as the host sees it: no torch and no CUDA headers, so that the two need not meet in one
// compiler. All of it throws std::runtime_error with CUDA's message when a call fails, and nothing here ever
// waits for the device. The device `device` must be current, and `stream` be one of its streams.
#pragma once

#include <cstdint>
#include <vector>

#include "decide.h"
#include "entry.h"
#include "stat.h"
#include "update.h"

namespace gradstat {

// Bytes of device memory a launch needs for itself, aligned to 8. It may be reused as soon as the launch is
// enqueued, for work later in the same stream.
int64_t stats_workspace_bytes(const std::vector<Entry>& entries, int32_t device);
int64_t scale_workspace_bytes(const std::vector<Entry>& entries, int32_t device);

// Writes table[i] = row of entries[i], and the norm of all unless that is null. One kernel. With a factor it
// multiplies every element by that first, with the bits of launch_scale before; then no two entries may
// overlap.
void launch_stats(const std::vector<Entry>& entries, Row* table, const NormRequest* norm, const float* factor,
                  void* workspace, int32_t device, void* stream);

// Multiplies every element of an entry by its coefficient. One kernel, which touches nothing whose coefficient
// is exactly 1. No two entries may overlap. Say that it `follows_stats` only if nothing was enqueued on the
// stream since launch_stats but other calls of this: it may then start while those are still running.
void launch_scale(const std::vector<Entry>& entries, const Coefficients& coefficients, bool follows_stats,
                  void* workspace, int32_t device, void* stream);

// Decides about a step and remembers it. One kernel of one block.
void launch_decide(const ClipRequest& request, int32_t device, void* stream);
void launch_guard(const GuardRequest& request, int32_t device, void* stream);

int64_t update_workspace_bytes(const std::vector<UpdateEntry>& entries);
// Writes table[i] = sums of entries[i], by its coefficients on the device. Two kernels.
void launch_update(const std::vector<UpdateEntry>& entries, const UpdateCoefficients<double>* coefficients,
                   UpdateSums<double>* table, void* workspace, int32_t device, void* stream);

}  // namespace gradstat
