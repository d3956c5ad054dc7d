"""Walsh coefficients: between the gradient filter (order 1) and exact backpropagation (all orders)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import gradfilter as gf
from gradfilter.errors import PlanError
from gradfilter.ops import walsh
from gradfilter.ops.walsh import Basis
from oracle import Layer
from oracles import Problem
from oracles.walsh import functions, low_pass, smoothed
from verdicts import report

POINT = Layer((1, 1), (1, 1), (1, 1), ((0, 0), (0, 0)))
SIDES = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class Case:
    """A 1x1 convolution with any groups and layout, or a linear layer over a map or over tokens."""

    seed: int
    kind: str
    groups: int
    channels: tuple[int, int]
    size: tuple[int, int]
    batch: int
    bias: bool
    patch: int | tuple[int, int]
    order: int
    layout: torch.memory_format

    @staticmethod
    def of(seed: int) -> Case:
        rng = Random(seed)  # noqa: S311
        kind = rng.choice(["conv", "conv", "map", "tokens"])
        groups = rng.choice([1, 1, 2, 3]) if kind == "conv" else 1
        return Case(
            seed,
            kind,
            groups,
            channels=(groups * rng.randint(1, 3), groups * rng.randint(1, 3)),
            size=(rng.randint(1, 19), rng.randint(1, 19)),
            batch=rng.choice([0, 1, 2, 3]),
            bias=rng.random() < 0.5,
            patch=rng.choice([rng.choice(SIDES), (rng.choice(SIDES), rng.choice(SIDES))]),
            order=rng.choice([1, 2, 3, 4, 7, 20]),
            layout=rng.choice([torch.contiguous_format, torch.channels_last]),
        )

    def layer(self) -> Any:
        a, b = self.channels
        if self.kind == "conv":
            made: nn.Module = nn.Conv2d(a, b, 1, groups=self.groups, bias=self.bias)
        else:
            made = nn.Linear(a, b, bias=self.bias)
        random = torch.Generator().manual_seed(self.seed)
        with torch.no_grad():
            for parameter in made.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=random))
        return made.double()

    def maps(self) -> tuple[Tensor, Tensor]:
        """Input and incoming gradient, as convolutions see them."""
        random = torch.Generator().manual_seed(self.seed + 1)
        shapes = [(self.batch, c, *self.size) for c in self.channels]
        x, g = (torch.randn(shape, generator=random, dtype=torch.float64) for shape in shapes)
        return x.to(memory_format=self.layout), g.to(memory_format=self.layout)

    def given(self, maps: Tensor) -> Tensor:
        """As the layer takes them."""
        if self.kind == "conv":
            return maps
        moved = maps.movedim(1, -1)
        return moved.flatten(1, 2) if self.kind == "tokens" else moved

    @property
    def options(self) -> dict[str, Any]:
        tokens = {"tokens": self.size} if self.kind == "tokens" else {}
        return {"patch": self.patch, **tokens}


def gradients(layer: nn.Module, method: gf.Method, x: Tensor, g: Tensor) -> list[Tensor]:
    """Of the input, then of the parameters."""
    leaf = x.detach().requires_grad_()
    model = gf.apply_(nn.Sequential(layer, nn.Identity()), method, example=x)
    assert type(model[0].gradfilter_method) is type(method)
    model(leaf).backward(g)
    return [leaf.grad, *(p.grad for p in layer.parameters())]  # type: ignore[list-item]


def differences(found: list[Tensor], expected: list[Tensor]) -> list[str]:
    return [
        f"gradient {i} is off by {(a - b).abs().max()}"
        for i, (a, b) in enumerate(zip(found, expected, strict=True))
        if a.shape != b.shape or (a.numel() and (a - b).abs().max() > 1e-10 * (1 + b.abs().max()))
    ]


def from_oracle(case: Case) -> list[Tensor]:
    x, g = case.maps()
    layer = case.layer()
    weight = layer.weight.detach().view(*layer.weight.shape[:2], 1, 1)
    problem = Problem(replace(POINT, groups=case.groups), x.numpy(), weight.numpy(), g.numpy())
    want = smoothed(problem, case.patch, case.order)
    x_grad = case.given(torch.from_numpy(want.x))
    weight_grad = torch.from_numpy(want.w).view_as(layer.weight)
    return [x_grad, weight_grad, *([torch.from_numpy(want.b)] if case.bias else [])]


def wrong_gradients(case: Case) -> list[str]:
    x, g = map(case.given, case.maps())
    method = gf.WalshHadamard(order=case.order, **case.options)
    return differences(gradients(case.layer(), method, x, g), from_oracle(case))


def test_gradients_equal_the_oracle() -> None:
    message = report(map(Case.of, range(400)), wrong_gradients)
    assert not message, message


MISTAKES: dict[str, tuple[str, Any]] = {
    "functions in another order": ("_walsh", lambda right: lambda side: right(side).flip(0)),
    "functions that are not orthonormal": (
        "_functions",
        lambda right: lambda *how: right(*how) * 1.01,
    ),
    "coefficients of the neighbour": ("_index", lambda right: lambda *how: (right(*how) - 1).clamp(min=0)),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_comparison_notices(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, broken = MISTAKES[mistake]
    remembered = walsh._functions
    remembered.cache_clear()
    monkeypatch.setattr(walsh, name, broken(getattr(walsh, name)))
    assert report(map(Case.of, range(60)), wrong_gradients)
    remembered.cache_clear()


# The two limits


def test_order_one_is_the_gradient_filter() -> None:
    def judge(case: Case) -> list[str]:
        x, g = map(case.given, case.maps())
        ours = gradients(case.layer(), gf.WalshHadamard(order=1, **case.options), x, g)
        return differences(ours, gradients(case.layer(), gf.GradientFilter(**case.options), x, g))

    message = report(map(Case.of, range(200)), judge)
    assert not message, message


def test_order_two_is_another_method() -> None:
    large = (c for c in map(Case.of, range(999)) if c.batch and min(c.size) > 8 and c.patch == 8)
    case = next(large)
    x, g = map(case.given, case.maps())
    ours = gradients(case.layer(), gf.WalshHadamard(order=2, **case.options), x, g)
    assert differences(ours, gradients(case.layer(), gf.GradientFilter(**case.options), x, g))


def test_every_order_is_exact() -> None:
    """Twice the patch less 1 keeps all functions, one less does not."""

    def judge(case: Case) -> list[str]:
        x, g = map(case.given, case.maps())
        sides = case.patch if isinstance(case.patch, tuple) else (case.patch, case.patch)
        method = gf.WalshHadamard(order=sum(sides) - 1, **case.options)
        layer = case.layer()
        leaf = x.detach().requires_grad_()
        layer(leaf).backward(g)
        exact = [leaf.grad, *(p.grad for p in layer.parameters())]
        return differences(gradients(case.layer(), method, x, g), exact)  # type: ignore[arg-type]

    message = report(map(Case.of, range(200)), judge)
    assert not message, message
    assert Basis((8, 8), (4, 4), 7).count == 64 > Basis((8, 8), (4, 4), 6).count


def test_more_functions_come_closer() -> None:
    """Of a smooth signal each order leaves less of the weight gradient out."""
    ramp = torch.linspace(0, 1, 16, dtype=torch.float64)
    maps = torch.stack([ramp[:, None] + ramp, ramp[:, None] * ramp]).unsqueeze(0)
    errors = []
    for order in (1, 2, 3, 5, 15):
        layer = nn.Conv2d(2, 2, 1, bias=False, dtype=torch.float64)
        found = gradients(layer, gf.WalshHadamard(8, order), maps, maps)[1]
        errors.append(float((found.view(2, 2) - torch.einsum("nohw,nchw->oc", maps, maps)).abs().max()))
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1e-12 < errors[-2]


# Functions


@pytest.mark.parametrize("side", range(1, 18))
def test_functions_are_orthonormal_and_smooth_ones_come_first(side: int) -> None:
    found = walsh._functions(side, side, torch.float64, torch.device("cpu"))
    assert torch.allclose(found @ found.t(), torch.eye(side, dtype=torch.float64), atol=1e-12)
    changes = [int(c) for c in ((found[:, 1:] > 0) != (found[:, :-1] > 0)).sum(1)]
    assert changes == list(range(side))
    np.testing.assert_allclose(found.numpy(), functions(side), atol=1e-12)


def test_coefficients_and_back_is_the_low_pass() -> None:
    x = torch.randn(2, 3, 11, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    basis = Basis((11, 6), (4, 8), 3)
    smooth = basis.synthesise(basis.analyse(x))
    np.testing.assert_allclose(smooth.numpy(), low_pass(x.numpy(), (4, 8), 3), atol=1e-12)
    again = basis.synthesise(basis.analyse(smooth))
    assert torch.allclose(again, smooth, atol=1e-12)
    assert not torch.allclose(smooth, x)


# Tokens that belong to no map


@pytest.mark.parametrize("extra", [1, 2])
@pytest.mark.parametrize("order", [1, 2, 99])
def test_class_tokens_are_exact(extra: int, order: int) -> None:
    random = torch.Generator().manual_seed(extra)
    size = (7, 10)
    x, g = (torch.randn(3, extra + 70, c, generator=random, dtype=torch.float64) for c in (5, 4))
    layer = nn.Linear(5, 4, dtype=torch.float64)
    method = gf.WalshHadamard(4, order, tokens=size, extra_tokens=extra)
    x_grad, weight_grad, bias_grad = gradients(layer, method, x, g)

    def smooth(t: Tensor) -> Tensor:
        maps = t[:, extra:].unflatten(1, size).movedim(-1, 1)
        left = torch.from_numpy(low_pass(maps.numpy(), 4, order)).movedim(1, -1).flatten(1, 2)
        return torch.cat([t[:, :extra], left], 1)

    assert torch.allclose(x_grad, smooth(g) @ layer.weight)
    assert torch.allclose(x_grad[:, :extra], g[:, :extra] @ layer.weight)
    assert torch.allclose(weight_grad, torch.einsum("nlo,nlc->oc", smooth(g), smooth(x)))
    assert torch.allclose(bias_grad, g.sum((0, 1)))


# Settings and refusals


def test_settings_are_checked() -> None:
    for settings in ({"patch": 3}, {"patch": (4, 6)}, {"patch": 0}, {"patch": ()}, {"patch": 2.0}):
        with pytest.raises(PlanError, match="patch must be powers of two"):
            gf.WalshHadamard(**settings)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="order must be a whole number of at least 1, not 0"):
        gf.WalshHadamard(order=0)
    with pytest.raises(PlanError, match=r"with tokens=\(H, W\)"):
        gf.WalshHadamard(extra_tokens=1)
    assert gf.WalshHadamard(patch=[2, 4]) == gf.WalshHadamard(patch=(2, 4))  # type: ignore[arg-type]


REFUSED: list[tuple[nn.Module, tuple[int, ...], str]] = [
    (nn.Conv2d(4, 4, 3, padding=1), (2, 4, 8, 8), "use GradientFilter"),
    (nn.Conv2d(4, 4, 1, stride=2), (2, 4, 8, 8), "use GradientFilter"),
    (nn.Conv2d(4, 4, 1, padding=1), (2, 4, 8, 8), "use GradientFilter"),
    (nn.ConvTranspose2d(4, 4, 1), (2, 4, 8, 8), "use GradientFilter"),
    (nn.Linear(4, 4), (2, 4), "use Exact"),
    (nn.Linear(4, 4), (2, 9, 4), "set tokens=(H, W)"),
    (nn.Conv1d(4, 4, 1), (2, 4, 8), "has 2 numbers but the map has 1 axes"),
]


@pytest.mark.parametrize(("layer", "shape", "reason"), REFUSED, ids=[str(row[0]) for row in REFUSED])
def test_what_does_not_fit_stays_exact(layer: nn.Module, shape: tuple[int, ...], reason: str) -> None:
    model = nn.Sequential(layer, nn.Identity())
    row = gf.plan(model, gf.WalshHadamard(patch=(4, 4)), example=torch.zeros(shape)).rows[0]
    assert reason in row.reason
    assert row.method == gf.Exact()


# Costs


def test_costs() -> None:
    """Patches of 8 with 6 of 64 functions; the ragged last column of patches, 4 wide, has 6 of 32."""
    model = nn.Sequential(nn.Conv2d(16, 32, 1), nn.Identity())
    x = torch.zeros(2, 16, 8, 12)
    row = gf.plan(model, gf.WalshHadamard(8, 3), example=x).rows[0]
    assert row.after is not None
    assert row.after.kept == 4 * 2 * 16 * 12
    product, transform = 2 * 12 * 16 * 32, 2 * 32 * (8 * 12 * 3 + 3 * 12 * 3)
    assert row.after.backward_macs == product + transform


class Largest(TorchDispatchMode):
    """Notes the most bytes that one operator's result has."""

    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        own = {t.untyped_storage()._cdata for t in tree_leaves(args) if isinstance(t, Tensor)}
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in own:
                self.bytes = max(self.bytes, tensor.untyped_storage().nbytes())
        return result


def keeping() -> Iterator[tuple[Tensor, int]]:
    for layout in (torch.contiguous_format, torch.channels_last):
        for size in ((32, 32), (28, 28), (7, 7)):
            for order in (1, 3, 8, 15):
                yield torch.randn(2, 16, *size).to(memory_format=layout), order


def test_keeping_makes_nothing_larger_than_the_input() -> None:
    for x, order in keeping():
        basis = Basis(tuple(x.shape[2:]), (8, 8), order)
        basis.analyse(x)  # functions are made once
        with Largest() as seen:
            coefficients = basis.analyse(x)
        assert seen.bytes <= 4 * x.numel(), (x.shape, order)
        assert coefficients.untyped_storage().nbytes() == 4 * 2 * 16 * basis.count
        assert coefficients.is_contiguous(
            memory_format=torch.channels_last if x.stride(1) == 1 else torch.contiguous_format
        )


def test_what_is_larger_than_the_input_is_noticed() -> None:
    x = torch.randn(2, 16, 32, 32)
    with Largest() as seen:
        torch.stack([x * sign for sign in (1, -1)])
    assert seen.bytes == 2 * 4 * x.numel()
