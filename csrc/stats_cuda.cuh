// The statistics kernel: the rows of tensors of any dtypes and sizes in one launch.
//
// Each block takes an equal, contiguous range of the tiles and processes it tensor by tensor. A small tensor is
// read by one warp while the others go on to the next. Any other tensor is shared by all warps; one of them
// merges their rows while the rest go on. A tensor that lies within one range is then complete. For a tensor
// that spans several ranges, each range writes a row to a slot, and the block that arrives last merges the
// slots in order. The norm of all tensors is computed in the same way from one total per range.
//
// A second kernel also multiplies elements by a factor in place, immediately before it reads them. A thread
// re-reads only what it stored itself, so nothing is multiplied twice and no barrier is needed.
#pragma once

#include "formats.cuh"

namespace gradstat {

struct StatsArguments {
  Partition partition;
  Row* table;
  Row* slots;           // ranges + tensors
  Row* totals;          // ranges
  uint32_t* tickets;    // ranges + 1, zero before and after the launch
  const float* factor;  // for the multiplying kernel
  NormRequest norm;
};
static_assert(sizeof(StatsArguments) <= kOtherArgumentBytes);

// The part of a tensor that one warp reads: chunks begin, begin + step, ... before end.
struct Segment {
  Place place;
  Extent extent;
  uint32_t begin, step, end;
  uint32_t full_end;  // end of the chunks that are complete

  GRADSTAT_DEVICE uint64_t vectors_address() const {
    return place.address + (static_cast<uint64_t>(extent.head) << place.shift);
  }
};

// Rows that several ranges write, to their slots or totals. The range that arrives last merges them.
struct Arrival {
  const Row* rows;
  uint32_t count;  // 0: none
  uint32_t* ticket;
  double* result;
};
// For each range: the tensor shared with earlier ranges, the one shared with later ranges, and the total.
constexpr int kArrivals = 3;
// Groups of threads that merge rows, one thread per column, and the number of rows each group loads at once.
constexpr int kMergers = kThreads / kFields;
static_assert(kFields <= 32, "one lane of a warp for each column");
constexpr int kRowsAtOnce = 16;

// In shared memory, also to keep these values out of registers during the hot loops.
struct BlockMemory {
  Segment segment[kWarps];
  int32_t tensor[kWarps];  // that the warp's segment belongs to
  // The warps' rows of a tensor. Double-buffered: the warps go on to the next tensor while one of them merges.
  double of_warp[2][kWarps][kFields];
  double total[kWarps][kFields];  // merged rows of the tensors each warp has finished
  Arrival arrivals[kArrivals];
  bool is_last[kArrivals];
  double of_merger[kArrivals][kMergers][kFields];
  float factor;
  uint8_t products[256];  // of the 256 codes of of_products with `factor`
  DType of_products;

