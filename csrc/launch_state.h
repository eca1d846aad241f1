// What launches keep between calls: tickets and tables in device memory, pinned memory for uploads, and the
// number of blocks a device runs at once. For the two .cu files only.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <mutex>
#include <vector>

#include "entry.h"
#include "tile_table.h"

// The one piece of syntax that only nvcc knows, so that everything else also compiles as plain C++, where
// tests/cuda_on_host gives it another meaning.
#if !defined(GRADSTAT_LAUNCH)
#define GRADSTAT_LAUNCH(kernel, blocks, stream, ...) kernel<<<blocks, kThreads, 0, stream>>>(__VA_ARGS__)
#endif

namespace gradstat {

// Throws std::runtime_error naming `what` if `result` is an error.
void check_cuda(cudaError_t result, const char* what);

// Makes a device current for a while. The caller has done so with torch's guard already; but this library has a
// CUDA runtime of its own, linked in, which should not have to learn of it through the driver.
class OnDevice {
 public:
  explicit OnDevice(int32_t device);
  ~OnDevice();
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  int before_ = -1;  // nothing to restore
};

bool is_capturing(cudaStream_t stream);

// Number of multiprocessors of a device, asked once.
int32_t multiprocessors(int32_t device);

// Blocks for a launch over `tiles`: what the device holds at once, or one for each tile if these are fewer.
// Both kernels use the same number, so that their blocks take the same ranges.
uint32_t blocks_for(uint32_t tiles, int32_t device);

// The number of tiles, which must fit in 32 bits (64 TB of gradients).
uint32_t checked_tiles(const std::vector<Entry>& entries);

// Room in a workspace for a table, when it does not fit in the parameters of a launch.
inline size_t table_bytes(size_t tensors) {
  return tensors > kLargeTable ? (DeviceTable::bytes(tensors) + 7) / 8 * 8 : 0;
}

// Zeroed tickets for one launch of up to `count`. Outside of graph capture they belong to the stream and
// reset themselves, so nothing is enqueued. A captured launch may be replayed on any stream, at the same time
// as other launches: it gets tickets of its own in `workspace`, zeroed by the graph before each replay.
uint32_t* tickets_for(uint32_t count, void* workspace, int32_t device, cudaStream_t stream);

// Holds the table of a launch in device memory. Uploads only if the stream's last one differed. The lock must
// be kept until the kernel is enqueued, for another thread might upload to the same stream.
struct UploadedTable {
  std::unique_lock<std::mutex> lock;
  DeviceTable table;
};
UploadedTable upload_table(const std::vector<Entry>& entries, void* workspace, int32_t device,
                           cudaStream_t stream);

// Calls launch(table) with the smallest kind of table that holds all entries.
template <class Launch>
void with_table(const std::vector<Entry>& entries, void* workspace, int32_t device, cudaStream_t stream,
                const Launch& launch) {
  const size_t count = entries.size();
  const auto by_parameters = [&](auto& table) {
    fill_table(entries, table.addresses, table.shapes, table.first_tiles);
    launch(table);
  };
  if (count <= kSmallTable) {
    ParameterTable<kSmallTable> table;
    by_parameters(table);
  } else if (count <= kMediumTable) {
    ParameterTable<kMediumTable> table;
    by_parameters(table);
  } else if (count <= kLargeTable) {
    ParameterTable<kLargeTable> table;
    by_parameters(table);
  } else {
    const UploadedTable uploaded = upload_table(entries, workspace, device, stream);
    launch(uploaded.table);
  }
}

}  // namespace gradstat
