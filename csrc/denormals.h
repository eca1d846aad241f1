// Keeps subnormal numbers in computations on the CPU, whatever the mode of the calling thread is.
#pragma once

#include <cstdint>

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

namespace gradstat {

// While in scope, arithmetic of this thread neither flushes subnormal results to zero nor reads subnormal
// numbers as zero, which torch.set_flush_denormal(True) and -ffast-math of other libraries switch on. A thread
// inherits the mode of the one that started it, so every thread that works needs its own. The mode is restored
// at the end.
class KeepsDenormals {
 public:
  KeepsDenormals() : before_(control()) {
    if ((before_ & kFlushes) != 0) set_control(before_ & ~kFlushes);
  }
  KeepsDenormals(const KeepsDenormals&) = delete;
  KeepsDenormals& operator=(const KeepsDenormals&) = delete;
  ~KeepsDenormals() {
    if ((before_ & kFlushes) != 0) set_control(before_);
  }

 private:
  // Compilers do not move loads and stores, nor therefore the arithmetic between them, across these statements.
#if defined(__SSE2__)
  using Control = uint32_t;
  static constexpr Control kFlushes = 0x8040;  // MXCSR: results to zero, operands are zero
  static Control control() { return _mm_getcsr(); }
  static void set_control(Control value) { asm volatile("ldmxcsr %0" ::"m"(value) : "memory"); }
#elif defined(__aarch64__)
  using Control = uint64_t;
  static constexpr Control kFlushes = uint64_t{1} << 24 | uint64_t{1} << 19;  // FPCR: FZ, FZ16
  static Control control() {
    Control value;
    asm volatile("mrs %0, fpcr" : "=r"(value));
    return value;
  }
  static void set_control(Control value) { asm volatile("msr fpcr, %0" ::"r"(value) : "memory"); }
#else
  using Control = uint32_t;  // no processor that torch is built for has such a mode here
  static constexpr Control kFlushes = 0;
  static Control control() { return 0; }
  static void set_control(Control) {}
#endif

  const Control before_;
};

}  // namespace gradstat
