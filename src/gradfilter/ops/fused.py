"""Convolution, batch norm with fixed statistics, residual sum and activation in one call.

The norm is folded into the weight. 3x3 convolutions of large maps run natively (winograd.cpp), all others in
oneDNN. Where that does not serve (not float32, not on a CPU) the same parts run one after the other, in
place. Results differ from the separate modules by rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import native
from ..calls import conv_geometry
from ..geometry import ConvGeometry
from ..grid import Grid
from ..native import winograd
from .activation import Gate, Slope, SlopeKind
from .layout import rows
from .matmul import product
from .means import remember_means
from .sources import hold, state_of

__all__ = [
    "HARDSWISH",
    "NONE",
    "RELU",
    "SILU",
    "Activation",
    "FusedConv",
    "activation_of",
    "bounded",
    "is_pointwise",
    "with_norm",
]

aten = torch.ops.aten
_ENDLESS = float("inf")
_EVERYTHING = (-_ENDLESS, _ENDLESS), (float("nan"), float("nan"))  # as limits, as bounds of a gate
_MANY_PIXELS = 1024  # of a batch: with fewer, packing a weight takes longer than is gained


class Activation(NamedTuple):
    """An activation as oneDNN names it, as torch runs it in place, and its slope."""

    name: str
    numbers: tuple[float, ...]
    run_: Callable[[Tensor], Tensor]
    slope: SlopeKind | None

    @property
    def is_gate(self) -> bool:
        return isinstance(self.slope, Gate)

    @property
    def limits(self) -> tuple[float, ...] | None:
        """Within which it keeps values, if that is all it does."""
        known = {"none": _EVERYTHING[0], "relu": (0.0, _ENDLESS), "hardtanh": self.numbers}
        return known.get(self.name)


NONE = Activation("none", (), lambda x: x, None)


def bounded(low: float, high: float) -> Activation:
    return Activation("hardtanh", (low, high), lambda x: F.hardtanh_(x, low, high), Gate(low, high))


def _leaky(slope: float) -> Activation | None:
    if slope < 0:
        return None
    return Activation("leaky_relu", (slope,), lambda x: F.leaky_relu_(x, slope), Gate(shut=slope))


RELU = Activation("relu", (), torch.relu_, Gate())
SILU = Activation("swish", (), lambda x: F.silu(x, inplace=True), Slope(aten.silu_backward))
HARDSWISH = Activation(
    "hardswish", (), lambda x: F.hardswish(x, inplace=True), Slope(aten.hardswish_backward)
)


def activation_of(module: nn.Module) -> Activation | None:
    """The activation that a module of torch's is; None if it is none that can be fused."""
    kind = getattr(module, "gradfilter_base", type(module))
    if kind is nn.ReLU:
        return RELU
    if kind in (nn.ReLU6, nn.Hardtanh):
        return bounded(module.min_val, module.max_val)  # type: ignore[arg-type]
    if kind is nn.LeakyReLU:
        return _leaky(module.negative_slope)  # type: ignore[arg-type]
    return {nn.SiLU: SILU, nn.Hardswish: HARDSWISH}.get(kind)


class _Folded(NamedTuple):
    """Weight and bias with the norm in them, and what they were made of."""

    state: list[Any]
    held: list[Tensor]
    weight: Tensor | winograd.Packed
    bias: Tensor | None


