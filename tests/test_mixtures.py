"""Methods that train little, and several methods in one network; what cannot be combined is refused."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradfilter as gf
from gradfilter.errors import PlanError
from gradfilter.geometry import ConvGeometry
from operators import averaged
from test_chain import _run_filtered, build, differences, image, run

Mix = dict[str, gf.Method]


def tiny() -> Any:
    torch.manual_seed(0)
    return gf.models.build("tiny", classes=4).eval()


def images(count: int = 2) -> Tensor:
    return torch.randn(count, 3, 16, 16, generator=torch.Generator().manual_seed(3))


def biased() -> nn.Sequential:
    torch.manual_seed(0)
    convs = [nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3, bias=False), nn.Conv2d(4, 4, 3)]
    return nn.Sequential(convs[0], nn.ReLU(), convs[1], nn.ReLU(), convs[2])


def rows(plan: gf.Plan) -> dict[str, tuple[str, str]]:
    return {row.name: (row.action, row.reason) for row in plan.rows}


def trained(model: nn.Module) -> list[str]:
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


# --- methods that train little


def test_bias_only() -> None:
    model, x = biased(), images()
    plan = gf.plan(model, gf.BiasOnly(), example=x)
    assert rows(plan) == {
        "0": ("train", ""),
        "2": ("pass", "has no bias; nothing of it trains"),
        "4": ("train", ""),
    }
    assert all(row.after and row.before and row.after.kept == 0 < row.before.kept for row in plan.rows)
    assert plan.rows[0].after
    assert plan.rows[0].after.backward_macs == 0
    gf.apply_(model, plan)
    assert trained(model) == ["0.bias", "4.bias"]
    model(x).square().sum().backward()
    plain = biased()
    plain(x).square().sum().backward()
    for name in trained(model):
        torch.testing.assert_close(model.get_parameter(name).grad, plain.get_parameter(name).grad)


def test_a_layer_without_a_bias_before_the_first_that_trains_is_frozen() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.Conv2d(4, 4, 3))
    assert rows(gf.plan(model, gf.BiasOnly()))["0"] == ("frozen", "has no bias; nothing of it trains")


def test_bias_only_accelerated() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3)).eval()
    gf.apply_(model, gf.BiasOnly())
    fast, x = gf.accelerate_(copy.deepcopy(model)), images()
    for one in (model, fast):
        one(x).square().sum().backward()
    for mine, theirs in zip(fast.parameters(), model.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None)
        if theirs.grad is not None:
            torch.testing.assert_close(mine.grad, theirs.grad, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("norm", ["fixed", "affine"])
def test_norm_only(norm: Any) -> None:
    model, x = tiny().train(), images()
    before = copy.deepcopy(model.state_dict())
    gf.apply_(model, {"head": gf.Exact(), "*": gf.NormOnly()}, "last:2", norm=norm)
    norms = [f"inverted.body.{i}.1" for i in (1, 2)]
    expected = [f"{name}.{part}" for name in norms for part in ("weight", "bias")]
    assert trained(model) == [*expected, "head.weight", "head.bias"]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()
    moved = [name for name, value in model.state_dict().items() if not torch.equal(value, before[name])]
    assert moved == trained(model)


def test_norm_only_costs_and_gradients() -> None:
    model, x = tiny(), images()
    plan = gf.plan(model, {"head": gf.Exact(), "*": gf.NormOnly()}, "all", example=x)
    assert all(row.after and row.after.kept == 0 for row in plan.rows if row.name != "head")
    plain = copy.deepcopy(model)
    gf.apply_(model, plan)
    with gf.kept_bytes(model) as kept:
        y = model(x)
    assert sum(kept.values()) == plan.kept[1] < plan.kept[0]
    y.square().sum().backward()
    plain(x).square().sum().backward()
    for name in trained(model):
        torch.testing.assert_close(
            model.get_parameter(name).grad, plain.get_parameter(name).grad, atol=1e-4, rtol=1e-4, msg=name
        )


def test_frozen_rows() -> None:
    plan = gf.plan(
        tiny(), {"stem.*": gf.Frozen(), "inverted.body.1.*": gf.Frozen(), "*": gf.GradientFilter()}
    )
    first, *_ = plan.rows
    assert (first.action, first.reason) == ("frozen", "")
    assert rows(plan)["inverted.body.1.0"] == ("pass", "")
    line = next(line for line in str(plan).splitlines() if line.startswith("inverted.body.1.0"))
    assert line.split()[2:] == ["pass", "Frozen()"]


def test_frozen_layers_pass_gradients_on_and_stay() -> None:
    model, x = biased(), images()
    gf.apply_(model, {"2": gf.Frozen(), "*": gf.Exact()})
    model(x).square().sum().backward()
    plain = biased()
    plain(x).square().sum().backward()
    for name, parameter in plain.named_parameters():
        mine = model.get_parameter(name).grad
        if name == "2.weight":
            assert mine is None
        else:
            torch.testing.assert_close(mine, parameter.grad)


@pytest.mark.parametrize("method", [gf.BiasOnly(), gf.NormOnly(), gf.Frozen(), gf.SparseUpdate()], ids=str)
def test_analyze_without_weight_gradients(method: gf.Method) -> None:
    model = tiny()
    mix: Mix = {"head": gf.Exact(), "inverted.body.2.0": method, "*": gf.Exact()}
    plan = gf.plan(model, mix, "last:3")
    found = gf.analyze(model, (images(), torch.tensor([0, 1])), F.cross_entropy, plan)
    names = [f"inverted.body.{i}.0" for i in (2, 1, 0)]
    assert [row.name for row in found.rows] == ["head", *(n for n in names if n in plan.trained)]
    for row in found.rows:
        partial_weight = row.method == method
        assert (row.weight is None) == (partial_weight and "weight" not in method.trains)
        assert row.output
        assert row.output.cosine == pytest.approx(1)
        if row.weight:
            assert (row.weight.cosine > 0.999) != partial_weight


def test_analyze_where_only_a_bias_trains_first() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3))
    plan = gf.plan(model, gf.BiasOnly())
    last, first = gf.analyze(model, images(), lambda y: y.square().mean(), plan).rows
    assert (last.name, first.name) == ("2", "0")
    assert last.output
    assert last.weight is first.weight is first.output is None


# --- mixtures: every layer does what it would alone


MOBILENET: Mix = {
    "classifier.*": gf.SparseUpdate(0.5),
    "features.1[6-8].*": gf.GradientFilter(4),
    "features.15.*": gf.Frozen(),
    "features.1[34].*": gf.GradientFilter(2),
    "features.12.conv.0.*": gf.Exact(),
    "features.12.*": gf.SparseUpdate(0.25),
    "features.11.*": gf.NormOnly(),
    "features.10.*": gf.SparseUpdate(4, "last"),
    "*": gf.Exact(),
}
RESIDUAL: Mix = {
    "6.*": gf.BiasOnly(),
    "5.body.1.*": gf.GradientFilter(4),
    "[45].*": gf.GradientFilter(4, "collapse"),
    "3.*": gf.GradientFilter(2),
    "2.*": gf.SparseUpdate(0.5),
    "*": gf.Exact(),
}
SHARED: Mix = {"0": gf.BiasOnly(), "2": gf.GradientFilter(2), "4": gf.SparseUpdate(3), "*": gf.Exact()}
MIXES: dict[str, tuple[str, Mix, str]] = {
    "mobilenet_v2": ("mobilenet_v2", MOBILENET, "last:28"),
    "residual": ("residual", RESIDUAL, "all"),
    "shared": ("shared", SHARED, "all"),
}
every_mix = pytest.mark.parametrize("mix", MIXES)


class LeakyOnGrid(torch.autograd.Function):
    """Behind a filtered layer an activation works on its grid: mean gradient times mean slope."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, slope: float, patch: int) -> Tensor:
        ctx.save_for_backward((x > 0).to(x.dtype) * (1 - slope) + slope)
        ctx.patches = (1, 1, patch, patch)
        return F.leaky_relu(x, slope)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        (slopes,) = ctx.saved_tensors
        return averaged(g, ctx.patches) * averaged(slopes, ctx.patches), None, None


