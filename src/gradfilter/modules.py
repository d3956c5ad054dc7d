"""The classes that modules of a changed model take on, and give back.

Only a module's class changes: its parameters, buffers, hooks and state-dict keys stay the very same objects.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from inspect import signature
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from torch.overrides import TorchFunctionMode

from .calls import Asked, asked
from .methods import Exact, Memory, Method
from .ops.activation import Gate
from .ops.layer import NOBODY, Call, Followers, run_layer
from .region import region

__all__ = [
    "BATCH_NORMS",
    "CONVOLUTIONS",
    "LAYERS",
    "NORMS",
    "AdaptedLayer",
    "FixedNorm",
    "RegionLayer",
    "RegionModule",
    "region_class",
    "role_of",
]

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
LAYERS = (*CONVOLUTIONS, nn.Linear)
BATCH_NORMS = (nn.modules.batchnorm._NormBase,)  # all that may keep statistics
NORMS = (*BATCH_NORMS, nn.GroupNorm, nn.LayerNorm)


class RegionModule:
    """Any module of a changed model: what it calls runs as in a region."""

    gradfilter_base: type[nn.Module]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        if torch.compiler.is_compiling():
            return _run_uncompiled(self, *args, **kwargs)
        return self._run(*args, **kwargs)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        with region():
            return super().forward(*args, **kwargs)  # type: ignore[misc]

    def __reduce_ex__(self, protocol: Any) -> Any:
        cls, roles = type(self), []
        while issubclass(cls, RegionModule):
            roles.append(cls.__mro__[1])
            cls = cls.gradfilter_base  # type: ignore[assignment]
        return _rebuild, (cls, *reversed(roles)), self.__getstate__()


class RegionLayer(RegionModule):
    """A convolution or linear layer whose backward belongs to a method."""

    gradfilter_method: Method
    gradfilter_memory: Memory

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        with _LayerCalls(self.gradfilter_method, self.gradfilter_memory):
            return super()._run(*args, **kwargs)

    def run_with(self, x: Tensor, followers: Followers) -> tuple[Tensor, bool]:
        """Run the layer, and as one node with it its followers if the second result says so."""
        with _LayerCalls(self.gradfilter_method, self.gradfilter_memory, followers) as calls:
            return super()._run(x), calls.ran_followers


class _LayerCalls(TorchFunctionMode):
    """Inside a layer's forward: torch's convolution or linear function runs with the layer's method."""

    def __init__(self, method: Method, memory: Memory, followers: Followers = NOBODY) -> None:
        super().__init__()
        self.method, self.memory = method, memory
        self.followers, self.ran_followers = followers, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with (
            torch._C.DisableTorchFunction()
        ):  # from here on the region's functions are plain ones, and faster
            call = asked(func, args, kwargs, self.method.tokens)
            if call is not None and any(
                t is not None and t.requires_grad for t in (call.x, call.weight, call.bias)
            ):
                method = Exact() if self.method.refuses(call.geometry) else self.method
                if not (func is F.linear and isinstance(method, Exact)):  # torch's own keeps as little
                    return self._run_layer(call, method)
        return func(*args, **kwargs)

    def _run_layer(self, call: Asked, method: Method) -> Tensor:
        followers = NOBODY if call.undo else self.followers
        self.ran_followers = followers is not NOBODY
        settings = Call(call.run, call.geometry, method, self.memory, call.channel, followers)
        y = run_layer(call.x, call.weight, call.bias, settings)
        return call.undo(y) if call.undo else y


class AdaptedLayer(RegionLayer):
    """A layer whose method has parameters of its own, which count without gradients too."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return _run_uncompiled(self, *args, **kwargs)
        return self._run(*args, **kwargs)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        with region(), _AdaptedCalls(self):
            return super(RegionModule, self).forward(*args, **kwargs)  # type: ignore[misc]


class _AdaptedCalls(TorchFunctionMode):
    """Inside an adapted layer's forward: the layer's method has the last word on the output."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, method = kwargs or {}, self.layer.gradfilter_method
        with torch._C.DisableTorchFunction():
            call = asked(func, args, kwargs, method.tokens)
            y = None if call is None else self._plain_output(call, method)
        if call is None or y is None:
            return func(*args, **kwargs)
        y = method.adapt(y, call.x, call.run, self.layer)
        return call.undo(y) if call.undo else y

    def _plain_output(self, call: Asked, method: Method) -> Tensor:
        tensors = (call.x, call.weight, call.bias)
        if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
            settings = Call(call.run, call.geometry, method, self.layer.gradfilter_memory, call.channel)
            return run_layer(*tensors, settings)
        return call.run(*tensors)


