"""Every operator between layers against exact autograd seen through patches, on thousands of networks.

With P for "replace every pixel by the mean of its patch", an operator behind filtered layers must hand on
P_in(vjp(P_out(g))), and its own parameters must get vjp(P_out(g)), where vjp is torch's exact gradient of the
plain operator. Linear operators along the axes of a map take g as it is.

GRADFILTER_CASES says how many cases are drawn. A failing case prints its seed; make_case(seed) is that case.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradfilter as gf
from gradfilter.coarse import CoarseGradient
from gradfilter.grid import Grid, pixels
from gradfilter.ops import activation, max_pool, norm, product, spatial
from operators import (
    BEFORE,
    FAMILIES,
    Maps,
    Net,
    Operator,
    OperatorCase,
    as_it_is,
    averaged,
    make_case,
    make_operator,
)
from verdicts import report

CASES = int(os.environ.get("GRADFILTER_CASES", "3000"))
CHUNKS = 20
TOLERANCE = 1e-10


# --- running and comparing


@dataclass
class Seen:
    """What one forward and backward showed: tensors by their place in the network, and their gradients."""

    y: Tensor
    values: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    coarse: set[str] = field(default_factory=set)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    fallbacks: Counter[str] = field(default_factory=Counter)


def prepare(case: OperatorCase, net: Net, method: gf.Method | None = None) -> Net:
    """Give every layer of the network its method."""
    method = method or gf.GradientFilter(patch=case.patch_option)
    gf.apply_(net, method, norm=case.operator.norm)
    for parameter in net.owner.parameters():
        if case.operator.norm == "fixed":
            parameter.requires_grad_(case.trains)
    return net


def gradient_like(case: OperatorCase, y: Tensor) -> Tensor:
    random = torch.Generator().manual_seed(case.seed + 2)
    return torch.randn(y.shape, generator=random, dtype=torch.float64).to(y.dtype)


def run(case: OperatorCase, net: Net, dtype: torch.dtype = torch.float64) -> Seen:
    """Forward and backward, looking at every tensor on the way."""
    seen = Seen(torch.empty(0))

    def look(name: str, tensor: Tensor) -> None:
        seen.values[name] = tensor.detach().clone()
        if tensor.requires_grad:
            tensor.register_hook(lambda gradient: note(name, gradient))

    def note(name: str, gradient: Tensor) -> None:
        if isinstance(gradient, CoarseGradient):
            seen.coarse.add(name)
            gradient = gradient.dense()
        seen.gradients[name] = gradient.detach().clone()

    net.look = look
    torch.default_generator.manual_seed(case.seed)
    y = net(case.image(dtype))
    with gf.count_fallbacks() as seen.fallbacks:
        y.backward(gradient_like(case, y))
    seen.y = y.detach()
    seen.parameters = {name: p.grad for name, p in net.owner.named_parameters() if p.grad is not None}
    return seen


def plain(case: OperatorCase, dtype: torch.dtype = torch.float64) -> Net:
    """The same network without gradfilter, in the mode that gradfilter runs it in."""
    net = case.net(dtype)
    for part in net.modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm) and case.operator.norm != "batch":
            part.eval()
    return net


def expected(
    case: OperatorCase, seen: Seen, twin: Net
) -> tuple[list[Tensor | None], dict[str, Tensor | None]]:
    """Gradients of the operator's maps and parameters, from the values of its maps and from what arrived."""
    maps = [seen.values[f"map{i}"].double() for i in range(case.operator.inputs)]
    arrived = seen.gradients["made"].double()
    if case.lands is not None:
        arrived = averaged(arrived, case.lands)
    owner = twin.owner
    parameters = {name: p for name, p in owner.named_parameters() if name in seen.parameters}
    if case.operator.gradients is not None:
        given = {name: parameter.detach() for name, parameter in owner.named_parameters()}
        made: Sequence[Tensor | None] = case.operator.gradients(
            maps[0], arrived, case.patches, given, list(parameters)
        )
    else:
        leaves = [x.requires_grad_() for x in maps]
        torch.default_generator.manual_seed(case.seed)
        # A mask is drawn in the order of memory; elsewhere the usual order is the safest for torch's kernels.
        z = owner(*(x.clone() if case.family == "dropout" else x.contiguous() * 1 for x in leaves))
        made = torch.autograd.grad(z, [*leaves, *parameters.values()], arrived, allow_unused=True)
    means = [
        None if gradient is None else averaged(gradient, patches)
        for gradient, patches in zip(made, case.all_patches, strict=False)
    ]
    return means, dict(zip(parameters, made[len(maps) :], strict=True))


