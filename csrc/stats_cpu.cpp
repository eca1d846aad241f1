// The CPU backend: splits tensors into chunks, distributes them over torch's threads, merges in a fixed order,
// and selects the inner loops for the processor at run time.
#include "stats_cpu.h"

#include <pthread.h>
#include <sys/stat.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "denormals.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#ifdef __SANITIZE_ADDRESS__
extern "C" void __asan_loadN(const void* address, size_t size);
#endif

#define GRADSTAT_INLINE inline __attribute__((always_inline))

namespace gradstat {
namespace {

// Bytes per block of the fast loop, small enough to stay in L1 for the rare second read.
constexpr int64_t kBlockBytes = 8192;
// Values per chunk: the unit of parallel work, and the unit of merging, which makes results reproducible.
constexpr int64_t kChunk = 65536;
// Bytes of work per task, and the total in bytes below which a single thread does everything. That takes 40 us,
// about as long as waking a second thread on a machine with other load.
constexpr int64_t kTaskBytes = 256 * 1024;
constexpr int64_t kParallelBytes = 1024 * 1024;
// The same for quantization, of which an element takes about a nanosecond.
constexpr int64_t kParallelElements = 64 * 1024;
// The fixed cost of a tensor, as the number of bytes that could be read in that time.
constexpr int64_t kTensorBytes = 512;

// Prefetch distance in bytes. On AMD family 25 (measured: Zen 4) prefetching more than the next lines disturbs
// the hardware prefetchers. Family 26 (Zen 5) behaves like Intel's processors.
int64_t choose_prefetch() {
#if defined(__x86_64__)
  unsigned eax = 0, ebx, ecx, edx;
  constexpr unsigned kFamily = 0x0ff00f00, kFamily25 = 0x00a00f00;
  if (__get_cpuid(1, &eax, &ebx, &ecx, &edx) && (eax & kFamily) == kFamily25) return 256;
#endif
  return 8192;
}
const int64_t prefetch_distance = choose_prefetch();

// float8 has no vectors: with only 256 codes, tables do.
using Float8Values = std::array<float, 256>;

// The value of each code.
const Float8Values& float8_values(DType dtype) {
  const auto make = [](DType of) {
    const KeepsDenormals kept;  // the table must not depend on the mode of the thread that makes it
    Float8Values values;
    for (int code = 0; code < 256; ++code) values[code] = float8_to_float(static_cast<uint8_t>(code), of);
    return values;
  };
  static const Float8Values values[] = {make(DType::kFloat8E4M3FN), make(DType::kFloat8E5M2),
                                        make(DType::kFloat8E4M3FNUZ), make(DType::kFloat8E5M2FNUZ)};
  return values[static_cast<int>(dtype) - static_cast<int>(DType::kFloat8E4M3FN)];
}

void scale_float8(const Entry& entry, int64_t first, int64_t count, double multiplier) {
  auto* p = static_cast<uint8_t*>(entry.data) + first;
  const Float8Values& values = float8_values(entry.dtype);
  uint8_t products[256];
  for (int code = 0; code < 256; ++code) {
    products[code] = to_float8(values[code] * static_cast<float>(multiplier), entry.dtype);
  }
  for (int64_t i = 0; i < count; ++i) p[i] = products[p[i]];
}

// Exact: a histogram contains everything except positions. Several histograms are used, as increments of the
// same counter by adjacent equal elements would depend on each other.
void read_float8(const Entry& entry, int64_t first, int64_t count, double factor, Row& row) {
  if (factor != 1.0) scale_float8(entry, first, count, factor);
  const auto* p = static_cast<const uint8_t*>(entry.data) + first;
  const Float8Values& values = float8_values(entry.dtype);
  constexpr int kWays = 4;
  uint32_t histograms[kWays][256] = {};
  int64_t done = 0;
  for (; done + kWays <= count; done += kWays) {
    for (int way = 0; way < kWays; ++way) ++histograms[way][p[done + way]];
  }
  for (; done < count; ++done) ++histograms[0][p[done]];

  const double nonfinite_before = row.nan_count + row.inf_count;
  for (int code = 0; code < 256; ++code) {
    double times = 0;
    for (const auto& histogram : histograms) times += histogram[code];
    if (times == 0) continue;
    Row one = identity_row();
    lift(one, kInf, values[code]);  // the position is found below
#define GRADSTAT_FIELD(name, how) \
  if (merge::identity_of_##how == 0) one.name *= times;
#include "stat_fields.def"
    merge_into(row, one);
  }
  if (row.nan_count + row.inf_count > nonfinite_before) {
    int64_t i = 0;
    while (std::isfinite(values[p[i]])) ++i;
    row.first_nonfinite = merge::min(row.first_nonfinite, static_cast<double>(first + i));
  }
}

// The inner loops, once per instruction set.
#define GRADSTAT_NAMESPACE baseline
#define GRADSTAT_VECTOR_BYTES 16
#define GRADSTAT_X86_LEVEL 0
#include "stats_cpu_kernel.h"

#if defined(__x86_64__)

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,popcnt"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,popcnt")
#endif
#define GRADSTAT_NAMESPACE avx2
#define GRADSTAT_VECTOR_BYTES 32
#define GRADSTAT_X86_LEVEL 2
#include "stats_cpu_kernel.h"
#if defined(__clang__)
#pragma clang attribute pop
#pragma clang attribute push( \
    __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c,popcnt"))), apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c,popcnt,prefer-vector-width=512")
#endif
#define GRADSTAT_NAMESPACE avx512
#define GRADSTAT_VECTOR_BYTES 64
#define GRADSTAT_X86_LEVEL 4
#include "stats_cpu_kernel.h"
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#endif  // __x86_64__

struct Kernels {
  const char* name;
  void (*read)(const Entry&, int64_t first, int64_t count, double factor, Row& row);
  void (*scale)(const Entry&, int64_t first, int64_t count, double multiplier);
  void (*quantize)(const Entry&, const BlockShape&, const QuantizationFormat&, float largest, int64_t first,
                   int64_t last, QuantizationRow& row);
};

Kernels choose_kernels() {
  std::vector<Kernels> supported = {{"baseline", baseline::read, baseline::scale, baseline::quantize}};
#if defined(__x86_64__)
  // Every processor with AVX2 also has F16C, which not all compilers can query.
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    supported.push_back({"avx2", avx2::read, avx2::scale, avx2::quantize});
    // Processors with VBMI2 (Ice Lake, Zen 4 and later) keep their frequency with 64-byte vectors; earlier ones
    // do not.
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vbmi2")) {
      supported.push_back({"avx512", avx512::read, avx512::scale, avx512::quantize});
    }
  }
