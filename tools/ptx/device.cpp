// Runs translated kernels: a fiber per thread, with all blocks alive at once, in a random order. Reports
// accesses of memory that is not there or not aligned, races, and barriers that some threads never reach.
#include "device.h"

#include <sys/mman.h>

#include <algorithm>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#if !defined(__x86_64__)
#error "switching fibers is written for x86-64"
#endif
// Saves the registers that a call preserves, stores the stack pointer at *rdi, and goes on at the stack rsi.
extern "C" void switch_stacks(void** from, void* to);
asm(R"(
.globl switch_stacks
switch_stacks:
  push %rbp; push %rbx; push %r12; push %r13; push %r14; push %r15
  mov %rsp, (%rdi)
  mov %rsi, %rsp
  pop %r15; pop %r14; pop %r13; pop %r12; pop %rbx; pop %rbp
  ret
)");

namespace {

constexpr u32 kLanes = 32, kMostAlive = 4096, kMostComplaints = 20;
constexpr size_t kStackBytes = 512 * 1024;  // of which the system provides what is touched

// Clocks ------------------------------------------------------------------------------------------------

// A thread's time advances when others learn of it. A clock is what has been learned: for threads of some
// blocks, the time up to which their accesses are ordered before. Clocks and their parts are shared and never
// changed.
using Times = std::vector<u32>;
using Clock = std::map<u32, std::shared_ptr<const Times>>;

void learn(Clock& clock, const Clock& other) {
  for (const auto& [block, times] : other) {
    std::shared_ptr<const Times>& known = clock[block];
    if (known == nullptr || known == times) {
      known = times;
      continue;
    }
    Times latest = *known;
    for (size_t i = 0; i < latest.size(); ++i) latest[i] = std::max(latest[i], (*times)[i]);
    known = std::make_shared<const Times>(std::move(latest));
  }
}

// The latest accesses of a byte ---------------------------------------------------------------------------

struct Access {
  u32 thread, time, line;  // time 0: none
};
struct Readers {
  u32 line;
  Times times;  // of the threads of a block
};
struct Shared {
  std::map<u32, Readers> reads, atomics;  // by block
};
struct Byte {
  Access write = {}, read = {};
  std::unique_ptr<Shared> shared;  // if several threads read it since the last write, or with atomics
};

// Memory that a kernel may access.
struct Region {
  u64 begin, end;
  u8* memory;
  std::vector<Byte> bytes;  // once it is accessed
};

struct Block;

struct Fiber : Thread {
  Block* home;
  char* stack;
  void* stack_pointer;
  u32 id, now = 1;  // number in the grid, and time
  std::shared_ptr<const Clock> clock;
  const u32* of_block;       // the part of the clock for threads of the same block
  Clock read, fenced;        // learned by atomics without acquire; known at the last fence
  Region* region = nullptr;  // accessed last
  u32 offered[3], result;    // in a meeting
  u32 line = 0;              // where it waits
  bool has_ended = false;
};

struct Gathering {
  Meeting what;
  u32 mask, arrived;
};

struct Block {
  std::vector<std::unique_ptr<Fiber>> fibers;
  std::vector<u8> memory;
  Region shared;
  std::map<u32, std::vector<Fiber*>> barriers;
  std::vector<std::vector<Gathering>> warps;
  u32 alive;
};

struct Launch {
  void (*kernel)(Thread*);
  u32 blocks, threads, shared_bytes;
  const u8* parameters;
  u32 parameter_bytes;

