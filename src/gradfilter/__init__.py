"""Train convolutional networks on small devices: the backward runs on patches, and little is kept for it.

>>> import torch, gradfilter as gf
>>> model = gf.models.build("tiny", classes=10)
>>> model = gf.apply_(model, gf.GradientFilter(patch=2), layers="last:4")
>>> model(torch.randn(8, 3, 32, 32)).sum().backward()
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import models as models
    from .analysis import analyze as analyze
    from .cache import FeatureCache as FeatureCache
    from .coarse import count_fallbacks as count_fallbacks
    from .costs import cost as cost
    from .costs import kept_bytes as kept_bytes
    from .costs import plan as plan
    from .data.kinds import open_data as open_data
    from .errors import GradFilterError as GradFilterError
    from .exports import export as export
    from .merging import merge_ as merge_
    from .methods import HOSVD as HOSVD
    from .methods import SVD as SVD
    from .methods import BiasOnly as BiasOnly
    from .methods import Exact as Exact
    from .methods import Frozen as Frozen
    from .methods import GradientFilter as GradientFilter
    from .methods import Int8Gradients as Int8Gradients
    from .methods import LiteResidual as LiteResidual
    from .methods import LowRankAdapter as LowRankAdapter
    from .methods import Memory as Memory
    from .methods import Method as Method
    from .methods import NormOnly as NormOnly
    from .methods import Quantized as Quantized
    from .methods import SparseUpdate as SparseUpdate
    from .methods import SubspaceIteration as SubspaceIteration
    from .methods import WalshHadamard as WalshHadamard
    from .plans import Plan as Plan
    from .program import accelerate_ as accelerate_
    from .program import acceleration as acceleration
    from .qas import scale_quantized_gradients_ as scale_quantized_gradients_
    from .ranks import choose_ranks as choose_ranks
    from .splitting import split as split
    from .state import load_method_state_ as load_method_state_
    from .state import method_state as method_state
    from .surgery import apply_ as apply_
    from .surgery import restore_ as restore_
    from .training.fit import fit as fit
    from .training.tasks import Classification as Classification
    from .training.tasks import Segmentation as Segmentation

# torch takes seconds to import: nothing here does until a name is used
_HOMES = {
    "BiasOnly": "methods",
    "Classification": "training.tasks",
    "Exact": "methods",
    "FeatureCache": "cache",
    "Frozen": "methods",
    "GradFilterError": "errors",
    "GradientFilter": "methods",
    "HOSVD": "methods",
    "Int8Gradients": "methods",
    "LiteResidual": "methods",
    "LowRankAdapter": "methods",
    "Memory": "methods",
    "Method": "methods",
    "NormOnly": "methods",
    "Plan": "plans",
    "Quantized": "methods",
    "SVD": "methods",
    "Segmentation": "training.tasks",
    "SparseUpdate": "methods",
    "SubspaceIteration": "methods",
    "WalshHadamard": "methods",
    "accelerate_": "program",
    "acceleration": "program",
    "analyze": "analysis",
    "apply_": "surgery",
    "choose_ranks": "ranks",
    "cost": "costs",
    "count_fallbacks": "coarse",
    "export": "exports",
    "fit": "training.fit",
    "kept_bytes": "costs",
    "load_method_state_": "state",
    "merge_": "merging",
    "method_state": "state",
    "models": "",
    "open_data": "data.kinds",
    "plan": "costs",
    "restore_": "surgery",
    "scale_quantized_gradients_": "qas",
    "split": "splitting",
}

__all__ = [
    "HOSVD",
    "SVD",
    "BiasOnly",
    "Classification",
    "Exact",
    "FeatureCache",
    "Frozen",
    "GradFilterError",
    "GradientFilter",
    "Int8Gradients",
    "LiteResidual",
    "LowRankAdapter",
    "Memory",
    "Method",
    "NormOnly",
    "Plan",
    "Quantized",
    "Segmentation",
    "SparseUpdate",
    "SubspaceIteration",
    "WalshHadamard",
    "accelerate_",
    "acceleration",
    "analyze",
    "apply_",
    "choose_ranks",
    "cost",
    "count_fallbacks",
    "export",
    "fit",
    "kept_bytes",
    "load_method_state_",
    "merge_",
    "method_state",
    "models",
    "open_data",
    "plan",
    "restore_",
    "scale_quantized_gradients_",
    "split",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("gradfilter")
    if name not in _HOMES:
        raise AttributeError(f"module 'gradfilter' has no attribute {name!r}")
    home = _HOMES[name]
    if not home:
        return import_module(f".{name}", __name__)
    return getattr(import_module(f".{home}", __name__), name)


def __dir__() -> list[str]:
    return __all__
