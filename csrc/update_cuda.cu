// Launches the update kernel and the kernel that merges its slots.
#include "cuda_launch.h"
#include "launch_state.h"
#include "update_cuda.cuh"

namespace gradstat {
namespace {

uint32_t chunks_of(const std::vector<UpdateEntry>& entries) {
  uint64_t chunks = 0;
  for (const UpdateEntry& entry : entries) chunks += (entry.numel() + kUpdateChunk - 1) / kUpdateChunk;
  if (chunks > INT32_MAX) throw std::runtime_error("gradstat: more than 2^45 parameter elements in one call");
  return static_cast<uint32_t>(chunks);
}

size_t places_bytes(const std::vector<UpdateEntry>& entries) {
  return entries.size() * sizeof(UpdatePlace) + (chunks_of(entries) + 1) / 2 * 2 * sizeof(uint32_t);
}

}  // namespace

void load_update_kernels() {
  load_kernels(
      {reinterpret_cast<const void*>(update_kernel), reinterpret_cast<const void*>(update_merge_kernel)});
}

int64_t update_workspace_bytes(const std::vector<UpdateEntry>& entries) {
  return static_cast<int64_t>(chunks_of(entries) * sizeof(UpdateSums<double>) + places_bytes(entries));
}

void launch_update(const std::vector<UpdateEntry>& entries, const UpdateCoefficients<double>* coefficients,
                   UpdateSums<double>* table, void* workspace, int32_t device, void* stream_pointer) {
  if (entries.empty()) return;
  const OnDevice on_device(device);
  load_all_kernels(device);
  const auto stream = static_cast<cudaStream_t>(stream_pointer);
  const uint32_t chunks = chunks_of(entries), count = static_cast<uint32_t>(entries.size());
  std::vector<uint64_t> words(places_bytes(entries) / sizeof(uint64_t));
  auto* places = reinterpret_cast<UpdatePlace*>(words.data());
  auto* tensors = reinterpret_cast<uint32_t*>(places + count);
  uint32_t chunk = 0;
  for (uint32_t i = 0; i < count; ++i) {
    const UpdatePlace place = update_place(entries[i], chunk);
    std::memcpy(places + i, &place, sizeof(place));
    for (const uint32_t end = chunk + place.chunks(); chunk < end; ++chunk) tensors[chunk] = i;
  }
  auto* slots = static_cast<UpdateSums<double>*>(workspace);
  const Uploaded uploaded = upload(words, slots + chunks, device, stream);
  const auto* on_gpu = static_cast<const UpdatePlace*>(uploaded.memory);
  const UpdateArguments arguments{
      on_gpu, reinterpret_cast<const uint32_t*>(on_gpu + count), coefficients, slots, table, count};
  if (chunks > 0) launch(update_kernel, chunks, stream, "launching the update kernel", arguments);
  launch(update_merge_kernel, (count + kWarps - 1) / kWarps, stream, "launching the update merge kernel",
         arguments);
}

}  // namespace gradstat
