"""Filtered convolutions against the slow oracle, on thousands of legal shapes.

GRADFILTER_CASES says how many cases are drawn. A failing case prints its seed; make_case(seed) is that case.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from random import Random

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gradfilter as gf
from gradfilter.errors import GradFilterError
from oracle import MISTAKES, Gradients, Layer, conv_forward, conv_gradients, linear_gradients
from shapes import ConvCase, make_case
from verdicts import report

CASES = int(os.environ.get("GRADFILTER_CASES", "3000"))
CHUNKS = 20
TOLERANCE = 1e-10
TAPS = ("overlap", "collapse")

# torch says once per process that it copies the input; the cases that make it do so are legal all the same.
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning")


# --- running and comparing


@dataclass(frozen=True)
class Run:
    """What one forward and backward left behind; a gradient that was not asked for is None."""

    y: Tensor
    x: Tensor | None
    w: Tensor | None
    b: Tensor | None


def run(
    layer: nn.Module,
    x: Tensor,
    g: Tensor,
    prepare: Callable[[nn.Module], nn.Module] = lambda layer: layer,
    needs: tuple[bool, bool, bool] = (True, True, True),
) -> Run:
    """Forward and backward through prepare(layer); `needs`: do input, weight and bias want a gradient?

    The gradients are read from the parameters as they were before `prepare`: an optimiser built before that
    must still see them.
    """
    wanted = list(zip(layer.parameters(), needs[1:], strict=False))
    model = prepare(layer)
    for parameter, needed in wanted:
        parameter.requires_grad_(needed)
    leaf = x.detach().requires_grad_(needs[0])
    x_before, g_before = x.clone(), g.clone()
    y = model(leaf)
    assert y.requires_grad == (needs[0] or any(needed for _, needed in wanted)), "requires_grad of the output"
    if y.requires_grad:
        y.backward(g)
    assert torch.equal(x, x_before), "the input was overwritten"
    assert torch.equal(g, g_before), "the incoming gradient was overwritten"
    grads = [parameter.grad for parameter, _ in wanted]
    return Run(y.detach(), leaf.grad, grads[0], grads[1] if len(grads) > 1 else None)


def filtering(layers: str = "all", **options: object) -> Callable[[nn.Module], nn.Module]:
    """A function that puts a layer into a model and applies the filter to it."""

    def prepare(layer: nn.Module) -> nn.Module:
        # A linear layer at the end is the head of the model and would stay exact.
        model = nn.Sequential(layer, nn.Identity()) if isinstance(layer, nn.Linear) else nn.Sequential(layer)
        gf.apply_(model, gf.GradientFilter(**options), layers=layers)
        return model

    return prepare


def run_case(case: ConvCase, dtype: torch.dtype = torch.float64, **how: object) -> Run:
    """The library on one case."""
    prepare = filtering(patch=case.patch_option, taps=case.taps, input_gradient=case.input_gradient)
    return run(case.module(dtype), *case.tensors(dtype), prepare=prepare, **how)


def expected(case: ConvCase, dtype: torch.dtype = torch.float64, mistake: str = "") -> Gradients:
    """The oracle on the same numbers, that is on those rounded to `dtype`."""
    x, g = (value.double().numpy() for value in case.tensors(dtype))
    w = case.module(dtype).weight.detach().double().numpy()
    return conv_gradients(case.layer, x, w, g, case.patch, case.taps, case.input_gradient, mistake)


def differences(
    got: Run, want: Gradients, tolerance: float, names: Iterable[str] = ("x", "w", "b")
) -> list[str]:
    """What is wrong with the gradients that are there: max|difference| <= tolerance * (1 + max|expected|)."""
    wrong = []
    for name in names:
        mine, reference = getattr(got, name), getattr(want, name)
        if mine is None:
            wrong.append(f"grad_{name} is missing")
        elif tuple(mine.shape) != reference.shape:
            wrong.append(f"grad_{name} has shape {tuple(mine.shape)}, not {reference.shape}")
        else:
            error = np.abs(mine.double().numpy() - reference).max(initial=0.0)
            bound = tolerance * (1 + np.abs(reference).max(initial=0.0))
            if not error <= bound:  # also catches NaN
                wrong.append(f"grad_{name} is off by {error:.3g}, allowed {bound:.3g}")
    return wrong


def problems(case: ConvCase, dtype: torch.dtype = torch.float64, tolerance: float = TOLERANCE) -> list[str]:
    """Everything that is wrong with the library on this case."""
    names = ("x", "w", "b") if case.bias else ("x", "w")
    got = run_case(case, dtype)
    wrong = differences(got, expected(case, dtype), tolerance, names)
    if not torch.equal(got.y, case.module(dtype)(case.tensors(dtype)[0])):
        wrong.append("the forward is not the plain one, bit by bit")
    if {grad.dtype for grad in (got.x, got.w, got.b) if grad is not None} != {dtype}:
        wrong.append("a gradient changed its dtype")
    return wrong


def as_arrays(result: Run) -> Gradients:
    """The gradients of plain autograd in the form of the oracle."""
    return Gradients(
        result.x.numpy(), result.w.numpy(), np.zeros(0) if result.b is None else result.b.numpy()
    )


# --- the oracle itself, and the generator


def test_oracle_is_exact_at_patch_one() -> None:
    """Forward and exact gradients of the oracle equal torch on cases that the big test does not use."""
    for seed in range(10**6, 10**6 + 200):
        case = make_case(seed)
        layer, (x, g) = case.module(), case.tensors()
        result = run(layer, x, g)
        exact = expected(replace(case, patch=(1,) * case.dims))
        names = ("x", "w", "b") if case.bias else ("x", "w")
        assert not differences(result, exact, 1e-12, names), case
        y = conv_forward(case.layer, x.numpy(), layer.weight.detach().numpy())
        if case.bias:
            y += layer.bias.detach().numpy().reshape(-1, *[1] * case.dims)
        np.testing.assert_allclose(result.y.numpy(), y, rtol=1e-12, atol=1e-12, err_msg=str(case))


def by_hand(layer: Layer, x: list[float], w: list[float], g: list[float], taps: str) -> list[list[float]]:
    grads = conv_gradients(layer, *(np.array([[value]]) for value in (x, w, g)), patch=(2,), taps=taps)
    return [grads.x[0, 0].tolist(), grads.w[0, 0].tolist(), grads.b.tolist()]


def test_oracle_by_hand() -> None:
    """Patch 2, small enough for pen and paper.

    Convolution, input grid {0, 1}, {2}: mean gradient 2, input means 1.5 and 3. The exact input gradient of
    (2, 2) is (2, 22, 20).
    """
    layer = Layer(kernel=(2,), stride=(1,), dilation=(1,), pads=((0, 0),))
    x, w, g = [1.0, 2.0, 3.0], [1.0, 10.0], [1.0, 3.0]
    assert by_hand(layer, x, w, g, "overlap") == [[12, 12, 20], [6, 9], [4]]
    assert by_hand(layer, x, w, g, "collapse") == [[22, 22, 0], [6, 6], [4]]


def test_oracle_by_hand_with_stride_and_ragged_edge() -> None:
    """Stride 2, input grid {0..3}, {4}: means of g 2 and 5, means of x 2.5 and 7.

    Output pixels read 0, 2 and 4, so the exact input gradient of (2, 2, 5) is 3 * (2, 0, 2, 0, 5).
    """
    layer = Layer(kernel=(1,), stride=(2,), dilation=(1,), pads=((0, 0),))
    x, w, g = [1.0, 2.0, 3.0, 4.0, 7.0], [3.0], [1.0, 3.0, 5.0]
    for taps in TAPS:
        assert by_hand(layer, x, w, g, taps) == [[3, 3, 3, 3, 15], [2 * 2 * 2.5 + 5 * 7], [9]]


def test_oracle_by_hand_transposed() -> None:
    """Stride 2, so the input grid has single pixels; means of g 2 and 6."""
    layer = Layer(
        kernel=(2,), stride=(2,), dilation=(1,), pads=((0, 0),), transposed=True, output_padding=(0,)
    )
    x, w, g = [1.0, 2.0], [3.0, 4.0], [1.0, 3.0, 5.0, 7.0]
    for taps in TAPS:
        assert by_hand(layer, x, w, g, taps) == [[14, 42], [14, 14], [16]]


FEATURES: dict[str, Callable[[ConvCase], bool]] = {
    "1d": lambda case: case.dims == 1,
    "2d": lambda case: case.dims == 2 and not case.transposed,
    "3d": lambda case: case.dims == 3,
    "transposed": lambda case: case.transposed,
    "depthwise": lambda case: 1 < case.groups == case.in_channels == case.out_channels,
    "depthwise with multiplier": lambda case: 1 < case.groups == case.in_channels < case.out_channels,
    "plain groups": lambda case: 1 < case.groups < case.in_channels,
    "pointwise": lambda case: set(case.kernel) == {1},
    "even kernel": lambda case: any(k % 2 == 0 for k in case.kernel),
    "asymmetric": lambda case: len({*zip(case.kernel, case.stride, case.dilation, strict=True)}) > 1,
    "strided": lambda case: prod(case.stride) > 1,
    "dilated": lambda case: any(d > 1 < k for d, k in zip(case.dilation, case.kernel, strict=True)),
    "same": lambda case: case.padding == "same",
    "valid": lambda case: case.padding == "valid",
    "more padding than kernel": lambda case: any(
        pad[0] > d * (k - 1) for pad, k, d in zip(case.layer.pads, case.kernel, case.dilation, strict=True)
    ),
    "output padding": lambda case: any(case.output_padding),
    "reflect": lambda case: case.padding_mode == "reflect",
    "circular": lambda case: case.padding_mode == "circular",
    "replicate": lambda case: case.padding_mode == "replicate",
    "no bias": lambda case: not case.bias,
    "empty batch": lambda case: case.batch == 0,
    "unbatched": lambda case: case.batch is None,
    "channels last": lambda case: case.layout == "channels_last",
    "strided memory": lambda case: case.layout == "strided",
    "single pixel": lambda case: 1 in case.size,
    "patch one": lambda case: set(case.patch) == {1},
    "patch per axis": lambda case: len(set(case.patch)) > 1,
    "patch beyond the map": lambda case: any(r > n for r, n in zip(case.patch, case.out_size, strict=True)),
    "ragged": lambda case: any(n % r for r, n in zip(case.patch, case.out_size, strict=True)),
    "collapse": lambda case: case.taps == "collapse",
    "exact input gradient": lambda case: case.input_gradient == "exact",
}


@pytest.mark.parametrize("feature", FEATURES)
def test_generator_draws_every_feature_often(feature: str) -> None:
    """At least 4 of 100 cases, so that hundreds of the default 3000 have any two common features together."""
    assert sum(FEATURES[feature](make_case(seed)) for seed in range(1000)) >= 40


# --- the library against the oracle


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_gradients_equal_the_oracle(chunk: int, use_native: Callable[[bool], None]) -> None:
    """Forward bit by bit, gradients to 1e-10, no crash."""
    use_native(chunk % 2 == 0)
    failed = report(map(make_case, range(chunk, CASES, CHUNKS)), problems)
    assert not failed, failed


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.1)])
def test_other_dtypes(dtype: torch.dtype, tolerance: float) -> None:
    """float32 is accurate; bfloat16 runs, keeps its dtype and gives the right gradient to its few digits."""
    cases = map(make_case, range(2 * 10**6, 2 * 10**6 + 150))
    failed = report(cases, lambda case: problems(case, dtype, tolerance))
    assert not failed, failed


def test_patch_one_is_exact_backpropagation() -> None:
    """Against torch itself, not the oracle."""

    def judge(case: ConvCase) -> list[str]:
        exact = as_arrays(run(case.module(), *case.tensors()))
        return differences(run_case(case), exact, 1e-12, ("x", "w", "b") if case.bias else ("x", "w"))

    cases = [make_case(seed) for seed in range(3 * 10**6, 3 * 10**6 + 200)]
    failed = report([replace(case, patch=(1,) * case.dims) for case in cases], judge)
    assert not failed, failed


def plain_case(**changes: object) -> ConvCase:
    """An ordinary 2d convolution without padding; say what is different."""
    return replace(
        ConvCase(
            seed=0,
            transposed=False,
            groups=1,
            in_channels=2,
            out_channels=3,
            kernel=(3, 3),
            stride=(1, 1),
            dilation=(1, 1),
            padding=(0, 0),
            output_padding=(),
            padding_mode="zeros",
            bias=True,
            batch=2,
            size=(7, 9),
            layout="contiguous",
            patch=(2, 2),
            taps="overlap",
            input_gradient="coarse",
        ),
        **changes,
    )


def constant_signals(case: ConvCase) -> list[str]:
    """Compare with exact backpropagation where every channel of x and g is a constant."""
    x, g = case.tensors()
    x, g = x[:, :, :1, :1].expand_as(x).contiguous(), g[:, :, :1, :1].expand_as(g).contiguous()
    options = {"patch": case.patch_option, "taps": case.taps}
    exact = run(case.module(), x, g)
    got = run(case.module(), x, g, filtering(**options))
    totals = [replace(result, x=result.x.sum(dim=(2, 3))) for result in (got, exact)]
    return differences(totals[0], as_arrays(totals[1]), 1e-12)


@pytest.mark.parametrize("taps", TAPS)
@pytest.mark.parametrize("stride", [1, 2, 3])
def test_constant_signals_give_the_exact_gradient(stride: int, taps: str) -> None:
    """Where no tap reads padding: every tap of the kernel, and the total that reaches the input."""
    sizes, patches = [(5, 5), (7, 9), (13, 10)], [(2, 2), (3, 3), (4, 2), (20, 20)]
    windows = [((1, 1), (1, 1)), ((3, 3), (1, 1)), ((2, 5), (1, 1)), ((3, 2), (2, 3))]
    cases = [
        plain_case(
            size=size, kernel=kernel, dilation=dilation, stride=(stride, stride), patch=patch, taps=taps
        )
        for (kernel, dilation), size, patch in product(windows, sizes, patches)
    ]
    cases += [replace(case, in_channels=2, out_channels=4, groups=2) for case in cases]
    failed = report(cases, constant_signals)
    assert not failed, failed


@pytest.mark.parametrize("taps", TAPS)
@pytest.mark.parametrize("stride", [1, 2, 3])
def test_constant_signals_transposed(stride: int, taps: str) -> None:
    """The same for a transposed convolution where the stride divides the patch: there the grids match."""
    cases = [
        plain_case(
            transposed=True,
            output_padding=(0, 0),
            size=size,
            kernel=kernel,
            stride=(stride, stride),
            patch=(times * stride, 2 * stride),
            taps=taps,
        )
        for kernel, size, times in product([(1, 1), (2, 3), (4, 4)], [(1, 4), (5, 7)], [1, 2, 3])
    ]
    failed = report(cases, constant_signals)
    assert not failed, failed


@pytest.mark.parametrize("taps", TAPS)
@pytest.mark.parametrize("groups", [1, 2])
def test_pointwise_with_patchwise_constant_gradient_is_exact(groups: int, taps: str) -> None:
    """1x1, stride 1, no padding, g constant on each output patch, any x: all three gradients are exact."""

    def judge(case: ConvCase) -> list[str]:
        x, g = case.tensors()
        for axis, r in enumerate(case.patch):
            first = torch.arange(g.shape[axis + 2]) // r * r
            g = g.index_select(axis + 2, first)
        exact = as_arrays(run(case.module(), x, g))
        options = {"patch": case.patch_option, "taps": case.taps}
        return differences(run(case.module(), x, g, filtering(**options)), exact, 1e-12)

    cases = [
        plain_case(kernel=(1, 1), size=size, patch=patch, taps=taps, groups=groups, out_channels=4)
        for size, patch in product([(1, 1), (6, 6), (7, 9)], [(2, 2), (3, 1), (4, 5), (20, 20)])
    ]
    failed = report(cases, judge)
    assert not failed, failed


# --- negative controls: the same comparison must notice each mistake


def several_patches_meet_several_taps(case: ConvCase) -> bool:
    """On one axis at least; elsewhere all taps see the same patch mean, in whatever order they come."""
    axes = zip(case.kernel, case.size, case.layer.in_patch(case.patch), strict=True)
    return any(kernel > 1 and size > patch for kernel, size, patch in axes)


MATTERS: dict[str, Callable[[ConvCase], bool]] = {
    "stride scale left out": lambda case: prod(case.stride) > 1 and not case.transposed,
    "kernel flipped": lambda case: case.taps == "overlap" and several_patches_meet_several_taps(case),
    "ragged edge miscounted": FEATURES["ragged"],
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_comparison_notices(mistake: str) -> None:
    """The library agrees with the oracle and disagrees with the broken one, nearly everywhere it matters.

    Not quite everywhere: a ragged patch may read nothing but padding, and a flipped kernel may be symmetric.
    """
    cases = [make_case(seed) for seed in range(250)]
    cases = [case for case in cases if case.batch != 0 and max(case.patch) > 1 and MATTERS[mistake](case)]
    noticed = 0
    for case in cases:
        got = run_case(case)
        assert not differences(got, expected(case), TOLERANCE, ("x", "w")), case
        noticed += bool(differences(got, expected(case, mistake=mistake), TOLERANCE, ("x", "w")))
    assert len(cases) >= 50
    assert noticed >= 0.8 * len(cases)


def test_comparison_rejects_what_is_not_a_gradient() -> None:
    """A missing gradient, a wrong shape and NaN are differences too."""
    case = plain_case()
    want = expected(case)
    good = Run(torch.empty(0), *(torch.from_numpy(grad.copy()) for grad in (want.x, want.w, want.b)))
    assert not differences(good, want, TOLERANCE)
    for bad in (None, good.x[:1], good.x * torch.nan):
        assert differences(replace(good, x=bad), want, TOLERANCE)


# --- which gradients are asked for, and how


@pytest.mark.parametrize("needs", list(product([True, False], repeat=3)), ids=str)
def test_only_the_gradients_that_are_asked_for(needs: tuple[bool, bool, bool]) -> None:
    """Input, weight and bias in all combinations, frozen after the filter is applied."""
    names = [name for name, needed in zip("xwb", needs, strict=True) if needed]

    def judge(case: ConvCase) -> list[str]:
        got = run_case(case, needs=needs)
        unasked = [
            f"grad_{n} was not asked for" for n in "xwb" if n not in names and getattr(got, n) is not None
        ]
        return unasked + differences(got, expected(case), TOLERANCE, names)

    cases = [make_case(seed) for seed in range(4 * 10**6, 4 * 10**6 + 40)]
    failed = report([replace(case, bias=True) for case in cases], judge)
    assert not failed, failed


def test_no_grad_is_the_plain_forward() -> None:
    """Nothing is recorded, and the values are those of the plain layer."""
    for seed in range(50):
        case = make_case(seed)
        x, _ = case.tensors()
        model = filtering(patch=case.patch_option, taps=case.taps)(case.module())
        with torch.no_grad():
            y = model(x.requires_grad_())
            assert torch.equal(y, case.module()(x)), case
        assert not y.requires_grad, case


@pytest.mark.parametrize("taps", TAPS)
def test_gradient_of_a_sum(taps: str) -> None:
    """`y.sum().backward()` hands over a gradient without memory of its own (stride 0 on every axis)."""

    def judge(case: ConvCase) -> list[str]:
        x, g = case.tensors()
        ones = torch.ones((), dtype=g.dtype).expand_as(g)
        weight = case.module().weight.detach().numpy()
        got = run(case.module(), x, ones, filtering(patch=case.patch_option, taps=taps))
        want = conv_gradients(case.layer, x.numpy(), weight, ones.numpy(), case.patch, taps)
        return differences(got, want, TOLERANCE, ("x", "w"))

    failed = report(map(make_case, range(5 * 10**6, 5 * 10**6 + 60)), judge)
    assert not failed, failed


def test_gradients_accumulate() -> None:
    """Two passes through one model add up, as with any layer."""
    case = plain_case(stride=(2, 2))
    x, g = case.tensors()
    layer = case.module()
    model = filtering(patch=2)(layer)
    for _ in range(2):
        model(x).backward(g)
    twice = Run(x, None, layer.weight.grad / 2, layer.bias.grad / 2)
    assert not differences(twice, expected(case), TOLERANCE, ("w", "b"))


@pytest.mark.parametrize("input_gradient", ["coarse", "exact"])
@pytest.mark.parametrize("taps", TAPS)
def test_double_backward_is_refused(taps: str, input_gradient: str) -> None:
    """A filtered gradient has no meaningful derivative: say so instead of returning a wrong one."""
    case = plain_case()
    x, g = case.tensors()
    layer = case.module()
    model = filtering(patch=2, taps=taps, input_gradient=input_gradient)(layer)
    y = model(x.requires_grad_())

    def second_order() -> None:
        first = torch.autograd.grad(y, [x, layer.weight], g, create_graph=True)
        torch.autograd.grad([grad.square().sum() for grad in first], [x, layer.weight])

    with pytest.raises(GradFilterError, match=r"(?i)double backward|create_graph|second.order|differentiat"):
        second_order()


# --- linear layers


@dataclass(frozen=True)
class LinearCase:
    """A linear layer on (N, *lead, C); the map is `tokens`, or `lead` itself if that has two axes."""

    seed: int
    batch: int
    lead: tuple[int, ...]
    in_features: int
    out_features: int
    bias: bool
    options: dict[str, object]

    def module(self) -> nn.Linear:
        torch.manual_seed(self.seed)
        return nn.Linear(self.in_features, self.out_features, bias=self.bias, dtype=torch.float64)

    def tensors(self) -> tuple[Tensor, Tensor]:
        random = torch.Generator().manual_seed(self.seed)
        shape = (self.batch, *self.lead)
        x = torch.randn(*shape, self.in_features, generator=random, dtype=torch.float64)
        return x, torch.randn(*shape, self.out_features, generator=random, dtype=torch.float64)


def make_linear_case(kind: str, seed: int) -> LinearCase:
    """`kind` is map (N, H, W, C), tokens (N, H*W, C) or vector (N, C)."""
    rng = Random(seed)  # noqa: S311
    size = (rng.randint(1, 9), rng.randint(1, 9))
    r = rng.randint(1, 5)
    options: dict[str, object] = {
        "patch": rng.choice([r, (r, rng.randint(1, 20))]),
        "taps": rng.choice(TAPS),
        "input_gradient": rng.choice(["coarse", "coarse", "exact"]),
    }
    if kind == "tokens":
        options["tokens"] = size
    return LinearCase(
        seed=seed,
        batch=rng.randint(0, 3),
        lead={"map": size, "tokens": (prod(size),), "vector": ()}[kind],
        in_features=rng.randint(1, 5),
        out_features=rng.randint(1, 5),
        bias=rng.random() < 0.7,
        options=options,
    )


def linear_problems(case: LinearCase) -> list[str]:
    """As `problems`, for a linear layer."""
    layer, (x, g) = case.module(), case.tensors()
    patch, tokens = case.options["patch"], case.options.get("tokens")
    pair = (patch, patch) if isinstance(patch, int) else patch
    how = str(case.options["input_gradient"])
    want = linear_gradients(x.numpy(), layer.weight.detach().numpy(), g.numpy(), pair, tokens, how)
    got = run(layer, x, g, filtering(layers="0", **case.options))
    wrong = differences(got, want, TOLERANCE, ("x", "w", "b") if case.bias else ("x", "w"))
    return wrong if torch.equal(got.y, case.module()(x)) else [*wrong, "the forward is not the plain one"]


@pytest.mark.parametrize("kind", ["map", "tokens", "vector"])
def test_linear(kind: str) -> None:
    """Linear layers are 1x1 convolutions over their map; on plain vectors they are exact."""
    failed = report((make_linear_case(kind, seed) for seed in range(100)), linear_problems)
    assert not failed, failed


@pytest.mark.parametrize("tokens", [None, (4, 6)])
def test_linear_oracle_is_exact_at_patch_one(tokens: tuple[int, int] | None) -> None:
    """The linear oracle against torch itself."""
    case = make_linear_case("map", 0)
    case = replace(case, batch=2, lead=(24,) if tokens else (4, 6), bias=True)
    layer, (x, g) = case.module(), case.tensors()
    exact = linear_gradients(x.numpy(), layer.weight.detach().numpy(), g.numpy(), (1, 1), tokens)
    assert not differences(run(layer, x, g), exact, 1e-12)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(("groups", "channels"), [(1, 16), (2, 2)])
def test_bfloat16_maps_narrower_than_the_stride(
    groups: int, channels: int, layout: torch.memory_format
) -> None:
    """oneDNN of torch 2.13 reads beyond such maps: what lies there must not matter."""
    layer = nn.Conv2d(channels, channels, 5, stride=3, padding=2, groups=groups, bias=False)
    x, g = torch.randn(1, channels, 2, 1), torch.randn(1, channels, 1, 1)
    wanted = gradients_of(layer, x, g)
    for _ in range(20):
        junk = [torch.full((1 << k,), torch.nan, dtype=torch.bfloat16) for k in range(2, 18)]
        del junk
        model = gf.apply_(nn.Sequential(copy.deepcopy(layer).bfloat16()), gf.Quantized(8), layers="all")
        found = gradients_of(model, *(t.bfloat16().contiguous(memory_format=layout) for t in (x, g)))
        for ours, exact in zip(found, wanted, strict=True):
            torch.testing.assert_close(ours.float(), exact, rtol=0.05, atol=0.05)


def gradients_of(model: nn.Module, x: Tensor, g: Tensor) -> list[Tensor]:
    leaf = x.detach().requires_grad_()
    return list(torch.autograd.grad(model(leaf), [leaf, *model.parameters()], g))
