"""Accelerated models: same results and gradients, same module to its owner; and models split in two."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradfilter as gf
from gradfilter import native
from gradfilter.graphs import why_untraceable
from gradfilter.native.inverted_residual import is_built
from gradfilter.ops import fused
from gradfilter.ops.inverted_residual import InvertedResidual

FILTER = gf.GradientFilter(patch=2)
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


def with_statistics(model: nn.Module) -> nn.Module:
    """Norms that do something: fresh ones have mean 0, variance 1, scale 1 and shift 0."""
    random = torch.Generator().manual_seed(0)
    bounds = {
        "running_mean": (-0.2, 0.2),
        "running_var": (0.5, 2.0),
        "weight": (0.5, 1.5),
        "bias": (-0.2, 0.2),
    }
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            for name, (low, high) in bounds.items():
                if getattr(module, name) is not None:
                    getattr(module, name).data.uniform_(low, high, generator=random)
    return model


def relative(a: Tensor, b: Tensor) -> float:
    return float(((a - b).norm() / (b.norm() + 1e-30)).detach())


def differences(model: nn.Module, other: nn.Module, x: Tensor) -> dict[str, float]:
    """How far outputs and gradients of two models are apart."""
    y, z = model(x), other(x)
    seed = torch.Generator().manual_seed(1)
    gradient = torch.randn(y.shape, generator=seed, dtype=y.dtype)
    found = {"output": relative(z, y)}
    for each, made in ((model, y), (other, z)):
        each.zero_grad()
        torch.autograd.backward(made, gradient)
    pairs = zip(model.named_parameters(), other.parameters(), strict=True)
    return found | {name: relative(q.grad, p.grad) for (name, p), q in pairs if p.grad is not None}


class Residual(nn.Module):
    """Functional activations, sums in both orders, a norm without an affine part, a bias before a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.second, self.plain = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8, affine=False)
        self.third = nn.Conv2d(8, 8, 1, bias=False)
        self.last = nn.Conv2d(8, 8, 3, stride=2, padding=2, dilation=2)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.first(x)))
        y = self.plain(self.second(x))
        y = torch.relu(x + y)
        z = self.third(y) + y
        w = F.hardswish(self.last(F.silu(z)))
        return self.head(w.mean((2, 3)))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "tiny": lambda: gf.models.build("tiny"),
    "residual": Residual,
    "mcunet": lambda: gf.models.build("mcunet-5fps", classes=7),
    "mobilenet_v2": lambda: gf.models.build("mobilenet_v2", classes=7),
    "resnet18": lambda: gf.models.build("resnet18", classes=7),
    "mobilenet_v3": lambda: gf.models.build("mobilenet_v3_small", classes=7),
    "shufflenet": lambda: gf.models.build("shufflenet_v2_x0_5", classes=7),
    "efficientnet": lambda: gf.models.build("efficientnet_b0", classes=7),
}