#endif
  const char* forced = std::getenv("GRADSTAT_CPU_INSTRUCTIONS");
  if (forced == nullptr || *forced == '\0') return supported.back();
  std::string names;
  for (const Kernels& kernels : supported) {
    if (std::string(kernels.name) == forced) return kernels;
    names += std::string(names.empty() ? "" : ", ") + kernels.name;
  }
  throw std::runtime_error(std::string("gradstat: GRADSTAT_CPU_INSTRUCTIONS=") + forced +
                           " is not available on this machine; available: " + names);
}

const Kernels& kernels() {
  static const Kernels chosen = choose_kernels();
  return chosen;
}

// Threads do not survive a fork, and the child's thread pool would wait for them forever. A process forked from
// one with several threads, as far as the system tells, therefore uses one thread.
class ForkedFromThreads {
 public:
  static bool value() { return here_; }

 private:
  static void before_fork() {
    struct stat tasks;
    // A directory has two links plus one per subdirectory.
    in_child_ = stat("/proc/self/task", &tasks) != 0 || tasks.st_nlink > 3;
  }

  static inline bool in_child_ = false, here_ = false;
  static inline const int registered_ = pthread_atfork(before_fork, nullptr, [] { here_ |= in_child_; });
};

// The chunks of all tensors in order, split into tasks of about equal cost. Chunk boundaries depend only on the
// tensors, never on the number of threads. A tensor of several chunks has a slot for each, in order.
class Work {
 public:
  explicit Work(const std::vector<Entry>& entries) : entries_(entries) {
    int64_t total = 0;
    for (const Entry& entry : entries) total += kTensorBytes + entry.values() * size_of(entry.dtype);
    const bool is_parallel = total >= kParallelBytes && !ForkedFromThreads::value();
    const int64_t most = is_parallel ? 8 * torch::stable::get_num_threads() : 1;
    const int64_t tasks = std::clamp<int64_t>(total / kTaskBytes, 1, most);
    Place place = {0, 0, 0};
    int64_t cost = 0;
    borders_.reserve(tasks + 1);
    borders_.push_back(place);
    for (; place.tensor < entries.size(); step(place)) {
      if (cost * tasks >= total * static_cast<int64_t>(borders_.size())) borders_.push_back(place);
      cost += chunk_at(place) * size_of(entries[place.tensor].dtype) + (place.first == 0 ? kTensorBytes : 0);
    }
    borders_.push_back(place);
  }

