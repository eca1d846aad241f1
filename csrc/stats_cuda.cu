// Launches the statistics kernel, and the one that multiplies as well.
#include "cuda_launch.h"
#include "launch_state.h"
#include "stats_cuda.cuh"

namespace gradstat {
namespace {

// A workspace: slots and totals of the blocks, then tickets and a table for when these are not kept.
struct Layout {
  size_t totals, tickets, table, end;

  Layout(size_t tensors, uint32_t blocks)
      : totals((blocks + tensors) * sizeof(Row)),
        tickets(totals + blocks * sizeof(Row)),
        table(tickets + (blocks + 2) / 2 * 2 * sizeof(uint32_t)),
        end(table + table_bytes(tensors)) {}
};

// With a factor the kernel that multiplies, else the one that only reads.
void launch_either(const std::vector<Entry>& entries, Row* table, const float* factor, const NormRequest* norm,
                   void* workspace, int32_t device, void* stream_pointer) {
  if (entries.empty() && norm == nullptr) return;
  const OnDevice on_device(device);
  const auto stream = static_cast<cudaStream_t>(stream_pointer);
  const uint32_t tiles = checked_tiles(entries);
  const uint32_t blocks = blocks_for(tiles, device);
  const Layout layout(entries.size(), blocks);
  char* memory = static_cast<char*>(workspace);
  const StatsArguments arguments{static_cast<int32_t>(entries.size()),
                                 Partition::of(tiles, blocks),
                                 table,
                                 reinterpret_cast<Row*>(memory),
                                 reinterpret_cast<Row*>(memory + layout.totals),
                                 tickets_for(blocks + 1, memory + layout.tickets, device, stream),
                                 factor,
                                 norm != nullptr,
                                 norm != nullptr ? *norm : NormRequest{}};
  const auto start = [&](auto kernel, const auto& entries_table) {
    launch(kernel, blocks, stream, false, "launching the statistics kernel", entries_table, arguments);
  };
  if (factor != nullptr) {
    with_table<kLargeTable>(entries, memory + layout.table, device, stream, [&](const auto& entries_table) {
      start(unscale_kernel<std::decay_t<decltype(entries_table)>>, entries_table);
    });
  } else {
    with_table(entries, memory + layout.table, device, stream, [&](const auto& entries_table) {
      start(stats_kernel<std::decay_t<decltype(entries_table)>>, entries_table);
    });
  }
}

}  // namespace

LoadedKernels load_stats_kernels() {
  return load_kernels({GRADSTAT_FOR_EVERY_TABLE(stats_kernel), GRADSTAT_FOR_LARGE_TABLES(unscale_kernel)});
}

int64_t stats_workspace_bytes(const std::vector<Entry>& entries, int32_t device) {
  return static_cast<int64_t>(Layout(entries.size(), blocks_for(checked_tiles(entries), device)).end);
}

void launch_stats(const std::vector<Entry>& entries, Row* table, const NormRequest* norm, void* workspace,
                  int32_t device, void* stream) {
  launch_either(entries, table, nullptr, norm, workspace, device, stream);
}

void launch_unscale(const std::vector<Entry>& entries, Row* table, const float* factor, void* workspace,
                    int32_t device, void* stream) {
  launch_either(entries, table, factor, nullptr, workspace, device, stream);
}

}  // namespace gradstat
