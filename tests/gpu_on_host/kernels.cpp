// The kernels behind a C interface, for tests/gpu_on_host/test_cuda_on_host.py.
#include "cuda_on_host.h"
#include "decide_cuda.cuh"
#include "scale_cuda.cuh"
#include "stats_cuda.cuh"
#include "update_cuda.cuh"

using namespace gradstat;

namespace {

std::vector<Entry> entries_of(int64_t count, const uint64_t* addresses, const int64_t* numels,
                              const int32_t* dtypes, const uint8_t* pairs) {
  std::vector<Entry> entries;
  for (int64_t i = 0; i < count; ++i) {
    entries.push_back(
        {reinterpret_cast<void*>(addresses[i]), numels[i], static_cast<DType>(dtypes[i]), pairs[i] != 0});
  }
  return entries;
}

template <class Run>
void with_table_of(const std::vector<Entry>& entries, const Partition& partition, const Run& run) {
  if (with_parameter_table<kSmallTable, kMediumTable, kLargeTable>(entries, partition, run)) return;
  std::vector<uint64_t> memory((DeviceTable::bytes(entries.size(), partition.ranges) + 7) / 8);
  DeviceTable table = DeviceTable::at(memory.data(), entries.size());
  fill_table(entries, partition, table);
  run(table);
}

Partition partition_of(const std::vector<Entry>& entries, uint32_t most_blocks) {
  const auto tiles = static_cast<uint32_t>(count_tiles(entries));
  const uint32_t most = std::min(most_blocks, kMostBlocks) * kRangesPerBlock;
  return Partition::of(tiles, std::max(1u, std::min(most, tiles)));
}

}  // namespace

extern "C" {

int32_t tile_bytes() { return kTileVectors * kVectorBytes; }
int32_t table_capacity() { return kLargeTable; }
uint32_t most_ranges(uint32_t most_blocks) { return most_blocks * kRangesPerBlock; }

// `tickets` has most_ranges(most_blocks) + 2 places, zero at first. Without a norm wanted, `norm` is null;
// without a factor to multiply by, `factor` is; without the step of an optimizer to decide about, the last
// three are.
void run_stats(int64_t count, const uint64_t* addresses, const int64_t* numels, const int32_t* dtypes,
               const uint8_t* pairs, uint32_t most_blocks, uint32_t seed, uint32_t* tickets, Row* table,
               const float* factor, void* norm, int32_t norm_dtype, double max_norm, int32_t infinity_norm,
               double* coefficient, const float* loss_scale, float* verdict, int64_t* counters) {
  const std::vector<Entry> entries = entries_of(count, addresses, numels, dtypes, pairs);
  const Partition partition = partition_of(entries, most_blocks);
  const uint32_t ranges = partition.ranges;
  // Rows no block writes before they are read must show.
  Row poison;
  std::memset(&poison, 0xff, sizeof(poison));
  std::vector<Row> slots(ranges + entries.size(), poison), totals(ranges, poison);
  const StatsArguments arguments{partition,
                                 table,
                                 slots.data(),
                                 totals.data(),
                                 tickets,
                                 factor,
                                 norm != nullptr,
                                 {max_norm,
                                  infinity_norm != 0,
                                  static_cast<DType>(norm_dtype),
                                  norm,
                                  coefficient,
                                  {loss_scale, verdict, counters}}};
  with_table_of(entries, partition, [&](const auto& entries_table) {
    cuda_on_host::launch(std::min(ranges, most_blocks), kThreads, seed, [&] {
      factor != nullptr ? unscale_kernel(entries_table, arguments) : stats_kernel(entries_table, arguments);
    });
  });
}

// As the operator decide_clip_, with null for what is not given.
void run_decide_clip(int64_t rule, const double* options, int64_t option_count, double* state, int64_t window,
                     const double* norm, const Row* rows, int64_t count, const Row* weights,
                     const float* factor, const float* skip, double* out, uint32_t seed) {
  ClipRequest request{
      static_cast<ClipRule>(rule), {}, state, window, norm, rows, count, weights, factor, skip, out};
  std::copy(options, options + option_count, request.options);
  cuda_on_host::launch(1, kThreads, seed, [&] { decide_clip_kernel(request); });
}

// As the operator guard_ for float32 values, likewise.
void run_guard(const double* options, double* state, int64_t window, double* numbers, const float* verdict,
               const float* loss, const float* update, int64_t* counters, float* out, uint32_t seed) {
  GuardRequest request{{}, state, window, numbers, verdict, loss, update, {}, out, counters};
  std::copy(options, options + kGuardOptions, request.options);
  cuda_on_host::launch(1, kThreads, seed, [&] { guard_kernel(request); });
}

void run_scale(int64_t count, const uint64_t* addresses, const int64_t* numels, const int32_t* dtypes,
               const uint8_t* pairs, uint32_t most_blocks, uint32_t seed, const double* coefficients,
               int64_t stride) {
  const std::vector<Entry> entries = entries_of(count, addresses, numels, dtypes, pairs);
  const Partition partition = partition_of(entries, most_blocks);
  const ScaleArguments arguments{partition, {coefficients, stride}};
  with_table_of(entries, partition, [&](const auto& table) {
    cuda_on_host::launch(std::min(partition.ranges, most_blocks), kThreads, seed,
                         [&] { scale_kernel(table, arguments); });
  });
}

// Of `count` operands in all; `rules` of tensors, a row of coefficients and of the table for each.
void run_update(int64_t count, const uint64_t* addresses, const int64_t* numels, const int32_t* dtypes,
                const uint8_t* pairs, int64_t tensors, const int64_t* rules, uint32_t seed,
                const double* coefficients, double* table) {
  const auto entries = update_entries(entries_of(count, addresses, numels, dtypes, pairs),
                                      std::vector<int64_t>(rules, rules + tensors));
  std::vector<UpdatePlace> places;
  std::vector<uint32_t> of_chunk;
  for (const UpdateEntry& entry : entries) {
    places.push_back(update_place(entry, static_cast<uint32_t>(of_chunk.size())));
    of_chunk.insert(of_chunk.end(), places.back().chunks(), static_cast<uint32_t>(places.size() - 1));
  }
  UpdateSums<double> poison;
  std::memset(&poison, 0xff, sizeof(poison));
  std::vector<UpdateSums<double>> slots(of_chunk.size(), poison);
  const UpdateArguments arguments{places.data(),
                                  of_chunk.data(),
                                  reinterpret_cast<const UpdateCoefficients<double>*>(coefficients),
                                  slots.data(),
                                  reinterpret_cast<UpdateSums<double>*>(table),
                                  static_cast<uint32_t>(entries.size())};
  if (!of_chunk.empty()) {
    cuda_on_host::launch(static_cast<uint32_t>(of_chunk.size()), kThreads, seed,
                         [&] { update_kernel(arguments); });
  }
  cuda_on_host::launch((arguments.count + kWarps - 1) / kWarps, kThreads, seed,
                       [&] { update_merge_kernel(arguments); });
}

}  // extern "C"
