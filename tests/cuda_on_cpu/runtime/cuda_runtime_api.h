// A replacement for CUDA's runtime, to test the launchers on the CPU. Work in a stream runs when the stream is
// synchronized, not before, so that memory reused too early is detected; or with `runs_at_once`, for torch's
// memory, at once except for what the host sees. Work in a captured stream goes into a graph instead. Counts
// calls.
#pragma once

#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

enum cudaError_t {
  cudaSuccess,
  cudaErrorMemoryAllocation,
  cudaErrorInitializationError,
  cudaErrorNotReady,
  cudaErrorStreamCaptureUnsupported
};
enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone, cudaStreamCaptureStatusActive };
enum cudaStreamCaptureMode { cudaStreamCaptureModeGlobal, cudaStreamCaptureModeRelaxed };
enum cudaMemcpyKind { cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost };
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount };
constexpr unsigned cudaEventDisableTiming = 2;

struct FakeStream;
struct FakeEvent {
  bool done = true;
  FakeStream* stream = nullptr;
};
using cudaEvent_t = FakeEvent*;

using FakeWork = std::vector<std::function<void()>>;

struct FakeStream {
  unsigned long long id;
  FakeWork queue, graph;
  bool capturing = false;

  void add(std::function<void()> work, bool is_seen_by_host = false);
  void synchronize();
};
using cudaStream_t = FakeStream*;

struct FakeRuntime {
  std::recursive_mutex mutex;
  int64_t allocations = 0, pinned_allocations = 0, copies = 0, fills = 0, launches = 0, bytes = 0;
  int64_t records = 0, waits = 0, devices_set = 0;
  int64_t seed = 0;
  int failures_left = 0;    // number of allocations and copies to the host to refuse
  int capturing = 0;        // number of streams being captured
  int blocks_that_fit = 3;  // per multiprocessor
  uint32_t last_blocks = 0;
  bool runs_kernels = true;  // else launches are only counted
  bool runs_at_once = false;
  std::set<const void*> loaded;  // loaded kernels
  static inline thread_local cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;

  const pid_t process = getpid();
  bool is_forked() const { return getpid() != process; }
  bool fails() { return failures_left > 0 && failures_left-- > 0; }
  bool refuses_unsafe_calls() const { return capturing > 0 && mode != cudaStreamCaptureModeRelaxed; }
};
inline FakeRuntime fake;
using FakeLock = std::lock_guard<std::recursive_mutex>;

inline void FakeStream::add(std::function<void()> work, bool is_seen_by_host) {
  const FakeLock lock(fake.mutex);
  if (fake.runs_at_once && !capturing && !is_seen_by_host) return work();
  (capturing ? graph : queue).push_back(std::move(work));
}
inline void FakeStream::synchronize() {
  const FakeLock lock(fake.mutex);
  for (const auto& work : std::exchange(queue, {})) work();
}

inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorInitializationError        ? "initialization error"
         : error == cudaErrorStreamCaptureUnsupported ? "operation not permitted when stream is capturing"
                                                      : "out of memory";
}
inline cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
inline cudaError_t cudaSetDevice(int) { return ++fake.devices_set, cudaSuccess; }
inline cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  return std::swap(*mode, fake.mode), cudaSuccess;
}
// Number of multiprocessors: the first device has two, the others fewer or more.
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int device) {
  constexpr int kMultiprocessors[] = {2, 1, 5, 256};
  return *value = kMultiprocessors[device], cudaSuccess;
}
// As all calls do in a forked process.
inline cudaError_t cudaStreamGetId(cudaStream_t stream, unsigned long long* id) {
  return *id = stream->id, fake.is_forked() ? cudaErrorInitializationError : cudaSuccess;
}
inline cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  *status = stream->capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

