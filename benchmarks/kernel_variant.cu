// The launchers and kernels behind a C interface, for benchmarks/gpu_variants.py: a variant is this file
// compiled with the macros that benchmarks/kernel_variants.py lists.
#include "launch_state.cpp"
//
#include "decide_cuda.cu"
#include "scale_cuda.cu"
#include "stats_cuda.cu"
#include "update_cuda.cu"

void* gradstat::allocate_forever(size_t bytes, int32_t /*device*/, const char* what) {
  void* memory = nullptr;
  check_cuda(cudaMalloc(&memory, bytes), what);
  return memory;
}

#define EXPORTED extern "C" __attribute__((visibility("default")))

namespace {

std::string variant_error;

std::vector<gradstat::Entry> entries_of(int64_t count, const uint64_t* addresses, const int64_t* numels,
                                        int32_t dtype) {
  std::vector<gradstat::Entry> entries;
  for (int64_t i = 0; i < count; ++i) {
    entries.push_back(
        {reinterpret_cast<void*>(addresses[i]), numels[i], static_cast<gradstat::DType>(dtype), false});
  }
  return entries;
}

}  // namespace

EXPORTED int64_t workspace_bytes(int64_t count, const uint64_t* addresses, const int64_t* numels,
                                 int32_t dtype) {
  const auto entries = entries_of(count, addresses, numels, dtype);
  return std::max(gradstat::stats_workspace_bytes(entries, 0), gradstat::scale_workspace_bytes(entries, 0));
}

EXPORTED int32_t run(int64_t count, const uint64_t* addresses, const int64_t* numels, int32_t dtype,
                     double* table, float* norm, double* multiplier, double max_norm, int32_t scales,
                     void* workspace, void* stream) {
  try {
    const auto entries = entries_of(count, addresses, numels, dtype);
    const gradstat::NormRequest request{max_norm, false, gradstat::DType::kFloat32, norm, multiplier, {}};
    gradstat::launch_stats(entries, reinterpret_cast<gradstat::Row*>(table), &request, nullptr, workspace, 0,
                           stream);
    if (scales) gradstat::launch_scale(entries, multiplier, workspace, 0, stream);
    return 0;
  } catch (const std::exception& error) {
    variant_error = error.what();
    return 1;
  }
}

EXPORTED const char* variant_error_text() { return variant_error.c_str(); }
