// The statistics kernel: the rows of many tensors of any types and sizes in one launch.
//
// Every block takes an equal, contiguous range of all tiles and walks it tensor by tensor. Warps read their
// share of a tensor independently (no barrier inside), then the block merges them into one row. A tensor
// that lies within one block is done; for one that spans several, each block leaves its row in a slot, and
// the block that arrives last merges the slots in their order. The norm of everything is made in the same
// way from one total per block. Nothing depends on which block comes last: the same input and grid give the
// same bits.
//
// A second kernel is the same but for one thing: it multiplies elements by a factor, in place, just before it
// reads them. A thread re-reads only what it stored itself, so nothing is multiplied twice and no barrier is
// needed.
#pragma once

#include "formats.cuh"

namespace gradstat {

struct StatsArguments {
  int32_t tensors;
  Partition partition;
  Row* table;
  Row* slots;           // gridDim.x + tensors
  Row* totals;          // gridDim.x
  uint32_t* tickets;    // gridDim.x + 1, zero before and after
  const float* factor;  // of the kernel that multiplies
  bool wants_norm;
  NormRequest norm;
};

constexpr int kWarps = kThreads / 32;
// Groups of threads that merge rows column by column.
constexpr int kMergers = kThreads / kFields;

// A tensor, and the part of its tiles that this block reads.
struct Segment {
  Place place;
  Extent extent;
  uint32_t begin, end;  // tiles of the tensor

  GRADSTAT_DEVICE uint64_t vectors_address() const {
    return place.address + (static_cast<uint64_t>(extent.head) << place.shift());
  }
};

// In shared memory also because what is there does not occupy registers during the hot loops.
struct BlockMemory {
  uint32_t begin, end;    // tiles of this block
  Segment segment;        // where it is
  double total[kFields];  // of all it has read
  double of_warp[kWarps][kFields];
  double of_merger[kMergers][kFields];
  bool is_last;
  float factor;
  uint8_t products[256];  // by it, of an 8-bit type

