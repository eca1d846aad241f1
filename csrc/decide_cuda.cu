// Launches the kernels that decide about a step.
#include "cuda_launch.h"
#include "decide_cuda.cuh"
#include "launch_state.h"

namespace gradstat {

void load_decide_kernels() {
  load_kernels(
      {reinterpret_cast<const void*>(decide_clip_kernel), reinterpret_cast<const void*>(guard_kernel)});
}

void launch_decide(const ClipRequest& request, int32_t device, void* stream) {
  const OnDevice on_device(device);
  launch(decide_clip_kernel, 1, static_cast<cudaStream_t>(stream), "launching the clip decision kernel",
         request);
}

void launch_decide(const GuardRequest& request, int32_t device, void* stream) {
  const OnDevice on_device(device);
  launch(guard_kernel, 1, static_cast<cudaStream_t>(stream), "launching the guard kernel", request);
}

}  // namespace gradstat
