// What elements would lose in a format of few bits, for one instruction set: a part of stats_cpu_kernel.h.
//
// Method. A tile is read twice while it is in the cache: for the largest magnitudes of its blocks, from which
// their scales follow, and for what rounding does to its elements. All numbers but the order of sums are those
// of gradstat/lowprecision/_reference.py, so that every product is rounded there where it is here.

// kLanes adjacent elements of a row; those beyond its end are 0.
struct Elements {
  VFloat magnitude;  // 0 for NaN and Inf; of float64 rounded to float32, at most its largest
  VDouble exact[2];  // the same before rounding
  VInt nonzero, nonfinite;
};

constexpr float kMostFloat = std::numeric_limits<float>::max();

template <class Type>
GRADSTAT_INLINE Elements elements_at(const typename Type::Storage* p, int64_t count) {
  typename Type::Storage part[kLanes];
  if (__builtin_expect(count < kLanes, 0)) {
    std::fill(std::copy(p, p + count, part), part + kLanes, typename Type::Storage{});
    p = part;
  }
  Elements elements;
  if constexpr (std::is_same_v<Type, Float64>) {
    using VHalfInt = Vector<int32_t, kVectorBytes / 2>;
    VHalfFloat magnitude[2];
    VHalfInt nonzero[2], nonfinite[2];
    for (int k = 0; k < 2; ++k) {
      const VLong bits = bitcast<VLong>(absolute(load<VDouble>(p + k * Type::kValues)));
      const VLong is_finite = bits < Type::kInfinity;
      elements.exact[k] = bitcast<VDouble>(bits & is_finite);
      magnitude[k] = __builtin_convertvector(vmin(elements.exact[k], VDouble{} + kMostFloat), VHalfFloat);
      nonzero[k] = __builtin_convertvector(elements.exact[k] > 0, VHalfInt);
      nonfinite[k] = __builtin_convertvector(~is_finite, VHalfInt);
    }
    std::memcpy(&elements.magnitude, magnitude, sizeof(VFloat));
    std::memcpy(&elements.nonzero, nonzero, sizeof(VInt));
    std::memcpy(&elements.nonfinite, nonfinite, sizeof(VInt));
  } else {
    const VInt bits = bitcast<VInt>(absolute(Type::load_vector(p)));
    const VInt is_finite = bits < Type::kInfinity;
    elements.magnitude = bitcast<VFloat>(bits & is_finite);
    widen(elements.magnitude, elements.exact[0], elements.exact[1]);
    elements.nonzero = elements.magnitude > 0;
    elements.nonfinite = ~is_finite;
  }
  return elements;
}

// A product that is rounded before anything is added to it. The compiler may not fuse the two.
GRADSTAT_INLINE VFloat product(VFloat a, VFloat b) {
  VFloat rounded = a * b;
#if defined(__x86_64__)
  asm("" : "+v"(rounded));
#elif defined(__aarch64__)
  asm("" : "+w"(rounded));
#else
  asm("" : "+m"(rounded));
#endif
  return rounded;
}

// Rounded to the nearest element, halves to even, as if there were no largest element.
GRADSTAT_INLINE VFloat rounded(VFloat x, float least, float steps) {
  const VFloat power = bitcast<VFloat>(bitcast<VInt>(x) & Narrow::kInfinity);
  const VFloat shift = vmax(power, VFloat{} + least) * steps;
  return (x + shift) - shift;
}

// What elements of blocks are multiplied by, and their scales in units of the format.
struct Scales {
  VFloat multiplier, scale;
};

class Scaling {
 public:
  // `largest`: magnitude of the tensor, if the rule needs it.
  Scaling(const QuantizationFormat& format, float largest) : format_(format) {
    if (format.rule != ScaleRule::kTwoLevel) return;
    of_tensor_ = std::min(kMostE4M3 * format.largest / largest, kMostFloat);
    unit_ = 1 / of_tensor_;
  }

  double unit() const { return unit_; }