  GRADSTAT_DEVICE Multiplier multiplier() const { return {factor, factor, products}; }
};

enum Column : int {
#define GRADSTAT_FIELD(name, how) kColumn_##name,
#include "stat_fields.def"
};

// Columns of minima and of maxima, as masks; the others are sums.
constexpr uint32_t kMinima = 0
#define GRADSTAT_FIELD(name, how) | (merge::identity_of_##how > 0 ? 1u << kColumn_##name : 0u)
#include "stat_fields.def"
    ;
constexpr uint32_t kMaxima = 0
#define GRADSTAT_FIELD(name, how) | (merge::identity_of_##how < 0 ? 1u << kColumn_##name : 0u)
#include "stat_fields.def"
    ;
// Columns for unusual elements, which the fast path does not write.
constexpr uint32_t kUnusual = 1u << kColumn_nan_count | 1u << kColumn_inf_count | 1u << kColumn_sq_sum_large |
                              1u << kColumn_sq_sum_small | 1u << kColumn_first_nonfinite;

GRADSTAT_DEVICE double identity_of_column(int column) {
  return (kMinima >> column & 1u) != 0   ? merge::identity_of_min
         : (kMaxima >> column & 1u) != 0 ? merge::identity_of_max
                                         : merge::identity_of_sum;
}

// Branch-free, as the lanes of a warp handle columns of all three kinds.
GRADSTAT_DEVICE double merge_column(int column, double a, double b) {
  const bool is_min = (kMinima >> column & 1u) != 0, is_max = (kMaxima >> column & 1u) != 0;
  const bool is_sum = !is_min & !is_max;
  const double next = is_sum ? merge::sum(a, b) : b;
  return is_sum | (is_min & (b < a)) | (is_max & (b > a)) ? next : a;
}

// Merges the rows of a warp's threads; the result is in lane 0. The columns for unusual elements are skipped
// if, as usual, no thread has any; all others are merged in parallel.
GRADSTAT_DEVICE void merge_over_warp(Row& row) {
  bool unusual = false;
#define GRADSTAT_FIELD(name, how) \
  if (kUnusual >> kColumn_##name & 1u) unusual |= row.name != merge::identity_of_##how;
#include "stat_fields.def"
  unusual = __any_sync(kAllLanes, unusual);
#pragma unroll 1
  for (int distance = 16; distance > 0; distance /= 2) {
#define GRADSTAT_FIELD(name, how)                                                    \
  if (!(kUnusual >> kColumn_##name & 1u)) {                                          \
    row.name = merge::how(row.name, __shfl_xor_sync(kAllLanes, row.name, distance)); \
  }
#include "stat_fields.def"
    if (!unusual) continue;
#define GRADSTAT_FIELD(name, how)                                                    \
  if (kUnusual >> kColumn_##name & 1u) {                                             \
    row.name = merge::how(row.name, __shfl_xor_sync(kAllLanes, row.name, distance)); \
  }
#include "stat_fields.def"
  }
}

// A warp merges rows[0 .. count) in shared memory in a fixed order; lanes 0 .. kFields - 1 return their column.
GRADSTAT_DEVICE double merge_by_warp(const double (*rows)[kFields], int count) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int column = lane % kFields;
  double value = identity_of_column(column);
#pragma unroll 1
  for (int i = lane / kFields; i < count; i += 32 / kFields) {
    if (lane < 32 / kFields * kFields) value = merge_column(column, value, rows[i][column]);
  }
  double merged = value;
#pragma unroll
  for (int other = kFields; other + kFields <= 32; other += kFields) {
    merged = merge_column(column, merged, __shfl_down_sync(kAllLanes, value, other));
  }
  return merged;
}

// Merges rows[0 .. count) by a whole block: each of its mergers writes a partial row, in a fixed order.
GRADSTAT_DEVICE void merge_by_mergers(const Row* rows, uint32_t count, double (*of_merger)[kFields]) {
  const int thread = static_cast<int>(threadIdx.x);
  const int column = thread % kFields;
  const uint32_t merger = static_cast<uint32_t>(thread / kFields);
  if (merger >= kMergers) return;
  const double* values = reinterpret_cast<const double*>(rows + merger) + column;
  constexpr int kChains = 4;
  double value[kChains];
  for (double& each : value) each = identity_of_column(column);
#pragma unroll 1
  for (uint32_t begin = merger; begin < count; begin += kMergers * kRowsAtOnce) {
    double loaded[kRowsAtOnce];
#pragma unroll
    for (int k = 0; k < kRowsAtOnce; ++k) {
      loaded[k] = identity_of_column(column);
      // Bypasses L1: the rows were written by other blocks.
      if (begin + k * kMergers < count) loaded[k] = __ldcg(values + k * kMergers * kFields);
    }
#pragma unroll
    for (int k = 0; k < kRowsAtOnce; ++k) {
      value[k % kChains] = merge_column(column, value[k % kChains], loaded[k]);
    }
    values += kMergers * kRowsAtOnce * kFields;
  }
  of_merger[merger][column] =
      merge_column(column, merge_column(column, value[0], value[1]), merge_column(column, value[2], value[3]));
}

GRADSTAT_DEVICE void lift_at(const Place& place, int64_t element, Row& row) {
  const double index = static_cast<double>(element);
  if (place.is_pair) {
    lift(row, index, value_at(place.address, place.dtype, 2 * element),
         value_at(place.address, place.dtype, 2 * element + 1));
  } else {
    lift(row, index, value_at(place.address, place.dtype, element));
  }
}

// With a factor of 1 nothing is stored, as in the scale kernel.
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

// The exact path, element by element: this thread's share of the elements before the first and after the last
// vector of the tensor, if `edges`, and its vectors of a chunk that are set in the mask.
template <bool kMultiplies>
GRADSTAT_DEVICE void read_exact(const Segment& segment, bool edges, uint32_t chunk, uint32_t vectors,
                                const BlockMemory& memory, Row& row) {
  const int64_t lane = threadIdx.x % 32;
  const int64_t edge_elements = edges ? segment.extent.head + segment.extent.tail : 0;
  const int64_t edge_pieces = (edge_elements - lane + 31) / 32;
  const int64_t pieces = edge_pieces + (vectors != 0 ? kVectorsPerThread : 0);
#pragma unroll 1
  for (int64_t piece = 0; piece < pieces; ++piece) {
    const bool is_edge = piece < edge_pieces;
    int32_t length = 1;
    int64_t element = piece * 32 + lane;
    if (is_edge) {
      if (element >= segment.extent.head) element += segment.place.numel - edge_elements;
    } else {
      if ((vectors >> (piece - edge_pieces) & 1u) == 0) continue;
      length = kVectorBytes >> segment.place.shift;
      element -= edge_pieces * 32;
      element = segment.extent.head + (static_cast<int64_t>(chunk) * kChunkVectors + element) * length;
    }
#pragma unroll 1
    for (int32_t i = 0; i < length; ++i) {
      // Vectors were already multiplied on the fast path.
      if (kMultiplies && is_edge) multiply_at(segment.place, element + i, memory.multiplier());
      lift_at(segment.place, element + i, row);
    }
  }
}

template <class Format>
GRADSTAT_DEVICE bool is_safe(const Share<Format>& share, uint32_t zeros, uint32_t elements) {
  // The high words of these powers of two as float64.
  constexpr uint32_t kLow = static_cast<uint32_t>(1023 + Format::kSafeLow) << 20;
  constexpr uint32_t kHigh = static_cast<uint32_t>(1023 + Format::kSafeHigh) << 20;
  const uint32_t high = high_word(share.sums.sq_sum);
  if (Format::is_suspect(share)) return false;
  return high - kLow < kHigh - kLow || (high == 0 && zeros == elements);
}

// Reads chunks starting with `chunk`, until the end of the segment or until any thread of the warp finds values
// that only the exact path can read. Writes what was read to `row` and the next chunk to `chunk`. Returns a
// mask of this thread's vectors in the previous chunk that are left to the exact path.
template <bool kMultiplies, class Format>
GRADSTAT_DEVICE uint32_t read_fast(const Format& format, const Segment& segment, uint32_t& chunk,
                                   const BlockMemory& memory, Row& row) {
  constexpr uint32_t kElements = Format::kElements;
  Share<Format> run{{}, Format::positive_infinity(), Format::negative_infinity(), 0};
  const auto take = [&](const Share<Format>& share, uint32_t zeros) {
    run.add(share.sums, share.low, share.high, false);
    run.zeros += zeros;
  };

  // Kept in registers, except in the multiplying kernel, which needs them for the products.
  const uint32_t step_kept = segment.step, full_end_kept = segment.full_end;
  const uint32_t& step = kMultiplies ? segment.step : step_kept;
  const uint32_t& full_end = kMultiplies ? segment.full_end : full_end_kept;
  uint4* next = reinterpret_cast<uint4*>(segment.vectors_address()) +
                static_cast<uint64_t>(chunk) * kChunkVectors + threadIdx.x % 32;
  uint32_t left_over = 0;
  bool stop = false;
  uint4 ahead[kVectorsPerThread] = {};  // if uninitialized, the compiler would keep the old contents alive
  const auto fetch_next = [&]() __attribute__((always_inline)) {
    if (chunk < full_end) {
#pragma unroll
      for (int k = 0; k < kVectorsPerThread; ++k) ahead[k] = load_vector(next + k * 32);
    }
  };
  const auto advance = [&]() __attribute__((always_inline)) {
    next += step * kChunkVectors;
    chunk += step;
  };
  fetch_next();
  while (chunk < full_end && !stop) {
    uint4 now[kVectorsPerThread];
#pragma unroll
    for (int k = 0; k < kVectorsPerThread; ++k) now[k] = ahead[k];
    // Loads are issued before the arithmetic, to stay in flight. In the multiplying kernel half of the traffic
    // is stores and half as many loads suffice: issuing them afterwards leaves registers to the products.
    if constexpr (!kMultiplies) {
      advance();
      fetch_next();
    } else {
      const Multiplier by = memory.multiplier();
#pragma unroll
      for (int k = 0; k < kVectorsPerThread; ++k) {
        now[k] = multiplied_at<Format>(next + k * 32, now[k], by);
      }
      advance();
    }
    Share<Format> share;
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

  // The last chunk of a tensor may be incomplete; its vectors are checked one by one.
  if (!stop && chunk < segment.end) {
    const int64_t left =
        segment.extent.vectors - static_cast<int64_t>(chunk) * kChunkVectors - threadIdx.x % 32;
#pragma unroll
    for (int k = 0; k < kVectorsPerThread; ++k) {
      if (k * 32 < left) ahead[k] = load_vector(next + k * 32);
    }
    chunk += step;
#pragma unroll
    for (int k = 0; k < kVectorsPerThread; ++k) {
      if (k * 32 < left) {
        if constexpr (kMultiplies) {
          ahead[k] = multiplied_at<Format>(next + k * 32, ahead[k], memory.multiplier());
        }
        Share<Format> share;
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
  run.sums.each(row, [](double& column, double sum) { column = sum; });
  row.min = format.widened_min(run.low);
  row.max = format.widened_max(run.high);
  return left_over;
}

template <bool kMultiplies>
GRADSTAT_DEVICE uint32_t read_fast(const Segment& segment, uint32_t& chunk, const BlockMemory& memory,
                                   Row& row) {
  const bool is_pair = segment.place.is_pair;
  switch (segment.place.dtype) {
    case DType::kFloat32:
      return is_pair ? read_fast<kMultiplies>(Float32Format<true>{}, segment, chunk, memory, row)
                     : read_fast<kMultiplies>(Float32Format<false>{}, segment, chunk, memory, row);
    case DType::kBFloat16:
      return read_fast<kMultiplies>(PackedFormat<PackedBFloat16, false>{}, segment, chunk, memory, row);
    case DType::kFloat16:
      return is_pair ? read_fast<kMultiplies>(PackedFormat<PackedHalf, true>{}, segment, chunk, memory, row)
                     : read_fast<kMultiplies>(PackedFormat<PackedHalf, false>{}, segment, chunk, memory, row);
    case DType::kFloat64:
      return is_pair ? read_fast<kMultiplies>(Float64Format<true>{}, segment, chunk, memory, row)
                     : read_fast<kMultiplies>(Float64Format<false>{}, segment, chunk, memory, row);
    case DType::kFloat8E4M3FN:
      return read_fast<kMultiplies>(Float8Format<DType::kFloat8E4M3FN>{}, segment, chunk, memory, row);
    case DType::kFloat8E5M2:
      return read_fast<kMultiplies>(Float8Format<DType::kFloat8E5M2>{}, segment, chunk, memory, row);
    case DType::kFloat8E4M3FNUZ:
      return read_fast<kMultiplies>(Float8Format<DType::kFloat8E4M3FNUZ>{}, segment, chunk, memory, row);
    default:
      return read_fast<kMultiplies>(Float8Format<DType::kFloat8E5M2FNUZ>{}, segment, chunk, memory, row);
  }
}

// Reads a warp's segment into `columns`, in shared memory. The fast and the exact path alternate, so that the
// code and registers of the exact path exist once, outside the hot loops.
template <bool kMultiplies>
GRADSTAT_DEVICE void read_segment(const Segment& segment, const BlockMemory& memory, double* columns) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  if (lane < kFields) columns[lane] = identity_of_column(lane);
  __syncwarp();
  uint32_t chunk = segment.begin;
  bool edges = chunk == 0 && segment.extent.head + segment.extent.tail > 0;
  while (edges || chunk < segment.end) {
    Row row = identity_row();
    uint32_t left_over = 0;
    if (chunk < segment.end) left_over = read_fast<kMultiplies>(segment, chunk, memory, row);
    if (edges || left_over != 0) {
      read_exact<kMultiplies>(segment, edges, chunk - segment.step, left_over, memory, row);
    }
    edges = false;
    merge_over_warp(row);
    if (lane != 0) continue;
#define GRADSTAT_FIELD(name, how) columns[kColumn_##name] = merge::how(columns[kColumn_##name], row.name);
#include "stat_fields.def"
  }
  __syncwarp();
}

// The part of tiles [begin, end) of a tensor that this warp reads, alone or shared with the other warps.
GRADSTAT_DEVICE Segment segment_of(const Place& place, uint32_t begin, uint32_t end, bool is_read_by_one_warp) {
  const Extent extent = place.extent();
  const auto full = static_cast<uint32_t>(extent.vectors / kChunkVectors);
  const uint32_t chunks = full + (extent.vectors % kChunkVectors != 0), most = end * kWarps;
  const uint32_t warp = threadIdx.x / 32;
  return {place,
          extent,
          begin * kWarps + (is_read_by_one_warp ? 0 : warp),
          is_read_by_one_warp ? 1u : kWarps,
          chunks < most ? chunks : most,
          full < most ? full : most};
}

// One warp merges `count` rows of a tensor and writes the result to the table or to the range's slot.
template <class Table>
GRADSTAT_DEVICE void write_row(const Table& table, const StatsArguments& arguments, uint32_t range,
                               int32_t tensor, const double (*rows)[kFields], int count, BlockMemory& memory) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const Partition& partition = arguments.partition;
  const uint32_t first = table.first_tiles[tensor], last = table.first_tiles[tensor + 1];
  const bool begins_before = first < partition.first_tile(range);
  const bool is_whole = !begins_before && last <= partition.first_tile(range + 1);
  // Slot numbers range + tensor are unique, as from one segment to the next one of the two increases.
  Row* const row = is_whole ? arguments.table + tensor : arguments.slots + range + tensor;
  const double value = merge_by_warp(rows, count);
  if (lane < kFields) {
    double& total = memory.total[threadIdx.x / 32][lane];
    total = merge_column(lane, total, value);
    reinterpret_cast<double*>(row)[lane] = value;
  }
  if (!is_whole && lane == 0) {
    const uint32_t first_range = partition.range_of(first), last_range = partition.range_of(last - 1);
    // A tensor that spans ranges is the last one in its first range, so it can use that range's ticket.
    memory.arrivals[begins_before ? 0 : 1] = {arguments.slots + first_range + tensor,
                                              last_range - first_range + 1, arguments.tickets + first_range,
                                              reinterpret_cast<double*>(arguments.table + tensor)};
  }
}

template <bool kMultiplies, class Table>
GRADSTAT_DEVICE void read_range(const Table& table, const StatsArguments& arguments, uint32_t range,
                                BlockMemory& memory) {
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % 32, warp = thread / 32;
  if (lane < kFields) memory.total[warp][lane] = identity_of_column(lane);
  if (thread < kArrivals) memory.arrivals[thread].count = 0;
  __syncwarp();
  const uint32_t begin = arguments.partition.first_tile(range), end = arguments.partition.first_tile(range + 1);
  int set = 0;
  for (int32_t tensor = table.first_tensors[range]; table.first_tiles[tensor] < end; ++tensor) {
    const Place place = place_of(table, tensor);
    if (kMultiplies && size_of(place.dtype) == 1 && place.dtype != memory.of_products) {
      __syncthreads();
      if (thread == 0) memory.of_products = place.dtype;
      fill_products(memory.products, place.dtype, memory.factor);
      __syncthreads();
    }
    const bool is_read_by_one_warp = place.is_small();
    const bool merges = tensor % kWarps == warp;  // the warps take turns
    if (is_read_by_one_warp && !merges) continue;
    if (lane == 0) {
      const uint32_t first = table.first_tiles[tensor], last = table.first_tiles[tensor + 1];
      memory.segment[warp] = segment_of(place, first < begin ? begin - first : 0,
                                        (last < end ? last : end) - first, is_read_by_one_warp);
      memory.tensor[warp] = tensor;
    }
    __syncwarp();
    read_segment<kMultiplies>(memory.segment[warp], memory, memory.of_warp[set][warp]);
    tensor = memory.tensor[warp];
    __syncwarp();  // the next small tensor replaces it
    const double (*rows)[kFields] = memory.of_warp[set] + (is_read_by_one_warp ? warp : 0);
    if (!is_read_by_one_warp) {
      __syncthreads();
      set ^= 1;
    }
    if (tensor % kWarps == warp)
      write_row(table, arguments, range, tensor, rows, is_read_by_one_warp ? 1 : kWarps, memory);
  }
}

// Performs the merges for which this range arrived last, and writes the norm and what follows from it.
GRADSTAT_DEVICE void finish(const StatsArguments& arguments, uint32_t range, BlockMemory& memory) {
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % 32, warp = thread / 32;
  __syncthreads();
  if (warp == 0) {
    if (arguments.norm.norm != nullptr) {
      const double total = merge_by_warp(memory.total, kWarps);
      if (lane < kFields) reinterpret_cast<double*>(arguments.totals + range)[lane] = total;
      if (lane == 0) {
        const uint32_t ranges = arguments.partition.ranges;
        memory.arrivals[kArrivals - 1] = {arguments.totals, ranges, arguments.tickets + ranges,
                                          memory.total[0]};
      }
    }
    __syncwarp();
    if (lane < kArrivals) {
      const Arrival& arrival = memory.arrivals[lane];
      memory.is_last[lane] = arrival.count > 0 && arrives_last(arrival.ticket, arrival.count);
    }
  }
  __syncthreads();
#pragma unroll 1
  for (int i = 0; i < kArrivals; ++i) {
    const Arrival& arrival = memory.arrivals[i];
    if (memory.is_last[i]) merge_by_mergers(arrival.rows, arrival.count, memory.of_merger[i]);
  }
  __syncthreads();
  if (warp >= kArrivals || !memory.is_last[warp]) return;
  const double value = merge_by_warp(memory.of_merger[warp], kMergers);
  if (lane < kFields) memory.arrivals[warp].result[lane] = value;
  __syncwarp();
  if (thread != 32 * (kArrivals - 1)) return;
  Row row = identity_row();
#define GRADSTAT_FIELD(name, how) row.name = memory.total[0][kColumn_##name];
#include "stat_fields.def"
  write_value(arguments.norm.norm, arguments.norm.dtype, decide(arguments.norm, row));
}

template <bool kMultiplies, class Table>
GRADSTAT_DEVICE void stats_block(const Table& table, const StatsArguments& arguments, BlockMemory& memory) {
  if constexpr (kMultiplies) {
    if (threadIdx.x == 0) {
      memory.factor = *arguments.factor;
      memory.of_products = DType::kFloat32;  // none
    }
    __syncthreads();
  }
  read_range<kMultiplies>(table, arguments, blockIdx.x, memory);
  finish(arguments, blockIdx.x, memory);
}

// Before sm_80, without packed conversions and minima, more registers are needed. The memory of these GPUs is
// slower: one block keeps enough bytes in flight.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
constexpr int kResidentBlocks = 1;
#else
constexpr int kResidentBlocks = kBlocksPerMultiprocessor;
#endif

template <class Table>
__global__ void __launch_bounds__(kThreads, kResidentBlocks)
    stats_kernel(const __grid_constant__ Table table, const __grid_constant__ StatsArguments arguments) {
  __shared__ BlockMemory memory;
  stats_block<false>(table, arguments, memory);
}

template <class Table>
__global__ void __launch_bounds__(kThreads, kResidentBlocks)
    unscale_kernel(const __grid_constant__ Table table, const __grid_constant__ StatsArguments arguments) {
  __shared__ BlockMemory memory;
  stats_block<true>(table, arguments, memory);
}

}  // namespace gradstat
