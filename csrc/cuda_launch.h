// The host interface of the CUDA backend, without torch or CUDA headers, so that no compiler has to process
// both. All functions throw std::runtime_error with CUDA's message if a call fails. Only `has_arrived` can sync
// with the device. `stream` must belong to `device`.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "decide.h"

namespace gradstat {

// Loads all kernels; throws if the device or its driver cannot run them.
void load_all_kernels(int32_t device);

// Returns device memory for work on the current stream, kept until the process ends. ops_cuda.cpp defines it
// with torch's caching allocator, as CUDA has no memory left once torch has reserved all of it. Throws
// std::runtime_error naming `what`.
void* allocate_forever(size_t bytes, int32_t device, const char* what);

// Bytes of device memory that a launch needs, aligned to 8. The memory may be reused as soon as the launch is
// enqueued, for later work in the same stream.
int64_t stats_workspace_bytes(const std::vector<Entry>& entries, int32_t device);
int64_t scale_workspace_bytes(const std::vector<Entry>& entries, int32_t device);

// Writes the row of entries[i] to table[i], and the norm of all entries unless `norm` is null. One kernel. With
// a factor, elements are first multiplied by it, bitwise as by launch_scale; entries must not overlap then.
void launch_stats(const std::vector<Entry>& entries, Row* table, const NormRequest* norm, const float* factor,
                  void* workspace, int32_t device, void* stream);

// Multiplies the elements of each entry by its multiplier. One kernel, which does not touch entries whose
// multiplier is exactly 1. Entries must not overlap.
void launch_scale(const std::vector<Entry>& entries, const Multipliers& multipliers, void* workspace,
                  int32_t device, void* stream);

// Decides about a step and updates the state. One kernel of one block.
void launch_decide(const ClipRequest& request, int32_t device, void* stream);
void launch_decide(const GuardRequest& request, int32_t device, void* stream);

// Pinned memory that a stream keeps for copies to the host. A slot that is released is free for its next copy.
// Releasing takes no lock and calls nothing, as a forked process or one that ends does it, too.
struct Slot {
  void* memory = nullptr;
  size_t bytes = 0;  // of the last copy
};
struct ReleaseSlot {
  void operator()(Slot* slot) const;
};
using HeldSlot = std::unique_ptr<Slot, ReleaseSlot>;

// Enqueues a copy into a slot. Null during graph capture, when there are no numbers yet.
HeldSlot copy_to_host(const void* from, size_t bytes, int32_t device, void* stream);
// Whether the copy is done; with `wait`, once it is.
bool has_arrived(const Slot& slot, bool wait);

}  // namespace gradstat
