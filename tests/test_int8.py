"""Gradient filtering in int8, and the gradients of parameters that are stored in int8."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradfilter as gf
from gradfilter.errors import PlanError
from gradfilter.ops import int8
from gradfilter.ops.int8 import Int8, dequantized, integer_product, quantized, rounded
from oracle import Layer, conv_forward
from oracles.int8 import int8 as rounded_by_oracle

METHOD_MODULE = importlib.import_module("gradfilter.methods.int8_gradients")


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def applied(layer: Any, method: gf.Method) -> nn.Module:
    with torch.no_grad():
        for seed, parameter in enumerate(layer.parameters()):
            parameter.copy_(noise(*parameter.shape, seed=seed))
    return gf.apply_(nn.Sequential(layer.double(), nn.Identity()), method)


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    leaf = x.clone().requires_grad_()
    model.zero_grad()
    model(leaf).sin().sum().backward()
    return [leaf.grad, *(p.grad for p in model.parameters())]  # type: ignore[list-item]


# --- numbers


@pytest.mark.parametrize("by_row", [False, True])
def test_rounding_is_that_of_the_oracle(by_row: bool) -> None:
    x = noise(5, 3, 7) * torch.tensor([1e-3, 1, 10, 1e3, 0]).view(5, 1, 1)
    expected = rounded_by_oracle(x.numpy(), by_row)
    q = quantized(x, by_row)
    assert int(q.values.abs().max()) == 127
    for found in (rounded(x, by_row), dequantized(q, x.dtype)):
        assert np.abs(found.numpy() - expected).max() <= 1e-12
    assert np.abs(rounded(x, not by_row).numpy() - expected).max() > 1e-3  # the negative control


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_small_halves_are_not_rounded_away(dtype: torch.dtype) -> None:
    x = (noise(100) * 1e-4).to(dtype)
    found = rounded(x, False)
    assert found.dtype == dtype
    assert (found.double() - x.double()).abs().max() <= 2e-6


def test_nothing_to_round() -> None:
    for x in (torch.zeros(2, 3), torch.zeros(0, 3), torch.zeros(2, 0)):
        for by_row in (False, True):
            assert torch.equal(dequantized(quantized(x, by_row), x.dtype), x)


# --- the method


def test_the_forward_is_that_of_rounded_numbers() -> None:
    layer = nn.Conv2d(3, 4, 3, padding=1, bias=False)
    model, x = applied(layer, gf.Int8Gradients(scaling="sample")), noise(2, 3, 8, 8)
    geometry = Layer((3, 3), (1, 1), (1, 1), ((1, 1), (1, 1)))
    weight = layer.weight.detach().numpy()
    expected = conv_forward(geometry, rounded_by_oracle(x.numpy(), True), rounded_by_oracle(weight, True))
    found = model(x.requires_grad_()).detach().numpy()
    assert np.abs(found - expected).max() <= 1e-12
    assert np.abs(found - conv_forward(geometry, x.detach().numpy(), weight)).max() > 1e-3
    assert not gf.Int8Gradients.forward_is_exact


def test_the_plan_says_that_the_forward_is_rounded() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3))
    table = str(gf.plan(model, gf.Int8Gradients(), "last:1")).splitlines()
    assert "reason" in table[0]
    assert "int8" not in table[1]  # frozen
    assert "the forward is rounded to int8; int8 products: " in table[2]
    assert "reason" not in str(gf.plan(model, gf.GradientFilter(), "last:1"))


@pytest.mark.parametrize("patch", [1, 2])
def test_int8_is_what_is_kept(patch: int) -> None:
    model, x = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Identity()), noise(2, 3, 8, 8).float()
    plan = gf.plan(model, gf.Int8Gradients(patch), example=x)
    gf.apply_(model, plan)
    with gf.kept_bytes(model) as kept:
        model(x)
    assert sum(kept.values()) == plan.kept[1] == x.numel() // patch**2 + 4


def test_a_scale_per_sample_is_finer_for_small_samples() -> None:
    x = noise(2, 3, 8, 8)
    x[0] *= 1000
    layer = nn.Conv2d(3, 4, 1, bias=False)
    errors = {}
    for scaling in ("tensor", "sample"):
        model = applied(layer, gf.Int8Gradients(patch=1, scaling=scaling))  # type: ignore[arg-type]
        errors[scaling] = float((model(x) - F.conv2d(x, layer.weight))[1].detach().norm())
        gf.restore_(model)
    assert errors["sample"] < 0.01 * errors["tensor"]


def test_it_trains() -> None:
    torch.manual_seed(0)
    model = gf.apply_(gf.models.build("tiny", classes=2).eval(), gf.Int8Gradients(patch=2))
    x, labels = noise(16, 3, 16, 16).float(), torch.arange(16) % 2
    x[labels == 1] += 0.5
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), labels)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]


def test_transposed_convolutions_stay_exact() -> None:
    model = nn.Sequential(nn.ConvTranspose2d(3, 4, 3), nn.Identity())
    assert gf.plan(model, gf.Int8Gradients()).rows[0].reason == "no int8 for transposed convolutions"


@pytest.mark.parametrize("settings", [{"patch": 0}, {"patch": 1.5}, {"taps": "some"}, {"scaling": "row"}])
def test_wrong_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match=f"{next(iter(settings))} must be"):
        gf.Int8Gradients(**settings)


# --- products of integers


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """As on a processor with dot products of int8; how many there were."""
    made: list[int] = []

    def noted(a: Int8, b: Int8, factor: float) -> Tensor | None:
        made.append(len(a.values))
        return integer_product(a, b, factor)

    monkeypatch.setattr(METHOD_MODULE, "has_integer_products", lambda: True)
    monkeypatch.setattr(METHOD_MODULE, "integer_product", noted)
    return made


CASES: list[tuple[nn.Module, gf.Method, tuple[int, ...], bool]] = [
    (nn.Conv2d(3, 4, 1), gf.Int8Gradients(1), (2, 3, 7, 7), True),
    (nn.Conv2d(3, 4, 1), gf.Int8Gradients(2), (2, 3, 8, 8), True),
    (nn.Conv2d(3, 4, 3, padding=1), gf.Int8Gradients(2, "collapse"), (2, 3, 8, 8), True),
    (nn.Linear(3, 4), gf.Int8Gradients(1), (2, 5, 3), True),
    (nn.Linear(3, 4), gf.Int8Gradients(1), (6, 3), True),
    (nn.Conv2d(3, 4, 1), gf.Int8Gradients(2), (2, 3, 7, 7), False),  # ragged: patches have weights
    (nn.Conv2d(3, 4, 1, stride=2), gf.Int8Gradients(1), (2, 3, 8, 8), False),
    (nn.Conv2d(4, 4, 1, groups=2), gf.Int8Gradients(1), (2, 4, 8, 8), False),
    (nn.Conv2d(3, 4, 3, padding=1), gf.Int8Gradients(2), (2, 3, 8, 8), False),
    (nn.Conv2d(3, 4, 1), gf.Int8Gradients(1, scaling="sample"), (2, 3, 7, 7), False),
]


@pytest.mark.parametrize(("layer", "method", "shape", "integer"), CASES)
def test_integer_products_equal_the_simulated(
    layer: nn.Module,
    method: gf.Method,
    shape: tuple[int, ...],
    integer: bool,
    products: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, x = applied(layer, method), noise(*shape)
    found = gradients(model, x)
    assert bool(products) == integer
    assert ("int8 products: integer" in method.warns) == (method.scaling == "tensor")  # type: ignore[attr-defined]
    monkeypatch.setattr(METHOD_MODULE, "has_integer_products", lambda: False)
    for one, other in zip(found, gradients(model, x), strict=True):
        assert torch.allclose(one, other, rtol=1e-12, atol=1e-12)
    gf.restore_(model)
    assert not torch.allclose(found[1], gradients(model, x)[1], rtol=1e-6)  # exact ones are others


def test_sums_that_could_overflow_are_left_to_float(monkeypatch: pytest.MonkeyPatch) -> None:
    q = Int8(torch.full((8, 2), 127, dtype=torch.int8), torch.ones(1, 1))
    assert integer_product(q, q, 1.0) is not None
    assert int8._MOST_ROWS * 127**2 < 2**31 <= (int8._MOST_ROWS + 1) * 127**2
    monkeypatch.setattr(int8, "_MOST_ROWS", 7)
    assert integer_product(q, q, 1.0) is None


# --- quantisation-aware scaling


def stored_in_int8(weight: Tensor, bias: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A toy int8 convolution: whole-numbered parameters, and their scales."""
    w_scale, x_scale = weight.abs().amax((1, 2, 3)) / 127, x.abs().max() / 127
    w = (weight / w_scale.view(-1, 1, 1, 1)).round()
    return w, (bias / (w_scale * x_scale)).round(), w_scale, w_scale * x_scale


