// The CPU backend: splits tensors into chunks, deals them to torch's threads, merges in a fixed order, and
// picks the inner loops for the machine it runs on.
#include "stats_cpu.h"

#include <torch/csrc/stable/ops.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Float8_e4m3fn.h>
#include <torch/headeronly/util/Float8_e4m3fnuz.h>
#include <torch/headeronly/util/Float8_e5m2.h>
#include <torch/headeronly/util/Float8_e5m2fnuz.h>
#include <torch/headeronly/util/Half.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <limits>
#include <stdexcept>
#include <string>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace gradstat {
namespace {

// Values per block of the fast loop: 8 KB of float32, well inside the first-level cache.
constexpr int64_t kBlock = 2048;
// Values per chunk: the unit of parallel work, and, since merging follows chunks, of reproducibility.
constexpr int64_t kChunk = 32 * kBlock;
// Bytes below which another thread costs more than it saves.
constexpr int64_t kTaskBytes = 256 * 1024;

// A block's float32 sum of squares is trusted in this range. Below it, squares that vanished (each under
// 2^-126, at most 2048 of them) could matter; above it, one may have overflowed.
constexpr double kSafeLow = 0x1p-86;
constexpr double kSafeHigh = 0x1p+120;
// The same for float64: no element beyond GRADSTAT_LARGE, none that mattered below GRADSTAT_SMALL.
constexpr double kSafeLowDouble = 0x1p-900;
constexpr double kSafeHighDouble = 0x1p+970;

uint16_t float_to_half(float x) { return torch::headeronly::Half(x).x; }
uint16_t float_to_bfloat16(float x) { return torch::headeronly::BFloat16(x).x; }

uint8_t float_to_float8(float x, DType dtype) {
  switch (dtype) {
    case DType::kFloat8E4M3FN:
      return torch::headeronly::Float8_e4m3fn(x).x;
    case DType::kFloat8E5M2:
      return torch::headeronly::Float8_e5m2(x).x;
    case DType::kFloat8E4M3FNUZ:
      return torch::headeronly::Float8_e4m3fnuz(x).x;
    default:
      return torch::headeronly::Float8_e5m2fnuz(x).x;
  }
}

// There are only 256 different elements, so a histogram holds everything but positions.
void read_float8(const Entry& entry, int64_t first, int64_t count, Row& row) {
  const auto* p = static_cast<const uint8_t*>(entry.data) + first;
  std::array<int64_t, 256> histogram{};
  for (int64_t i = 0; i < count; ++i) ++histogram[p[i]];
  bool bad[256] = {};
  const double bad_before = row.nan_count + row.inf_count;
  for (int code = 0; code < 256; ++code) {
    if (histogram[code] == 0) continue;
    const double value = float8_to_float(static_cast<uint8_t>(code), entry.dtype);
    const double times = static_cast<double>(histogram[code]);
    Row one = identity_row();
    lift(one, value, 0);
    bad[code] = one.nan_count + one.inf_count > 0;
    row.nan_count += times * one.nan_count;
    row.inf_count += times * one.inf_count;
    row.zero_count += times * one.zero_count;
    row.sum += times * one.sum;
    row.sq_sum += times * one.sq_sum;
    row.min = merge::min(row.min, one.min);
    row.max = merge::max(row.max, one.max);
  }
  if (row.nan_count + row.inf_count > bad_before) {
    int64_t i = 0;
    while (!bad[p[i]]) ++i;
    row.first_nonfinite = merge::min(row.first_nonfinite, static_cast<double>(first + i));
  }
}

void scale_float8(const Entry& entry, int64_t first, int64_t count, float coefficient) {
  auto* p = static_cast<uint8_t*>(entry.data) + first;
  std::array<uint8_t, 256> scaled;
  for (int code = 0; code < 256; ++code) {
    const float value = float8_to_float(static_cast<uint8_t>(code), entry.dtype);
    scaled[code] = float_to_float8(value * coefficient, entry.dtype);
  }
  for (int64_t i = 0; i < count; ++i) p[i] = scaled[p[i]];
}

// The inner loops, once per instruction set.
#define GRADSTAT_NAMESPACE baseline
#define GRADSTAT_VECTOR_BYTES 16
#define GRADSTAT_X86_LEVEL 0
#include "stats_cpu_kernel.h"
#undef GRADSTAT_NAMESPACE
#undef GRADSTAT_VECTOR_BYTES
#undef GRADSTAT_X86_LEVEL

#if defined(__x86_64__)

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif
#define GRADSTAT_NAMESPACE avx2
#define GRADSTAT_VECTOR_BYTES 32
#define GRADSTAT_X86_LEVEL 2
#include "stats_cpu_kernel.h"
#undef GRADSTAT_NAMESPACE
#undef GRADSTAT_VECTOR_BYTES
#undef GRADSTAT_X86_LEVEL
#if defined(__clang__)
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c"))), \
                             apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c,prefer-vector-width=512")
#endif
#define GRADSTAT_NAMESPACE avx512
#define GRADSTAT_VECTOR_BYTES 64
#define GRADSTAT_X86_LEVEL 4
#include "stats_cpu_kernel.h"
#undef GRADSTAT_NAMESPACE
#undef GRADSTAT_VECTOR_BYTES
#undef GRADSTAT_X86_LEVEL
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#endif  // __x86_64__

