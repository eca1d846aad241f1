// The kernels behind a C interface, for tests/test_cuda_on_host.py.
#include "cuda_on_host.h"
#include "scale_cuda.cuh"
#include "stats_cuda.cuh"

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
void with_table_of(const std::vector<Entry>& entries, const Run& run) {
  const auto by_parameters = [&](auto table) {
    fill_table(entries, table->addresses, table->shapes, table->first_tiles);
    run(*table);
  };
  if (entries.size() <= kSmallTable) return by_parameters(std::make_unique<ParameterTable<kSmallTable>>());
  if (entries.size() <= kMediumTable) return by_parameters(std::make_unique<ParameterTable<kMediumTable>>());
  if (entries.size() <= kLargeTable) return by_parameters(std::make_unique<ParameterTable<kLargeTable>>());
  std::vector<uint64_t> memory((DeviceTable::bytes(entries.size()) + 7) / 8);
  const DeviceTable table = DeviceTable::at(memory.data(), entries.size());
  fill_table(entries, const_cast<uint64_t*>(table.addresses), const_cast<uint64_t*>(table.shapes),
             const_cast<uint32_t*>(table.first_tiles));
  run(table);
}

uint32_t blocks_of(const std::vector<Entry>& entries, uint32_t most_blocks) {
  return std::max<uint32_t>(1, std::min<uint32_t>(most_blocks, static_cast<uint32_t>(count_tiles(entries))));
}

}  // namespace

extern "C" {

int32_t tile_bytes() { return kTileVectors * kVectorBytes; }
int32_t table_capacity() { return kLargeTable; }

// `tickets` has most_blocks + 1 places, zero at first. Without a norm wanted, `norm` is null; without a factor
// to multiply by, `factor` is; without the step of an optimizer to decide about, the last three are.
void run_stats(int64_t count, const uint64_t* addresses, const int64_t* numels, const int32_t* dtypes,
               const uint8_t* pairs, uint32_t most_blocks, uint32_t seed, uint32_t* tickets, Row* table,
               const float* factor, void* norm, int32_t norm_dtype, double max_norm, int32_t infinity_norm,
               double* coefficient, const float* loss_scale, float* verdict, int64_t* counters) {
  const std::vector<Entry> entries = entries_of(count, addresses, numels, dtypes, pairs);
  const uint32_t blocks = blocks_of(entries, most_blocks);
  // Rows no block writes before they are read must show.
  Row poison;
  std::memset(&poison, 0xff, sizeof(poison));
  std::vector<Row> slots(blocks + entries.size(), poison), totals(blocks, poison);
  const StatsArguments arguments{static_cast<int32_t>(count),
                                 Partition::of(static_cast<uint32_t>(count_tiles(entries)), blocks),
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
  with_table_of(entries, [&](const auto& entries_table) {
    cuda_on_host::launch(blocks, kThreads, seed, [&] {
      factor != nullptr ? unscale_kernel(entries_table, arguments) : stats_kernel(entries_table, arguments);
    });
  });
}

void run_scale(int64_t count, const uint64_t* addresses, const int64_t* numels, const int32_t* dtypes,
               const uint8_t* pairs, uint32_t most_blocks, uint32_t seed, const double* coefficients,
               int64_t stride) {
  const std::vector<Entry> entries = entries_of(count, addresses, numels, dtypes, pairs);
  const uint32_t blocks = blocks_of(entries, most_blocks);
  const ScaleArguments arguments{static_cast<int32_t>(count),
                                 Partition::of(static_cast<uint32_t>(count_tiles(entries)), blocks),
                                 {coefficients, stride}};
  with_table_of(entries, [&](const auto& table) {
    cuda_on_host::launch(blocks, kThreads, seed, [&] { scale_kernel(table, arguments); });
  });
}

}  // extern "C"
