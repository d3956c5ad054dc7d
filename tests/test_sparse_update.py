"""Sparse updates: which channels are chosen, that only those move, and that only those are kept."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradfilter as gf


def applied(layer: nn.Module, method: gf.Method) -> Any:
    gf.apply_(nn.Sequential(layer, nn.Identity()), method)
    return layer


def chosen(layer: Any) -> list[int]:
    found: list[int] = layer.gradfilter_memory["channels"].tolist()
    return found


def images(channels: int = 8) -> Tensor:
    return torch.randn(2, channels, 6, 6, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("make", [nn.Conv2d, nn.ConvTranspose2d])
@pytest.mark.parametrize("groups", [1, 2])
def test_the_largest_weights_are_chosen(make: Any, groups: int) -> None:
    layer = make(8, 4, 3, groups=groups)
    by_channel = (
        layer.weight.unflatten(0, (groups, -1)).transpose(1, 2) if make is nn.Conv2d else layer.weight
    )
    by_channel = by_channel if make is nn.Conv2d else by_channel.unflatten(0, (groups, -1))
    with torch.no_grad():  # (groups, channels, outputs, taps)
        by_channel[:, 1] += 5
        by_channel[0, 3] -= 5
    assert chosen(applied(layer, gf.SparseUpdate(2))) == [1, 3]


def test_other_choices() -> None:
    assert chosen(applied(nn.Linear(8, 2), gf.SparseUpdate(0.25, "last"))) == [6, 7]
    assert chosen(applied(nn.Linear(8, 2), gf.SparseUpdate([5, 0]))) == [0, 5]  # type: ignore[arg-type]
    found = {seed: chosen(applied(nn.Linear(64, 2), gf.SparseUpdate(8, "random", seed))) for seed in range(3)}
    assert all(len(set(channels)) == 8 for channels in found.values())
    assert len(set(map(tuple, found.values()))) == 3
    assert found[1] == chosen(applied(nn.Linear(64, 2), gf.SparseUpdate(8, "random", 1)))


def test_random_choices_leave_the_global_state_alone_and_differ_by_layer() -> None:
    before = torch.get_rng_state()
    layers = [nn.Linear(64, 64, device="meta") for _ in range(2)]
    assert torch.equal(torch.get_rng_state(), before)
    model = nn.Sequential(*(layer.to_empty(device="cpu") for layer in layers))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
    gf.apply_(model, gf.SparseUpdate(8, "random"))
    assert torch.equal(torch.get_rng_state(), before)
    assert chosen(model[0]) != chosen(model[1])


@pytest.mark.parametrize(
    ("channels", "there", "count"),
    [(0.25, 8, 2), (0.01, 8, 1), (3, 8, 3), (20, 8, 8), (1.0, 8, 8), (1, 8, 1)],
)
def test_how_many(channels: float, there: int, count: int) -> None:
    layer = applied(nn.Linear(there, 2), gf.SparseUpdate(channels))
    assert len(layer.gradfilter_memory.get("channels", range(there))) == count


def test_channels_by_layer() -> None:
    model = gf.models.build("tiny")
    method = gf.SparseUpdate({"head": (0,), "*": 0.5})
    assert hash(method) == hash(gf.SparseUpdate({"head": (0,), "*": 0.5}))
    plan = gf.plan(model, method, "last:1")
    assert [str(row.method) for row in plan.rows[-2:]] == [
        "SparseUpdate(channels=0.5)",
        "SparseUpdate(channels=(0,))",
    ]
    with pytest.raises(gf.GradFilterError, match="SparseUpdate's channels has no pattern that matches layer"):
        gf.plan(model, gf.SparseUpdate({"head": 2}))


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_the_other_channels_stay_bit_by_bit(optimizer: Any) -> None:
    layer = nn.Conv2d(8, 4, 3)
    before = layer.weight.detach().clone()
    applied(layer, gf.SparseUpdate((1, 5)))
    steps = optimizer(layer.parameters(), lr=0.1)
    for _ in range(3):
        steps.zero_grad()
        layer(images()).square().sum().backward()
        steps.step()
    moved = (layer.weight != before).flatten(2).any(2).any(0)
    assert moved.nonzero().flatten().tolist() == [1, 5]


def test_weight_decay_moves_them() -> None:
    """Which is why the documentation warns of it."""
    layer = nn.Conv2d(8, 4, 3)
    before = layer.weight.detach().clone()
    applied(layer, gf.SparseUpdate((1, 5)))
    steps = torch.optim.SGD(layer.parameters(), lr=0.1, weight_decay=0.1)
    layer(images()).sum().backward()
    steps.step()
    assert (layer.weight != before).flatten(2).any(2).any(0).all()


@pytest.mark.parametrize("groups", [1, 2, 8])
def test_bytes(groups: int) -> None:
    x = images().requires_grad_()
    model = nn.Sequential(nn.Conv2d(8, 8, 3, groups=groups), nn.Identity())
    plan = gf.plan(model, gf.SparseUpdate(0.25), example=x)
    count = max(1, round(8 // groups / 4))  # of each group
    indices = 4 * count if count < 8 // groups else 0
    assert plan.kept == (x.numel() * 4, x.numel() * 4 * count * groups // 8 + indices)
    assert plan.total[1].backward_macs == plan.total[0].backward_macs * count * groups // 8
    gf.apply_(model, plan)
    with gf.kept_bytes(model) as kept:
        model(x)
    assert sum(kept.values()) == plan.kept[1]


def test_the_choice_is_resumed() -> None:
    """A later start chooses by other weights; the saved state says what was chosen."""
    first = nn.Sequential(nn.Conv2d(8, 4, 3), nn.Identity())
    second = copy.deepcopy(first)
    with torch.no_grad():
        second[0].weight.copy_(second[0].weight.flip(1) + torch.arange(8).view(1, 8, 1, 1))
    for model in (first, second):
        gf.apply_(model, gf.SparseUpdate(2))
    assert chosen(first[0]) != chosen(second[0])
    gf.load_method_state_(second, gf.method_state(first))
    assert chosen(first[0]) == chosen(second[0])


def test_accelerated() -> None:
    torch.manual_seed(0)
    model = gf.apply_(gf.models.build("tiny").eval(), gf.SparseUpdate(0.5), "last:4")
    fast, x = gf.accelerate_(copy.deepcopy(model)), images(3)
    for one in (model, fast):
        one(x).square().sum().backward()
    for (name, mine), (_, theirs) in zip(fast.named_parameters(), model.named_parameters(), strict=True):
        if theirs.grad is not None:
            torch.testing.assert_close(mine.grad, theirs.grad, atol=1e-4, rtol=1e-4, msg=name)


@pytest.mark.parametrize("channels", [0, 0.0, 1.5, -1, True, (), (0, 0), (-1,), (0.5,), "half", {"*": 0}])
def test_settings_are_checked(channels: Any) -> None:
    with pytest.raises(gf.GradFilterError, match=r"channels must be a fraction above 0 up to 1\.0"):
        gf.SparseUpdate(channels)


def test_the_criterion_is_checked() -> None:
    with pytest.raises(
        gf.GradFilterError, match="criterion must be 'magnitude' or 'random' or 'last', not 'best'"
    ):
        gf.SparseUpdate(criterion="best")  # type: ignore[arg-type]


def test_layers_that_only_pass_gradients_have_no_state() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 3))
    gf.apply_(model, gf.SparseUpdate(2), "0")
    state = gf.method_state(model)
    assert list(state) == ["0:channels"]
    gf.load_method_state_(model, state)


def test_a_state_without_the_choice_is_refused() -> None:
    layer = applied(nn.Linear(8, 2), gf.SparseUpdate(2))
    before = chosen(layer)
    with pytest.raises(gf.GradFilterError, match="it lacks channels of layer"):
        gf.load_method_state_(layer, {})
    assert chosen(layer) == before
