// The CPU inner loops, for one instruction set. Included once per set by stats_cpu.cpp, which defines
//   GRADSTAT_NAMESPACE       a namespace of its own for each set
//   GRADSTAT_VECTOR_BYTES    16, 32 or 64
//   GRADSTAT_X86_LEVEL       0 portable vectors, 2 AVX2 + FMA + F16C, 4 AVX-512 F/BW/VL/DQ
// under the matching target pragma. Hence no include guard and no #include here.
//
// Method. Float32, bfloat16 and float16 are read in blocks of kBlock values. Sums of squares and of values
// are formed in float32 over groups of four per lane, as a balanced tree so that at most three roundings
// reach any term (norm error at most 9e-8 for any input), and each group is promoted to float64. Nothing in
// this fast loop looks for NaN, Inf, overflow or underflow: each of them shows in the block's sum of squares,
// which then leaves [kSafeLow, kSafeHigh], and the block, still in cache, is read again exactly.

namespace GRADSTAT_NAMESPACE {

constexpr int kVectorBytes = GRADSTAT_VECTOR_BYTES;
constexpr int kLanes = kVectorBytes / 4;
constexpr int kStep = 4 * kLanes;  // values per iteration of the fast loop
static_assert(kBlock % kStep == 0, "a block is a whole number of steps");

typedef float VFloat __attribute__((vector_size(kVectorBytes)));
typedef int32_t VInt __attribute__((vector_size(kVectorBytes)));
typedef uint32_t VUint __attribute__((vector_size(kVectorBytes)));
typedef int64_t VLong __attribute__((vector_size(kVectorBytes)));
typedef double VDouble __attribute__((vector_size(kVectorBytes)));
typedef float VHalfFloat __attribute__((vector_size(kVectorBytes / 2)));
typedef uint16_t VShort __attribute__((vector_size(kVectorBytes / 2)));

template <class To, class From>
inline __attribute__((always_inline)) To bitcast(From from) {
  static_assert(sizeof(To) == sizeof(From), "same size");
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

template <class V>
inline __attribute__((always_inline)) V load(const void* p) {
  V v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}

template <class V>
inline __attribute__((always_inline)) void store(void* p, V v) {
  std::memcpy(p, &v, sizeof(v));
}

// The few operations for which portable vectors compile to noticeably worse code.
#if GRADSTAT_X86_LEVEL == 4
inline __attribute__((always_inline)) VFloat vmin(VFloat a, VFloat b) { return _mm512_min_ps(a, b); }
inline __attribute__((always_inline)) VFloat vmax(VFloat a, VFloat b) { return _mm512_max_ps(a, b); }
inline __attribute__((always_inline)) VDouble vmin(VDouble a, VDouble b) { return _mm512_min_pd(a, b); }
inline __attribute__((always_inline)) VDouble vmax(VDouble a, VDouble b) { return _mm512_max_pd(a, b); }
inline __attribute__((always_inline)) VFloat fma(VFloat a, VFloat b, VFloat c) {
  return _mm512_fmadd_ps(a, b, c);
}
inline __attribute__((always_inline)) VInt count_zeros(VInt count, VFloat x) {
  const __m512i one = _mm512_set1_epi32(1);
  const __m512i old = bitcast<__m512i>(count);
  const __mmask16 zero = _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_EQ_OQ);
  return bitcast<VInt>(_mm512_mask_add_epi32(old, zero, old, one));
}
inline __attribute__((always_inline)) VFloat widen_half(VShort h) {
  return _mm512_cvtph_ps(bitcast<__m256i>(h));
}
inline __attribute__((always_inline)) VShort narrow_half(VFloat x) {
  return bitcast<VShort>(_mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
#elif GRADSTAT_X86_LEVEL == 2
inline __attribute__((always_inline)) VFloat vmin(VFloat a, VFloat b) { return _mm256_min_ps(a, b); }
inline __attribute__((always_inline)) VFloat vmax(VFloat a, VFloat b) { return _mm256_max_ps(a, b); }
inline __attribute__((always_inline)) VDouble vmin(VDouble a, VDouble b) { return _mm256_min_pd(a, b); }
inline __attribute__((always_inline)) VDouble vmax(VDouble a, VDouble b) { return _mm256_max_pd(a, b); }
inline __attribute__((always_inline)) VFloat fma(VFloat a, VFloat b, VFloat c) {
  return _mm256_fmadd_ps(a, b, c);
}
inline __attribute__((always_inline)) VInt count_zeros(VInt count, VFloat x) { return count - (x == 0); }
inline __attribute__((always_inline)) VFloat widen_half(VShort h) {
  return _mm256_cvtph_ps(bitcast<__m128i>(h));
}
inline __attribute__((always_inline)) VShort narrow_half(VFloat x) {
  return bitcast<VShort>(_mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
#else
inline __attribute__((always_inline)) VFloat vmin(VFloat a, VFloat b) { return a < b ? a : b; }
inline __attribute__((always_inline)) VFloat vmax(VFloat a, VFloat b) { return a > b ? a : b; }
inline __attribute__((always_inline)) VDouble vmin(VDouble a, VDouble b) { return a < b ? a : b; }
inline __attribute__((always_inline)) VDouble vmax(VDouble a, VDouble b) { return a > b ? a : b; }
inline __attribute__((always_inline)) VFloat fma(VFloat a, VFloat b, VFloat c) { return a * b + c; }
inline __attribute__((always_inline)) VInt count_zeros(VInt count, VFloat x) { return count - (x == 0); }
// half_to_float of stat.h, lane by lane.
inline __attribute__((always_inline)) VFloat widen_half(VShort h) {
  const VUint bits = __builtin_convertvector(h, VUint);
  const VUint sign = (bits & 0x8000u) << 16;
  const VUint magnitude = (bits & 0x7fffu) << 13;
  const VUint finite = bitcast<VUint>(bitcast<VFloat>(magnitude) * 0x1p+112f);
  const VUint special = magnitude | 0x7f800000u;
  return bitcast<VFloat>(sign | (magnitude >= 0x0f800000u ? special : finite));
}
inline __attribute__((always_inline)) VShort narrow_half(VFloat x) {
  VShort out;
  for (int lane = 0; lane < kLanes; ++lane) out[lane] = float_to_half(x[lane]);
  return out;
}
#endif

// Element types: how to load kLanes of them as float32, twice as many in any order, and one of them.
struct Float32 {
  using Storage = float;
  static inline __attribute__((always_inline)) VFloat load_vector(const float* p) { return load<VFloat>(p); }
  static inline __attribute__((always_inline)) void load_two(const float* p, VFloat& a, VFloat& b) {
    a = load<VFloat>(p);
    b = load<VFloat>(p + kLanes);
  }
  static inline __attribute__((always_inline)) void store_vector(float* p, VFloat x) { store(p, x); }
  static float to_float(float x) { return x; }
  static float from_float(float x) { return x; }
};

struct BFloat16 {
  using Storage = uint16_t;
  static inline __attribute__((always_inline)) VFloat load_vector(const uint16_t* p) {
    return bitcast<VFloat>(__builtin_convertvector(load<VShort>(p), VUint) << 16);
  }
  // The even and the odd elements: no widening, only a shift and a mask.
  static inline __attribute__((always_inline)) void load_two(const uint16_t* p, VFloat& a, VFloat& b) {
    const VUint both = load<VUint>(p);
    a = bitcast<VFloat>(both << 16);
    b = bitcast<VFloat>(both & 0xffff0000u);
  }
  static inline __attribute__((always_inline)) void store_vector(uint16_t* p, VFloat x) {
    const VUint bits = bitcast<VUint>(x);
    const VUint rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;  // to nearest even
    const VUint quiet_nan = (bits >> 16) | 0x40u;
    const VUint result = (bits & 0x7fffffffu) > 0x7f800000u ? quiet_nan : rounded;
    store(p, __builtin_convertvector(result, VShort));
  }
  static float to_float(uint16_t x) { return bfloat16_to_float(x); }
  static uint16_t from_float(float x) { return float_to_bfloat16(x); }
};

struct Float16 {
  using Storage = uint16_t;
  static inline __attribute__((always_inline)) VFloat load_vector(const uint16_t* p) {
    return widen_half(load<VShort>(p));
  }
  static inline __attribute__((always_inline)) void load_two(const uint16_t* p, VFloat& a, VFloat& b) {
    a = load_vector(p);
    b = load_vector(p + kLanes);
  }
  static inline __attribute__((always_inline)) void store_vector(uint16_t* p, VFloat x) {
    store(p, narrow_half(x));
  }
  static float to_float(uint16_t x) { return half_to_float(x); }
  static uint16_t from_float(float x) { return float_to_half(x); }
};

inline __attribute__((always_inline)) VDouble promote_sum(VFloat x) {
  VHalfFloat low, high;
  std::memcpy(&low, &x, sizeof(low));
  std::memcpy(&high, reinterpret_cast<const char*>(&x) + sizeof(low), sizeof(high));
  return __builtin_convertvector(low, VDouble) + __builtin_convertvector(high, VDouble);
}

inline double horizontal_sum(VDouble x) {
  double total = 0;
  for (int lane = 0; lane < kLanes / 2; ++lane) total += x[lane];
  return total;
}

// A block read fast: valid only if sq_sum lies in the safe range, or everything was zero.
struct FastBlock {
  double sq_sum, sum;
  float min, max;
  int64_t zero_count;  // of elements: pairs of zeros when kPair
};

template <class Type, bool kPair>
inline FastBlock read_fast(const typename Type::Storage* p, int64_t count) {
  VDouble sq_sum = {}, sum = {};
  VFloat low = VFloat{} + std::numeric_limits<float>::infinity();
  VFloat high = -low;
  VInt zeros = {};
  VLong zero_pairs = {};
  for (int64_t i = 0; i < count; i += kStep) {
    VFloat x0, x1, x2, x3;
    Type::load_two(p + i, x0, x1);
    Type::load_two(p + i + 2 * kLanes, x2, x3);
    sq_sum += promote_sum(fma(x1, x1, x0 * x0) + fma(x3, x3, x2 * x2));
    sum += promote_sum((x0 + x1) + (x2 + x3));
    low = vmin(vmin(vmin(x0, x1), vmin(x2, x3)), low);
    high = vmax(vmax(vmax(x0, x1), vmax(x2, x3)), high);
    if constexpr (kPair) {
      // A pair of float32 zeros, of either sign, is a 64-bit lane without bits besides the signs.
      const auto both_zero = [](VFloat x) { return (bitcast<VLong>(x) & 0x7fffffff7fffffffll) == 0; };
      zero_pairs -= both_zero(x0) + both_zero(x1) + both_zero(x2) + both_zero(x3);
    } else {
      zeros = count_zeros(count_zeros(count_zeros(count_zeros(zeros, x0), x1), x2), x3);
    }
  }
  FastBlock block{horizontal_sum(sq_sum), horizontal_sum(sum), low[0], high[0], 0};
  for (int lane = 0; lane < kLanes; ++lane) {
    block.min = low[lane] < block.min ? low[lane] : block.min;
    block.max = high[lane] > block.max ? high[lane] : block.max;
    if constexpr (!kPair) block.zero_count += zeros[lane];
  }
  if constexpr (kPair) {
    for (int lane = 0; lane < kLanes / 2; ++lane) block.zero_count += zero_pairs[lane];
  }
  return block;
}

// Whole vectors of real values, read exactly: every product and sum in float64, NaN and Inf set aside.
template <class Type>
inline void read_exact(const typename Type::Storage* p, int64_t count, int64_t first_index, Row& row) {
  VDouble sq_low = {}, sq_high = {}, sum = {};
  VFloat low = VFloat{} + std::numeric_limits<float>::infinity();
  VFloat high = -low;
  VInt zeros = {}, nans = {}, nonfinite = {};
  for (int64_t i = 0; i < count; i += kLanes) {
    const VFloat x = Type::load_vector(p + i);
    const VInt magnitude = bitcast<VInt>(x) & 0x7fffffff;
    const VInt bad = magnitude >= 0x7f800000;
    nonfinite -= bad;
    nans -= magnitude > 0x7f800000;
    const VFloat finite = bitcast<VFloat>(bitcast<VInt>(x) & ~bad);
    zeros -= magnitude == 0;
    low = vmin(bad ? low : x, low);
    high = vmax(bad ? high : x, high);
    VHalfFloat part[2];
    std::memcpy(part, &finite, sizeof(finite));
    const VDouble a = __builtin_convertvector(part[0], VDouble);
    const VDouble b = __builtin_convertvector(part[1], VDouble);
    sum += a + b;
    sq_low += a * a;
    sq_high += b * b;
  }
  int64_t bad_count = 0;
  for (int lane = 0; lane < kLanes; ++lane) {
    row.min = merge::min(row.min, low[lane]);
    row.max = merge::max(row.max, high[lane]);
    row.zero_count += zeros[lane];
    row.nan_count += nans[lane];
    bad_count += nonfinite[lane];
    row.inf_count += nonfinite[lane] - nans[lane];
  }
  row.sum += horizontal_sum(sum);
  row.sq_sum += horizontal_sum(sq_low + sq_high);
  if (bad_count > 0) {
    int64_t i = 0;
    while ((float_to_bits(Type::to_float(p[i])) & 0x7fffffffu) < 0x7f800000u) ++i;
    row.first_nonfinite = merge::min(row.first_nonfinite, static_cast<double>(first_index + i));
  }
}

// Adds `count` values starting at value number `first` of a tensor to its row.
template <class Type, bool kPair>
void read_values(const void* data, int64_t first, int64_t count, Row& row) {
  const auto* p = static_cast<const typename Type::Storage*>(data) + first;
  constexpr int kPerElement = kPair ? 2 : 1;
  int64_t done = 0;
  while (count - done >= kStep) {
    const int64_t take = std::min<int64_t>(kBlock, (count - done) / kStep * kStep);
    const FastBlock block = read_fast<Type, kPair>(p + done, take);
    const bool all_zero = block.zero_count * kPerElement == take;
    if (all_zero || (block.sq_sum >= kSafeLow && block.sq_sum <= kSafeHigh)) {
      row.sq_sum += block.sq_sum;
      row.sum += block.sum;
      row.zero_count += block.zero_count;
      row.min = merge::min(row.min, block.min);
      row.max = merge::max(row.max, block.max);
    } else if constexpr (kPair) {
      for (int64_t i = done; i < done + take; i += 2) {
        lift_pair(row, Type::to_float(p[i]), Type::to_float(p[i + 1]), (first + i) / 2);
      }
    } else {
      read_exact<Type>(p + done, take, first + done, row);
    }
    done += take;
  }
  for (; done < count; done += kPerElement) {
    if constexpr (kPair) {
      lift_pair(row, Type::to_float(p[done]), Type::to_float(p[done + 1]), (first + done) / 2);
    } else {
      lift(row, Type::to_float(p[done]), first + done);
    }
  }
}

// Float64: the same plan with float64 lanes; the exact path is the scalar lift, which scales.
template <bool kPair>
void read_doubles(const void* data, int64_t first, int64_t count, Row& row) {
  constexpr int kDoubles = kLanes / 2;
  const auto* p = static_cast<const double*>(data) + first;
  int64_t done = 0;
  while (!kPair && count - done >= 2 * kDoubles) {
    const int64_t take = std::min<int64_t>(kBlock / 2, (count - done) / (2 * kDoubles) * (2 * kDoubles));
    VDouble sq_sum[2] = {}, sum[2] = {};
    VDouble low = VDouble{} + kInf;
    VDouble high = -low;
    VLong zeros = {};
    for (int64_t i = done; i < done + take; i += 2 * kDoubles) {
      const VDouble a = load<VDouble>(p + i);
      const VDouble b = load<VDouble>(p + i + kDoubles);
      sq_sum[0] += a * a;
      sq_sum[1] += b * b;
      sum[0] += a;
      sum[1] += b;
      low = vmin(vmin(a, b), low);
      high = vmax(vmax(a, b), high);
      zeros -= a == 0;
      zeros -= b == 0;
    }
    const double squares = horizontal_sum(sq_sum[0] + sq_sum[1]);
    int64_t zero_count = 0;
    for (int lane = 0; lane < kDoubles; ++lane) zero_count += zeros[lane];
    if (zero_count == take || (squares >= kSafeLowDouble && squares <= kSafeHighDouble)) {
      row.sq_sum += squares;
      row.sum += horizontal_sum(sum[0] + sum[1]);
      row.zero_count += zero_count;
      for (int lane = 0; lane < kDoubles; ++lane) {
        row.min = merge::min(row.min, low[lane]);
        row.max = merge::max(row.max, high[lane]);
      }
    } else {
      for (int64_t i = done; i < done + take; ++i) lift(row, p[i], first + i);
    }
    done += take;
  }
  for (; done < count; done += kPair ? 2 : 1) {
    if constexpr (kPair) {
      lift_pair(row, p[done], p[done + 1], (first + done) / 2);
    } else {
      lift(row, p[done], first + done);
    }
  }
}

template <class Type>
void scale_values(void* data, int64_t first, int64_t count, float coefficient) {
  auto* p = static_cast<typename Type::Storage*>(data) + first;
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) Type::store_vector(p + i, Type::load_vector(p + i) * coefficient);
  for (; i < count; ++i) p[i] = Type::from_float(Type::to_float(p[i]) * coefficient);
}

void read(const Entry& entry, int64_t first, int64_t count, Row& row) {
  switch (entry.dtype) {
    case DType::kFloat32:
      return entry.is_pair ? read_values<Float32, true>(entry.data, first, count, row)
                           : read_values<Float32, false>(entry.data, first, count, row);
    case DType::kBFloat16:
      return read_values<BFloat16, false>(entry.data, first, count, row);
    case DType::kFloat16:
      return entry.is_pair ? read_values<Float16, true>(entry.data, first, count, row)
                           : read_values<Float16, false>(entry.data, first, count, row);
    case DType::kFloat64:
      return entry.is_pair ? read_doubles<true>(entry.data, first, count, row)
                           : read_doubles<false>(entry.data, first, count, row);
    default:
      return read_float8(entry, first, count, row);
  }
}

void scale(const Entry& entry, int64_t first, int64_t count, double coefficient) {
  switch (entry.dtype) {
    case DType::kFloat32:
      return scale_values<Float32>(entry.data, first, count, static_cast<float>(coefficient));
    case DType::kBFloat16:
      return scale_values<BFloat16>(entry.data, first, count, static_cast<float>(coefficient));
    case DType::kFloat16:
      return scale_values<Float16>(entry.data, first, count, static_cast<float>(coefficient));
    case DType::kFloat64: {
      auto* p = static_cast<double*>(entry.data) + first;
      for (int64_t i = 0; i < count; ++i) p[i] *= coefficient;
      return;
    }
    default:
      return scale_float8(entry, first, count, static_cast<float>(coefficient));
  }
}

}  // namespace GRADSTAT_NAMESPACE
