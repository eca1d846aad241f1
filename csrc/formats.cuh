// How the fast loop of the statistics kernel processes one thread's share of a tile, for each element type.
//
// The method, and the reason for groups of four or eight, are those of stats_cpu_kernel.h: shares that are not
// safe are read again exactly.
#pragma once

#include "device.cuh"

namespace gradstat {

// A sum of squares is trusted in [2^kSafeLow, 2^kSafeHigh). Below, underflowed squares could matter: at most 64
// of them, each off by at most 2^-150 in float32 (2^-34 of the smallest sum allowed); in float64, elements
// under GRADSTAT_SMALL. Above, a square may have overflowed, or an element exceeded GRADSTAT_LARGE.
template <int kLow, int kHigh>
struct Format {
  static constexpr int kSafeLow = kLow, kSafeHigh = kHigh;
  // Whether a share must be distrusted although its sum of squares is safe.
  template <class Share>
  GRADSTAT_DEVICE static bool is_suspect(const Share&) {
    return false;
  }
  template <class Share>
  GRADSTAT_DEVICE static uint32_t zeros(const Share& share) {
    return share.zeros;
  }
};
using FormatOfFloat32 = Format<-110, 120>;
using FormatOfFloat64 = Format<-900, 970>;

// The lift in registers, and sums over groups.
namespace lanes {
GRADSTAT_DEVICE float absolute(float x) { return fabsf(x); }
GRADSTAT_DEVICE double absolute(double x) { return fabs(x); }
#define GRADSTAT_INLINE GRADSTAT_DEVICE
#include "lift.h"
#undef GRADSTAT_INLINE
}  // namespace lanes
using lanes::Sums, lanes::sums_of;

template <int kCount>
GRADSTAT_DEVICE Sums<double> lifted(const float* x) {
  return Sums<float>::promoted<double, true>(sums_of<kCount / 2>(x), sums_of<kCount / 2>(x + kCount / 2),
                                             [](float sum) { return static_cast<double>(sum); });
}

// What a thread has accumulated on the fast path. The representation of `zeros` depends on the format.
template <class Format>
struct Share {
  using Extreme = typename Format::Extreme;
  Sums<double> sums;
  Extreme low, high;
  uint32_t zeros;

  // Adds sums and extremes, or with `first` starts from them.
  GRADSTAT_DEVICE void add(const Sums<double>& further, Extreme lowest, Extreme highest, bool first) {
    sums = first ? further : sums + further;
    add(lowest, highest, first);
  }
  GRADSTAT_DEVICE void add(Extreme lowest, Extreme highest, bool first) {
    low = first ? lowest : Format::min(low, lowest);
    high = first ? highest : Format::max(high, highest);
  }
};

// Each format has
//   Scale             how its vectors are multiplied (device.cuh)
//   Extreme           the type of minima and maxima, with their identities, min, max, widened_min, widened_max
//   kElements         elements per 16-byte vector
//   add(vector, share, first)   adds a vector to a share, or starts the share with it
//   zeros(share)      the number of zero elements
template <bool kPair>
struct Float32Format : FormatOfFloat32 {
  using Scale = ScaleFloat32;
  using Extreme = float;
  static constexpr int kElements = kPair ? 2 : 4;
  GRADSTAT_DEVICE static float positive_infinity() { return static_cast<float>(kInf); }
  GRADSTAT_DEVICE static float negative_infinity() { return -static_cast<float>(kInf); }
  GRADSTAT_DEVICE static float min(float a, float b) { return fminf(a, b); }
  GRADSTAT_DEVICE static float max(float a, float b) { return fmaxf(a, b); }
  GRADSTAT_DEVICE double widened_min(float x) const { return x; }
  GRADSTAT_DEVICE double widened_max(float x) const { return x; }

