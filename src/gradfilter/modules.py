"""The classes that modules of a changed model take on, and give back.

Only a module's class changes: its parameters, buffers, hooks and state-dict keys stay the very same objects.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .geometry import ConvAxis, ConvGeometry
from .grid import per_axis
from .methods import Exact, Method
from .ops.activation import Gate, SlopeKind
from .ops.layer import NOBODY, Call, Followers, run_layer
from .region import region

__all__ = ["CONVOLUTIONS", "LAYERS", "NORMS", "geometry_of", "region_class"]

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
LAYERS = (*CONVOLUTIONS, nn.Linear)
NORMS = (nn.modules.batchnorm._BatchNorm,)


class RegionModule:
    """Any module of a changed model: what it calls runs as in a region."""

    gradfilter_base: type[nn.Module]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return torch.compiler.disable(self._run)(*args, **kwargs)
        return self._run(*args, **kwargs)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        with region():
            return super().forward(*args, **kwargs)  # type: ignore[misc]

    def __reduce_ex__(self, protocol: Any) -> Any:
        state = self.__getstate__() if hasattr(self, "__getstate__") else self.__dict__
        return _rebuild, (self.gradfilter_base, type(self).__mro__[1]), state


class RegionLayer(RegionModule):
    """A convolution or linear layer whose backward belongs to a method."""

    gradfilter_method: Method

    def _run(self, x: Tensor, *args: Any) -> Any:
        weight: Tensor = self.weight  # type: ignore[attr-defined]
        followers = self.__dict__.pop("gradfilter_followers", NOBODY)
        if not torch.is_grad_enabled() or not (x.requires_grad or weight.requires_grad) or args:
            return super(RegionModule, self).forward(x, *args)  # type: ignore[misc]
        return _run_layer(self, x, self.gradfilter_method, followers)  # type: ignore[arg-type]


class RegionFollower(RegionModule):
    """A norm or activation that the layer before it may have run already."""

    def _run(self, x: Tensor) -> Any:
        if self in getattr(x.grad_fn, "absorbed", ()):
            return x
        return super()._run(x)


class FixedNorm(RegionFollower):
    """A batch norm whose statistics stay as they are, whatever mode the model is put in."""

    def train(self, mode: bool = True) -> Any:
        return super().train(False)  # type: ignore[misc]


class RegionSequential(RegionModule):
    """A plain ``nn.Sequential``: what follows a layer in it reads that layer alone, so both run as one node."""

    def _run(self, x: Any) -> Any:
        if not torch.is_grad_enabled():
            return super()._run(x)
        children = list(self.children())  # type: ignore[attr-defined]
        with region():
            for i, module in enumerate(children):
                if isinstance(module, RegionLayer):
                    module.__dict__["gradfilter_followers"] = _followers(children[i + 1 : i + 3])
                x = module(x)
        return x


def _followers(modules: list[nn.Module]) -> Followers:
    norm = modules.pop(0) if modules and _is_constant_norm(modules[0]) else None
    run_norm = None if norm is None else _own_forward(norm)
    kind = _slope_kind(modules[0]) if modules else None
    if kind is None:
        return Followers(norm, run_norm)
    return Followers(norm, run_norm, modules[0], _own_forward(modules[0]), kind)


def _own_forward(module: nn.Module) -> Callable[[Tensor], Tensor]:
    base: type[nn.Module] = module.gradfilter_base  # type: ignore[assignment]
    return partial(base.forward, module)


def _is_constant_norm(module: nn.Module) -> bool:
    """A batch norm that is the same scale and shift at every step."""
    return (
        isinstance(module, FixedNorm)
        and module.running_var is not None
        and not module.training
        and not any(p.requires_grad for p in module.parameters(recurse=False))
    )


def _slope_kind(module: nn.Module) -> SlopeKind | None:
    if not isinstance(module, RegionFollower) or module._forward_hooks or module._forward_pre_hooks:
        return None
    if isinstance(module, nn.Hardtanh):  # ReLU6 is one
        return Gate(module.min_val, module.max_val)
    if isinstance(module, nn.LeakyReLU):
        return Gate(shut=module.negative_slope) if module.negative_slope >= 0 else None
    return Gate() if isinstance(module, nn.ReLU) else None


GATES = (nn.ReLU, nn.Hardtanh, nn.LeakyReLU)


def role_of(module: nn.Module) -> type[RegionModule]:
    """The role of a module that is neither a layer with a method nor a batch norm to be fixed."""
    if isinstance(module, GATES) or isinstance(module, NORMS):
        return RegionFollower
    return RegionSequential if type(module).forward is nn.Sequential.forward else RegionModule


@lru_cache(maxsize=None)
def region_class(base: type[nn.Module], role: type[RegionModule]) -> type[nn.Module]:
    """The class that a module of class ``base`` takes on in ``role``."""
    members = {"gradfilter_base": base, "__module__": base.__module__, "__doc__": base.__doc__}
    return type(base.__name__, (role, base), members)


def _rebuild(base: type[nn.Module], role: type[RegionModule]) -> nn.Module:
    cls = region_class(base, role)
    return cls.__new__(cls)


def _run_layer(module: nn.Module, x: Tensor, method: Method, followers: Followers) -> Tensor:
    if isinstance(module, nn.Linear):
        return _run_linear(module, x, method)
    spatial = len(module.kernel_size)
    if x.dim() == spatial + 1:
        return _run_layer(module, x.unsqueeze(0), method, NOBODY).squeeze(0)
    if not module.transposed and module.padding_mode != "zeros":
        with region():
            x = F.pad(x, module._reversed_padding_repeated_twice, mode=module.padding_mode)
    geometry = geometry_of(module, tuple(x.shape))
    method = Exact() if method.refuses(geometry) else method
    call = Call(_forward_of(module), geometry, method, followers=followers)
    return run_layer(x, module.weight, module.bias, call)


def _run_linear(module: nn.Linear, x: Tensor, method: Method) -> Tensor:
    """A linear layer over maps (N, H, W, C), or over tokens (N, H*W, C) whose map is known."""
    if x.dim() == 3 and method.tokens and method.tokens[0] * method.tokens[1] == x.shape[1]:
        return _run_linear(module, x.unflatten(1, method.tokens), method).flatten(1, 2)
    if x.dim() < 4:
        return F.linear(x, module.weight, module.bias)
    geometry = ConvGeometry.pointwise((x.shape[0], x.shape[-1], *x.shape[1:-1]), module.out_features)
    if method.refuses(geometry):
        return F.linear(x, module.weight, module.bias)
    return run_layer(x, module.weight, module.bias, Call(F.linear, geometry, method, x.dim() - 1))


_FUNCTIONS = {
    (1, False): F.conv1d,
    (2, False): F.conv2d,
    (3, False): F.conv3d,
    (1, True): F.conv_transpose1d,
    (2, True): F.conv_transpose2d,
    (3, True): F.conv_transpose3d,
}


def _forward_of(module: nn.Module) -> Any:
    """The functional call that ``nn.Conv*``'s own forward makes, explicit padding aside."""
    function = _FUNCTIONS[len(module.kernel_size), module.transposed]
    settings = {"stride": module.stride, "dilation": module.dilation, "groups": module.groups}
    if module.transposed:
        settings |= {"padding": module.padding, "output_padding": module.output_padding}
    else:
        settings |= {"padding": module.padding if module.padding_mode == "zeros" else 0}
    return partial(function, **settings)


