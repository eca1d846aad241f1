// The update kernel: sums over gradient, weight and optimizer state of many tensors, each read once. Each block
// reads a chunk of one tensor and writes its sums to a slot; a second kernel adds up the slots of a tensor in
// order. Each thread sums four or eight elements at a time in float32 and promotes the sums. What cannot be
// trusted is read again in float64, as are float64 elements, mixed dtypes and operands not aligned to 16 bytes.
#pragma once

#include "device.cuh"
#include "update.h"

namespace gradstat {

constexpr int64_t kUpdateChunk = 16384;  // elements

// The kernel's description of a tensor.
struct UpdatePlace {
  uint64_t addresses[kMaxOperands];
  int64_t numel;
  uint32_t first_chunk;
  UpdateFormula formula;
  DType dtypes[kMaxOperands];
  bool can_use_vectors;  // all operands are of one type, narrower than float64, and aligned to 16 bytes

  GRADSTAT_HD uint32_t chunks() const {
    return static_cast<uint32_t>((numel + kUpdateChunk - 1) / kUpdateChunk);
  }
};

inline UpdatePlace update_place(const UpdateEntry& entry, uint32_t first_chunk) {
  UpdatePlace place = {{}, entry.numel(), first_chunk, entry.formula, {}, true};
  for (int k = 0; k < operands_of(entry.formula); ++k) {
    const Entry& operand = entry.operands[k];
    place.addresses[k] = reinterpret_cast<uint64_t>(operand.data);
    place.dtypes[k] = operand.dtype;
    const bool is_narrow = size_of(operand.dtype) == 2 || operand.dtype == DType::kFloat32;
    place.can_use_vectors &=
        is_narrow && operand.dtype == entry.operands[0].dtype && place.addresses[k] % kVectorBytes == 0;
  }
  return place;
}

struct UpdateArguments {
  const UpdatePlace* places;
  const uint32_t* tensors;  // the tensor of each chunk
  const UpdateCoefficients<double>* coefficients;
  UpdateSums<double>* slots;  // one for each chunk
  UpdateSums<double>* table;
  uint32_t count;  // of tensors
};

struct UpdateMemory {
  UpdatePlace place;
  UpdateCoefficients<double> by;
  UpdateCoefficients<float> narrow;
  UpdateSums<double> of_warp[kWarps];
};

// The 32-bit word `i` of a 16-byte vector.
GRADSTAT_DEVICE uint32_t word_of(const uint4& v, int i) {
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

struct UpdateFloat32 {
  static constexpr int kElements = 4;
  static constexpr uint32_t kMagnitude = 0x7fffffffu;
  GRADSTAT_DEVICE static float element(const uint4& v, int i) { return bits_to_float(word_of(v, i)); }
};
template <class Packed>
struct UpdatePacked {
  static constexpr int kElements = 8;
  static constexpr uint32_t kMagnitude = 0x7fff7fffu;
  GRADSTAT_DEVICE static float element(const uint4& v, int i) {
    const uint32_t word = word_of(v, i / 2);
    return i % 2 == 0 ? Packed::low(word) : Packed::high(word);
  }
};

template <class Format>
GRADSTAT_DEVICE bool is_zero(const uint4& v) {
  return ((v.x | v.y | v.z | v.w) & Format::kMagnitude) == 0;
}

// Reads elements begin, begin + step, ... before end, in float64.
template <UpdateFormula kFormula>
GRADSTAT_DEVICE void read_update_exactly(const UpdateMemory& memory, int64_t begin, int64_t end, int64_t step,
                                         UpdateSums<double>& sums) {
  constexpr int kOperands = operands_of(kFormula);
#pragma unroll 1
  for (int64_t i = begin; i < end; i += step) {
    double x[kOperands];
#pragma unroll
    for (int k = 0; k < kOperands; ++k) {
      x[k] = value_at(memory.place.addresses[k], memory.place.dtypes[k], i);
    }
    add_update<kFormula>(sums, x, memory.by);
  }
}

// Reads this thread's vectors of [at, end), every kThreads-th, and stops `at` the first that cannot be trusted.
template <UpdateFormula kFormula, class Format>
GRADSTAT_DEVICE void read_update_fast(const UpdateMemory& memory, int64_t& at, int64_t end,
                                      UpdateSums<double>& total) {
  constexpr int kOperands = operands_of(kFormula);
#pragma unroll 1
  for (; at < end; at += kThreads * Format::kElements) {
    uint4 v[kOperands];
    const auto load = [&](int k) __attribute__((always_inline)) {
      return load_vector(reinterpret_cast<const uint4*>(memory.place.addresses[k]) + at / Format::kElements);
    };
#pragma unroll
    for (int k = 0; k < kOperands; ++k) v[k] = load(k);
    UpdateSums<float> sums = {};
#pragma unroll
    for (int e = 0; e < Format::kElements; ++e) {
      float x[kOperands];
#pragma unroll
      for (int k = 0; k < kOperands; ++k) x[k] = Format::element(v[k], e);
      add_update<kFormula>(sums, x, memory.narrow);
    }
    if (!is_safe(sums, false, kFormula == UpdateFormula::kGradient, false, kFormula)) {
      // Zeros are rare, so loading the vectors again to check for them is cheap.
      const bool no_weight = is_zero<Format>(load(1));
      const bool no_gradient = is_zero<Format>(load(0)) && (memory.narrow.weight_decay == 0 || no_weight);
      const bool no_momentum = kFormula == UpdateFormula::kGradient || is_zero<Format>(load(2));
      if (!is_safe(sums, no_gradient, no_momentum, no_weight, kFormula)) return;
    }
    merge_into(total, sums);
  }
}

// Reads this thread's elements of [begin, end), where `begin` is aligned to a vector. The fast and the exact
// path alternate, to keep the registers of the latter out of the hot loop.
template <UpdateFormula kFormula>
GRADSTAT_DEVICE void read_update(const UpdateMemory& memory, int64_t begin, int64_t end,
                                 UpdateSums<double>& total) {
  const DType dtype = memory.place.dtypes[0];
  const bool can_use_vectors = memory.place.can_use_vectors && fits_float(memory.by, kFormula);
  const int64_t elements = can_use_vectors ? kVectorBytes / size_of(dtype) : 1;
  const int64_t whole = can_use_vectors ? end - (end - begin) % elements : begin;
  int64_t at = begin + threadIdx.x * elements;
  bool is_rest = false;
#pragma unroll 1
  while (!is_rest) {
    if (at < whole) {
      if (dtype == DType::kFloat32) {
        read_update_fast<kFormula, UpdateFloat32>(memory, at, whole, total);
      } else if (dtype == DType::kBFloat16) {
        read_update_fast<kFormula, UpdatePacked<PackedBFloat16>>(memory, at, whole, total);
      } else {
        read_update_fast<kFormula, UpdatePacked<PackedHalf>>(memory, at, whole, total);
      }
    }
    is_rest = at >= whole;
    const int64_t first = is_rest ? whole + threadIdx.x : at;
    read_update_exactly<kFormula>(memory, first, is_rest ? end : at + elements, is_rest ? kThreads : 1, total);
    at += kThreads * elements;
  }
}

GRADSTAT_DEVICE void merge_over_warp(UpdateSums<double>& sums) {
  double* column = &sums.update;
#pragma unroll
  for (int k = 0; k < kUpdateSums; ++k) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      column[k] += __shfl_xor_sync(kAllLanes, column[k], distance);
    }
  }
}

