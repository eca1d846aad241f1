// The launchers behind a C interface, over a runtime that stands in for CUDA's, for
// tests/gpu_on_host/test_cuda_launchers.py.
#include "cuda_on_host.h"
//
#include "../../benchmarks/kernel_variant.cu"

using namespace gradstat;

namespace {

std::vector<Entry> entries_of(int64_t count, const uint64_t* addresses, const int64_t* numels) {
  std::vector<Entry> entries;
  for (int64_t i = 0; i < count; ++i) {
    entries.push_back({reinterpret_cast<void*>(addresses[i]), numels[i], DType::kFloat32, false});
  }
  return entries;
}

std::string last_error;

template <class Call>
int32_t guarded(const Call& call) {
  try {
    call();
    return 0;
  } catch (const std::exception& error) {
    last_error = error.what();
    return 1;
  }
}

// Calls launch(entries, memory). As torch's allocator does: memory full of whatever was there, free for others
// once the stream has passed; a graph keeps its own.
template <class Bytes, class Launch>
int32_t start(FakeStream* stream, const std::vector<Entry>& entries, const Bytes& bytes_for,
              const Launch& launch) {
  return guarded([&] {
    const int64_t bytes = bytes_for(entries, 0);
    void* memory = std::memset(std::malloc(bytes > 0 ? bytes : 1), 0xff, bytes);
    const bool owned = !stream->capturing;
    launch(memory);
    if (owned) stream->add([=] { std::free(memory); });
  });
}

}  // namespace

extern "C" {

FakeStream* new_stream() {
  static unsigned long long ids = 0;
  return new FakeStream{++ids, {}, {}};
}
void synchronize(FakeStream* stream) { stream->synchronize(); }
void begin_capture(FakeStream* stream) {
  stream->capturing = true;
  ++fake.capturing;
}
void* end_capture(FakeStream* stream) {
  stream->capturing = false;
  --fake.capturing;
  return new std::vector<FakeWork>(std::exchange(stream->graph, {}));
}
void replay(const void* graph, FakeStream* stream) {
  for (const FakeWork& work : *static_cast<const std::vector<FakeWork>*>(graph)) stream->add(work.run);
}
void refuse_allocations(int32_t count) { fake.failures_due = count; }
const char* error_text() { return last_error.c_str(); }
int32_t table_capacity() { return kLargeTable; }

void set_device(int32_t blocks_that_fit, int32_t ptx_version) {
  fake.blocks_that_fit = blocks_that_fit;
  fake.ptx_version = ptx_version;
}
void run_kernels(int32_t value) { fake.runs_kernels = value != 0; }
uint32_t last_blocks() { return fake.last_blocks; }
int64_t bytes_allocated() { return fake.bytes; }
int64_t stats_bytes(int64_t count, const uint64_t* addresses, const int64_t* numels) {
  return stats_workspace_bytes(entries_of(count, addresses, numels), 0);
}
int64_t scale_bytes(int64_t count, const uint64_t* addresses, const int64_t* numels) {
  return scale_workspace_bytes(entries_of(count, addresses, numels), 0);
}

// allocations, pinned allocations, copies, fills, launches, overlaps
void counters(int64_t* out) {
  const int64_t now[] = {fake.allocations, fake.pinned_allocations, fake.copies,
                         fake.fills,       fake.launches,           fake.overlaps};
  std::copy(std::begin(now), std::end(now), out);
}

int32_t start_unscale(FakeStream* stream, int64_t count, const uint64_t* addresses, const int64_t* numels,
                      Row* table, const float* factor) {
  const std::vector<Entry> entries = entries_of(count, addresses, numels);
  return start(stream, entries, stats_workspace_bytes,
               [&](void* memory) { launch_stats(entries, table, nullptr, factor, memory, 0, stream); });
}

int32_t start_scale(FakeStream* stream, int64_t count, const uint64_t* addresses, const int64_t* numels,
                    const double* coefficients, int64_t stride) {
  const std::vector<Entry> entries = entries_of(count, addresses, numels);
  return start(stream, entries, scale_workspace_bytes,
               [&](void* memory) { launch_scale(entries, {coefficients, stride}, false, memory, 0, stream); });
}

// The percentile `share` of a clip that keeps so many norms.
int32_t start_decide(FakeStream* stream, double* state, int64_t window, const double* norm, double share,
                     double* out) {
  return guarded([&] {
    launch_decide(
        {ClipRule::kPercentile, {share}, state, window, norm, nullptr, 0, nullptr, nullptr, nullptr, out}, 0,
        stream);
  });
}

// A guard that refuses norms above a limit, and counts.
int32_t start_guard(FakeStream* stream, double* state, int64_t window, double* numbers, const float* verdict,
                    double max_norm, float* out, int64_t* counters) {
  return guarded([&] {
    GuardRequest request{{0, 6, 64, 10, 0, kInf, max_norm, kInf},
                         state,
                         window,
                         numbers,
                         verdict,
                         nullptr,
                         nullptr,
                         {},
                         out,
                         counters};
    launch_guard(request, 0, stream);
  });
}

// With `times` scale kernels right behind the statistics kernel, as clipping launches them: all in one
// workspace, since the allocator gives the second kernel the memory of the first.
int32_t start_stats(FakeStream* stream, int64_t count, const uint64_t* addresses, const int64_t* numels,
                    Row* table, float* norm, double max_norm, double* coefficient, int32_t times) {
  const std::vector<Entry> entries = entries_of(count, addresses, numels);
  const auto bytes_for = [&](const std::vector<Entry>& all, int32_t device) {
    const int64_t bytes = stats_workspace_bytes(all, device);
    return times == 0 ? bytes : std::max(bytes, scale_workspace_bytes(all, device));
  };
  return start(stream, entries, bytes_for, [&](void* memory) {
    const NormRequest request{max_norm, false, DType::kFloat32, norm, coefficient, {}};
    launch_stats(entries, table, &request, nullptr, memory, 0, stream);
    for (int32_t i = 0; i < times; ++i) launch_scale(entries, coefficient, true, memory, 0, stream);
  });
}

}  // extern "C"
