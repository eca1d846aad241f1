// What translated kernels (translate.py) are compiled with: registers, the instructions that only compute, and
// the thread, whose other functions are in device.cpp.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

using u8 = uint8_t;
using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;
using s8 = int8_t;
using s16 = int16_t;
using s32 = int32_t;
using s64 = int64_t;
using b8 = u8;
using b16 = u16;
using b32 = u32;
using b64 = u64;
using f32 = float;
using f64 = double;
using pred = bool;
// clang-format off
struct f16 { u16 bits; };
struct bf16 { u16 bits; };
struct e4m3x2 { u16 bits; };
struct f16x2 { u32 bits; };
struct bf16x2 { u32 bits; };
struct f32x2 { f32 low, high; };

// Registers of 1 to 64 bits, with members named as types.
#define OF_16 ::u8 u8, b8; ::s8 s8; ::u16 u16, b16; ::s16 s16;
#define OF_32 OF_16 ::u32 u32, b32; ::s32 s32; ::f32 f32;
union R1 { ::pred pred; };
union R16 { OF_16 ::f16 f16; ::bf16 bf16; ::e4m3x2 e4m3x2; };
union R32 { OF_32 ::f16x2 f16x2; ::bf16x2 bf16x2; };
union R64 { OF_32 ::u64 u64, b64; ::s64 s64; ::f64 f64; ::f32x2 f32x2; };

enum Space { kGeneric, kGlobal, kShared, kParameter };
constexpr u64 kSharedWindow = u64{1} << 60;  // generic addresses of shared memory

#define MEETINGS(X) X(bar_warp_sync) X(shfl_sync_bfly) X(shfl_sync_down) X(shfl_sync_up) X(shfl_sync_idx) \
  X(vote_sync_any) X(vote_sync_all) X(redux_sync_add_s32) X(redux_sync_min_s32) X(redux_sync_max_s32)
#define ENUMERATOR(name) k_##name,
enum Meeting { MEETINGS(ENUMERATOR) };
#undef ENUMERATOR
// clang-format on

struct Thread {
  u32 thread, block, threads, blocks;
  bool is_inside;  // whether the lane that the last shuffle read is in range
  R64 unused;      // the target _

  // Where `line` is that of the instruction in the PTX. Memory is checked before it is returned.
  const void* read(Space space, u64 address, u32 bytes, u32 line);
  void write(const void* values, Space space, u64 address, u32 bytes, u32 line);
  void* atomic(Space space, u64 address, u32 bytes, u32 line, bool acquires, bool releases);
  void fence();
  void barrier(u32 number, u32 line);
  u32 meet(Meeting what, u32 mask, u32 value, u32 b, u32 c, u32 line);  // of the lanes in `mask`
  [[noreturn]] void fail(const char* what, u32 line);
};

// A number in [-1, 1] that depends on `bits` and the launch's seed only: a device errs the same way every time.
double random_error(u64 bits);
[[noreturn]] void division_by_zero();

// Formats -----------------------------------------------------------------------------------------------

template <class To, class From>
To bitcast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}

template <class T>
T from_bits(u64 bits) {
  T to;
  memcpy(&to, &bits, sizeof(to));
  return to;
}

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

// Numbers with a sign bit and these numbers of bits; without `kHasInf`, only one mantissa is a NaN.
template <int kExponent, int kMantissa, bool kHasInf = true>
double decoded(u32 bits) {
  constexpr int kBias = (1 << (kExponent - 1)) - 1, kTop = (1 << kExponent) - 1, kOne = 1 << kMantissa;
  const int exponent = bits >> kMantissa & kTop, mantissa = bits & (kOne - 1);
  double size;
  if (kHasInf && exponent == kTop) {
    size = mantissa == 0 ? HUGE_VAL : kNaN;
  } else if (!kHasInf && exponent == kTop && mantissa == kOne - 1) {
    size = kNaN;
  } else {
    size = std::ldexp(exponent == 0 ? mantissa : mantissa + kOne,
                      (exponent == 0 ? 1 : exponent) - kBias - kMantissa);
  }
  return bits >> (kExponent + kMantissa) & 1 ? -size : size;
}

