// Lets g++ compile the device code of kernels and runs it on the CPU: one block after another, with threads as
// coroutines that switch only at barriers and warp exchanges, in a random order. A missing barrier gives wrong
// results in some orders. Threads that wait forever, and addresses that are not aligned, are errors.
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
#include <numeric>
#include <random>
#include <stdexcept>
#include <utility>
#include <vector>

using std::fma;  // the overloads for double and float, as in CUDA

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __shared__ static

struct alignas(16) uint4 {
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
  size_t expected = 0;
  std::vector<int> waiting = {};
};

class Block {
 public:
  explicit Block(int threads) : threads_(threads), warps_(threads / kWarpSize), exchange_(2 * threads) {}

  // Runs body() in every thread.
  template <class Body>
  void run(const Body& body, uint32_t seed) {
    body_ = [](const void* b) { (*static_cast<const Body*>(b))(); };
    argument_ = &body;
    random_.seed(seed);
    window_ = size_t{1} << random_() % 9;
    for (Thread& thread : threads_) thread.started = false, thread.parity = 0;
    left_ = threads_.size();
    all_ = {threads_.size()};
    for (Barrier& warp : warps_) warp = {kWarpSize};
    ready_.resize(threads_.size());
    std::iota(ready_.begin(), ready_.end(), 0);
    std::shuffle(ready_.begin(), ready_.end(), random_);
    if (_setjmp(home_) == 0) enter(next());
    if (error_ != nullptr) throw std::runtime_error(std::exchange(error_, nullptr));
  }

  // Abandons all threads, and makes `run` throw.
  [[noreturn]] void fail(const char* what) {
    error_ = what;
    _longjmp(home_, 1);
  }

  void block_barrier() { wait_at(all_); }
  void warp_barrier() { wait_at(warps_[current_ / kWarpSize]); }

  // Passes a value to the other lanes of the warp and returns the values of all lanes.
  template <class T>
  const T* exchange(T value) {
    static_assert(sizeof(T) <= 8);
    const int lane = current_ % kWarpSize, warp = current_ / kWarpSize;
    // Two buffers in turn suffice: a lane can be one exchange ahead of another, but not two.
    const int base = (2 * warp + (threads_[current_].parity ^= 1)) * kWarpSize;
    std::memcpy(&exchange_[base + lane], &value, sizeof(T));
    warp_barrier();
    static T values[kWarpSize];
    for (int i = 0; i < kWarpSize; ++i) std::memcpy(&values[i], &exchange_[base + i], sizeof(T));
    return values;
  }

 private:
  static constexpr size_t kStackBytes = 128 * 1024;  // a table in kernel parameters takes 32 KB

  struct Thread {
    ucontext_t context;
    jmp_buf jump;
    bool started;
    int parity;  // of its exchanges
    std::unique_ptr<char[]> stack = std::make_unique<char[]>(kStackBytes);
  };

  void wait_at(Barrier& barrier) {
    barrier.waiting.push_back(current_);
    if (barrier.waiting.size() == barrier.expected) {
      ready_.insert(ready_.end(), barrier.waiting.begin(), barrier.waiting.end());
      barrier.waiting.clear();
    }
    if (_setjmp(threads_[current_].jump) == 0) enter(next());
  }

  // One of the last threads that became ready. With a narrow window, a warp runs far ahead of the others.
  int next() {
    if (ready_.empty()) fail("threads of a block wait at different barriers");
    const size_t back = random_() % std::min(ready_.size(), window_);
    std::swap(ready_[ready_.size() - 1 - back], ready_.back());
    const int thread = ready_.back();
    ready_.pop_back();
    return thread;
  }

  [[noreturn]] void enter(int number) {
    Thread& thread = threads_[current_ = number];
    threadIdx.x = static_cast<uint32_t>(number);
    if (std::exchange(thread.started, true)) _longjmp(thread.jump, 1);
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = thread.stack.get();
    thread.context.uc_stack.ss_size = kStackBytes;
    thread.context.uc_link = nullptr;
    makecontext(&thread.context, &Block::start, 0);
    setcontext(&thread.context);
    std::abort();
  }

  static void start();

  std::vector<Thread> threads_;
  size_t left_ = 0;
  int current_ = 0;
  void (*body_)(const void*) = nullptr;
  const void* argument_ = nullptr;
  const char* error_ = nullptr;
  jmp_buf home_;
  std::vector<int> ready_;  // threads that can run, except the current one
  std::minstd_rand random_;
  size_t window_ = 1;
  std::vector<Barrier> warps_;
  Barrier all_;
  std::vector<uint64_t> exchange_;
};

inline Block* block = nullptr;

inline void Block::start() {
  Block& self = *block;
  self.body_(self.argument_);
  if (--self.left_ == 0) _longjmp(self.home_, 1);
  self.enter(self.next());
}

// Terminates the process if a kernel never ends, instead of blocking the tests.
struct TimeLimit {
  TimeLimit() { set(kMaxSeconds); }
  ~TimeLimit() { set(0); }
  static void set(int seconds) {
    const itimerval limit = {{0, 0}, {seconds, 0}};
    setitimer(ITIMER_VIRTUAL, &limit, nullptr);
  }
};

// Runs kernel() for every block, in a random order given by `seed`.
template <class Kernel>
void launch(uint32_t blocks, int threads, uint32_t seed, const Kernel& kernel) {
  if (threads != 256) std::abort();
  const TimeLimit limit;
  static Block runner(256);
  block = &runner;
  gridDim = {blocks};
  std::vector<uint32_t> order(blocks);
  std::iota(order.begin(), order.end(), 0);
  std::mt19937 random(seed);
  std::shuffle(order.begin(), order.end(), random);
  for (const uint32_t number : order) {
    blockIdx.x = number;
    runner.run(kernel, random());
  }
}

}  // namespace cuda_on_host

#if !defined(__SANITIZE_ADDRESS__)  // where UBSan reports it
// What -fsanitize=alignment calls.
extern "C" void __ubsan_handle_type_mismatch_v1(void*, void*) {
  cuda_on_host::block->fail("an address is not aligned");
}
#endif

inline void __syncthreads() { cuda_on_host::block->block_barrier(); }
inline void __syncwarp() { cuda_on_host::block->warp_barrier(); }

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
