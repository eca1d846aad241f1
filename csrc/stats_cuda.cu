// Launches the statistics kernel and the kernel that also multiplies.
#include "cuda_launch.h"
#include "launch_state.h"
#include "stats_cuda.cuh"

namespace gradstat {
namespace {

// Offsets in a workspace: slots and totals of the ranges, then tickets and a table if they are not kept per
// stream.
struct Workspace {
  size_t totals, tickets, table, end;

  Workspace(size_t tensors, const Partition& partition)
      : totals((partition.ranges + tensors) * sizeof(Row)),
        tickets(totals + partition.ranges * sizeof(Row)),
        table(tickets + (partition.ranges + 2) / 2 * 2 * sizeof(uint32_t)),
        end(table + table_bytes(tensors, partition)) {}
};

}  // namespace

int32_t load_stats_kernels() {
  return load_kernels({GRADSTAT_FOR_EVERY_TABLE(stats_kernel), GRADSTAT_FOR_EVERY_TABLE(unscale_kernel)});
}

int64_t stats_workspace_bytes(const std::vector<Entry>& entries, int32_t device) {
  return static_cast<int64_t>(Workspace(entries.size(), partition_for(entries, device)).end);
}

void launch_stats(const std::vector<Entry>& entries, Row* table, const NormRequest* norm, const float* factor,
                  void* workspace, int32_t device, void* stream_pointer) {
  if (entries.empty() && norm == nullptr) return;
  const OnDevice on_device(device);
  const auto stream = static_cast<cudaStream_t>(stream_pointer);
  const Partition partition = partition_for(entries, device);
  const Workspace offsets(entries.size(), partition);
  char* memory = static_cast<char*>(workspace);
  const StatsArguments arguments{partition,
                                 table,
                                 reinterpret_cast<Row*>(memory),
                                 reinterpret_cast<Row*>(memory + offsets.totals),
                                 tickets_for(partition.ranges + 1, memory + offsets.tickets, device, stream),
                                 factor,
                                 norm != nullptr ? *norm : NormRequest{}};
  const auto start = [&](auto kernel, const auto& entries_table) {
    launch(kernel, partition.ranges, stream, "launching the statistics kernel", entries_table, arguments);
  };
  with_table(entries, partition, memory + offsets.table, device, stream, [&](const auto& tensors) {
    using Table = std::decay_t<decltype(tensors)>;
    factor != nullptr ? start(unscale_kernel<Table>, tensors) : start(stats_kernel<Table>, tensors);
  });
}

}  // namespace gradstat
