// What the fast loop of the statistics kernel does with one thread's share of a tile, for each element type.
//
// Method, as in stats_cpu_kernel.h. Squares and values are added in float32 over small groups, as a balanced
// tree in which at most three roundings reach any term (norm error at most 9e-8 for any input), and each
// group is promoted to float64. Squares of 16-bit and 8-bit numbers are exact in float32, so their groups
// have eight members; those of float32 have four. Nothing here looks for NaN, Inf, overflow or underflow:
// each shows in the share's sum of squares, which then is not `safe`, and the share is read again exactly.
//
// Cost in sm_90 code, all instructions of the hot loop divided by its elements: bfloat16 and float16 6.9,
// float32 9.5, float8 10.3, float64 17. At 4.8 TB/s an H200 has time for 14, 28, 7 and 55: all but float8 are
// bound by memory. The gate tests/gpu_gates/check_cuda.py prints these loops' lengths.
#pragma once

#include "device.cuh"

namespace gradstat {

// A sum of squares is trusted in [2^kSafeLow, 2^kSafeHigh). Below, squares that vanished could matter: at most
// 64 of them, each off by at most 2^-150 in float32 (2^-34 of the smallest sum allowed); for float64, elements
// under GRADSTAT_SMALL. Above, one may have overflowed, or exceeded GRADSTAT_LARGE.
struct SafeFloat32 {
  static constexpr int kSafeLow = -110, kSafeHigh = 120;
};
struct SafeFloat64 {
  static constexpr int kSafeLow = -900, kSafeHigh = 970;
};

// What a thread knows of the values it has read fast. In a Share `zeros` is in the format's own notation.
template <class Extreme>
struct Share {
  double squares, sum;
  Extreme low, high;
  uint32_t zeros;
};

struct Group {
  float squares, sum;
};

GRADSTAT_DEVICE Group group_of(const float (&x)[8]) {
  const float a = fmaf(x[1], x[1], x[0] * x[0]) + fmaf(x[3], x[3], x[2] * x[2]);
  const float b = fmaf(x[5], x[5], x[4] * x[4]) + fmaf(x[7], x[7], x[6] * x[6]);
  return {a + b, ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7]))};
}

// Each format has
//   Extreme           what its minima and maxima are kept in, with lowest(), highest(), min, max, widened
//   kElements         per vector of 16 bytes
//   add(vector, share, first)   adds a vector to a share, or begins the share with it
//   zeros(share)      the number of zero elements
template <bool kPair>
struct Float32Format : SafeFloat32 {
  using Extreme = float;
  static constexpr int kElements = kPair ? 2 : 4;
  GRADSTAT_DEVICE static float positive_infinity() { return static_cast<float>(kInf); }
  GRADSTAT_DEVICE static float negative_infinity() { return -static_cast<float>(kInf); }
  GRADSTAT_DEVICE static float min(float a, float b) { return fminf(a, b); }
  GRADSTAT_DEVICE static float max(float a, float b) { return fmaxf(a, b); }
  GRADSTAT_DEVICE double widened_min(float x) const { return x; }
  GRADSTAT_DEVICE double widened_max(float x) const { return x; }

  GRADSTAT_DEVICE void add(const uint4& v, Share<float>& share, bool first) const {
    const float a = bits_to_float(v.x), b = bits_to_float(v.y);
    const float c = bits_to_float(v.z), d = bits_to_float(v.w);
    const double squares = fmaf(b, b, a * a) + fmaf(d, d, c * c);
    const double sum = (a + b) + (c + d);
    const float low = fminf(fminf(a, b), fminf(c, d)), high = fmaxf(fmaxf(a, b), fmaxf(c, d));
    uint32_t zeros = first ? 0 : share.zeros;
    if constexpr (kPair) {
      zeros += a == 0 && b == 0;
      zeros += c == 0 && d == 0;
    } else {
      zeros += a == 0;
      zeros += b == 0;
      zeros += c == 0;
      zeros += d == 0;
    }
    share = first ? Share<float>{squares, sum, low, high, zeros}
                  : Share<float>{share.squares + squares, share.sum + sum, fminf(share.low, low),
                                 fmaxf(share.high, high), zeros};
  }
  GRADSTAT_DEVICE static uint32_t zeros(const Share<float>& share) { return share.zeros; }
};

