// Lets g++ compile the device code of kernels and runs it on the CPU: one block after another, with threads as
// coroutines that switch only at barriers and warp exchanges. It therefore does not detect races between
// threads that do not synchronize. It does detect wrong results, mismatched barriers of the kinds below, and
// errors with tickets.
#pragma once

#include <setjmp.h>
#include <sys/time.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <utility>
#include <vector>

using std::fma;  // the overloads for double and float, as in CUDA

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __shared__ static

struct uint4 {
  uint32_t x, y, z, w;
};
struct dim3 {
  uint32_t x;
};
inline dim3 threadIdx, blockIdx, gridDim;

namespace cuda_on_host {

constexpr int kWarpSize = 32;
constexpr int kMaxSeconds = 60;  // CPU time for one launch

// A barrier: all threads wait until the last one arrives.
struct Barrier {
  int expected = 0, arrived = 0;
  uint64_t generation = 0;
};

class Block {
 public:
  explicit Block(int threads) : threads_(threads), jumps_(threads), contexts_(threads), started_(threads) {
    for (int i = 0; i < threads; ++i) stacks_.push_back(std::make_unique<char[]>(kStackBytes));
    warps_.resize(threads / kWarpSize);
    exchange_.resize(2 * threads);
  }

  // Runs body() in every thread, starting with thread `first`.
  template <class Body>
  void run(const Body& body, int first) {
    body_ = [](const void* b) { (*static_cast<const Body*>(b))(); };
    argument_ = &body;
    std::fill(started_.begin(), started_.end(), false);
    alive_.assign(threads_, true);
    left_ = threads_;
    idle_ = 0;
    all_ = {threads_, 0, 0};
    for (Barrier& warp : warps_) warp = {kWarpSize, 0, 0};
    std::fill(parity_, parity_ + kMaxThreads, 0);
    if (_setjmp(home_) == 0) enter(first);
  }

  void block_barrier() { wait_at(all_); }
  void warp_barrier() { wait_at(warps_[current_ / kWarpSize]); }

  // Passes a value to the other lanes of the warp and returns the values of all lanes.
  template <class T>
  const T* exchange(T value) {
    static_assert(sizeof(T) <= 8);
    const int lane = current_ % kWarpSize, warp = current_ / kWarpSize;
    // Two buffers in turn suffice: a lane can be one exchange ahead of another, but not two.
    const int base = (2 * warp + (parity_[current_] ^= 1)) * kWarpSize;
    std::memcpy(&exchange_[base + lane], &value, sizeof(T));
    warp_barrier();
    static T values[kWarpSize];
    for (int i = 0; i < kWarpSize; ++i) std::memcpy(&values[i], &exchange_[base + i], sizeof(T));
    return values;
  }

 private:
  static constexpr size_t kStackBytes = 128 * 1024;  // a table in kernel parameters takes 32 KB
  static constexpr int kMaxThreads = 1024;

  void wait_at(Barrier& barrier) {
    const uint64_t generation = barrier.generation;
    idle_ = 0;
    if (++barrier.arrived == barrier.expected) {
      barrier.arrived = 0;
      ++barrier.generation;
      return;
    }
    while (barrier.generation == generation) {
      if (++idle_ > 2 * threads_) {
        std::fprintf(stderr, "threads of a block wait at different barriers\n");
        std::abort();
      }
      if (_setjmp(jumps_[current_]) == 0) enter(next());
    }
    idle_ = 0;
  }

  int next() const {
    int thread = current_;
    do {
      thread = (thread + 1) % threads_;
    } while (!alive_[thread]);
    return thread;
  }

  [[noreturn]] void enter(int thread) {
    current_ = thread;
    threadIdx.x = static_cast<uint32_t>(thread);
    if (started_[thread]) _longjmp(jumps_[thread], 1);
    started_[thread] = true;
    getcontext(&contexts_[thread]);
    contexts_[thread].uc_stack.ss_sp = stacks_[thread].get();
    contexts_[thread].uc_stack.ss_size = kStackBytes;
    contexts_[thread].uc_link = nullptr;
    makecontext(&contexts_[thread], &Block::start, 0);
    setcontext(&contexts_[thread]);
    std::abort();
  }