  std::vector<Region> regions;
  std::map<u32, std::unique_ptr<Block>> alive;
  std::vector<Fiber*> ready;
  std::map<u64, Clock> released;  // by addresses of atomics
  std::mt19937 random;
  u64 seed;
  u32 window;                 // the next thread is one of so many that became ready last
  void* scheduler = nullptr;  // its stack
  Fiber* running = nullptr;
  bool failed = false;
  std::set<std::string> complaints;
};

Launch* launch = nullptr;
std::string complaints;
std::vector<char*> idle_stacks;

std::string name_of(u32 id) {
  return "thread " + std::to_string(id % launch->threads) + " of block " + std::to_string(id / launch->threads);
}

// Lines of the PTX are written as @number.
void complain(const std::string& key, const std::string& text) {
  if (launch->complaints.size() < kMostComplaints && launch->complaints.insert(key).second)
    complaints += text + "\n";
}

void yield(Fiber& fiber) { switch_stacks(&fiber.stack_pointer, launch->scheduler); }
void wake(Fiber& fiber) { launch->ready.push_back(&fiber); }

void set_clock(Fiber& fiber, std::shared_ptr<const Clock> clock) {
  fiber.clock = std::move(clock);
  fiber.of_block = fiber.clock->at(fiber.block)->data();
}

// A clock that includes what these threads of one block have done so far, after which they are at a later time.
Clock joined(const std::vector<Fiber*>& fibers) {
  Clock clock;
  const Clock* last = nullptr;
  for (const Fiber* fiber : fibers) {
    if (fiber->clock.get() != last) learn(clock, *fiber->clock);
    last = fiber->clock.get();
  }
  Times own = *clock.at(fibers[0]->block);
  for (Fiber* fiber : fibers) own[fiber->thread] = fiber->now++;
  clock[fibers[0]->block] = std::make_shared<const Times>(std::move(own));
  return clock;
}

void synchronize(const std::vector<Fiber*>& fibers) {
  const auto clock = std::make_shared<const Clock>(joined(fibers));
  for (Fiber* fiber : fibers) set_clock(*fiber, clock);
}

bool knows(const Fiber& fiber, u32 block, u32 thread, u32 time) {
  if (block == fiber.block) return thread == fiber.thread || fiber.of_block[thread] >= time;
  const auto found = fiber.clock->find(block);
  return found != fiber.clock->end() && (*found->second)[thread] >= time;
}

// Memory --------------------------------------------------------------------------------------------------

enum Kind { kRead, kWrite, kAtomic };
constexpr const char* kVerbs[] = {"reads", "writes", "changes atomically"};

std::string place_of(const Region& region, u64 address) {
  const bool is_shared = region.begin < launch->shared_bytes;
  return (is_shared ? "byte " + std::to_string(address - region.begin) + " of shared memory"
                    : "byte " + std::to_string(static_cast<s64>(address - region.begin)) + " of " +
                          std::to_string(region.end - region.begin) + " bytes in global memory");
}

void race(const Fiber& fiber, Kind kind, u32 line, const Region& region, u64 address, const char* other,
          u32 thread, u32 other_line) {
  complain("race " + std::to_string(line) + " " + std::to_string(other_line),
           "race: " + name_of(fiber.id) + " " + kVerbs[kind] + " " + place_of(region, address) + " at @" +
               std::to_string(line) + ", which " + name_of(thread) + " " + other + " at @" +
               std::to_string(other_line) + ", and nothing orders the two");
}

void check_all(const Fiber& fiber, const std::map<u32, Readers>& all, Kind kind, u32 line, const Region& region,
               u64 address, const char* verb) {
  for (const auto& [block, readers] : all) {
    for (u32 i = 0; i < readers.times.size(); ++i) {
      if (readers.times[i] != 0 && !knows(fiber, block, i, readers.times[i])) {
        return race(fiber, kind, line, region, address, verb, block * fiber.threads + i, readers.line);
      }
    }
  }
}

void note(std::map<u32, Readers>& all, const Access& access) {
  Readers& readers = all[access.thread / launch->threads];
  if (readers.times.empty()) readers.times.resize(launch->threads);
  readers.times[access.thread % launch->threads] = access.time;
  readers.line = access.line;
}

// `changes`: whether a write changes the byte. Threads of a block may write the same value in the same
// instruction: Triton makes all threads that hold a value store it.
void check(Fiber& fiber, Kind kind, Byte& byte, u32 line, const Region& region, u64 address, bool changes) {
  const Access own{fiber.id, fiber.now, line};
  const auto is_known = [&](const Access& access) {
    return access.time == 0 || access.thread == fiber.id ||
           knows(fiber, access.thread / fiber.threads, access.thread % fiber.threads, access.time);
  };
  const bool is_same = !changes && byte.write.line == line && byte.write.thread / fiber.threads == fiber.block;
  if (!is_same && !is_known(byte.write))
    race(fiber, kind, line, region, address, "writes", byte.write.thread, byte.write.line);
  if (byte.shared != nullptr && kind != kAtomic) {
    check_all(fiber, byte.shared->atomics, kind, line, region, address, "changes atomically");
  }
  if (kind == kRead) {
    if (byte.shared != nullptr && !byte.shared->reads.empty()) {
      note(byte.shared->reads, own);
    } else if (is_known(byte.read)) {
      byte.read = own;
    } else {
      if (byte.shared == nullptr) byte.shared = std::make_unique<Shared>();
      note(byte.shared->reads, byte.read);
      note(byte.shared->reads, own);
    }
    return;
  }
  if (!is_known(byte.read)) race(fiber, kind, line, region, address, "reads", byte.read.thread, byte.read.line);
  if (byte.shared != nullptr) check_all(fiber, byte.shared->reads, kind, line, region, address, "reads");
  byte.read = {};
  if (kind == kAtomic) {
    if (byte.shared == nullptr) byte.shared = std::make_unique<Shared>();
    byte.shared->reads.clear();
    note(byte.shared->atomics, own);
  } else {
    byte.write = own;
    byte.shared.reset();
  }
}

u8* access(Thread* thread, Kind kind, Space space, u64 address, u32 bytes, u32 line,
           const u8* values = nullptr) {
  Fiber& fiber = *static_cast<Fiber*>(thread);
  if (space == kParameter) {
    if (address + bytes > launch->parameter_bytes) fiber.fail("reads behind the parameters", line);
    if (address % bytes != 0) fiber.fail("reads a parameter that is not aligned", line);
    return const_cast<u8*>(launch->parameters) + address;
  }
  if (space == kGeneric && address >= kSharedWindow) {
    space = kShared;
    address -= kSharedWindow;
  }
  Region* region = &fiber.home->shared;
  if (space != kShared) {
    region = fiber.region;
    if (region == nullptr || address < region->begin || address >= region->end) {
      const auto after = std::upper_bound(launch->regions.begin(), launch->regions.end(), address,
                                          [](u64 at, const Region& r) { return at < r.begin; });
      region = after == launch->regions.begin() ? nullptr : fiber.region = &*std::prev(after);
    }
  }
  if (region == nullptr || address + bytes > region->end) {
    const std::string what =
        std::string(kVerbs[kind]) + " " + std::to_string(bytes) + " bytes out of bounds: " +
        (region == nullptr ? "address " + std::to_string(address) : place_of(*region, address));
    fiber.fail(what.c_str(), line);
  }
  if (address % bytes != 0) {
    const std::string what = std::string(kVerbs[kind]) + " " + std::to_string(bytes) +
                             " bytes that are not aligned, " + place_of(*region, address);
    fiber.fail(what.c_str(), line);
  }
  if (region->bytes.empty()) region->bytes.resize(region->end - region->begin);
  u8* const memory = region->memory + (address - region->begin);
  for (u32 i = 0; i < bytes; ++i) {
    const bool changes = values == nullptr || values[i] != memory[i];
    check(fiber, kind, region->bytes[address - region->begin + i], line, *region, address + i, changes);
  }
  return memory;
}

// Meetings of a warp ----------------------------------------------------------------------------------------

#define NAME(name) #name,
constexpr const char* kNames[] = {MEETINGS(NAME)};

// Sets each lane's result, from the three numbers that every lane offered: the value, and two operands.
void conclude(Meeting what, u32 mask, const std::vector<Fiber*>& lanes) {
  u32 any = 0, all = ~0u, sum = 0;
  s32 least = INT32_MAX, most = INT32_MIN;
  for (const Fiber* lane : lanes) {
    const u32 value = lane->offered[0];
    any |= value;
    all &= value;
    sum += value;
    least = std::min(least, static_cast<s32>(value));
    most = std::max(most, static_cast<s32>(value));
  }
  for (Fiber* fiber : lanes) {
    const u32 lane = fiber->thread % kLanes, by = fiber->offered[1] & 31;
    const u32 segment = fiber->offered[2] >> 8 & 31, clamp = fiber->offered[2] & 31;
    const u32 last = (lane & segment) | (clamp & ~segment);
    s32 from = static_cast<s32>(lane);
    switch (what) {
      case k_bar_warp_sync:
        continue;
      case k_vote_sync_any:
        fiber->result = any;
        continue;
      case k_vote_sync_all:
        fiber->result = all;
        continue;
      case k_redux_sync_add_s32:
        fiber->result = sum;
        continue;
      case k_redux_sync_min_s32:
        fiber->result = least;
        continue;
      case k_redux_sync_max_s32:
        fiber->result = most;
        continue;
      case k_shfl_sync_bfly:
        from ^= by;
        break;
      case k_shfl_sync_down:
        from += by;
        break;
      case k_shfl_sync_up:
        from -= by;
        break;
      case k_shfl_sync_idx:
        from = (lane & segment) | (by & ~segment);
        break;
    }
    fiber->is_inside = what == k_shfl_sync_up ? from >= static_cast<s32>(last) : from <= static_cast<s32>(last);
    const u32 source = fiber->is_inside ? from : lane;
    if ((mask >> source & 1) == 0) fiber->fail("shuffles from a lane that is not in the mask", fiber->line);
    fiber->result = fiber->home->fibers[fiber->thread / kLanes * kLanes + source]->offered[0];
  }
}

// Scheduling --------------------------------------------------------------------------------------------------

void run_fiber() {
  launch->kernel(launch->running);
  launch->running->has_ended = true;
  --launch->running->home->alive;
  yield(*launch->running);
  __builtin_unreachable();
}

void start_block(u32 number) {
  auto block = std::make_unique<Block>();
  block->memory.resize(launch->shared_bytes + 16);
  for (u8& byte : block->memory) byte = launch->random();
  u8* const aligned = block->memory.data() + (0 - reinterpret_cast<u64>(block->memory.data())) % 16;
  block->shared = {0, launch->shared_bytes, aligned, {}};
  block->warps.resize(launch->threads / kLanes);
  block->alive = launch->threads;
  const auto clock =
      std::make_shared<const Clock>(Clock{{number, std::make_shared<const Times>(Times(launch->threads))}});
  std::vector<Fiber*> order;
  for (u32 i = 0; i < launch->threads; ++i) {
    auto fiber = std::make_unique<Fiber>();
    fiber->thread = i;
    fiber->block = number;
    fiber->threads = launch->threads;
    fiber->blocks = launch->blocks;
    fiber->home = block.get();
    fiber->id = number * launch->threads + i;
    set_clock(*fiber, clock);
    if (idle_stacks.empty()) {
      void* memory = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_STACK, -1, 0);
      if (memory == MAP_FAILED) std::abort();
      mprotect(memory, 4096, PROT_NONE);
      idle_stacks.push_back(static_cast<char*>(memory));
    }
    char* const stack = idle_stacks.back();
    idle_stacks.pop_back();
    fiber->stack = stack;
    // As if switch_stacks had been called by run_fiber's caller: six registers and the return address.
    void** top = reinterpret_cast<void**>(stack + kStackBytes) - 8;
    std::fill(top, top + 8, nullptr);
    top[6] = reinterpret_cast<void*>(&run_fiber);
    fiber->stack_pointer = top;
    order.push_back(fiber.get());
    block->fibers.push_back(std::move(fiber));
  }
  std::shuffle(order.begin(), order.end(), launch->random);
  launch->ready.insert(launch->ready.end(), order.begin(), order.end());
  launch->alive[number] = std::move(block);
}

