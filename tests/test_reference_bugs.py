"""The gradient filter's reference code has 25 known limits and bugs, G1 to G25. Here each is a fact of ours.

Every test fails with the behaviour that its first line names.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import gradfilter as gf
from oracle import Layer, conv_gradients

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def prepared(layer: nn.Module) -> Any:
    """In float64, with parameters of its own."""
    layer = layer.double()
    with torch.no_grad():
        for i, parameter in enumerate(layer.parameters()):
            parameter.copy_(random(*parameter.shape, seed=7 + i))
    return layer


def gradients(
    layer: nn.Module, x: Tensor, g: Tensor | None = None, method: gf.Method | None = None
) -> dict[str, Tensor]:
    """Of the input, "x", and the parameters; by the filter of patch 2 if no method is given."""
    leaf = x.detach().requires_grad_()
    method = method or gf.GradientFilter(patch=2)
    model = gf.apply_(nn.Sequential(layer, nn.Identity()), method, example=x)
    assert type(layer.gradfilter_method) is type(method), "the method refuses the layer"
    y = model(leaf)
    y.backward(torch.ones_like(y) if g is None else g)
    found = {"x": leaf.grad} | {name: p.grad for name, p in layer.named_parameters()}
    gf.restore_(model)
    layer.zero_grad()
    return found  # type: ignore[return-value]


def exact(layer: nn.Module, x: Tensor, g: Tensor) -> dict[str, Tensor]:
    return gradients(layer, x, g, gf.Exact())


def per_axis(value: Any, axes: int) -> tuple[int, ...]:
    return tuple(value) if isinstance(value, tuple | list) else (value,) * axes


def by_definition(
    conv: Any, x: Tensor, g: Tensor, patch: int, taps: str = "overlap", mistake: str = ""
) -> dict[str, Tensor]:
    """What tests/oracle.py says that the gradients are."""
    axes = len(conv.kernel_size)
    spans = [d * (k - 1) for d, k in zip(conv.dilation, conv.kernel_size, strict=True)]
    same = conv.padding == "same"
    pads = [(t // 2, t - t // 2) for t in spans] if same else [(p, p) for p in per_axis(conv.padding, axes)]
    transposed = isinstance(conv, nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d)
    layer = Layer(
        tuple(conv.kernel_size),
        tuple(conv.stride),
        tuple(conv.dilation),
        tuple(pads),
        conv.groups,
        conv.padding_mode,
        transposed,
        tuple(conv.output_padding) if transposed else (),
    )
    arrays = (t.detach().numpy() for t in (x, conv.weight, g))
    found = conv_gradients(layer, *arrays, (patch,) * axes, taps, mistake=mistake)
    named = {"x": found.x, "weight": found.w, "bias": found.b}
    return {name: torch.from_numpy(np.array(named[name])) for name in ("x", *dict(conv.named_parameters()))}


def same(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-10) -> bool:
    assert found.keys() == expected.keys()
    return all(
        found[name].shape == expected[name].shape
        and torch.allclose(found[name], expected[name], rtol=tolerance, atol=tolerance)
        for name in expected
    )


def is_as_defined(conv: nn.Module, size: tuple[int, ...], patch: int = 2, batch: int = 2) -> bool:
    """Whether a convolution's filtered gradients, with both kinds of taps, are those of the definition."""
    conv = prepared(conv)
    x = random(batch, conv.in_channels, *size, seed=1)  # type: ignore[arg-type]
    g = random(*conv(x).shape, seed=2)
    return all(
        same(
            gradients(conv, x, g, gf.GradientFilter(patch, taps)),  # type: ignore[arg-type]
            by_definition(conv, x, g, patch, taps),
        )
        for taps in ("overlap", "collapse")
    )


def cosine(a: Tensor, b: Tensor) -> float:
    return float(F.cosine_similarity(a.flatten(), b.flatten(), 0))