@pytest.mark.usefixtures("vision")
@pytest.mark.parametrize("layers", ["last:3", "all"])
@pytest.mark.parametrize("method", [FILTER, gf.GradientFilter(4, taps="collapse"), gf.Exact()], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_results_and_gradients_are_those_of_the_plain_model(
    name: str, method: gf.Method, layers: str
) -> None:
    model = gf.apply_(with_statistics(MODELS[name]()).double(), method, layers)
    model = model.eval().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    x = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    faster = gf.accelerate_(copy.deepcopy(model))
    with gf.count_fallbacks() as fallbacks:
        found = differences(model, faster, x)
    assert max(found.values()) < TOLERANCE[torch.float64], found
    assert not fallbacks
    with torch.no_grad():
        assert relative(faster(x), model(x)) < TOLERANCE[torch.float64]


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("name", ["tiny", "residual", "mcunet"])
def test_onednn_gives_the_same_numbers(name: str, layout: torch.memory_format) -> None:
    """Only float32 runs there. Gates near zero may flip by rounding, so gradients are compared loosely."""
    model = gf.apply_(with_statistics(MODELS[name]()), FILTER, "last:3").eval().to(memory_format=layout)
    x = torch.randn(2, 3, 64, 64)
    found = differences(model, gf.accelerate_(copy.deepcopy(model)), x)
    assert found.pop("output") < TOLERANCE[torch.float32]
    assert max(found.values()) < 1e-3, found


class Narrow(nn.Module):
    """Pointwise convolutions of small maps, whose weights are larger: with and without bias, gate and sum."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 24, 3, padding=1)
        self.convs = nn.ModuleList(nn.Conv2d(24, 24, 1, bias=bias) for bias in (True, False, True, False))
        self.norms = nn.ModuleList(nn.BatchNorm2d(24) for _ in self.convs)
        self.head = nn.Linear(24, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu6(self.norms[0](self.convs[0](self.stem(x))))
        x = self.norms[1](self.convs[1](x)) + x
        x = F.relu(self.norms[2](self.convs[2](x)))
        return self.head(self.norms[3](self.convs[3](x)).mean((2, 3)))


@pytest.fixture
def finished(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of all maps whose norm and gate ran in one pass behind a product."""
    seen, finish = [], native.finish

    def spy(y: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
        seen.append(tuple(y.shape))
        return finish(y, *args)

    monkeypatch.setattr(native, "finish", spy)
    return seen


@pytest.mark.skipif(not native._functions(), reason="the native passes were not built")
@pytest.mark.parametrize("side", [1, 3, 4])
@pytest.mark.parametrize("patch", [1, 2, 16])
def test_norms_behind_products_of_small_maps(side: int, patch: int, finished: list[tuple[int, ...]]) -> None:
    plain = gf.apply_(with_statistics(Narrow()), gf.GradientFilter(patch), ["convs.*", "head"]).eval()
    model = plain.to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, side, side).to(memory_format=torch.channels_last)
    found = differences(model, gf.accelerate_(copy.deepcopy(model)), x)
    assert found.pop("output") < TOLERANCE[torch.float32]
    assert max(found.values()) < 1e-3, found
    assert len(finished) == (4 if min(patch, side) > 1 else 0)


@pytest.mark.parametrize("mistake", ["factors", "_fold"])
def test_comparison_notices_a_wrong_fold(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = getattr(fused.FusedConv, mistake)

    def wrong(self: Any, *args: Any) -> tuple[Tensor, Tensor | None]:
        first, second = right(self, *args)
        return first, None if second is None else second * 1.01

    model = gf.apply_(with_statistics(MODELS["tiny"]()).double(), FILTER, "last:2").eval()
    x = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    monkeypatch.setattr(fused.FusedConv, mistake, wrong)
    assert differences(model, gf.accelerate_(copy.deepcopy(model)), x)["output"] > 1e-6


def with_learned_norms(name: str, method: gf.Method) -> nn.Module:
    model = gf.apply_(with_statistics(MODELS[name]()).double(), method, "all", norm="affine").eval()
    with torch.no_grad():
        for norm in (m for m in model.modules() if isinstance(m, nn.BatchNorm2d) and m.weight is not None):
            norm.weight[::3] = 0.0  # what has no scale has a gradient of it all the same
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


@pytest.mark.parametrize("method", [FILTER, gf.GradientFilter(4, taps="collapse"), gf.Exact()], ids=str)
@pytest.mark.usefixtures("vision")
@pytest.mark.parametrize("name", ["residual", "tiny", "mobilenet_v2"])
def test_norms_that_train(name: str, method: gf.Method) -> None:
    model = with_learned_norms(name, method)
    faster = gf.accelerate_(copy.deepcopy(model))
    found = differences(model, faster, torch.randn(2, 3, 36, 36, dtype=torch.float64))
    assert max(found.values()) < TOLERANCE[torch.float64], found


def test_norms_that_train_keep_nothing_where_the_weight_tells_their_gradient() -> None:
    x = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    for method, folds in ((gf.Exact(), True), (FILTER, True), (gf.HOSVD(0.8), False)):
        model = with_learned_norms("tiny", method)
        faster = gf.accelerate_(copy.deepcopy(model))
        assert ("conv + norm" in str(gf.acceleration(faster))) == folds
        with gf.kept_bytes(model) as plain:
            model(x)
        with gf.kept_bytes(faster) as kept:
            faster(x)
        assert (sum(kept.values()) < sum(plain.values())) == folds


@pytest.mark.parametrize("norm", ["fixed", "affine"])
@pytest.mark.parametrize("accelerated", [False, True])
def test_the_backward_is_of_the_weights_that_the_forward_had(norm: str, accelerated: bool) -> None:
    """functional_call puts the model's own parameters back before the backward runs."""
    model = with_statistics(MODELS["tiny"]()).double().eval()
    ours = gf.apply_(copy.deepcopy(model), gf.Exact(), "all", norm=norm)  # type: ignore[arg-type]
    ours = gf.accelerate_(ours) if accelerated else ours
    x, found = torch.randn(2, 3, 32, 32, dtype=torch.float64), []
    trained = [name for name, parameter in ours.named_parameters() if parameter.requires_grad]
    for each in (model, ours):
        others = {name: (2 * p).detach() for name, p in each.named_parameters()}
        for name in trained:
            others[name].requires_grad_(True)
        torch.func.functional_call(each, others, (x,)).square().sum().backward()
        found.append([others[name].grad for name in trained])
    assert all(relative(mine, right) < 1e-10 for mine, right in zip(found[1], found[0], strict=True))


def test_weights_that_change_before_the_backward_are_noticed() -> None:
    faster = gf.accelerate_(with_learned_norms("tiny", gf.Exact()))
    y = faster(torch.randn(2, 3, 32, 32, dtype=torch.float64)).sum()
    with torch.no_grad():
        next(faster.parameters()).mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


@pytest.mark.parametrize("method", [FILTER, gf.Exact()], ids=str)
@pytest.mark.parametrize("missing", ["weight", "bias"])
def test_norms_without_scale_or_shift(missing: str, method: gf.Method) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 1)).double()
    setattr(model[1], missing, None)
    model = gf.apply_(with_statistics(model), method, "all", norm="affine").eval()
    found = differences(
        model, gf.accelerate_(copy.deepcopy(model)), torch.randn(2, 3, 8, 8, dtype=torch.float64)
    )
    assert max(found.values()) < TOLERANCE[torch.float64], found