  static void start();

  int threads_, current_ = 0, left_ = 0, idle_ = 0;
  void (*body_)(const void*) = nullptr;
  const void* argument_ = nullptr;
  jmp_buf home_;
  struct Jump {
    jmp_buf buffer;
  };
  struct Jumps {
    explicit Jumps(int count) : all(count) {}
    jmp_buf& operator[](int i) { return all[i].buffer; }
    std::vector<Jump> all;
  } jumps_;
  std::vector<ucontext_t> contexts_;
  std::vector<char> started_, alive_;
  std::vector<std::unique_ptr<char[]>> stacks_;
  std::vector<Barrier> warps_;
  Barrier all_;
  std::vector<uint64_t> exchange_;
  int parity_[kMaxThreads] = {};
};

inline Block* block = nullptr;

inline void Block::start() {
  Block& self = *block;
  self.body_(self.argument_);
  self.alive_[self.current_] = false;
  self.idle_ = 0;
  if (--self.left_ == 0) _longjmp(self.home_, 1);
  self.enter(self.next());
}

inline void limit_time(int seconds) {
  const itimerval limit = {{0, 0}, {seconds, 0}};
  setitimer(ITIMER_VIRTUAL, &limit, nullptr);
}

// Runs kernel() for every block, in a random order given by `seed`.
template <class Kernel>
void launch(uint32_t blocks, int threads, uint32_t seed, const Kernel& kernel) {
  if (threads != 256) std::abort();
  limit_time(kMaxSeconds);  // terminates the process if a kernel never ends, instead of blocking the tests
  static Block runner(256);
  block = &runner;
  gridDim = {blocks};
  std::vector<uint32_t> order(blocks);
  for (uint32_t i = 0; i < blocks; ++i) order[i] = i;
  std::mt19937 random(seed);
  std::shuffle(order.begin(), order.end(), random);
  for (const uint32_t number : order) {
    blockIdx.x = number;
    runner.run(kernel, static_cast<int>(random() % 256));
  }
  limit_time(0);
}

}  // namespace cuda_on_host

inline void __syncthreads() { cuda_on_host::block->block_barrier(); }
inline void __syncwarp() { cuda_on_host::block->warp_barrier(); }
inline void __threadfence() {}

template <class T>
T __shfl_xor_sync(uint32_t, T value, int mask) {
  const int lane = static_cast<int>(threadIdx.x % cuda_on_host::kWarpSize);
  return cuda_on_host::block->exchange(value)[lane ^ mask];
}
template <class T>
T __shfl_down_sync(uint32_t, T value, int distance) {
  const int lane = static_cast<int>(threadIdx.x % cuda_on_host::kWarpSize);
  const T* values = cuda_on_host::block->exchange(value);
  return values[lane + distance < cuda_on_host::kWarpSize ? lane + distance : lane];
}
inline bool __any_sync(uint32_t, bool value) {
  const bool* values = cuda_on_host::block->exchange(value);
  return std::any_of(values, values + cuda_on_host::kWarpSize, [](bool v) { return v; });
}
inline uint32_t atomicInc(uint32_t* address, uint32_t limit) {
  const uint32_t old = *address;
  *address = old >= limit ? 0 : old + 1;
  return old;
}
// As on the device: a number rather than NaN, and -0 below 0, which the C library does not guarantee.
inline float minimum_on_device(float a, float b) {
  return a != a ? b : b != b ? a : a == b ? (std::signbit(a) ? a : b) : a < b ? a : b;
}
inline float maximum_on_device(float a, float b) {
  return a != a ? b : b != b ? a : a == b ? (std::signbit(a) ? b : a) : a > b ? a : b;
}
#define fminf minimum_on_device
#define fmaxf maximum_on_device
template <class T>
T __ldcg(const T* address) {
  return *address;
}