@pytest.mark.parametrize("taps", ["overlap", "collapse"])
@pytest.mark.parametrize(("kernel", "stride"), [(1, 2), (1, 3), (2, 2)])
def test_g01_stride_does_not_scale_gradients(kernel: int, stride: int, taps: Any) -> None:
    """Not: gradients stride * stride times too large. Constant signals have no detail that is lost."""
    conv = prepared(nn.Conv2d(3, 4, kernel, stride))
    x = random(1, 3, 1, 1).expand(2, 3, 12, 12)
    g = random(2, 4, 1, 1).expand(conv(x).shape)
    found, expected = gradients(conv, x, g, gf.GradientFilter(2, taps)), exact(conv, x, g)
    assert torch.allclose(found["weight"], expected["weight"])
    assert torch.allclose(found["x"].sum((2, 3)), expected["x"].sum((2, 3)))
    mistaken = by_definition(conv, x, g, 2, taps, mistake="stride scale left out")
    assert torch.allclose(mistaken["weight"], stride**2 * expected["weight"])


def test_g02_groups_of_several_channels() -> None:
    """Not: an error in the backward. Each group is a convolution of its own."""
    conv = prepared(nn.Conv2d(6, 4, 3, padding=1, groups=2, bias=False))
    x, g = random(2, 6, 7, 9, seed=1), random(2, 4, 7, 9, seed=2)
    whole = gradients(conv, x, g)
    for i in range(2):
        part = nn.Conv2d(3, 2, 3, padding=1, bias=False).double()
        part.weight.data = conv.weight.detach()[2 * i : 2 * i + 2].clone()
        found = gradients(part, x[:, 3 * i : 3 * i + 3], g[:, 2 * i : 2 * i + 2])
        assert torch.allclose(whole["x"][:, 3 * i : 3 * i + 3], found["x"])
        assert torch.allclose(whole["weight"][2 * i : 2 * i + 2], found["weight"])


def test_g03_depthwise_with_a_multiplier() -> None:
    """Not: an error in the backward."""
    assert is_as_defined(nn.Conv2d(3, 6, 3, padding=1, groups=3), (7, 8))
    assert is_as_defined(nn.Conv2d(2, 6, 5, stride=2, groups=2), (11, 12))


@pytest.mark.parametrize("size", [(9, 9), (8, 11), (13, 6)])
def test_g04_convolutions_without_padding(size: tuple[int, int]) -> None:
    """Not: an error in the forward, or a gradient of another shape than the input."""
    assert is_as_defined(nn.Conv2d(2, 3, 5), size)
    assert is_as_defined(nn.Conv2d(2, 3, 3, stride=2), size, patch=3)


def test_g05_more_padding_than_half_a_kernel() -> None:
    """Not: an error of the pooling."""
    assert is_as_defined(nn.Conv2d(2, 3, 3, padding=3), (4, 3), patch=4)
    assert is_as_defined(nn.Conv2d(2, 3, 1, padding=2), (2, 2), patch=3)


def test_g06_dilation_with_any_kernel_and_padding() -> None:
    """Not: an error in the backward unless the kernel is 3x3 and the padding equals the dilation."""
    assert is_as_defined(nn.Conv2d(2, 3, 1, dilation=4), (8, 9))
    assert is_as_defined(nn.Conv2d(2, 3, 5, dilation=2, padding=4), (12, 11))
    assert is_as_defined(nn.Conv2d(2, 3, 3, dilation=4, padding=1), (12, 11))


def test_g07_dilation_that_the_patch_does_not_divide() -> None:
    """Not: a dilation of 4 on patches of 3 that acts as one of 3."""
    assert is_as_defined(nn.Conv2d(2, 3, 3, dilation=4, padding=4), (14, 15), patch=3)
    x, g = random(2, 2, 14, 14, seed=1), random(2, 3, 14, 14, seed=2)
    three, four = (prepared(nn.Conv2d(2, 3, 3, dilation=d, padding=d)) for d in (3, 4))
    method = gf.GradientFilter(3)
    assert not torch.allclose(gradients(three, x, g, method)["x"], gradients(four, x, g, method)["x"])


def test_g08_dilation_with_stride() -> None:
    """Not: geometry and scale that ignore the stride, and an input gradient that points elsewhere."""
    conv = prepared(nn.Conv2d(2, 3, 3, stride=2, dilation=4, padding=4))
    assert is_as_defined(conv, (24, 24))
    x = random(2, 2, 24, 24, seed=1)
    g = F.interpolate(random(2, 3, 3, 3, seed=2), scale_factor=4.0)  # constant on patches of 4
    assert g.shape == conv(x).shape
    found, ideal = gradients(conv, x, g), exact(conv, x, g)
    patches = F.interpolate(F.avg_pool2d(ideal["x"], 4), scale_factor=4.0)
    assert cosine(found["x"], patches) > 0.999


