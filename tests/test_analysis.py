"""What ``analyze`` reports, against cases whose answer is known."""

from __future__ import annotations

import math
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gradfilter as gf

WEIGHTS = Path(__file__).resolve().parents[2] / "shared" / "weights"


def pictures(count: int = 4, size: int = 16) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, 3, size, size, generator=generator), torch.arange(count)


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return gf.models.build("tiny")


def test_patch_1_is_exact(model: nn.Module) -> None:
    found = gf.analyze(model, pictures(), F.cross_entropy, gf.plan(model, gf.GradientFilter(patch=1)))
    assert len(found.rows) == 8
    for row in found.rows:
        for comparison in (row.weight, row.output, row.input):
            assert comparison is None or comparison.cosine == pytest.approx(1)
            assert comparison is None or comparison.norm_ratio == pytest.approx(1)
            assert comparison is None or comparison.snr_db > 100
        assert row.dc_energy is None or row.dc_energy == pytest.approx(1)


def test_layers_come_in_the_order_of_the_backward(model: nn.Module) -> None:
    found = gf.analyze(model, pictures(), F.cross_entropy, gf.plan(model, gf.GradientFilter(), "last:4"))
    names = [row.name for row in found.rows]
    assert names[0] == "head"
    assert names[1:4] == ["inverted.body.2.0", "inverted.body.1.0", "inverted.body.0.0"]
    assert found.rows[-1].input is None  # nothing before it trains


def waves() -> Tensor:
    """Maps that vary slowly: a coarser patch loses more of them, but never much."""
    line = torch.linspace(0, 2 * math.pi, 32, dtype=torch.float64)
    wave = torch.sin(line[:, None]) * torch.cos(line)
    return torch.stack([wave, wave.roll(5, 0), wave.t()]).unsqueeze(0)


@pytest.mark.parametrize("taps", ["overlap", "collapse"])
def test_a_coarser_patch_loses_more_of_a_smooth_gradient(taps: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)).double()

    def loss(y: Tensor) -> Tensor:
        return (y - 1).square().mean()

    seen = []
    for patch in (1, 2, 4, 8):
        plan = gf.plan(model, gf.GradientFilter(patch, taps), "all")  # type: ignore[arg-type]
        last, first = gf.analyze(model, waves(), loss, plan).rows
        assert last.weight
        assert last.input
        assert first.output
        assert last.dc_energy is not None
        assert first.output.cosine == pytest.approx(last.input.cosine)  # nothing lies between the two
        seen.append((last.weight.cosine, last.input.cosine, last.dc_energy, -last.input.snr_db))
    for values in zip(*seen, strict=True):
        assert list(values) == sorted(values, reverse=values[0] > values[-1])
    assert seen[1][0] > 0.95
    assert seen[-1][2] < seen[0][2] == pytest.approx(1)


def test_an_adapter_is_seen_as_the_weight_it_folds_into() -> None:
    """A step along the gradient of ``up`` moves the merged weight by scale^2 G down^T down."""
    torch.manual_seed(0)
    model, batch = (
        nn.Sequential(nn.Linear(24, 6)).double(),
        (torch.randn(8, 24).double(), torch.arange(8) % 6),
    )
    x, y = batch
    F.cross_entropy(model(x), y).backward()
    exact = model[0].weight.grad
    assert exact is not None
    cosines = []
    for rank in (1, 4, 16):
        method = gf.LowRankAdapter(rank, alpha=2.0)
        down = method.added("0", model[0])["down"]
        wanted = (2 / rank) ** 2 * exact @ down.t() @ down
        (row,) = gf.analyze(model, batch, F.cross_entropy, gf.plan(model, method)).rows
        assert row.weight
        assert row.weight.cosine == pytest.approx(
            float(F.cosine_similarity(wanted.flatten(), exact.flatten(), 0))
        )
        assert row.weight.norm_ratio == pytest.approx(float(wanted.norm() / exact.norm()))
        cosines.append(row.weight.cosine)
    assert 0.1 < cosines[0] < cosines[1] < cosines[2] < 0.99


def test_known_numbers() -> None:
    """One 1x1 convolution: the gradient of its output is chosen, so its patch means are known."""
    model = nn.Sequential(nn.Conv2d(1, 1, 1, bias=False), nn.Flatten())
    x = torch.ones(1, 1, 2, 2)
    plan = gf.plan(model, gf.GradientFilter(patch=2))
    (row,) = gf.analyze(model, x, lambda y: (y * torch.tensor([3.0, 1.0, 0.0, 0.0])).sum(), plan).rows
    assert row.dc_energy == pytest.approx(4 / 10)  # four times the mean 1, squared, of 9 + 1
    assert row.weight
    assert row.weight.cosine == pytest.approx(1)  # x is constant: nothing is lost in the weight


