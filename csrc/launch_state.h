// State that launches keep between calls: tickets and tables in device memory, pinned memory for uploads, and
// device properties of the kernels. For the .cu files only.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <initializer_list>
#include <mutex>
#include <vector>

#include "tile_table.h"

// The only call that depends on the kernel's type, replaceable by tests/cuda_on_cpu.
#if !defined(GRADSTAT_LAUNCH)
#define GRADSTAT_LAUNCH(config, kernel, arguments) \
  cudaLaunchKernelExC(config, reinterpret_cast<const void*>(kernel), arguments)
#endif

namespace gradstat {

// Throws std::runtime_error naming `what` if `result` is an error.
void check_cuda(cudaError_t result, const char* what);

// Makes a device current while in scope. torch's guard does not affect the CUDA runtime in this library.
class OnDevice {
 public:
  explicit OnDevice(int32_t device);
  ~OnDevice();
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  int before_ = -1;  // -1: nothing to restore
};

// Loads kernels, which CUDA would otherwise do in the first launch, which may be captured or timed. Returns how
// many blocks of each of them can be resident on a multiprocessor at once.
int32_t load_kernels(std::initializer_list<const void*> kernels);
#define GRADSTAT_FOR_EVERY_TABLE(kernel) \
  reinterpret_cast<const void*>(kernel<ParameterTable>), reinterpret_cast<const void*>(kernel<DeviceTable>)
int32_t load_stats_kernels();  // in stats_cuda.cu
int32_t load_scale_kernels();  // in scale_cuda.cu
void load_decide_kernels();    // in scale_cuda.cu

// The partition into ranges for the statistics and scale kernels, one for each block that can be resident on
// the device, but no more than there are tiles.
Partition partition_for(const std::vector<Entry>& entries, int32_t device);

template <class... Arguments>
void launch(void (*kernel)(Arguments...), uint32_t blocks, cudaStream_t stream, const char* what,
            const Arguments&... arguments) {
  cudaLaunchConfig_t config = {};
  config.gridDim.x = blocks;
  config.blockDim.x = kThreads;
  config.stream = stream;
  void* pointers[] = {const_cast<Arguments*>(&arguments)...};
  check_cuda(GRADSTAT_LAUNCH(&config, kernel, pointers), what);
}

// Bytes in a workspace for a table that does not fit in the launch parameters.
inline size_t table_bytes(size_t tensors, const Partition& partition) {
  return tensors > kParameterEntries ? (DeviceTable::bytes(tensors, partition.ranges) + 7) / 8 * 8 : 0;
}

// At least `count` zeroed tickets for a launch. They belong to the stream, and kernels reset them. A captured
// launch, whose replay may overlap with others, has its own in `workspace`, zeroed by the graph each time.
uint32_t* tickets_for(uint32_t count, void* workspace, int32_t device, cudaStream_t stream);

// The table of a launch in device memory, uploaded only if it differs from the stream's last one. Hold the lock
// until the kernel is enqueued, as another thread could upload to the same stream. A captured launch has its
// table in `workspace`.
struct Uploaded {
  std::unique_lock<std::mutex> lock;
  void* memory;
};
Uploaded upload(const std::vector<uint64_t>& words, void* workspace, int32_t device, cudaStream_t stream);

// Calls launch(table) with a parameter table, or an uploaded one if that does not hold all entries.
template <class Launch>
void with_table(const std::vector<Entry>& entries, const Partition& partition, void* workspace, int32_t device,
                cudaStream_t stream, const Launch& launch) {
  if (entries.size() <= kParameterEntries) {
    ParameterTable table;
    fill_table(entries, partition, table);
    return launch(table);
  }
  std::vector<uint64_t> words((DeviceTable::bytes(entries.size(), partition.ranges) + 7) / 8);
  DeviceTable host = DeviceTable::at(words.data(), entries.size());
  fill_table(entries, partition, host);
  const Uploaded uploaded = upload(words, workspace, device, stream);
  launch(DeviceTable::at(uploaded.memory, entries.size()));
}

}  // namespace gradstat
