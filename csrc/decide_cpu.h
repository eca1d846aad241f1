// One thread as the team of decide.h.
#pragma once

#include <algorithm>
#include <vector>

#include "decide.h"

namespace gradstat {

struct Alone {
  int64_t rank() const { return 0; }
  int64_t size() const { return 1; }
  void meet() const {}
  template <class How>
  double merged(double value, const How&) const {
    return value;
  }

  template <class Numbers>
  Neighbours ordered(const Numbers& numbers, int64_t count, int64_t k) const {
    std::vector<double> sorted(static_cast<size_t>(count));
    for (int64_t i = 0; i < count; ++i) sorted[i] = numbers(i);
    const auto at = sorted.begin() + k;
    std::nth_element(sorted.begin(), at, sorted.end());
    return {*at, k + 1 < count ? *std::min_element(at + 1, sorted.end()) : *at};
  }
};

inline void guard_step(const GuardRequest& request) {
  int judgements[kGuarded];
  for (int series = 0; series < kGuarded; ++series)
    judgements[series] = guards::judge(request, series, Alone{});
  guards::conclude(request, judgements);
}

}  // namespace gradstat