def filtered(layer: nn.Conv2d, method: gf.GradientFilter, x: Tensor) -> Any:
    y: Any = _run_filtered(layer, method, x)
    y.patch = method.patch
    return y


def leaky(module: nn.LeakyReLU, x: Tensor) -> Any:
    return LeakyOnGrid.apply(x, module.negative_slope, getattr(x, "patch", 1))


def reference(name: str, plan: gf.Plan, mixed: nn.Module, side: int) -> Any:
    """Plain torch; filtered convolutions by definition, rows of weight gradients that do not train zeroed."""
    model = build(name)
    model.requires_grad_(False)
    for row in plan.rows:
        layer: Any = model.get_submodule(row.name)
        for part, parameter in layer.named_parameters():
            parameter.requires_grad_(row.action == "train" and part in row.method.trains)
        if isinstance(row.method, gf.GradientFilter) and row.action != "frozen":
            layer.forward = partial(filtered, layer, row.method)
    for module in model.modules():
        if isinstance(module, nn.LeakyReLU):
            module.forward = partial(leaky, module)  # type: ignore[method-assign]
    for norm in plan.norms:
        model.get_submodule(norm).requires_grad_(True)
    found = run(model, image(side))
    for row in plan.rows:
        if isinstance(row.method, gf.SparseUpdate) and row.action == "train":
            memory: Any = mixed.get_submodule(row.name).gradfilter_memory
            grad = found.gradients[f"{row.name}.weight"]
            for channel in range(grad.shape[1]):
                if "channels" in memory and channel not in memory["channels"].tolist():
                    grad[:, channel] = 0
    return found