def test_g09_another_dilation_on_each_axis() -> None:
    """Not: that of the height for both."""
    assert is_as_defined(nn.Conv2d(2, 3, 3, dilation=(1, 3), padding=(1, 3)), (9, 12))
    assert is_as_defined(nn.Conv2d(2, 3, 3, dilation=(4, 2), padding=(4, 2)), (9, 12))
    x, g = random(2, 2, 9, 12, seed=1), random(2, 3, 9, 12, seed=2)
    one, other = (prepared(nn.Conv2d(2, 3, 3, dilation=(4, d), padding=(4, d))) for d in (2, 4))
    assert not torch.allclose(gradients(one, x, g)["x"], gradients(other, x, g)["x"])


def test_g10_another_kernel_and_padding_on_each_axis() -> None:
    """As in the reference, these run; there every tap has one gradient, here each its own."""
    assert is_as_defined(nn.Conv2d(2, 3, (1, 5), padding=(0, 2)), (9, 12))
    assert is_as_defined(nn.Conv2d(2, 3, (3, 2), padding=(2, 0)), (9, 12))
    assert is_as_defined(nn.Conv2d(2, 3, (3, 5), padding="same"), (9, 12))
    conv, x = prepared(nn.Conv2d(2, 3, 3)), random(2, 2, 9, 9)
    assert gradients(conv, x, random(2, 3, 7, 7, seed=2))["weight"].flatten(2).std(2).min() > 0


@pytest.mark.parametrize("mode", ["reflect", "circular", "replicate"])
def test_g11_the_padding_mode_is_that_of_the_layer(mode: str) -> None:
    """Not: zeros, and silently another output."""
    conv, x = prepared(nn.Conv2d(2, 3, 3, padding=1, padding_mode=mode)), random(2, 2, 6, 7)
    plain = conv(x)
    assert torch.equal(gf.apply_(nn.Sequential(conv), gf.GradientFilter(2))(x), plain)
    gf.restore_(nn.Sequential(conv))
    assert is_as_defined(conv, (6, 7))


def test_g12_patches_larger_than_the_map() -> None:
    """As in the reference: one patch."""
    conv, x, g = prepared(nn.Conv2d(2, 3, 3, padding=1)), random(2, 2, 5, 5), random(2, 3, 5, 5, seed=2)
    assert same(gradients(conv, x, g, gf.GradientFilter(100)), gradients(conv, x, g, gf.GradientFilter(5)))
    assert is_as_defined(nn.Conv2d(2, 3, 3), (4, 5), patch=16)


def test_g13_inputs_without_a_batch() -> None:
    """Not: an error in the backward."""
    conv, x, g = prepared(nn.Conv2d(2, 3, 3, padding=1)), random(2, 7, 6), random(3, 7, 6, seed=2)
    found = gradients(conv, x, g)
    batched = gradients(conv, x.unsqueeze(0), g.unsqueeze(0))
    assert same(found, batched | {"x": batched["x"].squeeze(0)})


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("taps", ["overlap", "collapse"])
def test_g14_autocast(taps: Any, groups: int) -> None:
    """Not: types that do not match in the backward of dense convolutions."""
    conv = prepared(nn.Conv2d(4, 4, 3, padding=1, groups=groups)).float()
    x = random(2, 4, 8, 8).float()
    full = gradients(conv, x, method=gf.GradientFilter(2, taps))
    model = gf.apply_(nn.Sequential(conv), gf.GradientFilter(2, taps))
    leaf = x.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = model(leaf)
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    found = {"x": leaf.grad, "weight": conv.weight.grad, "bias": conv.bias.grad}
    for name, value in found.items():
        assert value.dtype == torch.float32
        assert torch.allclose(value, full[name], atol=0.02 * float(full[name].abs().max()))


def test_g15_half_precision_keeps_means() -> None:
    """Not: sums over patches, which overflow: 64 times 2000 is more than float16 holds."""
    conv = nn.Conv2d(1, 1, 1, bias=False).half()
    x, g = torch.full((1, 1, 8, 8), 2000.0).half(), torch.full((1, 1, 8, 8), 1e-4).half()
    assert torch.isinf(x.sum())
    found = gradients(conv, x, g, gf.GradientFilter(8))
    assert float(found["weight"]) == pytest.approx(64 * 2000 * 1e-4, rel=1e-2)