  GRADSTAT_DEVICE Multiplier multiplier() const { return {factor, factor, products}; }
};

// Columns by number, for threads that each handle one ---------------------------------------------------

enum Column : int {
#define GRADSTAT_FIELD(name, how) kColumn_##name,
#include "stat_fields.def"
};

GRADSTAT_DEVICE double identity_of_column(int column) {
  switch (column) {
#define GRADSTAT_FIELD(name, how) \
  case kColumn_##name:            \
    return merge::identity_of_##how;
#include "stat_fields.def"
  }
  return 0;
}

GRADSTAT_DEVICE double merge_column(int column, double a, double b) {
  switch (column) {
#define GRADSTAT_FIELD(name, how) \
  case kColumn_##name:            \
    return merge::how(a, b);
#include "stat_fields.def"
  }
  return 0;
}

// Merges the rows of a warp's threads; lane 0 has the result. A column in which no thread has anything, as
// the five about unusual elements mostly are, costs nothing.
GRADSTAT_DEVICE void merge_over_warp(Row& row) {
  uint32_t used = 0;
#define GRADSTAT_FIELD(name, how) used |= row.name != merge::identity_of_##how ? 1u << kColumn_##name : 0u;
#include "stat_fields.def"
  used = __reduce_or_sync(kAllLanes, used);
#pragma unroll 1
  for (int distance = 16; distance > 0; distance /= 2) {
#define GRADSTAT_FIELD(name, how)    \
  if (used & (1u << kColumn_##name)) \
    row.name = merge::how(row.name, __shfl_xor_sync(kAllLanes, row.name, distance));
#include "stat_fields.def"
  }
}

GRADSTAT_DEVICE void merge_into_columns(double* columns, const Row& row) {
#define GRADSTAT_FIELD(name, how) columns[kColumn_##name] = merge::how(columns[kColumn_##name], row.name);
#include "stat_fields.def"
}

// Merges rows[0 .. count) in a fixed order. Threads 0 .. kFields - 1 return their column of the result.
GRADSTAT_DEVICE double merge_rows(const Row* rows, uint32_t count, BlockMemory& memory) {
  const int thread = static_cast<int>(threadIdx.x);
  const int column = thread % kFields;
  const uint32_t merger = static_cast<uint32_t>(thread / kFields);
  const double* values = reinterpret_cast<const double*>(rows);
  if (merger < kMergers) {
    double value = identity_of_column(column);
#pragma unroll 4
    for (uint32_t i = merger; i < count; i += kMergers) {
      // From the second-level cache: other blocks wrote these rows.
      value = merge_column(column, value, __ldcg(values + static_cast<uint64_t>(i) * kFields + column));
    }
    memory.of_merger[merger][column] = value;
  }
  __syncthreads();
  double value = 0;
  if (thread < kFields) {
    value = identity_of_column(column);
    for (int i = 0; i < kMergers; ++i) value = merge_column(column, value, memory.of_merger[i][column]);
  }
  __syncthreads();
  return value;
}

// Whether this block is the last of `count` to arrive. What the others wrote before is then visible. The
// ticket is back at zero after the last.
GRADSTAT_DEVICE bool arrives_last(uint32_t* ticket, uint32_t count, BlockMemory& memory) {
#if defined(GRADSTAT_WITHOUT_FINISH)  // benchmarks/gpu_variants.py: what finishing costs
  return false;
#endif
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) memory.is_last = atomicInc(ticket, count - 1) == count - 1;
  __syncthreads();
  const bool is_last = memory.is_last;
  if (is_last) __threadfence();
  return is_last;
}

// Reading ----------------------------------------------------------------------------------------------

// What a thread has to read exactly, element by element: its vectors of a tile, or its part of what lies
// before the first and behind the last vector of the tensor.
struct ExactWork {
  uint32_t vectors;  // a mask
  bool edges;
};

GRADSTAT_DEVICE void lift_at(const Place& place, int64_t element, Row& row) {
  const double index = static_cast<double>(element);
  if (place.is_pair) {
    lift_pair(row, value_at(place.address, place.dtype, 2 * element),
              value_at(place.address, place.dtype, 2 * element + 1), index);
  } else {
    lift(row, value_at(place.address, place.dtype, element), index);
  }
}

// A factor of 1 stores nothing, as the scale kernel does not either.
template <class Format>
GRADSTAT_DEVICE uint4 multiplied_at(uint4* address, const uint4& v, const Multiplier& by) {
  const uint4 product = scaled<typename Format::Scale>(v, by);
  if (by.narrow != 1.0f) store_vector(address, product);
  return product;
}

GRADSTAT_DEVICE void multiply_at(const Place& place, int64_t element, const Multiplier& by) {
  if (by.narrow == 1.0f) return;
  if (place.is_pair) {
    scale_value(place, 2 * element, by);
    scale_value(place, 2 * element + 1, by);
  } else {
    scale_value(place, element, by);
  }
}

template <bool kMultiplies>
GRADSTAT_DEVICE void read_exact(const Segment& segment, uint32_t tile, const ExactWork& work,
                                const BlockMemory& memory, Row& row) {
  const int32_t length = work.edges ? 1 : segment.place.elements_per_vector();
  const int64_t edge_elements = segment.extent.head + segment.extent.tail;
  const int64_t pieces =
      work.edges ? (edge_elements - threadIdx.x + kThreads - 1) / kThreads : int64_t{kVectorsPerThread};
#pragma unroll 1
  for (int64_t piece = 0; piece < pieces; ++piece) {
    int64_t element = piece * kThreads + threadIdx.x;
    if (work.edges) {
      if (element >= segment.extent.head) element += segment.place.numel - edge_elements;
    } else {
      if (((work.vectors >> piece) & 1u) == 0) continue;
      element = segment.extent.head + (static_cast<int64_t>(tile) * kTileVectors + element) * length;
    }
#pragma unroll 1
    for (int32_t i = 0; i < length; ++i) {
      // Vectors were multiplied when they were read fast.
      if (kMultiplies && work.edges) multiply_at(segment.place, element + i, memory.multiplier());
      lift_at(segment.place, element + i, row);
    }
  }
}

template <class Format>
GRADSTAT_DEVICE bool is_safe(const Share<typename Format::Extreme>& share, uint32_t zeros, uint32_t elements) {
  // Upper halves of these powers of two as float64.
  constexpr uint32_t kLow = static_cast<uint32_t>(1023 + Format::kSafeLow) << 20;
  constexpr uint32_t kHigh = static_cast<uint32_t>(1023 + Format::kSafeHigh) << 20;
  const uint32_t high = high_word(share.squares);
  if (Format::is_suspect(share)) return false;
  return high - kLow < kHigh - kLow || (high == 0 && zeros == elements);
}

// Reads tiles from `tile` on, until the end of the segment or a tile in which some thread of the warp has
// something that only the exact path can read. Fills `row` with what was read, `tile` with the next one,
// and returns this thread's vectors that are left to the exact path, as a mask.
template <bool kMultiplies, class Format>
GRADSTAT_DEVICE uint32_t read_fast(const Format& format, const Segment& segment, uint32_t& tile,
                                   const BlockMemory& memory, Row& row) {
  using ShareOf = Share<typename Format::Extreme>;
  constexpr uint32_t kElements = Format::kElements;
  ShareOf run{0, 0, Format::positive_infinity(), Format::negative_infinity(), 0};
  const auto take = [&](const ShareOf& share, uint32_t zeros) {
    run.squares += share.squares;
    run.sum += share.sum;
    run.low = Format::min(run.low, share.low);
    run.high = Format::max(run.high, share.high);
    run.zeros += zeros;
  };

  const auto full = static_cast<uint32_t>(segment.extent.vectors / kTileVectors);
  const uint32_t full_end = segment.end < full ? segment.end : full;
  uint4* next = reinterpret_cast<uint4*>(segment.vectors_address()) +
                static_cast<uint64_t>(tile) * kTileVectors + threadIdx.x;
  uint32_t left_over = 0;
  bool stop = false;
  uint4 ahead[kVectorsPerThread] = {};  // unset, the compiler would preserve what was there before
  const auto fetch_next = [&]() __attribute__((always_inline)) {
    if (tile < full_end) {
#pragma unroll
      for (int k = 0; k < kVectorsPerThread; ++k) ahead[k] = load_vector(next + k * kThreads);
    }
  };
  fetch_next();
  while (tile < full_end && !stop) {
    uint4 now[kVectorsPerThread];
#pragma unroll
    for (int k = 0; k < kVectorsPerThread; ++k) now[k] = ahead[k];
    next += kTileVectors;
    ++tile;
    // Before the arithmetic, so that loads are always under way. Where stores are half of the traffic half as
    // many will do; fetched behind it, vectors leave registers to the products.
    if constexpr (!kMultiplies) fetch_next();
    if constexpr (kMultiplies) {
      const Multiplier by = memory.multiplier();
#pragma unroll
      for (int k = 0; k < kVectorsPerThread; ++k) {
        now[k] = multiplied_at<Format>(next - kTileVectors + k * kThreads, now[k], by);
      }
    }
    ShareOf share;
#pragma unroll
    for (int k = 0; k < kVectorsPerThread; ++k) format.add(now[k], share, k == 0);
    const uint32_t zeros = Format::zeros(share);
    const bool safe = is_safe<Format>(share, zeros, kVectorsPerThread * kElements);
    if (safe) {
      take(share, zeros);
    } else {
      left_over = (1u << kVectorsPerThread) - 1;
    }
    stop = __any_sync(kAllLanes, !safe);
    if constexpr (kMultiplies) {
      if (!stop) fetch_next();
    }
  }

  // The last tile of a tensor may be partly filled; its vectors are checked one by one.
  if (!stop && tile < segment.end) {
    const int64_t left = segment.extent.vectors - static_cast<int64_t>(tile) * kTileVectors - threadIdx.x;
#pragma unroll
    for (int k = 0; k < kVectorsPerThread; ++k) {
      if (k * kThreads < left) ahead[k] = load_vector(next + k * kThreads);
    }
    ++tile;
#pragma unroll
    for (int k = 0; k < kVectorsPerThread; ++k) {
      if (k * kThreads < left) {
        if constexpr (kMultiplies) {
          ahead[k] = multiplied_at<Format>(next + k * kThreads, ahead[k], memory.multiplier());
        }
        ShareOf share;
        format.add(ahead[k], share, true);
        const uint32_t zeros = Format::zeros(share);
        if (is_safe<Format>(share, zeros, kElements)) {
          take(share, zeros);
        } else {
          left_over |= 1u << k;
        }
      }
    }
  }
  row.zero_count = run.zeros;
  row.sum = run.sum;
  row.sq_sum = run.squares;
  row.min = format.widened_min(run.low);
  row.max = format.widened_max(run.high);
  return left_over;
}

template <bool kMultiplies>
GRADSTAT_DEVICE uint32_t read_fast(const Segment& segment, uint32_t& tile, const BlockMemory& memory,
                                   Row& row) {
  const bool is_pair = segment.place.is_pair;
  switch (segment.place.dtype) {
    case DType::kFloat32:
      return is_pair ? read_fast<kMultiplies>(Float32Format<true>{}, segment, tile, memory, row)
                     : read_fast<kMultiplies>(Float32Format<false>{}, segment, tile, memory, row);
    case DType::kBFloat16:
      return read_fast<kMultiplies>(PackedFormat<PackedBFloat16, false>{}, segment, tile, memory, row);
    case DType::kFloat16:
      return is_pair ? read_fast<kMultiplies>(PackedFormat<PackedHalf, true>{}, segment, tile, memory, row)
                     : read_fast<kMultiplies>(PackedFormat<PackedHalf, false>{}, segment, tile, memory, row);
    case DType::kFloat64:
      return is_pair ? read_fast<kMultiplies>(Float64Format<true>{}, segment, tile, memory, row)
                     : read_fast<kMultiplies>(Float64Format<false>{}, segment, tile, memory, row);
    case DType::kFloat8E4M3FN:
      return read_fast<kMultiplies>(Float8Format<DType::kFloat8E4M3FN>{}, segment, tile, memory, row);
    case DType::kFloat8E5M2:
      return read_fast<kMultiplies>(Float8Format<DType::kFloat8E5M2>{}, segment, tile, memory, row);
    case DType::kFloat8E4M3FNUZ:
      return read_fast<kMultiplies>(Float8Format<DType::kFloat8E4M3FNUZ>{}, segment, tile, memory, row);
    default:
      return read_fast<kMultiplies>(Float8Format<DType::kFloat8E5M2FNUZ>{}, segment, tile, memory, row);
  }
}

// Reads a warp's part of a segment into `columns`, in shared memory. Fast and exact reading take turns, so
// that the code and the registers of the exact path exist once and outside the hot loops.
template <bool kMultiplies>
GRADSTAT_DEVICE void read_segment(const BlockMemory& memory, double* columns) {
  const Segment& segment = memory.segment;
  const int lane = static_cast<int>(threadIdx.x % 32);
  if (lane < kFields) columns[lane] = identity_of_column(lane);
  __syncwarp();
  uint32_t tile = segment.begin;
  ExactWork work{0, tile == 0};
  bool has_work = tile == 0 && segment.extent.head + segment.extent.tail > 0;
  while (has_work || (tile < segment.end && segment.extent.vectors > 0)) {
    Row row = identity_row();
    if (has_work) {
      read_exact<kMultiplies>(segment, tile - 1, work, memory, row);
      has_work = false;
    } else {
      work = {read_fast<kMultiplies>(segment, tile, memory, row), false};
      has_work = __any_sync(kAllLanes, work.vectors != 0);
    }
    merge_over_warp(row);
    if (lane == 0) merge_into_columns(columns, row);
  }
}

// The whole ---------------------------------------------------------------------------------------------

GRADSTAT_DEVICE void finish(const StatsArguments& arguments, BlockMemory& memory) {
  const int thread = static_cast<int>(threadIdx.x);
  if (thread < kFields) reinterpret_cast<double*>(arguments.totals + blockIdx.x)[thread] = memory.total[thread];
  if (!arrives_last(arguments.tickets + gridDim.x, gridDim.x, memory)) return;
  const double total = merge_rows(arguments.totals, gridDim.x, memory);
  if (thread < kFields) memory.of_warp[0][thread] = total;
  __syncthreads();
  if (thread != 0) return;
  Row row = identity_row();
#define GRADSTAT_FIELD(name, how) row.name = memory.of_warp[0][kColumn_##name];
#include "stat_fields.def"
  write_value(arguments.norm.norm, arguments.norm.dtype, decide(arguments.norm, row));
}

template <class Table>
GRADSTAT_DEVICE Segment segment_of(const Table& table, int32_t tensor, uint32_t begin, uint32_t end) {
  const uint32_t first = table.first_tile(tensor), last = table.first_tile(tensor + 1);
  const Place place = table.place(tensor);
  return {place, place.extent(), first < begin ? begin - first : 0, (last < end ? last : end) - first};
}

// Merges the rows of the block's warps, and puts the result where it belongs.
template <class Table>
GRADSTAT_DEVICE void leave_row(const Table& table, const StatsArguments& arguments, int32_t tensor,
                               BlockMemory& memory) {
  const int thread = static_cast<int>(threadIdx.x);
  const uint32_t block = blockIdx.x;
  const uint32_t first = table.first_tile(tensor), last = table.first_tile(tensor + 1);
  const uint32_t first_block = first >= memory.begin ? block : arguments.partition.block_of(first);
  const uint32_t last_block = last <= memory.end ? block : arguments.partition.block_of(last - 1);
  const bool is_whole = first_block == last_block;
  // Slots are numbered block + tensor: from one segment to the next, one of the two grows.
  Row* row = is_whole ? arguments.table + tensor : arguments.slots + block + tensor;
  if (thread < kFields) {
    double value = memory.of_warp[0][thread];
    for (int i = 1; i < kWarps; ++i) value = merge_column(thread, value, memory.of_warp[i][thread]);
    memory.total[thread] = merge_column(thread, memory.total[thread], value);
    reinterpret_cast<double*>(row)[thread] = value;
  }
  if (is_whole) {
    __syncthreads();
    return;
  }
  // A tensor that spans blocks is the last of its first block: that block's ticket is its own.
  const uint32_t count = last_block - first_block + 1;
  if (!arrives_last(arguments.tickets + first_block, count, memory)) return;
  const double value = merge_rows(arguments.slots + first_block + tensor, count, memory);
  if (thread < kFields) reinterpret_cast<double*>(arguments.table + tensor)[thread] = value;
}

template <bool kMultiplies, class Table>
GRADSTAT_DEVICE void stats_block(const Table& table, const StatsArguments& arguments, BlockMemory& memory) {
  const int thread = static_cast<int>(threadIdx.x);
  if (thread == 0) {
    memory.begin = arguments.partition.first_tile(blockIdx.x);
    memory.end = arguments.partition.first_tile(blockIdx.x + 1);
    if constexpr (kMultiplies) memory.factor = *arguments.factor;
  }
  if (thread < kFields) memory.total[thread] = identity_of_column(thread);
  __syncthreads();
  int32_t tensor = memory.begin < memory.end ? find_tensor(table, arguments.tensors, memory.begin) : -1;
  for (; 0 <= tensor && tensor < arguments.tensors && table.first_tile(tensor) < memory.end; ++tensor) {
    if (thread == 0) memory.segment = segment_of(table, tensor, memory.begin, memory.end);
    __syncthreads();
    if (kMultiplies && size_of(memory.segment.place.dtype) == 1) {
      fill_products(memory.products, memory.segment.place.dtype, memory.factor);
      __syncthreads();
    }
    read_segment<kMultiplies>(memory, memory.of_warp[thread / 32]);
    __syncthreads();
    leave_row(table, arguments, tensor, memory);
  }
  // Not before: blocks of the scale kernel would wait where blocks of this one could read.
  admit_next_kernel();
  if (arguments.wants_norm) finish(arguments, memory);
}

template <class Table>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    stats_kernel(const __grid_constant__ Table table, const __grid_constant__ StatsArguments arguments) {
  __shared__ BlockMemory memory;
  stats_block<false>(table, arguments, memory);
}

template <class Table>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    unscale_kernel(const __grid_constant__ Table table, const __grid_constant__ StatsArguments arguments) {
  __shared__ BlockMemory memory;
  stats_block<true>(table, arguments, memory);
}

}  // namespace gradstat
