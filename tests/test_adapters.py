"""Methods with parameters of their own: what they compute after some training, and what becomes of them."""

from __future__ import annotations

import copy
import io
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

import gradfilter as gf
from oracle import Layer, conv_gradients
from shapes import make_case
from verdicts import report

Array = NDArray[np.float64]
ADAPTERS: list[gf.Method] = [gf.LowRankAdapter(rank=3, alpha=2), gf.LiteResidual(kernel=3)]
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning")
every_adapter = pytest.mark.parametrize("method", ADAPTERS, ids=str)


def started(model: nn.Module, seed: int = 0) -> Any:
    """As after some training: no adapter is zero any more."""
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "gradfilter_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=random, dtype=torch.float64) / 4)
    return model


def tiny(method: Any = None, layers: str = "last:4", **how: Any) -> Any:
    torch.manual_seed(0)
    model = gf.models.build("tiny", classes=4).eval()
    return model if method is None else gf.apply_(model, {"head": gf.Exact(), "*": method}, layers, **how)


def images(count: int = 2) -> Tensor:
    return torch.randn(count, 3, 16, 16, generator=torch.Generator().manual_seed(3))


# --- low rank: the layer is one with another weight


def product_of(layer: Layer, down: Array, up: Array, shape: tuple[int, ...]) -> Array:
    """up times down in the shape of the weight, one channel at a time."""
    made = np.zeros(shape)
    outputs, rank = len(up) // layer.groups, up.shape[1]
    inputs = shape[0] // layer.groups if layer.transposed else shape[1]
    for group, o, i, r in product(range(layer.groups), range(outputs), range(inputs), range(rank)):
        strength = up[group * outputs + o, r].item()
        if layer.transposed:
            made[group * inputs + i, o] += strength * down[group * inputs + i, r]
        else:
            made[group * outputs + o, i] += strength * down[group * rank + r, i]
    return made


def wrong_low_rank(seed: int, flaw: float = 1.0) -> list[str]:
    """Against the oracle of a layer whose weight has the product added; ``flaw`` makes that wrong."""
    case, method = make_case(seed), gf.LowRankAdapter(rank=2, alpha=3)
    layer: Any = case.module()
    model = started(gf.apply_(nn.Sequential(layer, nn.Identity()), method), seed)
    (x, g), scale = case.tensors(), 1.5 * flaw
    leaf = x.detach().requires_grad_()
    y = model(leaf)
    y.backward(g)
    down, up, w = (
        t.detach().numpy().copy() for t in (layer.gradfilter_down, layer.gradfilter_up, layer.weight)
    )
    change = product_of(case.layer, down, up, w.shape)
    want = conv_gradients(case.layer, x.numpy(), w + scale * change, g.numpy(), (1,) * case.dims)
    wrong = []

    def check(what: str, got: Tensor | None, expected: Array) -> None:
        assert got is not None
        error = np.abs(got.numpy() - expected).max(initial=0.0)
        if error > 1e-10 * (1 + np.abs(expected).max(initial=0.0)):
            wrong.append(f"{what} is off by {error:.3g}")

    check("grad_x", leaf.grad, want.x)
    rng = np.random.default_rng(seed)
    for name, own in (("down", down), ("up", up)):  # along a random direction
        step = rng.normal(size=own.shape)
        along = (
            product_of(case.layer, step, up, w.shape)
            if name == "down"
            else product_of(case.layer, down, step, w.shape)
        )
        found = (layer.get_parameter(f"gradfilter_{name}").grad * torch.from_numpy(step)).sum()
        check(f"grad_{name}", found, np.asarray((scale * along * want.w).sum()))
    assert layer.weight.grad is None
    merged: Any = gf.merge_(model)
    check("the merged weight", layer.weight.detach(), w + scale * change)
    check("the merged output", merged(x).detach(), y.detach().numpy())
    return wrong


def test_low_rank_is_a_layer_with_another_weight() -> None:
    message = report(range(300), wrong_low_rank)
    assert not message, message


def test_a_wrong_scale_is_noticed() -> None:
    assert report(range(12), lambda seed: wrong_low_rank(seed, flaw=1.01))


