// Runs translated kernels: a fiber per thread, with many blocks alive at once, in a random order. Reports
// accesses of memory that is not there or not aligned, races, and barriers that some threads never reach.
#include "device.h"

#include <sys/mman.h>

#include <algorithm>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <sstream>
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
struct Threads {
  u32 line;
  Times times;  // of the threads of a block
};
using ByBlock = std::unique_ptr<std::map<u32, Threads>>;
struct Byte {
  Access write = {}, read = {};
  ByBlock reads, atomics;  // since the last write; reads if there are several, in place of `read`
};

// Memory that a kernel may access.
struct Region {
  u64 begin, end;
  u8* memory;
  const char* name;
  std::vector<Byte> bytes = {};  // once it is accessed
};

struct Block;

struct Fiber : Thread {
  Block* home;
  void* stack_pointer;
  u32 id, now = 1;  // number in the grid, and time
  std::shared_ptr<const Clock> clock;
  const u32* of_block;       // the part of the clock for threads of the same block
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
  std::vector<Fiber> fibers;
  std::vector<char*> stacks;
  std::vector<u8> memory;
  Region shared;
  std::vector<Fiber*> at_barrier;
  std::vector<std::vector<Gathering>> warps;
  u32 alive;
};

struct Launch {
  void (*kernel)(Thread*);
  u32 blocks, threads, shared_bytes;
  Region parameters;
  u64 seed;

  std::vector<Region> regions = {};
  std::map<u32, Block> alive = {};
  std::vector<Fiber*> ready = {};
  std::map<u64, Clock> released = {};  // by addresses of atomics
  std::mt19937 random = {};
  u32 window = 0;             // the next thread is one of so many that became ready last
  void* scheduler = nullptr;  // its stack
  Fiber* running = nullptr;
  bool failed = false;
  std::set<std::string> complaints = {};
};

Launch* launch = nullptr;
std::string complaints;
std::vector<char*> idle_stacks;

