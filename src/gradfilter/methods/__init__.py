"""The methods, one file each. The table below is the only list of them."""

from __future__ import annotations

from .base import Memory, Method
from .exact import Exact
from .gradient_filter import GradientFilter
from .int8_gradients import Int8Gradients
from .quantized import Quantized

__all__ = ["METHODS", "Exact", "GradientFilter", "Int8Gradients", "Memory", "Method", "Quantized"]

METHODS: dict[str, type[Method]] = {
    "exact": Exact,
    "filter": GradientFilter,
    "int8": Int8Gradients,
    "quantized": Quantized,
}
