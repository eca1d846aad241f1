// Launches the scale kernel.
#include "cuda_launch.h"
#include "launch_state.h"
#include "scale_cuda.cuh"

namespace gradstat {

int64_t scale_workspace_bytes(const std::vector<Entry>& entries, int32_t) {
  return static_cast<int64_t>(table_bytes(entries.size()));
}

void launch_scale(const std::vector<Entry>& entries, const double* coefficient, void* workspace, int32_t device,
                  void* stream_pointer) {
  if (entries.empty()) return;
  const OnDevice on_device(device);
  const auto stream = static_cast<cudaStream_t>(stream_pointer);
  const uint32_t tiles = checked_tiles(entries);
  const uint32_t blocks = blocks_for(tiles, device);
  const ScaleArguments arguments{static_cast<int32_t>(entries.size()), Partition::of(tiles, blocks),
                                 coefficient};
  with_table(entries, workspace, device, stream, [&](const auto& table) {
    GRADSTAT_LAUNCH(scale_kernel, blocks, stream, table, arguments);
    check_cuda(cudaGetLastError(), "launching the scale kernel");
  });
}

}  // namespace gradstat