// New memory is filled with a pattern, so that it is never zero by chance.
inline cudaError_t fake_allocate(void** memory, size_t bytes, int64_t& counter) {
  const FakeLock lock(fake.mutex);
  if (fake.refuses_unsafe_calls()) return cudaErrorStreamCaptureUnsupported;
  if (fake.fails()) return cudaErrorMemoryAllocation;
  ++counter;
  fake.bytes += static_cast<int64_t>(bytes);
  *memory = std::memset(std::aligned_alloc(256, (bytes + 255) / 256 * 256), 0xa5, bytes);
  return cudaSuccess;
}
inline cudaError_t cudaMalloc(void** memory, size_t bytes) {
  return fake_allocate(memory, bytes, fake.allocations);
}
inline cudaError_t cudaMallocHost(void** memory, size_t bytes) {
  return fake_allocate(memory, bytes, fake.pinned_allocations);
}

inline cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t stream) {
  ++fake.fills;
  stream->add([=] { std::memset(memory, value, bytes); });
  return cudaSuccess;
}
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                                   cudaStream_t stream) {
  const FakeLock lock(fake.mutex);
  if (kind == cudaMemcpyDeviceToHost && fake.fails()) return cudaErrorMemoryAllocation;
  ++fake.copies;
  if (kind == cudaMemcpyDeviceToHost) {
    auto read = std::make_shared<std::vector<char>>(bytes);
    stream->add([=] { std::memcpy(read->data(), from, bytes); });
    stream->add([=] { std::memcpy(to, read->data(), bytes); }, true);
  } else {
    stream->add([=] { std::memcpy(to, from, bytes); });
  }
  return cudaSuccess;
}
inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  ++fake.allocations;
  return *event = new FakeEvent, cudaSuccess;
}
inline cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  const FakeLock lock(fake.mutex);
  ++fake.records;
  event->done = false;
  event->stream = stream;
  stream->add([=] { event->done = true; }, true);
  return cudaSuccess;
}
inline cudaError_t cudaEventQuery(cudaEvent_t event) {
  if (fake.is_forked()) return cudaErrorInitializationError;
  if (fake.refuses_unsafe_calls()) return cudaErrorStreamCaptureUnsupported;
  return event->done ? cudaSuccess : cudaErrorNotReady;
}
inline cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  if (fake.is_forked()) return cudaErrorInitializationError;
  if (fake.refuses_unsafe_calls()) return cudaErrorStreamCaptureUnsupported;
  const FakeLock lock(fake.mutex);
  ++fake.waits;
  if (!event->done) event->stream->synchronize();
  return cudaSuccess;
}

struct cudaFuncAttributes {};
inline cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, const void* kernel) {
  if (fake.refuses_unsafe_calls()) return cudaErrorStreamCaptureUnsupported;
  fake.loaded.insert(kernel);
  return cudaSuccess;
}
inline cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int, size_t) {
  return *blocks = fake.blocks_that_fit, cudaSuccess;
}

struct cudaLaunchConfig_t {
  struct {
    uint32_t x;
  } gridDim, blockDim;
  cudaStream_t stream;
};

template <class... Arguments, size_t... kPlaces>
auto bound(void (*kernel)(Arguments...), void** pointers, std::index_sequence<kPlaces...>) {
  return [kernel, arguments = std::make_tuple(*static_cast<Arguments*>(pointers[kPlaces])...)] {
    std::apply(kernel, arguments);
  };
}

template <class... Arguments>
cudaError_t fake_launch(const cudaLaunchConfig_t* config, void (*kernel)(Arguments...), void** pointers) {
  const FakeLock lock(fake.mutex);
  FakeStream* const stream = config->stream;
  const bool was_loaded = fake.loaded.count(reinterpret_cast<const void*>(kernel)) > 0;
  if (!was_loaded && fake.refuses_unsafe_calls()) return cudaErrorStreamCaptureUnsupported;
  ++fake.launches;
  fake.last_blocks = config->gridDim.x;
  const uint32_t blocks = config->gridDim.x;
  const int threads = static_cast<int>(config->blockDim.x);
  if (!fake.runs_kernels) return cudaSuccess;
  const auto run = bound(kernel, pointers, std::index_sequence_for<Arguments...>{});
  stream->add([=] { cuda_on_host::launch(blocks, threads, static_cast<uint32_t>(fake.seed++), run); });
  return cudaSuccess;
}
#define GRADSTAT_LAUNCH(config, kernel, arguments) fake_launch(config, kernel, arguments)