// Rounds to nearest, ties to even.
template <int kExponent, int kMantissa>
u16 encoded(double x) {
  constexpr int kBias = (1 << (kExponent - 1)) - 1;
  constexpr s64 kInf = s64{(1 << kExponent) - 1} << kMantissa;
  if (x != x) return 0x7fff;
  const u16 sign = std::signbit(x) ? 0x8000 : 0;
  if (std::isinf(x)) return sign | kInf;
  int exponent;
  std::frexp(x, &exponent);
  exponent = exponent - 1 < 1 - kBias || x == 0 ? 1 - kBias : exponent - 1;
  const s64 mantissa = std::llrint(std::ldexp(std::fabs(x), kMantissa - exponent));
  const s64 bits = mantissa + (s64{exponent + kBias - 1} << kMantissa);
  return sign | (bits < kInf ? bits : kInf);
}

inline double value(f16 x) { return decoded<5, 10>(x.bits); }
inline double value(bf16 x) { return decoded<8, 7>(x.bits); }
template <class T>
T value(T x) {
  return x;
}
inline f16 low(f16x2 x) { return {u16(x.bits)}; }
inline f16 high(f16x2 x) { return {u16(x.bits >> 16)}; }
inline bf16 low(bf16x2 x) { return {u16(x.bits)}; }
inline bf16 high(bf16x2 x) { return {u16(x.bits >> 16)}; }
inline f16x2 pair(f16 low, f16 high) { return {low.bits | u32{high.bits} << 16}; }
inline bf16x2 pair(bf16 low, bf16 high) { return {low.bits | u32{high.bits} << 16}; }

// A result of arithmetic: in float32 there is only one NaN.
template <class T>
T made(T x) {
  if constexpr (std::is_same_v<T, f32>) return x != x ? from_bits<f32>(0x7fffffff) : x;
  return x;
}

// Conversions -------------------------------------------------------------------------------------------

template <class To, class From>
To cvt(From x) {
  return value(x);
}
template <class To, class From>
To cvt_rn(From x) {
  if constexpr (std::is_same_v<To, f16>)
    return {encoded<5, 10>(x)};
  else if constexpr (std::is_same_v<To, bf16>)
    return {encoded<8, 7>(x)};
  else if constexpr (std::is_same_v<From, e4m3x2>) {
    return pair(f16{encoded<5, 10>(decoded<4, 3, false>(x.bits & 0xff))},
                f16{encoded<5, 10>(decoded<4, 3, false>(x.bits >> 8))});
  } else {
    return made(static_cast<To>(x));
  }
}
template <class To>
To cvt_rn(f32 high, f32 low) {
  using Half = std::conditional_t<std::is_same_v<To, f16x2>, f16, bf16>;
  return pair(cvt_rn<Half>(low), cvt_rn<Half>(high));
}
template <class To>
To cvt_rzi(f64 x) {
  static_assert(std::is_same_v<To, s64>);
  if (x != x || x < -0x1p63) return std::numeric_limits<To>::min();
  return x >= 0x1p63 ? std::numeric_limits<To>::max() : static_cast<To>(x);
}

// Arithmetic --------------------------------------------------------------------------------------------

// clang-format off
#define UNARY(name, result) template <class T> T op_##name(T a) { return result; }
#define BINARY(name, result) template <class T> T op_##name(T a, T b) { return result; }
BINARY(add, made(static_cast<T>(a + b)))
BINARY(add_rn, made(a + b))
BINARY(sub, made(static_cast<T>(a - b)))
BINARY(sub_rn, made(a - b))
BINARY(mul, made(a * b))
BINARY(mul_rn, made(a * b))
BINARY(mul_lo, static_cast<T>(a * b))
BINARY(div_rn, made(a / b))
BINARY(div, b == 0 ? (division_by_zero(), a) : static_cast<T>(a / b))
BINARY(rem, b == 0 ? (division_by_zero(), a) : static_cast<T>(a % b))
BINARY(and, a & b)
BINARY(or, a | b)
BINARY(xor, a ^ b)
UNARY(neg, -a)
UNARY(rcp_rn, made(1 / a))
UNARY(sqrt_rn, made(std::sqrt(a)))
template <class T> T op_fma_rn(T a, T b, T c) { return made(std::fma(a, b, c)); }
template <class T> T op_mad_lo(T a, T b, T c) { return static_cast<T>(a * b + c); }
template <class T> T op_selp(T a, T b, pred p) { return p ? a : b; }
template <class T> T op_shl(T a, u32 n) { return n >= 8 * sizeof(T) ? 0 : static_cast<T>(a << n); }
// clang-format on

