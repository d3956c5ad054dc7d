"""The methods, one file each. The table below is the only list of them."""

from __future__ import annotations

from .base import Memory, Method
from .exact import Exact
from .gradient_filter import GradientFilter
from .hosvd import HOSVD
from .subspace import SubspaceIteration
from .svd import SVD

__all__ = ["HOSVD", "METHODS", "SVD", "Exact", "GradientFilter", "Memory", "Method", "SubspaceIteration"]
from .walsh import WalshHadamard

__all__ = ["METHODS", "Exact", "GradientFilter", "Memory", "Method", "WalshHadamard"]
from .int8_gradients import Int8Gradients
from .quantized import Quantized

__all__ = ["METHODS", "Exact", "GradientFilter", "Int8Gradients", "Memory", "Method", "Quantized"]

METHODS: dict[str, type[Method]] = {
    "exact": Exact,
    "filter": GradientFilter,
    "svd": SVD,
    "hosvd": HOSVD,
    "subspace": SubspaceIteration,
    "walsh": WalshHadamard,
    "int8": Int8Gradients,
    "quantized": Quantized,
}