@every_mix
def test_every_layer_does_what_it_would_alone(mix: str, vision: None) -> None:
    name, methods, layers = MIXES[mix]
    plan = gf.plan(build(name), methods, layers)
    used = {type(row.method) for row in plan.rows if row.action == "train"}
    assert len(used) >= 4 - (mix == "shared")
    for side in (64, 45):
        mixed = gf.apply_(build(name), plan)
        wrong = differences(run(mixed, image(side)), reference(name, plan, mixed, side))
        assert not wrong, (side, wrong)


@every_mix
def test_a_mistake_in_one_layer_is_noticed(mix: str, vision: None) -> None:
    name, methods, layers = MIXES[mix]
    plan = gf.plan(build(name), methods, layers)
    mixed = gf.apply_(build(name), plan)
    found = run(mixed, image(45))
    other = {pattern: _other(method) for pattern, method in methods.items()}
    assert differences(found, reference(name, gf.plan(build(name), other, layers), mixed, 45))


def _other(method: gf.Method) -> gf.Method:
    return gf.GradientFilter(3, method.taps) if isinstance(method, gf.GradientFilter) else method


@every_mix
def test_costs_of_mixtures_are_those_measured(mix: str, vision: None) -> None:
    name, methods, layers = MIXES[mix]
    model, x = build(name), image(45)
    plan = gf.plan(model, methods, layers, example=x)
    gf.apply_(model, plan)
    with gf.kept_bytes(model) as kept:
        model(x)
    assert sum(kept.values()) == plan.kept[1] < plan.kept[0]


def test_adapters_in_a_mixture() -> None:
    """Filtered layers, adapters and exact ones behind one another; bytes as predicted, weights as before."""
    model, x = tiny(), images()
    mix: Mix = {
        "inverted.body.0.*": gf.GradientFilter(2),
        "inverted.body.1.*": gf.LowRankAdapter(2),
        "inverted.body.2.*": gf.LiteResidual(),
        "*": gf.Exact(),
    }
    plan = gf.plan(model, mix, example=x)
    y = model(x)
    gf.apply_(model, plan)
    with gf.kept_bytes(model) as kept:
        assert torch.equal(model(x), y)
    assert sum(kept.values()) == plan.kept[1]
    model(x).sum().backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


def test_a_passing_layer_remembers_nothing() -> None:
    model = gf.apply_(tiny(), gf.SparseUpdate(2), "first:1")
    assert {path.partition(":")[0] for path in gf.method_state(model)} == {"stem.0", "head"}


def test_a_passing_layer_gets_no_adapter() -> None:
    model = gf.apply_(tiny(), gf.LowRankAdapter(), "first:1")
    assert [name for name in trained(model) if "gradfilter" in name] == [
        f"{layer}.gradfilter_{part}" for layer in ("stem.0", "head") for part in ("down", "up")
    ]


# --- what cannot be combined


@dataclass(frozen=True)
class Stored(gf.Method):
    """A method with a way of storing that does not exist."""

    store: Any = "int3"

    def keep(self, x: Tensor, geometry: ConvGeometry, memory: gf.Memory) -> tuple[Tensor, ...]:
        return (x,)