inline f16x2 op_add_rn(f16x2 a, f16x2 b) {
  return pair(cvt_rn<f16>(value(low(a)) + value(low(b))), cvt_rn<f16>(value(high(a)) + value(high(b))));
}
inline f16x2 op_mul_rn(f16x2 a, f16x2 b) {
  return pair(cvt_rn<f16>(value(low(a)) * value(low(b))), cvt_rn<f16>(value(high(a)) * value(high(b))));
}
// clang-format off
#define PAIRS(name, of_one) \
  inline f32x2 op_##name(f32x2 a, f32x2 b) { return {of_one(a.low, b.low), of_one(a.high, b.high)}; }
PAIRS(add, op_add)
PAIRS(add_rn, op_add)
PAIRS(sub, op_sub)
PAIRS(mul, op_mul)
PAIRS(mul_rn, op_mul)
// clang-format on
inline f32x2 op_fma_rn(f32x2 a, f32x2 b, f32x2 c) {
  return {op_fma_rn(a.low, b.low, c.low), op_fma_rn(a.high, b.high, c.high)};
}
inline u32 op_mul_hi(u32 a, u32 b) { return u64{a} * b >> 32; }
inline s32 op_mul_hi(s32 a, s32 b) { return s64{a} * b >> 32; }
inline u32 op_mul_wide(u16 a, u16 b) { return u32{a} * b; }
inline s32 op_mul_wide(s16 a, s16 b) { return s32{a} * b; }
inline u64 op_mul_wide(u32 a, u32 b) { return u64{a} * b; }
inline s64 op_mul_wide(s32 a, s32 b) { return s64{a} * b; }
inline u64 op_mad_wide(u32 a, u32 b, u64 c) { return u64{a} * b + c; }
inline s64 op_mad_wide(s32 a, s32 b, s64 c) { return s64{a} * b + c; }
template <class T>
T op_not(T a) {
  if constexpr (std::is_same_v<T, pred>)
    return !a;
  else
    return ~a;
}
template <class T>
T op_abs(T a) {
  if constexpr (std::is_integral_v<T>)
    return a < 0 ? -a : a;
  else
    return std::fabs(a);
}
template <class T>
T op_shr(T a, u32 n) {
  constexpr u32 kBits = 8 * sizeof(T);
  return n < kBits ? a >> n : std::is_signed_v<T> ? a >> (kBits - 1) : 0;
}
inline u32 op_popc(u32 a) { return __builtin_popcount(a); }
inline u64 op_bfi(u64 a, u64 b, u32 position, u32 length) {
  const u64 mask = ((length < 64 ? u64{1} << length : 0) - 1) << position;
  return (b & ~mask) | (a << position & mask);
}
inline u32 op_bfe(u32 a, u32 position, u32 length) {
  return u64{a} >> (position & 0xff) & ((u64{1} << (length & 0xff)) - 1);
}
inline u32 op_prmt(u32 a, u32 b, u32 c) {
  const u64 bytes = a | u64{b} << 32;
  u32 out = 0;
  for (int i = 0; i < 4; ++i) {
    const u32 choice = c >> 4 * i & 15, byte = bytes >> 8 * (choice & 7) & 0xff;
    out |= (choice & 8 ? (byte & 0x80 ? 0xffu : 0u) : byte) << 8 * i;
  }
  return out;
}

// A number rather than NaN, and -0 below 0.
template <class T>
bool is_less(T a, T b) {
  const auto x = value(a), y = value(b);
  if constexpr (std::is_integral_v<T>)
    return x < y;
  else
    return y != y || x < y || (x == y && std::signbit(x));
}
template <class T>
bool is_nan(T a) {
  return value(a) != value(a);
}
#define EXTREME(name, is_first)                                                         \
  template <class T>                                                                    \
  T op_##name(T a, T b) {                                                               \
    if constexpr (std::is_same_v<T, f16x2> || std::is_same_v<T, bf16x2>) {              \
      return pair(op_##name(low(a), low(b)), op_##name(high(a), high(b)));              \
    } else {                                                                            \
      if (is_nan(a) && is_nan(b)) return from_bits<T>(~u64{0} >> (65 - 8 * sizeof(T))); \
      return is_nan(b) || (!is_nan(a) && is_first) ? a : b;                             \
    }                                                                                   \
  }
EXTREME(min, is_less(a, b))
EXTREME(max, is_less(b, a))

#define COMPARISON(name, sign)                                 \
  template <class T>                                           \
  pred op_setp_##name(T a, T b) {                              \
    return !is_nan(a) && !is_nan(b) && value(a) sign value(b); \
  }                                                            \
  template <class T>                                           \
  pred op_setp_##name##u(T a, T b) {                           \
    return is_nan(a) || is_nan(b) || value(a) sign value(b);   \
  }