void end_block(u32 number) {
  for (const auto& fiber : launch->alive.at(number)->fibers) idle_stacks.push_back(fiber->stack);
  launch->alive.erase(number);
}

// What each thread waits for that no other can end.
void complain_of_waiting() {
  std::map<u32, std::vector<u32>> waiting;  // by line
  for (const auto& [number, block] : launch->alive) {
    for (const auto& fiber : block->fibers) {
      if (!fiber->has_ended) waiting[fiber->line].push_back(fiber->id);
    }
  }
  std::string text;
  for (const auto& [line, threads] : waiting) {
    text += ", " + name_of(threads[0]) +
            (threads.size() > 1 ? " and " + std::to_string(threads.size() - 1) + " more" : "") + " at @" +
            std::to_string(line);
  }
  complain("waiting", "waits for threads that never arrive: " + text.substr(2));
}

void run() {
  std::vector<u32> numbers(launch->blocks);
  for (u32 i = 0; i < launch->blocks; ++i) numbers[i] = i;
  std::shuffle(numbers.begin(), numbers.end(), launch->random);
  while (!launch->failed) {
    while (!numbers.empty() && (launch->alive.size() + 1) * launch->threads <= kMostAlive) {
      start_block(numbers.back());
      numbers.pop_back();
    }
    if (launch->ready.empty()) break;
    const size_t count = launch->ready.size();
    std::swap(launch->ready[count - 1 - launch->random() % std::min<size_t>(count, launch->window)],
              launch->ready.back());
    launch->running = launch->ready.back();
    launch->ready.pop_back();
    switch_stacks(&launch->scheduler, launch->running->stack_pointer);
    if (launch->running->home->alive == 0) end_block(launch->running->block);
  }
  if (!launch->failed && !launch->alive.empty()) complain_of_waiting();
  // What atomics count are tickets, which must be ready for the next launch.
  for (const auto& [address, clock] : launch->released) {
    if (launch->failed || address >= kSharedWindow) continue;
    const u32 left = *reinterpret_cast<const u32*>(address);
    if (left != 0) complain("ticket", "leaves " + std::to_string(left) + " in a ticket instead of 0");
  }
  while (!launch->alive.empty()) end_block(launch->alive.begin()->first);
}

}  // namespace