def before_the_operator(case: OperatorCase, seen: Seen) -> list[Tensor | None]:
    """What the layers get through the linear step before the operator: patch means of the exact gradient."""
    layers = [seen.values[f"layer{i}"].double().requires_grad_() for i in range(1 + case.two_layers)]
    maps = case.between(*layers)
    arrived = [seen.gradients.get(f"map{i}") for i in range(len(maps))]
    pairs = [(x, g.double()) for x, g in zip(maps, arrived, strict=True) if g is not None]
    made = torch.autograd.grad([x for x, _ in pairs], layers, [g for _, g in pairs], allow_unused=True)
    return [
        None if g is None else averaged(g, patches)
        for g, patches in zip(made, case.layer_patches, strict=True)
    ]


def difference(name: str, got: Tensor | None, want: Tensor | None, tolerance: float) -> list[str]:
    """What is wrong, if max|difference| <= tolerance * (1 + max|expected|) is not true."""
    if got is None or want is None:
        return [] if got is want else [f"{name} is {'missing' if got is None else 'there without a reason'}"]
    if got.shape != want.shape:
        return [f"{name} has shape {tuple(got.shape)}, not {tuple(want.shape)}"]
    if got.numel() == 0:
        return []
    error, bound = (got.double() - want).abs().max(), tolerance * (1 + want.abs().max())
    return [] if error <= bound else [f"{name} is off by {error:.3g}, allowed {bound:.3g}"]


def gradient_problems(case: OperatorCase, seen: Seen, twin: Net, tolerance: float = TOLERANCE) -> list[str]:
    """What is wrong with the gradients of the operator's maps and parameters, and of the layers before it."""
    maps, parameters = expected(case, seen, twin)
    layers = before_the_operator(case, seen)
    wrong = []
    for kind, wanted, all_patches in (("map", maps, case.all_patches), ("layer", layers, case.layer_patches)):
        for i, (want, patches) in enumerate(zip(wanted, all_patches, strict=True)):
            got = seen.gradients.get(f"{kind}{i}")
            means = None if got is None else averaged(got.double(), patches)
            wrong += difference(f"gradient of {kind} {i}", means, want, tolerance)
    for name, want in parameters.items():
        wrong += difference(f"gradient of {name}", seen.parameters[name], want, tolerance)
    if case.operator.coarse and max(case.shared_patches) > 1 and "map0" not in seen.coarse:
        wrong.append("the gradient of map 0 is dense")
    return wrong


def forward_problems(case: OperatorCase, seen: Seen, twin: Net) -> list[str]:
    """What is wrong with the output, given the plain network in the same dtype."""
    torch.default_generator.manual_seed(case.seed)
    want = twin(case.image(next(twin.parameters()).dtype))
    same = want.dtype == seen.y.dtype and torch.equal(want, seen.y)
    return [] if same else ["the forward is not the plain one, bit by bit"]


def problems(case: OperatorCase) -> list[str]:
    """Everything that is wrong with the library on this case."""
    net, twin = prepare(case, case.net()), plain(case)
    seen = run(case, net)
    wrong = forward_problems(case, seen, twin)
    if any(not torch.equal(a, b) for a, b in zip(net.buffers(), twin.buffers(), strict=True)):
        wrong.append("the running statistics are not the plain ones")
    wrong += gradient_problems(case, seen, twin)
    if case.operator.known and seen.fallbacks and max(case.shared_patches) > 1:
        wrong.append(f"became dense: {dict(seen.fallbacks)}")
    return wrong


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_gradients_equal_the_oracle(chunk: int, use_native: Callable[[bool], None]) -> None:
    """Forward bit by bit, gradients to 1e-10, no crash, and nothing becomes dense without need."""
    use_native(chunk % 2 == 0)
    failed = report(map(make_case, range(chunk, CASES, CHUNKS)), problems)
    assert not failed, failed