  GRADSTAT_INLINE Scales of(VFloat amax) const {
    VFloat multiplier;
    switch (format_.rule) {
      case ScaleRule::kTwoLevel: {
        const VFloat sought = product(amax, VFloat{} + of_tensor_ * (1 / format_.largest));
        const VFloat code = vmin(rounded(sought, 0x1p-6f, 1.5f * 0x1p20f), VFloat{} + kMostE4M3);
        multiplier = vmin(1 / (code * unit_), VFloat{} + kMostFloat);
        return {bitcast<VFloat>(bitcast<VInt>(multiplier) & (code > 0)), code};
      }
      case ScaleRule::kFloat32:
        multiplier = vmin((VFloat{} + format_.largest) / amax, VFloat{} + kMostFloat);
        break;
      case ScaleRule::kFloor:
        multiplier = reciprocal((bitcast<VInt>(amax) >> 23) - (127 + format_.greatest));
        break;
      case ScaleRule::kCeil: {
        const VInt bits = bitcast<VInt>(amax / format_.largest);
        // The exponent of the next power of two that is not below; 2^-127 is subnormal.
        multiplier = reciprocal(bits <= 0x400000 ? VInt{} - 127 : ((bits + 0x7fffff) >> 23) - 127);
      }
    }
    return {multiplier, 1 / multiplier};
  }

 private:
  static constexpr float kMostE4M3 = 448;

  // 2^-exponent, of an exponent that E8M0 has.
  static GRADSTAT_INLINE VFloat reciprocal(VInt exponent) {
    return bitcast<VFloat>((127 - (exponent < -127 ? VInt{} - 127 : exponent)) << 23);
  }

  const QuantizationFormat& format_;
  float of_tensor_ = 1, unit_ = 1;
};

