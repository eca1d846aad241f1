// Small device functions for the kernels: 16-byte loads and stores, packed 16-bit arithmetic, conversions.
// Hardware instructions are written in PTX, next to an equivalent in plain C++ that tests/cuda_on_cpu compiles
// for the CPU.
#pragma once

#include "tile_table.h"

#define GRADSTAT_DEVICE __device__ __forceinline__

namespace gradstat {

constexpr uint32_t kAllLanes = 0xffffffffu;

// Does not allocate in L1, where nothing is reused. L2 keeps its normal policy, so that the scale kernel finds
// what the statistics kernel read last.
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

GRADSTAT_DEVICE void store_vector(uint4* address, uint4 v) {
#if defined(__CUDA_ARCH__)
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
#else
  *address = v;
#endif
}

// Whether the caller is the last of `count` to arrive. If so, what other blocks wrote before the barrier ahead
// of their arrival is visible to this block after its next barrier. The last arrival sets the ticket to zero.
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

// Minimum and maximum of both halves. Of a number and a NaN they return the number, like fminf; the caller
// discards the results of a thread that has read NaN anyway.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
#define GRADSTAT_PACKED(name, instruction, choose)                \
  GRADSTAT_DEVICE static uint32_t name(uint32_t a, uint32_t b) {  \
    uint32_t out;                                                 \
    asm(instruction " %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b)); \
    return out;                                                   \
  }
#else
#define GRADSTAT_PACKED(name, instruction, choose)                       \
  GRADSTAT_DEVICE static uint32_t name(uint32_t a, uint32_t b) {         \
    return exact_pair(choose(low(a), low(b)), choose(high(a), high(b))); \
  }
#endif

// Two 16-bit floats packed into a 32-bit word.
struct PackedBFloat16 {
  static constexpr uint32_t kInfinities = 0x7f807f80u;
  GRADSTAT_DEVICE static float low(uint32_t pair) { return bits_to_float(pair << 16); }
  GRADSTAT_DEVICE static float high(uint32_t pair) { return bits_to_float(pair & 0xffff0000u); }
  GRADSTAT_DEVICE static uint32_t pair_of(float low, float high) { return to_bfloat16_pair(low, high); }
  GRADSTAT_DEVICE static uint32_t exact_pair(float low, float high) {
    return (float_to_bits(low) >> 16) | float_to_bits(high);
  }
  GRADSTAT_PACKED(min, "min.bf16x2", fminf)
  GRADSTAT_PACKED(max, "max.bf16x2", fmaxf)
};
struct PackedHalf {
  static constexpr uint32_t kInfinities = 0x7c007c00u;
  GRADSTAT_DEVICE static float low(uint32_t pair) { return low_half(pair); }
  GRADSTAT_DEVICE static float high(uint32_t pair) { return high_half(pair); }
  GRADSTAT_DEVICE static uint32_t pair_of(float low, float high) { return to_half_pair(low, high); }
  GRADSTAT_DEVICE static uint32_t exact_pair(float low, float high) { return pair_of(low, high); }
  GRADSTAT_PACKED(min, "min.f16x2", fminf)
  GRADSTAT_PACKED(max, "max.f16x2", fmaxf)
};
#undef GRADSTAT_PACKED

// Counts the halves of `pair` that are zero. Zero has the same bits in bfloat16 and float16, so one comparison
// serves both. It gives -1 in each half that is zero; subtracting that as one 32-bit number, which takes one
// instruction for two pairs, makes `count` low + 65536 * (high - low) modulo 2^32.
GRADSTAT_DEVICE uint32_t count_zero_halves(uint32_t count, uint32_t pair) {
#if defined(__CUDA_ARCH__)
  uint32_t zeros;
  asm("set.eq.u32.f16x2 %0, %1, %2;" : "=r"(zeros) : "r"(pair), "r"(0u));
#else
  const uint32_t zeros =
      ((pair & 0x7fffu) == 0 ? 0xffffu : 0u) | ((pair & 0x7fff0000u) == 0 ? 0xffff0000u : 0u);
#endif
  return count - zeros;
}

// The number of zeros in both halves, if below 65536.
GRADSTAT_DEVICE uint32_t total_of_halves(uint32_t count) { return (2 * count + (count >> 16)) & 0xffffu; }

// Multiplies both halves by those of `factor`; exact for the factors in use.
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

// Bytes 0 and 2, each moved up by one byte, with zeros below.
GRADSTAT_DEVICE uint32_t even_bytes_moved_up(uint32_t bytes) {
#if defined(__CUDA_ARCH__)
  return __byte_perm(bytes, 0, 0x2404);
#else
  return (bytes << 8) & 0xff00ff00u;
#endif
}

// Converts four bytes, as e4m3, to two pairs of float16; NaN stays NaN. Requires kHasFloat8Conversion.
GRADSTAT_DEVICE void e4m3_to_half_pairs([[maybe_unused]] uint32_t bytes, [[maybe_unused]] uint32_t* pairs) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  asm("{.reg .b16 low, high; mov.b32 {low, high}, %2; cvt.rn.f16x2.e4m3x2 %0, low; cvt.rn.f16x2.e4m3x2 %1, "
      "high;}"
      : "=r"(pairs[0]), "=r"(pairs[1])
      : "r"(bytes));
#endif
}

GRADSTAT_DEVICE uint32_t low_word(double x) { return static_cast<uint32_t>(bitcast<uint64_t>(x)); }
GRADSTAT_DEVICE uint32_t high_word(double x) { return static_cast<uint32_t>(bitcast<uint64_t>(x) >> 32); }
GRADSTAT_DEVICE double words_to_double(uint32_t low, uint32_t high) {
  return bitcast<double>(static_cast<uint64_t>(high) << 32 | low);
}

// The multiplier as float64 and float32; for 8-bit types a table of the products of all 256 codes.
struct Multiplier {
  double wide;
  float narrow;
  const uint8_t* products;
};

struct ScaleFloat32 {
  GRADSTAT_DEVICE static uint32_t word(uint32_t w, const Multiplier& by) {
    return float_to_bits(bits_to_float(w) * by.narrow);
  }
};
template <class Packed>
struct ScalePacked {
  GRADSTAT_DEVICE static uint32_t word(uint32_t w, const Multiplier& by) {
    return Packed::pair_of(Packed::low(w) * by.narrow, Packed::high(w) * by.narrow);
  }
};
struct ScaleFloat8 {
  GRADSTAT_DEVICE static uint32_t word(uint32_t w, const Multiplier& by) {
    const auto byte = [&](int shift) { return uint32_t{by.products[w >> shift & 0xffu]} << shift; };
    return byte(0) | byte(8) | byte(16) | byte(24);
  }
};

template <class Type>
GRADSTAT_DEVICE uint4 scaled(const uint4& v, const Multiplier& by) {
  return {Type::word(v.x, by), Type::word(v.y, by), Type::word(v.z, by), Type::word(v.w, by)};
}

struct ScaleFloat64 {};
template <>
GRADSTAT_DEVICE uint4 scaled<ScaleFloat64>(const uint4& v, const Multiplier& by) {
  const double a = words_to_double(v.x, v.y) * by.wide, b = words_to_double(v.z, v.w) * by.wide;
  return {low_word(a), high_word(a), low_word(b), high_word(b)};
}

// Fills the table of products for an 8-bit type, in shared memory. Needs a barrier before and after.
GRADSTAT_DEVICE void fill_products(uint8_t* products, DType dtype, float factor) {
  static_assert(kThreads == 256, "one product for each thread");
  const auto code = static_cast<uint8_t>(threadIdx.x);
  products[code] = to_float8(float8_to_float(code, dtype) * factor, dtype);
}

GRADSTAT_DEVICE void scale_value(const Place& place, int64_t index, const Multiplier& by) {
  const double value = value_at(place.address, place.dtype, index);
  const bool is_wide = place.dtype == DType::kFloat64;
  const double product = is_wide ? value * by.wide : static_cast<float>(value) * by.narrow;
  const int32_t bytes_shift = element_shift(place.dtype, false);
  write_value(reinterpret_cast<void*>(place.address + (static_cast<uint64_t>(index) << bytes_shift)),
              place.dtype, product);
}

}  // namespace gradstat