FEATURES: dict[str, Callable[[OperatorCase], bool]] = {
    "1d": lambda case: case.maps.axes == 1,
    "2d": lambda case: case.maps.axes == 2,
    "3d": lambda case: case.maps.axes == 3,
    "empty batch": lambda case: case.maps.batch == 0,
    "single pixel": lambda case: 1 in case.maps.size,
    "channels last": lambda case: case.layout == "channels_last",
    "3x3 before": lambda case: case.kernel == 3,
    "ragged": lambda case: any(n % r for n, r in zip(case.maps.size, case.patch, strict=True)),
    "patch per axis": lambda case: len(set(case.patch)) > 1,
    "patch beyond the map": lambda case: any(r > n for n, r in zip(case.maps.size, case.patch, strict=True)),
    "another patch behind": lambda case: case.after not in (None, case.patch),
    "dense gradient arrives": lambda case: case.after is None,
    "own parameters train": lambda case: case.trains,
    **{
        before or "nothing before": (lambda case, b=before: case.before == b)
        for before in dict.fromkeys(BEFORE)
    },
}


@pytest.mark.parametrize("feature", FEATURES)
def test_generator_draws_every_feature_often(feature: str) -> None:
    """At least 3 of 100 cases, so that every family meets it within the default number."""
    assert sum(FEATURES[feature](make_case(seed)) for seed in range(1000)) >= 30


def test_oracle_by_hand() -> None:
    """Patch 2, x = (-1, 3, 5), g = (1, 3, 4): means of g are 2 and 4, ReLU passes 0, 2, 4: means 1 and 4."""
    case = replace(make_case(0, "relu"), maps=Maps(1, 1, (3,)), patch=(2,), before="", after=None)
    case = replace(case, operator=Operator("F.relu(x)", lambda owner, x: torch.relu(x)))
    seen = Seen(
        torch.empty(0), {"map0": torch.tensor([[[-1.0, 3, 5]]])}, {"made": torch.tensor([[[1.0, 3, 4]]])}
    )
    assert expected(case, seen, case.net())[0][0].tolist() == [[[1, 1, 4]]]


def same_as_autograd(case: OperatorCase, method: gf.Method) -> list[str]:
    """Compare every gradient on the way with plain autograd, not with the oracle."""
    got, want = run(case, prepare(case, case.net(), method)), run(case, trained_alike(case, method))
    wrong = [] if torch.equal(got.y, want.y) else ["the forward is not the plain one, bit by bit"]
    for mine, plain_ones in ((got.gradients, want.gradients), (got.parameters, want.parameters)):
        for name in mine.keys() | plain_ones.keys():
            wrong += difference(f"gradient of {name}", mine.get(name), plain_ones.get(name), 1e-12)
    return wrong


def trained_alike(case: OperatorCase, method: gf.Method) -> Net:
    """The plain network, in which the same parameters train as in the changed one."""
    net = plain(case)
    changed = dict(prepare(case, case.net(), method).named_parameters())
    for name, parameter in net.named_parameters():
        parameter.requires_grad_(changed[name].requires_grad)
    return net


@pytest.mark.parametrize("method", [gf.Exact(), gf.GradientFilter(patch=1)], ids=str)
def test_exact_layers_get_exact_gradients(method: gf.Method) -> None:
    """Behind and before layers that want dense gradients, every operator is torch's."""
    failed = report(map(make_case, range(10**6, 10**6 + 360)), lambda case: same_as_autograd(case, method))
    assert not failed, failed


# --- other numbers than float64


UNMASKED = [family for family in FAMILIES if family != "dropout"]  # a mask of another dtype is another mask