struct Kernels {
  const char* name;
  void (*read)(const Entry&, int64_t first, int64_t count, Row& row);
  void (*scale)(const Entry&, int64_t first, int64_t count, double coefficient);
};

Kernels choose_kernels() {
  std::vector<Kernels> supported = {{"baseline", baseline::read, baseline::scale}};
#if defined(__x86_64__)
  // Every processor with AVX2 has F16C, about which not every compiler can ask.
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    supported.push_back({"avx2", avx2::read, avx2::scale});
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
      supported.push_back({"avx512", avx512::read, avx512::scale});
    }
  }
#endif
  const char* forced = std::getenv("GRADSTAT_CPU_INSTRUCTIONS");
  if (forced == nullptr || *forced == '\0') return supported.back();
  std::string known;
  for (const Kernels& kernels : supported) {
    if (std::string(kernels.name) == forced) return kernels;
    known += std::string(known.empty() ? "" : ", ") + kernels.name;
  }
  throw std::runtime_error(std::string("gradstat: GRADSTAT_CPU_INSTRUCTIONS=") + forced +
                           " is not available on this machine; available: " + known);
}

const Kernels& kernels() {
  static const Kernels chosen = choose_kernels();
  return chosen;
}

struct Chunk {
  int32_t tensor;
  int64_t first;  // value number within the tensor
  int64_t count;
};

// The chunks of all tensors, in order, and their division into tasks of about equal bytes. Where chunks
// begin depends on the tensors alone, never on the number of threads.
class Work {
 public:
  explicit Work(const std::vector<Entry>& entries) {
    int64_t total_bytes = 0;
    for (size_t i = 0; i < entries.size(); ++i) {
      const int64_t values = entries[i].values();
      total_bytes += values * size_of(entries[i].dtype);
      for (int64_t first = 0; first < values; first += kChunk) {
        chunks_.push_back({static_cast<int32_t>(i), first, std::min(kChunk, values - first)});
      }
    }
    if (total_bytes < 2 * kTaskBytes) {
      task_ends_.push_back(chunks_.size());
      return;
    }
    const int64_t tasks = std::min<int64_t>(total_bytes / kTaskBytes, 8 * torch::stable::get_num_threads());
    int64_t bytes = 0;
    for (size_t c = 0; c < chunks_.size(); ++c) {
      bytes += chunks_[c].count * size_of(entries[chunks_[c].tensor].dtype);
      if (bytes * tasks >= total_bytes * static_cast<int64_t>(task_ends_.size() + 1)) {
        task_ends_.push_back(c + 1);
      }
    }
    if (task_ends_.back() != chunks_.size()) task_ends_.push_back(chunks_.size());
  }

  const std::vector<Chunk>& chunks() const { return chunks_; }

  // Calls body(chunk number) for every chunk.
  template <class Body>
  void for_each_chunk(const Body& body) const {
    const auto run = [&](int64_t begin, int64_t end) {
      const size_t from = begin == 0 ? 0 : task_ends_[begin - 1];
      for (size_t c = from; c < task_ends_[end - 1]; ++c) body(c);
    };
    const auto tasks = static_cast<int64_t>(task_ends_.size());
    if (tasks == 1) {
      run(0, 1);
    } else {
      torch::stable::parallel_for(0, tasks, 1, run);
    }
  }

 private:
  std::vector<Chunk> chunks_;
  std::vector<size_t> task_ends_;
};

}  // namespace

Row rows_cpu(const std::vector<Entry>& entries, Row* table) {
  const auto read = kernels().read;
  const Work work(entries);
  std::vector<Row> rows(work.chunks().size());
  work.for_each_chunk([&](size_t c) {
    const Chunk& chunk = work.chunks()[c];
    Row row = identity_row();
    read(entries[chunk.tensor], chunk.first, chunk.count, row);
    rows[c] = row;
  });
  for (size_t i = 0; i < entries.size(); ++i) table[i] = identity_row();
  for (size_t c = 0; c < rows.size(); ++c) merge_into(table[work.chunks()[c].tensor], rows[c]);
  Row total = identity_row();
  for (size_t i = 0; i < entries.size(); ++i) merge_into(total, table[i]);
  return total;
}

void scale_cpu(const std::vector<Entry>& entries, double coefficient) {
  const auto scale = kernels().scale;
  const Work work(entries);
  work.for_each_chunk([&](size_t c) {
    const Chunk& chunk = work.chunks()[c];
    scale(entries[chunk.tensor], chunk.first, chunk.count, coefficient);
  });
}

void write_norm_cpu(double value, DType dtype, void* out) {
  switch (dtype) {
    case DType::kFloat64:
      *static_cast<double*>(out) = value;
      return;
    case DType::kFloat32:
      *static_cast<float*>(out) = static_cast<float>(value);
      return;
    case DType::kBFloat16:
      *static_cast<uint16_t*>(out) = float_to_bfloat16(static_cast<float>(value));
      return;
    default:
      *static_cast<uint16_t*>(out) = float_to_half(static_cast<float>(value));
      return;
  }
}

const char* cpu_instructions() { return kernels().name; }

}  // namespace gradstat