class FusedConv:
    """A convolution, a norm with fixed statistics, and an activation; the modules stay owners of all numbers.

    Frozen weights are packed once, and again when they have changed.
    """

    def __init__(self, conv: nn.Conv2d, norm: Any = None, activation: Activation = NONE) -> None:
        self.conv, self.norm, self.activation = conv, norm, activation
        self._folded: dict[bool, _Folded] = {}  # in tiles, and not: one layer may run on large and small maps
        self._norm_factors: tuple[list[Any], list[Tensor], Tensor, Tensor] | None = None
        padding: Any = conv.padding
        self.settings = (padding, conv.stride, conv.dilation, conv.groups)
        self._is_pointwise = is_pointwise(conv)
        self._is_plain_3x3 = (
            conv.kernel_size == (3, 3) and conv.stride == conv.dilation == (1, 1) and conv.groups == 1
        )

    def frozen(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        """All of it, with ``other`` added before the activation."""
        in_tiles = self._runs_in_tiles(x)
        state = [x.dtype, self.serves(x), *state_of(self.sources())]
        known = self._folded.get(in_tiles)
        if known is None or known.state != state:
            held, (weight, bias) = hold(self.sources()), self.folded()
            if in_tiles:
                known = _Folded(state, held, winograd.pack(weight, bias), None)
            else:
                packed = _packed(weight, self.settings, x) if self.serves(x) else weight
                known = _Folded(state, held, packed, bias)
            self._folded[in_tiles] = known
        return self._run(x, known.weight, known.bias, self.activation, other)

    def sources(self) -> list[Tensor | None]:
        """All that it computes with; the weight is the first."""
        return _own(self.conv, _CONV) + ([] if self.norm is None else _own(self.norm, _NORM))

    def folded(self) -> tuple[Tensor, Tensor | None]:
        """Weight and bias as they are now, with the norm in them."""
        return self._fold(self.conv.weight.detach(), self.conv.bias)

    def parts(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The contiguous weight, what its outputs are multiplied by, and what is then added."""
        weight, bias = self.conv.weight.detach().contiguous(), self.conv.bias
        if self.norm is None:
            return weight, None, None if bias is None else bias.detach().contiguous()
        return weight, *self._norm_and_bias(weight.dtype)

    def _norm_and_bias(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        scale, shift = self._known_factors(dtype)
        bias = self.conv.bias
        return scale, shift if bias is None else shift + bias.detach() * scale

    def trained(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Convolution and norm with the weight as it is now, and the activation if it is a gate."""
        return self.trained_folded(x, *self._fold(weight, bias))

    def trained_folded(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The same, of weight and bias that have the norm in them already."""
        activation = self.activation if self.activation.is_gate else NONE
        if self._trains_in_tiles(x):
            return self._run(x, winograd.pack(weight.detach(), bias), None, activation)
        return self._run(x, weight, bias, activation)

    def finishes(self, x: Tensor) -> bool:
        """Whether the convolution alone, and one pass for the rest, beat a norm folded into the weight."""
        gate = self.activation.slope
        return (
            self.norm is not None
            and (self.activation is NONE or (isinstance(gate, Gate) and gate.shut == 0))
            and x.dtype == torch.float32
            and 2 * self.conv.weight.numel() > x.numel()
            and native.fits(x)
        )

    def unfinished(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The convolution alone, for ``finish``, which has the bias too."""
        if self._trains_in_tiles(x):
            return self._run(x, winograd.pack(weight.detach(), None), None, NONE)
        return self._plain(x, weight, None).contiguous(memory_format=torch.channels_last)

    def finish(self, y: Tensor, grid: Grid) -> Tensor | None:
        """Make it the output: bias, norm, gate. Returns what is kept of the gate."""
        gate: Any = self.activation.slope
        limits, bounds = _EVERYTHING if gate is None else ((gate.low, gate.high), gate.bounds(y.dtype))
        norm = self._norm_and_bias(y.dtype)
        count, means = native.finish(y, norm, limits, grid.patches[2:], grid.coarse_shape, bounds)
        remember_means(y, grid, means)
        return None if gate is None else count

    @property
    def norm_trains(self) -> bool:
        return self.norm is not None and _has_trained(self.norm)

    @property
    def trains(self) -> bool:
        return _has_trained(self.conv) or self.norm_trains

    def factors(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """What the norm multiplies by and adds, in float32 at least; autograd goes on to scale and shift."""
        norm, wide = self.norm, torch.promote_types(dtype, torch.float32)
        scale = torch.rsqrt(norm.running_var.double() + norm.eps)
        if norm.weight is not None:
            scale = scale * norm.weight.double()
        shift = -norm.running_mean.double() * scale
        if norm.bias is not None:
            shift = shift + norm.bias.double()
        return scale.to(wide), shift.to(wide)

    def serves(self, x: Tensor) -> bool:
        """Whether oneDNN can run it."""
        return (
            x.dtype == torch.float32
            and x.device.type == "cpu"
            and x.dim() == 4
            and x.numel() > 0
            and torch.backends.mkldnn.is_available()
            and bool(torch.backends.mkldnn.enabled)
        )

    def _runs_in_tiles(self, x: Tensor) -> bool:
        """Whether winograd.cpp is the faster one."""
        conv = self.conv
        return (
            self._is_plain_3x3
            and self.serves(x)
            and conv.weight.shape == (conv.out_channels, x.shape[1], 3, 3)
            and conv.weight.dtype == torch.float32
            and conv.weight.device.type == "cpu"
            and (conv.bias is None or _alike(conv.bias, conv.weight, conv.out_channels))
            and winograd.fits(x, conv.out_channels, self.settings[0])
        )

    def _trains_in_tiles(self, x: Tensor) -> bool:
        """Whether that pays for a weight that has to be packed anew."""
        return self._runs_in_tiles(x) and x.numel() >= _MANY_PIXELS * x.shape[1]

    def geometry(self, x: Tensor) -> ConvGeometry:
        """Of the convolution of x, which has its batch."""
        return self.geometry_of(tuple(x.shape))

    def geometry_of(self, shape: tuple[int, ...]) -> ConvGeometry:
        conv: Any = self.conv
        settings = (conv.stride, conv.padding, conv.dilation, conv.groups)
        return conv_geometry(shape, conv.out_channels, conv.kernel_size, *settings)

    def _run(
        self,
        x: Tensor,
        weight: Tensor | winograd.Packed,
        bias: Tensor | None,
        activation: Activation,
        other: Tensor | None = None,
    ) -> Tensor:
        if isinstance(weight, winograd.Packed):
            return _run_in_tiles(x, weight, self.settings[0], activation, other)
        # With weights that are not packed, and small maps, torch's own call is the faster one.
        if not self.serves(x) or (weight.layout is torch.strided and 2 * weight.numel() > x.numel()):
            y = self._plain(x, weight, bias)
            return activation.run_(y if other is None else y.add_(other))
        ops = torch.ops.mkldnn
        name, numbers = activation.name, list(activation.numbers)
        made: Tensor
        if other is None:
            made = ops._convolution_pointwise(x, weight, bias, *self.settings, name, numbers, "")
            return made
        unary: tuple[Any, ...] = (
            ("relu", [], "") if name == "relu" else (None, [], None)
        )  # the only one it can run behind a sum
        settings = (weight, bias, *self.settings, "add", 1.0, *unary)
        made = ops._convolution_pointwise.binary(x, other, *settings)
        return made if name == "relu" else activation.run_(made)

    def _plain(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self._is_pointwise and self.serves(x) and x.is_contiguous(memory_format=torch.channels_last):
            return _product(x, weight, bias)
        padding, stride, dilation, groups = self.settings
        return F.conv2d(x, weight, bias, stride, padding, dilation, groups)

    def _fold(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        if self.norm is None:
            return weight, None if bias is None else bias.detach()
        return with_norm(weight, None if bias is None else bias.detach(), *self._known_factors(weight.dtype))

    def _known_factors(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Those of a norm that stays, worked out again only when it has been changed all the same."""
        sources = _own(self.norm, _NORM)
        state = [dtype, *state_of(sources)]
        known = self._norm_factors  # once: other threads may replace it
        if known is None or known[0] != state:
            with torch.no_grad():
                scale, shift = self.factors(dtype)
            known = self._norm_factors = (state, hold(sources), scale.to(dtype), shift.to(dtype))
        return known[2], known[3]


def with_norm(weight: Tensor, bias: Tensor | None, scale: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
    """Weight and bias that also multiply by the scale and add the shift, in the weight's type."""
    made = weight * scale.view(-1, 1, 1, 1)
    return made.to(weight.dtype), (shift if bias is None else shift + bias * scale).to(weight.dtype)


def _alike(bias: Tensor, weight: Tensor, outputs: int) -> bool:
    return (bias.dtype, bias.device, tuple(bias.shape)) == (weight.dtype, weight.device, (outputs,))


def _has_trained(module: nn.Module) -> bool:
    """Whether any of its own parameters is; as nn.Module.parameters would tell, only faster."""
    return any(p is not None and p.requires_grad for p in module._parameters.values())


_CONV, _NORM = ("weight", "bias"), ("running_mean", "running_var", "weight", "bias")


def _own(module: nn.Module, names: tuple[str, ...]) -> list[Tensor | None]:
    """The module's tensors; read at every step, so where they are kept: nn.Module's attributes are slow."""
    parameters, buffers = module._parameters, module._buffers
    found: list[Tensor | None] = []
    for name in names:
        if name in parameters:
            found.append(parameters[name])
        else:
            found.append(buffers[name] if name in buffers else getattr(module, name))
    return found


def is_pointwise(conv: nn.Conv2d) -> bool:
    """Whether each output pixel is a product of the same input pixel."""
    return conv.kernel_size == conv.stride == (1, 1) and conv.padding == (0, 0) and conv.groups == 1


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A pointwise convolution of channels-last maps; oneDNN's would reorder the weight first."""
    n, _, height, width = x.shape
    outputs = len(weight)
    made = product(rows(x), weight.flatten(1).t(), bias)
    # Not a view: autograd would not let that be written to.
    return made.as_strided_(
        (n, outputs, height, width), (height * width * outputs, 1, width * outputs, outputs)
    )


def _run_in_tiles(
    x: Tensor, weight: winograd.Packed, padding: tuple[int, int], activation: Activation, other: Tensor | None
) -> Tensor:
    if other is not None:
        other = other.resolve_neg().contiguous(memory_format=torch.channels_last)
    limits = activation.limits
    y = winograd.run(x, weight, padding, limits or _EVERYTHING[0], other)
    return y if limits else activation.run_(y)


def _packed(weight: Tensor, settings: tuple[Any, ...], x: Tensor) -> Tensor:
    """The weight in the layout that oneDNN wants for maps like x."""
    reorder: Any = torch._C._nn.mkldnn_reorder_conv2d_weight
    packed: Tensor = reorder(weight.to_mkldnn(), *settings, list(x.shape))
    return packed