def runs_in_torch(case: OperatorCase, net: Net, dtype: torch.dtype) -> bool:
    """Whether torch itself has the operator in this dtype; half precision lacks a few on CPU."""
    try:
        run(case, net, dtype)
    except RuntimeError as error:
        if "not implemented for" not in str(error):
            raise
        return False
    net.zero_grad()
    return True


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.1), (torch.float16, 0.02)]
)
def test_other_dtypes(dtype: torch.dtype, tolerance: float) -> None:
    """The gradients keep their dtype and are right to its digits, given what the layers made in it."""

    def judge(case: OperatorCase) -> list[str]:
        twin = plain(case, dtype)
        if not runs_in_torch(case, twin, dtype):
            return []
        seen = run(case, prepare(case, case.net(dtype)), dtype)
        wrong = forward_problems(case, seen, plain(case, dtype))
        if {g.dtype for g in (*seen.gradients.values(), *seen.parameters.values())} != {dtype}:
            wrong.append("a gradient changed its dtype")
        return wrong + gradient_problems(case, seen, twin.double(), tolerance)

    cases = [make_case(2 * 10**6 + seed, family) for family in UNMASKED for seed in range(5)]
    failed = report(cases, judge)
    assert not failed, failed


def test_autocast() -> None:
    """The forward of plain autocast bit by bit, and gradients right to the digits of bfloat16."""

    def judge(case: OperatorCase) -> list[str]:
        net, twin = prepare(case, case.net(torch.float32)), plain(case, torch.float32)
        with torch.autocast("cpu", torch.bfloat16):
            seen = run(case, net, torch.float32)
            wrong = forward_problems(case, seen, twin)
        return wrong + gradient_problems(case, seen, twin.double(), 0.1)

    cases = [make_case(3 * 10**6 + seed, family) for family in UNMASKED for seed in range(7)]
    failed = report(cases, judge)
    assert not failed, failed


# --- what is kept, and what becomes dense


def wide_case(family: str, seed: int) -> OperatorCase:
    """An operator on maps of 24 x 24 behind one or two layers of patch 4."""
    maps = Maps(batch=2, channels=8, size=(24, 24))
    case = replace(make_case(seed, family), maps=maps, patch=(4, 4), second_patch=(4, 4), kernel=1)
    return replace(
        case, operator=make_operator(family, seed, maps), before="", after=None, layout="contiguous"
    )


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "unknown"])
def test_nothing_of_full_size_is_kept(family: str) -> None:
    """All that is kept, the layers' own patch means included, is less than a quarter of one map."""
    one_map = 2 * 8 * 24 * 24 * 8
    for case in (wide_case(family, seed) for seed in range(20)):
        if not case.operator.known:
            continue
        net = prepare(case, case.net())
        with gf.kept_bytes(net) as kept:
            net(case.image())
        assert sum(kept.values()) < one_map / 4, (case, kept)


def test_plain_torch_keeps_whole_maps() -> None:
    """Or else the test above would not see them."""
    case = wide_case("relu", 0)
    with gf.kept_bytes(net := plain(case)) as kept:
        net(case.image())
    assert sum(kept.values()) >= 2 * 8 * 24 * 24 * 8


@pytest.mark.parametrize(
    ("gate", "slope"), [(nn.ReLU(), 0), (nn.ReLU6(), 0), (nn.LeakyReLU(0.2), 0), (nn.Hardtanh(), 0)], ids=str
)
def test_gates_keep_one_bit_for_exact_layers(gate: nn.Module, slope: float) -> None:
    """Where the gradient stays dense, a gate keeps one bit per value."""
    x = torch.randn(2, 3, 16, 16)
    kept_sizes = []
    for followed in (True, False):
        net = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Identity(), gate if followed else nn.Identity())
        gf.apply_(net, gf.Exact())
        with gf.kept_bytes(net) as kept:
            y = net(x)
        kept_sizes.append(sum(kept.values()))
    assert kept_sizes[0] - kept_sizes[1] == y.numel() / 8


