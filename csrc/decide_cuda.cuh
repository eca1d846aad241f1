// The kernels that decide about a step, one block each.
#pragma once

#include "decide.h"
#include "device.cuh"

namespace gradstat {

// Unsigned integers in the order of the numbers; -0 and +0 are equal.
GRADSTAT_DEVICE uint64_t key_of(double number) {
  const auto bits = bitcast<uint64_t>(number + 0.0);
  return bits >> 63 != 0 ? ~bits : bits | uint64_t{1} << 63;
}

// Radix select, one bit at a time from the highest bit in which any numbers differ: counting the candidates
// with a 0 there tells the bit of the result. Ends as soon as one candidate is left.
template <class Team, class Numbers>
GRADSTAT_DEVICE Neighbours neighbours(const Team& team, const Numbers& numbers, int64_t count, int64_t k) {
  const auto smaller = [](double a, double b) { return merge::min(a, b); };
  const auto larger = [](double a, double b) { return merge::max(a, b); };
  const auto sum = [](double a, double b) { return merge::sum(a, b); };
  const auto each = [&](auto&& take) {
    for (int64_t i = team.rank(); i < count; i += team.size()) take(numbers(i));
  };
  double least = kInf, most = -kInf;
  each([&](double number) {
    least = smaller(least, number);
    most = larger(most, number);
  });
  const uint64_t low = key_of(team.all_reduce(least, smaller)), high = key_of(team.all_reduce(most, larger));
  uint64_t prefix = low, mask = ~uint64_t{0};  // bits of the result's key, and the mask of known bits
  while ((low & mask) != (high & mask)) mask <<= 1;
  prefix &= mask;
  auto left = static_cast<double>(count), place = static_cast<double>(k);
  for (uint64_t bit = (~mask >> 1) + 1; ~mask != 0 && left > 1; bit >>= 1) {
    double mine = 0;
    each([&](double number) {
      const uint64_t key = key_of(number);
      mine += (key & mask) == prefix && (key & bit) == 0 ? 1 : 0;
    });
    const double zeros = team.all_reduce(mine, sum);
    mask |= bit;
    if (place < zeros) {
      left = zeros;
    } else {
      prefix |= bit;
      place -= zeros;
      left -= zeros;
    }
  }
  double result = kInf;
  each([&](double number) {
    if ((key_of(number) & mask) == prefix) result = smaller(result, number);
  });
  result = team.all_reduce(result, smaller);
  double next = kInf;
  each([&](double number) {
    if (number > result) next = smaller(next, number);
  });
  next = team.all_reduce(next, smaller);
  return {result, place + 1 < left || next == kInf ? result : next};
}

// The team of decide.h for a warp.
struct Warp {
  GRADSTAT_DEVICE int64_t rank() const { return threadIdx.x % 32; }
  GRADSTAT_DEVICE int64_t size() const { return 32; }
  GRADSTAT_DEVICE void barrier() const { __syncwarp(); }

  // Reduces in a fixed order.
  template <class How>
  GRADSTAT_DEVICE double all_reduce(double value, const How& how) const {
#pragma unroll 1
    for (int distance = 16; distance > 0; distance /= 2) {
      value = how(value, __shfl_xor_sync(kAllLanes, value, distance));
    }
    return value;
  }
};

// The team of decide.h for a block.
class Block {
 public:
  GRADSTAT_DEVICE explicit Block(double* of_warp) : of_warp_(of_warp) {}
  GRADSTAT_DEVICE int64_t rank() const { return threadIdx.x; }
  GRADSTAT_DEVICE int64_t size() const { return kThreads; }
  GRADSTAT_DEVICE void barrier() const { __syncthreads(); }

  template <class How>
  GRADSTAT_DEVICE double all_reduce(double value, const How& how) const {
    value = Warp().all_reduce(value, how);
    barrier();  // until of_warp_ of the previous call has been read
    if (threadIdx.x % 32 == 0) of_warp_[threadIdx.x / 32] = value;
    barrier();
    double all = of_warp_[0];
#pragma unroll 1
    for (int warp = 1; warp < kWarps; ++warp) all = how(all, of_warp_[warp]);
    return all;
  }

 private:
  double* of_warp_;  // kWarps numbers in shared memory
};

__global__ void __launch_bounds__(kThreads) decide_clip_kernel(const __grid_constant__ ClipRequest request) {
  __shared__ double of_warp[kWarps];
  decide_clip(request, Block(of_warp));
}

// One warp per series. There is one block, so a multiprocessor need not hold more (otherwise ptxas spills).
__global__ void __launch_bounds__(kThreads, 1) guard_kernel(const __grid_constant__ GuardRequest request) {
  __shared__ int judgements[kGuarded];
  const int series = static_cast<int>(threadIdx.x / 32);
  if (series < kGuarded) {
    const int judgement = guards::judge(request, series, Warp());
    if (threadIdx.x % 32 == 0) judgements[series] = judgement;
  }
  __syncthreads();
  if (threadIdx.x == 0) guards::conclude(request, judgements);
}

}  // namespace gradstat