class FixedNorm(RegionModule):
    """A norm whose statistics stay as they are, whatever mode the model is put in."""

    def train(self, mode: bool = True) -> Any:
        super().train(mode)  # type: ignore[misc]
        self.__dict__["gradfilter_record"]["training"] = mode  # what restore_ will give back
        self.training = False
        return self


class RegionSequential(RegionModule):
    """A plain ``nn.Sequential``: what follows a layer reads that layer alone, so both run as one node."""

    def _run(self, x: Any) -> Any:
        modules, done = list(self._modules.values()), 0  # type: ignore[attr-defined]
        with region():
            while done < len(modules):
                layer, done = modules[done], done + 1
                followers = _followers(layer, modules[done : done + 2])
                if followers is NOBODY:
                    x = layer(x)
                else:
                    x, ran = layer.run_with(x, followers)
                    done += ran * sum(f is not None for f in (followers.norm, followers.slope))
        return x


def _followers(layer: nn.Module, modules: list[nn.Module]) -> Followers:
    """The norm and the activation that can be run with the layer; where there are hooks, none."""
    if not (isinstance(layer, RegionLayer) and _can_join(layer, CONVOLUTIONS)):
        return NOBODY
    if isinstance(layer, AdaptedLayer):  # what is added to its output comes before them
        return NOBODY
    norm = modules.pop(0) if modules and _is_constant_norm(modules[0]) else None
    run_norm = None if norm is None else _own_forward(norm)
    gate = _gate(modules[0]) if modules else None
    if gate is None:
        return NOBODY if norm is None else Followers(norm, run_norm)
    return Followers(norm, run_norm, _own_forward(modules[0]), gate)


def _can_join(module: nn.Module, classes: tuple[type[nn.Module], ...]) -> bool:
    """Whether a module is just what one of torch's classes makes, and nobody looks on."""
    return (
        getattr(module, "gradfilter_base", None) in classes
        and not (module._forward_hooks or module._forward_pre_hooks)
        and not (module._backward_hooks or module._backward_pre_hooks)
        and not _has_any_global_hook()
    )


def _own_forward(module: nn.Module) -> Callable[[Tensor], Tensor]:
    base: type[nn.Module] = module.gradfilter_base  # type: ignore[assignment]
    return partial(base.forward, module)


def _is_constant_norm(module: nn.Module) -> bool:
    """A batch norm that is the same scale and shift at every step."""
    return (
        isinstance(module, FixedNorm)
        and _can_join(module, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d))
        and module.running_var is not None
        and not module.training
        and not any(p is not None and p.requires_grad for p in module._parameters.values())
    )


def _gate(module: nn.Module) -> Gate | None:
    if not _can_join(module, (nn.ReLU, nn.ReLU6, nn.Hardtanh, nn.LeakyReLU)):
        return None
    if isinstance(module, nn.Hardtanh):  # ReLU6 is one
        return Gate(module.min_val, module.max_val)
    if isinstance(module, nn.LeakyReLU):
        return Gate(shut=module.negative_slope) if module.negative_slope >= 0 else None
    return Gate()


def role_of(module: nn.Module) -> type[RegionModule]:
    """The role of a module that is neither a layer with a method nor a batch norm to be fixed."""
    return RegionSequential if type(module).forward is nn.Sequential.forward else RegionModule


@cache
def region_class(base: Any, role: Any) -> type[nn.Module]:
    """The class that a module of class ``base`` takes on in ``role``."""
    members = {"gradfilter_base": base, "__module__": base.__module__, "__doc__": base.__doc__}
    forward = _with_signature(role.forward, base.forward)
    return type(base.__name__, (role, base), {**members, "forward": forward})


def _with_signature(forward: Any, like: Any) -> Any:
    """The same function with the signature of another: trainers read there which columns of data to give."""
    parts = (forward.__code__, forward.__globals__, forward.__name__, forward.__defaults__)
    copied = FunctionType(*parts, forward.__closure__)
    with suppress(TypeError, ValueError):  # a forward that is written in C has none
        copied.__signature__ = signature(like)  # type: ignore[attr-defined]
    return copied


def _rebuild(cls: Any, *roles: Any) -> nn.Module:
    for role in roles:
        cls = region_class(cls, role)
    made: nn.Module = cls.__new__(cls)
    return made


def _run_uncompiled(module: RegionModule, *args: Any, **kwargs: Any) -> Any:
    """torch.compile leaves a region as it is: what that keeps depends on the graph that autograd builds."""
    return torch.compiler.disable(module._run)(*args, **kwargs)
