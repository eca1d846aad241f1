// Stands in for torch's header: what csrc/stats_cpu.cpp needs of it, on threads that ThreadSanitizer can
// follow. It cannot follow torch's own, as OpenMP's runtime is not built for it.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

namespace torch::stable {

constexpr int64_t kThreads = 4;

inline int64_t get_num_threads() { return kThreads; }

template <class F>
void parallel_for(int64_t begin, int64_t end, int64_t grain, const F& f) {
  std::atomic<int64_t> next{begin};
  std::vector<std::thread> threads;
  for (int64_t i = 0; i < kThreads; ++i) {
    threads.emplace_back([&] {
      for (int64_t at; (at = next.fetch_add(grain)) < end;) f(at, std::min(at + grain, end));
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace torch::stable
