// The team of decide.h for a single thread.
#pragma once

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "decide.h"

namespace gradstat {

struct SingleThread {
  int64_t rank() const { return 0; }
  int64_t size() const { return 1; }
  void barrier() const {}
  template <class How>
  double all_reduce(double value, const How&) const {
    return value;
  }
};

// Quickselect with branch-free partitions that always swap, as branches on random numbers are mispredicted.
// Values below the pivot come first, then those equal to it.
template <class Numbers>
Neighbours neighbours(const SingleThread&, const Numbers& numbers, int64_t count, int64_t k) {
  std::vector<double> sorted(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) sorted[i] = numbers(i);
  double *first = sorted.data(), *const end = first + count, *const at = first + k, *last = end;
  const auto moved_to_front = [&](auto&& belongs) {
    double* middle = first;
    for (double* p = first; p != last; ++p) {
      std::swap(*p, *middle);
      middle += belongs(*middle) ? 1 : 0;
    }
    return middle;
  };
  while (last - first > 1) {
    const double pivot = first[(last - first) / 2];
    double* const below = moved_to_front([&](double x) { return x < pivot; });
    if (at < below) {
      last = below;
      continue;
    }
    first = below;
    first = moved_to_front([&](double x) { return !(x > pivot); });
    if (at < first) break;
  }
  return {*at, at + 1 < end ? *std::min_element(at + 1, end) : *at};
}

// Throws std::runtime_error if numbers of recorded values, in the state of a clip or guard, cannot be right.
inline void require_counts(const double* recorded, int64_t number) {
  for (int64_t i = 0; i < number; ++i) {
    if (count_of(recorded[i]) != recorded[i] || std::floor(recorded[i]) != recorded[i]) {
      throw std::runtime_error("gradstat: state: expected whole numbers of recorded values, got " +
                               std::to_string(recorded[i]));
    }
  }
}

inline void decide_step(const ClipRequest& request) {
  require_counts(&reinterpret_cast<const ClipTotals*>(request.state)->recorded, 1);
  decide_clip(request, SingleThread{});
}

inline void decide_step(const GuardRequest& request) {
  require_counts(reinterpret_cast<const GuardTotals*>(request.state)->recorded, kGuarded);
  int judgements[kGuarded];
  for (int series = 0; series < kGuarded; ++series)
    judgements[series] = guards::judge(request, series, SingleThread{});
  guards::conclude(request, judgements);
}

}  // namespace gradstat