def with_dropout(model: nn.Module) -> nn.Module:
    stem, *rest = model.children()
    return nn.Sequential(stem, nn.Dropout(0.5), *rest)


def snapshot(model: nn.Module) -> dict[str, object]:
    tensors = {f"state {k}": v.clone() for k, v in model.state_dict().items()}
    grads = {f"grad {k}": None if p.grad is None else p.grad.clone() for k, p in model.named_parameters()}
    flags = {f"flag {k}": p.requires_grad for k, p in model.named_parameters()}
    modes = {f"mode {k}": (type(m), m.training) for k, m in model.named_modules()}
    return {**tensors, **grads, **flags, **modes, "random": torch.get_rng_state()}


@pytest.mark.parametrize("norm", ["fixed", "batch"])
def test_the_model_is_untouched(model: nn.Module, norm: str) -> None:
    model = with_dropout(model)
    model(pictures()[0]).sum().backward()
    plan = gf.plan(model, gf.GradientFilter(), norm=norm)  # type: ignore[arg-type]
    before = snapshot(model)
    first = gf.analyze(model, pictures(), F.cross_entropy, plan)
    assert str(first) == str(gf.analyze(model, pictures(), F.cross_entropy, plan))
    after = snapshot(model)
    assert before.keys() == after.keys()
    for name, value in before.items():
        same = torch.equal(value, after[name]) if isinstance(value, Tensor) else value == after[name]  # type: ignore[arg-type]
        assert same, name


def test_dropout_draws_the_same_numbers_in_both_runs(model: nn.Module) -> None:
    model = with_dropout(model)
    plan = gf.plan(model, gf.GradientFilter(patch=1))
    rows = gf.analyze(model.train(), pictures(), F.cross_entropy, plan).rows
    assert all(row.weight and row.weight.cosine > 0.999 for row in rows)


def test_a_model_with_a_plan_applied_can_be_analyzed(model: nn.Module) -> None:
    plan = gf.plan(model, gf.GradientFilter(patch=2), "last:2")
    expected = gf.analyze(model, pictures(), F.cross_entropy, plan)
    gf.apply_(model, plan)
    assert str(gf.analyze(model, pictures(), F.cross_entropy, plan)) == str(expected)


def test_the_table_says_what_could_not_be_compared(model: nn.Module) -> None:
    found = gf.analyze(model, pictures(), F.cross_entropy, gf.plan(model, gf.GradientFilter(), "last:1"))
    head, first, *_ = str(found).splitlines()
    assert head.split()[:3] == ["layer", "method", "DC"]
    assert first.split()[0] == "head"
    assert str(found).split("\n\n")[0].splitlines()[-1].split()[-1] == "-"  # nothing before it trains


@pytest.mark.parametrize(
    ("batch", "loss", "message"),
    [
        ("pictures", F.cross_entropy, "pair"),
        ((torch.zeros(2, 3, 16, 16), 1, 2), F.cross_entropy, "pair"),
        (torch.zeros(2, 3, 16, 16), lambda y: y, r"shape \(2, 10\)"),
        (torch.zeros(2, 3, 16, 16), lambda y: y.detach().sum(), "without a gradient"),
        (torch.zeros(2, 3, 16, 16), lambda y: 0.0, "a float"),
    ],
)
def test_what_it_cannot_analyze(model: nn.Module, batch: object, loss: object, message: str) -> None:
    with pytest.raises(gf.GradFilterError, match=message):
        gf.analyze(model, batch, loss, gf.plan(model, gf.GradientFilter()))  # type: ignore[arg-type]


@pytest.mark.shared
def test_real_weights_lose_more_with_depth_and_less_with_overlap() -> None:
    file = WEIGHTS / "mobilenet_v2-b0353104.pth"
    if not file.exists():
        pytest.skip(f"the shared weights are not there: {file}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a torchvision whose compiled part does not load
        model = gf.models.build("mobilenet_v2", weights=file).eval()
    batch = pictures(4, 96)
    means = {}
    for taps in ("overlap", "collapse"):
        plan = gf.plan(model, gf.GradientFilter(2, taps), "all", example=batch[0])  # type: ignore[arg-type]
        rows = gf.analyze(model, batch, F.cross_entropy, plan).rows
        cosines = [row.output.cosine for row in rows if row.output]
        assert len(cosines) == 53
        assert sum(cosines[:10]) > sum(cosines[20:30]) > sum(cosines[-10:])
        means[taps] = sum(cosines) / len(cosines)
    assert means["overlap"] > means["collapse"] + 0.1
