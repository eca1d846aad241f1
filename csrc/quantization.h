// What tensors would lose in a format of few bits: the arguments of the CPU kernel, and the row it fills.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "entry.h"

namespace gradstat {

// A dense tensor as [outer, rows, columns] in memory, in blocks of block_rows x block_columns that share a
// scale. A tile is a row of blocks, or a part of one: the kernel keeps the scales of a tile.
struct BlockShape {
  int64_t outer, rows, columns, block_rows, block_columns;

  static constexpr int64_t kTileWidth = 2048;      // at most
  static constexpr int64_t kTileElements = 16384;  // at most, in the second-level cache

  int64_t width() const { return std::min(kTileWidth, kTileElements / block_rows); }
  int64_t strips() const { return (rows + block_rows - 1) / block_rows; }
  int64_t tiles_of_strip() const { return (columns + width() - 1) / width(); }
  int64_t tiles() const { return outer * strips() * tiles_of_strip(); }

  // Whether the kernel reads such blocks: columns of them, or rows of whole vectors, in whole tiles.
  bool is_supported() const {
    constexpr int64_t kLongestVector = 16;
    const bool is_vectors = block_columns % kLongestVector == 0 && block_columns > 0;
    return outer >= 0 && rows >= 0 && columns >= 0 && block_rows > 0 && block_rows <= kTileElements / 16 &&
           (block_columns == 1 || (is_vectors && width() % block_columns == 0));
  }
};

// As gradstat.lowprecision.formats.ScaleRule, in its order.
enum class ScaleRule { kFloat32, kFloor, kCeil, kTwoLevel };

struct QuantizationFormat {
  ScaleRule rule;
  bool is_whole;       // one block, whose largest magnitude is that of the tensor
  float steps, least;  // an element's power of two, at least `least`, times `steps` is what rounds to it
  float largest;       // element
  int greatest;        // its exponent
};

// The columns of gradstat.QUANTIZATION_FIELDS; all but the last two are sums.
struct QuantizationRow {
  double sums[9] = {};
  double scale_min = std::numeric_limits<double>::infinity(), scale_max = -scale_min;

  void merge(const QuantizationRow& other) {
    for (int i = 0; i < 9; ++i) sums[i] += other.sums[i];
    scale_min = std::min(scale_min, other.scale_min);
    scale_max = std::max(scale_max, other.scale_max);
  }
};
constexpr int kQuantizationFields = sizeof(QuantizationRow) / sizeof(double);

}  // namespace gradstat
