// How tensors divide into tiles, and the table that tells a CUDA kernel where they are. Plain C++ for host
// and device, so that both count alike.
//
// A tensor is `head` elements up to the first address that is a multiple of 16, then whole 16-byte vectors,
// then `tail` elements. A tile is kTileVectors of these vectors; the first tile of a tensor brings head and
// tail along. Every tensor has at least one tile, an empty one too: it then gets its row like any other.
#pragma once

#include <cstdint>
#include <vector>

#include "entry.h"
#include "stat.h"

namespace gradstat {

// Two constants that benchmarks/gpu_variants.py compiles with other values.
#if !defined(GRADSTAT_VECTORS_PER_THREAD)
#define GRADSTAT_VECTORS_PER_THREAD 4
#endif
#if !defined(GRADSTAT_BLOCKS_PER_MULTIPROCESSOR)
#define GRADSTAT_BLOCKS_PER_MULTIPROCESSOR 3
#endif

constexpr int kThreads = 256;     // per block
constexpr int kVectorBytes = 16;  // one load
// Of one tile: what a thread has in flight at once.
constexpr int kVectorsPerThread = GRADSTAT_VECTORS_PER_THREAD;
constexpr int kTileVectors = kThreads * kVectorsPerThread;

// Blocks of any kernel that a multiprocessor holds at once, at least; a launch has as many as the device
// holds. It leaves each thread up to 80 registers. Because a thread of the statistics kernel asks for its next
// 64 bytes before it works on the last, 48 KB are in flight all the time; an H200 needs about 33 KB for each
// multiprocessor to cover 0.9 microseconds of latency.
constexpr int kBlocksPerMultiprocessor = GRADSTAT_BLOCKS_PER_MULTIPROCESSOR;

// Entries that fit in the parameters of a launch: 20 bytes each, in at most 4 KB, 12 KB and 32 KB (minus the
// other arguments). Three sizes, because a launch copies all of a parameter whatever part of it is used.
constexpr int kSmallTable = 190;
constexpr int kMediumTable = 600;
constexpr int kLargeTable = 1620;

struct Extent {
  int64_t head;     // elements before the vectors
  int64_t vectors;  // of 16 bytes
  int64_t tail;     // elements after them
};

// Log2 of the bytes of an element: divisions cost a GPU more than anything else here.
GRADSTAT_HD int32_t element_shift(DType dtype, bool is_pair) {
  const int32_t bytes = size_of(dtype);
  return (bytes == 8 ? 3 : bytes == 4 ? 2 : bytes == 2 ? 1 : 0) + (is_pair ? 1 : 0);
}

// torch aligns a complex element to its full size. Should one come from elsewhere aligned only to its real
// part, no vector would hold whole elements: then all of it is head, read correctly but slowly.
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

  GRADSTAT_HD int32_t shift() const { return element_shift(dtype, is_pair); }
  GRADSTAT_HD int32_t elements_per_vector() const { return kVectorBytes >> shift(); }
  GRADSTAT_HD Extent extent() const { return extent_of(address, numel, shift()); }
};

// Number of elements in the low 56 bits, type above them.
inline uint64_t pack_shape(const Entry& entry) {
  const uint64_t type = static_cast<uint64_t>(entry.dtype) | (entry.is_pair ? 16u : 0u);
  return static_cast<uint64_t>(entry.numel) | (type << 56);
}

GRADSTAT_HD Place unpack_place(uint64_t address, uint64_t shape) {
  const auto type = static_cast<uint32_t>(shape >> 56);
  return {address, static_cast<int64_t>(shape & ((uint64_t{1} << 56) - 1)), static_cast<DType>(type & 15u),
          (type & 16u) != 0};
}

inline uint32_t tiles_of(const Entry& entry) {
  const int32_t shift = element_shift(entry.dtype, entry.is_pair);
  const Extent extent = extent_of(reinterpret_cast<uint64_t>(entry.data), entry.numel, shift);
  const int64_t tiles = (extent.vectors + kTileVectors - 1) / kTileVectors;
  return static_cast<uint32_t>(tiles > 0 ? tiles : 1);
}

inline uint64_t count_tiles(const std::vector<Entry>& entries) {
  uint64_t tiles = 0;
  for (const Entry& entry : entries) tiles += tiles_of(entry);
  return tiles;
}

// The table as three arrays: addresses, shapes, and the number of tiles before each tensor and in all.
inline void fill_table(const std::vector<Entry>& entries, uint64_t* addresses, uint64_t* shapes,
                       uint32_t* first_tiles) {
  uint32_t tiles = 0;
  for (size_t i = 0; i < entries.size(); ++i) {
    addresses[i] = reinterpret_cast<uint64_t>(entries[i].data);
    shapes[i] = pack_shape(entries[i]);
    first_tiles[i] = tiles;
    tiles += tiles_of(entries[i]);
  }
  first_tiles[entries.size()] = tiles;
}

// Travels with the launch.
template <int kCapacity>
struct ParameterTable {
  uint64_t addresses[kCapacity];
  uint64_t shapes[kCapacity];
  uint32_t first_tiles[kCapacity + 1];

  GRADSTAT_HD Place place(int32_t i) const { return unpack_place(addresses[i], shapes[i]); }
  GRADSTAT_HD uint32_t first_tile(int32_t i) const { return first_tiles[i]; }
};

// Lies in device memory, for more tensors than parameters can hold.
struct DeviceTable {
  const uint64_t* addresses;
  const uint64_t* shapes;
  const uint32_t* first_tiles;

  GRADSTAT_HD Place place(int32_t i) const { return unpack_place(addresses[i], shapes[i]); }
  GRADSTAT_HD uint32_t first_tile(int32_t i) const { return first_tiles[i]; }

  static size_t bytes(size_t tensors) {
    return tensors * (2 * sizeof(uint64_t) + sizeof(uint32_t)) + sizeof(uint32_t);
  }
  static DeviceTable at(void* memory, size_t tensors) {
    auto* words = static_cast<uint64_t*>(memory);
    return {words, words + tensors, reinterpret_cast<uint32_t*>(words + 2 * tensors)};
  }
};

// The tensor that tile number `tile` belongs to.
template <class Table>
GRADSTAT_HD int32_t find_tensor(const Table& table, int32_t tensors, uint32_t tile) {
  int32_t low = 0, high = tensors - 1;
  while (low < high) {
    const int32_t middle = low + (high - low + 1) / 2;
    if (table.first_tile(middle) <= tile) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

// How `tiles` are dealt to `blocks`: contiguous ranges, the first `longer` of them of length + 1 tiles.
struct Partition {
  uint32_t blocks, length, longer;

  static Partition of(uint32_t tiles, uint32_t blocks) { return {blocks, tiles / blocks, tiles % blocks}; }

  GRADSTAT_HD uint32_t first_tile(uint32_t block) const {
    return block * length + (block < longer ? block : longer);
  }
  GRADSTAT_HD uint32_t block_of(uint32_t tile) const {
    const uint32_t in_longer = longer * (length + 1);
    return tile < in_longer ? tile / (length + 1) : longer + (tile - in_longer) / length;
  }
};

}  // namespace gradstat