COMPARISON(eq, ==)
COMPARISON(ne, !=)
COMPARISON(lt, <)
COMPARISON(le, <=)
COMPARISON(gt, >)
COMPARISON(ge, >=)
#undef COMPARISON
template <class T>
pred op_setp_nan(T a, T b) {
  return is_nan(a) || is_nan(b);
}
template <class T>
pred op_setp_num(T a, T b) {
  return !op_setp_nan(a, b);
}
template <class To>
To op_set_eq(f16x2 a, f16x2 b) {
  constexpr u32 kTrue = std::is_same_v<To, u32> ? 0xffff : 0x3c00;  // 1 in float16
  return from_bits<To>((op_setp_eq(low(a), low(b)) ? kTrue : 0) |
                       (op_setp_eq(high(a), high(b)) ? kTrue << 16 : 0));
}

// Approximations ----------------------------------------------------------------------------------------

// A float32 at most this far from `exact`, in units of its last place.
inline f32 near(double exact, double units, u64 salt, f32 from) {
  const auto rounded = static_cast<f32>(exact);
  if (rounded == 0 || !std::isfinite(rounded)) return made(rounded);
  const double unit = std::ldexp(1.0, std::ilogb(rounded) < -126 ? -149 : std::ilogb(rounded) - 23);
  return static_cast<f32>(exact + (units - 0.5) * unit * random_error(salt << 32 | bitcast<u32>(from)));
}
inline f32 flushed(f32 x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; }

inline f32 op_rcp_approx(f32 a) { return near(1.0 / a, 1, 1, a); }
inline f32 op_sqrt_approx(f32 a) { return near(std::sqrt(double{a}), 1, 2, a); }
inline f32 op_rsqrt_approx(f32 a) { return near(1 / std::sqrt(double{a}), 1, 3, a); }
inline f32 op_ex2_approx(f32 a) { return near(std::exp2(double{a}), 2, 4, a); }
inline f32 op_lg2_approx(f32 a) {
  const double exact = std::log2(double{a});
  if (!std::isfinite(exact)) return made(static_cast<f32>(exact));
  return static_cast<f32>(exact + 0x1p-23 * random_error(u64{5} << 32 | bitcast<u32>(a)));
}
inline f32 op_rcp_approx_ftz(f32 a) { return flushed(op_rcp_approx(flushed(a))); }
inline f32 op_sqrt_approx_ftz(f32 a) { return flushed(op_sqrt_approx(flushed(a))); }
inline f32 op_rsqrt_approx_ftz(f32 a) { return flushed(op_rsqrt_approx(flushed(a))); }
inline f32 op_ex2_approx_ftz(f32 a) { return flushed(op_ex2_approx(flushed(a))); }
inline f32 op_lg2_approx_ftz(f32 a) { return flushed(op_lg2_approx(flushed(a))); }
inline f32 op_div_full(f32 a, f32 b) { return near(double{a} / b, 2, bitcast<u32>(b), a); }

// Of float64 only the upper 32 bits are read and written.
inline f64 gross(f64 (*exact)(f64), f64 a, u64 salt) {
  constexpr u64 kUpper = ~u64{0} << 32;
  f64 from = from_bits<f64>(bitcast<u64>(a) & kUpper);
  if (std::fabs(from) < 0x1p-1022) from = std::copysign(0.0, from);
  const f64 y = exact(from);
  if (y == 0 || !std::isfinite(y)) return y;
  if (std::fabs(y) < 0x1p-1022) return std::copysign(0.0, y);
  const u64 bits = bitcast<u64>(y * (1 + 0x1p-20 * random_error(bitcast<u64>(from) ^ salt)));
  return from_bits<f64>(bits & kUpper);
}
inline f64 op_rcp_approx_ftz(f64 a) {
  return gross([](f64 x) { return 1 / x; }, a, 6);
}
inline f64 op_rsqrt_approx_ftz(f64 a) {
  return gross([](f64 x) { return 1 / std::sqrt(x); }, a, 7);
}

// Atomics -----------------------------------------------------------------------------------------------

// clang-format off
template <class T> T atom_add(T old, T by) { return old + by; }
template <class T> T atom_inc(T old, T by) { return old >= by ? 0 : old + 1; }
template <class T> T atom_exch(T, T by) { return by; }
// clang-format on
