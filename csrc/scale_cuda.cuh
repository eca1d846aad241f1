// The scale kernel: multiplies many tensors of any types and sizes in place by one number on the device, or by
// one for each.
//
// Blocks take the same ranges of tiles as in the statistics kernel but walk them backwards, so that the first
// reads meet what that kernel read last and the second-level cache still holds.
#pragma once

#include "multiply.cuh"

namespace gradstat {

struct ScaleArguments {
  int32_t tensors;
  Partition partition;
  Coefficients coefficients;
};

// The vectors of tiles [begin, end) of a tensor, the last tile first.
template <class Type>
GRADSTAT_DEVICE void scale_tiles(uint4* vectors, int64_t count, uint32_t begin, uint32_t end,
                                 const Multiplier& by) {
#pragma unroll 1
  for (uint32_t tile = end; tile > begin; --tile) {
    uint4* at = vectors + static_cast<uint64_t>(tile - 1) * kTileVectors + threadIdx.x;
    const int64_t left = count - static_cast<int64_t>(tile - 1) * kTileVectors - threadIdx.x;
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

// The values before the first and behind the last vector.
GRADSTAT_DEVICE void scale_edges(const Place& place, const Extent& extent, const Multiplier& by) {
  const int64_t per_element = place.is_pair ? 2 : 1;
  const int64_t count = (extent.head + extent.tail) * per_element;
  for (int64_t i = threadIdx.x; i < count; i += kThreads) {
    const int64_t in_vectors = place.numel * per_element - count;
    scale_value(place, i < extent.head * per_element ? i : i + in_vectors, by);
  }
}

GRADSTAT_DEVICE void scale_tiles_of(const Place& place, const Extent& extent, uint32_t begin, uint32_t end,
                                    const Multiplier& by) {
  auto* vectors =
      reinterpret_cast<uint4*>(place.address + (static_cast<uint64_t>(extent.head) << place.shift()));
  switch (place.dtype) {
    case DType::kFloat32:
      return scale_tiles<ScaleFloat32>(vectors, extent.vectors, begin, end, by);
    case DType::kBFloat16:
      return scale_tiles<ScaleBFloat16>(vectors, extent.vectors, begin, end, by);
    case DType::kFloat16:
      return scale_tiles<ScaleHalf>(vectors, extent.vectors, begin, end, by);
    case DType::kFloat64:
      return scale_tiles<ScaleFloat64>(vectors, extent.vectors, begin, end, by);
    default:
      return scale_tiles<ScaleFloat8>(vectors, extent.vectors, begin, end, by);
  }
}

template <class Table>
GRADSTAT_DEVICE void scale_block(const Table& table, const ScaleArguments& arguments, uint8_t* products) {
  const uint32_t begin = arguments.partition.first_tile(blockIdx.x);
  const uint32_t end = arguments.partition.first_tile(blockIdx.x + 1);
  int32_t tensor = find_tensor(table, arguments.tensors, end - 1);  // there are no more blocks than tiles
  // Every block, whatever it will do: were this kernel to end first, the next one would not wait either.
  wait_for_previous_kernel();
  const bool is_one_each = arguments.coefficients.stride != 0;
  double coefficient = arguments.coefficients.of(0);
  if (!is_one_each && coefficient == 1.0) return;

  DType of_products = DType::kFloat32;  // none
  for (; tensor >= 0; --tensor) {
    const uint32_t first = table.first_tile(tensor), last = table.first_tile(tensor + 1);
    if (last <= begin) return;
    if (is_one_each) {
      coefficient = arguments.coefficients.of(tensor);
      if (coefficient == 1.0) continue;
      of_products = DType::kFloat32;
    }
    const Multiplier by{coefficient, static_cast<float>(coefficient), products};
    const Place place = table.place(tensor);
    if (size_of(place.dtype) == 1 && place.dtype != of_products) {
      of_products = place.dtype;
      __syncthreads();
      fill_products(products, place.dtype, by.narrow);
      __syncthreads();
    }
    const Extent extent = place.extent();
    scale_tiles_of(place, extent, first < begin ? begin - first : 0, (last < end ? last : end) - first, by);
    if (first >= begin) scale_edges(place, extent, by);
  }
}

template <class Table>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    scale_kernel(const __grid_constant__ Table table, const __grid_constant__ ScaleArguments arguments) {
  __shared__ uint8_t products[256];
  scale_block(table, arguments, products);
}

}  // namespace gradstat