def test_scaled_gradients_have_the_ratios_of_the_float_model() -> None:
    x, sizes = noise(2, 3, 8, 8), torch.tensor([1e-3, 1.0, 0.1, 30.0])
    weight, bias, w_scale, b_scale = stored_in_int8(
        noise(4, 3, 3, 3, seed=1) * sizes.view(-1, 1, 1, 1), noise(4, seed=2) * sizes, x
    )
    as_float = [
        (weight * w_scale.view(-1, 1, 1, 1)).requires_grad_(),
        (bias * b_scale).requires_grad_(),
    ]
    stored = [weight.requires_grad_(), bias.requires_grad_()]
    F.conv2d(x, *as_float).sin().sum().backward()
    F.conv2d(x, weight * w_scale.view(-1, 1, 1, 1), bias * b_scale).sin().sum().backward()

    def ratios(p: Tensor) -> Tensor:
        assert p.grad is not None
        return (
            p.detach().flatten(1).norm(dim=1) / p.grad.flatten(1).norm(dim=1) if p.dim() > 1 else p / p.grad
        )

    wanted = [ratios(p).detach() for p in as_float]
    for p, scale, ratio in zip(stored, (w_scale, b_scale), wanted, strict=True):
        assert torch.allclose(ratios(p).detach() * scale.square(), ratio, rtol=1e-12)  # unscaled: off by s^2
        assert not torch.allclose(ratios(p).detach(), ratio, rtol=0.5)
    gf.scale_quantized_gradients_([(weight, w_scale), (bias, b_scale), (None, 1.0), (torch.zeros(1), 1.0)])
    for p, ratio in zip(stored, wanted, strict=True):
        assert torch.allclose(ratios(p).detach(), ratio, rtol=1e-12)