def test_comparison_notices_a_norm_folded_where_it_must_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gf.GradientFilter, "weight_gradient_tells_scale", lambda self, module: True)
    model = with_learned_norms("tiny", FILTER)
    found = differences(
        model, gf.accelerate_(copy.deepcopy(model)), torch.randn(2, 3, 32, 32, dtype=torch.float64)
    )
    assert max(found.values()) > 1e-3


def test_the_model_stays_what_it_was() -> None:
    model = gf.apply_(MODELS["tiny"](), FILTER, "last:2")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    parameters, kind = list(model.parameters()), type(model).__name__
    gf.accelerate_(model)(torch.randn(2, 3, 32, 32)).sum().backward()
    assert [id(p) for p in model.parameters()] == [id(p) for p in parameters]
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(model.state_dict()[name], before[name]) for name in before)
    assert type(model).__name__ == kind
    with pytest.raises(gf.GradFilterError, match="accelerated already"):
        gf.accelerate_(model)
    restored = gf.restore_(model)
    assert type(restored) is type(MODELS["tiny"]())
    assert not any(name.startswith("gradfilter") for m in restored.modules() for name in m.__dict__)


def test_kept_bytes_are_those_of_the_plain_model() -> None:
    model = gf.apply_(MODELS["tiny"](), FILTER, "all").to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    x = torch.randn(2, 3, 32, 32).to(memory_format=torch.channels_last)
    sizes = []
    for each in (model, gf.accelerate_(copy.deepcopy(model))):
        with gf.kept_bytes(each) as kept:
            each(x)
        sizes.append(sum(kept.values()))
    assert sizes[0] == sizes[1]