@pytest.mark.parametrize("shape", [(4,), (3, 4), (2, 5, 4), (2, 3, 3, 4)])
def test_low_rank_of_linear_layers(shape: tuple[int, ...]) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Identity()).double()
    x = torch.randn(shape, dtype=torch.float64)
    started(gf.apply_(model, gf.LowRankAdapter(rank=2)))
    layer: Any = model[0]
    expected = F.linear(x, layer.weight + layer.gradfilter_up @ layer.gradfilter_down, layer.bias)
    torch.testing.assert_close(model(x), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gf.merge_(model)(x), expected, rtol=1e-12, atol=1e-12)


# --- lite residuals


def test_lite_residual_is_what_it_says() -> None:
    conv = nn.Conv2d(4, 6, 3, stride=2, padding=1).double()
    model = started(gf.apply_(nn.Sequential(conv, nn.Identity()), gf.LiteResidual(2, 2, 3)))
    x = torch.randn(2, 4, 9, 7, dtype=torch.float64)
    own = dict(conv.named_parameters())
    small = F.avg_pool2d(x, 2, 2, ceil_mode=True, count_include_pad=False)
    small = F.conv2d(small, own["gradfilter_conv"], padding=1, groups=2)
    small = F.relu(F.group_norm(small, 2, own["gradfilter_scale"], own["gradfilter_shift"]))
    small = F.conv2d(small, own["gradfilter_up"])
    expected = F.conv2d(x, conv.weight, conv.bias, 2, 1) + F.interpolate(small, (5, 4), mode="bilinear")
    torch.testing.assert_close(model(x), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("conv", "size"),
    [
        (nn.Conv1d(4, 3, 3, padding=1), (7,)),
        (nn.Conv2d(4, 6, 3, stride=2, groups=2), (5, 4)),
        (nn.Conv3d(2, 2, 2), (3, 4, 3)),
        (nn.ConvTranspose2d(4, 2, 3, stride=2), (3, 4)),
    ],
    ids=lambda value: str(value),
)
@every_adapter
def test_gradients_are_derivatives(method: gf.Method, conv: nn.Module, size: tuple[int, ...]) -> None:
    layer: Any = copy.deepcopy(conv).double()
    model = started(gf.apply_(nn.Sequential(layer, nn.Identity()), method))
    x = torch.randn(2, layer.in_channels, *size, dtype=torch.float64, requires_grad=True)
    own = {name: p for name, p in layer.named_parameters() if p.requires_grad}
    assert set(own) >= {"gradfilter_up"}

    def run(x: Tensor, *values: Tensor) -> Tensor:
        return torch.func.functional_call(layer, dict(zip(own, values, strict=True)), (x,))

    assert torch.autograd.gradcheck(run, (x, *own.values()))
    assert model(x).shape == conv.float()(x.float()).shape


def test_only_pooled_maps_are_kept() -> None:
    model, x = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.Flatten()), torch.randn(2, 8, 16, 16)
    plan = gf.plan(model, gf.LiteResidual(reduction=4), example=x)
    pooled = 2 * 8 * 4 * 4 * 4
    assert plan.rows[0].before
    assert plan.rows[0].before.kept == 16 * pooled
    assert plan.kept[1] < 4 * pooled


# --- the start, and bits


@every_adapter
def test_the_first_forward_is_the_plain_one(method: gf.Method) -> None:
    plain, model, x = tiny(), tiny(method), images()
    assert torch.equal(model(x), plain(x))
    with torch.no_grad():
        assert torch.equal(model(x), plain(x))
    assert not torch.equal(started(model)(x), plain(x))


@every_adapter
def test_zeros_keep_their_sign(method: gf.Method) -> None:
    layer: Any = nn.Conv2d(4, 4, 1)
    gf.apply_(nn.Sequential(layer, nn.Identity()), method)
    y, x = torch.tensor([-0.0, 0.0]).repeat(2, 4, 3, 2), torch.randn(2, 4, 3, 4)
    run = nn.functional.conv2d
    adapted = method.adapt(y, x, lambda x, w, b: run(x, w, b), layer)
    assert torch.equal(adapted.signbit(), y.signbit())
    assert not torch.equal((y + 0 * x).signbit(), y.signbit())  # which a plain sum would not


