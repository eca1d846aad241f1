"""What tensors would lose in eight and in four bits: statistics of quantization."""

from gradstat.lowprecision.stats import QUANTIZATION_FIELDS, quantization_stats
from gradstat.lowprecision.study import LowPrecision

__all__ = ["QUANTIZATION_FIELDS", "LowPrecision", "quantization_stats"]