// Two 16-bit numbers to a word. `Packed` says how they are taken apart and compared.
struct PackedBFloat16 {
  static constexpr uint32_t kInfinities = 0x7f807f80u;
  GRADSTAT_DEVICE static float low(uint32_t pair) { return low_bfloat16(pair); }
  GRADSTAT_DEVICE static float high(uint32_t pair) { return high_bfloat16(pair); }
  GRADSTAT_DEVICE static uint32_t min(uint32_t a, uint32_t b) { return min_bfloat16(a, b); }
  GRADSTAT_DEVICE static uint32_t max(uint32_t a, uint32_t b) { return max_bfloat16(a, b); }
};

struct PackedHalf {
  static constexpr uint32_t kInfinities = 0x7c007c00u;
  GRADSTAT_DEVICE static float low(uint32_t pair) { return low_half(pair); }
  GRADSTAT_DEVICE static float high(uint32_t pair) { return high_half(pair); }
  GRADSTAT_DEVICE static uint32_t min(uint32_t a, uint32_t b) { return min_half(a, b); }
  GRADSTAT_DEVICE static uint32_t max(uint32_t a, uint32_t b) { return max_half(a, b); }
};

template <class Packed>
struct PackedExtremes : SafeFloat32 {
  using Extreme = uint32_t;
  GRADSTAT_DEVICE static uint32_t positive_infinity() { return Packed::kInfinities; }
  GRADSTAT_DEVICE static uint32_t negative_infinity() { return Packed::kInfinities | 0x80008000u; }
  GRADSTAT_DEVICE static uint32_t min(uint32_t a, uint32_t b) { return Packed::min(a, b); }
  GRADSTAT_DEVICE static uint32_t max(uint32_t a, uint32_t b) { return Packed::max(a, b); }
  GRADSTAT_DEVICE static double widened_min(uint32_t x) { return fminf(Packed::low(x), Packed::high(x)); }
  GRADSTAT_DEVICE static double widened_max(uint32_t x) { return fmaxf(Packed::low(x), Packed::high(x)); }
};

template <class Packed, bool kPair>
struct PackedFormat : PackedExtremes<Packed> {
  static constexpr int kElements = kPair ? 4 : 8;

  GRADSTAT_DEVICE void add(const uint4& v, Share<uint32_t>& share, bool first) const {
    const float x[8] = {Packed::low(v.x), Packed::high(v.x), Packed::low(v.y), Packed::high(v.y),
                        Packed::low(v.z), Packed::high(v.z), Packed::low(v.w), Packed::high(v.w)};
    const Group group = group_of(x);
    const uint32_t low = Packed::min(Packed::min(v.x, v.y), Packed::min(v.z, v.w));
    const uint32_t high = Packed::max(Packed::max(v.x, v.y), Packed::max(v.z, v.w));
    uint32_t zeros = first ? 0 : share.zeros;
    if constexpr (kPair) {
      zeros += (v.x & 0x7fff7fffu) == 0;
      zeros += (v.y & 0x7fff7fffu) == 0;
      zeros += (v.z & 0x7fff7fffu) == 0;
      zeros += (v.w & 0x7fff7fffu) == 0;
    } else {
      zeros = count_zero_halves(count_zero_halves(zeros, v.x), v.y);
      zeros = count_zero_halves(count_zero_halves(zeros, v.z), v.w);
    }
    const double squares = group.squares, sum = group.sum;
    share = first ? Share<uint32_t>{squares, sum, low, high, zeros}
                  : Share<uint32_t>{share.squares + squares, share.sum + sum, Packed::min(share.low, low),
                                    Packed::max(share.high, high), zeros};
  }
  GRADSTAT_DEVICE static uint32_t zeros(const Share<uint32_t>& share) {
    return kPair ? share.zeros : total_of_halves(share.zeros);
  }
};

// All four 8-bit types: a byte's magnitude moved to where bfloat16 has its exponent is the value times a
// fixed power of two. Which codes are NaN or Inf differs; they are found in the bytes, and make the sum of
// squares NaN.
struct Float8Format : PackedExtremes<PackedBFloat16> {
  static constexpr int kElements = 16;
  int shift;           // from the byte in the upper half of 16 bits to bfloat16
  uint32_t magnitude;  // mask of the moved magnitudes
  float scale;         // from the moved number to the value
  uint32_t addend;     // sets a byte's top bit for special magnitudes, or for all but zero
  bool negative_zero_is_nan;