const void* Thread::read(Space space, u64 address, u32 bytes, u32 line) {
  return access(this, kRead, space, address, bytes, line);
}
void Thread::write(const void* values, Space space, u64 address, u32 bytes, u32 line) {
  memcpy(access(this, kWrite, space, address, bytes, line, static_cast<const u8*>(values)), values, bytes);
}

void* Thread::atomic(Space space, u64 address, u32 bytes, u32 line, bool acquires, bool releases) {
  Fiber& fiber = *static_cast<Fiber*>(this);
  wake(fiber);  // others may come first
  yield(fiber);
  u8* const memory = access(this, kAtomic, space, address, bytes, line);
  Clock& released = launch->released[address];
  if (acquires) {
    Clock clock = *fiber.clock;
    learn(clock, released);
    set_clock(fiber, std::make_shared<const Clock>(std::move(clock)));
  } else {
    learn(fiber.read, released);
  }
  learn(released, releases ? joined({&fiber}) : fiber.fenced);
  return memory;
}

void Thread::fence() {
  Fiber& fiber = *static_cast<Fiber*>(this);
  Clock clock = *fiber.clock;
  learn(clock, fiber.read);
  set_clock(fiber, std::make_shared<const Clock>(std::move(clock)));
  fiber.fenced = joined({&fiber});
}