def geometry_of(module: nn.Module, x_shape: tuple[int, ...]) -> ConvGeometry:
    """The geometry of a convolution module for a batched input, padded if its padding is not zeros."""
    padded = not module.transposed and module.padding_mode != "zeros"
    padding = 0 if padded else module.padding
    return _geometry(
        x_shape,
        module.out_channels,
        module.kernel_size,
        module.stride,
        padding,
        module.output_padding,
        module.dilation,
        module.groups,
        module.transposed,
    )


@lru_cache(maxsize=4096)
def _geometry(
    x_shape: tuple[int, ...],
    channels: int,
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    padding: str | int | tuple[int, ...],
    output_padding: tuple[int, ...],
    dilation: tuple[int, ...],
    groups: int,
    transposed: bool,
) -> ConvGeometry:
    ends = _padding_ends(padding, kernel, dilation)
    axes = []
    for size, k, s, d, extra, (pad, pad_end) in zip(
        x_shape[2:], kernel, stride, dilation, output_padding, ends, strict=True
    ):
        if transposed:
            made = (size - 1) * s - 2 * pad + d * (k - 1) + 1 + extra
            axes.append(ConvAxis(made, size, k, s, d, pad, pad - extra))
        else:
            made = (size + pad + pad_end - d * (k - 1) - 1) // s + 1
            axes.append(ConvAxis(size, made, k, s, d, pad, pad_end))
    outputs = [axis.size_in if transposed else axis.size_out for axis in axes]
    return ConvGeometry(x_shape, (x_shape[0], channels, *outputs), tuple(axes), groups, transposed)


def _padding_ends(
    padding: str | int | tuple[int, ...], kernel: tuple[int, ...], dilation: tuple[int, ...]
) -> list[tuple[int, int]]:
    if padding == "same":
        totals = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
        return [(t // 2, t - t // 2) for t in totals]
    sides = per_axis(0 if isinstance(padding, str) else padding, len(kernel))
    return [(p, p) for p in sides]
