// Launches the scale kernel, and the kernels that decide about a step.
#include "cuda_launch.h"
#include "decide_cuda.cuh"
#include "launch_state.h"
#include "scale_cuda.cuh"

namespace gradstat {

int32_t load_scale_kernels() { return load_kernels({GRADSTAT_FOR_EVERY_TABLE(scale_kernel)}); }

int64_t scale_workspace_bytes(const std::vector<Entry>& entries, int32_t device) {
  if (entries.size() <= kParameterEntries) return 0;
  return static_cast<int64_t>(table_bytes(entries.size(), partition_for(entries, device)));
}

void launch_scale(const std::vector<Entry>& entries, const Multipliers& multipliers, void* workspace,
                  int32_t device, void* stream_pointer) {
  if (entries.empty()) return;
  const OnDevice on_device(device);
  const auto stream = static_cast<cudaStream_t>(stream_pointer);
  const Partition partition = partition_for(entries, device);
  const ScaleArguments arguments{partition, multipliers};
  with_table(entries, partition, workspace, device, stream, [&](const auto& table) {
    launch(scale_kernel<std::decay_t<decltype(table)>>, partition.ranges, stream, "launching the scale kernel",
           table, arguments);
  });
}

void load_decide_kernels() {
  load_kernels(
      {reinterpret_cast<const void*>(decide_clip_kernel), reinterpret_cast<const void*>(guard_kernel)});
}

void launch_decide(const ClipRequest& request, int32_t device, void* stream) {
  const OnDevice on_device(device);
  launch(decide_clip_kernel, 1, static_cast<cudaStream_t>(stream), "launching the clip decision kernel",
         request);
}

void launch_decide(const GuardRequest& request, int32_t device, void* stream) {
  const OnDevice on_device(device);
  launch(guard_kernel, 1, static_cast<cudaStream_t>(stream), "launching the guard kernel", request);
}

}  // namespace gradstat
