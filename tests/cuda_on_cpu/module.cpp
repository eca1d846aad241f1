// The extension module _C_cuda for tensors on the CPU, whose launchers are those of launchers.cpp.
#include "stable_tensors.h"

extern "C" int32_t fake_current_stream(int32_t device, void** stream);

#define kDLCUDA kDLCPU
#define aoti_torch_device_type_cuda aoti_torch_device_type_cpu
#define aoti_torch_get_current_cuda_stream fake_current_stream
#undef STABLE_TORCH_LIBRARY_IMPL
#define STABLE_TORCH_LIBRARY_IMPL(...) \
  [[maybe_unused]] static void registers_nothing(torch::stable::detail::StableLibrary& library)
#define GRADSTAT_CUDA_ARCHITECTURES "none"
#include "ops_cuda.cpp"