void Thread::barrier(u32 number, u32 line) {
  Fiber& fiber = *static_cast<Fiber*>(this);
  std::vector<Fiber*>& waiting = fiber.home->barriers[number];
  fiber.line = line;
  waiting.push_back(&fiber);
  if (waiting.size() == threads) {
    std::vector<Fiber*> all;
    all.swap(waiting);
    for (const Fiber* other : all) {
      const u32 first = fiber.home->fibers[other->thread / kLanes * kLanes]->line;
      if (other->line != first) {
        complain("barriers", "threads of a warp are at different barriers: @" + std::to_string(first) +
                                 " and @" + std::to_string(other->line));
      }
    }
    synchronize(all);
    for (Fiber* other : all) wake(*other);
  }
  yield(fiber);
}

u32 Thread::meet(Meeting what, u32 mask, u32 value, u32 b, u32 c, u32 line) {
  Fiber& fiber = *static_cast<Fiber*>(this);
  const u32 lane = thread % kLanes, warp = thread / kLanes;
  if ((mask >> lane & 1) == 0) fail("is not in its own mask", line);
  std::vector<Gathering>& gatherings = fiber.home->warps[warp];
  auto here = std::find_if(gatherings.begin(), gatherings.end(),
                           [&](const Gathering& g) { return g.what == what && g.mask == mask; });
  if (here == gatherings.end()) here = gatherings.insert(here, {what, mask, 0});
  here->arrived |= 1u << lane;
  fiber.line = line;
  fiber.offered[0] = value;
  fiber.offered[1] = b;
  fiber.offered[2] = c;
  if (here->arrived == mask) {
    gatherings.erase(here);
    std::vector<Fiber*> lanes;
    for (u32 i = 0; i < kLanes; ++i) {
      if (mask >> i & 1) lanes.push_back(fiber.home->fibers[warp * kLanes + i].get());
    }
    if (what == k_bar_warp_sync) synchronize(lanes);  // the others order no accesses of memory
    conclude(what, mask, lanes);
    for (Fiber* other : lanes) wake(*other);
  }
  yield(fiber);
  return fiber.result;
}