REFUSED: dict[str, tuple[Any, str]] = {
    "a pattern without a layer": (
        lambda m: gf.plan(m, {"inverted.bdy.0.*": gf.Exact(), "*": gf.Exact()}),
        "No layer matches 'inverted.bdy.0.*' of the methods. Did you mean inverted.body.0.0",
    ),
    "a pattern behind one that has its layers": (
        lambda m: gf.plan(m, {"*": gf.Exact(), "head": gf.BiasOnly()}),
        "All layers of 'head' have the method of a pattern before it; put it first.",
    ),
    "a method for layers that do not train": (
        lambda m: gf.plan(m, {"stem.*": gf.SparseUpdate(), "*": gf.Exact()}, "last:1"),
        "The layers of 'stem.*' are frozen, so that their SparseUpdate does nothing; select one of them",
    ),
    "no method for a layer": (
        lambda m: gf.plan(m, {"stem.*": gf.Exact()}),
        "No pattern of the methods matches layer ",
    ),
    "nothing trains": (
        lambda m: gf.plan(m, gf.Frozen()),
        "Nothing would train: layer stem.0 is frozen, for example; give a layer another method",
    ),
    "no bias": (
        lambda m: gf.plan(m, {"head": gf.Frozen(), "*": gf.BiasOnly()}),
        "Nothing would train: layer stem.0 has no bias, for example; give a layer another method",
    ),
    "no norm": (
        lambda m: gf.plan(nn.Sequential(nn.Conv2d(3, 3, 1)), gf.NormOnly()),
        "Nothing would train: layer 0 has no norm behind it, for example; give a layer another method",
    ),
    "norms that move, and must not": (
        lambda m: gf.plan(m, {"head": gf.Exact(), "*": gf.NormOnly()}, norm="batch"),
        "NormOnly leaves the statistics of norms as they are; use norm='fixed' with it.",
    ),
    "a channel that is not there": (
        lambda m: gf.plan(m, gf.SparseUpdate((0, 99)), "last:1"),
        "Layer inverted.body.2.0: SparseUpdate's channel 99 is not one of its ",
    ),
    "an unknown store": (
        lambda m: gf.plan(m, Stored()),
        "store must be 'same' or 'bf16' or 'int8', not 'int3'.",
    ),
    "adapters twice": (
        lambda m: gf.plan(gf.apply_(m, gf.LowRankAdapter()), gf.LowRankAdapter()),
        "The model has a plan applied already; call gf.restore_(model) first.",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_when_planned(case: str) -> None:
    call, sentence = REFUSED[case]
    with pytest.raises(PlanError) as caught:
        call(tiny())
    assert str(caught.value).startswith(sentence)
    assert str(caught.value).count(". ") <= 1


def test_reasons_of_layers_that_stay_exact() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"),
        nn.Conv2d(4, 4, 3),
        nn.Flatten(),
        nn.Linear(4, 2),
    )
    assert rows(gf.plan(model, gf.LiteResidual())) == {
        "0": ("train", "pads with padding_mode='reflect'"),
        "1": ("train", ""),
        "3": ("train", "is no convolution"),
    }


@pytest.mark.parametrize(
    ("layers", "mix"),
    [
        ("all", {"head": gf.BiasOnly(), "*": gf.Exact()}),
        ("last:1", {"stem.*": gf.Frozen(), "*": gf.Exact()}),
        ("first:1", {"inverted.*": gf.GradientFilter(), "*": gf.Exact()}),  # how gradients pass through
        ("last:1", {"inverted.*": gf.GradientFilter(), "head": gf.Exact(), "*": gf.SparseUpdate()}),
    ],
)
def test_what_can_be_combined_is_not_refused(layers: str, mix: Mix) -> None:
    assert gf.plan(tiny(), mix, layers).trained


def test_adapters_and_a_feature_cache() -> None:
    """Features are of the frozen part, so that adapters behind it do not matter to it."""
    model = gf.apply_(tiny(), {"head": gf.Exact(), "*": gf.LowRankAdapter()}, "last:1")
    parts, x = gf.split(model), images()
    features = parts.prefix(x)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "gradfilter" in name:
                parameter.add_(0.1)
    assert all(torch.equal(a, b) for a, b in zip(parts.prefix(x), features, strict=True))
    torch.testing.assert_close(parts.tail(features), model(x), atol=1e-5, rtol=1e-4)


STORED = [
    gf.GradientFilter(2, store="int8"),
    gf.SVD(0.8, store="int8"),
    gf.HOSVD(0.8, store="int8"),
    gf.SubspaceIteration(2, store="int8"),
    gf.WalshHadamard(4, 2, store="int8"),
    gf.SparseUpdate(0.5, store="int8"),
]


@pytest.mark.parametrize("method", STORED, ids=str)
def test_stores_of_other_methods(method: gf.Method) -> None:
    """Fewer bytes than the plain store, of which bf16 has half; gradients close to those of the plain one."""
    x = torch.randn(4, 16, 16, 16, generator=torch.Generator().manual_seed(0))
    found = {}
    for store in ("same", "bf16", "int8"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(16, 8, 1), nn.Identity())
        gf.apply_(model, replace(method, store=store))  # type: ignore[type-var, call-arg]
        with gf.kept_bytes(model) as kept:
            y = model(x)
        y.square().sum().backward()
        found[store] = sum(kept.values()), model.get_parameter("0.weight").grad
    sizes = {store: size for store, (size, _) in found.items()}
    assert sizes["int8"] < 0.6 * sizes["same"] or sizes["same"] < 4096
    assert sizes["bf16"] <= 0.75 * sizes["same"]
    for store, least in (("bf16", 0.9999), ("int8", 0.995)):
        cosine = nn.functional.cosine_similarity(found[store][1].flatten(), found["same"][1].flatten(), 0)  # type: ignore[union-attr]
        assert cosine > least
