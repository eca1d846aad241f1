// The CPU inner loops for one instruction set. stats_cpu.cpp includes this file once per set and defines
//   GRADSTAT_NAMESPACE       a separate namespace for each set
//   GRADSTAT_VECTOR_BYTES    16, 32 or 64
//   GRADSTAT_X86_LEVEL       0 portable vectors, 2 AVX2 + FMA + F16C, 4 also AVX-512 F/BW/VL/DQ
// under the matching target pragma. They are undefined at the end. Hence no include guard and no #include.
//
// Method. Values are read in blocks of kBlockBytes, in steps of eight vectors of float32 (or float64). Sums of
// values and of squares are formed in float32 over small groups, as balanced trees, and each group is promoted
// to float64. Each term is rounded at most three times, so the norm's relative error is at most 9e-8 for any
// input:
//   float32             groups of four squares per lane: the product, two additions
//   bfloat16, float16   groups of eight, since their squares are exact in float32: three additions
//   sums of values      groups of eight: three additions
// The fast loop does not test for NaN, Inf, overflow or underflow. Each of them moves the block's sum of
// squares out of Type::kSafeLow..kSafeHigh, and such a block, still in cache, is read again exactly. If values
// are to be multiplied, each block is scaled immediately before it is read.

namespace GRADSTAT_NAMESPACE {

constexpr int kVectorBytes = GRADSTAT_VECTOR_BYTES;
constexpr int kLanes = kVectorBytes / 4;

template <class T, int kBytes = kVectorBytes>
struct VectorOf {
  typedef T type __attribute__((vector_size(kBytes)));
};
template <class T, int kBytes = kVectorBytes>
using Vector = typename VectorOf<T, kBytes>::type;

using VFloat = Vector<float>;
using VDouble = Vector<double>;
using VShort = Vector<int16_t>;
using VInt = Vector<int32_t>;
using VUint = Vector<uint32_t>;
using VLong = Vector<int64_t>;
using VHalfFloat = Vector<float, kVectorBytes / 2>;
using VHalfShort = Vector<uint16_t, kVectorBytes / 2>;

template <class To, class From>
GRADSTAT_INLINE To bitcast(From from) {
  static_assert(sizeof(To) == sizeof(From), "same size");
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

template <class V>
GRADSTAT_INLINE V load(const void* p) {
  V v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}

template <class V>
GRADSTAT_INLINE void store(void* p, V v) {
  std::memcpy(p, &v, sizeof(v));
}

// Loads the first `count` values at `p`, fewer than a vector holds, and fills the remaining lanes with `fill`.
template <class T>
GRADSTAT_INLINE Vector<T> load_part(const T* p, int64_t count, T fill) {
  using V = Vector<T>;
#ifdef __SANITIZE_ADDRESS__
  __asan_loadN(p, count * sizeof(T));  // compilers do not instrument masked loads
#endif
#if GRADSTAT_X86_LEVEL == 4
  const auto loaded = static_cast<__mmask32>((uint64_t{1} << count) - 1);
  const __m512i others = bitcast<__m512i>(V{} + fill);
  if constexpr (sizeof(T) == 2) {
    return bitcast<V>(_mm512_mask_loadu_epi16(others, loaded, p));
  } else if constexpr (sizeof(T) == 4) {
    return bitcast<V>(_mm512_mask_loadu_epi32(others, static_cast<__mmask16>(loaded), p));
  } else {
    return bitcast<V>(_mm512_mask_loadu_epi64(others, static_cast<__mmask8>(loaded), p));
  }
#else
  T part[kVectorBytes / sizeof(T)];
  store(part, V{} + fill);
  std::memcpy(part, p, count * sizeof(T));
  return load<V>(part);
#endif
}

// Prefetches what is read next, so that loads overlap with arithmetic. The address may be past the end.
template <size_t kBytes>
GRADSTAT_INLINE void prefetch(const void* p, int64_t bytes_ahead) {
  for (size_t byte = 0; byte < kBytes; byte += 64) {
    __builtin_prefetch(static_cast<const char*>(p) + bytes_ahead + byte);
  }
}

// Operations for which compilers generate noticeably worse code from portable vectors.
#if GRADSTAT_X86_LEVEL >= 2
#if GRADSTAT_X86_LEVEL == 4
#define GRADSTAT_MM(operation) _mm512_##operation
#define GRADSTAT_UPPER_HALF(x) _mm512_extractf32x8_ps(x, 1)
#define GRADSTAT_LOWER_HALF(x) _mm512_castps512_ps256(x)
#else
#define GRADSTAT_MM(operation) _mm256_##operation
#define GRADSTAT_UPPER_HALF(x) _mm256_extractf128_ps(x, 1)
#define GRADSTAT_LOWER_HALF(x) _mm256_castps256_ps128(x)
#endif
using VBits = Vector<long long>;  // integer intrinsics take this type for all lane widths
using VHalfBits = Vector<long long, kVectorBytes / 2>;
GRADSTAT_INLINE VFloat vmin(VFloat a, VFloat b) { return GRADSTAT_MM(min_ps)(a, b); }
GRADSTAT_INLINE VFloat vmax(VFloat a, VFloat b) { return GRADSTAT_MM(max_ps)(a, b); }
GRADSTAT_INLINE VDouble vmin(VDouble a, VDouble b) { return GRADSTAT_MM(min_pd)(a, b); }
GRADSTAT_INLINE VDouble vmax(VDouble a, VDouble b) { return GRADSTAT_MM(max_pd)(a, b); }
GRADSTAT_INLINE VFloat fma(VFloat a, VFloat b, VFloat c) { return GRADSTAT_MM(fmadd_ps)(a, b, c); }
GRADSTAT_INLINE VDouble fma(VDouble a, VDouble b, VDouble c) { return GRADSTAT_MM(fmadd_pd)(a, b, c); }
GRADSTAT_INLINE VFloat widen_half(VHalfShort h) { return GRADSTAT_MM(cvtph_ps)(bitcast<VHalfBits>(h)); }
GRADSTAT_INLINE VHalfShort narrow_half(VFloat x) {
  return bitcast<VHalfShort>(GRADSTAT_MM(cvtps_ph)(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
GRADSTAT_INLINE VLong swap_pairs(VLong x) {
  return bitcast<VLong>(GRADSTAT_MM(permute_pd)(bitcast<VDouble>(x), kVectorBytes == 64 ? 0x55 : 0x5));
}
GRADSTAT_INLINE void widen(VFloat x, VDouble& a, VDouble& b) {
  a = GRADSTAT_MM(cvtps_pd)(GRADSTAT_LOWER_HALF(x));
  b = GRADSTAT_MM(cvtps_pd)(GRADSTAT_UPPER_HALF(x));
}
GRADSTAT_INLINE VShort vmax(VShort a, VShort b) {
  return bitcast<VShort>(GRADSTAT_MM(max_epi16)(bitcast<VBits>(a), bitcast<VBits>(b)));
}
GRADSTAT_INLINE VShort vmax_unsigned(VShort a, VShort b) {
  return bitcast<VShort>(GRADSTAT_MM(max_epu16)(bitcast<VBits>(a), bitcast<VBits>(b)));
}
#else
GRADSTAT_INLINE VFloat fma(VFloat a, VFloat b, VFloat c) { return a * b + c; }
GRADSTAT_INLINE VDouble fma(VDouble a, VDouble b, VDouble c) { return a * b + c; }
GRADSTAT_INLINE VLong swap_pairs(VLong x) { return VLong{x[1], x[0]}; }
#if defined(__aarch64__)
GRADSTAT_INLINE VFloat vmin(VFloat a, VFloat b) { return vminq_f32(a, b); }
GRADSTAT_INLINE VFloat vmax(VFloat a, VFloat b) { return vmaxq_f32(a, b); }
GRADSTAT_INLINE VDouble vmin(VDouble a, VDouble b) { return vminq_f64(a, b); }
GRADSTAT_INLINE VDouble vmax(VDouble a, VDouble b) { return vmaxq_f64(a, b); }
GRADSTAT_INLINE VShort vmax(VShort a, VShort b) { return vmaxq_s16(a, b); }
GRADSTAT_INLINE VShort vmax_unsigned(VShort a, VShort b) {
  return bitcast<VShort>(vmaxq_u16(bitcast<uint16x8_t>(a), bitcast<uint16x8_t>(b)));
}
GRADSTAT_INLINE VFloat widen_half(VHalfShort h) { return vcvt_f32_f16(bitcast<float16x4_t>(h)); }
GRADSTAT_INLINE VHalfShort narrow_half(VFloat x) { return bitcast<VHalfShort>(vcvt_f16_f32(x)); }
GRADSTAT_INLINE void widen(VFloat x, VDouble& a, VDouble& b) {
  a = vcvt_f64_f32(vget_low_f32(x));
  b = vcvt_high_f64_f32(x);
}
#else
GRADSTAT_INLINE VFloat vmin(VFloat a, VFloat b) { return a < b ? a : b; }
GRADSTAT_INLINE VFloat vmax(VFloat a, VFloat b) { return a > b ? a : b; }
GRADSTAT_INLINE VDouble vmin(VDouble a, VDouble b) { return a < b ? a : b; }
GRADSTAT_INLINE VDouble vmax(VDouble a, VDouble b) { return a > b ? a : b; }
GRADSTAT_INLINE VShort vmax(VShort a, VShort b) { return a > b ? a : b; }
GRADSTAT_INLINE VShort vmax_unsigned(VShort a, VShort b) {
  using Unsigned = Vector<uint16_t>;
  return bitcast<Unsigned>(a) > bitcast<Unsigned>(b) ? a : b;
}
// half_to_float of stat.h, lane by lane.
GRADSTAT_INLINE VFloat widen_half(VHalfShort h) {
  const VUint bits = __builtin_convertvector(h, VUint);
  const VUint sign = (bits & 0x8000u) << 16;
  const VUint magnitude = (bits & 0x7fffu) << 13;
  const VUint finite = bitcast<VUint>(bitcast<VFloat>(magnitude) * 0x1p+112f);
  const VUint special = magnitude | 0x7f800000u;
  return bitcast<VFloat>(sign | (magnitude >= 0x0f800000u ? special : finite));
}
GRADSTAT_INLINE VHalfShort narrow_half(VFloat x) {
  uint32_t pairs[kLanes / 2];
  for (int i = 0; i < kLanes / 2; ++i) pairs[i] = to_half_pair(x[2 * i], x[2 * i + 1]);
  return load<VHalfShort>(pairs);
}
GRADSTAT_INLINE void widen(VFloat x, VDouble& a, VDouble& b) {
  VHalfFloat half[2];
  std::memcpy(half, &x, sizeof(x));
  a = __builtin_convertvector(half[0], VDouble);
  b = __builtin_convertvector(half[1], VDouble);
}
#endif
#endif

// Swaps the two 32-bit halves of each 64-bit lane.
GRADSTAT_INLINE VInt swap_pairs(VInt x) {
  using VUlong = Vector<uint64_t>;
  const VUlong both = bitcast<VUlong>(x);
  return bitcast<VInt>((both << 32) | (both >> 32));
}

// Adds to `count` the number of lanes of `x` in which no bit of `mask` is set. On AVX-512 the count is a
// scalar, which relieves the vector units.
#if GRADSTAT_X86_LEVEL == 4
template <class Integer>
using Counter = int64_t;
GRADSTAT_INLINE int64_t count_without(int64_t count, VShort x, VShort mask) {
  return count + __builtin_popcount(GRADSTAT_MM(testn_epi16_mask)(bitcast<VBits>(x), bitcast<VBits>(mask)));
}
GRADSTAT_INLINE int64_t count_without(int64_t count, VInt x, VInt mask) {
  return count + __builtin_popcount(GRADSTAT_MM(testn_epi32_mask)(bitcast<VBits>(x), bitcast<VBits>(mask)));
}
GRADSTAT_INLINE int64_t count_without(int64_t count, VLong x, VLong mask) {
  return count + __builtin_popcount(GRADSTAT_MM(testn_epi64_mask)(bitcast<VBits>(x), bitcast<VBits>(mask)));
}
#else
template <class Integer>
using Counter = Vector<Integer>;
template <class V>
GRADSTAT_INLINE V count_without(V count, V x, V mask) {
  return count - ((x & mask) == 0);
}
#if GRADSTAT_X86_LEVEL == 0  // SSE2 has no 64-bit comparison
GRADSTAT_INLINE VLong count_without(VLong count, VLong x, VLong mask) {
  const VInt none = bitcast<VInt>(x & mask) == 0;
  return count - bitcast<VLong>(none & swap_pairs(none));
}
#endif
#endif

// Reduces the lanes to one number by halves, in a fixed order.
constexpr auto kAdd = [](auto a, auto b) __attribute__((always_inline)) { return a + b; };
constexpr auto kMin = [](auto a, auto b) __attribute__((always_inline)) { return b < a ? b : a; };
constexpr auto kMax = [](auto a, auto b) __attribute__((always_inline)) { return b > a ? b : a; };
template <class T, class Merge, int kBytes = kVectorBytes>
GRADSTAT_INLINE T reduce(Vector<T, kBytes> x, Merge merge) {
  if constexpr (kBytes > 16) {
    Vector<T, kBytes / 2> half[2];
    std::memcpy(half, &x, sizeof(x));
    return reduce<T, Merge, kBytes / 2>(merge(half[0], half[1]), merge);
  } else {
    using Halves = Vector<uint64_t, 16>;
    const auto halves = bitcast<Halves>(x);
    x = merge(x, bitcast<Vector<T, 16>>(Halves{halves[1], 0}));
    for (unsigned bits = 32; bits >= 8 * sizeof(T); bits /= 2) {
      x = merge(x, bitcast<Vector<T, 16>>(bitcast<Halves>(x) >> bits));
    }
    return x[0];
  }
}

GRADSTAT_INLINE VFloat absolute(VFloat x) {
  return bitcast<VFloat>(bitcast<VInt>(x) & std::numeric_limits<int32_t>::max());
}
GRADSTAT_INLINE VDouble absolute(VDouble x) {
  return bitcast<VDouble>(bitcast<VLong>(x) & std::numeric_limits<int64_t>::max());
}

#include "lift.h"

// Minimum and maximum of floating-point lanes.
template <class Type>
struct FloatExtremes {
  using V = typename Type::V;
  V low = V{} + std::numeric_limits<typename Type::Storage>::infinity();
  V high = -low;

  GRADSTAT_INLINE void add(const typename Type::Storage* p) {
    V x[8];
    for (int k = 0; k < 8; ++k) x[k] = load<V>(p + k * Type::kValues);
    low = vmin(vmin(vmin(vmin(x[0], x[1]), vmin(x[2], x[3])), vmin(vmin(x[4], x[5]), vmin(x[6], x[7]))), low);
    high = vmax(vmax(vmax(vmax(x[0], x[1]), vmax(x[2], x[3])), vmax(vmax(x[4], x[5]), vmax(x[6], x[7]))), high);
  }
  GRADSTAT_INLINE void add_vector(const typename Type::Storage* p) {
    low = vmin(load<V>(p), low);
    high = vmax(load<V>(p), high);
  }
  void add_to(Row& row, const typename Type::Storage*, int64_t) const {
    row.min = merge::min(row.min, static_cast<double>(reduce<typename Type::Storage>(low, kMin)));
    row.max = merge::max(row.max, static_cast<double>(reduce<typename Type::Storage>(high, kMax)));
  }
};

// Minimum and maximum of 16-bit floats, computed on their bits, which takes fewer vectors than widened
// values. As signed integers, floats from +0 up are in order, and floats from -0 down are in reverse order and
// below all others; as unsigned integers the negative ones come last, still in reverse order. So the maximum is
// the signed maximum, and the minimum is the unsigned maximum, unless all values have the same sign: then one
// of the two is the signed minimum, and the values are read again for it.
template <class Type>
struct BitExtremes {
  VShort signed_max = VShort{} + std::numeric_limits<int16_t>::min();
  VShort unsigned_max = {};

  GRADSTAT_INLINE void add(const uint16_t* p) {
    for (int i = 0; i < Type::kStep; i += kVectorBytes / 2) add_vector(p + i);
  }
  GRADSTAT_INLINE void add_vector(const uint16_t* p) {
    const VShort x = load<VShort>(p);
    signed_max = vmax(signed_max, x);
    unsigned_max = vmax_unsigned(unsigned_max, x);
  }
  void add_to(Row& row, const uint16_t* p, int64_t count) const {
    const auto high = reduce<int16_t>(signed_max, kMax);
    const auto low = static_cast<int16_t>(reduce<uint16_t>(bitcast<Vector<uint16_t>>(unsigned_max), kMax));
    auto between = std::numeric_limits<int16_t>::max();
    if (high < 0 || low >= 0) {
      for (int64_t i = 0; i < count; ++i) between = std::min(between, static_cast<int16_t>(p[i]));
    }
    const auto value = [](int16_t bits) { return double{Type::to_real(static_cast<uint16_t>(bits))}; };
    row.min = merge::min(row.min, value(low >= 0 ? between : low));
    row.max = merge::max(row.max, value(high < 0 ? between : high));
  }
};

// Element types. V holds kValues widened values; Bits has integer lanes of the same width as V's.
struct Narrow {
  using V = VFloat;
  using Real = float;
  using Bits = VInt;
  using Integer = int32_t;
  static constexpr int kValues = kLanes;
  static constexpr int kStep = 8 * kLanes;
  static constexpr int32_t kInfinity = 0x7f800000;
  // The range in which a block's sum of squares is trusted. Below it, underflowed squares (each under 2^-126,
  // at most 4096 of them) could matter; above it, a square may have overflowed.
  static constexpr double kSafeLow = 0x1p-85;
  static constexpr double kSafeHigh = 0x1p+120;
  static constexpr bool kSquaresFitDouble = true;

  static GRADSTAT_INLINE VDouble promote(VFloat x) {
    VDouble a, b;
    widen(x, a, b);
    return a + b;
  }
  static GRADSTAT_INLINE Sums<VDouble> lifted(VFloat x) {
    VDouble a, b;
    widen(x, a, b);
    return Sums<VDouble>::of_pair(a, b);
  }
};

struct Float32 : Narrow {
  using Storage = float;
  using Extremes = FloatExtremes<Float32>;
  static constexpr bool kGroupsOfEight = false;
  static constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  static GRADSTAT_INLINE VFloat load_vector(const float* p) { return load<VFloat>(p); }
#if GRADSTAT_X86_LEVEL >= 2  // sums and extremes load the adders of Zen processors more than the multipliers
  static GRADSTAT_INLINE VDouble promote(VFloat x) {
    VDouble a, b;
    widen(x, a, b);
    return fma(a, VDouble{} + 1.0, b);
  }
#endif
  static GRADSTAT_INLINE void store_vector(float* p, VFloat x) { store(p, x); }
  static float to_real(float x) { return x; }
};

struct BFloat16 : Narrow {
  using Storage = uint16_t;
  using Extremes = BitExtremes<BFloat16>;
  static constexpr bool kGroupsOfEight = true;
  static constexpr uint16_t kNan = 0x7fc0;
  static GRADSTAT_INLINE VFloat load_vector(const uint16_t* p) {
    return bitcast<VFloat>(__builtin_convertvector(load<VHalfShort>(p), VUint) << 16);
  }
  // The even and the odd elements, by a shift and a mask instead of widening.
  static GRADSTAT_INLINE void load_two(const uint16_t* p, VFloat& a, VFloat& b) {
    const VUint both = load<VUint>(p);
    a = bitcast<VFloat>(both << 16);
    b = bitcast<VFloat>(both & 0xffff0000u);
  }
  static GRADSTAT_INLINE void store_two(uint16_t* p, VFloat a, VFloat b) {
    store(p, (rounded(a) >> 16) | (rounded(b) & 0xffff0000u));
  }
  static float to_real(uint16_t x) { return bfloat16_to_float(x); }

 private:
  // Rounds to nearest even in the upper half. A NaN stays NaN provided its lower half is zero.
  static GRADSTAT_INLINE VUint rounded(VFloat x) {
    const VUint bits = bitcast<VUint>(x);
    return bits + 0x7fffu + ((bits >> 16) & 1u);
  }
};

struct Float16 : Narrow {
  using Storage = uint16_t;
  using Extremes = BitExtremes<Float16>;
  static constexpr bool kGroupsOfEight = true;
  static constexpr uint16_t kNan = 0x7e00;
  static GRADSTAT_INLINE VFloat load_vector(const uint16_t* p) { return widen_half(load<VHalfShort>(p)); }
  static GRADSTAT_INLINE void store_vector(uint16_t* p, VFloat x) { store(p, narrow_half(x)); }
  static float to_real(uint16_t x) { return half_to_float(x); }
};

struct Float64 {
  using V = VDouble;
  using Real = double;
  using Bits = VLong;
  using Integer = int64_t;
  using Storage = double;
  using Extremes = FloatExtremes<Float64>;
  static constexpr int kValues = kLanes / 2;
  static constexpr int kStep = 8 * kValues;
  static constexpr int64_t kInfinity = 0x7ff0000000000000;
  static constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
  // In this range no element is above GRADSTAT_LARGE, and none below GRADSTAT_SMALL matters.
  static constexpr double kSafeLow = 0x1p-900;
  static constexpr double kSafeHigh = 0x1p+970;
  static constexpr bool kSquaresFitDouble = false;
  static constexpr bool kGroupsOfEight = true;

  static GRADSTAT_INLINE VDouble load_vector(const double* p) { return load<VDouble>(p); }
  static GRADSTAT_INLINE void store_vector(double* p, VDouble x) { store(p, x); }
  static GRADSTAT_INLINE VDouble promote(VDouble x) { return x; }
  static GRADSTAT_INLINE Sums<VDouble> lifted(VDouble x) { return Sums<VDouble>::of(x); }
  static double to_real(double x) { return x; }
};

// Loads or stores two vectors of adjacent values; the type chooses which lane holds which value.
template <class Type>
GRADSTAT_INLINE void load_two(const typename Type::Storage* p, typename Type::V& a, typename Type::V& b) {
  if constexpr (std::is_same_v<Type, BFloat16>) {
    BFloat16::load_two(p, a, b);
  } else {
    a = Type::load_vector(p);
    b = Type::load_vector(p + Type::kValues);
  }
}
template <class Type>
GRADSTAT_INLINE void store_two(typename Type::Storage* p, typename Type::V a, typename Type::V b) {
  if constexpr (std::is_same_v<Type, BFloat16>) {
    BFloat16::store_two(p, a, b);
  } else {
    Type::store_vector(p, a);
    Type::store_vector(p + Type::kValues, b);
  }
}

// Number of stored values per vector; widened they take one V or two.
template <class Type>
constexpr int kPerVector = kVectorBytes / static_cast<int>(sizeof(typename Type::Storage));

template <class Type>
constexpr auto promoting = [](typename Type::V x) __attribute__((always_inline)) { return Type::promote(x); };

template <class Type>
GRADSTAT_INLINE Sums<VDouble> sums_of_vector(const typename Type::Storage* p) {
  if constexpr (kPerVector<Type> == Type::kValues) {
    return Type::lifted(Type::load_vector(p));
  } else {
    typename Type::V a, b;
    load_two<Type>(p, a, b);
    return Sums<typename Type::V>::of_pair(a, b).template promoted<VDouble>(promoting<Type>);
  }
}

// The sums of one step of the fast loop.
template <class Type>
GRADSTAT_INLINE Sums<VDouble> sums_of_step(const typename Type::Storage* p) {
  typename Type::V x[8];
  for (int k = 0; k < 8; k += 2) load_two<Type>(p + k * Type::kValues, x[k], x[k + 1]);
  return Sums<typename Type::V>::template promoted<VDouble, Type::kGroupsOfEight>(
      sums_of<4>(x), sums_of<4>(x + 4), promoting<Type>);
}
inline double total(VDouble lanes) { return reduce<double>(lanes, kAdd); }
inline void add_to(Row& row, const Sums<VDouble>& sums) {
  sums.each(row, [](double& column, VDouble sum) { column += total(sum); });
}

// Counts elements that are zero, of one or two parts, in integer lanes as wide as an element. As there are no
// 128-bit lanes, elements of that size are counted in two 64-bit lanes each.
template <class Type, bool kPair>
struct Zeros {
  static constexpr int kPartBits = 8 * sizeof(typename Type::Storage);
  static constexpr bool kTwoLanes = kPair && kPartBits == 64;
  static constexpr int kLaneBits = kPair && !kTwoLanes ? 2 * kPartBits : kPartBits;
  using Integer =
      std::conditional_t<kLaneBits == 16, int16_t, std::conditional_t<kLaneBits == 32, int32_t, int64_t>>;
  using V = Vector<Integer>;
  static_assert(kBlockBytes / 2 <= std::numeric_limits<Integer>::max(), "the count of a block fits a lane");
  // All bits of an element except the sign bits of its parts.
  static constexpr uint64_t kPartMask = (uint64_t{1} << (kPartBits - 1)) - 1;
  static constexpr auto kMask =
      static_cast<Integer>(kLaneBits > kPartBits ? kPartMask << kPartBits % 64 | kPartMask : kPartMask);

  Counter<Integer> count = {};

  GRADSTAT_INLINE void add(const typename Type::Storage* p) {
    for (int i = 0; i < Type::kStep; i += kPerVector<Type>) add_vector(p + i);
  }
  GRADSTAT_INLINE void add_vector(const typename Type::Storage* p) {
    V x = load<V>(p);
    if constexpr (kTwoLanes) x |= swap_pairs(x);
    count = count_without(count, x, V{} + kMask);
  }
  int64_t total() const {
    constexpr int kLanesPerElement = kTwoLanes ? 2 : 1;
    if constexpr (std::is_same_v<Counter<Integer>, int64_t>) {
      return count / kLanesPerElement;
    } else {
      return reduce<Integer>(count, kAdd) / kLanesPerElement;
    }
  }
};

// The accumulators of the fast loop for one block, per lane.
template <class Type, bool kPair>
struct Pass {
  using Storage = typename Type::Storage;
  static constexpr int kPerElement = kPair ? 2 : 1;

  Sums<VDouble> sums;
  typename Type::Extremes extremes;
  Zeros<Type, kPair> zeros;
  int64_t padding = 0;  // added elements that were counted as zeros

  // Adds one step.
  GRADSTAT_INLINE void add(const Storage* p) {
    sums = sums + sums_of_step<Type>(p);
    zeros.add(p);
    extremes.add(p);
  }
  // Adds the last values of a tensor, less than a step, vector by vector. The last vector is padded with zeros
  // for the sums and with copies of a value for the extremes, neither of which changes the result.
  GRADSTAT_INLINE void add_rest(const Storage* p, int64_t count) {
    for (; count >= kPerVector<Type>; p += kPerVector<Type>, count -= kPerVector<Type>) add_vector(p, p);
    if (count == 0) return;
    Storage with_zeros[kPerVector<Type>], with_copies[kPerVector<Type>];
    store(with_zeros, load_part(p, count, Storage{}));
    store(with_copies, load_part(p, count, p[0]));
    add_vector(with_zeros, with_copies);
    padding += (kPerVector<Type> - count) / kPerElement;
  }
  // Adds the `count` values at `p` to a row and returns true, or returns false if they must be read exactly.
  GRADSTAT_INLINE bool add_to(Row& row, const Storage* p, int64_t count) const {
    const double squares = total(sums.sq_sum);
    const int64_t zero_count = zeros.total() - padding;
    const bool is_safe = (squares >= Type::kSafeLow && squares <= Type::kSafeHigh) ||
                         (squares == 0 && zero_count * kPerElement == count);
    if (!is_safe) return false;
    GRADSTAT_NAMESPACE::add_to(row, sums);
    row.zero_count += static_cast<double>(zero_count);
    extremes.add_to(row, p, count);
    return true;
  }

 private:
  GRADSTAT_INLINE void add_vector(const Storage* p, const Storage* for_extremes) {
    sums = sums + sums_of_vector<Type>(p);
    zeros.add_vector(p);
    extremes.add_vector(for_extremes);
  }
};

// Reads a block that a Pass could not handle: NaN and Inf are masked out, all products and sums are in float64.
template <class Type, bool kPair>
__attribute__((noinline)) void read_exactly(const typename Type::Storage* p, int64_t count, int64_t first,
                                            Row& row) {
  using V = typename Type::V;
  using Bits = typename Type::Bits;
  using Integer = typename Type::Integer;
  constexpr int kPerElement = kPair ? 2 : 1;
  Sums<VDouble> sums;
  V low = V{} + std::numeric_limits<typename Type::Real>::infinity();
  V high = -low;
  Bits zeros = {}, nans = {}, nonfinite = {};
  const auto add = [&](const typename Type::Storage* at) __attribute__((always_inline)) {
    const V x = Type::load_vector(at);
    const Bits magnitude = bitcast<Bits>(x) & std::numeric_limits<Integer>::max();
    Bits zero = magnitude == 0;
    Bits nan = magnitude > Type::kInfinity;
    Bits is_nonfinite = magnitude >= Type::kInfinity;
    if constexpr (kPair) {
      zero &= swap_pairs(zero);
      nan |= swap_pairs(nan);
      is_nonfinite |= swap_pairs(is_nonfinite);
    }
    zeros -= zero;
    nans -= nan;
    nonfinite -= is_nonfinite;
    low = vmin(is_nonfinite ? low : x, low);
    high = vmax(is_nonfinite ? high : x, high);
    sums = sums + Type::lifted(bitcast<V>(bitcast<Bits>(x) & ~is_nonfinite));
  };
  int64_t i = 0;
  for (; i + Type::kValues <= count; i += Type::kValues) add(p + i);
  const int64_t padding = (Type::kValues - (count - i)) % Type::kValues;
  if (padding > 0) {  // pads with NaN, which are masked out; the counts are corrected below
    typename Type::Storage rest[Type::kValues];
    std::fill(std::copy(p + i, p + count, rest), rest + Type::kValues, Type::kNan);
    add(rest);
  }
  const auto elements = [](Bits counts) { return reduce<Integer>(counts, kAdd) / kPerElement; };
  const int64_t zero_count = elements(zeros);
  const int64_t nan_count = elements(nans) - padding / kPerElement;
  const int64_t nonfinite_count = elements(nonfinite) - padding / kPerElement;

  if constexpr (!Type::kSquaresFitDouble) {
    const double squares = total(sums.sq_sum);
    const bool safe = squares >= Type::kSafeLow && squares <= Type::kSafeHigh;
    if (!safe && (zero_count + nonfinite_count) * kPerElement < count) {
      for (int64_t k = 0; k < count; k += kPerElement) {
        if constexpr (kPair) {
          lift(row, (first + k) / 2, p[k], p[k + 1]);
        } else {
          lift(row, first + k, p[k]);
        }
      }
      return;
    }
  }
  add_to(row, sums);
  row.zero_count += zero_count;
  row.nan_count += nan_count;
  row.inf_count += nonfinite_count - nan_count;
  row.min = merge::min(row.min, reduce<typename Type::Real>(low, kMin));
  row.max = merge::max(row.max, reduce<typename Type::Real>(high, kMax));
  if (nonfinite_count > 0 && row.first_nonfinite == kInf) {  // blocks are read in order
    int64_t k = 0;
    while (std::isfinite(Type::to_real(p[k]))) ++k;
    row.first_nonfinite = (first + k) / kPerElement;
  }
}

template <class Type>
void scale_values(typename Type::Storage* p, int64_t count, double wide_multiplier) {
  using V = typename Type::V;
  using Real = typename Type::Real;
  // The payload of a NaN does not matter, but BFloat16 needs a NaN whose lower half is zero.
  const Real multiplier = is_nan(wide_multiplier) ? Real(NAN) : static_cast<Real>(wide_multiplier);
  constexpr int kTwo = 2 * Type::kValues;
  const auto scale_two = [&](typename Type::Storage* at) __attribute__((always_inline)) {
    V a, b;
    load_two<Type>(at, a, b);
    store_two<Type>(at, a * multiplier, b * multiplier);
  };
  int64_t i = 0;
  for (; i + kTwo <= count; i += kTwo) scale_two(p + i);
  if (i < count) {
    typename Type::Storage rest[kTwo] = {};
    std::copy(p + i, p + count, rest);
    scale_two(rest);
    std::copy(rest, rest + (count - i), p + i);
  }
}

// Adds the values at `p` to a row, block by block, after multiplying them by `factor` in place unless it is 1.
// `first`: index of the first value in its tensor.
template <class Type, bool kPair>
void read_values(typename Type::Storage* p, int64_t first, int64_t count, double factor, Row& row) {
  constexpr int64_t kBlock = kBlockBytes / sizeof(*p);
  static_assert(kBlock % Type::kStep == 0, "a block is a whole number of steps");
  for (int64_t done = 0; done < count; done += kBlock, p += kBlock) {
    const int64_t take = std::min(kBlock, count - done);
    if (factor != 1.0) scale_values<Type>(p, take, factor);
    Pass<Type, kPair> pass;
    int64_t i = 0;
    for (; i + Type::kStep <= take; i += Type::kStep) {
      prefetch<Type::kStep * sizeof(*p)>(p + i, prefetch_distance);
      pass.add(p + i);
    }
    if (i < take) pass.add_rest(p + i, take - i);
    if (!pass.add_to(row, p, take)) read_exactly<Type, kPair>(p, take, first + done, row);
  }
}

// Calls body(type, first value).
template <class Body>
void with_values(const Entry& entry, int64_t first, const Body& body) {
  const auto call = [&](auto type) {
    body(type, static_cast<typename decltype(type)::Storage*>(entry.data) + first);
  };
  switch (entry.dtype) {
    case DType::kFloat32:
      return call(Float32());
    case DType::kBFloat16:
      return call(BFloat16());
    case DType::kFloat16:
      return call(Float16());
    default:
      return call(Float64());
  }
}

void read(const Entry& entry, int64_t first, int64_t count, double factor, Row& row) {
  with_values(entry, first, [&](auto type, auto* values) {
    using Type = decltype(type);
    if constexpr (!std::is_same_v<Type, BFloat16>) {
      if (entry.is_pair) return read_values<Type, true>(values, first, count, factor, row);
    }
    return read_values<Type, false>(values, first, count, factor, row);
  });
}

void scale(const Entry& entry, int64_t first, int64_t count, double multiplier) {
  with_values(entry, first,
              [&](auto type, auto* values) { scale_values<decltype(type)>(values, count, multiplier); });
}

#include "quantization_cpu_kernel.h"

}  // namespace GRADSTAT_NAMESPACE

#undef GRADSTAT_MM
#undef GRADSTAT_UPPER_HALF
#undef GRADSTAT_LOWER_HALF
#undef GRADSTAT_NAMESPACE
#undef GRADSTAT_VECTOR_BYTES
#undef GRADSTAT_X86_LEVEL
