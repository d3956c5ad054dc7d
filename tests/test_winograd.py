"""3x3 convolutions in tiles: as exact as the plain sum, whatever the sizes; all others are left to oneDNN."""

from __future__ import annotations

import copy
from collections.abc import Callable
from random import Random
from statistics import median
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d

import gradfilter as gf
from gradfilter.native import winograd
from gradfilter.ops.fused import FusedConv

pytestmark = pytest.mark.skipif(not winograd.is_built(), reason="not built, or oneDNN has wider vectors here")
TOLERANCE = 2e-6  # of the largest value; oneDNN's own rounding is about half of it


def channels_last(*shape: int) -> Tensor:
    return torch.randn(shape).contiguous(memory_format=torch.channels_last)


def relative_errors(spoil: Callable[[Tensor], Tensor] = lambda weight: weight) -> list[float]:
    """Over drawn shapes: against the convolution in float64."""
    random, found = Random(0), []  # noqa: S311  shapes, not secrets
    for _ in range(120):
        inputs, outputs = random.choice([1, 5, 8, 33, 64, 300]), random.choice([1, 7, 16, 24, 50, 136])
        padding = (random.randint(0, 3), random.randint(0, 3))
        sides = (random.randint(max(1, 3 - 2 * p), 19) for p in padding)
        x = channels_last(random.randint(1, 3), inputs, *sides)
        weight, bias = torch.randn(outputs, inputs, 3, 3), torch.randn(outputs)
        if random.random() < 0.5:
            weight = weight.contiguous(memory_format=torch.channels_last)
        exact = conv2d(x.double(), weight.double(), bias.double(), padding=padding)
        other = channels_last(*exact.shape) if random.random() < 0.5 else None
        limits = random.choice([(0.0, float("inf")), (-0.5, 0.7), (-float("inf"), float("inf"))])
        packed = winograd.pack(spoil(weight), bias)
        y = winograd.run(x, packed, padding, limits, other)
        assert y.is_contiguous(memory_format=torch.channels_last)
        exact = exact if other is None else exact + other
        found.append(float((y - exact.clamp(*limits)).abs().max() / exact.abs().max()))
    return found


@pytest.mark.usefixtures("threads")
def test_equals_the_convolution() -> None:
    assert max(relative_errors()) < TOLERANCE


def test_a_wrong_tap_is_seen() -> None:
    def turned(weight: Tensor) -> Tensor:
        return weight.flip(2)

    assert median(relative_errors(turned)) > 1e3 * TOLERANCE  # of a map of one row only the middle is read


def test_a_picture_has_the_same_bits_in_any_batch() -> None:
    x, packed = channels_last(5, 40, 13, 11), winograd.pack(torch.randn(24, 40, 3, 3), None)
    limits = (0.0, float("inf"))
    together = winograd.run(x, packed, (1, 1), limits, None)
    torch.set_num_threads(2)
    for picture, wanted in zip(x.split(1), together.split(1), strict=True):
        found = winograd.run(
            picture.contiguous(memory_format=torch.channels_last), packed, (1, 1), limits, None
        )
        assert torch.equal(found, wanted)
    torch.set_num_threads(1)


ACTIVATIONS: list[Callable[[], nn.Module]] = [
    nn.Identity,
    nn.ReLU,
    nn.ReLU6,
    lambda: nn.LeakyReLU(0.2),
    nn.Hardswish,
    nn.SiLU,
]


class Residual(nn.Module):
    """Two convolutions, the second with a sum, as in a ResNet."""

    def __init__(self, activation: Callable[[], nn.Module], width: int) -> None:
        super().__init__()
        inner = width + 8
        self.first = nn.Sequential(nn.Conv2d(width, inner, 3, padding=1), nn.BatchNorm2d(inner), activation())
        self.second = nn.Sequential(nn.Conv2d(inner, width, 3, padding=1, bias=False), nn.BatchNorm2d(width))
        self.last = activation()

    def forward(self, x: Tensor) -> Any:
        return self.last(self.second(self.first(x)) + x)