UNKNOWN: dict[str, Callable[[Tensor], Tensor]] = {
    "aten.add.Tensor": lambda x: torch.relu(x) + torch.exp(x),  # a coarse and a dense gradient meet at x
    "aten.div.Tensor": lambda x: torch.relu(x / (1 + x.detach() ** 2)),
    "aten.mul.Tensor": lambda x: torch.relu(x.mul_(x.detach().cos())),
    "aten.copy_.default": lambda x: torch.relu_(x[:, :2]),  # in place on a view
}


@pytest.mark.parametrize("operator", UNKNOWN)
def test_what_becomes_dense_is_counted(operator: str) -> None:
    """By the name of the operator that asked for it; the gradients are right all the same."""
    run_it = UNKNOWN[operator]
    case = replace(wide_case("relu", 0), operator=Operator(operator, lambda owner, x: run_it(x), known=False))
    seen = run(case, prepare(case, case.net()))
    assert set(seen.fallbacks) & {operator}, seen.fallbacks
    assert all(count == 1 for count in seen.fallbacks.values())


class Between(nn.Module):
    """An operator between two convolutions."""

    def __init__(self, operator: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.operator, self.second = nn.Conv2d(3, 4, 3), operator, nn.Conv2d(4, 5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.operator(self.first(x)))


@pytest.mark.parametrize(("operator", "counted"), [(torch.exp, {"ExpBackward0": 1}), (torch.relu, {})])
@pytest.mark.parametrize("layers", ["all", "second"])
def test_an_operator_that_parts_two_layers_is_counted(
    operator: Callable[[Tensor], Tensor], counted: dict[str, int], layers: str
) -> None:
    """Nothing is counted where no earlier layer wanted a coarse gradient."""
    model = gf.apply_(Between(operator), gf.GradientFilter(patch=2), layers)
    with gf.count_fallbacks() as seen:
        model(torch.randn(2, 3, 12, 12, requires_grad=True)).sum().backward()
    assert dict(seen) == (counted if layers == "all" else {})


@pytest.mark.parametrize(
    "make", [lambda y: y[:, 1:3], lambda y: y.transpose(2, 3)], ids=["slice", "transpose"]
)
@pytest.mark.parametrize(
    "gate", [nn.ReLU(inplace=True), nn.SiLU(inplace=True), nn.Dropout(0.5, inplace=True)], ids=str
)
def test_in_place_on_a_view(make: Callable[[Tensor], Tensor], gate: Callable[[Tensor], Tensor]) -> None:
    """The base of the view is overwritten too, so its gradient passes through torch's own bookkeeping."""
    patches = (1, 1, 2, 3)

    def overwrite(y: Tensor) -> Tensor:
        torch.default_generator.manual_seed(0)
        gate(make(y))
        return y * 1

    class Overwriting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(2, 4, 1, dtype=torch.float64)

        def forward(self, x: Tensor) -> Tensor:
            return overwrite(self.conv(x))

    torch.default_generator.manual_seed(1)
    model, x = Overwriting(), torch.randn(2, 2, 5, 5, dtype=torch.float64)
    gf.apply_(model, gf.GradientFilter(patch=patches[2:]))
    g = averaged(torch.randn(2, 4, 5, 5, dtype=torch.float64), patches)
    z = model(x)
    z.backward(g)
    leaf = model.conv(x).detach().requires_grad_()
    y = overwrite(leaf * 1)
    assert torch.equal(y, z)
    want = averaged(torch.autograd.grad(y, leaf, g)[0], patches)
    assert not difference("bias", model.conv.bias.grad, want.sum((0, 2, 3)), TOLERANCE)
    weight_grad = torch.einsum("nohw,nihw->oi", want, x)[..., None, None]
    assert not difference("weight", model.conv.weight.grad, weight_grad, TOLERANCE)


@pytest.mark.parametrize("family", [family for family in FAMILIES if make_case(0, family).operator.coarse])
def test_double_backward_is_refused(family: str) -> None:
    """An averaged gradient has no meaningful derivative: say so instead of returning a wrong one."""
    case = wide_case(family, 0)
    net = prepare(case, case.net())
    y = net(case.image().requires_grad_())
    with pytest.raises(gf.GradFilterError, match="create_graph"):
        torch.autograd.grad(y.sum(), net.first.weight, create_graph=True)


# --- run with the layer before them


@dataclass(frozen=True)
class FollowedCase:
    """A 1x1 convolution followed by a batch norm, an activation or both in an ``nn.Sequential``."""

    seed: int
    size: tuple[int, int]
    patch: tuple[int, int]
    norm: str
    activation: str
    exact: bool

    def net(self) -> nn.Sequential:
        torch.default_generator.manual_seed(self.seed)
        parts: list[nn.Module] = [nn.Conv2d(2, 4, 1, bias=self.seed % 2 == 0)]
        parts += [nn.BatchNorm2d(4, affine=self.norm != "plain")] if self.norm else []
        parts += [ACTIVATIONS[self.activation]()] if self.activation else []
        for part in parts:
            if isinstance(part, nn.BatchNorm2d):
                for tensor in (part.running_mean, part.running_var, *part.parameters()):
                    tensor.data.uniform_(0.3, 2)
        return nn.Sequential(*parts, nn.Identity()).double()


ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "ReLU": nn.ReLU,
    "ReLU in place": lambda: nn.ReLU(inplace=True),
    "ReLU6": nn.ReLU6,
    "Hardtanh": lambda: nn.Hardtanh(-0.5, 0.8, inplace=True),
    "LeakyReLU": lambda: nn.LeakyReLU(0.3),
    "SiLU": nn.SiLU,
    "Hardswish in place": lambda: nn.Hardswish(inplace=True),
    "PReLU": nn.PReLU,
    "Softplus": nn.Softplus,
}


