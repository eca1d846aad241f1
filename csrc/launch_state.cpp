// See launch_state.h. State is kept per device and stream, keyed by the stream's id, which unlike its address
// is never reused. Per stream, tickets, uploaded tables and slots are kept until the process ends.
#include "launch_state.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

#include "cuda_launch.h"

namespace gradstat {
namespace {

// One per range, and one for all of them.
constexpr uint32_t kMaxTickets = kMaxRanges + 1;

// CUDA refuses memory allocation and kernel loading while any stream in the process is captured in the default
// mode, even if unrelated. This allows them for the current thread.
class AllowMemoryCalls {
 public:
  AllowMemoryCalls() { check_cuda(cudaThreadExchangeStreamCaptureMode(&mode_), "setting the capture mode"); }
  ~AllowMemoryCalls() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  AllowMemoryCalls(const AllowMemoryCalls&) = delete;
  AllowMemoryCalls& operator=(const AllowMemoryCalls&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

struct OwnedSlot : Slot {
  size_t capacity = 0;
  cudaEvent_t copied = nullptr;  // recorded behind the last copy
  std::atomic<bool> is_held{false};
};

struct StreamState {
  std::mutex mutex;
  uint32_t* tickets = nullptr;
  void* device_table = nullptr;
  size_t device_table_bytes = 0;
  std::vector<char> last;  // contents of device_table
  std::deque<OwnedSlot> slots;
};

// Never destroyed, as CUDA may be shut down earlier at exit.
StreamState& state_of(int32_t device, cudaStream_t stream) {
  static std::mutex& mutex = *new std::mutex;
  static auto& states = *new std::map<std::pair<int32_t, unsigned long long>, std::unique_ptr<StreamState>>;
  unsigned long long id = 0;
  check_cuda(cudaStreamGetId(stream, &id), "querying the stream id");
  const std::lock_guard<std::mutex> lock(mutex);
  std::unique_ptr<StreamState>& state = states[{device, id}];
  if (state == nullptr) state = std::make_unique<StreamState>();
  return *state;
}

bool is_capturing(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check_cuda(cudaStreamIsCapturing(stream, &status), "querying the capture status of a stream");
  return status != cudaStreamCaptureStatusNone;
}

// Returns a slot that nobody holds; for the host to write to, one that no copy uses. A copy from the device is
// ordered behind the other copies of the stream. Allocates more instead of waiting.
OwnedSlot& free_slot(StreamState& state, size_t bytes, bool host_writes) {
  for (OwnedSlot& slot : state.slots) {
    if (!slot.is_held && slot.capacity >= bytes && (!host_writes || has_arrived(slot, false))) return slot;
  }
  const AllowMemoryCalls allow;
  const size_t capacity = bytes + bytes / 2;
  OwnedSlot& slot = state.slots.emplace_back();
  check_cuda(cudaMallocHost(&slot.memory, capacity), "allocating pinned memory");
  check_cuda(cudaEventCreateWithFlags(&slot.copied, cudaEventDisableTiming), "creating an event");
  slot.capacity = capacity;  // before, it is of no use
  return slot;
}

// Loads all kernels of a device once; returns how many blocks of the statistics and scale kernels it holds.
uint32_t resident_blocks(int32_t device) {
  static std::mutex& mutex = *new std::mutex;
  static auto& of_devices = *new std::vector<uint32_t>;
  const std::lock_guard<std::mutex> lock(mutex);
  if (of_devices.size() <= static_cast<size_t>(device)) of_devices.resize(device + 1);
  uint32_t& blocks = of_devices[device];
  if (blocks == 0) {
    const OnDevice on_device(device);
    const AllowMemoryCalls allow;
    const int32_t fitting = std::max(1, std::min(load_stats_kernels(), load_scale_kernels()));
    load_decide_kernels();
    int multiprocessors = 0;
    check_cuda(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device),
               "querying the number of multiprocessors");
    blocks = std::min(static_cast<uint32_t>(fitting * multiprocessors), kMaxRanges);
  }
  return blocks;
}

}  // namespace

OnDevice::OnDevice(int32_t device) {
  check_cuda(cudaGetDevice(&before_), "querying the current device");
  if (before_ == device) {
    before_ = -1;
  } else {
    check_cuda(cudaSetDevice(device), "setting the current device");
  }
}

OnDevice::~OnDevice() {
  if (before_ >= 0) cudaSetDevice(before_);
}

void check_cuda(cudaError_t result, const char* what) {
  if (result == cudaSuccess) return;
  static_cast<void>(cudaGetLastError());
  throw std::runtime_error(std::string("gradstat: ") + what + ": " + cudaGetErrorString(result));
}

int32_t load_kernels(std::initializer_list<const void*> kernels) {
  int32_t fewest = INT32_MAX;
  for (const void* kernel : kernels) {
    cudaFuncAttributes attributes = {};
    check_cuda(cudaFuncGetAttributes(&attributes, kernel), "loading a kernel");
    int blocks = 0;
    check_cuda(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, kThreads, 0),
               "querying the occupancy of a kernel");
    fewest = std::min(fewest, blocks);
  }
  return fewest;
}

void load_all_kernels(int32_t device) { static_cast<void>(resident_blocks(device)); }

Partition partition_for(const std::vector<Entry>& entries, int32_t device) {
  uint64_t tiles = 0;
  for (const Entry& entry : entries) tiles += tiles_of(entry);
  // Chunks are counted in 32 bits.
  if (tiles >= UINT32_MAX / kWarps)
    throw std::runtime_error("gradstat: more than 8 TB of gradients in one call");
  const auto total = static_cast<uint32_t>(tiles),
             ranges = std::max(1u, std::min(total, resident_blocks(device)));
  return {ranges, total / ranges, total % ranges};
}

uint32_t* tickets_for(uint32_t count, void* workspace, int32_t device, cudaStream_t stream) {
  if (is_capturing(stream)) {
    check_cuda(cudaMemsetAsync(workspace, 0, count * sizeof(uint32_t), stream), "clearing tickets");
    return static_cast<uint32_t*>(workspace);
  }
  StreamState& state = state_of(device, stream);
  const std::lock_guard<std::mutex> lock(state.mutex);
  if (state.tickets == nullptr) {
    const AllowMemoryCalls allow;
    void* memory = allocate_forever(kMaxTickets * sizeof(uint32_t), device, "allocating tickets");
    check_cuda(cudaMemsetAsync(memory, 0, kMaxTickets * sizeof(uint32_t), stream), "clearing tickets");
    state.tickets = static_cast<uint32_t*>(memory);
  }
  return state.tickets;
}

Uploaded upload(const std::vector<uint64_t>& words, void* workspace, int32_t device, cudaStream_t stream) {
  const size_t bytes = words.size() * sizeof(uint64_t);
  const AllowMemoryCalls allow;
  if (is_capturing(stream)) {
    // Each replay copies from this memory, so it is never freed.
    void* pinned = nullptr;
    check_cuda(cudaMallocHost(&pinned, bytes), "allocating pinned memory");
    std::memcpy(pinned, words.data(), bytes);
    check_cuda(cudaMemcpyAsync(workspace, pinned, bytes, cudaMemcpyHostToDevice, stream), "uploading a table");
    return {{}, workspace};
  }

  StreamState& state = state_of(device, stream);
  std::unique_lock<std::mutex> lock(state.mutex);
  if (state.last.size() != bytes || std::memcmp(state.last.data(), words.data(), bytes) != 0) {
    state.last.clear();  // in case a call below fails
    if (state.device_table_bytes < bytes) {
      // The old table stays allocated: a kernel may be reading it, and freeing it would sync with the device.
      // Growing by half each time limits all tables together to three times the largest.
      state.device_table = allocate_forever(bytes + bytes / 2, device, "allocating a table");
      state.device_table_bytes = bytes + bytes / 2;
    }
    const OwnedSlot& slot = free_slot(state, bytes, true);
    std::memcpy(slot.memory, words.data(), bytes);
    check_cuda(cudaMemcpyAsync(state.device_table, slot.memory, bytes, cudaMemcpyHostToDevice, stream),
               "uploading a table");
    check_cuda(cudaEventRecord(slot.copied, stream), "recording an event");
    const auto* first = reinterpret_cast<const char*>(words.data());
    state.last.assign(first, first + bytes);
  }
  return {std::move(lock), state.device_table};
}

HeldSlot copy_to_host(const void* from, size_t bytes, int32_t device, void* stream_pointer) {
  const OnDevice on_device(device);
  const auto stream = static_cast<cudaStream_t>(stream_pointer);
  if (is_capturing(stream)) return nullptr;
  StreamState& state = state_of(device, stream);
  const std::lock_guard<std::mutex> lock(state.mutex);
  OwnedSlot& slot = free_slot(state, bytes, false);
  slot.bytes = bytes;
  check_cuda(cudaMemcpyAsync(slot.memory, from, bytes, cudaMemcpyDeviceToHost, stream), "copying to the host");
  check_cuda(cudaEventRecord(slot.copied, stream), "recording an event");
  slot.is_held = true;
  return HeldSlot(&slot);
}

void ReleaseSlot::operator()(Slot* slot) const { static_cast<OwnedSlot*>(slot)->is_held = false; }

bool has_arrived(const Slot& slot, bool wait) {
  const AllowMemoryCalls allow;
  const cudaEvent_t copied = static_cast<const OwnedSlot&>(slot).copied;
  const cudaError_t result = wait ? cudaEventSynchronize(copied) : cudaEventQuery(copied);
  if (result != cudaErrorNotReady) check_cuda(result, "waiting for a copy");
  static_cast<void>(cudaGetLastError());  // clears "not ready", which later calls would report as an error
  return result == cudaSuccess;
}

}  // namespace gradstat