def test_weights_that_change_are_seen() -> None:
    model = with_statistics(MODELS["tiny"]()).eval()
    faster, x = gf.accelerate_(copy.deepcopy(model)), torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        faster(x)
        other = with_statistics(MODELS["tiny"]()).eval()
        for norm in (m for m in other.modules() if isinstance(m, nn.BatchNorm2d)):
            norm.running_mean.add_(0.1)
        faster.load_state_dict(other.state_dict())
        assert relative(faster(x), other(x)) < 1e-5
        faster.stem[0].weight.mul_(2)  # type: ignore[index,union-attr,operator]
        assert relative(faster(x), other(x)) > 1e-3


def test_modes_are_followed() -> None:
    """Dropout runs in training and not in evaluation; freezing moves the border."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Dropout(0.5), nn.Conv2d(4, 4, 3))
    gf.accelerate_(gf.apply_(model, FILTER, "last:1"))
    x = torch.randn(2, 3, 12, 12)
    assert not torch.equal(model.train()(x), model(x))
    assert torch.equal(model.eval()(x), model(x))
    assert model(x).requires_grad
    model.requires_grad_(False)
    assert not model(x).requires_grad


def test_the_gradient_of_the_input_is_there_when_asked_for() -> None:
    model = gf.apply_(with_statistics(MODELS["tiny"]()).double(), gf.Exact(), "last:2").eval()
    x = torch.randn(2, 3, 32, 32, dtype=torch.float64, requires_grad=True)
    wanted = torch.autograd.grad(model(x).sum(), x)[0]
    made = torch.autograd.grad(gf.accelerate_(model)(x).sum(), x)[0]
    assert relative(made, wanted) < 1e-10


def test_hooks_are_called() -> None:
    model = gf.accelerate_(gf.apply_(MODELS["tiny"](), FILTER, "last:2"))
    seen: list[str] = []
    handle = model.stem.register_forward_hook(lambda *_: seen.append("stem"))  # type: ignore[union-attr]
    x = torch.randn(2, 3, 32, 32)
    with_hook = model(x)
    handle.remove()
    assert seen == ["stem"]
    assert relative(model(x), with_hook) < 1e-5
    assert seen == ["stem"]


def test_copies_are_models_of_their_own() -> None:
    model = gf.accelerate_(gf.apply_(MODELS["tiny"](), FILTER, "last:2")).eval()
    x = torch.randn(2, 3, 32, 32)
    before = model(x)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # noqa: S301  our own
        assert torch.equal(twin(x), before)
        with torch.no_grad():
            twin.head.weight.zero_()
        assert relative(twin(x), before) > 1e-3
        assert type(gf.restore_(twin)) is type(MODELS["tiny"]())
    assert torch.equal(model(x), before)


class Branches(nn.Module):
    """Cannot be traced as a whole, because it looks at its numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        self.tail = nn.Sequential(nn.Conv2d(4, 4, 3), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.tail(x) if x.sum() > -1e9 else x


def test_parts_of_a_model_that_cannot_be_traced() -> None:
    model = gf.apply_(with_statistics(Branches()).double(), FILTER, "tail").eval()
    x = torch.randn(2, 3, 12, 12, dtype=torch.float64)
    faster = gf.accelerate_(copy.deepcopy(model))
    found = differences(model, faster, x)
    assert max(found.values()) < 1e-10, found
    assert str(gf.acceleration(faster)).count("conv + ") == 2
    with pytest.raises(gf.GradFilterError, match="cannot be split, because it cannot be traced"):
        gf.split(model)
    with pytest.raises(gf.GradFilterError, match="Nothing in Conv2d can be traced"):
        gf.accelerate_(nn.Conv2d(3, 3, 1))


def test_what_runs_alone_has_a_reason() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3, padding="same"),
        nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"),
        nn.Conv2d(4, 4, 3),
        nn.BatchNorm2d(4),
        nn.Conv1d(4, 4, 1),
    )
    model[6].weight.requires_grad_(True)
    told = str(gf.acceleration(gf.accelerate_(gf.apply_(model[:7], FILTER, "last:1", norm="affine"))))
    assert told.splitlines()[1].split() == ["0", "conv", "+", "norm", "+", "relu"]
    assert "padding='same'" in told
    assert "padding_mode" in told
    assert "its norm trains" in told
    with pytest.raises(gf.GradFilterError, match=r"call gf\.accelerate_ first"):
        gf.acceleration(MODELS["tiny"]())


