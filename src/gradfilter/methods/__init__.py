"""The methods, one file each. What ``__all__`` names is public in gradfilter too."""

from __future__ import annotations

from .base import Memory, Method
from .bias_only import BiasOnly
from .exact import Exact
from .frozen import Frozen
from .gradient_filter import GradientFilter
from .hosvd import HOSVD
from .int8_gradients import Int8Gradients
from .lite_residual import LiteResidual
from .low_rank_adapter import LowRankAdapter
from .norm_only import NormOnly
from .quantized import Quantized
from .sparse_update import SparseUpdate
from .subspace import SubspaceIteration
from .svd import SVD
from .walsh import WalshHadamard

__all__ = [
    "HOSVD",
    "SVD",
    "BiasOnly",
    "Exact",
    "Frozen",
    "GradientFilter",
    "Int8Gradients",
    "LiteResidual",
    "LowRankAdapter",
    "Memory",
    "Method",
    "NormOnly",
    "Quantized",
    "SparseUpdate",
    "SubspaceIteration",
    "WalshHadamard",
]

METHODS: dict[str, type[Method]] = {
    "exact": Exact,
    "filter": GradientFilter,
    "svd": SVD,
    "hosvd": HOSVD,
    "subspace": SubspaceIteration,
    "walsh": WalshHadamard,
    "int8": Int8Gradients,
    "quantized": Quantized,
    "bias": BiasOnly,
    "norm": NormOnly,
    "frozen": Frozen,
    "sparse": SparseUpdate,
    "lora": LowRankAdapter,
    "lite": LiteResidual,
}