class Noting(gf.GradientFilter):
    """Notes which gradients it is asked for."""

    asked: list[tuple[bool, bool]] = []  # noqa: RUF012  one list for all

    def gradients(self, grad: Any, kept: Any, weight: Any, geometry: Any, want: Any) -> Any:
        self.asked.append((want.x, want.weight))
        assert bool(kept) == want.weight
        return super().gradients(grad, kept, weight, geometry, want)


@pytest.mark.parametrize("needs", [(True, False), (False, True)])
def test_g16_only_the_gradients_that_are_needed(needs: tuple[bool, bool]) -> None:
    """Not: both of them always, whatever is frozen."""
    conv = nn.Conv2d(2, 3, 3, bias=False)
    model = gf.apply_(nn.Sequential(conv), Noting(2))
    conv.weight.requires_grad_(needs[1])
    x = torch.randn(2, 2, 8, 8, requires_grad=needs[0])
    Noting.asked.clear()
    with gf.kept_bytes(model) as kept:
        y = model(x)
    y.sum().backward()
    assert Noting.asked == [needs]
    assert (conv.weight.grad is not None, x.grad is not None) == (needs[1], needs[0])
    assert bool(sum(kept.values())) == needs[1]


class Operators(TorchDispatchMode):
    """Notes which operators run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_g17_inference_costs_nothing_more(mode: Any) -> None:
    """Not: pooling and sums of weights in every forward until a flag is set by hand."""
    conv, x = nn.Conv2d(2, 3, 3), torch.randn(2, 2, 8, 8)
    model = gf.apply_(nn.Sequential(conv), gf.GradientFilter(2))
    with mode(), Operators() as seen:
        model(x)
    with mode(), Operators() as plain:
        F.conv2d(x, conv.weight, conv.bias)
    assert seen.names == plain.names


def test_g18_second_derivatives_are_refused() -> None:
    """Not: silently wrong ones."""
    model = gf.apply_(nn.Sequential(nn.Conv2d(2, 3, 3)), gf.GradientFilter(2))
    x = torch.randn(2, 2, 8, 8, requires_grad=True)
    with pytest.raises(gf.GradFilterError, match="Double backward"):
        torch.autograd.grad(model(x).square().sum(), x, create_graph=True)[0].sum().backward()


def test_g19_compiled_and_functional_calls() -> None:
    """Not: a failure. (torch.func's transforms of training still raise; of inference they work.)"""
    model = gf.apply_(nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.ReLU()), gf.GradientFilter(2))
    x, weight = torch.randn(2, 2, 8, 8), model[0].weight
    model(x).sum().backward()
    expected, parameters = weight.grad.clone(), dict(model.named_parameters())
    for run in (
        torch.compile(model, backend="eager"),
        lambda t: torch.func.functional_call(model, parameters, (t,)),
    ):
        weight.grad = None
        run(x).sum().backward()
        assert torch.allclose(weight.grad, expected)
    with torch.no_grad():
        each = torch.func.vmap(lambda t: model(t.unsqueeze(0)).squeeze(0))(x)
        assert torch.allclose(each, model(x), atol=1e-6)


def test_g20_nothing_is_kept_but_numbers_of_the_maps() -> None:
    """Not: a tensor of settings on the CPU, read back one by one; tensors without numbers could not be."""
    model = gf.apply_(nn.Sequential(nn.Conv2d(2, 3, 3, padding=1)), gf.GradientFilter(2)).to("meta")
    x = torch.empty(2, 2, 8, 8, device="meta", requires_grad=True)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = model(x)
    y.backward(torch.empty_like(y))
    assert x.grad is not None
    assert model[0].weight.grad.shape == (3, 2, 3, 3)
    assert all(t.is_meta and t.dtype == torch.float32 for t in kept)


@pytest.mark.parametrize("size", [(8, 8), (7, 9)])
def test_g21_channels_last_stays(size: tuple[int, int]) -> None:
    """Not: an input gradient that is laid out the other way, or a view into a larger one."""
    model = gf.apply_(nn.Sequential(nn.Conv2d(4, 4, 3, padding=1)), gf.GradientFilter(2))
    model = model.to(memory_format=torch.channels_last)
    x = torch.randn(2, 4, *size).to(memory_format=torch.channels_last).requires_grad_()
    model(x).sum().backward()
    assert x.grad is not None
    assert x.grad.is_contiguous(memory_format=torch.channels_last)
    assert x.grad.untyped_storage().nbytes() == 4 * x.numel()