// Adds `height` rows of `width` elements, in whole blocks, to a row. kColumns: blocks are of one column.
template <class Type, bool kColumns>
void quantize_tile(const typename Type::Storage* p, int64_t height, int64_t width, const BlockShape& shape,
                   const QuantizationFormat& format, float largest, QuantizationRow& row) {
  // Of amax and flushes a vector for each group of columns at first, then a number for each block.
  alignas(64) float amax[BlockShape::kTileWidth], multipliers[BlockShape::kTileWidth];
  alignas(64) double scales[BlockShape::kTileWidth];
  alignas(64) int32_t flushes[BlockShape::kTileWidth];
  const int64_t side = kColumns ? kLanes : shape.block_columns;
  const int64_t groups = (width + side - 1) / side;
  const int64_t blocks = kColumns ? width : groups;
  const int64_t padded = (blocks + kLanes - 1) / kLanes * kLanes;
  const Scaling scaling(format, largest);
  const auto merge_columns = [&](auto* values, auto merge) {
    using Value = std::decay_t<decltype(*values)>;
    if (kColumns) return;
    for (int64_t block = 0; block < blocks; ++block) {
      values[block] = reduce<Value>(load<Vector<Value>>(values + block * kLanes), merge);
    }
    std::fill(values + blocks, values + padded, Value{});
  };
  std::fill(amax, amax + groups * kLanes, format.is_whole ? largest : 0.0f);
  std::fill(flushes, flushes + groups * kLanes, 0);
  for (int64_t r = 0; r < (format.is_whole ? 0 : height); ++r) {
    for (int64_t group = 0; group < groups; ++group) {
      VFloat most = load<VFloat>(amax + group * kLanes);
      for (int64_t j = group * side; j < std::min((group + 1) * side, width); j += kLanes) {
        most = vmax(most, elements_at<Type>(p + r * shape.columns + j, width - j).magnitude);
      }
      store(amax + group * kLanes, most);
    }
  }
  merge_columns(amax, kMax);
  VFloat low = VFloat{} + std::numeric_limits<float>::infinity(), high = -low;
  for (int64_t block = 0; block < padded; block += kLanes) {
    const VFloat most = load<VFloat>(amax + block);
    const Scales of = scaling.of(most);
    store(multipliers + block, of.multiplier);
    VDouble wide[2];
    widen(of.scale, wide[0], wide[1]);
    for (int k = 0; k < 2; ++k) store(scales + block + k * kLanes / 2, wide[k] * scaling.unit());
    low = vmin(low, most > 0 ? of.scale : low);
    high = vmax(high, most > 0 ? of.scale : high);
  }

  VInt nonzero = {}, flushed = {}, saturated = {}, nonfinite = {};
  VDouble squares[2] = {}, errors[2] = {};
  for (int64_t r = 0; r < height; ++r) {
    for (int64_t group = 0; group < groups; ++group) {
      VFloat multiplier = VFloat{} + multipliers[group];
      VDouble scale[2] = {VDouble{} + scales[group], VDouble{} + scales[group]};
      if (kColumns) {
        multiplier = load<VFloat>(multipliers + group * kLanes);
        for (int k = 0; k < 2; ++k) scale[k] = load<VDouble>(scales + (2 * group + k) * kLanes / 2);
      }
      VInt of_group = load<VInt>(flushes + group * kLanes);
      for (int64_t j = group * side; j < std::min((group + 1) * side, width); j += kLanes) {
        const Elements elements = elements_at<Type>(p + r * shape.columns + j, width - j);
        const VFloat code = rounded(product(elements.magnitude, multiplier), format.least, format.steps);
        const VInt is_flushed = elements.nonzero & (code == 0);
        nonzero -= elements.nonzero;
        nonfinite -= elements.nonfinite;
        saturated -= code > format.largest;
        flushed -= is_flushed;
        of_group |= is_flushed;
        VDouble stored[2];
        widen(vmin(code, VFloat{} + format.largest), stored[0], stored[1]);
        for (int k = 0; k < 2; ++k) {
          const VDouble error = fma(stored[k], scale[k], -elements.exact[k]);
          squares[k] = fma(elements.exact[k], elements.exact[k], squares[k]);
          errors[k] = fma(error, error, errors[k]);
        }
      }
      store(flushes + group * kLanes, of_group);
    }
  }
  merge_columns(flushes, [](auto a, auto b) { return a | b; });
  VInt with_flushed = {}, all_zero = {};
  for (int64_t block = 0; block < padded; block += kLanes) {
    // Rounding keeps the order: nothing of a block is kept if its largest element is not.
    const VFloat most = product(load<VFloat>(amax + block), load<VFloat>(multipliers + block));
    const VInt is_flushed = load<VInt>(flushes + block);
    with_flushed -= is_flushed;
    all_zero -= is_flushed & (rounded(most, format.least, format.steps) == 0);
  }
  const auto count = [](VInt lanes) { return static_cast<double>(reduce<int32_t>(lanes, kAdd)); };
  row.merge(
      {{count(nonzero), count(flushed), count(saturated), count(nonfinite), total(squares[0] + squares[1]),
        total(errors[0] + errors[1]), static_cast<double>(blocks), count(with_flushed), count(all_zero)},
       reduce<float>(low, kMin) * scaling.unit(),
       reduce<float>(high, kMax) * scaling.unit()});
}

// Adds tiles of a tensor to a row.
void quantize(const Entry& entry, const BlockShape& shape, const QuantizationFormat& format, float largest,
              int64_t first, int64_t last, QuantizationRow& row) {
  for (int64_t tile = first; tile < last; ++tile) {
    const int64_t strip = tile / shape.tiles_of_strip(), column = tile % shape.tiles_of_strip() * shape.width();
    const int64_t top = strip % shape.strips() * shape.block_rows;
    const int64_t height = std::min(shape.block_rows, shape.rows - top);
    const int64_t width = std::min(shape.width(), shape.columns - column);
    const int64_t at = (strip / shape.strips() * shape.rows + top) * shape.columns + column;
    with_values(entry, at, [&](auto type, auto* values) {
      using Type = decltype(type);
      const auto read = shape.block_columns == 1 ? quantize_tile<Type, true> : quantize_tile<Type, false>;
      read(values, height, width, shape, format, largest, row);
    });
  }
}