def test_one_scale_for_all_channels() -> None:
    weight = torch.ones(3, 2, requires_grad=True)
    weight.sum().backward()
    gf.scale_quantized_gradients_([(weight, 0.5)])
    assert torch.equal(weight.grad, torch.full((3, 2), 4.0))  # type: ignore[arg-type]


@pytest.mark.parametrize("scale", [torch.ones(2), torch.ones(3, 1), 0.0, -1.0, float("nan")])
def test_wrong_scales_are_refused(scale: Any) -> None:
    weight = torch.ones(3, 2, requires_grad=True)
    weight.sum().backward()
    with pytest.raises(gf.GradFilterError, match=r"one per channel|greater than 0"):
        gf.scale_quantized_gradients_([(weight, scale)])
    assert torch.equal(weight.grad, torch.ones(3, 2))  # type: ignore[arg-type]


@pytest.mark.parametrize("sizes", [(6, 1, 1), (12, 1, 2), (1, 7, 33), (3, 5, 1), (9, 4, 6)])
@pytest.mark.parametrize(
    "lay_out", [lambda t: t, lambda t: t.t().contiguous().t(), lambda t: t.repeat(1, 3)[:, :1]]
)
def test_integer_products_of_single_rows_and_columns(
    sizes: tuple[int, int, int], lay_out: Callable[[Tensor], Tensor]
) -> None:
    rows, *columns = sizes
    a, b = (lay_out(torch.randint(-127, 128, (rows, c), dtype=torch.int8)) for c in columns)
    one = torch.ones(1, 1)
    found = integer_product(Int8(a, one), Int8(b, one), 1.0)
    assert found is not None
    assert torch.equal(found.double(), a.double().t() @ b.double())
