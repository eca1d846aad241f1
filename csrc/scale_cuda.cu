// Launches the scale kernel.
#include "cuda_launch.h"
#include "launch_state.h"
#include "scale_cuda.cuh"

namespace gradstat {

LoadedKernels load_scale_kernels() { return load_kernels({GRADSTAT_FOR_EVERY_TABLE(scale_kernel)}); }

int64_t scale_workspace_bytes(const std::vector<Entry>& entries, int32_t device) {
  if (entries.size() <= kLargeTable) return 0;
  return static_cast<int64_t>(table_bytes(entries.size(), partition_for(entries, device)));
}

void launch_scale(const std::vector<Entry>& entries, const Coefficients& coefficients, bool follows_stats,
                  void* workspace, int32_t device, void* stream_pointer) {
  if (entries.empty()) return;
  const OnDevice on_device(device);
  const auto stream = static_cast<cudaStream_t>(stream_pointer);
  const Partition partition = partition_for(entries, device);
  const ScaleArguments arguments{partition, coefficients};
  // No overlap in captured graphs, whose programmatic dependencies older drivers and tools do not support, nor
  // after the upload of a table, which is not a kernel.
#if defined(GRADSTAT_WITHOUT_OVERLAP)  // benchmarks/gpu_variants.py
  follows_stats = false;
#endif
  const bool overlaps = follows_stats && device_info(device).can_overlap && !is_capturing(stream);
  with_table<GRADSTAT_TABLE_SIZES>(entries, partition, workspace, device, stream, [&](const auto& table) {
    using Table = std::decay_t<decltype(table)>;
    constexpr bool kInParameters = !std::is_same_v<Table, DeviceTable>;
    launch(scale_kernel<Table>, blocks_for(partition, device), stream, overlaps && kInParameters,
           "launching the scale kernel", table, arguments);
  });
}

}  // namespace gradstat