# What odd models do


class Written(nn.Module):
    """A module whose forward is given."""

    def __init__(self, forward: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.drop, self.same = nn.Dropout(), nn.Identity()
        self.run = forward

    def forward(self, x: Tensor) -> Any:
        return self.run(self, x)


def written_twice(m: Any, x: Tensor) -> Tensor:
    y = m.a(x)
    y.add_(m.b(F.relu(y)))
    return torch.relu(y)


SHARED = {
    "dropout": lambda m, x: (lambda y: y + m.b(m.drop(y)))(torch.relu(m.a(x))),
    "identity": lambda m, x: (lambda y: (y + m.b(F.max_pool2d(y, 3, 1, 1))) * m.same(y))(torch.relu(m.a(x))),
    "view": lambda m, x: (lambda y, v: (y + m.b(F.max_pool2d(y, 3, 1, 1)))[:, :2] * v)(
        *(lambda y: (y, y[:, :2]))(torch.relu(m.a(x)))
    ),
    "keyword": lambda m, x: m.b(m.a(input=x)),
    "twice": lambda m, x: m.b(torch.relu(m.b(torch.relu(m.a(x))))),
    "both terms": lambda m, x: (lambda y: torch.relu(m.b(y.neg()) + m.b(y.sin())))(m.a(x)),
}


@pytest.mark.parametrize("name", SHARED)
def test_nobody_writes_to_what_others_read(name: str) -> None:
    """In float32, because only oneDNN adds on the way."""
    model = Written(SHARED[name]).eval().requires_grad_(False)
    x = torch.randn(2, 3, 12, 12)
    assert relative(gf.accelerate_(copy.deepcopy(model))(x), model(x)) < 1e-5


UNREADABLE = {
    "writes in place": written_twice,
    "sets attributes": lambda m, x: (setattr(m, "seen", x), m.b(m.a(x)))[1],
}


@pytest.mark.parametrize("why", UNREADABLE)
def test_what_cannot_be_read_off_is_refused_and_left_as_it_was(why: str) -> None:
    model = Written(UNREADABLE[why])
    before = [dict(part.__dict__) for part in model.modules()]
    with pytest.raises(gf.GradFilterError, match=why):
        gf.accelerate_(model)
    for part, known in zip(model.modules(), before, strict=True):
        assert part.__dict__.keys() == known.keys()
        assert all(part.__dict__[key] is known[key] for key in known)


def test_batches_of_every_kind() -> None:
    """An empty one and a single picture, after the weights were packed for a full one."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3))
    gf.apply_(model, FILTER, "last:1").eval()
    faster, x = gf.accelerate_(copy.deepcopy(model)), torch.randn(2, 3, 12, 12)
    for batch in (x, x[:0], x[:1]):
        assert torch.allclose(faster(batch), model(batch), atol=1e-5)
    assert torch.allclose(faster(x[0]), model(x[0]), atol=1e-5)


def test_only_a_bias_trains() -> None:
    model = gf.apply_(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3)), FILTER, "last:1")
    model[2].weight.requires_grad_(False)
    gf.accelerate_(model)(torch.randn(2, 3, 12, 12)).sum().backward()
    assert model[2].bias.grad is not None
    assert model[2].weight.grad is None


def test_a_parameter_that_is_replaced_trains() -> None:
    model = gf.accelerate_(gf.apply_(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)), FILTER, "last:1"))
    x = torch.randn(2, 3, 12, 12)
    model(x)
    model.requires_grad_(False)
    assert not model(x).requires_grad
    model[1].weight = nn.Parameter(torch.zeros(4, 4, 3, 3))
    assert model(x).requires_grad


def test_buffers_that_change_are_seen() -> None:
    def forward(m: Any, x: Tensor) -> Any:
        return m.b(m.a(x) * (m.scale + 1))

    model = Written(forward)
    model.register_buffer("scale", torch.tensor(1.0))
    gf.accelerate_(model)
    x = torch.randn(2, 3, 12, 12)
    before = model(x)
    model.scale.fill_(3.0)
    assert relative(model(x) - model.b.bias[:, None, None], 2 * (before - model.b.bias[:, None, None])) < 1e-5


def test_outputs_are_the_callers() -> None:
    def forward(m: Any, x: Tensor) -> Any:
        y = m.a(x)
        return {"out": m.b(y), "all": [y, (y,)]}

    made = gf.accelerate_(Written(forward))(torch.randn(2, 3, 12, 12))
    made["more"] = made["all"].append(1)
    assert type(made["all"][1]) is tuple


def test_means_of_an_input_that_is_refilled() -> None:
    """Nobody sees what is written through ``data``; so nothing is remembered of a user's own tensors."""
    model = gf.apply_(nn.Sequential(nn.Conv2d(3, 4, 3)), FILTER)
    x, other = torch.randn(2, 3, 12, 12), torch.randn(2, 3, 12, 12)
    model(x).sum().backward()
    x.data.copy_(other)
    model.zero_grad()
    model(x).sum().backward()
    wanted = model[0].weight.grad.clone()
    model.zero_grad()
    model(other).sum().backward()
    assert torch.equal(model[0].weight.grad, wanted)


# Two parts


@pytest.mark.parametrize("accelerated", [False, True])
@pytest.mark.parametrize("name", ["tiny", "residual"])
def test_a_split_model_is_the_model(name: str, accelerated: bool) -> None:
    model = gf.apply_(with_statistics(MODELS[name]()), FILTER, "last:3").eval()
    x = torch.randn(2, 3, 32, 32)
    whole = gf.accelerate_(model) if accelerated else gf.accelerate_(copy.deepcopy(model))
    parts = gf.split(model)
    features = parts.prefix(x)
    kept = [feature.clone() for feature in features]
    assert not any(feature.requires_grad for feature in features)
    assert torch.equal(parts.tail(features), whole(x))
    parts.tail(features).sum().backward()
    parts.tail(list(features)).sum().backward()
    assert all(torch.equal(a, b) for a, b in zip(features, kept, strict=True)), (
        "the tail wrote to its features"
    )
    frozen = {id(p) for p in model.parameters() if not p.requires_grad}
    assert {id(t) for t in parts.frozen if isinstance(t, nn.Parameter)} <= frozen
    with torch.no_grad():
        assert relative(parts.tail(features), whole(x)) < 1e-5


def test_the_signature_tells_structures_apart() -> None:
    def signature(stride: int, last: str) -> str:
        model = nn.Sequential(nn.Conv2d(3, 4, 3, stride), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3))
        return gf.split(gf.apply_(model, FILTER, last)).signature

    assert signature(1, "last:1") == signature(1, "last:1")
    assert len({signature(1, "last:1"), signature(2, "last:1"), signature(1, "last:2")}) == 3


