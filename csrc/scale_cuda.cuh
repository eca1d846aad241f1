// The scale kernel: multiplies many tensors of any types and sizes in place by one number on the device.
//
// Blocks take the same ranges of tiles as in the statistics kernel but walk them backwards, so that the first
// reads meet what that kernel read last and the second-level cache still holds.
#pragma once

#include "device.cuh"

namespace gradstat {

struct ScaleArguments {
  int32_t tensors;
  Partition partition;
  const double* coefficient;
};

// What a block multiplies by; for 8-bit types the product of each of the 256 numbers.
struct Multiplier {
  double wide;
  float narrow;
  const uint8_t* products;
};

GRADSTAT_DEVICE uint32_t products_of(uint32_t bytes, const uint8_t* products) {
  return products[bytes & 0xffu] | (static_cast<uint32_t>(products[(bytes >> 8) & 0xffu]) << 8) |
         (static_cast<uint32_t>(products[(bytes >> 16) & 0xffu]) << 16) |
         (static_cast<uint32_t>(products[bytes >> 24]) << 24);
}

struct ScaleFloat32 {
  GRADSTAT_DEVICE static uint32_t word(uint32_t w, const Multiplier& by) {
    return float_to_bits(bits_to_float(w) * by.narrow);
  }
};
struct ScaleBFloat16 {
  GRADSTAT_DEVICE static uint32_t word(uint32_t w, const Multiplier& by) {
    return to_bfloat16_pair(low_bfloat16(w) * by.narrow, high_bfloat16(w) * by.narrow);
  }
};
struct ScaleHalf {
  GRADSTAT_DEVICE static uint32_t word(uint32_t w, const Multiplier& by) {
    return to_half_pair(low_half(w) * by.narrow, high_half(w) * by.narrow);
  }
};
struct ScaleFloat8 {
  GRADSTAT_DEVICE static uint32_t word(uint32_t w, const Multiplier& by) { return products_of(w, by.products); }
};

template <class Type>
GRADSTAT_DEVICE uint4 scaled(const uint4& v, const Multiplier& by) {
  return {Type::word(v.x, by), Type::word(v.y, by), Type::word(v.z, by), Type::word(v.w, by)};
}

struct ScaleFloat64 {};
template <>
GRADSTAT_DEVICE uint4 scaled<ScaleFloat64>(const uint4& v, const Multiplier& by) {
  const double a = words_to_double(v.x, v.y) * by.wide, b = words_to_double(v.z, v.w) * by.wide;
  return {low_word(a), high_word(a), low_word(b), high_word(b)};
}

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

GRADSTAT_DEVICE void scale_value(const Place& place, int64_t index, const Multiplier& by) {
  const double value = value_at(place.address, place.dtype, index);
  const bool is_wide = place.dtype == DType::kFloat64;
  const double product = is_wide ? value * by.wide : static_cast<float>(value) * by.narrow;
  const int32_t bytes_shift = element_shift(place.dtype, false);
  write_value(reinterpret_cast<void*>(place.address + (static_cast<uint64_t>(index) << bytes_shift)),
              place.dtype, product);
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
  const double coefficient = *arguments.coefficient;
  if (coefficient == 1.0) return;
  const Multiplier by{coefficient, static_cast<float>(coefficient), products};

  DType of_products = DType::kFloat32;  // none
  for (; tensor >= 0; --tensor) {
    const uint32_t first = table.first_tile(tensor), last = table.first_tile(tensor + 1);
    if (last <= begin) return;
    const Place place = table.place(tensor);
    if (size_of(place.dtype) == 1 && place.dtype != of_products) {
      of_products = place.dtype;
      __syncthreads();
      static_assert(kThreads == 256, "one product for each thread");
      const auto code = static_cast<uint8_t>(threadIdx.x);
      products[code] = to_float8(float8_to_float(code, place.dtype) * by.narrow, place.dtype);
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