def make_followed_case(seed: int) -> FollowedCase:
    rng = Random(seed)  # noqa: S311
    return FollowedCase(
        seed=seed,
        size=(rng.randint(1, 9), rng.randint(1, 9)),
        patch=(rng.randint(1, 5), rng.randint(1, 5)),
        norm=rng.choice(["", "fixed", "affine", "batch", "plain"]),
        activation=rng.choice(["", *ACTIVATIONS]),
        exact=rng.random() < 0.2,
    )


def followed_problems(case: FollowedCase) -> list[str]:
    """The weights of the convolution and of the norm, and the gradient of the image."""
    random = torch.Generator().manual_seed(case.seed)
    image = torch.randn(2, 2, *case.size, generator=random, dtype=torch.float64).requires_grad_()
    g = torch.randn(2, 4, *case.size, generator=random, dtype=torch.float64)
    net, twin = case.net(), case.net()
    method = gf.Exact() if case.exact else gf.GradientFilter(patch=case.patch)
    gf.apply_(net, method, norm=case.norm if case.norm in ("affine", "batch") else "fixed")
    y = net(image)
    y.backward(g)

    if case.norm != "batch":
        twin.eval()
    read, made = [], image.detach()
    for part in twin:
        read.append(made.requires_grad_())
        made = part(made * 1).detach()
    wrong = [] if torch.equal(y, made) else ["the forward is not the plain one, bit by bit"]
    wanted = {name: parameter.grad is not None for name, parameter in net.named_parameters()}
    for i, (part, x) in reversed(list(enumerate(zip(twin, read, strict=True)))):
        if not case.exact and not isinstance(part, nn.Softplus | nn.Identity):
            g = averaged(g, (1, 1, *case.patch))
        own = {f"{i}.{name}": p for name, p in part.named_parameters() if wanted[f"{i}.{name}"]}
        g, *own_grads = torch.autograd.grad(part(x * 1), [x, *own.values()], g)
        for name, want in zip(own, own_grads, strict=True):
            wrong += difference(f"gradient of {name}", net.get_parameter(name).grad, want, TOLERANCE)
    return wrong + difference("gradient of the image", image.grad, g, TOLERANCE)


