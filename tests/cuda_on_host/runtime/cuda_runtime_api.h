// Stands in for CUDA's runtime where the launchers are tested on the CPU. Work given to a stream is done when
// the stream is synchronized and no sooner, so that memory reused too early shows; work given to a captured
// stream goes into a graph instead. Counts what a caller would be charged for.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <utility>
#include <vector>

enum cudaError_t { cudaSuccess, cudaErrorMemoryAllocation, cudaErrorNotReady };
enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone, cudaStreamCaptureStatusActive };
enum cudaStreamCaptureMode { cudaStreamCaptureModeGlobal, cudaStreamCaptureModeRelaxed };
enum cudaMemcpyKind { cudaMemcpyHostToDevice };
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount };
constexpr unsigned cudaEventDisableTiming = 2;

struct FakeEvent {
  bool done = true;
};
using cudaEvent_t = FakeEvent*;

struct FakeStream {
  unsigned long long id;
  std::vector<std::function<void()>> queue, graph;
  bool capturing = false;

  void add(std::function<void()> work) { (capturing ? graph : queue).push_back(std::move(work)); }
  void synchronize() {
    for (const auto& work : std::exchange(queue, {})) work();
  }
};
using cudaStream_t = FakeStream*;

struct FakeRuntime {
  int64_t allocations = 0, pinned_allocations = 0, copies = 0, fills = 0, launches = 0, seed = 0;
  int failures_due = 0;  // allocations to refuse
};
inline FakeRuntime fake;

inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline const char* cudaGetErrorString(cudaError_t) { return "out of memory"; }
inline cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
inline cudaError_t cudaSetDevice(int) { return cudaSuccess; }
inline cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) { return *value = 2, cudaSuccess; }
inline cudaError_t cudaStreamGetId(cudaStream_t stream, unsigned long long* id) {
  return *id = stream->id, cudaSuccess;
}
inline cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  *status = stream->capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

// New memory is never zero by luck.
inline cudaError_t fake_allocate(void** memory, size_t bytes, int64_t& counter) {
  if (fake.failures_due > 0 && fake.failures_due-- > 0) return cudaErrorMemoryAllocation;
  ++counter;
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
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind,
                                   cudaStream_t stream) {
  ++fake.copies;
  stream->add([=] { std::memcpy(to, from, bytes); });
  return cudaSuccess;
}
inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  return *event = new FakeEvent, cudaSuccess;
}
inline cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  event->done = false;
  stream->add([=] { event->done = true; });
  return cudaSuccess;
}
inline cudaError_t cudaEventQuery(cudaEvent_t event) { return event->done ? cudaSuccess : cudaErrorNotReady; }

#define GRADSTAT_LAUNCH(kernel, blocks, stream, ...)                                                          \
  (++fake.launches, stream->add([=] {                                                                         \
    cuda_on_host::launch(blocks, kThreads, static_cast<uint32_t>(fake.seed++), [&] { kernel(__VA_ARGS__); }); \
  }))
