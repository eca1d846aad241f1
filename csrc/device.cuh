// Small device functions the kernels use: 16-byte loads and stores, packed 16-bit arithmetic, conversions.
// Where the hardware has an instruction it is named in PTX; beside it stands the same thing in plain C++,
// which tests/gpu_on_host compiles for the CPU.
#pragma once

#include "stat.h"
#include "tile_table.h"

#define GRADSTAT_DEVICE __device__ __forceinline__

namespace gradstat {

constexpr uint32_t kAllLanes = 0xffffffffu;

// Memory ------------------------------------------------------------------------------------------------

// Past the first-level cache, which would gain nothing, but with the ordinary policy in the second, where the
// scale kernel is to find what the statistics kernel read last.
GRADSTAT_DEVICE uint4 load_vector(const uint4* address) {
#if defined(__CUDA_ARCH__)
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(address)
               : "memory");
  return v;
#else
  return *address;
#endif
}

// Into the second-level cache.
GRADSTAT_DEVICE void prefetch([[maybe_unused]] const uint4* address) {
#if defined(__CUDA_ARCH__)
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
#endif
}

GRADSTAT_DEVICE void store_vector(uint4* address, uint4 v) {
#if defined(__CUDA_ARCH__)
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
#else
  *address = v;
#endif
}

// Programmatic dependent launch: the scale kernel's blocks may be placed while the last of the statistics
// kernel are still merging. Nothing where the hardware or the launch does not have it.

// Everything the kernel before has written is visible behind this.
GRADSTAT_DEVICE void wait_for_previous_kernel() {
#if !defined(__CUDACC__)
  cuda_on_host::wait_for_previous_kernel();
#elif __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The next kernel may be placed once every block has come here.
GRADSTAT_DEVICE void admit_next_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Whether this is the last of `count` to arrive. Everything that the others' blocks wrote before they met here
// is then visible to this block, once it has met. The ticket is back at zero after the last.
GRADSTAT_DEVICE bool arrives_last(uint32_t* ticket, uint32_t count) {
#if defined(__CUDA_ARCH__)
  uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(ticket), "r"(count - 1)
               : "memory");
  return before == count - 1;
#else
  return atomicInc(ticket, count - 1) == count - 1;
#endif
}

// Packed 16-bit arithmetic ------------------------------------------------------------------------------

GRADSTAT_DEVICE float low_bfloat16(uint32_t pair) { return bits_to_float(pair << 16); }
GRADSTAT_DEVICE float high_bfloat16(uint32_t pair) { return bits_to_float(pair & 0xffff0000u); }

GRADSTAT_DEVICE float low_half(uint32_t pair) {
#if defined(__CUDA_ARCH__)
  float value;
  asm("{.reg .b16 low, high; mov.b32 {low, high}, %1; cvt.f32.f16 %0, low;}" : "=f"(value) : "r"(pair));
  return value;
#else
  return half_to_float(static_cast<uint16_t>(pair));
#endif
}

GRADSTAT_DEVICE float high_half(uint32_t pair) {
#if defined(__CUDA_ARCH__)
  float value;
  asm("{.reg .b16 low, high; mov.b32 {low, high}, %1; cvt.f32.f16 %0, high;}" : "=f"(value) : "r"(pair));
  return value;
#else
  return half_to_float(static_cast<uint16_t>(pair >> 16));
#endif
}