// sm_120 has too few registers for a third block without spilling.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
#define GRADSTAT_UPDATE_BLOCKS 2
#else
#define GRADSTAT_UPDATE_BLOCKS kBlocksPerMultiprocessor
#endif
__global__ void __launch_bounds__(kThreads, GRADSTAT_UPDATE_BLOCKS)
    update_kernel(const __grid_constant__ UpdateArguments arguments) {
  __shared__ UpdateMemory memory;
  const uint32_t thread = threadIdx.x, tensor = arguments.tensors[blockIdx.x];
  if (thread == 0) {
    memory.place = arguments.places[tensor];
    memory.by = arguments.coefficients[tensor];
    memory.narrow = narrowed(memory.by);
  }
  __syncthreads();
  const UpdatePlace& place = memory.place;
  const int64_t begin = static_cast<int64_t>(blockIdx.x - place.first_chunk) * kUpdateChunk;
  const int64_t end = begin + kUpdateChunk < place.numel ? begin + kUpdateChunk : place.numel;
  UpdateSums<double> sums = {};
  with_formula(place.formula,
               [&](auto formula) { read_update<decltype(formula)::value>(memory, begin, end, sums); });
  merge_over_warp(sums);
  if (thread % 32 == 0) memory.of_warp[thread / 32] = sums;
  __syncthreads();
  if (thread == 0) {
    for (int warp = 1; warp < kWarps; ++warp) merge_into(sums, memory.of_warp[warp]);
    arguments.slots[blockIdx.x] = sums;
  }
}

// One warp per tensor.
__global__ void __launch_bounds__(kThreads)
    update_merge_kernel(const __grid_constant__ UpdateArguments arguments) {
  const uint32_t tensor = blockIdx.x * kWarps + threadIdx.x / 32;
  if (tensor >= arguments.count) return;
  const UpdatePlace& place = arguments.places[tensor];
  UpdateSums<double> sums = {};
  for (uint32_t chunk = threadIdx.x % 32; chunk < place.chunks(); chunk += 32) {
    merge_into(sums, arguments.slots[place.first_chunk + chunk]);
  }
  merge_over_warp(sums);
  if (threadIdx.x % 32 == 0) arguments.table[tensor] = sums;
}

}  // namespace gradstat