  GRADSTAT_DEVICE explicit Float8Format(DType dtype) {
    const bool wide = dtype == DType::kFloat8E5M2 || dtype == DType::kFloat8E5M2FNUZ;
    negative_zero_is_nan = dtype == DType::kFloat8E4M3FNUZ || dtype == DType::kFloat8E5M2FNUZ;
    shift = wide ? 3 : 4;
    magnitude = wide ? 0x0fe00fe0u : 0x07f007f0u;
    const int bias = wide ? (negative_zero_is_nan ? 16 : 15) : (negative_zero_is_nan ? 8 : 7);
    scale = bits_to_float(static_cast<uint32_t>(127 + 127 - bias) << 23);
    addend = negative_zero_is_nan ? 0x7f7f7f7fu : (wide ? 0x04040404u : 0x01010101u);
  }

  GRADSTAT_DEVICE double widened_min(uint32_t x) const { return PackedExtremes::widened_min(x) * scale; }
  GRADSTAT_DEVICE double widened_max(uint32_t x) const { return PackedExtremes::widened_max(x) * scale; }

  GRADSTAT_DEVICE uint32_t special(uint32_t bytes) const {
    const uint32_t marks = (bytes & 0x7f7f7f7fu) + addend;
    return (negative_zero_is_nan ? ~marks & bytes : marks) & 0x80808080u;
  }

  // Every other byte, moved into two bfloat16.
  GRADSTAT_DEVICE uint32_t moved(uint32_t bytes_in_upper_halves) const {
    return ((bytes_in_upper_halves >> shift) & magnitude) | (bytes_in_upper_halves & 0x80008000u);
  }

  GRADSTAT_DEVICE void add_words(uint32_t a, uint32_t b, Share<uint32_t>& share, bool first) const {
    const uint32_t w[4] = {moved(a << 8), moved(a & 0xff00ff00u), moved(b << 8), moved(b & 0xff00ff00u)};
    float x[8];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[2 * i] = low_bfloat16(w[i]) * scale;
      x[2 * i + 1] = high_bfloat16(w[i]) * scale;
    }
    const Group group = group_of(x);
    const double squares = (special(a) | special(b)) != 0 ? NAN : group.squares;
    const uint32_t low = min(min(w[0], w[1]), min(w[2], w[3]));
    const uint32_t high = max(max(w[0], w[1]), max(w[2], w[3]));
    uint32_t zeros = first ? 0 : share.zeros;
#pragma unroll
    for (int i = 0; i < 4; ++i) zeros = count_zero_halves(zeros, w[i]);
    share = first ? Share<uint32_t>{squares, group.sum, low, high, zeros}
                  : Share<uint32_t>{share.squares + squares, share.sum + group.sum, min(share.low, low),
                                    max(share.high, high), zeros};
  }

  GRADSTAT_DEVICE void add(const uint4& v, Share<uint32_t>& share, bool first) const {
    add_words(v.x, v.y, share, first);
    add_words(v.z, v.w, share, false);
  }
  GRADSTAT_DEVICE static uint32_t zeros(const Share<uint32_t>& share) { return total_of_halves(share.zeros); }
};

// Float64 in float64; only the exact path scales.
template <bool kPair>
struct Float64Format : SafeFloat64 {
  using Extreme = double;
  static constexpr int kElements = kPair ? 1 : 2;
  GRADSTAT_DEVICE static double positive_infinity() { return kInf; }
  GRADSTAT_DEVICE static double negative_infinity() { return -kInf; }
  GRADSTAT_DEVICE static double min(double a, double b) { return merge::min(a, b); }
  GRADSTAT_DEVICE static double max(double a, double b) { return merge::max(a, b); }
  GRADSTAT_DEVICE static double widened_min(double x) { return x; }
  GRADSTAT_DEVICE static double widened_max(double x) { return x; }

  GRADSTAT_DEVICE void add(const uint4& v, Share<double>& share, bool first) const {
    const double a = words_to_double(v.x, v.y), b = words_to_double(v.z, v.w);
    const double squares = fma(b, b, a * a), sum = a + b;
    uint32_t zeros = first ? 0 : share.zeros;
    if constexpr (kPair) {
      zeros += a == 0 && b == 0;
    } else {
      zeros += a == 0;
      zeros += b == 0;
    }
    share = first ? Share<double>{squares, sum, min(a, b), max(a, b), zeros}
                  : Share<double>{share.squares + squares, share.sum + sum, min(share.low, min(a, b)),
                                  max(share.high, max(a, b)), zeros};
  }
  GRADSTAT_DEVICE static uint32_t zeros(const Share<double>& share) { return share.zeros; }
};

}  // namespace gradstat
