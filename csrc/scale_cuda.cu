// Launches the scale kernel.
#include "cuda_launch.h"
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

}  // namespace gradstat
