// The CPU kernels on several threads, called by several threads at once, for ThreadSanitizer
// (tools/sanitize.py). What they give must also be, bit by bit, what one call after the other gives. With an
// argument: a race on purpose.
#include <cstdio>
#include <thread>

#include "stats_cpu.cpp"

using namespace gradstat;

namespace {

// Tensors of every type: of several chunks, of few elements, and of none. As bits they are a number that counts
// up.
struct Tensors {
  std::vector<std::vector<uint32_t>> memory;
  std::vector<Entry> entries;

  Tensors() {
    const int64_t sizes[] = {400'000, 3, 70'000, 0, 65'536, 500};
    for (int type = 0; type < 8; ++type) {
      const auto dtype = static_cast<DType>(type);
      for (const int64_t size : sizes) {
        memory.emplace_back(size * size_of(dtype) / 4 + 2);
        for (size_t i = 0; i < memory.back().size(); ++i) {
          memory.back()[i] = static_cast<uint32_t>(i * 2654435761u) & 0x3fffffffu;
        }
        entries.push_back({memory.back().data(), size, dtype, false});
      }
    }
  }
};

std::vector<Row> measured_and_halved() {
  const Tensors tensors;
  const double half = 0.5;
  std::vector<Row> table(tensors.entries.size());
  rows_cpu(tensors.entries, table.data());
  scale_cpu(tensors.entries, Multipliers(&half));
  rows_cpu(tensors.entries, table.data(), 0.25);
  return table;
}

void race() {
  int number = 0;
  std::thread other([&] { ++number; });
  ++number;
  other.join();
}

}  // namespace

int main(int count, char**) {
  if (count > 1) {
    race();
    return 0;
  }
  std::vector<std::vector<Row>> tables(3);
  std::vector<std::thread> callers;
  for (auto& table : tables) callers.emplace_back([&table] { table = measured_and_halved(); });
  for (std::thread& caller : callers) caller.join();
  const std::vector<Row> expected = measured_and_halved();
  for (const auto& table : tables) {
    if (std::memcmp(table.data(), expected.data(), expected.size() * sizeof(Row)) != 0) {
      std::fprintf(stderr, "concurrent calls give other results than a single call\n");
      return 1;
    }
  }
  std::printf("%zu tensors on %zu threads: no race, bitwise equal results\n", expected.size(), tables.size());
}