template <class... Parts>
std::string text(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

std::string name_of(u32 id) {
  return text("thread ", id % launch->threads, " of block ", id / launch->threads);
}

// Lines of the PTX are written as @number.
void complain(const std::string& key, const std::string& what) {
  if (launch->complaints.size() < kMostComplaints && launch->complaints.insert(key).second)
    complaints += what + "\n";
}

// The fiber that runs is the `this` of all functions of `Thread`.
Fiber& self() { return *launch->running; }
void yield() { switch_stacks(&self().stack_pointer, launch->scheduler); }

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

bool knows(const Fiber& fiber, u32 id, u32 time) {
  if (time == 0 || id == fiber.id) return true;
  const u32 block = id / fiber.threads, thread = id % fiber.threads;
  if (block == fiber.block) return fiber.of_block[thread] >= time;
  const auto found = fiber.clock->find(block);
  return found != fiber.clock->end() && (*found->second)[thread] >= time;
}

// Memory --------------------------------------------------------------------------------------------------

enum Kind { kRead, kWrite, kAtomic };
constexpr const char* kVerbs[] = {"reads", "writes", "changes atomically"};

std::string place_of(const Region& region, u64 address) {
  const s64 offset = address - region.begin;
  return text("byte ", offset, " of ", region.end - region.begin, " in ", region.name);
}

void note(ByBlock& all, const Access& access) {
  if (all == nullptr) all = std::make_unique<std::map<u32, Threads>>();
  Threads& threads = (*all)[access.thread / launch->threads];
  threads.times.resize(launch->threads);
  threads.times[access.thread % launch->threads] = access.time;
  threads.line = access.line;
}

// An access of a byte, to be compared with earlier ones.
struct Check {
  const Fiber& fiber;
  Kind kind;
  u32 line;
  const Region& region;
  u64 address;

  void against(Kind other, const Access& access) const {
    if (knows(fiber, access.thread, access.time)) return;
    complain(text("race ", line, " ", access.line),
             text("race: ", name_of(fiber.id), " ", kVerbs[kind], " ", place_of(region, address), " at @", line,
                  ", which ", name_of(access.thread), " ", kVerbs[other], " at @", access.line,
                  ", and nothing orders the two"));
  }
  void against(Kind other, const ByBlock& all) const {
    if (all == nullptr) return;
    for (const auto& [block, threads] : *all) {
      for (u32 i = 0; i < threads.times.size(); ++i)
        against(other, {block * fiber.threads + i, threads.times[i], threads.line});
    }
  }
  // `changes`: whether a write changes the byte. Threads of a block may write the same value in the same
  // instruction: Triton makes all threads that hold a value store it.
  void run(Byte& byte, bool changes) const {
    const Access own{fiber.id, fiber.now, line};
    const bool is_same =
        !changes && byte.write.line == line && byte.write.thread / fiber.threads == fiber.block;
    if (!is_same) against(kWrite, byte.write);
    if (kind != kAtomic) against(kAtomic, byte.atomics);
    if (kind == kRead) {
      if (byte.reads == nullptr && knows(fiber, byte.read.thread, byte.read.time)) {
        byte.read = own;
        return;
      }
      if (byte.reads == nullptr) note(byte.reads, byte.read);
      note(byte.reads, own);
      return;
    }
    against(kRead, byte.read);
    against(kRead, byte.reads);
    byte.read = {};
    byte.reads.reset();
    if (kind == kAtomic) {
      note(byte.atomics, own);
    } else {
      byte.write = own;
      byte.atomics.reset();
    }
  }
};

// The region of an address in global memory, or the last one before it.
Region* region_of(u64 address) {
  const auto after = std::upper_bound(launch->regions.begin(), launch->regions.end(), address,
                                      [](u64 at, const Region& region) { return at < region.begin; });
  return after == launch->regions.begin() ? nullptr : &*std::prev(after);
}

u8* access(Kind kind, Space space, u64 address, u32 bytes, u32 line, const u8* values = nullptr) {
  Fiber& fiber = self();
  if (space == kGeneric && address >= kSharedWindow) {
    space = kShared;
    address -= kSharedWindow;
  }
  Region* region = space == kShared ? &fiber.home->shared : &launch->parameters;
  if (space == kGlobal || space == kGeneric) {
    region = fiber.region;
    if (region == nullptr || address < region->begin || address >= region->end)
      region = fiber.region = region_of(address);
  }
  const bool is_inside = region != nullptr && address >= region->begin && address + bytes <= region->end;
  if (!is_inside || address % bytes != 0) {
    const std::string where = region == nullptr ? text("address ", address) : place_of(*region, address);
    const char* const wrong = is_inside ? " bytes that are not aligned: " : " bytes out of bounds: ";
    fiber.fail(text(kVerbs[kind], " ", bytes, wrong, where).c_str(), line);
  }
  u8* const memory = region->memory + (address - region->begin);
  if (space == kParameter) return memory;
  if (region->bytes.empty()) region->bytes.resize(region->end - region->begin);
  for (u32 i = 0; i < bytes; ++i) {
    const bool changes = values == nullptr || values[i] != memory[i];
    Check{fiber, kind, line, *region, address + i}.run(region->bytes[address - region->begin + i], changes);
  }
  return memory;
}

// Meetings of a warp ----------------------------------------------------------------------------------------

// Sets each lane's result, from the three numbers that every lane offered: the value, and two operands.
void conclude(Meeting what, u32 mask, const std::vector<Fiber*>& lanes) {
  u32 any = 0, sum = 0;
  s32 least = INT32_MAX;
  for (const Fiber* fiber : lanes) {
    any |= fiber->offered[0];
    sum += fiber->offered[0];
    least = std::min(least, static_cast<s32>(fiber->offered[0]));
  }
  for (Fiber* fiber : lanes) {
    fiber->result = what == vote_sync_any ? any : what == redux_sync_add ? sum : least;
    if (what != shfl_sync_bfly && what != shfl_sync_down) continue;
    const u32 lane = fiber->thread % kLanes, by = fiber->offered[1] & 31;
    const u32 segment = fiber->offered[2] >> 8 & 31, clamp = fiber->offered[2] & 31;
    const u32 from = what == shfl_sync_bfly ? lane ^ by : lane + by;
    fiber->is_inside = from <= ((lane & segment) | (clamp & ~segment));
    const u32 source = fiber->is_inside ? from : lane;
    if ((mask >> source & 1) == 0) fiber->fail("shuffles from a lane that is not in the mask", fiber->line);
    fiber->result = fiber->home->fibers[fiber->thread - lane + source].offered[0];
  }
}

// Scheduling --------------------------------------------------------------------------------------------------

void run_fiber() {
  launch->kernel(&self());
  self().has_ended = true;
  --self().home->alive;
  yield();
  __builtin_unreachable();
}

char* new_stack() {
  void* memory = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_STACK, -1, 0);
  if (memory == MAP_FAILED) std::abort();
  mprotect(memory, 4096, PROT_NONE);
  return static_cast<char*>(memory);
}

