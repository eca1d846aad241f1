// The scale kernel: multiplies tensors of any dtypes and sizes in place, by one multiplier on the device or by
// one for each tensor.
//
// Blocks take the same ranges of tiles as in the statistics kernel but process them backwards, so that the
// first reads hit what that kernel read last, which is still in L2.
#pragma once

#include "device.cuh"

namespace gradstat {

struct ScaleArguments {
  Partition partition;
  Multipliers multipliers;
};

// Scales the vectors of tiles [begin, end) of a tensor, last tile first.
template <class Type>
GRADSTAT_DEVICE void scale_tiles(uint4* vectors, int64_t count, uint32_t begin, uint32_t end, uint32_t thread,
                                 const Multiplier& by) {
#pragma unroll 1
  for (uint32_t tile = end; tile > begin; --tile) {
    uint4* at = vectors + static_cast<uint64_t>(tile - 1) * kTileVectors + thread;
    const int64_t left = count - static_cast<int64_t>(tile - 1) * kTileVectors - thread;
    uint4 v[kVectorsPerThread] = {};
#pragma unroll
    for (int k = 0; k < kVectorsPerThread; ++k) {
      if (k * kThreads < left) v[k] = load_vector(at + k * kThreads);
    }
#pragma unroll
    for (int k = 0; k < kVectorsPerThread; ++k) {
      if (k * kThreads < left) store_vector(at + k * kThreads, scaled<Type>(v[k], by));
    }
  }
}

// Scales the values before the first and after the last vector.
GRADSTAT_DEVICE void scale_edges(const Place& place, const Extent& extent, uint32_t thread,
                                 const Multiplier& by) {
  const int64_t per_element = place.is_pair ? 2 : 1;
  const int64_t count = (extent.head + extent.tail) * per_element;
  for (int64_t i = thread; i < count; i += kThreads) {
    const int64_t in_vectors = place.numel * per_element - count;
    scale_value(place, i < extent.head * per_element ? i : i + in_vectors, by);
  }
}

GRADSTAT_DEVICE void scale_tiles_of(const Place& place, const Extent& extent, uint32_t begin, uint32_t end,
                                    uint32_t thread, const Multiplier& by) {
  auto* vectors = reinterpret_cast<uint4*>(place.address + (static_cast<uint64_t>(extent.head) << place.shift));
  switch (place.dtype) {
    case DType::kFloat32:
      return scale_tiles<ScaleFloat32>(vectors, extent.vectors, begin, end, thread, by);
    case DType::kBFloat16:
      return scale_tiles<ScalePacked<PackedBFloat16>>(vectors, extent.vectors, begin, end, thread, by);
    case DType::kFloat16:
      return scale_tiles<ScalePacked<PackedHalf>>(vectors, extent.vectors, begin, end, thread, by);
    case DType::kFloat64:
      return scale_tiles<ScaleFloat64>(vectors, extent.vectors, begin, end, thread, by);
    default:
      return scale_tiles<ScaleFloat8>(vectors, extent.vectors, begin, end, thread, by);
  }
}

template <class Table>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    scale_kernel(const __grid_constant__ Table table, const __grid_constant__ ScaleArguments arguments) {
  __shared__ uint8_t products[256];
  const uint32_t range = blockIdx.x;
  const bool is_per_tensor = arguments.multipliers.stride != 0;
  double multiplier = arguments.multipliers.of(0);
  if (!is_per_tensor && multiplier == 1.0) return;
  const uint32_t begin = arguments.partition.first_tile(range), end = arguments.partition.first_tile(range + 1);
  DType of_products = DType::kFloat32;  // none
  for (int32_t tensor = table.first_tensors[range + 1]; tensor >= 0; --tensor) {
    const uint32_t first = table.first_tiles[tensor];
    if (first >= end) continue;  // first tensor of the next range
    const uint32_t last = table.first_tiles[tensor + 1];
    if (last <= begin) return;
    if (is_per_tensor) {
      multiplier = arguments.multipliers.of(tensor);
      if (multiplier == 1.0) continue;
      of_products = DType::kFloat32;
    }
    const Multiplier by{multiplier, static_cast<float>(multiplier), products};
    const Place place = place_of(table, tensor);
    if (size_of(place.dtype) == 1 && place.dtype != of_products) {
      of_products = place.dtype;
      __syncthreads();
      fill_products(products, place.dtype, by.narrow);
      __syncthreads();
    }
    const Extent extent = place.extent();
    // Rotates the warps from tensor to tensor, so that tensors of few vectors are read in parallel.
    const uint32_t thread = (threadIdx.x + 32 * static_cast<uint32_t>(tensor)) % kThreads;
    scale_tiles_of(place, extent, first < begin ? begin - first : 0, (last < end ? last : end) - first, thread,
                   by);
    if (first >= begin) scale_edges(place, extent, thread, by);
  }
}

}  // namespace gradstat