def test_what_cannot_be_split_is_said() -> None:
    with pytest.raises(gf.GradFilterError, match="the first layer of the model trains"):
        gf.split(gf.apply_(MODELS["tiny"](), FILTER, "all"))
    with pytest.raises(gf.GradFilterError, match="nothing in the model trains"):
        gf.split(MODELS["tiny"]().requires_grad_(False))


@pytest.mark.parametrize("accelerated", [False, True])
def test_what_runs_with_a_model_is_not_lost_when_it_is_split(accelerated: bool) -> None:
    """Hooks and a forward of its own are the model's, and neither half would run them."""
    model, x = gf.apply_(MODELS["tiny"](), FILTER, "last:2"), torch.randn(2, 3, 32, 32)
    parts = gf.split(gf.accelerate_(model) if accelerated else model)
    features = parts.prefix(x)
    hook = model.register_forward_hook(lambda module, inputs, output: 2 * output)
    with pytest.raises(gf.GradFilterError, match="has hooks"):
        parts.tail(features)
    with pytest.raises(gf.GradFilterError, match="several inputs, hooks, another forward"):
        gf.split(model)
    hook.remove()
    parts.tail(features)
    model.forward = lambda x: x  # type: ignore[method-assign]
    with pytest.raises(gf.GradFilterError, match="several inputs, hooks, another forward"):
        gf.split(model)