  GRADSTAT_DEVICE void add(const uint4& v, Share<Float32Format>& share, bool first) const {
    const float x[4] = {bits_to_float(v.x), bits_to_float(v.y), bits_to_float(v.z), bits_to_float(v.w)};
    if (first) share.zeros = 0;
    if constexpr (kPair) {
      share.zeros += x[0] == 0 && x[1] == 0;
      share.zeros += x[2] == 0 && x[3] == 0;
    } else {
#pragma unroll
      for (const float each : x) share.zeros += each == 0;
    }
    share.add(lifted<4>(x), min(min(x[0], x[1]), min(x[2], x[3])), max(max(x[0], x[1]), max(x[2], x[3])),
              first);
  }
};

template <class Packed>
struct PackedExtremes : Packed, FormatOfFloat32 {
  using Extreme = uint32_t;
  using Packed::high;
  using Packed::low;
  GRADSTAT_DEVICE static uint32_t positive_infinity() { return Packed::kInfinities; }
  GRADSTAT_DEVICE static uint32_t negative_infinity() { return Packed::kInfinities | 0x80008000u; }
  GRADSTAT_DEVICE static double widened_min(uint32_t x) { return fminf(low(x), high(x)); }
  GRADSTAT_DEVICE static double widened_max(uint32_t x) { return fmaxf(low(x), high(x)); }
};

template <class Packed, bool kPair>
struct PackedFormat : PackedExtremes<Packed> {
  using Scale = ScalePacked<Packed>;
  static constexpr int kElements = kPair ? 4 : 8;

  GRADSTAT_DEVICE void add(const uint4& v, Share<PackedFormat>& share, bool first) const {
    const float x[8] = {Packed::low(v.x), Packed::high(v.x), Packed::low(v.y), Packed::high(v.y),
                        Packed::low(v.z), Packed::high(v.z), Packed::low(v.w), Packed::high(v.w)};
    if (first) share.zeros = 0;
    const uint32_t pairs[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (const uint32_t pair : pairs) {
      share.zeros = kPair ? share.zeros + ((pair & 0x7fff7fffu) == 0) : count_zero_halves(share.zeros, pair);
    }
    share.add(lifted<8>(x), Packed::min(Packed::min(v.x, v.y), Packed::min(v.z, v.w)),
              Packed::max(Packed::max(v.x, v.y), Packed::max(v.z, v.w)), first);
  }
  GRADSTAT_DEVICE static uint32_t zeros(const Share<PackedFormat>& share) {
    return kPair ? share.zeros : total_of_halves(share.zeros);
  }
};

// 8-bit types are converted to float16, which holds their values exactly. An e5m2 code is the upper byte of
// one; e4m3 has an instruction from sm_89 on. Otherwise the magnitude is shifted to the position of float16's
// exponent, and the number is multiplied by a power of two. Infinity and NaN in float16 make the share unsafe.
// Codes whose meaning differs from that of their bits in float16 are detected separately.
template <DType kType>
struct Float8Format : PackedExtremes<PackedHalf> {
  using Scale = ScaleFloat8;
  static constexpr int kElements = 16;
  static constexpr bool kIsWide = is_e5m2(kType), kHasNegativeZero = !is_fnuz(kType);
  static constexpr bool kIsConverted = kType == DType::kFloat8E4M3FN && kHasFloat8Conversion;

  // Converts the bytes in the upper halves to two float16 numbers.
  GRADSTAT_DEVICE static uint32_t upper_bytes_to_half_pair(uint32_t bytes) {
    if (kType == DType::kFloat8E5M2) return bytes;
    if (kIsWide) return times_half(bytes, 0x38003800u);  // 0.5
    const uint32_t bits = ((bytes >> 1) & 0x3f803f80u) | (bytes & 0x80008000u);
    return times_half(bits, kHasNegativeZero ? 0x5c005c00u : 0x58005800u);  // 256, 128
  }

  // Converts four bytes to two pairs of float16, in unspecified order.
  GRADSTAT_DEVICE static void widen(uint32_t bytes, uint32_t* pairs) {
    if constexpr (kIsConverted) {
      e4m3_to_half_pairs(bytes, pairs);
    } else {
      pairs[0] = upper_bytes_to_half_pair(even_bytes_moved_up(bytes));
      pairs[1] = upper_bytes_to_half_pair(bytes & 0xff00ff00u);
    }
  }

  // Sets the high bit of bytes that are 0x80, and possibly of bytes above such a byte.
  GRADSTAT_DEVICE static uint32_t negative_zeros(uint32_t bytes) {
    const uint32_t others = bytes ^ 0x80808080u;
    return (others - 0x01010101u) & ~others;
  }

