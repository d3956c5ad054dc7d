"""Walsh coefficients: between the gradient filter (order 1) and exact backpropagation (all orders)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
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
from gradfilter.spectral import SpectralGradient
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
    assert all(more <= less + 1e-9 for less, more in pairwise(errors))
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


def test_analyze_counts_the_energy_of_what_is_kept() -> None:
    """A fifth of it is in the class token, the rest in one function, which the first order leaves out."""
    model = nn.Sequential(nn.Linear(2, 1, bias=False), nn.Identity())
    x = torch.ones(1, 5, 2)
    signs = torch.tensor([1.0, 1.0, -1.0, 1.0, -1.0]).view(
        1, 5, 1
    )  # the map behind the token: left and right
    shares = []
    for order in (1, 2):
        method = gf.WalshHadamard((2, 2), order, tokens=[2, 2], extra_tokens=1)  # type: ignore[arg-type]
        plan = gf.plan(model, method, example=x)
        found = gf.analyze(model, x, lambda y: (y * signs).sum(), plan)
        shares.append(found.rows[0].dc_energy)
    assert shares == pytest.approx([1 / 5, 1])


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
    (nn.Linear(4, 4), (2, 0, 3, 4), "use Exact"),
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


# Coefficients stay coefficients from layer to layer


class Inverted(nn.Module):
    """MobileNetV2's block: widen, filter each channel, narrow."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        wide = 3 * channels
        self.body = nn.Sequential(
            *(nn.Conv2d(channels, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.ReLU6()),
            *(nn.Conv2d(wide, wide, 3, padding=1, groups=wide), nn.BatchNorm2d(wide), nn.ReLU6()),
            *(nn.Conv2d(wide, channels, 1, bias=False), nn.BatchNorm2d(channels)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


class Block(nn.Module):
    """Two 1x1 convolutions with their norms beside the identity, and nothing that is not linear."""

    def __init__(self, channels: int, between: nn.Module) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(channels, channels, 1), nn.BatchNorm2d(channels)
        self.between = between
        self.pair = nn.Sequential(nn.Conv2d(channels, channels, 1, groups=2), nn.BatchNorm2d(channels))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.pair(self.between(self.norm(self.conv(x))))


class Tokens(nn.Module):
    """Linear layers over maps (N, H, W, C), without and with something between them."""

    def __init__(self, channels: int, between: nn.Module) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(channels, channels), nn.Linear(channels, channels)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        y = x.movedim(1, -1)
        return (y + self.two(self.between(self.one(y)))).movedim(-1, 1)


def net(kind: type[nn.Module], between: type[nn.Module]) -> nn.Module:
    torch.default_generator.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 1), kind(4, between()), kind(4, between()), nn.Conv2d(4, 2, 1))
    for norm in model.modules():
        if isinstance(norm, nn.BatchNorm2d):
            norm.running_var.uniform_(0.5, 2)  # type: ignore[union-attr]
            nn.init.uniform_(norm.weight, 0.5, 1.5)
    return model.double().eval()


class LowPass(torch.autograd.Function):
    """A layer in plain torch with the backward of the method, on dense maps."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, layer: Any, settings: Any) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.layer, ctx.settings = layer, settings
        return type(layer).forward(layer, x)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        assert type(grad) is Tensor
        x, weight = ctx.saved_tensors
        channel, groups = (1, ctx.layer.groups) if isinstance(ctx.layer, nn.Conv2d) else (-1, 1)
        maps = [t.movedim(channel, 1).numpy() for t in (x, grad)]
        kernel = weight.reshape(*weight.shape[:2], 1, 1).numpy()
        found = smoothed(Problem(replace(POINT, groups=groups), maps[0], kernel, maps[1]), *ctx.settings)
        x_grad = torch.from_numpy(found.x).movedim(1, channel)
        weight_grad = torch.from_numpy(found.w.copy()).view_as(weight)
        return x_grad, weight_grad, torch.from_numpy(found.b), None, None


def layer_by_layer(model: nn.Module, x: Tensor, g: Tensor, patch: int, order: int) -> dict[str, Tensor]:
    layers = [layer for layer in model.modules() if isinstance(layer, nn.Conv2d | nn.Linear)]
    for layer in layers:
        layer.forward = partial(_run, layer, (patch, order))
    model(x).backward(g)
    return {
        name: p.grad
        for name, p in model.named_parameters()
        if p.grad is not None and any(p is own for layer in layers for own in layer.parameters())
    }


def _run(layer: Any, settings: tuple[int, int], x: Tensor) -> Tensor:
    result: Tensor = LowPass.apply(x, layer.weight, layer.bias, layer, settings)
    return result


def chain(model: nn.Module, x: Tensor, g: Tensor, patch: int, order: int) -> tuple[dict[str, Tensor], Any]:
    gf.apply_(model, gf.WalshHadamard(patch, order), example=x)
    y = model(x)
    with gf.count_fallbacks() as seen:
        y.backward(g)
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, dict(seen)


def maps_and_gradient(size: tuple[int, int]) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(5)
    shapes = [(2, c, *size) for c in (3, 2)]
    x, g = (torch.randn(shape, generator=random, dtype=torch.float64) for shape in shapes)
    return x, g


BETWEEN = {
    nn.Identity: {},
    nn.Dropout: {},
    nn.Tanh: {"TanhBackward0": 2},
    nn.ReLU: {"_ActivationBackward": 2},
}


@pytest.mark.parametrize("between", BETWEEN, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("kind", [Block, Tokens])
@pytest.mark.parametrize("size", [(8, 8), (7, 10)])
def test_chain_equals_layer_by_layer(
    kind: type[nn.Module], between: type[nn.Module], size: tuple[int, int]
) -> None:
    """Norms, sums and idle dropout pass coefficients on; the activation of each block gets the dense map."""
    x, g = maps_and_gradient(size)
    found, fallbacks = chain(net(kind, between), x, g, 4, 2)
    expected = layer_by_layer(net(kind, between), x, g, 4, 2)
    assert found.keys() == expected.keys()
    assert not differences([found[name] for name in found], [expected[name] for name in found])
    assert fallbacks == BETWEEN[between]


@pytest.mark.parametrize("kind", [Block, Tokens])
def test_chain_comparison_notices(kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: coefficients that lose their sign where branches join."""
    x, g = maps_and_gradient((7, 10))
    right = SpectralGradient.known[torch.ops.aten.add.Tensor]
    monkeypatch.setitem(SpectralGradient.known, torch.ops.aten.add.Tensor, lambda a, b: right(a, -b))
    found, _ = chain(net(kind, nn.Identity), x, g, 4, 2)
    expected = layer_by_layer(net(kind, nn.Identity), x, g, 4, 2)
    assert differences([found[name] for name in found], [expected[name] for name in found])


def test_other_settings_meet_as_dense_maps() -> None:
    """Layers of another order, or another method, get and give what they always do."""
    x, g = maps_and_gradient((7, 10))
    ours = {
        "0": gf.WalshHadamard(4, 2),
        "1": gf.WalshHadamard(4, 99),
        "2": gf.GradientFilter(1),
        "3": gf.Exact(),
    }
    model = nn.Sequential(*(nn.Conv2d(3, 3, 1) for _ in range(3)), nn.Conv2d(3, 2, 1)).double()
    exact = {"0": gf.WalshHadamard(4, 2), "*": gf.Exact()}
    found = []
    for methods in (ours, exact):
        gf.apply_(model, methods, example=x)
        model.zero_grad()
        with gf.count_fallbacks() as seen:
            model(x).backward(g)
        found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        gf.restore_(model)
        assert sum(seen.values()) == (1 if methods is ours else 0)
    assert len(found[0]) == 8
    assert not differences(*found)


def test_spectral_gradients_become_dense_for_unknown_operators() -> None:
    basis = Basis((7, 10), (4, 4), 2)
    maps = torch.randn(2, 3, 7, 10, dtype=torch.float64)
    gradient = SpectralGradient(basis.analyse(maps), basis, maps.shape)
    dense = gradient.dense()
    with gf.count_fallbacks() as seen:
        assert torch.equal(gradient.exp(), dense.exp())
        assert torch.equal(gradient + dense, dense + dense)
        assert torch.equal(gradient * dense, dense * dense)
        assert torch.equal(gradient.permute(0, 1, 3, 2), dense.permute(0, 1, 3, 2))
        assert torch.equal(gradient.sum((2, 3)), dense.sum((2, 3)))
    assert sum(seen.values()) == 5
    with gf.count_fallbacks() as seen:
        by_channel = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64).view(1, 3, 1, 1)
        kept = (-gradient.movedim(1, -1).movedim(-1, 1) * by_channel / 2 + gradient).clone().detach()
        total = kept.sum((0, 2, 3))
    assert not seen
    assert isinstance(kept, SpectralGradient)
    expected = dense - dense * by_channel / 2
    assert torch.allclose(kept.dense(), expected, atol=1e-12)
    assert torch.allclose(total, expected.sum((0, 2, 3)), atol=1e-12)


