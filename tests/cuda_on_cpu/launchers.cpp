// A C interface to the launchers and kernels, over a replacement of CUDA's runtime, for
// tests/helpers/cuda_on_cpu.py, module.cpp and tests/cuda_on_cpu/test_cuda_launchers.py. Complex tensors are
// passed as pairs.
#include "cuda_on_host.h"
//
#include "launch_state.cpp"
//
#include "scale_cuda.cu"
#include "stats_cuda.cu"

using namespace gradstat;

void* gradstat::allocate_forever(size_t bytes, int32_t /*device*/, const char* what) {
  void* memory = nullptr;
  check_cuda(cudaMalloc(&memory, bytes), what);
  return memory;
}

namespace {

std::vector<Entry> entries_of(int64_t count, const uint64_t* addresses, const int64_t* numels,
                              const int32_t* dtypes, const uint8_t* pairs) {
  std::vector<Entry> entries;
  for (int64_t i = 0; i < count; ++i) {
    entries.push_back(
        {reinterpret_cast<void*>(addresses[i]), numels[i], static_cast<DType>(dtypes[i]), pairs[i] != 0});
  }
  return entries;
}

std::string last_error;
FakeStream* current = nullptr;

template <class Call>
int32_t translating_exceptions(const Call& call) {
  try {
    call();
    return 0;
  } catch (const std::exception& error) {
    last_error = error.what();
    return 1;
  }
}

// Calls launch(memory) with memory as torch's allocator provides it: with arbitrary contents, and free for
// reuse once the stream has passed. A graph keeps its memory.
template <class Launch>
int32_t start(FakeStream* stream, int64_t bytes, const Launch& launch) {
  return translating_exceptions([&] {
    void* memory = std::memset(std::malloc(bytes > 0 ? bytes : 1), 0xff, bytes);
    const bool owned = !stream->capturing;
    launch(memory);
    if (owned) {
      stream->add([=] { std::free(memory); });
    }
  });
}

#define TENSORS \
  int64_t count, const uint64_t *addresses, const int64_t *numels, const int32_t *dtypes, const uint8_t *pairs
#define ENTRIES entries_of(count, addresses, numels, dtypes, pairs)

}  // namespace

extern "C" {

FakeStream* new_stream() {
  static unsigned long long ids = 0;
  return new FakeStream{++ids, {}, {}};
}
int32_t synchronize(FakeStream* stream) {
  return translating_exceptions([&] { stream->synchronize(); });
}
void begin_capture(FakeStream* stream) {
  stream->capturing = true;
  ++fake.capturing;
}
void* end_capture(FakeStream* stream) {
  stream->capturing = false;
  --fake.capturing;
  return new FakeWork(std::exchange(stream->graph, {}));
}
void replay(const void* graph, FakeStream* stream) {
  for (const auto& each : *static_cast<const FakeWork*>(graph)) stream->add(each);
}
void fail_allocations(int32_t count) { fake.failures_left = count; }
const char* error_text() { return last_error.c_str(); }
int32_t table_capacity() { return kParameterEntries; }

void set_blocks_that_fit(int32_t count) { fake.blocks_that_fit = count; }
void run_kernels(int32_t value) { fake.runs_kernels = value != 0; }
uint32_t last_blocks() { return fake.last_blocks; }
int64_t bytes_allocated() { return fake.bytes; }
int64_t stats_bytes(TENSORS) { return stats_workspace_bytes(ENTRIES, 0); }
int64_t scale_bytes(TENSORS) { return scale_workspace_bytes(ENTRIES, 0); }

// In the order of COUNTERS in test_cuda_launchers.py.
void counters(int64_t* out) {
  const int64_t now[] = {fake.allocations, fake.pinned_allocations, fake.copies,
                         fake.fills,       fake.launches,           fake.records,
                         fake.waits,       fake.devices_set};
  std::copy(std::begin(now), std::end(now), out);
}

// As aoti_torch_get_current_cuda_stream.
int32_t fake_current_stream(int32_t /*device*/, void** stream) { return *stream = current, 0; }
void set_stream(FakeStream* stream) {
  current = stream;
  fake.runs_at_once = stream != nullptr;
}

// Copies to the host and back.
int32_t copy_over(const void* from, int64_t bytes, FakeStream* stream, int32_t device, void* to) {
  return translating_exceptions([&] {
    const HeldSlot slot = copy_to_host(from, bytes, device, stream);
    if (has_arrived(*slot, true)) std::memcpy(to, slot->memory, slot->bytes);
  });
}

int32_t start_scale(FakeStream* stream, int32_t device, TENSORS, const double* multipliers, int64_t stride) {
  const std::vector<Entry> entries = ENTRIES;
  return start(stream, scale_workspace_bytes(entries, device),
               [&](void* memory) { launch_scale(entries, {multipliers, stride}, memory, device, stream); });
}

// Norm, factor and the pointers of an optimizer step may be null. `times`: number of scale kernels launched
// directly after the statistics kernel, as for clipping, all in one workspace, because the allocator gives the
// later kernels the memory of the first.
int32_t start_stats(FakeStream* stream, int32_t device, TENSORS, Row* table, const float* factor, void* norm,
                    int32_t norm_dtype, double max_norm, int32_t infinity_norm, double* multiplier,
                    const float* loss_scale, float* verdict, int64_t* counters, int32_t times) {
  const std::vector<Entry> entries = ENTRIES;
  const int64_t bytes = stats_workspace_bytes(entries, device);
  const int64_t most = times == 0 ? bytes : std::max(bytes, scale_workspace_bytes(entries, device));
  return start(stream, most, [&](void* memory) {
    const NormRequest request{max_norm, infinity_norm != 0, static_cast<DType>(norm_dtype),
                              norm,     multiplier,         {loss_scale, verdict, counters}};
    launch_stats(entries, table, norm != nullptr ? &request : nullptr, factor, memory, device, stream);
    for (int32_t i = 0; i < times; ++i) launch_scale(entries, multiplier, memory, device, stream);
  });
}

// As the operator decide_clip_, with null for absent arguments.
int32_t start_decide(FakeStream* stream, int64_t method, const double* options, int64_t option_count,
                     double* state, int64_t window, const double* norm, const Row* rows, int64_t count,
                     const Row* weights, const float* factor, const float* skip, double* out) {
  ClipRequest request{
      static_cast<ClipMethod>(method), {}, state, window, norm, rows, count, weights, factor, skip, out};
  std::copy(options, options + option_count, request.options);
  return translating_exceptions([&] { launch_decide(request, 0, stream); });
}

// As the operator guard_, for float32 values, with null for absent arguments.
int32_t start_guard(FakeStream* stream, const double* options, double* state, int64_t window, double* numbers,
                    const float* verdict, const float* loss, int64_t* counters, float* out) {
  GuardRequest request{
      {}, state, window, reinterpret_cast<Scaling*>(numbers), verdict, loss, DType::kFloat32, out, counters};
  std::memcpy(&request.options, options, sizeof(GuardOptions));
  return translating_exceptions([&] { launch_decide(request, 0, stream); });
}

}  // extern "C"