void start_block(u32 number) {
  Block& block = launch->alive[number];
  block.memory.resize(launch->shared_bytes + 16);
  for (u8& byte : block.memory) byte = launch->random();
  u8* const aligned = block.memory.data() + (0 - reinterpret_cast<u64>(block.memory.data())) % 16;
  block.shared = {0, launch->shared_bytes, aligned, "shared memory"};
  block.warps.resize(launch->threads / kLanes);
  block.alive = launch->threads;
  block.fibers.resize(launch->threads);
  const auto clock =
      std::make_shared<const Clock>(Clock{{number, std::make_shared<const Times>(Times(launch->threads))}});
  std::vector<Fiber*> order;
  for (u32 i = 0; i < launch->threads; ++i) {
    Fiber& fiber = block.fibers[i];
    static_cast<Thread&>(fiber) = {i, number, launch->threads, launch->blocks, false, {}};
    fiber.home = &block;
    fiber.id = number * launch->threads + i;
    set_clock(fiber, clock);
    if (idle_stacks.empty()) idle_stacks.push_back(new_stack());
    block.stacks.push_back(idle_stacks.back());
    idle_stacks.pop_back();
    // As if switch_stacks had been called by run_fiber's caller: six registers and the return address.
    void** top = reinterpret_cast<void**>(block.stacks.back() + kStackBytes) - 8;
    std::fill(top, top + 8, nullptr);
    top[6] = reinterpret_cast<void*>(&run_fiber);
    fiber.stack_pointer = top;
    order.push_back(&fiber);
  }
  std::shuffle(order.begin(), order.end(), launch->random);
  launch->ready.insert(launch->ready.end(), order.begin(), order.end());
}

void end_block(u32 number) {
  const std::vector<char*>& stacks = launch->alive.at(number).stacks;
  idle_stacks.insert(idle_stacks.end(), stacks.begin(), stacks.end());
  launch->alive.erase(number);
}

// Complains about threads that wait for others forever.
void complain_of_waiting() {
  std::map<u32, std::vector<u32>> waiting;  // by line
  for (const auto& [number, block] : launch->alive) {
    for (const Fiber& fiber : block.fibers) {
      if (!fiber.has_ended) waiting[fiber.line].push_back(fiber.id);
    }
  }
  std::string what = "waits for threads that never arrive";
  for (const auto& [line, threads] : waiting)
    what += text(", ", name_of(threads[0]), " and ", threads.size() - 1, " more at @", line);
  complain("waiting", what);
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
    switch_stacks(&launch->scheduler, self().stack_pointer);
    if (self().home->alive == 0) end_block(self().block);
  }
  if (!launch->failed && !launch->alive.empty()) complain_of_waiting();
  // What atomics count are tickets, which must be ready for the next launch.
  for (const auto& [address, clock] : launch->released) {
    if (launch->failed || address >= kSharedWindow) continue;
    const u32 left = *reinterpret_cast<const u32*>(address);
    if (left != 0) complain("ticket", text("leaves ", left, " in a ticket instead of 0"));
  }
  while (!launch->alive.empty()) end_block(launch->alive.begin()->first);
}

}  // namespace

