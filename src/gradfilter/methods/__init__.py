"""The methods, one file each. The table below is the only list of them."""

from __future__ import annotations

from .base import Memory, Method
from .bias_only import BiasOnly
from .exact import Exact
from .frozen import Frozen
from .gradient_filter import GradientFilter
from .lite_residual import LiteResidual
from .low_rank_adapter import LowRankAdapter
from .norm_only import NormOnly
from .sparse_update import SparseUpdate

__all__ = [
    "METHODS",
    "BiasOnly",
    "Exact",
    "Frozen",
    "GradientFilter",
    "LiteResidual",
    "LowRankAdapter",
    "Memory",
    "Method",
    "NormOnly",
    "SparseUpdate",
]

METHODS: dict[str, type[Method]] = {
    "exact": Exact,
    "filter": GradientFilter,
    "bias": BiasOnly,
    "norm": NormOnly,
    "frozen": Frozen,
    "sparse": SparseUpdate,
    "lora": LowRankAdapter,
    "lite": LiteResidual,
}
