// What translated kernels (translate.py) are compiled with: registers, the instructions that only compute, and
// the thread, whose other functions are in device.cpp.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

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
using f16 = _Float16;
using f32 = float;
using f64 = double;
using pred = bool;

template <class T>
T from_bits(u64 bits) {
  T to;
  memcpy(&to, &bits, sizeof(to));
  return to;
}
template <class T>
u64 bits_of(T from) {
  u64 bits = 0;
  memcpy(&bits, &from, sizeof(from));
  return bits;
}
// A result of arithmetic, of which there is only one NaN. In float64 a device keeps some payload; but where
// Triton has all lanes store the sum that they share, payloads would depend on the lane.
template <class T>
T made(T x) {
  return x != x ? from_bits<T>(~u64{0} >> (65 - 8 * sizeof(T))) : x;
}

struct bf16 {
  u16 bits;
  bf16() = default;
  explicit bf16(f32 x) {  // to nearest, ties to even
    const u32 wide = bits_of(x);
    bits = x != x ? 0x7fff : (wide + 0x7fff + (wide >> 16 & 1)) >> 16;
  }
  operator f32() const { return from_bits<f32>(u64{bits} << 16); }
};
struct e4m3 {
  u8 bits;
  operator f16() const {  // of which it is the upper half, but for the range of exponents
    const f32 size = (bits & 0x7f) == 0x7f ? f32{NAN} : from_bits<f16>((bits & 0x7f) << 7) * f32{0x1p8};
    return static_cast<f16>(bits & 0x80 ? -size : size);
  }
};
template <class T>
struct Pair {
  T low, high;
};
using e4m3x2 = Pair<e4m3>;
using f16x2 = Pair<f16>;
using bf16x2 = Pair<bf16>;
using f32x2 = Pair<f32>;

// clang-format off
// Registers of 1 to 64 bits, with members named as types.
#define OF_16 ::u8 u8, b8; ::s8 s8; ::u16 u16, b16; ::s16 s16;
#define OF_32 OF_16 ::u32 u32, b32; ::s32 s32; ::f32 f32;
union R1 { ::pred pred; };
union R16 { OF_16 ::f16 f16; ::bf16 bf16; ::e4m3x2 e4m3x2; };
union R32 { OF_32 ::f16x2 f16x2; ::bf16x2 bf16x2; };
union R64 { OF_32 ::u64 u64, b64; ::s64 s64; ::f64 f64; ::f32x2 f32x2; };
// clang-format on

enum Space { kGeneric, kGlobal, kShared, kParameter };
constexpr u64 kSharedWindow = u64{1} << 60;  // generic addresses of shared memory
enum Meeting {
  bar_warp_sync,
  shfl_sync_bfly,
  shfl_sync_down,
  vote_sync_any,
  redux_sync_add,
  redux_sync_min,
};

struct Thread {
  u32 thread, block, threads, blocks;
  bool is_inside;  // whether the lane that the last shuffle read is in range
  R64 unused;      // the target _

  // Where `line` is that of the instruction in the PTX. Memory is checked before it is returned.
  const void* read(Space space, u64 address, u32 bytes, u32 line);
  void write(const void* values, Space space, u64 address, u32 bytes, u32 line);
  void* atomic(Space space, u64 address, u32 bytes, u32 line, bool acquires, bool releases);
  void barrier(u32 line);
  u32 meet(Meeting what, u32 mask, u32 value, u32 b, u32 c, u32 line);  // of the lanes in `mask`
  [[noreturn]] void fail(const char* what, u32 line);
};

// A number in [-1, 1] that depends on `bits` and the launch's seed only: a device errs the same way every time.
double random_error(u64 bits);
[[noreturn]] void division_by_zero();

// clang-format off
// Arithmetic --------------------------------------------------------------------------------------------

#define UNARY(name, result) template <class T> T op_##name(T a) { return result; }
#define BINARY(name, result)                                    \
  template <class T> T op_##name(T a, T b) { return result; }   \
  template <class T> Pair<T> op_##name(Pair<T> a, Pair<T> b) {  \
    return {op_##name(a.low, b.low), op_##name(a.high, b.high)}; \
  }
