// How tensors are split into tiles, and the table that describes the tensors to a CUDA kernel. Plain C++ for
// host and device, so that both compute the same numbers.
//
// A tensor consists of `head` elements up to the first 16-byte boundary, then 16-byte vectors, then `tail`
// elements. A tile is kTileVectors of these vectors, in as many chunks as a block has warps. The first tile of
// a tensor includes head and tail. Every tensor has at least one tile, even if it is empty, so that it gets a
// row like any other.
#pragma once

#include <cstdint>
#include <type_traits>
#include <vector>

#include "entry.h"

namespace gradstat {

constexpr int kThreads = 256;     // per block
constexpr int kVectorBytes = 16;  // one load
// Vectors of one chunk per thread, all loaded at once.
constexpr int kVectorsPerThread = 4;
constexpr int kWarps = kThreads / 32;
constexpr int kChunkVectors = 32 * kVectorsPerThread;  // read by a warp at once
constexpr int kTileVectors = kWarps * kChunkVectors;

// Blocks of a statistics or scale kernel resident on a multiprocessor, at least. It limits a thread to 80
// registers and keeps 48 KB in flight, as a thread loads its next 64 bytes before it processes the last ones.
// An H200 needs about 33 KB per multiprocessor to cover 0.9 microseconds of latency.
constexpr int kBlocksPerMultiprocessor = 3;

// Each block takes one range of tiles. An upper bound, for 256 multiprocessors; no device has as many.
constexpr uint32_t kMaxRanges = 256 * kBlocksPerMultiprocessor;

// Tensors up to this size are read by one warp, others by all warps of a block.
constexpr int64_t kSmallTensorBytes = 4096;
static_assert(kSmallTensorBytes <= kTileVectors * kVectorBytes, "a small tensor is one tile");

// How many entries fit in the kernel parameters, besides the first tensor of each range (2 bytes) and the other
// arguments. CUDA allows 32,764 bytes; half of that, as a launch copies all of them however many are used.
constexpr int kParameterBytes = 16384, kEntryBytes = 20, kOtherArgumentBytes = 160;
constexpr int kParameterEntries =
    (kParameterBytes - kOtherArgumentBytes - 2 * (static_cast<int>(kMaxRanges) + 1)) / kEntryBytes / 10 * 10;

struct Extent {
  int64_t head;     // elements before the vectors
  int64_t vectors;  // of 16 bytes
  int64_t tail;     // elements after them
};

// Log2 of the size of an element in bytes: integer divisions are expensive on a GPU.
GRADSTAT_HD int32_t element_shift(DType dtype, bool is_pair) {
  const int32_t bytes = size_of(dtype);
  return (bytes == 8 ? 3 : bytes == 4 ? 2 : bytes == 2 ? 1 : 0) + (is_pair ? 1 : 0);
}

// torch aligns complex elements to their full size. If one from elsewhere is aligned only to its real part, no
// vector contains whole elements, and all of the tensor becomes head: read correctly but slowly.
GRADSTAT_HD Extent extent_of(uint64_t address, int64_t numel, int32_t shift) {
  const int64_t bytes = numel << shift;
  const int64_t lead = static_cast<int64_t>((0 - address) & (kVectorBytes - 1));
  if (lead >= bytes || (lead >> shift) << shift != lead) return {numel, 0, 0};
  const int64_t vectors = (bytes - lead) / kVectorBytes;
  return {lead >> shift, vectors, (bytes - lead - vectors * kVectorBytes) >> shift};
}

// One entry of a table, unpacked.
struct Place {
  uint64_t address;
  int64_t numel;
  DType dtype;
  bool is_pair;
  int32_t shift;  // log2 of the size of an element in bytes