const void* Thread::read(Space space, u64 address, u32 bytes, u32 line) {
  return access(kRead, space, address, bytes, line);
}
void Thread::write(const void* values, Space space, u64 address, u32 bytes, u32 line) {
  memcpy(access(kWrite, space, address, bytes, line, static_cast<const u8*>(values)), values, bytes);
}

void* Thread::atomic(Space space, u64 address, u32 bytes, u32 line, bool acquires, bool releases) {
  launch->ready.push_back(&self());  // others may come first
  yield();
  u8* const memory = access(kAtomic, space, address, bytes, line);
  Clock& released = launch->released[address];
  if (acquires) {
    Clock clock = *self().clock;
    learn(clock, released);
    set_clock(self(), std::make_shared<const Clock>(std::move(clock)));
  }
  if (releases) learn(released, joined({&self()}));
  return memory;
}

void Thread::barrier(u32 line) {
  Block& block = *self().home;
  self().line = line;
  block.at_barrier.push_back(&self());
  if (block.at_barrier.size() == threads) {
    for (const Fiber& other : block.fibers) {
      const u32 first = block.fibers[other.thread / kLanes * kLanes].line;
      if (other.line != first)
        complain("barriers",
                 text("threads of a warp are at different barriers: @", first, " and @", other.line));
    }
    synchronize(block.at_barrier);
    launch->ready.insert(launch->ready.end(), block.at_barrier.begin(), block.at_barrier.end());
    block.at_barrier.clear();
  }
  yield();
}

u32 Thread::meet(Meeting what, u32 mask, u32 value, u32 b, u32 c, u32 line) {
  Fiber& fiber = self();
  const u32 lane = thread % kLanes;
  if ((mask >> lane & 1) == 0) fail("is not in its own mask", line);
  std::vector<Gathering>& gatherings = fiber.home->warps[thread / kLanes];
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
      if (mask >> i & 1) lanes.push_back(&fiber.home->fibers[thread - lane + i]);
    }
    if (what == bar_warp_sync) synchronize(lanes);  // the others order no accesses of memory
    conclude(what, mask, lanes);
    launch->ready.insert(launch->ready.end(), lanes.begin(), lanes.end());
  }
  yield();
  return fiber.result;
}

void Thread::fail(const char* what, u32 line) {
  complain("failed", text(name_of(static_cast<Fiber*>(this)->id), " ", what, ", at @", line));
  launch->failed = true;
  yield();
  __builtin_unreachable();
}

void division_by_zero() { self().fail("divides an integer by zero", self().line); }

double random_error(u64 bits) {
  u64 x = bits + launch->seed * 0x9e3779b97f4a7c15;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
  x = (x ^ x >> 27) * 0x94d049bb133111eb;
  return static_cast<double>(static_cast<s64>(x ^ x >> 31)) * 0x1p-63;
}

extern "C" {

// Runs a kernel, which may access `count` regions of memory, in ascending order and apart from each other.
void run_kernel(void (*kernel)(Thread*), u32 blocks, u32 threads, u32 shared_bytes, u8* parameters,
                u32 parameter_bytes, u64 count, const u64* begins, const u64* ends, u64 seed, u64 errors) {
  Launch own{kernel, blocks, threads, shared_bytes, {0, parameter_bytes, parameters, "parameters"}, errors};
  for (u64 i = 0; i < count; ++i)
    own.regions.push_back({begins[i], ends[i], reinterpret_cast<u8*>(begins[i]), "global memory"});
  own.random.seed(seed);
  own.window = 1u << own.random() % 13;
  launch = &own;
  run();
}

// The errors since the last call, one on each line.
const char* take_complaints() {
  static std::string taken;
  taken.swap(complaints);
  complaints.clear();
  return taken.c_str();
}

}  // extern "C"