void Thread::fail(const char* what, u32 line) {
  Fiber& fiber = *static_cast<Fiber*>(this);
  complain("failed", name_of(fiber.id) + " " + what + ", at @" + std::to_string(line));
  launch->failed = true;
  yield(fiber);
  __builtin_unreachable();
}

void division_by_zero() { launch->running->fail("divides an integer by zero", launch->running->line); }

double random_error(u64 bits) {
  u64 x = bits + launch->seed * 0x9e3779b97f4a7c15;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
  x = (x ^ x >> 27) * 0x94d049bb133111eb;
  return static_cast<double>(static_cast<s64>(x ^ x >> 31)) * 0x1p-63;
}

extern "C" {

// Runs a kernel, which may access `count` regions of memory, in ascending order and apart from each other.
void run_kernel(void (*kernel)(Thread*), u32 blocks, u32 threads, u32 shared_bytes, const u8* parameters,
                u32 parameter_bytes, u64 count, const u64* begins, const u64* ends, u64 seed, u64 errors) {
  Launch own;
  own.kernel = kernel;
  own.blocks = blocks;
  own.threads = threads;
  own.shared_bytes = shared_bytes;
  own.parameters = parameters;
  own.parameter_bytes = parameter_bytes;
  for (u64 i = 0; i < count; ++i)
    own.regions.push_back({begins[i], ends[i], reinterpret_cast<u8*>(begins[i]), {}});
  own.random.seed(seed);
  own.seed = errors;
  own.window = 1u << own.random() % 13;
  launch = &own;
  run();
}

// What was wrong since the last call, a line each.
const char* take_complaints() {
  static std::string taken;
  taken.swap(complaints);
  complaints.clear();
  return taken.c_str();
}

}  // extern "C"