BINARY(add, made(static_cast<T>(a + b)))
BINARY(add_rn, op_add(a, b))
BINARY(sub, made(static_cast<T>(a - b)))
BINARY(mul, made(static_cast<T>(a * b)))
BINARY(mul_rn, op_mul(a, b))
BINARY(mul_lo, static_cast<T>(a * b))
BINARY(mul_hi, s64{a} * b >> 32)
BINARY(div_rn, made(a / b))
BINARY(div, b == 0 ? (division_by_zero(), a) : static_cast<T>(a / b))
BINARY(rem, b == 0 ? (division_by_zero(), a) : static_cast<T>(a % b))
BINARY(and, a & b)
BINARY(or, a | b)
BINARY(xor, a ^ b)
UNARY(abs, std::fabs(a))
UNARY(neg, -a)
UNARY(not, ~a)
inline pred op_not(pred a) { return !a; }
UNARY(rcp_rn, made(1 / a))
UNARY(sqrt_rn, made(std::sqrt(a)))
template <class T> T op_fma_rn(T a, T b, T c) { return made(std::fma(a, b, c)); }
inline f32x2 op_fma_rn(f32x2 a, f32x2 b, f32x2 c) {
  return {op_fma_rn(a.low, b.low, c.low), op_fma_rn(a.high, b.high, c.high)};
}
template <class T> T op_mad_lo(T a, T b, T c) { return static_cast<T>(a * b + c); }
template <class W, class T> W op_mul_wide(T a, T b) { return W{a} * b; }
template <class W, class T> W op_mad_wide(T a, T b, W c) { return W{a} * b + c; }
template <class T> T op_selp(T a, T b, pred p) { return p ? a : b; }
template <class T> T op_shl(T a, u32 n) { return n >= 8 * sizeof(T) ? 0 : static_cast<T>(a << n); }
template <class T> T op_shr(T a, u32 n) {
  constexpr u32 kBits = 8 * sizeof(T);
  return n < kBits ? a >> n : a < 0 ? -1 : 0;
}

// A number rather than NaN, and -0 below 0.
template <class T> bool is_negative(T a) { return std::signbit(static_cast<f64>(a)); }
BINARY(min, a != a ? made(b) : b != b || a < b || (a == b && is_negative(a)) ? a : b)
BINARY(max, a != a ? made(b) : b != b || b < a || (a == b && is_negative(b)) ? a : b)
template <class T> T op_min(T a, T b, T c) { return op_min(op_min(a, b), c); }
template <class T> T op_max(T a, T b, T c) { return op_max(op_max(a, b), c); }

#define COMPARISON(name, sign)                                                                        \
  template <class T> pred op_setp_##name(T a, T b) { return a == a && b == b && a sign b; }      \
  template <class T> pred op_setp_##name##u(T a, T b) { return !(a == a && b == b) || a sign b; }
COMPARISON(eq, ==)
COMPARISON(ne, !=)
COMPARISON(lt, <)
COMPARISON(le, <=)
COMPARISON(gt, >)
COMPARISON(ge, >=)
template <class T> pred op_setp_num(T a, T b) { return a == a && b == b; }
template <class T> pred op_setp_nan(T a, T b) { return !op_setp_num(a, b); }
template <class To> To op_set_eq(f16x2 a, f16x2 b) {
  return (a.low == b.low ? 0xffff : 0) | (a.high == b.high ? 0xffff0000 : 0);
}

// Conversions -------------------------------------------------------------------------------------------

template <class To, class From> To op_cvt(From x) { return made(static_cast<To>(x)); }
template <class To, class From> To op_cvt_rn(From x) { return op_cvt<To>(x); }
template <class To> To op_cvt_rn(f32 high, f32 low) {
  using Half = decltype(To::low);
  return {op_cvt<Half>(low), op_cvt<Half>(high)};
}
template <class To> To op_cvt_rn(e4m3x2 x) { return {made(f16{x.low}), made(f16{x.high})}; }
template <class To> To op_cvt_rzi(f64 x) {
  if (x != x || x < -0x1p63) return std::numeric_limits<To>::min();
  return x >= 0x1p63 ? std::numeric_limits<To>::max() : static_cast<To>(x);
}

// Bits --------------------------------------------------------------------------------------------------

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

// Approximations ----------------------------------------------------------------------------------------

template <class T> T flushed(T x) { return std::fabs(x) < std::numeric_limits<T>::min() ? std::copysign(T{0}, x) : x; }

// Of float64 only the upper 32 bits are read and written.
constexpr u64 kUpper = ~u64{0} << 32;
inline f64 upper(f64 a) { return flushed(from_bits<f64>(bits_of(a) & kUpper)); }
inline f64 gross(f64 exact, u64 salt) {
  if (exact == 0 || !std::isfinite(exact)) return exact;
  return upper(flushed(exact) * (1 + 0x1p-20 * random_error(bits_of(exact) ^ salt)));
}
inline f64 op_rsqrt_approx_ftz(f64 a) { return gross(1 / std::sqrt(upper(a)), 4); }

template <class T> T atom_add(T old, T by) { return old + by; }
template <class T> T atom_inc(T old, T by) { return old >= by ? 0 : old + 1; }
// clang-format on
