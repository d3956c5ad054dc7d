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
    from .methods import *  # noqa: F403
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

# torch takes seconds to import: nothing here does until a name is used. Methods are not listed: what
# methods/__init__.py names is public.
_HOMES = {
    "Classification": "training.tasks",
    "FeatureCache": "cache",
    "GradFilterError": "errors",
    "Plan": "plans",
    "Segmentation": "training.tasks",
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


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("gradfilter")
    if name == "__all__":
        return __dir__()
    if name in _HOMES:
        module = import_module(f".{_HOMES[name] or name}", __name__)
        return getattr(module, name) if _HOMES[name] else module
    # only classes: whoever asks for a private name or a module of ours must not wait for torch
    if name[:1].isupper() and name in (methods := import_module(".methods", __name__)).__all__:
        return getattr(methods, name)
    raise AttributeError(f"module 'gradfilter' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*_HOMES, *import_module(".methods", __name__).__all__])