def block(activation: Callable[[], nn.Module], width: int = 32) -> nn.Module:
    made = Residual(activation, width)
    for norm in (made.first[1], made.second[1]):
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2.0)
        norm.weight.data.uniform_(0.5, 2.0)
    return made.eval().requires_grad_(False).to(memory_format=torch.channels_last)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes that were run in tiles."""
    seen: list[tuple[int, ...]] = []
    run = winograd.run

    def watched(x: Tensor, *rest: Any) -> Tensor:
        seen.append(tuple(x.shape))
        return run(x, *rest)

    monkeypatch.setattr(winograd, "run", watched)
    return seen


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_frozen_blocks(activation: Callable[[], nn.Module], runs: list[tuple[int, ...]]) -> None:
    model, x = block(activation), channels_last(2, 32, 15, 12)
    exact = copy.deepcopy(model).double()(x.double())
    found = gf.accelerate_(model)(x)
    assert runs == [(2, 32, 15, 12), (2, 40, 15, 12)]
    assert float((found - exact).abs().max() / exact.abs().max()) < TOLERANCE


def test_weights_that_change_are_packed_again(runs: list[tuple[int, ...]]) -> None:
    model, x = gf.accelerate_(block(nn.ReLU)), channels_last(2, 32, 15, 12)
    model(x)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    found, plain = model(x), gf.restore_(copy.deepcopy(model))
    assert len(runs) == 4
    torch.testing.assert_close(found, plain(x), rtol=0, atol=1e-5)


# Of the second, batch norms are not folded into the weights: they have more numbers than the maps.
@pytest.mark.parametrize("shape", [(8, 32, 16, 16), (8, 128, 12, 12)])
def test_trained_layers_and_their_gradients(shape: tuple[int, ...], runs: list[tuple[int, ...]]) -> None:
    plain = gf.apply_(block(nn.ReLU, shape[1]), gf.GradientFilter(patch=2), "all")
    fused = gf.accelerate_(copy.deepcopy(plain))
    x = channels_last(*shape)
    outputs = [model(x) for model in (plain, fused)]
    assert len(runs) == 2
    torch.testing.assert_close(*outputs, rtol=0, atol=1e-5)
    for y in outputs:
        y.square().mean().backward()
    for mine, theirs in zip(fused.parameters(), plain.parameters(), strict=True):
        if theirs.grad is not None:
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=0, atol=1e-5 * theirs.grad.abs().max())


def test_what_is_left_to_one_dnn(runs: list[tuple[int, ...]]) -> None:
    large = (2, 64, 12, 12)
    others: list[tuple[nn.Conv2d, Tensor]] = [
        (nn.Conv2d(64, 64, 3, stride=2), channels_last(*large)),
        (nn.Conv2d(64, 64, 3, dilation=2), channels_last(*large)),
        (nn.Conv2d(64, 64, 3, groups=2), channels_last(*large)),
        (nn.Conv2d(64, 64, (3, 1)), channels_last(*large)),
        (nn.Conv2d(64, 16, 3), channels_last(*large)),  # few channels
        (nn.Conv2d(64, 64, 3), channels_last(2, 64, 7, 7)),  # a small map
        (nn.Conv2d(64, 64, 3), torch.randn(large)),  # another layout
        (nn.Conv2d(64, 64, 3).double(), channels_last(*large).double()),
        (nn.Conv2d(64, 64, 3), channels_last(0, *large[1:])),
    ]
    for conv, x in others:
        conv.requires_grad_(False)
        torch.testing.assert_close(FusedConv(conv).frozen(x), conv(x), rtol=0, atol=1e-5)
    assert not runs
    FusedConv(nn.Conv2d(64, 64, 3).requires_grad_(False)).frozen(channels_last(*large))
    assert runs == [large]


def test_large_and_small_maps_in_turn_pack_once(monkeypatch: pytest.MonkeyPatch) -> None:
    packed, pack = [], winograd.pack
    monkeypatch.setattr(winograd, "pack", lambda *given: packed.append(given) or pack(*given))
    fused = FusedConv(nn.Conv2d(32, 32, 3, padding=1).requires_grad_(False))
    large, small = channels_last(1, 32, 16, 16), channels_last(1, 32, 8, 8)
    for x in (large, small, large, small):
        torch.testing.assert_close(fused.frozen(x), fused.conv(x), rtol=0, atol=1e-5)
    assert len(packed) == 1


def watched_calls() -> dict[str, Callable[[nn.Module, Tensor], Tensor]]:
    from torch.fx.experimental.proxy_tensor import make_fx

    return {
        "make_fx": lambda f, x: make_fx(f)(torch.randn_like(x))(x),
        "vmap": lambda f, x: torch.vmap(f)(x[None])[0],
        "negative view": lambda f, x: f(torch._neg_view(-x)),
    }


@pytest.mark.parametrize("way", watched_calls())
def test_calls_that_are_watched_run_as_ever(way: str) -> None:
    model, x = block(nn.ReLU), channels_last(2, 32, 16, 16)
    wanted = model(x)
    torch.testing.assert_close(watched_calls()[way](gf.accelerate_(model), x), wanted, rtol=0, atol=1e-5)


def spoiled(**changes: Tensor) -> nn.Conv2d:
    conv = nn.Conv2d(64, 64, 3).requires_grad_(False)
    for name, value in changes.items():
        setattr(conv, name, nn.Parameter(value, requires_grad=False))
    return conv


@pytest.mark.parametrize(
    "conv",
    [
        spoiled(weight=torch.empty(64, 64, 3, 3, device="meta")),
        spoiled(weight=torch.zeros(64, 32, 3, 3)),
        spoiled(bias=torch.zeros(64).half()),
        spoiled(bias=torch.zeros(9)),
    ],
)
def test_weights_that_do_not_fit_are_refused_by_torch(conv: nn.Conv2d) -> None:
    with pytest.raises((RuntimeError, NotImplementedError)):
        FusedConv(conv).frozen(channels_last(2, 64, 12, 12))


def test_maps_that_do_not_fit_are_refused_by_torch(runs: list[tuple[int, ...]]) -> None:
    conv = nn.Conv2d(64, 64, 3).requires_grad_(False)
    for shape in ((1, 32, 20, 20), (1, 64, 2, 200)):
        with pytest.raises(RuntimeError):
            FusedConv(conv).frozen(channels_last(*shape))
    assert not runs
