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

// In rows and in columns of blocks.
std::vector<QuantizationRow> quantized() {
  const Tensors tensors;
  std::vector<Entry> entries;
  std::vector<BlockShape> shapes;
  for (const Entry& entry : tensors.entries) {
    if (size_of(entry.dtype) == 1) continue;
    entries.insert(entries.end(), 2, entry);
    shapes.push_back({1, 1, entry.numel, 1, 32});
    shapes.push_back({1, entry.numel, 1, 32, 1});
  }
  const QuantizationFormat nvfp4 = {ScaleRule::kTwoLevel, false, 0x1.8p22f, 1, 6, 2};
  const std::vector<float> largest(entries.size(), 2);
  std::vector<QuantizationRow> table(entries.size());
  quantize_cpu(entries, shapes, nvfp4, largest.data(), table.data());
  return table;
}

// Whether three calls at once give, bit by bit, what a single call gives.
template <class F>
bool are_independent(const char* name, const F& compute) {
  std::vector<decltype(compute())> tables(3);
  std::vector<std::thread> callers;
  for (auto& table : tables) callers.emplace_back([&] { table = compute(); });
  for (std::thread& caller : callers) caller.join();
  const auto expected = compute();
  for (const auto& table : tables) {
    if (std::memcmp(table.data(), expected.data(), expected.size() * sizeof(expected[0])) != 0) {
      std::fprintf(stderr, "%s: concurrent calls give other results than a single call\n", name);
      return false;
    }
  }
  std::printf("%s: %zu tensors on %zu threads: no race, bitwise equal results\n", name, expected.size(),
              tables.size());
  return true;
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
  const bool passed = are_independent("rows and scaling", measured_and_halved);
  return are_independent("quantization", quantized) && passed ? 0 : 1;
}
