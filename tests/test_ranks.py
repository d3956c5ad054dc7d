"""choose_ranks: the best ranks within a budget, on the user's own model and data."""

from __future__ import annotations

import copy
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradfilter as gf
from gradfilter import ranks
from gradfilter.ranks import _cheapest, _Option, _options, _tried

LEVELS = (0.4, 0.6, 0.8, 1.0)


def problem(seed: int = 0) -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    random = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = gf.models.build("tiny", classes=4).eval()
    batches = [(torch.randn(8, 3, 16, 16, generator=random), torch.arange(8) % 4) for _ in range(2)]
    return model, batches


def options(model: nn.Module, batches: Any, layers: str = "last:3") -> dict[str, list[_Option]]:
    tried = _tried(model, batches, F.cross_entropy, layers, LEVELS)
    return {name: _options(found, len(LEVELS)) for name, found in tried.items()}


def test_the_choice_is_the_best_there_is() -> None:
    found = options(*problem())
    least = sum(min(o.bytes for o in own) for own in found.values())
    most = sum(max(o.bytes for o in own) for own in found.values())
    for budget in range(least, most + 1, (most - least) // 13):
        chosen = _cheapest(found, budget).values()
        fitting = [c for c in product(*found.values()) if sum(o.bytes for o in c) <= budget]
        best = min(sum(o.error for o in c) for c in fitting)
        assert sum(o.bytes for o in chosen) <= budget
        assert sum(o.error for o in chosen) == pytest.approx(best, abs=1e-12)


def test_many_layers_stay_within_the_budget_and_near_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    random = torch.Generator().manual_seed(0)

    def some() -> list[_Option]:
        numbers = torch.rand(6, 2, generator=random).tolist()
        return [_Option((i,), int(1e5 * size), error) for i, (size, error) in enumerate(numbers)]

    layers = {str(i): some() for i in range(12)}
    budget = 300_000
    best = _cheapest(layers, budget)
    monkeypatch.setattr(ranks, "MOST_SUMS", 256)
    thinned = _cheapest(layers, budget)
    for chosen in (best, thinned):
        assert sum(o.bytes for o in chosen.values()) <= budget
    errors = [sum(o.error for o in chosen.values()) for chosen in (best, thinned)]
    assert errors[0] <= errors[1] <= 1.05 * errors[0]


def test_bytes_are_those_that_training_keeps() -> None:
    model, batches = problem()
    rows = gf.plan(model, gf.Exact(), "last:3", example=batches[0][0]).rows
    raw = sum(row.before.kept for row in rows if row.action == "train" and row.before)
    for share in (0.2, 0.5):
        chosen = gf.choose_ranks(model, batches, F.cross_entropy, "last:3", int(share * raw))
        plan = gf.plan(model, gf.SubspaceIteration(chosen), "last:3", example=batches[0][0])
        kept = sum(row.after.kept for row in plan.rows if row.action == "train" and row.after)
        assert 0 < kept <= share * raw


def test_a_budget_that_is_too_small_says_the_smallest() -> None:
    model, batches = problem()
    with pytest.raises(gf.GradFilterError, match="the least that these layers can keep is") as raised:
        gf.choose_ranks(model, batches, F.cross_entropy, "last:3", 10)
    least = int(str(raised.value).split("can keep is ")[1].split()[0])
    assert gf.choose_ranks(model, batches, F.cross_entropy, "last:3", least)
    with pytest.raises(gf.GradFilterError, match="too small"):
        gf.choose_ranks(model, batches, F.cross_entropy, "last:3", least - 1)


def test_a_large_budget_is_exact() -> None:
    model, batches = problem()
    chosen = gf.choose_ranks(model, batches[0], F.cross_entropy, "last:2", 10**9)
    plan = gf.plan(model, gf.SubspaceIteration(chosen), "last:2")
    rows = gf.analyze(model, batches[0], F.cross_entropy, plan).rows
    assert all(row.weight is not None and row.weight.cosine == pytest.approx(1) for row in rows)


def test_errors_are_relative_and_averaged() -> None:
    """A loss a thousand times larger has the same errors; absolute norms would not."""
    model, batches = problem()
    plain = options(model, batches)
    scaled = _tried(model, batches, lambda *a: 1000 * F.cross_entropy(*a), "last:3", LEVELS)
    for name, own in plain.items():
        other = _options(scaled[name], len(LEVELS))
        assert [o.error for o in own] == pytest.approx([o.error for o in other], rel=1e-3, abs=1e-6)
        singles = [options(model, [batch])[name] for batch in batches]
        means = [(a.error + b.error) / 2 for a, b in zip(*singles, strict=True)]
        assert [o.error for o in own] == pytest.approx(means, rel=1e-5, abs=1e-7)


def test_the_model_and_the_random_state_are_left_alone() -> None:
    model, batches = problem()
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    gf.choose_ranks(model, batches, F.cross_entropy, "last:2", 10**6)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)


def test_a_layer_that_is_called_twice() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.head = nn.Conv2d(4, 4, 3, padding=1), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            once = self.conv(x).relu()
            result: Tensor = self.head(self.conv(F.avg_pool2d(once, 2)).mean((2, 3)))
            return result

    model, x = Twice(), torch.randn(6, 4, 12, 12, generator=torch.Generator().manual_seed(0))
    chosen = gf.choose_ranks(model, x, lambda y: y.square().sum(), "all", 3000)
    plan = gf.plan(model, gf.SubspaceIteration(chosen), example=x)
    assert sum(row.after.kept for row in plan.rows if row.after) <= 3000


@pytest.mark.parametrize(("batch", "variances"), [([], (0.5,)), (torch.zeros(2, 3, 16, 16), (0.0,))])
def test_what_cannot_be_tried_is_refused(batch: Any, variances: tuple[float, ...]) -> None:
    with pytest.raises(gf.GradFilterError):
        gf.choose_ranks(problem()[0], batch, lambda y: y.sum(), "last:2", 10**6, variances=variances)


def test_a_layer_without_gradient_is_named() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3))
    parts: Any = nn.ModuleDict({"used": model, "idle": nn.Conv2d(3, 4, 3)})

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = parts

        def forward(self, x: Tensor) -> Tensor:
            self.parts["idle"](x)
            result: Tensor = self.parts["used"](x)
            return result

    with pytest.raises(gf.GradFilterError, match=r"No weight gradient reached layer parts\.idle"):
        gf.choose_ranks(Net(), torch.randn(2, 3, 9, 9), lambda y: y.sum(), "all", 10**6)


def test_what_a_loader_gives_is_a_pair() -> None:
    model, batches = problem()
    as_list = gf.choose_ranks(model, list(batches[0]), F.cross_entropy, "last:2", 10**6)
    assert as_list == gf.choose_ranks(model, batches[0], F.cross_entropy, "last:2", 10**6)


def test_layers_that_only_pass_gradients_need_no_ranks() -> None:
    model, batches = problem()
    names = [row.name for row in gf.plan(model, gf.Exact(), "last:3").rows if row.action == "train"]
    found = gf.choose_ranks(model, batches, F.cross_entropy, names[0], 10**6)
    assert list(found) == [names[0], "head"]
    plan = gf.plan(model, gf.SubspaceIteration(found), names[0], example=batches[0][0])
    assert {row.name: row.method for row in plan.rows if row.action == "pass"}[names[1]] == gf.Exact()
    with pytest.raises(gf.GradFilterError, match="no pattern that matches layer"):
        gf.plan(model, gf.SubspaceIteration(found), "last:3")