// Minimum and maximum of both halves. Of a number and a NaN the number, like fminf; the caller discards
// what was taken from a tile with a NaN anyway.
#if defined(__CUDA_ARCH__)
#define GRADSTAT_PACKED(name, instruction, low, high, choose)     \
  GRADSTAT_DEVICE uint32_t name(uint32_t a, uint32_t b) {         \
    uint32_t out;                                                 \
    asm(instruction " %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b)); \
    return out;                                                   \
  }
#else
#define GRADSTAT_PACKED(name, instruction, low, high, choose)       \
  GRADSTAT_DEVICE uint32_t name(uint32_t a, uint32_t b) {           \
    const uint32_t l = choose(low(a), low(b)) == low(a) ? a : b;    \
    const uint32_t h = choose(high(a), high(b)) == high(a) ? a : b; \
    return (l & 0xffffu) | (h & 0xffff0000u);                       \
  }
#endif
GRADSTAT_PACKED(min_bfloat16, "min.bf16x2", low_bfloat16, high_bfloat16, fminf)
GRADSTAT_PACKED(max_bfloat16, "max.bf16x2", low_bfloat16, high_bfloat16, fmaxf)
GRADSTAT_PACKED(min_half, "min.f16x2", low_half, high_half, fminf)
GRADSTAT_PACKED(max_half, "max.f16x2", low_half, high_half, fmaxf)
#undef GRADSTAT_PACKED

// Adds to each half of `count`, read as float16 numbers, 1 if that half of `pair` is zero. Zero has the same
// bits in bfloat16 and float16, so one comparison serves both; counts are exact up to 2048.
GRADSTAT_DEVICE uint32_t count_zero_halves(uint32_t count, uint32_t pair) {
#if defined(__CUDA_ARCH__)
  uint32_t out;
  asm("{.reg .b32 zero; set.eq.f16x2.f16x2 zero, %2, %3; add.rn.f16x2 %0, %1, zero;}"
      : "=r"(out)
      : "r"(count), "r"(pair), "r"(0u));
  return out;
#else
  // The small counts a tile reaches, as float16: looked up rather than rounded.
  const auto next = [](uint32_t half) {
    uint32_t bits = 0x3c00u;
    if (half != 0) {
      const float value = half_to_float(static_cast<uint16_t>(half)) + 1.0f;
      bits = ((float_to_bits(value) - 0x38000000u) >> 13) & 0x7fffu;
    }
    return bits;
  };
  uint32_t low = count & 0xffffu, high = count >> 16;
  if ((pair & 0x7fffu) == 0) low = next(low);
  if ((pair & 0x7fff0000u) == 0) high = next(high);
  return low | (high << 16);
#endif
}

// The sum of both halves of such a count. 2^23 is added so that the float's bits are the integer.
GRADSTAT_DEVICE uint32_t total_of_halves(uint32_t count) {
  return float_to_bits(low_half(count) + high_half(count) + 0x1p23f) - 0x4b000000u;
}

// Both halves times those of `factor`; exact, as used.
GRADSTAT_DEVICE uint32_t to_half_pair(float low, float high);
GRADSTAT_DEVICE uint32_t times_half(uint32_t pair, uint32_t factor) {
#if defined(__CUDA_ARCH__)
  uint32_t out;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(out) : "r"(pair), "r"(factor));
  return out;
#else
  return to_half_pair(low_half(pair) * low_half(factor), high_half(pair) * high_half(factor));
#endif
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
constexpr bool kHasFloat8Conversion = true;
#else
constexpr bool kHasFloat8Conversion = false;
#endif

// The lower two bytes of `bytes`, e4m3 numbers, as float16; NaN stays NaN. Where the hardware has it.
GRADSTAT_DEVICE uint32_t e4m3_to_half_pair(uint32_t bytes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  uint32_t out;
  asm("{.reg .b16 low, high; mov.b32 {low, high}, %1; cvt.rn.f16x2.e4m3x2 %0, low;}" : "=r"(out) : "r"(bytes));
  return out;
#else
  return bytes;  // not called
#endif
}

GRADSTAT_DEVICE uint32_t high_word(double x) {
#if defined(__CUDA_ARCH__)
  return static_cast<uint32_t>(__double2hiint(x));
#else
  uint64_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return static_cast<uint32_t>(bits >> 32);
#endif
}

GRADSTAT_DEVICE uint32_t low_word(double x) {
#if defined(__CUDA_ARCH__)
  return static_cast<uint32_t>(__double2loint(x));
#else
  uint64_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return static_cast<uint32_t>(bits);
#endif
}

GRADSTAT_DEVICE double words_to_double(uint32_t low, uint32_t high) {
#if defined(__CUDA_ARCH__)
  return __hiloint2double(static_cast<int>(high), static_cast<int>(low));
#else
  const uint64_t bits = (static_cast<uint64_t>(high) << 32) | low;
  double value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
#endif
}

// Narrowing, to nearest even ----------------------------------------------------------------------------

// Two floats as a pair of bfloat16, `low` in the low half.
GRADSTAT_DEVICE uint32_t to_bfloat16_pair(float low, float high) {
#if defined(__CUDA_ARCH__)
  uint32_t out;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
  return out;
#else
  const auto narrow = [](float x) {
    const uint32_t bits = float_to_bits(x);
    if (x != x) return 0x7fffu;
    return (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  };
  return narrow(low) | (narrow(high) << 16);
#endif
}

// Any binary format narrower than float32, without sign: the bits of the magnitude, which may have reached
// or passed the largest exponent. `bits` must not be NaN.
GRADSTAT_DEVICE uint32_t narrow_magnitude(uint32_t bits, int mantissa, int bias) {
  // Below the smallest normal number the spacing is fixed: adding a number whose last place is that spacing
  // rounds. Above, the bits themselves are rounded and the exponent is moved.
  const int drop = 23 - mantissa;
  const uint32_t smallest_normal = static_cast<uint32_t>(127 + 1 - bias) << 23;
  if (bits < smallest_normal) {
    const uint32_t magic = static_cast<uint32_t>(127 + 1 - bias + drop) << 23;
    return float_to_bits(bits_to_float(bits) + bits_to_float(magic)) - magic;
  }
  const uint32_t rounded = bits + ((1u << (drop - 1)) - 1) + ((bits >> drop) & 1u);
  return (rounded >> drop) - (static_cast<uint32_t>(127 - bias) << mantissa);
}

GRADSTAT_DEVICE uint32_t to_half_pair(float low, float high) {
#if defined(__CUDA_ARCH__)
  uint32_t out;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
  return out;
#else
  const auto narrow = [](float x) {
    const uint32_t sign = (float_to_bits(x) >> 16) & 0x8000u;
    const uint32_t bits = float_to_bits(x) & 0x7fffffffu;
    if (bits > 0x7f800000u) return 0x7fffu;
    const uint32_t magnitude = narrow_magnitude(bits, 10, 15);
    return sign | (magnitude > 0x7c00u ? 0x7c00u : magnitude);
  };
  return narrow(low) | (narrow(high) << 16);
#endif
}

// The 8-bit formats round like torch's (2.13): past the largest value to infinity where there is one, else to
// the largest (e4m3fn) or to NaN (the two without negative zero).
GRADSTAT_DEVICE uint8_t to_float8(float x, DType dtype) {
  const uint32_t sign = (float_to_bits(x) >> 24) & 0x80u;
  const uint32_t bits = float_to_bits(x) & 0x7fffffffu;
  const bool finite_only = dtype == DType::kFloat8E4M3FNUZ || dtype == DType::kFloat8E5M2FNUZ;
  const bool wide = dtype == DType::kFloat8E5M2 || dtype == DType::kFloat8E5M2FNUZ;
  const uint32_t nan = finite_only ? 0x80u : sign | 0x7fu;
  if (bits > 0x7f800000u) return static_cast<uint8_t>(nan);
  const uint32_t magnitude =
      narrow_magnitude(bits, wide ? 2 : 3, wide ? (finite_only ? 16 : 15) : (finite_only ? 8 : 7));
  if (dtype == DType::kFloat8E5M2) {
    return static_cast<uint8_t>(sign | (magnitude > 0x7cu ? 0x7cu : magnitude));
  }
  if (!finite_only) return static_cast<uint8_t>(sign | (magnitude > 0x7eu ? 0x7eu : magnitude));
  if (magnitude > 0x7fu) return static_cast<uint8_t>(nan);
  return static_cast<uint8_t>(magnitude == 0 ? 0 : sign | magnitude);
}

// One value of any type, read on its own -----------------------------------------------------------------

GRADSTAT_DEVICE double value_at(uint64_t address, DType dtype, int64_t index) {
  switch (dtype) {
    case DType::kFloat32:
      return reinterpret_cast<const float*>(address)[index];
    case DType::kBFloat16:
      return bfloat16_to_float(reinterpret_cast<const uint16_t*>(address)[index]);
    case DType::kFloat16:
      return half_to_float(reinterpret_cast<const uint16_t*>(address)[index]);
    case DType::kFloat64:
      return reinterpret_cast<const double*>(address)[index];
    default:
      return float8_to_float(reinterpret_cast<const uint8_t*>(address)[index], dtype);
  }
}

// Writes `value` as one element of a real type.
GRADSTAT_DEVICE void write_value(void* out, DType dtype, double value) {
  const auto narrow = static_cast<float>(value);
  switch (dtype) {
    case DType::kFloat64:
      *static_cast<double*>(out) = value;
      return;
    case DType::kFloat32:
      *static_cast<float*>(out) = narrow;
      return;
    case DType::kBFloat16:
      *static_cast<uint16_t*>(out) = static_cast<uint16_t>(to_bfloat16_pair(narrow, narrow));
      return;
    case DType::kFloat16:
      *static_cast<uint16_t*>(out) = static_cast<uint16_t>(to_half_pair(narrow, narrow));
      return;
    default:
      *static_cast<uint8_t*>(out) = to_float8(narrow, dtype);
      return;
  }
}

}  // namespace gradstat
