// The definition of the statistics: what a row means, how rows merge, how one element is lifted into a row
// (lift.h), and which values are derived from a row. Plain C++ without tensors or loops over memory, shared by
// host and device, so that the CPU and CUDA code agree. The columns come from gradstat/_fields.py.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "stat_fields.def"

#if defined(__CUDACC__)
#define GRADSTAT_HD __host__ __device__ __forceinline__
#else
#define GRADSTAT_HD inline
#endif

namespace gradstat {

// The element types a kernel reads. A complex tensor is read as pairs of its real type.
enum class DType : int32_t {
  kFloat32 = 0,
  kBFloat16 = 1,
  kFloat16 = 2,
  kFloat64 = 3,
  kFloat8E4M3FN = 4,
  kFloat8E5M2 = 5,
  kFloat8E4M3FNUZ = 6,
  kFloat8E5M2FNUZ = 7,
};

GRADSTAT_HD int32_t size_of(DType dtype) {
  if (dtype == DType::kFloat64) return 8;
  if (dtype == DType::kFloat32) return 4;
  return dtype == DType::kBFloat16 || dtype == DType::kFloat16 ? 2 : 1;
}

constexpr double kInf = HUGE_VAL;

// All fields are doubles in the order of the table's columns, so a Row has the memory layout of a table row.
struct Row {
#define GRADSTAT_FIELD(name, merge) double name;
#include "stat_fields.def"
};
constexpr int kFields = GRADSTAT_FIELD_COUNT;
static_assert(sizeof(Row) == kFields * sizeof(double), "a row is exactly its columns");

namespace merge {
constexpr double identity_of_sum = 0.0;
constexpr double identity_of_min = kInf;
constexpr double identity_of_max = -kInf;
GRADSTAT_HD double sum(double a, double b) { return a + b; }
// Not fmin/fmax: rows hold no NaN in these columns, and a plain comparison is the same on every compiler.
GRADSTAT_HD double min(double a, double b) { return b < a ? b : a; }
GRADSTAT_HD double max(double a, double b) { return b > a ? b : a; }
}  // namespace merge

GRADSTAT_HD Row identity_row() {
  Row row;
#define GRADSTAT_FIELD(name, how) row.name = merge::identity_of_##how;
#include "stat_fields.def"
  return row;
}

GRADSTAT_HD void merge_into(Row& into, const Row& other) {
#define GRADSTAT_FIELD(name, how) into.name = merge::how(into.name, other.name);
#include "stat_fields.def"
}

GRADSTAT_HD double absolute(double x) { return fabs(x); }

#include "lift.h"

// L2 norm of the finite elements, combined as by l2_norm in gradstat/_fields.py.
GRADSTAT_HD double l2_norm(const Row& row) {
  double squares = row.sq_sum_small, scale = GRADSTAT_SMALL_SCALE;
  if (row.sq_sum_large > 0) {
    squares = row.sq_sum_large + row.sq_sum * GRADSTAT_LARGE_SCALE * GRADSTAT_LARGE_SCALE;
    scale = GRADSTAT_LARGE_SCALE;
  } else if (row.sq_sum > 0) {
    squares = row.sq_sum + row.sq_sum_small / GRADSTAT_SMALL_SCALE / GRADSTAT_SMALL_SCALE;
    scale = 1;
  }
  return sqrt(squares) / scale;
}

// The L2 or infinity norm as torch reports it: NaN if any element is NaN, else Inf if any is infinite.
GRADSTAT_HD double reported_norm(const Row& row, bool infinity_norm) {
  if (row.nan_count > 0) return NAN;
  if (row.inf_count > 0) return kInf;
  return infinity_norm ? merge::max(0.0, merge::max(row.max, -row.min)) : l2_norm(row);
}

// The factor that clips gradients: min(1, max_norm / (norm + 1e-6)), torch's formula and constant
// (torch/nn/utils/clip_grad.py). NaN propagates. An infinite max_norm means: measure, do not clip.
GRADSTAT_HD double clip_multiplier(double norm, double max_norm) {
  if (max_norm == kInf) return 1.0;
  const double multiplier = max_norm / (norm + 1e-6);
  return multiplier > 1.0 ? 1.0 : multiplier;
}

template <class To, class From>
GRADSTAT_HD To bitcast(From from) {
  static_assert(sizeof(To) == sizeof(From), "same size");
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

GRADSTAT_HD float bits_to_float(uint32_t bits) { return bitcast<float>(bits); }
GRADSTAT_HD uint32_t float_to_bits(float value) { return bitcast<uint32_t>(value); }

GRADSTAT_HD float bfloat16_to_float(uint16_t bits) { return bits_to_float(static_cast<uint32_t>(bits) << 16); }

// Places exponent and mantissa in a float32 and rescales, which normalizes subnormals. Inf and NaN, which have
// the largest exponent, are handled first.
GRADSTAT_HD float half_to_float(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16;
  const uint32_t magnitude = static_cast<uint32_t>(bits & 0x7fffu) << 13;
  if (magnitude >= 0x0f800000u) return bits_to_float(sign | 0x7f800000u | magnitude);
  return bits_to_float(sign | float_to_bits(bits_to_float(magnitude) * 0x1p+112f));
}

// The 8-bit formats have the mantissa and exponent of e4m3 or e5m2, and are of the OCP or the "fnuz" (finite,
// no negative zero) family.
GRADSTAT_HD constexpr bool is_e5m2(DType dtype) {
  return dtype == DType::kFloat8E5M2 || dtype == DType::kFloat8E5M2FNUZ;
}
GRADSTAT_HD constexpr bool is_fnuz(DType dtype) {
  return dtype == DType::kFloat8E4M3FNUZ || dtype == DType::kFloat8E5M2FNUZ;
}
GRADSTAT_HD constexpr int float8_mantissa(DType dtype) { return is_e5m2(dtype) ? 2 : 3; }
GRADSTAT_HD constexpr int float8_bias(DType dtype) {
  return (is_e5m2(dtype) ? 15 : 7) + (is_fnuz(dtype) ? 1 : 0);
}

GRADSTAT_HD float float8_to_float(uint8_t bits, DType dtype) {
  const uint32_t magnitude = bits & 0x7fu, largest = is_e5m2(dtype) ? 0x7bu : 0x7eu;
  const float scale = bits_to_float(static_cast<uint32_t>(254 - float8_bias(dtype)) << 23);  // 2^(127 - bias)
  float value = bits_to_float(magnitude << (23 - float8_mantissa(dtype))) * scale;
  if (is_fnuz(dtype) ? bits == 0x80u : magnitude > largest) value = NAN;
  if (dtype == DType::kFloat8E5M2 && magnitude == 0x7cu) value = static_cast<float>(kInf);
  return (bits & 0x80u) != 0 ? -value : value;
}

// Two floats as a pair of bfloat16, `low` in the low half.
GRADSTAT_HD uint32_t to_bfloat16_pair(float low, float high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
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

// The magnitude bits of a finite or infinite float32, without sign, in any narrower binary format. The result
// may reach or exceed the largest exponent of that format. `bits` must not be NaN.
GRADSTAT_HD uint32_t narrow_magnitude(uint32_t bits, int mantissa, int bias) {
  // Below the smallest normal number the spacing is constant: adding a number whose last bit has that spacing
  // rounds to it. Above, the bits are rounded as an integer and the exponent is rebiased.
  const int drop = 23 - mantissa;
  const uint32_t smallest_normal = static_cast<uint32_t>(127 + 1 - bias) << 23;
  if (bits < smallest_normal) {
    const uint32_t magic = static_cast<uint32_t>(127 + 1 - bias + drop) << 23;
    return float_to_bits(bits_to_float(bits) + bits_to_float(magic)) - magic;
  }
  const uint32_t rounded = bits + ((1u << (drop - 1)) - 1) + ((bits >> drop) & 1u);
  return (rounded >> drop) - (static_cast<uint32_t>(127 - bias) << mantissa);
}

GRADSTAT_HD uint32_t to_half_pair(float low, float high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  uint32_t out;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
  return out;
#elif defined(__CUDA_ARCH__)
  uint32_t out;
  asm("{.reg .b16 l, h; cvt.rn.f16.f32 l, %1; cvt.rn.f16.f32 h, %2; mov.b32 %0, {l, h};}"
      : "=r"(out)
      : "f"(low), "f"(high));
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

// Rounds to 8 bits as torch 2.13 does. Values beyond the largest become infinity where the format has one,
// otherwise the largest value (e4m3fn) or NaN (the fnuz formats).
GRADSTAT_HD uint8_t to_float8(float x, DType dtype) {
  const uint32_t sign = (float_to_bits(x) >> 24) & 0x80u;
  const uint32_t bits = float_to_bits(x) & 0x7fffffffu;
  const uint32_t nan = is_fnuz(dtype) ? 0x80u : sign | 0x7fu;
  if (bits > 0x7f800000u) return static_cast<uint8_t>(nan);
  const uint32_t magnitude = narrow_magnitude(bits, float8_mantissa(dtype), float8_bias(dtype));
  if (!is_fnuz(dtype)) {
    const uint32_t most = is_e5m2(dtype) ? 0x7cu : 0x7eu;
    return static_cast<uint8_t>(sign | (magnitude > most ? most : magnitude));
  }
  if (magnitude > 0x7fu) return static_cast<uint8_t>(nan);
  return static_cast<uint8_t>(magnitude == 0 ? 0 : sign | magnitude);
}

// Reads one value of any real type.
GRADSTAT_HD double value_at(uint64_t address, DType dtype, int64_t index) {
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

// Writes `value` as one element of any real type.
GRADSTAT_HD void write_value(void* out, DType dtype, double value) {
  const auto narrow = static_cast<float>(value);
  if (dtype == DType::kFloat64) {
    *static_cast<double*>(out) = value;
  } else if (dtype == DType::kFloat32) {
    *static_cast<float*>(out) = narrow;
  } else if (dtype == DType::kBFloat16) {
    *static_cast<uint16_t*>(out) = static_cast<uint16_t>(to_bfloat16_pair(narrow, narrow));
  } else if (dtype == DType::kFloat16) {
    *static_cast<uint16_t*>(out) = static_cast<uint16_t>(to_half_pair(narrow, narrow));
  } else {
    *static_cast<uint8_t*>(out) = to_float8(narrow, dtype);
  }
}

}  // namespace gradstat
