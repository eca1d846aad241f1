// The CPU inner loops for update sums, for one instruction set: included by stats_cpu_kernel.h, in its
// namespace. Sums are formed in float32 over eight vectors and promoted to float64. A block whose sums cannot
// be trusted is read again in float64, and so are the values behind the last full vectors.

#if defined(__x86_64__)
#if GRADSTAT_X86_LEVEL >= 2
GRADSTAT_INLINE VFloat root(VFloat x) { return GRADSTAT_MM(sqrt_ps)(x); }
GRADSTAT_INLINE VDouble root(VDouble x) { return GRADSTAT_MM(sqrt_pd)(x); }
#else
GRADSTAT_INLINE VFloat root(VFloat x) { return _mm_sqrt_ps(x); }
GRADSTAT_INLINE VDouble root(VDouble x) { return _mm_sqrt_pd(x); }
#endif
#elif defined(__aarch64__)
GRADSTAT_INLINE VFloat root(VFloat x) { return vsqrtq_f32(x); }
GRADSTAT_INLINE VDouble root(VDouble x) { return vsqrtq_f64(x); }
#else
template <class V>
GRADSTAT_INLINE V root(V x) {
  for (size_t i = 0; i < sizeof(V) / sizeof(x[0]); ++i) x[i] = std::sqrt(x[i]);
  return x;
}
#endif
GRADSTAT_INLINE VFloat inverse_of(VFloat x) { return 1.0f / x; }
GRADSTAT_INLINE VDouble inverse_of(VDouble x) { return 1.0 / x; }
template <class V>
GRADSTAT_INLINE V larger(V a, V b) {
  return vmax(a, b);
}
template <class V>
GRADSTAT_INLINE V magnitude(V x) {
  return vmax(x, -x);
}

#include "update_element.h"

// Elements per block, which is trusted or read again as a whole: the operands of one block fit in L1.
constexpr int64_t kUpdateBlock = 1024;

template <class Storage>
bool is_zero(const Storage* p, int64_t count) {
  bool any = false;
  for (int64_t i = 0; i < count; ++i) {
    if constexpr (std::is_integral_v<Storage>) {
      any |= (p[i] & 0x7fff) != 0;
    } else {
      any |= p[i] != 0;
    }
  }
  return !any;
}

template <class Type, UpdateFormula kFormula>
void read_update_block(const typename Type::Storage* const* operands, int64_t count,
                       const UpdateCoefficients<double>& by, const UpdateCoefficients<float>& narrow,
                       bool fits_float, UpdateSums<double>& row) {
  using V = typename Type::V;
  constexpr int kOperands = operands_of(kFormula);
  constexpr bool kIsNarrow = sizeof(typename Type::Real) == 4;
  constexpr int kTwo = 2 * Type::kValues, kGroup = 4;
  const auto exactly = [&](int64_t from, UpdateSums<double>& sums) {
    for (int64_t i = from; i < count; ++i) {
      double x[kOperands];
      for (int k = 0; k < kOperands; ++k) x[k] = Type::to_real(operands[k][i]);
      gradstat::add_update<kFormula>(sums, x, by);
    }
  };
  if (kIsNarrow && !fits_float) return exactly(0, row);
  UpdateSums<VDouble> wide = {};
  int64_t i = 0;
  while (i + kTwo <= count) {
    UpdateSums<V> sums = {};
    const int64_t end = std::min(count - kTwo, i + (kGroup - 1) * kTwo);
    for (int k = 0; k < kOperands; ++k) {
      prefetch<kGroup * kTwo * sizeof(typename Type::Storage)>(operands[k] + i, prefetch_distance.several);
    }
    for (; i <= end; i += kTwo) {
      V x[2][kOperands];
      for (int k = 0; k < kOperands; ++k) load_two<Type>(operands[k] + i, x[0][k], x[1][k]);
      if constexpr (kIsNarrow) {
        GRADSTAT_NAMESPACE::add_update<kFormula>(sums, x[0], narrow);
        GRADSTAT_NAMESPACE::add_update<kFormula>(sums, x[1], narrow);
      } else {
        GRADSTAT_NAMESPACE::add_update<kFormula>(sums, x[0], by);
        GRADSTAT_NAMESPACE::add_update<kFormula>(sums, x[1], by);
      }
    }
    const V* from = &sums.update;
    VDouble* to = &wide.update;
    for (int k = 0; k < kUpdateSums; ++k) to[k] += Type::promote(from[k]);
  }
  UpdateSums<double> sums;
  double* to = &sums.update;
  for (int k = 0; k < kUpdateSums; ++k) to[k] = reduce<double>((&wide.update)[k], kAdd);
  if constexpr (kIsNarrow) {
    const bool no_weight = sums.weight == 0 && is_zero(operands[1], i);
    const bool no_gradient =
        sums.gradient == 0 && is_zero(operands[0], i) && (by.weight_decay == 0 || no_weight);
    const bool no_momentum =
        kFormula == UpdateFormula::kGradient || (sums.momentum == 0 && is_zero(operands[2], i));
    if (!is_safe(sums, no_gradient, no_momentum, no_weight, kFormula)) return exactly(0, row);
  }
  exactly(i, sums);
  merge_into(row, sums);
}

// Adds the elements [first, first + count) of a tensor. Operands of mixed dtypes are widened block by block.
template <class Type, bool kWidens>
void read_update(const UpdateEntry& entry, int64_t first, int64_t count, const UpdateCoefficients<double>& by,
                 UpdateSums<double>& row) {
  using Storage = typename Type::Storage;
  const UpdateCoefficients<float> narrow = narrowed(by);
  const bool fits = fits_float(by, entry.formula);
  const int operands = operands_of(entry.formula);
  Storage widened[kWidens ? kMaxOperands : 1][kWidens ? kUpdateBlock : 1];
  with_formula(entry.formula, [&](auto formula) {
    for (int64_t done = 0; done < count; done += kUpdateBlock) {
      const int64_t take = std::min(kUpdateBlock, count - done);
      const Storage* block[kMaxOperands];
      for (int k = 0; k < operands; ++k) {
        const Entry& operand = entry.operands[k];
        if constexpr (kWidens) {
          const auto address = reinterpret_cast<uint64_t>(operand.data);
          for (int64_t i = 0; i < take; ++i) {
            widened[k][i] = static_cast<Storage>(value_at(address, operand.dtype, first + done + i));
          }
          block[k] = widened[k];
        } else {
          block[k] = static_cast<const Storage*>(operand.data) + first + done;
        }
      }
      read_update_block<Type, decltype(formula)::value>(block, take, by, narrow, fits, row);
    }
  });
}

void read_update(const UpdateEntry& entry, int64_t first, int64_t count, const UpdateCoefficients<double>& by,
                 UpdateSums<double>& row) {
  bool is_mixed = false, has_double = false;
  for (int k = 0; k < operands_of(entry.formula); ++k) {
    is_mixed |= entry.operands[k].dtype != entry.operands[0].dtype;
    has_double |= entry.operands[k].dtype == DType::kFloat64;
  }
  if (has_double) {
    return is_mixed ? read_update<Float64, true>(entry, first, count, by, row)
                    : read_update<Float64, false>(entry, first, count, by, row);
  }
  const bool is_read = !is_mixed && with_values(entry.operands[0], first, [&](auto type, auto*) {
    read_update<decltype(type), false>(entry, first, count, by, row);
  });
  if (!is_read) read_update<Float32, true>(entry, first, count, by, row);
}