class ReadsSizes(nn.Module):
    """A frozen layer, a trained one, and what the latter is told of the former's map."""

    def __init__(self, read: Any) -> None:
        super().__init__()
        self.first, self.second, self.read = nn.Conv2d(3, 4, 3, stride=2), nn.Conv2d(4, 2, 1), read

    def forward(self, x: Tensor) -> Tensor:
        maps = self.first(x)
        return F.interpolate(self.second(maps), size=self.read(maps))


@pytest.mark.parametrize(
    ("read", "is_split"),
    [
        (lambda maps: maps.shape[-2:], True),
        (lambda maps: maps.shape[2:], True),
        (lambda maps: (maps.size(2), maps.size(-1)), True),
        (lambda maps: (2 * maps.shape[2], maps.shape[3] + maps.shape[2]), True),
        (lambda maps: (maps.shape[0] + 2, maps.shape[0] + 3), False),  # another one with another batch
        (lambda maps: maps.shape[:2], False),
        (lambda maps: maps.shape[2 : maps.shape[0] + 1], False),
        (lambda maps: (maps.size(0), maps.size(1)), False),
        (lambda maps: (maps.shape[2] * maps.shape[0], maps.shape[3]), False),
        (lambda maps: maps.permute(2, 3, 0, 1).shape[-2:], False),
        (lambda maps: maps.shape[2::-1][:2], False),
        (lambda maps: (maps.flatten(1).shape[-2], 3), False),
    ],
)
def test_heights_and_widths_are_features_too_and_the_size_of_the_batch_is_not(
    read: Any, is_split: bool
) -> None:
    model = gf.accelerate_(gf.apply_(ReadsSizes(read), FILTER, "second"))
    x, parts = torch.randn(3, 3, 9, 13), gf.split(model)
    if not is_split:
        with pytest.raises(gf.GradFilterError, match="reads more than maps and their heights and widths"):
            parts.prefix(x)
        return
    features = parts.prefix(x)
    assert all(len(feature) == 3 for feature in features)
    assert torch.equal(parts.tail([feature[:2] for feature in features]), model(x[:2]))


class Adds(nn.Module):
    """Adds to a value in place; another name for it sees that, torch.fx by itself would not."""

    def __init__(self, read_again: bool) -> None:
        super().__init__()
        self.first, self.second, self.pass_on = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1), nn.Identity()
        self.read_again = read_again

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        z = self.pass_on(y)
        z += 1
        return self.second(y if self.read_again else z)


def test_additions_in_place_are_seen() -> None:
    with pytest.raises(gf.GradFilterError, match="writes in place"):
        gf.accelerate_(Adds(read_again=True))
    model, x = Adds(read_again=False), torch.randn(2, 3, 8, 8)
    wanted = model(x)
    assert relative(gf.accelerate_(model)(x), wanted) < TOLERANCE[torch.float32]


class Noting(nn.Module):
    """Sets an attribute in its forward."""

    count: Any = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count = x.shape[0]
        return x


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_a_compiled_part_is_refused_and_the_model_stays_as_it_is() -> None:
    model = nn.Sequential(Noting(), torch.jit.script(nn.Conv2d(3, 4, 1)))
    with pytest.raises(gf.GradFilterError, match=r"a part of it is compiled by torch\.jit"):
        gf.accelerate_(model)
    assert vars(model[0]).get("count", 0) == 0
    assert model(torch.zeros(2, 3, 8, 8)).shape == (2, 4, 8, 8)


