// In-place multiplication of vectors of any element type, and of single values.
#pragma once

#include "device.cuh"

namespace gradstat {

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