  // Calls body(tensor, first value, number of values, slot) for every chunk, at least once per tensor.
  template <class Body>
  void for_each_chunk(const Body& body) const {
    const auto tasks = static_cast<int64_t>(borders_.size()) - 1;
    const auto run = [&](int64_t begin, int64_t end) {
      const KeepsDenormals kept;
      for (Place place = borders_[begin]; place != borders_[end]; step(place)) {
        body(place.tensor, place.first, chunk_at(place), place.slot);
      }
    };
    if (tasks == 1) {
      run(0, 1);
    } else {
      torch::stable::parallel_for(0, tasks, 1, run);
    }
  }

  // Fills table[i] with the merged rows of the chunks of tensor i. Calls read(tensor, first value, number of
  // values, row) for every chunk, with an identity row.
  template <class Read>
  void fill(Row* table, const Read& read) const {
    std::vector<Row> slots(borders_.back().slot);
    for_each_chunk([&](size_t tensor, int64_t first, int64_t count, size_t slot) {
      Row& row = has_slots(tensor) ? slots[slot] : table[tensor];
      row = identity_row();
      read(tensor, first, count, row);
    });
    auto slot = slots.begin();
    for (size_t i = 0; i < entries_.size(); ++i) {
      if (!has_slots(i)) continue;
      table[i] = identity_row();
      for (int64_t first = 0; first < entries_[i].values(); first += kChunk) merge_into(table[i], *slot++);
    }
  }

 private:
  struct Place {
    size_t tensor;
    int64_t first;  // index of the chunk's first value in the tensor
    size_t slot;

    bool operator!=(const Place& other) const { return tensor != other.tensor || first != other.first; }
  };

  bool has_slots(size_t tensor) const { return entries_[tensor].values() > kChunk; }

  int64_t chunk_at(const Place& place) const {
    return std::min(kChunk, entries_[place.tensor].values() - place.first);
  }

  void step(Place& place) const {
    place.slot += has_slots(place.tensor);
    place.first += kChunk;
    if (place.first >= entries_[place.tensor].values()) {
      ++place.tensor;
      place.first = 0;
    }
  }

  const std::vector<Entry>& entries_;
  std::vector<Place> borders_;
};

}  // namespace

Row rows_cpu(const std::vector<Entry>& entries, Row* table, double factor) {
  const auto read = kernels().read;
  Work(entries).fill(table, [&](size_t tensor, int64_t first, int64_t count, Row& row) {
    const Entry& entry = entries[tensor];
    (size_of(entry.dtype) == 1 ? read_float8 : read)(entry, first, count, factor, row);
  });
  Row total = identity_row();
  for (size_t i = 0; i < entries.size(); ++i) merge_into(total, table[i]);
  return total;
}

void scale_cpu(const std::vector<Entry>& entries, const Multipliers& multipliers) {
  const auto scale = kernels().scale;
  const Work work(entries);
  work.for_each_chunk([&](size_t tensor, int64_t first, int64_t count, size_t) {
    const double multiplier = multipliers.of(tensor);
    if (multiplier == 1.0) return;
    const Entry& entry = entries[tensor];
    (size_of(entry.dtype) == 1 ? scale_float8 : scale)(entry, first, count, multiplier);
  });
}

void quantize_cpu(const std::vector<Entry>& entries, const std::vector<BlockShape>& shapes,
                  const QuantizationFormat& format, const float* largest, QuantizationRow* table) {
  struct Part {
    size_t tensor;
    int64_t first, last;  // tiles
  };
  std::vector<Part> parts;
  int64_t total = 0;
  for (size_t i = 0; i < entries.size(); ++i) {
    const int64_t tiles = entries[i].numel > 0 ? shapes[i].tiles() : 0;
    const int64_t step = std::max<int64_t>(1, kChunk / (shapes[i].width() * shapes[i].block_rows));
    for (int64_t first = 0; first < tiles; first += step)
      parts.push_back({i, first, std::min(first + step, tiles)});
    total += entries[i].numel;
  }
  std::vector<QuantizationRow> rows(parts.size());
  const auto run = [&](int64_t begin, int64_t end) {
    const KeepsDenormals kept;
    for (int64_t i = begin; i < end; ++i) {
      const Part& part = parts[i];
      kernels().quantize(entries[part.tensor], shapes[part.tensor], format, largest[part.tensor], part.first,
                         part.last, rows[i]);
    }
  };
  const auto count = static_cast<int64_t>(parts.size());
  if (total < kParallelElements || ForkedFromThreads::value()) {
    run(0, count);
  } else {
    torch::stable::parallel_for(0, count, 1, run);
  }
  std::fill(table, table + entries.size(), QuantizationRow());
  for (int64_t i = 0; i < count; ++i) table[parts[i].tensor].merge(rows[i]);
}

const char* cpu_instructions() { return kernels().name; }

}  // namespace gradstat