  GRADSTAT_HD bool is_small() const { return numel << shift <= kSmallTensorBytes; }
  GRADSTAT_HD Extent extent() const { return extent_of(address, numel, shift); }
};

// Bits 0-55: number of elements; five bits for the type; three bits for the shift.
inline uint64_t pack_shape(const Entry& entry) {
  const uint64_t type = static_cast<uint64_t>(entry.dtype) | (entry.is_pair ? 16u : 0u) |
                        static_cast<uint64_t>(element_shift(entry.dtype, entry.is_pair)) << 5;
  return static_cast<uint64_t>(entry.numel) | (type << 56);
}

GRADSTAT_HD Place unpack_place(uint64_t address, uint64_t shape) {
  const auto type = static_cast<uint32_t>(shape >> 56);
  return {address, static_cast<int64_t>(shape & ((uint64_t{1} << 56) - 1)), static_cast<DType>(type & 15u),
          (type & 16u) != 0, static_cast<int32_t>(type >> 5)};
}

inline uint32_t tiles_of(const Entry& entry) {
  const int32_t shift = element_shift(entry.dtype, entry.is_pair);
  const Extent extent = extent_of(reinterpret_cast<uint64_t>(entry.data), entry.numel, shift);
  const int64_t tiles = (extent.vectors + kTileVectors - 1) / kTileVectors;
  return static_cast<uint32_t>(tiles > 0 ? tiles : 1);
}

// Splits `tiles` into contiguous ranges, of which the first `longer` have length + 1 tiles.
struct Partition {
  uint32_t ranges, length, longer;

  GRADSTAT_HD uint32_t first_tile(uint32_t range) const {
    return range * length + (range < longer ? range : longer);
  }
  GRADSTAT_HD uint32_t range_of(uint32_t tile) const {
    const uint32_t in_longer = longer * (length + 1);
    return tile < in_longer ? tile / (length + 1) : longer + (tile - in_longer) / length;
  }
};

// A table is four arrays: addresses; shapes; the number of tiles before each tensor, and in total; the first
// tensor of each range, followed by the number of tensors.

// Passed as a kernel parameter.
struct ParameterTable {
  uint64_t addresses[kParameterEntries];
  uint64_t shapes[kParameterEntries];
  uint32_t first_tiles[kParameterEntries + 1];
  uint16_t first_tensors[kMaxRanges + 1];
};

// In device memory, for more tensors than kernel parameters can hold.
struct DeviceTable {
  uint64_t* addresses;
  uint64_t* shapes;
  uint32_t* first_tiles;
  uint32_t* first_tensors;

  static size_t bytes(size_t tensors, uint32_t ranges) {
    return tensors * (2 * sizeof(uint64_t) + sizeof(uint32_t)) + (2 + ranges) * sizeof(uint32_t);
  }
  static DeviceTable at(void* memory, size_t tensors) {
    auto* words = static_cast<uint64_t*>(memory);
    auto* tiles = reinterpret_cast<uint32_t*>(words + 2 * tensors);
    return {words, words + tensors, tiles, tiles + tensors + 1};
  }
};

template <class Table>
GRADSTAT_HD Place place_of(const Table& table, int32_t tensor) {
  return unpack_place(table.addresses[tensor], table.shapes[tensor]);
}

template <class Table>
void fill_table(const std::vector<Entry>& entries, const Partition& partition, Table& table) {
  using Tensor = std::decay_t<decltype(table.first_tensors[0])>;
  uint32_t tiles = 0, range = 0;
  for (size_t i = 0; i < entries.size(); ++i) {
    table.addresses[i] = reinterpret_cast<uint64_t>(entries[i].data);
    table.shapes[i] = pack_shape(entries[i]);
    table.first_tiles[i] = tiles;
    tiles += tiles_of(entries[i]);
    for (; partition.first_tile(range) < tiles; ++range) table.first_tensors[range] = static_cast<Tensor>(i);
  }
  table.first_tiles[entries.size()] = tiles;
  for (; range <= partition.ranges; ++range) table.first_tensors[range] = static_cast<Tensor>(entries.size());
}

}  // namespace gradstat