def test_inverted_blocks_exchange_coefficients_at_every_join() -> None:
    """Dense maps are only given to the activation before each narrow layer, fused or not."""
    found = []
    x = torch.randn(2, 3, 12, 20, generator=torch.Generator().manual_seed(1))
    for accelerate in (False, True):
        torch.default_generator.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 8, 1), *(Inverted(8) for _ in range(3)), nn.Conv2d(8, 4, 1)).eval()
        gf.apply_(model, gf.WalshHadamard(4, 2), example=x)
        if accelerate:
            gf.accelerate_(model)
        y = model(x)
        with gf.count_fallbacks() as seen:
            y.square().sum().backward()
        assert seen == {"_LayerBackward": 3}
        found.append([p.grad for p in model.parameters() if p.grad is not None])
    for plain, fused in zip(*found, strict=True):
        assert torch.allclose(plain, fused, rtol=1e-3, atol=1e-4 * float(plain.abs().max()))


@pytest.mark.parametrize("tokens", [196, (14,), (14, 0), "14x14"])
@pytest.mark.parametrize("method", [gf.GradientFilter, gf.WalshHadamard])
def test_tokens_that_are_no_map_are_refused(method: Any, tokens: Any) -> None:
    with pytest.raises(gf.GradFilterError, match="tokens must be the height and width of a map"):
        method(tokens=tokens)
    assert hash(method(tokens=[14, 14])) == hash(method(tokens=(14, 14)))
