"""The coarse chain against the layer-by-layer method: whole networks, every weight gradient, float64.

The reference is the plain network in plain torch, in which each filtered convolution takes the dense
gradient, forms its gradients by definition and hands a dense gradient on. Where grids nest, the chain must
give the same numbers without ever leaving the grid.
"""

from __future__ import annotations

import gc
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradfilter as gf
from gradfilter.errors import ModelError
from gradfilter.grid import Grid
from gradfilter.models import _torchvision
from gradfilter.ops import activation, gathered, layer, max_pool, product
from operators import averaged
from oracle import conv_gradients
from shapes import ConvCase, make_case

TOLERANCE = 1e-10


@pytest.fixture(scope="session")
def vision() -> None:
    """Import torchvision once, so that the warning about a broken one stays here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            _torchvision.torchvision()
        except ModelError as missing:
            pytest.skip(str(missing))


# --- the reference: one layer by definition, on dense tensors


class FilteredConvolution(torch.autograd.Function):
    """A 2d convolution with the backward of tests/oracle.py; in torch, to be fast enough for networks."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, conv: nn.Conv2d, method: gf.GradientFilter
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.conv, ctx.method = conv, method
        return conv._conv_forward(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        assert type(g) is Tensor
        x, weight = ctx.saved_tensors
        method, found = ctx.method, []
        for patch, taps in (
            (method.patch, method.taps),
            (method.weight_patch or method.patch, method.weight_taps or method.taps),
        ):
            pair = patch if isinstance(patch, tuple) else (patch,) * 2
            in_patch = tuple(r * s for r, s in zip(pair, ctx.conv.stride, strict=True))
            formula = {"overlap": _overlap, "collapse": _collapse}[taps]
            found.append(formula(ctx.conv, x, weight, g, pair, in_patch))
        x_grad, weight_grad = found[0][0], found[1][1]
        bias_grad = g.sum((0, 2, 3)) if ctx.needs_input_grad[2] else None
        return x_grad, weight_grad, bias_grad, None, None


Pair = tuple[int, ...]


def _overlap(
    conv: nn.Conv2d, x: Tensor, weight: Tensor, g: Tensor, patch: Pair, in_patch: Pair
) -> tuple[Tensor, Tensor]:
    """P_in(exact(P_out(g))) and exact(P_in(x), P_out(g))."""
    how = (conv.stride, conv.padding, conv.dilation, conv.groups)
    smooth_g, smooth_x = averaged(g, (1, 1, *patch)), averaged(x, (1, 1, *in_patch))
    x_grad = torch.nn.grad.conv2d_input(x.shape, weight, smooth_g, *how)
    return averaged(x_grad, (1, 1, *in_patch)), torch.nn.grad.conv2d_weight(
        smooth_x, weight.shape, smooth_g, *how
    )


def _collapse(
    conv: nn.Conv2d, x: Tensor, weight: Tensor, g: Tensor, patch: Pair, in_patch: Pair
) -> tuple[Tensor, Tensor]:
    """Every tap of output patch p reads the input patch of the same number, or the last one there is."""
    sums, owners, means = g, [], x
    for axis, (r, big_r) in enumerate(zip(patch, in_patch, strict=True)):
        owner = torch.arange(x.shape[axis + 2]) // big_r
        owners.append((owner[:, None] == torch.arange(int(owner.max()) + 1)).to(x.dtype))
        pixel = (torch.arange(g.shape[axis + 2]) // r).clamp(max=int(owner.max()))
        gathered = (pixel == torch.arange(int(owner.max()) + 1)[:, None]).to(g.dtype)
        sums = torch.tensordot(sums, gathered, dims=([2], [1]))  # the next axis comes to the front of the map
        means = torch.tensordot(means, owners[-1] / owners[-1].sum(0), dims=([2], [0]))
    one_tap = weight.sum((2, 3), keepdim=True)
    patch_grads = torch.nn.grad.conv2d_input(means.shape, one_tap, sums.contiguous(), groups=conv.groups)
    per_pixel = [owner / owner.sum(0) for owner in owners]
    x_grad = torch.einsum("ncpq,hp,wq->nchw", patch_grads, *per_pixel)
    weight_grad = torch.nn.grad.conv2d_weight(
        means.contiguous(), one_tap.shape, sums.contiguous(), groups=conv.groups
    )
    return x_grad, weight_grad.expand_as(weight)


def is_plain(case: ConvCase) -> bool:
    """A 2d convolution with numbers for padding, as in the networks below."""
    usual = case.dims == 2 and not case.transposed and case.padding_mode == "zeros"
    numbers = not isinstance(case.padding, str) and case.batch is not None and max(case.patch) > 1
    return usual and numbers and case.input_gradient == "coarse"


def test_reference_is_the_definition() -> None:
    """The layer used here as the reference equals tests/oracle.py."""
    cases = [case for case in map(make_case, range(1500)) if is_plain(case)]
    assert len(cases) >= 150
    for case in cases:
        conv, (x, g) = case.module(), case.tensors()
        method = gf.GradientFilter(patch=case.patch, taps=case.taps)
        y = FilteredConvolution.apply(x.requires_grad_(), conv.weight, conv.bias, conv, method)
        got = torch.autograd.grad(y, [x, conv.weight], g)
        want = conv_gradients(
            case.layer, x.detach().numpy(), conv.weight.detach().numpy(), g.numpy(), case.patch, case.taps
        )
        for mine, theirs in zip(got, (want.x, want.w), strict=True):
            np.testing.assert_allclose(mine.numpy(), theirs, rtol=1e-10, atol=1e-10, err_msg=str(case))


# --- networks


class Unit(nn.Sequential):
    """Convolution, batch norm, activation."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        kernel: int,
        stride: int = 1,
        groups: int = 1,
        act: type | None = nn.ReLU,
    ) -> None:
        super().__init__(
            nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False),
            nn.BatchNorm2d(outputs),
            *([act()] if act else []),
        )


class SqueezeExcite(nn.Module):
    """The gate of a channel from the means of all."""

    def __init__(self, channels: int, inner: nn.Module, outer: nn.Module) -> None:
        super().__init__()
        self.reduce, self.expand = (
            nn.Conv2d(channels, channels // 2, 1),
            nn.Conv2d(channels // 2, channels, 1),
        )
        self.inner, self.outer = inner, outer

    def forward(self, x: Tensor) -> Tensor:
        gate = self.outer(self.expand(self.inner(self.reduce(F.adaptive_avg_pool2d(x, 1)))))
        return x * gate


def head(channels: int) -> nn.Sequential:
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 5))


class InvertedGated(nn.Module):
    """Widen, filter each channel, gate, narrow; added to its input where it can be."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, act: type) -> None:
        super().__init__()
        wide = 3 * inputs
        self.body = nn.Sequential(
            Unit(inputs, wide, 1, act=act),
            Unit(wide, wide, kernel, stride, groups=wide, act=act),
            SqueezeExcite(wide, nn.ReLU(), nn.Hardsigmoid()),
            Unit(wide, outputs, 1, act=None),
        )
        self.residual = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x) if self.residual else self.body(x)


def gated_net() -> nn.Module:
    """MobileNetV3's blocks: squeeze and excite, hardswish, silu."""
    return nn.Sequential(
        Unit(3, 8, 3, 2, act=nn.Hardswish),
        InvertedGated(8, 8, 3, 1, nn.Hardswish),
        InvertedGated(8, 12, 5, 2, nn.SiLU),
        InvertedGated(12, 12, 3, 1, nn.ReLU6),
        Unit(12, 16, 1, act=nn.Hardswish),
        head(16),
    )


class DenseBlock(nn.Module):
    """Every layer reads all maps before it."""

    def __init__(self, channels: int, growth: int, layers: int) -> None:
        super().__init__()
        widths = [channels + i * growth for i in range(layers)]
        self.norms = nn.ModuleList(nn.BatchNorm2d(c) for c in widths)
        self.narrow = nn.ModuleList(nn.Conv2d(c, 2 * growth, 1, bias=False) for c in widths)
        self.inner = nn.ModuleList(Unit(2 * growth, 2 * growth, 3, groups=growth) for _ in widths)
        self.grow = nn.ModuleList(nn.Conv2d(2 * growth, growth, 3, padding=1) for _ in widths)

    def forward(self, x: Tensor) -> Tensor:
        for norm, narrow, inner, grow in zip(self.norms, self.narrow, self.inner, self.grow, strict=True):
            x = torch.cat([x, grow(inner(narrow(torch.relu(norm(x)))))], 1)
        return x


def dense_net() -> nn.Module:
    """DenseNet's concatenations, with average pooling between the blocks."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1),
        DenseBlock(8, 4, 3),
        nn.Sequential(nn.BatchNorm2d(20), nn.ReLU(inplace=True), nn.Conv2d(20, 10, 1), nn.AvgPool2d(2)),
        DenseBlock(10, 4, 2),
        nn.BatchNorm2d(18),
        nn.ReLU(),
        head(18),
    )


class FunctionalNet(nn.Module):
    """Written with functions: a pyramid of maps, joined by interpolation, sums and concatenation."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
        self.down = nn.ModuleList([nn.Conv2d(6, 8, 3, 2, 1), nn.Conv2d(8, 10, 3, 2, 1)])
        self.side = nn.ModuleList([nn.Conv2d(c, 6, 1) for c in (6, 8, 10)])
        self.left, self.right = nn.Conv2d(6, 6, 3, padding=2, dilation=2), nn.Conv2d(6, 4, 5, padding=2)
        self.mix = nn.Conv2d(20, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        maps = [F.relu(self.stem(x))]
        for conv, act in zip(self.down, (F.silu, torch.tanh), strict=True):
            maps.append(act(conv(maps[-1])))
        sides = [side(y) for side, y in zip(self.side, maps, strict=True)]
        y = sides[2]
        for side in (sides[1], sides[0]):
            y = side + F.interpolate(y, side.shape[2:], mode="nearest")
        y = F.leaky_relu(y, 0.1, inplace=True)
        a, b = F.gelu(self.left(y)), F.relu6(self.right(F.dropout(y, 0.5, training=False)))
        y = self.mix(torch.cat([0.5 * a, b * 2, *self.left(a * 1).chunk(2, 1), b], 1))
        return y.mean((2, 3))


class Shuffled(nn.Module):
    """ShuffleNet's unit: half of the channels pass, the others are filtered, then all are mixed."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        half = channels // 2
        self.branch = nn.Sequential(
            Unit(half, half, 1), Unit(half, half, 3, groups=half, act=None), Unit(half, half, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, 1)
        y = torch.cat([a, self.branch(b)], 1)
        n, c, h, w = y.shape
        return y.view(n, 2, c // 2, h, w).transpose(1, 2).contiguous().view(n, c, h, w)


def shuffle_net() -> nn.Module:
    return nn.Sequential(Unit(3, 8, 3, 2, act=None), Shuffled(8), Unit(8, 12, 1), Shuffled(12), head(12))


def shared_net() -> nn.Module:
    """One activation module in several places."""
    act = nn.LeakyReLU(0.3)
    convs = [nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 6, 3, 2, 1, groups=3), nn.Conv2d(6, 8, 1)]
    return nn.Sequential(convs[0], act, convs[1], act, convs[2], act, head(8))


class Residual(nn.Module):
    """Two convolutions beside the identity, which came out of a gate; their sum goes into another."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(Unit(channels, channels, 3), Unit(channels, channels, 3, act=None))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        y += x
        return self.relu(y)


def residual_net() -> nn.Module:
    """At most two gates in a row: so far the chain is exact. Max pooling behind a gate counts as none."""
    pool = nn.MaxPool2d(3, 2, 1)
    return nn.Sequential(Unit(3, 6, 3), pool, Unit(6, 8, 3), Residual(8), Unit(8, 8, 1), Residual(8), head(8))


NETS: dict[str, Callable[[], nn.Module]] = {
    "mobilenet_v2": partial(gf.models.build, "mobilenet_v2", classes=5),
    "gated": gated_net,
    "dense": dense_net,
    "functional": FunctionalNet,
    "shuffle": shuffle_net,
    "shared": shared_net,
    "residual": residual_net,
}
LAST = {
    "mobilenet_v2": "last:12",
    "gated": "last:9",
    "dense": "last:6",
    "functional": "last:6",
    "shuffle": "last:5",
    "shared": "last:2",
    "residual": "last:4",
}


def build(name: str, seed: int = 0) -> nn.Module:
    """A network in float64 whose norms have statistics, scales and shifts of their own."""
    torch.default_generator.manual_seed(seed)
    model = gf.models.build("resnet18", classes=5) if name == "resnet18" else NETS[name]()
    with torch.no_grad():
        for norm in model.modules():
            if isinstance(norm, nn.BatchNorm2d):
                norm.running_mean.normal_(std=0.3)
                norm.running_var.uniform_(0.5, 2)
                norm.weight.uniform_(0.5, 1.5)
                norm.bias.normal_(std=0.3)
    return model.double().eval()


# --- running both


@dataclass(frozen=True)
class Chain:
    """What one pass gave: output, gradients by parameter, and what became dense on the way."""

    y: Tensor
    gradients: dict[str, Tensor]
    fallbacks: Counter[str] = field(default_factory=Counter)


def image(side: int) -> Tensor:
    return torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def run(model: nn.Module, x: Tensor) -> Chain:
    y = model(x)
    g = torch.randn(y.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    with gf.count_fallbacks() as fallbacks:
        y.backward(g)
    return Chain(
        y.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}, fallbacks
    )


def coarse_chain(name: str, plan: gf.Plan, side: int, seed: int = 0) -> Chain:
    return run(gf.apply_(build(name, seed), plan), image(side))


def layer_by_layer(name: str, plan: gf.Plan, side: int, seed: int = 0) -> Chain:
    """Plain torch, but for the backward of the planned convolutions."""
    model, trained = build(name, seed), set(plan.trained)
    for parameter_name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter_name.rpartition(".")[0] in trained)
    for row in plan.rows:
        if isinstance(row.method, gf.GradientFilter) and row.action != "frozen":
            conv = model.get_submodule(row.name)
            conv.forward = partial(_run_filtered, conv, row.method)
    return run(model, image(side))


def _run_filtered(conv: nn.Conv2d, method: gf.GradientFilter, x: Tensor) -> Tensor:
    if not (x.requires_grad or conv.weight.requires_grad):
        return conv._conv_forward(x, conv.weight, conv.bias)
    result: Tensor = FilteredConvolution.apply(x, conv.weight, conv.bias, conv, method)
    return result


def differences(got: Chain, want: Chain) -> dict[str, float]:
    """By parameter: the largest error against the largest entry, where it is more than the tolerance."""
    assert got.gradients.keys() == want.gradients.keys()
    assert torch.equal(got.y, want.y), "the forward is not the plain one, bit by bit"
    errors = {
        name: float((got.gradients[name] - exact).abs().max() / exact.abs().max())
        for name, exact in want.gradients.items()
    }
    return {name: error for name, error in errors.items() if not error <= TOLERANCE}


def compare(
    name: str, method: gf.GradientFilter, layers: str, side: int, seed: int = 0
) -> tuple[dict[str, float], Chain]:
    """What differs, and the chain itself."""
    plan = gf.plan(build(name), method, layers)
    chain = coarse_chain(name, plan, side, seed)
    return differences(chain, layer_by_layer(name, plan, side, seed)), chain


METHODS = [gf.GradientFilter(patch=patch, taps=taps) for patch in (2, 4) for taps in ("overlap", "collapse")]
METHODS.append(gf.GradientFilter(patch=2, weight_patch=4, weight_taps="collapse"))


@pytest.mark.parametrize("method", METHODS, ids=str)
@pytest.mark.parametrize("name", NETS)
def test_chain_equals_layer_by_layer(name: str, method: gf.GradientFilter, vision: None) -> None:
    """All layers and the last ones; even, odd and tiny maps; nothing becomes dense."""
    for layers, side in (("all", 64), ("all", 45), ("all", 13), (LAST[name], 48)):
        wrong, chain = compare(name, method, layers, side)
        assert not wrong, (layers, side, wrong)
        assert not chain.fallbacks, (layers, side, chain.fallbacks)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("side", [3, 5])
def test_gates_on_maps_smaller_than_their_patch(side: int, seed: int) -> None:
    """Gates before max pooling and in residual sums are known as such whatever the size of the map."""
    wrong, _ = compare("residual", gf.GradientFilter(patch=4), "all", side, seed)
    assert not wrong


@pytest.mark.parametrize("side", [1, 5])
def test_a_step_frees_all_its_maps_at_once(side: int) -> None:
    """None is part of a ring of references, which would wait for the garbage collector."""
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 4, 1), nn.Conv2d(4, 2, 1))
    gf.apply_(model, gf.GradientFilter(2))
    x = torch.randn(2, 3, side, side)
    model(x).sum().backward()  # what is made only once
    gc.collect()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        model(x).sum().backward()
        gc.collect()
        left = [found for found in gc.garbage if isinstance(found, Tensor)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
    assert not left


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_resnet(method: gf.GradientFilter, vision: None) -> None:
    """The same, but for the first convolution: three gates and a max pooling in a row lie behind it.

    Of such a row only neighbours are multiplied pixel by pixel, so its gradient is close, not equal.
    """
    for layers, side in (("all", 64), ("all", 45), ("layer3.*", 64), ("last:6", 64)):
        wrong, chain = compare("resnet18", method, layers, side)
        assert set(wrong) <= {"conv1.weight"}, (layers, side, wrong)
        assert max(wrong.values(), default=0) < 0.5, (layers, side, wrong)
        assert not chain.fallbacks, (layers, side, chain.fallbacks)


@pytest.mark.parametrize("name", ["gated", "functional", "residual"])
def test_exact_layers_give_exact_gradients(name: str) -> None:
    """With the method that keeps everything, the region is plain torch."""
    plan = gf.plan(build(name), gf.Exact())
    wrong = differences(coarse_chain(name, plan, 45), layer_by_layer(name, plan, 45))
    assert not wrong


# --- negative controls: the same comparison must notice each mistake


def full_patches(_: Any) -> Callable[[Grid, Tensor], float]:
    return lambda grid, like: float(prod(grid.patches))


MISTAKES: dict[str, tuple[str, Any, str, Callable[[Any], Any]]] = {
    "ragged patches counted as full, taps": ("functional", gathered, "pixels", full_patches),
    "ragged patches counted as full, bias": ("functional", layer, "pixels", full_patches),
    "gate open on the other side": (
        "residual",
        activation.Gate,
        "openness",
        lambda right: lambda gate, y: 1 - right(gate, y),
    ),
    "maxima one neighbour off": (
        "residual",
        max_pool,
        "_count_each",
        lambda right: lambda *how: right(*how).roll(1, 0),
    ),
    "masks of a join multiplied as means": (
        "residual",
        activation,
        "gated_term",
        lambda right: lambda z, grid: None,
    ),
    "broadcast to one pixel": ("gated", product, "pixels", lambda right: lambda grid, like: 1.0),
    "mean slope of the first pixels": (
        "gated",
        activation,
        "pool",
        lambda right: lambda x, grid: x[tuple(slice(None, None, p) for p in grid.patches)],
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_comparison_notices(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network that passes fails with one mistake in the library."""
    name, owner, attribute, broken = MISTAKES[mistake]
    method = gf.GradientFilter(patch=4)
    assert not compare(name, method, "all", 45)[0]
    monkeypatch.setattr(owner, attribute, broken(getattr(owner, attribute)))
    assert compare(name, method, "all", 45)[0]