def test_g22_a_changed_layer_is_the_same_layer() -> None:
    """Not: a new parameter that trains again, and an optimizer and hooks that are left behind."""
    conv, calls = nn.Conv2d(2, 3, 3), []
    conv.bias.requires_grad_(False)  # type: ignore[union-attr]
    conv.eval()
    conv.register_forward_hook(lambda *_: calls.append(1))
    optimizer = torch.optim.SGD(conv.parameters(), lr=0.1)
    weight, before = conv.weight, conv.weight.detach().clone()
    model = gf.apply_(nn.Sequential(conv), gf.GradientFilter(2))
    assert model[0] is conv
    assert conv.weight is weight
    assert isinstance(conv, nn.Conv2d)
    assert not conv.training
    model(torch.randn(2, 2, 8, 8)).sum().backward()
    optimizer.step()
    assert calls == [1]
    assert not torch.equal(conv.weight, before)
    gf.restore_(model)
    assert type(conv) is nn.Conv2d
    assert not conv.bias.requires_grad  # type: ignore[union-attr]


def test_g23_int8_gradients_of_groups_and_dilation() -> None:
    """Not: a class that cannot be made, and that forgets groups and dilation."""
    kind = getattr(gf, "Int8Gradients", None)
    if kind is None:
        pytest.skip("this version has no method called Int8Gradients")
    conv = nn.Conv2d(4, 6, 3, padding=2, dilation=2, groups=2)
    x = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    g = torch.randn(2, 6, 8, 8, generator=torch.Generator().manual_seed(1))
    found, expected = gradients(conv, x, g, kind()), exact(conv, x, g)
    for name, value in expected.items():
        assert found[name].shape == value.shape
        assert torch.isfinite(found[name]).all()


def test_g24_numbers_and_pairs_are_the_same() -> None:
    """Not: checks for numbers that are never true."""
    x, g = random(2, 2, 9, 9), random(2, 3, 5, 5, seed=2)
    one = prepared(nn.Conv2d(2, 3, kernel_size=3, stride=2, padding=1, dilation=1))
    two = prepared(nn.Conv2d(2, 3, kernel_size=(3, 3), stride=(2, 2), padding=(1, 1), dilation=(1, 1)))
    expected = gradients(one, x, g, gf.GradientFilter(2))
    assert same(gradients(two, x, g, gf.GradientFilter((2, 2))), expected)
    model = gf.apply_(nn.ModuleList([one]), gf.GradientFilter([2, 2]))  # type: ignore[arg-type]
    with torch.enable_grad():
        leaf = x.requires_grad_()
        model[0](leaf).backward(g)
    assert torch.allclose(leaf.grad, expected["x"])  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_g25_convolutions_of_every_kind(kind: Any) -> None:
    """Not: 2d alone."""
    axes = int(kind.__name__[-2])
    size = (9, 6, 5)[:axes]
    if not kind.__name__.startswith("ConvTranspose"):
        assert is_as_defined(kind(2, 3, 3, stride=2, padding=1), size)
        return
    conv = prepared(kind(2, 3, 3, stride=2, padding=1))
    x = random(2, 2, *size, seed=1)
    g = random(*conv(x).shape, seed=2)
    assert same(gradients(conv, x, g), by_definition(conv, x, g, 2))


def test_g25_linear_layers_over_maps() -> None:
    """They are 1x1 convolutions."""
    x, g = random(2, 3, 7, 8, seed=1), random(2, 4, 7, 8, seed=2)
    conv, linear = prepared(nn.Conv2d(3, 4, 1)), nn.Linear(3, 4).double()
    linear.load_state_dict({"weight": conv.weight.detach().flatten(1), "bias": conv.bias.detach()})
    expected = gradients(conv, x, g)
    found = gradients(linear, x.movedim(1, -1), g.movedim(1, -1))
    assert torch.allclose(found["x"].movedim(-1, 1), expected["x"])
    assert torch.allclose(found["weight"], expected["weight"].flatten(1))
    assert torch.allclose(found["bias"], expected["bias"])