@every_adapter
def test_the_same_at_every_start_and_unlike_in_every_layer(method: gf.Method) -> None:
    first, second = (dict(tiny(method).named_parameters()) for _ in range(2))
    own = [name for name in first if name.endswith(("gradfilter_down", "gradfilter_conv"))]
    assert len(own) == 4
    assert all(torch.equal(first[name], second[name]) for name in own)
    two = gf.apply_(nn.Sequential(nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3)), method)
    a, b = (next(p for n, p in m.named_parameters() if "gradfilter" in n) for m in two)
    assert not torch.equal(a, b)


# --- surgery


@every_adapter
def test_restore_gives_the_original_back(method: gf.Method) -> None:
    plain, model, x = tiny(), tiny(method), images()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    started(model)(x).square().sum().backward()
    optimizer.step()
    gf.restore_(model)
    bias = {"inverted.body.0.0.bias"}
    for name, value in plain.state_dict().items():
        if not name.startswith("head") and name not in bias:
            assert torch.equal(value, model.state_dict()[name]), name
    assert list(plain.state_dict()) == list(model.state_dict())
    assert [type(m) for m in plain.modules()] == [type(m) for m in model.modules()]


@every_adapter
def test_only_adapters_and_what_the_method_says_train(method: gf.Method) -> None:
    model = tiny(method)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert all("gradfilter_" in name or name.startswith("head") for name in trained)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):  # at the first step what is before ``up`` has no gradient
        optimizer.zero_grad()
        model(images()).square().sum().backward()
        optimizer.step()
    moved = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.any()}
    assert moved == trained


@every_adapter
def test_copies_and_files(method: gf.Method) -> None:
    model, x = started(tiny(method)), images()
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert torch.equal(other(x), model(x))
        other(x).sum().backward()
        assert torch.equal(gf.restore_(other)(x), tiny()(x))
    loaded = tiny(method)
    loaded.load_state_dict(model.state_dict())
    assert torch.equal(loaded(x), model(x))


@every_adapter
@pytest.mark.parametrize("training", [True, False])
def test_accelerated_and_split(method: gf.Method, training: bool) -> None:
    model, x = started(tiny(method)).train(training), images()
    y = model(x)
    y.square().sum().backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    fast = gf.accelerate_(copy.deepcopy(model))
    fast.zero_grad()
    reasons = {row[0]: row[2] for row in gf.acceleration(fast).rows}
    assert reasons["inverted.body.2.0"] == "its method adds to its output"
    torch.testing.assert_close(fast(x), y, atol=1e-5, rtol=1e-4)
    fast(x).square().sum().backward()
    for name, parameter in fast.named_parameters():
        if name in grads:
            torch.testing.assert_close(parameter.grad, grads[name], atol=1e-3, rtol=1e-3, msg=name)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), y, atol=1e-5, rtol=1e-4)
    parts = gf.split(model)
    torch.testing.assert_close(parts.tail(parts.prefix(x)), y, atol=1e-5, rtol=1e-4)


@every_adapter
def test_costs_are_those_measured(method: gf.Method) -> None:
    x = images()
    for layers in ("all", "last:2"):
        model = tiny()
        plan = gf.plan(model, {"head": gf.Exact(), "*": method}, layers, example=x)
        gf.apply_(model, plan)
        with gf.kept_bytes(model) as kept:
            model(x)
        assert sum(kept.values()) == plan.kept[1]
        assert plan.total[1].forward_macs > plan.total[0].forward_macs


@every_adapter
def test_analyze(method: gf.Method) -> None:
    model = tiny().double()
    plan = gf.plan(model, {"head": gf.Exact(), "*": method}, "last:3")
    found = gf.analyze(model, (images().double(), torch.tensor([0, 1])), F.cross_entropy, plan)
    assert [row.name for row in found.rows] == ["head"] + [f"inverted.body.{i}.0" for i in (2, 1, 0)]
    head, last, middle, first = found.rows
    assert head.weight
    for row in (last, first):  # the weight does not train, but may be one that the adapter folds into
        assert (row.weight is None) == isinstance(method, gf.LiteResidual)
    assert middle.output
    assert middle.output.cosine == pytest.approx(1)
    assert first.output is None
    assert " - " in str(found)