def test_identities_hide_nothing_but_what_they_do_counts() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Identity(), nn.ReLU()).requires_grad_(False)
    assert "conv + relu" in str(gf.acceleration(gf.accelerate_(copy.deepcopy(model))))
    model[1].forward = lambda y: 2 * y  # type: ignore[method-assign]
    x = torch.randn(2, 3, 8, 8)
    wanted = model(x)
    assert relative(gf.accelerate_(model)(x), wanted) < TOLERANCE[torch.float32]


@pytest.mark.skipif(not is_built(), reason="needs the native passes")
def test_weights_are_packed_once_for_all_ways_to_call() -> None:
    """Training and testing, and layers that thaw: frozen weights are not held once for each."""
    model = gf.accelerate_(gf.apply_(gf.models.build("mcunet-5fps"), FILTER, "last:2"))
    x = torch.randn(1, 3, 64, 64)
    for training in (False, True):
        model.train(training)
        with torch.set_grad_enabled(training):
            model(x)
    ways = model.__dict__["gradfilter_program"]._ready.values()
    assert len(ways) == 2
    first, second = ([step.run for step in way.prefix if not isinstance(step.run, nn.Module)] for way in ways)
    blocks = [run for run in first if isinstance(run, InvertedResidual)]
    assert len(blocks) > 10
    assert all(any(run is other for other in second) for run in blocks[:-2])


class Beside(nn.Module):
    """A frozen inverted residual, and a trained layer beside it: their sum is frozen only in a test."""

    def __init__(self) -> None:
        super().__init__()
        self.block = gf.models.build("tiny").get_submodule("inverted.body")
        self.side = nn.Conv2d(32, 32, 1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.block(x) + self.side(x)
        return y


@pytest.mark.parametrize("first", ["test", "training"])
def test_a_sum_that_is_frozen_in_one_way_to_call_only(first: str) -> None:
    torch.manual_seed(0)
    model = Beside().eval()
    model.requires_grad_(False).side.requires_grad_(True)
    x = torch.randn(2, 32, 8, 8)  # not channels-last: the parts run one by one
    wanted = model(x).detach()
    gf.accelerate_(model)
    for training in (first == "training", first != "training"):
        with torch.set_grad_enabled(training):
            assert relative(model(x), wanted) < 1e-5


def test_the_signature_tells_what_a_description_leaves_out() -> None:
    def signature(aligned: bool) -> str:
        grown = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=aligned)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), grown, nn.Conv2d(4, 4, 3))
        return gf.split(gf.apply_(model, FILTER, "last:1")).signature

    assert signature(True) == signature(True) != signature(False)


def test_a_plan_for_an_accelerated_model_is_refused() -> None:
    model = gf.accelerate_(MODELS["tiny"]())
    with pytest.raises(
        gf.GradFilterError, match=r"The model is accelerated; call gf.restore_\(model\), apply"
    ):
        gf.apply_(model, FILTER, "last:1")
    assert "gradfilter_program" in model.__dict__


def test_a_test_through_the_tail_leaves_what_methods_remember() -> None:
    model = gf.accelerate_(gf.apply_(MODELS["tiny"](), gf.SubspaceIteration(rank=2), "last:2"))
    parts, x = gf.split(model), torch.randn(4, 3, 32, 32)
    parts.tail(parts.prefix(x)).sum().backward()
    before = {name: value.clone() for name, value in gf.method_state(model).items()}
    assert before
    with torch.no_grad():
        parts.tail(parts.prefix(torch.randn(4, 3, 32, 32)))
    after = gf.method_state(model)
    assert all(torch.equal(after[name], value) for name, value in before.items())


class Counter(nn.Module):
    """Adds up in a buffer, which torch.fx would fill with a stand-in."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        self._buffers["last"] = x
        return self.conv(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("model", [Counter(), nn.Sequential(Counter(), nn.ReLU())], ids=["whole", "part"])
def test_tracing_leaves_buffers_as_they_were(model: nn.Module) -> None:
    before = dict(model.named_buffers())
    assert why_untraceable(model)
    assert dict(model.named_buffers()).keys() == before.keys()
    assert all(tensor is before[name] for name, tensor in model.named_buffers())
