"""Operators as networks write them, from a seed: which one, on which maps, behind which filtered layers.

Every case is valid by construction. A failing case prints its seed; make_case(seed) is that case.

>>> repr(make_case(7)) == repr(make_case(7))
True
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import gcd, prod
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = [
    "BEFORE",
    "FAMILIES",
    "Maps",
    "Net",
    "Operator",
    "OperatorCase",
    "as_it_is",
    "averaged",
    "make_case",
    "make_operator",
]

Patches = tuple[int, ...]
Run = Callable[..., Tensor]
Laid = Callable[[Patches], "Patches | None"]

_CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
_LARGEST_MAP = {1: 13, 2: 10, 3: 5}


# --- where an operator averages the gradient that arrives: patches of its output, from those of its input


def on_the_grid(patches: Patches) -> Patches:
    """On the patches of its input, which has the same shape."""
    return patches


def as_it_is(patches: Patches) -> None:
    """Nowhere: linear operators, and those that the library does not know."""


def averaged(x: Tensor, patches: Patches) -> Tensor:
    """Every value replaced by the mean over its patch: one dense averaging matrix per dimension.

    >>> averaged(torch.tensor([1.0, 3.0, 8.0]), (2,))
    tensor([2., 2., 8.])
    """
    for d, patch in enumerate(patches):
        owner = torch.arange(x.shape[d]) // patch
        together = (owner[:, None] == owner).to(x.dtype)
        matrix = together / together.sum(1, keepdim=True)
        x = torch.tensordot(matrix, x, dims=([1], [d])).movedim(0, d)
    return x.contiguous()  # torch's batch norm reads odd strides wrongly on maps of one row


def common(shape: Sequence[int], a: Patches, b: Patches) -> Patches:
    """The coarsest patches that both refine to; one patch over a whole dimension refines to any.

    >>> common((1, 6, 5), (1, 4, 5), (1, 6, 2))
    (1, 4, 2)
    """
    axes = zip(shape, a, b, strict=True)
    return tuple(r if q >= n else q if r >= n else gcd(q, r) for n, q, r in axes)


# --- operators


@dataclass(frozen=True)
class Operator:
    """``run(owner, *maps)``, where the owner is a module that has what ``holds()`` makes as attributes.

    lands: on which patches of its output the gradient that arrives is averaged.
    known: the library runs it on the grid, so no gradient becomes dense because of it.
    coarse: the gradient it hands on is constant on patches, whatever arrives.
    alone: of several maps, only the first one's patches matter to it.
    """

    label: str
    run: Run
    holds: Callable[[], Mapping[str, nn.Module | nn.Parameter]] = dict
    lands: Laid = on_the_grid
    known: bool = True
    coarse: bool = True
    norm: str = "fixed"
    inputs: int = 1
    alone: bool = False
    makes_maps: bool = True
    gradients: Callable[..., list[Tensor]] | None = None  # where exact autograd is not the definition

    def __repr__(self) -> str:
        return f"<{self.label}>"


def module(make: Callable[[], nn.Module], **how: Any) -> Operator:
    """An operator written as a module."""
    return Operator(f"{make()}", lambda owner, x: owner.inner(x), lambda: {"inner": make()}, **how)


def function(label: str, run: Callable[[Tensor], Tensor], **how: Any) -> Operator:
    """An operator written as a function or method."""
    return Operator(label, lambda owner, x: run(x), **how)


linear = partial(function, lands=as_it_is, coarse=False)
unknown = partial(function, lands=as_it_is, coarse=False, known=False)


@dataclass(frozen=True)
class Maps:
    """What an operator will be given: (batch, channels, *size) on patches."""

    batch: int
    channels: int
    size: tuple[int, ...]

    @property
    def axes(self) -> int:
        return len(self.size)

    @property
    def spatial(self) -> tuple[int, ...]:
        return tuple(range(2, 2 + self.axes))

    def per_channel(self) -> tuple[int, ...]:
        return (1, self.channels, *[1] * self.axes)


def _parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape))


# --- activations


def _relu(rng: Random, maps: Maps) -> Operator:
    b = rng.random() < 0.5
    return rng.choice(
        [
            module(lambda: nn.ReLU(inplace=b)),
            function(f"F.relu(x, inplace={b})", lambda x: F.relu(x, inplace=b)),
            function(f"F.relu(x, {b})", lambda x: F.relu(x, b)),
            function("F.relu(input=x)", lambda x: F.relu(input=x)),
            function("torch.relu(x)", torch.relu),
            function("x.relu()", lambda x: x.relu()),
            function("torch.relu_(x)", torch.relu_),
            function("x.relu_()", lambda x: x.relu_()),
        ]
    )


def _relu6(rng: Random, maps: Maps) -> Operator:
    b = rng.random() < 0.5
    return rng.choice(
        [
            module(lambda: nn.ReLU6(inplace=b)),
            function(f"F.relu6(x, {b})", lambda x: F.relu6(x, b)),
            function(f"F.relu6(x, inplace={b})", lambda x: F.relu6(x, inplace=b)),
        ]
    )


def _leaky_relu(rng: Random, maps: Maps) -> Operator:
    b, slope = rng.random() < 0.5, rng.choice([0.0, 0.01, 0.3])
    return rng.choice(
        [
            module(lambda: nn.LeakyReLU(slope, inplace=b)),
            function(f"F.leaky_relu(x, {slope}, {b})", lambda x: F.leaky_relu(x, slope, b)),
            function(
                f"F.leaky_relu(x, negative_slope={slope})", lambda x: F.leaky_relu(x, negative_slope=slope)
            ),
        ]
    )


def _hardtanh(rng: Random, maps: Maps) -> Operator:
    b, low, high = rng.random() < 0.5, rng.choice([-1.0, -0.5, 0.2]), rng.choice([0.5, 1.0, 3.0])
    return rng.choice(
        [
            module(lambda: nn.Hardtanh(low, high, inplace=b)),
            function(f"F.hardtanh(x, {low}, {high}, {b})", lambda x: F.hardtanh(x, low, high, b)),
            function(
                f"F.hardtanh(x, max_val={high}, min_val={low})",
                lambda x: F.hardtanh(x, max_val=high, min_val=low),
            ),
            function("F.hardtanh(x)", F.hardtanh),
        ]
    )


def _prelu(rng: Random, maps: Maps) -> Operator:
    slopes = rng.choice([1, maps.channels])
    return rng.choice(
        [
            module(lambda: nn.PReLU(slopes)),
            Operator(
                f"F.prelu(x, weight of {slopes})",
                lambda owner, x: F.prelu(x, owner.weight),
                lambda: {"weight": _parameter(slopes)},
            ),
        ]
    )


def _elu(rng: Random, maps: Maps) -> Operator:
    b, alpha = rng.random() < 0.5, rng.choice([0.5, 1.0, 2.0])
    return rng.choice(
        [
            module(lambda: nn.ELU(alpha, inplace=b)),
            function(f"F.elu(x, {alpha}, {b})", lambda x: F.elu(x, alpha, b)),
            function(f"F.elu(x, alpha={alpha})", lambda x: F.elu(x, alpha=alpha)),
        ]
    )


def _smooth(make: type[nn.Module], name: str) -> Callable[[Random, Maps], Operator]:
    def draw(rng: Random, maps: Maps) -> Operator:
        b, run = rng.random() < 0.5, getattr(F, name)
        return rng.choice(
            [
                module(lambda: make(inplace=b)),
                function(f"F.{name}(x, inplace={b})", lambda x: run(x, inplace=b)),
                function(f"F.{name}(x)", run),
            ]
        )

    return draw


def _gelu(rng: Random, maps: Maps) -> Operator:
    how = rng.choice(["none", "tanh"])
    return rng.choice(
        [
            module(lambda: nn.GELU(how)),
            function(f"F.gelu(x, approximate={how!r})", lambda x: F.gelu(x, approximate=how)),
            function("F.gelu(x)", F.gelu),
        ]
    )


def _saturating(make: type[nn.Module], name: str) -> Callable[[Random, Maps], Operator]:
    def draw(rng: Random, maps: Maps) -> Operator:
        return rng.choice(
            [
                module(make),
                function(f"F.{name}(x)", getattr(F, name)),
                function(f"torch.{name}(x)", getattr(torch, name)),
                function(f"x.{name}()", getattr(Tensor, name)),
            ]
        )

    return draw


def _dropout(rng: Random, maps: Maps) -> Operator:
    p, b = rng.choice([0.0, 0.2, 0.5, 1.0]), rng.random() < 0.3
    whole = {1: nn.Dropout1d, 2: nn.Dropout2d, 3: nn.Dropout3d}[maps.axes]
    exact = {"lands": as_it_is, "coarse": False} if p in (0.0, 1.0) or maps.batch == 0 else {}
    return rng.choice(
        [
            module(lambda: nn.Dropout(p, inplace=b), **exact),
            function(f"F.dropout(x, {p}, True, {b})", lambda x: F.dropout(x, p, True, b), **exact),
            function(f"F.dropout(x, p={p})", lambda x: F.dropout(x, p=p), **exact),
            linear("F.dropout(x, 0.5, training=False)", lambda x: F.dropout(x, 0.5, training=False)),
            module(lambda: whole(p), lands=as_it_is, coarse=False),
        ]
    )


# --- norms


def _fixed_batch_norm(rng: Random, maps: Maps) -> Operator:
    kind, c = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}[maps.axes], maps.channels
    policy, affine = rng.choice(["fixed", "affine"]), rng.random() < 0.8

    def direct(owner: Any, x: Tensor) -> Tensor:
        known = owner.statistics
        return F.batch_norm(x, known.running_mean, known.running_var, owner.weight, owner.bias, eps=0.1)

    return rng.choice(
        [
            module(lambda: kind(c, affine=affine), norm=policy),
            module(lambda: kind(c, affine=affine, eps=0.1), norm=policy),
            Operator(
                "F.batch_norm(x, mean, var, weight, bias)",
                direct,
                lambda: {
                    "statistics": kind(c, affine=False),
                    "weight": _parameter(c),
                    "bias": _parameter(c),
                },
            ),
        ]
    )


def _batch_norm(rng: Random, maps: Maps) -> Operator:
    kind, c = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}[maps.axes], maps.channels
    momentum, affine = rng.choice([None, 0.1, 0.7]), rng.random() < 0.8
    return rng.choice(
        [
            module(lambda: kind(c, affine=affine, momentum=momentum), norm="batch"),
            module(
                lambda: kind(c, affine=affine, track_running_stats=False), norm=rng.choice(["fixed", "batch"])
            ),
            Operator(
                "F.batch_norm(x, None, None, weight, bias, training=True)",
                lambda owner, x: F.batch_norm(x, None, None, owner.weight, owner.bias, training=True),
                lambda: {"weight": _parameter(c), "bias": _parameter(c)},
            ),
            function("F.batch_norm(x, None, None, training=True)", _normalised),
        ]
    )


def _normalised(x: Tensor) -> Tensor:
    return F.batch_norm(x, None, None, training=True)


def _group_norm(rng: Random, maps: Maps) -> Operator:
    c, affine = maps.channels, rng.random() < 0.7
    groups = rng.choice([g for g in range(1, c + 1) if c % g == 0])
    groups = 1 if maps.batch * prod(maps.size) == 1 else groups  # torch asks for two values at least
    return rng.choice(
        [
            module(lambda: nn.GroupNorm(groups, c, affine=affine)),
            Operator(
                f"F.group_norm(x, {groups}, weight, bias, eps=0.1)",
                lambda owner, x: F.group_norm(x, groups, owner.weight, owner.bias, eps=0.1),
                lambda: {"weight": _parameter(c), "bias": _parameter(c)},
            ),
            function(f"F.group_norm(x, {groups})", lambda x: F.group_norm(x, groups)),
        ]
    )


def _layer_norm(rng: Random, maps: Maps) -> Operator:
    """Over channels, as ConvNeXt does."""
    c, affine, back = maps.channels, rng.random() < 0.7, rng.random() < 0.7
    last = (0, *maps.spatial, 1)
    first = (0, maps.axes + 1, *range(1, maps.axes + 1))

    def run(owner: Any, x: Tensor) -> Tensor:
        y = owner.inner(x.permute(last))
        return y.permute(first) if back else y

    return Operator(
        f"LayerNorm({c}, {affine=}) over channels, {back=}",
        run,
        lambda: {"inner": nn.LayerNorm(c, eps=1e-3, elementwise_affine=affine)},
        lands=on_the_grid if back else lambda patches: tuple(patches[d] for d in last),
        makes_maps=back,
        gradients=partial(layer_norm_on_patches, order=None if back else first),
    )


def layer_norm_on_patches(
    x: Tensor,
    g: Tensor,
    patches: Patches,
    parameters: Mapping[str, Tensor],
    asked: Sequence[str],
    order: Patches | None,
) -> list[Tensor]:
    """The documented approximation: the usual formula with patch means of x-hat and of 1/std."""
    g = g if order is None else g.permute(order)
    centred = x - x.mean(1, keepdim=True)
    inverse = (centred.square().mean(1, keepdim=True) + 1e-3).rsqrt()
    x_hat, inverse = averaged(centred * inverse, patches), averaged(inverse, patches)
    weight = parameters.get("inner.weight")
    scaled = g if weight is None else g * weight.view(-1, *[1] * (x.dim() - 2))
    dims = (0, *range(2, x.dim()))
    x_grad = inverse * (
        scaled - scaled.mean(1, keepdim=True) - x_hat * (scaled * x_hat).mean(1, keepdim=True)
    )
    known = {"inner.weight": (g * x_hat).sum(dims), "inner.bias": g.sum(dims)}
    return [x_grad, *(known[name] for name in asked)]


# --- pooling and other changes of size


def _windows(rng: Random, maps: Maps, *, dilated: bool) -> tuple[Patches, ...]:
    """Kernel, stride, padding and dilation per axis: three usual windows, or any that fits.

    Without dilation even into the map that is not padded, as torch asks of an average.
    """
    usual = [((3, 2, 1, 1), 3), ((2, 2, 0, 1), 2), ((3, 1, 1, 1), 3)]
    fitting = [window for window, smallest in usual if min(maps.size) >= smallest]
    if fitting and rng.random() < 0.6:
        kernel, stride, padding, dilation = zip(*[rng.choice(fitting)] * maps.axes, strict=True)
        return kernel, stride, padding, dilation
    axes = []
    for n in maps.size:
        k = rng.randint(1, 4)
        d = rng.choice([1, 1, 2]) if dilated else 1
        pad = rng.randint(0, k // 2)
        while d * (k - 1) + 1 > n + 2 * pad * dilated:
            k, d, pad = k - 1, 1, min(pad, (k - 1) // 2)
        stride = rng.randint(1, 3)
        if not _windows_read_the_map(n, k, stride, pad, d):
            d = 1
        axes.append((k, stride, pad, d))
    kernel, stride, padding, dilation = zip(*axes, strict=True)
    return kernel, stride, padding, dilation


def _windows_read_the_map(size: int, kernel: int, stride: int, pad: int, dilation: int) -> bool:
    """Torch writes outside of its memory where a dilated window has nothing but padding in it."""
    taps = [k * dilation - pad for k in range(kernel)]
    starts = range(0, size + pad, stride)
    return all(any(0 <= start + tap < size for tap in taps) for start in starts if start - pad < size)


def _max_pool(rng: Random, maps: Maps) -> Operator:
    a = maps.axes
    kernel, stride, padding, dilation = window = _windows(rng, maps, dilated=True)
    ceil = rng.random() < 0.3
    run = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}[a]
    kind = {1: nn.MaxPool1d, 2: nn.MaxPool2d, 3: nn.MaxPool3d}[a]
    lands = partial(_pooled_patches, maps.size, window)
    plain = kernel == stride and not any(padding) and set(dilation) == {1} and len(set(kernel)) == 1
    if plain and rng.random() < 0.5:
        return function(f"F.max_pool(x, {kernel[0]})", lambda x: run(x, kernel[0]), lands=lands)
    return rng.choice(
        [
            module(lambda: kind(kernel, stride, padding, dilation, ceil_mode=ceil), lands=lands),
            function(
                f"F.max_pool(x, {kernel}, {stride}, {padding}, {dilation}, {ceil})",
                lambda x: run(x, kernel, stride, padding, dilation, ceil),
                lands=lands,
            ),
            function(
                f"F.max_pool(x, {kernel}, {stride=}, {padding=}, {dilation=})",
                lambda x: run(x, kernel, stride=stride, padding=padding, dilation=dilation),
                lands=lands,
            ),
        ]
    )


def _pooled_patches(size: Patches, window: tuple[Patches, ...], patches: Patches) -> Patches:
    """As many pixels as the input's patches, or a k-th of them where windows of side k tile them."""
    axes = list(zip(size, *window, patches[2:], strict=True))
    tiled = all(k == s and not pad and d == 1 and n % k == 0 and p % k == 0 for n, k, s, pad, d, p in axes)
    return (1, 1, *(p // k if tiled else p for _, k, _, _, _, p in axes))


def _adaptive_max_pool(rng: Random, maps: Maps) -> Operator:
    a = maps.axes
    whole = rng.random() < 0.7
    sizes = tuple(
        rng.choice([s for s in range(1, n + 1) if n % s == 0]) if whole else rng.randint(1, n)
        for n in maps.size
    )
    given = sizes[0] if len(set(sizes)) == 1 else sizes
    run = {1: F.adaptive_max_pool1d, 2: F.adaptive_max_pool2d, 3: F.adaptive_max_pool3d}[a]
    kind = {1: nn.AdaptiveMaxPool1d, 2: nn.AdaptiveMaxPool2d, 3: nn.AdaptiveMaxPool3d}[a]
    how: dict[str, Any] = {"known": False, "lands": as_it_is, "coarse": False}
    if all(n % s == 0 for n, s in zip(maps.size, sizes, strict=True)):
        kernel = tuple(n // s for n, s in zip(maps.size, sizes, strict=True))
        how = {"lands": partial(_pooled_patches, maps.size, (kernel, kernel, (0,) * a, (1,) * a))}
    return rng.choice(
        [
            module(lambda: kind(given), **how),
            function(f"F.adaptive_max_pool(x, {given})", lambda x: run(x, given), **how),
        ]
    )


def _avg_pool(rng: Random, maps: Maps) -> Operator:
    a = maps.axes
    kernel, stride, padding, _ = _windows(rng, maps, dilated=False)
    ceil, count = rng.random() < 0.3, rng.random() < 0.5
    run = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}[a]
    kind = {1: nn.AvgPool1d, 2: nn.AvgPool2d, 3: nn.AvgPool3d}[a]
    if kernel == stride and len(set(kernel)) == 1 and not any(padding) and rng.random() < 0.5:
        return linear(f"F.avg_pool(x, {kernel[0]})", lambda x: run(x, kernel[0]), coarse=True)
    return rng.choice(
        [
            module(lambda: kind(kernel, stride, padding, ceil, count), lands=as_it_is),
            linear(
                f"F.avg_pool(x, {kernel}, {stride}, {padding}, {ceil}, {count})",
                lambda x: run(x, kernel, stride, padding, ceil, count),
                coarse=True,
            ),
            linear(
                f"F.avg_pool(x, {kernel}, {stride=}, {padding=}, count_include_pad={count})",
                lambda x: run(x, kernel, stride=stride, padding=padding, count_include_pad=count),
                coarse=True,
            ),
        ]
    )


def _adaptive_avg_pool(rng: Random, maps: Maps) -> Operator:
    a = maps.axes
    sizes = (1,) * a if rng.random() < 0.4 else tuple(rng.randint(1, n + 1) for n in maps.size)
    given = sizes[0] if len(set(sizes)) == 1 else sizes
    run = {1: F.adaptive_avg_pool1d, 2: F.adaptive_avg_pool2d, 3: F.adaptive_avg_pool3d}[a]
    kind = {1: nn.AdaptiveAvgPool1d, 2: nn.AdaptiveAvgPool2d, 3: nn.AdaptiveAvgPool3d}[a]
    return rng.choice(
        [
            module(lambda: kind(given), lands=as_it_is),
            linear(f"F.adaptive_avg_pool(x, {given})", lambda x: run(x, given), coarse=True),
        ]
    )


def _interpolate(rng: Random, maps: Maps) -> Operator:
    a = maps.axes
    smooth = {1: ["linear"], 2: ["bilinear", "bicubic"], 3: ["trilinear"]}[a]
    mode = rng.choice(["nearest", "nearest", "nearest-exact", *smooth, *smooth])
    options: dict[str, Any] = {"mode": mode}
    if mode in smooth:
        options["align_corners"] = rng.choice([None, False, True])
    if rng.random() < 0.5:
        options["size"] = tuple(rng.randint(1, 2 * n + 1) for n in maps.size)
        if len(set(maps.size)) == 1 and rng.random() < 0.5:
            options["size"] = rng.randint(1, 9)
    else:
        options["scale_factor"] = rng.choice([2, 2.0, 1.5, tuple(rng.choice([1, 2, 2.5]) for _ in maps.size)])
        if rng.random() < 0.3:
            options["recompute_scale_factor"] = True
    text = ", ".join(f"{name}={value!r}" for name, value in options.items())
    named = {name: value for name, value in options.items() if name in ("size", "scale_factor", "mode")}
    return rng.choice(
        [
            linear(f"F.interpolate(x, {text})", lambda x: F.interpolate(x, **options), coarse=True),
            module(lambda: nn.Upsample(**named), lands=as_it_is),
        ]
    )


def _pad(rng: Random, maps: Maps) -> Operator:
    mode = rng.choice(["constant", "constant", "reflect", "replicate", "circular"])
    most = {"reflect": min(maps.size) - 1, "circular": min(maps.size)}.get(mode, 3)
    ends = [rng.randint(0, min(most, 3)) for _ in range(2 * maps.axes)]
    if mode == "constant":
        ends = ends[: 2 * rng.randint(1, maps.axes)]
        if rng.random() < 0.3:  # cropping, down to one pixel
            ends = [end for n in reversed(maps.size) for end in (rng.randint(0, 2), -min(1, n - 1))]
    value = rng.choice([None, 0.5]) if mode == "constant" else None
    zero = {1: nn.ZeroPad1d, 2: nn.ZeroPad2d, 3: nn.ZeroPad3d}[maps.axes]
    reflect = {1: nn.ReflectionPad1d, 2: nn.ReflectionPad2d, 3: nn.ReflectionPad3d}[maps.axes]
    choices = [
        linear(f"F.pad(x, {ends}, {mode!r}, {value})", lambda x: F.pad(x, ends, mode, value), coarse=True)
    ]
    if mode == "reflect":
        choices.append(module(lambda: reflect(tuple(ends)), lands=as_it_is))
    if mode == "constant" and len(ends) == 2 * maps.axes:
        choices.append(module(lambda: zero(tuple(ends)), lands=as_it_is))
    return rng.choice(choices)


def _mean(rng: Random, maps: Maps) -> Operator:
    dims, keep = (
        rng.choice([maps.spatial, tuple(d - 2 - maps.axes for d in maps.spatial)]),
        rng.random() < 0.5,
    )
    how = {"coarse": True, "makes_maps": False}
    return rng.choice(
        [
            linear(f"x.mean({dims}, {keep})", lambda x: x.mean(dims, keep), **how),
            linear(f"x.mean(dim={dims}, keepdim={keep})", lambda x: x.mean(dim=dims, keepdim=keep), **how),
            linear(f"torch.mean(x, {list(dims)})", lambda x: torch.mean(x, list(dims)), **how),
            linear("x.mean()", lambda x: x.mean(), **how),
        ]
    )


# --- several maps, and parts of one


def _product(rng: Random, maps: Maps) -> Operator:
    return rng.choice(
        [
            Operator("x * y", lambda owner, x, y: x * y, inputs=2),
            Operator("torch.mul(x, y)", lambda owner, x, y: torch.mul(x, y), inputs=2),
            Operator("x.mul(other=y)", lambda owner, x, y: x.mul(other=y), inputs=2),
            function("x * x", lambda x: x * x),
            function("x * x.detach()", lambda x: x * x.detach()),
            function("x.detach() * x", lambda x: x.detach() * x),
        ]
    )


def _channel_scale(rng: Random, maps: Maps) -> Operator:
    full, short = maps.per_channel(), maps.per_channel()[1:]
    shape = rng.choice([full, short, (max(1, maps.batch), *short), (1,), ()])
    label = f"factor of {shape}"
    fixed = {"lands": as_it_is, "coarse": False}

    def holds() -> dict[str, nn.Parameter]:
        return {"factor": _parameter(*shape)}

    return rng.choice(
        [
            Operator(f"x * {label}", lambda owner, x: x * owner.factor, holds, coarse=False),
            Operator(f"{label} * x", lambda owner, x: owner.factor * x, holds, coarse=False),
            Operator(
                f"torch.mul({label}, x)", lambda owner, x: torch.mul(owner.factor, x), holds, coarse=False
            ),
            Operator(f"x * fixed {label}", lambda owner, x: x * owner.factor.detach(), holds, **fixed),
            Operator(f"x / fixed {label}", lambda owner, x: x / owner.factor.detach(), holds, **fixed),
            linear("0.5 * x", lambda x: 0.5 * x),
            linear("x / 3", lambda x: x / 3),
            linear("-x", lambda x: -x),
        ]
    )


def _gating(rng: Random, maps: Maps) -> Operator:
    """A map times one that is broadcast over it and depends on it, or on another map."""
    return rng.choice(
        [
            Operator(
                "x * y.mean(spatial)",
                lambda owner, x, y: x * y.mean(maps.spatial, keepdim=True),
                inputs=2,
                alone=True,
            ),
            Operator("x * y[:, :1]", lambda owner, x, y: x * y[:, :1], inputs=2),
            Operator("y[:, :1] * x", lambda owner, x, y: y[:, :1] * x, inputs=2),
            Operator("x * y[:1]", lambda owner, x, y: x * y[:1], inputs=2),
        ]
    )


def _gated_pool(rng: Random, maps: Maps) -> Operator:
    """Max pooling right behind a gate: a maximum gets a gradient only where the gate is open."""
    kernel, stride, padding, dilation = _windows(rng, maps, dilated=True)
    gate, name = rng.choice([(F.relu, "relu"), (F.relu6, "relu6"), (F.hardtanh, "hardtanh")])
    pool = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}[maps.axes]
    window = f"{kernel}, {stride}, {padding}, {dilation}"
    return function(
        f"F.max_pool(F.{name}(x), {window})", lambda x: pool(gate(x), kernel, stride, padding, dilation)
    )


def _residual(rng: Random, maps: Maps) -> Operator:
    """A gate, a sum, another gate, as in residual networks: both masks count, pixel by pixel."""
    first, name = rng.choice([(F.relu, "relu"), (F.relu6, "relu6"), (F.hardtanh, "hardtanh")])
    form, overwrites = rng.choice(["y + a", "a + y", "y += a"]), rng.random() < 0.5

    def run(owner: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        a = first(x)  # alive until the second gate has seen it, as the identity of a block is
        z = {"y + a": y.__add__, "a + y": a.__add__, "y += a": y.add_}[form](y if form == "a + y" else a)
        return F.relu(z, inplace=overwrites)

    return Operator(f"a = F.{name}(x); F.relu({form}, inplace={overwrites})", run, inputs=2)


def _sum(rng: Random, maps: Maps) -> Operator:
    how: dict[str, Any] = {"lands": as_it_is, "coarse": False, "inputs": 2}
    one = {**how, "inputs": 1}
    return rng.choice(
        [
            Operator("x + y", lambda owner, x, y: x + y, **how),
            Operator("torch.add(x, y, alpha=2)", lambda owner, x, y: torch.add(x, y, alpha=2), **how),
            Operator("x - y", lambda owner, x, y: x - y, **how),
            Operator("x += y", lambda owner, x, y: x.add_(y), **how),
            Operator("x + 1", lambda owner, x: x + 1, **one),
            Operator("x + x", lambda owner, x: x + x, **one),
            Operator("1 - x", lambda owner, x: 1 - x, **one),
        ]
    )


def _cat(rng: Random, maps: Maps) -> Operator:
    how: dict[str, Any] = {"lands": as_it_is, "coarse": False, "inputs": 2}
    return rng.choice(
        [
            Operator("torch.cat([x, y], 1)", lambda owner, x, y: torch.cat([x, y], 1), **how),
            Operator("torch.cat([x, y, x], 1)", lambda owner, x, y: torch.cat([x, y, x], 1), **how),
            Operator(
                "torch.cat([x, y], -n)", lambda owner, x, y: torch.cat([x, y], dim=-maps.axes - 1), **how
            ),
            Operator("torch.cat([x, fixed y], 1)", lambda owner, x, y: torch.cat([x, y.detach()], 1), **how),
            Operator("torch.cat([x, y], 0)", lambda owner, x, y: torch.cat([x, y], 0), **how),
        ]
    )


def _parts(rng: Random, maps: Maps) -> Operator:
    def swapped(x: Tensor) -> Tensor:
        a, b = x.chunk(2, 1)
        return torch.cat([2 * b, a], 1)

    def split(x: Tensor) -> Tensor:
        a, b = torch.split(x, [1, x.shape[1] - 1], dim=1)
        return torch.cat([b, a], 1)

    return rng.choice(
        [
            linear("x.chunk(2, 1), swapped", swapped),
            linear("torch.split(x, [1, rest], 1), swapped", split),
            linear("x[:, 1:]", lambda x: x[:, 1:]),
            linear("x[:, ::2]", lambda x: x[:, ::2]),
            linear("x.narrow(1, 0, 1)", lambda x: x.narrow(1, 0, 1)),
            linear("x[:, :1] + x[:, 1:2]", lambda x: x[:, :1] + x[:, 1:2]),
        ]
    )


def _permutation(rng: Random, maps: Maps) -> Operator:
    order = list(range(maps.axes + 2))
    rng.shuffle(order)
    a, b = rng.sample(range(-maps.axes - 2, maps.axes + 2), 2)
    last = (0, *maps.spatial, 1)
    how = {"makes_maps": False}
    return rng.choice(
        [
            linear(f"x.permute({order})", lambda x: x.permute(order), **how),
            linear(f"x.permute({last}).contiguous()", lambda x: x.permute(last).contiguous(), **how),
            linear(f"x.transpose({a}, {b})", lambda x: x.transpose(a, b), **how),
            linear("x.mT", lambda x: x.mT, **how),
            linear("x.clone()", lambda x: x.clone()),
        ]
    )


def _shuffle(rng: Random, maps: Maps) -> Operator:
    groups = rng.choice([g for g in range(1, maps.channels + 1) if maps.channels % g == 0])

    def views(x: Tensor) -> Tensor:
        n, c, *size = x.shape
        return (
            x.contiguous().view(n, groups, c // groups, *size).transpose(1, 2).contiguous().view(n, c, *size)
        )

    def reshapes(x: Tensor) -> Tensor:
        n, c, *size = x.shape
        return x.reshape(n, groups, c // groups, *size).transpose(1, 2).reshape(n, c, *size)

    return rng.choice(
        [
            linear(f"channel shuffle of {groups}, view", views),
            linear(f"channel shuffle of {groups}, reshape", reshapes),
        ]
    )


def _unless_last_axis(patches: Patches) -> Patches | None:
    """Parts of an axis without patches are on the grid of the whole."""
    return patches if patches[-1] == 1 else None


def _unknown(rng: Random, maps: Maps) -> Operator:
    crop = (..., slice(maps.size[-1] // 2, None))
    parts = [
        unknown("x[..., half:].relu()", lambda x: x[crop].relu(), lands=_unless_last_axis),
        unknown(
            "torch.cat([x, x], -1).relu()", lambda x: torch.cat([x, x], -1).relu(), lands=_unless_last_axis
        ),
    ]
    return rng.choice(
        [
            *(parts if maps.size[-1] > 1 else ()),
            unknown("torch.exp(x)", torch.exp),
            unknown("x.clamp(-1, 1)", lambda x: x.clamp(-1, 1)),
            unknown("x ** 2", lambda x: x**2),
            unknown("F.softplus(x)", F.softplus),
            unknown("F.selu(x)", F.selu),
            unknown("F.leaky_relu(x, -0.5)", lambda x: F.leaky_relu(x, -0.5)),
            unknown("x.sigmoid_()", lambda x: x.sigmoid_()),
            unknown("x.cumsum(-1)", lambda x: x.cumsum(-1)),
            unknown("x.flip(-1)", lambda x: x.flip(-1)),
            unknown("x.flatten(2)", lambda x: x.flatten(2), makes_maps=False),
            unknown("x.sum()", lambda x: x.sum(), makes_maps=False),
            unknown("x.mean(1)", lambda x: x.mean(1), makes_maps=False),
            unknown("x.mean(-1)", lambda x: x.mean(-1), makes_maps=False),
            unknown("x / x.detach().abs().add(1)", lambda x: x / x.detach().abs().add(1)),
            unknown("x.mul_(map)", lambda x: x.mul_(x.detach().cos())),
            unknown("x[..., half:]", lambda x: x[crop]),
            unknown("torch.cat([x, x], -1)", lambda x: torch.cat([x, x], -1)),
            unknown("x + x.exp()", lambda x: x + x.exp()),
        ]
    )


FAMILIES: dict[str, Callable[[Random, Maps], Operator]] = {
    "relu": _relu,
    "relu6": _relu6,
    "leaky relu": _leaky_relu,
    "hardtanh": _hardtanh,
    "prelu": _prelu,
    "elu": _elu,
    "silu": _smooth(nn.SiLU, "silu"),
    "hardswish": _smooth(nn.Hardswish, "hardswish"),
    "hardsigmoid": _smooth(nn.Hardsigmoid, "hardsigmoid"),
    "mish": _smooth(nn.Mish, "mish"),
    "gelu": _gelu,
    "sigmoid": _saturating(nn.Sigmoid, "sigmoid"),
    "tanh": _saturating(nn.Tanh, "tanh"),
    "dropout": _dropout,
    "fixed batch norm": _fixed_batch_norm,
    "batch norm": _batch_norm,
    "group norm": _group_norm,
    "layer norm": _layer_norm,
    "max pool": _max_pool,
    "adaptive max pool": _adaptive_max_pool,
    "avg pool": _avg_pool,
    "adaptive avg pool": _adaptive_avg_pool,
    "interpolate": _interpolate,
    "pad": _pad,
    "mean": _mean,
    "product": _product,
    "channel scale": _channel_scale,
    "gating": _gating,
    "gated pool": _gated_pool,
    "residual": _residual,
    "sum": _sum,
    "cat": _cat,
    "parts": _parts,
    "permutation": _permutation,
    "shuffle": _shuffle,
    "unknown": _unknown,
}


# --- cases


_NEVER_EMPTY = ("batch norm", "interpolate", "pad", "adaptive max pool", "gating", "mean")
BEFORE = ("", "", "", "slice", "scale", "sum", "cat", "swap axes")


@dataclass(frozen=True)
class OperatorCase:
    """An operator behind one or two filtered layers, and perhaps before another.

    before: what stands between the first layer and the operator. after: the patch of a filtered layer behind
    the operator; None: a dense gradient arrives. trains: the operator's own parameters train.
    """

    seed: int
    family: str
    maps: Maps
    kernel: int
    patch: tuple[int, ...]
    second_patch: tuple[int, ...]
    before: str
    after: tuple[int, ...] | None
    layout: str
    trains: bool
    operator: Operator

    @property
    def two_layers(self) -> bool:
        return self.operator.inputs == 2 or self.before in ("sum", "cat")

    @property
    def patches(self) -> Patches:
        """Of the operator's first map."""
        first, second = (self._clipped(patch) for patch in (self.patch, self.second_patch))
        if self.before in ("sum", "cat"):
            return common(self._shape, first, second)
        return first

    @property
    def layer_patches(self) -> list[Patches]:
        """Of what each of the first layers makes."""
        first, second = self._clipped(self.patch), self._clipped(self.second_patch)
        if self.before == "swap axes":
            first = (*first[:2], *reversed(first[2:]))
        return [first, second][: 1 + self.two_layers]

    @property
    def patch_option(self) -> dict[str, tuple[int, ...]]:
        """The patches as a user would write them."""
        first = tuple(reversed(self.patch)) if self.before == "swap axes" else self.patch
        return {"first": first, "second": self.second_patch, "last": self.after or self.patch}

    @property
    def all_patches(self) -> list[Patches]:
        """Of each of the operator's maps."""
        return [self.patches, self._clipped(self.second_patch)][: self.operator.inputs]

    @property
    def shared_patches(self) -> Patches:
        """Those that serve all of the operator's maps."""
        if self.operator.inputs == 1 or self.operator.alone:
            return self.patches
        return common(self._shape, *self.all_patches)

    @property
    def lands(self) -> Patches | None:
        """The patches of the operator's output on which the gradient that arrives is averaged."""
        return self.operator.lands(self.shared_patches)

    @property
    def _shape(self) -> tuple[int, ...]:
        return (self.maps.batch, self.maps.channels, *self.maps.size)

    def _clipped(self, patch: tuple[int, ...]) -> Patches:
        return (1, 1, *map(min, patch, self.maps.size))

    def image(self, dtype: torch.dtype = torch.float64) -> Tensor:
        """What the first layers read."""
        size = tuple(reversed(self.maps.size)) if self.before == "swap axes" else self.maps.size
        random = torch.Generator().manual_seed(self.seed + 1)
        x = torch.randn(self.maps.batch, 2, *size, generator=random, dtype=torch.float64).to(dtype)
        if self.layout == "channels_last":
            return x.to(memory_format=torch.channels_last if self.maps.axes == 2 else torch.channels_last_3d)
        return x

    def net(self, dtype: torch.dtype = torch.float64) -> Net:
        """The plain network, with parameters and statistics that depend on the seed only."""
        net = Net(self)
        if self.after is not None:
            net.last = _CONVOLUTIONS[self.maps.axes](self._made_channels, 2, 1)
        net = Net.filled(net, self.seed)
        return net.to(dtype)

    @cached_property
    def _made_channels(self) -> int:
        with torch.no_grad():
            return Net(self)(torch.zeros(max(2, self.maps.batch), *self.image().shape[1:])).shape[1]

    def between(self, y: Tensor, *others: Tensor) -> list[Tensor]:
        """The operator's maps from what the first layers make."""
        match self.before:
            case "slice":
                y = y[:, 1:-1]
            case "scale":
                y = 0.5 * y
            case "sum":
                y = y + others[0]
            case "cat":
                y = torch.cat([y, others[0]], 1)
            case "swap axes":
                y = y.transpose(-1, -2)
        return [y, *others][: self.operator.inputs]


class Owner(nn.Module):
    """Has what an operator holds, and runs it."""

    def __init__(self, operator: Operator) -> None:
        super().__init__()
        for name, thing in operator.holds().items():
            setattr(self, name, thing)
        self.operator = operator

    def forward(self, *maps: Tensor) -> Tensor:
        return self.operator.run(self, *maps)


class Net(nn.Module):
    """Layers that want coarse gradients, what stands before the operator, the operator, perhaps a last layer.

    ``look`` is shown every tensor between its parts.
    """

    def __init__(self, case: OperatorCase) -> None:
        super().__init__()
        make, c = _CONVOLUTIONS[case.maps.axes], case.maps.channels
        wide = {"slice": c + 2, "cat": c - 1}.get(case.before, c)
        self.first = make(2, wide, case.kernel, padding=case.kernel // 2)
        self.second = None
        if case.two_layers:
            self.second = make(2, 1 if case.before == "cat" else c, 1)
        self.owner = Owner(case.operator)
        self.last: nn.Module | None = None
        self.case = case
        self.look: Callable[[str, Tensor], None] = lambda name, tensor: None

    def forward(self, image: Tensor) -> Tensor:
        layers = [self.first(image)] + ([] if self.second is None else [self.second(image)])
        for i, y in enumerate(layers):
            self.look(f"layer{i}", y)
        maps = self.case.between(*layers)
        for i, x in enumerate(maps):
            self.look(f"map{i}", x)
        z: Tensor = self.owner(*maps)
        self.look("made", z)
        return z if self.last is None else self.last(z)

    @staticmethod
    def filled(net: Net, seed: int) -> Net:
        random = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for tensor in net.parameters():
                tensor.copy_(torch.randn(tensor.shape, generator=random, dtype=torch.float64))
            for norm in net.modules():
                if isinstance(norm, nn.modules.batchnorm._BatchNorm) and norm.running_mean is not None:
                    norm.reset_running_stats()
                    norm.running_mean.normal_(generator=random)
                    norm.running_var.uniform_(0.5, 2, generator=random)
        return net


def make_operator(family: str, seed: int, maps: Maps) -> Operator:
    """One operator of a family."""
    return FAMILIES[family](Random(seed), maps)  # noqa: S311


def make_case(seed: int, family: str = "") -> OperatorCase:
    """The legal case number `seed`; families take turns unless one is named."""
    rng = Random(seed)  # noqa: S311
    family = family or list(FAMILIES)[seed % len(FAMILIES)]
    axes = rng.choices([1, 2, 3], weights=[15, 70, 15])[0]
    smallest = 2 if family == "batch norm" else 1
    size = tuple(rng.randint(smallest, _LARGEST_MAP[axes]) for _ in range(axes))
    batch = rng.choices([0, 1, 2, 3], weights=[0 if family in _NEVER_EMPTY else 6, 25, 45, 24])[0]
    maps = Maps(batch, rng.choice([2, 3, 4, 6]), size)
    operator = FAMILIES[family](rng, maps)
    before, patch = rng.choice(BEFORE), _patch(rng, axes)
    if (
        (before == "swap axes" and axes != 2)
        or (before in ("sum", "cat", "swap axes") and operator.inputs == 2)
        or (before in ("slice", "swap axes") and _overwrites(operator, maps))  # a view: see its own test
    ):
        before = ""
    return OperatorCase(
        seed=seed,
        family=family,
        maps=maps,
        kernel=rng.choice([1, 1, 3]),
        patch=patch,
        second_patch=patch if family == "residual" else _patch(rng, axes),
        before=before,
        after=_patch(rng, axes) if operator.makes_maps and rng.random() < 0.5 else None,
        layout=rng.choice(["contiguous", "channels_last"]) if axes > 1 else "contiguous",
        trains=rng.random() < 0.6,
        operator=operator,
    )


def _overwrites(operator: Operator, maps: Maps) -> bool:
    """Whether it works in place."""
    shape = (max(2, maps.batch), maps.channels, *maps.size)
    x = torch.linspace(-9, 9, steps=prod(shape)).view(shape)
    with torch.no_grad():
        Owner(operator)(*[y := x.clone()] * operator.inputs)
    return not torch.equal(x, y)


def _patch(rng: Random, axes: int) -> tuple[int, ...]:
    """1..5 per axis, often the same, rarely more than any map has."""
    if rng.random() < 0.05:
        return tuple(rng.choice([2, 20]) for _ in range(axes))
    if rng.random() < 0.5:
        return tuple(rng.choices([1, 2, 3, 4, 5], weights=[5, 40, 20, 25, 10])) * axes
    return tuple(rng.randint(1, 5) for _ in range(axes))