def test_followers_see_the_adapted_output() -> None:
    """In a sequence, norm and activation would otherwise run with the layer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 1))
    x = images()
    started(gf.apply_(model.double(), gf.LowRankAdapter(rank=2)))
    y = model(x.double())
    torch.testing.assert_close(gf.merge_(model).eval()(x.double()), y, rtol=1e-12, atol=1e-12)


def test_compiled() -> None:
    model, x = started(tiny(gf.LowRankAdapter())), images()
    compiled = torch.compile(model, backend="eager")
    assert torch.allclose(compiled(x), model(x))
    with torch.no_grad():
        assert torch.allclose(compiled(x), model(x))


@every_adapter
def test_autocast(method: gf.Method) -> None:
    model = started(tiny(method))
    with torch.autocast("cpu", torch.bfloat16):
        y = model(images())
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert all(p.grad is not None and p.grad.dtype == p.dtype for p in model.parameters() if p.requires_grad)


@every_adapter
def test_a_layer_that_runs_twice(method: gf.Method) -> None:
    layer = nn.Conv2d(4, 4, 3, padding=1).double()
    model = started(gf.apply_(nn.Sequential(layer, nn.ReLU(), layer), method))
    x = images().double().repeat(1, 2, 1, 1)[:, :4]
    y = model(x)
    y.sum().backward()
    if isinstance(method, gf.LowRankAdapter):
        torch.testing.assert_close(gf.merge_(model)(x), y, rtol=1e-10, atol=1e-10)


# --- merging


def test_merging_float32() -> None:
    model, x = started(tiny(gf.LowRankAdapter(rank=2))), images()
    before = model(x)
    merged = gf.merge_(model)
    assert list(merged.state_dict()) == list(tiny().state_dict())
    torch.testing.assert_close(merged(x), before, atol=1e-5, rtol=1e-5)


class Scaled(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return self._conv_forward(x, self.weight * 2, self.bias)


def tied() -> nn.Module:
    model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1))
    model[1].weight = model[0].weight
    return model


REFUSED: list[tuple[Any, gf.Method, str]] = [
    (
        lambda: nn.Sequential(nn.Conv2d(3, 3, 1)),
        gf.LiteResidual(),
        "The LiteResidual of layer 0 cannot be merged",
    ),
    (lambda: nn.Sequential(nn.Conv2d(3, 3, 1)), gf.Exact(), "The model has no adapters to merge"),
    (lambda: nn.Sequential(Scaled(3, 3, 1)), gf.LowRankAdapter(), "a Scaled works its weight out itself"),
    (tied, gf.LowRankAdapter(), "other layers share its weight"),
]


@pytest.mark.parametrize(("make", "method", "sentence"), REFUSED, ids=[case[2] for case in REFUSED])
def test_what_cannot_be_merged_stays(make: Any, method: gf.Method, sentence: str) -> None:
    model, x = started(gf.apply_(make(), method)), images()
    before = model(x)
    with pytest.raises(gf.GradFilterError, match=sentence):
        gf.merge_(model)
    assert torch.equal(model(x), before)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: gf.LowRankAdapter(rank=0), "rank must be a whole number of at least 1, not 0"),
        (lambda: gf.LowRankAdapter(alpha=-1), "alpha must be a number above 0, not -1"),
        (lambda: gf.LiteResidual(reduction=0), "reduction must be a whole number"),
        (lambda: gf.LiteResidual(kernel=4), "kernel must be odd, not 4; use 5"),
    ],
)
def test_settings_are_checked(make: Any, sentence: str) -> None:
    with pytest.raises(gf.GradFilterError, match=sentence):
        make()


@pytest.mark.parametrize(
    ("conv", "rank"),
    [
        (nn.Conv2d(6, 6, 3, groups=6), 1),
        (nn.ConvTranspose2d(6, 6, 3, groups=6), 1),
        (nn.Conv2d(4, 8, 1, groups=4), 1),
        (nn.Conv2d(3, 8, 1), 3),
        (nn.Conv2d(16, 16, 3), 5),
    ],
)
def test_the_rank_is_no_larger_than_a_weight_can_have(conv: Any, rank: int) -> None:
    model = gf.apply_(nn.Sequential(conv), gf.LowRankAdapter(rank=5))
    assert model[0].gradfilter_up.shape[1] == rank
