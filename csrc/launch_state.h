// State that launches keep between calls: tickets and tables in device memory, pinned memory for uploads, and
// device properties of the kernels. For the .cu files only.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <initializer_list>
#include <mutex>
#include <vector>

#include "entry.h"
#include "tile_table.h"

// The only call that depends on the kernel's type, replaceable by tests/gpu_on_host.
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

bool is_capturing(cudaStream_t stream);

// Properties of a set of kernels on the current device.
struct LoadedKernels {
  int32_t blocks_per_multiprocessor;  // that can be resident at once, of each of the kernels
  bool can_overlap;  // whether the code supports programmatic dependent launch (sm_90 and later)
};

// Also loads the kernels, which CUDA would otherwise do in the first launch, which may be captured or timed.
LoadedKernels load_kernels(std::initializer_list<const void*> kernels);
#define GRADSTAT_FOR_EVERY_TABLE(kernel)                                   \
  reinterpret_cast<const void*>(kernel<ParameterTable<kSmallTable>>),      \
      reinterpret_cast<const void*>(kernel<ParameterTable<kMediumTable>>), \
      reinterpret_cast<const void*>(kernel<ParameterTable<kLargeTable>>),  \
      reinterpret_cast<const void*>(kernel<DeviceTable>)
// The unscale kernel takes as long to compile as all others together, so it exists for the largest tables only.
// As it reads and writes every gradient, copying a larger parameter does not matter.
#define GRADSTAT_FOR_LARGE_TABLES(kernel)                             \
  reinterpret_cast<const void*>(kernel<ParameterTable<kLargeTable>>), \
      reinterpret_cast<const void*>(kernel<DeviceTable>)
LoadedKernels load_stats_kernels();  // in stats_cuda.cu
LoadedKernels load_scale_kernels();  // in scale_cuda.cu
void load_update_kernels();          // in update_cuda.cu
void load_decide_kernels();          // in decide_cuda.cu

// The same for the statistics and scale kernels together, and the size of the device; queried once.
struct DeviceInfo {
  int32_t multiprocessors = 0;
  int32_t blocks_per_multiprocessor = 0;
  bool can_overlap = false;  // also false if GRADSTAT_CUDA_PDL=0 is set
};
DeviceInfo device_info(int32_t device);

// The partition into ranges for the statistics and scale kernels, and the number of blocks for it: as many as
// can be resident on the device, but at most one per range.
Partition partition_for(const std::vector<Entry>& entries, int32_t device);
uint32_t blocks_for(const Partition& partition, int32_t device);

// Enqueues a kernel. With `overlaps_previous` it may start while the previous kernel in the stream is still
// running, and waits for its results itself (wait_for_previous_kernel in device.cuh).
template <class... Arguments>
void launch(void (*kernel)(Arguments...), uint32_t blocks, cudaStream_t stream, bool overlaps_previous,
            const char* what, const Arguments&... arguments) {
  cudaLaunchAttribute overlap = {};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim.x = blocks;
  config.blockDim.x = kThreads;
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = overlaps_previous ? 1 : 0;
  void* pointers[] = {const_cast<Arguments*>(&arguments)...};
  check_cuda(GRADSTAT_LAUNCH(&config, kernel, pointers), what);
}

// Bytes in a workspace for a table that does not fit in the launch parameters.
inline size_t table_bytes(size_t tensors, const Partition& partition) {
  return tensors > kLargeTable ? (DeviceTable::bytes(tensors, partition.ranges) + 7) / 8 * 8 : 0;
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

// Calls launch(table) with the smallest of these parameter tables that holds all entries, or an uploaded one.
#if defined(GRADSTAT_ONE_PARAMETER_TABLE)  // benchmarks/gpu_variants.py
#define GRADSTAT_TABLE_SIZES kLargeTable
#else
#define GRADSTAT_TABLE_SIZES kSmallTable, kMediumTable, kLargeTable
#endif
template <int... kCapacities, class Launch>
void with_table(const std::vector<Entry>& entries, const Partition& partition, void* workspace, int32_t device,
                cudaStream_t stream, const Launch& launch) {
  if (with_parameter_table<kCapacities...>(entries, partition, launch)) return;
  std::vector<uint64_t> words((DeviceTable::bytes(entries.size(), partition.ranges) + 7) / 8);
  DeviceTable host = DeviceTable::at(words.data(), entries.size());
  fill_table(entries, partition, host);
  const Uploaded uploaded = upload(words, workspace, device, stream);
  launch(DeviceTable::at(uploaded.memory, entries.size()));
}

}  // namespace gradstat