def test_followers_of_a_layer() -> None:
    """Norms and activations that run as one node with their layer give the same gradients."""
    failed = report(map(make_followed_case, range(400)), followed_problems)
    assert not failed, failed


# --- negative controls: the same comparison must notice each mistake


@dataclass(frozen=True)
class Mistake:
    """``attribute`` of ``owner`` replaced by ``broken(original)``; ``matters``: does a case depend on it?"""

    families: Sequence[str]
    owner: Any
    attribute: str
    broken: Callable[[Any], Any]
    matters: Callable[[OperatorCase], bool]


def full_patches(_: Any) -> Callable[[Grid, Tensor], float]:
    return lambda grid, like: float(prod(grid.patches))


def first_pixel(_: Any) -> Callable[[Tensor, Grid], Tensor]:
    return lambda x, grid: x[tuple(slice(None, None, patch) for patch in grid.patches)]


def ragged(case: OperatorCase) -> bool:
    return any(n % r for n, r in zip(case.maps.size, case.shared_patches[2:], strict=True))


def coarse(case: OperatorCase) -> bool:
    return max(case.shared_patches) > 1


MISTAKES: dict[str, Mistake] = {
    "ragged patches counted as full": Mistake(
        ["batch norm", "group norm"], norm, "pixels", full_patches, ragged
    ),
    "gate open on the other side": Mistake(
        ["relu", "relu6", "leaky relu", "hardtanh"],
        activation.Gate,
        "after",
        lambda right: lambda gate, y, grid: (pixels(grid, y) - right(gate, y, grid)).to(torch.uint8),
        coarse,
    ),
    "slope of the first pixel": Mistake(
        ["silu", "gelu", "tanh", "mish"], activation, "pool", first_pixel, coarse
    ),
    "maxima one neighbour off": Mistake(
        ["max pool", "gated pool"],
        max_pool,
        "_maxima",
        lambda right: lambda *how: (lambda y, counts: (y, counts.roll(1, 0)))(*right(*how)),
        lambda case: coarse(case) and case.lands == case.patches and case.maps.size > case.patches[2:],
    ),
    "matrices upside down": Mistake(
        ["avg pool", "interpolate", "pad"],
        spatial,
        "_coarse_matrix",
        lambda right: lambda *how: right(*how).flip(0),
        lambda case: coarse(case) and prod(case.maps.size) > prod(case.patches),
    ),
    "broadcast to one pixel": Mistake(
        ["channel scale"],
        product,
        "pixels",
        lambda right: lambda grid, like: 1.0,
        lambda case: coarse(case) and case.trains and case.operator.lands is not as_it_is,
    ),
    "mask of the first pixel": Mistake(
        ["dropout", "product"],
        product,
        "pool",
        first_pixel,
        lambda case: coarse(case) and case.operator.lands is not as_it_is,
    ),
    "masks of a join multiplied as means": Mistake(
        ["residual"], activation, "gated_term", lambda right: lambda z, grid: None, coarse
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_comparison_notices(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library passes, and the broken library fails, nearly everywhere the mistake matters.

    Not quite everywhere: all pixels of a patch may be alike, and some windows read one patch only.
    """
    mistake = MISTAKES[name]
    cases = [make_case(seed, family) for seed in range(150) for family in mistake.families]
    cases = [case for case in cases if case.maps.batch > 0 and mistake.matters(case)][:50]
    assert len(cases) >= 25
    assert not (failed := report(cases, problems)), failed
    broken = mistake.broken(getattr(mistake.owner, mistake.attribute))
    monkeypatch.setattr(mistake.owner, mistake.attribute, broken)
    noticed = sum(bool(report([case], problems)) for case in cases)
    assert noticed >= 0.8 * len(cases)


def test_comparison_rejects_what_is_not_a_gradient() -> None:
    """A missing gradient, a wrong shape and NaN are differences too."""
    want = torch.ones(2, 3)
    assert not difference("x", want.clone(), want, TOLERANCE)
    for bad in (None, want[:1], want * torch.nan):
        assert difference("x", bad, want, TOLERANCE)