  GRADSTAT_DEVICE static void add_words(uint32_t a, uint32_t b, Share<Float8Format>& share, bool first) {
    uint32_t w[4];
    widen(a, w);
    widen(b, w + 2);
    const float x[8] = {low(w[0]), high(w[0]), low(w[1]), high(w[1]),
                        low(w[2]), high(w[2]), low(w[3]), high(w[3])};
    if (first) share.zeros = 0;
#pragma unroll
    for (const uint32_t pair : w) share.zeros = count_zero_halves(share.zeros, pair);
    share.add(lifted<8>(x), min(min(w[0], w[1]), min(w[2], w[3])), max(max(w[0], w[1]), max(w[2], w[3])),
              first);
  }

  GRADSTAT_DEVICE void add(const uint4& v, Share<Float8Format>& share, bool first) const {
    add_words(v.x, v.y, share, first);
    add_words(v.z, v.w, share, false);
    if constexpr (!kHasNegativeZero) {
      const uint32_t marks =
          negative_zeros(v.x) | negative_zeros(v.y) | negative_zeros(v.z) | negative_zeros(v.w);
      if ((marks & 0x80808080u) != 0) share.sums.sq_sum = NAN;
    }
  }
  GRADSTAT_DEVICE static uint32_t zeros(const Share<Float8Format>& share) {
    return total_of_halves(share.zeros);
  }

  // After the shift, NaN in e4m3 becomes 480, which is above all finite values.
  GRADSTAT_DEVICE static bool is_suspect(const Share<Float8Format>& share) {
    constexpr bool kCanHide = kType == DType::kFloat8E4M3FN && !kIsConverted;
    return kCanHide && (widened_max(share.high) == 480 || widened_min(share.low) == -480);
  }
};

// Sums in float64; only the exact path scales. Comparisons use integers, as most devices have low float64
// throughput: on consumer cards it would be slower than memory.
template <bool kPair>
struct Float64Format : FormatOfFloat64 {
  using Scale = ScaleFloat64;
  using Extreme = int64_t;  // the bits, all but the sign inverted in negative numbers, so that they sort
  static constexpr int kElements = kPair ? 1 : 2;
  static constexpr int64_t kInfinity = 0x7ff0000000000000;
  GRADSTAT_DEVICE static int64_t positive_infinity() { return kInfinity; }
  GRADSTAT_DEVICE static int64_t negative_infinity() { return ~kInfinity; }
  GRADSTAT_DEVICE static int64_t min(int64_t a, int64_t b) { return b < a ? b : a; }
  GRADSTAT_DEVICE static int64_t max(int64_t a, int64_t b) { return b > a ? b : a; }
  GRADSTAT_DEVICE static double widened_min(int64_t x) { return double_of(x); }
  GRADSTAT_DEVICE static double widened_max(int64_t x) { return double_of(x); }

  GRADSTAT_DEVICE static int64_t ordered(uint32_t low, uint32_t high) {
    const auto sign = static_cast<uint32_t>(static_cast<int32_t>(high) >> 31);
    return static_cast<int64_t>((static_cast<uint64_t>(high ^ (sign >> 1)) << 32) | (low ^ sign));
  }
  GRADSTAT_DEVICE static double double_of(int64_t x) {
    const auto bits = static_cast<uint64_t>(ordered(static_cast<uint32_t>(x), static_cast<uint32_t>(x >> 32)));
    return words_to_double(static_cast<uint32_t>(bits), static_cast<uint32_t>(bits >> 32));
  }
  GRADSTAT_DEVICE static bool is_zero(uint32_t low, uint32_t high) { return ((high & 0x7fffffffu) | low) == 0; }

  GRADSTAT_DEVICE void add(const uint4& v, Share<Float64Format>& share, bool first) const {
    const double a = words_to_double(v.x, v.y), b = words_to_double(v.z, v.w);
    const int64_t c = ordered(v.x, v.y), d = ordered(v.z, v.w);
    if (first) share.zeros = 0;
    share.zeros += kPair ? is_zero(v.x | v.z, v.y | v.w) : is_zero(v.x, v.y) + is_zero(v.z, v.w);
    share.sums = first ? Sums<double>::of_pair(a, b) : share.sums.with(a).with(b);
    share.add(min(c, d), max(c, d), first);
  }
};

}  // namespace gradstat
